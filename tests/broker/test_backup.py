"""Kept and moved: a backup while the broker runs, incremental, put back with queues and positions; older directories."""

from __future__ import annotations

import errno
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.broker import Client, Server
from penstock.broker.backup import backup, restore
from penstock.errors import InvalidArgument, RefusedError
from penstock.journal.verify import verify
from tests.broker.conftest import LONG

SEGMENT_BYTES = 1 << 18


def test_a_backup_under_load_holds_what_was_confirmed_before_it(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(segment_bytes=SEGMENT_BYTES)
    copy, back = tmp_path / "copy", tmp_path / "back"
    stop, confirmed = threading.Event(), [0]

    def load() -> None:
        with Client(port=server.port) as publisher:
            while not stop.is_set():
                confirmed[0] = publisher.publish_many("t", [b"%08d" % 0 + bytes(500)] * 50)[1]

    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        client.queue("done", topics="t", max_tries=7)
        client.publish_many("t", [bytes(1000)] * 2000)
        client.purge("done")
        thread = threading.Thread(target=load)
        thread.start()
        try:
            for number in range(6):  # again and again, to the same place
                before = confirmed[0]
                found = backup(tmp_path / "broker", copy)
                assert found.copied_files < 3 * found.segments or not number, "full segments are copied once"
        finally:
            stop.set()
            thread.join(LONG)
    assert verify(copy) == []
    restore(copy, back)
    with Server(back, 0, segment_bytes=SEGMENT_BYTES).start() as again, Client(port=again.port) as client:
        assert client.statistics()["next"] > before
        known = {queue["queue"]: queue for queue in client.queues()}
        assert known["done"]["max_tries"] == 7 and known["done"]["floor"] > 2000, "with positions and queues"
        assert known["q"]["depth"] >= before
        with client.subscribe("q") as consumer:
            assert bytes(consumer.read(LONG) or b"") == bytes(1000)
        assert client.publish("t", b"goes on") >= before


def test_segments_that_were_freed_go_from_the_copy_too(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(segment_bytes=SEGMENT_BYTES, keep="0")
    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        client.publish_many("t", [bytes(10_000)] * 200)
        first = backup(tmp_path / "broker", tmp_path / "copy")
        client.purge("q")
        server.broker.trim()
        second = backup(tmp_path / "broker", tmp_path / "copy")
    assert second.segments < first.segments and second.removed_files > 0
    assert verify(tmp_path / "copy") == []


def test_what_is_no_backup_is_refused(serve: Callable[..., Server], tmp_path: Path) -> None:
    serve()
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine").write_text("mine")
    with pytest.raises(InvalidArgument, match="neither empty nor a backup"):
        backup(tmp_path / "broker", other)
    with pytest.raises(InvalidArgument, match="not empty"):
        restore(tmp_path / "broker", other)
    with pytest.raises(InvalidArgument, match="not a broker's directory"):
        backup(other, tmp_path / "copy")
    serve(directory=tmp_path / "second")
    backup(tmp_path / "broker", tmp_path / "copy")
    with pytest.raises(InvalidArgument, match="another broker"):
        backup(tmp_path / "second", tmp_path / "copy")


def test_a_first_copy_that_broke_off_is_gone_on_with(
    serve: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    with Client(port=server.port) as client:
        client.publish("t", b"kept")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for copy, target in ((backup, tmp_path / "copy"), (restore, tmp_path / "back")):
        for fails in ("fsync", "write", "none"):  # in the note of what has begun; in the first segment; nowhere
            with monkeypatch.context() as patched:
                if fails == "fsync":
                    patched.setattr("penstock.broker.backup.os.fsync", full)
                elif fails == "write":
                    patched.setattr("penstock.broker.backup.shutil.copyfileobj", full)
                if fails != "none":
                    with pytest.raises(OSError, match=str(target)):
                        copy(tmp_path / "broker", target)
                    with pytest.raises(InvalidArgument, match="not a broker's directory"):  # it is not whole
                        restore(target, tmp_path / "nowhere")
                else:
                    assert copy(tmp_path / "broker", target).segments == 1
        assert verify(target) == [] and not (target / "unfinished-backup").exists()
    serve(directory=tmp_path / "second")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "unfinished-backup").write_text("of another broker")
    with pytest.raises(InvalidArgument, match="neither empty nor a backup"):
        backup(tmp_path / "broker", tmp_path / "half")


def test_nothing_is_copied_over_a_broker_that_runs(serve: Callable[..., Server], tmp_path: Path) -> None:
    """What a broker confirms goes into its own files: none of them is replaced under it."""
    source, standby = tmp_path / "broker", tmp_path / "standby"
    server = serve()
    with Client(port=server.port) as client:
        client.publish("t", b"kept")
    (tmp_path / "link").symlink_to(source)
    for target in (source, source / "inner", tmp_path, tmp_path / "link", tmp_path / "link" / "inner"):
        with pytest.raises(InvalidArgument, match="same directory, or one lies in the other"):
            backup(source, target)
    backup(source, standby)
    with Server(standby, 0).start() as other, Client(port=other.port) as client:
        with pytest.raises(RefusedError, match="standby is in use"):
            backup(source, standby)
        client.publish("t", b"stored here alone")
    with Server(standby, 0).start() as other, Client(port=other.port) as client:
        assert client.statistics()["next"] == 3
    assert backup(source, standby).segments == 1, "nobody runs on it any more"


def test_the_commands(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve()
    with Client(port=server.port) as client:
        client.publish("t", b"kept")
    for line in (["backup", "broker", "copy"], ["restore", "copy", "back"]):
        command = [sys.executable, "-m", "penstock", "broker", line[0], *(str(tmp_path / name) for name in line[1:])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10 * LONG, check=False)
        assert done.returncode == 0 and "segments" in done.stdout, done.stdout + done.stderr
    with Server(tmp_path / "back", 0).start() as again, Client(port=again.port) as client:
        assert client.statistics()["next"] == 2


def test_a_broker_of_version_1_is_converted_in_place(tmp_path: Path) -> None:
    with tarfile.open(Path(__file__).parent / "data" / "version_1.tar.gz") as archive:
        archive.extractall(tmp_path / "old", filter="data")
    with Server(tmp_path / "old", 0).start() as server, Client(port=server.port) as client:
        assert {queue["queue"] for queue in client.queues()} == {"qa", "qb"}
        with client.subscribe("qa") as consumer:
            assert bytes(consumer.read(LONG) or b"") == b"from a"
        assert client.publish("b", b"goes on") == 2
