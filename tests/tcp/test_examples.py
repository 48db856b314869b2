"""The examples run as they stand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def start(name: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, str(EXAMPLES / name), *arguments], stdout=subprocess.PIPE, text=True)


def port_of(publisher: subprocess.Popen[str]) -> str:
    assert publisher.stdout is not None
    return publisher.stdout.readline().split()[-1]


def test_hello_world() -> None:
    publisher = start("hello_world_publisher.py", "0", "3")
    subscriber = start("hello_world_subscriber.py", port_of(publisher), "3")
    output, _ = subscriber.communicate(timeout=60)
    assert output.count("received 'Hello World' from tcp://127.0.0.1:") == 3
    publisher.communicate(timeout=60)
    assert publisher.returncode == subscriber.returncode == 0


def test_performance() -> None:
    publisher = start("performance_publisher.py", "0", "64", "1")
    subscriber = start("performance_subscriber.py", port_of(publisher))
    sent, _ = publisher.communicate(timeout=60)
    received, _ = subscriber.communicate(timeout=60)
    assert "messages/s" in sent and "messages in all" in received and " 0 lost" in received
    assert publisher.returncode == subscriber.returncode == 0
