"""Why nothing arrives at an address: what its broker knows about it. Only asks; consumes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock import address as addresses
from penstock.errors import PenstockError, RefusedError, nearest
from penstock.finding import Finding
from penstock.quantities import iso_time, number_of
from penstock.topics import is_pattern

if TYPE_CHECKING:
    from penstock.broker import Client

__all__ = ["describe", "explain", "topics"]

ANSWER_S = 2.0
PORT = 9876
MOST_QUEUES = 20


def explain(parts: addresses.Address) -> Iterator[Finding]:
    """Whether a broker listens there, and what it says of the queue."""
    found = _network(parts)
    yield from found
    if any(finding.grave for finding in found):
        return  # no broker answers, so nothing more can be said
    try:
        with _client(parts) as client:
            try:
                client.ping()
            except RefusedError as error:
                yield Finding(str(error), "give a token that it knows: ?token=")
                return
            if parts.topic and not is_pattern(parts.topic):
                try:
                    client.peers(parts.topic)
                except RefusedError as error:
                    yield Finding(str(error), "give a token that has the right to this topic: ?token=")
                    return
            known = client.queues()
    except RefusedError as error:
        yield Finding(f"the broker does not tell about its queues: {error}", "statistics is a right", grave=False)
        return
    except (PenstockError, OSError) as error:
        text = f"what listens at {parts.host}:{parts.port} does not answer as a broker: {error}"
        silent = isinstance(error, TimeoutError)  # a broker whose cluster has no quorum takes connections too
        yield Finding(text, f"{'look into its log' if silent else 'start a broker there'}, or check the port")
        return
    wanted = parts.options.get("queue")
    if wanted is None:
        yield from _queues_of(parts.topic, known)
        return
    queue = next((entry for entry in known if entry["queue"] == wanted), None)
    if queue is None:
        yield Finding(f"there is no queue {wanted!r}", nearest(wanted, [entry["queue"] for entry in known]))
        return
    yield from _queue(parts.topic, queue)


def topics(parts: addresses.Address, unknown: Sequence[str] = (">",)) -> list[str]:
    """The topic patterns of an address: its topic, or those of its queue; ``unknown`` if the broker does not say."""
    wanted = parts.options.get("queue")
    if parts.topic or wanted is None:
        return [parts.topic or ">"]
    try:
        with _client(parts) as client:
            known = {entry["queue"]: entry["topics"] for entry in client.queues()}
    except (PenstockError, OSError):
        return list(unknown)
    found: list[str] = known.get(wanted, [])
    return found


def describe(parts: addresses.Address) -> dict[str, Any]:
    """What the broker stores for the address, and the queues that are bound to it."""
    if unreached := [finding.text for finding in _network(parts) if finding.grave]:
        raise RefusedError(unreached[0])
    with _client(parts) as client:
        client.ping()
        facts: dict[str, Any] = {"journal": client.journal}
        try:
            known = client.queues()
        except RefusedError as error:
            known = []
            facts["queues"] = f"not told: {error}"
    if parts.topic:
        facts["kept"] = _first_stored(parts)
    wanted = parts.options.get("queue")
    takes = _queues_taking(parts.topic, known) if wanted is None else [k for k in known if k["queue"] == wanted]
    if wanted is not None and not takes and "queues" not in facts:
        facts[f"queue {wanted}"] = f"is not there; {nearest(wanted, [entry['queue'] for entry in known])}"
    for entry in takes[:MOST_QUEUES]:
        counts = f"{entry['depth']} wait, {entry['in_flight']} in flight, {number_of(entry['consumers'], 'consumer')}"
        paused = ", paused" if entry["paused"] else ""
        facts[f"queue {entry['queue']}"] = f"of {', '.join(entry['topics'])}: {counts}{paused}"
    if len(takes) > MOST_QUEUES:
        facts["more queues"] = len(takes) - MOST_QUEUES
    return facts


def _network(parts: addresses.Address) -> list[Finding]:
    """Whether a process listens there. Of several brokers only the one that leads listens."""
    from penstock.broker.hosts import NOBODY_LEADS_REMEDY, hosts_of, nobody_leads
    from penstock.tcp.explain import explain as network

    places = hosts_of(parts.host, parts.port or PORT)
    found = [finding for host, port in places for finding in network(replace(parts, host=host, port=port))]
    if all(finding.grave for finding in found):
        if len(places) == 1:
            return found
        none = Finding(nobody_leads(parts.host, parts.port or PORT), NOBODY_LEADS_REMEDY)
        return [none, *(replace(finding, remedy="", grave=False) for finding in found)]
    if len(places) == 1:
        return [replace(finding, grave=False) for finding in found]
    away = "it stands by, or does not run"  # the first is as it should be
    return [replace(one, text=f"{one.text}: {away}", remedy="", grave=False) if one.grave else one for one in found]


def _client(parts: addresses.Address) -> Client:
    from penstock.broker import Client

    return Client(parts.host, parts.port or PORT, reconnect=False, **_access(parts))


def _access(parts: addresses.Address) -> dict[str, Any]:
    tls: Any = parts.options.get("tls")
    tls = True if tls in ("1", "true", "yes") else tls
    timeout = float(parts.options.get("timeout", ANSWER_S))
    return {"token": parts.options.get("token"), "tls": tls, "timeout": timeout}


def _first_stored(parts: addresses.Address) -> str:
    """Where the stored messages of the topic begin."""
    from penstock.broker.client.clients import tls_context
    from penstock.broker.fetch import RangeClient

    access = _access(parts)
    access["tls"] = tls_context(access["tls"])
    with RangeClient(parts.host, parts.port or PORT, **access) as reader:
        found = list(reader.fetch(1, 1, topics=[parts.topic]))
    if not found:
        return "nothing"
    first, begun = found[0], iso_time(found[0].timestamp_ns)
    return f"from ordinal {first.ordinal} of {first.topic} on, position {first.position}, {begun}"


def _queues_taking(topic: str, known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The queues bound to a topic, without the temporary ones of single readers."""
    return [entry for entry in known if not entry["temporary"] and _is_bound(entry, topic)]


def _is_bound(entry: dict[str, Any], topic: str) -> bool:
    from penstock.broker.words import matches

    return any(matches(pattern, topic) or matches(topic, pattern) for pattern in entry["topics"])  # it may be a pattern


def _queues_of(topic: str, known: list[dict[str, Any]]) -> Iterator[Finding]:
    found = _queues_taking(topic, known)
    if readers := sum(entry["consumers"] for entry in known if entry["temporary"] and _is_bound(entry, topic)):
        yield Finding(f"{readers} read the topic {topic!r} without a queue that lasts", grave=False)
    elif not found:
        yield Finding(f"no queue takes the topic {topic!r}: it is kept and handed to nobody", grave=False)
    for entry in found:
        yield from _queue(topic, entry)


def _remedy(state: str) -> str:
    if state.startswith("no credit"):
        return "acknowledge messages, or consume with a larger credit="
    if state.startswith("failed to read"):
        return "penstock journal verify and repair while the broker is stopped, or SEEK past it"
    return ""


def _queue(topic: str, queue: dict[str, Any]) -> Iterator[Finding]:
    name = f"the queue {queue['queue']}"
    if topic and not _is_bound(queue, topic):
        yield Finding(f"{name} is bound to {', '.join(queue['topics'])}, which {topic!r} does not match")
    if queue.get("paused"):
        wait = number_of(queue["depth"], "message waits", "messages wait")
        yield Finding(f"{name} is paused, {wait}", "penstock queue resume, or on the page")
    elif queue.get("state"):
        yield Finding(f"{name} says: {queue['state']}", _remedy(queue["state"]))
    elif queue["ready"] and not queue["consumers"]:
        yield Finding(f"{name} has {number_of(queue['ready'], 'message')} and no consumer")
    else:
        consumers = number_of(queue["consumers"], "consumer")
        counts = f"{queue['ready']} ready, {queue['in_flight']} unacknowledged, {consumers}"
        yield Finding(f"{name}: {counts}", grave=False)
    if queue["dead_lettered"]:
        where = queue["dead_letter"] or queue["queue"] + ".dead"
        yield Finding(f"{number_of(queue['dead_lettered'], 'message')} of it went to {where}", grave=False)
