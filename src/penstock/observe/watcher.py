"""Reads the counters once a second (one "look") and keeps what the page, ``top`` and the demo show.

``Watcher`` has one thread of its own (``start``), or the caller drives it by ``look``. Any thread may read ``state``:
each look makes a new immutable state and swaps it in.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from penstock import system
from penstock.observe import health
from penstock.observe.history import History
from penstock.observe.history_file import HistoryFile
from penstock.observe.latency import Spread, Windows
from penstock.observe.memory import TAIL, seen
from penstock.observe.rates import Rate, between, flow, reads
from penstock.observe.snapshot import Block, Key

__all__ = ["Look", "State", "Watcher"]

log = logging.getLogger("penstock.monitor")

@dataclass(frozen=True, slots=True)
class Look:
    """One block with its rate and the verdict on it."""

    block: Block
    rate: Rate
    verdict: health.Verdict
    latency: Spread | None = None


@dataclass(frozen=True, slots=True)
class State:
    """Everything read in one look."""

    time_ns: int = 0
    looks: tuple[Look, ...] = ()
    processes: dict[int, system.Process] = field(default_factory=dict)
    processor: dict[int, float] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)

    @property
    def alarms(self) -> list[Look]:
        """The blocks whose ledgers do not balance."""
        return [look for look in self.looks if look.verdict.word == "books"]


class Watcher:
    """Looks at the counters, and keeps the newest state and the history; a day of it in the file ``long``, if given."""

    def __init__(
        self, source: Callable[[], Iterable[Block]] = seen, every_s: float = 1.0, long: HistoryFile | None = None
    ) -> None:
        self.history = History()
        self.long = long
        self.every_s = every_s
        self._source = source
        self._state = State()
        self._looked_ns = 0  # when the last look began; 0 before the first
        self._unbalanced: dict[Key, int] = {}
        self._last_counts: dict[Key, tuple[int, int]] = {}
        self._latencies = Windows()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._new_state = threading.Condition()

    @property
    def state(self) -> State:
        return self._state

    def look(self) -> State:
        """Look once, now; returns the new state."""
        before, began_ns = self._state, time.time_ns()
        blocks = self._with_last_moved(list(self._source()))
        found = {pid: p for pid in {b.pid for b in blocks if b.here} if (p := system.process(pid)) is not None}
        names = {pid: process.program for pid, process in found.items()}
        blocks = [replace(b, program=name) if b.here and (name := names.get(b.pid)) else b for b in blocks]
        rates = between((look.block for look in before.looks), blocks, self._looked_ns)
        self._unbalanced = {b.key: self._unbalanced.get(b.key, 0) + 1 for b in blocks if health.books_open(b)}
        now = time.time_ns()
        latencies = self._latencies.look(blocks, now)
        looks = tuple(
            Look(
                b, rates[b.key], health.judge(b, rates[b.key], self._unbalanced.get(b.key, 0)), latencies.get(b.key)
            ) for b in blocks
        )  # fmt: skip
        state = State(now, looks, found, _cores_in_use(before, found, now), _shared())
        self._state, self._looked_ns = state, began_ns
        samples = _samples(state, (now - before.time_ns) / 1e9 if before.time_ns else 0.0)
        self.history.add(now / 1e9, samples)
        if self.long is not None:
            self.long.add(now / 1e9, samples)
        with self._new_state:
            self._new_state.notify_all()
        return state

    def _with_last_moved(self, blocks: list[Block]) -> list[Block]:
        """Give handles that record no time of their last message the time when their count was last seen to change.

        The count of a handle that is seen for the first time may be old: it is no change, unless the handle was opened
        since the last look.
        """
        moved: dict[Key, tuple[int, int]] = {}
        for block in blocks:
            fresh = 0 < self._looked_ns <= block.opened_ns
            count, when = self._last_counts.get(block.key, (0 if fresh else flow(block), 0))
            moved[block.key] = (count, when) if flow(block) == count else (flow(block), block.read_ns)
        self._last_counts = moved
        return [b if b.last_ns >= (when := moved[b.key][1]) else replace(b, last_ns=when) for b in blocks]

    def start(self) -> None:
        """Look every ``every_s`` in a thread, until ``stop``."""
        self._thread = threading.Thread(target=self._run, name="penstock-watcher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the state and the history stay."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def wait(self, after_ns: int, timeout: float) -> State:
        """Wait for a state newer than ``after_ns``; after ``timeout`` seconds, the current one."""
        with self._new_state:
            self._new_state.wait_for(lambda: self._state.time_ns > after_ns or self._stop.is_set(), timeout)
        return self._state

    def _run(self) -> None:
        next_s = time.monotonic()
        if self._looked_ns:  # rates over so short a time would be meaningless
            next_s += self.every_s
            self._stop.wait(self.every_s)
        last_logged = ""
        while not self._stop.is_set():
            try:
                self.look()
                last_logged = ""
            except Exception as error:  # the cause may be gone at the next look; meanwhile /health says stale
                if repr(error) != last_logged:
                    last_logged = repr(error)
                    log.exception("reading the counters failed; the next try is in %g s", self.every_s)
            # At a fixed pace; but after a slow look pause at least a quarter, so as not to use a core all the time.
            next_s = max(next_s + self.every_s, time.monotonic() + self.every_s / 4)
            self._stop.wait(max(0.0, next_s - time.monotonic()))


def _cores_in_use(before: State, processes: dict[int, system.Process], now: int) -> dict[int, float]:
    """How many cores each process has used, on average, since the previous look."""
    seconds = (now - before.time_ns) / 1e9
    if not before.time_ns or seconds <= 0:
        return {}
    return {
        pid: max(0.0, (p.processor_s - before.processes[pid].processor_s) / seconds)
        for pid, p in processes.items()
        if pid in before.processes
    }


def _shared() -> dict[str, int]:
    from penstock import _core

    return system.shared_memory(_core.counters_directory())


def _samples(state: State, seconds: float) -> dict[str, float]:
    """The values of one look by series: for each address, each kind of loss, each process. ``seconds`` is the time
    since the previous look, 0 for the first one."""
    values: dict[str, float] = {}

    def add(name: str, value: float) -> None:
        values[name] = values.get(name, 0.0) + value

    for look in state.looks:
        if look.block.inside_gateway or look.block.kind == TAIL:
            continue
        block, where = look.block, look.block.place
        if role := _role(block):
            add(f"rate/{role}/{where}", look.rate.messages_hz)
            add(f"bytes/{role}/{where}", look.rate.bytes_hz)
        if look.latency is not None:
            values[f"latency/{where}"] = max(values.get(f"latency/{where}", 0.0), look.latency.p99_ns / 1e3)
        # Also while it is 0: otherwise a series that comes and goes would be plotted as separate dots.
        if block.depth or block.capacity or block.kind == "queue":
            add(f"depth/{where}", block.depth)
        if block.lag or block.position or block.kind == "pipeline" or (block.room, block.kind) == ("shm", "subscriber"):
            add(f"lag/{where}", block.lag)
        for reason, count in look.rate.dropped.items():
            add(f"lost/{reason}", count / seconds if seconds > 0 else 0.0)
    programs = {look.block.pid: look.block.program for look in state.looks}
    for pid, found in state.processes.items():
        values[f"memory/{programs.get(pid, '')} {pid}"] = found.resident_bytes / 1e6
    values["memory/shared"] = state.shared.get("penstock_bytes", 0) / 1e6
    return values


def _role(block: Block) -> str:
    """Whether its messages count as published at its place, as delivered there, or as neither: what only passes them on
    (a link, a broker, a gateway's module that publishes to an address, its inner bus) would count them twice."""
    if block.inside_gateway or block.kind == TAIL:
        return ""
    if block.kind in ("publisher", "source"):
        return "in"
    ends = block.kind in ("module", "pipeline") and not block.address
    return "out" if ends or reads(block) else ""


def summary(state: State) -> dict[str, Any]:
    """The totals of one look: what is published and delivered is the sum of the plots."""
    looks = [look for look in state.looks if look.block.kind != TAIL]
    published, delivered = ([look.rate for look in looks if _role(look.block) == role] for role in ("in", "out"))
    return {
        "handles": len(looks),
        "processes": len(state.processes),
        "published_hz": sum(rate.messages_hz for rate in published),
        "delivered_hz": sum(rate.messages_hz for rate in delivered),
        "bytes_hz": sum(rate.bytes_hz for rate in published),
        "lost": sum(look.block.lost for look in looks),
        "alarms": len(state.alarms),
    }
