"""Durable sources: what keeps its messages until they were handled.

``Forwarder`` reads batches, publishes them as a module's own, marks what was published (``marks.py``), and
acknowledges a batch when the mark says that it was handled. What was lost on the way is given back, to come again.
``Place`` is for sources that are read by position, as files are: it keeps on disk how far all was handled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from penstock.errors import ClosedError
from penstock.gateway.errors import BrokerError
from penstock.gateway.losses import last_loss
from penstock.gateway.marks import Mark
from penstock.gateway.throttle import Throttle

BATCH = 2048
MARKED = 32  # so many are acknowledged together, and come again together
IDLE_S = 0.2
LOOK_S = 0.002  # how often marks are looked at while nothing comes
log = logging.getLogger("penstock.gateway")


class Durable(Protocol):
    """A queue that waits for acknowledgements; one thread."""

    def read_many(self, most: int, timeout: float) -> Sequence[Any]:
        """Up to ``most`` messages; waits for the first one only."""

    def ack_many(self, batch: Any, begin: int, end: int) -> object:
        """Those of the batch were handled."""

    def nack_many(self, batch: Any, begin: int, end: int) -> object:
        """Those of the batch were not handled: they are to come again."""


class Forwarder:
    """Carries a durable queue's messages into the gateway, on a thread of its own."""

    def __init__(self, name: str, queue: Callable[[], Durable | None], publish: Callable[[Any], None],
                 mark: Callable[[int], Mark], most: int = BATCH) -> None:  # fmt: skip
        self._most = most
        self._name = name
        self._queue = queue
        self._publish = publish
        self._mark = mark
        self._stopping, self._cut, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._opened: Durable | None = None
        self._pending: deque[tuple[Mark, Any, int, int]] = deque()
        self._throttle = Throttle(log)
        self._using = threading.Lock()  # the queue and ``_pending``: one thread at a time
        self._publishing = False
        self._busy = threading.Event()  # the helper may be needed
        self._thread = threading.Thread(target=self._run, name=f"{name} reader", daemon=True)
        self._helper = threading.Thread(target=self._help, name=f"{name} acknowledging reader", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()
        self._helper.start()

    def stop(self) -> None:
        """Read no more, and wait until what was read is acknowledged, or until ``cut``."""
        self._stopping.set()
        for thread in (self._thread, self._helper):
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join()

    def cut(self) -> None:
        """Wait for nothing any more: what is not handled yet comes again."""
        self._stopping.set()
        self._cut.set()

    @property
    def in_flight(self) -> int:
        """Messages that were published and are not acknowledged."""
        return sum(end - begin for _, _, begin, end in list(self._pending))

    def _run(self) -> None:
        try:
            self._opened = self._queue()
            if self._opened is not None:
                self._carry(self._opened)
        finally:
            self._ended.set()
            self._busy.set()

    def _help(self) -> None:
        """Acknowledge what was handled while the reader waits for room in a sink's queue."""
        while not self._ended.wait(LOOK_S):
            if self._publishing:
                with self._using:
                    if self._publishing and self._opened is not None:
                        self._attempt(self._settle, self._opened)
            elif not self._pending:
                self._busy.clear()
                if not self._publishing and not self._ended.is_set():
                    self._busy.wait()  # asked after the clearing: the reader says either before it wakes this

    def _carry(self, queue: Durable) -> None:
        while not self._cut.is_set() and (self._pending or not self._stopping.is_set()):
            if not self._attempt(self._once, queue):
                return

    def _attempt(self, function: Callable[[Durable], object], queue: Durable) -> bool:
        """Whether it can be called again."""
        try:
            function(queue)
        except (ClosedError, BrokerError):
            return False  # closed, or the module is no longer attached: what is not acknowledged comes again
        except Exception as error:
            self._throttle.error("reading %s failed: %s: %s", self._name, type(error).__name__, error)
            self._cut.wait(1.0)
        return True

    def _once(self, queue: Durable) -> None:
        if self._stopping.is_set():
            self._cut.wait(LOOK_S)
        else:
            with self._using:
                batch = queue.read_many(self._most, LOOK_S if self._pending else IDLE_S)
            for begin in range(0, len(batch), MARKED):
                end = min(begin + MARKED, len(batch))
                self._publishing = True
                if not self._busy.is_set():
                    self._busy.set()
                since = last_loss()
                try:
                    for message in batch[begin:end]:
                        self._publish(message)
                    mark = self._mark(since)
                finally:
                    self._publishing = False
                with self._using:
                    self._pending.append((mark, batch, begin, end))
                    self._settle(queue)
        with self._using:
            self._settle(queue)

    def _settle(self, queue: Durable) -> None:
        while self._pending:
            mark, *messages = self._pending[0]
            if mark.handled():
                queue.ack_many(*messages)
            elif mark.lost:
                queue.nack_many(*messages)
            else:
                return
            self._pending.popleft()


class Place:
    """How far a source has come in its input, on disk: one line of text, replaced as a whole."""

    def __init__(self, path: str | Path, mark: Callable[[int], Mark]) -> None:
        self._path = Path(path)
        self._mark = mark
        self._since = last_loss()
        self._pending: deque[tuple[Mark, str]] = deque()
        self._written: str | None = None

    def read(self) -> str | None:
        """The last place up to which everything was handled; None where there is none yet."""
        with contextlib.suppress(FileNotFoundError):
            return self._path.read_text()[:4096].strip() or None
        return None

    def reached(self, place: str) -> None:
        """Everything up to ``place`` was published."""
        self._pending.append((self._mark(self._since), place))

    @property
    def in_flight(self) -> int:
        """Places that were reached and not written yet."""
        return len(self._pending)

    def settle(self) -> None:
        """Write the last place up to which everything was handled; called when ``reached`` has told of all that was
        published."""
        place, self._since = None, last_loss()
        while self._pending and self._pending[0][0].handled():
            place = self._pending.popleft()[1]
        if place is None or place == self._written:
            return
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        number = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(number, "w") as file:
            file.write(place + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)
        self._written = place
