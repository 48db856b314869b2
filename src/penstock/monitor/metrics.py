"""The counters in Prometheus's format, read from the watcher's state."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.observe.latency import BOUNDS_NS
from penstock.observe.watcher import Look, Watcher

__all__ = ["Collector", "exposition"]

_COUNTERS = ("matched", "delivered", "bytes", "expired", "redelivered", "errors")
_GAUGES = ("depth", "capacity", "peers", "memory_bytes", "lag")
_LABELS = ("room", "kind", "name", "pid", "handle")


class Collector:
    """A collector for ``prometheus_client``; keeps nothing between two scrapes."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        looks = self._watcher.state.looks
        for field in _COUNTERS:
            family = CounterMetricFamily(f"penstock_{field}", f"Ledger: {field}", labels=_LABELS)
            for look in looks:
                family.add_metric(_labels(look), getattr(look.block, field))
            yield family
        dropped = CounterMetricFamily("penstock_dropped", "Ledger: dropped by reason", labels=(*_LABELS, "reason"))
        for look in looks:
            for reason, count in look.block.dropped.items():
                dropped.add_metric((*_labels(look), reason), count)
        yield dropped
        for field in _GAUGES:
            gauge = GaugeMetricFamily(f"penstock_{field}", f"Now: {field}", labels=_LABELS)
            for look in looks:
                gauge.add_metric(_labels(look), getattr(look.block, field))
            yield gauge
        latency = HistogramMetricFamily("penstock_latency_seconds", "Of the messages measured", labels=_LABELS)
        flight = GaugeMetricFamily("penstock_in_flight", "What the ledger's equation leaves", labels=_LABELS)
        for look in looks:
            flight.add_metric(_labels(look), look.block.in_flight)
            if look.block.latency_counts:
                latency.add_metric(_labels(look), _buckets(look.block.latency_counts), look.block.latency_sum_ns / 1e9)
        yield from (latency, flight)
        alarms = GaugeMetricFamily("penstock_alarms", "Ledgers that do not close")
        alarms.add_metric((), len(self._watcher.state.alarms))
        yield alarms


def _buckets(counts: Sequence[int]) -> list[tuple[str, int]]:
    """Cumulative buckets, one per doubling: every second bound, to halve the number of series."""
    sums = list(itertools.accumulate(counts))
    ends = [(str(bound / 1e9), sums[bucket]) for bucket, bound in enumerate(BOUNDS_NS) if bucket % 2 == 0]
    return [*ends, ("+Inf", sums[-1])]


def _labels(look: Look) -> tuple[str, ...]:
    block = look.block
    # the handles of a bus get the name of the bus
    name = block.name.removeprefix("bus:") if block.room == "bus" else block.name
    return (block.room, block.kind, name, str(block.pid), f"{block.index}.{block.taking}")


def exposition(watcher: Watcher) -> bytes:
    """The text that Prometheus scrapes."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(watcher))
    return bytes(generate_latest(registry))
