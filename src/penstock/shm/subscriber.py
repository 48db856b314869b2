"""The subscriber. ``read``, ``read_newest``, ``read_many``, ``find``, ``wait``, ``fileno`` and ``close`` are native.

Rules: any thread; each message goes to one of those that read. A message holds its slot until it is released or
garbage-collected. At most ``max_active_messages`` may be held, or as many as there are free slots. At that limit a read
waits for a release: ``read(0)`` gives None and the message stays unread; a read that times out warns once and says
which process holds which slots.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock import channel
from penstock._core import shm as native
from penstock.channel import Function, Ledger, Overflow
from penstock.errors import InvalidArgument
from penstock.history import wants_past
from penstock.shm.publisher import agree_on_schema, group_id, is_reliable, newest_schema, schemas

if TYPE_CHECKING:
    from penstock._core import Message


class WeakReference:
    """Returns the message while its slot is unchanged, else None. Does not hold the slot."""

    __slots__ = ("_decoder", "_place", "_subscriber")

    def __init__(self, subscriber: Subscriber, message: Message) -> None:
        self._subscriber = subscriber
        self._place = subscriber._place_of(message)
        self._decoder = message._decoder  # its value stays what it was

    def __call__(self) -> Message | None:
        message = None if self._subscriber.closed else self._subscriber._read_at(*self._place)
        if message is not None:
            message._decoder = self._decoder
        return message

    def __repr__(self) -> str:
        return f"<shm.WeakReference to slot {self._place[0]} of {self._subscriber.name!r}>"

    @property
    def expired(self) -> bool:
        """Whether the message is gone; another one may be in its slot."""
        message = self()
        return message is None


class Subscriber(native.Subscriber, channel.Subscriber):
    """One reading handle on a shared-memory channel. ``docs/rooms/shm.md`` has the table of options."""

    def __init__(
        self,
        name: str,
        *,
        overflow: str | Overflow | None = None,
        reliable: bool | None = None,
        max_active_messages: int | None = None,
        type: str | None = None,
        checksum: str = "raise",
        pass_activation: bool = False,
        max_publishers: int | None = None,
        max_subscribers: int | None = None,
        mux: str | None = None,
        vchan_id: int | None = None,
        history: bool = True,
        mode: int | None = None,
        group: int | str | None = None,
        spin_us: int = 0,
        on_message: Callable[..., Any] | None = None,
    ) -> None:
        if vchan_id is not None and mux is None:
            raise InvalidArgument(f"channel {name!r}: vchan_id={vchan_id} needs mux=, the multiplexer that it is on")
        if checksum not in ("raise", "flag", "ignore"):
            raise InvalidArgument(f"channel {name!r}: checksum={checksum!r} must be 'raise', 'flag' or 'ignore'")
        self.name = name
        self.mux = mux
        self.reliable = reliable = is_reliable(name, overflow, reliable)
        self._dropped: Callable[[Subscriber, int], Any] | None = None
        self._takes_subscriber = False
        super().__init__(
            name=name, reliable=reliable, max_active_messages=max_active_messages, type=type,
            verify=checksum != "ignore", refuse_broken=checksum == "raise", pass_activation=pass_activation,
            max_publishers=max_publishers, max_subscribers=max_subscribers, mux=mux, vchan_id=vchan_id,
            history=wants_past(history), mode=mode, group=group_id(group), spin_us=spin_us,
        )  # fmt: skip
        self.call_in_thread(on_message)
        self._after_close(partial(_let_go, weakref.ref(self)))  # last: a call that runs is waited for before

    def agree(self, terms: channel.Terms) -> None:
        agree_on_schema(self, terms)

    @property
    def schema(self) -> str | None:
        """What describes the channel's type, or None."""
        return newest_schema(self)

    def schemas_of(self, topic: str | None) -> list[str]:
        """Every version of it, the newest last."""
        return schemas(self)

    def read_all(self) -> list[Message]:
        """Every message that is there, as many as may be held."""
        return list(self._read_all())

    def _available_messages(self) -> Iterator[Message]:
        end = self._end()  # the ledger does not count what was there before this subscriber
        while not self._passed(end) and (there := [self.read(0)])[0] is not None:
            yield there.pop()  # type: ignore[misc]  # nothing here keeps it

    def weak_reference(self, message: Message) -> WeakReference:
        """A reference that does not hold the slot."""
        return WeakReference(self, message)

    def on_message(self, function: Function) -> Function:
        """What ``process_all`` calls with (message) or (subscriber, message); None unsets it, inside itself too."""
        self._takes_subscriber = callable(function) and _takes_two(function)
        return super().on_message(function)

    def _call(self, function: Callable[..., Any], message: Message) -> None:
        if self._takes_subscriber:
            function(self, message)
        else:
            function(message)

    def on_dropped(self, function: Callable[[Subscriber, int], Any] | None) -> None:
        """``function(subscriber, count)`` is told when messages were overwritten before they were read."""
        if function is not None and not callable(function):
            raise TypeError(f"on_dropped takes a function or None, not {function.__class__.__name__}")
        self._dropped = function
        self._tell_drops(function is not None)

    def _tell_dropped(self, count: int) -> None:
        if self._dropped is not None:
            self._dropped(self, count)

    @property
    def ledger(self) -> Ledger:
        """What was published since subscribing, and what became of it."""
        matched, delivered, dropped, *_ = self._counts()
        lost = sum(dropped.values())
        return Ledger(matched=matched, delivered=delivered, dropped=dropped, in_flight=matched - delivered - lost)

    @property
    def delivered_past(self) -> int:
        """How many of the delivered messages were published before it subscribed."""
        return self._counts()[4]

    @property
    def checksum_errors(self) -> int:
        """Messages whose checksum did not match, or which could not be right."""
        return self._counts()[3]

    def __repr__(self) -> str:
        return f"<shm.Subscriber {self.name!r}{', closed' if self.closed else ''}>"


def _let_go(handle: weakref.ref[Subscriber]) -> None:
    """A message refers to its subscriber where the garbage collector does not see it: who keeps one beside the function
    would be kept by it for ever."""
    subscriber = handle()
    if subscriber is not None:
        subscriber._callback = subscriber._dropped = None


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a builtin that does not say
        return False
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return True
    return False
