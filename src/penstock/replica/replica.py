"""Replica: a directory and the stream that it is a copy of. Each opening of the journal asks it for a disk."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from penstock.errors import CorruptionError, InvalidArgument, PenstockError, RefusedError
from penstock.journal import layout
from penstock.replica.appender import PAUSE_S, SHORT_S, Appender, FencedError, LostBlocksError
from penstock.replica.block import Block
from penstock.replica.client import UnansweredError
from penstock.replica.disk import ReplicatedDisk, epoch_block
from penstock.replica.history import FILL_ANOTHER, History
from penstock.replica.outage import TELL_S, Outage
from penstock.replica.refill import Refilled, check_directory, refill, refuse_messages
from penstock.replica.seed import restore
from penstock.replica.stream import Blocks
from penstock.replica.writers import Writers

log = logging.getLogger("penstock.replica")
OPEN_S = 60.0  # how long opening waits for a quorum
OPENINGS = 20  # attempts, because others may open the stream at the same time
T = TypeVar("T")


class Replica:
    """``disk()`` makes the directory a copy of the stream and takes the lead."""

    def __init__(
        self,
        directory: str | Path,
        blocks: Blocks,
        *,
        short_s: float = SHORT_S,
        pause: Callable[[], None] = lambda: time.sleep(PAUSE_S),
    ) -> None:
        self.directory = Path(directory)
        self.blocks = blocks
        self._short_s = short_s
        self._pause = pause
        self._appender: Appender | None = None
        self.check = False  #: whether the next opening reads every segment of the directory, and not the last one alone

    @property
    def fault(self) -> OSError | None:
        """Why nothing can be stored any more, or None."""
        return None if self._appender is None else self._appender.fault

    def end_after(self, seconds: float) -> None:
        """Wait no longer than that for a stream that does not answer. Any thread, any signal handler."""
        if self._appender is not None:
            self._appender.end_after(seconds)

    def disk(self) -> ReplicatedDisk:
        """The disk with which the journal is opened: from here on nobody else can append to the stream."""
        if isinstance(self.fault, FencedError):
            raise self.fault
        deadline = time.monotonic() + OPEN_S
        for _ in range(OPENINGS):
            try:
                return self._open(deadline)
            except FencedError:
                log.info("%s: another broker has appended to it; reading it again", self.blocks.name)
            except LostBlocksError as error:
                log.warning("%s while it was opened; reading it again", error.strerror)
        tried = f"other brokers kept opening {self.blocks.name} ({OPENINGS} attempts)"
        raise RefusedError(f"{tried}: run one broker, or give all of them --standby")

    def _open(self, deadline: float) -> ReplicatedDisk:
        """Try once. FencedError: another broker has appended to the stream."""
        try:
            history, directory = self._believed(deadline)
            # then nothing is missing here, and blocks lost by the stream do no harm
            all_fetched = 0 < len(history.segments) == len(directory.copied)
            lost = 0 if all_fetched else history.bounds.missing
            damage = CorruptionError(f"{self.blocks.name} has lost {lost} blocks", self.blocks.name) if lost else None
            fatal = False
        except CorruptionError as error:
            damage, fatal = error, True
        if damage is not None:
            restored = self._patiently(deadline, partial(self._restore, damage, fatal))
            if restored or fatal:
                history, directory = self._patiently(deadline, self._refill)
            if restored:
                # if this fails, retention does it later
                with contextlib.suppress(PenstockError, UnansweredError, ConnectionError):
                    self.blocks.purge(history.segments[0].begin)
        taken = len(set(directory.copied) - set(directory.damaged))  # those that were damaged were told one by one
        if taken:
            log.info("%s: %d segment%s taken from %s", self.directory, taken, "s"[: taken - 1], self.blocks.name)
        writers = Writers(self.directory)
        epoch = max(_epoch(history.last), writers.epoch) + 1
        writer = writers.begin(epoch)
        missing = history.bounds.missing
        self._appender = Appender(self.blocks, history.bounds.last, writer, missing=missing, pause=self._pause)
        self._appender.begin(epoch_block(directory, epoch, writer), deadline)
        writers.note_led()
        return ReplicatedDisk(self._appender, directory, epoch, writer)

    def _believed(self, deadline: float) -> tuple[History, Refilled]:
        """Refill the directory. CorruptionError: the stream lacks something, and has lacked it for ``short_s``.

        A node that has lost the lead, or that has just taken it, may tell an end that the stream has passed already.
        """
        since = time.monotonic()
        while True:
            try:
                return self._patiently(deadline, self._refill)
            except CorruptionError:
                if time.monotonic() >= since + self._short_s:
                    raise
                self._pause()

    def _patiently(self, deadline: float, act: Callable[[], T]) -> T:
        """Call ``act``, and again from the beginning while the cluster is choosing a leader or has no quorum."""
        outage = Outage(self.blocks, "the log cannot be read yet; trying again", TELL_S)
        while True:
            try:
                found = act()
            except (UnansweredError, ConnectionError) as error:
                if time.monotonic() >= deadline:
                    raise
                outage.note(error)
                self._pause()
            else:
                outage.end()
                return found

    def _refill(self) -> tuple[History, Refilled]:
        history = History(self.blocks, self.blocks.bounds())
        if history.last is None:  # a start that is refused must not leave a stream behind
            check_directory(self.directory)
            refuse_messages(self.directory, self.blocks.name)
            self.blocks.make()
        led = Writers(self.directory).epoch > 0
        if history.unfinished:
            text = f"{history.unfinished}: {FILL_ANOTHER}"
            raise CorruptionError(text) if led else InvalidArgument(text)
        if history.last is not None and led and not history.segments and _has_segments(self.directory):
            raise CorruptionError(f"{self.blocks.name} has lost all of its segments", self.blocks.name)
        return history, refill(self.directory, history, check=self.check)

    def _restore(self, damage: CorruptionError, fatal: bool) -> bool:
        """Restore what the stream has lost from this directory; returns whether anything was. If the directory does not
        have it, ``damage`` is raised, unless the stream can be opened all the same (``fatal`` is False).
        """
        if not (self.directory / layout.MARKER_NAME).exists():
            text = f"{damage}. A broker that is started on the directory from which it was written last puts it right"
            raise CorruptionError(text, damage.place)
        writers = Writers(self.directory)
        try:
            count = restore(self.directory, self.blocks, writers, whole=not fatal, pause=self._pause)
        except (CorruptionError, InvalidArgument) as error:
            if fatal:
                raise CorruptionError(f"{damage}. It cannot be restored: {error}", damage.place) from None
            log.warning("%s. It cannot be restored: %s", damage, error)
            return False
        if count:
            log.warning("%s. Restored from %s: %d segment%s", damage, self.directory, count, "s"[: count - 1])
        return count > 0

    def close(self) -> None:
        """Close the connection."""
        self.blocks.close()


def _has_segments(directory: Path) -> bool:
    return bool(layout.latest_segments(os.listdir(directory)))


def _epoch(last: Block | None) -> int:
    return 0 if last is None else last.epoch
