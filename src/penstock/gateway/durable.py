"""Durable sources: they keep their messages until they were handled. ``Forwarder`` reads batches, publishes them as a
module's own, marks what was published (``marks.py``), and acknowledges a batch when the mark says that it was handled.
Messages that were lost on the way are returned to the source, for redelivery. While nothing is linked to the module it
reads nothing, because nobody could handle it. ``Place`` is for sources that are read by position, as files are: it
keeps on disk how far all was handled.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from penstock.errors import ClosedError, UnreachedError
from penstock.gateway.errors import BrokerError
from penstock.gateway.losses import last_loss
from penstock.gateway.marks import Mark
from penstock.gateway.module import Module
from penstock.throttle import Throttle

BATCH = 2048
MARKED = 32  # how many are acknowledged together, and redelivered together
IDLE_S = 0.2
UNLINKED_S = 0.05  # how often to check whether anything is linked to the source
LOOK_S = 0.002  # how often marks are checked while no messages arrive
HELD_LOOK_S = 0.02  # how often marks are checked that wait for a message which is tried again
log = logging.getLogger("penstock.gateway")


class Durable(Protocol):
    """A queue with acknowledgements, used by one thread. With ``acks_in_order``, messages after one that is tried again
    are acknowledged after it.
    """

    def read_many(self, most: int, timeout: float) -> Sequence[Any]:
        """Up to ``most`` messages; waits for the first one only."""

    def ack_many(self, batch: Any, begin: int, end: int) -> object:
        """Acknowledge these messages of the batch."""

    def nack_many(self, batch: Any, begin: int, end: int) -> object:
        """Return these messages of the batch, for redelivery."""


class Forwarder:
    """Carries a durable queue's messages into the gateway, on a thread of its own."""

    def __init__(self, module: Module, queue: Callable[[], Durable | None], publish: Callable[[Any], None],
                 most: int = BATCH) -> None:  # fmt: skip
        name = self._name = module.name
        self._most = most
        self._queue = queue
        self._publish = publish
        self._mark = functools.partial(module.broker.mark, module)
        self._is_linked = functools.partial(module.broker.linked, module)
        self._stopping, self._cut, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._opened: Durable | None = None
        self._pending: deque[tuple[Mark | _Refused, Any, int, int]] = deque()
        # marks that wait, or waited, for messages which are tried again
        self._held: list[tuple[Mark | _Refused, Any, int, int]] = []
        self._held_look_s = 0.0
        self._unpublished: tuple[Any, int] = ((), 0)  # the batch that was read, and how much of it was published
        self._last_mark: Mark | None = None
        self._throttle = Throttle(log)
        self._using = threading.Lock()  # guards the queue and ``_pending``
        self._publishing = False
        self._busy = threading.Event()  # set while the helper thread may be needed
        self._thread = threading.Thread(target=self._run, name=f"{name} reader", daemon=True)
        self._helper = threading.Thread(target=self._acknowledge, name=f"{name} acknowledging reader", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()
        self._helper.start()

    def stop(self) -> None:
        """Stop reading, and wait until what was read is acknowledged, or until ``cut``. Does not wait for messages that
        a sink tries again, nor for those behind them: they stay in the queue and are redelivered.
        """
        self._stopping.set()
        for thread in (self._thread, self._helper):
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join()

    def cut(self) -> None:
        """End all waits: what is not handled yet will be redelivered."""
        self._stopping.set()
        self._cut.set()

    @property
    def in_flight(self) -> int:
        """Messages that were published and are not acknowledged."""
        return sum(end - begin for _, _, begin, end in [*self._pending, *self._held])

    def _run(self) -> None:
        try:
            self._opened = self._queue()
            if self._opened is not None:
                self._carry(self._opened)
        finally:
            self._ended.set()
            self._busy.set()

    def _acknowledge(self) -> None:
        """Acknowledge what was handled while the reader waits for room in a sink's queue."""
        while not self._ended.wait(LOOK_S):
            if self._publishing:
                with self._using:
                    if self._publishing and self._opened is not None:
                        self._attempt(self._settle, self._opened)
            elif not self._pending and not self._held:
                self._busy.clear()
                if not self._publishing and not self._ended.is_set():
                    # checked after clearing: the reader sets either of them before it wakes this thread
                    self._busy.wait()

    def _carry(self, queue: Durable) -> None:
        while not self._cut.is_set():
            last = self._stopping.is_set()  # read first, so that one more check follows it
            if not self._attempt(self._read_or_publish, queue) or (last and self._is_settled()):
                return

    def _is_settled(self) -> bool:
        """Whether nothing is in flight except messages that wait for another try, and those behind the first one."""
        with self._using:
            return all(one[0].stalled for one in [*self._held, *itertools.islice(self._pending, 1)])

    def _attempt(self, function: Callable[[Durable], object], queue: Durable) -> bool:
        """Call it; returns whether it may be called again."""
        try:
            function(queue)
        except UnreachedError as error:
            self._throttle.error("reading %s failed: %s; trying again", self._name, error)
        except (ClosedError, BrokerError):
            return False  # closed, or the module is no longer attached: unacknowledged messages will be redelivered
        except Exception as error:
            self._throttle.error("reading %s failed: %s: %s", self._name, type(error).__name__, error)
            self._cut.wait(1.0)
        return True

    def _read_or_publish(self, queue: Durable) -> None:
        batch, begin = self._unpublished
        if self._stopping.is_set():
            self._cut.wait(LOOK_S)
            self._held_look_s = 0.0
        elif not self._is_linked():  # nothing is linked: a message that is read now would be lost
            self._stopping.wait(UNLINKED_S)
        elif begin == len(batch):
            with self._using:
                batch = queue.read_many(self._most, LOOK_S if self._pending or self._held else IDLE_S)
            self._unpublished = batch, 0
        while self._unpublished[1] < len(batch) and not self._stopping.is_set() and self._is_linked():
            self._publish_some(queue)
        if self._unpublished[1] == len(batch):
            self._unpublished = (), 0  # dropped at once: it may hold space in its queue
        with self._using:
            self._settle(queue)

    def _publish_some(self, queue: Durable) -> None:
        """Publish the next messages and mark them. A message that a sink refuses is returned."""
        batch, begin = self._unpublished
        end, refused = begin, False
        since = last_loss()
        self._publishing = True
        if not self._busy.is_set():
            self._busy.set()
        try:
            for message in batch[begin : begin + MARKED]:
                try:
                    self._publish(message)
                except (ClosedError, BrokerError):
                    raise
                except Exception as error:  # a sink stayed full for its time-out, or this is no message
                    self._throttle.error("%s: a message is to come again: %s", self._name, error)
                    refused = True
                    break
                end += 1
            self._last_mark = self._mark(since, self._last_mark)
        finally:
            self._publishing = False
        with self._using:
            if end > begin:
                self._pending.append((self._last_mark, batch, begin, end))
            if refused:
                self._pending.append((_Refused(), batch, end, end + 1))
            self._unpublished = batch, end + refused
            self._settle(queue)

    def _settle(self, queue: Durable) -> None:
        if self._held and time.monotonic() >= self._held_look_s:
            self._held_look_s = time.monotonic() + HELD_LOOK_S
            for one in list(self._held):
                if self._settled(queue, one):
                    self._held.remove(one)
        while self._pending:
            one = self._pending[0]
            if not self._settled(queue, one):
                if not one[0].held or getattr(queue, "acks_in_order", False):
                    return
                self._held.append(one)
            self._pending.popleft()

    def _settled(self, queue: Durable, one: tuple[Mark | _Refused, Any, int, int]) -> bool:
        mark, *messages = one
        if mark.handled():
            queue.ack_many(*messages)
        elif mark.lost:
            queue.nack_many(*messages)
        else:
            return False
        return True


class _Refused:
    """The mark of a message that was not published."""

    lost, held, stalled = True, False, False

    def handled(self) -> bool:
        """Never."""
        return False


class Place:
    """How far a source has read its input, on disk: one line of text, replaced atomically."""

    def __init__(self, path: str | Path, mark: Callable[[int], Mark]) -> None:
        self._path = Path(path)
        self._mark = mark
        self._since = last_loss()
        self._pending: deque[tuple[Mark, str]] = deque()
        self.handled = ""  # everything up to this place was handled, in this run

    def read(self) -> str | None:
        """The place up to which all was handled; None if there is none yet. After a power cut it may be empty."""
        with contextlib.suppress(FileNotFoundError):
            return self._path.read_text(errors="replace")[:4096].strip()
        return None

    def begin(self, place: str) -> None:
        """Start at ``place``: what is published from now on comes after it, and nothing is in flight."""
        self._pending.clear()
        self._since = last_loss()
        self._write(place)

    def reached(self, place: str) -> None:
        """Note that everything up to ``place`` was published."""
        self._pending.append((self._mark(self._since), place))

    @property
    def in_flight(self) -> int:
        """The number of places that were reached and not written yet."""
        return len(self._pending)

    @property
    def stalled(self) -> bool:
        """Whether the next place waits for a sink that tries a message again."""
        return bool(self._pending) and self._pending[0][0].stalled

    def settle(self) -> bool:
        """Write the place up to which everything was handled. Call it when ``reached`` has noted all that was
        published. False: something after it was lost, and the source must read again from there.
        """
        place, self._since = None, last_loss()
        while self._pending and self._pending[0][0].handled():
            place = self._pending.popleft()[1]
        if place is not None:
            self._write(place)
        return not self._pending or not self._pending[0][0].lost

    def _write(self, place: str) -> None:
        if place == self.handled:
            return
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        number = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(number, "w") as file:
            file.write(place + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)
        self.handled = place
