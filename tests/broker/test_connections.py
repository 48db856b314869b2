"""Many connections at once: idle ones, half-open ones, busy ones and deaf ones, each in processes of their own."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.broker import Client

from .conftest import Wire, until

HALF_OPEN, IDLE, BUSY = 10_000, 1000, 100
HELD_BYTES = 24 << 10  # of memory for each connection that has begun a message and does not end it

CROWD = """
import resource, socket, sys
port, half, idle = map(int, sys.argv[1:])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
sockets = []
for number in range(half + idle):
    sockets.append(socket.create_connection(("127.0.0.1", port), 60))
    if number < half:
        sockets[-1].sendall(b"PUB 1000000\\nhalf of it" if number % 2 else b"HELLO 1\\nPUB topic 99999 tt")
deaf = socket.create_connection(("127.0.0.1", port), 60)
deaf.sendall(b"HELLO 1\\nSUB deaf topics=t credit=65536\\n" + b"LIST\\n" * 1000)
print("here", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A broker in a process of its own, and its port."""
    command = [sys.executable, "-m", "penstock", "broker", str(tmp_path / "broker"), "0", "--max-connections", "12000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().rsplit(":", 1)[1])
        yield process, port
        process.terminate()
        assert process.wait(60) == 0


def held(process: subprocess.Popen[str]) -> int:
    """Its memory."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10


def confirmed(connection: Wire, count: int) -> None:
    while count > 0:
        first, _, last = connection.line().removeprefix("OK ").partition("-")
        count -= int(last or first) - int(first) + 1


def test_a_crowd_costs_nobody_anything(broker: tuple[subprocess.Popen[str], int]) -> None:
    process, port = broker
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < HALF_OPEN + IDLE + BUSY + 200:
        pytest.fail("this machine allows too few descriptors: raise the hard limit (ulimit -Hn) to 12000")
    with Client(port=port) as client:
        client.publish("t", b"warm")
        before = held(process)
        crowd = subprocess.Popen(
            [sys.executable, "-c", CROWD, str(port), str(HALF_OPEN), str(IDLE)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert crowd.stdout is not None and crowd.stdout.readline() == "here\n"
            until(lambda: client.statistics()["connections"] == HALF_OPEN + IDLE + 2)
            busy = [Wire(port).hello() for _ in range(BUSY)]
            for number, connection in enumerate(busy):
                connection.send(b"QUEUE q%d topics=t\n" % number)
                assert connection.line() == "OK"
            for _ in range(3):
                for connection in busy:
                    connection.send(b"PUB t 100\n" + b"x" * 100 + b"PUB t 1\ny" * 49)
                for connection in busy:
                    confirmed(connection, 50)
            for number, connection in enumerate(busy):
                connection.send(b"SUB q%d ack=none credit=1\n" % number)
                assert connection.line() == "OK"
                assert connection.line().startswith(f"MSG q{number} t ")
                connection.close()
            crowded = held(process)
            assert crowded - before < (HALF_OPEN + IDLE) * HELD_BYTES, "bounded by what came, not by what was claimed"
            assert client.statistics()["published"] == 1 + BUSY * 150
        finally:
            crowd.communicate("")
        until(lambda: client.statistics()["connections"] == 1)
        assert client.publish("t", b"goes on") == 2 + BUSY * 150, "what never completed left nothing"
