"""What every reach must do. The cases know reaches by their declared capabilities alone."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import threading
import time
import weakref
from typing import Any

import pytest

import penstock
from penstock._core import counters_read

from .reaches import Reach

LONG = 30.0  # more than enough on a loaded machine; nothing here waits for it when things work


def read_all(subscriber: penstock.Subscriber, count: int) -> list[bytes]:
    """``count`` messages one by one, as copies."""
    found = []
    for _ in range(count):
        message = subscriber.read(LONG)
        assert message is not None, f"only {len(found)} of {count} came"
        found.append(bytes(message))
        message.release()
    return found


# --- one message, many messages, order -------------------------------------------------------------------------------


def test_one_message(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    before = time.time_ns()
    publisher.publish(b"hello")
    message = subscriber.read(LONG)
    assert message is not None
    assert bytes(message) == b"hello"
    assert message == b"hello"
    assert len(message) == 5
    assert message.ordinal >= 1
    assert before - 10_000_000_000 <= message.timestamp_ns <= time.time_ns() + 10_000_000_000
    assert isinstance(message.channel, str)


def test_order_one_by_one(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    sent = [b"%d" % i for i in range(1000)]
    thread = threading.Thread(target=lambda: [publisher.publish(data) for data in sent])
    thread.start()
    assert read_all(subscriber, len(sent)) == sent
    thread.join()
    assert subscriber.read(0) is None


@pytest.mark.needs("contiguous")
def test_ordinals_are_contiguous_and_times_monotone(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    last = 0
    for i in range(1, 51):
        publisher.publish(b"x")
        message = subscriber.read(LONG)
        assert message is not None
        assert message.ordinal == i
        assert message.timestamp_ns >= last
        last = message.timestamp_ns
        message.release()


@pytest.mark.needs("ordinal")
def test_publish_tells_the_ordinal(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    for _ in range(5):
        told = publisher.publish(b"x")
        message = subscriber.read(LONG)
        assert message is not None and message.ordinal == told
        message.release()


def test_batches(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    sent = [b"%d" % i * (i % 7) for i in range(500)]
    thread = threading.Thread(target=publisher.publish_many, args=(sent,))
    thread.start()
    found: list[bytes] = []
    ordinals: list[int] = []
    while len(found) < len(sent):
        batch = subscriber.read_many(64, LONG)
        assert 0 < len(batch) <= 64
        found += [bytes(message) for message in batch]
        ordinals += [message.ordinal for message in batch]
        assert bytes(batch[0]) == found[-len(batch)]
        del batch
    thread.join()
    assert found == sent
    assert ordinals == sorted(set(ordinals))


def test_publish_many_takes_any_iterable_and_counts(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    assert publisher.publish_many([]) == 0
    assert publisher.publish_many(data for data in (b"a", bytearray(b"b"), memoryview(b"c"))) == 3
    assert read_all(subscriber, 3) == [b"a", b"b", b"c"]


def test_a_batch_can_be_published_on(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    publisher.publish_many([b"1", b"2", b"3"])
    batch = subscriber.read_many(1, LONG)
    assert publisher.publish_many(batch) == 1
    del batch
    assert read_all(subscriber, 3) == [b"2", b"3", b"1"]


def test_empty_message(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    publisher.publish_many([b"", b"x", b""])
    assert read_all(subscriber, 3) == [b"", b"x", b""]


def test_large_message(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    data = bytes(range(256)) * (3 << 12)  # 3 MiB
    thread = threading.Thread(target=publisher.publish, args=(data,))
    thread.start()
    message = subscriber.read(LONG)
    thread.join()
    assert message is not None and bytes(message) == data


@pytest.mark.needs("many")
def test_every_subscriber_gets_everything(reach: Reach) -> None:
    for_publisher, for_subscriber = reach.lossless()
    publisher = reach.publisher(**for_publisher)
    subscribers = [reach.subscriber(**for_subscriber) for _ in range(3)]
    assert publisher.wait_ready(3, timeout=LONG)
    sent = [b"%d" % i for i in range(20)]
    publisher.publish_many(sent)
    for subscriber in subscribers:
        assert read_all(subscriber, 20) == sent


# --- reserve ----------------------------------------------------------------------------------------------------------


def test_reserve_publishes_on_leaving(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    with publisher.reserve(4) as draft:
        view = draft.view()
        view[:] = b"abcd"
    assert read_all(subscriber, 1) == [b"abcd"]


def test_reserve_cut_to_size(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    draft = publisher.reserve(100)
    draft.write(b"abc")
    draft.publish(3)
    assert read_all(subscriber, 1) == [b"abc"]
    with pytest.raises(penstock.StateError):
        draft.publish(3)


def test_an_exception_cancels(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    with pytest.raises(RuntimeError, match="on purpose"), publisher.reserve(4) as draft:
        draft.write(b"lost")
        raise RuntimeError("on purpose")
    publisher.publish(b"next")
    assert read_all(subscriber, 1) == [b"next"]


def test_a_live_view_forbids_publishing(reach: Reach) -> None:
    numpy = pytest.importorskip("numpy")
    publisher, subscriber = reach.pair()
    draft = publisher.reserve(4)
    array = draft.array((4,), "uint8")
    array[:] = 7
    with pytest.raises(BufferError, match="nothing was published"):
        draft.publish(4)
    assert subscriber.read(0) is None
    del array
    draft.publish(4)
    message = subscriber.read(LONG)
    assert message is not None
    assert (message.array(dtype="uint8") == numpy.full(4, 7)).all()
    assert not message.array().flags.writeable


def test_reserve_refuses_bad_sizes(reach: Reach) -> None:
    publisher, _ = reach.pair()
    with pytest.raises(ValueError):
        publisher.reserve(-1)
    with publisher.reserve(4) as draft:
        with pytest.raises(ValueError):
            draft.publish(5)
        with pytest.raises(ValueError):
            draft.write(b"12345")
        draft.cancel()


@pytest.mark.needs("in place")
def test_the_reader_sees_the_reserved_memory(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    draft = publisher.reserve(64)
    address = draft.address
    draft.write(b"x" * 64)
    draft.publish()
    message = subscriber.read(LONG)
    assert message is not None
    if reach.can["processes"] == "no":  # else the same memory may be mapped at two addresses
        assert message.address == address
    with pytest.raises(TypeError):
        memoryview(message)[0] = 1


# --- time-outs and waiting -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [0, 0.0, 0.0003, 0.02])
def test_read_gives_none_when_the_time_is_over(reach: Reach, timeout: float) -> None:
    _, subscriber = reach.pair()
    began = time.monotonic()
    assert subscriber.read(timeout) is None
    assert time.monotonic() - began >= timeout
    assert len(subscriber.read_many(10, timeout)) == 0
    assert subscriber.wait(timeout) is False


def test_a_fraction_of_a_millisecond_is_not_zero(reach: Reach) -> None:
    _, subscriber = reach.pair()
    began = time.monotonic()
    for _ in range(20):
        assert subscriber.read(0.0009) is None
    assert time.monotonic() - began >= 20 * 0.0009


def test_none_waits_until_a_message_comes(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    timer = threading.Timer(0.1, publisher.publish, args=(b"late",))
    timer.start()
    message = subscriber.read(None)
    timer.join()
    assert message is not None and bytes(message) == b"late"


def test_wait_then_read(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    assert subscriber.wait(0) is False
    publisher.publish(b"x")
    assert subscriber.wait(LONG) is True
    assert subscriber.wait(0) is True, "waiting does not take the message"
    assert read_all(subscriber, 1) == [b"x"]


def test_the_interpreter_runs_while_one_waits(reach: Reach) -> None:
    _, subscriber = reach.pair()
    done = threading.Event()
    thread = threading.Thread(target=lambda: (subscriber.read(2), done.set()))
    thread.start()
    turns = 0
    while not done.is_set() and turns < 20:
        time.sleep(0.001)
        turns += 1
    assert turns == 20, "the waiting thread kept the interpreter to itself"
    thread.join()


@pytest.mark.parametrize("bad", [-1, float("nan"), -0.001])
def test_bad_timeouts(reach: Reach, bad: float) -> None:
    publisher, subscriber = reach.pair()
    with pytest.raises(ValueError):
        subscriber.read(bad)
    with pytest.raises(ValueError):
        subscriber.wait(bad)
    with pytest.raises(ValueError):
        subscriber.read_many(1, bad)
    with pytest.raises(ValueError):
        publisher.wait_ready(1, bad)


def test_timeouts_of_a_wrong_type(reach: Reach) -> None:
    _, subscriber = reach.pair()
    with pytest.raises(TypeError):
        subscriber.read("soon")  # type: ignore[arg-type]


def test_most_must_be_positive(reach: Reach) -> None:
    _, subscriber = reach.pair()
    for bad in (0, -3):
        with pytest.raises(ValueError):
            subscriber.read_many(bad, 0)


def test_wait_ready_gives_up(reach: Reach) -> None:
    publisher, _ = reach.pair()
    assert publisher.wait_ready(1, 0) is True
    assert publisher.wait_ready(50, 0.02) is False


# --- descriptors, iteration, asyncio, callbacks ----------------------------------------------------------------------


def test_the_descriptor_works_with_select(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    descriptor = subscriber.fileno()
    for round_ in range(20):
        assert subscriber.read(0) is None
        timer = threading.Timer(0.002, publisher.publish, args=(b"%d" % round_,))
        timer.start()
        ready, _, _ = select.select([descriptor], [], [], LONG)
        assert ready == [descriptor]
        message = subscriber.read(LONG)
        assert message is not None and bytes(message) == b"%d" % round_
        del message
        timer.join()


def test_select_says_nothing_while_there_is_nothing(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    publisher.publish(b"x")
    assert read_all(subscriber, 1) == [b"x"]
    deadline = time.monotonic() + LONG
    while select.select([subscriber.fileno()], [], [], 0)[0]:  # a stale wake-up may be there; reading clears it
        assert subscriber.read(0) is None
        assert time.monotonic() < deadline, "the descriptor stays readable with nothing to read"


def test_iteration_ends_on_close(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    sent = [b"%d" % i for i in range(10)]
    publisher.publish_many(sent)
    found = []
    for message in subscriber:
        found.append(bytes(message))
        if len(found) == 10:
            threading.Timer(0.05, subscriber.close).start()
    assert found == sent


def test_async_for(reach: Reach) -> None:
    publisher, subscriber = reach.pair()

    async def main() -> list[bytes]:
        found = []
        asyncio.get_running_loop().call_later(0.02, publisher.publish_many, [b"1", b"2"])
        asyncio.get_running_loop().call_later(0.06, publisher.publish, b"3")
        async for message in subscriber:
            found.append(bytes(message))
            if len(found) == 3:
                break
        assert await subscriber.read_async(0.01) is None
        return found

    assert asyncio.run(asyncio.wait_for(main(), LONG)) == [b"1", b"2", b"3"]


def test_callbacks(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    found: list[bytes] = []
    subscriber.on_message(lambda message: found.append(bytes(message)))
    assert subscriber.process_all() == 0
    publisher.publish_many([b"1", b"2"])
    deadline = time.monotonic() + LONG
    while len(found) < 2 and time.monotonic() < deadline:
        subscriber.wait(1)
        subscriber.process_all()
    assert found == [b"1", b"2"]
    subscriber.on_message(None)
    publisher.publish(b"3")
    assert subscriber.process_all() == 0
    assert read_all(subscriber, 1) == [b"3"]


def test_a_callback_may_unset_itself(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    found: list[bytes] = []

    def once(message: Any) -> None:
        found.append(bytes(message))
        subscriber.on_message(None)

    subscriber.on_message(once)
    publisher.publish_many([b"1", b"2"])
    assert subscriber.wait(LONG)
    assert subscriber.process_all() == 1
    assert found == [b"1"]
    assert read_all(subscriber, 1) == [b"2"]


# --- close ------------------------------------------------------------------------------------------------------------


def test_use_after_close(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    publisher.close()
    publisher.close()
    assert publisher.closed
    with pytest.raises(penstock.ClosedError):
        publisher.publish(b"x")
    with pytest.raises(penstock.ClosedError):
        publisher.publish_many([b"x"])
    with pytest.raises(penstock.ClosedError):
        publisher.reserve(1)
    subscriber.close()
    subscriber.close()
    assert subscriber.closed
    with pytest.raises(penstock.ClosedError):
        subscriber.read(0)
    with pytest.raises(penstock.ClosedError):
        subscriber.read_many(1, 0)
    with pytest.raises(penstock.ClosedError):
        subscriber.wait(0)
    with pytest.raises(penstock.ClosedError):
        subscriber.fileno()
    assert subscriber.ledger.balanced


def test_close_wakes_a_reader(reach: Reach) -> None:
    _, subscriber = reach.pair()
    threading.Timer(0.05, subscriber.close).start()
    with pytest.raises(penstock.ClosedError):
        subscriber.read(LONG)


@pytest.mark.needs("outlives")
def test_messages_outlive_their_publisher(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    publisher.publish_many([b"1", b"2"])
    publisher.close()
    assert read_all(subscriber, 2) == [b"1", b"2"]
    assert subscriber.read(0.01) is None


@pytest.mark.needs("history")
def test_a_late_subscriber_sees_history(reach: Reach) -> None:
    publisher = reach.publisher(**reach.lossless()[0])
    publisher.publish_many([b"1", b"2"])
    subscriber = reach.subscriber(**reach.lossless()[1])
    assert read_all(subscriber, 2) == [b"1", b"2"]


def test_a_subscriber_that_leaves_does_not_hinder(reach: Reach) -> None:
    if reach.can["many"] == "no":
        pytest.skip(f"docs/reaches.md: {reach.name} does not declare many")
    publisher, subscriber = reach.pair()
    other = reach.subscriber(**reach.lossless()[1])
    assert publisher.wait_ready(2, timeout=LONG)
    other.close()
    sent = [b"%d" % i for i in range(300)]
    thread = threading.Thread(target=publisher.publish_many, args=(sent,))
    thread.start()
    assert read_all(subscriber, 300) == sent
    thread.join()


def test_both_can_be_opened_again(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    publisher.publish(b"1")
    assert read_all(subscriber, 1) == [b"1"]
    subscriber.close()
    publisher.close()
    publisher, subscriber = reach.pair()
    publisher.publish(b"2")
    last = b""
    while last != b"2":  # where history is kept, the first message may come again
        message = subscriber.read(LONG)
        assert message is not None
        last = bytes(message)
        message.release()


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_message_outlives_its_handle(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    publisher.publish(b"kept")
    message = subscriber.read(LONG)
    assert message is not None
    subscriber.close()
    publisher.close()
    gc.collect()
    assert bytes(message) == b"kept"


def test_a_view_outlives_its_message(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    publisher.publish(b"kept")
    message = subscriber.read(LONG)
    assert message is not None
    view = memoryview(message)
    assert view.readonly
    message.release()
    for i in range(20):
        publisher.publish(b"%04d" % i)
        read_all(subscriber, 1)
    assert bytes(view) == b"kept", "a view never shows another message's bytes"
    del view


def test_a_released_message_gives_nothing(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    publisher.publish(b"gone")
    message = subscriber.read(LONG)
    assert message is not None
    with message:
        assert bytes(message) == b"gone"
    assert message.released
    with pytest.raises(BufferError):
        memoryview(message)
    with pytest.raises(penstock.StateError):
        message.release()


def test_messages_are_collected(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    publisher.publish(b"x")
    message = subscriber.read(LONG)
    assert message is not None
    gone = weakref.ref(message)
    del message
    gc.collect()
    assert gone() is None


@pytest.mark.needs("pins")
def test_many_more_messages_than_slots_flow(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    for i in range(3000):
        publisher.publish(b"%d" % i)
        message = subscriber.read(LONG)
        assert message is not None and bytes(message) == b"%d" % i
        del message


def test_closing_with_drafts_and_messages_out(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    publisher.publish(b"x")
    message = subscriber.read(LONG)
    draft = publisher.reserve(10)
    publisher.close()
    subscriber.close()
    with pytest.raises((penstock.ClosedError, penstock.StateError)):
        draft.publish(3)
    del draft, message
    gc.collect()


# --- overflow and ledger ---------------------------------------------------------------------------------------------


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
    found = []
    while (message := subscriber.read(0.5)) is not None:
        found.append(int(bytes(message).split()[0]))
        message.release()
    ledger = subscriber.ledger
    assert 0 < len(found) < total
    assert found == sorted(set(found))
    assert ledger.balanced, ledger
    assert ledger.delivered == len(found)
    lost = ledger.lost or publisher.ledger.lost
    assert len(found) + lost == total, (len(found), ledger, publisher.ledger)
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


# --- options and arguments -------------------------------------------------------------------------------------------


def test_unknown_options_are_refused_by_name(reach: Reach) -> None:
    for opener in (reach.publisher, reach.subscriber):
        with pytest.raises(penstock.InvalidArgument, match="no_such_option"):
            opener(no_such_option=1)


def test_unknown_values_name_the_nearest(reach: Reach) -> None:
    if reach.can["set on"] not in ("publisher", "subscriber"):
        pytest.skip(f"docs/reaches.md: {reach.name} has no overflow option")
    opener = reach.subscriber if reach.can["set on"] == "subscriber" else reach.publisher
    with pytest.raises(penstock.InvalidArgument, match=r"did you mean .*drop_(old|new)est"):
        opener(overflow="drop_oldes")


@pytest.mark.parametrize("bad", ["text", 5, None, object()])
def test_only_bytes_are_published(reach: Reach, bad: Any) -> None:
    publisher, subscriber = reach.pair()
    with pytest.raises(TypeError):
        publisher.publish(bad)
    with pytest.raises(TypeError):
        publisher.publish_many([bad])
    publisher.publish(b"fine")
    assert read_all(subscriber, 1) == [b"fine"]


def test_a_reader_measures_latency_and_a_publisher_measures_nothing(reach: Reach) -> None:
    began_ns = time.time_ns()
    publisher, subscriber = reach.pair()
    assert subscriber.read(0.05) is None
    publisher.publish(b"x")
    assert subscriber.read(LONG) is not None
    mine = [b for b in counters_read() if b["pid"] == os.getpid() and b["opened_ns"] >= began_ns]
    measured = [block for block in mine if block["latency_ns"]]
    assert measured and not [block for block in measured if block["kind"] == "publisher"]
    for block in measured:
        assert block["latency_ns"] <= time.time_ns() - began_ns and began_ns < block["last_ns"] <= time.time_ns()


def test_the_publisher_says_what_the_table_says_of_properties(reach: Reach) -> None:
    publisher = reach.publisher()
    assert publisher.carries_properties is (reach.can["properties"] == "yes")
    assert publisher.carries_properties or not publisher.carries_properties_of_many


@pytest.mark.needs("properties")
def test_properties_travel(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    publisher.publish(b"x", properties={"unit": "°C", "empty": ""})  # type: ignore[call-arg]
    message = subscriber.read(LONG)
    assert message is not None
    assert dict(message.properties) == {"unit": "°C", "empty": ""}
    with pytest.raises(TypeError):
        message.properties["unit"] = "K"  # type: ignore[index]
