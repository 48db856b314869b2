"""The demo: everything that was published arrives, every number agrees with every other, nothing is left behind."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from penstock.journal import Journal
from penstock.recording.story import read_story

from .command import run, start

pytest.importorskip("starlette")


def check(result: dict[str, Any], place: Path) -> None:
    assert result["complete"] and result["lost"] == 0, result
    by_reach = {row["reach"]: row for row in result["reaches"]}
    assert set(by_reach) == {"bus", "shm", "tcp", "broker"} and not result["missing_reaches"]
    for row in by_reach.values():
        assert row["published"] == row["delivered"] > 0 and row["balanced"] and row["p50_us"] > 0
    assert by_reach["bus"]["published"] == by_reach["tcp"]["published"] + by_reach["broker"]["published"]
    topics = result["recorded"]["topics"]
    assert topics == {
        "camera": by_reach["shm"]["published"],
        "vibration": by_reach["tcp"]["published"],
        "temperature": by_reach["broker"]["published"],
    }
    assert json.loads((place / "result.json").read_text()) == result
    assert result["most_memory_bytes"] < 3 << 30
    story = read_story(place / "recording")
    assert story.ended and story.lost == 0
    with Journal(place / "recording", mode="read") as journal:
        batch = journal.read_many(journal.first, 2000, topics=["temperature"])
        numbers = [json.loads(bytes(message))["n"] for message in batch]
    assert numbers == list(range(1, len(numbers) + 1))


def test_everything_arrives_without_spark(tmp_path: Path) -> None:
    done = run("demo", "--seconds", "4", "--no-spark", "--directory", str(tmp_path), "--json", timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    (place,) = tmp_path.iterdir()
    check(json.loads(done.stdout), place)


def test_ctrl_c_ends_in_order_and_the_page_is_served(tmp_path: Path) -> None:
    running = start("demo", "--forever", "--no-spark", "--directory", str(tmp_path))
    try:
        assert running.stderr is not None and running.stdout is not None
        url = running.stderr.readline().split()[-1]
        deadline = time.monotonic() + 60
        while True:
            with urllib.request.urlopen(url + "api/state", timeout=30) as answer:
                state = json.load(answer)
            rooms = {handle["room"] for handle in state["handles"]}
            if {"bus", "shm", "tcp", "gateway", "broker"} <= rooms and state["summary"]["delivered_hz"] > 0:
                break
            assert time.monotonic() < deadline, rooms
            time.sleep(0.2)
        assert not state["summary"]["alarms"]
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=90)
        assert running.returncode == 0, out + err
        assert "every message arrived" in out and "what to look at next:" in out and "Traceback" not in err
    finally:
        running.kill()
        running.wait()


@pytest.mark.spark
@pytest.mark.jvm
@pytest.mark.timeout(600)
def test_everything_is_in_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    done = run(
        "demo", "--seconds", "10", "--archive-every", "1", "--directory", str(tmp_path), "--json", timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (place,) = tmp_path.iterdir()
    result = json.loads(done.stdout)
    check(result, place)
    spark = result["spark"]
    assert spark["parquet"]["rows"] == spark["parquet"]["plain_rows"] == result["recorded"]["topics"]
    assert spark["rollup"]["readings"] == result["recorded"]["topics"]["temperature"]
    assert (spark["quality"]["missing"], spark["quality"]["duplicates"]) == (0, 0)
    assert Path(spark["quality"]["page"]).stat().st_size > 1000
