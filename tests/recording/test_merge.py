"""The merge: by time across channels, never changed within one, with a bound on what waits."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.recording.merge import HOLD_ROUNDS, Lane, Merge

Item = tuple[int, int, int]  # time, channel, number in the channel


@dataclass
class Channel:
    """Messages with the moments at which they are published; what is there can be read in pieces."""

    messages: list[Item]
    read: int = 0

    def give(self, most: int, until: int) -> list[Item]:
        end = self.read
        while end < len(self.messages) and end - self.read < most and self.messages[end][0] <= until:
            end += 1
        given, self.read = self.messages[self.read : end], end
        return given


def one_round(
    merge: Merge[Item], lanes: list[Lane[Item]], channels: list[Channel], now: int, late: int, most: int
) -> list[Item]:
    """Reads every channel; ``late`` is how much time passes between two of the reads."""
    merge.begin_round(now, now / 1e9)
    for number, (lane, channel) in enumerate(zip(lanes, channels, strict=True)):
        if not lane.readable:
            continue
        found = channel.give(most, now + number * late)
        merge.add(lane, [(item[0], 1, item) for item in found])
        if len(found) < most:
            merge.at_end(lane)
    return merge.take()


times = st.lists(st.integers(1, 60), max_size=40).map(sorted)


@given(
    channels=st.lists(times, min_size=1, max_size=5),
    patient=st.lists(st.booleans(), min_size=5, max_size=5),
    pauses=st.lists(st.integers(0, 10), max_size=12),
    late=st.integers(0, 3),
    most=st.integers(1, 8),
)
@settings(max_examples=300, deadline=None)
def test_all_come_once_in_the_order_of_their_times(
    channels: list[list[int]], patient: list[bool], pauses: list[int], late: int, most: int
) -> None:
    merge: Merge[Item] = Merge()
    lanes = [merge.lane(patient=one) for one, _ in zip(patient, channels, strict=False)]
    sources = [
        Channel([(time_ns, number, place) for place, time_ns in enumerate(channel)])
        for number, channel in enumerate(channels)
    ]
    stored: list[Item] = []
    now = 0
    for pause in pauses:
        now += pause
        stored += one_round(merge, lanes, sources, now, late, most)
        now += late * len(channels)
    now += 100
    while any(channel.read < len(channel.messages) for channel in sources) or merge.holding:
        now += 1
        before = (sum(channel.read for channel in sources), len(stored))
        stored += one_round(merge, lanes, sources, now, late, most)
        assert (sum(channel.read for channel in sources), len(stored)) != before, "each round makes progress"
    assert [time_ns for time_ns, _, _ in stored] == sorted(time_ns for channel in channels for time_ns in channel)
    for number, channel in enumerate(channels):
        assert [place for _, of, place in stored if of == number] == list(range(len(channel)))


@given(
    channels=st.lists(st.lists(st.integers(1, 60), max_size=30), min_size=1, max_size=5),
    patient=st.lists(st.booleans(), min_size=5, max_size=5),
    most=st.integers(1, 8),
    max_held=st.integers(0, 10),
)
@settings(max_examples=200, deadline=None)
def test_whatever_the_times_are_the_order_within_a_channel_and_the_bound_hold(
    channels: list[list[int]], patient: list[bool], most: int, max_held: int
) -> None:
    merge: Merge[Item] = Merge(max_held=max_held)
    lanes = [merge.lane(patient=one) for one, _ in zip(patient, channels, strict=False)]
    sources = [Channel([(at, number, place) for place, at in enumerate(times)]) for number, times in enumerate(channels)]
    stored: list[Item] = []
    for now in range(100, 1000):
        stored += one_round(merge, lanes, sources, now, 0, most)
        assert all(len(lane.held) <= (most if lane.patient else max_held) for lane in lanes)
        if all(channel.read == len(channel.messages) for channel in sources) and not merge.holding:
            break
    for number, times_ in enumerate(channels):
        assert [place for _, of, place in stored if of == number] == list(range(len(times_)))


def test_nothing_waits_where_all_are_at_their_ends() -> None:
    merge: Merge[str] = Merge()
    lanes = [merge.lane(patient=False) for _ in range(3)]
    merge.begin_round(100, 0.0)
    merge.add(lanes[2], [(50, 1, "c")])
    merge.add(lanes[0], [(60, 1, "a")])
    for lane in lanes:
        merge.at_end(lane)
    assert merge.take() == ["c", "a"] and not merge.holding


def test_what_was_published_during_the_round_waits_for_the_next_and_no_longer() -> None:
    merge: Merge[str] = Merge()
    first, second = merge.lane(patient=False), merge.lane(patient=False)
    merge.begin_round(100, 0.0)
    merge.at_end(first)
    merge.add(second, [(103, 1, "b"), (900, 1, "a clock that is ahead")])
    merge.at_end(second)
    assert merge.take() == []
    merge.begin_round(105, 0.0)
    merge.add(first, [(102, 1, "a")])
    merge.at_end(first)
    merge.at_end(second)
    assert merge.take() == ["a", "b", "a clock that is ahead"]


def test_a_live_channel_waits_for_a_long_history_only_so_long() -> None:
    merge: Merge[str] = Merge(hold_s=1.0)
    history, live = merge.lane(patient=True), merge.lane(patient=False)
    stored: list[str] = []
    for number in range(HOLD_ROUNDS + 1):
        merge.begin_round(10_000 + number, number * 0.5)
        merge.add(history, [(number + 1, 1, f"old {number}")])
        if not number:
            merge.add(live, [(10_000, 1, "live")])
        merge.at_end(live)
        stored += merge.take()
    assert stored == [*(f"old {number}" for number in range(HOLD_ROUNDS + 1)), "live"]


def test_only_what_waits_is_kept_and_once() -> None:
    kept: list[str] = []

    def keep(item: str) -> str:
        kept.append(item)
        return item.upper()

    merge = Merge(keep)
    behind, live = merge.lane(patient=True), merge.lane(patient=False)
    merge.begin_round(100, 0.0)
    merge.add(behind, [(1, 1, "x")])
    merge.add(live, [(1, 1, "now"), (2, 1, "waits")])
    assert merge.take() == ["x", "now"] and kept == ["waits"]
    merge.begin_round(101, 0.0)
    merge.add(behind, [(1, 1, "y")])
    assert merge.take() == ["y"] and kept == ["waits"]
    assert merge.flush() == ["WAITS"]
