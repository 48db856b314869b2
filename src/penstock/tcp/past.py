"""The past that a publisher keeps on disk, sent to those who ask for it: each has a source and a queue of its own.

Rules: a ``Feeder`` has one thread, which reads the source (a journal) and sends what it reads, for as long as its peer
is there; a slow peer is behind on the disk, and nobody waits for it. ``end`` may be called by any thread.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING, Protocol

from penstock._core import tcp as native
from penstock.channel import Subscriber
from penstock.errors import ClosedError, PenstockError
from penstock.history import Opened
from penstock.tcp.log import logger
from penstock.tcp.sockets import silence_s

if TYPE_CHECKING:
    from penstock.tcp.publisher import Publisher

ALL = (1 << 64) - 1  # any message of the connection may have come before: their ordinals only rise
BATCH = 4096
LOOK_S = 0.25
QUEUED_BYTES = 1 << 20  # at most this much is buffered per peer (up to 256 peers); the rest stays on disk


class Past(Protocol):
    """What is kept on disk."""

    identity: bytes  # the same for every publisher of it, one after the other

    def open(self, start: str, identity: bytes, last: int) -> Opened:
        """From ``start`` on, or after the ordinal ``last`` where that came from this past. Raises where it cannot be
        read there."""


class Feeder:
    """One subscriber that began in the past."""

    def __init__(
        self, publisher: Publisher, source: Subscriber, name: str, depth: int, depth_bytes: int, keepalive: float | None
    ) -> None:
        self.name = name
        self._publisher = weakref.ref(publisher)  # one that is forgotten is collected, and ends this
        self._keepalive = keepalive
        self._source = source
        where = self._where = f"{publisher.address} to {name}"
        most = min(depth_bytes, QUEUED_BYTES)
        self.outlet = native.Outlet(publisher._executor.loop, "block", depth, most, -1.0, where, 0, 0, 0)
        self._deadline: float | None = None  # once the publisher is being closed
        self._thread = threading.Thread(target=self._run, name="penstock-tcp-past", daemon=True)

    def begin(self, connection: socket.socket, answer: bytes) -> None:
        self.outlet.add(connection.detach(), True, answer, 0, False)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._feed()
        except ClosedError:
            pass
        except (PenstockError, OSError) as error:  # a damaged journal: the peer is closed, and may come again
            logger.error("%s: the past cannot be read on: %s", self._where, error)
        finally:
            self.outlet.close()
            self._source.close()
            publisher = self._publisher()
            if publisher is not None:
                publisher.remove_feeder(self)

    def _feed(self) -> None:
        while self.outlet.subscriber_count:
            batch = self._source.read_many(BATCH, LOOK_S if self._deadline is None else 0)
            if len(batch):
                self.outlet.publish_many(batch, True)
            elif self._deadline is not None:
                self.outlet.drain(max(0.0, self._deadline - time.monotonic()))
                return
            elif self._keepalive is not None:
                self.outlet.drop_silent(silence_s(self._keepalive))  # a peer that has acknowledged nothing for too long

    def end(self, deadline: float) -> None:
        """The publisher is being closed: what is on disk is sent, as far as the time reaches."""
        self._deadline = deadline
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self.outlet.close()
            with contextlib.suppress(RuntimeError):  # its own thread
                self._thread.join()
