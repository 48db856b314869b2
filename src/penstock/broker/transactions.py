"""Transactions: messages that wait for their COMMIT, and the ids that were committed. The broker's loop thread only.

Staged messages are copies in memory. Their overhead is counted too, so that many small messages or many ids reach the
bound as large ones do; idle transactions are dropped.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock._core.broker import batch_bytes, kept
from penstock.broker.limits import Limits
from penstock.broker.words import Refusal

if TYPE_CHECKING:
    from penstock._core import Batch

MESSAGE_BYTES, BATCH_BYTES, TRANSACTION_BYTES = 96, 512, 1024  # overhead of what is staged
PIECE_MESSAGES, PIECE_BYTES = 512, 256 << 10  # bytes of what is published at once


@dataclass(frozen=True, slots=True)
class Piece:
    """Messages that are published at once."""

    batch: Batch
    timed: bool  # True: they keep the publisher's times; False: they get the time of storing


@dataclass
class Staged:
    """Messages of a transaction that is not committed."""

    pieces: list[Piece] = field(default_factory=list)
    held_bytes: int = 0
    touched: float = 0.0


class LargeCommit:
    """A transaction that is committed in parts, one per turn of the loop; it becomes visible with the last one.

    What others publish meanwhile is stored and confirmed with it.
    """

    def __init__(self, account: str, transaction: str, pieces: list[Piece]) -> None:
        self.account = account
        self.transaction = transaction
        self.taken: dict[str, Staged] = {}
        self.left = deque(pieces)
        self.begun = self.done = False
        self.first = self.last = 0


class Transactions:
    """The staged messages and the committed ids."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.staged: dict[str, Staged] = {}
        self.committed: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self.staged_bytes = 0

    def stage(self, name: str, batch: Batch, *, timed: bool = False) -> None:
        """Stage messages until their transaction is committed."""
        staged = self.staged.get(name)
        more = batch_bytes(batch) + MESSAGE_BYTES * len(batch) + BATCH_BYTES
        if staged is None:
            more += TRANSACTION_BYTES
        if self.staged_bytes + more > self._limits.max_staged_bytes:
            most = self._limits.max_staged_bytes
            raise Refusal("full", f"more than {most} bytes would be staged; commit or abort first")
        if staged is None:
            staged = self.staged[name] = Staged()
        staged.pieces += (Piece(part, timed) for part in kept(batch, PIECE_MESSAGES, PIECE_BYTES))
        staged.held_bytes += more
        staged.touched = time.monotonic()
        self.staged_bytes += more

    def pieces(self, names: list[str], *, all_there: bool) -> list[Piece]:
        """What is staged under the names, in their order."""
        missing = [name for name in names if name not in self.staged]
        if missing and all_there:
            name = missing[0].rpartition("\n")[2]  # without the prefix of its owner
            raise Refusal("unknown_transaction", f"nothing is staged under {name}; stage it again")
        return [piece for name in names if name in self.staged for piece in self.staged[name].pieces]

    def take(self, names: list[str]) -> dict[str, Staged]:
        """Remove and return what is staged under the names; ``put_back`` undoes that."""
        taken = {name: self.staged.pop(name) for name in dict.fromkeys(names) if name in self.staged}
        self.staged_bytes -= sum(staged.held_bytes for staged in taken.values())
        return taken

    def abort(self, name: str) -> None:
        """Drop what was staged; ``NAME.*`` drops all parts of NAME, including those of failed attempts."""
        if name.endswith(".*"):
            self.take([part for part in self.staged if part.startswith(name[:-1])])
        else:
            self.take([name])

    def put_back(self, taken: dict[str, Staged]) -> None:
        """Undo ``take``."""
        for name, staged in taken.items():
            staged.touched = time.monotonic()
            self.staged[name] = staged
            self.staged_bytes += staged.held_bytes

    def hold(self, taken: dict[str, Staged]) -> None:
        """Count what was taken as staged until ``let_go``."""
        self.staged_bytes += sum(staged.held_bytes for staged in taken.values())

    def let_go(self, taken: dict[str, Staged]) -> None:
        """Undo ``hold``."""
        self.staged_bytes -= sum(staged.held_bytes for staged in taken.values())

    def note(self, name: str, first: int, last: int) -> None:
        """Note that an id was committed."""
        self.committed[name] = (first, last)
        while len(self.committed) > self._limits.max_transactions:
            self.committed.popitem(last=False)

    def forget_idle(self) -> None:
        """Drop transactions that have been idle for too long."""
        horizon = time.monotonic() - self._limits.staged_idle_s
        self.take([name for name, staged in self.staged.items() if staged.touched < horizon])
