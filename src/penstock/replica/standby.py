"""Standby: a broker's directory follows the stream until the lease is free; then this broker may lead. One thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from penstock.errors import CorruptionError, PenstockError, StateError
from penstock.replica.follower import POLL_S, Follower
from penstock.replica.lease import RENEWALS, Lease
from penstock.replica.stream import Blocks, JetStream, Target

log = logging.getLogger("penstock.replica")
#: The lease's stream keeps its last block alone.
LEASE_LIMITS = {"max_msgs": 1, "discard": "old"}
TELL_S = 10.0


def lease_stream(target: Target) -> JetStream:
    """Where the lease of a broker's stream is kept."""
    return JetStream(replace(target, stream=f"{target.stream}_lead"), limits=LEASE_LIMITS)


def stand_by(directory: Path, blocks: Blocks, lease: Lease, stopped: Callable[[], bool]) -> bool:
    """Keep the directory a copy of the stream until the lease is ours; False: ``stopped`` was first."""
    follower: Follower | None = None
    leader, told, look_at = "", -TELL_S, 0.0
    try:
        while not stopped():
            now = time.monotonic()
            try:
                if now >= look_at:
                    look_at = now + lease.lease_s / RENEWALS
                    if lease.take():
                        return True
                    if lease.holder is not None and lease.holder.address != leader:
                        leader = lease.holder.address
                        log.info("standing by: %s leads", leader)
                follower = follower or _follow(directory, blocks)
                if follower is None or not follower.step():
                    time.sleep(POLL_S)
            except (PenstockError, OSError) as error:
                if follower is not None and isinstance(error, CorruptionError):
                    follower.close()  # opening looks at it again, and puts back what the stream has lost
                    follower = None
                if now - told >= TELL_S:
                    told = now
                    log.warning("standing by: %s", error)
                time.sleep(0.1)
    finally:
        if follower is not None:
            follower.close()
    return False


def _follow(directory: Path, blocks: Blocks) -> Follower | None:
    """None: nothing was ever stored."""
    try:
        return Follower(directory, blocks)
    except StateError:
        return None
