"""What is seen of another process: counts, rates, health, history, all against numbers that the test sets itself."""

from __future__ import annotations

import dataclasses

import pytest

from penstock import system
from penstock.observe import health
from penstock.observe.history import MAX_SERIES, SAMPLES, History
from penstock.observe.rates import Rate, between
from penstock.observe.snapshot import Block, address_of, live, matching
from penstock.observe.watcher import Watcher, summary
from tests.monitor.handles import Handles

SECOND = 1_000_000_000


def block(**fields: object) -> Block:
    base = Block(1, 0, 1, "program", "shm", "subscriber", "/a", "", opened_ns=SECOND, read_ns=2 * SECOND)
    return dataclasses.replace(base, **fields)  # type: ignore[arg-type]


def test_a_block_of_another_process_is_seen_and_goes(handles: Handles, name: str) -> None:
    handles.do(f"open shm publisher {name}", f"add {name}/publisher matched 7", f"add {name}/publisher delivered 7")
    (seen,) = matching(live(), f"shm:{name}")
    assert (seen.pid, seen.kind, seen.matched, seen.delivered) == (handles.pid, "publisher", 7, 7)
    assert seen.ledger.balanced and seen.opened_ns > 0
    handles.do(f"close {name}/publisher")
    assert matching(live(), f"shm:{name}") == []


def test_a_dead_process_is_not_listed(name: str) -> None:
    with Handles() as running:
        running.do(f"open shm publisher {name}")
        running.process.kill()
        running.process.wait()
        assert matching(live(), f"shm:{name}") == []


def test_addresses() -> None:
    assert address_of("shm", "/a") == "shm:/a"
    assert address_of("tcp", "127.0.0.1:80") == "tcp://127.0.0.1:80"
    assert address_of("bus", "main") == "bus:main"
    assert address_of("journal", "/data#t") == "journal:/data#t"
    assert address_of("gateway", "x") == ""
    blocks = [block(name="/a"), block(name="/ab"), block(room="journal", name="/d#t")]
    assert [b.name for b in matching(blocks, "shm:/a?slots=4")] == ["/a"]
    assert [b.name for b in matching(blocks, "journal:/d")] == ["/d#t"]


def test_rates_are_differences_over_time() -> None:
    old = block(delivered=100, matched=100, bytes=1000, read_ns=10 * SECOND, dropped={"overflow": 1})
    new = block(delivered=300, matched=310, bytes=5000, read_ns=12 * SECOND, dropped={"overflow": 11, "gap": 0})
    rate = between([old], [new], 10 * SECOND)[new.key]
    assert (rate.messages_hz, rate.bytes_hz, rate.lost_hz) == (100, 2000, 5)
    assert rate.dropped == {"overflow": 10}
    fresh = block(taking=2, delivered=50, opened_ns=11 * SECOND, read_ns=12 * SECOND)
    assert between([old], [fresh], 10 * SECOND)[fresh.key].messages_hz == 50


def test_what_a_filter_keeps_back_is_dropped_and_not_lost() -> None:
    old = block(matched=10, delivered=10, read_ns=10 * SECOND)
    new = block(matched=90, delivered=20, read_ns=12 * SECOND, dropped={"filtered": 60, "gap": 4})
    assert (new.lost, new.dropped_count, new.in_flight) == (4, 64, 6)
    rate = between([old], [new], 10 * SECOND)[new.key]
    assert (rate.lost_hz, rate.dropped) == (2, {"gap": 4})
    assert health.judge(new, rate).reasons == ("lost since the last look: 4 gap",)
    quiet = block(matched=90, delivered=30, last_ns=12 * SECOND, read_ns=12 * SECOND, dropped={"filtered": 60})
    assert health.judge(quiet, between([old], [quiet], 10 * SECOND)[quiet.key]).word == "ok"


def test_losses_from_before_the_first_look_are_not_news() -> None:
    lossy = block(delivered=5, last_ns=2 * SECOND, errors=3, dropped={"gap": 7})
    rate = between([], [lossy], 0)[lossy.key]
    assert (rate.dropped, rate.errors, rate.lost_hz, rate.messages_hz) == ({}, 0, 0, 5)
    late = between([], [lossy], lossy.opened_ns + 1)[lossy.key]  # could not be read at the look before, for whatever reason
    assert late.dropped == {} and late.errors == 0
    opened_since = between([], [lossy], lossy.opened_ns - 1)[lossy.key]
    assert opened_since.dropped == {"gap": 7} and opened_since.errors == 3


def test_the_series_of_losses_is_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [SECOND]
    monkeypatch.setattr("penstock.observe.watcher.time.time_ns", lambda: now[0])
    blocks = [block(dropped={"gap": 100}, read_ns=now[0], opened_ns=SECOND // 2)]
    watcher = Watcher(lambda: blocks)
    watcher.look()
    assert summary(watcher.state)["lost"] == 100, "the ledger has them"
    now[0] += 4 * SECOND
    blocks = [dataclasses.replace(blocks[0], dropped={"gap": 110, "filtered": 5}, read_ns=now[0])]
    watcher.look()
    assert [name for name in watcher.history.names() if name.startswith("lost/")] == ["lost/gap"]
    assert watcher.history.series(["lost/gap"], 2)["series"] == {"lost/gap": [None, 2.5]}


def test_what_passes_messages_on_does_not_deliver_them_again() -> None:
    """A bus with a gateway on it: its own row, its publisher, the module that publishes there, a link, one reader."""
    kinds = (("bus", "bus"), ("bus", "publisher"), ("bus", "queue"), ("gateway", "module"), ("gateway", "link"))
    names = ("plant", "plant", "plant", "bus:plant", "vibration -> bus:plant")
    blocks = [
        block(room=room, kind=kind, name=name, index=at, matched=10, delivered=10)
        for at, ((room, kind), name) in enumerate(zip(kinds, names, strict=True))
    ]
    blocks += [
        block(room="gateway", kind="module", name="alarm", index=9, matched=4, delivered=4),
        block(room="bus", kind="queue", name="gateway-d04243960045?subscriber=d04243960045/alarm", index=10, matched=4, delivered=4),
        block(room="gateway", kind="source", name="vibration", index=11, matched=10, delivered=10, bytes=30),
    ]
    watcher = Watcher(lambda: blocks)
    watcher.look()
    rates = {name: value for name, value in watcher.history.series()["series"].items() if name.startswith("rate/")}  # type: ignore[attr-defined]
    published = {"rate/in/bus:plant": [10.0], "rate/in/gateway:vibration": [10.0]}
    assert rates == {**published, "rate/out/bus:plant": [10.0], "rate/out/gateway:alarm": [4.0]}
    sums = summary(watcher.state)
    assert (sums["published_hz"], sums["delivered_hz"], sums["bytes_hz"]) == (20.0, 14.0, 30.0), "as the plots have it"


def test_a_queue_that_is_empty_has_a_line_and_no_dots() -> None:
    watcher = Watcher(lambda: [block(room="broker", kind="queue", name="work")])
    watcher.look()
    assert watcher.history.series(["depth/broker:work"])["series"] == {"depth/broker:work": [0.0]}


def test_a_reader_of_shared_memory_that_is_not_behind_has_a_lag_of_0() -> None:
    watcher = Watcher(lambda: [block(room="shm", kind="subscriber", name="/cam")])
    watcher.look()
    assert watcher.history.series(["lag/shm:/cam"])["series"] == {"lag/shm:/cam": [0.0]}


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("/usr/bin/python3 /opt/plant/camera.py --fast", "camera.py"),
        ("python -m penstock.cli.demo readers", "readers"),
        ("python -m plant", "plant"),
        ("/usr/bin/python3 /usr/bin/penstock monitor --port 0", "monitor"),
        ("python -c import penstock; run()", ""),
        ("/opt/bridge --x", "bridge"),
    ],
)
def test_a_process_has_the_name_of_what_it_runs(command: str, name: str) -> None:
    assert system.Process(1, 0, 0.0, 1, command).program == name


def test_a_look_that_fails_is_logged_and_the_next_one_comes(caplog: pytest.LogCaptureFixture) -> None:
    looks = 0

    def source() -> list[Block]:
        nonlocal looks
        looks += 1
        if looks in (2, 3, 4):
            raise UnicodeDecodeError("utf-8", b"\xc3", 0, 1, "unexpected end of data")
        return [block()]

    watcher = Watcher(source, every_s=0.01)
    first = watcher.look()
    watcher.start()
    try:
        assert watcher.wait(first.time_ns, 30).time_ns > first.time_ns
        assert looks >= 5
    finally:
        watcher.stop()
    (record,) = [record for record in caplog.records if record.name == "penstock.monitor"]
    assert "reading the counters failed" in record.message and record.exc_info is not None


def test_a_watcher_that_has_looked_does_not_look_again_at_once() -> None:
    watcher = Watcher(lambda: [block()], every_s=0.5)
    first = watcher.look()
    watcher.start()
    try:
        assert watcher.wait(first.time_ns, 30).time_ns - first.time_ns > 0.3 * SECOND
    finally:
        watcher.stop()


@pytest.mark.parametrize(
    ("fields", "rate", "word"),
    [
        ({"last_ns": 2 * SECOND, "delivered": 5, "matched": 5}, Rate(messages_hz=5), "ok"),
        ({}, Rate(), "idle"),
        ({"last_ns": SECOND, "read_ns": 60 * SECOND}, Rate(), "idle"),
        ({"lag": 4, "last_ns": SECOND, "read_ns": 60 * SECOND}, Rate(), "stuck"),
        ({"depth": 4, "last_ns": SECOND, "read_ns": 60 * SECOND}, Rate(), "idle"),  # held, and nothing waits
        ({"depth": 4, "room": "broker", "last_ns": SECOND, "read_ns": 60 * SECOND}, Rate(), "stuck"),
        ({"depth": 8, "capacity": 8, "lag": 1, "last_ns": 2 * SECOND}, Rate(), "stuck"),
        ({"depth": 8, "capacity": 8, "room": "bus", "last_ns": 2 * SECOND}, Rate(), "stuck"),
        ({"depth": 8, "capacity": 8, "last_ns": 2 * SECOND}, Rate(), "ok"),  # held, and nothing waits
        ({"depth": 8, "capacity": 8, "last_ns": 2 * SECOND}, Rate(messages_hz=3), "ok"),
        ({"state": "paused"}, Rate(), "stuck"),
        ({"state": "stuck in receive"}, Rate(messages_hz=3), "stuck"),
        ({"last_ns": 2 * SECOND}, Rate(messages_hz=5, dropped={"gap": 2}), "losing"),
        ({"lag": 16, "dropped": {"overflow": 984}, "matched": 1000}, Rate(), "losing"),  # and not stuck for long enough
        ({"lag": 16, "dropped": {"overflow": 984}, "matched": 1000, "read_ns": 60 * SECOND}, Rate(), "stuck"),
        ({"last_ns": 2 * SECOND, "lag": 50_000}, Rate(messages_hz=5), "late"),
    ],
)
def test_verdicts(fields: dict[str, object], rate: Rate, word: str) -> None:
    verdict = health.judge(block(**fields), rate)
    assert verdict.word == word
    assert (word == "ok") == (not verdict.reasons)


def test_books_that_do_not_close_raise_an_alarm_after_three_looks(handles: Handles, name: str) -> None:
    handles.do(
        f"open shm subscriber {name}", f"add {name}/subscriber matched 10", f"add {name}/subscriber delivered 200"
    )
    watcher = Watcher(lambda: matching(live(), f"shm:{name}"))
    words = [watcher.look().looks[0].verdict.word for _ in range(3)]
    assert words[-1] == "books" and "books" not in words[:2]
    assert len(watcher.state.alarms) == 1 and summary(watcher.state)["alarms"] == 1
    handles.do(f"add {name}/subscriber matched 190")
    assert watcher.look().alarms == []


def test_watcher_keeps_history_and_processes(handles: Handles, name: str) -> None:
    handles.do(f"open shm publisher {name}")
    watcher = Watcher(lambda: matching(live(), f"shm:{name}"))
    watcher.look()
    handles.do(f"add {name}/publisher matched 1000", f"add {name}/publisher bytes 64000")
    state = watcher.look()
    assert state.looks[0].rate.messages_hz > 0
    assert state.processes[handles.pid].resident_bytes > 1_000_000
    kept = watcher.history.series([f"rate/in/shm:{name}"])
    values = kept["series"][f"rate/in/shm:{name}"]  # type: ignore[index]
    assert len(values) == 2 and values[-1] > 0


def test_history_is_bounded_and_shows_holes() -> None:
    history = History()
    for tick in range(SAMPLES + 10):
        history.add(float(tick), {"a": float(tick)} if tick % 2 else {"b": 1.0})
    kept = history.series()
    times, series = kept["times"], kept["series"]
    assert len(times) == SAMPLES and times[-1] == SAMPLES + 9 and times[0] == 10  # type: ignore[arg-type,index]
    assert series["a"][-2:] == [None, SAMPLES + 9] or series["a"][-1] is not None  # type: ignore[index]
    assert None in series["b"]  # type: ignore[index]
    for number in range(MAX_SERIES + 5):
        history.add(float(SAMPLES + 10 + number), {f"s{number}": 1.0})
    assert len(history.names()) == MAX_SERIES
