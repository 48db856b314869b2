"""Subscribers of a bus: callback, queue and fifo.

- A callback subscriber's handler is called by the thread that delivers (the publisher in direct mode, else the bus's
  thread). It must not block, because all other subscribers wait meanwhile.
- A queue subscriber has a bounded queue of its own; its handler runs in the thread that calls ``handle_queued`` and may
  block. What happens when the queue is full is its ``overflow``.
- A fifo subscriber passes each message on to the next fifo subscriber when it takes it. It blocks no publisher, but
  later fifo subscribers wait for it.

Every method may be called from any thread. A queue or fifo subscriber that is garbage-collected leaves its bus.
"""

from __future__ import annotations

import inspect
import logging
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypedDict, TypeVar

from penstock import channel, clock
from penstock._core import bus as _native
from penstock.channel import Ledger, Overflow, check_function, check_timeout, choose
from penstock.errors import ClosedError, InvalidArgument

if TYPE_CHECKING:
    from penstock._core.bus import Message

MAX_ID = 65535
DEFAULT_MAX_PUBLIC_ID = 4095
DEFAULT_DEPTH = 1000
DEFAULT_FIFO_DEPTH = 65536

Handler = Callable[["Message"], Any]
Predicate = Callable[["Message"], Any]
Function = TypeVar("Function", bound=Callable[..., Any])

logger = logging.getLogger("penstock.bus")
TELL_STUCK_S = 60.0  # seconds between two warnings for one subscriber
FULL = {Overflow.BLOCK: 0, Overflow.DROP_OLDEST: 1, Overflow.DROP_NEWEST: 2}


def check_id(value: int, option: str = "id") -> int:
    """``value`` as a 16-bit id; the error names the option."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{option} must be an int of 0 to {MAX_ID}, not {type(value).__name__}")
    if not 0 <= value <= MAX_ID:
        raise InvalidArgument(f"{option}={value} is not between 0 and {MAX_ID}")
    return value


class SubscriberOptions(TypedDict, total=False):
    """The options of every kind of subscriber."""

    name: str
    predicate: Predicate | None
    priority: int
    max_public_id: int
    max_peer_id: int | None
    depth: int | None
    overflow: str | Overflow | None
    timeout: float | None
    drop_above: int | None


class _Subscriber(_native.Subscriber):
    """What the three kinds share."""

    _kind = 0
    _default_overflow = Overflow.BLOCK
    _default_depth = DEFAULT_DEPTH

    def __init__(
        self,
        handler: Handler | None = None,
        *,
        name: str = "",
        ids: Iterable[int] = (),
        predicate: Predicate | None = None,
        priority: int = 0,
        max_public_id: int = DEFAULT_MAX_PUBLIC_ID,
        max_peer_id: int | None = None,
        depth: int | None = None,
        overflow: str | Overflow | None = None,
        timeout: float | None = None,
        drop_above: int | None = None,
    ) -> None:
        check_function("handler", handler)
        check_id(max_public_id, "max_public_id")
        max_peer_id = max_public_id if max_peer_id is None else check_id(max_peer_id, "max_peer_id")
        if max_peer_id < max_public_id:
            raise InvalidArgument(f"max_peer_id={max_peer_id} is below max_public_id={max_public_id}")
        if not 0 <= priority <= 255:
            raise InvalidArgument(f"priority={priority} is not between 0 (served first) and 255")
        depth = self._default_depth if depth is None else depth
        if depth < 1:
            raise InvalidArgument(f"depth={depth} must be 1 or more messages")
        chosen = self._default_overflow if overflow is None else choose(Overflow, overflow, "overflow")
        if clock.in_use() and chosen is Overflow.BLOCK:
            timeout = 0.0  # nobody would take anything out while a publisher waits
        name = name or getattr(handler, "__qualname__", "") or type(self).__name__
        super().__init__(
            self._kind,
            name,
            handler,
            priority,
            max_public_id,
            max_peer_id,
            depth,
            FULL[chosen],
            check_timeout(timeout),
            -1 if drop_above is None else check_id(drop_above, "drop_above"),
        )
        if clock.in_use():
            self._wait_by_the_clock()
        self._error_logged = False
        self._stuck_logged_at = -TELL_STUCK_S
        self.overflow = chosen
        self.on_error: Callable[[_Subscriber, Message, BaseException], Any] | None = None
        if predicate is not None:
            self.predicate = predicate
        self.subscribe(*ids)

    def _wait_by_the_clock(self) -> None:
        """Under a virtual clock, which stands still while anybody waits on the machine's."""
        for name in ("read", "read_many", "wait", "handle_queued"):
            vars(self)[name] = partial(_without_waiting, weakref.ref(self), name)

    def subscribe(self, *ids: int, predicate: Predicate | None = None) -> Self:
        """Receive these ids; with only a predicate, every public message for which it is true."""
        self._check_public(ids)
        for identifier in ids:
            self._set(identifier, True)
        if predicate is not None:
            self.predicate = predicate
        return self

    def unsubscribe(self, *ids: int) -> Self:
        """Stop receiving these ids. What is already queued still arrives."""
        self._check_public(ids)
        for identifier in ids:
            self._set(identifier, False)
        return self

    def _check_public(self, ids: Iterable[int]) -> None:
        for identifier in ids:  # check all of them before the first is set
            if check_id(identifier) > self.max_public_id:
                raise InvalidArgument(
                    f"id {identifier} is private to subscriber {self.name!r} (max_public_id={self.max_public_id}): "
                    "it is published to it by publish_to and cannot be subscribed"
                )

    @property
    def ids(self) -> list[int]:
        """The ids subscribed, ascending."""
        return self._subscribed()

    def range_of(self, identifier: int) -> str:
        """``public``, ``peer`` or ``private``: what the id is to this subscriber."""
        check_id(identifier)
        if identifier <= self.max_public_id:
            return "public"
        return "peer" if identifier <= self.max_peer_id else "private"

    @property
    def ledger(self) -> Ledger:
        """A snapshot of the counts."""
        matched, delivered, dropped, in_flight, _ = self._counts()
        return Ledger(matched=matched, delivered=delivered, dropped=dropped, in_flight=in_flight)

    @property
    def errors(self) -> int:
        """How often its handler or predicate raised."""
        return self._counts()[4]

    def _failed(self, message: Message, error: BaseException) -> None:
        """Called by the native core when the handler raised."""
        tell = self.on_error or getattr(self.bus, "on_error", None)
        if tell is not None:
            tell(self, message, error)
            return
        clock.note_failure(f"handler of subscriber {self.name!r}", error)
        if not self._error_logged:
            self._error_logged = True
            text = "handler of subscriber %r raised on a message with id %s; from now on it is only counted"
            logger.error(text, self.name, message.id, exc_info=error)

    def _may_tell_stuck(self) -> bool:
        """Whether the last warning is long enough ago; notes that there is one now."""
        if time.monotonic() - self._stuck_logged_at < TELL_STUCK_S:
            return False
        self._stuck_logged_at = time.monotonic()
        return True

    def _tell_stuck(self, seconds: float) -> None:
        """Called by the native core when a publisher has waited this long for room here."""
        if not self._may_tell_stuck():
            return
        closing = bool(getattr(self.bus, "closed", False))
        logger.warning(
            "bus %r waits for subscriber %r: its queue of %d messages has been full for %g s and nobody reads it; read "
            "it, close it, or give it timeout= or another overflow=%s",
            getattr(self.bus, "name", "?"),
            self.name,
            self.depth,
            seconds,
            "; the bus is closing, which timeout= and drain=False of its close() end" * closing,
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}{', closed' if self.closed else ''}>"


def _without_waiting(subscriber: weakref.ref[_Subscriber], name: str, *given: Any, **named: Any) -> Any:
    """A read of what is there; where that is nothing, again when the time-out is over by the virtual clock."""
    reader = subscriber()
    if reader is None:
        raise ClosedError("the subscriber is gone")
    arguments = dict(zip(("most", "timeout") if name == "read_many" else ("timeout",), given, strict=False), **named)
    timeout = check_timeout(arguments.get("timeout"))
    read = getattr(_native.Subscriber, name)
    found = read(reader, **{**arguments, "timeout": 0})
    if found or not clock.in_use():
        return found
    clock.pass_time(timeout, f"{name}() of {reader.name}")
    return read(reader, **{**arguments, "timeout": 0})


def _alone_in_loop() -> bool:
    """Whether the running task is the only one of its loop: another one could publish while it waits."""
    import asyncio

    try:
        return len(asyncio.all_tasks()) == 1
    except RuntimeError:  # a loop of trio
        return False


class CallbackSubscriber(_Subscriber):
    """Its handler is called by the delivering thread, before all other kinds of subscribers."""

    _kind = 0


class QueueSubscriber(_Subscriber, channel.Subscriber):  # type: ignore[misc]  # reads a list of the narrower Message
    """A bounded queue, read in the user's threads. ``overflow`` says what happens when it is full."""

    _kind = 1

    def agree(self, terms: channel.Terms) -> None:
        for identifier in self.ids:
            self.bus.agree(identifier, terms)

    @property
    def schema(self) -> str | None:
        """The schema of its first id, or None."""
        return self.bus.schema(self.ids[0]) if self.bus is not None and self.ids else None

    def schemas_of(self, topic: str | None) -> list[str]:
        """Every version of it, the newest last."""
        return self.bus.schemas(self.ids[0]) if self.bus is not None and self.ids else []

    def _refuse_endless_wait(self) -> None:
        super()._refuse_endless_wait()
        if _alone_in_loop():
            clock.refuse_if_virtual(
                f"an async read of {self.name} without a time-out by the only task of its loop "
                "(nothing happens while it waits; timeout=0 takes what is there)"
            )

    def process_all(self) -> int:
        """Handle every message that is there now: with ``on_message``'s function, else with the handler."""
        if self._callback is not None or self.handler is None:
            return super().process_all()
        count = 0
        for _ in range(self.queued):
            if self.handler is None or not self.handle_queued(0):
                break
            count += 1
        return count

    @property
    def errors(self) -> int:
        """How often its handler, predicate or function of ``on_message=`` raised."""
        return self._counts()[4] + self._failures


class FifoSubscriber(QueueSubscriber):
    """Takes a message and passes it on to the next fifo subscriber; never blocks the delivering thread."""

    _kind = 2
    _default_overflow = Overflow.DROP_NEWEST
    _default_depth = DEFAULT_FIFO_DEPTH


def with_options(function: Function) -> Function:
    """Give a function that creates subscribers the signature of their options, for ``help``."""
    own = [p for p in inspect.signature(function).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    options = inspect.signature(_Subscriber).parameters.values()
    more = [p for p in options if p.name in SubscriberOptions.__annotations__]
    shown: Any = function
    shown.__signature__ = inspect.signature(function).replace(parameters=[*own, *more])
    return function


KINDS: dict[str, type[_Subscriber]] = {
    "callback": CallbackSubscriber,
    "queue": QueueSubscriber,
    "fifo": FifoSubscriber,
}
