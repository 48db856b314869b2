"""Foxglove: serves live channels and recordings to the Foxglove viewer over its WebSocket protocol.

Importing this package loads nothing else; its parts are loaded when used. ``foxglove-sdk`` implements the protocol.
"""

from __future__ import annotations

__all__: list[str] = []
