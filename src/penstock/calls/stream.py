"""Lanes over one connection, for ``tcp://``: the server listens, a client connects when it first calls.

The greeting is the tcp room's own (tokens are proved the same way); then each side sends envelopes as payload frames.

Rules:

- Sending never blocks: what the socket does not accept waits in a bounded buffer; a peer that lets it fill up is
  disconnected.
- The server has one thread for all connections, so that a slow function delays no greeting; requests wait in a bounded
  queue, and connections are not read while it is full.
- When a connection is lost, its calls in flight end with ``PeerGone``; the next call connects again. So does a call
  that finds the connection lost before it is sent, if no other is in flight.
- A request that is larger than allowed is skipped unread and refused; the other calls of the connection go on.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import select
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Hashable, Iterator
from typing import Any

from penstock.address import Address, is_loopback
from penstock.calls.envelope import HEADER as ENVELOPE
from penstock.calls.envelope import Envelope, Kind, aged, pack, unpack
from penstock.calls.lanes import ClientLane, ServerLane, held
from penstock.errors import ClosedError, InvalidArgument, PeerGone, PenstockError, ProtocolError, RefusedError
from penstock.resolving import resolving
from penstock.tcp.log import Throttle
from penstock.tcp.protocol import HEADER, Answer, FrameType, Negotiation, Request, frame
from penstock.tcp.sockets import check_port, listen, listen_unix, name_of, prepare

logger = logging.getLogger("penstock.calls")
READ_BYTES = 1 << 18
MAX_WAITING = 256  # requests that wait for the function
WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Connection:
    """A socket that does not block, and frames on it. Any thread may send; one thread at a time receives."""

    def __init__(self, connection: socket.socket, max_message_bytes: int) -> None:
        self.socket = connection
        self.descriptor = connection.fileno()
        self.closed = False
        self._max = max_message_bytes
        self._lock = threading.Lock()  # a TLS socket may be used by one thread at a time only
        self._received = bytearray()
        self._pass_over = 0  # bytes still to skip of a message that is too large
        self._unsent = bytearray()
        self._end = select.poll()
        self._end.register(self.descriptor, select.POLLRDHUP)

    @property
    def hung_up(self) -> bool:
        """Whether the peer has closed its side; what it sent before may still be unread."""
        with self._lock:
            return not self.closed and bool(self._end.poll(0))

    def send(self, data: bytes) -> None:
        """Send, and buffer what the socket does not accept; ``PeerGone`` if the buffer is full."""
        whole = frame(FrameType.PAYLOAD, data)
        with self._lock:
            if self.closed:
                raise PeerGone("the connection was closed")
            if len(self._unsent) > self._max:
                raise PeerGone("the peer does not read what is sent to it")
            self._unsent += whole
            self._flush()

    def flush(self) -> None:
        """Send what is buffered."""
        with self._lock:
            if not self.closed:
                self._flush()

    def _flush(self) -> None:
        while self._unsent:
            try:
                sent = self.socket.send(self._unsent[:READ_BYTES])
            except WOULD_BLOCK:
                return
            except OSError as error:
                raise PeerGone(f"the connection broke: {error.strerror or error}") from None
            del self._unsent[:sent]

    @property
    def waits_to_send(self) -> bool:
        """Whether something is unsent."""
        return bool(self._unsent)

    def receive(self) -> Iterator[Envelope]:
        """The envelopes that have arrived. ``PeerGone``: the peer has closed."""
        yield from self._frames()
        while True:
            with self._lock:
                if self.closed:
                    raise PeerGone("the connection was closed")
                try:
                    data = self.socket.recv(READ_BYTES)
                except WOULD_BLOCK:
                    return
                except OSError as error:
                    raise PeerGone(f"the connection broke: {error.strerror or error}") from None
            if not data:
                raise PeerGone("the other side closed the connection")
            self._received += data
            yield from self._frames()

    def _frames(self) -> Iterator[Envelope]:
        while True:
            if self._pass_over:
                passed = min(self._pass_over, len(self._received))
                del self._received[:passed]
                self._pass_over -= passed
            if self._pass_over or len(self._received) < HEADER.size:
                return
            header_size, kind, _, size = HEADER.unpack_from(self._received)
            if header_size != HEADER.size or kind != FrameType.PAYLOAD:
                raise ProtocolError("the peer sent something that is not a call")
            too_large = size > self._max + ENVELOPE.size
            end = HEADER.size + (ENVELOPE.size if too_large else size)
            if len(self._received) < end:
                return
            data = bytes(self._received[HEADER.size : end])
            del self._received[:end]
            if too_large:
                self._pass_over = size - ENVELOPE.size
                self._refuse_size(unpack(data), size - ENVELOPE.size)
            else:
                yield unpack(data)

    def _refuse_size(self, envelope: Envelope, size: int) -> None:
        said = f"{size} bytes where {self._max} are allowed (max_message_bytes)"
        if envelope.kind is not Kind.REQUEST:
            raise ProtocolError(f"an answer of {said}")
        self.send(pack(Kind.REFUSAL, envelope.number, 0, envelope.origin, f"a request of {said}".encode()))

    def close(self) -> None:
        """Close it; what is still buffered is lost."""
        with self._lock:
            if not self.closed:
                self.closed = True
                with contextlib.suppress(OSError):
                    self.socket.close()


class StreamClient(ClientLane):
    """The client's lane: one connection at a time."""

    def __init__(
        self,
        address: Address,
        token: bytes | None,
        tls: ssl.SSLContext | None,
        connect_timeout: float,
        max_message_bytes: int,
        keepalive: float | None,
    ) -> None:
        self._address = address
        self._token = token
        self._tls = tls
        self._connect_timeout = connect_timeout
        self._max = max_message_bytes
        self._keepalive = keepalive
        self._selector = selectors.DefaultSelector()
        self._connection: Connection | None = None
        self._lock = threading.Lock()  # held while connecting
        self._closed = False

    def send(self, data: bytes, deadline: float | None) -> Hashable:
        if len(data) - ENVELOPE.size > self._max:
            size = len(data) - ENVELOPE.size
            raise InvalidArgument(f"a request of {size} bytes where {self._max} are allowed (max_message_bytes)")
        connection = self._connect(deadline)
        try:
            connection.send(data)
        except PeerGone:
            self._forget(connection)
            raise
        return connection

    @property
    def ready(self) -> bool:
        return self._connection is not None and not self._connection.closed

    def renew(self) -> None:
        connection = self._connection
        if connection is not None and connection.hung_up:
            self._forget(connection)

    def _connect(self, deadline: float | None) -> Connection:
        with held(self._lock, deadline, f"{self._address}: no connection in time"):
            if self._closed:
                raise ClosedError(f"the client of {self._address} was closed")
            if self._connection is not None and not self._connection.closed:
                return self._connection
            left = self._connect_timeout if deadline is None else deadline - time.monotonic()
            if left <= 0:
                left = self._connect_timeout  # even a call that must not wait needs a connection
            self._connection = Connection(self._open(min(left, self._connect_timeout)), self._max)
            self._selector.register(self._connection.descriptor, selectors.EVENT_READ)
            return self._connection

    def _open(self, timeout: float) -> socket.socket:
        address = self._address
        try:
            if address.name:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.settimeout(timeout)
                connection.connect(address.name)
            else:
                with resolving(address.host):
                    connection = socket.create_connection((address.host, address.port or 0), timeout)
        except TimeoutError:
            # The call had less time than a connection may take, so the server may well be there: a time-out, not
            # PeerGone.
            if timeout < self._connect_timeout:
                raise TimeoutError(f"{address}: no connection in time") from None
            raise PeerGone(f"no server answers at {address} within {timeout:g} s") from None
        except OSError as error:
            raise PeerGone(f"no server answers at {address}: {error.strerror or error}") from None
        try:
            if self._tls is not None:
                name = None if address.name else address.host
                connection = self._tls.wrap_socket(connection, server_hostname=name)
            negotiation = Request(self._token, calls=True)
            connection.sendall(negotiation.outgoing)
            negotiation.outgoing.clear()
            while _step(connection, negotiation) is None:
                pass
            prepare(connection, self._keepalive)
        except (TimeoutError, OSError) as error:
            connection.close()
            if isinstance(error, PenstockError):
                raise
            if isinstance(error, TimeoutError) and timeout < self._connect_timeout:
                raise TimeoutError(f"{address}: no handshake in time") from None
            raise PeerGone(f"{address}: the handshake failed: {error}") from None
        except BaseException:
            connection.close()
            raise
        return connection

    def cancel(self, peer: Hashable, data: bytes) -> None:
        assert isinstance(peer, Connection)
        with contextlib.suppress(PeerGone):
            peer.send(data)

    def receive(self, timeout: float) -> Envelope | None:
        deadline = time.monotonic() + timeout
        while True:
            connection = self._connection
            if self._closed:
                raise ClosedError(f"the client of {self._address} was closed")
            if connection is None or connection.closed:
                raise PeerGone(f"{self._address}: the connection to the server is lost")
            try:
                for envelope in connection.receive():
                    return envelope
                connection.flush()
            except (PeerGone, ProtocolError) as error:
                self._forget(connection)
                raise PeerGone(f"{self._address}: {error}") from None
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            try:
                self._selector.select(left)
            except (OSError, ValueError):  # another thread closed it meanwhile
                if not self._closed:
                    raise

    def _forget(self, connection: Connection) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.descriptor)
        connection.close()

    def gone(self, peer: Hashable) -> bool:
        assert isinstance(peer, Connection)
        return peer.closed

    def wait_ready(self, servers: int, timeout: float | None) -> bool:
        if servers > 1:
            raise InvalidArgument(f"servers={servers}: one server listens at {self._address}")
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                self._connect(deadline)
                return True
            except TimeoutError:
                return False
            except PeerGone:
                left = 0.05 if deadline is None else min(0.05, deadline - time.monotonic())
                if left <= 0:
                    return False
                time.sleep(left)

    def fileno(self) -> int:
        return self._selector.fileno()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connection = self._connection
        if connection is not None:
            self._forget(connection)
        self._selector.close()

    def abandon(self) -> None:
        self._closed = True
        if self._connection is not None:
            self._connection.socket.close()  # do not unregister: the epoll instance is shared with the parent
        self._selector.close()


class _Peer:
    """One connection of the server: greeting, then requests."""

    def __init__(self, connection: socket.socket, name: str, negotiation: Answer, deadline: float) -> None:
        self.socket = connection
        self.name = name
        self.negotiation: Answer | None = negotiation
        self.deadline = deadline  # deadline of the greeting
        self.connection: Connection | None = None


class StreamServer(ServerLane):
    """The server's lane. The way back is the connection."""

    def __init__(
        self,
        address: Address,
        token: bytes | None,
        tls: ssl.SSLContext | None,
        handshake_timeout: float,
        max_clients: int,
        max_message_bytes: int,
        keepalive: float | None,
    ) -> None:
        self._token = token
        self._tls = tls
        self._handshake_timeout = handshake_timeout
        self._max_clients = max_clients
        self._max = max_message_bytes
        self._keepalive = keepalive
        self._path = address.name
        if address.name:
            self._listener = listen_unix(address.name, 128)
        else:
            self._listener = listen(address.host, check_port(address.port or 0), 128)
            self.port = self._listener.getsockname()[1]
        self._peers: dict[int, _Peer] = {}
        self._requests: queue.SimpleQueue[tuple[Connection, Envelope, int] | None] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._paused = False
        self._closed = False
        self._warnings = Throttle()
        self._thread = threading.Thread(target=self._loop, name="penstock calls tcp", daemon=True)
        self._thread.start()

    # --- the thread of the connections

    def _loop(self) -> None:
        while not self._closed:
            for key, events in self._selector.select(1.0):
                if key.fileobj is self._bell:
                    with contextlib.suppress(BlockingIOError):
                        self._bell.recv(4096)
                elif key.fileobj is self._listener:
                    self._accept()
                elif key.fd in self._peers:
                    self._turn(self._peers[key.fd], events)
            self._arm()

    def _turn(self, peer: _Peer, events: int) -> None:
        """Serve one connection; an error in it ends this connection only."""
        try:
            if peer.connection is None:
                self._greet(peer)
            else:
                if events & selectors.EVENT_WRITE:
                    peer.connection.flush()
                if events & selectors.EVENT_READ:
                    for envelope in peer.connection.receive():
                        self._requests.put((peer.connection, envelope, time.monotonic_ns()))
        except PeerGone:
            self._drop_peer(peer)
        except (PenstockError, OSError) as error:
            self._warnings.warn("calls: %s: %s", peer.name, error)
            self._drop_peer(peer)
        except Exception:
            logger.exception("calls: %s: internal error; the connection is closed", peer.name)
            self._drop_peer(peer)

    def _accept(self) -> None:
        try:
            connection, where = self._listener.accept()
        except OSError:
            return  # the client hung up before it was accepted, or no descriptor is free: then it stays in the backlog
        if len(self._peers) >= self._max_clients:
            self._warnings.warn("calls: %s: closed, %d clients are the most (max_clients)", where, self._max_clients)
            connection.close()
            return
        prepare(connection, self._keepalive)
        if self._tls is not None:
            connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        deadline = time.monotonic() + self._handshake_timeout
        peer = _Peer(connection, name_of(where), Answer(self._token, calls=True), deadline)
        self._peers[connection.fileno()] = peer
        self._selector.register(connection.fileno(), selectors.EVENT_READ)

    def _greet(self, peer: _Peer) -> None:
        negotiation = peer.negotiation
        assert negotiation is not None
        try:
            if isinstance(peer.socket, ssl.SSLSocket):
                peer.socket.do_handshake()
            agreed = _step(peer.socket, negotiation)
            while agreed is None:
                agreed = _step(peer.socket, negotiation)
        except WOULD_BLOCK:
            return
        peer.socket.send(negotiation.answer(agreed, time.time_ns()))
        peer.negotiation = None
        peer.connection = Connection(peer.socket, self._max)

    def _arm(self) -> None:
        """Register what each connection waits for; disconnect those whose handshake takes too long."""
        now = time.monotonic()
        # back-pressure: while too many requests wait for the function, nothing is read and clients wait in TCP
        self._paused = self._requests.qsize() >= MAX_WAITING
        for descriptor, peer in list(self._peers.items()):
            if peer.connection is None:
                if now > peer.deadline:
                    self._drop_peer(peer)
                continue
            if peer.connection.closed:
                self._drop_peer(peer)
                continue
            wanted = 0 if self._paused else selectors.EVENT_READ
            wanted |= selectors.EVENT_WRITE if peer.connection.waits_to_send else 0
            key = self._selector.get_map().get(descriptor)
            if key is None:
                if wanted:
                    self._selector.register(descriptor, wanted)
            elif not wanted:
                self._selector.unregister(descriptor)
            elif key.events != wanted:
                self._selector.modify(descriptor, wanted)

    def _drop_peer(self, peer: _Peer) -> None:
        for descriptor, known in list(self._peers.items()):
            if known is peer:
                del self._peers[descriptor]
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(descriptor)
        if peer.connection is not None:
            peer.connection.close()
        else:
            with contextlib.suppress(OSError):
                peer.socket.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._ring.send(b"!")

    # --- the server's threads

    def receive(self, timeout: float | None) -> tuple[Any, Envelope] | None:
        try:
            found = self._requests.get(timeout=timeout) if timeout else self._requests.get_nowait()
        except queue.Empty:
            return None
        if found is None:
            raise ClosedError("the server was closed")
        if self._paused and self._requests.qsize() < MAX_WAITING // 2:
            self._wake()
        connection, envelope, came_ns = found
        if connection.closed:
            return None  # its client has disconnected meanwhile
        return connection, aged(envelope, time.monotonic_ns() - came_ns)

    def answer(self, way: Any, data: bytes) -> bool:
        try:
            way.send(data)
        except PeerGone:
            way.close()
            self._wake()
            return False
        if way.waits_to_send:
            self._wake()
        return True

    def gone(self, way: Any) -> bool:
        return bool(way.closed)

    def drop(self, way: Any) -> None:
        """Nothing was taken that could be given back."""

    def abandon(self) -> None:
        self._closed = True
        for peer in self._peers.values():
            peer.socket.close()
        for one in (self._listener, self._bell, self._ring, self._selector):
            one.close()

    def close(self, goodbye: bytes) -> None:
        """Close the connections, by which clients notice the end."""
        self._closed = True
        self._wake()
        self._thread.join()
        for peer in list(self._peers.values()):
            self._drop_peer(peer)
        self._selector.close()
        self._listener.close()
        if self._path:
            import os

            with contextlib.suppress(OSError):
                os.unlink(self._path)
        self._bell.close()
        self._ring.close()
        self._requests.put(None)


def _step(connection: socket.socket, negotiation: Negotiation) -> Any:
    """Read what the greeting needs next; returns the agreement when the greeting is complete."""
    data = connection.recv(negotiation.needs)
    if not data:
        raise PeerGone("the other side closed the connection during the handshake")
    try:
        return negotiation.feed(data)
    finally:
        if negotiation.outgoing:
            connection.send(bytes(negotiation.outgoing))  # a few bytes into an empty socket
            negotiation.outgoing.clear()


def _token(token: object) -> bytes | None:
    if token is not None and not isinstance(token, str):
        raise InvalidArgument(f"token= takes text, not {type(token).__name__}")
    return None if token is None else token.encode()


def _check(**options: float | None) -> None:
    """Numbers above 0."""
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise InvalidArgument(f"{name}={value!r} must be a number above 0")


def _tls(tls: ssl.SSLContext | None) -> ssl.SSLContext | None:
    if tls is not None and not isinstance(tls, ssl.SSLContext):
        raise InvalidArgument("tls= takes an ssl.SSLContext (ssl.create_default_context(...)) or None")
    return tls


def open_client(
    address: Address,
    origin: bytes,
    most: int,
    *,
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
    connect_timeout: float = 10.0,
    max_message_bytes: int = 64 << 20,
    keepalive: float | None = 15.0,
) -> ClientLane:
    """A client's lane to ``tcp://HOST:PORT`` (or ``tcp:///PATH``)."""
    if not address.name and not address.port:
        raise InvalidArgument(f"a client needs the server's port: {address.text!r} has none")
    _check(connect_timeout=connect_timeout, max_message_bytes=max_message_bytes)
    _check(**({} if keepalive is None else {"keepalive": keepalive}))
    return StreamClient(address, _token(token), _tls(tls), connect_timeout, max_message_bytes, keepalive)


def open_server(
    address: Address,
    *,
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
    insecure: bool = False,
    handshake_timeout: float = 10.0,
    max_clients: int = 1000,
    max_message_bytes: int = 64 << 20,
    keepalive: float | None = 15.0,
) -> ServerLane:
    """A server's lane at ``tcp://HOST:PORT`` (or ``tcp:///PATH``). Off loopback it wants a token or certificates."""
    _check(handshake_timeout=handshake_timeout, max_clients=max_clients, max_message_bytes=max_message_bytes)
    _check(**({} if keepalive is None else {"keepalive": keepalive}))
    asks_who_comes = token is not None or (tls is not None and _tls(tls).verify_mode is ssl.CERT_REQUIRED)  # type: ignore[union-attr]
    if not (address.name or insecure or is_loopback(address.host) or asks_who_comes):
        raise RefusedError(
            f"{address.host} can be reached from other machines: give the server a token=, a tls= context that asks "
            "for certificates of clients, or say insecure=True"
        )
    return StreamServer(address, _token(token), _tls(tls), handshake_timeout, max_clients, max_message_bytes, keepalive)
