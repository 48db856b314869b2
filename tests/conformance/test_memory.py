"""A handle that is closed gives its memory back, though somebody still has the object."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from pathlib import Path

import pytest

from .reaches import Reach
from .reading import LONG

SIZE = 1 << 20
COUNT = 48


def resident() -> int:
    """Bytes of this process's own memory: private and shared pages that it has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def trim() -> None:
    """Free memory of the allocator goes back to the system: pieces in use between may have kept it."""
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_closing_gives_memory_back(reach: Reach) -> None:
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
