"""Session: one subscriber's connection to one publisher: connects, does the handshake, and reconnects when it breaks.

Rules:

- Hosts are tried in turn, on any failure to connect. After the whole list has failed there is a pause that doubles up
  to ``reconnect_delay_max``, with jitter. More than ``max_reconnects`` failures in a row end the session (-1: never).
  A message, or a connection that lasted longer than ``reconnect_delay_max``, resets the count.
- A connection that broke before either, or because of what its publisher sent, counts as a failure: a handshake alone
  does not reset the count.
- The executor's threads connect; the reader reads. It reads the rest of a broken connection before the next one.
- ``cancel`` may be called by any thread. Outside of a callback it waits for a callback that is running.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import os
import random
import select
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError, ProtocolError, RefusedError
from penstock.resolving import resolving
from penstock.tcp import sockets
from penstock.tcp.executor import HANG_UP, READ, WRITE, CollectedError, Timer
from penstock.tcp.log import Throttle, logger
from penstock.tcp.protocol import DAMAGED, NO_NONCE, NO_PAST_HERE, Agreed, Request

if TYPE_CHECKING:
    from penstock.tcp.subscriber import Subscriber
    from penstock.tcp.tls import Pump

Target = tuple[str, int]  # (host, port), or (path, 0) for a unix socket


_chance = random.Random()  # noqa: S311 - its own: a program that seeds the module's (a replay does) gets the same again


class SessionState(enum.StrEnum):
    """What a session is doing."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    WAITING = "waiting"  # until the next attempt to connect
    ENDED = "ended"  # cancelled, refused, or failed more than max_reconnects times


class Session:
    """One of a subscriber's connections."""

    def __init__(self, subscriber: Subscriber, number: int, targets: Sequence[Target], max_reconnects: int) -> None:
        self.number = number
        self.targets = list(targets)
        self.max_reconnects = max_reconnects
        self.last_error: str | None = None
        self.answered = False  #: whether the last attempt was answered, by a refusal or by what is no publisher
        self.disagrees = False  #: whether its publisher's type does not match ours
        self.refused = ""  #: why reading ends, where the publisher cannot give what was asked for
        self.connections = 0
        self.clock_offset_ns: int | None = None
        self.place = 0  #: with ``start=``: the ordinal at which it began
        self.frontier = 0  #: with ``start=``: what was on disk when it joined lies before this ordinal; 0: not known
        self.schema = ""  #: the schema of its messages, from the publisher's handshake
        self._subscriber_reference = weakref.ref(subscriber)  # one that is forgotten is collected, and ends this
        self._executor = subscriber.executor
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._state = SessionState.CONNECTING
        self._target_index = 0
        self._failures = 0
        self._attempt: _Attempt | None = None
        self._timer: Timer | None = None
        self._sockets: dict[int, socket.socket] = {}  # by serial number; old ones stay until they are read to the end
        self._current_serial = 0
        self.identity = NO_NONCE  #: the identity of the publisher it was last connected to
        self._address = ""
        self._connected_at = 0.0
        self._warnings = Throttle()

    @property
    def _subscriber(self) -> Subscriber:
        subscriber = self._subscriber_reference()
        if subscriber is None:
            raise CollectedError("the subscriber of this session is gone")
        return subscriber

    # -- state

    @property
    def state(self) -> SessionState:
        return self._state

    @property
    def connected(self) -> bool:
        return self._state is SessionState.CONNECTED

    @property
    def publisher(self) -> str:
        """The publisher's address: the one it is (or was last) connected to, else the one it tries."""
        return self._address or self._target_name(self.targets[self._target_index])

    def wait_connected(self, timeout: float | None = None) -> bool:
        """Wait until it is connected; False when the time is over or the session has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._state in (SessionState.CONNECTED, SessionState.ENDED), timeout)
            return self.connected

    def cancel(self) -> None:
        """End the session. Afterwards no callback runs for it, except one that calls this."""
        with self._lock:
            self._end("cancelled")
        self._subscriber.forget(self)

    # -- connecting

    def connect(self) -> None:
        """Try the next target."""
        with self._lock:
            if self._state is SessionState.ENDED:
                return
            self._set_state(SessionState.CONNECTING)
            # An attempt that ends late compares itself with this one, and is ignored if it is not the current one.
            self._attempt = _Attempt(self, self.targets[self._target_index])
            attempt = self._attempt
        attempt.begin()

    def failed(self, attempt: _Attempt, error: BaseException) -> None:
        """An attempt failed: try the next host now, or the whole list after a pause."""
        with self._lock:
            if attempt is not self._attempt or self._state is SessionState.ENDED:
                return
            self._attempt = None
            self.last_error, self.answered = str(error), isinstance(error, (RefusedError, ProtocolError))
            # An absent publisher may still come. One that refuses does so until a person changes something: warn.
            log = self._warnings.warn if isinstance(error, RefusedError) else logger.debug
            log("session to %s: %s", self._target_name(attempt.target), error)
            self._target_index = (self._target_index + 1) % len(self.targets)
            lasts = isinstance(error, RefusedError) and any(why in str(error) for why in (NO_PAST_HERE, DAMAGED))
            if lasts and not self._target_index:
                self.refused = f"{self._target_name(attempt.target)}: {error}"
                self._refuse(str(error))
            elif self._target_index:
                self._executor.call_soon(self.connect)
            else:
                self._pause()

    def _pause(self) -> None:
        self._failures += 1
        if 0 <= self.max_reconnects < self._failures:
            self._end(f"{self._failures} attempts failed, the last one: {self.last_error or 'the connection broke'}")
            self._subscriber.ended(self)
            return
        self._set_state(SessionState.WAITING)
        self._timer = self._executor.call_later(self._delay(), self.connect)

    def _delay(self) -> float:
        first, most = self._subscriber.reconnect_delay, self._subscriber.reconnect_delay_max
        return min(most, first * 2.0 ** min(self._failures - 1, 30)) * _chance.uniform(0.5, 1.0)

    def agreed(self, attempt: _Attempt, connection: socket.socket, agreement: Agreed) -> None:
        """The handshake is done: hand the connection to the native core, which reads it."""
        with self._lock:
            if attempt is not self._attempt or self._state is SessionState.ENDED:
                connection.close()  # the session was cancelled while this attempt ended
                return
            self._attempt = None
            self._address = self._target_name(attempt.target)
            self.schema = agreement.schema
            if not self._subscriber._accepts_schema(agreement.schema, self):
                connection.close()
                self._disagree()
                return
            self._subscriber.note_schema(agreement.schema)
            if self.disagrees:
                self.disagrees = False
                self._subscriber.agrees_again()
            # Another identity is another stream: ordinals begin anew and no gap is counted as a loss.
            fresh = agreement.peer_identity != self.identity or not agreement.extended
            self.identity = agreement.peer_identity
            if fresh or not self.frontier:
                self.place, self.frontier = agreement.next_ordinal, agreement.frontier
            if agreement.extended:
                self.clock_offset_ns = agreement.peer_clock_ns - time.time_ns()
            self.connections += 1
            self._connected_at = time.monotonic()
            self._set_state(SessionState.CONNECTED)  # first: whoever has read a message finds its session connected
            serial = self._subscriber.attach(self, connection, agreement, fresh)
            self._sockets[serial] = connection
            self._current_serial = serial
            self._executor.watch(connection.fileno(), HANG_UP, lambda: self._on_hang_up(serial))
        logger.debug("session to %s connected, %s", self._address, "extended" if agreement.extended else "plain")

    def disagree(self) -> None:
        """Its publisher's type does not match ours: reading ends. It goes on when a publisher with another type is
        there, which is looked for as for one that cannot be reached."""
        with self._lock:
            self._current_serial = 0
            self._disagree()

    def _disagree(self) -> None:
        why = str(self._subscriber.refusal)
        if not self.disagrees or why != self.last_error:
            logger.warning("session to %s: %s", self.publisher, why)
        self.last_error, self.disagrees = why, True
        self._subscriber.check_end(self)
        self._pause()

    def _refuse(self, why: str) -> None:
        self.last_error = why
        self._end(why)
        self._subscriber.ended(self)

    # -- the end of a connection

    def _on_hang_up(self, serial: int) -> None:
        """The publisher has closed the connection: reconnect. The reader still reads what it sent before."""
        with self._lock:
            connection = self._sockets.get(serial)
            if serial != self._current_serial or connection is None:
                return
            if not _has_hung_up(connection):  # the event was for an older socket with the same descriptor
                self._executor.watch(connection.fileno(), HANG_UP, lambda: self._on_hang_up(serial))
                return
            self._current_serial = 0
            # Whether messages came is known only when the reader has read them; `lost` then resets the count.
            self._reconnect(good=self._connection_lasted())

    def _connection_lasted(self) -> bool:
        return time.monotonic() - self._connected_at > self._subscriber.reconnect_delay_max

    def lost(self, serial: int, reason: str, error: int, messages: int) -> None:
        """The reader has read a connection to its end: close it. Called in the reader's thread."""
        with self._lock:
            connection = self._sockets.pop(serial, None)
            if connection is None:
                return
            self._executor.unwatch(connection.fileno())
            connection.close()
            bad = reason in ("bad_header", "too_large")
            if messages and not bad:
                self._failures = 0
            if logger.isEnabledFor(logging.DEBUG):
                lost = dict(self._subscriber.ledger.dropped)
                logger.debug("session to %s: %d messages came, lost so far: %s", self._address, messages, lost or 0)
            self._log_end_of_connection(reason, error)
            if serial == self._current_serial:
                self._current_serial = 0
                self._reconnect(good=not bad and (messages > 0 or self._connection_lasted()))

    def _log_end_of_connection(self, reason: str, error: int) -> None:
        texts = {
            "closed": "closed by the publisher",
            "bad_header": "a header that cannot be: closed",
            "too_large": f"a message of more than max_message_size={self._subscriber.max_message_size}: closed",
        }
        text = texts.get(reason) or os.strerror(error)
        self.last_error = text
        bad = reason in ("bad_header", "too_large")
        (self._warnings.warn if bad else logger.debug)("session to %s: %s", self._address, text)
        if bad:
            self._subscriber.count_error()  # count after logging: who sees the count finds the line in the log

    def _reconnect(self, good: bool) -> None:
        """Schedule the next attempt: soon after a ``good`` connection, else with the growing pause."""
        if self._state is SessionState.ENDED:
            return
        if self.max_reconnects == 0:
            self._end("the connection broke")
            self._subscriber.ended(self)
            return
        self._target_index = 0
        if not good:
            self._pause()
            return
        self._failures = 0
        self._set_state(SessionState.WAITING)
        first = self._subscriber.reconnect_delay
        # A random delay, so that all subscribers of a restarted publisher do not connect at once.
        self._timer = self._executor.call_later(first * _chance.uniform(0.0, 1.0), self.connect)

    def _end(self, why: str) -> None:
        """The caller holds the lock. Sockets stay open until the reader has read them to the end."""
        if self._state is SessionState.ENDED:
            return
        self._set_state(SessionState.ENDED)
        logger.debug("session to %s ended: %s", self.publisher, why)
        if self._timer is not None:
            self._timer.cancel()
        if self._attempt is not None:
            self._attempt.abandon()
            self._attempt = None

    def close_sockets(self) -> None:
        """Close all sockets; call this after the native core has let go of them."""
        with self._lock:
            for connection in self._sockets.values():
                self._executor.unwatch(connection.fileno())
                connection.close()
            self._sockets.clear()

    def end_quietly(self) -> None:
        """End the session because its subscriber is being closed."""
        with self._lock:
            self._end("the subscriber was closed")

    def _set_state(self, state: SessionState) -> None:
        self._state = state
        self._changed.notify_all()

    @staticmethod
    def _target_name(target: Target) -> str:
        host, port = target
        return f"tcp://{host}" if host.startswith("/") else f"tcp://{sockets.name_of((host, port))}"

    def __repr__(self) -> str:
        return f"<tcp.Session {self.publisher}, {self._state}>"


def _has_hung_up(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))


class _Attempt:
    """One attempt to connect and shake hands: each address of a host in turn, all within ``handshake_timeout``."""

    def __init__(self, session: Session, target: Target) -> None:
        self.target = target
        self._session = session
        self._executor = session._executor
        self._lock = threading.RLock()
        self._socket: socket.socket | None = None
        self._addresses: list[tuple[int, Any]] = []
        self._request: Request | None = None
        self._pump: Pump | None = None
        self._ended = False
        self._error: BaseException = OSError(errno.EHOSTUNREACH, "no address")
        self._timeout = session._subscriber.handshake_timeout
        self._timer = self._executor.call_later(self._timeout, self._on_timeout)

    def begin(self) -> None:
        host, port = self.target
        try:
            if host.startswith("/"):
                self._addresses = [(socket.AF_UNIX, host)]
            else:
                with resolving(host):
                    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                self._addresses = [(family, address) for family, _, _, _, address in found]
        except OSError as error:
            self._error = error
        self._try_next_address()

    def _try_next_address(self) -> None:
        with self._lock:
            if self._ended:
                return
            self._drop_socket()
            if not self._addresses:
                self._fail(self._error)
                return
            family, address = self._addresses.pop(0)
            try:
                self._socket = socket.socket(family, socket.SOCK_STREAM)
                sockets.prepare(self._socket, self._session._subscriber.keepalive)
                error = self._socket.connect_ex(address)
                if error not in (0, errno.EINPROGRESS):
                    raise OSError(error, os.strerror(error))
                self._executor.watch(self._socket.fileno(), WRITE, self._connected)
            except OSError as error:
                self._error = error
                self._try_next_address()

    def _connected(self) -> None:
        with self._lock:
            if self._ended or self._socket is None:
                return
            error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self._error = OSError(error, os.strerror(error))
                self._try_next_address()
                return
            if self._session._subscriber.tls is not None:
                from penstock.tcp import tls

                self._executor.unwatch(self._socket.fileno())
                self._pump = tls.connect(self._executor, self._socket, self._session._subscriber.tls, self.target[0])
                self._socket = self._pump.inner
            self._request = self._session._subscriber.new_request(self._session)
        self._continue_handshake()  # without our lock: it may call the session, whose lock is always taken first

    def _continue_handshake(self) -> None:
        """Send and receive until both sides agree, or until there is nothing more to read now."""
        with self._lock:
            if self._ended or self._socket is None or self._request is None:
                return
            try:
                agreement = self._exchange_frames(self._socket, self._request)
            except (PenstockError, OSError) as error:
                why = self._pump.error if self._pump is not None else None
                self._error = ProtocolError(why) if why else error
                self._addresses.clear()  # a peer answered: the host's other addresses would not help
                self._try_next_address()
                return
            if agreement is None:
                self._executor.watch(self._socket.fileno(), READ, self._continue_handshake)
                return
            connection, self._socket = self._socket, None
            self._executor.unwatch(connection.fileno())
            self._finish()
        self._session.agreed(self, connection, agreement)

    @staticmethod
    def _exchange_frames(connection: socket.socket, request: Request) -> Agreed | None:
        while True:
            if request.outgoing:
                connection.sendall(request.outgoing)
                request.outgoing.clear()
            try:
                data = connection.recv(request.needs)
            except BlockingIOError:
                return None
            if not data:
                raise ProtocolError("closed before the handshake was answered")
            agreement = request.feed(data)
            if agreement is not None:
                return agreement

    def _on_timeout(self) -> None:
        with self._lock:
            if not self._ended:
                self._fail(TimeoutError(f"no handshake within {self._timeout:g} s"))

    def _fail(self, error: BaseException) -> None:
        self._finish()
        self._drop_socket()
        # Not called here: our lock is held, and the session's lock must be taken first.
        self._executor.call_soon(lambda: self._session.failed(self, error))

    def _finish(self) -> None:
        self._ended = True
        self._timer.cancel()

    def _drop_socket(self) -> None:
        if self._socket is not None:
            self._executor.unwatch(self._socket.fileno())
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None

    def abandon(self) -> None:
        with self._lock:
            if not self._ended:
                self._finish()
                self._drop_socket()
