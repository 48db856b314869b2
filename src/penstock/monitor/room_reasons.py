"""What one room can tell about the silence of an address: slots and types of a channel, queues of a broker, topics of a
journal, who listens. Looks, and joins nothing.
"""

from __future__ import annotations

import difflib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import address as addresses
from penstock.errors import PenstockError
from penstock.monitor.decode import iso_time
from penstock.monitor.finding import QUIET_S, Finding
from penstock.monitor.system import process

if TYPE_CHECKING:
    from penstock.shm import Channel, Member

__all__ = ["of_room"]


def of_room(parts: addresses.Address) -> Iterator[Finding]:
    """The findings of the address's room."""
    look = _ROOMS.get(parts.scheme)
    if look is not None:
        yield from look(parts)


def _bus(parts: addresses.Address) -> Iterator[Finding]:
    yield Finding(f"bus:{parts.name} reaches one process: a command outside of it never hears it", "use shm:/NAME")


def _shm(parts: addresses.Address) -> Iterator[Finding]:
    from penstock import shm

    mux = parts.options.get("mux")
    channel = next((c for c in shm.channels() if c.name == (mux or parts.name)), None)
    if channel is None:
        return  # nobody has it open: told by who looks at the counters
    if channel.problem:
        yield Finding(f"the files of {channel.name} cannot be used: {channel.problem}", "penstock shm clean")
        return
    wanted = parts.options.get("type")
    if wanted is not None and wanted != channel.type:
        yield Finding(
            f"type mismatch: {channel.name} carries {channel.type or 'messages without a type'!r}, not {wanted!r}",
            "open it with the type it has, or choose another channel",
        )
    elif channel.type:
        yield Finding(f"its messages are of type {channel.type!r}; whoever names another type is refused", grave=False)
    if mux and parts.name not in channel.vchans.values():
        near = ", ".join(sorted(channel.vchans.values())[:5]) or "none"
        yield Finding(f"no virtual channel {parts.name} in {mux}", f"it has {near}")
    for member in channel.members:
        yield from _member(channel, member)


def _member(channel: Channel, member: Member) -> Iterator[Finding]:
    """A member that is dead, or that holds slots and since when."""
    who = _who(member.pid)
    if not member.alive:
        yield Finding(f"the {member.kind} {who} died; the next one who needs its slots takes them", grave=False)
    if not member.held:
        return
    now_ns = time.time_ns()
    age_s = (now_ns - member.oldest_held_ns) / 1e9
    said = (
        f"{member.held} of {channel.slots} slots held by {who}, the oldest message since "
        f"{iso_time(member.oldest_held_ns)} ({age_s:.1f} s)"
    )
    full = channel.held_slots + channel.owned_slots >= channel.slots or member.held >= member.most_held
    if full:
        remedy = f"release messages there (message.release()), give the channel more slots, or end {member.pid}"
        yield Finding(said, remedy)
    elif age_s > QUIET_S:
        yield Finding(said, grave=False)


def _who(pid: int) -> str:
    found = process(pid)
    words = found.command.split() if found else []
    return f"pid {pid} ({' '.join(words[:3])[:60]})" if words else f"pid {pid}"


def _broker(parts: addresses.Address) -> Iterator[Finding]:
    """Whether somebody listens, and what the broker says of the queue."""
    found = list(_network(parts))
    yield from found
    if any(finding.grave for finding in found):
        return  # nobody there who could tell more
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


def _queue(topic: str, queue: dict[str, Any]) -> Iterator[Finding]:
    from penstock.broker.words import matches

    name = f"the queue {queue['queue']}"
    if topic and not any(matches(pattern, topic) or pattern == topic for pattern in queue["topics"]):
        yield Finding(f"{name} is bound to {', '.join(queue['topics'])}, which {topic!r} does not match")
    if queue.get("paused"):
        yield Finding(f"{name} is paused, {queue['depth']} messages wait", "resume it on the page, or Client.resume")
    elif queue.get("state"):
        yield Finding(f"{name} says: {queue['state']}", "acknowledge messages, or consume with a larger credit=")
    elif queue["ready"] and not queue["consumers"]:
        yield Finding(f"{name} has {queue['ready']} messages and no consumer")
    else:
        counts = f"{queue['ready']} ready, {queue['in_flight']} unacknowledged, {queue['consumers']} consumers"
        yield Finding(f"{name}: {counts}", grave=False)
    if queue["dead_lettered"]:
        where = queue["dead_letter"] or queue["queue"] + ".dead"
        yield Finding(f"{queue['dead_lettered']} messages of it went to {where}", grave=False)


def _network(parts: addresses.Address) -> Iterator[Finding]:
    """Whether somebody listens there."""
    where = parts.name or f"{parts.host}:{parts.port}"
    try:
        if parts.name:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(2)
                probe.connect(parts.name)
        else:
            socket.create_connection((parts.host, parts.port or 0), 2).close()
    except ConnectionRefusedError:
        what = "a publisher" if parts.scheme == "tcp" else "a broker"
        yield Finding(f"nobody listens at {where}", f"start {what} there, or check the port")
    except socket.gaierror as error:
        yield Finding(f"the name {parts.host} cannot be resolved: {error.strerror}")
    except TimeoutError:
        yield Finding(f"{where} does not answer within 2 s", "a firewall, a wrong address, or a machine that is off")
    except OSError as error:
        yield Finding(f"{where} cannot be reached: {error.strerror or error}")
    else:
        yield Finding(f"somebody listens at {where}", grave=False)


def _journal(parts: addresses.Address) -> Iterator[Finding]:
    from penstock.journal import Journal
    from penstock.journal.layout import MARKER_NAME, pattern_matches

    directory = Path(parts.name)
    if not (directory / MARKER_NAME).exists():
        yield Finding(f"{directory} is no journal yet: nobody has written to it", f"penstock pub {parts.text} 'hello'")
        return
    if not os.access(directory, os.R_OK | os.X_OK):
        yield Finding(f"{directory} cannot be read by this user", "chmod, or run as its owner")
        return
    topic = parts.topic or "default"
    with Journal(directory, mode="read") as journal:
        topics = journal.topics
        if not any(pattern_matches(topic, name) for name in topics):
            near = difflib.get_close_matches(topic, topics, n=3, cutoff=0.4) or sorted(topics)[:3]
            yield Finding(f"no topic {topic!r} in {directory}", f"it has {', '.join(near) or 'none yet'}")
        else:
            yield Finding(f"{journal.frontier - journal.first} messages are kept there", grave=False)
            yield Finding("a reader that begins with new messages does not see those", "--from 1", grave=False)


_ROOMS: dict[str, Callable[[addresses.Address], Iterator[Finding]]] = {
    "bus": _bus,
    "shm": _shm,
    "tcp": _network,
    "broker": _broker,
    "journal": _journal,
}
