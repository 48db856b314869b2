"""Carry: one way from what was read to where it is published, used by bridges, players, recorders and replays.

Rules:

- A batch goes whole, by ``Publisher.forward``: what the reach holds of a message besides its bytes is kept
  (``HOLDS``). What it cannot hold is told before the first message (``not_held``), never zeroed in silence.
- One message that is refused (too large, no room for another virtual channel) costs itself: it is counted as
  ``refused`` and the others go on. A sink that stays full for the time its options allow: what is left of the batch is
  counted as ``overflow``. Whatever else goes wrong is raised.
- Messages that are due together travel together (``due``).
- A ``Carry`` is used by one thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.channel import Publisher
from penstock.errors import CapacityError, ClosedError, InvalidArgument, RefusedError

if TYPE_CHECKING:
    from penstock._core import Counters

__all__ = ["HOLDS", "REFUSALS", "Carry", "due", "in_parts", "not_held", "total_bytes"]

Item = TypeVar("Item")

#: What a message keeps when it is forwarded to a reach, besides its bytes.
HOLDS: Mapping[str, frozenset[str]] = {
    "bus": frozenset(),
    "shm": frozenset({"metadata", "type"}),
    "tcp": frozenset({"ordinal", "time", "virtual channel", "properties"}),
    "journal": frozenset({"time", "properties"}),
    "broker": frozenset({"properties"}),
}
#: What a message of a reach may have that another reach could lose. Ordinals and times are given anew where they are
#: not held; that is a rule and no loss.
BRINGS: Mapping[str, frozenset[str]] = {
    "bus": frozenset(),
    "shm": frozenset(),  # its channel says what there is: metadata, a type
    "tcp": frozenset({"properties"}),
    "journal": frozenset({"properties"}),
    "broker": frozenset({"properties"}),
}
#: What a sink says to one message that it will never take.
REFUSALS: tuple[type[Exception], ...] = (InvalidArgument, CapacityError, RefusedError)
MOST = 1024
MOST_BYTES = 8 << 20

logger = logging.getLogger("penstock.carry")


def total_bytes(batch: Any) -> int:
    """The size of all of them together."""
    known = getattr(batch, "total_bytes", None)
    return known if known is not None else sum(memoryview(item).nbytes for item in batch)


def not_held(source: str, sink: str, brings: Iterable[str] = ()) -> list[str]:
    """What messages of one scheme lose on their way to another; ``brings`` is what the source is known to have."""
    return sorted((BRINGS[source] | set(brings)) - HOLDS[sink])


def in_parts(
    items: Sequence[Item],
    send: Callable[[Sequence[Item]], Any],
    refused: Callable[[Item, Exception], Any],
    sent: Callable[[], int] = lambda: 0,
    refusals: tuple[type[Exception], ...] = REFUSALS,
) -> None:
    """Send all together; where one of them is refused, those that ``sent()`` does not count yet, each on its own."""
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
    """Items in groups, each when its time has come: since the first one, divided by ``speed``; 0 waits for none.

    A group holds what is due already, ``MOST`` of them and ``MOST_BYTES`` at most.
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
                left = moment - clock()
                if left > 0:
                    sleep(left)
        group.append(item)
        held += size(item)
        if len(group) >= MOST or held >= MOST_BYTES:
            yield group
            group, held = [], 0
    if group:
        yield group


class Carry:
    """One sink and what became of each message: ``matched``, ``delivered`` and ``dropped`` of the counters."""

    def __init__(self, publisher: Publisher[Any], counters: Counters) -> None:
        self.publisher = publisher
        self._counters = counters

    def carry(self, batch: Any) -> None:
        """Publish each of them, in order."""
        self.carry_by(self.publisher.forward, batch)

    def carry_by(self, send: Callable[[Sequence[Any]], Any], batch: Any) -> None:
        """``carry`` where something else than ``forward`` publishes at the sink."""
        count = len(batch)
        self._counters.add("matched", count)
        before = self.publisher.ledger.matched
        refused = 0

        def sent() -> int:
            return self.publisher.ledger.matched - before

        def refuse(message: Any, error: Exception) -> None:
            nonlocal refused
            refused += 1
            self._counters.drop("refused", 1)
            self._counters.add("errors", 1)
            logger.warning("%r was not carried: %s", message, error)

        try:
            in_parts(batch, send, refuse, sent)
        except BaseException as error:
            reasons = (("overflow", TimeoutError), ("closed", ClosedError), ("error", BaseException))
            reason = next(name for name, kind in reasons if isinstance(error, kind))
            done = sent()
            self._counters.add("delivered", done)
            self._counters.drop(reason, count - done - refused)
            if not isinstance(error, TimeoutError):
                raise
        else:
            self._counters.add("delivered", count - refused)
        self._counters.add("bytes", total_bytes(batch))
        self._counters.set("last_ns", time.time_ns())
