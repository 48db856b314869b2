"""``penstock journal info|verify|repair|cat`` as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from penstock.journal import Journal
from penstock.journal.commands import cat, info


def penstock(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from penstock.cli import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)


def fill(directory: Path) -> None:
    with Journal(directory, segment_bytes=65536) as journal:
        queue = journal.queue("workers", topics=["a.*"], start="first")
        for i in range(100):
            journal.append(f"a.{i % 2}", b"%d " % i * 300, properties={"i": str(i)})
        queue.ack_many(queue.read_many(10, 30))
        journal.append("b", b"\xff\x00binary")


def test_info(tmp_path: Path) -> None:
    fill(tmp_path / "j")
    with Journal(tmp_path / "j") as journal:
        report = journal.info()
        assert report.writer_pid is not None
    report = info(tmp_path / "j")
    assert report.writer_pid is None
    assert (report.messages, report.first, report.frontier) == (101, 1, 102)
    assert {topic.name: (topic.messages, topic.greatest_ordinal) for topic in report.topics} == {
        "a.0": (50, 50), "a.1": (50, 50), "b": (1, 1),
    }  # fmt: skip
    assert [(q.name, q.floor) for q in report.queues] == [("workers", 10)]
    assert [segment.sealed for segment in report.segments].count(False) == 1
    done = penstock("journal", "info", str(tmp_path / "j"))
    assert done.returncode == 0, done.stderr
    assert "workers" in done.stdout and "a.1" in done.stdout
    assert json.loads(penstock("journal", "info", "--json", str(tmp_path / "j")).stdout)["messages"] == 101


def test_cat(tmp_path: Path) -> None:
    fill(tmp_path / "j")
    assert [message.position for message in cat(tmp_path / "j", start=5, end=9)] == [5, 6, 7, 8]
    done = penstock("journal", "cat", str(tmp_path / "j"), "--topic", "b", "--json")
    assert json.loads(done.stdout)["topic"] == "b"
    raw = subprocess.run(
        [sys.executable, "-c", "from penstock.cli import main; main()", "journal", "cat", str(tmp_path / "j"),
         "--topic", "b", "--raw"],
        capture_output=True, timeout=60,
    )  # fmt: skip
    assert raw.stdout == b"\xff\x00binary"


def test_cat_of_a_topic_that_is_not_there_fails(tmp_path: Path) -> None:
    fill(tmp_path / "j")
    done = penstock("journal", "cat", str(tmp_path / "j"), "--topic", "nope", "--topic", "b", "--json")
    assert done.returncode == 1 and json.loads(done.stdout)["topic"] == "b", "the others are printed"
    assert f"no topic 'nope' in {tmp_path / 'j'} (it has " in done.stderr
    assert penstock("journal", "cat", str(tmp_path / "j"), "--topic", "nope.>").returncode == 0, "a pattern may match none"


def test_verify_and_repair(tmp_path: Path) -> None:
    fill(tmp_path / "j")
    assert penstock("journal", "verify", str(tmp_path / "j")).returncode == 0
    log = sorted((tmp_path / "j").glob("*.log"))[0]
    with log.open("r+b") as file:
        file.seek(20_000)
        file.write(b"damage")
    done = penstock("journal", "verify", str(tmp_path / "j"))
    assert done.returncode == 4
    assert log.name in done.stdout and "repair" in done.stderr
    done = penstock("journal", "repair", str(tmp_path / "j"))
    assert done.returncode == 0 and "lost: positions" in done.stdout and "100 messages kept, 1 lost" in done.stdout
    assert penstock("journal", "verify", str(tmp_path / "j")).returncode == 0


def test_a_running_writer_forbids_repair(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.append("a", b"x")
        done = penstock("journal", "repair", str(tmp_path / "j"))
        assert done.returncode == 1 and "process" in done.stderr
        assert penstock("journal", "verify", str(tmp_path / "j")).returncode == 0
    done = penstock("journal", "info", str(tmp_path))
    assert done.returncode == 2 and "not a journal" in done.stderr
