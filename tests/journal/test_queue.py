"""Durable queues of the embedded journal."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from penstock.errors import ClosedError, InvalidArgument
from penstock.journal import Journal

LONG = 30.0


def test_a_queue_keeps_its_place(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.append("a", b"before")
        queue = journal.queue("q", topics=["a"])
        first, _ = journal.append_many("a", [b"%d" % i for i in range(10)])
        journal.append("b", b"other")
        got = queue.read_many(4, LONG)
        assert [bytes(message) for message in got] == [b"0", b"1", b"2", b"3"]
        assert queue.ack_many(got[:2]) == 2
        queue.flush()
    with Journal(tmp_path / "j") as journal:
        queue = journal.queue("q")
        assert queue.state.settings.topics == ("a",)
        got = queue.read_many(100, LONG)
        assert [message.position for message in got] == list(range(first + 2, first + 10))
        assert [queue.tries(message) for message in got] == [2, 2, 1, 1, 1, 1, 1, 1]
        assert queue.ack_through(got[-1]) == 8
        assert queue.read(0) is None
        queue.flush()
    with Journal(tmp_path / "j") as journal:
        assert journal.queue("q").read(0) is None


def test_acks_ride_along_with_the_next_append_and_survive_rolls(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", segment_bytes=65536) as journal:
        queue = journal.queue("q", topics=["work"], start="first")
        for i in range(100):
            journal.append("work", b"%d" % i * 500)
            message = queue.read(LONG)
            assert message is not None
            queue.ack(message)
        assert len(list((tmp_path / "j").glob("*.log"))) > 1
        journal.append("other", b"carries the last ack")
    with Journal(tmp_path / "j") as journal:
        assert journal.queue("q").read(0) is None


def test_nack_timeouts_and_dead_letters(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        patient = journal.queue("patient", topics=["work"], max_tries=3)
        queue = journal.queue("q", topics=["work"], max_tries=3, ack_timeout_s=0.05)
        journal.append("work", b"poison", properties={"unit": "m"})
        dead = journal.queue("undertaker", topics=["dead.>"])
        message = patient.read(LONG)
        assert message is not None and patient.tries(message) == 1
        assert patient.nack(message, delay_s=0.01)
        message = patient.read(LONG)
        assert message is not None and patient.tries(message) == 2
        patient.ack(message)
        for tries in (1, 2, 3):  # each after the ack time-out of the one before
            message = queue.read(LONG)
            assert message is not None and queue.tries(message) == tries
        assert queue.read(0.2) is None
        letter = dead.read(LONG)
        assert letter is not None and letter.channel == "dead.q" and bytes(letter) == b"poison"
        assert letter.properties["dead-letter-topic"] == "work" and letter.properties["dead-letter-tries"] == "3"
        assert letter.properties["unit"] == "m"
    with Journal(tmp_path / "j") as journal:
        assert journal.queue("q").read(0) is None


def test_tries_survive_a_restart(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.queue("q", topics=["work"], max_tries=2)
        journal.append("work", b"kills its consumer")
    for expected in (1, 2):
        with Journal(tmp_path / "j") as journal:
            queue = journal.queue("q")
            message = queue.read(LONG)
            assert message is not None and queue.tries(message) == expected
    with Journal(tmp_path / "j") as journal:
        assert journal.queue("q").read(0) is None
        assert journal.queue("u", topics=["dead.q"], start="first").read(LONG) is not None


def test_a_delay_survives_a_restart(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        queue = journal.queue("q", topics=["work"])
        journal.append_many("work", [b"later", b"now"])
        later, now = queue.read_many(2, LONG)
        assert queue.nack(later, delay_s=3600) and queue.nack(now)
        queue.flush()
    with Journal(tmp_path / "j", segment_bytes=65536) as journal:
        queue = journal.queue("q")
        message = queue.read(LONG)
        assert message is not None and bytes(message) == b"now" and queue.tries(message) == 2
        assert queue.read(0) is None
        journal.append_many("other", [bytes(1000)] * 100)
        journal.append("other", b"in a new segment, which begins with a snapshot")
    with Journal(tmp_path / "j") as journal:
        queue = journal.queue("q")
        message = queue.read(LONG)
        assert message is not None and bytes(message) == b"now" and queue.tries(message) == 3
        assert queue.read(0) is None and queue.ack(2) is True and queue.ack(1) is True and queue.ack(1) is False


def test_threads_share_a_queue_and_appends_share_syncs(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        queue = journal.queue("q", topics=["work"])
        done: list[bytes] = []

        def consume() -> None:
            while (message := queue.read(2)) is not None:
                done.append(bytes(message))
                queue.ack(message)

        def produce(number: int) -> None:
            for i in range(50):
                journal.append("work", b"%d-%d" % (number, i))

        consumers = [threading.Thread(target=consume) for _ in range(3)]
        before = journal.writer.commits
        producers = [threading.Thread(target=produce, args=(n,)) for n in range(8)]
        for thread in consumers + producers:
            thread.start()
        for thread in producers:
            thread.join()
        assert journal.writer.commits - before <= 400
        for thread in consumers:
            thread.join()
        assert sorted(done) == sorted(b"%d-%d" % (n, i) for n in range(8) for i in range(50))


def test_seek_purge_and_delete(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        queue = journal.queue("q", start="first")
        journal.append_many("a", [b"1", b"2", b"3"])
        assert len(queue.read_many(10, LONG)) == 3
        queue.seek(2)
        assert [bytes(message) for message in queue.read_many(10, LONG)] == [b"2", b"3"]
        queue.purge()
        assert queue.read(0) is None
        journal.delete_queue("q")
        with pytest.raises(ClosedError):
            queue.read(0)
        with pytest.raises(LookupError):
            journal.delete_queue("q")
    with Journal(tmp_path / "j") as journal:
        assert journal.queue_states == {}
        with pytest.raises(InvalidArgument):
            journal.queue("")
        with pytest.raises(InvalidArgument):
            journal.queue("x", topics=["a..b"])


def test_retention_by_size_age_and_queues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(journal: Journal) -> None:
        for i in range(60):
            journal.append("a", b"%d" % i * 2000)

    with Journal(tmp_path / "size", segment_bytes=65536, retain_bytes=150_000) as journal:
        old = journal.append("a", b"old")
        view = memoryview(journal.read(old))
        fill(journal)
        assert journal.first > 1 and journal.holes[0].reason == "retention"
        journal.retain()  # since the last roll the segment that is written to has grown
        stored = sum(path.stat().st_size for path in (tmp_path / "size").glob("[0-9]*.log"))
        assert 65536 < stored <= 150_000
        assert bytes(view) == b"old", "who has it mapped keeps it"
        with pytest.raises(LookupError, match="least kept"):
            journal.read(old)
        follower = journal.follow(1)
        assert follower.read(LONG).position == journal.first  # type: ignore[union-attr]
        assert follower.ledger.dropped == {"gap": journal.first - 1}
    with Journal(tmp_path / "age", segment_bytes=65536, retain_age_s=3600) as journal:
        journal.append_many("a", [bytes(1000)] * 100, timestamp_ns=0)
        fill(journal)
        assert journal.first == 1, "what counts is when they were stored"
        now_ns = time.time_ns() + 7200 * 10**9
        monkeypatch.setattr("penstock.journal.retention.time.time_ns", lambda: now_ns)
        journal.retain()
        assert journal.first > 101
    with Journal(tmp_path / "queues", segment_bytes=65536, retain_queues=True) as journal:
        slow, fast = journal.queue("slow"), journal.queue("fast")
        fill(journal)
        fast.ack_many(fast.read_many(60, LONG))
        assert journal.retain() == 0, "the slow one needs them"
        slow.ack_many(slow.read_many(60, LONG))
        assert journal.retain() > 0 and journal.first > 1


def test_compaction_keeps_the_last_of_each_key(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", segment_bytes=65536, compact_topics=["state.*"]) as journal:
        reader = Journal(tmp_path / "j", mode="read")
        kept = memoryview(journal.read(journal.append("state.a", b"first" * 100, key="k0")))
        last = {}
        for i in range(300):
            last[f"k{i % 5}"] = journal.append("state.a", b"%d" % i * 300, key=f"k{i % 5}")
            journal.append("plain", b"%d" % i, key="k")
        journal.append("state.a", b"no key")
        total = journal.frontier - 1
        assert len(journal.read_many(1, 10_000)) > 0
        removed = journal.compact()
        assert removed > 100 and bytes(kept) == b"first" * 100
        assert journal.verify() == []
        for source in (journal, reader):
            found, at = [], 1
            while at < source.frontier:
                batch, at = source.read_from(at, 10_000)
                found += [(message.position, message.channel, bytes(message)) for message in batch]
            assert len(found) == total - removed
            assert {p for p, topic, _ in found if topic == "state.a"} >= set(last.values())
            assert len([1 for _, topic, _ in found if topic == "plain"]) == 300
        assert sum(hole.last - hole.first + 1 for hole in journal.holes) == removed
        assert {hole.reason for hole in journal.holes} == {"compaction"}
        assert journal.compact() == 0
        rows = sum(batch.num_rows for batch in journal.batches())
        assert rows == total - removed
        assert journal.find_ordinal("plain", 7) is not None
        reader.close()
    with Journal(tmp_path / "j", segment_bytes=65536) as journal:
        assert journal.append("state.a", b"more", key="k0") == total + 1


def test_threads_that_sleep_on_one_queue_wake_each_other_and_closing_wakes_all(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    queue = journal.queue("q", topics=["work"])
    taken: list[int] = []
    ended = []

    def consume() -> None:
        try:
            while True:
                message = queue.read(None)
                assert message is not None
                taken.append(message.position or 0)
                queue.ack(message)
        except ClosedError:
            ended.append(True)

    threads = [threading.Thread(target=consume) for _ in range(4)]
    for thread in threads:
        thread.start()
    journal.append_many("work", [b"x"] * 200)
    deadline = time.monotonic() + LONG
    while len(taken) < 200 and time.monotonic() < deadline:
        time.sleep(0.001)
    journal.close()
    for thread in threads:
        thread.join(LONG)
    assert sorted(taken) == list(range(1, 201)) and len(ended) == 4
