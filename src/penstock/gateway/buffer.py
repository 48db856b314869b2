"""Buffer: a journal in the middle of a link, so that its sink may be gone for days and the gateway may be ended.

``journal:DIRECTORY?retain_bytes=N&retain_age_s=S``. A message is on disk before the next one is accepted; it is removed
when the sink has handled it. Beyond ``retain_bytes`` (1 GiB by default) or ``retain_age_s`` the oldest messages are
removed, counted as lost and reported. Damage on disk costs the messages that it hits: they are counted as lost and
reported, and the link goes on with the next one. Several links may share a directory. While the disk is full nothing
more is accepted; space is freed as messages are handled.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import re
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock import address
from penstock._core.gateway import GatewayMessage
from penstock.errors import ClosedError, CorruptionError
from penstock.gateway import carriage
from penstock.gateway.durable import Forwarder
from penstock.gateway.errors import MessageFailed, ModuleError
from penstock.gateway.module import Module, Outlet
from penstock.quantities import check_duration, check_size, number_of

BATCH = 256
COUNTED = 4096  # messages that are read at once where they are only counted
MIN_SEGMENT_BYTES, MAX_SEGMENT_BYTES = 1 << 16, 8 << 20
FLUSH_S = 1.0
PLAIN_NAME = r"[A-Za-z0-9]+(?:[_-][A-Za-z0-9]+)*"
MAX_PLAIN = 128  # characters of a link's name that go into the name of its topic
RETAIN_BYTES = 1 << 30
# no time-out: this is the only reader, and unacknowledged messages are redelivered after a restart only
ACK_TIMEOUT_S = 100 * 365 * 86400.0
ACCOUNTED = "accounted"  # how many of the messages stored for a link were handled, or were removed and reported
REPAIRED = "the buffer was damaged, and the repair could not keep them"
log = logging.getLogger("penstock.gateway")


class Buffer(Module):
    """Stores and forwards."""

    durable = True

    def __init__(self, text: str, link: str) -> None:
        parsed = address.parse(text)
        retain_bytes = check_size(parsed.options.get("retain_bytes", RETAIN_BYTES), "retain_bytes")
        age_s = parsed.options.get("retain_age_s")
        self._directory = parsed.name
        self._topic = _topic_of(link)
        self._options: dict[str, Any] = {
            "segment_bytes": _segment_bytes(parsed.name, retain_bytes),
            "retain_bytes": retain_bytes,
            "retain_age_s": None if age_s is None else check_duration(age_s, "retain_age_s"),
            "retain_queues": True,
        }
        self._forwarder: Forwarder | None = None
        self._backlog_at_end: int | None = None
        self._met: CorruptionError | None = None  # damage that was found while messages were counted

    def create(self, broker: Outlet, configuration: Any) -> None:
        """Open the journal and find the position to continue from."""
        super().create(broker, configuration)
        try:
            self._open()
        except CorruptionError as error:
            raise CorruptionError(self._with_remedy(error), error.place) from None

    def _open(self) -> None:
        from penstock.journal.follow import JournalPublisher, share
        from penstock.journal.reading import topic_filter

        journal = share(self._directory, self._options)
        self._publisher = JournalPublisher(journal, self._topic)
        self._journal = journal
        self._queue = journal.queue(self._topic, topics=[self._topic], start="first", ack_timeout_s=ACK_TIMEOUT_S)
        self._kept_from = journal.first
        self._counting = threading.Lock()
        self._reading = False
        self._filter = topic_filter([self._topic])
        self._out: set[int] = set()  # positions that were read and are not acknowledged
        self._given_back: set[int] = set()  # those of them that will be redelivered
        place = max(self._queue.state.cursor, journal.first)
        for begin, end in self._queue.state.runs:  # handled, after some that were removed before they were read
            place = end + 1 if begin <= place <= end else place
        self._next = self._ordinal_at(place)  # ordinal in the topic: nothing from here on was read
        self._flush_due_s = 0.0
        self._open_books()

    def _open_books(self) -> None:
        """Find out how many messages were removed since the count was last stored: each message of this link was
        handled, is still stored, or was removed. The count is kept in the queue's state, so that one commit stores it
        together with the acknowledgements that it includes.
        """
        state = self._queue.state
        first = self._ordinal_at(self._journal.first)
        stored = self._following() - first
        ends = [(0, state.floor), *state.runs]
        stored -= sum(max(0, self._ordinal_at(end + 1) - max(first, self._ordinal_at(begin))) for begin, end in ends)
        holes = [hole for hole in self._journal.holes if hole.reason == "lost" and hole.last > state.floor]
        done = sum(max(0, min(end, hole.last) - max(begin, hole.first) + 1) for hole in holes for begin, end in ends)
        unknown = sum(hole.last - hole.first + 1 for hole in holes) - done
        if unknown:
            stored -= min(unknown, self._count_missing(state.floor + 1))
        self._accounted = int(state.settings.extra.get(ACCOUNTED, self._following() - 1 - stored))
        self._untold = max(0, self._following() - 1 - stored - self._accounted)
        self._untold_damaged = min(self._untold, unknown)
        self._account(0)

    def _count_missing(self, place: int) -> int:
        """How many messages of this link a repair could not keep, between others that are stored from a position on."""
        missing, last = 0, 0
        while place < self._journal.frontier:
            try:
                batch, place = self._journal.read_from(max(place, self._journal.first), COUNTED, None, self._filter)
            except CorruptionError as error:
                if error.positions is None:
                    raise
                last, place = 0, error.positions[1]  # damage that was not repaired is counted when it is read
                continue
            for ordinal in (int(message.ordinal or 0) for message in batch):
                missing += max(0, ordinal - last - 1) if last else 0
                last = ordinal
        return missing

    def _account(self, count: int) -> None:
        """Add messages that were handled, or that were removed and reported."""
        with self._journal.queue_lock:
            self._accounted += count
            state = self._queue.state
            state.change(replace(state.settings, extra={**state.settings.extra, ACCOUNTED: str(self._accounted)}))
            self._journal.touch_queue(state)

    def start(self) -> None:
        """Begin to forward."""
        self._forwarder = Forwarder(self, lambda: self, self._forward, BATCH)
        untold, self._untold = self._untold, 0
        damaged, self._untold_damaged = self._untold_damaged, 0
        met = self._met
        self._tell_gone(damaged, REPAIRED if met is None else f"the buffer is damaged: {self._with_remedy(met)}")
        self._tell_gone(untold - damaged)
        self._forwarder.start()

    def receive_many(self, messages: Sequence[GatewayMessage]) -> None:
        """Store them; they are on disk when this returns."""
        for part in self._parts(messages):
            try:
                carriage.send(self._publisher, part)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    self._journal.retain()  # otherwise handled segments would be removed only when the next one begins
                raise
            self._count_gone()

    def _parts(self, messages: Sequence[GatewayMessage]) -> Iterator[Sequence[GatewayMessage]]:
        """The messages in pieces that fit well into a segment. What is published together lies in one segment, and the
        bounds remove whole segments, so a large piece would cost more messages than necessary.
        """
        begin, size = 0, 0
        for at, message in enumerate(messages):
            size += len(message)
            if size > self._options["segment_bytes"] and at > begin:
                yield messages[begin:at]
                begin, size = at, len(message)
        yield messages[begin:]

    def receive(self, message: GatewayMessage) -> None:
        """Store one."""
        self.receive_many([message])

    @property
    def backlog(self) -> int:  # type: ignore[override]  # counted when somebody asks
        """Messages that are stored and not handled, including those on their way to the sink."""
        if self._backlog_at_end is not None:
            return self._backlog_at_end
        return max(0, self._following() - 1 - self._accounted - self._untold)

    # ---- the queue, for the forwarder

    def read_many(self, most: int, timeout: float) -> Sequence[Any]:
        """The next ones that are stored."""
        with self._counting:
            self._reading = True
        batch: Sequence[Any] = ()
        damage: CorruptionError | None = None
        try:
            batch = self._queue.read_many(most, timeout)
        except CorruptionError as error:
            damage = error
        finally:
            self._count_gone(batch)
        if damage is not None:
            self._pass_over(damage)
        if not batch and time.monotonic() >= self._flush_due_s > 0:
            self._queue.flush()
            self._flush_due_s = 0.0
        return batch

    def _count_gone(self, batch: Sequence[Any] | None = None) -> None:
        """Count and report messages of this link that the journal's bounds removed before they were read. ``batch`` was
        just read; while a batch is being read, only its reader knows what was read, so the reader counts.
        """
        with self._counting:
            if batch is None and self._reading:
                return
            self._reading = False
            gone, first = 0, self._journal.first
            for message in batch or ():
                self._given_back.discard(message.position)
                self._out.add(message.position)
            if first != self._kept_from:
                self._kept_from = first
                lost = {position for position in self._given_back if position < first}
                self._given_back -= lost
                self._out -= lost
                unread = [message.ordinal for message in batch or () if message.ordinal >= self._next]
                kept = min([self._ordinal_at(first), *unread[:1]])
                gone = len(lost) + max(0, kept - self._next)
                self._next = max(self._next, kept)
            for message in batch or ():
                self._next = max(self._next, message.ordinal + 1)
        self._tell_gone(gone)

    def _pass_over(self, damage: CorruptionError) -> None:
        """Continue behind damage; the messages of this link in it that were not handled are lost, counted and reported.
        If the reader does not know where the damage ends, nothing more is forwarded: the module counts as failed.
        """
        reason = self._with_remedy(damage)
        if damage.positions is None:
            if self.on_failure is not None:
                self.on_failure(ModuleError(f"the buffer is damaged, and nothing more is forwarded: {reason}"))
            raise ClosedError(reason)
        first, following = damage.positions
        with self._counting, self._journal.queue_lock:
            kept = self._ordinal_at(following)
            handled = sum(
                max(0, min(kept, self._ordinal_at(end + 1)) - max(self._next, self._ordinal_at(begin)))
                for begin, end in self._queue.state.runs
            )
            done = self._queue.state.runs
            hit = sum(not any(begin <= place <= end for begin, end in done) for place in range(first, following))
            numbered = max(0, kept - self._next - handled)
            gone = min(numbered, hit)
            unnumbered = self._count_unnumbered(first, following) if following - first > numbered else 0
            self._next = max(self._next, kept)
            self._queue.pass_over(first, following)
        end = " at its end, where messages may have been that were handled" if unnumbered else ""
        self._tell_gone(gone, f"the buffer is damaged{end}: {reason}", unnumbered)

    def _count_unnumbered(self, first: int, following: int) -> int:
        """How many damaged positions the numbers of no topic account for: they were the journal's end, and the numbers
        go on from what remained before it. The first link of the directory that passes them counts them; whose they
        were is not known.
        """
        states = self._journal.queue_states.values()
        if any(state.floor >= first or any(begin <= first <= end for begin, end in state.runs) for state in states):
            return 0
        before, after = dict[str, int](), dict[str, int]()
        for message in self._stored(self._journal.first, first):
            before[str(message.channel)] = int(message.ordinal) + 1
        whole = self._journal.first == 1
        if not before and not whole:
            return 0  # nothing says which numbers came before
        for message in self._stored(following, self._journal.frontier):
            after.setdefault(str(message.channel), int(message.ordinal))
        unnumbered = following - first
        for _, name, _, number, _ in self._journal.writer.topics():
            topic = name.decode()
            kept = after.get(topic, number)
            unnumbered -= max(0, kept - before.get(topic, 1 if whole else kept))
        return max(0, unnumbered)

    def _stored(self, place: int, end: int) -> Iterator[Any]:
        """What can be read between two positions, of all topics."""
        while place < end:
            try:
                batch, place = self._journal.read_from(max(place, self._journal.first), COUNTED)
            except CorruptionError as error:
                if error.positions is None:
                    raise
                place = error.positions[1]
                continue
            yield from (message for message in batch if int(message.position or 0) < end)

    def _with_remedy(self, damage: CorruptionError) -> str:
        from penstock.journal.recovery import mended_by

        told, remedy = str(damage), mended_by(self._directory)
        known = remedy in told or mended_by(Path(self._directory).absolute()) in told
        return told if known else f"{told}; {remedy}"

    def _tell_gone(self, gone: int, why: str = "", unnumbered: int = 0) -> None:
        """Report messages that were removed, and those whose numbers were given again. If nobody counts any more,
        because this module was given up when the gateway ended, the next start finds and reports the former.
        """
        if lost := gone + unnumbered:
            why = why or "the buffer is full, they were old, or its first files were removed by somebody else"
            told = f"{number_of(lost, 'message was', 'messages were')} lost: {why}"
            if self.on_failure is None or self.on_failure(MessageFailed(told, lost)) is not False:
                self._account(gone)

    def _ordinal_at(self, position: int) -> int:
        """The number in its topic of this link's first message at a position or after it, or of the next one."""
        following = self._following()
        while True:
            try:
                batch, _ = self._journal.read_from(max(position, self._journal.first), 1, None, self._filter)
            except CorruptionError as error:
                if error.positions is None:
                    raise
                self._met, position = error, error.positions[1]  # behind the damage
            else:
                return next((int(message.ordinal) for message in batch), following)

    def _following(self) -> int:
        """The number in its topic of the next message that is stored."""
        topic = self._topic.encode()
        return next((ordinal for _, name, _, ordinal, _ in self._journal.writer.topics() if name == topic), 1)

    def ack_many(self, batch: Sequence[Any], begin: int, end: int) -> None:
        """Acknowledge them; on disk with the next commit, at the latest a second later."""
        with self._journal.queue_lock:  # in one commit
            self._account(self._queue.ack_many(batch[begin:end]))
        self._out.difference_update(message.position for message in batch[begin:end])
        if time.monotonic() >= self._flush_due_s:
            self._queue.flush()
            self._flush_due_s = time.monotonic() + FLUSH_S

    def nack_many(self, batch: Sequence[Any], begin: int, end: int) -> None:
        """Return them: they were not handled."""
        for message in batch[begin:end]:
            self._given_back.add(message.position)
            self._queue.nack(message, delay_s=1.0)

    def _forward(self, data: Any) -> None:
        self.broker.publish(self, carriage.arrived(data))

    def stop(self) -> None:
        """Stop forwarding, and wait for what the sink is handling. What it fails at stays stored."""
        if self._forwarder is not None:
            self._forwarder.stop()
            with self._counting:  # a message that is being handled is redelivered only if it is still stored
                self._given_back = set(self._out)
                self._kept_from = 0
            self._count_gone()

    def kill(self) -> None:
        """End all waits."""
        if self._forwarder is not None:
            self._forwarder.cut()

    def destroy(self) -> None:
        """Close the journal."""
        self.kill()
        self.stop()
        self._queue.flush()
        self._backlog_at_end = self.backlog
        self._publisher.close()


def _topic_of(link: str) -> str:
    """The topic of a link. A name with characters that a topic cannot have is changed, so a digest of the whole name is
    added: otherwise two links could get the same topic.
    """
    plain = re.sub(r"[^A-Za-z0-9_-]+", "_", link)
    if re.fullmatch(rf"{PLAIN_NAME} -> {PLAIN_NAME}", link):
        return plain
    return f"{plain[:MAX_PLAIN]}_{hashlib.blake2s(link.encode(), digest_size=8).hexdigest()}"


def _segment_bytes(directory: str, retain_bytes: int) -> int:
    """The size of a segment. A segment is freed as a whole when all of it was handled, so it is a small part of the
    bound and of the disk: a full disk then has room again soon after the sink is back.
    """
    existing = next(path for path in (Path(directory).absolute(), *Path(directory).absolute().parents) if path.exists())
    part = min(retain_bytes // 8, shutil.disk_usage(existing).total // 32)
    return max(MIN_SEGMENT_BYTES, min(MAX_SEGMENT_BYTES, part))
