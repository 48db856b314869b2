"""Publisher: offers one stream of messages at a port; a subscriber gets every message from when it joined.

Rules:

- ``publish`` may be called by any thread; callers take turns. Without a subscriber it only counts the message.
- Each subscriber has a bounded queue. ``overflow`` says what happens when it is full: ``block`` (wait for it, at most
  ``timeout`` seconds, then ``TimeoutError`` with nothing published), ``drop_oldest`` or ``drop_newest`` (counted).
- It listens on loopback by default. Any other host needs a token, client certificates, or ``insecure=True``. With
  ``port=0`` the system chooses a port; the attribute ``port`` says which.
- The executor's threads accept connections and do their handshakes; messages never pass through those threads.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from penstock._core import tcp as native
from penstock.address import check_host, is_loopback
from penstock.carry import time_of
from penstock.channel import Ledger, Overflow, Terms, check_subscribers, check_timeout, choose
from penstock.channel import Publisher as PublisherContract
from penstock.errors import CapacityError, ClosedError, InvalidArgument, RefusedError
from penstock.history import Opened, kept_of
from penstock.tcp import sockets
from penstock.tcp.executor import READ, Executor, default_executor, weakly
from penstock.tcp.joining import Joining
from penstock.tcp.log import Throttle, logger
from penstock.tcp.past import Feeder, Past
from penstock.tcp.protocol import NEXT_ORDINAL_OFFSET, Agreed, Answer, Wanted

if TYPE_CHECKING:
    import ssl

    from penstock._core import Batch, Draft, Message
    from penstock.channel import Buffer
    from penstock.tcp.tls import Pump

MAX_JOINING = 1024
MAX_FEEDERS = 256  # each has a thread
BACKLOG = 1024
LOG_DROPS_S = 1.0
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True, slots=True)
class SubscriberState:
    """One connected subscriber, as its publisher sees it."""

    address: str
    extended: bool
    ledger: Ledger
    queued_messages: int
    queued_bytes: int


class Publisher(PublisherContract):
    """One port, one stream, any number of subscribers."""

    carries_properties = True

    def __init__(
        self,
        port: int = 0,
        host: str = "127.0.0.1",
        *,
        path: str | None = None,
        overflow: Overflow | str = Overflow.BLOCK,
        timeout: float | None = None,
        depth: int = 32768,
        depth_bytes: int = 16 << 20,
        tls: ssl.SSLContext | None = None,
        token: str | bytes | None = None,
        insecure: bool = False,
        handshake_timeout: float = 10.0,
        close_timeout: float = 5.0,
        keepalive: float | None = 15.0,
        executor: Executor | None = None,
        schema: str = "",
        history: int | str | None = None,
        latest: bool = False,
        history_bytes: int | str | None = None,
        past: Past | None = None,
    ) -> None:
        kept = kept_of(history, latest, history_bytes)
        self._schema = schema
        self.overflow = choose(Overflow, overflow, "overflow")
        if depth < 1 or depth_bytes < 1:
            raise InvalidArgument(f"depth={depth} and depth_bytes={depth_bytes} must be 1 or more")
        block = check_timeout(timeout)
        self.handshake_timeout = check_timeout(handshake_timeout, "handshake_timeout") or 10.0
        self._close_timeout = check_timeout(close_timeout, "close_timeout") or 0.0
        self._keepalive = check_timeout(keepalive, "keepalive")
        self._token = sockets.check_secrets(token, tls, "publisher")
        self._tls = tls
        authenticates = bool(self._token) or (tls is not None and tls.verify_mode.name == "CERT_REQUIRED")
        check_host(host)
        if not (path or insecure or is_loopback(host) or authenticates):
            raise InvalidArgument(
                f"{host} is reachable from other machines: give token= (and tls=), or a tls= that asks for the "
                "certificates of clients, or say insecure=True (in an address: ?insecure=true)"
            )
        self._path = path
        self._past = past
        self._feeders: list[Feeder] = []  # one for each subscriber that began with messages on disk
        self._depths = (depth, depth_bytes)
        self._identity = os.urandom(16) if past is None else past.identity
        self._executor = executor if executor is not None else default_executor()
        self._executor.check_open()
        sockets.check_port(port)
        self._listener = sockets.listen_unix(path, BACKLOG) if path else sockets.listen(host, port, BACKLOG)
        self._owner_pid = os.getpid()
        self.host = host
        self.port: int = 0 if path else self._listener.getsockname()[1]
        self._outlet = native.Outlet(
            self._executor.loop,
            self.overflow.value,
            depth,
            depth_bytes,
            -1.0 if block is None else block,
            self.address,
            *kept.words,
        )
        # The native method itself, so that a message costs no Python frame.
        vars(self)["publish"] = self._outlet.publish
        vars(self)["reserve"] = self._outlet.reserve
        self._outlet.hold(self)
        self._changed = threading.Condition()
        self._names: dict[int, str] = {}
        self._joining: dict[Joining, None] = {}
        self._pumps: weakref.WeakSet[Pump] = weakref.WeakSet()
        self._closing = False
        self._warnings = Throttle()
        self._drop_silent_peers()
        self._logged_drops: dict[int, int] = {}  # by subscriber: how many drops the log has reported
        if logger.isEnabledFor(logging.DEBUG):
            self._log_drops_regularly()
        self._executor.handles.add(self)
        self._executor.watch(self._outlet.gone_fileno(), READ, weakly(self._forget_disconnected))
        self._executor.watch(self._listener.fileno(), READ, weakly(self._accept))
        logger.info("publisher listens at %s", self.address)

    # -- publishing

    def publish(
        self,
        data: Buffer,
        *,
        properties: Mapping[str, str] | None = None,
        vchan_id: int | None = None,
        ordinal: int | None = None,
        timestamp_ns: int | None = None,
        drops: int = 0,
        timeout: float | Literal["as opened"] | None = "as opened",
    ) -> int:
        """Publish a copy of ``data``; gives its ordinal.

        ``timeout`` is for this call what it is for all at opening: seconds to wait for room, None for ever. The other
        arguments (a bridge knows a message's ordinal and time) reach our own peers only; peers of plain
        version 0 get just the bytes.
        """
        return self._outlet.publish(
            data,
            properties=properties,
            vchan_id=vchan_id,
            ordinal=ordinal,
            timestamp_ns=timestamp_ns,
            drops=drops,
            timeout=timeout,
        )

    def publish_many(
        self, batch: Iterable[Buffer], *, timeout: float | Literal["as opened"] | None = "as opened"
    ) -> int:
        """Publish each item of ``batch``, in order and in few system calls; gives how many.

        ``timeout`` is for all of them together; without it each may wait as long as the publisher was opened with.
        """
        return self._outlet.publish_many(batch, timeout=timeout)

    def forward(self, batch: Batch | Sequence[Message]) -> int:
        """Publish messages unchanged: with their ordinals, times, virtual channels and properties."""
        if not isinstance(batch, list):
            return self._outlet.publish_many(batch, True)
        for message in batch:  # of a list, the native core would take the payloads only
            self.publish(
                message, properties=dict(message.properties) or None, vchan_id=message.vchan_id,
                ordinal=message.ordinal, timestamp_ns=time_of(message),
            )  # fmt: skip
        return len(batch)

    def _publish_now(self, data: Buffer, options: Mapping[str, Any]) -> int:
        return self._outlet.publish(data, **options, wait=False)

    def send(self, data: Buffer | list[Buffer] | tuple[Buffer, ...]) -> int:
        """``publish`` by the name that tcp_pubsub uses; a list of buffers becomes one message."""
        if not isinstance(data, list | tuple):
            return self._outlet.publish(data)
        return self._send_gathered(data)

    def _send_gathered(self, parts: Sequence[Any]) -> int:
        views = [memoryview(part).cast("B") for part in parts]
        draft = self._outlet.reserve(sum(view.nbytes for view in views))
        offset = 0
        for view in views:
            offset = draft.write(view, offset)
        ordinal = draft.publish()
        return int(ordinal or 0)

    def reserve(self, size: int) -> Draft:
        """A writable buffer of ``size`` bytes; leaving its ``with`` block publishes it."""
        return self._outlet.reserve(size)

    # -- its address and subscribers

    @property
    def address(self) -> str:
        """The address that a subscriber opens."""
        if self._path:
            return f"tcp://{self._path}"
        return f"tcp://{sockets.name_of((self.host, self.port))}"

    @property
    def subscriber_count(self) -> int:
        """How many subscribers have finished their handshake and are still connected."""
        fed = sum(feeder.outlet.subscriber_count for feeder in list(self._feeders))
        return self._outlet.subscriber_count + fed

    @property
    def subscribers(self) -> list[SubscriberState]:
        """Each subscriber with its own counts."""
        outlets = [self._outlet, *(feeder.outlet for feeder in list(self._feeders))]
        return [self._state(*row) for outlet in outlets for row in outlet.peers()]

    def _state(
        self, number: int, extended: bool, matched: int, delivered: int, full: int, closed: int, depth: int, size: int
    ) -> SubscriberState:
        dropped = {name: n for name, n in (("overflow", full), ("closed", closed)) if n}
        ledger = Ledger(matched, delivered, dropped, 0, matched - delivered - full - closed)
        return SubscriberState(self._names.get(number, "?"), extended, ledger, depth, size)

    @property
    def memory_bytes(self) -> int:
        """How much memory the queues use now."""
        return self._outlet.memory_bytes

    def wait_ready(self, subscribers: int = 1, timeout: float | None = None) -> bool:
        """Wait until so many have joined: everything published later is queued for each of them."""
        check_subscribers(subscribers)
        check_timeout(timeout)
        with self._changed:
            ready = self._changed.wait_for(
                lambda: self._closing or self.subscriber_count >= subscribers, timeout
            )
            if self._closing:
                raise ClosedError("this publisher is closed")
            return ready

    @property
    def ledger(self) -> Ledger:
        """Counts each message once: as delivered when every subscriber was sent it, as lost when one was not.

        The counts of each subscriber are in ``subscribers``.
        """
        matched, delivered, dropped, in_flight = self._outlet.ledger()
        return Ledger(matched, delivered, dropped, 0, in_flight)

    # -- connections, in the executor's threads

    def _accept(self) -> None:
        delay = 0.0
        for _ in range(64):  # at most so many a turn: the thread has other connections to serve
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                break
            except OSError as error:
                if self._closing:
                    return
                if error.errno in OUT_OF_DESCRIPTORS:
                    self._warnings.warn("%s cannot accept: %s", self.address, error.strerror)
                    delay = 0.1  # the listener stays readable: without a pause this would spin
                    break
                continue  # the peer disconnected before it was accepted
            self._begin_handshake(connection, sockets.name_of(address))
        if not self._closing:
            self._resume_accepting(delay)

    def _resume_accepting(self, delay: float) -> None:
        if delay:
            self._executor.call_later(delay, lambda: self._resume_accepting(0))
            return
        with self._changed:
            if not self._closing:
                self._executor.watch(self._listener.fileno(), READ, weakly(self._accept))

    def _begin_handshake(self, connection: socket.socket, name: str) -> None:
        logger.debug("%s: connection from %s", self.address, name)
        with contextlib.suppress(OSError):
            sockets.prepare(connection, self._keepalive)
        if self._tls is not None:
            from penstock.tcp import tls

            try:
                pump = tls.serve(self._executor, connection, self._tls, name)
            except OSError as error:
                self._warnings.warn("%s: %s closed: %s", self.address, name, error)
                connection.close()
                return
            self._pumps.add(pump)
            connection = pump.inner
        joining = Joining(self, connection, name, self._executor)
        with self._changed:
            self._joining[joining] = None
            # A flood of silent connections must not keep new ones out: the oldest handshake goes.
            oldest = next(iter(self._joining)) if len(self._joining) > MAX_JOINING else None
            closing = self._closing
        if closing:  # `close` has begun and may have missed this handshake in its list
            joining.abandon("the publisher was closed")
            return
        if oldest is not None:
            oldest.abandon(f"more than {MAX_JOINING} unfinished handshakes")
        joining.begin()

    def new_answer(self) -> Answer:
        """The protocol state of a new connection."""
        return Answer(self._token, identity=self._identity, schema=self._schema, durable=self.durable)

    @property
    def durable(self) -> bool:
        """Whether its messages are kept on disk, for subscribers with ``start=``."""
        return self._past is not None

    def agree(self, terms: Terms) -> None:
        """Send the schema of ``terms`` in every later handshake. A publisher opened with a type has sent it to all."""
        self._schema = terms.text

    @property
    def schema(self) -> str | None:
        """The schema that its handshake sends, or None."""
        return self._schema or None

    def joined(
        self, joining: Joining, connection: socket.socket, agreed: Agreed, answer: bytes, opened: Opened | None = None
    ) -> None:
        """A handshake has succeeded: hand the connection to the native core."""
        if opened is not None:
            self._begin_past(joining, connection, opened, answer)
            return
        offset = NEXT_ORDINAL_OFFSET if agreed.extended else 0
        with self._changed:
            self._joining.pop(joining, None)
            past = agreed.extended and agreed.wanted.past
            number = self._outlet.add(connection.detach(), agreed.extended, answer, offset, past)
            if number:
                self._names[number] = joining.name
            self._changed.notify_all()
        logger.debug("%s: %s joined, %s", self.address, joining.name, "extended" if agreed.extended else "plain")

    def open_past(self, wanted: Wanted) -> Opened:
        """What a subscriber asked for by ``start=``."""
        assert self._past is not None  # else it was refused
        if len(self._feeders) >= MAX_FEEDERS:
            raise CapacityError(f"{MAX_FEEDERS} subscribers read the past already")
        return self._past.open(wanted.start, *wanted.last)

    def _begin_past(self, joining: Joining, connection: socket.socket, opened: Opened, answer: bytes) -> None:
        source = opened.source
        feeder = Feeder(self, source, joining.name, *self._depths, self._keepalive)
        with self._changed:
            self._joining.pop(joining, None)
            if self._closing:
                connection.close()
                source.close()
                return
            self._feeders.append(feeder)
            feeder.begin(connection, answer)
            self._changed.notify_all()
        logger.debug("%s: %s joined at %d of the past", self.address, joining.name, opened.position)

    def remove_feeder(self, feeder: Feeder) -> None:
        """Its peer has gone."""
        with self._changed:
            self._feeders.remove(feeder)
            self._changed.notify_all()

    def failed(self, joining: Joining, error: BaseException) -> None:
        """A handshake has failed, and its connection is about to be closed; other subscribers are not affected."""
        # While closing, abandoned handshakes are no errors; a refusal is, the peer may have been refused before.
        if isinstance(error, ConnectionError) and not joining.heard:  # somebody looked whether the port is open
            logger.debug("%s: %s closed: %s", self.address, joining.name, error)
        elif not self._closing or isinstance(error, RefusedError):
            self._warnings.warn("%s: %s closed: %s", self.address, joining.name, error)
            self._outlet.error()  # count after logging: who sees the count finds the line in the log

    def remove_joining(self, joining: Joining) -> None:
        """Its connection is closed. Last: until then ``close`` finds it and waits for its lock."""
        with self._changed:
            self._joining.pop(joining, None)

    def _forget_disconnected(self) -> None:
        """Log and forget the subscribers whose connections the native core has closed."""
        with self._changed:
            for number, error, lost, dropped in self._outlet.take_gone():
                self._log_drops_of(number, dropped)
                self._logged_drops.pop(number, None)
                name = self._names.pop(number, "?")
                why = os.strerror(error) if error else "closed by it"
                log = self._warnings.warn if lost and error else logger.debug
                log("%s: %s has gone (%s), %d messages undelivered", self.address, name, why, lost)
            self._changed.notify_all()
            if not self._closing:
                self._executor.watch(self._outlet.gone_fileno(), READ, weakly(self._forget_disconnected))

    def _log_drops_regularly(self) -> None:
        """Log drops every ``LOG_DROPS_S``; started only when debug messages are logged."""
        self._log_all_drops()
        if not self._closing:
            with contextlib.suppress(ClosedError):
                self._executor.call_later(LOG_DROPS_S, weakly(self._log_drops_regularly))

    def _log_all_drops(self) -> None:
        with self._changed:
            for number, _, _, _, dropped, _, _, _ in self._outlet.peers():
                self._log_drops_of(number, dropped)

    def _log_drops_of(self, number: int, dropped: int) -> None:
        """Log how many messages were dropped for one subscriber since the last such line."""
        more = dropped - self._logged_drops.get(number, 0)
        if more and logger.isEnabledFor(logging.DEBUG):
            self._logged_drops[number] = dropped
            name = self._names.get(number, "?")
            logger.debug("%s: %d messages dropped for %s: its queue was full", self.address, more, name)

    def _drop_silent_peers(self) -> None:
        """Disconnect peers that have acknowledged nothing for too long though data was sent, as after a cut cable."""
        if self._keepalive is None or self._closing:
            return
        silence_s = sockets.silence_s(self._keepalive)
        self._outlet.drop_silent(silence_s)
        with contextlib.suppress(Exception):  # the executor may be closed by now
            self._silence_timer = self._executor.call_later(silence_s / 4, weakly(self._drop_silent_peers))

    # -- the end

    @property
    def closed(self) -> bool:
        return self._closing

    def close(self, timeout: float | None = None) -> None:
        """Stop accepting, and send what is queued for at most ``timeout`` seconds (default: ``close_timeout``)."""
        if self._owner_pid != os.getpid():
            return  # a forked child's copy: the connections belong to the parent
        with self._changed:
            if self._closing:
                return
            self._closing = True
            joining = list(self._joining)
            self._changed.notify_all()
        self._stop_listening()
        if self._keepalive is not None:
            self._silence_timer.cancel()
        for one in joining:
            one.abandon("the publisher was closed")
        deadline = time.monotonic() + (self._close_timeout if timeout is None else timeout)
        for feeder in list(self._feeders):
            feeder.end(deadline)
        flushed = self._outlet.drain(max(0.0, deadline - time.monotonic()))
        self._executor.unwatch(self._outlet.gone_fileno())
        self._forget_disconnected()
        if logger.isEnabledFor(logging.DEBUG):
            self._log_all_drops()
        self._outlet.close()
        self._warnings.end()
        for pump in list(self._pumps):  # TLS: what was drained is in the pumps, not yet at the peer
            pump.done.wait(max(0.0, deadline - time.monotonic()))
        logger.info("publisher at %s closed%s", self.address, "" if flushed else ", not everything was sent")

    def _stop_listening(self) -> None:
        if self._listener.fileno() < 0:
            return
        # Unwatch before closing: the number of a closed descriptor may belong to another file at once.
        self._executor.unwatch(self._listener.fileno())
        self._listener.close()
        if self._path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    def __del__(self) -> None:
        """Forgotten: its port is free at once, and a thread of the executor sends what is queued."""
        if vars(self).get("_closing") is False and self._owner_pid == os.getpid():
            self._stop_listening()
            self._executor.handles.add(self)  # add it again, so that the exit handler waits for it
            with contextlib.suppress(ClosedError):
                self._executor.call_soon(partial(Publisher.close, self))

    def end_at_exit(self) -> None:
        """Flush what was published, for at most ``close_timeout``."""
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.subscriber_count} subscriber(s)"
        return f"<tcp.Publisher {self.address}, {state}>"
