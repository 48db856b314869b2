"""Queue: a named consumer of a journal whose place survives crashes and restarts.

The native ``QueueState`` knows which messages are done, in flight or due for redelivery; this adds the I/O and the
clock.

Rules:

- Delivery is at least once: what was not acknowledged is redelivered after the time-out, a nack or a restart, and its
  tries are counted.
- An ack is on disk with the journal's next commit; ``flush`` commits now. If it is lost before that, the message is
  redelivered.
- With ``max_tries`` the count is on disk before a message is delivered, so that a message that kills its consumer
  becomes a dead letter in the end.

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
from penstock.errors import ClosedError, CorruptionError
from penstock.journal.journal import QUEUE_KIND, topic_filter
from penstock.journal.queue_notes import QueueState

FALLBACK_POLL_S = 0.01
ANY_BYTES = 2**63
NEVER = 2**63 - 1
READER = 1  # the consumer's name in the state: threads share what is in flight
MOST_DEAD = 1024  # messages that are checked for used-up tries at once

if TYPE_CHECKING:
    from penstock.journal.journal import Journal


class Queue:
    """A durable queue; created by ``Journal.queue``."""

    def __init__(self, journal: Journal, state: QueueState) -> None:
        self._journal = journal
        self.state = state
        self.name = state.name
        self._places = state.places
        self._touch = journal.touch_queue
        self._filter = topic_filter(state.settings.topics)
        self._watch = native.Watch(str(journal.directory))
        self._readers = 0  # threads that read or wait for messages
        journal.add_sleeper(self)
        self.expired = 0  # removed by retention or compaction before they were read

    def read(self, timeout: float | None = None) -> Message | None:
        """The next message, or None when the time is over."""
        messages = self.read_many(1, timeout)
        return messages[0] if messages else None

    def read_many(self, most: int = 1024, timeout: float | None = None) -> list[Message]:
        """Up to ``most`` messages, redeliveries first; waits for the first one only."""
        check_timeout(timeout)
        messages = self._take(most)
        return messages or self._wait_and_take(most, timeout)

    def _wait_and_take(self, most: int, timeout: float | None) -> list[Message]:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._journal.queue_lock:
            self._readers += 1  # from here on a change of the state wakes this thread
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
            # One wake-up ends one sleep. There may be more messages, which only a thread that is awake can see: wake
            # the next.
            with self._journal.queue_lock:
                self._readers -= 1
                self._wake_readers()

    def _take(self, most: int) -> list[Message]:
        """The messages to deliver now, without waiting."""
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
            fresh = self._fresh(most - len(again), now_ns, deadline_ns, last=not again)
            if max_tries and places.waiting:
                dead += self._find_dead(now_ns, max_tries)  # delivered too often before a restart
            if places.changed:
                self._touch(state)
            if self._readers and (again or fresh):
                # wake sleepers: they do not know yet when the messages just taken are due for redelivery
                self._watch.wake()
        if dead or (max_tries and (again or fresh)):
            self._store_tries(dead, again, fresh)
        return self._messages(again) + fresh if again else fresh

    def _find_dead(self, now_ns: int, max_tries: int) -> list[int]:
        """Those that used up their tries; they are held back until they are buried."""
        if not max_tries:
            return []
        dead = [position for position, tries in self._places.due(now_ns, MOST_DEAD) if tries >= max_tries]
        for position in dead:
            self._places.postpone(position, NEVER)
        return dead

    def _store_tries(self, dead: list[int], again: list[int], fresh: list[Message]) -> None:
        """Bury the dead ones, and store the tries of the others."""
        try:
            self._dead_letter(dead)
            if again or fresh:
                self.flush()
        # a full disk: they are not delivered, so they are not in flight and the try does not count
        except BaseException:
            with self._journal.queue_lock:
                now_ns = time.time_ns()
                for position in [*again, *(message.position or 0 for message in fresh)]:
                    self._places.take_back(position, now_ns)
                for position in dead:
                    self._places.postpone(position, now_ns)
            raise

    def _fresh(self, most: int, now_ns: int, deadline_ns: int, *, last: bool) -> list[Message]:
        """New messages; damage is raised only if nothing else was taken (``last``), because what is taken already
        counts as in flight. The next call finds the damage again.
        """
        try:
            return self._scan(most, now_ns, deadline_ns)
        except CorruptionError:
            if last:
                raise
            return []

    def _scan(self, most: int, now_ns: int, deadline_ns: int) -> list[Message]:
        """New messages from the cursor on, now in flight."""
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

    def pass_over(self, first: int, following: int) -> None:
        """Count damaged positions that were never delivered as done, and continue with ``following``."""
        with self._journal.queue_lock:
            for position in range(max(first, self._places.cursor), following):
                self._places.finish_ahead(position)
            self._places.look_from(following)
            self._touch(self.state)

    def wake(self) -> None:
        """End a wait: the journal was closed."""
        self._watch.wake()

    def _dead_letter(self, dead: list[int]) -> None:
        """Copy messages to the dead letters and acknowledge the originals, in one commit."""
        topic = self.state.settings.dead_letter or f"dead.{self.name}"
        for position in dead:
            with self._journal.queue_lock:
                tries = self._places.deliveries(position)
                note = self.state.done_record(position)
                if not 0 < self.state.settings.max_tries <= tries:  # meanwhile the queue was moved, or has more tries
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
            with self._journal.queue_lock:  # only when it is on disk: a failed commit must change nothing
                self._places.acknowledge_each(position)
                self._touch(self.state)

    def _sleep(self, left: float | None) -> None:
        with self._journal.queue_lock:
            due = self._places.next_time_ns
        if due != NEVER:
            until = max(0.0, (due - time.time_ns()) / 1e9) + 0.001
            left = until if left is None else min(left, until)
        if self._watch.fileno() < 0:  # no inotify instance is left on this machine: appends must be polled for
            left = FALLBACK_POLL_S if left is None else min(left, FALLBACK_POLL_S)
        self._watch.wait(-1 if left is None else math.ceil(left * 1000))
        self._journal._live_reader()  # closed meanwhile

    def ack(self, message: Message | int | Iterable[Message | int]) -> bool:
        """Acknowledge a message or a batch; False if one of them was not in flight."""
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
        """Acknowledge messages; returns how many were in flight."""
        # Iterate over the caller's messages before taking the lock: its code may block.
        given = messages if isinstance(messages, list | tuple) else list(messages)
        with self._journal.queue_lock:
            done = self._places.acknowledge_each(given)
            self._answered()
            return done

    def ack_through(self, message: Message | int) -> int:
        """Acknowledge it and all that were delivered before it and are still in flight."""
        with self._journal.queue_lock:
            done = self._places.acknowledge(0, 0, _position(message), True)
            self._answered()
            return done

    def nack(self, message: Message | int, *, delay_s: float = 0) -> bool:
        """Return a message: it is redelivered after ``delay_s``."""
        delay_ns = int(delay_s * 1e9)
        with self._journal.queue_lock:
            due_ns = time.time_ns() + delay_ns
            out = self._places.return_message(0, _position(message), due_ns, delay_ns > 0)
            self._answered()
            return out

    def extend(self, message: Message | int) -> bool:
        """Restart its ack time-out."""
        with self._journal.queue_lock:
            return self._places.extend(_position(message), time.time_ns() + self.state.settings.ack_timeout_ns)

    def tries(self, message: Message | int) -> int:
        """How often it has been delivered, this time included."""
        with self._journal.queue_lock:
            return self._places.deliveries(_position(message))

    def seek(self, position: int) -> None:
        """Continue with ``position``, forwards or back; on disk when this returns."""
        with self._journal.queue_lock:
            self.state.seek(position)
            self._answered()
        self.flush()

    def purge(self) -> None:
        """Acknowledge everything stored so far."""
        self.seek(self._journal.frontier)

    def flush(self) -> None:
        """Return when all acks so far are on disk."""
        self._journal.commit_queues()

    def __repr__(self) -> str:
        return f"<Queue {self.name!r}, floor {self.state.floor}, {self.state.in_flight} out>"


def _position(message: Message | int) -> int:
    return message if isinstance(message, int) else int(message.position or 0)
