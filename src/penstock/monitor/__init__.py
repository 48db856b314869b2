"""The monitor: serves what ``penstock.observe`` collects to a browser and to Prometheus.

Importing this package loads none of its modules.
"""

from __future__ import annotations

__all__: list[str] = []
