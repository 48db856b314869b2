"""The journal's promises to its users: order, atomic batches, views, processes side by side, bad input."""

from __future__ import annotations

import datetime
import os
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock._core.broker import batch_names, range_batch
from penstock.errors import CapacityError, ClosedError, InvalidArgument, RefusedError, StateError
from penstock.journal import Details, Entry, Journal
from penstock.journal.verify import verify

LONG = 30.0


def test_many_topics_one_log(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        assert [journal.append("a", b"1"), journal.append("b", b"2"), journal.append("a", b"3")] == [1, 2, 3]
        assert [(m.channel, m.ordinal, m.position) for m in journal.read_many(1)] == [
            ("a", 1, 1), ("b", 1, 2), ("a", 2, 3),
        ]  # fmt: skip
        assert [m.position for m in journal.read_many(1, topics=["a"])] == [1, 3]
        assert len(journal.read_many(4)) == 0
        assert journal.frontier == 4 and journal.first == 1 and journal.topics == {"a": 1, "b": 2}


def test_wildcards(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        names = ["s.north.temp", "s.south.temp", "s.north.wind", "s", "s.north", "other"]
        for name in names:
            journal.append(name, b"")
        found = {
            pattern: [m.channel for m in journal.read_many(1, topics=[pattern])]
            for pattern in ("s.*.temp", "s.>", "*", "s.*", ">", "s.north.temp")
        }
        assert found == {
            "s.*.temp": names[:2], "s.>": [*names[:3], "s.north"], "*": ["s", "other"], "s.*": ["s.north"],
            ">": names, "s.north.temp": names[:1],
        }  # fmt: skip
        with pytest.raises(InvalidArgument):
            journal.read_many(1, topics=["a.>.b"])
        with pytest.raises(TypeError):
            journal.read_many(1, topics="a")


def test_a_batch_in_a_transaction(tmp_path: Path) -> None:
    """Many messages at once keep all they have, their times too; with others and state they are one batch."""
    index = b"".join(
        struct.pack("<qQqQIIIHH", -1, 0, time_ns, offset, 1, topic, 4, 1, 2)
        for time_ns, offset, topic in ((10**18, 0, 0), (10**18 + 7, 8, 1))
    )
    batch = range_batch(index, b"1k\0v\0ikk2k\0w\0jll", {0: "a", 1: "b"})
    with Journal(tmp_path / "j") as journal:
        with journal.transaction() as transaction:
            transaction.append("c", b"0")
            transaction.append_batch(batch, batch_names(batch))
            transaction.append("a", b"3")
            transaction.state(9, b"nine")
        assert (transaction.first, transaction.last) == (1, 4)
        found = journal.read_many(1)
        assert [(m.channel, bytes(m), dict(m.properties), m.ordinal) for m in found] == [
            ("c", b"0", {}, 1), ("a", b"1", {"k": "v"}, 1), ("b", b"2", {"k": "w"}, 1), ("a", b"3", {}, 2),
        ]  # fmt: skip
        assert [m.timestamp_ns for m in found][1:3] == [10**18, 10**18 + 7]
        assert (journal.details(2), journal.details(3)) == (Details("i", "kk"), Details("j", "ll"))
        with pytest.raises(InvalidArgument, match="no topic id"), journal.transaction() as transaction:
            transaction.append("c", b"lost")
            transaction.append_batch(batch, ["a", "b"][:0])
        assert journal.append("c", b"next") == 5, "nothing of what failed was staged"


def test_transactions_are_whole_or_nothing(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        with journal.transaction() as transaction:
            transaction.append("a", b"1", message_id="m", key="k", properties={"p": "q"})
            transaction.append_many("b", [b"2", b"3"])
            transaction.state(9, b"nine")
        assert (transaction.first, transaction.last) == (1, 3)
        details = journal.details(1)
        assert (details.message_id, details.key) == ("m", "k") and dict(journal.read(1).properties) == {"p": "q"}
        with pytest.raises(RuntimeError), journal.transaction() as transaction:
            transaction.append("a", b"lost")
            raise RuntimeError
        assert journal.frontier == 4
        with pytest.raises(StateError):
            transaction.append("a", b"late")
        assert journal.commit([("c", b"4"), Entry("d", b"5", key="k")], [(1, b"one")]) == (4, 5)
        assert journal.commit(states=[(1, b"two")]) is None
    with Journal(tmp_path / "j") as journal:
        assert list(journal.state_records()) == [(9, b"nine"), (1, b"one"), (1, b"two")]
        journal.snapshot([(1, b"all")])
    with Journal(tmp_path / "j") as journal:
        assert list(journal.state_records()) == [(1, b"all")]


def test_a_transaction_that_spills_is_seen_at_once(tmp_path: Path) -> None:
    """Over several segments; another thread's message is stored with it, and acknowledged with it."""
    with Journal(tmp_path / "j", segment_bytes=65536) as journal, Journal(tmp_path / "j", mode="read") as reader:
        journal.append("a", b"before")
        with ThreadPoolExecutor(1) as pool:
            with journal.transaction() as transaction:
                for number in range(8):
                    transaction.append_many("a", [b"%d" % number + bytes(10_000)] * 3)
                    transaction.state(1, b"%d" % number)
                    transaction.spill()
                    if number == 3:
                        other = pool.submit(journal.append, "other", b"meanwhile")
                    assert reader.frontier == 2 and journal.frontier == 2
                    assert [bytes(message) for message in reader.read_many(1)] == [b"before"]
                    assert reader.verify() == []
                assert not other.done()
            assert len(list((tmp_path / "j").glob("*.log"))) > 3
            position = other.result(60)
        assert bytes(reader.read(position)) == b"meanwhile"
        assert (transaction.first, reader.frontier) == (2, 27)
        read = [reader.read(position) for position in range(1, 27)]
        assert [message.ordinal for message in read if message.channel == "a"] == list(range(1, 26))
    with Journal(tmp_path / "j", segment_bytes=65536) as journal:
        assert journal.frontier == 27 and not journal.recovery.torn_bytes and journal.verify() == []
        assert [data for _, data in journal.state_records()] == [b"%d" % number for number in range(8)]


@pytest.mark.parametrize("ends", ["drop", "close", "frontier lost"])
def test_a_transaction_that_spilled_and_was_dropped_was_never_there(tmp_path: Path, ends: str) -> None:
    with Journal(tmp_path / "j", segment_bytes=65536) as journal:
        journal.commit([("a", b"before")], [(1, b"state")])
        transaction = journal.transaction()
        for _ in range(8):
            transaction.append_many("b", [bytes(10_000)] * 3)
            transaction.spill()
        if ends == "drop":
            transaction.drop()
            with pytest.raises(OSError):
                journal.append("a", b"not before it is opened again")
    if ends == "frontier lost":
        (tmp_path / "j" / "frontier").unlink()
    with Journal(tmp_path / "j", segment_bytes=65536) as journal:
        assert journal.frontier == 2 and list(journal.state_records()) == [(1, b"state")] and journal.verify() == []
        assert journal.append_numbered("b", b"after") == (2, 1)
        assert [bytes(journal.read(position)) for position in (1, 2)] == [b"before", b"after"]
    with pytest.raises(StateError):
        transaction.append("a", b"late")


def test_state_is_carried_from_segment_to_segment(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", segment_bytes=65536) as journal:
        journal.commit(states=[(1, b"early")])
        for _ in range(10):
            journal.append("a", bytes(20_000))
    with Journal(tmp_path / "j") as journal:
        assert len(journal._reader.segments()) > 2
        assert list(journal.state_records()) == [(1, b"early")]


def test_state_that_no_function_gives_is_carried_too(tmp_path: Path) -> None:
    """What others keep in the same journal: stored before, before the function was known, and after it."""
    with Journal(tmp_path / "j") as journal:
        journal.commit(states=[(7, b"before"), (1, b"old")])
    with Journal(tmp_path / "j", segment_bytes=65536) as journal:
        journal.on_snapshot(lambda: [(1, b"new")], kinds=[1])
        for _ in range(10):
            journal.append("a", bytes(20_000))
    with Journal(tmp_path / "j", segment_bytes=65536) as journal:
        assert sorted(journal.state_records()) == [(1, b"new"), (7, b"before")]
        journal.commit(states=[(8, b"between")])
        journal.on_snapshot(lambda: [(1, b"newer")], kinds=[1])
        journal.commit(states=[(7, b"after")])
        for _ in range(10):
            journal.append("a", bytes(20_000))
    with Journal(tmp_path / "j", segment_bytes=65536) as journal:
        wanted = [(1, b"newer"), (7, b"after"), (7, b"before"), (8, b"between")]
        assert sorted(journal.state_records()) == wanted
        journal.snapshot([(9, b"all")])
        journal.on_snapshot(list, kinds=[1])
        for _ in range(10):
            journal.append("a", bytes(20_000))
    with Journal(tmp_path / "j") as journal:
        assert list(journal.state_records()) == [(9, b"all")]


@pytest.mark.parametrize("messages", [0, 3])
def test_a_segment_of_state_alone_is_replaced(tmp_path: Path, messages: int) -> None:
    """It makes room, readers beside it go on, and an older frontier, as after a power cut, is no damage."""
    with Journal(tmp_path / "j") as journal, Journal(tmp_path / "j", mode="read") as reader:
        for number in range(messages):
            journal.append("a", b"%d" % number)
        journal.roll(full=False)
        journal.on_snapshot(lambda: [(1, b"whole")], kinds=[1])
        for _ in range(3):
            for _ in range(20):
                journal.commit(states=[(1, bytes(5000))])
            frontier = (tmp_path / "j" / "frontier").read_bytes()
            journal.roll(full=False)
            assert [bytes(message) for message in reader.read_many(1)] == [b"%d" % n for n in range(messages)]
        logs = sorted(path.name for path in (tmp_path / "j").glob("*.log"))
        assert len(logs) == (2 if messages else 1)
        assert logs[-1].endswith("-0003.log" if messages else "-0004.log"), "one more, where the first had no message"
        journal.append("b", b"after")
        assert [(m.channel, bytes(m)) for m in reader.read_many(messages + 1)] == [("b", b"after")]
        assert reader.topics.keys() == ({"a", "b"} if messages else {"b"})
    (tmp_path / "j" / "frontier").write_bytes(frontier)
    with Journal(tmp_path / "j", refuse_damage=True) as journal:
        assert list(journal.state_records()) == [(1, b"whole")]
        assert journal.append("a", b"next") == messages + 2
    assert not verify(tmp_path / "j")


def test_find_by_ordinal_and_time(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", segment_bytes=65536) as journal:
        for i in range(1, 201):
            journal.append(f"t{i % 2}", bytes(1000), timestamp_ns=-i)  # the publisher's times tell nothing of the order
        stored = {position: journal.read(position).stored_ns or 0 for position in range(1, 201)}
        assert list(stored.values()) == sorted(stored.values())
        for position in (1, 2, 100, 200):
            found = journal.find_time(stored[position])
            assert found is not None and stored[found] == stored[position] and stored.get(found - 1) != stored[position]
        assert journal.find_time(0) == 1 and journal.find_time(stored[200] + 1) is None
        assert journal.find_time(-(2**70)) == 1 and journal.find_time(2**70) is None
        of_t1 = journal.find_time(stored[100], "t1")
        assert of_t1 is not None and of_t1 in (99, 101), "the first of its topic at or after the time"
        assert journal.find_ordinal("t1", 50) == 99 and journal.find_ordinal("t1", 101) is None
        assert journal.find_ordinal("none", 1) is None


def test_messages_are_views_of_the_file(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.append("a", b"x" * 1000)
        first, again = journal.read(1), journal.read(1)
        assert first.address == again.address, "the same mapped bytes, no copy"
        with pytest.raises(TypeError):
            memoryview(first)[0] = 1
    assert bytes(first) == b"x" * 1000, "a message outlives its journal"


def test_stage_many_from_one_buffer(tmp_path: Path) -> None:
    import array

    with Journal(tmp_path / "j") as journal:
        ids = array.array("I", [journal.topic_id("a"), journal.topic_id("b"), journal.topic_id("a")])
        offsets, lengths = array.array("Q", [0, 3, 3]), array.array("Q", [3, 0, 4])
        assert journal.writer.stage_many(ids, b"onetwo!", offsets, lengths) == (1, 3)
        assert journal.frontier == 1, "staged is not stored"
        journal.commit_staged()
        assert [(m.channel, bytes(m)) for m in journal.read_many(1)] == [("a", b"one"), ("b", b""), ("a", b"two!")]
        for bad in (array.array("Q", [5, 0, 0]), array.array("Q", [2**64 - 1, 0, 0])):
            with pytest.raises(InvalidArgument):
                journal.writer.stage_many(ids, b"onetwo!", bad, lengths)
        with pytest.raises(InvalidArgument):
            journal.writer.stage_many(7, b"onetwo!", offsets, lengths)


def test_bad_arguments_name_what_is_wrong(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", max_message_bytes=100) as journal:
        for name in ("", "a..b", "a.*", ">", "with blank", "new\nline", "x" * 256):
            with pytest.raises(InvalidArgument):
                journal.append(name, b"x")
        with pytest.raises(TypeError):
            journal.append(5, b"x")  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            journal.append("a", "text")
        with pytest.raises(InvalidArgument, match="max_message_bytes=100"):
            journal.append("a", bytes(101))
        with pytest.raises(TypeError):
            journal.append("a", b"x", properties={"a": 1})  # type: ignore[dict-item]
        for position in (0, -1, 2**63):
            with pytest.raises(InvalidArgument):
                journal.read(position)
        with pytest.raises(LookupError, match="next position is 1"):
            journal.read(1)
        with pytest.raises(InvalidArgument):
            journal.commit(states=[(70_000, b"")])
        assert journal.frontier == 1 and journal.append("x" * 255, b"") == 1
    for bad in ({"mode": "append"}, {"segment_bytes": 10}, {"max_message_bytes": 0}):
        with pytest.raises(InvalidArgument):
            Journal(tmp_path / "other", **bad)  # type: ignore[arg-type]


def test_a_batch_has_a_bound(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", max_message_bytes=512 << 20) as journal:
        writer, topic, part = journal.writer, journal.topic_id("a"), bytes(400 << 20)
        writer.stage(topic, part)
        writer.stage(topic, part)
        with pytest.raises(CapacityError, match="smaller parts"):
            writer.stage(topic, part)


def test_closed_and_read_only(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.append("a", b"x")
    reader = Journal(tmp_path / "j", mode="read")
    with pytest.raises(StateError, match="mode='read'"):
        reader.append("a", b"x")
    journal.close()
    journal.close()
    for use in (lambda: journal.append("a", b"x"), lambda: journal.read(1), lambda: journal.frontier):
        with pytest.raises(ClosedError):
            use()
    assert bytes(reader.read(1)) == b"x"
    reader.close()


def test_a_second_writer_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from penstock.journal import Journal\n"
        "journal = Journal(sys.argv[1])\n"
        "print('open', flush=True)\n"
        "sys.stdin.read()\n"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "j")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"open\n"
        with pytest.raises(RefusedError, match=f"process {other.pid}"):
            Journal(tmp_path / "j")
        other.kill()
    with Journal(tmp_path / "j") as journal:
        with pytest.raises(RefusedError, match=str(os.getpid())):
            Journal(tmp_path / "j")
        assert journal.append("a", b"x") == 1, "the refused one has not taken the lock away"
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
        assert f"process {os.getpid()}" in done.stderr


def test_after_a_fork_the_child_is_refused(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.append("a", b"x")
        child = os.fork()
        if child == 0:
            try:
                journal.append("a", b"from the child")
            except StateError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert journal.append("a", b"y") == 2


def test_readers_in_other_processes_follow_the_frontier(tmp_path: Path) -> None:
    Journal(tmp_path / "j").close()
    code = (
        "import sys\n"
        "from penstock.journal import Journal\n"
        "with Journal(sys.argv[1], mode='read') as journal:\n"
        "    follower = journal.follow(1)\n"
        "    print('ready', flush=True)\n"
        "    found = 0\n"
        "    while found < 3000:\n"
        "        for message in follower.read_many(100, 30):\n"
        "            found += 1\n"
        "            assert message.position == found, (message.position, found)\n"
        "            assert bytes(message) == b'%d' % found * (found % 50), message.position\n"
        "print('done', flush=True)\n"
    )
    readers = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "j")], stdout=subprocess.PIPE) for _ in range(2)
    ]
    with Journal(tmp_path / "j", segment_bytes=65536) as journal:
        for reader in readers:
            assert reader.stdout is not None and reader.stdout.readline() == b"ready\n"
        for i in range(1, 3001):
            if i % 100 == 1:
                journal.append_many("a", [b"%d" % n * (n % 50) for n in range(i, i + 90)])
            if i % 100 > 90 or i % 100 == 0:
                journal.append("a", b"%d" % i * (i % 50))
        for reader in readers:
            assert reader.stdout is not None and reader.stdout.readline() == b"done\n"
            reader.stdout.close()
            assert reader.wait(LONG) == 0


def test_threads_share_commits(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        positions: list[int] = []

        def work(number: int) -> None:
            for i in range(100):
                positions.append(journal.append(f"t{number}", b"%d" % i))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(positions) == list(range(1, 801))
        assert journal.writer.commits < 801
        for number in range(8):
            batch = journal.read_many(1, 1000, topics=[f"t{number}"])
            assert [bytes(message) for message in batch] == [b"%d" % i for i in range(100)]
            assert list(batch.ordinals) == list(range(1, 101))


def test_times_are_the_publishers_and_those_of_storing_are_monotone(tmp_path: Path) -> None:
    given = [500, 100, 0, -1, -(2**62), 2**63 - 1, 900]
    with Journal(tmp_path / "j") as journal:
        for time_ns in given:
            journal.append("a", b"", timestamp_ns=time_ns)
        journal.append_many("b", [b"x", b"y"], timestamp_ns=0)
        journal.commit([Entry("c", b"", timestamp_ns=-7)])
        journal.append("a", b"")
        batch = journal.read_many(1)
        stamps, stored = list(batch.timestamps_ns), list(batch.stored_ns)
        assert stamps[:-1] == [*given, 0, 0, -7] and stamps[-1] == stored[-1]
        assert stored == sorted(stored) and abs(stored[0] - time.time_ns()) < 60e9
        assert [message.stored_ns for message in batch] == stored
        pytest.importorskip("pyarrow")
        table = [row for part in journal.batches(columns=["timestamp_ns", "stored_ns"]) for row in part.to_pylist()]
        assert [(row["timestamp_ns"], row["stored_ns"]) for row in table] == list(zip(stamps, stored, strict=True))
    with Journal(tmp_path / "j") as journal:
        journal.append("a", b"")
        assert (journal.read(journal.frontier - 1).stored_ns or 0) >= stored[-1]


def test_a_subscriber_begins_where_start_says_as_on_every_reach(tmp_path: Path) -> None:
    address = f"journal:{tmp_path / 'j'}"
    with penstock.publisher(address) as publisher:
        publisher.publish_many([b"1", b"2"])
        between = datetime.datetime.now(datetime.UTC)
        publisher.publish_many([b"3", b"4"])
        places = [("first", 1), (2, 2), ("2", 2), ("last 10 min", 1), (between, 3), (between.isoformat(), 3)]
        for start, first in places:
            with penstock.subscriber(address, start=start) as subscriber:
                assert bytes(subscriber.receive(LONG)) == b"%d" % first, start
        for start in ("last 0 s", "new", None):
            with penstock.subscriber(address, start=start) as subscriber:
                publisher.publish(b"after")
                assert bytes(subscriber.receive(LONG)) == b"after", start
        for bad in ("soon", 0, -1, "last week", True):
            with pytest.raises((ValueError, TypeError), match="start"):
                penstock.subscriber(address, start=bad)


def test_addresses(tmp_path: Path) -> None:
    address = f"journal:{tmp_path / 'j'}"
    with (
        penstock.publisher(f"{address}#a.b", segment_bytes=1 << 20) as one,
        penstock.publisher(f"{address}#a.c") as two,
    ):
        with penstock.subscriber(f"{address}#a.*?start=first") as subscriber:
            assert (one.publish(b"1"), two.publish(b"2"), one.publish(b"3")) == (1, 1, 2)
            assert [bytes(subscriber.read(LONG)) for _ in range(3)] == [b"1", b"2", b"3"]  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument):
            penstock.subscriber(f"{address}?start=middle")


def test_a_function_that_is_assigned_is_refused(tmp_path: Path) -> None:
    with Journal(tmp_path / "log") as journal, pytest.raises(AttributeError, match=r"journal\.on_snapshot\(function\)"):
        journal.on_snapshot = print  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("name", ["key", "message_id"])
def test_an_id_or_key_that_is_no_text_is_refused_in_words(tmp_path: Path, name: str) -> None:
    wrong: Any = {name: b"k"}
    with Journal(tmp_path / "journal") as journal:
        with pytest.raises(TypeError, match=f"{name} must be a str, not bytes"):
            journal.commit([Entry("t", b"x", **wrong)])
        with pytest.raises(TypeError, match=f"{name} must be a str, not bytes"):
            journal.append("t", b"x", **wrong)
        journal.commit([Entry("t", b"x", key="k", message_id="1")])
