"""Which messages of a recording are played and exported: every one of the span, whatever the order they came in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.errors import InvalidArgument
from penstock.journal import Entry, Journal
from penstock.recording import story as recording
from penstock.recording.span import OPTIONS, Span, messages, reader
from penstock.recording.tables import Recording
from penstock.replay import Script
from tests.cli.command import run

SECOND = 1_000_000_000


def write(directory: Path, *entries: tuple[str, float]) -> Path:
    """A recording of messages given by topic and time; the body says both."""
    with Journal(directory) as journal:
        journal.append(recording.STORY, json.dumps({"event": "started", "addresses": {}}).encode())
        for topic, at_s in entries:
            journal.commit([Entry(topic, f"{topic} {at_s:g}".encode(), timestamp_ns=int(at_s * SECOND))])
        journal.append(recording.STORY, json.dumps({"event": "ended"}).encode())
    return directory


def chosen(*folders: Path, start: str | None = None, length: str | None = None) -> list[str]:
    journals = [reader(folder) for folder in folders]
    try:
        return [bytes(message).decode() for message in messages(journals, None, Span.of(journals, start, length))]
    finally:
        for journal in journals:
            journal.close()


def test_without_a_span_everything_is_played_in_the_order_of_recording(tmp_path: Path) -> None:
    """A backlog beside a live address: what was stored later is older."""
    made = write(tmp_path / "r", ("a", 1000), ("b", 999), ("a", 1001), ("b", 999.5))
    assert chosen(made) == ["a 1000", "b 999", "a 1001", "b 999.5"]
    done = run("export", str(made), "--to", "jsonl", "-o", "-")
    assert [json.loads(line)["payload"] for line in done.stdout.splitlines()] == chosen(made), done.stderr


def test_the_start_is_the_least_time_of_any_topic(tmp_path: Path) -> None:
    made = write(tmp_path / "r", ("a", 1000), ("b", 990), ("b", 995), ("a", 1001))
    assert chosen(made, length="6s") == ["b 990", "b 995"]
    assert chosen(made, start="5s") == ["a 1000", "b 995", "a 1001"]
    assert chosen(made, start="5s", length="5.5s") == ["a 1000", "b 995"]


@pytest.mark.parametrize("wrong", [{"start": "1h"}, {"start": "soon"}, {"length": "0s"}, {"length": "soon"}])
def test_an_error_names_what_the_user_wrote(tmp_path: Path, wrong: dict[str, str]) -> None:
    made = write(tmp_path / "r", ("a", 1000), ("a", 1001))
    name = next(iter(wrong))
    with Recording(made) as opened, pytest.raises(InvalidArgument, match=rf"^{name}\b"):
        opened.batches("a", **wrong)
    with pytest.raises(InvalidArgument, match=rf"^{name}\b"):
        Script(made, **wrong)
    option = {"start": "--from", "length": "--for"}[name]
    with Journal(made, mode="read") as one, pytest.raises(InvalidArgument, match=rf"^{option}\b"):
        Span.of([one], wrong.get("start"), wrong.get("length"), OPTIONS)


def test_an_empty_first_part_does_not_move_the_start(tmp_path: Path) -> None:
    parts = write(tmp_path / "1"), write(tmp_path / "2", ("a", 1000), ("a", 1020)), write(tmp_path / "3", ("a", 1040))
    assert chosen(*parts, length="30s") == ["a 1000", "a 1020"]
    assert chosen(*parts, start="15s") == ["a 1020", "a 1040"]


def test_what_stands_behind_a_message_past_the_end_is_played(tmp_path: Path) -> None:
    """A pre-buffer of two addresses: all of the first, then all of the second."""
    made = write(tmp_path / "r", *(("a", 1000 + n) for n in range(20)), *(("b", 1000.5 + n) for n in range(20)))
    assert chosen(made, length="3s") == ["a 1000", "a 1001", "a 1002", "b 1000.5", "b 1001.5", "b 1002.5"]


def test_segments_that_cannot_have_any_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = write(tmp_path / "r", ("a", 1000), ("b", 1000))
    with Journal(made, segment_bytes=65536) as journal:
        for _ in range(3):
            journal.commit(Entry("ab"[n % 2], bytes(100), timestamp_ns=2000 * SECOND) for n in range(1000))
    read: list[int] = []
    plain = Journal.read_from
    monkeypatch.setattr(Journal, "read_from", lambda *given: (read.append(given[1]), plain(*given))[1])
    assert chosen(made, length="1s") == ["a 1000", "b 1000"]
    with Journal(made, mode="read") as journal:
        segments = journal.info().segments
    assert len(segments) > 2 and max(read) < segments[1].first, "the first segment alone was read"


def test_times_in_any_order_are_found(tmp_path: Path) -> None:
    made = write(tmp_path / "r", ("a", 1000), ("a", 5000), ("a", 1001))
    assert chosen(made, length="2s") == ["a 1000", "a 1001"]


def test_a_loop_without_messages_ends(tmp_path: Path) -> None:
    made = write(tmp_path / "r", ("a", 1000))
    words = ("play", str(made), "--loop", "--from", "1h", "--map", f"a=journal:{tmp_path}/copy#a", "--json")
    done = run(*words, timeout=30)
    assert done.returncode == 2 and "is after the end" in done.stderr
