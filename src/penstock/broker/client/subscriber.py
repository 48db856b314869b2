"""Subscriber: one consumer of one queue, for ``broker://`` addresses and ``Client.subscribe``.

A message counts as done when the next one is read (``ack="next"``, the default: after a crash while handling it, or an
error of the function of ``on_message=``, it is redelivered), as soon as it is read (``ack="read"``), or when
``ack(message)`` says so (``ack="manual"``). Without a queue's name it gets a temporary queue, which begins with new
messages and is deleted with it.

Several threads may use one: each message goes to one of them. With ``ack="next"`` a message is done when any of them
reads the next one; threads that handle messages concurrently should use ``ack="manual"``.
"""

from __future__ import annotations

import contextlib
import enum
import ssl
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import channel
from penstock._core import Counters, Message
from penstock._core.broker import ack_words, delivery_count, redelivered_count
from penstock.address import check_options
from penstock.broker.client.clients import tls_context
from penstock.broker.client.dialogue import Dialogue, Pending
from penstock.broker.client.link import Link
from penstock.broker.client.requests import (
    milliseconds,
    non_negative_int,
    queue_options,
    schema_answer,
    schema_versions_answer,
)
from penstock.broker.hosts import settled
from penstock.broker.liveness import DEFAULT_S
from penstock.broker.words import TEMPORARY
from penstock.carry import total_bytes
from penstock.channel import Ledger, check_timeout, choose
from penstock.errors import ClosedError, InvalidArgument, ProtocolError, RefusedError, StateError

if TYPE_CHECKING:
    from penstock._core import Batch


SPANS_A_LINE = 1_000  # two positions have at most 41 letters
TELL_S = 0.1  # how long acknowledgements are gathered while messages are being read


class Ack(enum.StrEnum):
    """When a message counts as done."""

    NEXT = "next"
    READ = "read"
    MANUAL = "manual"


class Subscriber(channel.Subscriber):
    """A consumer."""

    _closing = False

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 9876,
        *,
        queue: str = "",
        ack: str | Ack = Ack.NEXT,
        credit: int = 2048,
        token: str | None = None,
        tls: bool | str | Path | ssl.SSLContext | None = None,
        timeout: float = 30.0,
        reconnect: bool = True,
        max_message_bytes: int = 64 << 20,
        keepalive_s: float = DEFAULT_S,
        **options: Any,
    ) -> None:
        if not 1 <= credit <= 65_536:
            raise InvalidArgument(f"credit={credit} must be 1 to 65536")
        self._mode = choose(Ack, ack, "ack")
        check_options(options, queue_options, "a subscriber's queue")
        self.queue = queue or f"{TEMPORARY}{uuid.uuid4().hex}"
        if not queue:
            options.setdefault("temporary", True)
        self._credit = credit
        self._batches: deque[Batch] = deque()  # received batches; the first one is being read
        self._next = 0  # index in the first batch of the next message to read
        self._begin = 0  # index in the first batch up to which all is acknowledged
        self._acked_at = time.monotonic()
        self._turn = threading.RLock()  # held by the thread that talks to the broker; reentrant for signal handlers
        self._moved = threading.Condition(self._turn)
        self._asleep = 0  # threads that wait for messages
        self._sleeper = 0  # the one of them that waits at the socket; the others wait for `_moved`
        # only the broker knows the topics of a named queue
        where = options.get("topics") or ("" if queue else "default")
        self._topics = options.get("topics")
        host, port = settled(host, port)
        self._place = f"{host}:{port}/{where}?queue={self.queue}"
        self._counters = Counters("broker", "subscriber", self._place)
        self._final: Ledger | None = None
        self._dialogue = Dialogue(token=token, producer="", max_message_bytes=max_message_bytes)
        self._link = Link(
            host,
            port,
            self._dialogue,
            tls=tls_context(tls),
            reconnect=reconnect,
            connect_timeout=timeout,
            keepalive_s=keepalive_s,
        )
        words = f"{queue_options(**options)} credit={credit}".strip()
        pending = self._dialogue.subscribe(self.queue, words, _weak(self._receive))
        deadline = time.monotonic() + timeout
        try:
            while not pending.done:
                self._advance()
                left = deadline - time.monotonic()
                if not pending.done and left <= 0:
                    raise TimeoutError(self._link.silence(timeout))
                if not pending.done:
                    self._link.wait(left)
            pending.result()
        except BaseException:
            self.close()
            raise

    # --- input

    def _receive(self, batch: Batch) -> None:
        self._batches.append(batch)
        self._counters.add("matched", len(batch))
        self._counters.add("depth", len(batch))  # the other counters are updated when messages are read
        if again := redelivered_count(batch):
            self._counters.add("redelivered", again)

    def _available(self) -> bool:
        batches = self._batches
        return len(batches) > 1 or (len(batches) == 1 and self._next < len(batches[0]))

    def _step(self, most: int) -> bool:
        """Whether there is a message, after processing what was received."""
        while not self._available():
            if not self._dialogue.step(most):
                return False
        return True

    def _advance(self, most: int = 1024) -> None:
        """Process what was received, then read the socket, without waiting."""
        try:
            if not self._step(most):
                self._link.pump()
                self._step(most)
        except ProtocolError as error:
            self._link.lost(error)

    def _fill(self, timeout: float | None, most: int = 1024) -> bool:
        """Wait for a message; returns whether there is one. The caller holds ``_turn``, which is released while this
        sleeps.
        """
        began = time.monotonic()
        deadline = None if timeout is None else began + timeout
        while not self._available():
            self._advance(most)
            if self._available():
                break
            self._link.check_reachable(began)
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            self._sleep(left)
            self._check()
            self._done()  # another thread may have read messages meanwhile
        return True

    def _sleep(self, left: float | None) -> None:
        """Sleep until something may have arrived. ``_turn``, which the caller holds, is released meanwhile."""
        me = threading.get_ident()
        self._asleep += 1
        try:
            if self._sleeper not in (0, me):  # it may be this very thread, if a signal handler reads
                self._moved.wait(left)
                return
            before, self._sleeper = self._sleeper, me
            try:
                self._turn.release()  # inside: a signal's function may raise right after it
                self._link.wait(left)
            finally:
                try:
                    self._turn.acquire()
                finally:
                    self._sleeper = before
                    self._moved.notify_all()
        finally:
            self._asleep -= 1

    def _pass_on(self) -> None:
        """Wake the other threads for messages that are left: they were received already, so the socket does not become
        readable.
        """
        if self._asleep and self._available():
            self._moved.notify_all()
            self._link.wake()

    def _check(self) -> None:
        self._check_link()
        if self._closing:
            raise ClosedError("this subscriber was closed")

    def _check_link(self) -> None:
        """For acknowledging, which a function that ``close`` waits for may do."""
        self._link.check("this subscriber")

    # --- what messages are made of

    def agree(self, terms: channel.Terms) -> None:
        """If it reads one topic, check that the topic's schema can be read as the handle's type."""
        terms.check(self.schema or "", f"topic {self._topics!r} of this broker")

    @property
    def schema(self) -> str | None:
        """The schema of its topic; None for patterns, and if none was declared."""
        return self.schema_of(str(self._topics or ""))

    def schema_of(self, topic: str | None) -> str | None:
        """The current schema of one of its topics, from the broker."""
        return self._described(topic)[1] or None

    def schemas_of(self, topic: str | None) -> list[str]:
        """Every version that the broker has, the newest last; brokers of older releases return only the newest."""
        _, newest, digests = self._described(topic)
        if len(digests) > 1:
            with contextlib.suppress(RefusedError), self._turn:
                self._check()
                return self._answer_to(self._dialogue.ask(f"SCHEMA {topic} all", convert=schema_versions_answer))  # type: ignore[no-any-return]
        return [newest] if newest else []

    def _described(self, topic: str | None) -> tuple[int, str, list[str]]:
        """Version, text and the digests of all versions, as the broker has them now."""
        if not topic or set(topic) & set("*>,"):
            return 0, "", []
        with self._turn:
            self._check()
            return self._answer_to(self._dialogue.ask(f"SCHEMA {topic}", convert=schema_answer))  # type: ignore[no-any-return]

    # --- reading

    def read(self, timeout: float | None = None) -> Message | None:
        """The next message, or None when the time is over."""
        timeout = check_timeout(timeout)
        with self._turn:
            self._check()
            self._done()
            if not self._available() and not self._fill(timeout):
                return None
            message = self._batches[0][self._next]
            self._given(1, len(message), message)
        return message

    def read_many(self, most: int = 1024, timeout: float | None = None) -> Batch | list[Message]:
        """Up to ``most`` messages that are there; waits for the first one only."""
        timeout = check_timeout(timeout)
        if most < 1:
            raise InvalidArgument(f"most={most} must be at least 1")
        with self._turn:
            self._check()
            self._done()
            if not self._fill(timeout, most):
                return []
            batch = self._batches[0]
            whole = self._next == 0 and len(batch) <= most
            found = batch if whole else batch[self._next : self._next + most]
            self._given(len(found), batch.total_bytes if whole else total_bytes(found), found[0])
        return found

    def _available_messages(self) -> Iterator[Message]:
        with self._turn:
            self._check()
            self._done()
            self._advance()
            try:
                while self._dialogue.step(1024):  # process everything that was received
                    pass
            except ProtocolError as error:
                self._link.lost(error)
            there = sum(map(len, self._batches)) - self._next
        for _ in range(there):
            message = self.read(0)
            if message is None:
                return
            yield message

    def _given(self, count: int, size: int, first: Message) -> None:
        # latency is measured for one message per batch
        self._counters.deliver(count, size, 0 if self._next else first.timestamp_ns)
        self._next += count
        if self._mode is Ack.READ:
            self._done()
        if self._asleep:
            self._pass_on()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until there is something to read; False when the time is over.

        If nothing is there, what was read so far is acknowledged, as when more is read: the broker may be waiting for
        it.
        """
        timeout = check_timeout(timeout)
        with self._turn:
            self._check()
            if not self._available():
                self._done()
            found = self._fill(timeout)
            self._pass_on()
        return found

    def fileno(self) -> int:
        """Readable when something may have arrived."""
        with self._turn:
            self._check()
            return self._link.fileno()

    def _begin_wait(self) -> None:
        self._link.begin_wait()

    def _end_wait(self) -> None:
        self._link.end_wait()

    # --- acknowledging

    def _done(self) -> None:
        """Acknowledge what was read so far. The broker is told now and then, and always before waiting for more."""
        if not self._batches:
            return
        batch = self._batches[0]
        read = self._next - self._begin
        over = self._next >= len(batch)
        if self._mode is not Ack.MANUAL and read:
            now = time.monotonic()
            if over or read >= self._credit // 4 or now - self._acked_at > TELL_S:
                self._dialogue.tell(b"ACK %s%s" % (self.queue.encode(), ack_words(batch, self._begin, self._next)))
                self._begin, self._acked_at = self._next, now
                self._link.send()
        if over:
            self._next = self._begin = 0  # first: a signal's function may raise after the call
            self._batches.popleft()

    def ack(self, message: Message | int | Iterable[Message | int], *, confirm: bool = False) -> None:
        """Acknowledge this message (or position), or a batch of them. With ``confirm`` it is on disk when this
        returns.
        """
        # Bytes would give their numbers as positions, and text its letters: both are refused as no message.
        if isinstance(message, Iterable) and not isinstance(message, Message | bytes | bytearray | memoryview | str):
            positions = sorted({_position(one) for one in message})
        else:
            positions = [_position(message)]
        for spans in _spans(positions):
            if not confirm:
                self._send(f"ACK {self.queue} {spans}")
                continue
            with self._turn:
                self._check_link()
                self._answer_to(self._dialogue.ask(f"ACK {self.queue} {spans} confirm", repeat=False))

    def _send(self, line: str | bytes) -> None:
        with self._turn:
            self._check_link()  # without a connection nobody would get it, and the message is redelivered
            self._dialogue.tell(line)
            self._link.send()

    def _answer_to(self, pending: Pending) -> Any:
        """Wait for an answer; messages that arrive meanwhile are kept. The caller holds ``_turn``, which is released
        while this sleeps.
        """
        while not pending.done:
            try:
                self._link.pump()
                while self._dialogue.step():
                    pass
            except ProtocolError as error:
                self._link.lost(error)
            if not pending.done:
                self._sleep(None)
        self._pass_on()
        return pending.result()

    def ack_many(self, batch: Batch | list[Message], begin: int = 0, end: int | None = None) -> None:
        """Acknowledge messages that were read together, or those of them from ``begin`` up to ``end``."""
        end = len(batch) if end is None else end
        if isinstance(batch, list):
            words = b"".join(b" %d" % (message.position or 0) for message in batch[begin:end])
        else:
            words = ack_words(batch, begin, end)
        self._send(b"ACK %s%s" % (self.queue.encode(), words))

    def nack(self, message: Message | int, *, delay_s: float = 0.0) -> None:
        """Return a message: it is redelivered, after ``delay_s`` if given, or when the broker starts again."""
        position = _position(message)
        if self._mode is Ack.READ:
            raise StateError('with ack="read" a message is acknowledged when it is read; nack needs ack="manual"')
        self._send(f"NACK {self.queue} {position} delay_ms={milliseconds(delay_s, 'delay_s')}")

    def _was_not_handled(self, message: Message) -> None:
        """The function of ``on_message=`` failed at the last message: do not acknowledge it."""
        self._give_back_last()

    def _give_back_last(self) -> None:
        if self._mode is not Ack.NEXT:
            return
        with self._turn:
            if not self._link.closed and self._batches and self._next > self._begin:
                batch = self._batches[0]
                if self._next - 1 > self._begin:
                    words = ack_words(batch, self._begin, self._next - 1)
                    self._dialogue.tell(b"ACK %s%s" % (self.queue.encode(), words))
                self._begin = self._next
                self.nack(batch.positions[self._next - 1], delay_s=channel.AGAIN_S)

    def deliveries(self, message: Message) -> int:
        """How often a message read here was delivered, this time included."""
        return delivery_count(message)

    # --- the rest

    @property
    def ledger(self) -> Ledger:
        """A snapshot of the counts."""
        if self._final is not None:
            return self._final
        counts = self._counters
        matched, delivered, again = (counts.get(name) for name in ("matched", "delivered", "redelivered"))
        return Ledger(matched=matched, delivered=delivered, in_flight=matched - delivered, redelivered=again)

    def close(self) -> None:
        """Acknowledge what was read, but for a message whose function runs still, and close the connection."""
        self._end(done=True)

    def __exit__(self, kind: object = None, *_: object) -> None:
        self._end(done=kind is None)  # after an exception the message is redelivered

    def _end(self, done: bool) -> None:
        with self._turn:
            if self._link.closed:
                return
            self._closing = True  # nothing is read from here on
            self._moved.notify_all()
            self._link.wake()
        returned = self._wait_for_call()
        with self._turn:
            if not self._link.closed:
                if not returned:
                    self._give_back_last()
                self._end_in_turn(done)
                self._moved.notify_all()

    def _end_in_turn(self, done: bool) -> None:
        name = self.queue.encode()
        if self._mode is not Ack.MANUAL and self._batches and self._next > self._begin:
            batch = self._batches[0]
            if done or self._mode is Ack.READ:
                self._dialogue.tell(b"ACK %s%s" % (name, ack_words(batch, self._begin, self._next)))
            else:  # delivered, and not acknowledged
                for position in batch.positions[self._begin : self._next]:
                    self._dialogue.tell(b"NACK %s %d" % (name, position))
        # Messages that were sent ahead and never read return as if they had not been delivered. With ack="manual" it is
        # not known here which ones were read.
        self._link.finish(b"BYE" if self._mode is Ack.MANUAL else b"BYE unread")
        self._final = self.ledger
        self._counters.close()

    @property
    def trouble(self) -> str:
        """Why it has no connection to its broker now; empty while it has one."""
        return self._link.trouble

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closing or self._link.closed


def _weak(receive: Callable[[Batch], None]) -> Callable[[Batch], None]:
    """The method with a weak reference to its subscriber, so that an unused subscriber is collected and consumes
    nothing.
    """
    method = weakref.WeakMethod(receive)

    def call(batch: Batch) -> None:
        found = method()
        if found is not None:
            found(batch)

    return call


def _spans(positions: list[int]) -> Iterator[str]:
    """Sorted positions as the words of ACK, neighbours as one span; each text fits in a line of the protocol."""
    spans: list[list[int]] = []
    for position in positions:
        if spans and position == spans[-1][1] + 1:
            spans[-1][1] = position
        else:
            spans.append([position, position])
    for begin in range(0, len(spans), SPANS_A_LINE):
        yield " ".join(f"{first}-{last}" for first, last in spans[begin : begin + SPANS_A_LINE])


def _position(message: Any) -> int:
    """The position of a message, or the position itself."""
    position = message if isinstance(message, int) else getattr(message, "position", None)
    if position is None:
        raise TypeError(f"a message of this subscriber is wanted, or its position, not {type(message).__name__}")
    return non_negative_int(position, "position")
