"""TLS for our own peers, by Python's ssl, around the same native core.

Job: a pump copies between an encrypted socket and one end of a local socket pair. The core, the handshake and
everything else use the other end as if it were a plain connection.

Rules: the executor's threads pump, one at a time for each connection. Each direction holds at most one buffer, so that
back-pressure passes through. When one side ends, the other is ended after everything received has been passed on.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading

from penstock.tcp.executor import HANG_UP, READ, WRITE, Executor
from penstock.tcp.log import Throttle

BUFFER_BYTES = 64 * 1024
MOVES_PER_TURN = 32
_warnings = Throttle()  # shared by all connections


class Pump:
    """One encrypted connection. ``inner`` is the end to use; ``done`` is set when both sides are closed."""

    def __init__(self, executor: Executor, outer: ssl.SSLSocket, name: str) -> None:
        self.inner, self._local = socket.socketpair()
        self.inner.setblocking(False)
        self._local.setblocking(False)
        self.error: str | None = None
        self.done = threading.Event()
        self._outer = outer
        self._executor = executor
        self._name = name
        self._lock = threading.Lock()
        self._handshake_done = False
        self._sending = b""  # from the local end, to be encrypted
        self._received = b""  # decrypted, for the local end
        self._local_ended = self._outer_ended = self._close_notify_sent = False
        self._outer_wants = 0
        self._turn_limit_reached = False

    def turn(self) -> None:
        """Copy what can be copied now, then watch for more."""
        with self._lock:
            if self.done.is_set():
                return
            try:
                if not self._handshake_done:
                    self._handshake()
                if self._handshake_done:
                    self._move()
            except (OSError, ValueError) as error:
                self._fail(error)
                return
            if self._local_ended and self._outer_ended:
                self._close()
            else:
                self._watch()

    def _handshake(self) -> None:
        self._outer_wants = 0
        try:
            self._outer.do_handshake()
            self._handshake_done = True
        except ssl.SSLWantReadError:
            self._outer_wants = READ
        except ssl.SSLWantWriteError:
            self._outer_wants = WRITE

    def _move(self) -> None:
        """Copy in both directions until nothing moves, or until the turn is over: other connections need the thread."""
        self._turn_limit_reached = False
        for _ in range(MOVES_PER_TURN):
            self._outer_wants = 0
            moved = self._encrypt()
            moved = self._decrypt() or moved
            if not moved:
                return
        self._turn_limit_reached = True  # epoll brings us back after the other connections
        self._outer_wants = READ | WRITE

    def _encrypt(self) -> bool:
        if not self._sending and not self._local_ended:
            with contextlib.suppress(BlockingIOError):
                self._sending = self._local.recv(BUFFER_BYTES)
                self._local_ended = not self._sending
        if self._sending:
            try:
                self._sending = self._sending[self._outer.send(self._sending) :]
                return True
            except ssl.SSLWantWriteError:
                self._outer_wants |= WRITE
            except ssl.SSLWantReadError:
                self._outer_wants |= READ
        elif self._local_ended and not self._close_notify_sent:
            self._close_notify_sent = True
            # Sends close_notify; the peer's answer is not awaited, since a silent peer would keep the pump for ever.
            with contextlib.suppress(ssl.SSLError, OSError):
                self._outer.unwrap()
            with contextlib.suppress(OSError):
                self._outer.shutdown(socket.SHUT_WR)
            self._outer_ended = True  # the local end is closed: nobody could read what still arrives
        return False

    def _decrypt(self) -> bool:
        if not self._received and not self._outer_ended:
            try:
                self._received = self._outer.recv(BUFFER_BYTES)
                if not self._received:
                    self._outer_ended = True
                    self._local.shutdown(socket.SHUT_WR)
            except ssl.SSLWantReadError:
                self._outer_wants |= READ
            except ssl.SSLWantWriteError:
                self._outer_wants |= WRITE
        if self._received:
            with contextlib.suppress(BlockingIOError):
                self._received = self._received[self._local.send(self._received) :]
                return True
        return False

    def _watch(self) -> None:
        # During the handshake only a close of the local end matters; its data waits in the socket pair.
        local_wants = HANG_UP
        if self._handshake_done:
            local_wants = 0 if self._sending or self._local_ended else READ  # a full buffer: back-pressure
            local_wants |= WRITE if self._received or self._turn_limit_reached else 0
        if self._outer_wants:
            self._executor.watch(self._outer.fileno(), self._outer_wants, self.turn)
        if local_wants:
            callback = self.turn if self._handshake_done else self._on_local_closed
            self._executor.watch(self._local.fileno(), local_wants, callback)

    def _on_local_closed(self) -> None:
        """The user of the connection has closed it before the TLS handshake was done."""
        with self._lock:
            if not self._handshake_done and not self.done.is_set():
                self._fail(ConnectionAbortedError("given up before the TLS handshake was done"))

    def _fail(self, error: Exception) -> None:
        self.error = f"TLS: {getattr(error, 'reason', None) or error}"
        _warnings.warn("%s: %s", self._name, self.error)
        self._close()

    def _close(self) -> None:
        for one in (self._outer, self._local):
            self._executor.unwatch(one.fileno())
            with contextlib.suppress(OSError):
                one.close()
        self.done.set()


def _start(executor: Executor, outer: ssl.SSLSocket, name: str) -> Pump:
    pump = Pump(executor, outer, name)
    executor.call_soon(pump.turn)
    return pump


def serve(executor: Executor, connection: socket.socket, context: ssl.SSLContext, name: str) -> Pump:
    """Encrypt an accepted connection."""
    outer = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
    return _start(executor, outer, name)


def connect(executor: Executor, connection: socket.socket, context: ssl.SSLContext, host: str) -> Pump:
    """Encrypt a connection to ``host``; its certificate must name ``host`` unless the context says otherwise."""
    name = None if host.startswith("/") else host
    outer = context.wrap_socket(connection, server_hostname=name, do_handshake_on_connect=False)
    return _start(executor, outer, host)
