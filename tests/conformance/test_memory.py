"""A handle that is closed gives its memory back, though somebody still has the object."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .reaches import Reach
from .reading import LONG

SIZE = 1 << 20
COUNT = 48
ALONE = "PENSTOCK_TEST_ALONE"


def resident() -> int:
    """Bytes of this process's own memory: private and shared pages that it has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def trim() -> None:
    """Free memory of the allocator goes back to the system: pieces in use between may have kept it."""
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_closing_gives_memory_back(reach: Reach, request: pytest.FixtureRequest) -> None:
    """In a process of its own: in this one the tests before have left threads, caches and half-used memory."""
    if ALONE not in os.environ:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", request.node.nodeid]
        environment = {**os.environ, ALONE: "1"}
        done = subprocess.run(command, cwd=request.config.rootpath, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:]
        return
    gc.collect()
    before = resident()
    options = reach.bounded(COUNT + 8, "block") if reach.can["block"] == "yes" else reach.lossless()
    if reach.name == "tcp":
        options = ({"depth": COUNT + 8, "depth_bytes": 2 * COUNT * SIZE}, {})
    publisher, subscriber = reach.pair(options)
    for _ in range(COUNT):
        publisher.publish(b"x" * SIZE)
    assert subscriber.wait(LONG)
    subscriber.close()
    publisher.close()
    if reach.name == "broker":
        reach.close()  # it runs in this process
    gc.collect()
    deadline = time.monotonic() + LONG  # a thread of the core frees what was under way
    while resident() - before >= COUNT * SIZE // 3:
        assert time.monotonic() < deadline, "what was published is still in memory"
        trim()
        time.sleep(0.05)
