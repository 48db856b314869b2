"""The player: what is due together travels together, in the order of the recording."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from penstock.carry import due
from penstock.journal import Details, Entry, Journal
from penstock.recording.player import Player


def test_flat_out_into_a_journal_commits_by_the_batch(tmp_path: Path) -> None:
    with Journal(tmp_path / "from") as journal:
        journal.commit(Entry("ab"[n % 2], b"%d" % n, {"n": str(n)}, timestamp_ns=1000 + n) for n in range(3000))
    commits = 0
    with contextlib.ExitStack() as stack:
        recorded = stack.enter_context(Journal(tmp_path / "from", mode="read"))
        player = Player(stack, {name: f"journal:{tmp_path}/to#{name}" for name in "ab"}, 0, 0.0)
        target: Any = player._publishers["a"].journal  # type: ignore[attr-defined]
        commit = target.commit

        def counted(entries: Any) -> Any:
            nonlocal commits
            commits += 1
            return commit(entries)

        target.commit = counted
        assert player.play(((recorded, message) for message in recorded.read_many(1, 3000)), 0, lambda count: None) == 3000
        assert player.counts == {"a": 1500, "b": 1500}
    assert commits == 3
    with Journal(tmp_path / "to", mode="read") as played:
        found = played.read_many(1, 3000)
        assert [(m.channel, bytes(m), m.timestamp_ns, dict(m.properties)) for m in found] == [
            ("ab"[n % 2], b"%d" % n, 1000 + n, {"n": str(n)}) for n in range(3000)
        ]


def test_a_journal_keeps_times_ids_and_keys_of_what_is_played(tmp_path: Path) -> None:
    """Also a time of 0 or before 1970."""
    times = [-5, 0, 10**18, 3]
    with Journal(tmp_path / "from") as journal:
        for n, time_ns in enumerate(times):
            journal.append("a", b"%d" % n, message_id=f"m{n}", key=f"k{n}" if n else None, timestamp_ns=time_ns)
    with contextlib.ExitStack() as stack:
        recorded = stack.enter_context(Journal(tmp_path / "from", mode="read"))
        player = Player(stack, {"a": f"journal:{tmp_path}/to#a"}, 0, 0.0)
        player.play(((recorded, message) for message in recorded.read_many(1, 10)), 0, lambda count: None)
    with Journal(tmp_path / "to", mode="read") as played:
        assert [(m.timestamp_ns, played.details(m.position or 0)) for m in played.read_many(1, 10)] == [
            (time_ns, Details(f"m{n}", f"k{n}" if n else "")) for n, time_ns in enumerate(times)
        ]


def test_ids_and_keys_that_a_sink_does_not_keep_are_told_once_a_sink(tmp_path: Path) -> None:
    told: list[str] = []
    with Journal(tmp_path / "from") as journal:
        for name in "abcd":
            for n in range(3):
                journal.append(name, b"%d" % n, message_id=f"{name}{n}" if name in "ac" else None, key="k" * (name == "b"))
    places = {"a": "bus:first", "b": "bus:second", "c": f"journal:{tmp_path}/to#c", "d": "bus:third"}
    with contextlib.ExitStack() as stack:
        recorded = stack.enter_context(Journal(tmp_path / "from", mode="read"))
        player = Player(stack, places, 0, 0.0, tell=told.append)
        for _ in range(2):  # as --loop does
            assert player.play(((recorded, one) for one in recorded.read_many(1, 20)), 0, lambda count: None) == 12
    assert told == [f"bus:{name} cannot hold id and key of messages: they end here" for name in ("first", "second")]


def test_each_is_given_when_its_time_has_come() -> None:
    now = [100.0]
    given = []
    times_ns = [0, 0, 10**9, 3 * 10**9, 3 * 10**9]
    for group in due(times_ns, int, lambda _: 1, 2.0, lambda: now[0], lambda s: now.__setitem__(0, now[0] + s)):
        given.append((now[0], group))
        if len(given) == 2:
            now[0] += 60  # a slow sink: what became due meanwhile comes together
    assert given == [(100.0, [0, 0]), (100.5, [10**9]), (160.5, [3 * 10**9, 3 * 10**9])]


def test_a_moment_that_is_ages_away_is_waited_for_in_steps() -> None:
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    groups = list(due([0, 10**9], int, lambda _: 1, 1 / (3 * 86_400), lambda: now[0], sleep))
    assert groups == [[0], [10**9]] and sum(slept) == 3 * 86_400 and max(slept) <= 86_400


def test_time_until_an_interruption_counts(tmp_path: Path) -> None:
    with Journal(tmp_path / "from") as journal:
        journal.append("a", b"x")
    with contextlib.ExitStack() as stack:
        recorded = stack.enter_context(Journal(tmp_path / "from", mode="read"))
        player = Player(stack, {"a": f"bus:player-{tmp_path.name}"}, 0, 0.0)

        def interrupt(count: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            player.play(((recorded, message) for message in recorded.read_many(1, 1)), 0, interrupt)
    assert player.seconds > 0 and player.counts == {"a": 1}


def test_the_order_of_the_recording_holds_between_places(tmp_path: Path) -> None:
    with Journal(tmp_path / "from") as journal:
        journal.commit(Entry("ab"[n % 5 == 0], b"%d" % n, timestamp_ns=1000 + n) for n in range(1000))
    sent: list[bytes] = []
    with contextlib.ExitStack() as stack:
        recorded = stack.enter_context(Journal(tmp_path / "from", mode="read"))
        player = Player(stack, {name: f"bus:player-{tmp_path.name}-{name}" for name in "ab"}, 0, 0.0)
        for publisher in player._publishers.values():
            publisher.forward = lambda batch: sent.extend(map(bytes, batch))  # type: ignore[method-assign]
        player.play(((recorded, message) for message in recorded.read_many(1, 1000)), 0, lambda count: None)
        assert player.counts == {"a": 800, "b": 200}
    assert sent == [b"%d" % n for n in range(1000)]
