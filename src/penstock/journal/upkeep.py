"""Upkeep: seals full segments, then applies retention.

Sealing syncs the caches of a segment, some hundred milliseconds of disk time, so it happens in a thread of its own
while appending goes on; the next roll waits for it, so that at most one full segment is unsealed and unsealed
ones are always the last. On a simulated disk it happens in the calling thread, so that the order of operations is
fixed.

``lock`` is held while sealed segments are changed: by sealing, retention, compaction. It is never taken while holding
the writer's lead.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from penstock.errors import ClosedError, PenstockError
from penstock.journal import layout, recovery
from penstock.journal.disk import Disk
from penstock.journal.lock import WriterLock

LOG = logging.getLogger("penstock.journal")


class Full(NamedTuple):
    """A segment that is full."""

    header: layout.SegmentHeader
    following: int  # the first position of the next one
    end: int
    tail: int | None  # the sum of its last block; None: its caches are incomplete


class Upkeep:
    """The work after a roll."""

    def __init__(self, disk: Disk, retain: Callable[[], object]) -> None:
        self._disk = disk
        self._retain: Callable[[], object] | None = retain
        self._unsealed: list[Full] = []
        self._thread: threading.Thread | None = None
        self._beginning = threading.Lock()  # held while a thread is started: one that is not cannot be waited for
        self.lock = threading.RLock()

    def hold(self, lock: WriterLock) -> None:
        """The lock of the journal's directory; before anything else."""
        self._place = lock

    def begin(self, full: Full) -> None:
        """Start sealing a segment, in a thread on a real disk. Call ``wait`` before."""
        if not self._disk.native:
            self._work(full)
            return
        thread = threading.Thread(target=self._work, args=(full,), name="penstock-journal-seal")
        try:
            with self._beginning:
                thread.start()
                self._thread = thread
        except RuntimeError:  # the system allows no more threads
            self._thread = None
            self._work(full)

    def wait(self) -> None:
        """Wait until the work that was started is done."""
        with self._beginning:
            thread = self._thread  # not cleared: other threads that wait must find it too
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def end(self) -> None:
        """Wait, then drop the reference to the journal."""
        self.wait()
        with self.lock:
            self._retain = None

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """A context in which no work runs and none starts; the caller prevents rolls."""
        self.wait()
        with self.lock:
            yield

    def forget_locks(self) -> None:
        """Replace the locks in a forked child, where neither their holders nor the thread exist."""
        self.lock = threading.RLock()
        self._beginning = threading.Lock()
        self._thread = None

    def _work(self, full: Full) -> None:
        with self.lock:
            self._seal(full)
        try:
            if self._retain is not None:
                self._retain()
        except ClosedError:
            pass  # closed by another thread since: the next roll does it
        except (OSError, PenstockError) as error:
            LOG.warning("retention could not be applied: %s", error)

    def _seal(self, full: Full) -> None:
        """Sync the caches of a full segment, then seal its header. A failure is retried later."""
        self._unsealed.append(full)
        if len(self._unsealed) == 1 and full.tail is not None:
            try:
                self._place.check()
                with self._place.naming():
                    place = self._place.place
                    recovery.seal_written(place, full.header, full.end, full.following, full.tail, self._disk)
                self._unsealed.clear()
            except (OSError, PenstockError) as error:
                LOG.warning("cannot seal a segment yet: %s", error)
                return
        self.seal_rest()

    def seal_rest(self) -> None:
        """Seal what could not be sealed before, perhaps because the disk was full; the caller holds ``lock``.

        Retention calls this: an unsealed segment is never removed, and on a full disk nothing else would retry.
        """
        try:
            while self._unsealed:
                self._place.check()
                header, following = self._unsealed[0].header, self._unsealed[0].following
                with self._place.naming():
                    place, segment = self._place.place, (header.first, header.revision)
                    recovery.seal_from_log(place, segment, header, following, self._disk)
                self._unsealed.pop(0)
        except (OSError, PenstockError) as error:
            LOG.warning("cannot seal a segment yet: %s", error)
