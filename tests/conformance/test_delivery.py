"""One message, many messages, order, memory that is reserved: the contract of publishing and reading, on every reach."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import penstock

from .reaches import Reach
from .reading import LONG, read_all

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


def test_publish_gives_the_ordinal_or_nothing(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    given = [publisher.publish(b"x"), publisher.publish(b"y")]
    found = [subscriber.receive(LONG).ordinal for _ in given]
    assert given == (found if reach.can["ordinal"] == "yes" else [None, None])
    assert publisher.publish_many([b"1", b"2", b"3"]) == 3


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


# --- reserve ---------------------------------------------------------------------------------------------------------


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
    half = draft.array((4,), "uint8")[:2]
    draft.array()[:] = 7
    with pytest.raises(BufferError, match="nothing was published"):
        draft.publish(4)
    assert subscriber.read(0) is None
    del half
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
    if reach.can["processes"] == "no":
        assert message.address == address
    else:  # the same bytes of the same file, which may be mapped twice
        assert mapped(message.address) == mapped(address)
    with pytest.raises(TypeError):
        memoryview(message)[0] = 1


def mapped(address: int) -> tuple[str, str, int]:
    """What is mapped at an address: device and number of the file, and the place in it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, device, number, *_ = line.split()
        begin, end = (int(edge, 16) for edge in span.split("-"))
        if begin <= address < end:
            assert number != "0", f"no file: {line}"
            return device, number, int(offset, 16) + address - begin
    raise AssertionError(f"nothing is mapped at {address:#x}")


# --- processes -------------------------------------------------------------------------------------------------------

READER = """
import json, sys
import penstock
with penstock.subscriber(sys.argv[1], **json.loads(sys.argv[2])) as subscriber:
    for _ in range(int(sys.argv[3])):
        message = subscriber.read(60)
        print(message.ordinal, bytes(message).hex())
        message.release()
    assert subscriber.read(0) is None
"""


@pytest.mark.needs("processes")
def test_a_subscriber_in_another_process(reach: Reach) -> None:
    for_publisher, for_subscriber = reach.lossless()
    publisher = reach.publisher(**for_publisher)
    sent = [b"%d" % i * (i % 50) for i in range(300)]
    command = [sys.executable, "-c", READER, reach.address, json.dumps(for_subscriber), str(len(sent))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            assert publisher.wait_ready(1, timeout=LONG)
            publisher.publish_many(sent)
            out, err = child.communicate(timeout=60)
        finally:
            child.kill()
    assert child.returncode == 0, err
    read = [line.split(" ") for line in out.splitlines()]
    assert [bytes.fromhex(data) for _, data in read] == sent
    ordinals = [int(ordinal) for ordinal, _ in read]
    assert ordinals == list(range(1, len(sent) + 1))
