"""Link: a dialogue and its socket. It connects and reconnects by itself; nothing here blocks. ``pump`` does what can be
done now: connecting, the TLS handshake, sending, receiving. To wait, poll ``fileno()``. Used by one thread at a time,
but for ``wait`` beside the others; ``close`` by any thread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import ssl
import threading
import time

from penstock._core.broker import open_timer, set_timer
from penstock.address import place_text
from penstock.broker.client.dialogue import Dialogue, NotABrokerError, RenewalRefused
from penstock.broker.hosts import NOBODY_LEADS_REMEDY, NOT_LISTENING_REMEDY, hosts_of, nobody_leads, settled
from penstock.broker.liveness import DEFAULT_S, PROBES, Liveness
from penstock.channel import check_timeout
from penstock.clock import refuse_if_virtual
from penstock.errors import (
    ClosedError,
    InvalidArgument,
    PenstockError,
    ProtocolError,
    RefusedError,
    StateError,
    UnreachedError,
    describe,
)
from penstock.resolving import resolving

log = logging.getLogger("penstock.broker")
RETRY_S = (0.02, 2.0)  # the first pause before connecting again, and the longest
ATTEMPT_S = 5.0  # time-out of one attempt to connect: a machine that is gone answers nothing
# With several brokers another one may lead at any moment, even while the old one is only stopped: its kernel still
# accepts connections and acknowledges data. So the broker must answer a question after some silence.
GROUP_ATTEMPT_S, GROUP_RETRY_S, GROUP_SILENCE_S = 1.0, 0.25, 2.0
MAX_TIMEOUT_S = 1e9  # some thirty years
MAY_WAIT = "it may be waiting for its disk, or for the quorum of its cluster: its log tells"
FAREWELL_S = 2.0  # how long a broker may take to close the connection after the last line


class Link:
    """One client's connection, renewed as often as necessary."""

    def __init__(
        self,
        host: str,
        port: int,
        dialogue: Dialogue,
        *,
        tls: ssl.SSLContext | None = None,
        reconnect: bool = True,
        connect_timeout: float = 10.0,
        keepalive_s: float = DEFAULT_S,
    ) -> None:
        refuse_if_virtual(f"the broker at {host}:{port} (of other processes)")
        self._hosts = hosts_of(host, port)
        self._at = 0  # index of the host that is tried, or connected
        if check_timeout(connect_timeout) is None or connect_timeout > MAX_TIMEOUT_S:
            raise InvalidArgument(f"timeout={connect_timeout!r} must be 0 to {MAX_TIMEOUT_S:.0f} seconds")
        self.host, self.port = settled(host, port)
        self._place = ",".join(place_text(*place) for place in self._hosts)
        self.dialogue = dialogue
        self.dialogue.one_store = len(self._hosts) > 1
        self.closed = False
        self.connections = 0
        self._tls = tls
        self._reconnect = reconnect
        self._give_up_s = connect_timeout
        self._socket: socket.socket | None = None
        self._connecting = False
        self._shaking = False
        self._retry_at = 0.0
        self._attempt_until = 0.0
        self._heard_at = 0.0
        self._look_at = 0.0  # when the peer's silence is checked next
        self._pause = self._broken_pause = RETRY_S[0]  # the second: after what is no answer, which also greets
        self._greeted_at = 0.0
        self._error: Exception | None = None
        self._troubles: dict[tuple[str, int], Exception] = {}  # by host and port: the last error
        self._missed_s = 0.0  # how long readers were without a connection, until the time that follows
        self._missed_at = time.monotonic()
        self._failed_at = 0.0  # when an attempt to connect failed last
        self._poll = select.epoll()  # fileno() returns it: it stays the same over reconnects
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Nobody may write to a descriptor's number after it was closed. A signal's function may wake too.
        self._waking = threading.RLock()
        self._woken = False
        self._poll.register(self._wake, select.EPOLLIN)
        self._timer, self._timer_at = open_timer(), 0.0
        self._poll.register(self._timer, select.EPOLLIN)
        self._mask = 0
        self._keepalive_s = keepalive_s
        # how long to wait for an answer; 0: no limit
        self._patience_s = 0.0 if len(self._hosts) == 1 else min(GROUP_SILENCE_S, keepalive_s)
        self._asked_at = 0.0  # when the missing answer was asked for, or noticed as missing
        self._liveness: Liveness | None = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._owner = 0  # the thread that holds the lock to send or receive
        self._waiting = 0  # threads that sleep on the descriptor, which stays open until the last of them woke up

    def check(self, handle: str) -> None:
        """Refuse a link that was closed, or belongs to another process."""
        if os.getpid() != self._pid:
            raise StateError(f"{handle} was opened before this process was forked; open it again in the child")
        if self.closed:
            raise ClosedError(f"{handle} was closed")

    # --- the descriptor

    def fileno(self) -> int:
        """Readable when ``pump`` has something to do."""
        return self._poll.fileno()

    def _interest(self) -> None:
        if self._socket is None:
            return
        mask = select.EPOLLIN
        if self._connecting or self.dialogue.outgoing() is not None:
            mask |= select.EPOLLOUT
        if mask != self._mask:
            self._poll.modify(self._socket, mask)
            self._mask = mask

    def wait(self, timeout: float | None) -> bool:
        """Sleep until there is something to do; False when the time is over."""
        self.begin_wait()
        try:
            if self._socket is None and self.dialogue.refused is not None:
                return True  # nothing will arrive any more; the next pump raises the reason
            found = bool(self._poll.poll(-1 if timeout is None else timeout))
            if self._woken and not self.closed:
                self._woken = False
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            return found
        finally:
            self.end_wait()

    def begin_wait(self) -> None:
        """From here to ``end_wait`` the descriptor stays open, even if this is closed."""
        self.check("this client")  # before the lock, which another thread may have held at a fork
        with self._lock:
            self.check("this client")
            self._interest()
            self._waiting += 1

    def end_wait(self) -> None:
        """One sleep that ``begin_wait`` has counted is over."""
        with self._lock:
            self._waiting -= 1
            self._give_back()

    def _give_back(self) -> None:
        """Close the descriptors of a closed link once no thread sleeps on them."""
        if self.closed and not self._waiting and not self._poll.closed:
            with self._waking:
                self._poll.close()
                os.close(self._wake)
            os.close(self._timer)

    def _set_timer(self) -> None:
        """Make the descriptor readable when it is time to reconnect, or to check whether the broker is alive."""
        if self.closed:
            return
        at = 0.0
        if self._socket is None:
            at = self._retry_at if self.dialogue.refused is None else 0.0
        elif self._connecting or self._shaking:
            at = self._attempt_until
        elif self._liveness is not None and self._keepalive_s:
            at = self._look_at
        if at != self._timer_at:
            self._timer_at = at
            set_timer(self._timer, max(1e-6, at - time.monotonic()) if at else 0.0)

    def _check_silence(self) -> None:
        """ConnectionError if the broker's machine has vanished."""
        now = time.monotonic()
        if self._keepalive_s and self._liveness is not None and now >= self._look_at:
            self._look_at = now + self._look_every_s
            if self._liveness.silent():
                raise ConnectionError(f"the broker was silent for {self._keepalive_s:g} s")

    @property
    def _look_every_s(self) -> float:
        return (self._patience_s or self._keepalive_s) / PROBES

    def _check_answer(self) -> None:
        """Nothing was received. With several brokers: ConnectionError if that has lasted too long."""
        now = time.monotonic()
        if not self._patience_s or now < self._heard_at + self._look_every_s:
            return
        if not self._asked_at:
            self._asked_at = now
            if self.dialogue.idle:
                self.dialogue.ask("PING", repeat=False)
                self._send()
            return
        most_s = self._patience_s if self.dialogue.ready else min(self._patience_s, GROUP_ATTEMPT_S)
        if now >= self._asked_at + most_s:
            raise ConnectionError(f"the broker did not answer for {most_s:g} s")

    def wake(self) -> None:
        """End a ``wait`` of another thread."""
        with self._waking:
            if self._poll.closed:
                return
            self._woken = True
            with contextlib.suppress(OSError):
                os.eventfd_write(self._wake, 1)

    # --- doing

    def pump(self) -> None:
        """Do what can be done now, without waiting."""
        if os.getpid() != self._pid:
            self._drop_socket()
            self.check("this client")
        me = threading.get_ident()
        with self._lock:
            self._owner = me
            try:
                self._pump()
            except (OSError, PenstockError):
                raise
            except BaseException:
                self.dialogue.torn = True
                raise
            finally:
                self._owner = 0

    def _pump(self) -> None:
        if self.closed:
            self._drop_socket()
            self._give_back()
            self.check("this client")
        if self.dialogue.torn:
            self._lost(ConnectionError("an exchange with the broker was interrupted"))
        if self.dialogue.refused is not None and self._socket is None:
            raise self.dialogue.refused
        try:
            if self._socket is None:
                self._connect()
            elif self._connecting or self._shaking:
                self._go_on_connecting()
            else:
                try:
                    self._send()
                except (BrokenPipeError, ConnectionResetError):
                    # The broker may have sent the reason before it closed: a refusal says more than a broken pipe.
                    self._take_last_words()
                    raise
                self._check_silence()
                if not self._receive():
                    self._check_answer()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            pass
        except (OSError, ProtocolError) as error:
            self._lost(error)
        self._interest()
        self._set_timer()

    def _connect(self) -> None:
        now = time.monotonic()
        if now < self._retry_at:
            return
        if self.connections and not self._reconnect:
            raise ConnectionError("the connection was lost")
        with resolving(self._hosts[self._at][0]):
            family, kind, _, _, address = socket.getaddrinfo(*self._hosts[self._at], type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(family, kind)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connecting = True
        self._attempt_until = now + min(ATTEMPT_S if len(self._hosts) == 1 else GROUP_ATTEMPT_S, self._give_up_s)
        self._mask = select.EPOLLOUT
        self._poll.register(self._socket, self._mask)
        code = self._socket.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))
        if code == 0:
            self._connected()

    def _go_on_connecting(self) -> None:
        try:
            if self._connecting:
                self._connected()
            else:
                self._handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        if (self._connecting or self._shaking) and time.monotonic() >= self._attempt_until:
            raise TimeoutError("the broker did not answer the connection attempt")

    def _connected(self) -> None:
        assert self._socket is not None
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        writable = select.poll()
        writable.register(self._socket, select.POLLOUT)
        if not writable.poll(0):
            return
        self._connecting = False
        if self._tls is not None:
            self._poll.unregister(self._socket)
            self._socket = self._tls.wrap_socket(
                self._socket, server_hostname=self._hosts[self._at][0], do_handshake_on_connect=False
            )
            self._poll.register(self._socket, select.EPOLLIN)
            self._mask = select.EPOLLIN
            self._shaking = True
            self._attempt_until = time.monotonic() + self._give_up_s
            self._handshake()
        else:
            self._introduce()

    def _handshake(self) -> None:
        assert isinstance(self._socket, ssl.SSLSocket)
        self._socket.do_handshake()
        self._shaking = False
        self._introduce()

    def _introduce(self) -> None:
        self.connections += 1
        self._greeted_at = time.monotonic()
        assert self._socket is not None
        self._liveness = Liveness(self._socket, self._keepalive_s)
        self._heard_at = self._asked_at = time.monotonic()  # HELLO asks for an answer
        self._look_at = self._heard_at + self._look_every_s
        self.dialogue.connected()
        self._send()

    def send(self) -> None:
        """Send what the socket accepts now. The next ``pump`` notices a lost connection."""
        me = threading.get_ident()
        if self._owner == me:  # a signal handler interrupted a pump, which will send it
            return
        with self._lock:
            self._owner = me
            try:
                self._send()
                if self.dialogue.outgoing() is not None:
                    self._interest()  # update what a thread that sleeps on the descriptor waits for
            except OSError:
                pass
            except BaseException:
                self.dialogue.torn = True
                raise
            finally:
                self._owner = 0

    def _send(self) -> None:
        sock = self._socket
        if sock is None or self._connecting or self._shaking or self.dialogue.torn or os.getpid() != self._pid:
            return
        try:
            while (data := self.dialogue.outgoing()) is not None:
                self.dialogue.sent(sock.send(data))
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass

    def _take_last_words(self) -> None:
        """The broker has closed the connection during a send: read what it sent before, such as the reason."""
        with contextlib.suppress(OSError):
            for _ in range(64):  # bounded: a refusal is short, and a peer may never stop sending
                if not self._receive():
                    break

    def _receive(self) -> bool:
        """Receive and handle input; returns whether there was any."""
        sock = self._socket
        assert sock is not None
        got: int | None
        if isinstance(sock, ssl.SSLSocket):
            try:
                data = sock.recv(262_144)
            except ssl.SSLWantReadError:
                return False
            got = len(data)
            self.dialogue.scanner.feed(data)
        else:
            got = self.dialogue.scanner.receive(sock.fileno())
            if got is None:
                return False
        if got == 0:
            raise ConnectionError("the broker closed the connection")
        if self._patience_s:
            self._heard_at, self._asked_at = time.monotonic(), 0.0
        if self.dialogue.ready:
            self._pause = RETRY_S[0]
        return True

    def lost(self, error: Exception) -> None:
        """The peer broke the protocol: continue with a new connection."""
        with self._lock:
            self._lost(error)

    def _lost(self, error: Exception) -> None:
        was_ready = self.dialogue.ready
        while not self.dialogue.torn:  # handle everything that arrived before the end
            try:
                if not self.dialogue.step():
                    break
            except ProtocolError as found:
                if not was_ready and not isinstance(error, ProtocolError):
                    error = found  # says more than that the connection was closed
                break
        self._drop_socket()
        self.dialogue.disconnected()
        self._failed_at = now = time.monotonic()
        if was_ready:
            self._missed_s, self._missed_at = 0.0, now
        self._note(error)
        self._at = (self._at + 1) % len(self._hosts)
        self._retry_at = now
        if now - self._greeted_at > RETRY_S[1]:
            self._broken_pause = RETRY_S[0]
        if type(error) is ProtocolError:  # not a refusal, after which the next connection may be taken
            self._pause = self._broken_pause = min(self._broken_pause * 2, RETRY_S[1])
        if self._at == 0 or was_ready:  # all hosts were tried
            self._retry_at += self._pause
            self._pause = min(self._pause * 2, RETRY_S[1] if len(self._hosts) == 1 else GROUP_RETRY_S)
        if self.dialogue.refused is None and self.connections and not self._reconnect:
            self.dialogue.fail(ClosedError(self._without_connection()))
        elif isinstance(error, ssl.SSLCertVerificationError) and not self.connections:
            self.dialogue.fail(RefusedError(f"the broker at {self._place} is not trusted: {error}"))
        self._set_timer()

    def _note(self, error: Exception) -> None:
        """Why there is no connection; of one of several, that something else listens there is told once."""
        self._error = error
        place = self._hosts[self._at]
        known, self._troubles[place] = self._troubles.get(place), error
        if isinstance(error, RenewalRefused) and not isinstance(known, RenewalRefused):
            log.warning("the broker at %s:%d: %s; trying again", *place, error)
        if isinstance(error, NotABrokerError) and not isinstance(known, NotABrokerError):
            log.warning("what listens at %s:%d is no broker: %s; the others of the group are tried", *place, error)

    def check_reachable(self, since: float) -> None:
        """UnreachedError if readers were without a connection for the connect time-out, and an attempt has failed since
        this one began to read (``since``). Nothing else changes: the next request connects again.

        The time counts from one read to the next, for who polls. Of the time between two reads the longest pause counts
        at most: nothing was tried in the rest of it.
        """
        if self.dialogue.ready:
            return
        now = time.monotonic()
        between_s = max(0.0, since - self._missed_at)
        self._missed_s += min(between_s, RETRY_S[1]) + now - max(since, self._missed_at)
        self._missed_at = now
        if self._missed_s > self._give_up_s and self._failed_at >= since:
            self._missed_s = 0.0
            raise UnreachedError(self._without_connection())

    def _without_connection(self) -> str:
        return f"no connection to the broker at {self._place}: {self._why()}"

    def _drop_socket(self) -> None:
        if self._socket is not None:
            if os.getpid() == self._pid:  # a forked child shares the parent's epoll, and must leave it as it is
                with contextlib.suppress(OSError, ValueError):
                    self._poll.unregister(self._socket)
            self._socket.close()
        self._socket = self._liveness = None
        self._connecting = self._shaking = False
        self._mask = 0

    @property
    def trouble(self) -> str:
        """Why there is no connection now; empty while there is one."""
        return "" if self.dialogue.ready else self._why()

    def silence(self, waited_s: float) -> str:
        """The sentence for a request without an answer, with the reason if that is known."""
        said = f"the broker at {self._place} did not answer within {waited_s:g} s"
        if self.dialogue.farewell:
            return f"{said}; it closed the connection before: {self.dialogue.farewell}"
        return f"{said}; {MAY_WAIT}" if self.dialogue.ready or self._error is None else f"{said}: {self._why()}"

    def _why(self) -> str:
        """Why there is no connection."""
        if self._error is None:
            return "not connected yet"
        if len(self._hosts) == 1 or self.dialogue.refused is not None:
            remedy = f" ({NOT_LISTENING_REMEDY})" if isinstance(self._error, ConnectionRefusedError) else ""
            return f"{describe(self._error)}{remedy}"
        usual = ConnectionRefusedError | TimeoutError  # of those that stand by, or do not run
        others = {place: error for place, error in self._troubles.items() if not isinstance(error, usual)}
        told = "".join(f"; {host}:{port}: {describe(error)}" for (host, port), error in others.items())
        return f"{nobody_leads(self.host, self.port)} ({NOBODY_LEADS_REMEDY}){told}"

    def finish(self, farewell: bytes) -> None:
        """Send what is pending and a last line, and close when the broker has: FAREWELL_S at most."""
        if not self.closed and os.getpid() == self._pid and self._lock.acquire(timeout=0.1):
            try:
                if self.dialogue.ready and not self.dialogue.torn:
                    self.dialogue.tell(farewell)
                    self._read_to_the_end(time.monotonic() + FAREWELL_S)
            except OSError:
                pass  # the broker has closed the connection, or is gone
            finally:
                self._lock.release()
        self.close()

    def _read_to_the_end(self, deadline: float) -> None:
        """Send everything and discard input until the broker closes the connection. If a socket is closed with unread
        input, the kernel resets the connection and discards what the peer has not received yet: acknowledgements would
        be lost.
        """
        sock, poll = self._socket, select.poll()
        assert sock is not None
        while (left_s := deadline - time.monotonic()) > 0:
            self._send()
            poll.register(sock, select.POLLIN | (select.POLLOUT if self.dialogue.outgoing() is not None else 0))
            with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                while sock.recv(262_144):
                    if time.monotonic() >= deadline:
                        return
                return
            poll.poll(left_s * 1e3)

    def close(self) -> None:
        """Give everything back."""
        if self.closed:
            return
        self.closed = True
        self.wake()
        if self._lock.acquire(timeout=1.0):  # a thread inside pump notices `closed` at its next turn
            try:
                self._drop_socket()
                self._give_back()
            finally:
                self._lock.release()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the constructor may have raised
            self.closed, self._waiting = True, 0
            self._drop_socket()
            self._give_back()
