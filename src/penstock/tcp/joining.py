"""Joining: a connection on its way to becoming a subscriber of a publisher: the handshake, within a time.

Rules: served by one executor thread at a time. It ends in exactly one of two ways: the socket belongs to the native
core (``joined``), or it is closed and the reason told (``failed``).
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING

from penstock.errors import PenstockError, ProtocolError, RefusedError
from penstock.tcp.executor import READ, Executor
from penstock.tcp.past import ALL
from penstock.tcp.protocol import Agreed

if TYPE_CHECKING:
    from penstock.tcp.publisher import Publisher


class Joining:
    """One handshake, on the publisher's side."""

    def __init__(self, publisher: Publisher, connection: socket.socket, name: str, executor: Executor) -> None:
        self.name = name
        self._publisher = publisher
        self._socket = connection
        self._executor = executor
        self._answer = publisher.new_answer()
        self._ended = False
        self._lock = threading.RLock()  # a finaliser may close the publisher inside a call of its own thread
        self._timer = executor.call_later(publisher.handshake_timeout, self._too_late)

    def begin(self) -> None:
        self._executor.watch(self._socket.fileno(), READ, self._readable)

    def _readable(self) -> None:
        with self._lock:
            if self._ended:
                return
            try:
                agreed = self._receive()
            except (PenstockError, OSError) as error:
                if not self._ended:
                    self._fail(error)
                return
            if self._ended:
                return
            if agreed is None:
                self._executor.watch(self._socket.fileno(), READ, self._readable)
            else:
                self._join(agreed)

    def _receive(self) -> Agreed | None:
        while True:
            try:
                data = self._socket.recv(self._answer.needs)
            except BlockingIOError:
                return None
            if not data:
                raise ProtocolError("closed before its handshake")
            try:
                agreed = self._answer.feed(data)
            finally:
                self._send()
            if agreed is not None:
                return agreed

    def _send(self) -> None:
        """A challenge or a refusal: a few bytes into an empty socket, so that what does not fit is no peer of ours."""
        if self._answer.outgoing:
            data = bytes(self._answer.outgoing)
            self._answer.outgoing.clear()
            if self._socket.send(data) != len(data):
                raise ProtocolError("does not read its handshake")

    def _join(self, agreed: Agreed) -> None:
        answer = self._answer.answer(agreed, time.time_ns(), past=ALL if self._publisher.durable else 0)
        self._finish()
        self._publisher.joined(self, self._socket, agreed, answer)

    def _finish(self) -> None:
        self._ended = True
        self._timer.cancel()
        self._executor.unwatch(self._socket.fileno())

    def _fail(self, error: BaseException) -> None:
        self._finish()
        if isinstance(error, RefusedError):  # let the refusal arrive: unread bytes would turn the close into a reset
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
        self._socket.close()
        self._publisher.failed(self, error)

    def _too_late(self) -> None:
        self.abandon(f"no handshake within {self._publisher.handshake_timeout:g} s")

    def abandon(self, reason: str) -> None:
        """Close it for ``reason``, unless it has ended."""
        with self._lock:
            if not self._ended:
                self._fail(ProtocolError(reason))
