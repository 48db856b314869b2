"""Feeds: how the recorder reads one address without waiting for it.

A ``Direct`` feed asks its subscriber at once. A broker's subscriber may wait for its connection, so that the others
would not be read meanwhile: a ``Pumped`` feed reads it in a thread of its own, one batch ahead. All else is called by
the recorder's one thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import penstock
from penstock.address import parse
from penstock.errors import PenstockError

__all__ = ["Direct", "feed_of"]

WAIT_S = 0.2
ASK_S = 0.2  # how often a source is asked what its messages are made of, while there are any


def feed_of(
    address: str, subscriber: penstock.Subscriber, claim: Callable[[int], int], give_back: Callable[[int], None]
) -> Direct:
    """The feed for that reach."""
    parts = parse(address)
    scheme, topic = parts.scheme, parts.topic or None
    if scheme == "broker":
        return Pumped(subscriber, topic, claim, give_back)
    kinds: dict[str, type[Direct]] = {"journal": Stored, "shm": Direct if "start" in parts.options else Slots}
    return kinds.get(scheme, Direct)(subscriber, topic, claim, give_back)


class Direct:
    """``claim`` says how many messages may be read, ``give_back`` takes what was not."""

    #: Whether what is not read in time is lost, or keeps.
    patient = False

    def __init__(
        self,
        subscriber: penstock.Subscriber,
        topic: str | None,
        claim: Callable[[int], int],
        give_back: Callable[[int], None],
    ) -> None:
        self._subscriber, self._topic = subscriber, topic
        self._claim, self._give_back = claim, give_back
        self._asked = 0.0

    def read(self, most: int) -> Any:
        """What is there, at most so many that are wanted."""
        claimed = self._claim(most)
        if not claimed:
            return ()
        batch: Any = ()
        try:
            batch = self._subscriber.read_many(claimed, 0)
        finally:
            self._give_back(claimed - len(batch))
        return batch

    @property
    def empty(self) -> bool:
        """Whether nothing was there at the last read."""
        return True

    def schemas(self) -> Sequence[str]:
        """What its messages are made of, every version that is kept there; asked now and then, else nothing."""
        now = time.monotonic()  # a publisher that comes back may have another type
        if self._asked and now - self._asked < ASK_S:
            return ()
        self._asked = now
        with contextlib.suppress(PenstockError):  # a broker that does not tell it
            return self._subscriber.schemas_of(self._topic)
        return ()

    def fileno(self) -> int:
        """Readable when there may be something; -1: nobody can tell."""
        try:
            return self._subscriber.fileno()
        except OSError:
            return -1

    def drain(self) -> None:
        """Read what is there, and wait for no more."""

    @property
    def over(self) -> bool | None:
        """Whether all that was there when ``drain`` was called has been read; None: nobody here knows."""
        return None

    def stop(self) -> None:
        """Read no more."""


class Slots(Direct):
    """Of shared memory: its ledger counts what was published."""

    def drain(self) -> None:
        self._published = self._subscriber.ledger.matched

    @property
    def over(self) -> bool:
        ledger = self._subscriber.ledger
        return ledger.matched - ledger.in_flight >= self._published


class Stored(Direct):
    """Of a journal: what is not read yet keeps."""

    patient = True

    def drain(self) -> None:
        self._frontier: int = self._follower.frontier

    @property
    def over(self) -> bool:
        return bool(self._follower.position >= self._frontier)

    @property
    def _follower(self) -> Any:
        return self._subscriber


class Pumped(Direct):
    """A queue's messages count as done when more are read: the next batch is read when this one is stored."""

    patient = True

    def __init__(
        self,
        subscriber: penstock.Subscriber,
        topic: str | None,
        claim: Callable[[int], int],
        give_back: Callable[[int], None],
    ) -> None:
        super().__init__(subscriber, topic, claim, give_back)
        self._changed = threading.Condition()  # guards all below
        self._most = 0  # how many the recorder has asked for; 0: what it has is not stored yet
        self._batch: Any = ()
        self._schemas: Sequence[str] = ()
        self._error: BaseException | None = None
        self._empty = False
        self._draining = self._stopped = False
        self._ready = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="record queue")
        self._thread.start()

    def read(self, most: int) -> Any:
        """The batch that is ready; asking for it says that the one before is stored."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._ready)
        with self._changed:
            batch, self._batch = self._batch, ()
            if not len(batch):
                if self._error is not None:
                    raise self._error
                self._most = most
                self._changed.notify()
            return batch

    @property
    def empty(self) -> bool:
        """Whether nothing was there when the thread looked, and it looks still."""
        with self._changed:
            return self._empty

    def schemas(self) -> Sequence[str]:
        """As it was said when the batch was read."""
        return self._schemas

    def fileno(self) -> int:
        return self._ready

    def drain(self) -> None:
        with self._changed:
            self._draining, self._empty = True, False

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()
        if self._ready >= 0:
            os.close(self._ready)
            self._ready = -1

    # --- the thread

    def _run(self) -> None:
        try:
            while self._next():
                pass
        except BaseException as error:
            with self._changed:
                self._error, self._empty = error, True
                os.eventfd_write(self._ready, 1)

    def _next(self) -> bool:
        with self._changed:
            while not self._stopped and (not self._most or (self._draining and self._empty)):
                self._changed.wait()
            if self._stopped:
                return False
            most, draining = self._most, self._draining
        there = self._subscriber.wait(0)
        if not there:
            with self._changed:
                self._empty = self._draining == draining  # otherwise it is looked for once more
            if draining:
                return True
            there = self._subscriber.wait(WAIT_S)
        batch = super().read(most) if there else ()
        schemas = super().schemas() if len(batch) else ()
        with self._changed:
            if len(batch):
                self._batch, self._schemas, self._most, self._empty = batch, schemas, 0, False
                os.eventfd_write(self._ready, 1)
            elif there and not self._stopped:  # no more are wanted now
                self._empty = True
                self._changed.wait(0.01)
        return True
