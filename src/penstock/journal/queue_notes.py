"""How a journal keeps its queues in the log: their names, settings and places. No I/O, no clock.

The native ``QueueState``, which the broker's queues use too, knows what is done, in flight or due for redelivery. This
adds a name and settings, and makes notes of it: ``changes()`` for the next commit, ``encode()`` for a snapshot. A
record is the queue's name and then notes, of which each may be replayed twice.

Not thread-safe: its owner calls it under its own lock. Times are nanoseconds of the owner's realtime clock.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Final

from penstock._core import journal as native
from penstock.errors import CorruptionError, InvalidArgument
from penstock.topics import MAX_NAME_BYTES, check_pattern

OLD_NOTE: Final = struct.Struct("<BQQ")  # notes of old versions; read, never written (except DELETED)
SIZED: Final = struct.Struct("<BI")
HEAD: Final = struct.Struct("<H")
# sizes of notes; SETTINGS and PLACES have their own size, 1 to 4 and 6 are old notes
SETTINGS, DELETED, PLACES = 5, 7, 8


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """The settings of a queue. ``max_tries=0``: no limit. ``dead_letter``: a topic, empty for none."""

    topics: tuple[str, ...] = (">",)
    ack_timeout_ns: int = 30_000_000_000
    max_tries: int = 0
    dead_letter: str = ""
    max_in_flight: int = 65536
    extra: dict[str, str] = field(default_factory=dict)  # for the owner's use

    def __post_init__(self) -> None:
        for pattern in self.topics:
            check_pattern(pattern)
        if self.ack_timeout_ns <= 0 or self.max_tries < 0 or self.max_in_flight < 1:
            raise InvalidArgument("a queue's ack time-out and bound must be positive, its tries 0 or more")


class QueueState:
    """The state of one queue: ``places`` says what is done and what is in flight."""

    def __init__(self, name: str, settings: QueueSettings | None = None, *, floor: int = 0) -> None:
        if not name or len(name.encode("utf-8", "surrogateescape")) > MAX_NAME_BYTES:
            raise InvalidArgument(f"a queue's name has 1 to {MAX_NAME_BYTES} bytes of UTF-8")
        self.name = name
        self.settings = settings or QueueSettings()
        self.places = native.QueueState(floor + 1)
        self.deleted = False
        self._notes: list[bytes] = []  # notes of settings and deletion that `changes` has not returned yet

    @property
    def floor(self) -> int:
        """Everything up to it is done."""
        return self.places.floor - 1

    @property
    def cursor(self) -> int:
        """Where to look for messages that were never delivered."""
        return self.places.cursor

    @property
    def runs(self) -> list[tuple[int, int]]:
        """What is done above the floor, as runs: first and last position of each."""
        return self.places.runs

    @property
    def in_flight(self) -> int:
        """How many are in flight."""
        return self.places.in_flight

    @property
    def waiting(self) -> int:
        """How many are due for redelivery later, or have used up their tries."""
        return self.places.waiting

    def seek(self, position: int) -> None:
        """Continue with ``position``, forwards or backwards: everything before it counts as done, nothing from it
        on."""
        self.places.reset(position)

    def delete(self) -> None:
        """Mark the queue as deleted."""
        self.deleted = True
        self._notes.append(OLD_NOTE.pack(DELETED, 0, 0))

    def change(self, settings: QueueSettings) -> None:
        """Change the settings."""
        if settings != self.settings:
            self.settings = settings
            self._notes.append(_settings_note(settings))

    def changes(self) -> bytes:
        """The changes since the last call, for a state record; empty if there are none."""
        notes, self._notes = self._notes, []
        if self.places.changed:
            notes.append(_sized(PLACES, self.places.delta()))
        return self._record(*notes) if notes else b""

    def encode(self) -> bytes:
        """The complete state, for a snapshot, including what ``changes`` has not returned yet."""
        if self.deleted:
            return self._record(OLD_NOTE.pack(DELETED, 0, 0))
        return self._record(_settings_note(self.settings), _sized(PLACES, self.places.snapshot()))

    def done_record(self, position: int) -> bytes:
        """The record that marks a message as done, for the commit that stores its copy. Acknowledge the message after
        that commit."""
        return self._record(_sized(PLACES, self.places.done_record(position)))

    def _record(self, *notes: bytes) -> bytes:
        name = self.name.encode("utf-8", "surrogateescape")
        return HEAD.pack(len(name)) + name + b"".join(notes)

    def apply(self, data: bytes) -> None:
        """Replay notes of ``changes`` or ``encode``, once or more often; only before anything is delivered."""
        try:
            self._apply(data)
        except struct.error:
            raise CorruptionError(f"the notes of queue {self.name!r} end in the middle") from None

    def _apply(self, data: bytes) -> None:
        at = HEAD.size + HEAD.unpack_from(data)[0]
        while at < len(data):
            if data[at] in (SETTINGS, PLACES):
                kind, size = SIZED.unpack_from(data, at)
                note = data[at + SIZED.size : at + SIZED.size + size]
                at += SIZED.size + size
                if kind == SETTINGS:
                    self.settings = _decode_settings(note)
                elif not self.places.apply(note):
                    text = f"the record of what queue {self.name!r} has delivered and acknowledged cannot be read"
                    raise CorruptionError(text)
                continue
            kind, first, second = OLD_NOTE.unpack_from(data, at)
            self.deleted = self.deleted or kind == DELETED
            self.places.apply_note(kind, first, second)
            at += OLD_NOTE.size


def restore(records: Iterable[bytes]) -> dict[str, QueueState]:
    """The queues, restored from their records in the order of storing."""
    states: dict[str, QueueState] = {}
    for data in records:
        name = queue_name(data)
        state = states.get(name)
        if state is None or state.deleted:
            state = states[name] = QueueState(name)
        state.apply(data)
    alive = {name: state for name, state in states.items() if not state.deleted}
    for state in alive.values():
        state.places.recovered()
    return alive


def queue_name(data: bytes) -> str:
    """The name of the queue that a record belongs to."""
    if len(data) < HEAD.size:
        raise CorruptionError("the notes of a queue end before its name")
    size = HEAD.unpack_from(data)[0]
    return data[HEAD.size : HEAD.size + size].decode("utf-8", "surrogateescape")


def _sized(kind: int, data: bytes) -> bytes:
    return SIZED.pack(kind, len(data)) + data


def _settings_note(settings: QueueSettings) -> bytes:
    return _sized(SETTINGS, json.dumps(asdict(settings), separators=(",", ":")).encode())


def _decode_settings(data: bytes) -> QueueSettings:
    try:
        values = json.loads(data)
        return QueueSettings(**{**values, "topics": tuple(values["topics"])})
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptionError(f"a queue's settings cannot be read: {error}") from None
