"""Handles that are open, so that the end of the process leaves nothing behind.

Any thread. A handle that is still open at exit leaves its channel at once: nobody can read through it any more.
"""

from __future__ import annotations

import atexit
import weakref
from typing import Any

_open: weakref.WeakSet[Any] = weakref.WeakSet()


def remember(handle: Any) -> None:
    """Have ``handle`` abandoned when the interpreter ends."""
    _open.add(handle)


def _abandon_all() -> None:
    for handle in list(_open):
        handle._abandon()


atexit.register(_abandon_all)
