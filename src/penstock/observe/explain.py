"""Why nothing arrives at an address: findings from the counters, from the address's room and from the system.

What only one room knows is in its module ``explain``. Nothing here subscribes, except ``explain_filter``.
"""

from __future__ import annotations

import difflib
import importlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import penstock
from penstock import address as addresses
from penstock.address import plain
from penstock.errors import InvalidArgument
from penstock.filter import compile_filter
from penstock.finding import QUIET_S, Finding
from penstock.observe import decode
from penstock.observe.health import STANDSTILL
from penstock.observe.memory import TAIL, seen, tailing
from penstock.observe.rates import PRODUCERS, READERS, flow
from penstock.observe.snapshot import Block, Key, live, matching, named
from penstock.printable import command, printable
from penstock.quantities import number_of
from penstock.topics import matches
from penstock.types.fields import Values

__all__ = ["Finding", "ended", "explain", "explain_filter"]

#: A reader that takes no message for so long, while some wait for it, is called stalled.
WATCH_S = 2.0


def explain(text: str, watch_s: float = WATCH_S, *, own: bool = True) -> list[Finding]:
    """The findings about an address where nothing arrives, the likeliest reason first.

    Watches readers that have messages waiting or have lost some for up to ``watch_s``, to find those that are stalled
    and those that still lose. ``own=False``: without the publishers of this process, of which it knows itself.
    """
    return _explain(text, watch_s, set(), 0 if own else os.getpid())


def ended(texts: Iterable[str]) -> dict[str, Finding]:
    """Why nothing comes any more, of those addresses where that is sure: nobody publishes there, or all who do are
    stopped. A publisher that runs may only be slow."""
    found = {}
    for text, pids in _publishing(texts).items():
        stopped = [finding for finding in _process_findings(pids) if finding.grave]
        if not pids:
            found[text] = Finding("nobody publishes it now")
        elif len(stopped) == len(pids):
            found[text] = stopped[0]
    return found


def _publishing(texts: Iterable[str]) -> dict[str, set[int]]:
    """The processes that publish at each address, 0 for one that /proc does not show here; without addresses of which
    that cannot be known. Looks once for all of them."""
    found, memory, blocks = {}, None, None
    for text in texts:
        parts = addresses.parse(text)
        if parts.scheme == "shm":
            from penstock.shm import channels
            from penstock.shm.explain import publishing

            memory = memory or {channel.name: channel for channel in channels()}
            found[text] = publishing(parts, memory)
        elif parts.scheme == "journal":
            from penstock.journal.explain import publishing as writing

            found[text] = writing(parts)
        elif parts.scheme == "tcp":
            blocks = blocks or live()
            pids = {block.pid for block in matching(blocks, text) if block.kind in PRODUCERS and block.here}
            found |= {text: pids} if pids else {}  # none: it may be on another machine
    return found


def _explain(text: str, watch_s: float, passed: set[str], without: int = 0) -> list[Finding]:
    """``passed``: addresses that are explained already, so that a ring of bridges has an end. ``without``: a
    process of whose publishers nothing is said."""
    everything = seen()
    if inside := named(everything, text):
        return _inside_findings(text, inside, watch_s)
    parts = addresses.parse(text)
    blocks = _of_address(matching(everything, text), everything, parts)
    calls = [b for b in blocks if b.kind in ("client", "server")]
    if calls:  # the channels below only carry the calls: findings about them would repeat these
        found = [*_call_findings(parts.text, calls), *_process_findings({b.pid for b in calls if b.here})]
        return sorted(found, key=lambda finding: not finding.grave)
    found = [*_process_findings({b.pid for b in blocks if b.here}), *_room_findings(parts)]
    bridged = _bridge_findings(parts, everything, passed | {plain(parts.text)})
    publishers = [b for b in blocks if b.kind in PRODUCERS]
    if publishers or not bridged:
        found += _publisher_findings(parts.text, publishers, parts.scheme, without)
    found += bridged
    readers = [b for b in blocks if b.kind not in (*PRODUCERS, TAIL)]
    from_disk = list(_disk_findings(parts))
    found += from_disk
    if readers or not from_disk:
        stalled, losing = _watch(readers, watch_s)
        found += _reader_findings(readers, stalled, losing, watch_s)
    if not bridged and (not blocks or (parts.scheme == "shm" and not publishers)):
        # a journal that has the topic answers too
        answers = parts.scheme in ("tcp", "broker", "nats", "journal") and not any(finding.grave for finding in found)
        if parts.scheme == "broker" or not answers:
            found += _similar_addresses(parts, everything, at_another_port=not answers)
    return sorted(found, key=lambda finding: not finding.grave)


def _inside_findings(text: str, blocks: list[Block], watch_s: float) -> list[Finding]:
    """About a part of a program that has a name and no address, such as a gateway's module."""
    found = list(_process_findings({b.pid for b in blocks if b.here}))
    for b in blocks:
        what = f"a {b.kind} inside process {b.pid} ({b.program})"
        found.append(Finding(f"{text} is no address, but {what}: {_messages(flow(b))} up to now", grave=False))
    found += _reader_findings(blocks, *_watch(blocks, watch_s), watch_s)
    return sorted(found, key=lambda finding: not finding.grave)


def _of_address(below: list[Block], everything: list[Block], parts: addresses.Address) -> list[Block]:
    """The handles of the address. In shared memory those ``below`` it are other channels, of which nothing arrives, and
    a multiplexer gets what the publishers of its virtual channels publish, whatever their names are."""
    if parts.scheme == "broker":
        return _of_broker(below, everything, parts)
    if parts.scheme == "nats" and parts.topic:
        return [b for b in everything if b.room == "nats" and b.address and _meets(b, parts)]
    if parts.scheme != "shm":
        return below
    from penstock.shm.explain import carriers

    names = {f"shm:{name}" for name in carriers(parts)}
    own = f"shm:{parts.name}"
    return [
        b
        for b in everything
        if b.room == "shm" and b.channel in names and (b.kind in PRODUCERS or b.channel == own)
    ] + [
        b
        for b in below
        if b.name_cut or b.room not in ("shm", "journal") or (b.room == "journal" and b.channel == own)
    ]


def _meets(block: Block, parts: addresses.Address) -> bool:
    """Whether what it publishes arrives at the address, or what is published there arrives at it."""
    other = addresses.parse(block.address)
    return addresses.arrives(other, parts) if block.kind in PRODUCERS else addresses.arrives(parts, other)


def _of_broker(below: list[Block], everything: list[Block], parts: addresses.Address) -> list[Block]:
    """Who publishes what the address or its queue takes; of a queue, who reads that one."""
    takes: list[str] = _room(parts).topics(parts)
    head = plain(parts.text).removesuffix(parts.topic)
    queue = parts.options.get("queue")

    def fits(block: Block) -> bool:
        topic = block.address.removeprefix(head).removeprefix("/").partition("?")[0]
        return any(pattern == topic or matches(pattern, topic) for pattern in takes)

    there = [b for b in everything if b.address.startswith(head)]
    publishers = [b for b in there if b.kind == "publisher" and fits(b)]
    others = [b for b in there if b.kind != "publisher"]
    if queue is not None:
        return publishers + [b for b in others if b.address.endswith(f"?queue={queue}")]
    known = {b.key: b for b in below if b.kind != "publisher"} | {b.key: b for b in others if fits(b)}
    return [*publishers, *known.values()]


def _disk_findings(parts: addresses.Address) -> Iterator[Finding]:
    """How many read a durable channel's journal, those included whose counters this user may not read."""
    if parts.scheme != "shm":
        return  # over tcp the publisher reads for them; a bus cannot be seen from outside its process
    from penstock.shm.explain import kept_at

    if not (directory := kept_at(parts)):
        return
    from penstock.journal import presence

    journal = f"journal:{directory}"
    if number := presence.count(Path(directory)):
        text = number_of(number, "subscriber reads", "subscribers read")
        yield Finding(f"{text} it from disk ({printable(journal)})", grave=False)


def _bridge_findings(parts: addresses.Address, everything: list[Block], passed: set[str]) -> list[Finding]:
    """What keeps the bridges of this machine that publish at the address from getting messages themselves."""
    found = []
    for block in everything:
        source, arrow, sink = block.name.partition(" -> ")
        if block.kind != "bridge" or not arrow or block.name_cut or plain(sink) != plain(parts.text):
            continue
        who = f"the bridge from {source} in process {block.pid}"
        if plain(source) in passed or source.startswith("bus:"):  # a bus cannot be seen from outside its process
            continue
        above = next((f for f in _explain(source, 0.0, passed) if f.grave and not f.meant), None)
        if above is None:
            found.append(Finding(f"{who} carried {_messages(flow(block))} up to now", grave=False))
        else:
            found.append(Finding(f"{who} gets nothing: {above.text}", command("why", source)))
    return found


def _room_findings(parts: addresses.Address) -> Iterator[Finding]:
    """The findings of the address's room."""
    found: Iterator[Finding] = _room(parts).explain(parts)
    return found


def _room(parts: addresses.Address) -> Any:
    """The module ``explain`` of the address's room."""
    return importlib.import_module(f"{addresses.ROOMS[parts.scheme]}.explain")


def explain_filter(text: str, expression: str, seconds: float) -> Finding:
    """Subscribe for ``seconds`` and report how many messages came and how many pass the filter."""
    passes = compile_filter(expression)
    seen = passed = 0
    example = ""
    deadline = time.monotonic() + seconds
    with tailing():
        opened = penstock.subscriber(text)
    with opened as subscriber:
        values = Values(subscriber)
        try:
            values.check(addresses.parse(text).topic or None, passes.paths)
        except InvalidArgument as error:
            return Finding(f"the filter matches no message: {error}", f"look at {expression!r}")
        while (left := deadline - time.monotonic()) > 0:
            came, through, first = _count_passing(subscriber, values, passes, min(left, 0.5))
            seen, passed, example = seen + came, passed + through, example or first
    if not seen:
        return Finding(f"no message came within {seconds:g} s, whatever the filter")
    if not passed:
        return Finding(
            f"the filter matches none of {_messages(seen)}; one of them: {example}", f"look at {expression!r}"
        )
    return Finding(f"the filter lets {passed:,} of {_messages(seen)} pass", grave=False)


def _count_passing(
    subscriber: penstock.Subscriber, values: Values, passes: Callable[..., bool], timeout: float
) -> tuple[int, int, str]:
    """How many messages came, how many pass, and the first one's text. All are released when this returns."""
    batch = subscriber.read_many(256, timeout)
    example = decode.example(batch[0], values) if len(batch) else ""
    return len(batch), sum(passes(message, values) for message in batch), example


def _publisher_findings(text: str, publishers: list[Block], scheme: str, without: int) -> Iterator[Finding]:
    if not publishers and scheme == "bus":
        return  # the findings of the bus already say that other processes cannot publish to it
    if not publishers and scheme == "shm":
        yield Finding(f"nobody publishes {text} on this machine", command("pub", text, "hello"))
    elif not publishers:
        yield Finding(f"no publisher of {text} on this machine; one elsewhere cannot be seen from here", grave=False)
    for block in publishers:
        if block.pid == without:
            continue
        who = f"the publisher in process {block.pid} ({block.program})"
        open_s = (block.read_ns - block.opened_ns) / 1e9
        if block.state.lower().startswith(("blocked", "stuck", "waiting")):
            yield Finding(f"{who} says: {block.state}", "see who does not read, below")
        elif flow(block) == 0:
            yield Finding(f"{who} is open for {open_s:.0f} s and has published nothing")
        elif block.idle_s is not None and block.idle_s > QUIET_S:
            yield Finding(f"{who} published {_messages(flow(block))}, the last one {block.idle_s:.0f} s ago")
        else:
            yield Finding(f"{who} publishes: {_messages(flow(block))} up to now", grave=False)
        if block.lost:
            yield Finding(f"{who} dropped {_messages(block.lost)}: {_reasons(block)}")


def _call_findings(text: str, blocks: list[Block]) -> Iterator[Finding]:
    """The clients and servers of an address, and the outcomes of their calls."""
    if not any(block.kind == "server" for block in blocks):
        yield Finding(f"nobody on this machine answers calls to {text}", command("serve", text, "COMMAND"))
    for block in blocks:
        who = f"the {block.kind} in process {block.pid} ({block.program})"
        verb = "asked" if block.kind == "client" else "was asked"
        under_way = block.matched - block.delivered - block.expired - sum(block.dropped.values())
        books = f"{block.delivered} answered, {under_way} under way"
        yield Finding(f"{who} {verb} {block.matched} times: {books}", grave=False)
        quiet_s = block.idle_s if block.idle_s is not None else (block.read_ns - block.opened_ns) / 1e9
        if under_way and quiet_s > QUIET_S:
            yield Finding(f"{who} has {number_of(under_way, 'call')} without an answer for {quiet_s:.0f} s")
        if block.expired:
            calls = number_of(block.expired, "call")
            yield Finding(f"{calls} of {who} ran out of time before an answer came", grave=False)
        for reason, meaning in _CALL_ENDS.items():
            if count := block.dropped.get(reason):
                yield Finding(f"{number_of(count, 'call')} of {who} {meaning}", grave=False)


_CALL_ENDS = {
    "closed": "lost the other side",
    "error": "ended in an error of the function",
    "refused": "ended as refused",
    "filtered": "ended as cancelled",
}


def _watch(readers: list[Block], watch_s: float) -> tuple[set[Key], dict[Key, int]]:
    """The readers that have messages waiting and took none while they were watched; and those that lost more, with how
    many they have lost by now.

    One look cannot distinguish a slow reader from a stalled one, nor losses that go on from those of long ago.
    """
    waiting = {block.key: flow(block) for block in readers if block.waiting or block.depth}
    lossy = {block.key: block.lost for block in readers if block.lost}
    losing: dict[Key, int] = {}
    deadline = time.monotonic() + watch_s
    while (waiting or lossy) and time.monotonic() < deadline:
        time.sleep(min(0.05, watch_s))
        now = {block.key: block for block in live()}
        waiting = {key: count for key, count in waiting.items() if key in now and flow(now[key]) == count}
        lossy = {key: count for key, count in lossy.items() if key in now}
        losing |= {key: now[key].lost for key, count in lossy.items() if now[key].lost > count}
        lossy = {key: count for key, count in lossy.items() if key not in losing}
    return set(waiting), losing


def _reader_findings(
    readers: list[Block], stalled: set[Key], losing: dict[Key, int], watch_s: float
) -> Iterator[Finding]:
    if not readers:
        yield Finding("nobody reads it on this machine", grave=False)
    for block in readers:
        who = f"the {block.kind} in process {block.pid} ({block.program})"
        quiet_s = block.idle_s if block.idle_s is not None else (block.read_ns - block.opened_ns) / 1e9
        told = block.room == "bus" and block.state.startswith("stuck")  # by the findings of the bus
        if block.state.lower().startswith(STANDSTILL) and quiet_s > 1 and not told:
            yield Finding(f"{who} says: {block.state}")
        is_stalled = block.key in stalled
        quiet = _quiet_time(block, watch_s)
        wait = number_of(block.waiting, "message waits", "messages wait")
        if told:
            pass
        elif is_stalled and block.waiting and block.capacity and block.depth >= block.capacity and quiet_s > 1:
            text = f"{who} holds all its {block.capacity} places and took nothing {quiet}"
            remedy = "read there" if block.room == "bus" else "release messages there"
            yield Finding(text, f"{remedy}, or end process {block.pid}")
        elif is_stalled and block.waiting:
            yield Finding(f"{wait} for {who}, which took none {quiet}")
        elif block.waiting:
            yield Finding(f"{who} reads, and {wait} for it", grave=False)
        if block.without_consumer and (block.depth or block.lag):
            yield Finding(f"the queue {block.name} has {_messages(block.depth or block.lag)} and no consumer")
        if filtered := block.dropped.get("filtered"):
            if block.delivered:
                yield Finding(f"{who} filtered out {filtered:,} of {_messages(block.matched)}", grave=False)
            else:
                yield Finding(f"the filter of {who} matched none of {_messages(filtered)}", "look at its filter")
        if block.lost:
            remedy = "read faster"
            if block.room == "shm":
                remedy += ", give the channel more slots, or open both sides with reliable=True"
            grave = block.key in losing or (block.room == "shm" and not block.delivered)
            goes_on = f", and goes on to lose them ({losing[block.key]:,} by now)" if block.key in losing else ""
            text = f"{who} lost {_messages(block.lost)}: {_reasons(block)}{goes_on}"
            yield Finding(text, remedy if grave else "", grave=grave)


def _quiet_time(block: Block, watch_s: float) -> str:
    """For how long a stalled reader has taken nothing: exact only if its handle records when it reads."""
    if block.kind not in READERS or (block.delivered and not block.last_ns):
        return f"in {watch_s:g} s"
    if block.idle_s is None:
        return f"since it was opened, {(block.read_ns - block.opened_ns) / 1e9 + watch_s:.0f} s ago"
    return f"for {block.idle_s + watch_s:.0f} s"


def _messages(count: int) -> str:
    return number_of(count, "message")


def _reasons(block: Block) -> str:
    return ", ".join(f"{number:,} {reason}" for reason, number in sorted(block.losses.items()) if number)


def _process_findings(pids: set[int]) -> Iterator[Finding]:
    for pid in sorted(pids):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state in "Tt":
            yield Finding(f"process {pid} is stopped", f"kill -CONT {pid}")
        elif state == "D":
            yield Finding(f"process {pid} waits for a disk or device", grave=False)


def _similar_addresses(parts: addresses.Address, everything: list[Block], at_another_port: bool) -> Iterator[Finding]:
    """Open addresses of the same scheme with a similar name; not the broker that this address belongs to."""
    text = plain(parts.text)
    head = f"{parts.scheme}:" if at_another_port else f"{parts.scheme}://{parts.host}:{parts.port}/"
    known = {b.address.partition("?")[0] for b in everything if b.address.startswith(head)}
    close = difflib.get_close_matches(text, sorted(n for n in known if not text.startswith(n)), n=3, cutoff=0.75)
    if parts.scheme == "shm":  # channels above and below it: a name cut short, or a slash too many
        stem = text.rstrip("/")
        near = sorted(n for n in known if n != text and (n == stem or n.startswith(stem + "/")) and n not in close)
        close = [*near, *close][:3]
    if close:
        yield Finding(f"{' and '.join(close)} {'is' if len(close) == 1 else 'are'} open: was that meant?", meant=True)
