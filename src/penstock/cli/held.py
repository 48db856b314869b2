"""Holds back what a program writes to standard error while it starts, and shows it only if the start fails."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["held_back"]

MOST_LINES = 200
MARK = b"\0the end of what is held back\n"


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """Send the standard error of this process and of its children through a pipe.

    If the block raises, the last lines are shown. After the block, output of the programs that were started is passed
    on until the event that this yields is set.
    """
    reading, writing = os.pipe()
    before = os.dup(2)
    sys.stderr.flush()
    os.dup2(writing, 2)
    held: deque[bytes] = deque(maxlen=MOST_LINES)
    started = threading.Event()
    quiet = threading.Event()
    threading.Thread(target=_pass_on, args=(reading, os.dup(before), held, started, quiet), daemon=True).start()

    failed = False
    try:
        yield quiet
    except Exception:
        failed = True
        raise
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.write(writing, MARK)
        os.close(writing)
        started.wait()
        if failed:
            os.write(before, b"".join(held))
        os.close(before)


def _pass_on(reading: int, target: int, held: deque[bytes], started: threading.Event, quiet: threading.Event) -> None:
    with os.fdopen(reading, "rb") as lines, os.fdopen(target, "wb", buffering=0) as out:
        for line in lines:
            if quiet.is_set():
                continue
            if started.is_set():
                out.write(line)
            elif line.endswith(MARK):
                held.append(line.removesuffix(MARK))
                started.set()
            else:
                held.append(line)
