"""The page: what ``penstock.observe`` sees, served to a browser and to Prometheus.

The parts are loaded when used: importing this loads nothing else.
"""

from __future__ import annotations

__all__: list[str] = []
