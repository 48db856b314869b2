"""The end of the program while threads wait in handles, on every reach: no crash, and no word of threads that read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .reaches import Reach
from .reading import LONG

ROOT = Path(__file__).parents[2]

# The program opens the reach by itself; nothing is closed when it ends.
BEGIN = """
import asyncio, sys, threading, time
from pathlib import Path
from tests.conformance.reaches import REACHES, capabilities

def opened(name):
    directory = Path(sys.argv[2]) / name
    directory.mkdir()
    return REACHES[sys.argv[1]](capabilities()[sys.argv[1]], directory)

def in_thread(function):
    begun = threading.Event()
    threading.Thread(target=lambda: (begun.set(), function()), daemon=True).start()
    assert begun.wait(60)
"""

READING = """
def forever(subscriber):
    while True:
        subscriber.read(0.0005)

def loop(subscriber):
    for message in subscriber:
        pass

async def loop_async(subscriber):
    async for message in subscriber:
        pass

waits = {
    "read": lambda subscriber: subscriber.read(),
    "again": forever,
    "for": loop,
    "async": lambda subscriber: asyncio.run(loop_async(subscriber)),
}
for name, wait in waits.items():
    publisher, subscriber = opened(name).pair()
    in_thread(lambda wait=wait, subscriber=subscriber: wait(subscriber))
    if name != "read":
        publisher.publish(b"x")
reach = opened("on_message")
publisher = reach.publisher(**reach.lossless()[0])
got = threading.Event()
subscriber = reach.subscriber(**reach.lossless()[1], on_message=lambda message: got.set())
assert publisher.wait_ready(1, timeout=60)
publisher.publish(b"x")
assert got.wait(60)
time.sleep(0.1)  # most are asleep by now; the rule holds wherever they are
"""

PUBLISHING = """
reach = opened("thread")
payload = b"x" * (reach.flood_padding or 8)
publisher, subscriber = reach.pair(reach.bounded(4, "block"))

def fill():
    while True:
        publisher.publish(payload)

in_thread(fill)
awaited, unread = opened("async").pair(reach.bounded(4, "block"))

async def main():
    while True:
        try:
            await asyncio.wait_for(awaited.publish_async(payload), 0.5)
        except TimeoutError:
            return

asyncio.run(main())
"""


def run(reach: Reach, tmp_path: Path, program: str) -> subprocess.CompletedProcess[str]:
    directory = tmp_path / "program"
    directory.mkdir()
    command = [sys.executable, "-c", BEGIN + program, reach.name, str(directory)]
    # What a thread that never ends refers to is never freed.
    environment = {name: value for name, value in os.environ.items() if name != "PENSTOCK_LEAK_WARNINGS"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=2 * LONG, check=False
    )


def test_the_program_ends_while_threads_read(reach: Reach, tmp_path: Path) -> None:
    ended = run(reach, tmp_path, READING)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr


@pytest.mark.needs("block")
def test_the_program_ends_while_threads_publish(reach: Reach, tmp_path: Path) -> None:
    ended = run(reach, tmp_path, PUBLISHING)
    assert ended.returncode == 0, ended.stderr
