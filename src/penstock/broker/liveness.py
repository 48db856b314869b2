"""Whether a TCP peer is still there, judged by what its TCP acknowledges: a peer that is alive but slow counts as
alive.

A peer that has vanished (no power, no network) sends nothing, not even the end of the connection. The kernel probes
idle connections (keepalive). It would repeat unacknowledged data for a quarter of an hour, so ``silent`` notices when
nothing was acknowledged for a while. A peer that does not read has closed its window; the kernel then asks less and
less often, down to every two minutes, whether there is room. So the time since the peer was last heard proves nothing;
data that was sent later and stays unacknowledged does. TCP_USER_TIMEOUT would disconnect such a peer and is not used.
Without TCP_INFO only the kernel's own probes are left. One thread at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import sys
import termios
import time

DEFAULT_S = 15.0
_TICK_S = 0.01  # the kernel counts these times in ticks, of 10 ms at the most
PROBES = 3  # probes in that time
_TCP_INFO = getattr(socket, "TCP_INFO", None)
_REPEATS, _UNANSWERED_PROBES, _UNACKNOWLEDGED_SEGMENTS = 2, 3, 24  # offsets in struct tcp_info
# milliseconds since data was sent, data was received, an acknowledgement was received
_SINCE_SENT, _SINCE_DATA, _SINCE_ACK = 44, 52, 56
_TCP_RTO_MAX_MS = 44  # Linux 6.15: the longest pause between two probes of a closed window, and between two repeats


def _tcp_info(sock: socket.socket) -> bytes:
    """The kernel's struct tcp_info; empty where the system has none."""
    if _TCP_INFO is None:
        return b""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 104)
    except OSError:
        return b""
    return info if len(info) >= _SINCE_ACK + 4 else b""


def _number(info: bytes, offset: int) -> int:
    return int.from_bytes(info[offset : offset + 4], sys.byteorder)


def since_heard_s(sock: socket.socket) -> float | None:
    """Seconds since the peer's TCP was last heard; None where that is not known."""
    info = _tcp_info(sock)
    return min(_number(info, _SINCE_DATA), _number(info, _SINCE_ACK)) / 1e3 if info else None


def owes_answer(sock: socket.socket) -> bool:
    """Whether data or a probe was sent to the peer's TCP and nothing was heard since.

    Without a route (this machine's own cable was pulled) repeats fail and do not count as sent, so they are looked at
    too.
    """
    info = _tcp_info(sock)
    if not info or info[_UNANSWERED_PROBES] or info[_REPEATS]:
        return bool(info)
    heard = min(_number(info, _SINCE_DATA), _number(info, _SINCE_ACK))
    return _number(info, _UNACKNOWLEDGED_SEGMENTS) > 0 and _number(info, _SINCE_SENT) < heard


def unacknowledged_bytes(sock: socket.socket) -> int:
    """Bytes that were written and not yet acknowledged by the peer's TCP."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0\0\0\0"))[0])
    except (OSError, ValueError):
        return 0


class Liveness:
    """Watches one connection."""

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self._socket = sock
        self._seconds = seconds
        self._since = 0.0  # when an answer was first missing, with nothing heard since
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
            self._socket.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, 1000 * interval_s)

    def silent(self) -> bool:
        """Whether the peer has owed an answer for the whole time-out. Call it PROBES times within that time.

        What was sent right after one call is seen by the next, so one interval has passed before it counts.
        """
        now = time.monotonic()
        heard_s = since_heard_s(self._socket) if self._seconds and owes_answer(self._socket) else None
        if heard_s is None:
            self._since = 0.0
            return False
        if not self._since or heard_s < now - self._since:
            self._since = now
        return now - self._since >= self._seconds * (PROBES - 1) / PROBES

    def probe(self) -> bool | None:
        """Probe the peer now. True: it has answered; False: it has missed the probe; None: call again."""
        now = time.monotonic()
        if not self._probed:
            self._probed = now
            self._keepalive(1)
        heard_s = since_heard_s(self._socket)
        limit_s = max(2.5, self._seconds / 5)
        # What was heard in the same tick just before the probe is no answer to it.
        answered = heard_s is None or heard_s + _TICK_S < now - self._probed
        if not answered and now - self._probed < limit_s:
            return None
        self._probed = 0.0
        self._keepalive(max(1, round(self._seconds / PROBES)) if self._seconds else 7200)
        # With a closed window the kernel sends no keepalive, so the peer has missed no probe.
        return answered or (unacknowledged_bytes(self._socket) > 0 and not owes_answer(self._socket))
