"""A broker of a group (``penstock broker --standby``): stands by, leads while it has the lease, stands by again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli import exits

if TYPE_CHECKING:
    from penstock.broker import Server
    from penstock.replica import JetStream, Replica
    from penstock.replica.lease import Lease

log = logging.getLogger("penstock.broker")
END_S = 1.0  # an end waits so long for a cluster that does not answer


class Turns:
    """One broker's turns as leader. ``serve`` creates the server of a turn, ``leading`` is called when it listens.
    ``renew`` reads again who may connect, for the servers that ``serve`` creates from then on.
    """

    def __init__(
        self,
        directory: Path,
        blocks: JetStream,
        lease: Lease,
        serve: Callable[[Replica, Callable[[], bool]], Server],
        leading: Callable[[Server], None],
        drain_s: float,
        renew: Callable[[], None] = lambda: None,
    ) -> None:
        self._directory = directory
        self._blocks = blocks
        self._lease = lease
        self._serve = serve
        self._leading = leading
        self._drain_s = drain_s
        self._renew = renew
        self._reload = False  # whether the tokens are to be read again
        self._stopped = False
        self._replica: Replica | None = None
        self._server: Server | None = None
        self._offered = False  # whether the lead was offered to others, because the disk is full
        self._ended = False  # whether this turn as leader has ended, because its lease was lost

    def stop(self, *_: object) -> None:
        """End for good. Any thread, any signal handler."""
        self._stopped = True
        if self._server is not None:
            self._server.stop()
        if self._replica is not None:
            self._replica.end_after(self._drain_s)

    def end(self, number: int, _frame: object) -> None:
        """``stop`` by a signal. While it does not serve it may be waiting for a cluster that does not answer."""
        self.stop()
        if self._server is None:
            raise exits.Terminated(number)

    def reload(self, *_: object) -> None:
        """Read the tokens again, also while this broker stands by: what is wrong is told now."""
        if self._server is not None:
            self._server.reload()
        else:
            self._reload = True

    def _must_end(self) -> bool:
        """Whether this broker is to end; asked often while it stands by."""
        if self._reload:
            self._reload = False
            self._renew()
        return self._stopped

    def run(self) -> None:
        """Stand by and lead in turn until ``stop``."""
        from penstock.replica.standby import stand_by

        try:
            while stand_by(self._directory, self._blocks, self._lease, self._must_end):
                try:
                    self._lead()
                finally:
                    self._server = self._replica = None
                    self._lease.release(END_S if self._stopped else None)
        finally:
            self._lease.release(END_S)  # a signal may have come when it was just taken

    def _lead(self) -> None:
        """One turn. It ends when another broker leads or the cluster cannot be reached; other errors are raised."""
        from penstock.replica import Replica

        replica = self._replica = Replica(self._directory, self._blocks)
        self._offered = self._ended = False
        self._lease.keep(self._lost, self._offers)  # before the log is read, which may take longer than a lease
        self._reload = False
        self._renew()
        try:
            server = self._server = self._serve(replica, lambda: self._lease.held and not self._ended)
            if self._stopped:
                server.stop()
            if self._reload:
                server.reload()
            self._leading(server)
            server.run()
        except OSError as error:
            if replica.fault is None and self._lease.held:
                raise
            fault = replica.fault or error
            log.warning("%s", fault.strerror or fault)
        if not self._stopped:
            why = f": the disk of {self._directory} is full, and another broker has room" if self._offered else ""
            log.warning("this broker does not lead any more%s", why)

    def _offers(self) -> bool:
        """Whether another broker should lead, if there is one with room: this one's disk has been full for a lease."""
        from penstock.replica.standby import has_room

        server = self._server
        since = 0.0 if server is None else server.full_since
        offered = since > 0.0 and time.monotonic() - since > self._lease.lease_s and not has_room(self._directory)
        if offered != self._offered:
            self._offered = offered
            full = f"the disk of {self._directory} is full: a standby broker with room may take the lead"
            log.warning("%s", full if offered else f"the disk of {self._directory} has room again")
        return offered

    def _lost(self) -> None:
        """The lease has ended: end all waits, and cut off the clients first, as one of them may wait for an answer."""
        self._ended = True  # a renewal whose answer comes now changes nothing
        replica, server = self._replica, self._server
        if server is not None:
            server.cut_off()
        if replica is not None:
            replica.end_after(0)
