"""The monitor as a service: a listening socket, the watcher's thread and a web server, opened and closed together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import uvicorn

from penstock.address import check_host, is_loopback
from penstock.errors import ClosedError, InvalidArgument
from penstock.monitor import connections
from penstock.monitor.server import Settings, application
from penstock.observe.history_file import HistoryFile
from penstock.observe.watcher import Watcher
from penstock.quantities import check_duration
from penstock.resolving import UnresolvedError, resolving

__all__ = ["Service"]

log = logging.getLogger("penstock.monitor")

#: Bounds of the seconds between two looks: more often would use a whole core, less often would show nothing live.
EVERY_S = (0.01, 3600.0)


class Service:
    """A context manager: ``run`` serves in this thread until a signal ends it, ``start`` in a thread of its own."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str | None = None,
        allow_actions: bool = False,
        every_s: float = 1.0,
        certificate: str | None = None,
        key: str | None = None,
        insecure: bool = False,
        history: Path | None = None,
    ) -> None:
        """``certificate`` and ``key`` are PEM files: the page is served by TLS then, which it must be off loopback
        unless ``insecure``. ``history`` is a file that keeps a day of the plots; several monitors may share it."""
        if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65535:
            raise InvalidArgument(f"port={port!r} must be 0 to 65535; 0 takes a free one")
        every_s = check_duration(every_s, "every_s")
        if not EVERY_S[0] <= every_s <= EVERY_S[1]:
            raise InvalidArgument(f"every_s={every_s:g} must be {EVERY_S[0]:g} to {EVERY_S[1]:g} seconds")
        if token is not None and (not isinstance(token, str) or len(token) < 8):
            raise InvalidArgument("a token is a text of at least 8 characters, or it would be guessed")
        if (certificate is None) != (key is None):
            raise InvalidArgument("TLS needs a certificate and its key")
        check_host(host)
        if certificate is None and not insecure and not is_loopback(host):
            raise InvalidArgument(
                f"{host} is not loopback: without TLS the token and all that is shown could be read on the network; "
                "give a certificate and its key (--tls-certificate, --tls-key), or say insecure=True (--insecure)"
            )
        self._tls = certificate is not None
        self.token = token or (None if is_loopback(host) else secrets.token_urlsafe(18))
        self._socket = _listen(host, port)
        self._history = _opened(history)
        self.watcher = Watcher(every_s=every_s, long=self._history)
        settings = Settings(host, self.token, allow_actions, self._tls)
        app = application(self.watcher, settings, lambda: self._server.should_exit)
        self._server = _Server(
            uvicorn.Config(
                app, log_level="critical", access_log=False, timeout_graceful_shutdown=5, lifespan="off",
                http=connections.Connection, ws="none", ssl_certfile=certificate, ssl_keyfile=key,
            )
        )  # fmt: skip
        if self._tls:
            try:
                self._server.config.load()  # an unreadable certificate is reported here, not in a thread
            except OSError as error:  # of ssl too
                self._socket.close()
                raise InvalidArgument(f"the certificate {certificate} and key {key} cannot be used: {error}") from None
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def url(self) -> str:
        """The page's URL, with the token when there is one."""
        host, port = self._socket.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        scheme = "https" if self._tls else "http"
        return f"{scheme}://{shown}:{port}/" + (f"?token={quote(self.token, safe='')}" if self.token else "")

    def __enter__(self) -> Service:
        self.watcher.look()
        self.watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the page and the watcher; any thread may, and more than once."""
        self._closed = True
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(10)
        self.watcher.stop()
        self._socket.close()
        if self._history is not None:
            self._history.close()

    def run(self) -> None:
        """Serve until SIGINT or SIGTERM; afterwards the caller's handlers get the signal."""
        self._check_open()
        self._server.run(sockets=[self._socket])

    def start(self) -> None:
        """Serve in a thread, which leaves signals to the caller; returns when the page answers."""
        self._check_open()
        self._server.signals = False
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="penstock-page", daemon=True
        )
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the monitor has ended; open another one")


class _Server(uvicorn.Server):
    """A server that leaves signals alone when it runs in a thread."""

    signals = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Also SIGHUP, if the caller handles it: an exception out of its handler would leave the loop half ended."""
        if not self.signals:
            yield
            return
        with super().capture_signals():
            before = signal.getsignal(signal.SIGHUP)
            if not callable(before) or threading.current_thread() is not threading.main_thread():
                yield
                return
            signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, as uvicorn would, but with a bound for the handshake of TLS."""
        loop = asyncio.get_running_loop()
        handshake_s = connections.HEAD_S if self.config.ssl is not None else None
        self.servers = [
            await loop.create_server(self._connection, sock=one, ssl=self.config.ssl, ssl_handshake_timeout=handshake_s)
            for one in sockets or ()
        ]
        self.started = True

    def _connection(self) -> connections.Connection:
        return connections.Connection(self.config, self.server_state, {})


def _opened(path: Path | None) -> HistoryFile | None:
    """Open the history file; None with a warning if that fails: the page works without it."""
    try:
        return HistoryFile(path) if path is not None else None
    except (OSError, sqlite3.Error) as error:
        log.warning("%s cannot keep the history of the plots: %s", path, error)
        return None


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, connections.SEND_BUFFER_BYTES)
        with resolving(host):
            found = socket.getaddrinfo(host or None, port, family, socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        listener.bind(found[0][4])
        listener.listen(128)
    except OSError as error:
        listener.close()
        hint = "; --port 0 takes a free one" if port and not isinstance(error, UnresolvedError) else ""
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}{hint}") from None
    return listener
