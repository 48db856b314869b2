"""HttpPoster: each message as the body of a POST; its properties as headers ``X-Property-NAME``.

args: ``url`` (required, http or https), ``timeout_s`` (10.0), ``content_type`` ("application/octet-stream"). Answers
outside 200 to 299 count as failures; a connection that was closed while idle is opened again once.
"""

from __future__ import annotations

import http.client
from typing import Any
from urllib.parse import quote, urlsplit

from penstock._core.gateway import GatewayMessage
from penstock.gateway.module import Module, Outlet, options


class HttpPoster(Module):
    """Posts."""

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        given = options(args, url="", timeout_s=10.0, content_type="application/octet-stream")
        if (parts := urlsplit(given["url"])).scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url is http://HOST... or https://HOST..., not {given['url']!r}")
        return given

    def create(self, broker: Outlet, configuration: Any) -> None:
        """Prepare a connection, which the first message opens."""
        super().create(broker, configuration)
        parts = urlsplit(configuration["url"])
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname or "", parts.port, timeout=configuration["timeout_s"])
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

    def receive(self, message: GatewayMessage) -> None:
        """Post one and wait for the answer."""
        headers = {f"X-Property-{quote(k, safe='')}": quote(v, safe=" /:;,.=+") for k, v in message.properties.items()}
        headers["Content-Type"] = self.configuration["content_type"]
        try:
            status = self._post(bytes(message), headers)
        except ConnectionError:
            status = self._post(bytes(message), headers)
        if not 200 <= status < 300:
            raise OSError(f"{self.configuration['url']} answered {status}")

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
