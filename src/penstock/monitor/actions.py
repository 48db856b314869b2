"""What the page may change when the monitor was started with ``--allow-actions``. Each action is one function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.errors import InvalidArgument, nearest

__all__ = ["ACTIONS", "act"]

#: Filled by the functions below; an action takes keyword arguments out of the request and says what it did.
ACTIONS: dict[str, Callable[..., str]] = {}


def act(name: str, arguments: Mapping[str, Any]) -> str:
    """Do it; ``InvalidArgument`` for an action that does not exist."""
    if name not in ACTIONS:
        raise InvalidArgument(f"there is no action {name!r}; {nearest(name, ACTIONS)}")
    return ACTIONS[name](**arguments)
