"""Bridge: one thread that reads a source in batches and publishes them at a sink.

Rules:

- What the sink can say of a message it says (``carrier``): over TCP ordinals, times, virtual channels and properties
  are those of the source, so that whoever reads behind the bridge, or behind several, counts what was lost before the
  last link (``gap``) apart from what was lost on it (``overflow``). A sink that numbers its own messages (shared
  memory, a journal) does so: what was lost before it stands in this bridge's ``subscriber.ledger``.
- ``run`` works in the caller's thread until ``close`` is called (by any thread), the source ends or ``count`` messages
  have passed; ``start`` does it in a thread of its own. An error that ends that thread is logged, stands in ``failure``
  and is raised by ``wait``.
- A shared-memory channel that was opened with ``local=True`` is not carried to where other machines may read.
- Latency is shown with both clocks: what the difference of the two reads, and what it is when the other clock's offset,
  as the handshake showed it (to within its own travel time), is taken out.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock import address as addresses
from penstock.bridge.carrier import Carrier, logger
from penstock.bridge.multiplexer import Multiplexer
from penstock.channel import Ledger, Publisher, Subscriber
from penstock.errors import ClosedError, RefusedError

LEAVING = ("tcp", "broker")  # reaches whose readers may be on another machine
CLOSE_S = 5.0  # for a sink that is full
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
    """``Bridge("shm:/camera", "tcp://0.0.0.0:1588?token=SECRET")`` and, elsewhere,
    ``Bridge("tcp://robot:1588?token=SECRET", "shm:/camera")``."""

    def __init__(
        self,
        source: str,
        sink: str,
        *,
        vchans: Mapping[int, int | str] | None = None,
        names: Mapping[int, str] | None = None,
        source_options: Mapping[str, Any] | None = None,
        sink_options: Mapping[str, Any] | None = None,
        most: int = 1024,
    ) -> None:
        """``vchans`` maps virtual channels; ``names`` makes the sink a multiplexer with a channel for each of them."""
        from penstock import _core

        self.source, self.sink = addresses.without_secrets(source), addresses.without_secrets(sink)
        self._most = most
        self._closing = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._latency: Latency | None = None
        with contextlib.ExitStack() as opened:
            self._counters = _core.Counters("bridge", "bridge", f"{self.source} -> {self.sink}")
            opened.callback(self._counters.close)  # last: what closing the sink ends is still counted
            self.publisher: Publisher = opened.enter_context(_open_sink(sink, names, dict(sink_options or {})))
            others: dict[str, Publisher] = {}
            for target in (vchans or {}).values():
                if isinstance(target, str) and target not in others:
                    others[target] = opened.enter_context(addresses.publisher(target))
            self.others: Mapping[str, Publisher] = others
            self.subscriber: Subscriber = opened.enter_context(
                addresses.subscriber(source, **dict(source_options or {}))
            )
            self._leaves_machine = any(addresses.parse(to).scheme in LEAVING for to in (sink, *others))
            self._refuse_local()
            self._stack = opened.pop_all()
        self._carrier = Carrier(self.publisher, vchans or {}, others, self._counters)

    # -- working

    def run(self, count: int | None = None) -> int:
        """Carry messages until closed, or so many; gives how many were taken from the source."""
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
                carried += self._carrier.carry(batch)
            except ClosedError:
                if not self._closing.is_set():
                    raise
            del batch  # before the next read: a source may lend a bounded number of messages
        return carried

    def start(self) -> Bridge:
        """``run`` in a thread of its own."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="penstock-bridge", daemon=True)
            self._thread.start()
        return self

    def _refuse_local(self) -> None:
        if self._leaves_machine and getattr(self.subscriber, "local", False):
            raise RefusedError(f"{self.source} was opened with local=True: it is not carried to {self.sink}")

    def _work(self) -> None:
        try:
            self.run()
        except BaseException as error:
            self._failure = error
            self._counters.add("errors", 1)
            logger.error("%r ended: %s: %s", self, type(error).__name__, error)
        finally:
            self._ended.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until what ``start`` began has ended: True, or the error that ended it; False when the time is over."""
        ended = self._ended.wait(timeout)
        if self._failure is not None:
            raise self._failure
        return ended

    @property
    def failure(self) -> BaseException | None:
        """What ended the thread of ``start``, if it was an error."""
        return self._failure

    def _note(self, batch: Any) -> None:
        last = batch[len(batch) - 1]
        session = last.source
        offset = getattr(session, "clock_offset_ns", None)
        if last.timestamp_ns:
            self._latency = Latency(time.time_ns() - last.timestamp_ns, offset)
            self._counters.note_latency(max(1, self._latency.corrected_ns or self._latency.apparent_ns))

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

    def close(self, timeout: float = CLOSE_S) -> None:
        """Stop, and close both ends; what was taken from the source has been published.

        A sink that stays full for ``timeout`` seconds is closed even so; what it did not take is counted as ``closed``.
        """
        self._closing.set()
        thread = self._thread if self._thread is not threading.current_thread() else None
        if thread is not None:
            thread.join(timeout)
            if thread.is_alive():
                self.publisher.close()  # whoever waits for it waits no longer
                for other in self.others.values():
                    other.close()
                thread.join()
        self._stack.close()

    def __enter__(self) -> Bridge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Bridge {self.source} > {self.sink}>"


def _open_sink(sink: str, names: Mapping[int, str] | None, options: dict[str, Any]) -> Publisher:
    return addresses.publisher(sink, **options) if names is None else Multiplexer(sink, names, **options)
