"""Durable channels: ``penstock.publisher("tcp://...", durable="DIRECTORY")``, at ``bus:``, ``shm:`` and ``tcp://``.

Rules:

- A message goes to disk first, then to the live publisher: every message that a subscriber has read is on disk. One
  thread commits messages in groups, another passes them to the live publisher. ``publish`` waits for neither; with
  ``durable_wait=True`` it waits for the disk.
- One directory holds one channel. So a message's ordinal is its position in the journal, and the next publisher
  continues the numbers.
- A subscriber with ``start=`` reads the journal only, old messages and new ones: there is no switch from one source to
  another at which messages could be lost or duplicated. A slow one lags on disk and slows nobody down. Over tcp the
  publisher reads the journal for it.
- ``publish`` may be called by any thread.
"""

from __future__ import annotations

import atexit
import datetime
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import address as addresses
from penstock._core import journal as native
from penstock.channel import Ledger, Publisher, Terms, check_timeout
from penstock.errors import ClosedError, InvalidArgument, RefusedError
from penstock.history import Opened, check_start, kept_of, start_ns
from penstock.journal import presence
from penstock.journal.follow import Follower
from penstock.journal.journal import SEGMENT_BYTES, Journal
from penstock.journal.layout import FRONTIER_NAME, TIME_NOW, encode_properties
from penstock.printable import printable

if TYPE_CHECKING:
    from penstock._core import Batch, Draft, Message
    from penstock.address import Address
    from penstock.channel import Buffer

REACHES = ("bus", "shm", "tcp")
STAGED_BYTES = 16 << 20  # a publisher that is faster than the disk commits itself beyond this, which slows it down
BATCH = 4096
CLOSE_S = 5.0
LOOK_S = 0.05
PASS_ON_S = 1.0  # how long a publisher waits for a live flow that stands still
KEEP_UP_S, KEEP_UP_LOOK_S = 0.02, 0.0002  # how long a batch waits for slow readers of shm, and how often it looks
MAX_NS = (1 << 63) - 1

logger = logging.getLogger("penstock.durable")


def open_publisher(
    address: Address,
    live_options: Mapping[str, Any],
    *,
    durable: str | os.PathLike[str] | None = None,
    durable_wait: bool = False,
    retain_bytes: int | str | None = None,
    retain_age_s: float | str | None = None,
    segment_bytes: int | str = SEGMENT_BYTES,
) -> DurablePublisher:
    """A publisher that stores its messages in the journal ``durable`` before it sends them."""
    if address.scheme not in REACHES:
        raise InvalidArgument(f"durable= is for {', '.join(REACHES)}: what is published at {address.text!r} is kept")
    if durable is None or not os.fspath(durable):
        raise InvalidArgument(
            f"publisher of {address.text!r}: give durable=DIRECTORY, where the messages are kept; durable_wait=, "
            "retain_bytes=, retain_age_s= and segment_bytes= go with it"
        )
    if not isinstance(durable_wait, bool):
        raise InvalidArgument(f"durable_wait={durable_wait!r} must be True or False")
    journal = Journal(durable, retain_bytes=retain_bytes, retain_age_s=retain_age_s, segment_bytes=segment_bytes)
    try:
        return DurablePublisher(address, journal, live_options, durable_wait)
    except BaseException:
        journal.close()
        raise


def open_subscriber(
    address: Address,
    live_options: Mapping[str, Any],
    *,
    start: int | str | datetime.datetime = "new",
    durable: str | None = None,
    on_message: Callable[..., Any] | None = None,
) -> Follower:
    """A subscriber of ``bus:`` or ``shm:`` that begins at ``start`` in what its publisher keeps on disk.

    The publisher tells it the directory; without a publisher, ``durable`` names it.
    """
    text = check_start(start)
    directory = durable or _kept_at(address, live_options)
    if not (Path(directory) / FRONTIER_NAME).exists():
        raise InvalidArgument(f"there is no journal {directory}: reading makes none, a publisher with durable= does")
    journal = Journal(directory, mode="read")
    try:
        _check_topic(journal, topic_of(address))
        follower = Follower(journal, place_of(journal, text), own=True)
    except BaseException:
        journal.close()
        raise
    return follower.call_in_thread(on_message)


def place_of(journal: Journal, start: str) -> int:
    """The position that ``start`` names."""
    frontier, first = journal.frontier, journal.first
    if start in ("new", "first"):
        return frontier if start == "new" else first
    if start.isdigit():
        return int(start)
    return journal.find_time(min(max(start_ns(start), 0), MAX_NS)) or frontier


def _kept_at(address: Address, live_options: Mapping[str, Any]) -> str:
    """Where the publisher of ``address`` keeps its messages."""
    if address.scheme == "bus":
        bus = addresses.room("bus").named_bus(address.name)
        directory = bus.durable.get(live_options.get("id", 0), "")
    else:
        with addresses.room("shm").Subscriber(address.name, history=False) as looking:
            directory = looking._durable("")
    if not directory:
        raise RefusedError(
            f"nobody says where {address.text} is kept: its publisher is not there, or has no durable=; give "
            "durable=DIRECTORY to read what a publisher left"
        )
    return str(directory)


def _check_topic(journal: Journal, topic: str) -> None:
    others = set(journal.topics) - {topic}
    if others:
        directory = printable(str(journal.directory))
        raise RefusedError(f"{directory} keeps {min(others)!r}, not {topic!r}: one directory keeps one channel")


def topic_of(address: Address) -> str:
    """What the channel is called in its journal."""
    name = address.name.strip("/").replace("/", ".") if address.scheme != "tcp" else ""
    parts = [re.sub(r"[^A-Za-z0-9_-]", "_", part) for part in name.split(".")]
    return ".".join(part for part in parts if part) or "default"


class Past:
    """What a tcp publisher reads for a subscriber that asks for the past."""

    def __init__(self, journal: Journal, topic: str) -> None:
        self._journal = journal
        self._topic = topic
        self.identity = journal.uuid.bytes

    def open(self, start: str, identity: bytes, last: int) -> Opened:
        """From ``start`` on, or after ``last`` where that came from this journal."""
        frontier = self._journal.frontier
        same = identity == self.identity and last
        place = last + 1 if same else place_of(self._journal, check_start(start))
        source = Follower(self._journal, place)
        try:
            source.wait(0)  # raises where it is damaged: the peer is told, instead of coming again and again
        except BaseException:
            source.close()
            raise
        return Opened(source, place, frontier)


_open: weakref.WeakSet[DurablePublisher] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Write what was published to disk before the program ends."""
    for publisher in list(_open):
        publisher.close()


class DurablePublisher(Publisher):
    """One writing handle over a journal and a live publisher. Unknown attributes are those of the live publisher."""

    carries_properties = True

    def __init__(self, address: Address, journal: Journal, live_options: Mapping[str, Any], wait: bool) -> None:
        self.journal = journal
        self.scheme = address.scheme
        self.topic = topic_of(address)
        _check_topic(journal, self.topic)
        self._topic_id = journal.topic_id(self.topic)
        self._writer = journal.writer
        self._wait = wait
        # What is committed together lies in one segment, and retention removes whole segments: several fit into one.
        self._most_staged = min(STAGED_BYTES, journal.segment_bytes // 4)
        self._closed = False
        self._lock = threading.Lock()
        self._staged, self._committed = threading.Event(), threading.Event()
        self._awake = False
        self._ending = False
        self._failure: BaseException | None = None
        self._committing = threading.Lock()  # held by one commit, until its failure is noted
        self._passing_on = threading.Condition()  # guards the two below
        self._passed_on = 0  # the live flow has everything up to this position
        self._held_up = False  # one has waited in vain; nobody waits until everything was passed on
        self._outrun = False  # a reader of shm does not keep up
        self._before = self._writer.next_position - 1  # published by others
        self.inner, self._position = _open_live(address, journal, self.topic, dict(live_options))
        self._passed_on = self._position - 1
        self._threads = [
            threading.Thread(target=function, name=f"penstock-durable-{word}", daemon=True)
            for word, function in (("commit", self._commit_on), ("forward", self._forward_on))
        ]
        for thread in self._threads:
            thread.start()
        _open.add(self)

    # --- publishing

    def publish(
        self,
        data: Buffer,
        *,
        properties: Mapping[str, str] | None = None,
        timestamp_ns: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Store a copy of ``data``, which then goes to the live publisher; returns its ordinal.

        ``timeout`` is checked and ends nothing: who publishes waits for the disk at most, never for a subscriber.
        """
        if self._closed or self._failure is not None:
            self._check_usable()
        if timeout is not None:
            check_timeout(timeout)
        if self._wait:
            ordinal = self.journal.append(self.topic, data, properties=properties, timestamp_ns=timestamp_ns)
            self._committed.set()
            self._await_passed_on(ordinal)
        elif properties is None and timestamp_ns is None:
            ordinal = self._writer.stage(self._topic_id, data)
            self._wake()
        else:
            time_ns = TIME_NOW if timestamp_ns is None else timestamp_ns
            ordinal = self._writer.stage(self._topic_id, data, encode_properties(properties), b"", b"", time_ns)
            self._wake()
        return ordinal

    def publish_many(self, batch: Iterable[Buffer], *, timeout: float | None = None) -> int:
        """Store each of them, in order; returns how many. ``timeout`` as in ``publish``."""
        self._check_usable()
        check_timeout(timeout)
        items = batch if isinstance(batch, list | tuple) else list(batch)
        if self._wait:
            self.journal.append_many(self.topic, items)
            self._committed.set()
            self._await_passed_on(self._writer.committed_position - 1)
        elif items:
            self._writer.stage_buffers(self._topic_id, items)
            self._wake()
        return len(items)

    def reserve(self, size: int) -> Draft:
        """A writable buffer of ``size`` bytes; leaving its ``with`` block publishes it."""
        self._check_usable()
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"size must be an int, not {type(size).__name__}")
        if not 0 <= size <= self.journal.max_message_bytes:
            raise InvalidArgument(f"size={size} must be 0 to max_message_bytes={self.journal.max_message_bytes}")
        return native.reserve(size, self.publish, self)

    def flush(self) -> None:
        """Wait until everything published so far is on disk, and has been passed to the live publisher: who joins
        afterwards finds it in its history. A live flow that stands still is waited for a second at most."""
        self._check_usable()
        self._commit()
        self._check_usable()  # another thread's commit may have failed
        self._await_passed_on(self._writer.committed_position - 1)

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            self._staged.set()
        if self._writer.staged_bytes > self._most_staged:
            self._commit()

    def _publish_now(self, data: Any, options: Mapping[str, Any]) -> int:
        if self._wait:
            raise BlockingIOError
        return self.publish(data, **options)

    # --- from memory to the disk, from the disk to the live flow

    def _commit(self, note: bool = False) -> None:
        """``note``: a failure is told by the next call instead of being raised."""
        with self._committing:
            try:
                self.journal.commit_staged()
            except ClosedError:
                raise
            except Exception as error:
                if not note:
                    raise
                self._failure = error
                logger.error("%r: what was published last is not on disk: %s", self, error)
            finally:
                self._committed.set()

    def _await_passed_on(self, position: int) -> None:
        with self._passing_on:
            if self._passed_on >= position or self._held_up:
                return
            came = self._passing_on.wait_for(lambda: self._passed_on >= position or self._ending, PASS_ON_S)
            self._held_up = not came

    def _commit_on(self) -> None:
        while True:
            self._staged.wait()
            self._staged.clear()
            # read before the commit: if it is set, everything is staged by now and this commit is the last
            ending = self._ending
            self._awake = False  # cleared before the commit, so that whatever is staged later wakes this thread again
            try:
                self._commit(note=True)
            except ClosedError:
                return
            if ending:
                return

    def _forward_on(self) -> None:
        while True:
            ending = self._ending and not self._threads[0].is_alive()
            self._committed.clear()
            try:
                self._forward()
            except ClosedError:
                return
            except Exception as error:  # only live subscribers miss it: it is in the journal
                logger.error("%r: messages did not reach the live flow: %s", self, error)
            if ending:
                return
            self._committed.wait(LOOK_S if self._ending else None)

    def _forward(self) -> None:
        while True:
            batch, self._position = self.journal.read_from(self._position, BATCH)
            if not len(batch):
                self._note_passed_on(self._position - 1, everything=True)
                return
            for part in self._portions(batch):
                self.inner.forward(part)
            self._note_passed_on(self._position - 1)

    def _note_passed_on(self, position: int, everything: bool = False) -> None:
        with self._passing_on:
            self._passed_on = position
            self._held_up = self._held_up and not everything
            self._passing_on.notify_all()

    def _portions(self, batch: Batch) -> Iterator[Batch | Sequence[Message]]:
        """The batch as the live flow takes it.

        What was committed together would come to an ``shm`` channel as one burst of more messages than it has slots,
        and a reader that keeps up with the publisher would lose most of them. So they come in portions, each when the
        slowest reader has room for it; all of them wait ``KEEP_UP_S`` at most, for nobody holds the live flow up.
        """
        if self.scheme != "shm":
            yield batch
            return
        slots = self.inner.slots
        most = max(1, slots // 4)
        room = max(slots - most, most)
        deadline = time.monotonic() + KEEP_UP_S
        for begin in range(0, len(batch), most):
            part = batch[begin : begin + most]
            while (late := self.inner.unread + len(part) > room) and not self._outrun and not self._ending:
                if time.monotonic() >= deadline:
                    self._outrun = True  # once: a reader that stands still is not waited for with every message
                    break
                time.sleep(KEEP_UP_LOOK_S)
            self._outrun = self._outrun and late
            yield part

    # --- the contract

    def wait_ready(self, subscribers: int = 1, timeout: float | None = None) -> bool:
        """Wait for this many subscribers, live ones and readers of the journal together."""
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._check_usable()
            followers = 0 if self.scheme == "tcp" else presence.count(self.journal.directory)
            left = LOOK_S if deadline is None else min(LOOK_S, max(0.0, deadline - time.monotonic()))
            if followers >= subscribers or self.inner.wait_ready(subscribers - followers, left):
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def agree(self, terms: Terms) -> None:
        self.inner.agree(terms)
        self.journal.agree(self.topic, terms)

    @property
    def schema(self) -> str | None:
        return self.journal.schemas.newest(self.topic)[1] or None

    @property
    def ledger(self) -> Ledger:
        """What this publisher has published, and what of it is on disk."""
        published = self._writer.next_position - 1 - self._before
        stored = self._writer.committed_position - 1 - self._before
        return Ledger(matched=published, delivered=min(stored, published), in_flight=max(0, published - stored))

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("this publisher was closed")
        if self._failure is not None:
            error, self._failure = self._failure, None
            raise error

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Write what was published to disk, and pass it to live subscribers as far as they accept it."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._ending = True
        self._staged.set()
        self._threads[0].join()
        self._committed.set()
        self._threads[1].join(CLOSE_S)
        slow = self._threads[1].is_alive()
        self.inner.close()
        self._threads[1].join()
        if slow:
            logger.warning(
                "%r: live subscribers were too slow: some messages from ordinal %d on did not reach them and are on "
                "disk (start= reads them)",
                self,
                self._passed_on + 1,
            )
        self.journal.close()

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while it is being made
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"<durable.Publisher {self.journal.directory}{', closed' if self._closed else ''}>"


def _open_live(address: Address, journal: Journal, topic: str, options: dict[str, Any]) -> tuple[Any, int]:
    """The live publisher, and the position from which on it is given messages.

    The messages that it keeps for late joiners come from the journal, also those of earlier publishers.
    """
    next_position = journal.frontier
    kept = kept_of(options.get("history"), bool(options.get("latest")), options.get("history_bytes"))
    first = max(journal.first, next_position - kept.messages)
    if kept.age_ns:
        first = max(first, journal.find_time(time.time_ns() - kept.age_ns) or next_position)
    room = addresses.room(address.scheme)
    if options.get("mux") is not None:
        raise InvalidArgument(f"{address.text}: a virtual channel cannot be durable; bridge it to a journal")
    if address.scheme == "tcp":
        return room.open_publisher(address, past=Past(journal, topic), **options), first
    directory = str(journal.directory.resolve())
    if address.scheme == "bus":
        live = room.open_publisher(address, **options)
        try:
            live.bus.claim(live)
        except RefusedError:
            live.close()
            raise
        if live.bus.durable.get(live.id) == directory and live.wait_ready(1, 0):
            first = journal.first  # its subscribers continue with what the last publisher had not passed on
        live.bus.durable[live.id] = directory
        last = live.bus._go_on(live.id, first - 1)
        return live, min(last + 1, next_position)
    if options.get("max_publishers") not in (None, 1):
        raise InvalidArgument(f"{address.text}: a durable channel has one publisher, so that ordinals are positions")
    live = room.Publisher(address.name, before=first - 1, **{**options, "max_publishers": 1})
    live._durable(directory)
    last = live.last_ordinal  # the channel outlived its last publisher: continue with what that one had not passed on
    return live, min(last + 1, next_position)
