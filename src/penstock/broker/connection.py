"""Connection: one client's socket with the scanner, the outbox and the session around it. The loop thread only.

Nothing here blocks. Input is read while the session can handle it. The session delivers nothing more while much output
is pending. A client that does not read its replies is not read from.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass

from penstock._core.broker import Outbox, Scanner
from penstock.broker import words
from penstock.broker.liveness import DEFAULT_S, PROBES, Liveness, unacknowledged_bytes
from penstock.broker.protocol import VERBS, Protocol
from penstock.broker.queue import BUSY
from penstock.broker.session import Host
from penstock.broker.words import Disconnect
from penstock.tcp.protocol import HEADER, FrameType, frame

TURN_S = 0.005  # seconds for one connection's requests, or for all long work, in one turn of the loop
TURN_MESSAGES = 512  # most messages that are published in one step
REPLY_BYTES = 4 << 20  # with more unread output than this, a client is not read from
RECEIVE_BYTES = 256 * 1024
# the greeting of tcp:// without its size; no command starts like this
TCP_BEGINS = frame(FrameType.HANDSHAKE, b"")[: HEADER.size - 8]


@dataclass(frozen=True)
class ConnectionLimits:
    """Bounds on one connection."""

    max_message_bytes: int = 64 << 20
    max_unacknowledged: int = 65_536
    max_rate: float = 0.0  # messages per second; 0: none
    output_bytes: int = 1 << 20
    keepalive_s: float = DEFAULT_S  # a peer that was silent for this long counts as gone; 0: never


class Connection:
    """One client."""

    def __init__(
        self,
        host: Host,
        sock: socket.socket,
        peer: str,
        loopback: bool,
        limits: ConnectionLimits,
        numbers: Callable[[], int],
        touched: Callable[[Connection], None],
        tls: ssl.SSLContext | None,
    ) -> None:
        sock.setblocking(False)
        self.descriptor = sock.fileno()
        self.socket = sock
        self.peer = peer
        self.limits = limits
        self.opened = time.monotonic()
        self.scanner = Scanner("raw", limits.max_message_bytes)
        self.outbox = Outbox()
        self.session = Protocol(
            host,
            self.scanner,
            self.outbox,
            numbers,
            loopback=loopback,
            touched=lambda: touched(self),
            output_bytes=limits.output_bytes,
            max_unacknowledged=limits.max_unacknowledged,
        )
        self.tls: ssl.SSLSocket | None = None
        self.secure = tls is None
        if tls is not None:
            self.tls = tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            self.socket = self.tls
        self.heard = False  # whether anything was received
        self.wants_write = False
        self.ending = False  # close when all output is written
        self.reset = False  # the peer accepts no more output; what it sent before is still read
        self.liveness = Liveness(self.socket, limits.keepalive_s)
        self.look_at = self.opened + limits.keepalive_s / PROBES
        self.unacknowledged = False  # messages are in flight that count as acknowledged when the peer's TCP has them
        self.busy = False  # a long command can continue now
        self.cut = False  # its turn ended before all received input was handled
        self.paused_until = 0.0
        self.received_messages = 0
        self._allowance = limits.max_rate

    @property
    def working(self) -> bool:
        """Whether its input takes more than one turn to handle."""
        return self.cut or self.session.work is not None

    @property
    def could_go_on(self) -> bool:
        """Whether it has work that can be done at once in its next turn."""
        return self.cut or (self.session.work is not None and self.busy)

    # --- input

    def readable(self) -> None:
        """Read input. Raises Disconnect or OSError when the connection is over."""
        if not self.secure and not self._handshake():
            return
        if not self.heard:
            self.heard = True
            if self.tls is None:
                self._refuse_tcp()
        if not self._receive():
            raise Disconnect
        self.scan()

    def _refuse_tcp(self) -> None:
        """Tell a peer that speaks the protocol of tcp:// that this is a broker; it would wait for a greeting for
        ever."""
        if self.socket.recv(len(TCP_BEGINS), socket.MSG_PEEK) != TCP_BEGINS:
            return
        self.socket.recv(RECEIVE_BYTES)  # unread input would reset the connection before the answer has arrived
        host, port = self.socket.getsockname()[:2]
        said = f"a broker listens at this port: broker://{host}:{port}/TOPIC"
        self.socket.send(frame(FrameType.REFUSED, said.encode()))
        raise Disconnect("a tcp:// peer connected to the port of a broker; use broker://")

    def _handshake(self) -> bool:
        assert self.tls is not None
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLWantWriteError:
            self.wants_write = True
            return False
        self.secure = True
        return True

    def _receive(self) -> bool:
        """False at the end of the stream."""
        if self.tls is None:
            return self.scanner.receive(self.descriptor) != 0
        while True:
            try:
                data = self.tls.recv(RECEIVE_BYTES)
            except ssl.SSLWantReadError:
                return True
            except ssl.SSLWantWriteError:
                self.wants_write = True
                return True
            if not data:
                return False
            self.scanner.feed(data)
            if not self.tls.pending():
                return True

    def scan(self) -> None:
        """Handle the input, within the time for all requests of one turn."""
        end = time.monotonic() + TURN_S
        self.cut = False
        while not self.ending and not self.paused():
            # a request that needs several turns is finished first: answers come in the order of requests
            if self.session.work is not None:
                said = self.session.go_on()
                self.busy = said == BUSY
                if said:
                    return
            else:
                event = self.scanner.next(TURN_MESSAGES)
                if event is None:
                    return
                verb, rest, batch = event
                if batch is not None:
                    self._count(len(batch))
                # after a reset nobody reads answers: questions are skipped, publishes and acknowledgements count
                if not (self.reset and verb in VERBS and VERBS[verb].asks):
                    self.session.handle(verb, rest, batch)
                if self.session.loaded:
                    self._count(self.session.loaded)
                    self.session.loaded = 0
            if time.monotonic() >= end:
                self.cut = True
                return

    def _count(self, messages: int) -> None:
        self.received_messages += messages
        rate = self.limits.max_rate
        if rate:
            now = time.monotonic()
            self._allowance = min(rate, self._allowance + (now - self.opened) * rate)
            self.opened = now
            self._allowance -= messages
            if self._allowance < 0:
                self.paused_until = now - self._allowance / rate

    def paused(self) -> bool:
        """Whether input must wait, because of the rate limit or because the client does not read its answers."""
        waiting = self.outbox.pending_bytes + self.session.answer_bytes
        return waiting > REPLY_BYTES or (self.paused_until > 0 and self.paused_until > time.monotonic())

    # --- output

    def send(self) -> None:
        """Write as much as the socket accepts. OSError when the connection is over."""
        if not self.secure:
            return
        self.wants_write = False
        if not self.reset:
            self._write()
        if self.reset:
            self.outbox.clear()
        if self.outbox.pending_bytes:
            self.wants_write = True
        self.settle()
        self.session.wake_starved()

    def _write(self) -> None:
        try:
            if self.tls is None:
                self.outbox.send(self.descriptor)
            else:
                self._send_tls(self.tls)
        except (BrokenPipeError, ConnectionResetError):
            self.end_output()

    def end_output(self) -> None:
        """The peer accepts no more output.

        A client that closes with unread input resets the connection. Its last acknowledgements may still wait to be
        read here, so only the output ends now; the input ends when recv says so.
        """
        self.reset = True
        self.session.output_bytes = 0
        self.session.drop_question()

    def settle(self) -> None:
        """Note which messages that need no acknowledgement the peer's TCP has received."""
        if not self.session.automatic:
            self.unacknowledged = False
            return
        left = unacknowledged_bytes(self.socket)
        self.unacknowledged = left > 0 and not self.reset  # nothing more will be acknowledged
        if self.tls is None or not left:  # the bytes that TLS adds are not known, so count all of the output or none
            self.session.settle(max(0, self.outbox.sent_bytes - left))

    def _send_tls(self, tls: ssl.SSLSocket) -> None:
        while self.outbox.pending_bytes:
            try:
                self.outbox.advance(tls.send(self.outbox.front()))
            except ssl.SSLWantWriteError:
                return
            except ssl.SSLWantReadError:
                return

    def end(self, reason: str = "") -> None:
        """Send the reason, if the client understands it, and close when that is written."""
        if reason and self.session.hello:
            self.session.answer(0, words.error_line("closing", reason))
        self.ending = True

    def close(self) -> None:
        """The client is gone: end its subscriptions."""
        try:
            self.settle()
            self.session.end()
        finally:
            self.give_back()

    def give_back(self) -> None:
        """Release memory and socket."""
        self.scanner.clear()
        self.outbox.clear()
        self.socket.close()
