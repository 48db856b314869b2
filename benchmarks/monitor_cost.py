"""What the monitor costs a publisher: publishing into shared memory with nobody looking, and with a monitor that looks
ten times a second from another core. Interleaved in one run; wanted: the difference within the spread.

    python benchmarks/monitor_cost.py [--quick] [--json FILE]
    python benchmarks/monitor_cost.py instructions      # of one publish, counted by callgrind, watched and not

The monitor's process is there all the time; where nobody is to look it is stopped.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

from harness import Candidate, compare, options
from wishes import at_least

import penstock

LOOKER = """
import os, sys
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, cores[-1:])
from penstock.observe.watcher import Watcher
watcher = Watcher(every_s=0.1)
watcher.look()
watcher.start()
print("looking", flush=True)
sys.stdin.read()
watcher.stop()
"""

PUBLISHES = 20_000
PUBLISHING = """
import os, sys, penstock
with penstock.publisher(f"shm:/bench-monitor-{os.getpid()}", slots=64, slot_size=64) as publisher:
    for _ in range(int(sys.argv[1])):
        publisher.publish(b"0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef")
"""


@contextlib.contextmanager
def looker() -> Iterator[subprocess.Popen[str]]:
    """A monitor's watcher in a process and on a core of its own."""
    process = subprocess.Popen([sys.executable, "-c", LOOKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdin is not None
    process.stdout.readline()
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.stdin.close()
        process.wait()
        process.stdout.close()


def time_it() -> None:
    arguments = options()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])
    publisher = penstock.publisher(f"shm:/bench-monitor-{uuid.uuid4().hex[:8]}", slots=64, slot_size=64)
    body = b"x" * 64

    def publish(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            publisher.publish(body)
        return time.perf_counter() - begin

    with publisher:
        os.sched_setaffinity(0, cores)
        with looker() as process:
            os.sched_setaffinity(0, cores[:1])
            process.send_signal(signal.SIGSTOP)

            def watched(count: int) -> float:
                process.send_signal(signal.SIGCONT)
                try:
                    return publish(count)
                finally:
                    process.send_signal(signal.SIGSTOP)

            count = 1_000_000
            quiet = Candidate("nobody looks", publish, count)
            name = "a monitor looks ten times a second"
            looked_at = Candidate(name, watched, count, wishes=[at_least(0.97, "nobody looks")])
            compare("publish while watched", [quiet, looked_at], "nobody looks", arguments)


def count_instructions() -> None:
    """Instructions of one publish, the interpreter's included: a program that publishes twice as often, less the same
    program, with nobody looking and with a monitor."""

    def counted(publishes: int) -> int:
        done = subprocess.run(
            ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", sys.executable, "-c", PUBLISHING,
             str(publishes)],
            text=True, capture_output=True, check=True, env={**os.environ, "PYTHONHASHSEED": "0"},
        )  # fmt: skip
        found = re.search(r"Collected\s*:\s*(\d+)", done.stderr)
        assert found is not None, done.stderr
        return int(found[1])

    def one() -> float:
        return (counted(2 * PUBLISHES) - counted(PUBLISHES)) / PUBLISHES

    print(f"{'nobody looks':<40} {one():>10.2f} instructions a publish")
    with looker():
        print(f"{'a monitor looks ten times a second':<40} {one():>10.2f} instructions a publish")


if __name__ == "__main__":
    count_instructions() if sys.argv[1:] == ["instructions"] else time_it()
