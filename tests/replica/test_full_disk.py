"""A broker with a store on a disk that is full: it starts in the room that there is, or refuses and changes nothing."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.broker import Client
from penstock.errors import describe
from penstock.journal.layout import LOCK_NAME
from penstock.journal.verify import verify
from penstock.replica.refill import BOOT_NAME
from penstock.replica.writers import FILE_NAME, Writers

from .conftest import LONG, replicated_server
from .fake_blocks import FakeBlocks, FakeStream

FREE = [0, 1, 2, 4, 16, 64, 128, 160, 256, 512]  # pages of 4096 bytes


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A partition of 4 MB."""
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True)
    if made.returncode:
        pytest.skip("mounting needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def publish(directory: Path, stream: FakeStream, names: list[bytes]) -> None:
    """Run a broker there that confirms a message of each name."""
    with (
        replicated_server(directory, FakeBlocks(stream), segment_bytes=256 << 10).start() as server,
        Client(port=server.port, timeout=LONG) as client,
    ):
        client.queue("q", topics="t")
        for name in names:
            client.publish("t", name + bytes(10_000))


def names_there(directory: Path, stream: FakeStream, count: int = 60) -> list[bytes]:
    """What a broker that is started there delivers."""
    with (
        replicated_server(directory, FakeBlocks(stream), segment_bytes=256 << 10).start() as server,
        Client(port=server.port, timeout=LONG) as client,
        client.subscribe("q", ack="manual") as consumer,
    ):
        return sorted(bytes(consumer.receive(timeout=LONG))[:5] for _ in range(count))


def leave_free(place: Path, size: int) -> Path:
    """Fill the partition but for that many bytes."""
    filler = place / "filler"
    system = os.statvfs(place)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, system.f_bavail * system.f_frsize - size)
    assert os.statvfs(place).f_bavail * system.f_frsize == size
    return filler


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != LOCK_NAME}


def named(first: int, last: int) -> list[bytes]:
    return [b"%5d" % number for number in range(first, last)]


@pytest.mark.parametrize("pages", FREE)
def test_what_is_there_and_right_needs_no_room(tmp_path: Path, small: Path, stream: FakeStream, pages: int) -> None:
    publish(small / "a", stream, named(0, 60))
    with contextlib.suppress(FileNotFoundError):
        (small / "a" / "reserve").unlink()
    leave_free(small, pages * 4096)
    for _ in range(3):  # again and again
        assert names_there(small / "a", stream) == named(0, 60)
    assert not verify(small / "a")


@pytest.mark.parametrize("pages", FREE)
@pytest.mark.parametrize("there", ["some", "nothing"])
def test_without_room_it_refuses_and_leaves_the_directory_as_it_was(
    tmp_path: Path, small: Path, stream: FakeStream, pages: int, there: str
) -> None:
    publish(tmp_path / "a", stream, named(0, 20))
    if there == "some":
        shutil.copytree(tmp_path / "a", small / "a", ignore=shutil.ignore_patterns("reserve"))
    publish(tmp_path / "a", stream, named(20, 60))
    filler = leave_free(small, pages * 4096)
    before = files_of(small / "a")
    try:
        assert names_there(small / "a", stream) == named(0, 60)
        assert pages >= 64, "it cannot have had room for 40 messages of 10 kB"
    except OSError as error:
        assert pages < 256
        told = describe(error)
        assert re.fullmatch(rf"{small}/a: No space left on device: (at least )?\d+ bytes are needed for .*", told), told
        assert files_of(small / "a") == before
    filler.unlink()
    assert names_there(small / "a", stream) == named(0, 60)
    assert not verify(small / "a")


@pytest.mark.parametrize("where", ["header", "message"])
def test_damage_is_mended_on_a_full_disk(small: Path, stream: FakeStream, where: str) -> None:
    publish(small / "a", stream, named(0, 60))
    path = max((small / "a").glob("*.log"))
    data = bytearray(path.read_bytes())
    data[40 if where == "header" else len(data) // 2] ^= 1
    path.write_bytes(data)
    (small / "a" / BOOT_NAME).write_bytes(b"x" * len((small / "a" / BOOT_NAME).read_bytes()))  # of another boot
    with contextlib.suppress(FileNotFoundError):
        (small / "a" / "reserve").unlink()
    leave_free(small, 0)
    assert names_there(small / "a", stream) == named(0, 60)
    assert not verify(small / "a")


def test_writers_are_noted_on_a_full_disk(small: Path) -> None:
    Writers(small).begin(1)
    leave_free(small, 0)
    for epoch in range(2, 12):
        writers = Writers(small)
        writer = writers.begin(epoch)
        assert Writers(small).epoch != epoch and Writers(small).were_last(epoch, writer)
        writers.note_led()
        assert Writers(small).epoch == epoch
    path = small / FILE_NAME
    path.write_bytes(path.read_bytes()[:-20])  # the last line is torn
    assert Writers(small).epoch == 10
    (small / "filler").unlink()
    Writers(small).begin(12)
    assert Writers(small).were_last(12, Writers(small)._kept[-1][1]) and b"\n\n" not in path.read_bytes()
