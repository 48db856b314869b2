"""A recording in a viewer: its range, playing, pausing, seeking, speed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import penstock
from penstock.errors import InvalidArgument
from penstock.foxglove.server import Server
from penstock.journal import Journal

from .viewer import PAUSE, PLAY, Viewer

BEGIN_NS = 1_700_000_000_000_000_000
SECOND_NS = 1_000_000_000


class Tick(msgspec.Struct):
    n: int


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """A hundred seconds: a tick each second, and one thing at the tenth."""
    directory = tmp_path / "run"
    with penstock.publisher(f"journal:{directory}#clock.tick", type=Tick):
        pass
    with Journal(directory) as journal:
        for n in range(101):
            at_ns = BEGIN_NS + n * SECOND_NS
            journal.append("clock.tick", b'{"n":%d}' % n, timestamp_ns=at_ns)
            if n == 10:
                journal.append("thing", b"once", timestamp_ns=at_ns + 1)
            if n in (20, 50):
                journal.roll(full=False)
    return directory


@pytest.fixture
def server(recording: Path) -> Iterator[Server]:
    with Server(recording=recording, port=0, paused=True) as server:
        yield server


def look(viewer: Viewer, server: Server, *topics: str) -> None:
    """Subscribe, and wait until the server knows."""
    for topic in topics:
        viewer.watch(topic)
    shown = [one for one in server.board.topics.values() if one.topic in topics]
    viewer.until(lambda: all(server.board.watched(one) for one in shown))


def numbers(viewer: Viewer) -> list[int]:
    return [json.loads(body)["n"] for body in viewer.bodies("/clock/tick")]


def second(n: float) -> int:
    return BEGIN_NS + int(n * SECOND_NS)


def test_what_is_told_before_it_plays(server: Server) -> None:
    with Viewer(server.port) as viewer:
        assert "playbackControl" in viewer.info["capabilities"]
        assert viewer.info["dataStartTime"] == {"sec": BEGIN_NS // SECOND_NS, "nsec": 0}
        assert viewer.info["dataEndTime"] == {"sec": BEGIN_NS // SECOND_NS + 100, "nsec": 0}
        viewer.until(lambda: {"/clock/tick", "/thing"} <= viewer.channels.keys())
        assert viewer.channels["/clock/tick"]["schemaName"] == "Tick"
        untyped = viewer.channels["/thing"]
        assert (untyped["schemaName"], json.loads(untyped["schema"] or "null")) == ("untyped", {"type": "object"})


def test_all_of_it_in_order_and_to_the_end(server: Server) -> None:
    with Viewer(server.port) as viewer:
        look(viewer, server, "/clock/tick", "/thing")
        assert viewer.control(PLAY, 100.0)["status"] == "playing"
        viewer.until(lambda: viewer.states[-1]["status"] == "ended" and len(numbers(viewer)) == 101)
        assert numbers(viewer) == list(range(101))
        assert viewer.times("/clock/tick") == [second(n) for n in range(101)]
        assert viewer.bodies("/thing") == [b'{"value": "once"}']
        assert viewer.states[-1]["now_ns"] == second(100)
        assert viewer.control(PLAY, 100.0, request="again")["now_ns"] == second(0)
        viewer.until(lambda: len(numbers(viewer)) >= 102)
        assert numbers(viewer)[101] == 0


def test_damage_is_told_and_what_lies_before_and_after_is_shown(
    recording: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = sorted(recording.glob("*.log"))[1]  # the ticks 21 to 50
    body = bytearray(log.read_bytes())
    body[body.index(b'{"n":30}') + 5] ^= 0xFF
    log.write_bytes(body)
    with Server(recording=recording, port=0, paused=True) as server, Viewer(server.port) as viewer:
        look(viewer, server, "/clock/tick")
        viewer.control(PLAY, 100.0)
        viewer.until(lambda: any("damaged" in status for status in viewer.statuses))
        viewer.until(lambda: viewer.states[-1]["status"] == "paused")
        assert "damaged" in caplog.text
        assert numbers(viewer) == list(range(len(numbers(viewer)))) and 20 <= len(numbers(viewer)) <= 30
        viewer.control(PLAY, 100.0, seek_ns=second(60), request="after it")
        viewer.until(lambda: numbers(viewer)[-1] == 100 and viewer.states[-1]["status"] == "ended")


def test_seek_shows_what_stood_there_and_goes_on_from_there(server: Server) -> None:
    with Viewer(server.port) as viewer:
        look(viewer, server, "/clock/tick", "/thing")
        state = viewer.control(PAUSE, 1.0, second(60.5))
        assert (state["status"], state["now_ns"], state["did_seek"]) == ("paused", second(60.5), True)
        viewer.until(lambda: 60 in numbers(viewer) and viewer.bodies("/thing"))
        viewer.messages.clear()
        assert viewer.control(PLAY, 100.0, request="play")["did_seek"] is False
        viewer.until(lambda: viewer.states[-1]["status"] == "ended" and 100 in numbers(viewer))
        assert numbers(viewer) == list(range(61, 101))


def test_seek_back_and_beyond_the_ends(server: Server) -> None:
    with Viewer(server.port) as viewer:
        look(viewer, server, "/clock/tick")
        assert viewer.control(PAUSE, 1.0, second(500), "late")["now_ns"] == second(100)
        viewer.until(lambda: 100 in numbers(viewer))
        assert viewer.control(PLAY, 100.0, 5, "early")["now_ns"] == second(0)
        viewer.until(lambda: len(numbers(viewer)) == 102)
        assert numbers(viewer) == [100, *range(101)]


def test_pause_holds_the_time_and_strange_speeds_change_nothing(server: Server) -> None:
    with Viewer(server.port) as viewer:
        look(viewer, server, "/clock/tick")
        viewer.control(PLAY, 20.0, request="play")
        viewer.until(lambda: len(numbers(viewer)) >= 3)
        held = viewer.control(PAUSE, float("nan"), request="pause")
        assert held["speed"] == 20.0
        again = viewer.control(PAUSE, -1.0, request="still")
        assert (again["now_ns"], again["speed"]) == (held["now_ns"], 20.0)
        assert max(numbers(viewer)) <= (held["now_ns"] - BEGIN_NS) // SECOND_NS
        assert viewer.control(PAUSE, 1e9, request="fast")["speed"] == 100.0
        viewer.get()
        viewer.until(lambda: viewer.parameters == {"paused": True, "speed": 100.0})


def test_parameters_steer_it_too(server: Server) -> None:
    with Viewer(server.port) as viewer:
        viewer.watch("/clock/tick")
        viewer.get()
        viewer.until(lambda: viewer.parameters == {"paused": True, "speed": 1.0})
        viewer.set(paused=False, speed=50)
        viewer.until(lambda: viewer.parameters == {"paused": False, "speed": 50.0})
        viewer.until(lambda: any(state["speed"] == 50.0 for state in viewer.states))  # the buttons show it too
        viewer.until(lambda: len(numbers(viewer)) >= 10)
        viewer.set(paused=True)
        viewer.until(lambda: viewer.parameters["paused"] is True)


def test_time_stands_still_until_somebody_looks(recording: Path) -> None:
    with Server(recording=recording, port=0) as server:
        assert server.playback is not None
        with Viewer(server.port) as viewer:
            assert viewer.control(PLAY, 100.0)["now_ns"] == second(0)
            assert viewer.control(PLAY, 100.0, request="still")["now_ns"] == second(0)
            viewer.watch("/clock/tick")
            viewer.until(lambda: numbers(viewer)[:3] == [0, 1, 2])
            viewer.control(PLAY, 0.01, request="slow")
        # who looked is gone
        with Viewer(server.port) as viewer:
            now = viewer.until(lambda: server.board.any_watched is False and server.playback.state.now_ns)
            assert server.playback.state.now_ns == now


def test_a_topic_that_is_looked_at_later_shows_what_stands_there(recording: Path) -> None:
    """A viewer subscribes to one topic after another while the recording plays already."""
    with Server(recording=recording, port=0, paused=True) as server, Viewer(server.port) as viewer:
        look(viewer, server, "/clock/tick")
        viewer.control(PLAY, 20.0)
        viewer.until(lambda: len(numbers(viewer)) >= 15)
        look(viewer, server, "/thing")  # it came once, at the tenth second
        viewer.until(lambda: viewer.states[-1]["status"] == "ended")
        viewer.until(lambda: len(numbers(viewer)) == 101 and viewer.bodies("/thing"))
        assert viewer.bodies("/thing") == [b'{"value": "once"}']


def test_a_loop_begins_again(recording: Path) -> None:
    with Server(recording=recording, port=0, loop=True) as server, Viewer(server.port) as viewer:
        look(viewer, server, "/clock/tick")
        viewer.control(PLAY, 100.0, second(95))
        viewer.until(lambda: 0 in numbers(viewer))


def test_who_comes_while_it_stands_sees_what_stands_there(server: Server) -> None:
    with Viewer(server.port) as first:
        look(first, server, "/clock/tick")
        first.control(PAUSE, 1.0, second(30.5))
        first.until(lambda: 30 in numbers(first))
        with Viewer(server.port) as later:
            later.watch("/clock/tick")
            later.until(lambda: 30 in numbers(later))


def test_an_empty_recording_is_told(tmp_path: Path) -> None:
    with Journal(tmp_path / "empty"):
        pass
    with pytest.raises(InvalidArgument, match="no messages"):
        Server(recording=tmp_path / "empty")


def test_nothing_of_a_server_is_left(recording: Path) -> None:
    import threading

    before: Any = {thread.name for thread in threading.enumerate()}
    for _ in range(3):
        with Server(recording=recording, port=0) as server, Viewer(server.port) as viewer:
            viewer.watch("/clock/tick")
            viewer.until(lambda viewer=viewer: numbers(viewer))
    deadline = time.monotonic() + 60
    while left := {thread.name for thread in threading.enumerate()} - before:  # a viewer's own thread ends a little later
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


class Reading(msgspec.Struct, frozen=True):
    n: int


class Renamed(msgspec.Struct, frozen=True):
    number: int
    unit: str


def test_every_message_is_shown_by_the_version_that_it_was_written_with(tmp_path: Path) -> None:
    address = f"journal:{tmp_path / 'run'}#level"
    with penstock.publisher(address, type=Reading) as old:
        for n in range(5):
            old.publish(Reading(n))
        with penstock.publisher(address, type=Renamed, evolve="any") as new:
            for n in range(5, 9):
                new.publish(Renamed(n, "m"))
        old.publish(Reading(9))
    with Server(recording=tmp_path / "run", port=0, paused=True) as server, Viewer(server.port) as viewer:
        look(viewer, server, "/level")
        schema = json.loads(viewer.channels["/level"]["schema"])
        assert set(schema["properties"]) == {"n", "number", "unit"}
        viewer.control(PLAY, 100.0)
        viewer.until(lambda: viewer.states[-1]["status"] == "ended" and len(viewer.bodies("/level")) == 10)
        shown = [json.loads(body) for body in viewer.bodies("/level")]
        renamed = [{"number": n, "unit": "m"} for n in range(5, 9)]
        assert shown == [*({"n": n} for n in range(5)), *renamed, {"n": 9}]
        assert server.board.topics["level"].failures == 0
