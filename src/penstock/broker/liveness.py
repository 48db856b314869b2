"""Whether a TCP peer is still there, told by what it acknowledges: a peer that is alive and slow counts as alive.

A peer that has vanished (no power, no network) sends nothing, not even the end of the connection. The kernel probes
idle connections (keepalive). Data that is under way it would repeat for a quarter of an hour: here ``silent`` notices
that nothing was acknowledged for a while. A peer that reads nothing acknowledges all the same (probes of its closed
window), so TCP_USER_TIMEOUT, which cuts such a peer, is not used. Where the system does not tell (no TCP_INFO) only the
kernel's own probes are left. One thread at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import termios
import time

DEFAULT_S = 15.0
PROBES = 3  # in that time
_TCP_INFO = getattr(socket, "TCP_INFO", None)
_SINCE_DATA, _SINCE_ACK = 52, 56  # in struct tcp_info: milliseconds since data and since an acknowledgement came


def since_heard_s(sock: socket.socket) -> float | None:
    """How long ago the peer's TCP was heard of; None where the system does not tell."""
    if _TCP_INFO is None:
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 104)
        (since_data,), (since_ack,) = (struct.unpack_from("=I", info, at) for at in (_SINCE_DATA, _SINCE_ACK))
        return min(int(since_data), int(since_ack)) / 1e3
    except (OSError, struct.error):
        return None


def unacknowledged_bytes(sock: socket.socket) -> int:
    """What was written and the peer's TCP has not acknowledged."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0\0\0\0"))[0])
    except (OSError, ValueError):
        return 0


class Liveness:
    """Watches one connection."""

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self._socket = sock
        self._seconds = seconds
        self._since = 0.0  # when data was first seen unacknowledged, with nothing heard of the peer since
        self._probed = 0.0
        if seconds:
            self._keepalive(max(1, round(seconds / PROBES)))

    def _keepalive(self, interval_s: int) -> None:
        options = {"TCP_KEEPIDLE": interval_s, "TCP_KEEPINTVL": interval_s, "TCP_KEEPCNT": PROBES - 1}
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in options.items():
                if hasattr(socket, name):
                    self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def silent(self) -> bool:
        """Whether something was sent and nothing was heard of the peer for the time. To be asked again and again."""
        now = time.monotonic()
        heard_s = since_heard_s(self._socket) if self._seconds and unacknowledged_bytes(self._socket) else None
        if heard_s is None:
            self._since = 0.0
            return False
        if not self._since or heard_s < now - self._since:
            self._since = now
        return now - self._since >= self._seconds

    def probe(self) -> bool | None:
        """Ask the peer now. True: it has answered; False: it has missed the probe; None: ask this again."""
        now = time.monotonic()
        if not self._probed:
            self._probed = now
            self._keepalive(1)
        heard_s = since_heard_s(self._socket)
        limit_s = max(2.5, self._seconds / 5)
        answered = heard_s is None or heard_s < now - self._probed
        if not answered and now - self._probed < limit_s:
            return None
        self._probed = 0.0
        self._keepalive(max(1, round(self._seconds / PROBES)) if self._seconds else 7200)
        return answered
