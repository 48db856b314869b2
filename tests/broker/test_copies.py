"""How often bytes are copied on their way."""

from __future__ import annotations

import socket

from penstock._core.broker import Outbox, Scanner, publish_lines


def test_what_is_received_in_one_block_is_never_moved() -> None:
    near, far = socket.socketpair()
    far.setblocking(False)
    scanner = Scanner("hello", 1 << 20)
    scanner.allow("t")
    stream = publish_lines(b"PUB t", [b"x" * 64] * 100_000)
    sent = received = 0
    while received < 100_000:
        if sent < len(stream):
            sent += near.send(stream[sent : sent + 50_000])
        assert scanner.receive(far.fileno()) != 0
        while (event := scanner.next()) is not None:
            assert event[2] is not None
            received += len(event[2])
            del event
    assert scanner.moved_bytes < len(stream) * 0.01, "only what straddles a block's end is moved"
    near.close()
    far.close()


def test_a_large_message_is_received_in_place() -> None:
    near, far = socket.socketpair()
    far.setblocking(False)
    scanner = Scanner("hello", 64 << 20)
    scanner.allow("t")
    body = bytes(16 << 20)
    stream = publish_lines(b"PUB t", [body])
    view = memoryview(stream)
    sent = 0
    batch = None
    while batch is None:
        if sent < len(stream):
            sent += near.send(view[sent : sent + 100_000])
        scanner.receive(far.fileno())
        event = scanner.next()
        batch = event[2] if event is not None else None
    assert bytes(batch[0]) == body
    assert scanner.moved_bytes < 1 << 20, "growing in place, not by copying"
    near.close()
    far.close()


def test_delivery_refers_to_the_message_where_it_lies() -> None:
    from penstock._core import Message
    from penstock._core.broker import gather

    memory = bytearray(b"a" * 1000)
    outbox = Outbox()
    outbox.bare(gather([Message(memory, ordinal=1, channel="t", position=1)]))
    memory[:] = b"b" * 1000  # what is sent is what the memory holds when it is sent: nothing was copied before
    assert outbox.front() == b"b" * 1000
