"""A full disk and a failing sync: nothing is confirmed that is not stored, and it goes on, or ends, as it must."""

from __future__ import annotations

import errno
import time
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


def test_an_id_that_was_refused_is_stored_when_it_comes_again(serve: Callable[..., Server]) -> None:
    disk = Failing()
    connection = Wire(serve(disk=disk).port).hello()
    disk.write_error = errno.ENOSPC
    connection.send(b"PUB t 1 id=a\nx")
    assert connection.line().startswith("ERR full ")
    disk.write_error = 0
    connection.send(b"PUB t 1\ny")
    assert connection.line() == "OK 1"
    connection.send(b"PUB t 1 id=a\nxPUB t 1 id=a\nx")
    assert connection.line() == "OK 2", "not taken for stored"
    assert connection.line() == "OK 2", "and now it is"
    connection.close()


def test_a_transaction_that_was_refused_is_still_staged(serve: Callable[..., Server]) -> None:
    disk = Failing()
    server = serve(disk=disk)
    with Client(port=server.port) as client:
        client.stage("job", "t", [b"a", b"b"])
        disk.write_error = errno.ENOSPC
        with pytest.raises(PenstockError, match="nothing was stored"):
            client.commit("job")
        disk.write_error = 0
        assert client.commit("job") == (1, 2, False)
        assert client.commit("job") == (1, 2, True)
        assert client.statistics()["staged_bytes"] == 0


def test_a_queue_that_was_refused_is_stored_when_it_is_asked_for_again(serve: Callable[..., Server]) -> None:
    disk = Failing()
    server = serve(disk=disk)
    connection = Wire(server.port).hello().send(b"QUEUE kept topics=t\n")
    assert connection.line() == "OK"
    disk.write_error = errno.ENOSPC
    for line in (b"QUEUE new topics=t\n", b"DELETE kept\n"):
        connection.send(line)
        assert connection.line().startswith("ERR full ")
    disk.write_error = 0
    connection.send(b"QUEUE new topics=t\nPUB t 1\nx")
    assert [connection.line(), connection.line()] == ["OK", "OK 1"]
    connection.close()
    server.close()
    with Client(port=serve().port) as client:
        assert [(entry["queue"], entry["depth"]) for entry in client.queues()] == [("new", 1)]


def test_dead_letters_and_delayed_messages_wait_for_room(serve: Callable[..., Server]) -> None:
    """What is moved by the broker itself when the disk is full is moved later, not lost."""
    disk = Failing()
    server = serve(disk=disk)
    with Client(port=server.port) as client:
        client.queue("q", topics="t", max_tries=1)
        client.publish("t", b"poison")
        client.publish("t", b"later", delay_s=0.2)
        with client.subscribe("q", ack="manual") as consumer:
            message = consumer.read(LONG)
            assert message is not None and bytes(message) == b"poison"
            failures = server.failures
            disk.write_error = errno.ENOSPC
            consumer.nack(message)
            until(lambda: server.failures > failures + 10 and time.time_ns() > message.timestamp_ns + 300_000_000)
            disk.write_error = 0
            late = consumer.read(LONG)
            assert late is not None and bytes(late) == b"later"
            consumer.ack(late, confirm=True)
        with client.subscribe("q.dead") as dead:
            assert bytes(dead.read(LONG) or b"") == b"poison"
            assert dead.read(0.2) is None
    server.close()
    with Client(port=serve().port) as client:
        assert {entry["queue"]: entry["depth"] for entry in client.queues()} == {"q": 0, "q.dead": 0}


def test_a_raw_client_whose_message_was_not_stored_is_closed(serve: Callable[..., Server]) -> None:
    disk = Failing()
    server = serve(disk=disk)
    bystander = Wire(server.port)
    bystander.send(b"SUB q\nPUB 1\na").exactly(b"a")
    disk.write_error = errno.ENOSPC
    publisher = Wire(server.port).send(b"PUB 1\nb")
    assert publisher.closed() == b""
    disk.write_error = 0
    bystander.send(b"PUB 1\nc").exactly(b"c")
    bystander.close()
    publisher.close()
