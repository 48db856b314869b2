"""Latencies counted by size: what the counts tell, the window they are taken over, and what Prometheus gets."""

from __future__ import annotations

import random

import pytest

import penstock
from penstock import _core
from penstock.monitor.metrics import exposition
from penstock.observe.latency import BOUNDS_NS, WINDOW_NS, Windows, quantile, spread
from penstock.observe.snapshot import live, matching
from penstock.observe.watcher import Watcher
from tests.monitor.handles import Handles

from .test_watcher import block


def counted(*latencies_ns: int) -> tuple[int, ...]:
    handle = _core.Counters("test", "subscriber", "latency")
    try:
        for latency in latencies_ns:
            handle.note_latency(latency)
        found = handle.snapshot()
        assert found["latency_sum_ns"] == sum(latencies_ns) and found["latency_ns"] == latencies_ns[-1]
        return tuple(found["latency_counts"])
    finally:
        handle.close()


def test_every_latency_falls_between_its_bounds() -> None:
    for bucket, bound in enumerate(BOUNDS_NS):
        assert counted(bound - 1)[bucket] == 1 and counted(bound)[bucket + 1] == 1, bound
    assert len(counted(1)) == len(BOUNDS_NS) + 1
    assert counted(1)[0] == 1 and counted(2**63)[-1] == 1


def test_a_handle_that_measures_nothing_has_no_counts() -> None:
    handle = _core.Counters("test", "publisher", "latency")
    assert handle.snapshot()["latency_counts"] == ()
    handle.close()
    assert spread(()) is None


@pytest.mark.parametrize("middle_ns", [3_000, 80_000, 5_000_000, 900_000_000])
def test_percentiles_are_within_a_third(middle_ns: int) -> None:
    chosen = random.Random(middle_ns)
    values = sorted(int(chosen.lognormvariate(0, 0.7) * middle_ns) for _ in range(5000))
    counts = counted(*values)
    for part in (0.5, 0.9, 0.99):
        exact = values[int(part * len(values)) - 1]
        assert exact / 1.34 < quantile(counts, part) < exact * 1.34, part


def test_the_window_forgets_what_is_older_than_a_minute() -> None:
    windows = Windows()
    slow, fast = counted(*[10**9] * 50), counted(*[10**9] * 50, *[10**4] * 50)

    def p50_ns(counts: tuple[int, ...], at_windows: float) -> float:
        looked = windows.look([block(latency_counts=counts)], 1 + int(at_windows * WINDOW_NS))
        return looked[block().key].p50_ns

    assert p50_ns(slow, 0) > 5e8  # since it was opened
    assert p50_ns(slow, 1) > 5e8
    assert p50_ns(fast, 2) < 2e4  # less what was counted one window ago
    assert windows.look([block(latency_counts=fast)], 1 + 3 * WINDOW_NS) == {}  # nothing new since then


def test_a_handle_that_is_gone_leaves_nothing_in_the_window() -> None:
    windows = Windows()
    windows.look([block(latency_counts=counted(5))], 1)
    for turn in (1, 2, 3):
        windows.look([], 1 + turn * WINDOW_NS)
    assert not windows._older and not windows._newer


def test_readers_of_a_real_channel_are_counted_and_publishers_are_not(name: str) -> None:
    with penstock.publisher(f"shm:{name}", slots=64) as publisher, penstock.subscriber(f"shm:{name}") as subscriber:
        for _ in range(5000):
            publisher.publish(b"x")
            assert subscriber.read(timeout=10) is not None
        blocks = {b.kind: b for b in matching(live(), f"shm:{name}")}
        assert blocks["publisher"].latency_counts == () and sum(blocks["subscriber"].latency_counts) >= 4


def test_prometheus_gets_a_histogram(handles: Handles, name: str) -> None:
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    handles.do(f"open shm subscriber {name}", *(f"latency {name}/subscriber {us}500" for us in range(1, 101)))
    watcher = Watcher()
    watcher.look()
    families = {family.name: family for family in text_string_to_metric_families(exposition(watcher).decode())}
    family = families["penstock_latency_seconds"]
    assert family.type == "histogram"
    mine = [sample for sample in family.samples if sample.labels["name"] == name]
    values = {sample.labels.get("le", sample.name.rpartition("_")[2]): sample.value for sample in mine}
    assert values["+Inf"] == values["count"] == 100
    assert values["sum"] == pytest.approx(sum(range(1, 101)) * 1e-6 + 100 * 0.5e-6)
    ends = sorted((float(end), count) for end, count in values.items() if end not in ("sum", "count"))
    assert [count for _, count in ends] == sorted(count for _, count in ends)
    for end, count in ends:
        assert count == sum((us + 0.5) * 1e-6 < end for us in range(1, 101)), end
