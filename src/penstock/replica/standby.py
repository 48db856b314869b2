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
from penstock.replica.client import UnansweredError
from penstock.replica.follower import POLL_S, Follower
from penstock.replica.lease import RENEWALS, Lease
from penstock.replica.outage import Outage
from penstock.replica.stream import ANSWER_S, Blocks, JetStream, Seldom, Target

log = logging.getLogger("penstock.replica")
#: The limits of the lease's stream: it keeps only its last block.
LEASE_LIMITS = {"max_msgs": 1, "discard": "old"}
DISK_FULL = errno.ENOSPC, errno.EDQUOT
ROOM_BYTES = 64 << 20  # free on the disk of a standby that takes the place of a leader whose disk is full
LOOK_S = 0.5  # at most, between two looks at the lease: who gives it back is not waited for


def lease_stream(target: Target, answer_s: float = ANSWER_S) -> JetStream:
    """The stream that keeps the lease of a broker's stream."""
    return JetStream(replace(target, stream=f"{target.stream}_lead"), answer_s=answer_s, limits=LEASE_LIMITS)


def stand_by(directory: Path, blocks: Blocks, lease: Lease, stopped: Callable[[], bool]) -> bool:
    """Keep the directory a copy of the stream until this broker has the lease; False: ``stopped`` was set before.

    What would keep this broker from leading is raised now: a directory of another journal, or that it cannot write.
    """
    follower: Follower | None = None
    leader, seldom, look_at = "", Seldom(), 0.0
    in_step = full = False  # with the stream; the disk
    outage = Outage(blocks, "standing by: nobody leads, and publishers wait, until it answers again")
    try:
        while not stopped():
            now = time.monotonic()
            try:
                if now >= look_at:
                    look_at = now + min(LOOK_S, lease.lease_s / RENEWALS)
                    if full:  # nor could the journal be opened
                        lease.look()
                    elif lease.take():
                        outage.end()
                        return True
                    if lease.holder is not None and lease.holder.address != leader and not lease.claimed:
                        leader = lease.holder.address
                        log.info("standing by: %s leads", leader)
                    if lease.offered and in_step and has_room(directory) and lease.claim():
                        log.warning("the disk of %s, which leads, is full: this broker takes its place", leader)
                follower = follower or _follow(directory, blocks)
                in_step = follower is not None and not follower.step()
                full = False
                if follower is None or in_step:
                    time.sleep(POLL_S)
                outage.end()
                outage.begin()
            except (InvalidArgument, PermissionError):
                raise
            except (UnansweredError, ConnectionError) as error:
                outage.note(error)
                time.sleep(0.1)
            except (PenstockError, OSError) as error:
                in_step, full = False, getattr(error, "errno", None) in DISK_FULL
                if follower is not None and isinstance(error, CorruptionError):
                    follower.close()  # opening checks the directory again, and restores what the stream has lost
                    follower = None
                seldom.warn("standing by: %s", error)
                time.sleep(0.1)
    finally:
        outage.drop()
        if follower is not None:
            follower.close()
    return False


def has_room(directory: Path) -> bool:
    """Whether the directory's disk has room for what a leader writes, or cannot be asked."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return True
    return found.f_bavail * found.f_frsize >= ROOM_BYTES


def _follow(directory: Path, blocks: Blocks) -> Follower | None:
    """A follower of the stream; None: nothing was ever stored."""
    try:
        return Follower(directory, blocks)
    except StateError:
        return None
