"""Bridge: one thread that reads a source in batches and publishes them at a sink.

Rules:

- What the sink can hold of a message is kept (``penstock.carry``), what it cannot is told in ``not_held`` before the
  first one; a channel of shared memory takes its type, its size of slots and of metadata from the source's. Over TCP
  ordinals, times, virtual channels and properties are those of the source, so that whoever reads behind the bridge, or
  behind several, counts what was lost before the last link (``gap``) apart from what was lost on it (``overflow``). A
  sink that numbers its own messages (shared memory, a journal) does so: what was lost before it stands in this bridge's
  ``subscriber.ledger``.
- A source of shared memory that has no publisher yet says what its messages have when one comes: a sink in shared
  memory is opened then. Who asks for ``publisher`` earlier has it opened with what is known.
- ``run`` works in the caller's thread until ``close`` is called (by any thread), the source ends or ``count`` messages
  have passed; ``start`` does it in a thread of its own. An error that ends that thread is logged, stands in ``failure``
  and is raised by ``wait``.
- A shared-memory channel that was opened with ``local=True`` is not carried to where other machines may read.
- Latency is shown with both clocks: what the difference of the two reads, and what it is when the other clock's offset,
  as the handshake showed it (to within its own travel time), is taken out.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock import address as addresses
from penstock.bridge.carrier import Carrier
from penstock.bridge.multiplexer import Multiplexer
from penstock.carry import not_held
from penstock.channel import Ledger, Publisher, Subscriber
from penstock.errors import ClosedError, InvalidArgument, RefusedError
from penstock.types import Schema, Terms

LEAVING = ("tcp", "broker")  # reaches whose readers may be on another machine
CLOSE_S = 5.0  # for a sink that is full
ASK_S = 0.2  # how often the source is asked what its messages are made of, while there are any
POLL_S = 0.2  # how soon a close by another thread is noticed at the latest

logger = logging.getLogger("penstock.bridge")


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
        self._final: Ledger | None = None
        self._opening = threading.RLock()
        self._publisher: Publisher | None = None
        self._schema: str | None = None
        self._schema_asked = 0.0
        self._vchans = dict(vchans or {})
        self._ends = (source, sink)
        self._open_options = (names, dict(sink_options or {}))
        _refuse_loop(source, sink)
        found = _channel(source)
        self._waits_for_channel = found is None and addresses.parse(source).scheme == "shm"
        #: What the sink cannot hold of what the source's messages have; told before the first one is carried.
        self.not_held = _lost_on_the_way(source, sink, found)
        ring = _ring(source, sink)
        if ring:
            logger.warning("%r closes a ring with %s: messages go round in it for ever", self, ", ".join(ring))
        with contextlib.ExitStack() as opened:
            self._counters = _core.Counters("bridge", "bridge", f"{self.source} -> {self.sink}")
            opened.callback(self._close_counters)  # last: what closing the sink ends is still counted
            opened.callback(self._close_publisher)
            others: dict[str, Publisher] = {}
            self.others: Mapping[str, Publisher] = others
            if not (self._waits_for_channel and addresses.parse(sink).scheme == "shm"):
                self._open_publisher(found)
            if addresses.parse(sink).port == 0:  # a free one was taken: this is where it is found
                self.sink = getattr(self.publisher, "address", self.sink)
            for target in (vchans or {}).values():
                if isinstance(target, str) and target not in others:
                    others[target] = opened.enter_context(addresses.publisher(target))
            self.subscriber: Subscriber = opened.enter_context(
                addresses.subscriber(source, **dict(source_options or {}))
            )
            self._leaves_machine = any(addresses.parse(to).scheme in LEAVING for to in (sink, *others))
            self._refuse_local()
            if self._publisher is not None:
                self._carry_schema()
            self._stack = opened.pop_all()

    # -- the sink

    @property
    def publisher(self) -> Publisher:
        """The handle at the sink."""
        with self._opening:
            return self._publisher or self._open_publisher(_channel(self._ends[0]))

    def _open_publisher(self, found: Any) -> Publisher:
        names, options = self._open_options
        sink = self._ends[1]
        self._publisher = _open_sink(sink, names, {**_inherited(found, sink), **options})
        return self._publisher

    def _close_publisher(self) -> None:
        with self._opening:
            if self._publisher is not None:
                self._publisher.close()

    def _look_for_channel(self) -> None:
        """Once the source has its first publisher: what its messages have is known now."""
        found = _channel(self._ends[0])
        if found is None:
            return
        self._waits_for_channel = False
        self.not_held = _lost_on_the_way(*self._ends, found)
        if self.not_held:
            logger.warning("%r: the sink cannot hold %s of messages: they end here", self, " and ".join(self.not_held))
        with self._opening:
            if self._publisher is None and not self._closing.is_set():
                self._open_publisher(found)

    def _carry_schema(self) -> None:
        """Say at the sink what the source says of its messages, and again when it says something else."""
        now = time.monotonic()
        if self._schema_asked and now - self._schema_asked < ASK_S:
            return
        self._schema_asked = now
        text = self.subscriber.schema
        if text is None or text == self._schema:
            return
        # The first must go with what is said at the sink; later ones follow the source, which let them in.
        self.publisher.agree(Terms(Schema.parse(text), writes=True, lenient=self._schema is not None))
        self._schema = text
        self.not_held = [word for word in self.not_held if word != "type"]

    # -- working

    def run(self, count: int | None = None) -> int:
        """Carry messages until closed, or so many; gives how many were taken from the source."""
        carried = 0
        carrier: Carrier | None = None
        while not self._closing.is_set() and (count is None or carried < count):
            most = self._most if count is None else min(self._most, count - carried)
            try:
                batch = self.subscriber.read_many(most, POLL_S)
            except ClosedError:
                break
            if self._waits_for_channel:
                self._look_for_channel()
            if not len(batch):
                continue
            if not carried:  # a channel that had no publisher when this began has said it now
                self._refuse_local()
            self._note(batch)
            try:
                self._carry_schema()
                if carrier is None:
                    carrier = Carrier(self.publisher, self._vchans, self.others, self._counters)
                carrier.carry(batch)
                carried += len(batch)
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
        if self._final is not None:
            return self._final
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
                self._close_publisher()  # whoever waits for it waits no longer
                for other in self.others.values():
                    other.close()
                thread.join()
        self._stack.close()

    def _close_counters(self) -> None:
        self._final = self.ledger
        self._counters.close()

    def __enter__(self) -> Bridge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Bridge {self.source} > {self.sink}>"


def _refuse_loop(source: str, sink: str) -> None:
    """A bridge from a place to itself would carry its own messages for ever."""
    first, second = (_place(addresses.parse(text)) for text in (source, sink))
    if first == second:
        raise InvalidArgument(
            f"{addresses.without_secrets(source)} is both source and sink: the bridge would carry its own messages for "
            "ever"
        )


def _ring(source: str, sink: str) -> list[str]:
    """Bridges of this machine that carry, one after the other, from this one's sink to its source."""
    from penstock import _core

    ways: dict[tuple[Any, ...], list[tuple[str, tuple[Any, ...]]]] = {}
    for block in _core.counters_read():
        first, arrow, second = str(block["name"]).partition(" -> ")
        if block["room"] != "bridge" or not arrow:
            continue
        with contextlib.suppress(InvalidArgument):  # a name that was cut short
            places = [_place(addresses.parse(text)) for text in (first, second)]
            ways.setdefault(places[0], []).append((f"{first} > {second} (pid {block['pid']})", places[1]))
    wanted = _place(addresses.parse(source))
    seen: set[tuple[Any, ...]] = set()
    paths = [(_place(addresses.parse(sink)), list[str]())]
    while paths:
        place, path = paths.pop()
        if place == wanted:
            return path
        if place in seen:
            continue
        seen.add(place)
        paths.extend((after, [*path, told]) for told, after in ways.get(place, ()))
    return []


def _place(parts: addresses.Address) -> tuple[Any, ...]:
    name = os.path.realpath(parts.name) if parts.scheme == "journal" else parts.name
    topic = parts.topic or ("default" if parts.scheme in ("journal", "broker") else "")
    port = None if parts.port == 0 else parts.port  # any free one is never the source's
    return parts.scheme, name, parts.host, port, topic, parts.options.get("mux"), parts.options.get("id", "0")


def _channel(source: str) -> Any:
    """The source as a channel of shared memory that somebody publishes to; None for anything else."""
    parts = addresses.parse(source)
    if parts.scheme != "shm":
        return None
    from penstock import shm

    wanted = parts.options.get("mux") or parts.name
    return next((channel for channel in shm.channels() if channel.name == wanted and channel.publishers), None)


def _lost_on_the_way(source: str, sink: str, channel: Any) -> list[str]:
    has = {} if channel is None else {"metadata": channel.metadata_size, "type": channel.type}
    brings = [name for name, there in has.items() if there]
    return not_held(addresses.parse(source).scheme, addresses.parse(sink).scheme, brings)


def _inherited(channel: Any, sink: str) -> dict[str, Any]:
    """What a channel that is made as the sink takes from the source; what its address says comes first."""
    parts = addresses.parse(sink)
    if channel is None or parts.scheme != "shm" or _channel(sink) is not None:
        return {}
    taken = {"type": channel.type, "slot_size": channel.slot_size, "metadata_size": channel.metadata_size}
    return {name: value for name, value in taken.items() if value and name not in parts.options}


def _open_sink(sink: str, names: Mapping[int, str] | None, options: dict[str, Any]) -> Publisher:
    return addresses.publisher(sink, **options) if names is None else Multiplexer(sink, names, **options)
