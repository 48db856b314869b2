"""Queue: a named consumer of a journal whose place survives everything. The logic is ``QueueState``; this adds the I/O.

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
from penstock.journal.queue_state import Delivery, QueueState

FALLBACK_POLL_S = 0.01

if TYPE_CHECKING:
    from penstock.journal.journal import Journal


class Queue:
    """Made by ``Journal.queue``."""

    def __init__(self, journal: Journal, state: QueueState) -> None:
        self._journal = journal
        self.state = state
        self._filter = topic_filter(state.settings.topics)
        self._watch = native.Watch(str(journal.directory))
        self._readers = 0  # threads that look for messages or wait for them
        journal.add_sleeper(self)
        self.expired = 0  # gone by retention or compaction before they were read

    @property
    def name(self) -> str:
        """The queue's name."""
        return self.state.name

    def read(self, timeout: float | None = None) -> Message | None:
        """The next message, or None when the time is over."""
        messages = self.read_many(1, timeout)
        return messages[0] if messages else None

    def read_many(self, most: int = 1024, timeout: float | None = None) -> list[Message]:
        """Up to ``most`` messages, those that come again first; waits for the first one only."""
        check_timeout(timeout)
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
        with self._journal.queue_lock:
            if self.state.deleted:
                raise ClosedError(f"queue {self.name!r} was deleted")
            now = time.time_ns()
            again = self.state.due(now, most)
            fresh = self._scan(most - len(again), now) if len(again) < most else []
            dead, self.state.dead = self.state.dead, []
            if again or fresh or self.state.changed:
                self._journal.touch_queue(self.state)
        try:
            self._bury(dead)
            if (again or fresh) and self.state.settings.max_tries:
                self.flush()
        except BaseException:  # a full disk: nobody gets them, so they are neither out nor tried
            with self._journal.queue_lock:
                taken = [*again, *(Delivery(int(message.position or 0), 1) for message in fresh)]
                self.state.untake(taken, time.time_ns())
                self.state.not_buried(dead)
            raise
        return self._messages(again) + fresh if again else fresh

    def _scan(self, most: int, now: int) -> list[Message]:
        """New messages from the cursor on, put out."""
        room = min(self.state.room, most)
        if room <= 0:
            return []
        start = max(self.state.cursor, self._journal.first)
        if start > self.state.cursor:
            self.expired += start - self.state.cursor
            self.state.offer([], start, now)
        while self.state.cursor < self._journal.frontier:
            batch, following = self._journal.read_from(self.state.cursor, room, None, self._filter)
            taken = self.state.offer(list(batch.positions), following, now)
            if len(taken) == len(batch) > 0:
                return list(batch)
            if taken:
                wanted = {delivery.position for delivery in taken}
                return [message for message in batch if message.position in wanted]
        return []

    def _messages(self, deliveries: list[Delivery]) -> list[Message]:
        messages = []
        for position, _ in deliveries:
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
                note = self.state.bury(position)
            if note is None:
                continue  # the queue was sought elsewhere meanwhile
            with self._journal.transaction() as transaction:
                try:
                    message = self._journal.read(position)
                    properties = {
                        **message.properties,
                        "dead-letter-queue": self.name,
                        "dead-letter-topic": str(message.channel),
                        "dead-letter-position": str(position),
                        "dead-letter-tries": str(self.state.tries(position)),
                    }
                    transaction.append(topic, message, properties=properties)
                except LookupError:
                    self.expired += 1
                transaction.state(QUEUE_KIND, note, internal=True)
            with self._journal.queue_lock:  # not before it is on disk: a failed commit must leave it where it was
                self.state.ack(position)
                self._journal.touch_queue(self.state)

    def _sleep(self, left: float | None) -> None:
        with self._journal.queue_lock:
            due = self.state.next_due_ns()
        if due is not None:
            until = max(0.0, (due - time.time_ns()) / 1e9) + 0.001
            left = until if left is None else min(left, until)
        if self._watch.fileno() < 0:  # no inotify left on this machine: nobody tells of appends
            left = FALLBACK_POLL_S if left is None else min(left, FALLBACK_POLL_S)
        self._watch.wait(-1 if left is None else math.ceil(left * 1000))
        self._journal._live_reader()  # closed meanwhile

    def ack(self, message: Message | int | Iterable[Message | int]) -> bool:
        """Done with it, or with all of a batch; False when it, or one of them, was not out."""
        if not isinstance(message, int | Message):
            positions = [_position(one) for one in message]
            return self.ack_many(positions) == len(positions)
        with self._journal.queue_lock:
            done = self.state.ack(_position(message))
            self._answered()
            return done

    def _answered(self) -> None:
        self._journal.touch_queue(self.state)
        self._wake_readers()  # there may be room again

    def _wake_readers(self) -> None:
        if self._readers:
            self._watch.wake()

    def ack_many(self, messages: Iterable[Message | int]) -> int:
        """Done with them; gives how many were out."""
        positions = [_position(message) for message in messages]  # the caller's code, so not under the lock
        with self._journal.queue_lock:
            done = self.state.ack_many(positions)
            self._answered()
            return done

    def ack_through(self, message: Message | int) -> int:
        """Done with it and all that were delivered before it and are still out."""
        with self._journal.queue_lock:
            done = self.state.ack_through(_position(message))
            self._answered()
            return done

    def nack(self, message: Message | int, *, delay_s: float = 0) -> bool:
        """Not done: it comes again after ``delay_s``."""
        with self._journal.queue_lock:
            out = self.state.nack(_position(message), time.time_ns(), int(delay_s * 1e9))
            self._answered()
            return out

    def extend(self, message: Message | int) -> bool:
        """Still at it: the ack time-out starts again."""
        with self._journal.queue_lock:
            return self.state.extend(_position(message), time.time_ns())

    def tries(self, message: Message | int) -> int:
        """How often it has been delivered, this time included."""
        return self.state.tries(_position(message))

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
