"""Server: shows live addresses, or plays a recording, to whoever connects with the Foxglove WebSocket protocol.

Threads: ``run`` manages the live addresses; each address with viewers has a thread of its own, and so has a playback.
Requests of viewers arrive on the protocol's threads, which only store them.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import foxglove
from foxglove.websocket import (
    Capability,
    ChannelView,
    Client,
    Parameter,
    PlaybackCommand,
    PlaybackControlRequest,
    PlaybackState,
    PlaybackStatus,
    ServerListener,
    StatusLevel,
)

from penstock.address import check_host, is_loopback
from penstock.errors import InvalidArgument, RefusedError
from penstock.foxglove.board import Board
from penstock.foxglove.live import Live
from penstock.foxglove.playback import Playback, State

__all__ = ["Server"]

TEND_S = 0.5
STATUS = {"playing": PlaybackStatus.Playing, "paused": PlaybackStatus.Paused, "ended": PlaybackStatus.Ended}


class Server:
    """A context manager. Shows ``recording`` if given, else ``addresses``, else everything on this machine."""

    def __init__(
        self,
        addresses: Sequence[str] = (),
        recording: Path | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 8766,
        paused: bool = False,
        loop: bool = False,
        insecure: bool = False,
    ) -> None:
        check_host(host)
        if not is_loopback(host) and not insecure:
            raise InvalidArgument(
                f"{host} can be reached from other machines, and the protocol has no authentication: whoever connects "
                "sees all that is shown; --insecure allows it"
            )
        self.board = Board()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._server: Any = None
        self._host, self._port = host, port
        self.live: Live | None = None
        self.playback: Playback | None = None
        if recording is None:
            self.live = Live(self.board, addresses, paused=paused)
        else:
            self.playback = Playback(self.board, recording, self._broadcast_state, self._warn, paused=paused, loop=loop)

    def __enter__(self) -> Server:
        more: dict[str, Any] = {}
        if self.playback is not None:
            more["playback_time_range"] = self.playback.range_ns
        try:
            self._server = foxglove.start_server(
                name="penstock",
                host=self._host,
                port=self._port,
                capabilities=[Capability.Parameters, Capability.Time],
                server_listener=Listener(self),
                context=self.board.context,
                **more,
            )
        except Exception as error:  # the package has no errors of its own
            self.close()
            said = f"{self._host}:{self._port}: {str(error).removeprefix('FoxgloveError: ')}"
            raise RefusedError(f"{said}; --port chooses another, 0 a free one") from None
        if self.playback is not None:
            self.playback.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything; waits for the threads."""
        if self.live is not None:
            self.live.close()
        if self.playback is not None:
            self.playback.close()
        if self._server is not None:
            self._server.stop()
            self._server = None

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.port)

    @property
    def url(self) -> str:
        """What a viewer opens."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"ws://{host}:{self.port}"

    def run(self, seconds: float | None = None) -> None:
        """Manage the addresses until interrupted or the time is over."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while deadline is None or time.monotonic() < deadline:
            if self.live is not None:
                self.live.refresh_topics()
            try:
                self._wake.get(timeout=TEND_S)
                while True:  # several wake-ups count as one
                    self._wake.get_nowait()
            except queue.Empty:
                pass

    def note_viewer(self, channel: int, change: int) -> None:
        """One viewer more or fewer subscribes to a channel."""
        self.board.note_viewer(channel, change)
        if self.playback is not None:
            self.playback.look()
        self._wake.put(None)

    @property
    def paused(self) -> bool:
        """Whether nothing is sent."""
        if self.live is not None:
            return self.live.paused
        return self.playback is not None and self.playback.state.status != "playing"

    def parameters(self) -> list[Parameter]:
        """``paused``, and of a recording its ``speed``."""
        found = [Parameter("paused", value=self.paused)]
        if self.playback is not None:
            found.append(Parameter("speed", value=self.playback.state.speed))
        return found

    def set_parameter(self, name: str, value: Any) -> None:
        """Apply a parameter that a viewer has set; others than those two are ignored."""
        if name == "paused" and isinstance(value, bool):
            if self.live is not None:
                self.live.paused = value
            elif self.playback is not None:
                self._broadcast_state(self.playback.control(paused=value))
        elif name == "speed" and isinstance(value, int | float) and self.playback is not None:
            self._broadcast_state(self.playback.control(speed=float(value)))

    def tell_parameters(self) -> None:
        """The parameters have changed by other means: tell those who show them."""
        if self._server is not None:
            self._server.publish_parameter_values(self.parameters())

    def _broadcast_state(self, state: State) -> None:
        server = self._server
        if server is not None:
            server.broadcast_time(state.now_ns)
            server.broadcast_playback_state(_playback_state(state, ""))

    def _warn(self, why: str) -> None:
        if self._server is not None:
            self._server.publish_status(why, StatusLevel.Error)


def _playback_state(state: State, request: str) -> PlaybackState:
    return PlaybackState(STATUS[state.status], state.now_ns, state.speed, state.did_seek, request)


class Listener(ServerListener):  # type: ignore[misc]  # without the package it is unknown
    """Receives the requests of viewers, on the protocol's threads."""

    def __init__(self, server: Server) -> None:
        self._of = server

    def on_subscribe(self, client: Client, channel: ChannelView) -> None:
        """A viewer subscribes to a channel."""
        self._of.note_viewer(channel.id, 1)

    def on_unsubscribe(self, client: Client, channel: ChannelView) -> None:
        """A viewer has unsubscribed or disconnected."""
        self._of.note_viewer(channel.id, -1)

    def on_get_parameters(
        self, client: Client, param_names: list[str], request_id: str | None = None
    ) -> list[Parameter]:
        """The parameters that are named, or all."""
        return [one for one in self._of.parameters() if not param_names or one.name in param_names]

    def on_set_parameters(
        self, client: Client, parameters: list[Parameter], request_id: str | None = None
    ) -> list[Parameter]:
        """Set parameters; returns all of them afterwards."""
        for one in parameters:
            self._of.set_parameter(one.name, one.get_value())
        return self._of.parameters()

    def on_playback_control_request(self, playback_control_request: PlaybackControlRequest) -> PlaybackState | None:
        """Play, pause, seek or change the speed."""
        asked, playback = playback_control_request, self._of.playback
        if playback is None:
            return None
        paused = asked.playback_command == PlaybackCommand.Pause
        state = playback.control(paused=paused, speed=asked.playback_speed, seek_ns=asked.seek_time)
        self._of.tell_parameters()
        return _playback_state(state, asked.request_id)
