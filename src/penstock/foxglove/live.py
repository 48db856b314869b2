"""Live: addresses that are read while a viewer subscribes to them.

A channel is opened briefly to learn its schema. After that it is read, by a thread of its own, only while at least one
viewer subscribes to it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import penstock
from penstock.address import parse, without_secrets
from penstock.errors import ClosedError, PenstockError, describe
from penstock.foxglove.board import Board, Shown
from penstock.foxglove.presentation import is_image
from penstock.observe.rates import PRODUCERS, carries_calls
from penstock.observe.snapshot import Block, live, matching
from penstock.recording.story import topic_of

__all__ = ["Live"]

#: Reaches that can be read without taking messages from others. A broker's queue gives each message to one reader.
SHARED = ("shm:", "tcp:", "journal:")
GREETING_S = 1.0
LOOKS = 5  # a publisher announces its schema shortly after it has opened, so look more than once
LOOK_S = 0.02
BATCH = 256
WAIT_S = 0.2
logger = logging.getLogger("penstock.foxglove")


class Live:
    """The given addresses, or all that are published on this machine. One thread calls ``tend``."""

    def __init__(self, board: Board, addresses: Sequence[str] = (), *, paused: bool = False) -> None:
        self.board = board
        self.paused = paused  #: while set, messages are read and not sent
        self._named = list(dict.fromkeys(addresses))
        # for each address, those present when its schema was last read
        self._publishers: dict[str, frozenset[object]] = {}
        self._readers: dict[str, _Reader] = {}
        self._looks: dict[str, int] = {}  # for each address, reads since its publishers changed
        self._failed: dict[str, str] = {}
        self._silent: set[str] = set()  # named, and nobody publishes there

    def tend(self) -> None:
        """Announce new addresses, withdraw those that have gone, and read those with viewers."""
        found = self._found()
        for address in self.board.topics.keys() - found.keys():
            self._end(address)
            self.board.hide(address)
            self._publishers.pop(address, None)
        for address, publishers in found.items():
            self._describe(address, publishers)
        for address, shown in self.board.topics.items():
            reader = self._readers.get(address)
            if reader is not None and (reader.ended or reader.shown is not shown):
                self._end(address)
                reader = None
            if self.board.watched(shown) and reader is None:
                self._readers[address] = _Reader(self, address, shown)
            elif reader is not None and not self.board.watched(shown):
                self._end(address)

    def close(self) -> None:
        """End all reading."""
        for reader in self._readers.values():
            reader.stop()  # stop all of them first, then wait for each
        for address in list(self._readers):
            self._end(address)

    def _found(self) -> dict[str, frozenset[object]]:
        blocks = [block for block in live() if block.kind in PRODUCERS and not carries_calls(block)]
        if self._named:
            return {address: _keys(matching(blocks, address.partition("?")[0])) for address in self._named}
        names = {block.address.partition("?")[0] for block in blocks if block.address.startswith(SHARED)}
        return {name: _keys(block for block in blocks if block.address.partition("?")[0] == name) for name in names}

    def _describe(self, address: str, publishers: frozenset[object]) -> None:
        """Announce the address with its current schema, which is read again when its publishers have changed."""
        reader = self._readers.get(address)
        shown = self.board.topics.get(address)
        sample = None
        if address in self._named:
            self._tell_nobody(address, publishers)
        if reader is not None and shown is not None:
            schema = reader.schema
            if schema is None or schema == shown.schema:
                return
        elif shown is not None and self._publishers.get(address) == publishers and self._looks[address] >= LOOKS:
            return
        else:
            same = self._publishers.get(address) == publishers
            self._looks[address] = self._looks.get(address, 0) + 1 if same else 1
            try:
                schema, sample = self._look(address)
            except (PenstockError, OSError) as error:
                self._tell(address, describe(error))
                if address not in self._named:
                    return  # the channel may have gone already
                schema = None
        if schema is not None:
            self._looks[address] = LOOKS
        self._publishers[address] = publishers
        if self.board.show(address, topic_of(address), schema, sample) is None:
            self._tell(address, "there are too many topics; it is not shown")

    def _look(self, address: str) -> tuple[str | None, Any]:
        """What its messages are made of, and of images one that is there: pictures or clouds."""
        scheme = parse(address).scheme
        with penstock.subscriber(address) as subscriber:
            schema = subscriber.schema
            deadline = time.monotonic() + GREETING_S
            while scheme == "tcp" and schema is None and time.monotonic() < deadline:
                sessions = getattr(subscriber, "sessions", ())
                if any(session.connected for session in sessions):
                    return subscriber.schema, None
                time.sleep(LOOK_S)
                schema = subscriber.schema
            if scheme == "shm" and is_image(schema) and (message := subscriber.read(0)) is not None:
                return schema, bytes(message)
        return schema, None

    def _tell_nobody(self, address: str, publishers: frozenset[object]) -> None:
        """Say that nobody publishes there, once for each time that it is so; of this machine alone is it known."""
        if publishers:
            self._silent.discard(address)
        elif address not in self._silent and parse(address).scheme in ("shm", "journal"):
            self._silent.add(address)
            said = "%s: nobody publishes there; waiting, and it is shown when somebody does"
            logger.warning(said, without_secrets(address))

    def _tell(self, address: str, why: str) -> None:
        """Log a reason once."""
        if self._failed.get(address) != why:
            self._failed[address] = why
            logger.warning("%s: %s", without_secrets(address), why)

    def _end(self, address: str) -> None:
        reader = self._readers.pop(address, None)
        if reader is not None:
            reader.stop()
            reader.thread.join()


def _keys(blocks: Iterable[Block]) -> frozenset[object]:
    return frozenset(block.key for block in blocks)


class _Reader:
    """One thread that reads an address while it has viewers."""

    def __init__(self, live: Live, address: str, shown: Shown) -> None:
        self.shown = shown
        self.ended = False
        self.schema: str | None = None
        self._live, self._address = live, address
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name=f"foxglove {shown.topic}", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        try:
            with contextlib.suppress(ClosedError), penstock.subscriber(self._address) as subscriber:
                looked_at = 0.0
                while not self._stop.is_set():
                    if time.monotonic() - looked_at > 1:
                        looked_at = time.monotonic()
                        with contextlib.suppress(PenstockError):  # a broker that does not tell it
                            self.schema = subscriber.schema
                    for message in subscriber.read_many(BATCH, WAIT_S):
                        if not self._live.paused:
                            self.shown.log(message)
        except (PenstockError, OSError) as error:
            logger.warning("%s is not read any more: %s", without_secrets(self._address), describe(error))
            self._stop.wait(1.0)  # the next `tend` tries again
        finally:
            self.ended = True
