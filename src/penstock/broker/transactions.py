"""Transactions: messages that wait for their COMMIT, and which ids were committed. The broker's loop thread only.

Staged messages are tight copies in memory. What they cost is counted with everything around them, so that many small
messages or many ids reach the bound as surely as large ones; idle ones are given up.
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

MESSAGE_BYTES, BATCH_BYTES, TRANSACTION_BYTES = 96, 512, 1024  # around what is staged
PIECE_MESSAGES, PIECE_BYTES = 512, 256 << 10  # of what is published in one go


@dataclass(frozen=True, slots=True)
class Piece:
    """Messages that are published in one go."""

    batch: Batch
    timed: bool  # their times are the publisher's; otherwise each gets that of storing


@dataclass
class Staged:
    """Messages of a transaction that is not committed."""

    pieces: list[Piece] = field(default_factory=list)
    held_bytes: int = 0
    touched: float = 0.0


class LargeCommit:
    """A transaction that is committed in parts, each of them a turn's; nobody sees any of it before the last one.

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
    """What is staged, and what was committed."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.staged: dict[str, Staged] = {}
        self.committed: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self.staged_bytes = 0

    def stage(self, name: str, batch: Batch, *, timed: bool = False) -> None:
        """Keep messages until their transaction is committed."""
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
            name = missing[0].rpartition("\n")[2]  # without whose it is
            raise Refusal("unknown_transaction", f"nothing is staged under {name}; stage it again")
        return [piece for name in names if name in self.staged for piece in self.staged[name].pieces]

    def take(self, names: list[str]) -> dict[str, Staged]:
        """Forget what is staged under the names; gives it, for ``put_back``."""
        taken = {name: self.staged.pop(name) for name in dict.fromkeys(names) if name in self.staged}
        self.staged_bytes -= sum(staged.held_bytes for staged in taken.values())
        return taken

    def abort(self, name: str) -> None:
        """Forget what was staged; ``NAME.*`` is all of NAME's parts, those of failed attempts too."""
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
        """What was taken counts as staged until it is let go."""
        self.staged_bytes += sum(staged.held_bytes for staged in taken.values())

    def let_go(self, taken: dict[str, Staged]) -> None:
        """Undo ``hold``."""
        self.staged_bytes -= sum(staged.held_bytes for staged in taken.values())

    def note(self, name: str, first: int, last: int) -> None:
        """It was committed."""
        self.committed[name] = (first, last)
        while len(self.committed) > self._limits.max_transactions:
            self.committed.popitem(last=False)

    def forget_idle(self) -> None:
        """Transactions that nobody has touched for long are given up."""
        horizon = time.monotonic() - self._limits.staged_idle_s
        self.take([name for name, staged in self.staged.items() if staged.touched < horizon])
