"""HttpPoster: each message as the body of a POST; its properties as headers ``X-Property-NAME``.

args: ``url`` (required, http or https), ``timeout_s`` (10.0), ``content_type`` ("application/octet-stream"),
``headers`` ({}), ``token`` (null: no ``Authorization: Bearer``), ``tries`` (5), ``backoff_s`` (0.5, doubled each time).
Answers of 500 and above, 408 and 429, and connections that fail are tried again; after that, and with other answers
outside 200 to 299, it is a failure.
"""

from __future__ import annotations

import http.client
import threading
from typing import Any
from urllib.parse import quote, urlsplit

from penstock._core.gateway import GatewayMessage
from penstock.gateway.module import Module, Outlet, options


class _Refused(OSError):
    """An answer that another try would not change, or the last one."""


class HttpPoster(Module):
    """Posts."""

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        given = options(args, url="", timeout_s=10.0, content_type="application/octet-stream", headers={}, token=None,
                        tries=5, backoff_s=0.5)  # fmt: skip
        if given["tries"] < 1 or not given["backoff_s"] > 0:
            raise ValueError("tries is 1 or more and backoff_s above 0")
        if (parts := urlsplit(given["url"])).scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url is http://HOST... or https://HOST..., not {given['url']!r}")
        return given

    def create(self, broker: Outlet, configuration: Any) -> None:
        """Prepare a connection, which the first message opens."""
        super().create(broker, configuration)
        parts = urlsplit(configuration["url"])
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname or "", parts.port, timeout=configuration["timeout_s"])
        self._ending = threading.Event()
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

    def receive(self, message: GatewayMessage) -> None:
        """Post one and wait for the answer."""
        headers = {f"X-Property-{quote(k, safe='')}": quote(v, safe=" /:;,.=+") for k, v in message.properties.items()}
        headers["Content-Type"] = self.configuration["content_type"]
        headers.update(self.configuration["headers"])
        if self.configuration["token"] is not None:
            headers["Authorization"] = f"Bearer {self.configuration['token']}"
        self._post_until_taken(bytes(message), headers)

    def _post_until_taken(self, body: bytes, headers: dict[str, str]) -> None:
        for tried in range(1, self.configuration["tries"] + 1):
            last = tried == self.configuration["tries"] or self._ending.is_set()
            try:
                status = self._post(body, headers)
                if 200 <= status < 300:
                    return
                if last or not (status >= 500 or status in (408, 429)):
                    raise _Refused(f"{self.configuration['url']} answered {status}")
            except (OSError, http.client.HTTPException) as error:
                if last or isinstance(error, _Refused):
                    raise
            if tried > 1:  # the first time the connection may only have been closed while idle
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
        except BaseException:  # half an answer may be waiting
            self._connection.close()
            raise

    def destroy(self) -> None:
        """Close the connection."""
        self._connection.close()
