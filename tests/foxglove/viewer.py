"""A viewer: a client of the Foxglove WebSocket protocol, as small as the tests need it."""

from __future__ import annotations

import json
import re
import struct
import time
from typing import Any

from websockets.sync.client import connect

PLAY, PAUSE = 0, 1


class Viewer:
    def __init__(self, port: int) -> None:
        self._connecting = connect(f"ws://127.0.0.1:{port}", subprotocols=["foxglove.sdk.v1"], max_size=None)  # type: ignore[list-item]
        self._socket = self._connecting.__enter__()
        self.info: dict[str, Any] = {}
        self.channels: dict[str, dict[str, Any]] = {}
        self.gone: list[int] = []
        self.messages: list[tuple[str, int, bytes]] = []  # topic, time, body
        self.states: list[dict[str, Any]] = []
        self.parameters: dict[str, Any] = {}
        self._topics: dict[int, str] = {}  # by the subscription's number
        self._asked: list[dict[str, int]] = []
        self.statuses: list[str] = []

    def __enter__(self) -> Viewer:
        self.until(lambda: self.info)
        return self

    def __exit__(self, *error: Any) -> None:
        self._connecting.__exit__(*error)

    def until(self, holds: Any, timeout: float = 60) -> Any:
        """Take what comes until something holds."""
        deadline = time.monotonic() + timeout
        while not (found := holds()):
            assert time.monotonic() < deadline, (self.info, list(self.channels), self.messages[-3:], self.states[-3:], self.statuses)
            try:
                self._take(self._socket.recv(timeout=0.1))
            except TimeoutError:
                continue
        return found

    def _take(self, said: str | bytes) -> None:
        if isinstance(said, str):
            told = json.loads(said)
            kind = told["op"]
            if kind == "status":
                self.statuses.append(told["message"])
            if kind == "serverInfo":
                self.info = told
            elif kind == "advertise":
                self.channels.update({channel["topic"]: channel for channel in told["channels"]})
            elif kind == "unadvertise":
                self.gone += told["channelIds"]
                self.channels = {t: c for t, c in self.channels.items() if c["id"] not in told["channelIds"]}
            elif kind == "status" and "nknown channel" in told["message"]:
                # the package tells of a channel an instant before it takes subscriptions to it
                number = int(re.findall(r"\d+", told["message"])[-1])
                for asked in self._asked:
                    if asked["channelId"] == number:
                        self._say({"op": "subscribe", "subscriptions": [asked]})
            elif kind == "parameterValues":
                self.parameters.update({one["name"]: one["value"] for one in told["parameters"]})
        elif said[0] == 1:
            number, time_ns = struct.unpack_from("<IQ", said, 1)
            self.messages.append((self._topics[number], time_ns, said[13:]))
        elif said[0] == 5:
            status, now_ns, speed, did_seek, size = struct.unpack_from("<BQfBI", said, 1)
            names = ("playing", "paused", "buffering", "ended")
            request = said[19 : 19 + size].decode()
            self.states.append(
                {"status": names[status], "now_ns": now_ns, "speed": speed, "did_seek": bool(did_seek), "id": request}
            )

    def watch(self, topic: str) -> dict[str, Any]:
        """Subscribe to a topic once it is there; gives its channel."""
        channel: dict[str, Any] = self.until(lambda: self.channels.get(topic))
        number = len(self._topics) + 1
        self._topics[number] = topic
        self._asked.append({"id": number, "channelId": channel["id"]})
        self._say({"op": "subscribe", "subscriptions": self._asked[-1:]})
        return channel

    def unwatch(self, topic: str) -> None:
        self._say({"op": "unsubscribe", "subscriptionIds": [n for n, t in self._topics.items() if t == topic]})

    def set(self, **values: Any) -> None:
        named = [{"name": name, "value": value} for name, value in values.items()]
        self._say({"op": "setParameters", "parameters": named, "id": "set"})

    def get(self, *names: str) -> None:
        self._say({"op": "getParameters", "parameterNames": list(names), "id": "get"})

    def control(self, command: int, speed: float = 1.0, seek_ns: int | None = None, request: str = "r") -> dict[str, Any]:
        """Ask for it; gives the state that answers."""
        body = request.encode()
        seek = (0, 0) if seek_ns is None else (1, seek_ns)
        self._socket.send(struct.pack("<BBfBQI", 3, command, speed, *seek, len(body)) + body)
        answer: dict[str, Any] = self.until(lambda: next((s for s in self.states if s["id"] == request), None))
        return answer

    def bodies(self, topic: str) -> list[bytes]:
        return [body for name, _, body in self.messages if name == topic]

    def times(self, topic: str) -> list[int]:
        return [time_ns for name, time_ns, _ in self.messages if name == topic]

    def _say(self, what: dict[str, Any]) -> None:
        self._socket.send(json.dumps(what))
