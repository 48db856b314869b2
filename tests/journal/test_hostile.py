"""What others put into a journal's directory is refused or passed over: never followed, waited for or swallowed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import penstock
from penstock.errors import ClosedError, InvalidArgument, PenstockError, RefusedError
from penstock.journal import Journal, recovery
from penstock.journal.verify import verify

LONG = 60.0
NAMES = {
    "segment": "00000000000000000950-0000.log",
    "index": "00000000000000000001-0000.index",
    "sums": "00000000000000000001-0000.sums",
    "topics": "00000000000000000001-0000.topics",
    "frontier": "frontier",
    "marker": "penstock-journal",
    "lock": "lock",
}
PROGRAM = """
import faulthandler, sys
from penstock.errors import PenstockError
from penstock.journal import Journal
from penstock.journal.verify import verify
how, *copies = sys.argv[1:]
def look(where):
    if how == "verify":
        verify(where)
    elif how == "write":
        with Journal(where) as journal: journal.append("t", b"y")
    else:
        with Journal(where, mode="read") as journal:
            if how == "arrow": found = sum(batch.num_rows for batch in journal.batches(columns=["position", "payload"]))
            else: found = sum(len(journal.read_many(segment.first, 10**6)) for segment in journal.info().segments)
        assert found == 900, found
for where in copies:
    print(where, flush=True)  # the last one is where it failed
    faulthandler.dump_traceback_later(60, exit=True)  # it waits for a fifo, or reads without an end
    try:
        look(where)
    except (PenstockError, OSError) as error:
        assert where in str(error), error
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "j"
    with Journal(path, segment_bytes=65536) as journal:
        for start in range(0, 900, 100):
            journal.append_many("t", [b"x" * 100] * 100)
            journal.roll()
            assert start < 900
    return path


def fifo(place: Path) -> None:
    place.unlink(missing_ok=True)
    os.mkfifo(place)


def link(place: Path) -> None:
    place.unlink(missing_ok=True)
    place.symlink_to("/dev/zero")


@pytest.mark.parametrize("how", ["read", "arrow", "verify", "write"])
def test_what_is_no_file_is_named_or_passed_over(made: Path, tmp_path: Path, how: str) -> None:
    copies = []
    for name, file in NAMES.items():
        for make in (fifo, link):
            copy = tmp_path / f"{name}-{make.__name__}"
            shutil.copytree(made, copy)
            make(copy / file)
            copies.append(str(copy))
    done = subprocess.run([sys.executable, "-c", PROGRAM, how, *copies], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == copies


@pytest.mark.parametrize("suffix", ["log", "index"])
def test_a_sparse_giant_is_read_as_far_as_it_has_data(made: Path, tmp_path: Path, suffix: str) -> None:
    shutil.copytree(made, tmp_path / "j")
    os.truncate(max((tmp_path / "j").glob(f"*.{suffix}")), 1 << 40)
    with Journal(tmp_path / "j", mode="read") as journal:
        assert sum(len(journal.read_many(segment.first, 10**6)) for segment in journal.info().segments) == 900
    assert verify(tmp_path / "j") == []
    with Journal(tmp_path / "j") as journal:
        assert journal.append("t", b"") == 901


def test_a_link_in_the_place_of_a_temporary_file_is_not_written_through(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "j").mkdir()
    for name in ("penstock-journal.new", "frontier.new", "00000000000000000001-0000.log.new"):
        (tmp_path / "j" / name).symlink_to(precious)
    with Journal(tmp_path / "j") as journal:
        journal.append("t", b"")
    assert precious.read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make another user's directory")
def test_another_users_directory_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 12345, 12345)
    with pytest.raises(RefusedError, match="another user"):
        Journal(tmp_path / "theirs")
    (tmp_path / "link").symlink_to(tmp_path)
    os.chown(tmp_path / "link", 12345, 12345, follow_symlinks=False)
    with pytest.raises(RefusedError, match="another user"):
        recovery.check_owner(tmp_path / "link")
    assert os.listdir(tmp_path / "theirs") == []


def test_reading_makes_no_journal(tmp_path: Path) -> None:
    for open_it in (
        lambda: penstock.subscriber(f"journal:{tmp_path}/typo#x"),
        lambda: Journal(tmp_path / "typo", mode="read"),
    ):
        with pytest.raises(InvalidArgument, match="typo"):
            open_it()
    assert not (tmp_path / "typo").exists()


def publish_until_closed(
    publisher: penstock.Publisher, done: list[int], raised: list[str], begun: threading.Event
) -> None:
    try:
        while True:
            publisher.publish(b"x" * 32)
            done[0] += 1
            begun.set()
    except BaseException as error:
        raised.append(type(error).__name__)


def test_publishing_while_another_thread_closes(tmp_path: Path) -> None:
    """Each publish has either returned and is stored, or raised ClosedError and is not; the books say the same."""
    for number in range(15):
        address = f"journal:{tmp_path}/{number}#t?sync=false"
        publisher = penstock.publisher(address)
        done: list[int] = [0]
        raised: list[str] = []
        begun = threading.Event()

        thread = threading.Thread(target=publish_until_closed, args=(publisher, done, raised, begun))
        thread.start()
        assert begun.wait(LONG)
        publisher.close()
        thread.join(LONG)
        assert raised == [ClosedError.__name__]
        with Journal(tmp_path / str(number), mode="read") as journal:
            assert journal.frontier - 1 == done[0] == publisher.ledger.delivered


def test_readers_beside_retention(tmp_path: Path) -> None:
    """Segments that go while they are looked at are no error of who looks."""
    failures: list[BaseException] = []
    with Journal(tmp_path / "j", segment_bytes=65536, retain_bytes=200_000) as journal:
        journal.append("t", bytes(1000))
        ended = threading.Event()

        def look() -> None:
            while not ended.is_set():
                try:
                    assert verify(tmp_path / "j") == []
                    journal.info()
                    with Journal(tmp_path / "j", mode="read") as reader:
                        _ = reader.holes
                except PenstockError as error:
                    failures.append(error)
                except OSError as error:
                    failures.append(error)

        thread = threading.Thread(target=look)
        thread.start()
        for _ in range(60):
            journal.append_many("t", [bytes(1000)] * 64)
        ended.set()
        thread.join(LONG)
    assert failures == []


def test_topics_are_a_list(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.append("work", b"")
        for call in (journal.queue, lambda _, topics: list(journal.batches(topics=topics))):
            with pytest.raises(TypeError, match="not one str"):
                call("jobs", topics="work")  # type: ignore[operator]
        assert journal.queue_states == {}


def test_no_memory_inside_a_commit_leaves_the_writer_usable(tmp_path: Path) -> None:
    program = """
import faulthandler, resource, sys
from penstock.journal import Journal
def used(): return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
journal = Journal(sys.argv[1], segment_bytes=1 << 30)
journal.append("t", b"x")
items, refused = [b""] * 500_000, 0
faulthandler.dump_traceback_later(50, exit=True)
for room in range(0, 200, 4):
    resource.setrlimit(resource.RLIMIT_AS, (used() + (room << 20), resource.RLIM_INFINITY))
    try:
        journal.append_many("t", items)
        break
    except MemoryError:
        refused += 1
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    assert journal.append("t", b"y") == refused + 1
assert refused and journal.frontier == refused + 2 + len(items), (refused, journal.frontier)
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "j")], check=True, timeout=LONG)
