"""The health of each block of counters: one verdict and the reasons for it.

The verdicts, the worst first: ``books`` (its ledger cannot be right), ``stuck`` (messages wait and none moves),
``losing`` (messages were lost since the last look, or before it and nothing has moved since), ``late`` (far behind what
is stored), ``idle``, ``ok``.
Pure functions of blocks and rates.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.observe.memory import TAIL
from penstock.observe.rates import PRODUCERS, Rate, flow
from penstock.observe.snapshot import Block
from penstock.quantities import number_of

__all__ = ["Verdict", "ORDER", "judge"]

ORDER = ("books", "stuck", "losing", "late", "idle", "ok")
IDLE_S = 5.0
STUCK_S = 3.0
LATE_MESSAGES = 10_000

#: The ``state`` text of a handle that cannot go on begins with one of these.
STANDSTILL = ("stuck", "blocked", "dead", "failed", "no credit", "paused", "given up")


#: Counters are read without a lock, between two stores of a running handle: they may be inconsistent by so much.
BOOKS_SLACK = 64


@dataclass(frozen=True, slots=True)
class Verdict:
    """A word of ``ORDER`` and the reasons for it."""

    word: str
    reasons: tuple[str, ...] = ()


def judge(block: Block, rate: Rate, books_open_looks: int = 0) -> Verdict:
    """The verdict on one block; ``books_open_looks`` is how many looks in a row its ledger did not balance."""
    if block.kind == TAIL:  # a viewer's tail may miss messages: that is no problem of the program
        return Verdict("ok" if rate.messages_hz else "idle", () if rate.messages_hz else ("no message to show",))
    found: dict[str, list[str]] = {}
    # One or two looks may have caught the counters between two stores; three in a row have not.
    if books_open_looks >= 3:
        found.setdefault("books", []).append(
            f"{-block.in_flight} more delivered and dropped than matched: the ledger does not balance"
        )
    for word, reason in _stuck(block, rate):
        found.setdefault(word, []).append(reason)
    if rate.dropped:
        causes = ", ".join(f"{n:,} {reason}" for reason, n in sorted(rate.dropped.items()))
        found.setdefault("losing", []).append(f"lost since the last look: {causes}")
    if rate.errors:
        found.setdefault("losing", []).append(f"{number_of(rate.errors, 'error')} since the last look")
    if block.lag >= LATE_MESSAGES:
        found.setdefault("late", []).append(f"{number_of(block.lag, 'message')} behind the end")
    worst = next((word for word in ORDER if word in found), None)
    if worst is not None:
        return Verdict(worst, tuple(reason for known in ORDER for reason in found.get(known, ())))
    if rate.messages_hz == 0 and (block.idle_s is None or block.idle_s > IDLE_S):
        return Verdict("idle", (_idle_since(block),))
    return Verdict("ok")


def _idle_since(block: Block) -> str:
    if block.idle_s is not None:
        return f"no message for {block.idle_s:.0f} s"
    return "no message since the monitor began" if flow(block) else "no message yet"


def _stuck(block: Block, rate: Rate) -> list[tuple[str, str]]:
    found = []
    state = block.state.lower()
    # the state is that of one consumer, and others may still consume
    moves = block.kind == "queue" and rate.messages_hz > 0
    if state.startswith(STANDSTILL) and not moves:
        found.append(("stuck", block.state))
    # A gateway reports when one of its modules is stuck: a module may be slow on purpose, and empties its queue by
    # batches.
    if block.kind == "module" or block.inside_gateway:
        return found
    if block.waiting > 0 and rate.messages_hz == 0 and block.kind not in PRODUCERS:
        standing = _standing(block)
        found += [("stuck", reason) for reason in standing]
        # do not show it as healthy between the look that saw the loss and the one that calls it stuck
        if block.lost and not standing:
            lost = number_of(block.lost, "message was", "messages were")
            found.append(("losing", f"{lost} lost, and none of {block.waiting:,} that wait is taken"))
    if block.capacity and block.depth >= block.capacity and block.waiting and rate.messages_hz == 0:
        found.append(("stuck", f"full: {block.depth} of {block.capacity}"))
    return found


def _standing(block: Block) -> list[str]:
    """Why waiting messages are not read, if that has lasted for a while."""
    open_s = (block.read_ns - block.opened_ns) / 1e9
    quiet_s = block.idle_s if block.idle_s is not None else open_s
    if quiet_s <= STUCK_S:
        return []
    wait = number_of(block.waiting, "message waits", "messages wait")
    if block.without_consumer:
        return [f"{wait} and it has no consumer"]
    # A handle that has taken messages and records no time: since when nothing moves is not known.
    known = block.idle_s is not None or not flow(block)
    since = f"for {quiet_s:.0f} s" if known else "since the monitor began"
    return [f"{wait} and none was taken {since}"]


def books_open(block: Block) -> bool:
    """Whether the ledger gives a negative number in flight that one inconsistent read cannot explain."""
    return block.in_flight < -BOOKS_SLACK or (block.in_flight < 0 and block.idle_s is not None and block.idle_s > 1.0)
