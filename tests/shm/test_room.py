"""Enough slots for everybody: who is guaranteed what, who holds more while slots are free, what a read at the limit does."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path

import pytest

import penstock
from penstock import shm
from penstock.observe.memory import seen

LONG = 30


def join_until_refused(stack: ExitStack, name: str) -> int:
    for count in range(1000):
        try:
            stack.enter_context(shm.Subscriber(name))
        except penstock.CapacityError:
            return count
    raise AssertionError("never refused")


@pytest.mark.parametrize(("slots", "publishers", "viewers"), [(16, 2, 6), (64, 1, 31), (64, 4, 29)])
def test_who_joins_is_sure_of_two(name: str, slots: int, publishers: int, viewers: int) -> None:
    with ExitStack() as stack:
        cameras = [stack.enter_context(shm.Publisher(name, slots=slots)) for _ in range(publishers)]
        assert join_until_refused(stack, name) == viewers
        for camera in cameras:
            assert camera.publish(b"frame")


def test_a_refusal_names_who_holds_the_slots_and_counts_the_others(name: str) -> None:
    with ExitStack() as stack:
        stack.enter_context(shm.Publisher(name, slots=64))
        viewers = join_until_refused(stack, name)
        with pytest.raises(penstock.CapacityError) as refused:
            shm.Subscriber(name)
        named = re.findall(r"(?:publisher|subscriber) \d+ \(pid", str(refused.value))
        more = re.search(r" and (\d+) more[,;)]", str(refused.value))
        assert more is not None and len(named) + int(more[1]) == 1 + viewers, refused.value


@pytest.mark.parametrize(("viewers", "too_few", "enough"), [(4, 8, 10), (2, 4, 6), (4, 3, 10), (2, 3, 6)])
def test_the_order_of_joining_makes_no_difference(name: str, viewers: int, too_few: int, enough: int) -> None:
    """Who brings the slots after the subscribers is refused where it would have refused the last of them."""
    with ExitStack() as stack:
        readers = [stack.enter_context(shm.Subscriber(name)) for _ in range(viewers)]
        with pytest.raises(penstock.CapacityError, match=rf"{too_few} slots are too few .*; {enough} slots would do"):
            shm.Publisher(name, slots=too_few)
        publisher = stack.enter_context(shm.Publisher(name, slots=enough))
        publisher.publish_many([b"one", b"two"])
        held = [reader.read(LONG) for reader in readers]
        assert enough < 4 or all(reader.read(0) is not None for reader in readers), "each is guaranteed two"
        assert all(held) and publisher.publish(b"more")


def test_all_may_hold_two_and_the_publishers_go_on(name: str) -> None:
    with ExitStack() as stack:
        cameras = [stack.enter_context(shm.Publisher(name, slots=16)) for _ in range(2)]
        viewers = [stack.enter_context(shm.Subscriber(name)) for _ in range(6)]
        held = [deque[tuple[penstock.Message, bytes]]() for _ in viewers]
        for i in range(40):
            for camera in cameras:
                with camera.reserve(8) as draft:
                    draft.write(b"%08d" % i)
            for viewer, kept in zip(viewers, held, strict=True):
                if len(kept) == 2:
                    kept.popleft()
                message = viewer.read_newest(0)
                assert message is not None
                kept.append((message, b"%08d" % i))
                del message
            assert all(bytes(message) == wanted for kept in held for message, wanted in kept)
        assert [viewer.held for viewer in viewers] == [2] * 6


def test_one_reader_may_hold_nearly_all(name: str) -> None:
    with shm.Publisher(name, slots=16) as publisher, shm.Subscriber(name) as subscriber:
        assert subscriber.max_active_messages == 14
        publisher.publish_many([b"%d" % i for i in range(15)])
        held = subscriber.read_all()
        assert [bytes(message) for message in held] == [b"%d" % i for i in range(14)]
        assert subscriber.held == 14 and publisher.publish(b"more")
        with pytest.raises(penstock.CapacityError, match=r"subscriber 0 \(pid \d+\) holds 14 and is guaranteed 2"):
            shm.Subscriber(name)
        del held[2:]
        with shm.Subscriber(name) as other:
            assert other.max_active_messages == 12
            publisher.publish_many([b"more"] * 14)
            more = subscriber.read_all()
            assert subscriber.held == 12, "two are kept for the other"
            assert len(other.read_all()) == 2
            del more
        assert subscriber.max_active_messages == 14


def test_a_batch_takes_half(name: str) -> None:
    with shm.Publisher(name, slots=64) as publisher, shm.Subscriber(name) as subscriber:
        publisher.publish_many([b"x"] * 64)
        first = subscriber.read_many(1024, 0)
        second = subscriber.read_many(1024, 0)
        assert len(first) == len(second) == 31 == subscriber.max_active_messages // 2
        assert len(subscriber.read_many(1024, 0)) == 0
        first.release()
        assert len(subscriber.read_many(1024, 0)) == 2, "what is left"


def test_a_message_of_a_batch_holds_its_slot_alone(name: str) -> None:
    with shm.Publisher(name, slots=64) as publisher, shm.Subscriber(name) as subscriber:
        publisher.publish_many([b"%d" % i for i in range(20)])
        for message in subscriber.read_many(20, 0):
            last = message
        assert subscriber.held == 1 and bytes(last) == bytes(message) == b"19"
        del last, message
        assert subscriber.held == 0


def test_a_read_at_the_limit_waits_for_a_release(name: str) -> None:
    with shm.Publisher(name, slots=8) as publisher, shm.Subscriber(name, max_active_messages=1) as subscriber:
        publisher.publish_many([b"first", b"second", b"third", b"fourth"])
        for read in (lambda: subscriber.read(LONG), lambda: next(iter(subscriber.read_many(8, LONG)))):
            message = subscriber.read(0)
            assert message is not None
            releases = threading.Thread(target=lambda held=message: (time.sleep(0.05), held.release()))
            releases.start()
            got = read()
            assert got is not None and message.released
            releases.join()
            del message, got


def test_asynchronous_reading_at_the_limit_does_not_spin(name: str) -> None:
    async def read() -> None:
        with shm.Publisher(name, slots=8) as publisher, shm.Subscriber(name, max_active_messages=1) as subscriber:
            publisher.publish_many([b"first", b"second"])
            message = await subscriber.read_async(LONG)
            assert message is not None
            reading = asyncio.create_task(subscriber.read_async(LONG))
            turns, spent = 0, time.process_time()
            while turns < 20:
                await asyncio.sleep(0.01)
                turns += 1
            assert time.process_time() - spent < 0.1, "the task sleeps"
            assert not reading.done()
            message.release()
            second = await reading
            assert second is not None and bytes(second) == b"second"

    asyncio.run(read())


def test_a_reliable_message_survives_an_unreliable_flood(name: str) -> None:
    with ExitStack() as stack:
        steady = stack.enter_context(shm.Publisher(name, slots=8, reliable=True, timeout=0))
        flood = stack.enter_context(shm.Publisher(name))
        subscriber = stack.enter_context(shm.Subscriber(name, reliable=True))
        for i in range(3):
            steady.publish(b"R%d" % i)
        published = [flood.publish(b"U%d" % i) for i in range(1000)]
        got = [bytes(message) for message in iter(lambda: subscriber.read(0), None)]
        assert [text for text in got if text[:1] == b"R"] == [b"R0", b"R1", b"R2"]
        given_up = published.count(None)
        assert flood.ledger.dropped.get("overflow", 0) == given_up and flood.ledger.balanced
        assert subscriber.ledger.balanced and subscriber.ledger.in_flight == 0
        assert flood.publish(b"again") and subscriber.read(0) is not None


def test_an_unreliable_message_gives_way_where_all_slots_are_wanted(name: str) -> None:
    with ExitStack() as stack:
        steady = stack.enter_context(shm.Publisher(name, slots=8, reliable=True, timeout=0))
        flood = stack.enter_context(shm.Publisher(name))
        subscriber = stack.enter_context(shm.Subscriber(name, reliable=True))
        steady.publish_many([b"R%d" % i for i in range(8)])
        assert flood.publish(b"given up") is None
        assert flood.publish_many([b"given up"] * 3) == 0
        assert flood.ledger.dropped == {"overflow": 4}
        with pytest.raises(penstock.CapacityError, match="reliable subscribers have not read"):
            flood.reserve(4)
        assert bytes(subscriber.read(0) or b"") == b"R0"
        assert flood.publish(b"goes")


def test_a_stuck_reader_does_not_freeze_an_unreliable_publisher(name: str) -> None:
    with shm.Publisher(name, slots=8) as camera, shm.Subscriber(name, reliable=True), shm.Subscriber(name) as viewer:
        for i in range(100):
            assert camera.publish(b"%d" % i) == i + 1
        assert bytes(viewer.read_newest(0) or b"") == b"99"


@pytest.mark.parametrize("is_virtual", [False, True])
def test_an_unread_reliable_message_does_not_freeze_an_unreliable_publisher(name: str, is_virtual: bool) -> None:
    mux = {"mux": f"{name}-mux"} if is_virtual else {}
    with ExitStack() as stack:
        steady = stack.enter_context(shm.Publisher(name, slots=16, reliable=True, timeout=0, **mux))
        camera = stack.enter_context(shm.Publisher(name, **mux))
        stuck, other = (stack.enter_context(shm.Subscriber(name, reliable=True, **mux)) for _ in range(2))
        viewer = stack.enter_context(shm.Subscriber(name, **mux))
        for round_ in range(3):  # what was kept beyond the ring comes back each time
            steady.publish_many([b"R%d" % i for i in range(3)])
            for i in range(1000):
                assert camera.publish(b"%d" % i) is not None
            assert bytes(viewer.read_newest(0) or b"") == b"999"
            with pytest.raises(TimeoutError):
                steady.publish(b"waits for the stuck one")
            assert stuck.ledger.balanced
            for reader in (stuck, other):
                got = [bytes(message) for message in iter(lambda reader=reader: reader.read(0), None)]
                assert got[:3] == [b"R0", b"R1", b"R2"] and got[-1] == b"999", round_
                ledger = reader.ledger
                assert ledger.balanced and ledger.in_flight == 0 and ledger.delivered + ledger.lost == 1003 * (round_ + 1)
            assert camera.ledger.dropped == {}
        steady.publish_many([b"last"] * 16)  # every slot is there
        assert stuck.read(0) is not None


def test_who_passes_over_what_was_kept_for_it_gives_the_slots_back(name: str) -> None:
    with ExitStack() as stack:
        steady = stack.enter_context(shm.Publisher(name, slots=8, reliable=True, timeout=0))
        camera = stack.enter_context(shm.Publisher(name))
        subscriber = stack.enter_context(shm.Subscriber(name, reliable=True))
        steady.publish_many([b"R"] * 3)
        for _ in range(200):
            assert camera.publish(b"U") is not None
        assert bytes(subscriber.read_newest(0) or b"") == b"U"
        assert subscriber.ledger.balanced
        steady.publish_many([b"last"] * 8)


@pytest.mark.parametrize("mux_publisher_is_reliable", [True, False])
def test_siblings_on_a_multiplexer_lose_nothing(name: str, mux_publisher_is_reliable: bool) -> None:
    mux = f"{name}-mux"
    with ExitStack() as stack:
        steady = stack.enter_context(shm.Publisher(f"{name}-a", slots=8, mux=mux, reliable=True, timeout=0))
        sibling = stack.enter_context(
            shm.Publisher(f"{name}-b", mux=mux, reliable=mux_publisher_is_reliable, timeout=0)
        )
        subscriber = stack.enter_context(shm.Subscriber(f"{name}-a", mux=mux, reliable=True))
        for i in range(3):
            steady.publish(b"R%d" % i)
        for i in range(200):
            try:
                sibling.publish(b"U%d" % i)
            except TimeoutError:
                break
        assert [bytes(message) for message in iter(lambda: subscriber.read(0), None)] == [b"R0", b"R1", b"R2"]
        assert subscriber.ledger.lost == 0


def mapped() -> int:
    """Channel files in the memory of this process."""
    return sum("%2F" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_closing_gives_memory_back(name: str) -> None:
    before = mapped()
    publisher, subscriber = shm.Publisher(name, slots=8), shm.Subscriber(name)
    with publisher.reserve(4) as draft:
        array = draft.array()
        array[:] = 7
    message = subscriber.read(0)
    assert message is not None and mapped() > before
    publisher.close()
    subscriber.close()
    assert bytes(message) == bytes(array) == b"\7" * 4, "what somebody looks at stays"
    del message, array, draft
    assert mapped() == before
    assert publisher.closed and subscriber.closed and subscriber.ledger.delivered == 1


def test_publishing_many_says_how_many_went(name: str) -> None:
    with shm.Publisher(name, slots=8, reliable=True, timeout=0) as publisher, shm.Subscriber(name, reliable=True):
        with pytest.raises(TimeoutError) as told:
            publisher.publish_many([b"x"] * 20)
        assert told.value.published == 8 and "8 were published" in told.value.__notes__  # type: ignore[attr-defined]


def test_who_looks_from_outside_counts_no_loss_twice(name: str) -> None:
    """A reader that asks for its own ledger has counted what was overwritten: from outside it is the same number."""

    def lost() -> int:
        return next(block.lost for block in seen() if block.name == name and block.kind == "subscriber")

    with shm.Publisher(name, slots=8) as publisher, shm.Subscriber(name) as subscriber:
        for round_number in range(1, 4):
            publisher.publish_many([b"x"] * 100)
            assert lost() == round_number * 100 - 8
            ledger = subscriber.ledger
            assert ledger.balanced and ledger.lost == round_number * 100 - 8 == lost()
        assert sum(len(subscriber.read_many(100, 0)) for _ in range(8)) == 8
        assert subscriber.ledger == penstock.Ledger(matched=300, delivered=8, dropped={"overflow": 292}) and lost() == 292


def test_threads_that_share_a_handle_wait_for_each_other_s_copies(name: str) -> None:
    """A long copy is made without the GIL and has a slot reserved meanwhile; nobody has drafts."""
    with shm.Publisher(name, slots=16, slot_size=1 << 20) as publisher:
        failed: list[BaseException] = []

        def publish(size: int, many: bool) -> None:
            body = b"x" * size
            try:
                for _ in range(300):
                    if many:
                        assert publisher.publish_many([body] * 3) == 3
                    else:
                        assert publisher.publish(body)
            except BaseException as error:
                failed.append(error)

        kinds = [(300_000, False), (300_000, True), (10, False), (10, True)]
        threads = [threading.Thread(target=publish, args=kind) for kind in kinds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG * 4)
        assert not failed, failed[0]
        assert publisher.ledger.matched == 300 * (1 + 3 + 1 + 3)
        draft = publisher.reserve(10)
        with pytest.raises(penstock.CapacityError):
            publisher.publish(b"x" * 300_000)
        draft.cancel()
