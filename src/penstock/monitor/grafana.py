"""A dashboard for Grafana over what ``/metrics`` gives to Prometheus, as the JSON that Grafana imports."""

from __future__ import annotations

from typing import Any

from penstock.observe.rates import READERS

__all__ = ["dashboard"]

#: A name is unique only within its room: a bus and a shared-memory channel may have the same.
NAME = "{{room}} {{name}}"

_LATENCY = 'sum by (le, room, name) (rate(penstock_latency_seconds_bucket{kind!="tail"}[5m]))'

#: As on the page: messages delivered to programs, not those that a bus, a broker, a journal or a link passes on.
_DELIVERED = (
    f'penstock_delivered_total{{kind=~"{"|".join(READERS)}|pipeline"}}',
    'penstock_delivered_total{room="bus",kind="queue",name!~"gateway-[0-9a-f]{12}.*"}',  # those of modules: see below
    'penstock_delivered_total{kind="module",name!~".*:.*"}',
)

#: Title, unit of Grafana, and queries with their legends, in the order of the page.
_PANELS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("Published", "cps", (('sum by (room, name) (rate(penstock_matched_total{kind=~"publisher|source"}[1m]))', NAME),)),
    ("Delivered", "cps", (
        (f"sum by (room, name) ({' or '.join(f'rate({counter}[1m])' for counter in _DELIVERED)})", NAME),
    )),
    ("Lost", "cps", (
        (
            'sum by (room, name, reason) (rate(penstock_dropped_total{reason!="filtered",kind!="tail"}[1m]))',
            NAME + ": {{reason}}",
        ),
    )),
    ("Latency", "s", (
        (f"histogram_quantile(0.5, {_LATENCY})", f"{NAME} p50"),
        (f"histogram_quantile(0.99, {_LATENCY})", f"{NAME} p99"),
    )),
    ("Waiting", "short", (("sum by (room, name) (penstock_depth{kind!=\"tail\"})", NAME),)),
    ("Lag", "short", (("sum by (room, name) (penstock_lag{kind!=\"tail\"})", NAME),)),
    ("Bytes", "Bps", (('sum by (room, name) (rate(penstock_bytes_total{kind=~"publisher|source"}[1m]))', NAME),)),
    ("Books that do not close", "short", (("penstock_alarms", "handles"),)),
)  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The dashboard; importing it asks for the Prometheus data source to use."""
    source = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
    panels = [
        {
            "id": number + 1, "type": "timeseries", "title": title, "datasource": source,
            "gridPos": {"x": 12 * (number % 2), "y": 8 * (number // 2), "w": 12, "h": 8},
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "targets": [
                {"refId": chr(ord("A") + at), "expr": query, "legendFormat": legend, "datasource": source}
                for at, (query, legend) in enumerate(queries)
            ],
        }
        for number, (title, unit, queries) in enumerate(_PANELS)
    ]  # fmt: skip
    asked = {"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "pluginId": "prometheus"}
    return {
        "__inputs": [{**asked, "pluginName": "Prometheus"}],
        "title": "Penstock", "uid": "penstock", "schemaVersion": 39, "tags": ["penstock"], "refresh": "10s",
        "time": {"from": "now-15m", "to": "now"}, "panels": panels,
    }  # fmt: skip
