"""kill -9 of a writer at random moments: what it had acknowledged is there, in order, and the next writer goes on."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.journal import Journal

pytestmark = pytest.mark.torture

WRITER = """
import sys, threading
from penstock.journal import Journal
journal = Journal(sys.argv[1], segment_bytes=65536)
queue = journal.queue("q", topics=["t.*"], start="first")
lock = threading.Lock()
def say(text):
    with lock:
        sys.stdout.write(text)
        sys.stdout.flush()
say(f"open {journal.frontier}\\n")
def publish(number):
    count = 0
    while True:
        count += 1
        if count % 7 == 0:
            first, last = journal.append_many(f"t.{number}", [b"%d" % number * 50] * 5)
        else:
            first = last = journal.append(f"t.{number}", b"%d" % number * (count * 37 % 900))
        say(f"stored {number} {first} {last}\\n")
def consume():
    while True:
        messages = queue.read_many(20, 1)
        queue.ack_many(messages)
        queue.flush()
        if messages:
            say(f"acked {messages[-1].position}\\n")
for number in range(4):
    threading.Thread(target=publish, args=(number,), daemon=True).start()
consume()
"""


def test_kill_the_writer(tmp_path: Path, kills: int | None, seed: int) -> None:
    chance = random.Random(seed)
    stored: dict[int, int] = {}  # position: topic
    acked = 0
    restarts = []
    for _ in range(kills or 8):
        arguments = [sys.executable, "-c", WRITER, str(tmp_path / "j")]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline().startswith("open")
            end = time.monotonic() + chance.random() * 0.5
            lines = []
            while time.monotonic() < end:
                lines.append(writer.stdout.readline())
            writer.kill()
            lines += writer.stdout.readlines()
        for line in lines:
            words = line.split()
            if not line.endswith("\n"):
                continue  # cut by the kill
            if words[0] == "stored":
                for position in range(int(words[2]), int(words[3]) + 1):
                    assert stored.setdefault(position, int(words[1])) == int(words[1]), "a position was used twice"
            elif words[0] == "acked":
                acked = max(acked, int(words[1]))
        began = time.monotonic()
        with Journal(tmp_path / "j", segment_bytes=65536) as journal:
            restarts.append(time.monotonic() - began)
            check(journal, stored, acked)
    print(f"{len(stored)} stored, {acked} acknowledged, restart at most {max(restarts) * 1000:.1f} ms")


def check(journal: Journal, stored: dict[int, int], acked: int) -> None:
    assert not journal.recovery.damage
    found: dict[int, int] = {}
    at = 1
    while at < journal.frontier:
        batch, at = journal.read_from(at, 10_000)
        for message in batch:
            number = int(str(message.channel).split(".")[1])
            assert set(bytes(message)) <= {ord(str(number))}, "corrupted"
            found[message.position or 0] = number
    assert len(found) == journal.frontier - 1
    assert stored.items() <= found.items(), "acknowledged and lost"
    state = journal.queue_states.get("q")
    assert state is None or state.floor <= journal.frontier
    assert acked == 0 or (state is not None and not state.places.open(acked)), "an acknowledgement on disk was lost"
    assert journal.verify() == []
