"""Losses: a number for each time that messages were lost on at_least_once links, or one of them was put aside to be
tried again, in the order in which it happens.

Who keeps messages until they were handled asks for the last number before he publishes them. A module (or an output,
from which a link was taken) with a greater one has lost something since, perhaps them; a message that was put aside
with a smaller one is none of them.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.gateway.worker import Output, Worker

_lock = threading.Lock()
_last = 0


def last_loss() -> int:
    """The last number so far, anywhere in this process."""
    return _last


def number_aside() -> int:
    """The number of a message that is put aside now."""
    global _last  # noqa: PLW0603
    with _lock:
        _last += 1
        return _last


def note_loss(worker: Worker) -> None:
    """A module has lost messages."""
    global _last  # noqa: PLW0603
    with _lock:
        _last += 1
        worker.last_loss = _last


def note_parting(output: Output) -> None:
    """What the output published may have missed a sink."""
    global _last  # noqa: PLW0603
    with _lock:
        _last += 1
        output.parted = _last
