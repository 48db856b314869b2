"""``penstock export --to lerobot``: frames at a fixed rate out of messages that came when they came."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy
import pytest

import penstock
from penstock.errors import InvalidArgument
from penstock.journal import Journal
from penstock.recording import lerobot
from penstock.types import codec_of
from tests.cli.command import run as command

parquet = pytest.importorskip("pyarrow.parquet")
pandas = pytest.importorskip("pandas")

SECOND = 1_000_000_000
BEGIN = 1_700_000_000 * SECOND


@dataclasses.dataclass
class Arm:
    shoulder: float
    elbow: float
    name: str = ""


@dataclasses.dataclass
class State:
    position: list[float]
    arm: Arm


@dataclasses.dataclass
class Joints:
    positions: list[float]


def fill(directory: Path, topic: str, kind: Any, *values: tuple[float, Any]) -> None:
    """Messages of a type at chosen times, in seconds."""
    codec = codec_of(kind)
    with penstock.publisher(f"journal:{directory}#{topic}", type=kind):
        pass
    with Journal(directory) as journal:
        for seconds, value in values:
            journal.append(topic, bytes(codec.encode(value)), timestamp_ns=BEGIN + int(seconds * SECOND))


def state(number: float) -> State:
    return State([number, -number], Arm(number, 10 * number))


def frames(dataset: Path) -> Any:
    return parquet.read_table(dataset / "data/chunk-000/file-000.parquet")


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """States at 0, 1, 2 ... 5 s, commands a quarter of a second later."""
    fill(tmp_path / "run", "state", State, *((number, state(number)) for number in range(6)))
    fill(tmp_path / "run", "command", float, *((number + 0.25, float(number)) for number in range(6)))
    return tmp_path / "run"


def test_a_frame_has_the_last_message_of_each_feature(recording: Path, tmp_path: Path) -> None:
    features = {"observation.state": "state:arm", "observation.position": "state:position", "action": "command"}
    done = lerobot.write(recording, tmp_path / "set", features, fps=2, task="reach")
    table = frames(tmp_path / "set")
    # From 0.25 s, when the first command came, to 5 s, the last state: at 0.25, 0.75 ... 4.75.
    assert (done.episodes, done.frames, done.empty) == (1, 10, [])
    times = numpy.arange(10) / 2 + 0.25
    assert table["observation.state"].to_pylist() == [[10.0 * int(time), float(int(time))] for time in times]
    assert table["observation.position"].to_pylist()[3] == [1.0, -1.0]
    assert table["action"].to_pylist() == [float(int(time - 0.25)) for time in times]
    assert table["timestamp"].to_pylist() == [number / 2 for number in range(10)]
    assert table["index"].to_pylist() == table["frame_index"].to_pylist() == list(range(10))
    info = json.loads((tmp_path / "set/meta/info.json").read_text())
    assert info["features"]["observation.state"] == {"dtype": "float32", "shape": [2], "names": ["elbow", "shoulder"]}
    assert info["features"]["action"] == {"dtype": "float32", "shape": [1], "names": None}
    assert (info["codebase_version"], info["fps"], info["splits"]) == ("v3.0", 2, {"train": "0:1"})
    tasks = pandas.read_parquet(tmp_path / "set/meta/tasks.parquet")
    assert tasks.loc["reach", "task_index"] == 0
    statistics = json.loads((tmp_path / "set/meta/stats.json").read_text())
    assert statistics["action"]["max"] == [4.0] and statistics["action"]["count"] == [10]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_messages_of_a_topic_begin_episodes(recording: Path, tmp_path: Path) -> None:
    fill(recording, "begin", str, (0.5, "pick"), (3.4, "place"), (5.6, "pick"))
    features = {"action": "command", "s": "state:position"}
    done = lerobot.write(recording, tmp_path / "set", features, fps=4, episodes="begin")
    assert (done.episodes, done.empty) == (2, [2])
    rows = parquet.read_table(tmp_path / "set/meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [row["tasks"] for row in rows] == [["pick"], ["place"]]
    # pick: from the first command after 0.5 s (1.25) to the last state before 3.4 s (3).
    assert [row["length"] for row in rows] == [8, 4]
    assert [(row["dataset_from_index"], row["dataset_to_index"]) for row in rows] == [(0, 8), (8, 12)]
    assert rows[1]["stats/action/min"] == [4.0]
    table = frames(tmp_path / "set")
    assert table["episode_index"].to_pylist() == [0] * 8 + [1] * 4
    assert table["task_index"].to_pylist() == [0] * 8 + [1] * 4
    assert table["frame_index"].to_pylist() == [*range(8), *range(4)]


@pytest.mark.parametrize(
    ("features", "told"),
    [
        ({}, "a dataset has features"),
        ({"index": "state"}, "'index' cannot be a feature"),
        ({"action": "comand"}, "there is no topic 'comand'; .*command"),
        ({"action": "state:arm.name"}, "str where a number is wanted"),
        ({"action": "state:leg"}, "State has no field 'leg'; valid: arm, position"),
        ({"action": "raw"}, "topic 'raw' has no type"),
        ({"action": "odd"}, "position [0-9]+ of odd: .* 1 numbers, and 2 in the messages before"),
        ({"action": "joints"}, "joints is no feature: .* name one of its fields, as in joints:positions"),
        ({"action": "camera"}, "pictures, which are not written"),
    ],
)
def test_what_cannot_be_a_feature_is_refused_by_name(
    recording: Path, tmp_path: Path, features: dict[str, str], told: str
) -> None:
    with Journal(recording) as journal:
        journal.append("raw", b"x")
    fill(recording, "odd", list[float], (0.0, [1.0, 2.0]), (1.0, [1.0]))
    fill(recording, "joints", Joints, (0.0, Joints([1.0])))
    fill(recording, "camera", penstock.Image, (0.0, numpy.zeros((2, 2), "u1")))
    with pytest.raises(InvalidArgument, match=told):
        lerobot.write(recording, tmp_path / "set", features, fps=10)
    assert not (tmp_path / "set").exists()


def test_by_the_command(recording: Path, tmp_path: Path) -> None:
    target = tmp_path / "set"
    words = ["export", str(recording), "--to", "lerobot", "-o", str(target), "--feature", "action=command", "--json"]
    done = command(*words, "--fps", "10", "--task", "reach")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"directory": str(target), "episodes": 1, "frames": 51}
    with pytest.raises(InvalidArgument, match=r"^start 1h is after the end"):
        lerobot.write(recording, tmp_path / "late", {"action": "command"}, fps=10, start="1h")
    late = command(*words, "--fps", "10", "-o", str(tmp_path / "late"), "--from", "1h")
    assert late.returncode == 2 and "--from 1h is after the end" in late.stderr
    again = command(*words, "--fps", "10")
    assert again.returncode == 2 and "is there already" in again.stderr
    assert "needs --fps" in command(*words).stderr
    assert "a folder" in command(*words, "--fps", "10", "-o", "-").stderr
    assert "are for --to lerobot" in command("export", str(recording), "--to", "csv", "--fps", "3").stderr
