"""Finding: one reason for silence, as a sentence for people."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["QUIET_S", "Finding"]

#: Nothing for so long is worth a sentence.
QUIET_S = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason and what to do about it. ``grave`` ones explain silence, the others are only worth knowing."""

    text: str
    remedy: str = ""
    grave: bool = True
    meant: bool = False  #: names what may have been meant: worth saying beside any other reason
