"""Finding: one reason why no messages arrive, as a sentence for the user."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["QUIET_S", "Finding"]

#: A handle without a message for so long is worth a finding.
QUIET_S = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason and what to do about it. ``grave`` ones explain why nothing arrives, the others are background."""

    text: str
    remedy: str = ""
    grave: bool = True
    meant: bool = False  #: suggests another address that was perhaps meant: shown besides any other reason
