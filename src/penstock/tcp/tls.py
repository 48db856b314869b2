"""TLS for our own peers, by Python's ssl, around the same native core.

Job: a pump between an encrypted socket and one end of a local socket pair; the core, the handshake and everything else
work on the other end and never know.

Rules: the executor's threads pump, one at a time for each connection. Each direction holds at most one buffer, so that
back-pressure goes through. Whatever ends one side ends the other, after what was received has been passed on.
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
_warnings = Throttle()  # of all connections together


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
        self._greeted = False
        self._sending = b""  # from the local end, to be encrypted
        self._received = b""  # decrypted, for the local end
        self._local_over = self._outer_over = self._said_goodbye = False
        self._outer_wants = 0
        self._more = False

    def turn(self) -> None:
        """Move what can be moved, then watch for more."""
        with self._lock:
            if self.done.is_set():
                return
            try:
                if not self._greeted:
                    self._greet()
                if self._greeted:
                    self._move()
            except (OSError, ValueError) as error:
                self._fail(error)
                return
            if self._local_over and self._outer_over:
                self._close()
            else:
                self._watch()

    def _greet(self) -> None:
        self._outer_wants = 0
        try:
            self._outer.do_handshake()
            self._greeted = True
        except ssl.SSLWantReadError:
            self._outer_wants = READ
        except ssl.SSLWantWriteError:
            self._outer_wants = WRITE

    def _move(self) -> None:
        """As long as something moves, but no longer than a turn: the thread serves other connections too."""
        self._more = False
        for _ in range(MOVES_PER_TURN):
            self._outer_wants = 0
            moved = self._outward()
            moved = self._inward() or moved
            if not moved:
                return
        self._more = True  # whatever can still go on comes back by epoll, after the others
        self._outer_wants = READ | WRITE

    def _outward(self) -> bool:
        if not self._sending and not self._local_over:
            with contextlib.suppress(BlockingIOError):
                self._sending = self._local.recv(BUFFER_BYTES)
                self._local_over = not self._sending
        if self._sending:
            try:
                self._sending = self._sending[self._outer.send(self._sending) :]
                return True
            except ssl.SSLWantWriteError:
                self._outer_wants |= WRITE
            except ssl.SSLWantReadError:
                self._outer_wants |= READ
        elif self._local_over and not self._said_goodbye:
            self._said_goodbye = True
            with contextlib.suppress(ssl.SSLError, OSError):
                self._outer.unwrap()
            with contextlib.suppress(OSError):
                self._outer.shutdown(socket.SHUT_WR)
            self._outer_over = True  # nothing that still comes can reach anybody
        return False

    def _inward(self) -> bool:
        if not self._received and not self._outer_over:
            try:
                self._received = self._outer.recv(BUFFER_BYTES)
                if not self._received:
                    self._outer_over = True
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
        inner = HANG_UP
        if self._greeted:
            inner = 0 if self._sending or self._local_over else READ
            inner |= WRITE if self._received or self._more else 0
        if self._outer_wants:
            self._executor.watch(self._outer.fileno(), self._outer_wants, self.turn)
        if inner:
            callback = self.turn if self._greeted else self._abandoned
            self._executor.watch(self._local.fileno(), inner, callback)

    def _abandoned(self) -> None:
        """The user of the connection has closed it before it was greeted."""
        with self._lock:
            if not self._greeted and not self.done.is_set():
                self._fail(ConnectionAbortedError("given up before the TLS handshake was done"))

    def _fail(self, error: Exception) -> None:
        self.error = f"TLS: {getattr(error, 'reason', None) or error}"
        _warnings.tell("%s: %s", self._name, self.error)
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
    """Encrypt a connection to ``host``, whose name the certificate must bear unless the context says otherwise."""
    name = None if host.startswith("/") else host
    outer = context.wrap_socket(connection, server_hostname=name, do_handshake_on_connect=False)
    return _start(executor, outer, host)
