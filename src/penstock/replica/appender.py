"""Appender: adds blocks to a stream and makes sure of each that it is stored. If another writer appends, it stops.

After a time-out, a lost connection or "wrong last sequence" the outcome of an append is unknown, so the block at its
place is read. The same bytes: it is stored. Other bytes: another broker leads (FencedError). Nothing: the same block is
sent again. This may be repeated safely, since the block can only be stored at that place. So nothing depends on time,
and ``append`` waits as long as the stream has no quorum.

How much goes into one block is asked at each try, because it belongs to the connection: a block that the server takes
no more in one message is cut, and its parts are a chain. Any cut of our own data at our place counts as stored, and the
next block goes on where it ends.

A stream that has lost blocks, as its servers do when their files are damaged, is noticed here too (LostBlocksError):
opening it again on the directory that has them restores them. One thread.
"""

from __future__ import annotations

import errno
import logging
import math
import time
from collections.abc import Callable

from penstock.errors import CorruptionError, PenstockError
from penstock.replica.block import HEAD, Block, decode
from penstock.replica.client import UnansweredError
from penstock.replica.outage import TELL_S, Outage
from penstock.replica.stream import Blocks, StreamError, WrongLastError

log = logging.getLogger("penstock.replica")
WAITING = "publishers wait, and nothing is confirmed, refused or delivered until it stores again"
STARTING = "the broker cannot start yet; trying again"
PAUSE_S = 0.05  # pause between two tries
CHECK_S = 5.0  # how often to check whether the stream has lost blocks
SHORT_S = 10.0  # how long a stream may end too early: its server may not be up to date yet


class FencedError(PenstockError, OSError):
    """Another broker writes to the stream: this one must end. The other has everything that this one confirmed."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.errno = errno.ESTALE
        self.strerror = text


class LostBlocksError(PenstockError, OSError):
    """The stream has lost confirmed blocks: it must be opened again, on the directory that has them."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.errno = errno.ENODATA
        self.strerror = text


class UnknownOutcomeError(PenstockError, TimeoutError):
    """The stream is not waited for any longer: whether the last block is there is not known."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.errno = errno.ETIMEDOUT
        self.strerror = text


class Appender:
    """The end of a stream, as its only writer knows it. ``missing``: the number of blocks that it had lost before."""

    def __init__(
        self,
        blocks: Blocks,
        last: int,
        writer: int,
        *,
        missing: int = 0,
        pause: Callable[[], None] = lambda: time.sleep(PAUSE_S),
    ) -> None:
        self.blocks = blocks
        self.last = last
        self._missing = missing
        self._check_at = time.monotonic() + CHECK_S
        self._short_since: float | None = None
        self.fault: OSError | None = None  # why nothing can be appended any more
        self._writer = writer
        self._pause = pause
        self._end_at = math.inf
        self._outage = Outage(blocks, WAITING)
        self.unknown = 0  # appends whose outcome had to be looked up
        # The blocks with which the oldest segment begins and the one that is being written; 0: none. Who purges the
        # stream below them takes what is in the directory alone then.
        self.oldest = self.newest = 0
        self._purged = 0  # the last block up to which somebody else has purged the stream, as was logged

    def end_after(self, seconds: float) -> None:
        """Wait at most this many seconds from now on for an outcome. Any thread, any signal handler."""
        self._end_at = time.monotonic() + seconds

    def begin(self, block: Block, deadline: float) -> None:
        """Add the first block, which nobody but this broker's start waits for. UnknownOutcomeError: it was not stored
        before the deadline, and why.
        """
        usual, self._outage = self._outage, Outage(self.blocks, STARTING, TELL_S)
        ended, self._end_at = self._end_at, min(self._end_at, deadline)
        try:
            self.append(block)
        except UnknownOutcomeError:
            self.fault = UnknownOutcomeError(f"{self.blocks.name} stores nothing: {self._outage.reason}")
            raise self.fault from None
        finally:
            self._outage = usual
            if self._end_at == deadline:  # else a signal has come
                self._end_at = ended

    def append(self, block: Block) -> int:
        """Add a block, or a chain of its parts if it is too long for one; returns the sequence of the first.
        FencedError: another broker has added one; this is final.
        """
        begun = self.last + 1
        at = self._append(block, 0, begun)
        while at < len(block.data):
            at += self._append(block, at, begun)
        return begun

    def _append(self, block: Block, at: int, begun: int) -> int:
        """Add one block with data from ``at`` on; returns how many bytes of it."""
        if self.fault is None and time.monotonic() >= self._check_at:
            self._check()
        if self.fault is not None:
            raise self.fault
        sequence = self.last + 1
        self._outage.begin()
        while (size := self._try(block, at, begun)) is None:
            if time.monotonic() >= self._end_at:
                self._outage.drop()
                text = f"{self.blocks.name} did not answer: whether block {sequence} is there is not known"
                self.fault = UnknownOutcomeError(text)
                raise self.fault
            self._pause()
        self._outage.end()
        self.last = sequence
        self._short_since = None
        return size

    def _check(self) -> None:
        """Note a fault if the stream has lost blocks since the last check."""
        self._check_at = time.monotonic() + CHECK_S
        try:
            bounds = self.blocks.bounds()
        except (UnansweredError, ConnectionError, StreamError):
            return
        purged, missing = bounds.first - 1, bounds.missing
        if missing > self._missing:
            self.fault = LostBlocksError(f"{self.blocks.name} has lost {missing - self._missing} blocks")
        elif purged >= self.newest > 0:
            self.fault = LostBlocksError(f"{self.blocks.name} was purged up to block {purged}, and not by this broker")
        elif purged >= self.oldest > self._purged:
            self._purged = purged
            log.warning(
                "%s was purged up to block %d, and not by this broker: older messages are in its directory alone, "
                "until it opens the stream again", self.blocks.name, purged,
            )  # fmt: skip
        self._missing = missing

    def _try(self, block: Block, at: int, begun: int) -> int | None:
        """How many bytes are stored; None: nothing is."""
        try:
            size = min(len(block.data) - at, self.blocks.max_bytes - HEAD.size)
            # the size is a part of it: a server takes the same identity for the same message
            identity = f"{self._writer:016x}-{self.last + 1}-{size}"
            self.blocks.append(block.part(at, size, begun).encode(), self.last, identity)
            return size
        except (WrongLastError, UnansweredError, ConnectionError, StreamError) as error:
            self.unknown += 1
            problem: Exception = error
        if not isinstance(problem, WrongLastError):
            self._outage.note(problem)  # before the block is looked for, which may take as long
        try:
            stored = self._stored(block, at, begun, isinstance(problem, WrongLastError))
            if stored is not None:
                return stored
        except (UnansweredError, ConnectionError, StreamError) as error:
            problem = error
        if not isinstance(problem, WrongLastError):
            self._outage.note(problem)
        return None

    def _stored(self, block: Block, at: int, begun: int, moved: bool) -> int | None:
        """How many bytes the block at our place has of ours; None: there is no block. ``moved``: the server says that
        the stream does not end right before it.
        """
        found = self.blocks.read(self.last + 1)
        if found is None and moved:
            bounds = self.blocks.bounds()
            if bounds.last < self.last:
                self._note_short(f"ends with block {bounds.last}, and block {self.last} was confirmed")
            if bounds.first > self.last + 1:
                found = b""  # there was a block, and it was purged, but not by us
        if found is None:
            return None
        size = len(found) - HEAD.size
        if size >= 0 and found == block.part(at, size, begun).encode():
            return size
        self.fault = FencedError(self._who_wrote(found))
        raise self.fault

    def _who_wrote(self, found: bytes) -> str:
        """Whose the block is that stands in the place of ours."""
        place = f"block {self.last + 1}"
        try:
            if found:
                decode(found, place)
        except CorruptionError:
            text = f"somebody who is no broker has written to {self.blocks.name}: {place} is no block of a journal"
            return f"{text}. A broker that is started again puts it right"
        return f"another broker writes to {self.blocks.name}: {place} is not ours"

    def _note_short(self, text: str) -> None:
        now = time.monotonic()
        if self._short_since is None:
            self._short_since = now
        if now - self._short_since >= SHORT_S:
            self.fault = LostBlocksError(f"{self.blocks.name} {text}")
            raise self.fault
        raise StreamError(f"it {text}")
