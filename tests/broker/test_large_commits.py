"""A large transaction is committed in parts, a turn each: nobody waits for it but who stores, and it is seen whole."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.broker import Client, Limits, Server
from penstock.broker import broker as broker_module
from penstock.broker.fetch import RangeClient
from penstock.errors import RefusedError
from penstock.journal.disk import Disk
from tests.broker.conftest import LONG, Wire, until

COUNT = 20_000


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "PART_BYTES", 65_536)


class Held:
    """The broker stands before each part until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parts = 0
        self.gate = threading.Semaphore(0)
        write = broker_module.Broker.write_part

        def wait(broker: broker_module.Broker) -> None:
            if self.gate.acquire(blocking=False):
                self.parts += 1
                write(broker)

        monkeypatch.setattr(broker_module.Broker, "write_part", wait)

    def let_go(self, parts: int = 1 << 20) -> None:
        self.gate.release(parts)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    found = Held(monkeypatch)
    yield found
    found.let_go()


def stage(port: int, name: str = "job", count: int = COUNT) -> None:
    with RangeClient("127.0.0.1", port) as writer:
        writer.stage(name, "t", [b"%d" % number for number in range(count)])


def committing(port: int, name: str = "job") -> tuple[threading.Thread, list[object]]:
    found: list[object] = []

    def run() -> None:
        try:
            with RangeClient("127.0.0.1", port, timeout=LONG) as writer:
                found.append(writer.commit(name))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def begun(server: Server) -> bool:
    large = server.broker.large
    return large is not None and large.begun


def test_others_go_on_meanwhile_and_nobody_sees_a_part(serve: Callable[..., Server], held: Held) -> None:
    server = serve()
    with Client(port=server.port) as client, Client(port=server.port) as publisher:
        client.queue("q", topics="t")
        client.queue("other", topics="o")
        publisher.publish_many("o", [b"before"] * 10)
        stage(server.port)
        thread, found = committing(server.port)
        until(lambda: begun(server))
        held.let_go(3)
        until(lambda: held.parts == 3)
        client.ping()
        assert {entry["queue"]: entry["depth"] for entry in client.queues()} == {"q": 0, "other": 10}
        assert client.statistics()["next"] == 11, "nothing of it is there"
        with client.subscribe("other") as consumer:
            assert [bytes(consumer.receive(timeout=LONG)) for _ in range(10)] == [b"before"] * 10
        Wire(server.port).hello().close()
        confirmed: list[int] = []
        before = server.broker.counters.get("matched")
        late = threading.Thread(target=lambda: confirmed.append(publisher.publish("t", b"late")))
        late.start()
        until(lambda: server.broker.counters.get("matched") == before + 1, "its message is staged")
        assert not confirmed and not found
        held.let_go()
        for waiting in (thread, late):
            waiting.join(LONG)
        (first, last, again), (position,) = found[0], confirmed  # type: ignore[misc]
        assert (first, again) == (11, False) and last == 10 + COUNT + 1 and first < position < last
        with client.subscribe("q") as consumer:
            bodies = [bytes(consumer.receive(timeout=LONG)) for _ in range(COUNT + 1)]
        bodies.remove(b"late")
        assert bodies == [b"%d" % number for number in range(COUNT)]
        with RangeClient("127.0.0.1", server.port) as writer:
            assert writer.commit("job") == (first, last, True)
        assert client.statistics()["staged_bytes"] == 0
    assert not server.internal_errors


def test_who_asks_for_it_and_goes_away_has_committed_it(serve: Callable[..., Server], held: Held) -> None:
    server = serve()
    stage(server.port)
    wire = Wire(server.port).hello("producer=p").send(b"COMMIT job\n")
    until(lambda: begun(server))
    other = Wire(server.port).send(b"HELLO 1 producer=p\n")  # takes over: the first connection is dropped
    assert wire.closed() == b""
    held.let_go()
    assert other.line().startswith("HELLO 1")
    until(lambda: server.broker.large is None)
    with RangeClient("127.0.0.1", server.port) as writer:
        assert writer.commit("job") == (1, COUNT, True)


def test_two_at_a_time_and_one_of_them_twice(serve: Callable[..., Server], held: Held) -> None:
    server = serve()
    for name in ("one", "two"):
        stage(server.port, name)
    asked = [committing(server.port, name) for name in ("one", "one", "two")]
    until(lambda: begun(server))
    held.let_go()
    for thread, _ in asked:
        thread.join(LONG)
    answers = [found[0] for _, found in asked]
    assert sorted(answers[:2])[0][:2] == sorted(answers[:2])[1][:2]  # type: ignore[type-var, index]
    assert sorted(answer[2] for answer in answers) == [False, False, True]  # type: ignore[index]
    assert {answer[:2] for answer in answers} == {(1, COUNT), (COUNT + 1, 2 * COUNT)}  # type: ignore[index]


def test_an_ending_broker_stores_it_whole(serve: Callable[..., Server], tmp_path: Path, held: Held) -> None:
    server = serve(drain_s=0.0)
    stage(server.port)
    thread, _ = committing(server.port)
    until(lambda: begun(server))
    server.stop()
    held.let_go()
    server.close()
    thread.join(LONG)
    server = serve()
    with RangeClient("127.0.0.1", server.port) as writer:
        assert writer.frontier == COUNT + 1
        assert writer.commit("job") == (1, COUNT, True)


class Filling(Disk):
    """A disk that is full after so many large writes; the reserve has room for small ones."""

    native = False
    left = 1 << 30

    def write(self, file: int, data: bytes, zeros: int, offset: int) -> None:
        self.left -= len(data) > 16_384
        if self.left < 0 and len(data) > 16_384:
            raise OSError(errno.ENOSPC, "on purpose")
        super().write(file, data, zeros, offset)


@pytest.mark.parametrize("writes", [0, 3, 9, 20])
def test_a_disk_that_is_full_in_the_midst_of_it_refuses_it_whole(serve: Callable[..., Server], writes: int) -> None:
    disk = Filling()
    server = serve(disk=disk)
    with Client(port=server.port, timeout=LONG) as client:
        client.queue("q", topics="t")
        assert client.publish("t", b"before") == 1
        stage(server.port)
        disk.left = writes
        thread, found = committing(server.port)
        thread.join(LONG)
        assert isinstance(found[0], RefusedError) and "disk is full" in str(found[0])
        disk.left = 1 << 30
        assert client.statistics()["next"] == 2
        thread, found = committing(server.port)
        thread.join(LONG)
        assert found == [(2, COUNT + 1, False)], "it was staged all the time"
        assert client.publish("t", b"after") == COUNT + 2
        assert next(entry["depth"] for entry in client.queues() if entry["queue"] == "q") == COUNT + 2
        assert client.statistics()["internal_errors"] == 0


def test_what_is_being_committed_counts_as_staged(serve: Callable[..., Server], held: Held) -> None:
    server = serve(limits=Limits(max_staged_bytes=4_000_000))
    stage(server.port)
    thread, found = committing(server.port)
    until(lambda: begun(server))
    with pytest.raises(RefusedError, match="more than 4000000 bytes would be staged"):
        stage(server.port, "other", 3 * COUNT)
    held.let_go()
    thread.join(LONG)
    assert found == [(1, COUNT, False)]


def test_a_large_fetch_is_read_in_steps(serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.broker.protocol.FETCH_STEP", 100)
    monkeypatch.setattr("penstock.broker.connection.TURN_S", 0.0)
    monkeypatch.setattr("penstock.broker.server.TURN_S", 0.0)
    server = serve()
    with Client(port=server.port) as client:
        for number in range(20):
            client.publish_many(f"t{number % 3}", [b"%d" % number] * 100)
    with RangeClient("127.0.0.1", server.port) as reader:
        before = server.turns
        part = reader.fetch(1, most=65_536)
        assert server.turns - before >= 20
        assert [(m.position, m.topic, m.payload) for m in part] == [
            (1 + i, f"t{i // 100 % 3}", b"%d" % (i // 100)) for i in range(2000)
        ]
        assert part.next == 2001
    wire = Wire(server.port).hello().send(b"PUB t0 1\nxFETCH 2001 10\n")
    assert wire.line() == "OK 2001"
    size = int(wire.line().split()[1])
    assert b'"count": 1' in wire.line().encode(), size
