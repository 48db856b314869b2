"""Identifiers: the message ids of a time window, for deduplication. The broker's loop thread only."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from penstock.broker.limits import Limits


class Identifier(NamedTuple):
    """The key of deduplication: the sender's account, the topic, and the id that the sender gave."""

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
        """The position of a message with this id, if it is in the window."""
        self._forget_old(self._limits.deduplication_ids - 1)  # room for this one
        found = self._found.get(identifier)
        return None if found is None else found[0]

    def note_new(self, rows: Iterable[tuple[Identifier, int]]) -> list[Identifier]:
        """Add those of many (id, position) that are not in the window; returns which these are."""
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
        """Add an id with its position and age; an id that is known keeps its first position."""
        self._found.setdefault(identifier, (position, time.monotonic() - age_s))

    def accounts(self) -> Iterator[tuple[str, int]]:
        """The accounts of those that have one, with their positions."""
        return ((key.account, position) for key, (position, _) in self._found.items() if key.account)

    def forget(self, *identifiers: Identifier) -> None:
        """Remove ids whose messages could not be stored."""
        for identifier in identifiers:
            self._found.pop(identifier, None)
