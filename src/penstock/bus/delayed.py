"""Delayed messages: published to one subscriber after a delay; they can be started again.

``start``, ``update`` and ``abort`` may be called from any thread, also while the handler runs. They return the state in
which they found the message: ``idle``, ``pending`` (the timer runs), ``queued`` (fired and waiting) or ``handled`` (its
handler has it). A message that fires while its last firing is still queued or handled is not queued twice: it waits
until that one is done, and is counted in ``deferred``. The handler sees in ``generation`` which start the message came
from, and in ``cancelled`` whether it was aborted or updated after it had fired.
"""

from __future__ import annotations

import enum
import functools
import logging
import threading
from typing import TYPE_CHECKING, Any

from penstock._core import bus as _native
from penstock.channel import check_delay
from penstock.clock import Clock, Timer, current
from penstock.errors import ClosedError, InvalidArgument, PenstockError

if TYPE_CHECKING:
    from penstock.bus.subscriber import _Subscriber

RETRY_S = 0.005  # delay before a full subscriber is tried again: the clock must not wait for it
logger = logging.getLogger("penstock.bus")


class Caught(enum.StrEnum):
    """What a delayed message was doing when it was started, updated or aborted."""

    IDLE = "idle"
    PENDING = "pending"
    QUEUED = "queued"
    HANDLED = "handled"

    @property
    def in_time(self) -> bool:
        """Whether it had not fired yet: the old start will not arrive."""
        return self in (Caught.IDLE, Caught.PENDING)


class DelayedMessage:
    """A message of a private id to one subscriber."""

    def __init__(self, subscriber: _Subscriber, id: int, memory: Any = b"", *, clock: Clock | None = None) -> None:
        if subscriber.range_of(id) != "private":
            raise InvalidArgument(
                f"id {id} is {subscriber.range_of(id)} at subscriber {subscriber.name!r}; a delayed message has a "
                f"private id (above {subscriber.max_peer_id})"
            )
        self.subscriber = subscriber
        self.deferred = 0
        self.fired = 0
        self._clock: Clock = current() if clock is None else clock
        self._message = _native.StaticMessage(memory, id, self._handled)
        self._lock = threading.RLock()  # reentrant: the last release may run in a finaliser of a thread that holds it
        self._timer: Timer | None = None
        self._generation = 0
        self._in_flight: int | None = None  # the generation that is queued or handled, until `_handled` was called
        self._waiting: int | None = None  # the generation that fired while the last one was in flight

    @property
    def id(self) -> int:
        """The message's id."""
        return self._message.id

    @property
    def generation(self) -> int:
        """The number of the last start."""
        return self._generation

    @property
    def reference_count(self) -> int:
        """0: not in flight."""
        return self._message.reference_count

    @property
    def state(self) -> Caught:
        """What it is doing now."""
        with self._lock:
            if self._in_flight is not None:
                return Caught.QUEUED if self._message.queued else Caught.HANDLED
            return Caught.IDLE if self._timer is None else Caught.PENDING

    def start(self, delay: float) -> Caught:
        """Fire after ``delay`` seconds. A timer that runs already is not changed (``update`` does that)."""
        check_delay(delay)
        with self._lock:
            caught = self.state
            if self._timer is None:
                self._set(delay)
            return caught

    def update(self, delay: float) -> Caught:
        """Abort, then start. Caught queued or handled, the message arrives twice (the first one ``cancelled``)."""
        check_delay(delay)
        with self._lock:
            caught = self.abort()
            self._set(delay)
            return caught

    def abort(self) -> Caught:
        """Stop the timer. Caught queued or handled it still arrives, ``cancelled``."""
        with self._lock:
            caught = self.state
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._waiting = None
            if self._in_flight is not None:
                self._message._mark(self._in_flight, True)
            return caught

    def _set(self, delay: float) -> None:
        self._generation += 1
        fire = functools.partial(self._fire, self._generation)
        self._timer = self._clock.call_at(self._clock.now() + delay, fire)

    def _fire(self, generation: int) -> None:
        """Called by the clock."""
        with self._lock:
            if self._timer is None or generation != self._generation:
                return  # aborted or updated at the last moment
            self._timer = None
            self.fired += 1
            # not the reference count: it is already 0 while `_handled` waits for the lock
            if self._in_flight is not None:
                self._waiting = generation
                self.deferred += 1
                return
            self._take(generation)
        self._deliver()

    def _take(self, generation: int) -> None:
        self._in_flight = generation
        self._message.acquire()
        self._message._mark(generation, False)

    def _handled(self, _: Any) -> None:
        """Called by the native core when the last reference is gone."""
        with self._lock:
            generation, self._waiting, self._in_flight = self._waiting, None, None
            if generation is None:
                return
            self._take(generation)
        self._deliver()

    def _deliver(self) -> None:
        """Publish it. If the subscriber is full, try again soon, because the clock must not wait."""
        try:
            if not self.subscriber._deliver(self._message, False, False):
                self._clock.call_at(self._clock.now() + RETRY_S, self._deliver)
        except PenstockError as error:  # closed, or without a handler: not delivered, so it may be started again
            logger.log(
                logging.INFO if isinstance(error, ClosedError) else logging.WARNING,
                "delayed message id %d was not delivered to subscriber %r: %s",
                self.id,
                self.subscriber.name,
                error,
            )
            self._message.release()

    def __repr__(self) -> str:
        return f"<DelayedMessage id {self.id} to {self.subscriber.name!r}, {self.state}>"
