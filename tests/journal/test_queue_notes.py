"""The state of queues and how it is kept, against a slow model of itself, with restarts at any moment."""

from __future__ import annotations

import random
import struct

import pytest

from penstock._core import Message
from penstock._core.broker import gather
from penstock.errors import CorruptionError
from penstock.journal.queue_notes import QueueSettings, QueueState, queue_name, restore

TIMEOUT_NS = 100


def offer(state: QueueState, positions: list[int], following: int, now_ns: int) -> list[int]:
    """What is handed out of what a look forward found."""
    batch = gather([Message(b"x", ordinal=1, channel="t", position=position) for position in positions])
    deadline_ns = now_ns + state.settings.ack_timeout_ns
    sent = state.places.take(batch, following, 1, deadline_ns, now_ns, state.settings.max_tries)
    return [] if sent is None else list(sent.positions)


def due(state: QueueState, now_ns: int, most: int = 1024) -> list[tuple[int, int]]:
    """What comes again now, with its tries so far; it is out again, unless it is dead."""
    deadline_ns, most_tries = now_ns + state.settings.ack_timeout_ns, state.settings.max_tries
    state.places.expire(now_ns, deadline_ns)
    found = state.places.due(now_ns, most)
    for position, tries in found:
        if not most_tries or tries < most_tries:
            assert state.places.redeliver(position, 1, deadline_ns) == tries + 1
    return found


def small(**options: int) -> QueueState:
    return QueueState("q", QueueSettings(ack_timeout_ns=TIMEOUT_NS, **options))  # type: ignore[arg-type]


def kept(state: QueueState) -> QueueState:
    """The same after a restart."""
    return restore([state.encode()])[state.name]


def test_acks_move_the_floor_over_what_others_own() -> None:
    state = small()
    assert offer(state, [2, 5, 9], 12, 0) == [2, 5, 9]
    assert state.floor == 1, "what others own is done as soon as it is passed"
    assert state.places.acknowledge_each(5) == 1 and state.places.acknowledge_each(5) == 0
    assert state.floor == 1 and state.runs == [(3, 8), (10, 11)]
    assert state.places.acknowledge_each(2) and state.floor == 8
    assert state.places.acknowledge_each(9) and state.floor == 11 and state.runs == []


def test_deadlines_and_tries() -> None:
    state = small(max_tries=2)
    offer(state, [1, 2], 3, 0)
    assert due(state, 99) == []
    assert due(state, 100) == [(1, 1), (2, 1)]
    assert state.places.acknowledge_each(1)
    assert due(state, 200) == [(2, 2)] and state.places.deliveries(2) == 2, "it is dead: delivered as often as may be"
    assert state.places.postpone(2, 1 << 62) and due(state, 10_000) == []
    assert state.floor == 1, "what is dead is not done until its owner has moved it"
    again = kept(state)
    assert offer(again, [2], 3, 0) == [] and due(again, 0) == [(2, 2)], "nor is it delivered after a restart"
    again = restore([state.encode(), state.done_record(2)])["q"]
    assert offer(again, [2], 3, 0) == [] and due(again, 0) == [], "the note that goes with its copy says that it is done"
    assert state.floor == 1 and state.places.acknowledge_each(2) and state.floor == 2


def test_a_delay_outlives_a_restart() -> None:
    state = small()
    offer(state, [1, 2, 3], 4, 0)
    assert state.places.return_message(0, 1, 60, True) and state.places.return_message(0, 2, 10)
    assert due(state, 59) == [(2, 1)] and state.places.next_time_ns == 60
    for again in (kept(state), restore([small().encode(), state.changes()])["q"]):
        assert offer(again, [1, 2, 3], 4, 59) == [2, 3]
        assert due(kept(again), 60) == [] and due(again, 60) == [(1, 1)]


def test_what_never_reached_anyone_does_not_count() -> None:
    state = small()
    offer(state, [1], 2, 0)
    assert state.places.take_back(1, 0) and not state.places.take_back(1, 0)
    assert due(state, 0) == [(1, 0)] and state.places.deliveries(1) == 1


def test_whoever_is_still_at_it_gets_more_time() -> None:
    state = small()
    offer(state, [1, 2], 3, 0)
    assert state.places.extend(1, 150) and not state.places.extend(3, 150)
    assert due(state, 100) == [(2, 1)] and due(state, 149) == [] and due(state, 150) == [(1, 1)]


def test_acks_of_many_are_few_notes(seed: int) -> None:
    state = small()
    offer(state, list(range(1, 2001, 2)), 2001, 0)
    state.changes()
    assert state.places.acknowledge(0, 0, 500, True) == 250 and state.floor == 500
    assert state.places.acknowledge_each(list(range(601, 701, 2))) == 50 and (600, 700) in state.runs
    stored = [small().encode(), state.changes()]
    assert len(stored[1]) < 100, "neighbours are one note"
    rest = [position for position in range(501, 2001, 2) if not 601 <= position < 701]
    random.Random(seed).shuffle(rest)
    assert state.places.acknowledge_each(rest[:300]) == 300
    again = restore([*stored, state.changes()])["q"]
    assert offer(again, [p for p in range(1, 2001, 2) if p >= again.places.cursor], 2001, 0) == sorted(rest[300:])
    assert state.places.acknowledge_each(tuple(rest)) == len(rest) - 300 and state.floor == 2000


def test_settings_and_deletion_survive() -> None:
    state = QueueState("näme", QueueSettings(topics=("a.*",), max_tries=3, dead_letter="dead", extra={"x": "y"}))
    snapshot = state.encode()
    assert queue_name(snapshot) == "näme"
    again = restore([snapshot])["näme"]
    assert again.settings == state.settings
    state.delete()
    assert restore([snapshot, state.changes()]) == {}


def test_cut_notes_are_damage() -> None:
    state = small()
    offer(state, [1], 2, 0)
    state.places.acknowledge_each(1)
    with pytest.raises(CorruptionError):
        restore([state.changes()[:-1]])


def test_notes_of_older_journals_are_read() -> None:
    """One note for each thing that happened: kind, two numbers."""
    done, tries, cursor, waiting, seek = 1, 2, 3, 4, 6
    notes = [(seek, 5, 0), (done, 8, 9), (tries, 7, 3), (waiting, 10, 50), (cursor, 12, 0), (done, 5, 6), (tries, 6, 9)]
    record = struct.pack("<H", 1) + b"q" + b"".join(struct.pack("<BQQ", *note) for note in notes)
    for state in (restore([record])["q"], restore([record, record])["q"], kept(restore([record])["q"])):
        assert state.floor == 6 and state.runs == [(8, 9)] and state.places.cursor == 7
        assert offer(state, [7, 10, 11, 12], 13, 0) == [7, 11, 12]
        assert [state.places.deliveries(position) for position in (7, 10, 11, 12)] == [4, 1, 2, 1]
        state.places.acknowledge_each([7, 11, 12])
        assert due(state, 50) == [(10, 1)] and state.floor == 9
        assert restore([record, state.changes()])["q"].floor == 9, "newer notes follow them in the same segment"


def test_against_a_model_with_restarts(seed: int) -> None:
    for turn in range(30):
        run_model(random.Random(f"{seed}-{turn}"))


def run_model(chance: random.Random) -> None:
    mine = sorted(chance.sample(range(1, 400), 150))
    state = small(max_in_flight=40, max_tries=chance.choice([0, 0, 4]))
    done: set[int] = set()
    tried = dict.fromkeys(mine, 0)
    out: set[int] = set()
    stored = [state.encode()]
    now = 0
    for _ in range(4000):
        now += chance.randrange(20)
        handed = []
        for position, tries in due(state, now, chance.randrange(1, 5)):
            if state.settings.max_tries and tries >= state.settings.max_tries:
                assert tried[position] >= 1 and state.places.acknowledge_each(position)
                done.add(position)
            else:
                handed.append(position)
        room = 40 - state.places.outstanding
        if room > 0:
            cursor = state.places.cursor
            following = min(400, cursor + chance.randrange(1, 30))
            found = [p for p in mine if cursor <= p < following][:room]
            if len(found) == room:
                following = found[-1] + 1
            handed += offer(state, found, max(following, cursor), now)
        for position in handed:
            assert position not in done, "what was acknowledged does not come again"
            tried[position] += 1
            assert 1 <= state.places.deliveries(position) <= tried[position]
            out.add(position)
        for position in chance.sample(sorted(out), min(len(out), chance.randrange(4))):
            out.discard(position)
            what = chance.randrange(5)
            if what == 0:
                state.places.return_message(0, position, now + chance.randrange(100), chance.random() < 0.5)
            elif what == 1:
                state.places.take_back(position, now)
            elif state.places.acknowledge_each(position):
                done.add(position)
        assert state.places.outstanding <= 40
        assert state.floor < min((p for p in mine if p not in done), default=401)
        what = chance.randrange(40)
        if what < 4:
            stored.append(state.changes())
        elif what == 4:  # a roll: a snapshot that the last notes follow once more
            last = state.changes()
            stored = [state.encode(), last] if last else [state.encode()]
        elif what == 5:  # a crash right after a commit
            stored.append(state.changes())
            state = restore([record for record in stored if record])["q"]
            out.clear()
            now += 1000  # waits and deadlines of before are over
        if len(done) == len(mine):
            break
    assert len(done) == len(mine)
    assert offer(state, [p for p in mine if p >= state.places.cursor], 400, now) == []
    assert state.floor >= mine[-1]


def test_no_deadline_is_further_away_than_the_time_out() -> None:
    """The clock may be set back, and the time-out made shorter, while messages are out."""
    state = small()
    assert offer(state, [1, 2], 3, 10_000) == [1, 2]
    assert due(state, 5_000) == []  # the clock went back by far more than the time-out
    assert offer(state, [3], 4, 5_050) == [3]
    assert due(state, 5_100) == [(1, 1), (2, 1)]
    assert due(state, 5_150) == [(3, 1)]
    state.change(QueueSettings(ack_timeout_ns=10))
    assert due(state, 5_160) == []
    assert [position for position, _ in due(state, 5_170)] == [1, 2, 3]
