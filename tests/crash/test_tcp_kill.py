"""kill -9 and SIGSTOP of publishers and subscribers under load: everybody else goes on, the books close, nothing is torn
and nothing of one session turns up in another. ``--kills N`` and ``--seed S`` as everywhere.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator

import penstock
from penstock import tcp

KILLS = 6
LONG = 60.0

# Publishes as fast as it can: name, run, number, in every way of sending (gathered, referred to, from its own memory).
PUBLISHER = """
import sys, zlib
from penstock import tcp
name, run, port = sys.argv[1].encode(), int(sys.argv[2]), int(sys.argv[3])
publisher = tcp.Publisher(port)
print(publisher.port, flush=True)
assert publisher.wait_ready(1, 60)
number = 0
while True:
    number += 1
    size = 100_000 if number % 100 == 0 else 6_000 if number % 10 == 0 else number % 300
    text = b"%s %d %d " % (name, run, number) + bytes(size)
    publisher.publish(b"%08x" % zlib.crc32(text) + text)
"""

# Reads until it is told to end; says what it got. Ordinals must rise; every message must be whole.
SUBSCRIBER = """
import sys, zlib
from penstock import tcp
subscriber = tcp.Subscriber()
assert subscriber.add_session("127.0.0.1", int(sys.argv[1])).wait_connected(60)
print("connected", flush=True)
last = 0
for message in subscriber:
    data = bytes(message)
    assert int(data[:8], 16) == zlib.crc32(data[8:]), "torn"
    assert message.ordinal > last
    last = message.ordinal
    if data[8:] == b"end":
        break
ledger = subscriber.ledger
print(ledger.matched, ledger.delivered, ledger.dropped.get("overflow", 0), ledger.lost, ledger.balanced, flush=True)
subscriber.close()
"""


def body(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text) + text


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Program:
    """A process of ours, whose lines are read here."""

    def __init__(self, text: str, *arguments: object) -> None:
        command = [sys.executable, "-c", text, *map(str, arguments)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, f"it said nothing and ended with {self.process.poll()}"
        return line

    def kill(self) -> None:
        assert self.process.stdout is not None
        self.process.kill()  # nothing where it has ended
        self.process.wait()
        self.process.stdout.close()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@contextlib.contextmanager
def program(text: str, *arguments: object) -> Iterator[Program]:
    started = Program(text, *arguments)
    try:
        yield started
    finally:
        started.kill()


class Reading:
    """Reads one subscriber with several sessions, and checks what comes against who must have sent it."""

    def __init__(self, subscriber: tcp.Subscriber, sessions: dict[str, tcp.Session]) -> None:
        self.subscriber = subscriber
        self.sessions = sessions
        self.last: dict[str, tuple[int, int]] = dict.fromkeys(sessions, (0, 0))
        self.delivered = 0

    def step(self) -> tuple[str, int]:
        message = self.subscriber.read(LONG)
        assert message is not None, "nothing comes any more"
        data = bytes(message)
        assert int(data[:8], 16) == zlib.crc32(data[8:]), "a message was torn"
        name, run, number = data[8 : 8 + 60].split()[0].decode(), *map(int, data[8 : 8 + 60].split()[1:3])
        assert message.source is self.sessions[name], f"a message of {name} came as one of {message.source}"
        before = self.last[name]
        assert (run, number) in ((before[0], before[1] + 1), (before[0] + 1, 1)), f"{name}: {before} then {run, number}"
        assert message.ordinal == number
        self.last[name] = (run, number)
        self.delivered += 1
        return name, number


def test_a_publisher_is_killed_under_load(kills: int | None, seed: int) -> None:
    source = random.Random(seed)
    rounds = KILLS if kills is None else kills
    with (
        program(PUBLISHER, "steady", 1, 0) as steady,
        contextlib.ExitStack() as running,
        tcp.Subscriber(reconnect_delay=0.01, reconnect_delay_max=0.1) as subscriber,
    ):
        victim = running.enter_context(program(PUBLISHER, "victim", 1, 0))
        port = int(victim.line())
        sessions = {
            "steady": subscriber.add_session("127.0.0.1", int(steady.line())),
            "victim": subscriber.add_session("127.0.0.1", port),
        }
        reading = Reading(subscriber, sessions)
        reading.last["steady"] = reading.last["victim"] = (1, 0)
        for run in range(1, rounds + 1):
            left = source.randrange(1, 2000)
            while left:
                left -= reading.step()[0] == "victim"
            victim.kill()
            victim = running.enter_context(program(PUBLISHER, "victim", run + 1, port))
            assert int(victim.line()) == port
            while reading.last["victim"][0] == run:  # what it had sent is read first, then what the new one sends
                reading.step()
        ledger = subscriber.ledger
        assert ledger == penstock.Ledger(reading.delivered, reading.delivered)
        assert (sessions["steady"].connections, sessions["victim"].connections) == (1, rounds + 1)


def test_a_stopped_publisher_loses_nothing(seed: int) -> None:
    with program(PUBLISHER, "one", 1, 0) as publisher, tcp.Subscriber() as subscriber:
        session = subscriber.add_session("127.0.0.1", int(publisher.line()))
        reading = Reading(subscriber, {"one": session})
        reading.last["one"] = (1, 0)
        for _ in range(3):
            for _ in range(random.Random(seed).randrange(1, 500)):
                reading.step()
            publisher.signal(signal.SIGSTOP)
            while subscriber.wait(0.1):  # what is under way
                reading.step()
            assert session.connected
            publisher.signal(signal.SIGCONT)
        for _ in range(500):
            reading.step()
        assert subscriber.ledger == penstock.Ledger(reading.delivered, reading.delivered)
        assert session.connections == 1


def test_a_subscriber_is_killed_under_load(kills: int | None, seed: int) -> None:
    source = random.Random(seed)
    with tcp.Publisher(depth=2000) as publisher, program(SUBSCRIBER, publisher.port) as steady:
        steady.line()
        assert publisher.wait_ready(1, LONG)
        count = lost = 0

        def publish() -> None:
            nonlocal count
            size = 100_000 if count % 100 == 0 else 6_000 if count % 10 == 0 else count % 300
            count += 1
            publisher.publish(body(bytes(size)))

        for _ in range(KILLS if kills is None else kills):
            with program(SUBSCRIBER, publisher.port) as victim:
                victim.line()
                assert publisher.wait_ready(2, LONG)
                for _ in range(source.randrange(1, 3000)):
                    publish()
                victim.kill()
                for _ in range(500):  # nobody has told the publisher yet
                    publish()
                eventually(lambda: publisher.subscriber_count == 1)
        publisher.publish(body(b"end"))
        assert steady.line() == f"{count + 1} {count + 1} 0 0 True"
        eventually(lambda: publisher.subscriber_count == 0)
        ledger = publisher.ledger
        lost = ledger.dropped.get("closed", 0)
        assert ledger == penstock.Ledger(count + 1, count + 1 - lost, {"closed": lost} if lost else {})
        assert publisher.memory_bytes == 0


def test_a_stopped_subscriber_costs_itself_alone(seed: int) -> None:
    bound = 1 << 20
    with (
        tcp.Publisher(overflow="drop_oldest", depth_bytes=bound) as publisher,
        program(SUBSCRIBER, publisher.port) as stopped,
    ):
        stopped.line()
        assert publisher.wait_ready(1, LONG)
        (name,) = (one.address for one in publisher.subscribers)
        with program(SUBSCRIBER, publisher.port) as steady:
            steady.line()
            assert publisher.wait_ready(2, LONG)

            def state(of_stopped: bool) -> tcp.SubscriberState:
                (found,) = (one for one in publisher.subscribers if (one.address == name) is of_stopped)
                return found

            stopped.signal(signal.SIGSTOP)
            count = 0
            while state(True).ledger.lost < 100:
                for _ in range(10):
                    publisher.publish(body(bytes(6_000)))
                count += 10
                assert publisher.memory_bytes < 2 * bound
                eventually(lambda: state(False).queued_messages == 0)  # as fast as the other one can
            stopped.signal(signal.SIGCONT)
            eventually(lambda: state(True).queued_messages == 0)
            lost = state(True).ledger.lost
            publisher.publish(body(b"end"))
            assert steady.line() == f"{count + 1} {count + 1} 0 0 True"
            assert stopped.line() == f"{count + 1} {count + 1 - lost} {lost} {lost} True"
            assert publisher.ledger == penstock.Ledger(count + 1, count + 1 - lost, {"overflow": lost})
