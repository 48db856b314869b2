"""Queue: a named consumer of a journal whose place survives everything.

Which messages are done, out or come again is the native ``QueueState``'s business; this adds the I/O and the clock.

Rules:

- At least once: what was not acknowledged comes again after the time-out, a nack or a restart, with its tries counted.
- An ack is on disk with the journal's next commit; ``flush`` commits now. Lost before that, the message comes again.
- With ``max_tries`` the count is on disk before a message is handed out, so that one which kills its consumer ends up
  with the dead letters.

Any thread; several threads share a queue by sharing the object.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from penstock._core import Message
from penstock._core import journal as native
from penstock.channel import check_timeout
from penstock.errors import ClosedError
from penstock.journal.journal import QUEUE_KIND, topic_filter
from penstock.journal.queue_notes import QueueState

FALLBACK_POLL_S = 0.01
ANY_BYTES = 2**63
NEVER = 2**63 - 1
READER = 1  # what the state calls whoever reads: threads share what is out
MOST_DEAD = 1024  # messages that are looked at for being dead in one go

if TYPE_CHECKING:
    from penstock.journal.journal import Journal


class Queue:
    """Made by ``Journal.queue``."""

    def __init__(self, journal: Journal, state: QueueState) -> None:
        self._journal = journal
        self.state = state
        self.name = state.name
        self._places = state.places
        self._touch = journal.touch_queue
        self._filter = topic_filter(state.settings.topics)
        self._watch = native.Watch(str(journal.directory))
        self._readers = 0  # threads that look for messages or wait for them
        journal.add_sleeper(self)
        self.expired = 0  # gone by retention or compaction before they were read

    def read(self, timeout: float | None = None) -> Message | None:
        """The next message, or None when the time is over."""
        messages = self.read_many(1, timeout)
        return messages[0] if messages else None

    def read_many(self, most: int = 1024, timeout: float | None = None) -> list[Message]:
        """Up to ``most`` messages, those that come again first; waits for the first one only."""
        check_timeout(timeout)
        messages = self._take(most)
        return messages or self._wait_and_take(most, timeout)

    def _wait_and_take(self, most: int, timeout: float | None) -> list[Message]:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._journal.queue_lock:
            self._readers += 1  # from here on a change of the state wakes
        try:
            while True:
                self._watch.drain()
                messages = self._take(most)
                if messages:
                    return messages
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return []
                self._sleep(left)
        finally:
            # One wake ends one sleep, and only who is awake sees what else there is and when: it is passed on.
            with self._journal.queue_lock:
                self._readers -= 1
                self._wake_readers()

    def _take(self, most: int) -> list[Message]:
        """What is to be handed out now, without waiting."""
        state, places = self.state, self._places
        max_tries = state.settings.max_tries
        again: list[int] = []
        dead: list[int] = []
        with self._journal.queue_lock:
            if state.deleted:
                raise ClosedError(f"queue {self.name!r} was deleted")
            now_ns = time.time_ns()
            deadline_ns = now_ns + state.settings.ack_timeout_ns
            places.expire(now_ns, deadline_ns)
            if places.waiting:
                dead = self._find_dead(now_ns, max_tries)
                again = [position for position, _ in places.due(now_ns, most)]
                for position in again:
                    places.redeliver(position, READER, deadline_ns)
            fresh = self._scan(most - len(again), now_ns, deadline_ns)
            if max_tries and places.waiting:
                dead += self._find_dead(now_ns, max_tries)  # delivered too often before a restart
            if places.changed:
                self._touch(state)
            if self._readers and (again or fresh):
                self._watch.wake()  # what was taken comes again at a time that sleepers do not know yet
        if dead or (max_tries and (again or fresh)):
            self._store_tries(dead, again, fresh)
        return self._messages(again) + fresh if again else fresh

    def _find_dead(self, now_ns: int, max_tries: int) -> list[int]:
        """Those that used up their tries; they wait until they are buried."""
        if not max_tries:
            return []
        dead = [position for position, tries in self._places.due(now_ns, MOST_DEAD) if tries >= max_tries]
        for position in dead:
            self._places.postpone(position, NEVER)
        return dead

    def _store_tries(self, dead: list[int], again: list[int], fresh: list[Message]) -> None:
        """Bury the dead ones, and have it on disk that the others are tried."""
        try:
            self._bury(dead)
            if again or fresh:
                self.flush()
        except BaseException:  # a full disk: nobody gets them, so they are neither out nor tried
            with self._journal.queue_lock:
                now_ns = time.time_ns()
                for position in [*again, *(message.position or 0 for message in fresh)]:
                    self._places.take_back(position, now_ns)
                for position in dead:
                    self._places.postpone(position, now_ns)
            raise

    def _scan(self, most: int, now_ns: int, deadline_ns: int) -> list[Message]:
        """New messages from the cursor on, put out."""
        state, places = self.state, self._places
        room = min(state.settings.max_in_flight - places.outstanding, most)
        reader = self._journal._reader or self._journal._live_reader()
        while room > 0:
            cursor = places.cursor
            batch, following, skipped = reader.read_many(cursor, room, ANY_BYTES, self._filter)
            self.expired += skipped
            sent = places.take(batch, following, READER, deadline_ns, now_ns, state.settings.max_tries)
            if sent is not None:
                return list(sent)
            if following <= cursor:
                break
        return []

    def _messages(self, positions: list[int]) -> list[Message]:
        messages = []
        for position in positions:
            try:
                messages.append(self._journal.read(position))
            except LookupError:
                self.expired += 1
                self.ack(position)
        return messages

    def wake(self) -> None:
        """End a wait: the journal was closed."""
        self._watch.wake()

    def _bury(self, dead: list[int]) -> None:
        """Copies to the dead letters and the acks of the originals, in one commit."""
        topic = self.state.settings.dead_letter or f"dead.{self.name}"
        for position in dead:
            with self._journal.queue_lock:
                tries = self._places.deliveries(position)
                note = self.state.burial(position)
                if not 0 < self.state.settings.max_tries <= tries:  # sought elsewhere, or has more tries, meanwhile
                    self._places.postpone(position, time.time_ns())
                    continue
            with self._journal.transaction() as transaction:
                try:
                    message = self._journal.read(position)
                    properties = {
                        **message.properties,
                        "dead-letter-queue": self.name,
                        "dead-letter-topic": str(message.channel),
                        "dead-letter-position": str(position),
                        "dead-letter-tries": str(tries),
                    }
                    transaction.append(topic, message, properties=properties)
                except LookupError:
                    self.expired += 1
                transaction.state(QUEUE_KIND, note, internal=True)
            with self._journal.queue_lock:  # not before it is on disk: a failed commit must leave it where it was
                self._places.acknowledge_each(position)
                self._touch(self.state)

    def _sleep(self, left: float | None) -> None:
        with self._journal.queue_lock:
            due = self._places.next_time_ns
        if due != NEVER:
            until = max(0.0, (due - time.time_ns()) / 1e9) + 0.001
            left = until if left is None else min(left, until)
        if self._watch.fileno() < 0:  # no inotify left on this machine: nobody tells of appends
            left = FALLBACK_POLL_S if left is None else min(left, FALLBACK_POLL_S)
        self._watch.wait(-1 if left is None else math.ceil(left * 1000))
        self._journal._live_reader()  # closed meanwhile

    def ack(self, message: Message | int | Iterable[Message | int]) -> bool:
        """Done with it, or with all of a batch; False when it, or one of them, was not out."""
        if not isinstance(message, int | Message):
            messages = list(message)
            return self.ack_many(messages) == len(messages)
        with self._journal.queue_lock:
            done = self._places.acknowledge_each(message)
            self._touch(self.state)
            if self._readers:
                self._watch.wake()  # there may be room again
        return done > 0

    def _answered(self) -> None:
        self._touch(self.state)
        self._wake_readers()  # there may be room again

    def _wake_readers(self) -> None:
        if self._readers:
            self._watch.wake()

    def ack_many(self, messages: Iterable[Message | int]) -> int:
        """Done with them; gives how many were out."""
        # What the caller's code gives one by one is not taken under the lock.
        given = messages if isinstance(messages, list | tuple) else list(messages)
        with self._journal.queue_lock:
            done = self._places.acknowledge_each(given)
            self._answered()
            return done

    def ack_through(self, message: Message | int) -> int:
        """Done with it and all that were delivered before it and are still out."""
        with self._journal.queue_lock:
            done = self._places.acknowledge(0, 0, _position(message), True)
            self._answered()
            return done

    def nack(self, message: Message | int, *, delay_s: float = 0) -> bool:
        """Not done: it comes again after ``delay_s``."""
        delay_ns = int(delay_s * 1e9)
        with self._journal.queue_lock:
            due_ns = time.time_ns() + delay_ns
            out = self._places.return_message(0, _position(message), due_ns, delay_ns > 0)
            self._answered()
            return out

    def extend(self, message: Message | int) -> bool:
        """Still at it: the ack time-out starts again."""
        with self._journal.queue_lock:
            return self._places.extend(_position(message), time.time_ns() + self.state.settings.ack_timeout_ns)

    def tries(self, message: Message | int) -> int:
        """How often it has been delivered, this time included."""
        with self._journal.queue_lock:
            return self._places.deliveries(_position(message))

    def seek(self, position: int) -> None:
        """Go on with ``position``, forwards or back; on disk when this returns."""
        with self._journal.queue_lock:
            self.state.seek(position)
            self._answered()
        self.flush()

    def purge(self) -> None:
        """Everything stored so far is done."""
        self.seek(self._journal.frontier)

    def flush(self) -> None:
        """Acks given so far are on disk when this returns."""
        self._journal.commit_queues()

    def __repr__(self) -> str:
        return f"<Queue {self.name!r}, floor {self.state.floor}, {self.state.in_flight} out>"


def _position(message: Message | int) -> int:
    return message if isinstance(message, int) else int(message.position or 0)
