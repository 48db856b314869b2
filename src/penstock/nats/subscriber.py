"""Subscriber of a subject: messages wait in a bounded buffer that the loop's thread fills.

Core NATS: what finds the buffer full is dropped and counted, as the protocol knows no back-pressure. JetStream: as many
are fetched as there is room for, and those that were read are acknowledged with the next read, or by ``close`` when the
block was left without an error. Any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import threading
import time
from collections import deque
from typing import Any

from penstock import channel
from penstock._core import Counters, Message
from penstock.channel import Deadline, Ledger
from penstock.errors import ClosedError, InvalidArgument
from penstock.nats.connection import Access, Connection, check_subject, properties_of

MAX_WAITING, MAX_WAITING_BYTES = 65_536, 64 << 20
FETCH, FETCH_S = 256, 1.0
RETRY_S = 0.5


class Subscriber(channel.Subscriber):
    """``stream``: JetStream, else core NATS."""

    def __init__(self, access: Access, subject: str, *, queue: str = "", stream: str = "", durable: str = "") -> None:
        self.subject = check_subject(subject, wildcards=True)
        if durable and not stream:
            raise InvalidArgument("durable= is for a JetStream stream: give stream=NAME too")
        if queue and stream:
            raise InvalidArgument("queue= is core NATS; readers of a stream share its messages by durable=NAME")
        self._counters = Counters("nats", "subscriber", f"{access.place}/{subject}")
        self._final: Ledger | None = None
        self._waiting: deque[Message] = deque()
        self._bytes = 0
        self._unacknowledged: list[Any] = []  # of JetStream, read and not acknowledged yet
        self._count = 0
        self._lock = threading.Lock()
        self._ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._failure: Exception | None = None
        self._failed = False  # the block was left by an error
        self._jetstream = bool(stream)
        try:
            self._connection = Connection(access)
            try:
                self._connection.run(self._begin(queue, stream, durable), access.timeout)
            except BaseException:
                self._connection.close()
                raise
        except BaseException:
            self._counters.close()
            os.close(self._ready)
            raise

    async def _begin(self, queue: str, stream: str, durable: str) -> None:
        client = self._connection.client
        if not stream:
            await client.subscribe(self.subject, queue=queue, cb=self._arrived)
            await client.flush()
            return
        found = await client.jetstream().pull_subscribe(self.subject, durable=durable or None, stream=stream)
        self._fetching = asyncio.create_task(self._fetch(found))

    async def _fetch(self, subscription: Any) -> None:
        import nats.errors

        while True:
            room = min(FETCH, MAX_WAITING - len(self._waiting))
            if room <= 0 or self._bytes > MAX_WAITING_BYTES:
                await asyncio.sleep(0.01)
                continue
            try:
                for message in await subscription.fetch(room, FETCH_S):
                    await self._arrived(message)
            except (TimeoutError, nats.errors.TimeoutError):
                continue
            except nats.errors.ConnectionClosedError:
                return
            except Exception as error:  # a stream that was deleted, a server that is choosing a leader
                await self._connection._note_error(error)
                await asyncio.sleep(RETRY_S)

    async def _arrived(self, message: Any) -> None:
        """In the loop's thread."""
        properties, time_ns = properties_of(message.headers)
        position = None
        if self._jetstream:
            about = message.metadata
            position = about.sequence.stream
            time_ns = time_ns if time_ns is not None else int(about.timestamp.timestamp() * 1e9)
            if about.num_delivered and about.num_delivered > 1:
                self._counters.add("redelivered", 1)
        with self._lock:
            self._counters.add("matched", 1)
            if len(self._waiting) >= MAX_WAITING or self._bytes > MAX_WAITING_BYTES:
                self._counters.drop("overflow", 1)
                return
            self._count += 1
            made = Message(
                message.data, ordinal=self._count, timestamp_ns=time.time_ns() if time_ns is None else time_ns,
                channel=message.subject, position=position, properties=properties or None, source=message,
            )  # fmt: skip
            self._counters.add("depth", 1)
            self._waiting.append(made)
            self._bytes += len(message.data)
            if len(self._waiting) == 1:
                os.eventfd_write(self._ready, 1)

    def read(self, timeout: float | None = None) -> Message | None:
        """The next message, or None when the time is over."""
        found = self.read_many(1, timeout)
        return found[0] if found else None

    def read_many(self, most: int = 1024, timeout: float | None = None) -> list[Message]:
        """Up to ``most`` messages that are there; waits for the first one only."""
        if most < 1:
            raise InvalidArgument(f"most={most} must be 1 or more")
        deadline = Deadline(timeout)
        self._acknowledge()
        while True:
            with self._lock:
                self._check()
                found = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
                size = sum(len(message) for message in found)
                self._bytes -= size
                if not self._waiting:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._ready)
                if self._jetstream:
                    self._unacknowledged += [message.source for message in found]
                if found:
                    self._counters.deliver(len(found), size, found[0].timestamp_ns)
                    return found
            if deadline.passed:
                return []
            self._sleep(deadline)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until there is something to read; False when the time is over."""
        deadline = Deadline(timeout)
        while True:
            with self._lock:
                self._check()
                if self._waiting:
                    return True
            if deadline.passed:
                return False
            self._sleep(deadline)

    def _sleep(self, deadline: Deadline) -> None:
        poll = select.poll()
        poll.register(self._ready, select.POLLIN)
        left = deadline.left
        poll.poll(200 if left is None else min(200.0, left * 1e3))  # a close by another thread is noticed then

    def fileno(self) -> int:
        """Readable when there is something to read."""
        self._check()
        return self._ready

    def _acknowledge(self) -> None:
        """Tell the stream that what was read is done."""
        with self._lock:
            done, self._unacknowledged = self._unacknowledged, []
        if done and not self.closed:
            self._connection.run(self._acknowledge_all(done), self._connection.access.timeout)

    async def _acknowledge_all(self, messages: list[Any]) -> None:
        for message in messages:
            await message.ack()

    def _check(self) -> None:
        if self.closed:
            raise ClosedError("this subscriber was closed")

    @property
    def ledger(self) -> Ledger:
        """A snapshot of the counts."""
        if self._final is not None:
            return self._final
        found = self._counters.snapshot()
        dropped = {reason: count for reason, count in found["dropped"].items() if count}
        matched, delivered = found["matched"], found["delivered"]
        in_flight = matched - delivered - sum(dropped.values())
        return Ledger(matched, delivered, dropped, 0, in_flight, found["redelivered"])

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._final is not None

    def __exit__(self, *error: object) -> None:
        self._failed = error[:1] not in ((), (None,))
        self.close()

    def close(self) -> None:
        """Acknowledge what was read, unless an error ended the block, and leave."""
        if self.closed:
            return
        if not self._failed:
            with contextlib.suppress(Exception):
                self._acknowledge()
        self._connection.close()
        with self._lock:
            if self._final is None:
                left = len(self._waiting)
                if left and not self._jetstream:
                    self._counters.drop("closed", left)
                self._final = self.ledger
                self._counters.close()
                os.close(self._ready)
