"""Standby: a broker's directory follows the stream until the lease is free; then this broker may lead. One thread."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from penstock.errors import CorruptionError, InvalidArgument, PenstockError, StateError
from penstock.journal.lock import WriterLock
from penstock.journal.recovery import check_owner
from penstock.replica.client import UnansweredError
from penstock.replica.follower import POLL_S, Follower
from penstock.replica.lease import RENEWALS, Lease
from penstock.replica.stream import ANSWER_S, SLOW_S, Blocks, JetStream, Seldom, Target

log = logging.getLogger("penstock.replica")
#: The limits of the lease's stream: it keeps only its last block.
LEASE_LIMITS = {"max_msgs": 1, "discard": "old"}
LOOK_S = 0.5  # at most, between two looks at the lease: who gives it back is not waited for


def lease_stream(target: Target, answer_s: float = ANSWER_S) -> JetStream:
    """The stream that keeps the lease of a broker's stream."""
    return JetStream(replace(target, stream=f"{target.stream}_lead"), answer_s=answer_s, limits=LEASE_LIMITS)


def check_directory(directory: Path) -> None:
    """Refuse a directory that this process cannot write, or that another one writes."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owner(directory)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))
    WriterLock(directory).release()


def stand_by(directory: Path, blocks: Blocks, lease: Lease, stopped: Callable[[], bool]) -> bool:
    """Keep the directory a copy of the stream until this broker has the lease; False: ``stopped`` was set before.

    What would keep this broker from leading is raised now: a directory of another journal, or that it cannot write.
    """
    follower: Follower | None = None
    leader, seldom, look_at, well_at = "", Seldom(), 0.0, time.monotonic()
    try:
        while not stopped():
            now = time.monotonic()
            try:
                if now >= look_at:
                    look_at = now + min(LOOK_S, lease.lease_s / RENEWALS)
                    if lease.take():
                        return True
                    if lease.holder is not None and lease.holder.address != leader:
                        leader = lease.holder.address
                        log.info("standing by: %s leads", leader)
                follower = follower or _follow(directory, blocks)
                idle = follower is None or not follower.step()
                well_at = time.monotonic()
                if idle:
                    time.sleep(POLL_S)
            except (InvalidArgument, PermissionError):
                raise
            except (PenstockError, OSError) as error:
                if follower is not None and isinstance(error, CorruptionError):
                    follower.close()  # opening checks the directory again, and restores what the stream has lost
                    follower = None
                if not isinstance(error, UnansweredError) or time.monotonic() - well_at >= SLOW_S:
                    seldom.warn("standing by: %s", error)
                time.sleep(0.1)
    finally:
        if follower is not None:
            follower.close()
    return False


def _follow(directory: Path, blocks: Blocks) -> Follower | None:
    """A follower of the stream; None: nothing was ever stored."""
    try:
        return Follower(directory, blocks)
    except StateError:
        return None
