"""Feeds: how the recorder reads one address without waiting for it.

A ``Direct`` feed reads its subscriber in the recorder's thread. A broker's subscriber may block while it connects, and
the other addresses would not be read meanwhile: a ``Pumped`` feed reads it in a thread of its own, one batch ahead.
Everything else is called by the recorder's one thread.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import penstock
from penstock.address import parse
from penstock.errors import PenstockError, UnreachedError

__all__ = ["Direct", "feed_of"]

WAIT_S = 0.2
ASK_S = 0.2  # how often a source is asked for its schema, while it gives messages


def feed_of(
    address: str, subscriber: penstock.Subscriber, claim: Callable[[int], int], give_back: Callable[[int], None]
) -> Direct:
    """The feed for the reach of an address."""
    parts = parse(address)
    scheme, topic = parts.scheme, parts.topic or None
    if scheme == "broker":
        return Pumped(subscriber, topic, claim, give_back)
    kinds: dict[str, type[Direct]] = {"journal": Stored, "shm": Direct if "start" in parts.options else Slots}
    return kinds.get(scheme, Direct)(subscriber, topic, claim, give_back)


class Direct:
    """``claim`` returns how many messages may be read; ``give_back`` returns those that were not read."""

    #: Whether unread messages are kept for later, or may be lost.
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
        self._asked = {False: -math.inf, True: -math.inf}  # when schemas were asked for, without messages and with some

    def read(self, most: int) -> Any:
        """Read what is there, at most as many messages as are wanted."""
        claimed = self._claim(most)
        if not claimed:
            return ()
        batch: Any = ()
        try:
            with contextlib.suppress(UnreachedError):
                batch = self._subscriber.read_many(claimed, 0)
        finally:
            self._give_back(claimed - len(batch))
        return batch

    @property
    def empty(self) -> bool:
        """Whether nothing was there at the last read."""
        return True

    def schemas(self, read: bool) -> Sequence[str]:
        """Every version of its schema; asked for now and then, otherwise empty. ``read``: messages were read just now.
        The first of them are asked about whenever they come: before them there may have been no publisher."""
        now = time.monotonic()  # a publisher may be replaced by one of another type
        if now - self._asked[read] < ASK_S:
            return ()
        self._asked[read] = now
        with contextlib.suppress(PenstockError, OSError):  # the broker does not tell the schema, or is not there now
            return self._subscriber.schemas_of(self._topic)
        return ()

    def fileno(self) -> int:
        """A descriptor that is readable when there may be messages; -1: there is none."""
        try:
            return self._subscriber.fileno()
        except OSError:
            return -1

    def drain(self) -> None:
        """Stop waiting: only what is there now is still read."""

    @property
    def over(self) -> bool | None:
        """Whether everything that was there when ``drain`` was called has been read; None: not known here."""
        return None

    def stop(self) -> None:
        """Stop reading."""


class Slots(Direct):
    """A feed of shared memory, whose ledger says how many messages were published since subscribing.

    What the channel held before comes first, and is in the ledger only when it is read.
    """

    def drain(self) -> None:
        self._published = self._since(self._subscriber.ledger.matched)

    @property
    def over(self) -> bool:
        ledger = self._subscriber.ledger
        return self._since(ledger.matched - ledger.in_flight) >= max(1, self._published)

    def _since(self, count: int) -> int:
        subscriber: Any = self._subscriber
        return count - int(subscriber.delivered_past)


class Stored(Direct):
    """A feed of a journal, which keeps unread messages."""

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
    """A feed of a broker's queue. Reading acknowledges what was read before, so the next batch is read only when this
    one is stored.
    """

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
        self._most = 0  # how many messages the recorder has asked for; 0: its last batch is not stored yet
        self._batch: Any = ()
        self._schemas: Sequence[str] = ()
        self._error: BaseException | None = None
        self._empty = False
        self._draining = self._stopped = False
        self._ready = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="record queue")
        self._thread.start()

    def read(self, most: int) -> Any:
        """The batch that is ready. Calling this means that the batch before is stored."""
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
        """Whether nothing was there at the thread's last look, and it is still looking."""
        with self._changed:
            return self._empty

    def schemas(self, read: bool) -> Sequence[str]:
        """The schemas as of when the batch was read; before the first one, of when the feed was opened."""
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
            self._schemas = super().schemas(read=False)
            while self._next():
                pass
        except BaseException as error:
            with self._changed:
                self._error, self._empty = error, True
                os.eventfd_write(self._ready, 1)

    def _wait(self, timeout: float) -> bool:
        with contextlib.suppress(UnreachedError):  # its broker may come back: the recording goes on then
            return self._subscriber.wait(timeout)
        return False

    def _next(self) -> bool:
        with self._changed:
            while not self._stopped and (not self._most or (self._draining and self._empty)):
                self._changed.wait()
            if self._stopped:
                return False
            most, draining = self._most, self._draining
        there = self._wait(0)
        if not there:
            with self._changed:
                self._empty = self._draining == draining  # if draining began meanwhile, look once more
            if draining:
                return True
            there = self._wait(WAIT_S)
        batch = super().read(most) if there else ()
        schemas = super().schemas(read=True) if len(batch) else ()
        with self._changed:
            if len(batch):
                self._batch, self._schemas, self._most, self._empty = batch, schemas, 0, False
                os.eventfd_write(self._ready, 1)
            elif there and not self._stopped:  # enough for now
                self._empty = True
                self._changed.wait(0.01)
        return True
