"""Why nothing arrives at an address: what can be told from counters, from the room and from the system.

Each finding is a sentence and what to do about it; ``grave`` ones explain silence, the others are only worth knowing.
Nothing here subscribes, except the look at a filter, which is asked for.
"""

from __future__ import annotations

import difflib
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import penstock
from penstock import address as addresses
from penstock.monitor.filter import compile_filter
from penstock.monitor.rates import PRODUCERS, flow
from penstock.monitor.snapshot import Block, live, matching

__all__ = ["Finding", "explain", "explain_filter"]

QUIET_S = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason."""

    text: str
    remedy: str = ""
    grave: bool = True


def explain(text: str) -> list[Finding]:
    """What can be said about the silence of an address, the likeliest reason first."""
    parts = addresses.parse(text)
    everything = live()
    blocks = matching(everything, text)
    found = [*_ROOMS.get(parts.scheme, _nothing)(parts)]
    found += _publishers(text, [b for b in blocks if b.kind in PRODUCERS], parts.scheme)
    found += _readers([b for b in blocks if b.kind not in PRODUCERS])
    found += _processes({b.pid for b in blocks})
    if not blocks:
        found += _misspelt(text, everything)
    return sorted(found, key=lambda finding: not finding.grave)


def explain_filter(text: str, expression: str, seconds: float) -> Finding:
    """Reads for a while and tells how many messages came and how many pass the filter."""
    passes = compile_filter(expression)
    seen = passed = 0
    example = ""
    deadline = time.monotonic() + seconds
    with penstock.subscriber(text) as subscriber:
        while (left := deadline - time.monotonic()) > 0:
            came, through, first = _try(subscriber, passes, min(left, 0.5))
            seen, passed, example = seen + came, passed + through, example or first
    if not seen:
        return Finding(f"no message came within {seconds:g} s, whatever the filter")
    if not passed:
        return Finding(
            f"the filter matches none of {seen} messages; one of them: {example!r}", f"look at {expression!r}"
        )
    return Finding(f"{passed} of {seen} messages pass the filter", grave=False)


def _try(subscriber: penstock.Subscriber, passes: Callable[..., bool], timeout: float) -> tuple[int, int, str]:
    """How many came, how many pass, what the first says. Every message is given back when this returns."""
    batch = subscriber.read_many(256, timeout)
    example = bytes(memoryview(batch[0])[:80]).decode("utf-8", "replace") if len(batch) else ""
    return len(batch), sum(passes(message) for message in batch), example


def _publishers(text: str, publishers: list[Block], scheme: str) -> Iterator[Finding]:
    if not publishers and scheme in ("bus", "shm"):
        reach = "in its own process only" if scheme == "bus" else "on this machine"
        yield Finding(f"nobody publishes {text} {reach}", f"penstock pub {text} 'hello'")
    elif not publishers:
        yield Finding(f"no publisher of {text} on this machine; one elsewhere cannot be seen from here", grave=False)
    for block in publishers:
        who = f"the publisher in process {block.pid} ({block.program})"
        open_s = (block.read_ns - block.opened_ns) / 1e9
        if block.state.lower().startswith(("blocked", "stuck", "waiting")):
            yield Finding(f"{who} says: {block.state}", "see who does not read, below")
        elif flow(block) == 0:
            yield Finding(f"{who} is open for {open_s:.0f} s and has published nothing")
        elif block.idle_s is not None and block.idle_s > QUIET_S:
            yield Finding(f"{who} published {flow(block)} messages, the last one {block.idle_s:.0f} s ago")
        else:
            yield Finding(f"{who} publishes: {flow(block)} messages up to now", grave=False)
        if block.lost:
            yield Finding(f"{who} dropped {block.lost} messages: {_reasons(block)}")


def _readers(readers: list[Block]) -> Iterator[Finding]:
    if not readers:
        yield Finding("nobody reads it on this machine", grave=False)
    for block in readers:
        who = f"the {block.kind} in process {block.pid} ({block.program})"
        quiet_s = block.idle_s if block.idle_s is not None else (block.read_ns - block.opened_ns) / 1e9
        if block.state.lower().startswith(("stuck", "blocked", "dead", "failed", "no credit")):
            yield Finding(f"{who} says: {block.state}")
        if block.depth and block.capacity and block.depth >= block.capacity and quiet_s > 1:
            text = f"{who} holds all its {block.capacity} places and took nothing for {quiet_s:.0f} s"
            yield Finding(text, f"release messages there, or end process {block.pid}")
        elif block.depth and quiet_s > QUIET_S:
            yield Finding(f"{block.depth} messages wait for {who}, which took none for {quiet_s:.0f} s")
        if block.kind == "queue" and block.peers == 0 and (block.depth or block.lag):
            yield Finding(f"the queue {block.name} has {block.depth or block.lag} messages and no consumer")
        if block.dropped.get("filtered"):
            yield Finding(f"{who} filtered out {block.dropped['filtered']} messages", "look at its filter")
        if block.lost - block.dropped.get("filtered", 0):
            yield Finding(f"{who} lost {block.lost} messages: {_reasons(block)}", grave=False)


def _reasons(block: Block) -> str:
    return ", ".join(f"{number} {reason}" for reason, number in sorted(block.dropped.items()) if number)


def _processes(pids: set[int]) -> Iterator[Finding]:
    for pid in sorted(pids):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state in "Tt":
            yield Finding(f"process {pid} is stopped", f"kill -CONT {pid}")
        elif state == "D":
            yield Finding(f"process {pid} waits for a disk or device", grave=False)


def _misspelt(text: str, everything: list[Block]) -> Iterator[Finding]:
    known = sorted({block.address for block in everything if block.address})
    close = difflib.get_close_matches(text, known, n=3, cutoff=0.75)
    if close:
        yield Finding(f"{' and '.join(close)} {'is' if len(close) == 1 else 'are'} open: was that meant?")


def _nothing(_parts: addresses.Address) -> Iterator[Finding]:
    yield from ()


def _bus(parts: addresses.Address) -> Iterator[Finding]:
    yield Finding(f"bus:{parts.name} reaches one process: a command outside of it never hears it", "use shm:/NAME")


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
    "tcp": _network,
    "broker": _network,
    "journal": _journal,
}
