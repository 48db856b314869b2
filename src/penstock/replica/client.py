"""A small blocking NATS client: one connection at a time to any of several servers, requests and their answers.

It connects at the first request, and to another server after a failure. There is no thread: what a server sends between
requests waits in the socket. One thread uses it at a time.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import InvalidArgument, ProtocolError, RefusedError, describe
from penstock.nats_credentials import read_credentials
from penstock.replica import protocol
from penstock.replica.protocol import Failure, Info, Message, Parser, Ping, Pong
from penstock.resolving import resolving

PORT = 4222
READ_BYTES = 1 << 18
CONNECT_S = 3.0
LEAST_MESSAGE_BYTES = 1 << 16  # a server or stream that takes less in one message would have chains of tiny blocks
NO_RESPONDERS = 503
LET_IN = (
    "give its token (PENSTOCK_STORE_TOKEN, or nats://TOKEN@HOST), its user (nats://USER:PASSWORD@HOST) "
    "or a credentials file (nats://HOST/STREAM?creds=FILE)"
)
#: Why a handshake fails that does not succeed later either.
UNTRUSTED = ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER")
MORE_PAYLOAD = "max_payload: 8MB"
NEW_CREDS = "replace the credentials file: it is read again at every connection"
TRUST = "--store-authority FILE names the authority of the servers' certificates, where they have TLS"


class UnansweredError(TimeoutError):
    """No answer came: the request may have been carried out, may be carried out later, or never."""


@dataclass(frozen=True)
class Access:
    """The credentials. ``tls``: a context that verifies servers (and may present a client certificate)."""

    token: str = field(default="", repr=False)
    user: str = ""
    password: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    creds: str = ""  #: a credentials file

    def words(self, nonce: str = "") -> dict[str, str]:
        """The fields of ``CONNECT``. ``nonce``: what the server wants to be signed."""
        if self.creds:
            found = read_credentials(self.creds)
            return {"jwt": found.jwt, "sig": found.sign(nonce.encode())} if nonce else {}
        if self.token:
            return {"auth_token": self.token}
        return {"user": self.user, "pass": self.password} if self.user else {}


class Connection:
    """A connection to one server."""

    def __init__(self, server: tuple[str, int], access: Access, timeout: float) -> None:
        self.server = server
        self._parser = Parser()
        self._events: list[protocol.Event] = []
        self.info: dict[str, Any] = {}
        with resolving(server[0]):
            self._socket = socket.create_connection(server, timeout)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._greet(access, time.monotonic() + timeout)
        except BaseException:
            self._socket.close()
            raise

    @property
    def max_payload(self) -> int:
        """The longest message that the server accepts."""
        found = self.info.get("max_payload")
        return found if isinstance(found, int) and found > 0 else 1 << 20

    @property
    def too_little(self) -> str:
        """Why the server cannot keep blocks, or nothing."""
        if self.max_payload >= LEAST_MESSAGE_BYTES:
            return ""
        takes = f"{_name(self.server)} takes {self.max_payload} bytes in one message"
        return f"{takes}, and {LEAST_MESSAGE_BYTES} is the least"

    def _greet(self, access: Access, deadline: float) -> None:
        if not isinstance(self.event(deadline), Info):
            raise ProtocolError(f"{_name(self.server)} does not greet as a NATS server does")
        if self.info.get("tls_required") or access.tls is not None:
            context = access.tls or ssl.create_default_context()
            self._socket = context.wrap_socket(self._socket, server_hostname=self.server[0])
        words: dict[str, Any] = {"verbose": False, "pedantic": False, "headers": True, "no_responders": True}
        words |= {"protocol": 1, **access.words(str(self.info.get("nonce", "")))}
        self.send(protocol.connect({**words, "name": "penstock", "lang": "python", "version": "1"}))
        self.send(protocol.PING)
        while True:
            event = self.event(deadline)
            if isinstance(event, Pong):
                return
            if isinstance(event, Failure):
                raise RefusedError(f"{_name(self.server)} says: {event.text}{_remedy(event.text, access)}")

    def send(self, *pieces: bytes) -> None:
        """Send everything."""
        for piece in pieces if sum(map(len, pieces)) > READ_BYTES else (b"".join(pieces),):
            self._socket.sendall(piece)

    def event(self, deadline: float) -> protocol.Event:
        """The next event; UnansweredError if there is none before the deadline."""
        while not self._events:
            left = deadline - time.monotonic()
            if left <= 0:
                raise UnansweredError(f"{_name(self.server)} has not answered in time")
            self._socket.settimeout(left)
            try:
                data = self._socket.recv(READ_BYTES)
            except TimeoutError:
                continue
            if not data:
                raise ConnectionError(f"{_name(self.server)} has closed the connection")
            for event in self._parser.feed(data):
                if isinstance(event, Ping):
                    self.send(protocol.PONG)
                elif isinstance(event, Info):
                    self.info = event.fields
                    self._events.append(event)
                else:
                    self._events.append(event)
        return self._events.pop(0)

    def write_timeout(self, seconds: float) -> None:
        """How long sending may wait."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """Let go of the socket."""
        with contextlib.suppress(OSError):
            self._socket.close()


def _remedy(text: str, access: Access) -> str:
    """What to do about a server's refusal."""
    if "authorization" not in text.lower():
        return ""
    if access.creds:
        return f"; it refuses the credentials file {access.creds} (expired, revoked or damaged)"
    return f"; {LET_IN}"


def _name(server: tuple[str, int]) -> str:
    return f"{server[0]}:{server[1]}"


class Client:
    """Sends requests to any server that answers."""

    def __init__(self, servers: Sequence[tuple[str, int]], access: Access | None = None) -> None:
        self.servers = list(servers)
        self._access = access or Access()
        self._next = 0
        self._connection: Connection | None = None
        self._greeted = False  # by any server, at any time
        self._inbox = f"_INBOX.{secrets.token_hex(11)}"
        self._number = 0

    @property
    def name(self) -> str:
        """The server of the current connection, or of the next one, for messages to the user."""
        return _name(self.servers[self._next % len(self.servers)])

    def connection(self) -> Connection:
        """The current connection, or a new one to the next server that accepts it."""
        if self._connection is not None:
            return self._connection
        problem: Exception | None = None
        refusal: RefusedError | None = None  # by one that answers, which tells more than why another one is away
        untrusted = 0
        for _ in self.servers:
            server = self.servers[self._next % len(self.servers)]
            try:
                connection = Connection(server, self._access, CONNECT_S)
                if connection.too_little:
                    connection.close()
                    raise ProtocolError(f"{connection.too_little}: {MORE_PAYLOAD} in its configuration")
                connection.send(protocol.subscribe(f"{self._inbox}.*", "1"))
                self._connection = connection
                self._greeted = True
                return connection
            except (OSError, ProtocolError, InvalidArgument) as error:  # the last: a credentials file was replaced
                self._next += 1
                problem = error
                untrusted += isinstance(error, ssl.SSLError) and error.reason in UNTRUSTED
            except RefusedError as error:
                self._next += 1
                refusal = error
        names = ", ".join(map(_name, self.servers))
        if untrusted == len(self.servers) and not self._greeted:  # waiting does not change that
            raise RefusedError(f"{names} and this machine do not agree on TLS: {problem}; {TRUST}")
        if refusal is not None and not self._greeted:  # a wrong token
            raise refusal
        if refusal is not None:  # a token that was changed meanwhile may be changed back
            raise ConnectionError(f"no NATS server lets this program in any more: {refusal}")
        raise ConnectionError(f"no NATS server answers at {names}: {describe(problem) if problem else 'none is named'}")

    def request(
        self, subject: str, data: bytes = b"", headers: Mapping[str, str] | None = None, *, timeout: float
    ) -> Message:
        """One request, one answer. UnansweredError: no answer came. ConnectionError: the request was not sent."""
        for message in self.requests(subject, data, headers, timeout=timeout):
            return message
        raise UnansweredError(f"no answer to {subject}")

    def requests(
        self, subject: str, data: bytes = b"", headers: Mapping[str, str] | None = None, *, timeout: float
    ) -> Iterator[Message]:
        """One request, any number of answers; ``timeout`` is for each."""
        connection = self.connection()
        self._number += 1
        inbox = f"{self._inbox}.{self._number}"
        try:
            connection.write_timeout(timeout)
            connection.send(*protocol.publish(subject, inbox, data, headers))
            while True:
                yield self._answer(connection, inbox, time.monotonic() + timeout)
        except UnansweredError:
            self.disconnect()
            raise
        except (OSError, ProtocolError) as error:
            self.disconnect()
            raise UnansweredError(f"the connection to {_name(connection.server)} failed: {error}") from error

    def _answer(self, connection: Connection, inbox: str, deadline: float) -> Message:
        while True:
            event = connection.event(deadline)
            if isinstance(event, Message) and event.subject == inbox:
                return event
            if isinstance(event, Failure):
                raise ConnectionError(f"the server says: {event.text}")

    def disconnect(self) -> None:
        """Close the connection: the next request goes to the next server."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self._next += 1

    def close(self) -> None:
        """Let go of everything."""
        self.disconnect()
