"""Foxglove: what flows here, and what was recorded, served to the Foxglove viewer by its WebSocket protocol.

The parts are loaded when used: importing this loads nothing else. The package ``foxglove-sdk`` speaks the protocol.
"""

from __future__ import annotations

__all__: list[str] = []
