"""Carry: forwards batches of messages to a publisher and counts the outcome; for bridges, players and recorders.

Rules:

- A batch is forwarded as one (``Publisher.forward``). The sink keeps those fields of a message that its reach can hold
  (``HOLDS``); which ones it cannot hold is known before the first message (``not_held``).
- A message that the sink refuses (too large, no room for another virtual channel) is counted as ``refused``, and the
  others go on. If the sink stays full, or does not answer, for longer than its options allow, the rest of the batch is
  dropped, logged and counted as ``overflow``; a ``Carry`` that keeps trying tries again instead. Any other error is
  raised.
- Messages that are due at the same time go in one batch (``due``).
- One thread uses a ``Carry``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.channel import Publisher
from penstock.errors import CapacityError, ClosedError, InvalidArgument, RefusedError
from penstock.throttle import Throttle

if TYPE_CHECKING:
    from penstock._core import Counters, Message
    from penstock.channel import IdAndKey

__all__ = ["HOLDS", "REFUSALS", "Carry", "due", "in_parts", "not_held", "not_held_of", "time_of", "total_bytes"]

Item = TypeVar("Item")

#: The fields of a message, besides its payload, that survive when it is forwarded to a reach.
HOLDS: Mapping[str, frozenset[str]] = {
    "bus": frozenset(),
    "shm": frozenset({"metadata", "type"}),
    "tcp": frozenset({"ordinal", "time", "virtual channel", "properties"}),
    "journal": frozenset({"time", "properties"}),
    "broker": frozenset({"time", "properties"}),
    "nats": frozenset({"time", "properties"}),
}
#: The fields of a reach's messages that another reach could lose. Ordinals and times do not count: a sink that does not
#: keep them gives new ones, which is its rule and no loss.
BRINGS: Mapping[str, frozenset[str]] = {
    "bus": frozenset(),
    "shm": frozenset(),  # depends on the channel: metadata, a type
    "tcp": frozenset({"properties"}),
    "journal": frozenset({"properties"}),
    "broker": frozenset({"properties"}),
    "nats": frozenset({"properties"}),
}
#: Errors by which a sink refuses one message for good; another message may still be accepted.
REFUSALS: tuple[type[Exception], ...] = (InvalidArgument, CapacityError, RefusedError)
RETRY_S = (0.1, 2.0)  # the first pause before a sink is tried again, and the longest
MOST = 1024
MOST_BYTES = 8 << 20
LONGEST_SLEEP_S = 86_400.0  # the system refuses to sleep for ages

logger = logging.getLogger("penstock.carry")


def time_of(message: Message[Any]) -> int | None:
    """A message's time, None if it has none. A time may be 0 or before 1970."""
    return message.timestamp_ns if message._timed else None


def total_bytes(batch: Any) -> int:
    """The total size of the payloads."""
    known = getattr(batch, "total_bytes", None)
    return known if known is not None else sum(memoryview(item).nbytes for item in batch)


def not_held(source: str, sink: str, brings: Iterable[str] = ()) -> list[str]:
    """The fields that messages lose from one scheme to another; ``brings`` adds fields the source is known to have."""
    return sorted((BRINGS[source] | set(brings)) - HOLDS[sink])


def not_held_of(message: Message[Any], holds: Container[str] = ()) -> list[str]:
    """The fields that a message has and a reader loses which keeps bytes, properties, time and what ``holds`` names.

    The first message of a shared-memory channel shows it for all: all of them have metadata, or none.
    """
    has = {"metadata": message.metadata, "virtual channel": message.vchan_id}
    return [name for name, value in has.items() if value is not None and name not in holds]


def in_parts(
    items: Sequence[Item],
    send: Callable[[Sequence[Item]], Any],
    refused: Callable[[Item, Exception], Any],
    sent: Callable[[], int] = lambda: 0,
    refusals: tuple[type[Exception], ...] = REFUSALS,
) -> None:
    """Send all items together. If one is refused, send those that ``sent()`` does not count yet one by one."""
    try:
        send(items)
    except refusals:
        for at in range(sent(), len(items)):
            try:
                send([items[at]])
            except refusals as error:
                refused(items[at], error)


def due(
    items: Iterable[Item],
    time_ns: Callable[[Item], int],
    size: Callable[[Item], int],
    speed: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[list[Item]]:
    """Yield items in groups when they are due: as long after the first as recorded, divided by ``speed`` (0: at once).

    A group holds the items that are due already, at most ``MOST`` of them or about ``MOST_BYTES``.
    """
    group: list[Item] = []
    held = 0
    began = first_ns = None
    for item in items:
        if began is None or first_ns is None:
            began, first_ns = clock(), time_ns(item)
        if speed:
            moment = began + (time_ns(item) - first_ns) / 1e9 / speed
            if moment > clock():
                if group:
                    yield group
                    group, held = [], 0
                while (wait_s := moment - clock()) > 0:  # measured again: the consumer of the group may have taken long
                    sleep(min(wait_s, LONGEST_SLEEP_S))
        group.append(item)
        held += size(item)
        if len(group) >= MOST or held >= MOST_BYTES:
            yield group
            group, held = [], 0
    if group:
        yield group


class Carry:
    """Forwards to one sink and counts each message as ``matched`` and then ``delivered`` or ``dropped``."""

    def __init__(
        self,
        publisher: Publisher[Any],
        counters: Counters,
        keep_trying: Callable[[float], bool] | None = None,
        details: Callable[[Message[Any]], IdAndKey] | None = None,
    ) -> None:
        """``keep_trying(seconds)`` waits before the sink is tried again; False gives up. None: never try again.
        ``details`` gives the id and the key of a message, for a sink that carries them.
        """
        self.publisher = publisher
        self._details = details
        self._counters = counters
        self._keep_trying = keep_trying
        self._refusals = Throttle(logger)

    def carry(self, batch: Any) -> None:
        """Publish the messages of ``batch``, in order."""
        self.carry_by(self.publisher.forward if self._details is None else self._forward_details, batch)

    def _forward_details(self, batch: Sequence[Any]) -> int:
        assert self._details is not None
        return self.publisher.forward_details(batch, [self._details(message) for message in batch])

    def carry_by(self, send: Callable[[Sequence[Any]], Any], batch: Any) -> None:
        """As ``carry``, but ``send`` publishes instead of ``Publisher.forward``."""
        count = len(batch)
        self._counters.add("matched", count)
        before = self._accepted()
        refused = 0

        def sent() -> int:
            return self._accepted() - before

        def refuse(message: Any, error: Exception) -> None:
            nonlocal refused
            refused += 1
            self._counters.drop("refused", 1)
            self._counters.add("errors", 1)
            self._refusals.log(logging.WARNING, "%r was not carried: %s", message, error)

        try:
            self._send_all(batch, send, refuse, lambda: sent() + refused, sent)
        except BaseException as error:
            reasons = (("overflow", TimeoutError), ("closed", ClosedError), ("error", BaseException))
            reason = next(name for name, kind in reasons if isinstance(error, kind))
            done = max(0, sent() - getattr(error, "unconfirmed", 0))  # what is on its way may never arrive
            self._counters.add("delivered", done)
            self._counters.drop(reason, count - done - refused)
            if not isinstance(error, TimeoutError):
                raise
            self._refusals.log(logging.WARNING, "%d messages were not carried: %s", count - done - refused, error)
        else:
            self._counters.add("delivered", count - refused)
        self._counters.add("bytes", total_bytes(batch))
        self._counters.set("last_ns", time.time_ns())

    def _send_all(
        self,
        batch: Any,
        send: Callable[[Sequence[Any]], Any],
        refuse: Callable[[Any, Exception], None],
        done: Callable[[], int],
        sent: Callable[[], int],
    ) -> None:
        """Send the batch; where the sink does not take it in time, what is left of it again and again."""
        pause = RETRY_S[0]

        def try_to_send(items: Sequence[Any]) -> None:
            try:
                send(items)
            except RefusedError as error:
                if self._keep_trying is None or not getattr(error, "passing", False):
                    raise
                raise TimeoutError(str(error)) from error  # a broker is full: there may be room later

        while True:
            begin, accepted = done(), sent()
            try:
                if begin < len(batch):
                    in_parts(batch[begin:] if begin else batch, try_to_send, refuse, lambda: sent() - accepted)  # noqa: B023
                else:  # all of it was sent: a broker that did not confirm it in time may not have it
                    self.publisher.flush()  # type: ignore[attr-defined]
                return
            except TimeoutError as error:
                if self._keep_trying is None:
                    raise
                self._refusals.log(
                    logging.WARNING, "%d messages wait for their sink, which is tried again: %s", len(batch), error
                )
                if not self._keep_trying(pause):
                    raise ClosedError(f"{len(batch)} messages were not carried: {error}") from error
                pause = min(2 * pause, RETRY_S[1])

    def _accepted(self) -> int:
        """How many messages the sink has taken, by its own count, since ``send`` gives no number when it fails. What
        it has dropped for an error, or refused, it did not take.
        """
        ledger = self.publisher.ledger
        return ledger.matched - ledger.dropped.get("error", 0) - ledger.dropped.get("refused", 0)
