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
from pathlib import Path
from typing import Any

import penstock
from penstock.address import check, parse, without_secrets
from penstock.errors import ClosedError, PenstockError, RefusedError, describe
from penstock.foxglove.board import Board, Shown
from penstock.foxglove.presentation import Line, is_image
from penstock.journal import Journal
from penstock.observe.rates import PRODUCERS, carries_calls
from penstock.observe.snapshot import Block, live, matching
from penstock.recording.story import read_story, topic_of
from penstock.shm.directory import schemas
from penstock.tcp.explain import explain, unreached
from penstock.types import Schema
from penstock.types.schema import MAX_VERSIONS
from penstock.types.versions import SEEN

__all__ = ["Live"]

#: Reaches that can be read without taking messages from others. A broker's queue gives each message to one reader.
SHARED = ("shm:", "tcp:", "journal:")
GREETING_S = 1.0
LOOKS = 5  # a publisher announces its schema shortly after it has opened, so look more than once
LOOK_S = 0.02
BATCH = 256
LOOK_AGAIN_S = 5.0
WAIT_S = 0.2
AGAIN_S = 2.0  # how long a reader waits for viewers of a topic that was announced again
logger = logging.getLogger("penstock.foxglove")


class Live:
    """The given addresses, or all that are published on this machine. One thread calls ``tend``."""

    def __init__(self, board: Board, addresses: Sequence[str] = (), *, paused: bool = False) -> None:
        for address in addresses:
            check(address, "subscriber")
        self.board = board
        self.paused = paused  #: while set, messages are read and not sent
        self._named = list(dict.fromkeys(addresses))
        # for each address, those present when its schema was last read
        self._publishers: dict[str, frozenset[object]] = {}
        self._readers: dict[str, _Reader] = {}
        self._looks: dict[str, int] = {}  # for each address, reads since its publishers changed
        self._lines: dict[str, Line] = {}  # for each address, the versions of its schema that were seen
        self._failed: dict[str, str] = {}
        self._look_again: dict[str, float] = {}  # for each address that could not be read, when it is tried next
        self._recordings: dict[Path, bool] = {}  # for each journal, whether a recorder writes it
        self._silent: set[str] = set()  # addresses that were given by name and have no publisher

    def refresh_topics(self) -> None:
        """Announce new addresses, withdraw those that have gone, and read those with viewers."""
        found = self._addresses()
        for address in self.board.topics.keys() - found.keys():
            self._end(address)
            self.board.hide(address)
            self._publishers.pop(address, None)
            self._lines.pop(address, None)
        for address, publishers in found.items():
            self._describe(address, publishers)
        for address, shown in self.board.topics.items():
            reader = self._readers.get(address)
            if reader is not None and reader.ended:
                self._end(address)
                reader = None
            if reader is not None and reader.shown is not shown:
                reader.go_on_with(shown)
            if self.board.watched(shown) and reader is None:
                self._readers[address] = _Reader(self, address, shown)
            elif reader is not None and not self.board.watched(shown) and not reader.expects_viewers:
                self._end(address)

    def close(self) -> None:
        """End all reading."""
        for reader in self._readers.values():
            reader.stop()  # stop all of them first, then wait for each
        for address in list(self._readers):
            self._end(address)

    def _addresses(self) -> dict[str, frozenset[object]]:
        blocks = [block for block in live() if block.kind in PRODUCERS and not carries_calls(block)]
        if self._named:
            return {address: _keys(matching(blocks, address.partition("?")[0])) for address in self._named}
        names = {block.address.partition("?")[0] for block in blocks if block.address.startswith(SHARED)}
        shown = [name for name in sorted(names, key=_order) if not self._is_recorded(name)]
        return {name: _keys(block for block in blocks if block.address.partition("?")[0] == name) for name in shown}

    def _is_recorded(self, address: str) -> bool:
        """Whether a recorder writes there: what it records is shown already."""
        if not address.startswith("journal:"):
            return False
        folder = Path(parse(address).name)
        if folder not in self._recordings:
            try:
                known = read_story(folder).known
                with Journal(folder, mode="read") as journal:
                    if not known and journal.frontier <= 1:
                        # a journal without messages yet: its first message will say whether it is a recording
                        return True
                self._recordings[folder] = known
            except (PenstockError, OSError):  # it is being created, or was removed
                return True
        return self._recordings[folder]

    def _describe(self, address: str, publishers: frozenset[object]) -> None:
        """Announce the address with its current schema, which is read again when its publishers have changed."""
        reader = self._readers.get(address)
        shown = self.board.topics.get(address)
        sample = None
        if address in self._named:
            self._tell_nobody(address, publishers)
        if reader is not None and shown is not None:
            schema = reader.schema
            if schema is None or schema == _newest(shown.line):
                return
        elif self._looked(address, publishers, shown) or time.monotonic() < self._look_again.get(address, 0.0):
            return
        else:
            same = self._publishers.get(address) == publishers
            self._looks[address] = self._looks.get(address, 0) + 1 if same else 1
            try:
                schema, sample = self._find_schema(address)
                self._failed.pop(address, None)
            except (PenstockError, OSError) as error:
                if address not in self._silent:  # that nobody publishes there was reported before
                    self._warn_once(address, f"{describe(error)}; waiting, and it is shown when somebody is there")
                self._look_again[address] = time.monotonic() + LOOK_AGAIN_S
                self._looks[address] = 0
                if address not in self._named:
                    return  # the channel may have gone already
                schema = None
        if schema is not None:
            self._looks[address] = LOOKS
        self._publishers[address] = publishers
        line = self._lines[address] = _with_current(self._lines.get(address, ()), schema)
        if self.board.show(address, topic_of(address), line, sample) is None:
            self._warn_once(address, "there are too many topics; it is not shown")

    def _looked(self, address: str, publishers: frozenset[object], shown: Shown | None) -> bool:
        """Whether its publishers are the same as at the last look, and there were enough looks since they came."""
        same = shown is not None and self._publishers.get(address) == publishers
        return same and self._looks[address] >= LOOKS

    def _find_schema(self, address: str) -> tuple[str | None, Any]:
        """The schema of its messages, and for images a sample, which says whether they are pictures or point clouds."""
        parts = parse(address)
        scheme = parts.scheme
        if scheme in ("tcp", "broker"):  # connecting to an absent server would delay all other addresses
            for finding in explain(parts):
                if finding.grave:
                    raise RefusedError(finding.text)
        seen = schemas(parts.name) if scheme == "shm" and "mux" not in parts.options else []
        if seen and not is_image(_with_current((), seen[-1])):  # without joining: who only looks is no subscriber
            return seen[-1], None
        more = {"timeout": GREETING_S} if scheme == "broker" and "timeout" not in parts.options else {}
        with penstock.subscriber(address, **more) as subscriber:
            if scheme == "tcp" and (why := unreached(subscriber, time.monotonic() + GREETING_S)):
                raise RefusedError(why)
            schema = subscriber.schema
            if scheme == "shm" and is_image(_with_current((), schema)) and (message := subscriber.read(0)) is not None:
                return schema, bytes(message)
        return schema, None

    def _tell_nobody(self, address: str, publishers: frozenset[object]) -> None:
        """Report once per silence that nobody publishes there; this is known only for this machine."""
        if publishers:
            self._silent.discard(address)
        elif address not in self._silent and parse(address).scheme in ("shm", "journal"):
            self._silent.add(address)
            said = "%s: nobody publishes there; waiting, and it is shown when somebody does"
            logger.warning(said, without_secrets(address))

    def _warn_once(self, address: str, why: str) -> None:
        """Log a reason once."""
        if self._failed.get(address) != why:
            self._failed[address] = why
            logger.warning("%s: %s", without_secrets(address), why)

    def _end(self, address: str) -> None:
        reader = self._readers.pop(address, None)
        if reader is not None:
            reader.stop()
            reader.thread.join()


def _with_current(line: Line, text: str | None) -> Line:
    """The versions, with the current one at the end."""
    if not text or text == _newest(line):
        return line
    try:
        schema = Schema.parse(text)
    except PenstockError:
        return line
    return [*(pair for pair in line if pair[1] != schema), (SEEN, schema)][-MAX_VERSIONS:]


def _newest(line: Line) -> str | None:
    return line[-1][1].text if line else None


def _order(address: str) -> tuple[int, str]:
    """The sort key of an address: of two with the same name in the viewer, the first gets it."""
    return SHARED.index(address.partition(":")[0] + ":"), address


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
        self._viewers_by = self._looked_at = 0.0
        self.thread = threading.Thread(target=self._run, name=f"foxglove {shown.topic}", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self._stop.set()

    def go_on_with(self, shown: Shown) -> None:
        """Its topic was announced again with another schema: viewers will subscribe again, and reading waits for them.
        A new reader would read again what a channel still holds."""
        self._viewers_by = time.monotonic() + AGAIN_S
        self.shown = shown

    @property
    def expects_viewers(self) -> bool:
        """Whether there is still time for them to come."""
        return time.monotonic() < self._viewers_by

    def _await_viewers(self) -> None:
        while self.expects_viewers and not self._live.board.watched(self.shown):
            if self._stop.wait(LOOK_S):
                return

    def _send(self, message: Any, subscriber: Any) -> None:
        """Send a message. One that does not match may be the first of a new type: then look for the new schema and wait
        for its viewers.
        """
        before = self.shown
        if before.send(message) is None:
            return
        self._refresh_schema(subscriber)
        deadline = time.monotonic() + AGAIN_S
        while self.schema not in (None, _newest(before.line)) and self.shown is before and not self._stop.is_set():
            if time.monotonic() > deadline:
                break
            self._stop.wait(LOOK_S)
        self._await_viewers()
        self.shown.log(message)

    def _refresh_schema(self, subscriber: Any, every_s: float = LOOK_S) -> None:
        if time.monotonic() - self._looked_at < every_s:
            return
        self._looked_at = time.monotonic()
        with contextlib.suppress(PenstockError):  # the broker does not tell the schema
            self.schema = subscriber.schema

    def _run(self) -> None:
        try:
            with contextlib.suppress(ClosedError), penstock.subscriber(self._address) as subscriber:
                while not self._stop.is_set():
                    self._refresh_schema(subscriber, 1.0)
                    self._await_viewers()
                    for message in subscriber.read_many(BATCH, WAIT_S):
                        if not self._live.paused:
                            self._send(message, subscriber)
        except (PenstockError, OSError) as error:
            logger.warning("%s is not read any more: %s", without_secrets(self._address), describe(error))
            self._stop.wait(1.0)  # the next `tend` tries again
        finally:
            self.ended = True
