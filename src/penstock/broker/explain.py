"""Why nothing arrives at an address: what its broker knows about it. Only asks; consumes nothing."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from penstock import address as addresses
from penstock.errors import PenstockError
from penstock.finding import Finding

__all__ = ["explain"]


def explain(parts: addresses.Address) -> Iterator[Finding]:
    """Whether a broker listens there, and what it says of the queue."""
    from penstock.tcp.explain import explain as network

    found = list(network(parts))
    yield from found
    if any(finding.grave for finding in found):
        return  # no broker there that could say more
    from penstock.broker import Client

    tls: Any = parts.options.get("tls")
    tls = True if tls in ("1", "true", "yes") else tls
    token = parts.options.get("token")
    try:
        with Client(parts.host, parts.port or 0, timeout=2.0, reconnect=False, token=token, tls=tls) as client:
            known = client.queues()
    except (PenstockError, OSError) as error:
        yield Finding(f"the broker does not tell about its queues: {error}", "statistics is a right", grave=False)
        return
    wanted = parts.options.get("queue")
    if wanted is None:
        yield from _queues_of(parts.topic, known)
        return
    queue = next((entry for entry in known if entry["queue"] == wanted), None)
    if queue is None:
        near = difflib.get_close_matches(wanted, [entry["queue"] for entry in known], n=3, cutoff=0.4)
        yield Finding(f"there is no queue {wanted!r}", f"it has {', '.join(near) or len(known)}")
        return
    yield from _queue(parts.topic, queue)


def _queues_of(topic: str, known: list[dict[str, Any]]) -> Iterator[Finding]:
    from penstock.broker.words import matches

    found = [entry for entry in known if any(matches(pattern, topic) for pattern in entry["topics"])]
    if not found:
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
    from penstock.broker.words import matches

    name = f"the queue {queue['queue']}"
    if topic and not any(matches(pattern, topic) or pattern == topic for pattern in queue["topics"]):
        yield Finding(f"{name} is bound to {', '.join(queue['topics'])}, which {topic!r} does not match")
    if queue.get("paused"):
        yield Finding(f"{name} is paused, {queue['depth']} messages wait", "penstock queue resume, or on the page")
    elif queue.get("state"):
        yield Finding(f"{name} says: {queue['state']}", _remedy(queue["state"]))
    elif queue["ready"] and not queue["consumers"]:
        yield Finding(f"{name} has {queue['ready']} messages and no consumer")
    else:
        counts = f"{queue['ready']} ready, {queue['in_flight']} unacknowledged, {queue['consumers']} consumers"
        yield Finding(f"{name}: {counts}", grave=False)
    if queue["dead_lettered"]:
        where = queue["dead_letter"] or queue["queue"] + ".dead"
        yield Finding(f"{queue['dead_lettered']} messages of it went to {where}", grave=False)
