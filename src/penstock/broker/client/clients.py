"""Client and AsyncClient: the broker's verbs as methods, over one implementation of the protocol.

A client is used by one thread (or one event loop) at a time; ``close`` may be called by any thread. It connects at
first use, reconnects by itself, and sends again what was not confirmed; a message is stored once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from penstock.broker.client.dialogue import Dialogue, Pending
from penstock.broker.client.link import Link
from penstock.broker.client.requests import Requests
from penstock.broker.liveness import DEFAULT_S
from penstock.channel import Deadline
from penstock.errors import ClosedError, ProtocolError

if TYPE_CHECKING:
    from penstock.broker.client.subscriber import Subscriber


CLOSED = "this client was closed"
UNKNOWN = "it was closed while messages were under way: whether these are stored is not known"


def tls_context(tls: bool | str | Path | ssl.SSLContext | None) -> ssl.SSLContext | None:
    """None: plain. True: the system's authorities. A path: the authority's certificate. A context: used unchanged."""
    if tls is None or tls is False or isinstance(tls, ssl.SSLContext):
        return tls or None
    return ssl.create_default_context(cafile=None if tls is True else str(tls))


class _Base(Requests):
    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 9876,
        *,
        token: str | None = None,
        tls: bool | str | Path | ssl.SSLContext | None = None,
        name: str = "",
        timeout: float = 30.0,
        reconnect: bool = True,
        keepalive_s: float = DEFAULT_S,
    ) -> None:
        self._options: dict[str, Any] = {
            "token": token,
            "tls": tls,
            "timeout": timeout,
            "reconnect": reconnect,
            "keepalive_s": keepalive_s,
        }
        self.timeout = timeout  #: seconds that an answer may take
        self._staged = {}
        self._dialogue = Dialogue(token=token, name=name)
        self._link = Link(
            host,
            port,
            self._dialogue,
            tls=tls_context(tls),
            reconnect=reconnect,
            connect_timeout=timeout,
            keepalive_s=keepalive_s,
        )

    @property
    def journal(self) -> str:
        """The identity of the broker's store; empty before the first answer."""
        return self._dialogue.journal

    @property
    def connections(self) -> int:
        """How often this client has connected."""
        return self._link.connections

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._link.closed

    def _close(self) -> None:
        self._dialogue.refused = self._dialogue.refused or ClosedError(CLOSED)  # the error for requests after this
        self._link.close()

    def subscribe(self, queue: str = "", **options: Any) -> Subscriber:
        """A consumer of a queue, over its own connection; with the client's options unless others are given."""
        from penstock.broker.client.subscriber import Subscriber

        return Subscriber(self._link.host, self._link.port, queue=queue, **{**self._options, **options})

    def _advance(self) -> None:
        """Do everything that can be done without waiting."""
        self._link.pump()
        try:
            while self._dialogue.step():
                pass
        except ProtocolError as error:
            self._link.lost(error)
        self._link.send()


class Client(_Base):
    """The synchronous client: a method returns when the broker has answered."""

    def _finish(self, pending: Pending, deadline: Deadline | None = None, *, keep: bool = False) -> Any:
        """Wait for the answer, for ``timeout`` seconds or until an earlier ``deadline``. A request that was never sent
        is taken back then, unless ``keep``.
        """
        began = time.monotonic()
        most = self.timeout if deadline is None or deadline.left is None else min(self.timeout, deadline.left)
        try:
            while not pending.done:
                self._advance()
                if pending.done:
                    break
                left = began + most - time.monotonic()
                if left <= 0:
                    if not keep:
                        self._dialogue.withdraw(pending)
                    raise TimeoutError(self._link.silence(most))
                self._link.wait(left)
        except ClosedError:
            if self.closed and pending.publishes:
                raise ClosedError(UNKNOWN) from None
            raise
        return pending.result()

    def close(self) -> None:
        """Close the connection."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Done:
    """An awaitable that is already done."""

    def __await__(self) -> Generator[Any, None, None]:
        yield from ()


class AsyncClient(_Base):
    """The client for asyncio: methods return awaitables. Many may be awaited at a time."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: deque[tuple[Pending, asyncio.Future[None]]] = deque()

    def _finish(self, pending: Pending) -> Any:
        return self._answer(pending)

    async def _answer(self, pending: Pending) -> Any:
        if pending.done:
            return pending.result()
        self._link.check("this client")
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._link.fileno(), self._ready)
        self._ready()
        if not pending.done:
            future = self._loop.create_future()
            self._waiting.append((pending, future))
            try:
                async with asyncio.timeout(self.timeout):
                    await future
            except TimeoutError:
                self._dialogue.withdraw(pending)
                raise TimeoutError(self._link.silence(self.timeout)) from None
        return pending.result()

    def _ready(self) -> None:
        """Called by the loop when the descriptor is readable."""
        assert self._loop is not None
        if self._link.closed:
            return
        with contextlib.suppress(Exception):  # the tasks that wait get the error from their requests
            self._advance()
        # done, or its task was cancelled
        while self._waiting and (self._waiting[0][0].done or self._waiting[0][1].done()):
            future = self._waiting.popleft()[1]
            if not future.done():
                future.set_result(None)

    def close(self) -> Awaitable[None]:
        """Close the connection. It is closed when this returns; the result may be awaited, as for all methods here."""
        if self._loop is not None and not (self.closed or self._loop.is_closed()):
            self._loop.remove_reader(self._link.fileno())
            self._loop.call_soon_threadsafe(self._tell_closed)
        self._close()
        return _Done()

    def _tell_closed(self) -> None:
        """End the waits of all tasks: no answer will come."""
        while self._waiting:
            pending, future = self._waiting.popleft()
            if not future.done():
                told = UNKNOWN if pending.publishes else "this client was closed while it waited"
                future.set_exception(ClosedError(told))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
