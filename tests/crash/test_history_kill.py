"""kill -9 of a durable publisher, and of a subscriber that goes from the past over into the live flow: none is missing,
none comes twice. ``--kills N`` and ``--seed S`` as everywhere.
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock
from tests.conformance.reaches import unique

KILLS = 3
LONG = 60.0

# Publishes numbers that go on where the journal ends: in bursts, one by one, and never so fast that nobody keeps up.
PUBLISHER = """
import json, sys, time
import penstock
publisher = penstock.publisher(sys.argv[1], durable=sys.argv[2], **json.loads(sys.argv[3]))
number = publisher.journal.frontier
print(number, flush=True)
while True:
    assert publisher.publish(b"%d" % number) == number
    number += 1
    if number % 700 < 300:
        publisher.flush()
    elif number % 50 == 0:
        time.sleep(0.005)
"""

# Reads from the position it is given, and says each one that it has.
SUBSCRIBER = """
import json, sys
import penstock
with penstock.subscriber(sys.argv[1], start=int(sys.argv[2]), **json.loads(sys.argv[3])) as subscriber:
    for message in subscriber:
        assert int(bytes(message)) == message.ordinal
        print(message.ordinal, flush=True)
"""


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def kill(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    process.kill()
    process.wait()
    process.stdout.close()


def kill_reader(reader: subprocess.Popen[str], expected: int) -> int:
    """Kill it; what it had said until then goes on from ``expected`` too. Gives the next that nobody has had."""
    assert reader.stdout is not None
    reader.kill()
    rest = reader.stdout.read().split("\n")[:-1]  # whole lines
    assert [int(line) for line in rest] == list(range(expected, expected + len(rest)))
    reader.stdout.close()
    reader.wait()
    return expected + len(rest)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def address_of(scheme: str) -> str:
    return f"shm:/{unique('durable')}" if scheme == "shm" else f"tcp://127.0.0.1:{free_port()}"


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_a_publisher_is_killed_again_and_again(scheme: str, tmp_path: Path, kills: int | None, seed: int) -> None:
    chance = random.Random(seed)
    where, kept = address_of(scheme), str(tmp_path / "kept")
    options: dict[str, Any] = {"reconnect_delay": 0.005, "reconnect_delay_max": 0.02} if scheme == "tcp" else {}
    publisher = start(PUBLISHER, where, kept, "{}")
    assert publisher.stdout is not None and publisher.stdout.readline()
    subscriber = penstock.subscriber(where, start="first", **options)
    expected = 1
    try:
        for _ in range(kills or KILLS):
            goal = expected + chance.randrange(1, 1500)
            while expected < goal:
                for message in subscriber.read_many(500, LONG):
                    assert message.ordinal == expected == int(bytes(message))
                    expected += 1
            kill(publisher)
            publisher = start(PUBLISHER, where, kept, "{}")
            assert publisher.stdout is not None
            assert int(publisher.stdout.readline()) >= expected, "what was read is on disk"
    finally:
        kill(publisher)
        subscriber.close()


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_a_subscriber_is_killed_on_its_way_from_past_to_live(
    scheme: str, tmp_path: Path, kills: int | None, seed: int
) -> None:
    chance = random.Random(seed)
    where = address_of(scheme)
    with penstock.publisher(where, durable=str(tmp_path / "kept")) as publisher:
        number = 1
        expected = 1
        for _ in range(kills or KILLS):
            publisher.publish_many([b"%d" % n for n in range(number, number + 300)])
            number += 300
            reader = start(SUBSCRIBER, where, str(expected), "{}")
            assert reader.stdout is not None
            goal = expected + chance.randrange(1, 400)  # in the past or in the live flow
            while expected < goal:
                if expected > number - 300:
                    publisher.publish(b"%d" % number)
                    number += 1
                assert int(reader.stdout.readline()) == expected
                expected += 1
            expected = kill_reader(reader, expected)
        assert publisher.wait_ready(0, timeout=LONG)


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_publisher_and_subscriber_are_killed_on_the_way_from_past_to_live(
    scheme: str, tmp_path: Path, kills: int | None, seed: int
) -> None:
    """Either of them, or both at once: the next subscriber goes on after the last that was read."""
    chance = random.Random(seed)
    where, kept = address_of(scheme), str(tmp_path / "kept")
    fast = {"reconnect_delay": 0.005, "reconnect_delay_max": 0.02}
    options = json.dumps(fast if scheme == "tcp" else {"durable": kept})
    publisher = reader = None
    expected = 1
    try:
        for _ in range(kills or KILLS):
            if publisher is None:
                publisher = start(PUBLISHER, where, kept, "{}")
                assert publisher.stdout is not None
                assert int(publisher.stdout.readline()) >= expected, "what was read is on disk"
            if reader is None:
                reader = start(SUBSCRIBER, where, str(expected), options)
            assert reader.stdout is not None
            goal = expected + chance.randrange(1, 1500)
            while expected < goal:
                assert int(reader.stdout.readline()) == expected
                expected += 1
            victims = chance.choice(("publisher", "reader", "both"))
            if victims != "reader":
                kill(publisher)
                publisher = None
            if victims != "publisher":
                expected = kill_reader(reader, expected)
                reader = None
    finally:
        for process in (publisher, reader):
            if process is not None:
                kill(process)


@pytest.mark.parametrize(
    ("scheme", "for_publisher", "for_subscriber"),
    [
        ("shm", {"reliable": True, "history": 10}, {"reliable": True}),
        ("tcp", {"history": "10 min"}, {"reconnect_delay": 0.005, "reconnect_delay_max": 0.02}),
    ],
)
def test_the_live_flow_goes_on_over_killed_publishers(
    scheme: str, for_publisher: dict[str, Any], for_subscriber: dict[str, Any], tmp_path: Path, kills: int | None, seed: int
) -> None:
    chance = random.Random(seed)
    where, kept = address_of(scheme), str(tmp_path / "kept")
    with penstock.subscriber(where, **for_subscriber) as subscriber:
        last = 0
        for _ in range(kills or KILLS):
            publisher = start(PUBLISHER, where, kept, json.dumps(for_publisher))
            try:
                goal = last + chance.randrange(1, 1000)
                while last < goal:
                    for message in subscriber.read_many(20, LONG):
                        assert message.ordinal == last + 1 == int(bytes(message))
                        last = message.ordinal
                        message.release()
            finally:
                kill(publisher)
        assert subscriber.ledger.balanced and not subscriber.ledger.lost
