from __future__ import annotations

from tests.monitor.conftest import handles, name

__all__ = ["handles", "name"]
