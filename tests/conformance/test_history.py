"""What a publisher keeps for who joins later: exactly so much, then the live flow, in order, none missing, none twice."""

from __future__ import annotations

import threading
import time

import pytest

import penstock

from .reaches import Reach
from .reading import LONG, read_all

pytestmark = pytest.mark.needs("keeps")


def numbers(first: int, last: int) -> list[bytes]:
    return [b"%d" % i for i in range(first, last + 1)]


def read_up_to(subscriber: penstock.Subscriber, last: bytes) -> list[bytes]:
    """What comes, up to a message that is known to come."""
    found = [b""]
    while found[-1] != last:
        found += read_all(subscriber, 1)
    return found[1:]


def test_who_joins_gets_exactly_the_last_messages_and_then_the_live_ones(reach: Reach) -> None:
    publisher = reach.publisher(history=10)
    publisher.publish_many(numbers(1, 30))
    subscriber = reach.subscriber()
    assert publisher.wait_ready(1, timeout=LONG)
    publisher.publish_many(numbers(31, 33))
    assert read_up_to(subscriber, b"33") == numbers(21, 33)
    assert subscriber.read(0) is None
    assert subscriber.ledger.balanced and not subscriber.ledger.lost


def test_fewer_than_are_kept_come_all(reach: Reach) -> None:
    publisher = reach.publisher(history=10)
    with publisher.reserve(1) as draft:
        draft.write(b"1")
    publisher.publish(b"2")
    assert read_all(reach.subscriber(), 2) == [b"1", b"2"]


def test_process_all_takes_what_was_kept(reach: Reach) -> None:
    publisher = reach.publisher(history=10)
    publisher.publish_many(numbers(1, 3))
    subscriber = reach.subscriber()
    found: list[bytes] = []
    subscriber.on_message(lambda message: found.append(bytes(message)))
    while found[-1:] != [b"3"]:  # a reach may bring them one by one, but none of them waits for another message
        assert subscriber.wait(LONG)
        assert subscriber.process_all() > 0
    assert found == numbers(1, 3)


def test_everybody_who_joins_gets_them_with_their_ordinals_and_times(reach: Reach) -> None:
    publisher = reach.publisher(history=3)
    publisher.publish_many(numbers(1, 5))
    seen = set()
    for _ in range(3):
        subscriber = reach.subscriber()
        messages = [subscriber.receive(LONG) for _ in range(3)]
        assert [message.ordinal for message in messages] == [3, 4, 5]
        seen.add(tuple(message.timestamp_ns for message in messages))
        subscriber.close()
    assert len(seen) == 1


def test_who_wants_no_past_begins_with_what_comes(reach: Reach) -> None:
    publisher = reach.publisher(history=10)
    publisher.publish_many(numbers(1, 5))
    subscriber = reach.subscriber(history=False)
    assert publisher.wait_ready(1, timeout=LONG)
    publisher.publish(b"6")
    assert read_all(subscriber, 1) == [b"6"]


def test_history_by_time(reach: Reach) -> None:
    publisher = reach.publisher(history="300 ms")
    publisher.publish_many(numbers(1, 5))
    begun = time.monotonic()
    while time.monotonic() - begun < 0.4:  # until they are too old, whatever the machine does meanwhile
        time.sleep(0.05)
    subscriber = reach.subscriber()
    assert publisher.wait_ready(1, timeout=LONG)
    publisher.publish(b"6")
    assert read_up_to(subscriber, b"6") == [b"6"]
    subscriber.close()


def test_history_within_the_time(reach: Reach) -> None:
    publisher = reach.publisher(history="10 min")
    publisher.publish_many(numbers(1, 40))
    assert read_all(reach.subscriber(), 40) == numbers(1, 40)


def test_history_is_bounded_by_bytes_and_the_newest_is_always_there(reach: Reach) -> None:
    publisher = reach.publisher(history=100, history_bytes=1000)
    sent = [b"%d" % i * 300 for i in range(10)]
    publisher.publish_many(sent)
    first = reach.subscriber()
    assert publisher.wait_ready(1, timeout=LONG)
    publisher.publish(b"x" * 3000)
    assert read_up_to(first, b"x" * 3000) == [*sent[-3:], b"x" * 3000]
    second = reach.subscriber()
    assert publisher.wait_ready(2, timeout=LONG)
    publisher.publish(b"end")
    assert read_up_to(second, b"end") == [b"x" * 3000, b"end"]


def test_large_messages_are_kept(reach: Reach) -> None:
    publisher = reach.publisher(history=3)
    sent = [bytes([i]) * (1 << 20) for i in range(5)]
    for data in sent:
        publisher.publish(data)
    assert read_all(reach.subscriber(), 3) == sent[-3:]


def test_who_joins_in_the_midst_of_publishing_misses_nothing(reach: Reach) -> None:
    for_publisher, for_subscriber = reach.lossless()
    publisher = reach.publisher(history=20, **for_publisher)
    reader = reach.subscriber(on_message=lambda message: message.release(), **for_subscriber)  # it never waits for nobody
    assert publisher.wait_ready(1, timeout=LONG)
    ended = threading.Event()

    def publish() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            publisher.publish(b"%d" % number)
        publisher.publish(b"end")

    publisher.publish_many([b"%d" % -i for i in range(20)])
    thread = threading.Thread(target=publish)
    thread.start()
    try:
        for _ in range(20):
            subscriber = reach.subscriber(**for_subscriber)
            ordinals = []
            for _ in range(60):
                with subscriber.receive(LONG) as message:
                    ordinals.append(message.ordinal)
            assert ordinals == list(range(ordinals[0], ordinals[0] + 60))
            subscriber.close()
    finally:
        ended.set()
        thread.join()
    assert not reader.ledger.lost


def test_latest_is_the_last_value_and_set_replaces_it(reach: Reach) -> None:
    state = reach.publisher(latest=True)
    state.set(b"closed")
    state.set(b"open")
    early = reach.subscriber()
    assert read_all(early, 1) == [b"open"]
    state.set(b"closed")
    assert read_all(early, 1) == [b"closed"]
    assert read_all(reach.subscriber(), 1) == [b"closed"]


def test_latest_of_objects(reach: Reach) -> None:
    state = reach.publisher(latest=True, type=dict)
    state.set({"door": "open"})
    with reach.subscriber(type=dict) as subscriber:
        assert subscriber.receive(LONG).value == {"door": "open"}


@pytest.mark.parametrize(
    "options",
    [
        {"history": -1}, {"history": "soon"}, {"history": "-1 s"}, {"history": 5, "latest": True},
        {"history_bytes": 100}, {"history": 5, "history_bytes": 0}, {"history": None, "latest": "yes"},
    ],
)  # fmt: skip
def test_wrong_options_are_refused(reach: Reach, options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"history|latest"):
        reach.publisher(**options)


@pytest.mark.parametrize("history", [0, "0", "0 s"])
def test_a_history_of_nothing_keeps_nothing(reach: Reach, history: object) -> None:
    publisher = reach.publisher(history=history)
    publisher.publish(b"before")
    with reach.subscriber(**reach.lossless()[1]) as subscriber:
        assert publisher.wait_ready(1, LONG)
        publisher.publish(b"after")
        assert read_all(subscriber, 1) == [b"after"]


@pytest.mark.parametrize("history", [5, "5 s", "yes"])
def test_how_much_is_kept_is_for_the_publisher_to_say(reach: Reach, history: object) -> None:
    reach.publisher(history=10)
    with pytest.raises(ValueError, match="its publisher"):
        reach.subscriber(history=history)
