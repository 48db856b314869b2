"""What the monitor costs a publisher: publishing into shared memory with nobody looking, and with a monitor that looks
ten times a second. Interleaved in one run; wanted: the difference within the spread.

    python benchmarks/monitor_cost.py [--quick] [--json FILE]
"""

from __future__ import annotations

import subprocess
import sys
import time
import uuid

from harness import Candidate, compare, options

import penstock

LOOKER = """
import sys, time
from penstock.monitor.watcher import Watcher
watcher = Watcher(every_s=0.1)
watcher.start()
print("looking", flush=True)
sys.stdin.read()
watcher.stop()
"""


def main() -> None:
    arguments = options()
    publisher = penstock.publisher(f"shm:/bench-monitor-{uuid.uuid4().hex[:8]}", slots=64, slot_size=64)
    body = b"x" * 64

    def publish(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            publisher.publish(body)
        return time.perf_counter() - begin

    def watched(count: int) -> float:
        looker = subprocess.Popen(
            [sys.executable, "-c", LOOKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert looker.stdout is not None and looker.stdin is not None
            looker.stdout.readline()
            return publish(count)
        finally:
            looker.stdin.close()
            looker.wait()
            looker.stdout.close()

    count = 1_000_000
    quiet = Candidate("nobody looks", publish, count)
    looked_at = Candidate("a monitor looks ten times a second", watched, count, wanted="within the spread")
    compare("publish while watched", [quiet, looked_at], "nobody looks", arguments)
    publisher.close()


if __name__ == "__main__":
    main()
