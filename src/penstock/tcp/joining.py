"""Joining: a publisher's side of one handshake, from the accepted connection to the new subscriber.

Rules: one executor thread at a time serves it. It ends within ``handshake_timeout`` in exactly one of two ways: the
native core owns the socket (``Publisher.joined``), or it is closed with a reason (``Publisher.failed``).
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING

from penstock.errors import CorruptionError, PenstockError, ProtocolError, RefusedError
from penstock.history import Opened
from penstock.tcp.executor import READ, Executor
from penstock.tcp.past import ALL
from penstock.tcp.protocol import DAMAGED, Agreed, FrameType, frame

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
        self.heard = False  #: whether the peer has sent anything
        self._ended = False
        self._lock = threading.RLock()  # a finaliser may close the publisher inside a call of its own thread
        self._timer = executor.call_later(publisher.handshake_timeout, self._on_timeout)

    def begin(self) -> None:
        self._executor.watch(self._socket.fileno(), READ, self._on_readable)

    def _on_readable(self) -> None:
        with self._lock:
            if self._ended:
                return
            try:
                agreed = self._receive()
            except (PenstockError, OSError) as error:
                if not self._ended:
                    self._fail(error)
                return
            if self._ended:  # a finaliser in this thread may have closed the publisher in the meantime
                return
            if agreed is None:
                self._executor.watch(self._socket.fileno(), READ, self._on_readable)
            else:
                self._join(agreed)

    def _receive(self) -> Agreed | None:
        while True:
            try:
                data = self._socket.recv(self._answer.needs)
            except BlockingIOError:
                return None
            if not data:
                raise ConnectionAbortedError("closed before its handshake")
            self.heard = True
            try:
                agreed = self._answer.feed(data)
            finally:
                self._send()  # also after an error: a refusal has to reach the peer
            if agreed is not None:
                return agreed

    def _send(self) -> None:
        """Send a challenge or a refusal: a few bytes, which fit into the empty send buffer of any honest peer."""
        if self._answer.outgoing:
            data = bytes(self._answer.outgoing)
            self._answer.outgoing.clear()
            if self._socket.send(data) != len(data):
                raise ProtocolError("does not read its handshake")

    def _join(self, agreed: Agreed) -> None:
        opened: Opened | None = None
        if agreed.wanted.start:
            try:
                opened = self._publisher.open_past(agreed.wanted)
            except Exception as error:  # whatever a peer asked for: it alone is closed, and told why
                said = f"{DAMAGED}: {error}" if isinstance(error, CorruptionError) else str(error)
                with contextlib.suppress(OSError):
                    self._socket.send(frame(FrameType.REFUSED, said.encode()))
                self._fail(error)
                return
        places = (0, 0) if opened is None else (opened.position, opened.frontier)
        past = ALL if self._publisher.durable else 0
        answer = self._answer.answer(agreed, time.time_ns(), places[0], past, places[1])
        self._finish()
        self._publisher.joined(self, self._socket, agreed, answer, opened)

    def _finish(self) -> None:
        self._ended = True
        self._timer.cancel()
        self._executor.unwatch(self._socket.fileno())

    def _fail(self, error: BaseException) -> None:
        self._finish()
        self._publisher.failed(self, error)  # before the close: whoever sees that finds the reason
        if isinstance(error, RefusedError):
            # Unread bytes would turn the close into a reset, and the refusal would not arrive.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
        self._socket.close()
        self._publisher.remove_joining(self)

    def _on_timeout(self) -> None:
        self.abandon(f"no handshake within {self._publisher.handshake_timeout:g} s")

    def abandon(self, reason: str) -> None:
        """Close the connection with ``reason``, unless the handshake has ended."""
        with self._lock:
            if not self._ended:
                self._fail(ProtocolError(reason))
