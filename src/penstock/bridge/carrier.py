"""Carrier: puts a batch of one reach into another, and counts what became of each message.

Rules:

- What the sink can say of a message besides its bytes, it says: ordinal, time, virtual channel, properties, as far as
  its ``publish`` takes them. A sink with ``forward`` takes a whole batch as it is.
- One message that the sink refuses (too large for it, no room for another virtual channel) is dropped and counted as
  ``refused``; the others go on. A sink that stays full for the time its options allow: what is left of the batch is
  dropped and counted as ``overflow``. Whatever else goes wrong ends the bridge, and is told by it.
- Used by one thread.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Mapping
from typing import Any

from penstock import _core
from penstock.channel import Publisher
from penstock.errors import CapacityError, ClosedError, InvalidArgument, RefusedError

CARRIED = ("ordinal", "timestamp_ns", "vchan_id", "properties")
REFUSALS = (InvalidArgument, CapacityError, RefusedError)

logger = logging.getLogger("penstock.bridge")


class Carrier:
    """One sink, the other sinks that a map of virtual channels names, and the counts."""

    def __init__(
        self,
        sink: Publisher,
        vchans: Mapping[int, int | str],
        others: Mapping[str, Publisher],
        counters: _core.Counters,
    ) -> None:
        self._sink = sink
        self._vchans = dict(vchans)
        self._others = dict(others)
        self._counters = counters
        self._takes = _taken(sink)
        self._forward = getattr(sink, "forward", None)

    def carry(self, batch: Any) -> int:
        """Publish each of them, in order; gives how many were taken from the source."""
        count = len(batch)
        self._counters.add("matched", count)
        whole = not self._vchans and (not self._takes or (self._forward is not None and not isinstance(batch, list)))
        done = self._carry_whole(batch) if whole else 0
        try:
            while done < count:  # one by one, or what a refused message left
                self._carry_one(batch[done])
                done += 1
        except TimeoutError:
            self._counters.drop("overflow", count - done)
        except ClosedError:
            self._counters.drop("closed", count - done)
            raise
        except BaseException:
            self._counters.drop("error", count - done)
            raise
        return count

    def _carry_whole(self, batch: Any) -> int:
        """All at once; gives how many are done with: all, or those up to and with the one that was refused."""
        before = self._sink.ledger.matched
        try:
            sent = self._forward(batch) if self._forward is not None and self._takes else self._sink.publish_many(batch)
        except REFUSALS as error:
            done = self._sent(before)
            self._refuse(error, batch[done])
            return done + 1
        except TimeoutError:
            self._counters.drop("overflow", len(batch) - self._sent(before))
            return len(batch)
        except BaseException as error:
            reason = "closed" if isinstance(error, ClosedError) else "error"
            self._counters.drop(reason, len(batch) - self._sent(before))
            raise
        self._counters.add("delivered", sent)
        return len(batch)

    def _sent(self, before: int) -> int:
        """How many of a batch that was interrupted the sink has published."""
        sent = self._sink.ledger.matched - before
        self._counters.add("delivered", sent)
        return sent

    def _carry_one(self, message: Any) -> None:
        target = self._vchans.get(message.vchan_id) if message.vchan_id is not None else None
        try:
            if isinstance(target, str):
                self._others[target].publish(message)
            else:
                self._sink.publish(message, **self._known(message, target))
        except REFUSALS as error:
            self._refuse(error, message)
        else:
            self._counters.add("delivered", 1)

    def _known(self, message: Any, vchan_id: int | None) -> dict[str, Any]:
        known = {name: getattr(message, name) for name in self._takes}
        if "properties" in known:
            known["properties"] = dict(known["properties"])
        if vchan_id is not None and "vchan_id" in known:
            known["vchan_id"] = vchan_id
        return known

    def _refuse(self, error: Exception, message: Any) -> None:
        self._counters.drop("refused", 1)
        self._counters.add("errors", 1)
        logger.warning("%r was not carried: %s", message, error)


def _taken(publisher: Publisher) -> tuple[str, ...]:
    """What this sink's ``publish`` takes besides the bytes."""
    takes: Mapping[str, Any] = {}
    with contextlib.suppress(ValueError):  # a native method that does not say
        takes = inspect.signature(type(publisher).publish).parameters
    return tuple(name for name in CARRIED if name in takes)
