"""kill -9 of the broker at random moments, under load from four publishers and two acknowledging consumers.

Every confirmed message is delivered at least once to each queue, none is corrupted, each is stored once whatever was
sent again, and new messages come in the order of their positions. ``--kills N`` and ``--seed S`` as everywhere.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from pathlib import Path

import pytest

from penstock.broker import Client, Subscriber
from penstock.broker.fetch import RangeClient
from penstock.errors import ClosedError, RefusedError

KILLS = 20
LONG = 60.0
TRANSACTION, POISON = 50, 400  # messages
SERVE = """
import signal, sys
from penstock.broker import Server, broker, transactions
broker.PART_BYTES, transactions.PIECE_MESSAGES = 2000, 10  # transactions are committed in parts
server = Server(sys.argv[1], int(sys.argv[2]), segment_bytes=1 << 20)
signal.signal(signal.SIGTERM, lambda *_: server.stop())
print("ready", flush=True)
server.run()
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def start(directory: Path, port: int) -> tuple[subprocess.Popen[str], float]:
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(directory), str(port)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process, time.monotonic() - began


def body(publisher: int, number: int) -> bytes:
    text = b"%d:%d:%s" % (publisher, number, random.Random(f"{publisher}:{number}").randbytes(number % 500))
    return b"%08x" % zlib.crc32(text) + text


def check(data: bytes) -> tuple[int, int]:
    assert int(data[:8], 16) == zlib.crc32(data[8:]), "a message was corrupted"
    publisher, number, _ = data[8:].split(b":", 2)
    return int(publisher), int(number)


class Worker(threading.Thread):
    """A thread that keeps what went wrong."""

    error: BaseException | None = None

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:
            self.error = error

    def work(self) -> None:
        raise NotImplementedError


class Publishing(Worker):
    """Publishes numbered messages, one by one, many at once, and some with an id sent twice on purpose."""

    def __init__(self, number: int, port: int, seed: int, stop: threading.Event) -> None:
        super().__init__(name=f"publisher-{number}")
        self.number, self.port, self.stop = number, port, stop
        self.chooser = random.Random(seed)
        self.confirmed: dict[int, int | None] = {}  # with the position, where it was told

    def work(self) -> None:
        topic, count = f"load.{self.number}", 0
        with Client(port=self.port, timeout=LONG) as client:
            while not self.stop.is_set():
                way = self.chooser.random()
                if way < 0.3:
                    self.confirmed[count] = client.publish(topic, body(self.number, count))
                    count += 1
                elif way < 0.4:
                    name = f"{self.number}-{count}"
                    told = [client.publish(topic, body(self.number, count), message_id=name) for _ in range(2)]
                    assert None in told or told[0] == told[1], "the same id was stored twice"
                    self.confirmed[count] = told[0]
                    count += 1
                else:
                    size = self.chooser.randrange(2, 200)
                    client.publish_many(topic, [body(self.number, count + i) for i in range(size)])
                    self.confirmed.update((count + i, None) for i in range(size))
                    count += size


class Consuming(Worker):
    """Reads one queue and acknowledges; notes what came, and that new messages come in order."""

    def __init__(self, queue: str, port: int) -> None:
        super().__init__(name=f"consumer-{queue}")
        self.queue, self.port = queue, port
        self.places: dict[tuple[int, int], int] = {}
        self.positions: set[int] = set()
        self.highest = 0
        self.again = 0
        self.over = threading.Event()

    def work(self) -> None:
        with (
            Client(port=self.port, timeout=LONG) as client,
            client.subscribe(self.queue, timeout=LONG, credit=500) as subscriber,
        ):
            while not self.over.is_set():
                for message in subscriber.read_many(100, 0.1):
                    self.note(check(bytes(message)), message.position or 0)

    def note(self, key: tuple[int, int], position: int) -> None:
        known = self.places.setdefault(key, position)
        assert known == position, f"message {key} was stored at {known} and again at {position}"
        if position in self.positions:
            self.again += 1
            return
        assert position > self.highest, f"{position} came after {self.highest}"
        self.highest = position
        self.positions.add(position)


@pytest.mark.torture
@pytest.mark.timeout(0)
def test_the_broker_is_killed_under_load(tmp_path: Path, kills: int | None, seed: int) -> None:
    chooser = random.Random(seed)
    port = free_port()
    stop = threading.Event()
    process, _ = start(tmp_path / "journal", port)
    restarts: list[float] = []
    with Client(port=port, timeout=LONG) as client:  # the queues are there before the first message
        client.queue("first", topics="load.>")
        client.queue("second", topics="load.>")
    publishers = [Publishing(i, port, seed + i, stop) for i in range(4)]
    consumers = [Consuming("first", port), Consuming("second", port)]
    workers = [*publishers, *consumers]

    def healthy() -> None:
        assert not any(worker.error for worker in workers), [worker.error for worker in workers if worker.error]

    try:
        for worker in workers:
            worker.start()
        for _ in range(KILLS if kills is None else kills):
            time.sleep(chooser.uniform(0.02, 0.5))  # the random moment
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
            process, took = start(tmp_path / "journal", port)
            restarts.append(took)
            healthy()
        stop.set()
        for publisher in publishers:
            publisher.join(LONG)
            assert not publisher.is_alive()
        healthy()
        wanted = {(publisher.number, count) for publisher in publishers for count in publisher.confirmed}
        deadline = time.monotonic() + LONG
        while not all(wanted <= set(consumer.places) for consumer in consumers):
            assert time.monotonic() < deadline, [len(wanted - set(consumer.places)) for consumer in consumers]
            healthy()
            time.sleep(0.05)
    finally:
        stop.set()
        for consumer in consumers:
            consumer.over.set()
        for worker in workers:
            worker.join(LONG)
        process.terminate()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    healthy()
    for publisher in publishers:
        for count, position in publisher.confirmed.items():
            for consumer in consumers:
                assert position is None or consumer.places[publisher.number, count] == position
    again = [consumer.again for consumer in consumers]
    restarts.sort()
    print(
        f"\nseed {seed}: {len(restarts)} kills, {len(wanted)} confirmed, delivered again {again}, "
        f"restart median {restarts[len(restarts) // 2]:.2f} s, longest {restarts[-1]:.2f} s"
    )


def test_acknowledged_and_delayed_messages_survive_a_kill(tmp_path: Path) -> None:
    """What was acknowledged does not come again, what was not does, what is delayed comes when it is due.

    The queue has its options and each message the number of its deliveries.
    """
    port = free_port()
    process, _ = start(tmp_path / "journal", port)
    try:
        with Client(port=port, timeout=LONG) as client:
            client.queue("q", topics=["t", "u.>"], max_tries=7, ack_timeout_s=5, dead_letter="grave")
            client.publish_many("t", [b"%d" % i for i in range(10)])
            due_ns = time.time_ns() + 1_000_000_000
            client.publish("t", b"later", at_ns=due_ns)
            with client.subscribe("q", ack="manual", credit=6) as consumer:
                messages = [consumer.read(LONG) for _ in range(6)]
                assert messages[0] is not None
                consumer.nack(messages[0])
                again = consumer.read(LONG)
                assert again is not None and consumer.deliveries(again) == 2
                for message in messages[1:4]:
                    assert message is not None
                    consumer.ack(message, confirm=True)  # and with it, in one commit, what was delivered before
                process.kill()
                process.wait()
        assert process.stdout is not None
        process.stdout.close()
        process, _ = start(tmp_path / "journal", port)
        with Client(port=port, timeout=LONG) as client, client.subscribe("q") as consumer:
            found = [consumer.read(LONG) for _ in range(8)]
            assert [bytes(message or b"") for message in found] == [b"0", *(b"%d" % i for i in range(4, 10)), b"later"]
            assert time.time_ns() >= due_ns
            assert [consumer.deliveries(message) for message in found[:3] if message] == [3, 2, 2]
            (queue,) = client.queues()
            wanted = {"topics": ["t", "u.>"], "max_tries": 7, "ack_timeout_s": 5.0, "dead_letter": "grave"}
            assert {key: queue[key] for key in wanted} == wanted
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


class Committing(Worker):
    """Commits transactions one after the other until the broker is gone."""

    def __init__(self, port: int, round_number: int) -> None:
        super().__init__(name="committing")
        self.port, self.round_number = port, round_number
        self.answered: set[bytes] = set()
        self.began = threading.Event()

    def work(self) -> None:
        with contextlib.suppress(ClosedError, RefusedError), Client(port=self.port, reconnect=False) as client:
            for number in itertools.count():
                name = f"{self.round_number}-{number}"
                for _ in range(2):  # two turns of the loop
                    client.stage(name, "jobs", [name.encode()] * (TRANSACTION // 2))
                client.commit(name)
                self.answered.add(name.encode())
                self.began.set()


class Burying(Worker):
    """Returns what it reads: the broker moves each message to the dead letters."""

    def __init__(self, port: int, queue: str) -> None:
        super().__init__(name="burying")
        self.port, self.queue = port, queue
        self.began = threading.Event()

    def work(self) -> None:
        with (
            contextlib.suppress(ClosedError, RefusedError),
            Subscriber(port=self.port, queue=self.queue, ack="manual", credit=4, reconnect=False) as consumer,
        ):
            while (message := consumer.read()) is not None:
                consumer.nack(message)
                self.began.set()


def test_moves_are_whole_after_a_kill(tmp_path: Path, seed: int) -> None:
    """A transaction is there with all its messages or none; a message is in its queue or with the dead letters."""
    chooser = random.Random(seed)
    port = free_port()
    process, _ = start(tmp_path / "journal", port)
    answered: set[bytes] = set()
    try:
        for number in range(4):
            with Client(port=port, timeout=LONG) as client:
                client.queue(f"q{number}", topics=f"poison{number}", max_tries=1)
                client.publish_many(f"poison{number}", [b"%d" % i for i in range(POISON)])
            committing, burying = Committing(port, number), Burying(port, f"q{number}")
            committing.start()
            burying.start()
            assert committing.began.wait(LONG) and burying.began.wait(LONG)
            time.sleep(chooser.uniform(0.0, 0.1))  # the random moment
            process.kill()
            process.wait()
            for worker in (committing, burying):
                worker.join(LONG)
                assert not worker.is_alive() and worker.error is None, worker.error
            assert process.stdout is not None
            process.stdout.close()
            answered |= committing.answered
            process, _ = start(tmp_path / "journal", port)
            with RangeClient(port=port) as reader:
                ranges = reader.ranges(1, reader.frontier, topics=["jobs"])
                found = Counter(bytes(message.payload) for part in ranges for message in part)
            assert set(found.values()) == {TRANSACTION} and answered <= set(found)
            with Client(port=port, timeout=LONG) as client:
                depths = {entry["queue"]: entry["depth"] for entry in client.queues()}
                assert depths[f"q{number}"] + depths.get(f"q{number}.dead", 0) == POISON
                client.delete(f"q{number}")
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
