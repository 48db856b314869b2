"""The contract: what a publisher and a subscriber do, whatever their reach.

Rules, held by every room and checked by ``tests/conformance``:

- ``read(timeout)`` gives a message, or None when the time is over. ``timeout`` is in seconds; 0 polls, None waits for
  ever. Closed in the meantime by another thread: ``ClosedError`` (iteration ends instead).
- After ``read(0)`` or ``read_many(most, 0)`` has given nothing, the descriptor ``fileno()`` becomes readable when there
  is something to read. That is all that select, poll and asyncio need; there is no second implementation for them.
- ``publish`` copies; ``reserve`` does not. Both give the message's ordinal, or None where the reach cannot know it.
- Several threads may use one handle: what each publishes keeps its order, and each message that is read goes to one
  of them.
- ``close`` is idempotent; every other use after it, and every wait that it ends, raises ``ClosedError``.
- ``process_all`` calls the function of ``on_message`` with what was there when it was called. A subscriber opened with
  ``on_message=function`` calls it from a thread of its own, until it is closed. ``handle.on_message = function``
  raises, as for every method of a handle whose name begins with ``on_``.
- In an event loop: ``read_async`` and ``async for``, ``publish_async``, ``publish_many_async``, ``reserve_async``. None
  of them stops the loop, however full the channel is. Two tasks that read one handle at a time: ``StateError``.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import inspect
import logging
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar

from penstock import clock
from penstock.errors import ClosedError, InvalidArgument, RefusedError, StateError, nearest
from penstock.tasks import Worker, readable

if TYPE_CHECKING:
    # Type checkers have this module's types built in; nothing is imported at run time.
    from typing_extensions import Buffer as _Buffer
    from typing_extensions import TypeVar as _TypeVar

    from penstock._core import Batch, Draft, Message

    class _Array(Protocol):
        """numpy's arrays, which declare ``__buffer__`` to type checkers only from Python 3.12 on."""

        @property
        def __array_interface__(self) -> dict[str, Any]: ...

    #: What can be published: whatever has a buffer.
    Buffer = _Buffer | _Array
    T = _TypeVar("T", default=bytes)
else:
    Buffer = Any
    T = TypeVar("T")

Choice = TypeVar("Choice", bound=enum.StrEnum)
Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any] | None)
Method = TypeVar("Method", bound=Callable[..., Any])
logger = logging.getLogger("penstock")

UNPROCESSED_S = 1.0  # warn if process_all has not been called for this long
LOG_FAILURES_S = 10.0  # seconds between two log entries of a function that keeps failing
LOOK_S = 0.02  # how often a thread polls for what it is not notified of
END_S = 5.0  # how long close waits for a running function
AGAIN_S = 1.0  # delay before a message is redelivered at which the function of on_message= failed


class Overflow(enum.StrEnum):
    """What happens when a subscriber is full."""

    BLOCK = "block"
    DROP_OLDEST = "drop_oldest"
    DROP_NEWEST = "drop_newest"


def choose(kind: type[Choice], value: str | Choice, option: str) -> Choice:
    """``value`` as a member of ``kind``; ``InvalidArgument`` names the option and the nearest valid values."""
    try:
        return kind(value)
    except ValueError:
        valid = [member.value for member in kind]
        raise InvalidArgument(f"{option}={value!r} is not a choice; {nearest(str(value), valid)}") from None


def check_timeout(timeout: float | None, option: str = "timeout") -> float | None:
    """``timeout`` in seconds; None waits for ever. Negative and not-a-number are refused by name."""
    return None if timeout is None else _check_seconds(timeout, option, " or None", ", or None to wait for ever")


@contextlib.contextmanager
def telling_published(count: int) -> Iterator[None]:
    """Inside, errors get the attribute ``published``: how many messages of a batch were published before them."""
    try:
        yield
    except Exception as error:
        if not hasattr(error, "published"):
            error.published = count  # type: ignore[attr-defined]
        raise


def check_delay(delay: float, option: str = "delay") -> float:
    """``delay`` in seconds, which cannot be None."""
    return _check_seconds(delay, option, "", "")


def _check_seconds(seconds: float, option: str, or_none: str, or_ever: str) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"{option} must be seconds as a number{or_none}, not {type(seconds).__name__}")
    if not seconds >= 0:
        raise InvalidArgument(f"{option}={seconds!r} must be 0 or more seconds{or_ever}")
    return float(seconds)


def check_flag(option: str, value: Any) -> None:
    """A text is no flag: "no" would be true."""
    if isinstance(value, str | bytes | float):
        raise TypeError(f"{option} must be True or False, not {value!r}")


def check_subscribers(subscribers: int) -> None:
    """The number that ``wait_ready`` waits for."""
    if subscribers < 0:
        raise InvalidArgument(f"subscribers={subscribers} must be 0 or more")


def check_function(option: str, function: Any) -> None:
    """``TypeError`` unless it is None or a function that can be called from a thread, which awaits nothing."""
    if function is None:
        return
    if not callable(function):
        raise TypeError(f"{option} takes a function or None, not {type(function).__name__}")
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        raise TypeError(f"{option} takes a plain function, not a coroutine function: use 'async for' to await messages")


class Deadline:
    """When a wait is over. None waits for ever, 0 polls."""

    __slots__ = ("_end",)

    def __init__(self, timeout: float | None, option: str = "timeout") -> None:
        timeout = check_timeout(timeout, option)
        self._end = None if timeout is None else time.monotonic() + timeout

    @property
    def left(self) -> float | None:
        """Seconds, 0 when it has passed; None: for ever."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        """Whether the time is over."""
        return self._end is not None and time.monotonic() >= self._end


@dataclass(frozen=True, slots=True)
class Ledger:
    """Counts that must balance, from the moment of subscribing (or of opening, for a publisher).

    matched = delivered + dropped (by reason) + expired + in_flight. Redeliveries are counted separately.
    """

    matched: int = 0
    delivered: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    expired: int = 0
    in_flight: int = 0
    redelivered: int = 0

    @classmethod
    def of(cls, counts: Mapping[str, Any]) -> Ledger:
        """From a snapshot of counters (``_core.Counters.snapshot()``)."""
        names = ("matched", "delivered", "expired", "in_flight", "redelivered")
        return cls(dropped=dict(counts["dropped"]), **{name: counts[name] for name in names})

    @property
    def lost(self) -> int:
        """Everything dropped, whatever the reason."""
        return sum(self.dropped.values())

    @property
    def balanced(self) -> bool:
        """Whether the counts add up."""
        return self.matched == self.delivered + self.lost + self.expired + self.in_flight


class Terms(Protocol):
    """The schema of a typed handle and its rule for others: ``penstock.types.Terms``."""

    @property
    def name(self) -> str:
        """The type's name."""

    @property
    def text(self) -> str:
        """Its schema, as it travels."""

    @property
    def digest(self) -> str:
        """16 hexadecimal digits of a hash of the text."""

    @property
    def replaces(self) -> bool:
        """Whether it replaces a schema that is not compatible with it."""

    def check(self, there: str, where: str) -> bool:
        """Whether ``there`` is the same schema; ``RefusedError`` if the two are not compatible."""

    def added_to(self, versions: Sequence[str], where: str) -> list[str] | None:
        """All versions with this one as the newest, or None if it is known already; ``RefusedError`` as for
        ``check``."""

    def check_name(self, there: str, where: str) -> None:
        """The same where only a name is known."""


class _Called:
    """A method that takes a function, and refuses to be replaced by it. It costs nothing where nobody names it."""

    def __init__(self, method: FunctionType) -> None:
        self._method = method

    def __get__(self, owner: object, kind: type | None = None) -> Any:
        return self._method.__get__(owner, kind)

    def __set__(self, owner: object, _: object) -> None:
        name = self._method.__name__
        whose = "subscriber" if isinstance(owner, Subscriber) else "publisher" if isinstance(owner, Publisher) else ""
        whose = whose or type(owner).__name__.lower()
        opening = ", or give on_message=function at opening" if name == "on_message" else ""
        raise AttributeError(
            f"{name} is a method that takes the function: write {whose}.{name}(function), not {whose}.{name} = "
            f"function{opening}"
        )


def called(method: Method) -> Method:
    """Decorator of a method that takes a function: who assigns one to it instead is told what to write."""
    return _Called(method)  # type: ignore[return-value, arg-type]  # to a type checker it is the method


class Handle(ABC):
    """What publishers and subscribers share."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, method in list(vars(cls).items()):
            if name.startswith("on_") and isinstance(method, FunctionType):
                setattr(cls, name, called(method))

    def agree(self, terms: Terms) -> None:  # noqa: B027 - a reach that carries no schema has nothing to do
        """Announce the schema of the messages and compare it with the channel's. Called once, right after opening.

        ``RefusedError`` if the channel has another type. A reach that carries no schema accepts any.
        """

    @property
    def schema(self) -> str | None:
        """The schema of the messages as text (``penstock.types.Schema.parse`` reads it), or None."""
        return None

    @property
    @abstractmethod
    def ledger(self) -> Ledger:
        """A snapshot of the counts."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Closing twice does nothing."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether ``close`` was called."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        room, kind = type(self).__module__.split(".")[1], type(self).__name__
        name = getattr(self, "name", None) or getattr(self, "topic", None) or getattr(self, "_place", "")
        return f"<{room}.{kind}{f' {name!r}' if name else ''}{', closed' if self.closed else ''}>"

    def _after_close(self, function: Callable[[], None]) -> None:
        """Call ``function`` after this handle was closed. Here, because rooms implement ``close`` natively."""
        handle = weakref.ref(self)
        before: Callable[..., None] = vars(self).get("close") or partial(_close, handle, type(self).close)

        def close(*arguments: Any, **options: Any) -> None:
            before(*arguments, **options)
            function()

        vars(self)["close"] = close


def _close(handle: weakref.ref[Any], function: Callable[..., None], *arguments: Any, **options: Any) -> None:
    alive = handle()
    if alive is not None:
        function(alive, *arguments, **options)


def _show_options(room: type, name: str) -> None:
    """``help`` of ``NAME_async`` lists the options that the room's own ``NAME`` has."""
    shown: Any = getattr(room, f"{name}_async")
    signature = inspect.signature(getattr(room, name))
    returned = inspect.signature(shown).return_annotation
    copy: Any = FunctionType(shown.__code__, shown.__globals__, shown.__name__, shown.__defaults__, shown.__closure__)
    copy.__doc__, copy.__module__ = shown.__doc__, room.__module__
    copy.__qualname__ = f"{room.__qualname__}.{name}_async"
    copy.__signature__ = signature.replace(return_annotation=returned)
    setattr(room, f"{name}_async", copy)


class IdAndKey(Protocol):
    """What a journal keeps of a message beside its data and properties; empty where it has none."""

    @property
    def message_id(self) -> str: ...
    @property
    def key(self) -> str: ...


class Publisher(Handle, Generic[T]):
    """One writing handle. ``T`` is the type of its values: bytes, unless a type was given."""

    #: Whether ``publish`` takes ``properties={...}``: the column *properties* of docs/reaches.md.
    carries_properties: ClassVar[bool] = False
    #: Whether ``publish_many`` takes ``properties=[{...}, ...]`` too, one for each message.
    carries_properties_of_many: ClassVar[bool] = False
    #: Whether ``forward_details`` keeps ids and keys.
    carries_details: ClassVar[bool] = False
    #: Whether ``reserve`` may wait for room, and takes ``timeout=``; elsewhere publishing the draft may wait.
    reserve_waits: ClassVar[bool] = False

    _worker: Worker | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("publish", "publish_many", "reserve"):
            _show_options(cls, name)

    @abstractmethod
    def publish(self, data: Buffer | T, *, timeout: float | None = None) -> int | None:
        """Publish a copy of ``data``; gives its ordinal where the reach knows it. ``TimeoutError``: it was not."""

    def set(self, data: Buffer | T, **options: Any) -> int | None:
        """``publish`` for topics that have a state, opened with ``latest=True``: this is its value from now on."""
        return self.publish(data, **options)

    @abstractmethod
    def publish_many(self, batch: Iterable[Buffer | T], *, timeout: float | None = None) -> int:
        """Publish each of them, in order; gives how many were published.

        An error says in its attribute ``published`` how many went before it.
        """

    @abstractmethod
    def reserve(self, size: int) -> Draft:
        """A writable buffer of ``size`` bytes; leaving its ``with`` block publishes it.

        All of them: what is not written is as it was in that memory (zeros where it leaves the process, as over tcp);
        ``draft.publish(n)`` publishes the first ``n`` bytes alone.
        """

    @abstractmethod
    def wait_ready(self, subscribers: int = 1, timeout: float | None = None) -> bool:
        """Wait until this many subscribers are connected, so that they miss nothing that is published afterwards."""

    def forward(self, batch: Batch | Sequence[Message]) -> int:
        """Publish messages of any reach, with the fields that this reach can hold; returns how many were published.

        Every reach holds the payload; properties if ``carries_properties``; ordinals and times if the room says so.
        """
        if not self.carries_properties:
            return self.publish_many(batch)
        properties = [message.properties for message in batch]
        if not any(properties):
            return self.publish_many(batch)
        many: Callable[..., int] = self.publish_many
        if self.carries_properties_of_many:
            return many(batch, properties=properties)
        publish: Callable[..., int | None] = self.publish
        for message, one in zip(batch, properties, strict=True):
            publish(message, properties=one)
        return len(properties)

    def forward_details(self, batch: Sequence[Message], details: Sequence[IdAndKey]) -> int:
        """``forward`` with the id and the key of each message, which a ``Message`` does not hold, where
        ``carries_details`` says that this reach keeps them.
        """
        return self.forward(batch)

    # --- in an event loop

    def _publish_now(self, data: Buffer | T, options: Mapping[str, Any]) -> int | None:
        """``publish`` if it need not wait, else ``BlockingIOError``. A room that cannot know keeps this default."""
        raise BlockingIOError

    async def publish_async(self, data: Buffer | T, **options: Any) -> int | None:
        """``publish`` for asyncio: the event loop goes on while this waits.

        ``timeout``, where ``publish`` has it, includes the wait for earlier calls. If this is cancelled while it waits,
        the message may still be published later. ``data`` is not copied before that: leave it as it is.
        """
        if self._worker is None or not self._worker.busy:
            try:
                return self._publish_now(data, options)
            except BlockingIOError:
                pass
        return await self._in_worker(partial(self.publish, data), options)

    async def publish_many_async(self, batch: Iterable[Buffer | T], **options: Any) -> int:
        """``publish_many`` for asyncio; ``batch`` is read at once, in the event loop."""
        items = batch if hasattr(batch, "__len__") else list(batch)
        try:
            return await self._in_worker(partial(self.publish_many, items), options)
        except TimeoutError as error:
            if not hasattr(error, "published"):
                error.published = 0  # type: ignore[attr-defined]  # it had not begun
            raise

    def reserve_async(self, size: int, **options: Any) -> Reservation:
        """``reserve`` for asyncio: ``async with publisher.reserve_async(n) as draft`` publishes at its end.

        ``draft = await publisher.reserve_async(n)`` gives the draft alone, whose ``publish`` may wait.
        """
        reserve: Callable[..., Draft] = partial(self.reserve, size)
        if not self.reserve_waits:  # the time-out is for the calls before it alone
            reserve = lambda timeout=None, **more: self.reserve(size, **more)  # noqa: E731
        return Reservation(self._in_worker, reserve, options)

    def _in_worker(self, function: Callable[..., Result], options: Mapping[str, Any]) -> Awaitable[Result]:
        """Run a call that may wait in one thread, which keeps the order of calls. Its time-out starts here."""
        if self.closed:
            raise ClosedError("this publisher was closed")
        if self._worker is None:
            self._worker = Worker("penstock-publish")
            self._after_close(self._worker.stop)
        if options.get("timeout") is None:
            return self._worker.run(partial(function, **options))
        deadline = Deadline(options["timeout"])
        return self._worker.run(lambda: function(**{**options, "timeout": deadline.left}), deadline.left)


class Reservation:
    """What ``reserve_async`` gives: to be awaited for the draft, or entered by ``async with``, which publishes it."""

    def __init__(
        self,
        run: Callable[[Callable[..., Any], Mapping[str, Any]], Awaitable[Any]],
        reserve: Callable[..., Draft],
        options: Mapping[str, Any],
    ) -> None:
        self._run = run
        self._reserve = reserve
        self._options = options
        self._draft: Draft | None = None

    def __await__(self) -> Generator[Any, Any, Draft]:
        return self._run(self._reserve, self._options).__await__()

    async def __aenter__(self) -> Draft:
        self._draft = draft = await self
        return draft

    async def __aexit__(self, kind: object, *_: object) -> None:
        draft, self._draft = self._draft, None
        if draft is None or not draft.open:
            return
        if kind is not None:
            draft.cancel()
        else:
            await self._run(draft.publish, {})


class Subscriber(Handle, Generic[T]):
    """One reading handle. A room implements ``read``, ``read_many``, ``wait``, ``fileno``; the rest follows.

    ``T`` is the type of its values: bytes, unless a type was given.
    """

    _callback: Callable[..., Any] | None = None
    _caller: threading.Thread | None = None  # the thread that calls on_message=, if given at opening
    _call_ends_by: Deadline | None = None  # how long close waits for it
    _unprocessed = False  # a function was set, and process_all has not been called since
    _failures = 0
    _told_ns = 0
    _awaited = False  # set while a task is in read_async

    @abstractmethod
    def read(self, timeout: float | None = None) -> Message[T] | None:
        """The next message, or None when the time is over."""

    @abstractmethod
    def read_many(self, most: int = 1024, timeout: float | None = None) -> Batch[T] | list[Message[T]]:
        """Up to ``most`` messages that are there; waits for the first one only. Empty when the time is over."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> bool:
        """Wait until there is something to read; False when the time is over."""

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable when a message may be there (see the rule at the top)."""

    def schema_of(self, topic: str | None) -> str | None:
        """``schema`` of one of its topics, as ``message.channel`` names it; a reach of one topic has one schema."""
        return self.schema

    def schemas_of(self, topic: str | None) -> list[str]:
        """Every version of ``schema_of``, as far as the reach keeps them, the newest last."""
        newest = self.schema_of(topic)
        return [newest] if newest else []

    def receive(self, timeout: float | None = None) -> Message[T]:
        """``read`` that raises ``TimeoutError`` instead of giving None."""
        message = self.read(timeout)
        if message is None:
            raise TimeoutError(f"no message came within {timeout:g} s" if timeout else "no message is there")
        return message

    def _available_messages(self) -> Iterator[Message[T]]:
        """The messages that are there now, read one by one, without waiting."""
        for _ in range(self.ledger.in_flight):
            there = [self.read(0)]
            if there[0] is None:
                return
            yield there.pop()  # type: ignore[misc]  # nothing here keeps it, so that one may be held at a time

    # --- functions that are called

    def on_message(self, function: Function) -> Function:
        """What ``process_all`` calls with each message; None unsets it. It may be changed inside the function.

        Gives the function, so that it may decorate one.
        """
        check_function("on_message", function)
        self._callback = function
        self._unprocessed = function is not None and not self._calls_by_itself
        if self._unprocessed:
            _watch_processing(self)
        return function

    @property
    def _calls_by_itself(self) -> bool:
        """Whether a thread calls the function, without ``process_all``."""
        return self._caller is not None

    def process_all(self) -> int:
        """Call the function with every message that is there now, then return how many there were.

        Messages that arrive meanwhile are left for the next call; ``wait`` and ``fileno`` report them.
        """
        self._unprocessed = False
        count = 0
        there = self._available_messages()
        while (function := self._callback) is not None and (message := next(there, None)) is not None:
            self._call(function, message)
            del message  # otherwise it would be held while the next one is read
            count += 1
        if (function is None or not count) and self.closed:
            raise ClosedError("this subscriber is closed")
        return count

    def _call(self, function: Callable[..., Any], message: Message[T]) -> None:
        function(message)

    def call_in_thread(self, function: Callable[..., Any] | None) -> Self:
        """What ``on_message=`` at opening does: ``function`` is called with every message from a thread of its own.

        What it raises is logged and counted in ``errors``. From now on only this thread may read the handle. It keeps
        the handle alive and runs until ``close``, which waits for a running call. None does nothing.
        """
        if function is None:
            return self
        if self._caller is not None:
            raise StateError("a thread calls this subscriber's function already")
        clock.refuse_if_virtual("on_message= (in a thread of its own; at a bus a CallbackSubscriber has none)")
        read = self.read  # taken before `read` is replaced below, which refuses it to all others
        self._caller = threading.Thread(target=self._serve, args=(read,), name="penstock-on-message", daemon=True)
        self.on_message(function)
        vars(self)["read"] = vars(self)["read_many"] = partial(refuse_read, weakref.ref(self))
        self._after_close(partial(_join, weakref.ref(self)))
        _called.add(self)
        self._caller.start()
        return self

    def _serve(self, read: Callable[[float | None], Message[T] | None]) -> None:
        while True:
            if self._callback is None:  # unset for a while: messages wait
                if self.closed:
                    return
                time.sleep(LOOK_S)
                continue
            try:
                message = read(None)
            except (ClosedError, RefusedError) as error:
                if not self.closed and getattr(self, "refusal", None) is not None:
                    time.sleep(LOOK_S)  # its publisher has another type, and one of the right type may come
                    continue
                if not self.closed:
                    logger.warning("%r: its function will not be called any more: %s", self, error)
                return
            except Exception:  # a damaged message or no memory: the next message may be good
                self._note_failure("reading failed")
                time.sleep(LOOK_S)  # no event says when it is better: pause, then try again
                continue
            function = self._callback
            if message is None or function is None:
                continue
            try:
                self._call(function, message)
            except BaseException:  # SystemExit too: nothing else would report it
                self._note_failure("the function of on_message failed")
                with contextlib.suppress(ClosedError):
                    self._was_not_handled(message)
            del message

    def _was_not_handled(self, message: Message[T]) -> None:
        """The function of ``on_message=`` has failed at it. Where a reach has redelivery, it comes again."""

    def _wait_for_call(self) -> bool:
        """Wait for the thread of ``on_message=``, which ends when nothing is read any more; whether it has. Where a
        reach has redelivery, ``close`` acknowledges after this.
        """
        caller = self._caller
        if caller is None or caller is threading.current_thread():
            return True
        if self._call_ends_by is None:
            self._call_ends_by = Deadline(END_S)
        caller.join(self._call_ends_by.left)
        return not caller.is_alive()

    def _note_failure(self, what: str) -> None:
        now = time.monotonic_ns()
        if not self._told_ns or now - self._told_ns >= LOG_FAILURES_S * 1e9:
            self._told_ns = now
            logger.exception("%r: %s (%d times so far)", self, what, self._failures + 1)
        self._failures += 1  # count after logging: who sees the count finds the line in the log

    @property
    def errors(self) -> int:
        """How often the thread of ``on_message=`` failed: in the function, or reading."""
        return self._failures

    # --- loops

    def __iter__(self) -> Iterator[Message[T]]:
        """Messages as they come, until closed."""
        try:
            while True:
                there = [self.read(None)]
                if there[0] is None:
                    return
                yield there.pop()  # type: ignore[misc]  # nothing here keeps it: `del` in the loop releases it
        except ClosedError:
            if not self.closed:
                raise

    def _begin_wait(self) -> None:
        """A task starts to wait. Until ``_end_wait`` the descriptor stays open, even if the handle is closed."""

    def _end_wait(self) -> None:
        """The task has stopped waiting for the descriptor."""

    def _refuse_endless_wait(self) -> None:
        """A task is about to wait without a time-out under a virtual clock."""
        clock.refuse_if_replayed("an async read without a time-out (nothing happens while it waits)")

    async def read_async(self, timeout: float | None = None) -> Message[T] | None:
        """``read`` for asyncio: the event loop goes on while this waits."""
        deadline = Deadline(timeout)
        if self._awaited:
            raise StateError("another task is reading from this handle, and only one may: open a second subscriber")
        message = self.read(0)
        if message is not None:
            return message
        if timeout is None and clock.in_use() and not _others_go_on():
            self._refuse_endless_wait()
        descriptor = self.fileno()
        self._awaited = True
        self._begin_wait()
        try:
            while (message := self.read(0)) is None:
                left = deadline.left
                if left == 0:
                    return None
                await readable(descriptor, left)
        finally:
            self._awaited = False
            self._end_wait()
        return message

    async def receive_async(self, timeout: float | None = None) -> Message[T]:
        """``read_async`` that raises ``TimeoutError`` instead of giving None."""
        message = await self.read_async(timeout)
        if message is None:
            raise TimeoutError(f"no message came within {timeout:g} s" if timeout else "no message is there")
        return message

    async def __aiter__(self) -> AsyncIterator[Message[T]]:
        """Messages as they come, until closed."""
        try:
            while (there := [await self.read_async(None)])[0] is not None:
                yield there.pop()  # type: ignore[misc]  # nothing here keeps it: `del` in the loop releases it
        except ClosedError:
            if not self.closed:
                raise


def _others_go_on() -> bool:
    """Whether the running loop is one of a replay, in which the recording goes on while a task waits."""
    import asyncio

    try:
        return getattr(asyncio.get_running_loop(), "replayed", False)
    except RuntimeError:  # a loop of trio
        return False


_called: weakref.WeakSet[Subscriber[Any]] = weakref.WeakSet()


@atexit.register
def _end_calls() -> None:
    """Before the interpreter shuts down: end the threads that call functions."""
    for subscriber in list(_called):
        if not subscriber.closed:
            subscriber.close()


def refuse_read(handle: weakref.ref[Subscriber[Any]], *_: Any, **__: Any) -> Any:
    """Replaces ``read`` on a handle that a thread reads."""
    subscriber = handle()
    if subscriber is None or subscriber.closed:
        raise ClosedError("this subscriber is closed")
    raise StateError("messages go to the function of on_message, which a thread calls: open another subscriber to read")


def _join(handle: weakref.ref[Subscriber[Any]]) -> None:
    subscriber = handle()
    if subscriber is not None and not subscriber._wait_for_call():
        logger.warning("the function of on_message still runs %g s after its subscriber was closed", END_S)


# subscribers and since when they are watched, the oldest first
_watched: list[tuple[float, weakref.ref[Subscriber[Any]]]] = []
_watching = threading.Lock()  # held while the list is changed, and while a thread begins or ends


def _watch_processing(subscriber: Subscriber[Any]) -> None:
    """Warn once if ``process_all`` is not called soon. One thread watches all such subscribers."""
    with _watching:
        _watched.append((time.monotonic(), weakref.ref(subscriber)))
        if len(_watched) == 1:
            threading.Thread(target=_tell_unprocessed, name="penstock-unprocessed", daemon=True).start()


def _tell_unprocessed() -> None:
    while True:
        since, reference = _watched[0]
        time.sleep(max(0.0, since + UNPROCESSED_S - time.monotonic()))
        subscriber = reference()
        if subscriber is not None and subscriber._unprocessed and not subscriber.closed:
            subscriber._unprocessed = False
            logger.warning(
                "%r: on_message() has set a function, but nobody has called process_all() for %g s, so nothing calls "
                "it; open the subscriber with on_message=function to have it called from a thread of its own",
                subscriber,
                UNPROCESSED_S,
            )
        del subscriber
        with _watching:
            del _watched[0]
            if not _watched:
                return


def _forget_watched() -> None:
    """Reset the list in a forked child, which has no such thread."""
    global _watching  # noqa: PLW0603
    _watching = threading.Lock()
    _watched.clear()


os.register_at_fork(after_in_child=_forget_watched)
