"""The contract: what a publisher and a subscriber do, whatever their reach.

Rules, held by every room and checked by ``tests/conformance``:

- ``read(timeout)`` gives a message, or None when the time is over. ``timeout`` is in seconds; 0 polls, None waits for
  ever. Closed in the meantime by another thread: ``ClosedError`` (iteration ends instead).
- After ``read(0)`` or ``read_many(most, 0)`` has given nothing, the descriptor ``fileno()`` becomes readable when there
  is something to read. That is all that select, poll and asyncio need; there is no second implementation for them.
- ``publish`` copies; ``reserve`` does not. Both give the message's ordinal, or None where the reach cannot know it.
- A handle may be used by one thread at a time unless its room says otherwise; ``close`` and ``ledger`` by any thread.
- ``close`` is idempotent; every other use after it raises ``ClosedError``.
"""

from __future__ import annotations

import enum
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from penstock.errors import ClosedError, InvalidArgument, nearest

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Buffer  # type: ignore[attr-defined]

    from penstock._core import Batch, Draft, Message

Choice = TypeVar("Choice", bound=enum.StrEnum)


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
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"{option} must be seconds as a number or None, not {type(timeout).__name__}")
    if not timeout >= 0:
        raise InvalidArgument(f"{option}={timeout!r} must be 0 or more seconds, or None to wait for ever")
    return float(timeout)


@dataclass(frozen=True, slots=True)
class Ledger:
    """Counts that must balance, from the moment of subscribing (or of opening, for a publisher).

    matched = delivered + dropped (by reason) + expired + in_flight. What was delivered again is counted apart.
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
        """Whether the books close."""
        return self.matched == self.delivered + self.lost + self.expired + self.in_flight


class _Handle(ABC):
    """What publishers and subscribers share."""

    @property
    @abstractmethod
    def ledger(self) -> Ledger:
        """A snapshot of the counts."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Closing twice does nothing."""

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


class Publisher(_Handle):
    """One writing handle."""

    #: Whether ``publish`` takes ``properties={...}``: the column *properties* of docs/reaches.md.
    carries_properties: ClassVar[bool] = False
    #: Whether ``publish_many`` takes ``properties=[{...}, ...]`` too, one for each message.
    carries_properties_of_many: ClassVar[bool] = False

    @abstractmethod
    def publish(self, data: Buffer) -> int | None:
        """Publish a copy of ``data``; gives its ordinal where the reach knows it."""

    @abstractmethod
    def publish_many(self, batch: Iterable[Buffer]) -> int:
        """Publish each of them, in order; gives how many were published."""

    @abstractmethod
    def reserve(self, size: int) -> Draft:
        """A writable buffer of ``size`` bytes; leaving its ``with`` block publishes it."""

    @abstractmethod
    def wait_ready(self, subscribers: int = 1, timeout: float | None = None) -> bool:
        """Wait until so many subscribers are there: nothing published later is missed for want of a connection."""


class Subscriber(_Handle):
    """One reading handle. A room implements ``read``, ``read_many``, ``wait``, ``fileno``; the rest follows."""

    _callback: Callable[..., Any] | None = None

    @abstractmethod
    def read(self, timeout: float | None = None) -> Message | None:
        """The next message, or None when the time is over."""

    @abstractmethod
    def read_many(self, most: int = 1024, timeout: float | None = None) -> Batch | list[Message]:
        """Up to ``most`` messages that are there; waits for the first one only. Empty when the time is over."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> bool:
        """Wait until there is something to read; False when the time is over."""

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable when a message may be there (see the rule at the top)."""

    def on_message(self, function: Callable[[Message], Any] | None) -> None:
        """What ``process_all`` calls with each message; None unsets it. It may be changed inside the function."""
        if function is not None and not callable(function):
            raise TypeError(f"on_message takes a function or None, not {type(function).__name__}")
        self._callback = function

    def process_all(self) -> int:
        """Call the function with every message that is there, then return how many there were."""
        count = 0
        while self._callback is not None:
            message = self.read(0)
            if message is None:
                break
            self._callback(message)
            count += 1
        return count

    def __iter__(self) -> Iterator[Message]:
        """Messages as they come, until closed."""
        try:
            while True:
                message = self.read(None)
                if message is None:
                    return
                yield message
        except ClosedError:
            if not self.closed:
                raise

    async def read_async(self, timeout: float | None = None) -> Message | None:
        """``read`` for asyncio: the event loop goes on while this waits."""
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        while (message := self.read(0)) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            await readable(self.fileno(), left)
        return message

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Messages as they come, until closed."""
        try:
            while (message := await self.read_async(None)) is not None:
                yield message
        except ClosedError:
            if not self.closed:
                raise


async def readable(descriptor: int, timeout: float | None) -> bool:
    """Wait in the running event loop until ``descriptor`` is readable; False when the time is over.

    One task at a time may wait for one descriptor: a handle has one reader.
    """
    import asyncio  # here, so that importing penstock stays light

    loop = asyncio.get_running_loop()
    future: asyncio.Future[bool] = loop.create_future()
    loop.add_reader(descriptor, _settle, future)
    timer = None if timeout is None else loop.call_later(timeout, _settle, future, False)
    try:
        return await future
    finally:
        loop.remove_reader(descriptor)
        if timer is not None:
            timer.cancel()


def _settle(future: asyncio.Future[bool], value: bool = True) -> None:
    if not future.done():
        future.set_result(value)
