"""The queue's pure logic against a slow model of itself, with restarts at any moment."""

from __future__ import annotations

import random

import pytest

from penstock.errors import CorruptionError
from penstock.journal.queue_state import QueueSettings, QueueState, queue_name, restore


def small(**options: int) -> QueueState:
    return QueueState("q", QueueSettings(ack_timeout_ns=100, **options))  # type: ignore[arg-type]


def test_acks_move_the_floor_over_what_others_own() -> None:
    state = small()
    assert [d.position for d in state.offer([2, 5, 9], 12, 0)] == [2, 5, 9]
    assert state.floor == 0
    assert state.ack(5) and not state.ack(5)
    assert state.floor == 0 and state.runs == [(3, 5), (10, 11)]
    assert state.ack(2) and state.floor == 5
    assert state.ack(9) and state.floor == 11 and state.runs == []


def test_deadlines_and_tries() -> None:
    state = small(max_tries=2)
    state.offer([1, 2], 3, 0)
    assert state.due(99) == []
    assert [(d.position, d.tries) for d in state.due(100)] == [(1, 2), (2, 2)]
    assert state.ack(1)
    assert state.due(200) == [] and state.dead == [2]
    assert state.in_flight == 1, "what is dying is not done until its owner has moved it"
    assert state.ack(2) and state.floor == 2


def test_nack_with_delay() -> None:
    state = small()
    state.offer([1], 2, 0)
    assert state.nack(1, 10, delay_ns=50)
    assert state.due(59) == [] and state.next_due_ns() == 60
    assert [(d.position, d.tries) for d in state.due(60)] == [(1, 2)]


def test_the_bound() -> None:
    state = small(max_in_flight=2)
    state.offer([1, 2], 3, 0)
    assert state.room == 0
    state.nack(1, 0, 5)
    assert state.room == 0
    state.ack(2)
    assert state.room == 1


def test_ack_through_and_ranges() -> None:
    state = small()
    state.offer(range(1, 1001), 1001, 0)
    assert state.ack_through(500) == 500 and state.floor == 500
    assert state.ack_many(range(601, 701)) == 100 and state.runs == [(601, 700)]
    assert len(state.changes()) < 100, "neighbours are one note"


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
    state.offer([1], 2, 0)
    state.ack(1)
    with pytest.raises(CorruptionError):
        restore([state.changes()[:-1]])


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
        deliveries = state.due(now, chance.randrange(1, 5))
        if state.room:
            scanned = min(400, state.cursor + chance.randrange(1, 30))
            found = [p for p in mine if state.cursor <= p < scanned][: state.room]
            if len(found) == state.room:
                scanned = found[-1] + 1
            deliveries += state.offer(found, scanned, now)
        for position, tries in deliveries:
            assert position not in done, "what was acknowledged does not come again"
            tried[position] += 1
            assert tries >= 1
            out.add(position)
        while state.dead:
            position = state.dead.pop()
            assert state.settings.max_tries and tried[position] >= 1
            assert state.ack(position)
            done.add(position)
        for position in chance.sample(sorted(out), min(len(out), chance.randrange(4))):
            out.discard(position)
            what = chance.randrange(4)
            if what == 0:
                state.nack(position, now, chance.randrange(100))
            elif state.ack(position):
                done.add(position)
        assert state.in_flight + state.waiting <= 40
        assert all(state.is_done(p) for p in done)
        assert not any(state.is_done(p) for p in tried if p not in done)
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
    assert state.offer([p for p in mine if p >= state.cursor], 400, now) == []
    assert state.floor >= mine[-1]


def test_no_deadline_is_further_away_than_the_time_out() -> None:
    """The clock may be set back, and the time-out made shorter, while messages are out."""
    state = QueueState("q", QueueSettings(ack_timeout_ns=100))
    assert [delivery.position for delivery in state.offer([1, 2], 3, 10_000)] == [1, 2]
    assert state.due(5_000) == []  # the clock went back by far more than the time-out
    assert [delivery.position for delivery in state.offer([3], 4, 5_050)] == [3]
    assert [delivery.position for delivery in state.due(5_100)] == [1, 2]
    assert [delivery.position for delivery in state.due(5_150)] == [3]
    state.change(QueueSettings(ack_timeout_ns=10))
    assert state.due(5_160) == []
    assert [delivery.position for delivery in state.due(5_170)] == [1, 2, 3]
