"""Recordings: what was recorded is what is played, exported and imported, also after the recorder was killed."""

from __future__ import annotations

import csv
import json
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

import penstock
from penstock.journal import Entry, Journal
from penstock.recording import story as recording

from .command import environment, run, start

SECOND = 1_000_000_000


def bodies(directory: Path, topic: str) -> list[bytes]:
    found: list[bytes] = []
    for part in recording.parts(directory):
        with Journal(part, mode="read") as journal:
            position = journal.first
            while position < journal.frontier:
                batch, following = journal.read_from(position, 1000)
                found += [bytes(message) for message in batch if message.channel == topic]
                position = max(following, position + 1)
    return found


@pytest.fixture
def run1(tmp_path: Path) -> Path:
    """A recording of two topics with known times, made by hand."""
    directory = tmp_path / "run1"
    with Journal(directory) as journal:
        story = {"event": "started", "addresses": {f"journal:{tmp_path}/out#a": "a", f"journal:{tmp_path}/out#b": "b"}}
        journal.append(recording.STORY, json.dumps(story).encode())
        journal.commit(
            Entry(
                "ab"[n % 2],
                json.dumps({"n": n}).encode(),
                {"unit": "C"},
                timestamp_ns=1_000 * SECOND + n * SECOND // 10,
            )
            for n in range(20)
        )
        journal.append(recording.STORY, json.dumps({"event": "ended", "messages": 20}).encode())
    return directory


def test_topics_of_addresses() -> None:
    assert recording.topic_of("shm:/camera/front") == "camera.front"
    assert recording.topic_of("bus:plant") == "plant"
    assert recording.topic_of("tcp://127.0.0.1:1588") == "tcp.127.0.0.1.1588"
    assert recording.topic_of("journal:/data#sensors.hall") == "sensors.hall"
    assert recording.topic_of("broker://h:1/sensors.temp?queue=q") == "sensors.temp"


def made(source: str) -> str:
    """The address of a journal that is there: a recorder makes none where it only reads."""
    penstock.publisher(source).close()
    return source


def record_while(directory: Path, source: str, publish: list[str], *more: str) -> tuple[str, str]:
    """Records a source while a publisher runs; ended by its count."""
    recorder = start("record", made(source), "-o", str(directory), "--json", *more)
    try:
        done = run("pub", source, *publish, "--wait", "1", timeout=90)
        assert done.returncode == 0, done.stderr
        return recorder.communicate(timeout=60)
    finally:
        recorder.kill()
        recorder.wait()


def test_record_then_play_gives_the_same_messages(tmp_path: Path) -> None:
    source = f"journal:{tmp_path}/live#camera"
    out, err = record_while(tmp_path / "rec", source, ["frame {count}", "--count", "200"], "--count", "200")
    assert json.loads(out) == {
        "directory": str(tmp_path / "rec"), "parts": 1, "messages": 200, "lost": 0, "topics": {"camera": 200},
        "bytes": sum(len(f"frame {n}") for n in range(1, 201)),
    }, err  # fmt: skip
    expected = [f"frame {n}".encode() for n in range(1, 201)]
    assert bodies(tmp_path / "rec", "camera") == expected
    story = recording.read_story(tmp_path / "rec")
    assert story.ended and story.addresses == {"camera": source}
    played = run(
        "play", str(tmp_path / "rec"), "--speed", "0", "--map", f"camera=journal:{tmp_path}/copy#again", "--json"
    )
    assert json.loads(played.stdout)["messages"] == 200, played.stderr
    assert bodies(tmp_path / "copy", "again") == expected


def test_timestamps_are_kept(tmp_path: Path) -> None:
    source = f"journal:{tmp_path}/live#t"
    record_while(tmp_path / "rec", source, ["{count}", "--count", "5", "--rate", "50"], "--count", "5")
    times = []
    for directory, topic in ((tmp_path / "live", "t"), (tmp_path / "rec", "t")):
        with Journal(directory, mode="read") as journal:
            batch = journal.read_many(journal.first, 100, topics=[topic])
            times.append([message.timestamp_ns for message in batch])
    assert len(times[0]) == 5 and times[0] == times[1]


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rec").mkdir()
    (tmp_path / "rec" / "mine.txt").write_text("keep me")
    source = made(f"journal:{tmp_path}/live#a")
    done = run("record", source, "-o", str(tmp_path / "rec"), "--seconds", "1")
    assert done.returncode == 2 and "not empty" in done.stderr
    assert (tmp_path / "rec" / "mine.txt").read_text() == "keep me"


def test_two_addresses_of_one_topic_are_refused(tmp_path: Path) -> None:
    done = run("record", f"journal:{tmp_path}/x#a", f"journal:{tmp_path}/y#a", "-o", str(tmp_path / "rec"))
    assert done.returncode == 2 and "--as" in done.stderr and f"{tmp_path}/x#a and " in done.stderr


def test_play_says_what_a_sink_does_not_keep(tmp_path: Path) -> None:
    with Journal(tmp_path / "with") as journal:
        journal.append_many("s", [b"1", b"2"])
        journal.append("s", b"3", message_id="m3")
    with Journal(tmp_path / "without") as journal:
        journal.append_many("s", [b"1", b"2"])
    for name, times in {"with": 1, "without": 0}.items():
        played = run("play", str(tmp_path / name), "--speed", "0", "--map", "s=tcp://127.0.0.1:0")
        assert played.returncode == 0 and "played" in played.stdout, played.stderr
        assert played.stderr.count("tcp://127.0.0.1:0 cannot hold id and key of messages: they end here") == times


def test_split_by_size_makes_parts_that_play_as_one(tmp_path: Path) -> None:
    source = f"journal:{tmp_path}/live#s"
    publish = ["{count}", "--size", "1000", "--count", "100", "--rate", "400"]
    out, err = record_while(tmp_path / "rec", source, publish, "--count", "100", "--split", "20k")
    told = json.loads(out)
    assert told["parts"] >= 3, err
    assert len(recording.parts(tmp_path / "rec")) == told["parts"]
    numbers = [int(body.rstrip(b".")) for body in bodies(tmp_path / "rec", "s")]
    assert numbers == list(range(1, 101))
    played = run("play", str(tmp_path / "rec"), "--speed", "0", "--map", f"s=journal:{tmp_path}/copy#s", "--json")
    assert json.loads(played.stdout)["messages"] == 100
    assert [int(body.rstrip(b".")) for body in bodies(tmp_path / "copy", "s")] == numbers
    shutil.rmtree(tmp_path / "rec" / "00002")
    assert recording.read_story(tmp_path / "rec").missing() == ["part 00002 is missing"]
    shutil.rmtree(tmp_path / "rec" / "00001")
    assert recording.read_story(tmp_path / "rec").missing() == ["the beginning is missing: the first part is 00003"]
    assert not recording.read_story(tmp_path / "rec" / "00003").missing()


def test_max_size_keeps_the_newest_and_the_way_back(tmp_path: Path) -> None:
    source = f"journal:{tmp_path}/live#m"
    publish = ["{count}", "--size", "20000", "--count", "600"]
    out, err = record_while(tmp_path / "rec", source, publish, "--count", "600", "--max-size", "4M")
    assert json.loads(out)["messages"] == 600, err
    numbers = [int(body.rstrip(b".")) for body in bodies(tmp_path / "rec", "m")]
    assert numbers and numbers[0] > 1 and numbers == list(range(numbers[0], 601))
    size = sum(path.stat().st_size for path in (tmp_path / "rec").iterdir())
    assert size < 8 << 20
    assert recording.read_story(tmp_path / "rec").addresses == {"m": source}


def test_pre_buffer_stores_from_the_signal_on(tmp_path: Path) -> None:
    source = made(f"journal:{tmp_path}/live#p")
    recorder = start("record", source, "-o", str(tmp_path / "rec"), "--pre-buffer", "60s", "--json")
    try:
        assert run("pub", source, "before {count}", "--count", "10", "--wait", "1").returncode == 0
        time.sleep(1)
        assert bodies(tmp_path / "rec", "p") == []
        recorder.send_signal(signal.SIGUSR1)
        assert run("pub", source, "after {count}", "--count", "5", "--wait", "1").returncode == 0
        deadline = time.monotonic() + 30
        while len(bodies(tmp_path / "rec", "p")) < 15 and time.monotonic() < deadline:
            time.sleep(0.1)
        recorder.send_signal(signal.SIGINT)
        out, err = recorder.communicate(timeout=60)
        assert recorder.returncode == 0 and json.loads(out)["messages"] == 15, err
    finally:
        recorder.kill()
        recorder.wait()
    expected = [f"before {n}".encode() for n in range(1, 11)] + [f"after {n}".encode() for n in range(1, 6)]
    assert bodies(tmp_path / "rec", "p") == expected


def test_the_signal_of_a_pre_buffer_may_come_as_soon_as_it_records(tmp_path: Path) -> None:
    """The folder is there, and the channel has a reader: whoever sees that may send it."""
    code = """
        import signal, sys
        from penstock.recording.recorder import Recorder
        from penstock.cli import main
        enter = Recorder.__enter__
        Recorder.__enter__ = lambda self: (enter(self), signal.raise_signal(signal.SIGUSR1))[0]
        main()
    """
    name = f"/signal-{time.time_ns()}"
    arguments = ["record", f"shm:{name}", "-o", str(tmp_path / "rec"), "--pre-buffer", "60s", "--seconds", "1", "--json"]
    with penstock.publisher(f"shm:{name}") as publisher:
        publisher.publish(b"x")
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), *arguments], env=environment(), capture_output=True,
            text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_killed_recorder_keeps_what_was_synced_and_play_says_so(tmp_path: Path) -> None:
    source = made(f"journal:{tmp_path}/live#k")
    recorder = start("record", source, "-o", str(tmp_path / "rec"))
    publisher = start("pub", source, "{count}", "--count", "0", "--rate", "500", "--wait", "1")
    try:
        deadline = time.monotonic() + 60
        while not (recording.is_journal(tmp_path / "rec") and len(bodies(tmp_path / "rec", "k")) > 50):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert recording.read_story(tmp_path / "rec").missing() == [
            "it is still being recorded; what is there so far is taken"
        ]
        recorder.kill()
        recorder.wait()
    finally:
        recorder.kill()
        recorder.communicate()
        publisher.kill()
        publisher.communicate()
    kept = [int(body) for body in bodies(tmp_path / "rec", "k")]
    assert kept == list(range(kept[0], kept[0] + len(kept))) and len(kept) > 50
    played = run("play", str(tmp_path / "rec"), "--speed", "0", "--map", f"k=journal:{tmp_path}/copy#k", "--json")
    assert "did not end properly" in played.stderr
    told = json.loads(played.stdout)
    assert told["messages"] == len(kept) and told["ended"] is False


def test_play_back_to_where_it_came_from_with_properties(run1: Path, tmp_path: Path) -> None:
    done = run("play", str(run1), "--speed", "0", "--json")
    assert json.loads(done.stdout)["topics"] == {"a": 10, "b": 10}, done.stderr
    with Journal(tmp_path / "out", mode="read") as journal:
        messages = list(journal.read_many(journal.first, 100))
    assert [json.loads(bytes(m))["n"] for m in messages] == list(range(20))
    assert all(dict(m.properties) == {"unit": "C"} for m in messages)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--topic", "a"], list(range(0, 20, 2))),
        (["--from", "1s"], list(range(10, 20))),
        (["--for", "500ms"], list(range(5))),
        (["--from", "1s", "--for", "300ms"], [10, 11, 12]),
        (["--from", "1970-01-01T00:16:41.5+00:00"], list(range(15, 20))),
    ],
)
def test_play_a_part(run1: Path, tmp_path: Path, arguments: list[str], expected: list[int]) -> None:
    done = run("play", str(run1), "--speed", "0", "--map", f"*=journal:{tmp_path}/part#{{topic}}", *arguments)
    assert done.returncode == 0, done.stderr
    with Journal(tmp_path / "part", mode="read") as journal:
        got = [json.loads(bytes(m))["n"] for m in journal.read_many(journal.first, 100)]
    assert got == expected


def test_speed_is_held(run1: Path, tmp_path: Path) -> None:
    """Two seconds of recording at twice the speed take one second, and not less."""
    done = run("play", str(run1), "--speed", "2", "--map", f"*=journal:{tmp_path}/x#{{topic}}", "--json")
    assert json.loads(done.stdout)["seconds"] >= 0.95


@pytest.mark.parametrize("command", ["play", "export"])
def test_a_beginning_after_the_end_is_told(command: str, run1: Path, tmp_path: Path) -> None:
    more = ["--map", f"*=journal:{tmp_path}/out#t"] if command == "play" else ["--to", "jsonl"]
    done = run(command, str(run1), "--from", "1h", *more)
    assert done.returncode == 2 and "--from 1h" in done.stderr and "s long" in done.stderr, done


def test_play_without_an_address_names_the_topic(run1: Path, tmp_path: Path) -> None:
    with Journal(tmp_path / "bare") as journal:
        journal.append("lonely", b"x")
    done = run("play", str(tmp_path / "bare"))
    assert done.returncode == 2 and "lonely" in done.stderr and "--map" in done.stderr
    assert run("play", str(tmp_path / "none")).returncode == 2


def test_a_map_of_a_topic_that_is_not_there_is_refused(run1: Path) -> None:
    done = run("play", str(run1), "--speed", "0", "--map", "nope=shm:/x")
    assert done.returncode == 2 and "no topic matches nope" in done.stderr and not done.stdout


def test_export_jsonl_and_csv(run1: Path, tmp_path: Path) -> None:
    out = run("export", str(run1), "--to", "jsonl", "-o", "-")
    rows = [json.loads(line) for line in out.stdout.splitlines()]
    assert [row["payload"]["n"] for row in rows] == list(range(20)) and rows[0]["properties"] == {"unit": "C"}
    done = run("export", str(run1), "--to", "csv", "-o", str(tmp_path / "x.csv"), "--topic", "b", "--json")
    assert json.loads(done.stdout)["messages"] == 10
    with (tmp_path / "x.csv").open(newline="") as stream:
        table = list(csv.DictReader(stream))
    assert [json.loads(row["payload"])["n"] for row in table] == list(range(1, 20, 2))


def test_export_parquet(run1: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert run("export", str(run1), "--to", "parquet", "-o", str(tmp_path / "x.parquet")).returncode == 0
    table = parquet.read_table(tmp_path / "x.parquet").to_pylist()
    assert [json.loads(row["payload"])["n"] for row in table] == list(range(20))
    assert {row["topic"] for row in table} == {"a", "b"} and dict(table[0]["properties"]) == {"unit": "C"}


def test_mcap_there_and_back(run1: Path, tmp_path: Path) -> None:
    pytest.importorskip("mcap")
    assert run("export", str(run1), "--to", "mcap", "-o", str(tmp_path / "x.mcap")).returncode == 0
    from mcap.reader import make_reader

    with (tmp_path / "x.mcap").open("rb") as stream:
        messages = [(channel.topic, message) for _, channel, message in make_reader(stream).iter_messages()]
    assert [json.loads(message.data)["n"] for _, message in messages] == list(range(20))
    assert [message.log_time for _, message in messages] == [1_000 * SECOND + n * SECOND // 10 for n in range(20)]
    done = run("import", str(tmp_path / "x.mcap"), "-o", str(tmp_path / "back"), "--json")
    assert json.loads(done.stdout) == {
        "directory": str(tmp_path / "back"),
        "messages": 20,
        "topics": {"a": 10, "b": 10},
    }
    assert bodies(tmp_path / "back", "a") == bodies(run1, "a")


def test_a_damaged_mcap_is_told_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("mcap")
    (tmp_path / "bad.mcap").write_bytes(b"not an mcap file at all" * 10)
    done = run("import", str(tmp_path / "bad.mcap"), "-o", str(tmp_path / "x"))
    assert done.returncode == 1 and "bad.mcap" in done.stderr and "Traceback" not in done.stderr


def test_sub_from_an_ordinal_and_a_time(run1: Path) -> None:
    done = run("sub", f"journal:{run1}#a", "--from", "8", "--count", "3", "--timeout", "30", "--json")
    assert [json.loads(line)["ordinal"] for line in done.stdout.splitlines()] == [8, 9, 10], done.stderr
    with Journal(run1, mode="read") as journal:  # --since goes by the time of storing
        stored = {json.loads(bytes(m))["n"]: m.stored_ns or 0 for m in journal.read_many(1, topics=["a"])}
    since = datetime.fromtimestamp(stored[10] // 1000 / 1e6, UTC)
    wanted = [n for n, stored_ns in stored.items() if stored_ns >= round(since.timestamp() * 1e6) * 1000]
    count = str(len(wanted))
    done = run("sub", f"journal:{run1}#a", "--since", since.isoformat(), "--count", count, "--timeout", "30")
    assert [json.loads(line)["n"] for line in done.stdout.splitlines()] == wanted, done.stderr
    done = run(
        "sub",
        f"journal:{run1}#>",
        "--since",
        "1000",
        "--count",
        "3",
        "--template",
        "{channel} {payload}",
        "--timeout",
        "30",
    )
    assert done.stdout.splitlines()[-1].startswith(("a ", "b ", "_recording "))
    assert run("sub", f"journal:{run1}#>", "--from", "2").returncode == 2


def test_split_by_time_makes_parts_that_play_as_one(tmp_path: Path) -> None:
    source = f"journal:{tmp_path}/live#s"
    publish = ["{count}", "--count", "60", "--rate", "40"]
    out, err = record_while(tmp_path / "rec", source, publish, "--count", "60", "--split", "300ms")
    told = json.loads(out)
    assert told["parts"] >= 3 and len(recording.parts(tmp_path / "rec")) == told["parts"], err
    assert [int(body) for body in bodies(tmp_path / "rec", "s")] == list(range(1, 61))
    played = run("play", str(tmp_path / "rec"), "--speed", "0", "--map", f"s=journal:{tmp_path}/copy#s", "--json")
    assert json.loads(played.stdout)["messages"] == 60
    assert [int(body) for body in bodies(tmp_path / "copy", "s")] == list(range(1, 61))


def test_play_again_and_again_until_ctrl_c(run1: Path, tmp_path: Path) -> None:
    target = f"a=journal:{tmp_path}/loop#a"
    playing = start("play", str(run1), "--loop", "--speed", "0", "--topic", "a", "--map", target, "--json")
    try:
        deadline = time.monotonic() + 60
        while not recording.is_journal(tmp_path / "loop") or len(bodies(tmp_path / "loop", "a")) < 35:
            assert time.monotonic() < deadline and playing.poll() is None
            time.sleep(0.05)
        playing.send_signal(signal.SIGINT)
        out, err = playing.communicate(timeout=60)
    finally:
        playing.kill()
        playing.wait()
    told = json.loads(out)
    again = [json.loads(body)["n"] for body in bodies(tmp_path / "loop", "a")]
    assert playing.returncode == 0, err
    assert told["messages"] == len(again)
    assert again == [2 * (n % 10) for n in range(len(again))], "in order, from the start again"


def test_what_a_repair_cut_out_is_told(tmp_path: Path) -> None:
    with Journal(tmp_path / "rec") as journal:
        for number in range(3):
            journal.append("s", b"message %d" % number)
    (log,) = (tmp_path / "rec").glob("*.log")
    data = bytearray(log.read_bytes())
    data[data.index(b"message 1")] ^= 1
    log.write_bytes(data)
    assert run("journal", "repair", str(tmp_path / "rec")).returncode == 0
    assert recording.read_story(tmp_path / "rec").missing() == ["damaged messages were cut out by a repair: 1"]
    played = run("play", str(tmp_path / "rec"), "--speed", "0", "--map", f"s=journal:{tmp_path}/copy#s")
    assert played.returncode == 0 and "cut out by a repair" in played.stderr
