"""HttpIn: a webhook. It publishes the body of each POST or PUT request as a message.

args: ``host`` ("127.0.0.1"), ``port`` (8080; 0: a free one), ``path`` ("/": this path and all below it), ``token``
(null; required off loopback: requests carry ``Authorization: Bearer TOKEN``), ``max_body_bytes`` (1048576),
``timeout_s`` (10.0: how long a sender may be silent), ``max_requests`` (64 at once), ``confirm`` ("published", or
"handled": answer when all sinks linked at_least_once have handled the message, or have given it up after
``max_tries``; or 503 after ``timeout_s``, so that the sender tries again). Answers: 204 accepted, 400, 401, 404, 405 to
other methods, 411, 413, 503. Properties: ``path``, ``content-type``, and each header ``X-Property-NAME`` as NAME,
percent-decoded (except ``path`` and ``content-type``, which come from the request itself); 400 if one holds a NUL.

Example: {"name": "hook", "loader": {"name": "python", "entrypoint": "penstock.gateway.modules:HttpIn"}, "args":
{"host": "0.0.0.0", "port": 8443, "path": "/hook", "token": "${file:hook.token}", "confirm": "handled"}}
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import unquote, urlsplit

from penstock.address import check_host, is_loopback
from penstock.errors import PenstockError
from penstock.gateway.losses import last_loss
from penstock.gateway.module import Outlet, Source, options

LOOK_S = 0.002
LINGER_READS = 64
PREFIX = "x-property-"


class HttpIn(Source):
    """Publishes the bodies of requests."""

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        given = options(args, host="127.0.0.1", port=8080, path="/", token=None, max_body_bytes=1 << 20, timeout_s=10.0,
                        max_requests=64, confirm="published")  # fmt: skip
        if given["token"] is not None and (not isinstance(given["token"], str) or not given["token"]):
            raise ValueError("token must be a text that is not empty, or null")
        check_host(given["host"])
        if given["token"] is None and not is_loopback(given["host"]):
            raise ValueError(f"host {given['host']!r} can be reached from outside: give a token")
        if given["confirm"] not in ("published", "handled"):
            raise ValueError(f'confirm must be "published" or "handled", not {given["confirm"]!r}')
        if not 0 <= given["port"] <= 65535 or given["max_requests"] < 1 or given["max_body_bytes"] < 0:
            raise ValueError("port must be 0 to 65535, max_requests 1 or more, max_body_bytes 0 or more")
        if not given["timeout_s"] > 0 or not given["path"].startswith("/"):
            raise ValueError("timeout_s must be above 0 and path must begin with /")
        return given

    @classmethod
    def durable_with(cls, configuration: Any) -> bool:
        """As its args say."""
        return bool(configuration["confirm"] == "handled")

    def create(self, broker: Outlet, configuration: Any) -> None:
        """Open the port now, so that an error is noticed at once."""
        super().create(broker, configuration)
        self.durable = self.durable_with(configuration)
        self._server = _Server(self)
        self.port = self._server.server_address[1]

    def run(self) -> None:
        """Answer until the end."""
        self._server.serve_forever(0.05)

    def stop(self) -> None:
        """Take no more requests."""
        if hasattr(self, "stopping"):
            self.stopping.set()
            self._server.shutdown()
        super().stop()

    def destroy(self) -> None:
        """Give the port back."""
        super().destroy()
        self._server.server_close()

    def take(self, body: bytes, properties: dict[str, str]) -> bool:
        """Publish one; returns whether it was published, or handled, depending on ``confirm``."""
        since = last_loss()
        self.publish(body, properties)
        if not self.durable:
            return True
        mark, until_s = self.broker.mark(self, since), time.monotonic() + self.configuration["timeout_s"]
        while not mark.handled():
            if mark.lost or time.monotonic() >= until_s or self.stopping.is_set():
                return False
            time.sleep(LOOK_S)
        return True


class _Server(ThreadingMixIn, HTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, module: HttpIn) -> None:
        self.module = module
        self._room = threading.BoundedSemaphore(module.configuration["max_requests"])
        super().__init__((module.configuration["host"], module.configuration["port"]), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for it, if ``max_requests`` allows one more."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle the request, then let the next one start."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that disconnects early is no failure of the module."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.server.module.configuration["timeout_s"])

    def do_POST(self) -> None:
        c = self.server.module.configuration
        path, wanted = urlsplit(self.path).path, c["path"].rstrip("/")
        size = self.headers.get("Content-Length", "")
        given = self.headers.get("Authorization", "").encode()
        if c["token"] is not None and not hmac.compare_digest(given, f"Bearer {c['token']}".encode()):
            self._answer(401)
        elif path != wanted and not path.startswith(f"{wanted}/"):
            self._answer(404)
        elif len(self.headers.get_all("Content-Length", ())) + len(self.headers.get_all("Transfer-Encoding", ())) > 1:
            self._answer(400)  # another server might see a different end of this request (request smuggling)
        elif not size.isdecimal():
            self._answer(411)
        elif len(size) > 18 or int(size) > c["max_body_bytes"]:
            self._answer(413)
        else:
            self._take(path, int(size))

    do_PUT = do_POST

    def do_GET(self) -> None:
        self._answer(405)

    do_HEAD = do_DELETE = do_PATCH = do_OPTIONS = do_GET

    def _take(self, path: str, size: int) -> None:
        body = self.rfile.read(size)
        if len(body) < size:
            self.close_connection = True
            return
        properties = {}
        for name, value in self.headers.items():
            if name.lower().startswith(PREFIX):
                properties[unquote(name[len(PREFIX) :])] = unquote(value)
        properties.pop("", None)
        properties |= {"path": path, "content-type": self.headers.get("Content-Type", "")}
        refused = "\0" in "".join(map("".join, properties.items()))  # no property can hold it
        try:
            taken = not refused and self.server.module.take(body, properties)
        except (PenstockError, TimeoutError):
            taken = False
        self._answer(400 if refused else 204 if taken else 503, body_was_read=True)

    def _answer(self, status: int, *, body_was_read: bool = False) -> None:
        self.send_response_only(status)
        self.send_header("Content-Length", "0")
        if status == 405:
            self.send_header("Allow", "POST, PUT")
        if not body_was_read:  # the unread body would be taken for the next request
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        if not body_was_read:
            self._linger()

    def _linger(self) -> None:
        """Read what the client is still sending, up to a bound: closing with unread input would discard the answer."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            for _ in range(LINGER_READS):
                if not self.connection.recv(1 << 16):
                    return

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are counted as messages, and not logged."""
