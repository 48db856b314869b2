"""Lease: which of several brokers should lead. A hint: what fences an old leader is the epoch block of the new one.

The lease is the last block of a small stream of its own. Who leads appends a block to it several times a lease; who
stands by looks at it, and appends when nothing was added for longer than a lease, by its own clock. Each append names
the block that it must follow, so of several who try at once one succeeds. The leader counts its lease from before it
sent the block, a standby from when it saw it: so the old lease has ended before the new one begins, whatever the
clocks of the machines say, as long as they run at the same speed (within ``MARGIN``).

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
from dataclasses import dataclass

from penstock.errors import InvalidArgument, PenstockError
from penstock.replica.stream import Blocks, WrongLastError

log = logging.getLogger("penstock.replica")
LEASE_S = 2.0
RENEWALS = 6  # how often a lease is renewed in the time that it lasts
MARGIN = 1.1  # a standby waits so many leases: clocks do not run at exactly the same speed
MAX_BYTES = 4096  # of a lease's block; a longer one is not ours


@dataclass(frozen=True, slots=True)
class Holder:
    """Who wrote a lease's block. An empty ``address``: it has given the lease back."""

    writer: str
    address: str

    def encode(self) -> bytes:
        """As JSON, for people who look at the stream."""
        return json.dumps({"writer": self.writer, "address": self.address}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Holder:
        """What nobody can read is a holder without a name, whose lease ends as any other's."""
        fields = None
        if len(data) <= MAX_BYTES:
            with contextlib.suppress(ValueError, RecursionError):
                fields = json.loads(data)
        if not isinstance(fields, dict):
            return cls("", "somebody")
        return cls(str(fields.get("writer", "")), str(fields.get("address", "somebody")))


class Lease:
    """One broker's view of the lease. ``address`` is where its clients find it."""

    def __init__(
        self, blocks: Blocks, address: str, lease_s: float = LEASE_S, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not 0.5 <= lease_s <= 3600:
            raise InvalidArgument(f"lease_s={lease_s} must be 0.5 to 3600 seconds")
        self.blocks = blocks
        self.lease_s = lease_s
        self.holder: Holder | None = None  #: as it was seen last
        self._me = Holder(secrets.token_hex(8), address)
        self._clock = clock
        self._last = -1  # the last block of the stream, as it was seen
        self._seen_at = 0.0  # when it was seen first
        self._until = 0.0  # the end of our own lease
        self._sent = (0, 0.0)  # the block that was sent last, and when it was sent first
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def held(self) -> bool:
        """Whether this broker may lead now."""
        return self._clock() < self._until

    def look(self) -> Holder | None:
        """Who holds the lease; None: nobody ever did. UnansweredError, ConnectionError, StreamError: not known."""
        last = self.blocks.bounds().last
        if last != self._last:
            data = self.blocks.read(last) if last else None
            self.holder = None if data is None else Holder.decode(data)
            self._last, self._seen_at = last, self._clock()
        return self.holder

    @property
    def free(self) -> bool:
        """Whether nobody holds the lease any more, by what ``look`` saw."""
        if self.holder is None or not self.holder.address or self.holder.writer == self._me.writer:
            return self._last >= 0
        return self._clock() - self._seen_at > self.lease_s * MARGIN

    def take(self) -> bool:
        """Try to get the lease, if it is free; whether it is ours now."""
        self.look()
        return self.free and self._write(self._me)

    def renew(self) -> bool:
        """Begin the lease anew. False: somebody else has it, and it stays lost until ``take``."""
        if self._write(self._me):
            return True
        self._until = 0.0
        return False

    def release(self) -> None:
        """Give the lease back, so that a standby need not wait for its end. What fails is the same as no release."""
        self.stop()
        held, self._until = self.held, 0.0
        if held:
            with contextlib.suppress(PenstockError, OSError):
                self._write(Holder(self._me.writer, ""))
        self._until = 0.0

    def _write(self, holder: Holder) -> bool:
        """Add a block after the last one that was seen; False: somebody else has added one."""
        data, sequence = holder.encode(), self._last + 1
        if self._sent[0] != sequence:  # sent again, it may be the first one that landed
            self._sent = sequence, self._clock()
        sent_at = self._sent[1]
        try:
            self.blocks.append(data, self._last, f"{holder.writer}-{sequence}")
        except WrongLastError:  # perhaps by our own earlier block, whose answer was lost
            if self.blocks.bounds().last != sequence or self.blocks.read(sequence) != data:
                return False
        self._last, self._seen_at, self.holder = sequence, sent_at, holder
        self._until = sent_at + self.lease_s
        return True

    # -- renewing ---------------------------------------------------------------------------------------------------

    def keep(self, lost: Callable[[], None]) -> None:
        """Renew the lease in a thread of its own until ``stop``; ``lost`` is called once when it has ended."""
        self._ended.clear()
        self._thread = threading.Thread(target=self._keep, args=(lost,), name="penstock-lease", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the lease ends when its time is over."""
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None

    def _keep(self, lost: Callable[[], None]) -> None:
        while not self._ended.wait(self.lease_s / RENEWALS):
            try:
                if not self.renew():
                    break
            except (PenstockError, OSError) as error:
                if not self.held:
                    log.warning("%s: the lease could not be renewed: %s", self.blocks.name, error)
                    break
        if not self._ended.is_set():
            lost()
