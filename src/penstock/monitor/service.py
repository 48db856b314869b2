"""The monitor as a service: a listening socket, the watcher's thread and a web server, opened and closed together."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from urllib.parse import quote

import uvicorn

from penstock.address import is_loopback
from penstock.errors import InvalidArgument
from penstock.monitor.server import Settings, application
from penstock.observe.watcher import Watcher

__all__ = ["Service"]


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
    ) -> None:
        if token is not None and len(token) < 8:
            raise InvalidArgument("a token has at least 8 characters, or it would be guessed")
        self.token = token or (None if is_loopback(host) else secrets.token_urlsafe(18))
        self.watcher = Watcher(every_s=every_s)
        app = application(self.watcher, Settings(host, self.token, allow_actions), lambda: self._server.should_exit)
        self._server = _Server(
            uvicorn.Config(app, log_level="critical", access_log=False, timeout_graceful_shutdown=5, lifespan="off")
        )
        self._socket = _listen(host, port)
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The page's URL, with the token when there is one."""
        host, port = self._socket.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{port}/" + (f"?token={quote(self.token, safe='')}" if self.token else "")

    def __enter__(self) -> Service:
        self.watcher.look()
        self.watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(10)
        self.watcher.stop()
        self._socket.close()

    def run(self) -> None:
        """Serve until SIGINT or SIGTERM; afterwards the caller's handlers get the signal."""
        self._server.run(sockets=[self._socket])

    def start(self) -> None:
        """Serve in a thread, which leaves signals to the caller; returns when the page answers."""
        self._server.signals = False
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="penstock-page", daemon=True
        )
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)


class _Server(uvicorn.Server):
    """A server that leaves signals alone when it runs in a thread."""

    signals = True

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return super().capture_signals() if self.signals else contextlib.nullcontext()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        hint = "; --port 0 takes a free one" if port else ""
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}{hint}") from None
    return listener
