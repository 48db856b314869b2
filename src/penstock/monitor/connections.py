"""A connection to the monitor: how long it may take, and how many there may be.

Rules: a peer has ``HEAD_S`` to complete the TLS handshake, and so long again for the head of each request. One that
takes none of its answer for ``STALLED_S`` is cut off. Beyond ``MAX_CONNECTIONS`` a new one takes the place of the one
that has waited longest without asking for anything, so that silent peers keep nobody out; if all are being served, the
new one is closed. All this runs in the server's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["Connection"]

HEAD_S = 10.0
STALLED_S = 10.0
MAX_CONNECTIONS = 256
#: The send buffer of a connection. The system's default may keep megabytes of an answer that nobody reads.
SEND_BUFFER_BYTES = 64 << 10


class Connection(H11Protocol):
    """One connection; uvicorn makes one for each."""

    _head: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _quiet_since_s = 0.0

    @property
    def is_served(self) -> bool:
        """Whether a request has come whose answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._quiet_since_s = time.monotonic()
        self._expect_head()
        if len(self.connections) > MAX_CONNECTIONS:
            others = [one for one in self.connections if isinstance(one, Connection) and not one.is_served]
            oldest = min(others, key=lambda one: one._quiet_since_s)
            # remove it now: its connection_lost comes later, and others may connect before that
            self.connections.discard(oldest)
            oldest._cut_off()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.is_served:
            self._expect_head()
        elif self._head is not None:
            self._head.cancel()
            self._head = None

    def on_response_complete(self) -> None:
        self._quiet_since_s = time.monotonic()
        super().on_response_complete()

    def _expect_head(self) -> None:
        if self._head is None:
            self._head = self.loop.call_later(HEAD_S, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head = None
        if not self.is_served:
            self._cut_off()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    def _watch_writing(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._stalled = self.loop.call_later(STALLED_S, self._writing_goes_on, left)

    def _writing_goes_on(self, before: int) -> None:
        """Cut the peer off if it has read nothing since; a slow one may go on."""
        if self.transport.get_write_buffer_size() >= before:
            self._cut_off()
        else:
            self._watch_writing()

    def _cut_off(self) -> None:
        """End the connection with a reset: after a normal close the system would keep the unread data."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._descriptor())) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _descriptor(self) -> int:
        return int(self.transport.get_extra_info("socket").fileno())
