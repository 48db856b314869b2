"""Connection: a client of nats-py in a thread with its own event loop; other threads give it coroutines to run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.errors import ClosedError, InvalidArgument, PenstockError, RefusedError
from penstock.throttle import Throttle

log = logging.getLogger("penstock.nats")
TIME_HEADER = "Penstock-Time-Ns"
MAX_HEADERS_BYTES = 64 << 10
Result = TypeVar("Result")


@dataclass(frozen=True)
class Access:
    """Where the servers are, and what they ask for."""

    host: str
    port: int
    token: str | None = field(default=None, repr=False)
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool | str | ssl.SSLContext | None = None
    timeout: float = 10.0

    @property
    def places(self) -> list[tuple[str, int]]:
        """Host and port of each server."""
        if "," not in self.host:
            return [(self.host, self.port)]
        found = []
        for text in self.host.split(","):
            name, _, port = text.rpartition(":")
            known = name and port.isascii() and port.isdigit() and not text.endswith("]")
            found.append((name, int(port)) if known else (text, self.port))
        return [(name.removeprefix("[").removesuffix("]"), port) for name, port in found]

    @property
    def place(self) -> str:
        """For messages to people."""
        return f"{self.host}:{self.port}"

    def options(self) -> dict[str, Any]:
        """Of ``nats.connect``."""
        scheme = "tls" if self.tls else "nats"
        servers = [f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}" for host, port in self.places]
        found: dict[str, Any] = {"servers": servers, "connect_timeout": self.timeout}
        given = {"token": self.token, "user": self.user, "password": self.password}
        found |= {name: value for name, value in given.items() if value}
        if self.tls:
            context = self.tls if isinstance(self.tls, ssl.SSLContext) else None
            authority = None if self.tls is True else str(self.tls)
            found["tls"] = context or ssl.create_default_context(cafile=authority)
        return found


def check_subject(subject: str, *, wildcards: bool) -> str:
    """A subject of NATS: tokens separated by dots."""
    tokens = subject.split(".")
    plain = all(token and token.isprintable() and not set(token) & set(" \t") for token in tokens)
    wild = [at for at, token in enumerate(tokens) if token in ("*", ">")]
    if not plain or (">" in tokens[:-1]) or (wild and not wildcards):
        allowed = "; '*' stands for one word, '>' at the end for the rest" if wildcards else ", without wildcards"
        raise InvalidArgument(f"{subject!r} is not a subject: words separated by dots{allowed}")
    return subject


def headers_of(properties: Mapping[str, str] | None, timestamp_ns: int | None) -> dict[str, str] | None:
    """Properties as headers. What a header cannot hold is refused, and so are names that mean something to a server."""
    found = {}
    for name, value in (properties or {}).items():
        if not name or not name.isascii() or not name.isprintable() or set(name) & set(": "):
            raise InvalidArgument(f"property {name!r} cannot be a header of NATS: ASCII without blanks and colons")
        if name.lower().startswith("nats-"):
            raise InvalidArgument(f"property {name!r}: headers that begin with Nats- are for the server")
        if "\r" in value or "\n" in value or value != value.strip():
            raise InvalidArgument(
                f"property {name!r} cannot be a header of NATS: {value!r} has line ends or outer blanks"
            )
        found[name] = value
    if timestamp_ns is not None:
        found[TIME_HEADER] = str(timestamp_ns)
    if sum(len(name) + len(value) for name, value in found.items()) > MAX_HEADERS_BYTES:
        raise InvalidArgument(f"the properties are longer than {MAX_HEADERS_BYTES} bytes")
    return found or None


def properties_of(headers: Mapping[str, str] | None) -> tuple[dict[str, str], int | None]:
    """Headers as properties, without those of the server; and the publisher's time, where it gave one."""
    found = {name: value for name, value in (headers or {}).items() if not name.lower().startswith("nats-")}
    time_ns = found.pop(TIME_HEADER, "")
    known = time_ns.removeprefix("-").isdigit() and time_ns.isascii() and len(time_ns) < 20
    return found, int(time_ns) if known else None


def _client_of(access: Access) -> Any:
    """A client of nats-py. By itself it encrypts only where the server asks for it: one that offers no TLS, or somebody
    on the way who says so, would get the credentials and the messages as they are."""
    from nats.aio.client import Client

    class Encrypted(Client):  # type: ignore[misc, unused-ignore]
        def _connect_command(self) -> bytes:
            if not self._server_info.get("tls_required"):
                said = f"the NATS server at {access.place} offers no TLS; nothing was sent to it"
                raise OSError(said) if self.is_reconnecting else RefusedError(said)  # the first time nobody waits
            command: bytes = super()._connect_command()
            return command

    return Encrypted() if access.tls else Client()


class Connection:
    """Connects at once, or raises; connects again by itself after that."""

    def __init__(self, access: Access) -> None:
        try:
            client = _client_of(access)
        except ImportError:
            raise InvalidArgument("nats:// needs nats-py: pip install 'penstock[nats]'") from None
        self.access = access
        self.closed = False
        self._refuse_nobody()
        self._throttle = Throttle(log)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock-nats", daemon=True)
        self._thread.start()
        self.client: Any = client
        try:
            self.run(
                client.connect(
                    **access.options(), max_reconnect_attempts=-1, allow_reconnect=True, error_cb=self._note_error,
                    name="penstock",
                ),
                access.timeout,
            )  # fmt: skip
        except BaseException:
            self.close()
            raise

    def _refuse_nobody(self) -> None:
        """nats-py would try for ever: where no server listens, that is told at once."""
        problem: OSError | None = None
        for host, port in self.access.places:
            try:
                socket.create_connection((host, port), self.access.timeout).close()
                return
            except OSError as error:
                problem = error
        raise ConnectionError(f"no NATS server answers at {self.access.place}: {problem}") from None

    async def _note_error(self, error: Exception) -> None:
        self._throttle.log(logging.WARNING, "nats://%s: %s", self.access.place, str(error) or type(error).__name__)

    def run(self, work: Coroutine[Any, Any, Result], timeout: float | None) -> Result:
        """Run it in the loop, and wait for it. Errors of nats-py become the usual ones."""
        import nats.errors

        if self.closed:
            work.close()
            raise ClosedError("this handle was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout)
        except (TimeoutError, nats.errors.TimeoutError):
            future.cancel()
            raise TimeoutError(f"nats://{self.access.place} did not answer within {timeout:g} s") from None
        except CancelledError:
            raise ClosedError("this handle was closed") from None
        except nats.errors.ConnectionClosedError:
            raise ClosedError(f"the connection to nats://{self.access.place} was closed") from None
        except nats.errors.Error as error:
            raise RefusedError(f"nats://{self.access.place}: {str(error) or type(error).__name__}") from None
        except OSError as error:
            raise ConnectionError(f"no NATS server answers at {self.access.place}: {error}") from None

    def call_soon(self, function: Callable[[], Any]) -> None:
        """In the loop's thread, soon."""
        with contextlib.suppress(RuntimeError):  # it was closed
            self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Send what is pending and leave, for as long as the time-out allows."""
        if self.closed:
            return
        with contextlib.suppress(PenstockError, OSError):
            self.run(self._leave(), min(self.access.timeout, 5.0))
        self.closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _leave(self) -> None:
        with contextlib.suppress(Exception):
            await self.client.flush(2)
        await self.client.close()
