"""Threads and processes that get in each other's way: waits that must end, closing under load, forks, the end of Python."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock._core import Message
from penstock._core import journal as native
from penstock.errors import StateError
from penstock.journal import Journal, recovery

LONG = 30.0


def in_thread(function: object, *arguments: object) -> tuple[threading.Thread, list[object]]:
    """A thread that was started, and where its result will be."""
    result: list[object] = []
    thread = threading.Thread(target=lambda: result.append(function(*arguments)))  # type: ignore[operator]
    thread.start()
    return thread, result


def test_an_ack_makes_room_for_who_waits(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        queue = journal.queue("q", max_in_flight=1, ack_timeout_s=600)
        journal.append_many("a", [b"1", b"2", b"3"])
        for expected in (b"2", b"3"):
            held = queue.read(LONG)
            assert held is not None
            waiting, result = in_thread(queue.read, LONG)
            while not queue._readers:
                os.sched_yield()
            queue.ack(held)
            waiting.join()
            assert isinstance(result[0], Message) and bytes(result[0]) == expected
            queue.nack(result[0])
            del result, held


def test_a_queue_without_inotify_still_hears_of_appends(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        queue = journal.queue("q")
        queue._watch = native.Watch(str(tmp_path / "nowhere"))
        assert queue._watch.fileno() < 0
        waiting, result = in_thread(queue.read, LONG)
        while not queue._readers:
            os.sched_yield()
        journal.append("a", b"1")
        waiting.join()
        assert isinstance(result[0], Message)
        del result


def test_closing_waits_for_a_segment_that_another_thread_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be sealed without the lock, while the next process opens the journal."""
    asked, go_on, closed = threading.Event(), threading.Event(), threading.Event()
    locked: list[bool] = []
    journal = Journal(tmp_path / "j", segment_bytes=65536)
    seal = recovery.seal_written

    def state() -> list[tuple[int, bytes]]:
        asked.set()
        go_on.wait(LONG)
        return []

    def seal_late(*arguments: object) -> None:
        closed.wait(0.3)  # where nobody waits for this, the journal is closed by then
        locked.append(journal._lock._file >= 0)
        seal(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(recovery, "seal_written", seal_late)
    journal.on_snapshot(state)
    while journal.writer.end < 65536:
        journal.append("a", bytes(4096))

    def append() -> None:
        with pytest.raises(Exception, match="closed"):
            while True:
                journal.append("a", bytes(4096))

    appending, _ = in_thread(append)
    assert asked.wait(LONG)
    closing, _ = in_thread(lambda: (journal.close(), closed.set()))
    while not journal.closed:
        os.sched_yield()
    go_on.set()
    closing.join()
    appending.join()
    assert locked and all(locked)  # until the lock for rolling is taken the other thread may begin more than one
    with Journal(tmp_path / "j") as again:
        assert not again.verify()


def test_who_waits_for_upkeep_while_its_thread_is_being_started_waits_for_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    waits: list[threading.Thread] = []
    found: list[object] = []

    def wait() -> None:
        try:
            found.append(journal.retain())
        except Exception as error:
            found.append(error)

    def start_late(thread: threading.Thread) -> None:
        if thread.name == "penstock-journal-seal" and not waits:
            waits.append(threading.Thread(target=wait))
            start(waits[0])
            waits[0].join(0.3)  # where it does not wait for the start, it has ended by then
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    with Journal(tmp_path / "j", segment_bytes=65536) as journal:
        while not waits:
            journal.append("a", bytes(4096))
        waits[0].join()
    assert found == [0]


def test_a_forked_child_can_let_go_of_a_journal_that_was_busy(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        queue = journal.queue("q")
        assert journal.writer.take_lead()  # as a thread that commits has it; in the child there is no such thread
        locks = [journal._roll_lock, journal.queue_lock]
        for lock in locks:
            taker = threading.Thread(target=lock.acquire)
            taker.start()
            taker.join()
        child = os.fork()
        if child == 0:
            signal.alarm(int(LONG))
            code = 1
            try:
                for call in (lambda: journal.append("a", b""), lambda: journal.append_many("a", [b""]), queue.flush):
                    with pytest.raises(StateError, match="fork"):
                        call()
                journal.close()
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        journal._forget_locks()
        journal.writer.give_lead()
        assert os.waitstatus_to_exitcode(status) == 0
        assert journal.append("a", b"the parent goes on") == 1


@pytest.mark.parametrize("call", ["journal.append('a', bytes(100))", "queue.read()", "follower.read()"])
def test_python_ends_well_while_threads_are_at_it(tmp_path: Path, call: str) -> None:
    program = f"""
import threading, time
from penstock.journal import Journal
journal = Journal({str(tmp_path / "j")!r})
queue, follower = journal.queue('q'), journal.follow()
def run():
    while True:
        {call}
for _ in range(4):
    threading.Thread(target=run, daemon=True).start()
time.sleep(0.02)
"""
    for _ in range(3):
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=LONG, check=False)
        assert ended.returncode == 0, ended.stderr


def test_a_draft_that_is_being_published_can_be_neither_published_nor_cancelled() -> None:
    """Publishing may wait for a disk, and another thread come along meanwhile."""
    published: list[bytes] = []

    def publish(view: memoryview) -> int:
        for call in (draft.publish, draft.cancel):
            with pytest.raises(StateError, match="published"):
                call()
        if not published:
            published.append(bytes(view))
            raise OSError("refused the first time")
        published.append(bytes(view))
        return 7

    draft = native.reserve(4, publish, published)
    draft.write(b"data")
    with pytest.raises(OSError, match="refused"):
        draft.publish()
    draft.write(b"more")
    assert draft.publish() == 7
    assert published == [b"data", b"more"]


def test_topics_defined_in_another_order_than_numbered_have_their_names(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.topic_id("early")
        late = journal.append("late", b"1")
        assert journal.read(late).channel == "late"  # the names so far are known now
        early = journal.append("early", b"2")
        assert journal.read(early).channel == "early"
        assert [message.channel for message in journal.read_many(1)] == ["late", "early"]
        assert [message.channel for message in journal.read_many(1, topics=["early"])] == ["early"]


def test_a_reader_goes_on_where_a_segment_was_written_anew_or_removed(tmp_path: Path) -> None:
    """Between its look at the directory and the opening of a file both may happen."""
    with Journal(tmp_path / "j", segment_bytes=65536) as journal:
        for i in range(60):
            journal.append("a", b"%d " % i * 1500)
    segments = sorted((tmp_path / "j").glob("*.log"))
    assert len(segments) > 2
    with Journal(tmp_path / "j", mode="read") as reader:
        assert reader.first == 1  # it has looked
        for suffix in ("log", "index"):
            old = segments[0].with_suffix(f".{suffix}")
            shutil.move(old, old.with_name(old.name.replace("-0000", "-0001")))
        assert bytes(reader.read(1)) == b"0 " * 1500
    with Journal(tmp_path / "j", mode="read") as reader:
        assert reader.first == 1
        for path in (tmp_path / "j").glob(segments[0].name.replace("-0000.log", "-*")):
            path.unlink()
        kept = int(segments[1].name[:20])
        assert reader.find_time(0) == kept
    with Journal(tmp_path / "j", mode="read") as reader:
        assert reader.first == kept
        for path in (tmp_path / "j").glob(segments[1].name.replace(".log", "*")):
            path.unlink()
        assert reader.find_ordinal("a", 1) == int(segments[2].name[:20])


def test_who_follows_while_segments_come_and_go_sees_no_damage(tmp_path: Path) -> None:
    """Filtered, with new topics all the time: names are looked up while segments are being removed."""
    path = tmp_path / "j"
    with Journal(path, segment_bytes=65536, retain_bytes=300_000, sync=False) as journal:
        writing = True
        problems: list[BaseException] = []

        def follow(reader: Journal) -> None:
            try:
                follower = reader.follow(1, topics=["even.>"])
                while writing or len(follower.read_many(64, 0)):
                    for message in follower.read_many(64, 0.01):
                        assert message.channel.startswith("even.")
            except BaseException as error:
                problems.append(error)

        readers = [Journal(path, mode="read") for _ in range(2)]
        threads = [threading.Thread(target=follow, args=(reader,)) for reader in [*readers, journal]]
        for thread in threads:
            thread.start()
        for i in range(1500):
            journal.append_many(f"{('even', 'odd')[i % 2]}.{i // 4}", [bytes(1500)] * 4)
        writing = False
        for thread in threads:
            thread.join()
        for reader in readers:
            reader.close()
        assert problems == []


def test_what_retention_took_is_told_to_who_waits_too(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", segment_bytes=65536, retain_bytes=1) as journal:
        follower = journal.follow(1, topics=["other"])
        for _ in range(60):
            journal.append("a", bytes(4096))
        journal.retain()
        gone = journal.first - 1
        assert gone > 0
        assert not follower.wait(0)
        assert follower.position == journal.frontier and follower.ledger.dropped == {"gap": gone}
        assert not follower.wait(0) and follower.ledger.dropped == {"gap": gone}
        follower.close()


def test_close_lets_retention_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.MonkeyPatch.context() as patch, Journal(tmp_path / "j", segment_bytes=65536, retain_bytes=1) as journal:
        seal, closing, wait = recovery.seal_written, threading.Event(), journal._upkeep.wait
        patch.setattr(recovery, "seal_written", lambda *given: (closing.wait(60), seal(*given)))
        while len(list((tmp_path / "j").glob("*.log"))) < 2:
            journal.append("a", bytes(4096))
        patch.setattr(journal._upkeep, "wait", lambda: (closing.set(), wait()))
        journal.close()
    assert len(list((tmp_path / "j").glob("*.log"))) == 1 and not caplog.records


def test_a_reader_without_descriptors_sees_less_but_no_damage(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", segment_bytes=65536) as journal:
        journal.append("a", b"0")
        with Journal(tmp_path / "j", mode="read") as reader:
            assert bytes(reader.read(1)) == b"0"
            last = [journal.append("a", bytes(4096)) for _ in range(40)][-1]
            assert len(list((tmp_path / "j").glob("*.log"))) > 1
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # what is open stays open
            try:
                with pytest.raises(LookupError):
                    reader.read(last)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert bytes(reader.read(last)) == bytes(4096)
