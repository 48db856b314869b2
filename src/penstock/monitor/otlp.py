"""The counters as OpenTelemetry metrics, sent to a collector over HTTP (extra ``otel``).

The SDK's own thread asks the watcher's newest state at each export; nothing of the watched programs is disturbed.
Traces of single messages are made by the programs themselves: ``penstock.observe.trace``.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from penstock import __version__
from penstock.errors import InvalidArgument
from penstock.observe.watcher import Look, Watcher
from penstock.secrecy import without_secrets

__all__ = ["exporting"]

log = logging.getLogger("penstock.monitor")

#: How long the end of the monitor waits for the collector.
LAST_EXPORT_S = 1.0

_COUNTERS = ("matched", "delivered", "bytes", "expired", "redelivered", "errors", "lost")
_GAUGES = ("depth", "lag", "in_flight", "memory_bytes")


@contextlib.contextmanager
def exporting(
    watcher: Watcher, endpoint: str, every_s: float = 10.0, last_s: float = LAST_EXPORT_S
) -> Iterator[None]:
    """Export to ``endpoint`` (such as ``http://127.0.0.1:4318``) until the context ends, which exports once more and
    waits for that for ``last_s``."""
    if not endpoint.startswith(("http://", "https://")):
        raise InvalidArgument(f"{without_secrets(endpoint)!r} is no collector's address: it begins with http:// or https://")
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource

    exporter = OTLPMetricExporter(endpoint=endpoint.rstrip("/") + "/v1/metrics", timeout=5)
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=every_s * 1000)
    provider = MeterProvider([reader], Resource.create({"service.name": "penstock"}), shutdown_on_exit=False)
    meter = provider.get_meter("penstock", __version__)
    for field in _COUNTERS:
        meter.create_observable_counter(f"penstock.{field}", [_observe(watcher, field)])
    for field in _GAUGES:
        meter.create_observable_gauge(f"penstock.{field}", [_observe(watcher, field)])
    try:
        yield
    finally:
        # In a thread that ends with the process: the SDK waits and tries again whatever deadline it is given.
        ending = threading.Thread(target=provider.shutdown, name="penstock-otlp-end", daemon=True)
        ending.start()
        ending.join(last_s)
        if ending.is_alive():
            log.warning("%s did not take the last figures within %g s", without_secrets(endpoint), last_s)


def _observe(watcher: Watcher, field: str) -> Callable[[Any], Iterator[Any]]:
    def observations(_options: Any) -> Iterator[Any]:
        from opentelemetry.metrics import Observation

        for look in watcher.state.looks:
            yield Observation(getattr(look.block, field), _attributes(look))

    return observations


def _attributes(look: Look) -> dict[str, str | int]:
    block = look.block
    return {
        "room": block.room, "kind": block.kind, "name": block.name, "pid": block.pid,
        "handle": f"{block.index}.{block.taking}",
    }  # fmt: skip
