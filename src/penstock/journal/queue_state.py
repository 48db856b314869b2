"""QueueState: what a durable queue knows - what is done, what is out, what comes again and when. No I/O, no clock.

Rules:

- A queue walks the journal with a cursor. Its owner scans from ``cursor`` and offers what it found; what the queue
  wants delivered comes back. Positions of other topics are done as soon as they are passed.
- ``floor``: everything up to it is done. ``runs``: what is done above it. In flight: delivered, not yet acknowledged,
  with a deadline and a count of tries. Waiting: to be delivered again at a time.
- Each change is noted; ``changes()`` gives the notes as bytes to be stored in the next commit, ``encode()`` the whole
  state for a snapshot. Notes are replayed by ``apply`` and may be replayed twice: they are idempotent.
- After a restart nothing is in flight: the cursor goes back to the floor and what is not done is delivered again, with
  its tries counted.
- Everything is bounded by ``max_in_flight``: while so many are out nothing new is taken.

Not thread-safe: its owner calls it under its own lock. Times are nanoseconds of the owner's realtime clock.
"""

from __future__ import annotations

import heapq
import json
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Final, NamedTuple

from penstock.errors import CorruptionError, InvalidArgument
from penstock.topics import MAX_NAME_BYTES, check_pattern

NOTE: Final = struct.Struct("<BQQ")
HEAD: Final = struct.Struct("<H")
DONE, TRIES, CURSOR, WAITING, SETTINGS, SEEK, DELETED = range(1, 8)


class Delivery(NamedTuple):
    """A message to hand out; ``tries`` counts this time too."""

    position: int
    tries: int


class Flight(NamedTuple):
    """A message that is out. ``lead`` is the first position since the one before it: passed with it."""

    lead: int
    deadline_ns: int
    tries: int


class Wait(NamedTuple):
    """A message that comes again."""

    lead: int
    due_ns: int
    tries: int


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """What a queue was made with. ``max_tries`` 0: for ever. ``dead_letter``: a topic, empty for none."""

    topics: tuple[str, ...] = (">",)
    ack_timeout_ns: int = 30_000_000_000
    max_tries: int = 0
    dead_letter: str = ""
    max_in_flight: int = 65536
    extra: dict[str, str] = field(default_factory=dict)  # the owner's own

    def __post_init__(self) -> None:
        for pattern in self.topics:
            check_pattern(pattern)
        if self.ack_timeout_ns <= 0 or self.max_tries < 0 or self.max_in_flight < 1:
            raise InvalidArgument("a queue's ack time-out and bound must be positive, its tries 0 or more")


class QueueState:
    """The state of one queue."""

    def __init__(self, name: str, settings: QueueSettings | None = None, *, floor: int = 0) -> None:
        if not name or len(name.encode("utf-8", "surrogateescape")) > MAX_NAME_BYTES:
            raise InvalidArgument(f"a queue's name has 1 to {MAX_NAME_BYTES} bytes of UTF-8")
        self.name = name
        self.settings = settings or QueueSettings()
        self.floor = floor
        self.cursor = floor + 1
        self.deleted = False
        self.acked = 0
        self.redelivered = 0
        self.dead: list[int] = []  # used up their tries: their owner moves them away and acknowledges them
        self._firsts: list[int] = []  # runs above the floor, sorted and apart: firsts and lasts
        self._lasts: list[int] = []
        self._flights: dict[int, Flight] = {}  # in order of delivery, hence of deadline
        self._waits: dict[int, Wait] = {}
        self._heap: list[tuple[int, int]] = []  # (due, position) of the waits; stale ones are passed over
        self._dying: dict[int, Flight] = {}
        self._tries: dict[int, int] = {}  # known from before a restart
        self._due: dict[int, int] = {}
        self._delivered_to = floor + 1  # positions below it were delivered at least once
        self._notes: list[bytes] = []
        self._last = floor  # the last position that was passed
        self._told_cursor = floor + 1

    # -- looking -----------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """How many are out."""
        return len(self._flights) + len(self._dying)

    @property
    def waiting(self) -> int:
        """How many come again later."""
        return len(self._waits)

    @property
    def room(self) -> int:
        """How many more may be taken."""
        return max(0, self.settings.max_in_flight - len(self._flights) - len(self._waits) - len(self._dying))

    @property
    def runs(self) -> list[tuple[int, int]]:
        """What is done above the floor."""
        return list(zip(self._firsts, self._lasts, strict=True))

    def is_done(self, position: int) -> bool:
        """Whether it was acknowledged or passed."""
        if position <= self.floor:
            return True
        at = bisect_right(self._firsts, position) - 1
        return at >= 0 and self._lasts[at] >= position

    def tries(self, position: int) -> int:
        """How often it has been delivered as far as is known."""
        out = self._flights.get(position) or self._waits.get(position) or self._dying.get(position)
        return out.tries if out else self._tries.get(position, 0)

    def next_due_ns(self) -> int | None:
        """When something happens by itself: a deadline passes or a wait ends."""
        times = []
        if self._flights:
            times.append(next(iter(self._flights.values())).deadline_ns)
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        if self._heap:
            times.append(self._heap[0][0])
        return min(times) if times else None

    # -- delivering --------------------------------------------------------------------------------------------------

    def offer(self, positions: Sequence[int], scanned_to: int, now_ns: int) -> list[Delivery]:
        """Positions found from the cursor on, in order, everything below ``scanned_to`` having been looked at."""
        deliveries: list[Delivery] = []
        deadline = now_ns + self.settings.ack_timeout_ns
        plain = not self._firsts and not self._tries and not self._due and self.cursor >= self._delivered_to
        lead = self._last + 1
        for position in positions:
            if plain:
                self._flights[position] = Flight(lead, deadline, 1)
                deliveries.append(Delivery(position, 1))
            elif not self.is_done(position):
                self._take_again(position, lead, now_ns, deadline, deliveries)
            elif lead < position:
                self._mark_done(lead, position, note=False)  # of other topics, up to what was done before a restart
            lead = position + 1
        self.cursor = max(self.cursor, scanned_to)
        self._last = max(self._last, scanned_to - 1)
        self._delivered_to = max(self._delivered_to, self.cursor)
        if lead < scanned_to:
            self._mark_done(lead, scanned_to - 1, note=False)  # found again by scanning
        return deliveries

    def _take_again(self, position: int, lead: int, now_ns: int, deadline: int, deliveries: list[Delivery]) -> None:
        before = self._tries.pop(position, 1 if position < self._delivered_to else 0)
        due = self._due.pop(position, 0)
        if due > now_ns:
            self._wait(position, Wait(lead, due, before))
        else:
            self._put_out(position, lead, before + 1, deadline, deliveries)

    def _put_out(self, position: int, lead: int, tries: int, deadline: int, deliveries: list[Delivery]) -> None:
        if self.settings.max_tries and tries > self.settings.max_tries:
            self._dying[position] = Flight(lead, 0, tries - 1)
            self.dead.append(position)
            return
        self._flights[position] = Flight(lead, deadline, tries)
        if tries > 1:
            self.redelivered += 1
            self._notes.append(NOTE.pack(TRIES, position, tries))
        deliveries.append(Delivery(position, tries))

    def due(self, now_ns: int, most: int = 1024) -> list[Delivery]:
        """What is to be delivered again now: deadlines that passed and waits that ended. Look at ``dead`` after it."""
        self.expire(now_ns)
        deliveries: list[Delivery] = []
        deadline = now_ns + self.settings.ack_timeout_ns
        while self._heap and len(deliveries) < most and self._heap[0][0] <= now_ns:
            item = heapq.heappop(self._heap)
            if self._is_current(item):
                wait = self._waits.pop(item[1])
                self._put_out(item[1], wait.lead, wait.tries + 1, deadline, deliveries)
        return deliveries

    def expire(self, now_ns: int) -> int:
        """Take back what was out for too long; gives how many."""
        self._clamp(now_ns)
        late = []
        for position, flight in self._flights.items():
            if flight.deadline_ns > now_ns:
                break
            late.append(position)
        for position in late:
            flight = self._flights.pop(position)
            self._wait(position, Wait(flight.lead, now_ns, flight.tries))
        return len(late)

    def _clamp(self, now_ns: int) -> None:
        """No deadline is further away than the time-out: not after the clock was set back, nor one made shorter."""
        limit = now_ns + self.settings.ack_timeout_ns
        out = self._flights
        if out and max(next(iter(out.values())).deadline_ns, next(reversed(out.values())).deadline_ns) > limit:
            self._flights = {p: f if f.deadline_ns <= limit else f._replace(deadline_ns=limit) for p, f in out.items()}

    def _wait(self, position: int, wait: Wait) -> None:
        self._waits[position] = wait
        heapq.heappush(self._heap, (wait.due_ns, position))

    def _is_current(self, item: tuple[int, int]) -> bool:
        wait = self._waits.get(item[1])
        return wait is not None and wait.due_ns == item[0]

    # -- answering ---------------------------------------------------------------------------------------------------

    def ack(self, position: int) -> bool:
        """Done with it; False when it was not out (done already, or never delivered)."""
        out = self._flights.pop(position, None) or self._waits.pop(position, None) or self._dying.pop(position, None)
        if out is None:
            return False
        self.acked += 1
        self._mark_done(out.lead, position)
        return True

    def ack_many(self, positions: Iterable[int]) -> int:
        """Done with them; gives how many were out. Neighbours become one note."""
        count, first, last = 0, 0, -1
        flights = self._flights
        for position in positions:
            out = flights.pop(position, None) or self._waits.pop(position, None) or self._dying.pop(position, None)
            if out is None:
                continue
            count += 1
            if out.lead == last + 1:
                last = position
                continue
            if last >= first > 0:
                self._mark_done(first, last)
            first, last = out.lead, position
        if last >= first > 0:
            self._mark_done(first, last)
        self.acked += count
        return count

    def ack_through(self, position: int) -> int:
        """Done with everything that is out up to and with ``position``."""
        out = {**self._flights, **self._waits, **self._dying}
        return self.ack_many(sorted(p for p in out if p <= position))

    def nack(self, position: int, now_ns: int, delay_ns: int = 0) -> bool:
        """Not done: deliver it again after ``delay_ns``. False when it was not out."""
        flight = self._flights.pop(position, None)
        if flight is None:
            return False
        self._wait(position, Wait(flight.lead, now_ns + delay_ns, flight.tries))
        self._notes.append(NOTE.pack(TRIES, position, flight.tries))
        if delay_ns:
            self._notes.append(NOTE.pack(WAITING, position, now_ns + delay_ns))
        return True

    def extend(self, position: int, now_ns: int) -> bool:
        """Its consumer is still at it: a fresh deadline."""
        flight = self._flights.pop(position, None)
        if flight is None:
            return False
        self._flights[position] = flight._replace(deadline_ns=now_ns + self.settings.ack_timeout_ns)
        return True

    def give_back(self, positions: Iterable[int], now_ns: int) -> int:
        """Their consumer has gone: deliver them again at once; what was never seen does not count as tried."""
        count = 0
        for position in positions:
            flight = self._flights.pop(position, None)
            if flight is not None:
                self._wait(position, Wait(flight.lead, now_ns, flight.tries))
                count += 1
        return count

    def untake(self, deliveries: Iterable[Delivery], now_ns: int) -> None:
        """They could not be handed out after all: deliver them again at once, this time not counted."""
        for position, _ in deliveries:
            flight = self._flights.pop(position, None)
            if flight is not None:
                self._wait(position, Wait(flight.lead, now_ns, flight.tries - 1))

    def bury(self, position: int) -> bytes | None:
        """What is stored with the copy of one that used up its tries; ``ack`` it after that. None: it is not dying."""
        flight = self._dying.get(position)
        return None if flight is None else self._head() + NOTE.pack(DONE, flight.lead, position)

    def not_buried(self, positions: Iterable[int]) -> None:
        """Their copies could not be stored: they are among the ``dead`` again."""
        self.dead += [position for position in positions if position in self._dying]

    def seek(self, position: int) -> None:
        """Go on with ``position``, forwards or backwards: everything before it is done, nothing from it on."""
        self._reset(position - 1)
        self._notes.append(NOTE.pack(SEEK, position, 0))

    def _reset(self, floor: int) -> None:
        self.floor, self.cursor, self._last = floor, floor + 1, floor
        self._told_cursor = self._delivered_to = floor + 1
        for kept in (self._firsts, self._lasts, self._flights, self._waits, self._heap, self._dying, self.dead):
            kept.clear()
        self._tries.clear()
        self._due.clear()

    def delete(self) -> None:
        """The queue is no more."""
        self.deleted = True
        self._notes.append(NOTE.pack(DELETED, 0, 0))

    def change(self, settings: QueueSettings) -> None:
        """Other settings from now on."""
        if settings != self.settings:
            self.settings = settings
            self._notes.append(_settings_note(settings))

    def _mark_done(self, first: int, last: int, *, note: bool = True) -> None:
        if note:
            self._notes.append(NOTE.pack(DONE, first, last))
        if first <= self.floor + 1:
            self.floor = max(self.floor, last)
        else:
            self._add_run(first, last)
        while self._firsts and self._firsts[0] <= self.floor + 1:
            self.floor = max(self.floor, self._lasts.pop(0))
            self._firsts.pop(0)

    def _add_run(self, first: int, last: int) -> None:
        low = bisect_left(self._lasts, first - 1)
        high = bisect_right(self._firsts, last + 1)
        if low < high:
            first, last = min(first, self._firsts[low]), max(last, self._lasts[high - 1])
        self._firsts[low:high] = [first]
        self._lasts[low:high] = [last]

    # -- keeping -----------------------------------------------------------------------------------------------------

    @property
    def changed(self) -> bool:
        """Whether there is something to store."""
        return bool(self._notes) or self.cursor != self._told_cursor

    def changes(self) -> bytes:
        """What has happened since the last call, for a state record; empty when nothing has."""
        notes, self._notes = self._notes, []
        if self.cursor != self._told_cursor:
            notes.append(NOTE.pack(CURSOR, self.cursor, 0))
            self._told_cursor = self.cursor
        return self._head() + b"".join(notes) if notes else b""

    def encode(self) -> bytes:
        """The whole state, for a snapshot; what ``changes`` has not given yet is in it too."""
        if self.deleted:
            return self._head() + NOTE.pack(DELETED, 0, 0)
        notes = [_settings_note(self.settings), NOTE.pack(SEEK, self.floor + 1, 0)]
        notes += [NOTE.pack(DONE, first, last) for first, last in self.runs]
        notes += [NOTE.pack(TRIES, p, flight.tries) for p, flight in self._flights.items() if flight.tries > 1]
        notes += [NOTE.pack(TRIES, p, wait.tries) for p, wait in self._waits.items()]
        notes += [NOTE.pack(TRIES, p, flight.tries) for p, flight in self._dying.items()]
        notes += [NOTE.pack(TRIES, position, tries) for position, tries in self._tries.items()]
        notes += [NOTE.pack(WAITING, p, wait.due_ns) for p, wait in self._waits.items()]
        notes += [NOTE.pack(WAITING, position, due) for position, due in self._due.items()]
        notes.append(NOTE.pack(CURSOR, max(self.cursor, self._delivered_to), 0))
        return self._head() + b"".join(notes)

    def _head(self) -> bytes:
        name = self.name.encode("utf-8", "surrogateescape")
        return HEAD.pack(len(name)) + name

    def apply(self, data: bytes) -> None:
        """Replay what ``changes`` or ``encode`` gave, once or more often; only before anything is delivered."""
        try:
            self._apply(data)
        except struct.error:
            raise CorruptionError(f"the notes of queue {self.name!r} end in the middle") from None

    def _apply(self, data: bytes) -> None:
        at = HEAD.size + HEAD.unpack_from(data)[0]
        while at < len(data):
            if data[at] == SETTINGS:
                size = struct.unpack_from("<I", data, at + 1)[0]
                self.settings = _decode_settings(data[at + 5 : at + 5 + size])
                at += 5 + size
                continue
            self._replay(*NOTE.unpack_from(data, at))
            at += NOTE.size

    def _replay(self, kind: int, first: int, second: int) -> None:
        if kind == DONE:
            self._mark_done(first, second, note=False)
            self.cursor = self._told_cursor = self.floor + 1
            self._last = self.floor
        elif kind == TRIES:
            self._tries[first] = max(second, self._tries.get(first, 0))
        elif kind == CURSOR:
            self._delivered_to = max(self._delivered_to, first)
        elif kind == WAITING:
            self._due[first] = second
        elif kind == SEEK:
            self._reset(first - 1)
        elif kind == DELETED:
            self.deleted = True

    def forget_done(self) -> None:
        """After replaying: drop tries and waits of what is done."""
        self._tries = {p: tries for p, tries in self._tries.items() if not self.is_done(p)}
        self._due = {p: due for p, due in self._due.items() if not self.is_done(p)}


def queue_name(data: bytes) -> str:
    """Whose notes these are."""
    if len(data) < HEAD.size:
        raise CorruptionError("the notes of a queue end before its name")
    size = HEAD.unpack_from(data)[0]
    return data[HEAD.size : HEAD.size + size].decode("utf-8", "surrogateescape")


def restore(records: Iterable[bytes]) -> dict[str, QueueState]:
    """Queues from their notes in order of storing."""
    states: dict[str, QueueState] = {}
    for data in records:
        name = queue_name(data)
        state = states.get(name)
        if state is None or state.deleted:
            state = states[name] = QueueState(name)
        state.apply(data)
    alive = {name: state for name, state in states.items() if not state.deleted}
    for state in alive.values():
        state.forget_done()
    return alive


def _settings_note(settings: QueueSettings) -> bytes:
    text = json.dumps(asdict(settings), separators=(",", ":")).encode()
    return struct.pack("<BI", SETTINGS, len(text)) + text


def _decode_settings(data: bytes) -> QueueSettings:
    try:
        values = json.loads(data)
        return replace(QueueSettings(**{**values, "topics": tuple(values["topics"])}))
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptionError(f"a queue's settings cannot be read: {error}") from None
