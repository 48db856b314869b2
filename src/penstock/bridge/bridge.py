"""Bridge: one thread that reads a source in batches and publishes them at a sink.

Rules:

- What the sink can say of a message it says: over TCP ordinals, times, virtual channels and properties are those of
  the source, so that whoever reads behind the bridge counts what was lost before it (``gap``) apart from what was lost
  on the link (``overflow``). A sink that numbers its own messages (shared memory, a journal) does so.
- ``run`` works in the caller's thread until ``close`` is called (by any thread), the source ends or ``count`` messages
  have passed; ``start`` does it in a thread of its own.
- A shared-memory channel that was opened with ``local=True`` is not carried to where other machines may read.
- Latency is shown with both clocks: what the difference of the two reads, and what it is when the other clock's offset,
  as the handshake showed it (to within its own travel time), is taken out.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock import address as addresses
from penstock.channel import Ledger, Publisher, Subscriber
from penstock.errors import ClosedError, RefusedError

CARRIED = ("ordinal", "timestamp_ns", "vchan_id", "properties")
LEAVING = ("tcp", "broker")  # reaches whose readers may be on another machine
POLL_S = 0.2  # how soon a close by another thread is noticed at the latest


@dataclass(frozen=True, slots=True)
class Latency:
    """Of the last message: this machine's clock minus the publisher's, and the same by one clock."""

    apparent_ns: int
    clock_offset_ns: int | None

    @property
    def corrected_ns(self) -> int | None:
        """With the publisher's clock set right; None where its offset is not known."""
        return None if self.clock_offset_ns is None else self.apparent_ns + self.clock_offset_ns


class Bridge:
    """``Bridge("shm:/camera", "tcp://0.0.0.0:1588")`` and, elsewhere, ``Bridge("tcp://robot:1588", "shm:/camera")``."""

    def __init__(
        self,
        source: str,
        sink: str,
        *,
        vchans: Mapping[int, int | str] | None = None,
        source_options: Mapping[str, Any] | None = None,
        sink_options: Mapping[str, Any] | None = None,
        most: int = 1024,
    ) -> None:
        from penstock import _core

        self.source, self.sink = source, sink
        self._vchans = dict(vchans or {})
        self._most = most
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._latency: Latency | None = None
        with contextlib.ExitStack() as opened:
            self.publisher: Publisher = opened.enter_context(addresses.publisher(sink, **dict(sink_options or {})))
            self._others: dict[str, Publisher] = {}
            for target in self._vchans.values():
                if isinstance(target, str) and target not in self._others:
                    self._others[target] = opened.enter_context(addresses.publisher(target))
            self.subscriber: Subscriber = opened.enter_context(
                addresses.subscriber(source, **dict(source_options or {}))
            )
            self._leaves_machine = any(addresses.parse(to).scheme in LEAVING for to in (sink, *self._others))
            self._refuse_local()
            self._stack = opened.pop_all()
        self._counters = _core.Counters("bridge", "bridge", f"{source} -> {sink}")
        self._carries = _carried(self.publisher)

    # -- working

    def run(self, count: int | None = None) -> int:
        """Carry messages until closed, or so many; gives how many were carried."""
        carried = 0
        while not self._closing.is_set() and (count is None or carried < count):
            most = self._most if count is None else min(self._most, count - carried)
            try:
                batch = self.subscriber.read_many(most, POLL_S)
            except ClosedError:
                break
            if not len(batch):
                continue
            if not carried:  # a channel that had no publisher when this began has said it now
                self._refuse_local()
            self._note(batch)
            try:
                carried += self._carry(batch)
            except ClosedError:
                if not self._closing.is_set():
                    raise
            del batch  # before the next read: a source may lend a bounded number of messages
        return carried

    def start(self) -> Bridge:
        """``run`` in a thread of its own."""
        if self._thread is None:
            self._thread = threading.Thread(target=self.run, name="penstock-bridge", daemon=True)
            self._thread.start()
        return self

    def _refuse_local(self) -> None:
        if self._leaves_machine and getattr(self.subscriber, "local", False):
            raise RefusedError(f"{self.source} was opened with local=True: it is not carried to {self.sink}")

    def _carry(self, batch: Any) -> int:
        before = self._counters.get("delivered")
        self._counters.add("matched", len(batch))
        forward = getattr(self.publisher, "forward", None)
        try:
            if not self._vchans and forward is not None and not isinstance(batch, list):
                self._counters.add("delivered", forward(batch))
            elif not self._vchans and not self._carries:
                self._counters.add("delivered", self.publisher.publish_many(batch))
            else:
                for message in batch:
                    self._carry_one(message)
        except TimeoutError:  # the sink stayed full for the time its options allow
            gone = self._counters.get("delivered") - before
            self._counters.drop("overflow", len(batch) - gone)
        return len(batch)

    def _carry_one(self, message: Any) -> None:
        target = self._vchans.get(message.vchan_id) if message.vchan_id is not None else None
        if isinstance(target, str):
            self._others[target].publish(message)
        else:
            known = {name: getattr(message, name) for name in self._carries}
            if "properties" in known:
                known["properties"] = dict(known["properties"])
            if target is not None and "vchan_id" in known:
                known["vchan_id"] = target
            self.publisher.publish(message, **known)
        self._counters.add("delivered", 1)

    def _note(self, batch: Any) -> None:
        last = batch[len(batch) - 1]
        session = last.source
        offset = getattr(session, "clock_offset_ns", None)
        if last.timestamp_ns:
            self._latency = Latency(time.time_ns() - last.timestamp_ns, offset)
            self._counters.set("latency_ns", max(0, self._latency.corrected_ns or self._latency.apparent_ns))

    # -- looking

    @property
    def latency(self) -> Latency | None:
        """Of the last message that was carried."""
        return self._latency

    @property
    def ledger(self) -> Ledger:
        """What this bridge did; what was lost before it stands in ``subscriber.ledger``."""
        counts = self._counters.snapshot()
        dropped = {name: n for name, n in counts["dropped"].items() if n}
        in_flight = counts["matched"] - counts["delivered"] - sum(dropped.values())
        return Ledger(counts["matched"], counts["delivered"], dropped, 0, in_flight)

    # -- the end

    def close(self) -> None:
        """Stop, and close both ends; what was taken from the source has been published."""
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._stack.close()
        self._counters.close()

    def __enter__(self) -> Bridge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Bridge {self.source} > {self.sink}>"


def _carried(publisher: Publisher) -> tuple[str, ...]:
    """What this sink's ``publish`` takes besides the bytes."""
    try:
        takes = inspect.signature(type(publisher).publish).parameters
    except ValueError:  # a native method that does not say
        return ()
    return tuple(name for name in CARRIED if name in takes)
