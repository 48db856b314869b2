"""Appender: adds blocks to a stream and makes sure of each that it is stored. If another writer appends, it stops.

After a time-out, a lost connection or "wrong last sequence" the outcome of an append is unknown, so the block at its
place is read. The same bytes: it is stored. Other bytes: another broker leads (FencedError). Nothing: the same block is
sent again. This may be repeated safely, since the block can only be stored at that place. So nothing depends on time,
and ``append`` waits as long as the stream has no quorum.

A stream that has lost blocks, as its servers do when their files are damaged, is noticed here too (LostBlocksError):
opening it again on the directory that has them restores them. One thread.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable

from penstock.errors import CorruptionError, PenstockError
from penstock.replica.block import decode
from penstock.replica.client import UnansweredError
from penstock.replica.outage import Outage
from penstock.replica.stream import Blocks, StreamError, WrongLastError

log = logging.getLogger("penstock.replica")
WAITING = "publishers wait, and nothing is confirmed, refused or delivered until it stores again"
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
        self._end_at: float | None = None
        self._outage = Outage(blocks, WAITING)
        self.unknown = 0  # appends whose outcome had to be looked up
        # The blocks with which the oldest segment begins and the one that is being written; 0: none. Who purges the
        # stream below them takes what is in the directory alone then.
        self.oldest = self.newest = 0
        self._purged = 0  # by somebody else, as was told

    def end_after(self, seconds: float) -> None:
        """Wait at most this many seconds from now on for an outcome. Any thread, any signal handler."""
        self._end_at = time.monotonic() + seconds

    def append(self, data: bytes) -> int:
        """Add a block; returns its sequence. FencedError: another broker has added one; this is final."""
        if self.fault is not None:
            raise self.fault
        sequence = self.last + 1
        identity = f"{self._writer:016x}-{sequence}"
        self._outage.begin()
        while not self._try(data, identity):
            if self._end_at is not None and time.monotonic() >= self._end_at:
                self._outage.drop()
                text = f"{self.blocks.name} did not answer: whether block {sequence} is there is not known"
                self.fault = UnknownOutcomeError(text)
                raise self.fault
            self._pause()
        self._outage.end()
        self.last = sequence
        self._short_since = None
        if time.monotonic() >= self._check_at:
            self._check()
        return sequence

    def _check(self) -> None:
        """Raise if the stream has lost blocks since the last check. The block appended just now is stored in any
        case.
        """
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

    def _try(self, data: bytes, identity: str) -> bool:
        try:
            self.blocks.append(data, self.last, identity)
            return True
        except (WrongLastError, UnansweredError, ConnectionError, StreamError) as error:
            self.unknown += 1
            problem: Exception = error
        try:
            if self._is_there(data, isinstance(problem, WrongLastError)):
                return True
        except (UnansweredError, ConnectionError, StreamError) as error:
            problem = error
        if not isinstance(problem, WrongLastError):
            self._outage.note(problem)
        return False

    def _is_there(self, data: bytes, moved: bool) -> bool:
        """Whether the block is at its place. ``moved``: the server says that the stream does not end right before
        it.
        """
        found = self.blocks.read(self.last + 1)
        if found is None and moved:
            bounds = self.blocks.bounds()
            if bounds.last < self.last:
                self._note_short(f"ends with block {bounds.last}, and block {self.last} was confirmed")
            if bounds.first > self.last + 1:
                found = b""  # there was a block, and it was purged, but not by us
        if found is None or found == data:
            return found is not None
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
