"""InfluxOut: writes numbers to InfluxDB, or to any server that accepts its line protocol over HTTP.

args: ``url`` (required: with its path, ``http://HOST:8086/api/v2/write?org=O&bucket=B``, or ``/write?db=D`` of 1.x;
times are nanoseconds), ``token`` (null), ``measurement`` ("gateway"; ``{NAME}`` stands for a property), ``tags`` ([]:
names of properties), ``fields`` (null: all numbers, truth values and texts of the content, a JSON object; or a list of
names), and as in HttpPoster ``timeout_s``, ``headers``, ``tries``, ``backoff_s``. Waiting messages are sent in one
request. If the content is not a JSON object with such a field, only that message fails.

Example: {"name": "influx", "loader": {"name": "python", "entrypoint": "penstock.gateway.modules:InfluxOut"}, "args":
{"url": "http://10.0.0.5:8086/api/v2/write?org=plant&bucket=raw", "token": "${file:influx.token}", "measurement":
"{quantity}", "tags": ["deviceId"]}}
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence
from typing import Any

from penstock._core.gateway import GatewayMessage
from penstock.gateway.errors import give_back
from penstock.gateway.module import options
from penstock.gateway.modules.http_poster import ARGS, HttpPoster, check_token


class InfluxOut(HttpPoster):
    """Sends lines of the line protocol."""

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        all_ = options(args, **{name: value for name, value in {**ARGS, **OWN}.items() if name not in NOT_HERE})
        if not isinstance(all_["fields"], list | None) or all_["fields"] == []:
            raise ValueError("fields must be null or a list of names")
        check_token(token := all_.pop("token"))
        own = {name: all_.pop(name) for name in OWN}
        headers = {} if token is None else {"Authorization": f"Token {token}"}
        given = super().parse({**all_, "content_type": "text/plain; charset=utf-8"})
        return {**given, **own, "headers": {**headers, **given["headers"]}}

    def receive_many(self, messages: Sequence[GatewayMessage]) -> None:
        """Send them as lines of one request."""
        lines: list[str] = []
        failed: list[tuple[Exception, GatewayMessage]] = []
        for message in messages:
            try:
                lines.append(self._line(message))
            except ValueError as error:
                if len(messages) == 1:
                    raise
                failed.append((error, message))
        if lines:
            self._post_until_taken("\n".join(lines).encode(), self._own_headers())
        for failure, message in failed:
            give_back(self, failure, message)

    def receive(self, message: GatewayMessage) -> None:
        """Send one."""
        self.receive_many([message])

    def _line(self, message: GatewayMessage) -> str:
        c, data = self.configuration, json.loads(bytes(message))
        if not isinstance(data, dict):
            raise ValueError(f"the content must be a JSON object, not {type(data).__name__}")
        wanted = data if c["fields"] is None else {name: data[name] for name in c["fields"] if name in data}
        fields = [f"{_escaped(name)}={text}" for name, value in wanted.items() if (text := _field(value)) is not None]
        if not fields:
            raise ValueError("the content has no field that can be written")
        name = re.sub(r"{(.*?)}", lambda m: message.properties.get(m[1], "-"), c["measurement"])
        tags = [(tag, message.properties[tag]) for tag in c["tags"] if message.properties.get(tag)]
        head = ",".join([_escaped(name, ", "), *(f"{_escaped(tag)}={_escaped(value)}" for tag, value in tags)])
        return f"{head} {','.join(fields)} {message.timestamp_ns or time.time_ns()}"


OWN: dict[str, Any] = {"measurement": "gateway", "tags": [], "fields": None}
NOT_HERE = ("batch", "batch_format", "content_type")  # of HttpPoster: messages that wait together are sent together


def _escaped(text: str, special: str = ",= ") -> str:
    """A name or a tag: it cannot hold a line's end, nor end in a backslash."""
    text = re.sub(r"[\r\n]+", " ", text).rstrip("\\") or "-"
    return "".join(f"\\{sign}" if sign in special else sign for sign in text)


def _field(value: Any) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value}i" if -(1 << 63) <= value < 1 << 63 else repr(float(value))
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else None
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return None
