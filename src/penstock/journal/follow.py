"""Publisher and Follower: the journal as a channel of the contract (``journal:DIRECTORY#TOPIC``).

A follower sleeps on an inotify descriptor of the frontier file, which its writer touches after each commit, so it works
across processes and costs the writer nothing per reader. Several threads may use a handle: each message goes to one.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock._core import Counters, Draft
from penstock._core import journal as native
from penstock.carry import time_of, total_bytes
from penstock.channel import (
    IdAndKey,
    Ledger,
    Publisher,
    Subscriber,
    Terms,
    check_subscribers,
    check_timeout,
    telling_published,
)
from penstock.errors import ClosedError, CorruptionError, InvalidArgument
from penstock.journal import presence
from penstock.journal.books import Books
from penstock.journal.disk import read_all
from penstock.journal.guard import Guard
from penstock.journal.journal import Details, Journal, topic_filter
from penstock.journal.layout import MARKER_NAME, encode_marker
from penstock.journal.transaction import Entry
from penstock.topics import check_topic, matches

if TYPE_CHECKING:
    from penstock._core import Batch, Message
    from penstock.channel import Buffer

FALLBACK_POLL_S = 0.01
LOOK_S = 1.0  # how often a follower that waits looks whether its directory is still there
DEFAULT_TOPIC = "default"


class Follower(Subscriber):
    """Messages from a position on, as they become durable."""

    def __init__(
        self, journal: Journal, start: int, topics: Iterable[str] | None = None, *, own: bool = False, seen_as: str = ""
    ) -> None:
        """``seen_as``: the address under which the monitor lists it, if not the journal's."""
        self._journal = journal
        self._own = own
        self._patterns = patterns = None if topics is None else list(topics)
        self._filter = topic_filter(patterns)
        self.position = start
        self._place = seen_as or f"{journal.directory.absolute()}#{','.join(patterns or ['>'])}"
        self._books = Books(Counters("journal", "subscriber", self._place))
        self._books.reach(start)
        self._watch = native.Watch(str(journal.directory))
        self._closed = False
        self._waited = False
        self._turn = threading.RLock()  # of whoever reads; again in a signal handler of the same thread
        self._asleep = 0  # threads that wait for more
        self._look_at = 0.0
        journal.add_sleeper(self)
        self._present = presence.Presence(journal.directory)

    def agree(self, terms: Terms) -> None:
        """Check that the schemas of its topics can be read as the handle's type; topics that appear later are not
        checked."""
        for topic, versions in self._described():
            terms.added_to(versions, f"topic {topic!r} of {self._journal.directory}")

    def _described(self) -> list[tuple[str, list[str]]]:
        schemas = self._journal.schemas
        wanted = self._patterns or [">"]
        return [
            (topic, list(schemas.versions(topic).values()))
            for topic in schemas.topics
            if any(matches(pattern, topic) for pattern in wanted)
        ]

    @property
    def frontier(self) -> int:
        """The position of the next message that will be stored."""
        return self._journal.frontier

    def details(self, message: Message) -> Details:
        """The id and the key of a message that this has read; empty if the journal has removed it meanwhile."""
        try:
            return self._journal.details(message.position or 0)
        except LookupError:
            return NO_DETAILS

    @property
    def schema(self) -> str | None:
        """The schema of its first topic that has one, or None."""
        return next((versions[-1] for _, versions in self._described()), None)

    def schema_of(self, topic: str | None) -> str | None:
        """The schema of one of its topics, or None."""
        return self._journal.schemas.newest(topic or "")[1] or None

    def schemas_of(self, topic: str | None) -> list[str]:
        """Every version of it, the newest last."""
        return list(self._journal.schemas.versions(topic or "").values())

    def read(self, timeout: float | None = None) -> Message | None:
        """The next message, or None when the time is over."""
        # the class's own: `call_in_thread` replaces the instance's `read_many`
        batch = Follower.read_many(self, 1, timeout)
        return batch[0] if len(batch) else None

    def read_many(self, most: int = 1024, timeout: float | None = None) -> Batch:
        """Up to ``most`` messages that are there; waits for the first one only."""
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            batch = self._take(most)
            if len(batch):
                return batch
            with self._sleeping():
                self._watch.drain()  # then look again, so as not to sleep although a message has come in between
                batch = self._take(most)
                if len(batch) or not self._sleep(deadline):
                    return batch

    def _take(self, most: int) -> Batch:
        with self._turn:
            self._check_open()
            before = self.position
            batch, self.position, skipped = self._journal.read_counted(before, most, None, self._filter)
            count = len(batch)
            if self.position != before:
                self._books.reach(self.position)
            # Only for a follower that has caught up is the age of a message its latency.
            since_ns = batch[0].stored_ns if count and self._waited else None
            self._waited = self._waited and not count
            if count or skipped:
                self._books.count(count, batch.total_bytes, skipped, since_ns)
            if self._asleep and count:
                self._pass_on()
        return batch

    @contextlib.contextmanager
    def _sleeping(self) -> Iterator[None]:
        """From before the last look to the end of the wait: who takes one of several messages wakes this thread."""
        with self._turn:
            self._asleep += 1
        try:
            yield
        finally:
            with self._turn:
                self._asleep -= 1

    def _pass_on(self) -> None:
        """Wake those who would sleep over what is left: the notice of it was drained by whoever came first."""
        if self._asleep and self.position < self._journal.frontier:
            self._watch.wake()

    def _available_messages(self) -> Iterator[Message]:
        self._check_open()
        frontier = self._journal.frontier
        while self.position < frontier and (message := self.read(0)) is not None:
            yield message

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until there is something to read."""
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._sleeping():
                self._watch.drain()
                if self._has_messages():
                    return True
                if not self._sleep(deadline):
                    return False

    def _has_messages(self) -> bool:
        """Whether there is something to read."""
        with self._turn:
            self._check_open()
            batch, following, skipped = self._journal.read_counted(self.position, 1, None, self._filter)
            if len(batch):
                if self._asleep > 1:  # others beside this one
                    self._pass_on()
                return True
            if following != self.position:
                self._books.reach(following)
            self.position = following
            if skipped:
                self._books.count(0, 0, skipped)
            return False

    def _sleep(self, deadline: float | None) -> bool:
        """Sleep until there may be a message; False when the time is over."""
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return False
        if self._own:
            self._check_there()
            left = LOOK_S if left is None else min(left, LOOK_S)
        self._waited = True
        if self._watch.fileno() < 0:  # no inotify instance is left on this machine
            time.sleep(FALLBACK_POLL_S if left is None else min(left, FALLBACK_POLL_S))
            return True
        self._watch.wait(-1 if left is None else math.ceil(left * 1000))
        return True

    def _check_there(self) -> None:
        """A directory that was removed or made anew never gets another message: that is an error, not a wait."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        directory = self._journal.directory
        try:
            same = read_all(directory / MARKER_NAME) == encode_marker(self._journal.uuid)
        except FileNotFoundError:
            same = False
        except OSError:
            return
        if not same:
            text = f"{directory} was removed or made anew since this subscriber was opened; open it again"
            raise CorruptionError(text, str(directory))

    def wake(self) -> None:
        """End a wait: the journal was closed."""
        self._watch.wake()

    def fileno(self) -> int:
        """Readable after the frontier has moved."""
        self._check_open()
        if self._watch.fileno() < 0:
            raise OSError(24, "no inotify instance left (fs.inotify.max_user_instances); use read(timeout)")
        return self._watch.fileno()

    @property
    def ledger(self) -> Ledger:
        """Delivered, and what retention removed before it was read."""
        return self._books.ledger

    def _check_open(self) -> None:
        if self._closed:
            self._watch.wake()  # wake the next waiting thread: only one of them has read the event
            raise ClosedError("this follower was closed")

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def close(self) -> None:
        """Release everything; a waiting ``read`` ends."""
        self._closed = True
        if not self._books.close():
            return
        self._watch.wake()
        self._present.leave()
        if self._own:
            self._journal.close()


NO_DETAILS = Details("", "")


class JournalPublisher(Publisher):
    """Appends to one topic; each ``publish`` is on disk when it returns."""

    carries_properties = carries_properties_of_many = carries_details = True

    def __init__(self, journal: Journal, topic: str) -> None:
        self._journal = self.journal = journal
        self.topic = check_topic(topic)
        self._closed = False
        self._books = Books(Counters("journal", "publisher", f"{journal.directory.absolute()}#{topic}"))

    def agree(self, terms: Terms) -> None:
        self._journal.agree(self.topic, terms)

    @property
    def schema(self) -> str | None:
        """The schema of the topic, or None."""
        return self._journal.schemas.newest(self.topic)[1] or None

    def publish(
        self,
        data: Buffer,
        *,
        properties: dict[str, str] | None = None,
        message_id: str | None = None,
        key: str | None = None,
        timestamp_ns: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Store a copy of ``data``; gives its ordinal in the topic (``Journal.append`` gives the position).

        ``timeout`` is checked and ends nothing: a journal waits for no reader, and a sync cannot be broken off.
        If another thread closes the publisher meanwhile, this either stores the message and returns, or raises.
        """
        self._check_open()
        check_timeout(timeout)
        ordinal = self._journal.append_numbered(self.topic, data, properties, message_id, key, timestamp_ns)[1]
        self._books.count(1, total_bytes((data,)))
        return ordinal

    def publish_many(
        self,
        batch: Iterable[Buffer],
        *,
        properties: Mapping[str, str] | Iterable[Mapping[str, str]] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Store them in order as one atomic batch. Properties: one mapping for all, or one for each.

        ``timeout`` as in ``publish``.
        """
        self._check_open()
        check_timeout(timeout)
        with telling_published(0):
            items: Any = batch if hasattr(batch, "__getitem__") else list(batch)
            if isinstance(properties, Mapping):
                self._journal.append_many(self.topic, items, properties=properties)
            elif properties is not None:
                self._journal.commit(Entry(self.topic, data, one) for data, one in zip(items, properties, strict=True))
            else:
                self._journal.append_many(self.topic, items)
        self._books.count(len(items), total_bytes(items))
        return len(items)

    def forward(self, batch: Iterable[Message]) -> int:
        """Store messages of any reach, with their times and properties, as one atomic batch."""
        return self.forward_together([(self, message) for message in batch])

    def forward_details(self, batch: Sequence[Message], details: Sequence[IdAndKey]) -> int:
        """``forward`` with the id and the key of each."""
        return self.forward_together([(self, message) for message in batch], details)

    def forward_together(
        self, pairs: Sequence[tuple[JournalPublisher, Message]], details: Sequence[IdAndKey] | None = None
    ) -> int:
        """``forward`` for this and other publishers of its journal: one atomic batch, in this order. ``details``: the
        id and the key of each, which a ``Message`` does not hold.
        """
        for publisher in {publisher for publisher, _ in pairs}:
            publisher._check_open()
        self._journal.commit(
            Entry(
                to.topic, message, dict(message.properties) or None, one.message_id or None, one.key or None,
                time_of(message),
            )
            for (to, message), one in zip(pairs, details or itertools.repeat(NO_DETAILS, len(pairs)), strict=True)
        )
        by_publisher: dict[JournalPublisher, list[int]] = {}
        for publisher, message in pairs:
            by_publisher.setdefault(publisher, []).append(message.size)
        for publisher, sizes in by_publisher.items():
            publisher._books.count(len(sizes), sum(sizes))
        return len(pairs)

    def reserve(self, size: int) -> Draft:
        """A buffer that ``draft.publish`` stores."""
        self._check_open()
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"size must be an int, not {type(size).__name__}")
        if not 0 <= size <= self._journal.max_message_bytes:
            raise InvalidArgument(f"size={size} must be 0 to max_message_bytes={self._journal.max_message_bytes}")
        return native.reserve(size, self.publish, self)

    def wait_ready(self, subscribers: int = 1, timeout: float | None = None) -> bool:
        """Wait for this many followers, in any process. Not needed to avoid losses: stored messages wait for their
        readers."""
        check_subscribers(subscribers)
        check_timeout(timeout)
        self._check_open()
        deadline = None if timeout is None else time.monotonic() + timeout
        while presence.count(self._journal.directory) < subscribers:
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(FALLBACK_POLL_S)
            self._check_open()
        return True

    @property
    def ledger(self) -> Ledger:
        """What was stored."""
        return self._books.ledger

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this publisher was closed")

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def close(self) -> None:
        """Release the journal; the last publisher of a directory closes it."""
        self._closed = True
        if self._books.close():
            _release_shared(self._journal)


# journals that publishers of this process share, and how many publishers use each
_shared: dict[Path, tuple[Journal, int]] = {}
_guard = Guard()


def _after_fork() -> None:
    """Forget them in a forked child, which must open its own."""
    _guard.renew()
    _shared.clear()


os.register_at_fork(after_in_child=_after_fork)


def share(directory: str, options: dict[str, Any]) -> Journal:
    """The directory's journal, opened for writing by the first publisher of this process."""
    path = Path(directory).resolve()
    with _guard:
        journal, users = _shared.get(path, (None, 0))
        if journal is None:
            journal = Journal(path, **options)
        _shared[path] = (journal, users + 1)
        return journal


def _release_shared(journal: Journal) -> None:
    with _guard:
        path = next((path for path, (shared, _) in _shared.items() if shared is journal), None)
        if path is None:
            return
        users = _shared[path][1] - 1
        if users:
            _shared[path] = (journal, users)
            return
        del _shared[path]
    journal.close()
