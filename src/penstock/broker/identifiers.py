"""Identifiers: the message ids of a window of time, so that one is stored once. The broker's loop thread only."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from penstock.broker.limits import Limits


class Identifier(NamedTuple):
    """What makes a message the same one: who sent it, where to, and the id that it has from its sender."""

    account: str
    topic: str
    id: str


class Duplicate(int):
    """The position of a message that was stored before under the same id."""


class Identifiers:
    """Message ids with the position each was stored at; bounded by time and number."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._found: OrderedDict[Identifier, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def find(self, identifier: Identifier) -> int | None:
        """Where a message with this id is, if it is in the window."""
        self._forget_old(self._limits.deduplication_ids - 1)  # room for this one
        found = self._found.get(identifier)
        return None if found is None else found[0]

    def note_new(self, rows: Iterable[tuple[Identifier, int]]) -> list[Identifier]:
        """Those of many (id, position) that are not in the window are stored there now; which these are."""
        self._forget_old(self._limits.deduplication_ids)
        now = time.monotonic()
        fresh = []
        for identifier, position in rows:
            if identifier not in self._found:
                self._found[identifier] = (position, now)
                fresh.append(identifier)
        self._forget_old(self._limits.deduplication_ids)
        return fresh

    def _forget_old(self, most: int) -> None:
        horizon = time.monotonic() - self._limits.deduplication_s
        while self._found:
            _, (_, when) = next(iter(self._found.items()))
            if when >= horizon and len(self._found) <= most:
                break
            self._found.popitem(last=False)

    def note(self, identifier: Identifier, position: int, age_s: float = 0.0) -> None:
        """It is stored there, so long ago; one that is known stays where it was first."""
        self._found.setdefault(identifier, (position, time.monotonic() - age_s))

    def accounts(self) -> Iterator[tuple[str, int]]:
        """The accounts of those that have one, with their positions."""
        return ((key.account, position) for key, (position, _) in self._found.items() if key.account)

    def forget(self, *identifiers: Identifier) -> None:
        """They were not stored after all."""
        for identifier in identifiers:
            self._found.pop(identifier, None)
