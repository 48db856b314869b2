"""A publisher that keeps its messages on disk, and the channel that its directory holds."""

from __future__ import annotations

import atexit
import contextlib
import logging
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from penstock import address as addresses
from penstock._core import journal as native
from penstock.carry import time_of
from penstock.channel import Ledger, Publisher, Terms, check_timeout, telling_published
from penstock.errors import CapacityError, ClosedError, InvalidArgument, RefusedError
from penstock.history import Opened, kept_of
from penstock.journal import presence
from penstock.journal.disk import Disk, read_all
from penstock.journal.follow import Follower
from penstock.journal.journal import Journal
from penstock.journal.layout import CHANNEL_NAME, TIME_NOW, encode_properties
from penstock.journal.transaction import Entry
from penstock.printable import printable

if TYPE_CHECKING:
    from penstock._core import Batch, Draft, Message
    from penstock.address import Address
    from penstock.channel import Buffer

STAGED_BYTES = 16 << 20  # a publisher that is faster than the disk commits itself beyond this, which slows it down
BATCH = 4096
CLOSE_S = 5.0
LOOK_S = 0.05
PASS_ON_S = 1.0  # how long ``flush`` waits for a live publisher that makes no progress
KEEP_UP_S, KEEP_UP_LOOK_S = 0.02, 0.0002  # how long a batch waits for slow readers of shm, and how often it checks

logger = logging.getLogger("penstock.durable")


def check_channel(journal: Journal, address: Address, options: Mapping[str, Any]) -> str:
    """The channel, as its directory knows it; ``RefusedError`` where the directory keeps another one."""
    channel, topic = channel_of(address, options), topic_of(address)
    with contextlib.suppress(FileNotFoundError):
        kept = read_all(journal.directory / CHANNEL_NAME).decode("utf-8", "replace").strip()
        if kept != channel and journal.frontier > 1:
            raise _keeps(journal, kept, channel)
        return channel
    if others := set(journal.topics) - {topic}:  # a journal of an earlier release, which wrote no such file
        raise _keeps(journal, repr(min(others)), f"{topic!r}, the topic of {channel}")
    return channel


def _keeps(journal: Journal, kept: str, wanted: str) -> RefusedError:
    texts = [printable(text) for text in (str(journal.directory), kept, wanted)]
    return RefusedError("{} keeps {}, not {}: one directory keeps one channel".format(*texts))


def _note_channel(journal: Journal, channel: str) -> None:
    """Write into the directory which channel it keeps, before its first message."""
    path = journal.directory / CHANNEL_NAME
    with contextlib.suppress(FileNotFoundError):
        if read_all(path).decode("utf-8", "replace").strip() == channel:
            return
    disk = Disk()
    disk.write_file(path, f"{channel}\n".encode())
    disk.sync_directory(journal.directory)


def channel_of(address: Address, options: Mapping[str, Any]) -> str:
    """The channel's address without the parts that its next publisher may choose differently: options, and the port of
    tcp.
    """
    if address.scheme == "tcp":
        return "tcp://"
    name = quote(address.name, safe="/")
    number = options.get("id") or 0
    return f"{address.scheme}:{name}?id={number}" if number else f"{address.scheme}:{name}"


def topic_of(address: Address) -> str:
    """The topic of the channel in its journal."""
    name = address.name.strip("/").replace("/", ".") if address.scheme != "tcp" else ""
    parts = [re.sub(r"[^A-Za-z0-9_-]", "_", part) for part in name.split(".")]
    return ".".join(part for part in parts if part) or "default"


class Past:
    """What a tcp publisher reads for a subscriber that asks for the past."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.identity = journal.uuid.bytes

    def open(self, start: str, identity: bytes, last: int) -> Opened:
        """From ``start`` on, or after ``last`` where that came from this journal."""
        frontier = self._journal.frontier
        same = identity == self.identity and last
        place = last + 1 if same else self._journal.place_of(start)
        source = Follower(self._journal, place)
        try:
            source.wait(0)  # raises if it is damaged: the peer gets the reason, instead of reconnecting for ever
        except BaseException:
            source.close()
            raise
        return Opened(source, place, frontier)


_flows: set[Flow] = set()  # those whose threads are running
_forgotten: set[Flow] = set()  # those that are ending because their publisher was garbage-collected


@atexit.register
def _end_all() -> None:
    """Write what was published to disk before the program ends."""
    for flow in list(_flows):
        flow.end()


def end_forgotten() -> None:
    """Wait until those whose publishers were garbage-collected have ended."""
    for flow in list(_forgotten):
        flow.end()


class Flow:
    """The two threads of a publisher: messages go from memory to the disk, and from the disk to the live publisher. The
    threads hold a reference to this object and never to the publisher, so that a publisher that nobody uses is
    garbage-collected, which ends them.
    """

    def __init__(self, address: Address, journal: Journal, live_options: Mapping[str, Any]) -> None:
        self.journal = journal
        self.scheme = address.scheme
        self.writer = journal.writer
        # A commit lies in one segment, and retention removes whole segments: keep commits small, so that several fit
        # into one.
        self._most_staged = min(STAGED_BYTES, journal.segment_bytes // 4)
        # A queue without a lock, because a finaliser puts into it: it may run on any thread, in the middle of any other
        # call, and would wait for ever for a lock that its own thread holds.
        self._staged: SimpleQueue[None] = SimpleQueue()
        self._awake = False
        self.committed = threading.Event()
        self._all_committed = False
        self._ending = False
        self.failure: BaseException | None = None
        self.end_error: BaseException | None = None
        self._committing = threading.Lock()  # held by one commit, until its failure is noted
        self._passing_on = threading.Condition()  # guards the two below
        self._passed_on = 0  # the live flow has everything up to this position
        self._held_up = False  # a wait has timed out; no other wait begins until everything was passed on
        self._outrun = False  # a reader of shm does not keep up
        self.live, self._position = _open_live(address, journal, dict(live_options))
        self._passed_on = self._position - 1
        self._forwarder = threading.Thread(target=self._forward_on, name="penstock-durable-forward", daemon=True)
        self._committer = threading.Thread(target=self._commit_on, name="penstock-durable-commit", daemon=True)
        self._forwarder.start()
        self._committer.start()
        _flows.add(self)

    # --- from memory to the disk

    def wake(self, position: int) -> None:
        """Something was staged, up to ``position``. ``ClosedError`` if a close came before its commit."""
        if self._ending:
            self._committer.join(CLOSE_S)
            if self.writer.committed_position <= position:
                raise ClosedError("this publisher was closed; what was published then is not stored")
        if not self._awake:
            self._awake = True
            self._staged.put(None)
        if self.writer.staged_bytes > self._most_staged:
            self.commit()

    def commit(self, note: bool = False) -> None:
        """``note``: a failure is raised by the next call of the user instead of here."""
        with self._committing:
            try:
                self.journal.commit_staged()
            except ClosedError:
                raise
            except Exception as error:
                if not note:
                    raise
                logger.error("%r: what was published last is not on disk: %s", self, error)
                self.failure = error
            finally:
                self.committed.set()

    def _commit_on(self) -> None:
        ending = False
        try:
            while not ending:
                self._staged.get()
                # read before the commit: if it is set, everything is staged by now and this commit is the last
                ending = self._ending
                self._awake = False  # before the commit, so that whatever is staged later wakes this thread again
                self.commit(note=True)
        except ClosedError:
            pass
        try:
            self._give_back()
        except BaseException as error:
            logger.error("%r: closing failed: %s", self, error)
            self.end_error = error
        finally:
            _flows.discard(self)
            _forgotten.discard(self)

    # --- from the disk to the live publisher

    def await_passed_on(self, position: int) -> None:
        """Wait until the live publisher has everything up to ``position``; ``PASS_ON_S`` at most."""
        with self._passing_on:
            if self._passed_on >= position or self._held_up:
                return
            came = self._passing_on.wait_for(lambda: self._passed_on >= position or self._ending, PASS_ON_S)
            self._held_up = not came

    def _forward_on(self) -> None:
        while True:
            ending = self._all_committed
            self.committed.clear()
            try:
                self._forward()
            except ClosedError:
                return
            except Exception as error:  # only live subscribers lose it; it is in the journal
                logger.error("%r: messages were stored, but did not reach live subscribers: %s", self, error)
            if ending:
                return
            if not self._all_committed:
                self.committed.wait()

    def _forward(self) -> None:
        while True:
            batch, self._position = self.journal.read_from(self._position, BATCH)
            if not len(batch):
                self._note_passed_on(self._position - 1, everything=True)
                return
            for part in self._portions(batch):
                self.live.forward(part)
            self._note_passed_on(self._position - 1)

    def _note_passed_on(self, position: int, everything: bool = False) -> None:
        with self._passing_on:
            self._passed_on = position
            self._held_up = self._held_up and not everything
            self._passing_on.notify_all()

    def _portions(self, batch: Batch) -> Iterator[Batch | Sequence[Message]]:
        """The batch in portions for the live publisher.

        A commit would reach an ``shm`` channel as one burst of more messages than it has slots, and a reader that keeps
        up with the publisher would lose most of them. So each portion waits until the slowest reader has room for it,
        but a batch waits ``KEEP_UP_S`` at most in all: no reader may hold up the live publisher.
        """
        if self.scheme != "shm":
            yield batch
            return
        slots = self.live.slots
        most = max(1, slots // 4)
        room = max(slots - most, most)
        deadline = time.monotonic() + KEEP_UP_S
        for begin in range(0, len(batch), most):
            part = batch[begin : begin + most]
            while (late := self.live.unread + len(part) > room) and not self._outrun and not self._ending:
                if time.monotonic() >= deadline:
                    self._outrun = True  # a reader that does not read is waited for once, not with every message
                    break
                time.sleep(KEEP_UP_LOOK_S)
            self._outrun = self._outrun and late
            yield part

    # --- the end

    def forget(self) -> None:
        """The publisher was garbage-collected. A finaliser calls this, so it takes no lock and never waits."""
        if not self._ending:
            _forgotten.add(self)
            self._begin_end()

    def _begin_end(self) -> None:
        self._ending = True
        self._staged.put(None)

    def end(self) -> None:
        """Return when everything is on disk and passed on, and the threads have ended."""
        self._begin_end()
        self._committer.join()

    def _give_back(self) -> None:
        self._all_committed = True
        self.committed.set()
        self._forwarder.join(CLOSE_S)
        slow = self._forwarder.is_alive()
        self.live.close()
        self._forwarder.join()
        if slow:
            logger.warning(
                "%r: live subscribers were too slow: some messages from ordinal %d on did not reach them and are on "
                "disk (start= reads them)",
                self,
                self._passed_on + 1,
            )
        self.journal.close()

    def __repr__(self) -> str:
        return f"<durable.Publisher {self.journal.directory}{', closed' if self._ending else ''}>"


class DurablePublisher(Publisher):
    """One writing handle over a journal and a live publisher. Unknown attributes are those of the live publisher."""

    carries_properties = True

    def __init__(self, address: Address, journal: Journal, live_options: Mapping[str, Any], wait: bool) -> None:
        self.journal = journal
        self.scheme = address.scheme
        self.topic = topic_of(address)
        _note_channel(journal, check_channel(journal, address, live_options))
        self._topic_id = journal.topic_id(self.topic)
        self._writer = journal.writer
        self._wait = wait
        self._closed = False
        self._lock = threading.Lock()
        self._before = self._writer.next_position - 1  # published by others
        self._flow = Flow(address, journal, live_options)
        self.inner = self._flow.live
        weakref.finalize(self, self._flow.forget).atexit = False

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

        ``timeout`` is checked but not used: publishing may wait for the disk, never for a subscriber.
        """
        flow = self._flow
        if self._closed or flow.failure is not None:
            self._check_usable()
        if timeout is not None:
            check_timeout(timeout)
        if self._wait:
            ordinal = self.journal.append(self.topic, data, properties=properties, timestamp_ns=timestamp_ns)
            flow.committed.set()
            flow.await_passed_on(ordinal)
        elif properties is None and timestamp_ns is None:
            ordinal = self._writer.stage(self._topic_id, data)
            flow.wake(ordinal)
        else:
            time_ns = TIME_NOW if timestamp_ns is None else timestamp_ns
            ordinal = self._writer.stage(self._topic_id, data, encode_properties(properties), b"", b"", time_ns)
            flow.wake(ordinal)
        return ordinal

    def publish_many(self, batch: Iterable[Buffer], *, timeout: float | None = None) -> int:
        """Store each of them, in order; returns how many. ``timeout`` as in ``publish``."""
        self._check_usable()
        check_timeout(timeout)
        with telling_published(0):
            items = batch if isinstance(batch, list | tuple) else list(batch)
            self._check_usable()  # the iterable may have closed it, or taken so long that another thread has
            if self._wait:
                self.journal.append_many(self.topic, items)
            elif items:
                _, last = self._writer.stage_buffers(self._topic_id, items)
                self._flow.wake(last)
        with telling_published(len(items)):
            if self._wait:
                self._flow.committed.set()
                self._flow.await_passed_on(self._writer.committed_position - 1)
        return len(items)

    def forward(self, batch: Batch | Sequence[Message]) -> int:
        """Store messages of any reach with their times and properties; returns how many."""
        if not self._wait:
            for message in batch:
                self.publish(message, properties=dict(message.properties) or None, timestamp_ns=time_of(message))
            return len(batch)
        self._check_usable()
        if len(batch):
            self.journal.commit(
                Entry(self.topic, message, dict(message.properties) or None, timestamp_ns=time_of(message))
                for message in batch
            )
            self._flow.committed.set()
            self._flow.await_passed_on(self._writer.committed_position - 1)
        return len(batch)

    def reserve(self, size: int) -> Draft:
        """A writable buffer of ``size`` bytes; leaving its ``with`` block publishes it."""
        self._check_usable()
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"size must be an int, not {type(size).__name__}")
        if not 0 <= size <= self.journal.max_message_bytes:
            raise InvalidArgument(f"size={size} must be 0 to max_message_bytes={self.journal.max_message_bytes}")
        return native.reserve(size, self.publish, self)

    def flush(self) -> None:
        """Wait until everything published so far is on disk and was passed to the live publisher, so that later
        subscribers find it in its history. Waits at most a second for a live publisher that makes no progress.
        """
        self._check_usable()
        self._flow.commit()
        self._check_usable()  # a commit by another thread may have failed
        self._flow.await_passed_on(self._writer.committed_position - 1)

    def _publish_now(self, data: Any, options: Mapping[str, Any]) -> int:
        if self._wait:
            raise BlockingIOError
        return self.publish(data, **options)

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
        flow = self._flow
        if flow.failure is not None:
            error, flow.failure = flow.failure, None
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
        self._flow.end()
        if self._flow.end_error is not None:
            raise self._flow.end_error

    def on_resize(self, function: Callable[[Any, int, int], Any] | None) -> None:
        """``function(publisher, old_size, new_size)`` is asked before slots grow, where the live channel has slots."""
        self.inner.on_resize(function)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while it is being constructed
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"<durable.Publisher {self.journal.directory}{', closed' if self._closed else ''}>"


def _open_live(address: Address, journal: Journal, options: dict[str, Any]) -> tuple[Any, int]:
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
        return room.open_publisher(address, past=Past(journal), **options), first
    directory = str(journal.directory.resolve())
    if address.scheme == "bus":
        live = room.open_publisher(address, **options)
        try:
            live.bus.claim(live)
        except RefusedError:
            live.close()
            raise
        if live.bus.durable.get(live.id) == directory and live.wait_ready(1, 0):
            first = journal.first  # begin with the messages that the previous publisher had not passed on
        live.bus.durable[live.id] = directory
        last = live.bus._go_on(live.id, first - 1)
        return live, min(last + 1, next_position)
    if options.get("max_publishers") not in (None, 1):
        raise InvalidArgument(f"{address.text}: a durable channel has one publisher, so that ordinals are positions")
    try:
        live = room.Publisher(address.name, **{**options, "before": first - 1, "max_publishers": 1})
    except (CapacityError, RefusedError) as error:
        there = next((c.publishers for c in room.channels() if c.name == address.name), ())
        if pids := sorted({str(member.pid) for member in there if member.alive}):
            publishers = f"{'publishers' if len(there) > 1 else 'a publisher'} already: pid {', '.join(pids)}"
            raise RefusedError(
                f"{address.text}: a durable channel has one publisher, and this one has {publishers}; end it first"
            ) from error
        raise
    live._durable(directory)
    # the channel still exists: continue after the last message that the previous publisher passed on
    last = live.last_ordinal
    return live, min(last + 1, next_position)
