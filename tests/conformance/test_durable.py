"""``durable=`` and ``start=``: the past from the disk and the live flow as one, on every reach that has them."""

from __future__ import annotations

import asyncio
import datetime
import re
import threading
from typing import Any

import pytest

import penstock

from .reaches import Reach, unique
from .reading import LONG, read_all

pytestmark = pytest.mark.needs("durable")


def numbers(first: int, last: int) -> list[bytes]:
    return [b"%d" % i for i in range(first, last + 1)]


def durable(reach: Reach, **options: Any) -> Any:
    return reach.publisher(durable=str(reach.directory / "kept"), **options)


def test_the_past_and_then_the_live_flow(reach: Reach) -> None:
    publisher = durable(reach)
    publisher.publish_many(numbers(1, 100))
    subscriber = reach.subscriber(start="first")
    assert read_all(subscriber, 100) == numbers(1, 100)
    for number in range(101, 151):
        assert publisher.publish(b"%d" % number) == number
    messages = [subscriber.receive(LONG) for _ in range(50)]
    assert [message.ordinal for message in messages] == list(range(101, 151))
    assert [bytes(message) for message in messages] == numbers(101, 150)
    assert subscriber.read(0) is None
    assert subscriber.ledger.balanced and not subscriber.ledger.lost


@pytest.mark.parametrize("method", ["publish", "publish_many", "an iterable"])
def test_what_was_published_before_a_close_is_stored_and_nothing_else(reach: Reach, method: str) -> None:
    """Another thread closes it: each call either stored its messages, or raised ClosedError and stored none."""
    for round_ in range(6):
        publisher = reach.publisher(durable=str(reach.directory / f"kept{round_}"))
        closer = threading.Timer(0.002 * round_, publisher.close)
        closer.start()
        returned = 0

        def slowly(publisher: Any = publisher) -> Any:
            while not publisher.closed:
                yield b"x"

        with pytest.raises(penstock.ClosedError):
            while True:
                if method == "publish":
                    publisher.publish(b"x")
                    returned += 1
                else:
                    returned += publisher.publish_many([b"x"] * 10 if method == "publish_many" else slowly())
        closer.join(LONG)
        with penstock.subscriber(f"journal:{reach.directory / f'kept{round_}'}#>", start="first") as kept:
            stored = 0
            while batch := kept.read_many(1000, 0):
                stored += len(batch)
        assert stored == returned and publisher.ledger.balanced


def test_the_live_flow_has_the_ordinals_of_the_disk(reach: Reach) -> None:
    publisher = durable(reach)
    subscriber = reach.subscriber()
    assert publisher.wait_ready(1, timeout=LONG)
    with publisher.reserve(1) as draft:
        draft.write(b"1")
    publisher.publish(b"2")
    assert [(m.ordinal, bytes(m)) for m in (subscriber.receive(LONG), subscriber.receive(LONG))] == [(1, b"1"), (2, b"2")]


def test_where_a_subscriber_begins(reach: Reach) -> None:
    publisher = durable(reach)
    publisher.publish_many(numbers(1, 10))
    publisher.flush()
    between = datetime.datetime.now(datetime.UTC)
    publisher.publish_many(numbers(11, 20))
    publisher.flush()
    new = reach.subscriber(start="new")
    assert publisher.wait_ready(1, timeout=LONG)
    publisher.publish(b"21")
    assert read_all(new, 1) == [b"21"]
    for start, first in [("first", 1), (5, 5), ("last 10 min", 1), (between, 11), (between.isoformat(), 11)]:
        with reach.subscriber(start=start) as subscriber:
            assert read_all(subscriber, 1) == [b"%d" % first], start


@pytest.mark.parametrize("start", ["soon", 0, -1, "last week", True])
def test_a_start_that_is_none_is_refused(reach: Reach, start: Any) -> None:
    durable(reach)
    with pytest.raises((ValueError, TypeError), match="start"):
        reach.subscriber(start=start)


def test_a_start_that_is_misspelt_is_told_all_that_can_be_said(reach: Reach) -> None:
    durable(reach)
    with pytest.raises(ValueError, match=r"'frist'.*'first'.*'new'.*position.*2026.*'last 10 min'"):
        reach.subscriber(start="frist")


@pytest.mark.parametrize("options", [{"durable_wait": True}, {"retain_bytes": 5}, {"segment_bytes": 1 << 20}, {"durable": ""}])
def test_what_goes_with_a_directory_needs_one(reach: Reach, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="durable=DIRECTORY"):
        reach.publisher(**options)


def test_a_publisher_counts_what_it_has_published_itself(reach: Reach) -> None:
    for number in (10, 3):
        with durable(reach) as publisher:
            publisher.publish_many(numbers(1, number))
            publisher.flush()
            assert (publisher.ledger.matched, publisher.ledger.delivered) == (number, number)
            assert publisher.ledger.balanced


def test_retention_by_size_is_as_fine_as_the_segments(reach: Reach) -> None:
    publisher = durable(reach, retain_bytes=300_000, segment_bytes=100_000)
    for _ in range(100):
        publisher.publish(bytes(10_000))
        publisher.flush()
    publisher.journal.retain()  # waits for what another thread removes
    oldest = publisher.journal.first
    assert oldest > 50
    with reach.subscriber(start="first") as subscriber:
        found = subscriber.receive(LONG).ordinal
    publisher.journal.retain()  # more may have gone at any time: its first position is told when the files are gone
    assert oldest <= found <= publisher.journal.first


def test_ordinals_go_on_with_the_next_publisher(reach: Reach) -> None:
    with durable(reach) as publisher:
        publisher.publish_many(numbers(1, 10))
    publisher = durable(reach)
    live = reach.subscriber(history=False)
    assert publisher.wait_ready(1, timeout=LONG)
    assert publisher.publish(b"11") == 11
    assert live.receive(LONG).ordinal == 11
    assert read_all(reach.subscriber(start="first"), 11) == numbers(1, 11)


def test_history_and_the_last_value_come_from_the_disk(reach: Reach) -> None:
    with durable(reach) as publisher:
        publisher.publish_many(numbers(1, 10))
    with durable(reach, history=3):
        subscriber = reach.subscriber()
        assert [subscriber.receive(LONG).ordinal for _ in range(3)] == [8, 9, 10]
        subscriber.close()
    durable(reach, latest=True)
    assert read_all(reach.subscriber(), 1) == [b"10"]


def test_a_slow_reader_loses_nothing_and_holds_nobody_up(reach: Reach) -> None:
    publisher = durable(reach)
    slow = reach.subscriber(start="first")
    assert publisher.wait_ready(1, timeout=LONG)
    sent = [b"%06d" % i + bytes(1000) for i in range(20_000)]
    publisher.publish_many(sent)  # more than any queue holds, and nobody reads
    publisher.flush()
    found: list[bytes] = []
    while len(found) < len(sent):
        found += [bytes(message) for message in slow.read_many(1024, LONG)]
    assert found == sent
    publisher.publish(b"live again")
    assert read_all(slow, 1) == [b"live again"]


def test_who_comes_in_the_midst_of_publishing_misses_nothing(reach: Reach) -> None:
    publisher = durable(reach)
    ended = threading.Event()

    def publish() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            publisher.publish(b"%d" % number)
            if number % 200 == 0:
                publisher.flush()  # it fills no disk

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        for _ in range(5):
            with reach.subscriber(start="first") as subscriber:
                ordinals: list[int] = []
                while len(ordinals) < 2000:
                    ordinals += [message.ordinal for message in subscriber.read_many(1000, LONG)]
                assert ordinals == list(range(1, len(ordinals) + 1))
    finally:
        ended.set()
        thread.join()


def test_what_was_waited_for_is_on_disk(reach: Reach) -> None:
    publisher = durable(reach, durable_wait=True)
    publisher.publish(b"1")
    publisher.publish_many([b"2", b"3"])
    with penstock.journal.Journal(reach.directory / "kept", mode="read") as journal:
        assert [bytes(message) for message in journal.read_many(1)] == [b"1", b"2", b"3"]


def test_objects(reach: Reach) -> None:
    publisher = durable(reach, type=dict)
    publisher.publish({"n": 1})
    with reach.subscriber(start="first", type=dict) as subscriber:
        assert subscriber.receive(LONG).value == {"n": 1}


def test_one_directory_keeps_one_channel_and_has_one_publisher(reach: Reach) -> None:
    publisher = durable(reach)
    publisher.publish(b"1")
    publisher.flush()
    with pytest.raises((penstock.PenstockError, OSError)):
        durable(reach)


def test_an_option_of_the_other_side_is_told_as_such(reach: Reach) -> None:
    with pytest.raises(ValueError, match=r"publisher of .* has no option 'start'; a subscriber has"):
        reach.publisher(start="first")
    publisher = reach.publisher()
    for name in ("latest", "durable_wait", "segment_bytes"):
        with pytest.raises(ValueError, match=rf"subscriber of .* has no option '{name}'; a publisher has"):
            reach.subscriber(**{name: True})
    with pytest.raises(ValueError, match="did you mean start"):
        reach.subscriber(strat="first")
    with pytest.raises(ValueError, match="did you mean durable"):
        penstock.publisher(reach.address, durible="kept")
    assert not publisher.closed


OTHERS = {  # of one name, as far as a journal's topic tells
    "bus": [("bus:{}?id=1", "bus:{}?id=2"), ("bus:{}", "bus:{}?id=1"), ("bus:{}", "shm:/{}"), ("bus:{}/b", "bus:{}.b")],
    "shm": [("shm:/{}/b", "shm:/{}.b"), ("shm:/{}", "bus:{}"), ("shm:/{}", "tcp://127.0.0.1:0")],
    "tcp": [("tcp://127.0.0.1:0", "bus:default"), ("tcp://127.0.0.1:0", "shm:/default")],
}


def test_a_directory_knows_the_channel_that_it_keeps(reach: Reach) -> None:
    name = unique("kept")
    for number, (first, second) in enumerate(OTHERS[reach.name]):
        directory = reach.directory / str(number)
        here, other = first.format(name), second.format(name)
        with penstock.publisher(here, durable=directory) as publisher:
            publisher.publish(b"1")
        both = rf"keeps {re.escape(here.partition('127')[0])}.*, not {re.escape(other.partition('127')[0])}"
        with pytest.raises(penstock.RefusedError, match=both):
            penstock.publisher(other, durable=directory)
        if not other.startswith("tcp"):
            with pytest.raises(penstock.RefusedError, match=both):
                penstock.subscriber(other, start="first", durable=str(directory))
        with penstock.publisher(here, durable=directory) as publisher:
            assert publisher.publish(b"2") == 2


def test_a_directory_in_which_nothing_was_kept_takes_another_channel(reach: Reach) -> None:
    for first, second in OTHERS[reach.name]:
        for address in (first, second):
            penstock.publisher(address.format(unique("none")), durable=reach.directory / "none").close()


def test_a_directory_of_before_takes_the_channel_of_its_topic(reach: Reach) -> None:
    """Directories were once made without the file that names the channel."""
    with durable(reach) as publisher:
        publisher.publish(b"1")
    (reach.directory / "kept" / "channel").unlink()
    with durable(reach) as publisher:
        assert publisher.publish(b"2") == 2
    assert (reach.directory / "kept" / "channel").exists()


def test_a_publisher_that_keeps_nothing_has_no_start(reach: Reach) -> None:
    """It is refused with the reason: when it is opened, or, where the publisher's word is needed, when it is read."""
    publisher = reach.publisher()
    for read in ("read", "receive", "read_many", "wait"):
        with pytest.raises(penstock.RefusedError, match="durable="):
            getattr(reach.subscriber(start="first"), read)(timeout=LONG)
    with pytest.raises(penstock.RefusedError, match="durable="):
        next(iter(reach.subscriber(start="first")))
    with pytest.raises(penstock.RefusedError, match="durable="):
        asyncio.run(reach.subscriber(start="first").read_async(LONG))
    with pytest.raises(penstock.RefusedError, match="durable="):
        reach.subscriber(start="first", type=dict).read(LONG)
    assert not publisher.closed


def test_all_is_on_disk_when_a_publisher_has_closed(reach: Reach) -> None:
    with durable(reach) as publisher:
        for number in range(1, 1001):
            publisher.publish(b"%d" % number)
    with penstock.journal.Journal(reach.directory / "kept", mode="read") as journal:
        assert journal.frontier == 1001
