"""A full disk and a failing sync: nothing is confirmed that is not stored, and it goes on, or ends, as it must."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.broker import Client, Server
from penstock.errors import PenstockError
from penstock.journal.disk import Disk

from .conftest import LONG, Wire, until


class Failing(Disk):
    """Writes and syncs fail while told to."""

    native = False
    write_error = 0
    sync_error = 0

    def write(self, file: int, data: bytes, zeros: int, offset: int) -> None:
        if self.write_error:
            raise OSError(self.write_error, "on purpose")
        super().write(file, data, zeros, offset)

    def sync(self, file: int) -> None:
        if self.sync_error:
            raise OSError(self.sync_error, "on purpose")
        super().sync(file)


def test_a_full_disk_refuses_and_goes_on_when_there_is_room(serve: Callable[..., Server]) -> None:
    disk = Failing()
    server = serve(disk=disk)
    connection = Wire(server.port).hello()
    connection.send(b"QUEUE q topics=t\nPUB t 1\na")
    assert [connection.line(), connection.line()] == ["OK", "OK 1"]
    disk.write_error = errno.ENOSPC
    connection.send(b"PUB t 1\nbPUB t 1\ncPING\n")
    assert [connection.line().split()[:2] for _ in range(3)] == [["ERR", "full"]] * 3
    disk.write_error = 0
    connection.send(b"PUB t 1\nd")
    assert connection.line() == "OK 2"
    connection.send(b"SUB q\n")
    assert connection.line() == "OK"
    assert connection.line().split()[3] == "1"
    connection.exactly(b"a\n")
    assert connection.line().split()[3] == "2"
    connection.exactly(b"d\n")
    connection.close()


def test_a_numbered_producer_sends_again_what_was_not_stored(serve: Callable[..., Server]) -> None:
    disk = Failing()
    server = serve(disk=disk)
    with Client(port=server.port, timeout=LONG) as client:
        assert client.publish("t", b"1") == 1
        disk.write_error = errno.ENOSPC
        with pytest.raises(PenstockError):
            client.publish("t", b"2")
        disk.write_error = 0
        assert client.publish("t", b"3") == 2
        assert client.statistics()["next"] == 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_after_a_failed_sync_nothing_is_confirmed_and_the_broker_ends(tmp_path: Path) -> None:
    disk = Failing()
    server = Server(tmp_path / "broker", 0, disk=disk).start()
    connection = Wire(server.port).hello()
    connection.send(b"PUB t 1\na")
    assert connection.line() == "OK 1"
    disk.sync_error = errno.EIO
    connection.send(b"PUB t 1\nb")
    assert b"OK" not in connection.closed()
    until(lambda: server._thread is not None and not server._thread.is_alive())
    connection.close()
    disk.sync_error = 0
    server.close()
    with Server(tmp_path / "broker", 0).start() as again, Client(port=again.port) as client:
        assert client.publish("t", b"c") >= 2
