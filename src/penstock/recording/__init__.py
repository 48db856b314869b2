"""Recordings: messages of addresses, stored in journals together with the story of the recording, and played back.

The parts are loaded when used: importing this loads nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.recording.tables import Recording

__all__ = ["Recording"]


def __getattr__(name: str) -> Any:
    if name == "Recording":
        from penstock.recording.tables import Recording

        return Recording
    raise AttributeError(f"module 'penstock.recording' has no attribute {name!r}")
