"""What happens when it is full, and books that close, on every reach."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

import penstock

from .reaches import Reach
from .reading import LONG, read_all


def test_the_ledger_balances(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    publisher.publish_many([b"x"] * 30)
    assert len(read_all(subscriber, 20)) == 20
    ledger = subscriber.ledger
    assert ledger.balanced, ledger
    assert ledger.delivered == 20
    read_all(subscriber, 10)
    assert subscriber.ledger == penstock.Ledger(matched=30, delivered=30)
    assert publisher.ledger.balanced
    assert publisher.ledger.matched == 30


@pytest.mark.needs("block")
def test_block_loses_nothing(reach: Reach) -> None:
    publisher, subscriber = reach.pair(reach.bounded(8, "block"))
    sent = [b"%d" % i for i in range(400)]
    thread = threading.Thread(target=lambda: [publisher.publish(data) for data in sent])
    thread.start()
    time.sleep(0.02)  # let it run into the bound; the outcome does not depend on it
    assert read_all(subscriber, 400) == sent
    thread.join()
    assert subscriber.ledger.lost == 0


def flood(reach: Reach, overflow: str) -> tuple[int, int, int]:
    """Publish far more than fits without reading, then read what is left: its first and last number, and the total."""
    publisher, subscriber = reach.pair(reach.bounded(16, overflow))
    total = 0
    while total < reach.flood_count and not (reach.flood_padding and publisher.ledger.lost > 50):
        publisher.publish(b"%d " % total + bytes(reach.flood_padding))
        total += 1
    found: list[int] = []

    def left() -> int:
        return total - len(found) - (subscriber.ledger.lost or publisher.ledger.lost)

    while (message := subscriber.read(LONG if left() else 0)) is not None:
        found.append(int(bytes(message).split()[0]))
        message.release()
    ledger = subscriber.ledger
    assert 0 < len(found) < total
    assert found == sorted(set(found))
    assert ledger.balanced, ledger
    assert ledger.delivered == len(found)
    assert left() == 0, (len(found), ledger, publisher.ledger)
    return found[0], found[-1], total


@pytest.mark.needs("drop_oldest")
def test_drop_oldest_keeps_the_newest(reach: Reach) -> None:
    _, last, total = flood(reach, "drop_oldest")
    assert last == total - 1


@pytest.mark.needs("drop_newest")
def test_drop_newest_keeps_the_oldest(reach: Reach) -> None:
    first, _, _ = flood(reach, "drop_newest")
    assert first == 0


@pytest.mark.needs("block")
def test_block_gives_up_after_its_timeout(reach: Reach) -> None:
    publisher, _ = reach.pair(reach.bounded(4, "block", timeout=0.05))
    payload = bytes(65536)
    with pytest.raises(TimeoutError):
        for _ in range(20_000):
            publisher.publish(payload)


@pytest.mark.needs("block")
def test_publish_many_says_how_many_went_before_the_time_was_over(reach: Reach) -> None:
    publisher, subscriber = reach.pair(reach.bounded(4, "block", timeout=0.05))
    batch = [(b"%06d" % i).ljust(max(6, reach.flood_padding), b".") for i in range(min(reach.flood_count, 20_000))]
    with pytest.raises(TimeoutError) as raised:
        publisher.publish_many(batch)
    went = raised.value.published  # type: ignore[attr-defined]
    assert 0 < went < len(batch)
    assert publisher.ledger.matched == went
    found = 0
    while (message := subscriber.read(LONG if found < went - 1 else 0.2)) is not None:
        assert bytes(message)[:6] == b"%06d" % found
        found += 1
        message.release()
    assert found in (went, went - 1), "one may have gone to others and not to this subscriber"


@pytest.mark.needs("block")
@pytest.mark.parametrize("many", [False, True])
def test_a_time_limit_of_one_call(reach: Reach, many: bool) -> None:
    """The handle waits for ever; this call does not, and what it could not publish is counted or was never there."""
    publisher, subscriber = reach.pair(reach.bounded(4, "block"))
    publish: Any = publisher.publish
    if many:
        publish = lambda data, timeout: publisher.publish_many([data], timeout=timeout)  # type: ignore[call-arg]  # noqa: E731
    sent = 0
    for limit in (0.05, 0):
        with pytest.raises(TimeoutError):
            while sent < reach.flood_count:
                publish(b"%d " % sent + bytes(reach.flood_padding), timeout=limit)
                sent += 1
    found = [int(data.split()[0]) for data in read_all(subscriber, sent)]
    assert found == list(range(sent))
    ledger = subscriber.ledger
    assert ledger.balanced and ledger.matched - ledger.lost == sent, ledger
    publish(b"more", timeout=LONG)
    for bad in (-1, float("nan")):
        with pytest.raises(penstock.InvalidArgument):
            publish(b"x", timeout=bad)


def test_publishing_takes_a_time_limit_everywhere(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    publish: Any = publisher.publish
    many: Any = publisher.publish_many
    publish(b"1", timeout=LONG)
    publish(b"2", timeout=None)
    assert many([b"3", b"4"], timeout=LONG) == 2
    assert many([b"5"], timeout=None) == 1
    assert read_all(subscriber, 5) == [b"1", b"2", b"3", b"4", b"5"]
    for bad, error in ((-1, ValueError), (float("nan"), ValueError), ("soon", TypeError)):
        with pytest.raises(error, match="timeout"):
            publish(b"x", timeout=bad)
        with pytest.raises(error, match="timeout"):
            many([b"x"], timeout=bad)
    assert subscriber.read(0) is None
