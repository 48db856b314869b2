"""Losses: numbers, in order of time, the events in which messages on at_least_once links were lost or put aside for
redelivery.

A durable source keeps messages until they were handled. It notes the last number before it publishes them. If a module
(or an output from which a link was removed) has a greater number, it has lost something since, perhaps these messages.
A message that was put aside with a smaller number is not one of them.
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
    """Note that a module has lost messages."""
    global _last  # noqa: PLW0603
    with _lock:
        _last += 1
        worker.last_loss = _last


def note_parting(output: Output) -> None:
    """Note that a link of the output was removed, so that its messages may have missed a sink."""
    global _last  # noqa: PLW0603
    with _lock:
        _last += 1
        output.parted = _last
