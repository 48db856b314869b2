"""Bridge: one thread that reads a source in batches and publishes them at a sink.

Rules:

- A message keeps the fields that the sink can hold (``penstock.carry``); ``not_held`` names the others before the first
  message. A new shared-memory channel takes its type, slot size and metadata size from the source's channel. Over TCP,
  ordinals, times, virtual channels and properties are the source's, so that a subscriber behind one or several bridges
  can count what was lost before the last link (``gap``) apart from what was lost on it (``overflow``). Shared memory
  and journals number messages themselves; what was lost before them is in this bridge's ``subscriber.ledger``.
- Retirement is not carried: the bridge releases a message once it was published at the sink. Holding it until readers
  of the sink have released theirs would take slots of the source, and a stuck reader there would cost messages here. A
  bridge says so before it carries the first message of a publisher that asked for retirement.
- The fields of a shared-memory source are known once it has a publisher: a sink in shared memory is opened then. Using
  ``publisher`` earlier opens it with what is known.
- ``run`` works in the caller's thread until ``close`` is called (by any thread), the source ends or ``count`` messages
  have passed; ``start`` does so in a thread of its own. An error that ends that thread is logged, kept in ``failure``
  and raised by ``wait``.
- A shared-memory channel that was opened with ``local=True`` is not carried to where other machines may read.
- Latency is given twice: as the difference of the two clocks, and corrected by the other clock's offset, which the
  handshake measured (to within its own travel time).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from penstock import address as addresses
from penstock.bridge.carrier import Carrier
from penstock.bridge.multiplexer import Multiplexer
from penstock.bridge.vchans import read_map
from penstock.carry import not_held
from penstock.channel import IdAndKey, Ledger, Publisher, Subscriber
from penstock.errors import ClosedError, InvalidArgument, PenstockError, RefusedError, UnreachedError
from penstock.shm.vchans import read_vchans
from penstock.topics import is_pattern
from penstock.types import Schema, Terms

RETIREMENT = "retirement"
LEAVING = ("tcp", "broker", "nats")  # reaches whose readers may be on another machine
AT_HAND = ("bus", "shm", "tcp", "journal")  # reaches that know a schema without asking a server
KEEPING = ("journal", "broker")  # reaches whose messages stay until they were carried
JETSTREAM = {"stream", "durable"}  # options of a reader of nats: that reads a stream
CLOSE_S = 5.0  # how long `close` waits for a sink that is full
POLL_S = 0.2  # a close by another thread is noticed within this time

logger = logging.getLogger("penstock.bridge")


@dataclass(frozen=True, slots=True)
class Latency:
    """The latency of the last message: this machine's clock minus the publisher's time stamp, raw and corrected."""

    apparent_ns: int
    clock_offset_ns: int | None

    @property
    def corrected_ns(self) -> int | None:
        """Corrected by the offset of the publisher's clock; None if the offset is not known."""
        return None if self.clock_offset_ns is None else self.apparent_ns + self.clock_offset_ns


class Bridge:
    """``Bridge("shm:/camera", "tcp://0.0.0.0:1588?token=SECRET")`` and, elsewhere,
    ``Bridge("tcp://robot:1588?token=SECRET", "shm:/camera")``."""

    def __init__(
        self,
        source: str,
        sink: str,
        *,
        vchans: Mapping[int, int | str] | str | os.PathLike[str] | None = None,
        names: Mapping[int, str] | str | os.PathLike[str] | None = None,
        source_options: Mapping[str, Any] | None = None,
        sink_options: Mapping[str, Any] | None = None,
        most: int = 1024,
    ) -> None:
        """``vchans`` maps virtual channels; ``names`` makes the sink a multiplexer with a channel for each of them.
        Each may be the path of the file that has it."""
        from penstock import _core

        if isinstance(vchans, str | os.PathLike):
            vchans = read_map(vchans)
        if isinstance(names, str | os.PathLike):
            names = read_vchans(names)
        self.source, self.sink = addresses.without_secrets(source), addresses.without_secrets(sink)
        self._most = most
        self._closing = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._ran = False
        self._all_carried = True  # False while a batch is carried, and after it could not be
        self._failure: BaseException | None = None
        self._latency: Latency | None = None
        self._final_ledger: Ledger | None = None
        self._open_lock = threading.RLock()
        self._publisher: Publisher | None = None
        self._vchans = dict(vchans or {})
        self._addresses = (source, sink)
        self._source_options = dict(source_options or {})
        self._open_options = (names, dict(sink_options or {}))
        self._topics = _topics_of(addresses.parse(source))
        for target in (sink, *(vchans or {}).values()):
            if isinstance(target, str):
                _refuse_loop(source, target, self._topics)
        found = _find_source(source)
        self._waits_for_channel = found is None and addresses.parse(source).scheme == "shm"
        self._lost: dict[str, list[str]] = {}  # by sink: that of the bridge, those of its map
        self._announced: str | None = None  # the schema
        self._typed = False  # a type was seen, and what becomes of it was told
        self._details_told = False  # messages with ids or keys were seen, which the sink cannot hold
        ring = _bridges_back(source, sink)
        if ring:
            logger.warning("%r forms a loop with %s: messages will circulate for ever", self, ", ".join(ring))
        with contextlib.ExitStack() as opened:
            self._counters = _core.Counters("bridge", "bridge", f"{self.source} -> {self.sink}")
            opened.callback(self._close_counters)  # runs last: messages that the sink drops on closing still count
            opened.callback(self._close_publisher)
            others: dict[str, Publisher] = {}
            self.others: Mapping[str, Publisher] = others
            if not (self._waits_for_channel and addresses.parse(sink).scheme == "shm"):
                self._open_publisher(found)
            if addresses.parse(sink).port == 0:  # the system chose a port: show the real address
                self.sink = getattr(self.publisher, "address", self.sink)
            for target in (vchans or {}).values():
                if isinstance(target, str) and target not in others:
                    inherited = _inherited_options(found, target)
                    others[target] = opened.enter_context(addresses.publisher(target, **inherited))
            self.subscriber: Subscriber = opened.enter_context(
                addresses.subscriber(source, **dict(source_options or {}))
            )
            self._find_details: Callable[[Any], IdAndKey] | None = (
                getattr(self.subscriber, "details", None) if addresses.parse(source).scheme == "journal" else None
            )
            self._lost = self._losses_at(found)
            self._announce_early()
            self._leaves_machine = any(addresses.parse(to).scheme in LEAVING for to in (sink, *others))
            self._refuse_local(found)
            self._stack = opened.pop_all()

    # -- the sink

    @property
    def publisher(self) -> Publisher:
        """The handle at the sink."""
        with self._open_lock:
            return self._publisher or self._open_publisher(_find_source(self._addresses[0]))

    def _open_publisher(self, found: Any) -> Publisher:
        names, options = self._open_options
        sink = self._addresses[1]
        self._publisher = _open_sink(sink, names, {**_inherited_options(found, sink, options), **options})
        return self._publisher

    def _close_publisher(self) -> None:
        with self._open_lock:
            if self._publisher is not None:
                self._publisher.close()

    def _open_sink_when_known(self) -> None:
        """Once the source has its first publisher and the fields of its messages are known: open the sink."""
        found = _find_source(self._addresses[0])
        if found is None:
            return
        self._waits_for_channel = False
        with self._open_lock:
            if self._publisher is None and not self._closing.is_set():
                self._open_publisher(found)
        self._log_losses(self._losses_at(found))
        self._announce_early()

    # -- what is lost

    @property
    def not_held(self) -> list[str]:
        """The fields of the source's messages that a sink cannot hold; known before the first message is carried.

        ``retirement`` is among them once the source has a publisher that asked for it.
        """
        return list(dict.fromkeys(name for lost in self._lost.values() for name in lost))

    @property
    def losses(self) -> list[str]:
        """What ``not_held`` means, in sentences."""
        return self._in_words(self._lost)

    def _losses_at(self, found: Any) -> dict[str, list[str]]:
        """The fields that each sink loses. A type that a schema describes is announced at the bridge's own, whose one
        topic all messages get."""
        source, sink = self._addresses
        lost = _fields_not_held(source, sink, found) + [RETIREMENT] * self._has_retirement()
        if "virtual channel" in lost and self._open_options[0] is not None:
            lost.remove("virtual channel")  # the sink is a multiplexer
        lost += ["topic"] * _several(self._topics)
        here = [name for name in lost if name != "type" or not self.subscriber.schema]
        mapped = {addresses.without_secrets(to): _fields_not_held(source, to, found) for to in self.others}
        named = {to: [name for name in names if name != "virtual channel"] for to, names in mapped.items()}
        return {**named, self.sink: here}

    def _has_retirement(self) -> bool:
        with contextlib.suppress(ClosedError):  # by another thread
            return bool(getattr(self.subscriber, "retirement", False))
        return False

    def _look_for_retirement(self) -> None:
        """A publisher that asks for retirement may join at any time: told once, before its first message is carried."""
        if RETIREMENT not in self.not_held and self._has_retirement():
            self._log_losses({self.sink: [RETIREMENT]})

    def _look_for_type(self) -> bool:
        """Whether messages have a type since now: it may come later too, with a publisher of a virtual channel or of a
        channel that had none. What becomes of it is told before the first such message is carried."""
        if self._typed or not self._has_type():
            return False
        found = _find_source(self._addresses[0])
        if found is not None:
            self._typed = True
            self._log_losses(self._losses_at(found))
        return self._typed

    def _has_type(self) -> bool:
        with contextlib.suppress(ClosedError):  # by another thread
            return bool(getattr(self.subscriber, "_typed", False))
        return False

    def _details(self) -> Callable[[Any], IdAndKey] | None:
        """How the id and the key of a message are found, if the sink can hold them."""
        return self._find_details if self._find_details is not None and self._holds_details() else None

    def _holds_details(self) -> bool:
        given = {*addresses.parse(self._addresses[1]).options, *self._open_options[1]}
        return self.publisher.carries_details and "ttl_s" not in given  # a broker refuses both together

    def _look_for_details(self, batch: Any) -> None:
        """Messages with ids or keys may come at any time: what becomes of these is told once, before the first one is
        carried."""
        find = self._find_details
        if find is None or self._details_told or self._holds_details():
            return
        if any(one.message_id or one.key for one in map(find, batch)):
            self._details_told = True
            self._log_losses({self.sink: ["id", "key"]})

    def _log_losses(self, lost: dict[str, list[str]]) -> None:
        """Log those that were not known before."""
        known = self._lost
        new = {place: [name for name in names if name not in known.get(place, ())] for place, names in lost.items()}
        self._lost = {**known, **{place: [*known.get(place, ()), *names] for place, names in new.items()}}
        for said in self._in_words(new):
            logger.warning("%r: %s", self, said)

    def _refuses_metadata(self, place: str) -> bool:
        """Whether messages with more metadata than it holds do not pass: a channel in shared memory without a log."""
        parts = addresses.parse(place)
        return parts.scheme == "shm" and "durable" not in {
            *parts.options, *(self._open_options[1] if place == self.sink else ())
        }  # fmt: skip

    def _in_words(self, lost: dict[str, list[str]]) -> list[str]:
        said = []
        for place, names in lost.items():
            refused = "metadata" in names and self._refuses_metadata(place)
            ending = [name for name in names if name != RETIREMENT and not (name == "metadata" and refused)]
            if ending:
                said.append(f"{place} cannot hold {' and '.join(ending)} of messages: they end here")
            if refused:
                said.append(f"{place} has less room for metadata than messages bring: they are refused and counted")
        if RETIREMENT in lost.get(self.sink, ()):
            said.append(
                f"retirement is not carried: publishers of {self.source} are told when this bridge has released a "
                f"message, not when readers of {self.sink} have"
            )
        return said

    # -- working

    def run(self, count: int | None = None) -> int:
        """Carry messages until closed, or ``count`` of them; returns how many were taken from the source."""
        self._ran = True
        carried = 0
        carrier: Carrier | None = None
        while not self._closing.is_set() and (count is None or carried < count):
            most = self._most if count is None else min(self._most, count - carried)
            try:
                batch = self.subscriber.read_many(most, POLL_S)
            except UnreachedError as error:
                logger.warning("%r: %s; trying again", self, error)
                continue
            except ClosedError:
                break
            if self._waits_for_channel:
                self._open_sink_when_known()
            self._look_for_retirement()
            if not len(batch):
                if not carried:
                    self._announce_early()
                continue
            if not carried:  # a channel that had no publisher at first is known to be local only now
                self._refuse_local(_find_channel(self._addresses[0]))
            self._record_latency(batch)
            try:
                if self._look_for_type() or carrier is None:
                    self._announce_schema()
                if carrier is None:
                    carrier = Carrier(
                        self.publisher, self._vchans, self.others, self._counters, self._keep_trying(), self._details()
                    )
                self._look_for_details(batch)
                self._all_carried = False
                carrier.carry(batch)
                self._all_carried = True
                carried += len(batch)
            except ClosedError:
                if not self._closing.is_set():
                    raise
            del batch  # before the next read: a source may lend a bounded number of messages
        return carried

    def _keep_trying(self) -> Callable[[float], bool] | None:
        """How a sink that does not take a batch is tried again: for a source that keeps its messages until they were
        carried. Another source would drop newer messages meanwhile, uncounted here.
        """
        source = addresses.parse(self._addresses[0])
        options = {*source.options, *self._source_options}
        kept = source.scheme in KEEPING or (source.scheme == "nats" and JETSTREAM & options)
        return (lambda pause: not self._closing.wait(pause)) if kept else None

    def start(self) -> Bridge:
        """``run`` in a thread of its own."""
        if self._closing.is_set():
            raise ClosedError(f"{self!r} is closed")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_and_log, name="penstock-bridge", daemon=True)
            self._thread.start()
        return self

    def _refuse_local(self, found: Any) -> None:
        # What is kept on disk of a channel (start=) is read there: such a subscriber does not know the channel.
        local = getattr(self.subscriber, "local", False) or (found is not None and found.local)
        if self._leaves_machine and local:
            raise RefusedError(f"{self.source} was opened with local=True: it is not carried to {self.sink}")

    def _announce_schema(self) -> None:
        """Announce the schema of the source's messages at the sink; log a warning if the sink has another type."""
        parts = addresses.parse(self.source)
        if parts.scheme in ("journal", "broker") and (not parts.topic or set(parts.topic) & set("*>,")):
            return  # several topics, each with a schema of its own
        try:
            text = self.subscriber.schema
            if not text or text == self._announced:
                return
            self._announced = text
            self.publisher.agree(Terms(Schema.parse(text), writes=True))
        except ClosedError:
            return  # by another thread
        except PenstockError as error:
            known = self._lost.get(self.sink, [])
            self._lost = {**self._lost, self.sink: [*known, *["type"] * ("type" not in known)]}
            logger.warning("%r carries the messages without their type: %s", self, error)

    def _announce_early(self) -> None:
        """Before the first message, where the schema is at hand: who connects by TCP is told it on connecting only."""
        if self._publisher is not None and addresses.parse(self.source).scheme in AT_HAND:
            self._announce_schema()

    def _run_and_log(self) -> None:
        try:
            self.run()
        except BaseException as error:
            logger.error("%r ended: %s: %s", self, type(error).__name__, error)
            self._failure = error
            self._counters.add("errors", 1)  # count after logging: who sees the count finds the line in the log
        finally:
            self._ended.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the thread of ``start`` has ended: True, or raises its error; False after ``timeout`` seconds."""
        ended = self._ended.wait(timeout)
        if self._failure is not None:
            raise self._failure
        return ended

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the thread of ``start``, or None."""
        return self._failure

    def _record_latency(self, batch: Any) -> None:
        last = batch[len(batch) - 1]
        session = last.source
        offset = getattr(session, "clock_offset_ns", None)
        if last.timestamp_ns:
            self._latency = Latency(time.time_ns() - last.timestamp_ns, offset)
            self._counters.note_latency(max(1, self._latency.corrected_ns or self._latency.apparent_ns))

    # -- figures

    @property
    def latency(self) -> Latency | None:
        """The latency of the last message that was carried."""
        return self._latency

    @property
    def ledger(self) -> Ledger:
        """The counts of this bridge; what was lost before it is in ``subscriber.ledger``."""
        if self._final_ledger is not None:
            return self._final_ledger
        counts = self._counters.snapshot()
        dropped = {name: n for name, n in counts["dropped"].items() if n}
        in_flight = counts["matched"] - counts["delivered"] - sum(dropped.values())
        return Ledger(counts["matched"], counts["delivered"], dropped, 0, in_flight)

    # -- the end

    def close(self, timeout: float = CLOSE_S) -> None:
        """Stop, and close both ends after publishing what was taken from the source.

        A sink that stays full for ``timeout`` seconds is closed anyway; what it did not take is counted as ``closed``.
        """
        if not (self._ran or self._thread is not None or self._closing.is_set()):
            logger.warning("%r carried nothing: neither start() nor run() was called", self)
        self._closing.set()
        thread = self._thread if self._thread is not threading.current_thread() else None
        # Ctrl-C inside `start` may leave a thread that has not begun: it cannot be joined, and ends by `_closing`.
        if thread is not None and thread.is_alive():
            thread.join(timeout)
            if thread.is_alive():
                self._close_publisher()  # ends the thread's wait for room in the sink
                for other in self.others.values():
                    other.close()
                thread.join()
        if not self._all_carried:
            # As after an error in a `with` block: a queue gives what was not carried to its next reader.
            self.subscriber.__exit__(ClosedError, None, None)
        self._stack.close()

    def _close_counters(self) -> None:
        self._final_ledger = self.ledger
        self._counters.close()

    def __enter__(self) -> Bridge:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._closing.set()  # the error says why nothing was carried
        self.close()

    def __repr__(self) -> str:
        return f"<Bridge {self.source} > {self.sink}>"


def _refuse_loop(source: str, sink: str, topics: list[str]) -> None:
    """Refuse a bridge that would read what it publishes, and carry its own messages for ever."""
    first, second = addresses.parse(source), addresses.parse(sink)
    if first.scheme == second.scheme == "shm" and first.options.get("mux") == second.name:
        raise InvalidArgument(f"{first} is a channel of {second}: the bridge would carry its own messages for ever")
    if addresses.arrives(second, first, topics):
        said = f"takes what is published at {second}" if _several(topics) else "is both source and sink"
        raise InvalidArgument(f"{first} {said}: the bridge would carry its own messages for ever")


def _topics_of(source: addresses.Address) -> list[str]:
    """The topics and patterns of a source, where its reach has such; of a queue alone its broker knows them."""
    if source.scheme not in addresses.PATTERNS:
        return []
    if source.scheme == "broker" and not source.topic and "queue" in source.options:
        found: list[str] = importlib.import_module(f"{addresses.ROOMS['broker']}.explain").topics(source, unknown=[])
        return found
    topic = source.topic or addresses.DEFAULT_TOPIC
    return [topic] if source.scheme == "nats" else topic.split(",")


def _several(topics: list[str]) -> bool:
    """Whether messages of several topics may come."""
    return len(topics) > 1 or any(map(is_pattern, topics))


def _bridges_back(source: str, sink: str) -> list[str]:
    """The other bridges on this machine that lead from this one's sink back to its source, if there are any."""
    from penstock import _core

    bridges: dict[str, tuple[addresses.Address, addresses.Address]] = {}
    for block in _core.counters_read():
        first, arrow, second = str(block["name"]).partition(" -> ")
        if block["room"] != "bridge" or not arrow or block["name_cut"]:
            continue
        with contextlib.suppress(InvalidArgument):
            ends = addresses.parse(first), addresses.parse(second)
            bridges[f"{first} > {second} (pid {block['pid']})"] = ends
    wanted = addresses.parse(source)
    paths = [(addresses.parse(sink), list[str]())]
    while paths:
        place, path = paths.pop()
        if addresses.arrives(place, wanted):
            return path
        following = [bridge for bridge, ends in bridges.items() if addresses.arrives(place, ends[0])]
        paths.extend((bridges.pop(bridge)[1], [*path, bridge]) for bridge in following)
    return []


def _find_channel(source: str) -> Any:
    """The shared-memory channel of an address, if it has a publisher; None for anything else."""
    parts = addresses.parse(source)
    if parts.scheme != "shm":
        return None
    from penstock import shm

    wanted = parts.options.get("mux") or parts.name
    return next((channel for channel in shm.channels() if channel.name == wanted and channel.publishers), None)


def _find_source(source: str) -> Any:
    """As ``_find_channel``; of a virtual channel, which has a type of its own, once it has a publisher itself."""
    channel, parts = _find_channel(source), addresses.parse(source)
    if channel is None or "mux" not in parts.options:
        return channel
    own = {number for number, name in channel.vchans.items() if name == parts.name}
    there = any(member.vchan_id in own for member in channel.publishers)
    return dataclasses.replace(channel, type=_type_of(channel, parts)) if there else None


def _type_of(channel: Any, place: addresses.Address) -> str:
    """The name of the type of a channel, or of a virtual channel."""
    own = (channel.vchan_types.get(number, "") for number, name in channel.vchans.items() if name == place.name)
    return str(next(own, "") if "mux" in place.options else channel.type)


def _fields_not_held(source: str, sink: str, channel: Any) -> list[str]:
    parts, place, there = addresses.parse(source), addresses.parse(sink), _find_channel(sink)
    if channel is None:
        return not_held(parts.scheme, place.scheme)
    has = {"metadata": channel.metadata_size, "type": channel.type}
    if several := channel.mux and "mux" not in parts.options:
        has |= {"virtual channel": True, "type": bool(channel.vchan_types)}
    found = set(not_held(parts.scheme, place.scheme, [name for name, brought in has.items() if brought]))
    if there is not None and there.metadata_size < channel.metadata_size:
        found.add("metadata")  # messages that bring it are refused there
    if has["type"] and (several or (there is not None and _type_of(there, place) != channel.type)):
        found.add("type")
    return sorted(found)


def _inherited_options(channel: Any, sink: str, given: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """The options that a new shared-memory sink takes from the source's channel; its own address has precedence. One
    that is there takes a type if it has none."""
    parts, there = addresses.parse(sink), _find_channel(sink)
    if channel is None or parts.scheme != "shm":
        return {}
    taken = {
        "type": channel.type, "slot_size": channel.slot_size,
        "metadata_size": 0 if "durable" in {*parts.options, *given} else channel.metadata_size,  # not kept on disk
        "local": channel.local,  # or the next bridge would carry it off this machine
    }  # fmt: skip
    if there is not None:
        taken = {} if _type_of(there, parts) else {"type": channel.type}
    return {name: value for name, value in taken.items() if value and name not in parts.options}


def _open_sink(sink: str, names: Mapping[int, str] | None, options: dict[str, Any]) -> Publisher:
    return addresses.publisher(sink, **options) if names is None else Multiplexer(sink, names, **options)
