"""Endpoints: addresses as ends of links. An endpoint is a module whose other side is a channel.

Messages from the channel are published as the endpoint's own; messages from modules are sent to the channel, all that
wait together. Properties travel along (``carriage.py``). The two roles are opened when a link asks for them, and closed
together. A broker or a tcp publisher that cannot be reached yet is waited for, and this is logged.

A queue of a broker (``?queue=NAME``) is durable: its messages are acknowledged when every linked module has handled
them, and are redelivered after a crash.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from penstock import address
from penstock._core.broker import redelivered_count
from penstock._core.gateway import GatewayMessage
from penstock.carry import not_held_of
from penstock.channel import Publisher, Subscriber
from penstock.errors import ClosedError, PenstockError, UnreachedError
from penstock.gateway import carriage
from penstock.gateway.durable import Forwarder
from penstock.gateway.module import Module
from penstock.throttle import Throttle
from penstock.types import Schema, Terms
from penstock.types.fields import Step, Values

BATCH = 256
MAX_DONE = 4096  # acknowledged messages of a broker's queue whose copies are still recognized
READ_TIMEOUT_S = 0.2
FIRST_TRY_S = 2.0  # how long creating a gateway waits for a broker; after that a thread goes on waiting
RETRY_S = 1.0
log = logging.getLogger("penstock.gateway")


class Endpoint(Module):
    """One address, read, written or both."""

    def __init__(self, text: str) -> None:
        self.name = address.without_secrets(text)
        self._text = text
        self._waits = address.parse(text).scheme == "broker"  # its server may be started later
        self.durable = is_durable(text)
        self._options: dict[str, Any] = {"ack": "manual"} if self.durable else {}
        self._subscriber: Subscriber | None = None
        self._publisher: Publisher | None = None
        self._topic = address.parse(text).topic or None
        self._channel_values: Values | None = None
        self._reads = False
        self._bare = False  # send content without properties
        self._reader: Forwarder | _Reader | None = None
        self._stopping = threading.Event()
        self._started = False
        self._beginning = threading.Lock()
        self._throttle = Throttle(log)

    def open(self, *, reads: bool, writes: bool) -> None:
        """Open the roles that are asked for and not open yet. Call ``read`` when the link exists."""
        if writes and self._publisher is None:
            self._publisher = self._first_try(address.publisher, {})
        if reads and not self._reads:
            self._subscriber = self._first_try(address.subscriber, self._options)
            self._reads = True

    def announce(self, schema: Schema) -> None:
        """Announce the schema of what is sent at this address. ``RefusedError`` if the channel has another type.

        If the channel carries no properties, only the content is sent from now on: the byte form that includes
        properties would not match the schema.
        """
        if self._publisher is not None:
            self._publisher.agree(Terms(schema, writes=True))
            self._bare = not self._publisher.carries_properties

    def compare(self, schema: Schema) -> None:
        """``RefusedError`` if the channel announces another schema for its messages."""
        text = None if self._subscriber is None else self._subscriber.schema
        if text:
            Terms(schema, writes=False).check(text, self.name)

    def channel_value(self, message: GatewayMessage) -> Any:
        """The value of a message from this channel, decoded by the channel's schema; ``ValueError`` if it does not
        match.
        """
        if self._channel_values is None and self._subscriber is not None:
            self._channel_values = Values(self._subscriber)
        if self._channel_values is None:
            raise ValueError("nobody reads here")
        return self._channel_values.read(message, self._topic)

    def check_fields(self, paths: Iterable[Sequence[Step]]) -> None:
        """``InvalidArgument`` if the channel has a schema and that has no such field."""
        if self._channel_values is not None:
            self._channel_values.check(self._topic, paths)

    def start(self) -> None:
        """Begin to read, if anything is linked to this end."""
        self._started = True
        self.read()

    def read(self) -> None:
        """Begin to read, if that was asked for and it was started."""
        with self._beginning:
            if self._reads and self._started and self._reader is None:
                self._read()

    def _first_try(self, role: Callable[..., Any], options: dict[str, Any]) -> Any:
        if not self._waits:
            return role(self._text, **options)
        try:
            return role(self._text, **options, **self._timeout(FIRST_TRY_S))
        except (TimeoutError, ConnectionError) as error:
            log.warning("%s is not there yet and is waited for: %s", self.name, error)
            return None

    def _timeout(self, seconds: float) -> dict[str, float]:
        return {} if "timeout" in address.parse(self._text).options else {"timeout": seconds}

    def _await(self, role: Callable[..., Any], options: dict[str, Any]) -> Any:
        """Wait until a role can be opened, and open it; None if the endpoint is stopped before."""
        while not self._stopping.is_set():
            try:
                opened = role(self._text, **options, **self._timeout(FIRST_TRY_S))
            except (PenstockError, OSError) as error:
                self._throttle.error("%s is still waited for: %s", self.name, error)
                self._stopping.wait(RETRY_S)
            else:
                log.warning("%s is there", self.name)
                return opened
        return None

    def _read(self) -> None:
        if self.durable:
            self._reader = Forwarder(self, self._queue, self._forward)
        else:
            self._reader = _Reader(self)
        self._reader.start()

    def _opened(self) -> Subscriber | None:
        if self._subscriber is None:
            self._subscriber = self._await(address.subscriber, self._options)
        return self._subscriber

    def _queue(self) -> Any:
        subscriber: Any = self._opened()
        return None if subscriber is None else _BrokerQueue(subscriber)

    def wait_ready(self, subscribers: int = 1, timeout: float | None = None) -> bool:
        """Wait until the channel has this many subscribers, so that they miss nothing that is sent afterwards."""
        return self._publisher is None or self._publisher.wait_ready(subscribers, timeout)

    def receive(self, message: GatewayMessage) -> None:
        """Send one message."""
        self.receive_many([message])

    def receive_many(self, messages: Sequence[GatewayMessage]) -> None:
        """Send them together; waits for a server that cannot be reached."""
        if self._publisher is None:
            self._publisher = self._await(address.publisher, {})
        if self._publisher is None:
            raise ClosedError(f"{self.name} was not there")
        if self._bare and any(message.encoded_properties for message in messages):
            self._throttle.error("%s carries no properties beside a type: they are not sent", self.name)
        carriage.send(self._publisher, messages, bare=self._bare)

    def _forward(self, data: Any) -> None:
        self.broker.publish(self, carriage.arrived(data))

    def stop(self) -> None:
        """Stop reading; what was read from a durable queue is acknowledged first."""
        self._stopping.set()
        if self._reader is not None:
            self._reader.stop()

    def kill(self) -> None:
        """End all waits: what was read from a durable queue and not handled will be redelivered."""
        self._stopping.set()
        if self._reader is not None:
            self._reader.cut()

    def destroy(self) -> None:
        """Close both roles."""
        self.kill()
        self.stop()
        for handle in (self._subscriber, self._publisher):
            if handle is not None:
                handle.close()


def is_durable(text: str) -> bool:
    """Whether the address keeps its messages until they were handled."""
    parsed = address.parse(text)
    return parsed.scheme == "broker" and "queue" in parsed.options and "ack" not in parsed.options


class _Reader:
    """Publishes the messages of a channel without acknowledgements."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._stopping = threading.Event()
        self._begun = False  # a message has come
        self._absent = False  # it was told that nobody serves the address
        self._tell_s = time.monotonic() + FIRST_TRY_S
        self._thread = threading.Thread(target=self._run, name=f"{endpoint.name} reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not threading.current_thread():
            self._thread.join(10)

    def cut(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        endpoint = self._endpoint
        subscriber = endpoint._opened()
        while subscriber is not None and not self._stopping.is_set():
            try:
                # Keep no reference: a batch that is alive while the next one is read may hold slots of the channel.
                self._forward_all(subscriber.read_many(BATCH, READ_TIMEOUT_S))
                self._tell_presence(subscriber)
            except (PenstockError, OSError) as error:
                if isinstance(error, ClosedError) and not isinstance(error, UnreachedError):
                    return
                endpoint._throttle.error("reading %s failed: %s", endpoint.name, error)
                if self._stopping.wait(RETRY_S):
                    return

    def _tell_presence(self, subscriber: Any) -> None:
        """Over tcp: tell once that a publisher is not there, and once that it has come."""
        missing = [session for session in getattr(subscriber, "sessions", ()) if not session.connected]
        if missing and not self._absent and time.monotonic() >= self._tell_s:
            self._absent = True
            reason = missing[0].last_error or "no answer"
            log.warning("%s is not there yet and is waited for: %s", self._endpoint.name, reason)
        elif self._absent and not missing:
            self._absent, self._tell_s = False, math.inf
            log.warning("%s is there", self._endpoint.name)
        elif not missing:
            self._tell_s = math.inf  # the room itself tells about a connection that is lost later

    def _forward_all(self, batch: Any) -> None:
        if not self._begun and len(batch):
            self._begun = True
            if lost := not_held_of(batch[0]):
                log.warning("%s: modules do not see %s of messages", self._endpoint.name, " and ".join(lost))
        for data in batch:
            try:
                self._endpoint._forward(data)
            except TimeoutError as error:  # counted by the broker already
                self._endpoint._throttle.error("%s: %s", self._endpoint.name, error)
            with contextlib.suppress(PenstockError):
                data.release()


class _BrokerQueue:
    """A broker's queue for ``Forwarder``. The broker sends a message again when it was not acknowledged in time. Such a
    copy is left out while this end holds the message, because a sink tries it again: its acknowledgement is for both.
    A copy that was on its way when the message was acknowledged is acknowledged too. Single messages are looked at only
    from the first one that was sent again on, until many were acknowledged without a copy.
    """

    def __init__(self, subscriber: Any) -> None:
        self._subscriber = subscriber
        # by id: each batch that was read, how many of it are neither acknowledged nor returned, and which parts are
        self._open: dict[int, tuple[Any, list[int], list[tuple[int, int]]]] = {}
        self._held: set[_Key] | None = None  # the messages of these batches that are neither; None: not looked at
        self._copied: set[_Key] = set()  # those of them that were sent again
        self._done: dict[_Key, None] = {}  # the last ones that were acknowledged
        self._since_copy = 0  # how many were acknowledged since the last copy

    def read_many(self, most: int, timeout: float) -> Any:
        """What comes, without such copies."""
        batch = self._subscriber.read_many(most, timeout)
        left_out = 0
        while self._has_sent_again(batch):
            fresh = self._without_copies(batch)
            left_out += len(batch) - len(fresh)
            batch = fresh
            if fresh or left_out >= most:
                break
            batch = self._subscriber.read_many(most, 0)  # copies come one by one
        if len(batch):
            self._open[id(batch)] = batch, [len(batch)], []
            if self._held is not None:
                self._held.update(_keys(batch))
        return batch

    def _has_sent_again(self, batch: Any) -> bool:
        if isinstance(batch, list):
            return any(self._subscriber.deliveries(message) > 1 for message in batch)
        return redelivered_count(batch) > 0

    def _without_copies(self, batch: Any) -> list[Any]:
        if self._held is None:
            self._held = {key for read, _, parts in self._open.values() for key in _keys_but(read, parts)}
        fresh = []
        for message, key in zip(batch, _keys(batch), strict=True):
            again = self._subscriber.deliveries(message) > 1  # otherwise the queue was set back by a user
            if again and key in self._done:
                self._subscriber.ack_many([message], 0, 1)
            elif again and key in self._held:
                self._copied.add(key)
            else:
                self._held.add(key)
                fresh.append(message)
        self._since_copy = 0
        return fresh

    def ack_many(self, batch: Any, begin: int, end: int) -> None:
        """Acknowledge them."""
        if self._held is None:
            self._subscriber.ack_many(batch, begin, end)
        else:  # one by one: a range would not be for messages in its midst that were sent again
            self._subscriber.ack_many(list(batch[begin:end]), 0, end - begin)
        keys = self._settle(batch, begin, end)
        self._done.update(dict.fromkeys(keys))
        while len(self._done) > MAX_DONE:
            del self._done[next(iter(self._done))]
        self._since_copy += len(keys)
        if self._since_copy >= MAX_DONE and not self._copied:
            self._held, self._since_copy = None, 0
            self._done.clear()

    def nack_many(self, batch: Any, begin: int, end: int) -> None:
        """Return them."""
        for message in batch[begin:end]:
            self._subscriber.nack(message, delay_s=RETRY_S)
        self._settle(batch, begin, end)

    def _settle(self, batch: Any, begin: int, end: int) -> list[_Key]:
        """Note that these are no longer held; returns what tells them apart, if single messages are looked at."""
        _, left, parts = self._open[id(batch)]
        left[0] -= end - begin
        parts.append((begin, end))
        if left[0] == 0:
            del self._open[id(batch)]
        if self._held is None:
            return []
        keys = _keys(batch, begin, end)
        self._held.difference_update(keys)
        self._copied.difference_update(keys)
        return keys


_Key = tuple[int, int]


def _keys(batch: Any, begin: int = 0, end: int | None = None) -> list[_Key]:
    """What tells each message of a part of the batch from all others of its queue. When a broker has taken over for
    another one, it may give the last positions again.
    """
    if isinstance(batch, list):
        return [(message.position or 0, message.timestamp_ns) for message in batch[begin:end]]
    return list(zip(batch.positions[begin:end], batch.timestamps_ns[begin:end], strict=True))


def _keys_but(batch: Any, parts: Sequence[tuple[int, int]]) -> set[_Key]:
    """Those of the batch without these parts."""
    return set(_keys(batch)).difference(*(_keys(batch, *part) for part in parts))
