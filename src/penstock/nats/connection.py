"""Connection: a client of nats-py in a thread with its own event loop; other threads pass it coroutines to run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import operator
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from penstock.address import places_of
from penstock.channel import check_timeout
from penstock.errors import ClosedError, InvalidArgument, PenstockError, RefusedError, StateError
from penstock.nats_credentials import read_credentials
from penstock.resolving import resolving
from penstock.throttle import Throttle

log = logging.getLogger("penstock.nats")
TIME_HEADER = "Penstock-Time-Ns"
MAX_SUBJECT_BYTES = 3900  # servers end connections with lines above 4096 bytes (max_control_line)
_TIME = re.compile(r"-?[0-9]{1,19}")
MAX_HEADERS_BYTES = 64 << 10
GREETING = b"INFO {"
PING_S, MOST_PINGS = 5, 2  # a server that leaves so many unanswered is left for another one, with the next
FLUSH_POLL_S = 0.02
Result = TypeVar("Result")


class CredentialsError(OSError):
    """The credentials file cannot be used while a connection is opened again. nats-py takes an ``OSError`` for a server
    that failed, and tries on; other errors end its task for good.
    """


@dataclass(frozen=True)
class Access:
    """The addresses of the servers, and the credentials."""

    host: str
    port: int
    token: str | None = field(default=None, repr=False)
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool | str | ssl.SSLContext | None = None
    timeout: float = 10.0
    creds: str | None = None  #: a credentials file

    def __post_init__(self) -> None:
        check_timeout(self.timeout)
        for option in ("token", "user", "creds"):  # an empty one would connect as somebody else
            if getattr(self, option) == "":
                raise InvalidArgument(f"{option}= is empty: give it a value, or leave it out")

    @property
    def places(self) -> list[tuple[str, int]]:
        """Host and port of each server."""
        return places_of(self.host, self.port)

    @property
    def place(self) -> str:
        """The servers as text, for messages to the user."""
        return f"{self.host}:{self.port}"

    def options(self) -> dict[str, Any]:
        """Of ``nats.connect``."""
        scheme = "tls" if self.tls else "nats"
        servers = [f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}" for host, port in self.places]
        found: dict[str, Any] = {"servers": servers, "connect_timeout": self.timeout}
        given = {"token": self.token, "user": self.user, "password": self.password}
        found |= {name: value for name, value in given.items() if value}
        if creds := self.creds:
            if any(given.values()):
                raise InvalidArgument("creds=FILE goes without token=, user= and password=")
            read_credentials(creds)  # what is wrong with it is said now
            found["user_jwt_cb"] = partial(_jwt_of, creds)
            found["signature_cb"] = partial(_signature_by, creds)
        if self.tls:
            found["tls"] = self.tls if isinstance(self.tls, ssl.SSLContext) else self._context()
        return found

    def _context(self) -> ssl.SSLContext:
        """Of the system's authorities, or of a file: the errors of ``ssl`` do not name it."""
        authority = None if self.tls is True else str(self.tls)
        try:
            return ssl.create_default_context(cafile=authority)
        except ssl.SSLError as error:
            raise InvalidArgument(f"tls={authority} is no certificate in PEM form: {error}") from None
        except OSError as error:
            raise InvalidArgument(f"tls={authority} cannot be read: {error.strerror}") from None


def _jwt_of(creds: str) -> bytes:
    return read_credentials(creds).jwt.encode()


def _signature_by(creds: str, nonce: str) -> bytes:
    return read_credentials(creds).sign(nonce.encode()).encode()


def check_subject(subject: str, *, wildcards: bool) -> str:
    """A subject of NATS: tokens separated by dots."""
    tokens = subject.split(".")
    plain = all(token and token.isprintable() and not set(token) & set(" \t") for token in tokens)
    wild = [at for at, token in enumerate(tokens) if token in ("*", ">")]
    if not plain or (">" in tokens[:-1]) or (wild and not wildcards):
        allowed = "; '*' stands for one word, '>' at the end for the rest" if wildcards else ", without wildcards"
        raise InvalidArgument(f"{subject!r} is not a subject: words separated by dots{allowed}")
    if (size := len(subject.encode())) > MAX_SUBJECT_BYTES:
        raise InvalidArgument(f"the subject has {size} bytes, and a NATS server takes at most {MAX_SUBJECT_BYTES}")
    return subject


def headers_of(properties: Mapping[str, str] | None, timestamp_ns: int | None) -> dict[str, str] | None:
    """Properties as headers. Refuses what a header cannot hold, and names that have a meaning for the server."""
    found = {}
    for name, value in (properties or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"properties are text to text, not {name!r}: {value!r}")
        if not name or not name.isascii() or not name.isprintable() or set(name) & set(": "):
            raise InvalidArgument(f"property {name!r} cannot be a header of NATS: ASCII without blanks and colons")
        if name.lower().startswith("nats-"):
            raise InvalidArgument(f"property {name!r}: headers that begin with Nats- are for the server")
        if name.lower() == TIME_HEADER.lower():
            raise InvalidArgument(f"property {name!r}: this header is for the message's time; give it as timestamp_ns=")
        if "\r" in value or "\n" in value or value != value.strip():
            raise InvalidArgument(
                f"property {name!r} cannot be a header of NATS: {value!r} has line ends or outer blanks"
            )
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidArgument(f"property {name!r} cannot be a header of NATS: {value!r} is not UTF-8") from None
        found[name] = value
    if timestamp_ns is not None:
        if isinstance(timestamp_ns, bool) or not hasattr(timestamp_ns, "__index__"):
            raise TypeError(f"timestamp_ns must be an int, not {type(timestamp_ns).__name__}")
        if not -(2**63) < (number := operator.index(timestamp_ns)) < 2**63:
            raise InvalidArgument(f"timestamp_ns={number} must be nanoseconds since 1970, in 64 bits")
        found[TIME_HEADER] = str(number)
    if sum(len(name) + len(value) for name, value in found.items()) > MAX_HEADERS_BYTES:
        raise InvalidArgument(f"the properties are longer than {MAX_HEADERS_BYTES} bytes")
    return found or None


def properties_of(headers: Mapping[str, str] | None) -> tuple[dict[str, str], int | None]:
    """Headers as properties, without those of the server; and the publisher's time, if there is one."""
    found = {name: value for name, value in (headers or {}).items() if not name.lower().startswith("nats-")}
    time_ns = found.pop(TIME_HEADER, "")
    number = int(time_ns) if _TIME.fullmatch(time_ns) else None
    return found, number if number is not None and -(2**63) < number < 2**63 else None


def _client_of(access: Access) -> Any:
    """A client of nats-py that insists on TLS where that is wanted, and whose ``flush`` means what it says."""
    from nats.aio.client import Client

    class Careful(Client):  # type: ignore[misc, unused-ignore]
        was_connected = False  # nats-py's own state says the same at the first connection and at those that follow

        async def connect(self, *arguments: Any, **options: Any) -> None:
            try:
                await super().connect(*arguments, **options)
            except ValueError as error:  # asyncio's, of a line without an end
                raise error if isinstance(error, PenstockError) else ConnectionError(f"its greeting: {error}") from None
            self.was_connected = True

        def _connect_command(self) -> bytes:
            # By itself nats-py encrypts only if the server asks for it: a server without TLS, or an attacker in
            # between, would get the credentials and the messages unencrypted.
            if access.tls and not self._server_info.get("tls_required"):
                said = f"the NATS server at {access.place} offers no TLS; nothing was sent to it"
                # the first connection fails at once, a reconnect tries again
                raise OSError(said) if self.was_connected else RefusedError(said)
            writer = getattr(self._transport, "_io_writer", None)
            if writer is not None and writer.get_extra_info("ssl_object") is not None:
                # nats-py does not tell its protocol that it is encrypted: asyncio would warn at the end of each
                # connection.
                writer.transport.get_protocol()._over_ssl = True
            if access.creds:
                self._auth_configured = True  # which nats-py forgets where it is given functions
            try:
                command: bytes = super()._connect_command()
            except (InvalidArgument, OSError) as error:  # the credentials file is not what it was
                raise (CredentialsError(str(error)) if self.was_connected else error) from None
            return command

        async def _process_pong(self) -> None:
            # The answer to a `flush` that was given up: nats-py would set the result of a cancelled future, and its
            # loop that reads would end by that error.
            if self._pongs and self._pongs[0].done():
                self._pongs[0] = asyncio.get_running_loop().create_future()
            await super()._process_pong()

        def _reads(self) -> bool:
            return self._reading_task is not None and not self._reading_task.done()

        async def flush(self, timeout: float = 10) -> None:
            # While nobody reads, as during a reconnect, that of nats-py returns without the server's answer.
            while not self.is_closed and not (self.is_connected and self._reads()):
                await asyncio.sleep(FLUSH_POLL_S)
            await super().flush(timeout)  # type: ignore[arg-type, unused-ignore]

    return Careful()


class Connection:
    """Connects at once, or raises; connects again by itself after that."""

    def __init__(self, access: Access) -> None:
        try:
            client = _client_of(access)
        except ImportError:
            raise InvalidArgument("nats:// needs nats-py: pip install 'penstock[nats]'") from None
        self.access = access
        self.closed = False
        self._pid = os.getpid()
        options = access.options()
        self._refuse_nobody()
        self._throttle = Throttle(log)
        self._connected = False  # for the first time
        self._leaving = False
        self._error = ""  # the last one of connecting
        self._unusable = ""  # what was last said about the credentials file
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="penstock-nats", daemon=True)
        self._thread.start()
        self.client: Any = client
        try:
            self.run(
                client.connect(
                    **options, max_reconnect_attempts=-1, allow_reconnect=True, name="penstock",
                    ping_interval=PING_S, max_outstanding_pings=MOST_PINGS,
                    error_cb=self.note_error, disconnected_cb=self._note_loss, reconnected_cb=self._note_return,
                ),
                access.timeout,
            )  # fmt: skip
            self._connected = True
        except BaseException:
            self.close()
            raise

    def _run_loop(self) -> None:
        """Run the loop, and end what is left of its tasks: in its own thread, for that of ``close`` may run another."""
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def _refuse_nobody(self) -> None:
        """nats-py would try for ever: where no server listens, or something else does, that is told at once."""
        problem: OSError | None = None
        deadline = time.monotonic() + self.access.timeout
        for host, port in self.access.places:
            try:
                with resolving(host):
                    probe = socket.create_connection((host, port), max(0.1, deadline - time.monotonic()))
                with probe:
                    greeting = b""
                    with contextlib.suppress(TimeoutError):
                        greeting = probe.recv(256)
                    if greeting.startswith(b"-ERR"):  # of too many connections
                        raise ConnectionError(greeting.decode(errors="replace").strip())
                    if not greeting or not GREETING.startswith(greeting[: len(GREETING)]):
                        raise ConnectionError("what listens there does not greet as one")
                return
            except OSError as error:
                problem = error
        raise ConnectionError(f"no NATS server answers at {self.access.place}: {problem}") from None

    async def note_error(self, error: Exception) -> None:
        """Tell it. While nats-py connects for the first time: keep it, or end that where trying again is of no use."""
        self._error = str(error) or type(error).__name__
        if not self._connected:
            if "authorization" in self._error.lower():
                creds = self.access.creds
                refused = f": it refuses the credentials file {creds} (expired, revoked or damaged)" if creds else ""
                raise RefusedError(f"nats://{self.access.place} does not let this client in{refused}: {self._error}")
            if isinstance(error, ssl.SSLCertVerificationError) and len(self.access.places) == 1:
                raise RefusedError(f"nats://{self.access.place} is not trusted: {self._error}")
        elif isinstance(error, CredentialsError):
            if self._unusable != self._error:
                log.error("nats://%s: %s; trying again until it can be used", self.access.place, self._error)
            self._unusable = self._error
        elif "EOF" not in self._error:  # a lost connection is logged by `_note_loss`
            trying = "" if self.client.is_connected else "; trying again"
            self._throttle.log(logging.WARNING, "nats://%s: %s%s", self.access.place, self._error, trying)

    async def _note_loss(self) -> None:
        if self._connected and not self._leaving:
            log.warning("nats://%s: the connection was lost; connecting again", self.access.place)

    async def _note_return(self) -> None:
        self._unusable = ""
        log.warning("nats://%s: connected again", self.access.place)

    @property
    def forked(self) -> bool:
        """Whether this is a forked child's copy: the connection and the thread belong to the parent."""
        return os.getpid() != self._pid

    def refuse_child(self, handle: str) -> None:
        """StateError in a forked child."""
        if self.forked:
            raise StateError(f"{handle} was opened before this process was forked; open it again in the child")

    def run(self, work: Coroutine[Any, Any, Result], timeout: float | None) -> Result:
        """Run a coroutine in the loop and wait for it. Errors of nats-py become the usual ones."""
        import nats.errors

        if self.closed:
            work.close()
            raise ClosedError("this handle was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout)
        except (TimeoutError, nats.errors.TimeoutError):
            future.cancel()
            why = f": {self._error}" if self._error and not self.client.is_connected else ""
            raise TimeoutError(f"nats://{self.access.place} did not answer within {timeout:g} s{why}") from None
        except CancelledError:
            raise ClosedError("this handle was closed") from None
        except nats.errors.ConnectionClosedError:
            raise ClosedError(f"the connection to nats://{self.access.place} was closed") from None
        except nats.errors.Error as error:
            raise RefusedError(f"nats://{self.access.place}: {str(error) or type(error).__name__}") from None
        except OSError as error:
            raise ConnectionError(f"no NATS server answers at {self.access.place}: {error}") from None

    def call_soon(self, function: Callable[[], Any]) -> None:
        """Call a function in the loop's thread, soon."""
        with contextlib.suppress(RuntimeError):  # it was closed
            self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Send what is pending and leave, for as long as the time-out allows."""
        if self.closed or self.forked:
            return
        with contextlib.suppress(PenstockError, OSError):
            self.run(self._leave(), min(self.access.timeout, 5.0))
        self.closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _leave(self) -> None:
        self._leaving = True
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self.client.flush(2), 2)  # it may be connecting again
        await self.client.close()
