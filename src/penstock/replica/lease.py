"""Lease: which of several brokers should lead. It is only a hint: an old leader is fenced by the epoch block of the new
one. The lease is the last block of a small stream of its own. The leader appends a block several times per lease; a
standby watches the stream, and appends when nothing was added for longer than a lease, by its own clock. Each append
names the block that it must follow, so of several brokers that try at once one succeeds. The leader counts its lease
from before it sent the block, a standby from when it saw it: so the old lease has ended before the new one begins,
whatever the clocks of the machines say, as long as they run at the same speed (within ``MARGIN``). How long a lease
lasts stands in it, so all go by the leader's.

A leader that cannot do its work (its disk is full) offers its place in the lease, and leads on. A standby that can do
it claims the place by a block of its own: the leader cannot renew after that, and the claim becomes a lease when that
of the leader has ended, as if it had not been renewed. Where nobody claims, nothing changes.

``held`` may be asked by any thread; everything else is for one thread at a time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock.errors import InvalidArgument, PenstockError
from penstock.replica.stream import Blocks, NoStreamError, WrongLastError

log = logging.getLogger("penstock.replica")
LEASE_S = 2.0
SHORTEST_S, LONGEST_S = 0.5, 3600.0
RENEWALS = 6  # how often a lease is renewed in the time that it lasts
MARGIN = 1.1  # how many leases a standby waits: clocks do not run at exactly the same speed
MAX_BYTES = 4096  # longest block of a lease; a longer one is not ours


@dataclass(frozen=True, slots=True)
class Holder:
    """The writer of a lease's block. An empty ``address``: it has released the lease."""

    writer: str
    address: str
    lease_s: float = 0.0  #: 0: not told
    offered: bool = False  #: it leads, and another one should

    def encode(self) -> bytes:
        """As JSON, readable for people who inspect the stream."""
        fields = {"writer": self.writer, "address": self.address, "lease_s": self.lease_s}
        return json.dumps(fields | ({"offered": True} if self.offered else {})).encode()

    @classmethod
    def decode(cls, data: bytes) -> Holder:
        """Parse a block. An invalid one gives a holder without a name, whose lease ends like any other."""
        fields = None
        if len(data) <= MAX_BYTES:
            with contextlib.suppress(ValueError, RecursionError):
                fields = json.loads(data)
        if not isinstance(fields, dict):
            return cls("", "somebody")
        length = fields.get("lease_s")
        if not isinstance(length, int | float) or not SHORTEST_S <= length <= LONGEST_S:
            length = 0.0
        offered = fields.get("offered") is True
        return cls(str(fields.get("writer", "")), str(fields.get("address", "somebody")), length, offered)


class Lease:
    """One broker's view of the lease. ``address`` is the address for its clients."""

    def __init__(
        self, blocks: Blocks, address: str, lease_s: float = LEASE_S, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not SHORTEST_S <= lease_s <= LONGEST_S:
            raise InvalidArgument(f"lease_s={lease_s} must be {SHORTEST_S:g} to {LONGEST_S:g} seconds")
        self.blocks = blocks
        self.lease_s = lease_s
        self.holder: Holder | None = None  #: the holder at the last look
        self._me = Holder(secrets.token_hex(8), address, lease_s)
        self._clock = clock
        self._last = -1  # the last block of the stream at the last look
        self._seen_at = 0.0  # when that block was first seen
        self._until = 0.0  # when our own lease ends
        self._not_before = 0.0  # when the lease of the one has ended whose place was claimed
        self._sent = (0, 0.0)  # the last block that was sent, and when it was first sent
        self._ended = threading.Event()  # the lease is not to be renewed any more
        self._over = threading.Event()  # nor is it
        self._threads: list[threading.Thread] = []

    @property
    def held(self) -> bool:
        """Whether this broker may lead now."""
        return self._clock() < self._until

    def look(self) -> Holder | None:
        """Read who holds the lease; None: nobody ever did. A stream that somebody has deleted is made again.
        UnansweredError, ConnectionError, StreamError: not known.
        """
        try:
            last = self.blocks.bounds().last
        except NoStreamError:
            log.warning("%s was deleted and is made again", self.blocks.name)
            self.blocks.make()
            last = self.blocks.bounds().last
        if last == 0 < self._last:  # it was made again: who has the lease believes so until that has ended
            lease_s = self.lease_s if self.holder is None else self.holder.lease_s or self.lease_s
            self._not_before = max(self._not_before, self._clock() + lease_s * MARGIN)
        if last != self._last:
            data = self.blocks.read(last) if last else None
            self.holder = None if data is None else Holder.decode(data)
            self._last, self._seen_at = last, self._clock()
        return self.holder

    @property
    def free(self) -> bool:
        """Whether the lease is free, judging by ``look``."""
        if self._clock() < self._not_before:
            return False
        if self.holder is None or not self.holder.address or self.holder.writer == self._me.writer:
            return self._last >= 0
        return self._clock() - self._seen_at > (self.holder.lease_s or self.lease_s) * MARGIN

    def take(self) -> bool:
        """Try to get the lease if it is free; returns whether this broker has it now."""
        self.look()
        if self.claimed and self.holder is not None:
            self._write(self.holder, claims=True)  # else others would count from the claim, and come at the same time
            return False
        return self.free and self._write(self._me)

    @property
    def offered(self) -> bool:
        """Whether another broker has offered its place, judging by ``look``."""
        return self.holder is not None and self.holder.offered and self.holder.writer != self._me.writer

    @property
    def claimed(self) -> bool:
        """Whether this broker has claimed a place whose lease may not have ended, judging by ``look``."""
        mine = self.holder is not None and self.holder.writer == self._me.writer
        return mine and self._clock() < self._not_before

    def claim(self) -> bool:
        """Claim the place that the holder has offered; False: it was renewed meanwhile. ``take`` gets the lease when
        that of the holder has ended.
        """
        if self.holder is None or not self.offered:
            return False
        lease_s = self.holder.lease_s or self.lease_s
        # Also if the answer is lost: whenever the claim is stored, the holder's last block is the one that was seen.
        self._not_before = max(self._not_before, self._seen_at + lease_s * MARGIN)
        return self._write(replace(self._me, lease_s=max(lease_s, self.lease_s)), claims=True)

    def renew(self, *, offered: bool = False) -> bool:
        """Renew the lease. False: another broker has it, and it stays lost until ``take``."""
        if self._write(replace(self._me, offered=offered)):
            return True
        self._until = 0.0
        return False

    def release(self, patience_s: float | None = None) -> None:
        """Release the lease, so that a standby need not wait for its end. A failure is ignored: then the lease just
        ends.

        With ``patience_s`` it is given up when its thread waits longer for an answer; the lease is not used after that.
        """
        joined = self.stop(patience_s)
        held, self._until = self.held, 0.0
        if held and joined:
            with contextlib.suppress(PenstockError, OSError):
                self._write(Holder(self._me.writer, ""))
        self._until = 0.0

    def _write(self, holder: Holder, *, claims: bool = False) -> bool:
        """Add a block after the last one that was seen; False: another broker has added one."""
        sequence = self._last + 1
        if self._sent[0] != sequence:  # if it is sent again, the first attempt may have been stored
            self._sent = sequence, self._clock()
        sent_at = self._sent[1]
        try:
            # without an identity: to servers that know it a block is stored, also if others have come after it
            self.blocks.append(holder.encode(), self._last)
        except WrongLastError:  # it may be our own earlier block, whose answer was lost
            stored = self.blocks.read(sequence) if self.blocks.bounds().last == sequence else None
            if stored is None or not _same(Holder.decode(stored), holder):
                return False
        self._last, self._seen_at, self.holder = sequence, sent_at, holder
        if not claims:
            self._until = sent_at + self.lease_s
        return True

    # -- renewing ---------------------------------------------------------------------------------------------------

    def keep(self, lost: Callable[[], None], offers: Callable[[], bool] = lambda: False) -> None:
        """Renew the lease in a thread of its own until ``stop``. When it has ended, another thread calls ``lost`` once:
        by the clock alone, for a renewal may wait for its answer much longer. While ``offers`` returns True, the place
        is offered to others.
        """
        self._ended.clear()
        self._over.clear()
        self._threads = [
            threading.Thread(target=self._keep, args=(offers,), name="penstock-lease", daemon=True),
            threading.Thread(target=self._tell_end, args=(lost,), name="penstock-lease-end", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def stop(self, patience_s: float | None = None) -> bool:
        """End the threads, and whether they have ended; the lease ends when its time is over."""
        self._ended.set()
        self._over.set()
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.is_alive():  # a signal may have come before it began
                thread.join(patience_s)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return not [thread for thread in self._threads if thread is not threading.current_thread()]

    def _keep(self, offers: Callable[[], bool]) -> None:
        try:
            while not self._ended.wait(self.lease_s / RENEWALS):
                try:
                    if not self.renew(offered=offers()):
                        break
                except (PenstockError, OSError) as error:
                    if not self.held:
                        log.warning("%s: the lease could not be renewed: %s", self.blocks.name, error)
                        break
        finally:
            self._over.set()

    def _tell_end(self, lost: Callable[[], None]) -> None:
        while self.held and not self._over.wait(max(0.0, self._until - self._clock())):
            pass
        if not self._ended.is_set():
            self._ended.set()  # a renewal that waits for its answer is the last one
            lost()


def _same(one: Holder, other: Holder) -> bool:
    """Whether both are of one broker, and both or neither releases the lease."""
    return (one.writer, one.address) == (other.writer, other.address)
