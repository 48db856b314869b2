"""The recorder's ends: it ends while messages keep coming, counts exactly, tells what failed, keeps the way back."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

import penstock
from penstock import Message
from penstock.broker import Server
from penstock.cli.demo.conductor import everything_arrived
from penstock.errors import RefusedError
from penstock.journal import Entry, Journal
from penstock.recording import merge
from penstock.recording import recorder as recorder_module
from penstock.recording import story as recording
from penstock.recording.recorder import Plan, Recorder
from penstock.recording.span import Span, messages
from penstock.recording.tape import Tape
from tests.cli.command import HERE, environment, run, start
from tests.cli.test_recording import bodies


@contextmanager
def flood(address: str, **options: Any) -> Iterator[penstock.Publisher]:
    """A publisher that never pauses; its bodies are numbers."""
    stop = threading.Event()
    with penstock.publisher(address, **options) as publisher:

        def run_on() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                publisher.publish(b"%d" % number)

        thread = threading.Thread(target=run_on)
        thread.start()
        try:
            yield publisher
        finally:
            stop.set()
            thread.join()


def channel() -> str:
    return f"shm:/test-recorder-{uuid.uuid4().hex[:8]}"


def wait_for(what: Any) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ctrl_c_ends_it_while_messages_keep_coming(tmp_path: Path) -> None:
    address = channel()
    with flood(address, slots=64, slot_size=64):
        running = start("record", address, "-o", str(tmp_path / "rec"), "--json")
        try:
            wait_for(lambda: recording.is_journal(tmp_path / "rec") and len(bodies(tmp_path / "rec", topic(address))))
            running.send_signal(signal.SIGINT)
            out, err = running.communicate(timeout=40)
        finally:
            running.kill()
            running.wait()
    assert running.returncode == 0, err
    stored = [int(body) for body in bodies(tmp_path / "rec", topic(address))]
    assert json.loads(out)["messages"] == len(stored) > 0
    assert stored == sorted(set(stored))
    assert recording.read_story(tmp_path / "rec").ended


def topic(address: str) -> str:
    return recording.topic_of(address)


def test_what_was_published_before_the_stop_is_stored(tmp_path: Path) -> None:
    address = channel()
    plan = Plan(tmp_path / "rec", {f"{address}?reliable=true": "t"})
    with penstock.publisher(address, slots=4096, slot_size=64) as publisher, Recorder(plan) as recorder:
        for number in range(3000):
            publisher.publish(b"%d" % number)
        recorder.stop()
    assert [int(body) for body in bodies(tmp_path / "rec", "t")] == list(range(3000))


def test_what_a_recording_cannot_hold_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole, plain, virtual = channel(), channel(), channel()
    mux = virtual.removeprefix("shm:")
    plan = Plan(tmp_path / "rec", {whole: "whole", plain: "plain", virtual: "virtual"})
    with (
        penstock.publisher(whole, metadata_size=8) as first,
        penstock.publisher(plain) as second,
        penstock.publisher(f"{virtual}-one", mux=mux) as third,
        Recorder(plan) as recorder,
    ):
        for _ in range(2):
            first.publish(b"x", metadata=b"12345678")  # type: ignore[call-arg]
            second.publish(b"y")
            third.publish(b"z")
        recorder.stop()
    told = [record.getMessage() for record in caplog.records if record.name == "penstock.recording"]
    assert sorted(told) == sorted([
        f"{whole}: a recording cannot hold metadata of messages: they end here",
        f"{virtual}: a recording cannot hold virtual channel of messages: they end here",
    ])


@pytest.mark.parametrize("addresses", [1, 3])
def test_the_count_is_exact(tmp_path: Path, addresses: int) -> None:
    names = [channel() for _ in range(addresses)]
    with flood(names[0], slots=64, slot_size=64):
        done = run("record", *names, "-o", str(tmp_path / "rec"), "--count", "1000", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["messages"] == 1000, done.stderr
    assert len(bodies(tmp_path / "rec", topic(names[0]))) == 1000


ELSEWHERE = "tcp://127.0.0.1:1"  # how much was published there nobody knows here


class Backlog:
    """A subscriber that always has one more old message."""

    closed = False

    def schemas_of(self, topic: str | None) -> list[str]:
        return []

    def __init__(self, *_: object, **__: object) -> None:
        self.ledger = penstock.Ledger()

    def read_many(self, most: int, timeout: float | None = None) -> list[Message]:
        return [Message(b"old", timestamp_ns=1)]

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> Backlog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Endless(Backlog):
    """A subscriber of somebody who never pauses: at every look there is a new message."""

    def read_many(self, most: int, timeout: float | None = None) -> list[Message]:
        return [Message(b"new", timestamp_ns=time.time_ns())]


def test_what_keeps_coming_after_the_stop_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock, "subscriber", Endless)
    monkeypatch.setattr(recorder_module, "DRAIN_S", 1e6)
    with Recorder(Plan(tmp_path / "rec", {ELSEWHERE: "t"})) as recorder:
        wait_for(lambda: recorder.totals()["messages"])
        recorder.stop()
    story = recording.read_story(tmp_path / "rec")
    assert story.ended and not recorder.errors


def test_a_backlog_is_drained_for_a_while_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock, "subscriber", Backlog)
    monkeypatch.setattr(recorder_module, "DRAIN_S", 0.2)
    with Recorder(Plan(tmp_path / "rec", {ELSEWHERE: "t"})) as recorder:
        recorder.stop()
    assert recording.read_story(tmp_path / "rec").ended


def test_a_second_ctrl_c_gives_the_backlog_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock, "subscriber", Backlog)
    monkeypatch.setattr(recorder_module, "DRAIN_S", 1e6)
    with pytest.raises(KeyboardInterrupt), Recorder(Plan(tmp_path / "rec", {ELSEWHERE: "t"})) as recorder:
        here = threading.get_ident()
        thread = threading.Thread(target=lambda: (recorder._stop.wait(), signal.pthread_kill(here, signal.SIGINT)))
        thread.start()
        recorder.stop()
    thread.join()
    assert not [one for one in threading.enumerate() if one.name.startswith("record")]
    story = recording.read_story(tmp_path / "rec")
    assert story.ended and not recorder.errors and not story.failed


class Behind(Backlog):
    """A subscriber that always has ten more messages, all of them old, and says how far it is."""

    frontier = property(lambda self: self.position + 10)

    def __init__(self, *_: object, **__: object) -> None:
        self.position = 0

    @property
    def ledger(self) -> penstock.Ledger:
        return penstock.Ledger(matched=self.position + 10, delivered=self.position, in_flight=10)

    @ledger.setter
    def ledger(self, _: object) -> None: ...

    def read_many(self, most: int, timeout: float | None = None) -> list[Message]:
        self.position += 1
        return super().read_many(most, timeout)


@pytest.mark.parametrize("address", ["shm:/x", "journal:x#t"])
def test_what_was_there_at_the_stop_is_all_that_is_waited_for_whatever_its_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setattr(penstock, "subscriber", Behind)
    monkeypatch.setattr(recorder_module, "DRAIN_S", 1e6)
    with Recorder(Plan(tmp_path / "rec", {address: "t"})) as recorder:
        wait_for(lambda: recorder.totals()["messages"])
        recorder.stop()
    assert recording.read_story(tmp_path / "rec").ended


class Ahead(Backlog):
    """A subscriber of somebody whose clock is an hour ahead: many messages wait when the recorder stops."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()
        self.stopped = threading.Event()
        self.left = 4 * recorder_module.BATCH

    def fileno(self) -> int:
        return -1

    def read_many(self, most: int, timeout: float | None = None) -> list[Message]:
        count = min(most, self.left) if self.stopped.is_set() else 0
        self.left -= count
        return [Message(b"ahead", timestamp_ns=time.time_ns() + 3600 * 10**9) for _ in range(count)]


def test_a_clock_that_is_ahead_does_not_end_it_before_all_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(penstock, "subscriber", Ahead)
    with Recorder(Plan(tmp_path / "rec", {ELSEWHERE: "t"})) as recorder:
        cast(Ahead, recorder.sources[0].subscriber).stopped = recorder._stop
        recorder.stop()
    assert len(bodies(tmp_path / "rec", "t")) == 4 * recorder_module.BATCH


def test_stored_messages_with_times_ahead_do_not_end_it_either(tmp_path: Path) -> None:
    later_ns = time.time_ns() + 3600 * 10**9
    with Journal(tmp_path / "source") as source:
        source.commit(Entry("t", b"%d" % number, timestamp_ns=later_ns + number) for number in range(2000))
    with Recorder(Plan(tmp_path / "rec", {f"journal:{tmp_path}/source#t?start=first": "t"})) as recorder:
        recorder.stop()
    assert [int(body) for body in bodies(tmp_path / "rec", "t")] == list(range(2000))


def test_a_message_too_long_for_a_journal_is_told_and_the_rest_is_stored(tmp_path: Path) -> None:
    long, other = f"tcp://127.0.0.1:{free_port()}", channel()
    with (
        penstock.publisher(long, depth_bytes=128 << 20) as first,
        penstock.publisher(other, slots=64, slot_size=64) as second,
    ):
        running = start("record", long, other, "-o", str(tmp_path / "rec"), "--json")
        try:
            assert first.wait_ready(1, 60) and second.wait_ready(1, 60)
            first.publish(b"before")
            first.publish(bytes(65 << 20))
            first.publish(b"after")
            assert running.stderr is not None
            while not (line := running.stderr.readline()).startswith(f"penstock: {long}: not everything"):
                assert "nothing came yet" in line, "while the others go on"
            second.publish(b"going on")
            wait_for(lambda: bodies(tmp_path / "rec", topic(long))[-1:] == [b"after"])
            wait_for(lambda: bodies(tmp_path / "rec", topic(other)))
            running.send_signal(signal.SIGINT)
            out, err = running.communicate(timeout=60)
        finally:
            running.kill()
            running.wait()
    told = json.loads(out)
    assert running.returncode == 1 and list(told["errors"]) == [long], err
    assert (told["messages"], told["lost"]) == (3, 1)
    assert bodies(tmp_path / "rec", topic(long)) == [b"before", b"after"]
    assert recording.read_story(tmp_path / "rec").lost == 1


def test_a_disk_that_is_full_is_told_with_the_address(tmp_path: Path) -> None:
    address = channel()
    with flood(address, slots=64, slot_size=64):
        done = subprocess.run(
            [*HERE, "record", address, "-o", str(tmp_path / "rec")], env=environment(), capture_output=True, text=True,
            timeout=60, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20)), check=False,
        )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"penstock: {address}: not recorded any more: " in done.stderr, done.stderr
    assert bodies(tmp_path / "rec", topic(address))
    story = recording.read_story(tmp_path / "rec")
    assert address in story.failed or not story.ended, "the notes may fit on the disk still, or may not"


def test_a_failure_that_the_disk_refused_stands_in_the_end_of_the_story(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(tape: Tape, event: dict[str, Any]) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(penstock, "subscriber", Failing)
    monkeypatch.setattr(Tape, "tell", refuse)
    with Recorder(Plan(tmp_path / "rec", {"shm:/x": "t"})) as recorder:
        wait_for(lambda: recorder.errors)
    story = recording.read_story(tmp_path / "rec")
    assert story.ended and story.failed == {"shm:/x": "nobody thought of this"}


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Failing(Backlog):
    """Gives one message, then fails in a way that nobody thought of."""

    given = 0

    def read_many(self, most: int, timeout: float | None = None) -> list[Message]:
        self.given += 1
        if self.given > 1:
            raise TypeError("nobody thought of this")
        return super().read_many(most)


def test_one_address_that_fails_is_in_the_story_and_play_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = channel()
    opened = penstock.subscriber
    monkeypatch.setattr(penstock, "subscriber", lambda to: Failing() if to == "shm:/x" else opened(to))
    plan = Plan(tmp_path / "rec", {"shm:/x": "x", address: "t"})
    with penstock.publisher(address, slots=64, slot_size=64) as publisher, Recorder(plan) as recorder:
        wait_for(lambda: recorder.errors)
        publisher.publish(b"going on")
        recorder.stop()
    assert recorder.errors == {"shm:/x": "not recorded any more: nobody thought of this"}
    assert bodies(tmp_path / "rec", "t") == [b"going on"]
    assert recording.read_story(tmp_path / "rec").failed == {"shm:/x": "nobody thought of this"}
    played = run("play", str(tmp_path / "rec"), "--speed", "0", "--map", f"*=journal:{tmp_path}/copy#{{topic}}")
    assert played.returncode == 0 and "shm:/x was not recorded to the end: nobody thought" in played.stderr


def test_max_size_and_kill_keep_the_way_back_and_play_tells_what_is_missing(tmp_path: Path) -> None:
    source, rec = f"journal:{tmp_path}/live#m", tmp_path / "rec"
    Journal(tmp_path / "live").close()  # reading makes none, and the publisher below may come later
    running = start("record", source, "-o", str(rec), "--max-size", "1M")
    try:
        done = run("pub", source, "{count}", "--size", "20000", "--count", "300", "--wait", "1", timeout=90)
        assert done.returncode == 0, done.stderr
        wait_for(lambda: bodies(rec, "m")[-1:] and int(bodies(rec, "m")[-1].rstrip(b".")) == 300)
    finally:
        running.kill()
        running.communicate()
    with Journal(rec, mode="read") as journal:
        assert journal.first > 1, "the beginning is gone"
    story = recording.read_story(rec)
    assert story.known and story.trimmed and not story.ended and story.addresses == {"m": source}
    played = run("play", str(rec), "--speed", "0", "--map", f"m=journal:{tmp_path}/copy#m")
    assert "the beginning is missing" in played.stderr and "did not end properly" in played.stderr
    exported = run("export", str(rec), "--to", "jsonl", "-o", str(tmp_path / "x.jsonl"))
    assert exported.returncode == 0
    assert "the beginning is missing" in exported.stderr and "did not end properly" in exported.stderr


def test_much_at_once_leaves_the_newest_of_a_bounded_recording(tmp_path: Path) -> None:
    """A commit goes as a whole, with its segment: one of everything would leave nothing."""
    tape = Tape(Plan(tmp_path / "rec", {"shm:/x": "x"}, max_bytes=4 << 20))
    for piece in tape.pieces([Entry("x", b"%06d" % number + bytes(20_000)) for number in range(1, 601)]):
        tape.commit(piece, 20_006 * len(piece))
    tape.tell({"event": "lost", "count": 1, "reason": "overrun"})
    tape._journal.retain()
    with Journal(tmp_path / "rec", mode="read") as reader:
        batch, _ = reader.read_from(reader.first, 1000)
        found = [int(bytes(message)[:6]) for message in batch if message.channel == "x"]
    tape.end({})
    assert found and found == list(range(found[0], 601)) and found[0] > 1


def test_at_no_moment_is_a_bounded_recording_without_its_addresses(tmp_path: Path) -> None:
    tape = Tape(Plan(tmp_path / "rec", {"shm:/x?token=secret": "x"}, max_bytes=1 << 20))
    trimmed = 0
    for _ in range(60):
        tape.commit([Entry("x", bytes(100_000))], 100_000)
        tape.tell({"event": "lost", "count": 1, "reason": "overrun"})
        tape._journal.retain()  # what would be done in its own time is done now
        story = recording.read_story(tmp_path / "rec")
        assert story.addresses == {"x": "shm:/x"} and not story.ended
        trimmed += story.trimmed
    tape.end({"lost": 60})
    assert trimmed and recording.read_story(tmp_path / "rec").lost == 60


@pytest.mark.parametrize(
    ("shm", "tcp", "topics", "more", "complete"),
    [
        ((10, 10), (7, 7), {"camera": 10, "vibration": 7}, {}, True),
        ((10, 9), (7, 8), {"camera": 10, "vibration": 7}, {}, False),  # a surplus does not make up for a loss
        ((10, 10), (7, 7), {"camera": 10, "vibration": 6}, {}, False),
        ((10, 10), (7, 7), {"camera": 10, "vibration": 7}, {"errors": {"shm:/x": "failed"}}, False),
        ((10, 10), (7, 7), {"camera": 10, "vibration": 7}, {"finished": False}, False),
    ],
)
def test_the_demo_is_complete_when_every_number_agrees(
    shm: tuple[int, int], tcp: tuple[int, int], topics: dict[str, int], more: dict[str, Any], complete: bool
) -> None:
    rows = [{"reach": n, "published": p, "delivered": d} for n, (p, d) in (("shm", shm), ("tcp", tcp))]
    report = {"recorded": {"topics": topics, "lost": 0}, "errors": {}, "finished": True, **more}
    assert everything_arrived(rows, report) is complete


def stored_topics(directory: Path) -> list[tuple[str, int]]:
    """The topics and times of a recording, in its order."""
    with Journal(directory, mode="read") as journal:
        return [
            (message.channel or "", message.timestamp_ns) for message in messages([journal], None, Span(None, None))
        ]


def test_a_recording_of_several_channels_is_in_the_order_of_publishing(tmp_path: Path) -> None:
    """Both what the channels hold when it begins, and what comes while it runs."""
    names = [channel() for _ in range(3)]
    plan = Plan(tmp_path / "rec", {name: f"t{number}" for number, name in enumerate(names)})
    with contextlib.ExitStack() as stack:
        publishers = [stack.enter_context(penstock.publisher(name, slots=2048, slot_size=64)) for name in names]
        for number in range(900):
            publishers[number % 3].publish(b"%d" % number)
        with Recorder(plan) as recorder:
            for number in range(900, 1800):
                publishers[number % 3].publish(b"%d" % number)
            recorder.stop()
    stored = stored_topics(tmp_path / "rec")
    assert len(stored) == 1800
    assert [topic for topic, _ in stored] == [f"t{number % 3}" for number in range(1800)]


@pytest.mark.parametrize("later", [0, 600])
def test_what_a_channel_held_is_stored_also_when_the_recorder_is_stopped_before_it_has_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: int
) -> None:
    name, stopped = channel(), threading.Event()
    run = Recorder._run
    monkeypatch.setattr(Recorder, "_run", lambda *given: (stopped.wait(60), run(*given)))
    with penstock.publisher(name, slots=2048, slot_size=64) as publisher:
        publisher.publish_many([b"x"] * 600)
        with Recorder(Plan(tmp_path / "rec", {name: "t"})) as recorder:
            publisher.publish_many([b"x"] * later)
            recorder._end_reading()
            stopped.set()
    assert len(stored_topics(tmp_path / "rec")) == 600 + later


def test_of_what_was_held_back_as_many_are_stored_as_are_wanted(tmp_path: Path) -> None:
    name = channel()
    plan = Plan(tmp_path / "rec", {name: "t"}, pre_buffer_s=1000, max_messages=3)
    with penstock.publisher(name) as publisher, Recorder(plan) as recorder:
        publisher.publish_many([b"x"] * 5)
        wait_for(lambda: len(recorder.sources[0].waiting) == 5)
        recorder.trigger()
        wait_for(lambda: not recorder.running)
    assert len(stored_topics(tmp_path / "rec")) == 3


def test_what_was_held_back_is_stored_in_the_order_of_publishing(tmp_path: Path) -> None:
    names = [channel() for _ in range(2)]
    plan = Plan(tmp_path / "rec", {name: f"t{number}" for number, name in enumerate(names)}, pre_buffer_s=1000)
    with contextlib.ExitStack() as stack:
        publishers = [stack.enter_context(penstock.publisher(name, slots=1024, slot_size=64)) for name in names]
        recorder = stack.enter_context(Recorder(plan))
        for number in range(600):
            publishers[number % 2].publish(b"%d" % number)
        wait_for(lambda: sum(len(source.waiting) for source in recorder.sources) == 600)
        recorder.trigger()
        recorder.stop()
    assert [topic for topic, _ in stored_topics(tmp_path / "rec")] == [f"t{number % 2}" for number in range(600)]


def test_journals_are_recorded_in_the_order_of_their_times(tmp_path: Path) -> None:
    """Backlogs longer than one read, one of them much denser."""
    for name, step in (("a", 1000), ("b", 7)):
        with Journal(tmp_path / name) as journal:
            journal.commit(Entry("m", b"x", timestamp_ns=10**18 + step * n) for n in range(1500))
    plan = Plan(tmp_path / "rec", {f"journal:{tmp_path}/{name}#m?start=first": name for name in "ab"})
    with Recorder(plan) as recorder:
        wait_for(lambda: recorder.totals()["messages"] == 3000)
    times = [time_ns for _, time_ns in stored_topics(tmp_path / "rec")]
    assert times == sorted(times) and len(times) == 3000


def test_a_queue_is_recorded_beside_a_live_channel_and_done_when_it_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue's backlog is older than the live channel's messages, and longer than one read."""
    monkeypatch.setattr(merge, "HOLD_ROUNDS", 10**9)  # however slow the machine is
    live = channel()
    with (
        Server(tmp_path / "broker", 0).start() as server,
        penstock.publisher(live, slots=64, slot_size=64) as publisher,
    ):
        address = f"broker://127.0.0.1:{server.port}/m"
        queue = f"{address}?queue=q"
        penstock.subscriber(queue).close()  # it takes what comes from now on
        with penstock.publisher(address) as before:
            for number in range(700):
                before.publish(b"%d" % number)
        publisher.publish(b"live")
        with Recorder(Plan(tmp_path / "rec", {queue: "queue", live: "live"})) as recorder:
            wait_for(lambda: recorder.totals()["messages"] == 701)
            with penstock.publisher(address) as after:
                after.publish(b"700")
            wait_for(lambda: recorder.totals()["messages"] == 702)
        assert not recorder.errors
        with penstock.subscriber(queue) as again:
            assert again.read(0.2) is None, "all is done"
    assert [int(body) for body in bodies(tmp_path / "rec", "queue")] == list(range(701))
    assert [name for name, _ in stored_topics(tmp_path / "rec")] == ["queue"] * 700 + ["live", "queue"]


def test_what_is_not_wanted_is_not_taken_from_a_queue(tmp_path: Path) -> None:
    with Server(tmp_path / "broker", 0).start() as server:
        address = f"broker://127.0.0.1:{server.port}/m"
        penstock.subscriber(f"{address}?queue=q").close()
        with penstock.publisher(address) as publisher:
            for number in range(10):
                publisher.publish(b"%d" % number)
        with Recorder(Plan(tmp_path / "rec", {f"{address}?queue=q": "m"}, max_messages=4)) as recorder:
            wait_for(lambda: not recorder.running)
        with penstock.subscriber(f"{address}?queue=q") as rest:
            assert bytes(rest.receive(60)) == b"4"
    assert bodies(tmp_path / "rec", "m") == [b"0", b"1", b"2", b"3"]


def test_a_broker_that_nobody_can_reach_is_told_by_name_and_soon(tmp_path: Path) -> None:
    with socket.socket() as nobody:  # bound, not listening
        nobody.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{nobody.getsockname()[1]}"
        plan = Plan(tmp_path / "rec", {f"broker://{place}/m?queue=q": "m"}, reach_s=0.1)
        with pytest.raises(RefusedError, match=f"the broker at {place} cannot be reached"), Recorder(plan):
            pass
    assert not (tmp_path / "rec").exists()
