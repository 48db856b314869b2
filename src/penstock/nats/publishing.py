"""Publisher of a subject. Core NATS: the server has the message. JetStream: its stream has stored it. Any thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

from penstock import channel
from penstock._core import Counters
from penstock._core.broker import reserve
from penstock.carry import time_of
from penstock.channel import Deadline, Ledger, check_subscribers, check_timeout, telling_published
from penstock.errors import CapacityError, ClosedError, InvalidArgument, PenstockError, RefusedError
from penstock.nats.connection import Access, Connection, check_subject, headers_of

if TYPE_CHECKING:
    from penstock._core import Batch, Draft, Message
    from penstock.channel import Buffer

AGAIN_S = 0.1  # before what no stream has answered for is sent again
LOOK_S = 1.0  # how long the answer to why nobody has confirmed is awaited
UNDER_WAY = 256  # most messages that wait for their stream's confirmation
Headers = dict[str, str] | None


class Publisher(channel.Publisher):
    """Publishes to one subject. With ``jetstream``, ``publish`` returns when a stream has stored the message."""

    carries_properties = carries_properties_of_many = True

    def __init__(self, access: Access, subject: str, *, jetstream: bool = False) -> None:
        self.subject = check_subject(subject, wildcards=False)
        self._counters = Counters("nats", "publisher", f"{access.place}/{subject}")
        self._final: Ledger | None = None
        self._lock = threading.Lock()
        self._jetstream: Any = None
        self._access = access
        try:
            self._connection = Connection(access)
        except BaseException:
            self._counters.close()
            raise
        if jetstream:
            self._jetstream = self._connection.client.jetstream(timeout=access.timeout)

    def publish(
        self,
        data: Buffer,
        *,
        properties: Mapping[str, str] | None = None,
        timestamp_ns: int | None = None,
        timeout: float | None = None,
    ) -> int | None:
        """Publish a copy of ``data``. NATS knows no ordinals."""
        self._send([(_bytes(data), headers_of(properties, timestamp_ns))], timeout)
        return None

    def publish_many(
        self,
        batch: Iterable[Buffer],
        *,
        properties: Mapping[str, str] | Iterable[Mapping[str, str]] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Publish each of them, in order; gives how many were published. Properties: of all, or of each."""
        with telling_published(0):
            items = [_bytes(item) for item in batch]
            each = repeat(properties) if properties is None or isinstance(properties, Mapping) else list(properties)
            if isinstance(each, list) and len(each) != len(items):
                raise InvalidArgument(f"{len(items)} messages have {len(each)} properties")
            ready = [(item, headers_of(one, None)) for item, one in zip(items, each, strict=False)]
        return self._send(ready, timeout)

    def forward(self, batch: Batch | Sequence[Message]) -> int:
        """Publish messages of any reach with the times and properties they have."""
        items = [(bytes(one), headers_of(one.properties, time_of(one))) for one in batch]
        return self._send(items, None)

    def reserve(self, size: int) -> Draft:
        """A writable buffer of ``size`` bytes; leaving its ``with`` block publishes it."""
        self._check()
        return reserve(self.publish, size, self)

    def _send(self, items: list[tuple[bytes, Headers]], timeout: float | None) -> int:
        with telling_published(0):
            self._check()
            most = self._connection.client.max_payload
            for data, headers in items:
                size = len(data) + sum(len(name) + len(value) + 4 for name, value in (headers or {}).items())
                if size > most:
                    raise CapacityError(f"a message of {size} bytes is longer than the server takes ({most})")
            within = self._access.timeout if timeout is None else check_timeout(timeout)
        for begin in range(0, len(items), UNDER_WAY):
            part = items[begin : begin + UNDER_WAY]
            self._counters.add("matched", len(part))
            self._counters.add("bytes", sum(len(data) for data, _ in part))
            try:
                with telling_published(begin):
                    self._deliver(part, within)
            except BaseException as error:
                self._counters.drop("refused" if isinstance(error, RefusedError) else "error", len(part))
                raise
            self._counters.add("delivered", len(part))
        return len(items)

    def _deliver(self, items: list[tuple[bytes, Headers]], within: float | None) -> None:
        deadline = Deadline(within)
        try:
            while left := self._connection.run(self._publish(items), deadline.left):
                # Nobody answered for the stream: it is not there, or its servers are choosing a leader.
                items = left
                if self._no_stream():
                    raise self._refusal()
                if deadline.passed:
                    raise TimeoutError(f"the stream that takes {self.subject} had no leader for {within:g} s")
                time.sleep(AGAIN_S)
        except TimeoutError:
            if self._jetstream is not None and self._no_stream():
                raise self._refusal() from None
            raise

    def _no_stream(self) -> bool:
        """Whether no stream takes the subject: where others read it, the server does not say that nobody stores it."""
        from nats.js.errors import NotFoundError

        async def look() -> bool:
            try:
                await self._jetstream.find_stream_name_by_subject(self.subject)
            except NotFoundError:
                return True
            except Exception:  # the servers choose a leader, or do not answer
                return False
            return False

        try:
            return self._connection.run(look(), min(LOOK_S, self._access.timeout))
        except (OSError, PenstockError):  # a server that does not answer
            return False

    def _refusal(self) -> RefusedError:
        return RefusedError(f"no stream takes the subject {self.subject}: make one, or publish without jetstream=true")

    async def _publish(self, items: list[tuple[bytes, Headers]]) -> list[tuple[bytes, Headers]]:
        """Returns those for which no stream has answered, which are not stored."""
        if self._jetstream is not None:
            from nats.js.errors import NoStreamResponseError

            sent = [self._jetstream.publish(self.subject, data, headers=headers) for data, headers in items]
            answers = await asyncio.gather(*sent, return_exceptions=True)
            unanswered = []
            for item, answer in zip(items, answers, strict=True):
                if isinstance(answer, NoStreamResponseError):
                    unanswered.append(item)
                elif isinstance(answer, BaseException):
                    raise answer
            return unanswered
        client = self._connection.client
        for data, headers in items:
            await client.publish(self.subject, data, headers=headers)
        await client.flush(self._access.timeout)
        return []

    def wait_ready(self, subscribers: int = 1, timeout: float | None = None) -> bool:
        """Wait for the connection only: a NATS server does not say who subscribes."""
        check_subscribers(subscribers)
        self._check()
        end = None if timeout is None else time.monotonic() + (check_timeout(timeout) or 0)
        while not self._connection.client.is_connected:
            self._check()
            if end is not None and time.monotonic() >= end:
                return False
            time.sleep(0.02)
        return True

    def _check(self) -> None:
        self._connection.refuse_child("this publisher")
        if self.closed:
            raise ClosedError("this publisher was closed")

    @property
    def ledger(self) -> Ledger:
        """A snapshot of the counts; delivered: the server has it, with ``jetstream`` its stream."""
        if self._final is not None:
            return self._final
        found = self._counters.snapshot()
        dropped = {reason: count for reason, count in found["dropped"].items() if count}
        matched, delivered = found["matched"], found["delivered"]
        return Ledger(matched, delivered, dropped, 0, matched - delivered - sum(dropped.values()))

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._final is not None

    def close(self) -> None:
        """Send what is pending, and leave."""
        if self._connection.forked:  # before the lock, which another thread may have held at the fork
            return
        with self._lock:
            if self._final is not None:
                return
            self._connection.close()
            self._final = self.ledger
            self._counters.close()


def _bytes(data: Any) -> bytes:
    """A copy of the bytes. Refuses a text, and a number, which ``bytes`` would take as a size."""
    try:
        view = memoryview(data)
    except TypeError:
        raise TypeError(f"publish takes bytes or a buffer, not {type(data).__name__}; encode it first") from None
    if getattr(getattr(data, "dtype", None), "hasobject", False) or view.format.endswith("O"):
        raise TypeError(
            f"publish takes bytes or a buffer of values, not {type(data).__name__} of Python objects (dtype object): "
            "it holds their addresses in this process; convert it, as in array.astype(float)"
        )
    return bytes(view)
