"""Bus: routes messages by id to its subscribers, in this process.

How it delivers is its ``mode``:

- ``thread`` (the default): publish queues and returns; the bus's own thread delivers, one message after the other. Its
  queue is bounded (``pending_bytes``); when it is full, ``publish`` raises ``CapacityError``, or does what
  ``pending_depth`` asks for. A bus that is garbage-collected ends its thread.
- ``direct``: publish delivers in the caller; several threads may do so at a time. What a handler publishes is delivered
  after the current message has reached all subscribers.
- an ``executor``: publish queues, a task of the executor delivers; one at a time.

Order of delivery: callback subscribers, then queue, then fifo; within a kind by priority (0 first), then by order of
adding. Set up in this order: create the bus; create allocators and add them; create and configure subscribers, then add
them.

Every method may be called from any thread. ``publish``, ``publish_to`` and ``allocate(timeout=0)`` may be called in a
signal handler.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

from penstock import clock
from penstock._core import bus as _native
from penstock.address import check_options
from penstock.bus.publisher import Publisher
from penstock.bus.subscriber import (
    FULL,
    KINDS,
    CallbackSubscriber,
    FifoSubscriber,
    QueueSubscriber,
    SubscriberOptions,
    _Subscriber,
    with_options,
)
from penstock.channel import Ledger, Overflow, Terms, check_function, check_timeout, choose
from penstock.errors import ClosedError, InvalidArgument, RefusedError, StateError, nearest

if TYPE_CHECKING:
    from penstock._core.bus import Message

OnError = Callable[["CallbackSubscriber | QueueSubscriber | FifoSubscriber", "Message", BaseException], Any]
DEFAULT_MAX_MESSAGE_BYTES = 1 << 31
DEFAULT_PENDING_BYTES = 64 << 20
MODES = ("thread", "direct")
EXIT_S = 2.0  # at exit: time for delivering what is pending
STUCK_AT_EXIT_S = 0.2  # at exit: time for a reader that does not read


class Bus(_native.Bus):
    """Pub/sub inside one process. See the module's text for modes and order."""

    def __init__(
        self,
        name: str = "bus",
        *,
        mode: str = "thread",
        executor: Executor | None = None,
        on_error: OnError | None = None,
        pending_depth: int | None = None,
        pending_overflow: str | Overflow = Overflow.BLOCK,
        pending_timeout: float | None = None,
        pending_bytes: int = DEFAULT_PENDING_BYTES,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        max_messages: int | None = None,
        stuck_after: float = 10.0,
    ) -> None:
        if executor is not None:
            if not callable(getattr(executor, "submit", None)):
                raise TypeError(f"executor must have a method submit, as those of concurrent.futures, not {executor!r}")
            mode = "executor"
        elif mode not in MODES:
            raise InvalidArgument(f"mode={mode!r} is not a choice (or give an executor); {nearest(str(mode), MODES)}")
        if mode != "direct":
            clock.refuse_if_virtual(f'bus {name!r} (mode={mode!r}, in a thread of its own; mode="direct" has none)')
        if pending_depth is not None and pending_depth < 1:
            raise InvalidArgument(f"pending_depth={pending_depth} must be 1 or more messages, or None")
        if pending_bytes < 1:
            raise InvalidArgument(f"pending_bytes={pending_bytes} must be 1 or more bytes")
        super().__init__(
            name,
            mode != "direct",
            pending_depth or 0,
            FULL[choose(Overflow, pending_overflow, "pending_overflow")],
            check_timeout(pending_timeout, "pending_timeout"),
            max_message_bytes,
            max_messages or 0,
            pending_bytes,
            check_timeout(stuck_after, "stuck_after") or 0.0,
        )
        self.mode = mode
        self.on_error = on_error
        self._executor = executor
        self._thread: threading.Thread | None = None
        self._starting = threading.RLock()  # guards the start of the thread
        self._allocators: list[_native.Allocator] = []
        self._schemas: dict[int, list[str]] = {}  # the schemas of each id, the newest version last
        self.durable: dict[int, str] = {}  #: by id: the directory of its durable publisher
        self._publishers: weakref.WeakSet[Publisher] = weakref.WeakSet()
        self._claimed: dict[int, weakref.ref[Publisher]] = {}
        _buses.add(self)

    def agree(self, id: int, terms: Terms) -> None:
        """The first typed handle sets the schema of an id. The schemas of later ones must be compatible with all
        before."""
        with _describing:
            versions = terms.added_to(self._schemas.get(id, []), f"id {id} of bus {self.name!r}")
            if versions is not None:
                self._schemas[id] = versions

    def claim(self, publisher: Publisher) -> None:
        """Make it the only publisher of its id, until it is closed: the ordinals of a durable one are positions."""
        with _describing:
            for other in self._publishers:
                if other is not publisher and other.id == publisher.id and not other.closed:
                    raise RefusedError(
                        f"id {publisher.id} of bus {self.name!r} has another publisher; a durable publisher must be "
                        "the only one of its id"
                    )
            self._claimed[publisher.id] = weakref.ref(publisher)

    def _admit(self, publisher: Publisher) -> None:
        self._check_open()
        with _describing:
            owner = self._claimed.get(publisher.id, lambda: None)()
            if owner is not None and not owner.closed:
                raise RefusedError(f"id {publisher.id} of bus {self.name!r} has a durable publisher, its only one")
            self._publishers.add(publisher)

    def schema(self, id: int) -> str | None:
        """The schema of the id's messages, or None if no typed handle has set one."""
        return self._schemas.get(id, [None])[-1]

    def schemas(self, id: int) -> list[str]:
        """Every version of it, the newest last."""
        return list(self._schemas.get(id, ()))

    def publish_to(self, subscriber: _Subscriber, message: Any, *, writable: bool = False) -> None:
        """Publish a draft or static message directly to one subscriber; its id must be private or peer-to-peer."""
        publish_to(subscriber, message, writable=writable)

    def publisher(self, id: int = 0, *, allocator: _native.Allocator | None = None, name: str = "") -> Publisher:
        """A writing handle for one id."""
        return Publisher(self, id, allocator=allocator, name=name)

    @overload
    def subscribe(
        self, *ids: int, kind: Literal["queue"] = ..., handler: Any = None, **options: Unpack[SubscriberOptions]
    ) -> QueueSubscriber: ...
    @overload
    def subscribe(
        self, *ids: int, kind: Literal["fifo"], handler: Any = None, **options: Unpack[SubscriberOptions]
    ) -> FifoSubscriber: ...
    @overload
    def subscribe(
        self, *ids: int, kind: Literal["callback"], handler: Any = None, **options: Unpack[SubscriberOptions]
    ) -> CallbackSubscriber: ...
    @overload
    def subscribe(
        self, *ids: int, kind: str, handler: Any = None, **options: Unpack[SubscriberOptions]
    ) -> Any: ...
    @with_options
    def subscribe(
        self, *ids: int, kind: str = "queue", handler: Any = None, **options: Unpack[SubscriberOptions]
    ) -> Any:
        """Make a subscriber of these ids and add it. Kinds: ``callback``, ``queue``, ``fifo``."""
        return self.add(_make(kind, handler, ids, options))

    @with_options
    def on(self, *ids: int, kind: str = "callback", **options: Unpack[SubscriberOptions]) -> Callable[[Any], Any]:
        """Decorator: the function becomes the handler of a subscriber of these ids, kept as ``function.subscriber``."""
        for one in ids:  # at once: @bus.on without an id would take the function for one, and never call it
            if not isinstance(one, int):
                raise TypeError(f"id must be an int of 0 to 65535, not {type(one).__name__}; write @bus.on(ID)")

        def decorate(function: Any) -> Any:
            _check_decorated(function)
            function.subscriber = self.subscribe(*ids, kind=kind, handler=function, **options)
            return function

        return decorate

    def add_declared(self, *functions: Any) -> None:
        """Add the subscribers of functions that ``declare`` decorated: of these, or of all that are on no bus yet."""
        self._check_open()
        if not functions:
            declared = [function for reference in _declared if (function := reference()) is not None]
            functions = tuple(one for one in declared if one.subscriber.bus is None and not one.subscriber.closed)
        for function in functions:
            subscriber = getattr(function, "subscriber", None)
            if subscriber is None:
                raise StateError(f"{function!r} has no subscriber; decorate it with declare() first")
            self.add(subscriber)

    def add_allocator(self, allocator: _native.Allocator) -> int:
        """Add an allocator and return the id that the bus gave it."""
        self._check_open()
        identifier = allocator._attach(self)
        self._allocators.append(allocator)
        return identifier

    def remove_allocator(self, allocator: _native.Allocator) -> None:
        """Remove an allocator. Refused while its messages are in use."""
        allocator._detach(self)
        self._allocators.remove(allocator)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"bus {self.name!r} was closed")

    @property
    def allocators(self) -> list[_native.Allocator]:
        """Those added, in order."""
        return list(self._allocators)

    @property
    def subscribers(self) -> list[Any]:
        """Those added, in order of delivery."""
        return self._subscribers()

    @property
    def ledger(self) -> Ledger:
        """Messages published: delivered to subscribers, dropped from the publish queue, or still in it."""
        matched, delivered, dropped, in_flight = self._counts()
        return Ledger(matched=matched, delivered=delivered, dropped=dropped, in_flight=in_flight)

    def _schedule(self) -> None:
        """Called by the native core when there are messages to deliver and no thread delivers."""
        if self._executor is not None:
            self._executor.submit(self._drain)
            return
        self._ensure_thread()

    def _ensure_thread(self) -> None:
        with self._starting:
            there = self._thread
            if there is not None and (there.ident is None or there.is_alive()):
                return  # without an ident: this thread is starting it, and a signal's function has published
            # A weak reference, so that the thread does not keep the bus alive.
            arguments = (weakref.ref(self),)
            thread = threading.Thread(target=Bus._serve, args=arguments, name=f"penstock-bus-{self.name}", daemon=True)
            self._thread = thread
            try:
                thread.start()
            except BaseException:
                self._thread = there
                raise

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything published before has been delivered; False when the time is over."""
        return self._flush(timeout)

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """Deliver what is pending (or discard it), then remove all subscribers. Closing twice does nothing.

        Delivering waits while a queue is full: read it, or give ``timeout`` or ``drain=False``. Leaving a ``with``
        block by an error discards.
        """
        if not self._stop(not drain):
            return
        for allocator in self._allocators:
            allocator._wake()  # nothing can be published any more, so no thread should wait for memory
        if drain:
            self._end_delivery(timeout)
        self._finish()  # wakes a delivery that waits for a full subscriber
        self._end_delivery(timeout)
        self._allocators = [allocator for allocator in self._allocators if not _detached(allocator, self)]

    def _end_delivery(self, timeout: float | None) -> None:
        if self.mode == "thread" and self.pending:
            self._ensure_thread()  # the publishing thread may not have started it yet
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        elif self._executor is not None and not self._here:
            self._drain_executor(timeout)

    def _drain_executor(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (self.pending or self._serving) and (deadline is None or time.monotonic() < deadline):
            if not self._serving:
                self._drain()  # here: the executor may have been shut down
            else:
                time.sleep(0.001)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(drain=kind is None)  # after an error nobody may be left to read: waiting would hide it

    def __repr__(self) -> str:
        return f"<Bus {self.name!r}, {self.mode}{', closed' if self.closed else ''}>"


def _make(kind: str, handler: Any, ids: tuple[int, ...], options: SubscriberOptions) -> _Subscriber:
    if kind not in KINDS:
        raise InvalidArgument(f"kind={kind!r} is not a choice; {nearest(str(kind), KINDS)}")
    check_options(options, KINDS[kind], f"a {kind} subscriber")
    return KINDS[kind](handler, ids=ids, **options)


def _check_decorated(function: Any) -> None:
    """Before there is a subscriber that nobody could close."""
    check_function("handler", function)
    try:
        function.subscriber = getattr(function, "subscriber", None)
    except AttributeError:
        raise TypeError(
            f"{function!r} cannot keep its subscriber, as a decorated function does (it is a method of an object, or a "
            'built-in one); write bus.subscribe(ID, kind="callback", handler=FUNCTION)'
        ) from None


@with_options
def declare(*ids: int, kind: str = "callback", **options: Unpack[SubscriberOptions]) -> Callable[[Any], Any]:
    """Decorator for module level: makes the function a handler before there is a bus; ``bus.add_declared`` adds it."""

    def decorate(function: Any) -> Any:
        _check_decorated(function)
        function.subscriber = _make(kind, function, ids, options)
        _declared.append(weakref.ref(function, _declared.remove))
        return function

    return decorate


_declared: list[weakref.ref[Any]] = []


def _detached(allocator: _native.Allocator, bus: Bus) -> bool:
    if allocator.in_use:
        return False
    allocator._detach(bus)
    return True


def publish_to(subscriber: _Subscriber, message: Any, *, writable: bool = False) -> None:
    """Publish a draft or static message to one subscriber; its id must be private or peer-to-peer there.

    A callback subscriber's handler runs at once in the caller. The subscriber need not be on a bus. ``writable``: its
    one receiver may write to it (private ids only).
    """
    if not isinstance(subscriber, _native.Subscriber):
        raise TypeError(f"publish_to takes a subscriber of a bus, not {type(subscriber).__name__}")
    subscriber._deliver(message, writable, True)


_buses: weakref.WeakSet[Bus] = weakref.WeakSet()
_describing = threading.Lock()  # guards the schemas


def _stop_all() -> None:
    """At exit: let the threads of buses deliver what is pending, and end them before the interpreter shuts down.

    Subscribers are not closed: a daemon thread that waits for one would only print a ClosedError.
    """
    deadline = time.monotonic() + EXIT_S
    for bus in list(_buses):
        with bus._starting:
            thread = bus._thread
        if thread is not None:
            bus._stop(False)
            _join(bus, thread, deadline)


def _join(bus: Bus, thread: threading.Thread, deadline: float) -> None:
    """Wait for the thread, but not long for a reader that does not read: only daemon threads still run."""
    count, since = -1, time.monotonic()
    while thread.is_alive() and (now := time.monotonic()) < deadline:
        if not bus._waits or bus.pending != count:
            count, since = bus.pending, now
        elif now - since > STUCK_AT_EXIT_S:
            return
        thread.join(0.02)


def _after_fork_in_child() -> None:
    for bus in list(_buses):
        bus._forked()
        bus._thread = None
        bus._starting = threading.RLock()


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
