"""The parser under anything: hypothesis here, a million inputs in tests/stress."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock._core import Message
from penstock._core.broker import Outbox, QueueState, Scanner, gather, publish_lines
from penstock.broker import words

WORDS = [b"PUB", b"SUB", b"STAGE", b"HELLO 1", b"ACK", b"BYE", b"MSG", b"DATA", b" ", b"\n", b"\r\n", b"t", b"a.b", b"0", b"5", b"-1",
         b"99999999999999999999", b"id=x", b"hello", b"?", b"!", b"#", b"\0", b"\xff", b"q 1 1 1 1 1 3\nabc"]  # fmt: skip


def drain(scanner: Scanner) -> list[tuple[str, str, list[bytes] | None]]:
    """All events, until the scanner wants more or has failed. Every topic is allowed."""
    found = []
    while (event := scanner.next(64)) is not None:
        verb, rest, batch = event
        if verb == words.NEW_TOPIC:
            scanner.allow(rest.encode(errors="surrogateescape").decode(errors="replace")) if rest.isprintable() else None
            if not rest.isprintable():
                break
            continue
        if verb == words.BROKEN:
            found.append((verb, rest, None))
            break
        found.append((verb, rest, batch.copies() if batch is not None else None))
    return found


def merged(events: list[tuple[str, str, list[bytes] | None]]) -> list[tuple[str, str, bytes | None]]:
    """Rows taken apart: how a row was cut does not matter."""
    return [(v, r, d) for v, r, batch in events for d in (batch if batch is not None else [None])]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(WORDS), max_size=60), st.sampled_from(["raw", "hello", "deliveries"]))
def test_nonsense_made_of_words(parts: list[bytes], grammar: str) -> None:
    drain_whole(b"".join(parts), grammar)


@settings(max_examples=300)
@given(st.binary(max_size=2000), st.sampled_from(["raw", "hello", "deliveries"]))
def test_binary_nonsense(data: bytes, grammar: str) -> None:
    drain_whole(data, grammar)


def drain_whole(data: bytes, grammar: str) -> None:
    scanner = Scanner(grammar, 1000)  # type: ignore[arg-type]
    scanner.feed(data)
    whole = merged(drain(scanner))
    pieces = Scanner(grammar, 1000)  # type: ignore[arg-type]
    found: list[tuple[str, str, bytes | None]] = []
    for at in range(0, len(data), 7):
        if found and found[-1][0] == words.BROKEN:
            break
        pieces.feed(data[at : at + 7])
        found += merged(drain(pieces))
    assert found == whole, "how the stream is cut does not matter"


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.sampled_from(["a", "b.c", "d"]), st.binary(max_size=300)), max_size=50),
    st.integers(min_value=1, max_value=500),
)
def test_what_goes_in_comes_out(messages: list[tuple[str, bytes]], step: int) -> None:
    stream = b"".join(publish_lines(f"PUB {topic}".encode(), [data]) for topic, data in messages)
    scanner = Scanner("hello", 1000)
    found: list[tuple[str | None, bytes]] = []
    for at in range(0, len(stream), step):
        scanner.feed(stream[at : at + step])
        while (event := scanner.next()) is not None:
            verb, rest, batch = event
            if verb == words.NEW_TOPIC:
                scanner.allow(rest)
            else:
                assert verb == "PUB" and batch is not None
                found += [(message.channel, bytes(message)) for message in batch]
    assert found == messages


@settings(max_examples=100)
@given(st.lists(st.tuples(st.binary(max_size=200), st.integers(1, 1 << 40)), max_size=30))
def test_deliveries_come_out_as_they_went_in(messages: list[tuple[bytes, int]]) -> None:
    batch = gather(
        [Message(data, ordinal=i + 1, timestamp_ns=n, channel="t.x", position=i + 1) for i, (data, n) in enumerate(messages)]
    )
    outbox = Outbox()
    outbox.framed(b"queue", batch)
    scanner = Scanner("deliveries", 1000)
    while outbox.pending_bytes:
        piece = outbox.front(13)
        scanner.feed(piece)
        outbox.advance(len(piece))
    found = []
    while (event := scanner.next()) is not None:
        assert event[0] == "MSG" and event[1] == "queue" and event[2] is not None
        found += [(bytes(m), m.timestamp_ns, m.ordinal, m.channel, dict(m.properties)) for m in event[2]]
    assert found == [(data, n, i + 1, "t.x", {}) for i, (data, n) in enumerate(messages)]


@settings(max_examples=200)
@given(st.integers(0, 1 << 32))
def test_queue_state_recovers_to_what_it_was(seed: int) -> None:
    """Against a model: what is not acknowledged comes again after a restart, in order; what is does not."""
    chooser = random.Random(seed)
    state, notes, next_position = QueueState(1), [], 1
    done: set[int] = set()
    held: set[int] = set()
    for _ in range(chooser.randrange(1, 60)):
        way = chooser.random()
        if way < 0.4:
            count = chooser.randrange(1, 8)
            places = [next_position + k for k in range(count) if chooser.random() < 0.8]
            next_position += count
            if places:
                batch = gather([Message(b"x", ordinal=1, channel="t", position=place) for place in places])
                sent, _, _ = state.take(batch, 1, 1 << 60, 0)
                taken = list(sent.positions) if sent is not None else []
                assert taken == [place for place in places if place not in done]
                held.update(taken)
            state.look_from(next_position)
        elif way < 0.7 and held:
            first = chooser.choice(sorted(held))
            last = min(max(held), first + chooser.randrange(0, 6))
            state.acknowledge(1, first, last, True)
            done |= {place for place in held if first <= place <= last}
            held -= done
        elif way < 0.8:
            notes.append(state.delta())
        elif way < 0.9:
            notes = [state.snapshot(), *([notes[-1]] if notes and chooser.random() < 0.5 else [])]
            state.delta()
        else:  # restart: what was noted last is what is known
            notes.append(state.delta())
            state = QueueState(1)
            for note in notes:
                assert state.apply(note)
            state.recovered()
            places = [place for place in range(state.cursor, next_position) if place in held or place in done]
            if places:
                batch = gather([Message(b"x", ordinal=1, channel="t", position=place) for place in places])
                sent, _, _ = state.take(batch, 1, 1 << 60, 0)
                assert (list(sent.positions) if sent is not None else []) == sorted(held)
            else:
                assert not held
            state.look_from(next_position)
    assert state.in_flight == len(held)


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_queue_state_takes_no_nonsense(record: bytes) -> None:
    state = QueueState(1)
    state.apply(record)
    state.apply(b"\1" + bytes(7) + record)
    state.recovered()
    assert state.cursor >= 1 or record
