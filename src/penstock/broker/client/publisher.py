"""Publisher: messages to one topic, for ``broker://`` addresses.

``publish`` returns when the message is on disk. With ``unconfirmed=N`` it waits only while N messages are unconfirmed;
``flush`` waits for all of them, and an error is raised by the next call. With ``queue`` that queue is created before
the first message, so that it misses none.

Threads that use one publisher take turns; ``close`` and ``ledger`` by any thread.
"""

from __future__ import annotations

import ssl
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import channel
from penstock._core import Counters
from penstock._core.broker import reserve
from penstock.broker import words
from penstock.broker.client.clients import Client
from penstock.broker.client.requests import encode_many, non_negative_int, publish_options, times_of
from penstock.broker.hosts import settled
from penstock.broker.ranges import encode_entry, encode_head
from penstock.carry import time_of, total_bytes
from penstock.channel import Deadline, Ledger, check_subscribers, telling_published
from penstock.errors import ClosedError, InvalidArgument, RefusedError
from penstock.journal.layout import TIME_NOW

if TYPE_CHECKING:
    from penstock._core import Batch, Draft, Message
    from penstock.broker.client.dialogue import Pending, Properties
    from penstock.channel import Buffer, IdAndKey

CHUNK = 8192  # messages of publish_many that are encoded at a time
RANGE_BYTES = 4 << 20  # of messages that are sent as one range
LOOK_S = 0.02  # how often wait_ready checks
END_S = 1.0  # how long close waits for a publish of another thread
CLOSED = "this publisher was closed"


class Publisher(channel.Publisher):
    """A publisher to one topic of a broker."""

    carries_properties = carries_properties_of_many = carries_details = True

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 9876,
        topic: str = words.DEFAULT_TOPIC,
        *,
        queue: str = "",
        unconfirmed: int = 0,
        ttl_s: float | None = None,
        token: str | None = None,
        tls: bool | str | Path | ssl.SSLContext | None = None,
        timeout: float = 30.0,
        reconnect: bool = True,
    ) -> None:
        non_negative_int(unconfirmed, "unconfirmed")
        self.topic = words.check_topic(topic)
        self.position: int | None = None  #: the position of the last confirmed message
        self._unconfirmed = unconfirmed
        self._options = publish_options(None, ttl_s, None, None)
        self._under_way: deque[Pending] = deque()
        self._count = 0  # unconfirmed messages
        self._late = False  # the last wait for a confirmation ended in a TimeoutError
        host, port = settled(host, port)
        self._counters = Counters("broker", "publisher", f"{host}:{port}/{topic}")
        self._final: Ledger | None = None
        self._closing = False
        self._turn = threading.RLock()  # held by the thread that talks to the broker; reentrant for signal handlers
        self._client = Client(host, port, token=token, tls=tls, timeout=timeout, reconnect=reconnect)
        try:
            if queue:
                self._client.queue(queue, create=True, topics=topic)
            else:
                self._client.ping()
        except BaseException:
            self.close()
            raise

    def agree(self, terms: channel.Terms) -> None:
        """Declare the schema at the broker, which keeps it as long as it has the topic."""
        while True:
            version, there, digests = self._client.schema(self.topic)
            same = terms.check(there, f"topic {self.topic!r} of this broker")
            if same or (terms.digest in digests and not terms.replaces):
                return
            try:
                self._client.declare_schema(self.topic, version + 1, terms.text)
            except words.Refusal as refusal:
                if refusal.code != "exists":
                    raise
            else:
                return

    @property
    def schema(self) -> str | None:
        """The schema of the topic's messages, or None."""
        with self._turn:
            return self._client.schema(self.topic)[1] or None

    def publish(
        self,
        data: Buffer,
        *,
        properties: Mapping[str, str] | None = None,
        timestamp_ns: int | None = None,
        timeout: float | None = None,
    ) -> int | None:
        """Publish a copy of ``data``. A broker returns positions, not ordinals: see ``position``.

        ``timeout`` bounds the wait for the broker's answer to this call, where it is less than the publisher was opened
        with. Without an answer ``TimeoutError`` is raised, whose ``published`` says whether the message was sent: if
        it was (1), it may be stored, and is sent again after a reconnect; if not (0), it will not be.
        """
        encoded = words.encode_properties(properties)
        times = None if timestamp_ns is None else times_of([timestamp_ns])
        deadline = Deadline(timeout)
        own: list[Pending] = []
        with self._turn:
            self._check()
            try:
                self._send([data], encoded, times, own)
                self._settle(self._unconfirmed, deadline)
            except TimeoutError as error:
                self._take_back(own, error)
                raise
        return None

    def publish_many(
        self,
        batch: Iterable[Buffer],
        *,
        properties: Mapping[str, str] | Iterable[Mapping[str, str]] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Publish each of them, in order; gives how many were published. Properties: of all, or of each.

        ``timeout`` is for all of them together, as in ``publish``; ``published`` of its error says how many are stored
        or on their way.
        """
        return self._publish_all(batch, encode_many(properties), Deadline(timeout))

    def forward(self, batch: Batch | Sequence[Message]) -> int:
        """Publish messages of any reach with the times and properties they have; gives how many were published."""
        times = times_of(_time_of(message) for message in batch) if self._client._dialogue.times else None
        if isinstance(batch, list):  # a list passes on the payloads only
            properties = encode_many([message.properties for message in batch])
            return self._publish_all(batch, properties, Deadline(None), times)
        return self._publish_all(batch, None, Deadline(None), times)

    def forward_details(self, batch: Sequence[Message], details: Sequence[IdAndKey]) -> int:
        """``forward`` with the id and the key of each message, which the broker stores with it.

        An id that the broker knows does not leave a message out, so that what has gone before can go again. A later
        ``publish`` with one of these ids is a duplicate, as after any other message with an id.
        """
        if not any(one.message_id or one.key for one in details):
            return self.forward(batch)
        if self._options:
            raise InvalidArgument("ttl_s: messages with ids or keys cannot be given a time to live")
        own: list[Pending] = []
        with self._turn:
            self._check()
            dialogue = self._client._dialogue
            if not dialogue.ranges:
                raise RefusedError("this broker is of an older version, which cannot keep message ids and keys")
            try:
                for index, pieces in _ranges(batch, details):
                    head = encode_head(len(index), [self.topic], times=True)
                    pending = dialogue.publish_range(len(index), (head, *index, *pieces))
                    self._sent(pending, sum(map(len, pieces[::4])), own)
                    self._settle(max(self._unconfirmed, 4 * CHUNK))
                self._settle(self._unconfirmed)
            except TimeoutError as error:
                self._take_back(own, error)
                raise
        return len(batch)

    def _publish_all(
        self, batch: Iterable[Buffer], properties: Properties, deadline: Deadline, times: array[int] | None = None
    ) -> int:
        with telling_published(0):
            items: Any = batch if hasattr(batch, "__len__") else list(batch)
            if isinstance(properties, list) and len(properties) != len(items):
                raise InvalidArgument(f"{len(items)} messages have {len(properties)} properties")
        own: list[Pending] = []
        with self._turn:
            self._check()
            try:
                self._send_all(items, properties, times, deadline, own)
            except TimeoutError as error:
                self._take_back(own, error)
                raise
            except Exception as error:
                error.published = sum(pending.messages - pending.refused for pending in own)  # type: ignore[attr-defined]
                raise
        return len(items)

    def _take_back(self, own: list[Pending], error: TimeoutError) -> None:
        """Take back the messages of one call that were never sent. Others stay under way: they may be stored, and are
        sent again after a reconnect.
        """
        self._late = True
        published = sum(pending.messages for pending in own)
        for pending in reversed(own):
            if self._client._dialogue.withdraw(pending):
                self._under_way.remove(pending)
                self._count -= pending.messages
                self._counters.drop("error", pending.messages)
                published -= pending.messages
        error.published = published  # type: ignore[attr-defined]
        error.unconfirmed = self._count  # type: ignore[attr-defined]

    def _send_all(
        self, items: Any, properties: Properties, times: array[int] | None, deadline: Deadline, own: list[Pending]
    ) -> None:
        if len(items) <= CHUNK or properties is None:  # a slice of a batch is a list, without the properties
            if len(items):
                self._send(items, properties, times, own)
        else:
            for begin in range(0, len(items), CHUNK):
                part = properties[begin : begin + CHUNK] if isinstance(properties, list) else properties
                self._send(items[begin : begin + CHUNK], part, times and times[begin : begin + CHUNK], own)
                self._settle(max(self._unconfirmed, 4 * CHUNK), deadline)
        self._settle(self._unconfirmed, deadline)

    def reserve(self, size: int) -> Draft:
        """A writable buffer of ``size`` bytes; leaving its ``with`` block publishes it."""
        self._check()
        return reserve(self.publish, size, self)

    def _send(self, items: Any, properties: Properties, times: array[int] | None, own: list[Pending]) -> None:
        dialogue = self._client._dialogue
        pending = dialogue.publish(self.topic, items, self._options, properties, times)
        self._sent(pending, total_bytes(items), own)

    def _sent(self, pending: Pending, size: int, own: list[Pending]) -> None:
        own.append(pending)
        self._count += pending.count  # first: a signal's function may raise after the call
        self._under_way.append(pending)
        self._counters.add("matched", pending.count)
        self._counters.add("bytes", size)
        self._counters.set("last_ns", time.time_ns())
        self._client._link.send()

    def _settle(self, most: int, deadline: Deadline | None = None) -> None:
        """Wait until at most ``most`` messages are unconfirmed."""
        while self._under_way and (self._count > most or self._under_way[0].done):
            self._collect(deadline)

    def _collect(self, deadline: Deadline | None = None) -> None:
        """Wait for the answer to the oldest of them."""
        pending = self._under_way[0]
        count = pending.messages
        kept = False
        try:
            try:
                span = self._client._finish(pending, deadline, keep=True)
            except TimeoutError:
                kept = True
                raise
            finally:
                if not kept:
                    self._count = self._count - count if len(self._under_way) > 1 else 0
                    self._under_way.popleft()
        except TimeoutError:
            raise
        except words.Refusal:
            self._counters.drop("refused", pending.refused)
            self._counters.add("delivered", count - pending.refused)
            raise
        except BaseException as error:
            self._counters.drop("error", count)
            if self._closing:
                raise ClosedError(f"{CLOSED} while it waited: whether what it sent is stored is unknown") from error
            raise
        self._late = False
        self._counters.add("delivered", count)
        self.position = span[1]

    def flush(self) -> None:
        """Wait until everything published is on disk."""
        with self._turn:
            self._check()
            self._settle(0)

    def wait_ready(self, subscribers: int = 1, timeout: float | None = None) -> bool:
        """Wait until the queues bound to this topic have this many consumers."""
        check_subscribers(subscribers)
        deadline = Deadline(timeout)
        while self._consumers() < subscribers:
            if deadline.passed:
                return False
            left = deadline.left
            time.sleep(LOOK_S if left is None else min(LOOK_S, left))
        return True

    def _consumers(self) -> int:
        with self._turn:
            self._check()
            try:
                return int(self._client.peers(self.topic)[1])
            except Exception as error:
                if self._closing:
                    raise ClosedError(CLOSED) from error
                raise

    def _check(self) -> None:
        if self._closing:
            raise ClosedError(CLOSED)
        self._client._link.check("this publisher")

    @property
    def ledger(self) -> Ledger:
        """A snapshot of the counts; delivered means on disk."""
        if self._final is not None:
            return self._final
        found = self._counters.snapshot()
        dropped = {reason: count for reason, count in found["dropped"].items() if count}
        matched, delivered = found["matched"], found["delivered"]
        in_flight = matched - delivered - sum(dropped.values())
        return Ledger(matched=matched, delivered=delivered, dropped=dropped, in_flight=in_flight)

    def close(self) -> None:
        """Wait for unconfirmed messages, then close the connection. A publish of another thread that does not end soon
        is interrupted: then it is not known whether its message was stored.
        """
        if self._closing:
            return
        self._closing = True
        mine = self._turn.acquire(timeout=END_S)
        refusal: words.Refusal | None = None
        try:
            # What a TimeoutError has named as unconfirmed is not waited for a second time.
            while mine and self._under_way and not self._late:
                try:
                    self._settle(0)
                except words.Refusal as error:  # one message was refused: go on counting the others
                    refusal = refusal or error
            if refusal is not None:
                raise refusal
        finally:
            self._client.close()
            if not mine:
                self._turn.acquire()  # the thread that holds it ends now
            self._counters.drop("error", self._count)
            self._final = self.ledger
            self._counters.close()
            self._turn.release()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closing


def _ranges(batch: Sequence[Message], details: Sequence[IdAndKey]) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """The messages as ranges: the index and, four for each message, the bytes."""
    index: list[bytes] = []
    pieces: list[bytes] = []
    size = 0
    for message, one in zip(batch, details, strict=True):
        parts = (
            bytes(message), words.encode_properties(message.properties), one.message_id.encode(), one.key.encode(),
        )  # fmt: skip
        more = sum(map(len, parts))
        if index and (size + more > RANGE_BYTES or len(index) >= CHUNK):
            yield index, pieces
            index, pieces, size = [], [], 0
        index.append(encode_entry(size, *map(len, parts), time_ns=_time_of(message)))
        pieces += parts
        size += more
    if index:
        yield index, pieces


def _time_of(message: Message) -> int:
    """The time to store for a message: its own, or the time of storing if it has none."""
    found = time_of(message)
    return TIME_NOW if found is None else found
