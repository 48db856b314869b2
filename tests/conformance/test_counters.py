"""One rule for the counters of a subscriber: messages, bytes, time and latency are of what the program has read."""

from __future__ import annotations

import time

from penstock.observe.memory import seen
from penstock.observe.rates import flow, reads
from penstock.observe.snapshot import Block

from .reaches import Reach


def counted(opened_ns: int) -> Block:
    """The counters of the one reader that was opened since then."""
    found = [block for block in seen() if reads(block) and block.opened_ns >= opened_ns]
    assert len(found) == 1, found
    return found[0]


def test_what_a_reader_counts_is_what_was_read(reach: Reach) -> None:
    began_ns = time.time_ns()
    publisher, subscriber = reach.pair()
    publisher.publish_many([b"12345"] * 10)
    assert subscriber.wait(30)
    if reach.name not in ("tcp", "journal"):  # what lies in a socket has no number, in a journal there are other topics
        end = time.monotonic() + 30
        while counted(began_ns).waiting < 10 and time.monotonic() < end:
            subscriber.wait(0)
        assert counted(began_ns).waiting == 10
    before = counted(began_ns)
    assert (flow(before), before.bytes, before.last_ns, before.latency_ns) == (0, 0, 0, 0), "nothing was read"
    assert subscriber.read(30) is not None
    first = counted(began_ns)
    assert (flow(first), first.bytes) == (1, 5) and first.last_ns
    assert first.latency_ns or reach.name == "journal", "a journal's reader measures where it waits at the end"
    time.sleep(0.02)  # longer than the coarse clock's tick
    assert subscriber.read(30) is not None
    second = counted(began_ns)
    assert (flow(second), second.bytes) == (2, 10) and second.last_ns > first.last_ns
    count = 2
    while count < 10:
        count += len(subscriber.read_many(3, 30))
        last = counted(began_ns)
        assert (flow(last), last.bytes) == (count, 5 * count)
    assert last.waiting == 0
