"""Recordings: what is read from addresses, stored in journals with its story, and played back.

The parts are loaded when used: importing this loads nothing else.
"""

from __future__ import annotations

__all__: list[str] = []
