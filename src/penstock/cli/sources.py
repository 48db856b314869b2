"""The sources that ``penstock sub`` reads: what each printed and lost, where it ends, and why it is silent."""

from __future__ import annotations

import contextlib
import json
import select
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import typer

from penstock.channel import Subscriber
from penstock.cli import exits, silence
from penstock.errors import UnreachedError
from penstock.observe import decode
from penstock.types.fields import Values

if TYPE_CHECKING:
    from penstock._core import Message

__all__ = ["Losses", "Reader", "Source", "Write"]

Write = Callable[["Message", Values], bytes]
#: How long a reach without stored messages may be silent before --exit-at-end counts that as the end.
QUIET_AT_END_S = 1.0
ROUND_S = 0.5


class Losses:
    """Compares the ledger with its last state and reports what was lost in between."""

    def __init__(self, subscriber: Subscriber, as_json: bool) -> None:
        self._subscriber = subscriber
        self._json = as_json
        self._known: dict[str, int] = {}  # losses before the first check are reported too

    def _counts(self) -> dict[str, int]:
        """Losses by reason; what the user's own filter left out is no loss."""
        return {reason: count for reason, count in self._subscriber.ledger.dropped.items() if reason != "filtered"}

    def look(self) -> None:
        dropped = self._counts()
        if dropped == self._known:
            return
        fresh = {
            reason: n - self._known.get(reason, 0) for reason, n in dropped.items() if n != self._known.get(reason, 0)
        }
        self._known = dropped
        for reason, number in fresh.items():
            if self._json:
                print(json.dumps({"lost": number, "reason": reason}), file=sys.stderr, flush=True)
            else:
                exits.told(f"lost {number} message{'s' * (number != 1)}: {reason}")


@dataclass(slots=True)
class Source:
    """One address that is read; with several, ``head`` is printed before each of its messages."""

    address: str  # as it is printed
    where: str  # as it was opened, with its secrets
    subscriber: Subscriber
    values: Values
    losses: Losses
    head: bytes
    began_ns: int
    seen: int = 0
    takes: bool = False  # reading takes messages from others, so all of them are printed
    past: str = ""  # where reading starts; empty: with new messages, or with the history that the reach keeps
    last: int = 0  # the ordinal that was read last
    frontier: int | None = None  # the position after the last message on disk when it was opened
    passed: bool = False  # a message has arrived that did not exist when it was opened

    @property
    def quiet_s(self) -> float:
        """How long it may be silent before that counts as its end; on disk one read is enough."""
        return 0.0 if self.past == "disk" or self.address.startswith("journal:") else QUIET_AT_END_S

    @property
    def _session(self) -> Any:
        """Its TCP session, if the publisher sends stored messages and has said how many there are."""
        sessions: Any = getattr(self.subscriber, "sessions", ()) if self.past == "network" else ()
        return next((one for one in sessions if one.frontier), None)

    @property
    def ended(self) -> bool:
        """Whether everything that existed when it was opened has been read."""
        session = self._session
        return self.passed or bool(session is not None and max(self.last + 1, session.place) >= session.frontier)

    def is_new(self, message: Message) -> bool:
        """Whether a message came after this was opened: by its number, else by its publisher's clock."""
        session = self._session
        if self.frontier is not None:
            new = (message.position or 0) >= self.frontier
        elif session is not None:
            new = bool(message.ordinal >= session.frontier)
        else:
            sessions: Any = getattr(self.subscriber, "sessions", ())
            offset = next((one.clock_offset_ns for one in sessions if one.clock_offset_ns is not None), 0)
            new = message.timestamp_ns > self.began_ns + offset
        self.passed = self.passed or new
        return new

    def missing(self) -> str:
        """Which stored messages will not arrive, because their publisher has stopped sending them, as text; empty while
        they may.
        """
        session = self._session
        if session is None or self.ended or session.connected:
            return ""
        read, all_of_it = max(0, self.last + 1 - session.place), session.frontier - session.place
        return f"{self.address}: its publisher is gone after {read} of the {all_of_it} messages that were there"


@dataclass(slots=True)
class Reader:
    """Prints the messages of all sources, and says once a silence why nothing arrives."""

    sources: list[Source]
    write: Write
    passes: Callable[..., bool] | None
    expression: str
    join: Callable[[], list[Source]] = list  # opens new publishers that match an address with '*'
    waits_for: str = ""  # the text printed while there is no source yet
    printed: int = 0
    silence_told: bool = False
    silences: silence.Silences = field(default_factory=silence.Silences)
    example: str = ""
    began: float = field(default_factory=time.monotonic)
    seldom: silence.Seldom = field(default_factory=silence.Seldom)
    to_the_end: bool = False  # messages published after the start of this command are not printed

    def run(self, count: int | None, timeout: float | None, exit_at_end: bool) -> bool:
        """Run until the count or the end is reached (True), or nothing came for too long (False)."""
        read_at = printed_at = time.monotonic()
        self.to_the_end = exit_at_end
        while count is None or self.printed < count:
            at_end_s = max((source.quiet_s for source in self.sources), default=0.0)
            ends = [printed_at + timeout] if timeout is not None else []
            ends += [read_at + at_end_s] if exit_at_end and self.sources else []
            before, wait_s = self.printed, min([ROUND_S, *(end - time.monotonic() for end in ends)])
            came = self._round(None if count is None else count - self.printed, max(0.0, wait_s))
            now = time.monotonic()
            read_at = now if came or not self.sources else read_at
            if exit_at_end and self.sources and all(source.ended for source in self.sources):
                return True
            if self.printed > before:
                printed_at = now
            elif exit_at_end and self.sources and not came and now - read_at >= at_end_s and self._is_over():
                return True
            elif timeout is not None and now - printed_at >= timeout:
                return False
            self.seldom(self._update_sources)
        return True

    def _update_sources(self) -> None:
        if not self.to_the_end or not self.sources:
            self.sources += self.join()
        self._tell_silence()

    def _is_over(self) -> bool:
        """Whether all sources are silent because they are at their end; raises if one broke off before."""
        for source in self.sources:
            if said := source.missing():
                exits.told(said)
                raise typer.Exit(exits.FAILED)
        return all(source._session is None or source.ended for source in self.sources)

    def _round(self, most: int | None, wait_s: float) -> int:
        """Wait for one of the sources, then print what each has; returns how many messages came."""
        if len(self.sources) == 1:
            return self._print_some(self.sources[0], most, wait_s)
        came = 0
        for source in self.sources:
            if most is None or came < most:
                came += self._print_some(source, None if most is None else most - came, 0)
        if not came:
            waiting = select.poll()  # select takes no descriptor above 1023
            for source in self.sources:
                waiting.register(source.subscriber.fileno(), select.POLLIN)
            waiting.poll(wait_s * 1000)
        return came

    def _print_some(self, source: Source, most: int | None, wait_s: float) -> int:
        """Print some messages; all of them are released when this returns."""
        out = sys.stdout.buffer
        batch: Any = []
        with contextlib.suppress(UnreachedError):  # which `Silences` tells; the next read tries again
            batch = source.subscriber.read_many(min(256, most or 256), wait_s)
        before = self.printed
        for message in batch:
            if self.to_the_end and source.is_new(message) and not source.takes:
                break
            if self.passes is None or self.passes(message, source.values):
                out.write(source.head + self.write(message, source.values))
                self.printed += 1
            source.last = message.ordinal
        if self.printed > before:
            out.flush()
        elif len(batch):
            self.example = self.example or decode.example(batch[0], source.values)
        source.seen += len(batch)
        source.losses.look()
        return len(batch)

    def unmatched(self) -> str:
        """A text that says how many messages the filter rejected, if it rejected all; otherwise empty."""
        seen = sum(source.seen for source in self.sources)
        if self.printed or not seen:
            return ""
        return f"{seen} came, and none passes the filter {self.expression!r}; one of them: {self.example}"

    def _tell_silence(self) -> None:
        """One line if nothing was printed for the first second; later those of ``Silences``."""
        if not self.silence_told and not self.printed and time.monotonic() - self.began >= silence.TELL_AFTER_S:
            self.silence_told = True
            self._tell_first()
        self.silences.look((source.address, source.subscriber, source.seen) for source in self.sources)

    def _tell_first(self) -> None:
        if said := self.unmatched():
            exits.told(said)
        elif not self.sources:
            exits.told(f"{self.waits_for}; waiting")
        elif len(self.sources) == 1:
            silence.tell(self.sources[0].address, self.sources[0].subscriber, self.sources[0].where)
            self.silences.mark_reported(self.sources[0].address, self.sources[0].subscriber)
        else:
            exits.told(f"nothing came yet from any of {len(self.sources)} addresses")
