"""HttpPoster: sends each message as the body of a POST request, its properties as headers ``X-Property-NAME``.

args: ``url`` (required, http or https; ``USER:PASSWORD@`` in it is sent as basic authorization), ``timeout_s`` (10.0),
``content_type`` (null: "application/json" for batches of that format, else "application/octet-stream"), ``headers``
({}), ``token`` (null: no ``Authorization: Bearer``), ``tries`` (5), ``backoff_s`` (0.5, doubled each time). Answers of
500 and above, 408 and 429, and failed connections are tried again; after the last try, and with other answers outside
200 to 299, the message fails. ``batch`` (1; more: up to this many waiting messages go into one request, without headers
of their own), ``batch_format`` ("lines": contents, each with a line break; "json": a list of objects as in FileOut).

Example: {"name": "uplink", "loader": {"name": "python", "entrypoint": "penstock.gateway.modules:HttpPoster"}, "args":
{"url": "https://example.org/in", "token": "${file:uplink.token}", "batch": 100, "batch_format": "json"}}
"""

from __future__ import annotations

import base64
import http.client
import json
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from penstock._core.gateway import GatewayMessage
from penstock.gateway.errors import give_back
from penstock.gateway.module import Module, Outlet, options
from penstock.gateway.modules.file_out import as_json

ARGS = {"url": "", "timeout_s": 10.0, "content_type": None, "headers": {}, "token": None, "tries": 5, "backoff_s": 0.5,
        "batch": 1, "batch_format": "lines"}  # fmt: skip
_NAME = re.compile(r"[!#-'*+.^`|~\w-]+", re.ASCII)
_LINE = re.compile(r"[\t\x20-\x7e\x80-\U0010ffff]*")


class HttpRefused(OSError):
    """An answer that another try would not change, or the answer to the last try."""


def check_token(token: Any) -> None:
    """Refuse a token that a header cannot carry. The error does not contain it: it is a secret."""
    if token is not None and not (isinstance(token, str) and token and _LINE.fullmatch(token)):
        raise ValueError("token must be null or a text of one line that is not empty")


class HttpPoster(Module):
    """Sends messages to a web server."""

    reaches_outside = True

    receive_many: Callable[[Sequence[GatewayMessage]], None]  # set if messages are sent in batches

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        given = options(args, **ARGS)
        if given["batch"] < 1 or given["batch_format"] not in ("lines", "json"):
            raise ValueError('batch must be 1 or more and batch_format "lines" or "json"')
        if not isinstance(given["content_type"], str | None):
            raise ValueError(f"content_type must be a text or null, not {given['content_type']!r}")
        if given["tries"] < 1 or not min(given["backoff_s"], given["timeout_s"]) > 0:
            raise ValueError("tries must be 1 or more, backoff_s and timeout_s above 0")
        for name, value in given["headers"].items():
            if not (isinstance(value, str) and _NAME.fullmatch(name) and _LINE.fullmatch(value)):
                raise ValueError("headers must be names with texts of one line")  # which may be secrets
        check_token(given["token"])
        _check_url(given["url"])
        return given

    def create(self, broker: Outlet, configuration: Any) -> None:
        """Prepare a connection, which the first message opens."""
        super().create(broker, configuration)
        parts = urlsplit(configuration["url"])
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname or "", parts.port, timeout=configuration["timeout_s"])
        self._ending = threading.Event()
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        place = parts.netloc.rpartition("@")[2]
        self._shown_url = f"{parts.scheme}://{place}{parts.path}"  # a query or a user may hold secrets
        user = parts.netloc.rpartition("@")[0]
        self._basic = {"Authorization": f"Basic {base64.b64encode(unquote(user).encode()).decode()}"} if user else {}
        if configuration["batch"] > 1:
            self.receive_many = self._post_batches

    def receive(self, message: GatewayMessage) -> None:
        """Post one and wait for the answer."""
        if self.configuration["batch"] > 1:  # it failed in a batch and is tried again alone
            self._post_batches([message])
            return
        headers = {f"X-Property-{quote(k, safe='')}": _quoted(v) for k, v in message.properties.items()}
        self._post_until_taken(bytes(message), {**headers, **self._own_headers()})

    def _post_batches(self, messages: Sequence[GatewayMessage]) -> None:
        """Post them in batches of the configured size."""
        most = self.configuration["batch"]
        for begin in range(0, len(messages), most):
            group = messages[begin : begin + most]
            if self.configuration["batch_format"] == "lines":
                body = b"".join(bytes(message) + b"\n" for message in group)
            else:
                body = json.dumps([as_json(message) for message in group]).encode()
            try:
                self._post_until_taken(body, self._own_headers())
            except (OSError, http.client.HTTPException) as error:
                if begin == 0:
                    raise
                give_back(self, error, *messages[begin:])  # those before were accepted
                return

    def _own_headers(self) -> dict[str, str]:
        c = self.configuration
        kind = "application/json" if c["batch"] > 1 and c["batch_format"] == "json" else "application/octet-stream"
        headers = {"Content-Type": c["content_type"] or kind, **self._basic, **c["headers"]}
        if self.configuration["token"] is not None:
            headers["Authorization"] = f"Bearer {self.configuration['token']}"
        return headers

    def _post_until_taken(self, body: bytes, headers: dict[str, str]) -> None:
        for tried in range(1, self.configuration["tries"] + 1):
            last = tried == self.configuration["tries"] or self._ending.is_set()
            try:
                status = self._post(body, headers)
                if 200 <= status < 300:
                    return
                if last or not (status >= 500 or status in (408, 429)):
                    raise HttpRefused(f"{self._shown_url} answered {status}")
            except HttpRefused:
                raise
            except (OSError, http.client.HTTPException) as error:
                if last:
                    raise ConnectionError(f"{self._shown_url} did not answer: {error}") from error
            if tried > 1:  # at the first try the connection may just have been closed while idle: no pause
                self._ending.wait(self.configuration["backoff_s"] * 2 ** (tried - 2))

    def kill(self) -> None:
        """Try no more."""
        self._ending.set()

    def _post(self, body: bytes, headers: dict[str, str]) -> int:
        try:
            self._connection.request("POST", self._path, body, headers)
            answer = self._connection.getresponse()
            answer.read(1 << 20)
            return answer.status
        except BaseException:  # a part of an answer may be unread: use a new connection
            self._connection.close()
            raise

    def destroy(self) -> None:
        """Close the connection."""
        self._connection.close()


def _check_url(url: str) -> None:
    """Check the URL. Errors do not contain it: it may hold secrets."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError as error:
        raise ValueError(f"url: {error}") from None
    if not good or not url.isascii() or re.search(r"[\0-\x20\x7f]", url):
        raise ValueError("url must be http://HOST... or https://HOST..., with %20 for a blank")


def _quoted(value: str) -> str:
    """The value percent-encoded for a header. Blanks are encoded only if it begins or ends with one: a header would
    lose those.
    """
    return quote(value, safe=" /:;,.=+" if value == value.strip() else "/:;,.=+")
