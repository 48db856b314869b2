"""Replica: a directory and the stream that it is a copy of. Each opening of the journal asks it for a disk."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from penstock.errors import InvalidArgument, RefusedError
from penstock.replica.appender import PAUSE_S, Appender, FencedError
from penstock.replica.block import Block
from penstock.replica.client import UnansweredError
from penstock.replica.disk import ReplicatedDisk, epoch_block
from penstock.replica.history import History
from penstock.replica.refill import Refilled, refill
from penstock.replica.stream import Blocks

log = logging.getLogger("penstock.replica")
OPEN_S = 60.0  # how long opening waits for a quorum
OPENINGS = 20  # tries, where others open the stream at the same time


class Replica:
    """``disk()`` makes the directory what the stream says and takes the lead."""

    def __init__(
        self, directory: str | Path, blocks: Blocks, *, pause: Callable[[], None] = lambda: time.sleep(PAUSE_S)
    ) -> None:
        self.directory = Path(directory)
        self.blocks = blocks
        self._pause = pause
        self._appender: Appender | None = None

    @property
    def fault(self) -> OSError | None:
        """Why nothing can be stored any more, if that is so."""
        return None if self._appender is None else self._appender.fault

    def end_after(self, seconds: float) -> None:
        """Wait no longer than that for a stream that does not answer. Any thread, any signal handler."""
        if self._appender is not None:
            self._appender.end_after(seconds)

    def disk(self) -> ReplicatedDisk:
        """The disk for opening the journal now: from here on nobody else appends to the stream."""
        if isinstance(self.fault, FencedError):
            raise self.fault
        deadline = time.monotonic() + OPEN_S
        for _ in range(OPENINGS):
            history, directory = self._refill(deadline)
            if directory.copied:
                log.info("%s: %d segments taken from %s", self.directory, len(directory.copied), self.blocks.name)
            epoch, writer = _epoch(history.last) + 1, secrets.randbits(64)
            self._appender = Appender(self.blocks, history.bounds.last, writer, pause=self._pause)
            try:
                self._appender.append(epoch_block(directory, epoch, writer))
                return ReplicatedDisk(self._appender, directory, epoch, writer)
            except FencedError:
                log.info("%s: somebody else has appended to it meanwhile: reading it again", self.blocks.name)
        raise RefusedError(f"{self.blocks.name} is opened by others all the time")

    def _refill(self, deadline: float) -> tuple[History, Refilled]:
        """From the beginning again, where the cluster is choosing a leader or has no quorum at the moment."""
        while True:
            try:
                history = History(self.blocks, self.blocks.bounds())
                if history.last is not None and history.last.epoch == 0:
                    raise InvalidArgument(f"{self.blocks.name} was not filled to its end: fill another one")
                return history, refill(self.directory, history)
            except (UnansweredError, ConnectionError):
                if time.monotonic() >= deadline:
                    raise
                self._pause()

    def close(self) -> None:
        """Let go of the connection."""
        self.blocks.close()


def _epoch(last: Block | None) -> int:
    return 0 if last is None else last.epoch
