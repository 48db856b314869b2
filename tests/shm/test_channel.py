# ruff: noqa: SIM117 -- nesting shows who outlives whom
"""Publishing and reading between handles of one process: everything that needs no second process."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import shm

LONG = 30.0


def test_oldest_is_overwritten_and_counted(name: str) -> None:
    with shm.Publisher(name, slots=8) as publisher, shm.Subscriber(name) as subscriber:
        for i in range(30):
            publisher.publish(b"%d" % i)
        found = []
        while (message := subscriber.read(0)) is not None:
            found.append(int(bytes(message)))
            del message
        assert found == list(range(22, 30))
        assert subscriber.ledger.dropped == {"overflow": 22}
        assert subscriber.ledger.balanced


def test_drops_are_told(name: str) -> None:
    told: list[int] = []
    with shm.Publisher(name, slots=4) as publisher, shm.Subscriber(name) as subscriber:
        subscriber.on_dropped(lambda who, count: told.append(count) if who is subscriber else None)
        for _ in range(10):
            publisher.publish(b"x")
        assert subscriber.read(0) is not None
        assert told == [6]


def test_loss_before_the_first_read_counts(name: str) -> None:
    with shm.Publisher(name, slots=4) as publisher:
        publisher.publish(b"before")
        with shm.Subscriber(name, history=False) as subscriber:
            for _ in range(9):
                publisher.publish(b"x")
            subscriber.read_newest(0)
            ledger = subscriber.ledger
            assert (ledger.matched, ledger.delivered, ledger.lost) == (9, 1, 8)


def test_a_late_subscriber_sees_what_is_in_the_slots(name: str) -> None:
    with shm.Publisher(name, slots=4) as publisher:
        for i in range(6):
            publisher.publish(b"%d" % i)
        with shm.Subscriber(name) as subscriber:
            found = []
            while (message := subscriber.read(0)) is not None:
                found.append(bytes(message))
                del message
            assert found == [b"2", b"3", b"4", b"5"]
            assert subscriber.ledger.balanced and subscriber.ledger.lost == 0


def test_read_newest_and_all_and_find(name: str) -> None:
    with shm.Publisher(name, slots=16) as publisher, shm.Subscriber(name, max_active_messages=8) as subscriber:
        publisher.publish_many([b"1", b"2", b"3"])
        newest = subscriber.read_newest(0)
        assert newest is not None and bytes(newest) == b"3"
        assert subscriber.read_newest(0) is None
        assert subscriber.ledger.dropped == {"filtered": 2}
        publisher.publish_many([b"4", b"5"])
        everything = subscriber.read_all()
        assert [bytes(message) for message in everything] == [b"4", b"5"]
        found = subscriber.find(newest.timestamp_ns)
        assert found is not None and found.timestamp_ns >= newest.timestamp_ns
        assert subscriber.find(everything[-1].timestamp_ns + 1) is None
        assert subscriber.find(0) is not None


def test_the_limit_of_held_messages(name: str) -> None:
    with shm.Publisher(name, slots=16) as publisher, shm.Subscriber(name, max_active_messages=2) as subscriber:
        publisher.publish_many([b"1", b"2", b"3"])
        first, second = subscriber.read(0), subscriber.read(0)
        assert first is not None and second is not None
        assert subscriber.held == 2
        assert subscriber.read(0) is None, "the third stays unread"
        with pytest.warns(RuntimeWarning, match=r"holds 2 messages.*subscriber 0 \(pid \d+\) holds 2.*max_active_messages"):
            assert subscriber.read(0.01) is None, "nobody released one"
        assert len(subscriber.read_many(1, 0.01)) == 0
        first.release()
        third = subscriber.read(0)
        assert third is not None and bytes(third) == b"3"
        assert bytes(second) == b"2"


@pytest.mark.parametrize("bad", [0, -1])
def test_max_active_messages_must_be_positive(name: str, bad: int) -> None:
    with pytest.raises(penstock.InvalidArgument, match=f"channel '{name}': max_active_messages"):
        shm.Subscriber(name, max_active_messages=bad)


def test_held_slots_are_never_overwritten(name: str) -> None:
    with shm.Publisher(name, slots=8) as publisher, shm.Subscriber(name, max_active_messages=4) as subscriber:
        publisher.publish_many([b"%d" % i for i in range(4)])
        held = [subscriber.read(0) for _ in range(4)]
        for i in range(100):
            publisher.publish(b"new %d" % i)
        assert [bytes(message) for message in held if message is not None] == [b"0", b"1", b"2", b"3"]


def test_slots_released_out_of_order_are_used_again(name: str) -> None:
    with shm.Publisher(name, slots=4, reliable=True, timeout=5) as publisher:
        with shm.Subscriber(name, reliable=True, max_active_messages=2) as subscriber:
            publisher.publish_many([b"a", b"b"])
            kept = subscriber.read(0)
            for i in range(50):  # one slot stays held, the other three go round
                publisher.publish(b"%d" % i)
                message = subscriber.read(0)
                assert message is not None
                del message
            assert kept is not None and bytes(kept) == b"a"


def test_weak_references(name: str) -> None:
    with shm.Publisher(name, slots=4) as publisher, shm.Subscriber(name) as subscriber:
        publisher.publish(b"weak")
        message = subscriber.read(0)
        assert message is not None
        weak = subscriber.weak_reference(message)
        again = weak()
        assert again is not None and bytes(again) == b"weak" and subscriber.held == 1
        del again, message
        assert subscriber.held == 0
        assert not weak.expired
        for _ in range(4):
            publisher.publish(b"other")
        assert weak() is None and weak.expired


def test_callback_with_the_subscriber(name: str) -> None:
    with shm.Publisher(name) as publisher, shm.Subscriber(name) as subscriber:
        found: list[tuple[shm.Subscriber, bytes]] = []

        def first(who: shm.Subscriber, message: penstock.Message) -> None:
            found.append((who, bytes(message)))
            who.on_message(lambda message: found.append((subscriber, b"second " + bytes(message))))

        subscriber.on_message(first)
        publisher.publish_many([b"1", b"2"])
        assert subscriber.process_all() == 2
        assert found == [(subscriber, b"1"), (subscriber, b"second 2")]
        subscriber.on_message(lambda message: (found.append((subscriber, bytes(message))), subscriber.on_message(None)))
        publisher.publish_many([b"3", b"4"])
        assert subscriber.process_all() == 1, "it was unset inside itself"
        assert found[-1] == (subscriber, b"3") and subscriber.read(0) == b"4"


def test_several_reservations(name: str) -> None:
    with shm.Publisher(name, max_reserved=2) as publisher, shm.Subscriber(name) as subscriber:
        first, second = publisher.reserve(5), publisher.reserve(5)
        with pytest.raises(penstock.CapacityError, match="max_reserved"):
            publisher.reserve(5)
        second.write(b"2")
        second.publish(1)
        first.cancel()
        message = subscriber.read(0)
        assert message is not None and (bytes(message), message.ordinal) == (b"2", 1)


def test_growing(name: str) -> None:
    asked: list[tuple[int, int]] = []
    with shm.Publisher(name, slot_size=64, slots=4) as publisher, shm.Subscriber(name, max_active_messages=2) as subscriber:
        publisher.on_resize(lambda who, old, new: asked.append((old, new)))
        publisher.publish(b"small")
        small = subscriber.read(0)
        publisher.publish(b"x" * 1000)
        assert publisher.slot_size == 1024
        publisher.publish(b"y" * 5000)
        assert publisher.slot_size == 6144
        assert asked == [(64, 1024), (1024, 6144)]
        assert small is not None and bytes(small) == b"small"
        large = subscriber.read(0)
        assert large is not None and bytes(large) == b"x" * 1000
        publisher.on_resize(lambda who, old, new: False)
        with pytest.raises(penstock.RefusedError, match="vetoed"):
            publisher.publish(b"z" * 100_000)
        publisher.on_resize(None)
        del small, large
        for _ in range(40):  # older sizes are given back once no slot refers to them
            publisher.publish(b"y" * 5000)
        directory = Path(os.environ["PENSTOCK_SHM_DIR"])
        assert len([path for path in directory.iterdir() if ".payload." in path.name]) == 1


def test_growing_while_others_read(name: str) -> None:
    with shm.Publisher(name, slot_size=64, slots=16, reliable=True) as publisher:
        subscribers = [shm.Subscriber(name, reliable=True, max_active_messages=2) for _ in range(3)]
        sent = [os.urandom(1 + (i * i) % 50_000) for i in range(300)]
        found: list[list[bytes]] = [[] for _ in subscribers]

        def reader(number: int) -> None:
            for _ in sent:
                message = subscribers[number].read(LONG)
                assert message is not None
                found[number].append(bytes(message))

        threads = [threading.Thread(target=reader, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for data in sent:
            publisher.publish(data)
        for thread in threads:
            thread.join()
        assert all(got == sent for got in found)
        for subscriber in subscribers:
            subscriber.close()


def test_who_does_not_say_fixed_size_takes_the_channel_as_it_is(name: str) -> None:
    with shm.Publisher(name, slot_size=64, fixed_size=True), shm.Publisher(name) as plain:
        assert plain.fixed_size
        with pytest.raises(penstock.InvalidArgument, match="fixed size"):
            plain.publish(bytes(100))


def test_fixed_size(name: str) -> None:
    with shm.Publisher(name, slot_size=64, fixed_size=True) as publisher:
        with pytest.raises(penstock.InvalidArgument, match="fixed size of 64"):
            publisher.publish(b"x" * 65)
        with pytest.raises(penstock.InvalidArgument, match="-5"):
            publisher.reserve(-5)
        assert publisher.publish(b"x" * 64) == 1


def test_reliable_with_two_speeds_loses_nothing(name: str) -> None:
    with shm.Publisher(name, slots=8, reliable=True) as publisher:
        fast, slow = (shm.Subscriber(name, reliable=True, max_active_messages=1) for _ in range(2))
        count = 2000
        thread = threading.Thread(target=lambda: [publisher.publish(b"%d" % i) for i in range(count)])
        thread.start()
        totals = {fast: 0, slow: 0}
        while totals[slow] < count:
            for subscriber, most in ((fast, 5), (slow, 1)):
                for _ in range(most):
                    message = subscriber.read(0)
                    if message is not None:
                        assert int(bytes(message)) == totals[subscriber]
                        totals[subscriber] += 1
                        del message
        thread.join()
        while (message := fast.read(0)) is not None:
            totals[fast] += 1
            del message
        assert totals == {fast: count, slow: count}
        assert fast.ledger.lost == slow.ledger.lost == 0
        fast.close()
        slow.close()


def test_unreliable_subscribers_cause_no_back_pressure(name: str) -> None:
    with shm.Publisher(name, slots=8, reliable=True, timeout=LONG) as publisher, shm.Subscriber(name) as subscriber:
        for i in range(100):
            publisher.publish(b"%d" % i)
        newest = subscriber.read_newest(0)
        assert newest is not None and bytes(newest) == b"99"


def test_a_reliable_publisher_without_subscriber_waits(name: str) -> None:
    with shm.Publisher(name, reliable=True, timeout=0.01) as publisher:
        with pytest.raises(TimeoutError, match="no subscriber"):
            publisher.publish(b"x")
        with shm.Subscriber(name):
            assert publisher.publish(b"x") == 1


def test_types(name: str) -> None:
    with shm.Publisher(name, type="image") as publisher:
        with pytest.raises(penstock.RefusedError, match="'image', not 'text'"):
            shm.Subscriber(name, type="text")
        with shm.Subscriber(name, type="image") as subscriber, shm.Subscriber(name) as other:
            assert subscriber.type == other.type == "image"
            publisher.publish(b"x")


def test_checksums(name: str) -> None:
    with shm.Publisher(name, checksum=True, slots=8) as publisher:
        strict, lenient = shm.Subscriber(name), shm.Subscriber(name, checksum="flag")
        publisher.publish(b"whole")
        message = lenient.read(0)
        assert isinstance(message, shm.Message) and message.intact
        del message
        assert strict.read(0) is not None
        publisher.publish(b"to be broken")
        directory = Path(os.environ["PENSTOCK_SHM_DIR"])
        (payload,) = (path for path in directory.iterdir() if ".payload." in path.name)
        with payload.open("r+b") as file:
            at = file.read().index(b"to be broken")
            file.seek(at)
            file.write(b"T")
        with pytest.raises(penstock.CorruptionError, match=r"message 2 .* checksum"):
            strict.read(0)
        message = lenient.read(0)
        assert isinstance(message, shm.Message) and not message.intact
        assert strict.checksum_errors == lenient.checksum_errors == 1
        del message
        strict.close()
        lenient.close()


def test_metadata(name: str) -> None:
    with shm.Publisher(name, metadata_size=8) as publisher, shm.Subscriber(name) as subscriber:
        publisher.publish(b"x", metadata=b"frame 1")
        with publisher.reserve(1, metadata=b"frame 22") as draft:
            draft.write(b"y")
        publisher.publish(b"z")
        found = [message.metadata for message in iter(lambda: subscriber.read(0), None)]  # type: ignore[union-attr]
        assert found == [b"frame 1\0", b"frame 22", bytes(8)]
        with pytest.raises(penstock.InvalidArgument, match="metadata_size=8"):
            publisher.publish(b"x", metadata=b"too long a text")
        assert publisher.publish(b"x") == 4, "the refused one left no hole"


def test_activation(name: str) -> None:
    with shm.Subscriber(name) as ordinary, shm.Subscriber(name, pass_activation=True) as curious:
        with shm.Publisher(name, activation=True) as publisher:
            publisher.publish(b"x")
            message = ordinary.read(0)
            assert message is not None and (bytes(message), message.ordinal) == (b"x", 2)
            del message
            assert ordinary.ledger.balanced and ordinary.ledger.dropped == {"filtered": 1}
            first = curious.read(0)
            assert first is not None and (len(first), first.ordinal) == (0, 1)


def test_an_activation_without_a_slot_is_told_at_the_users_line(name: str) -> None:
    with shm.Publisher(name, slots=16, reliable=True) as full, shm.Subscriber(name, reliable=True):
        with pytest.raises(TimeoutError):
            full.publish_many([b"x"] * 40, timeout=0)
        for opened in (shm.Publisher, shm.publisher, lambda name, **more: penstock.publisher(f"shm:{name}", **more)):
            with pytest.warns(UserWarning, match="activation message found no slot") as told:
                publisher = opened(name, reliable=True, activation=True)
            assert told[0].filename == __file__ and not publisher.activated
            publisher.close()


@pytest.mark.parametrize("option", ["reliable", "activation", "retirement", "local", "fixed_size", "checksum"])
def test_a_text_is_no_flag(name: str, option: str) -> None:
    with pytest.raises(TypeError, match=f"{option} must be True or False, not 'no'"):
        shm.Publisher(name, **{option: "no"})  # type: ignore[arg-type]


class Keeper:
    """Keeps its last message beside the function that was called with it."""

    def __init__(self, name: str, how: str) -> None:
        self.last: Any = None
        self.called = threading.Event()
        self.subscriber = shm.Subscriber(name, on_message=self.keep if how == "at opening" else None)
        if how == "process_all":
            self.subscriber.on_message(self.keep)
        if how == "on_dropped":
            self.subscriber.on_dropped(self.dropped)

    def keep(self, message: Any) -> None:
        self.last = message
        self.called.set()

    def dropped(self, subscriber: shm.Subscriber, count: int) -> None:
        pass


@pytest.mark.parametrize("how", ["at opening", "process_all", "on_dropped"])
def test_a_closed_subscriber_lets_go_of_its_functions(name: str, how: str) -> None:
    with shm.Publisher(name, slots=16) as publisher:
        for _ in range(20):  # more than there are slots
            keeper = Keeper(name, how)
            publisher.publish(b"x")
            if how == "at opening":
                assert keeper.called.wait(LONG)
            elif how == "process_all":
                keeper.subscriber.process_all()
            else:
                keeper.last = keeper.subscriber.read(0)
            assert keeper.last is not None
            keeper.subscriber.close()
            forgotten = weakref.ref(keeper)
            del keeper
            gc.collect()
            assert forgotten() is None
        assert publisher.subscribers == 0


def test_retirement(name: str) -> None:
    with shm.Publisher(name, retirement=True, slots=8) as publisher:
        one, two = shm.Subscriber(name), shm.Subscriber(name)
        publisher.publish(b"x")
        assert publisher.retired() == []
        message = one.read(0)
        assert two.read(0) is not None
        assert publisher.retired() == [], "one still holds it"
        del message
        assert len(publisher.retired(LONG)) == 1
        assert publisher.retired() == []
        one.close()
        two.close()


def test_every_retirement_is_told_once_in_the_order_of_publishing(name: str) -> None:
    with shm.Publisher(name, retirement=True, slots=8) as publisher, shm.Subscriber(name) as subscriber:
        publisher.publish(b"held")
        held = subscriber.read(0)
        assert held is not None
        for turn in range(100):  # each slot but the held one many times
            publisher.publish(b"%d" % turn)
            assert subscriber.read(0) is not None
        assert len(publisher.retired()) == 100 and publisher.retired() == []
        del held
        assert len(publisher.retired()) == 1, "it was held all the time"
        publisher.publish_many([b"x"] * 4)
        assert publisher.retired() == [], "nobody has read them"
        slots = [subscriber._place_of(message)[0] for message in subscriber.read_many(4, 0)]
        assert publisher.retired() == slots


@pytest.mark.parametrize(
    ("published", "read"), [({}, {}), ({"history": 5}, {}), ({"history": 5}, {"reliable": True}), ({"mux": True}, {"mux": True})]
)
def test_process_all_takes_what_was_there_before_the_subscriber(
    name: str, published: dict[str, Any], read: dict[str, Any]
) -> None:
    published, read = ({**options, **({"mux": f"{name}-mux"} if "mux" in options else {})} for options in (published, read))
    with shm.Publisher(name, **published) as publisher:
        publisher.publish_many([b"1", b"2"])
        with shm.Subscriber(name, **read) as subscriber:
            calls: list[bytes] = []

            def note(message: Any) -> None:
                calls.append(bytes(message))
                publisher.publish(b"meanwhile")

            subscriber.on_message(note)
            assert subscriber.wait(0) and subscriber.process_all() == 2 and calls == [b"1", b"2"]
            subscriber.on_message(lambda message: calls.append(bytes(message)))
            assert subscriber.process_all() == 2 and calls[2:] == [b"meanwhile"] * 2
            assert subscriber.process_all() == 0 and not subscriber.wait(0)


def test_a_subscriber_sees_that_a_publisher_asks_for_retirement(name: str) -> None:
    with shm.Subscriber(name) as subscriber, shm.Publisher(name):
        assert not subscriber.retirement
        with shm.Publisher(name, retirement=True):
            assert subscriber.retirement
        assert not subscriber.retirement, "nobody is left to be told"


def test_retirement_belongs_to_a_virtual_channel(name: str) -> None:
    with (
        shm.Publisher(f"{name}/a", mux=name, retirement=True),
        shm.Publisher(f"{name}/b", mux=name),
        shm.Subscriber(f"{name}/a", mux=name) as of_a,
        shm.Subscriber(f"{name}/b", mux=name) as of_b,
        shm.Subscriber(name) as of_all,
    ):
        assert of_a.retirement and of_all.retirement and not of_b.retirement


def test_limits(name: str) -> None:
    with shm.Publisher(name, max_publishers=1, max_subscribers=1) as publisher, shm.Subscriber(name):
        with pytest.raises(penstock.CapacityError, match=rf"1 publishers, .*max_publishers: 1 of pid {os.getpid()}; .* 4096"):
            shm.Publisher(name)
        with pytest.raises(penstock.CapacityError, match=rf"1 subscribers, .*max_subscribers: 1 of pid {os.getpid()}; .* 4096"):
            shm.Subscriber(name)
        with pytest.raises(penstock.RefusedError, match="max_publishers"):
            shm.Publisher(name, max_publishers=3)
        publisher.publish(b"x")


def test_a_limit_below_what_is_there_is_refused_and_limits_nothing(name: str) -> None:
    with shm.Publisher(name), shm.Subscriber(name):
        with pytest.raises(penstock.RefusedError, match=rf"max_publishers=1, but the channel has 1 already: 1 of pid {os.getpid()}"):
            shm.Publisher(name, max_publishers=1)
        with pytest.raises(penstock.RefusedError, match="max_subscribers=1, but the channel has 1 already"):
            shm.Subscriber(name, max_subscribers=1)
        with shm.Publisher(name), shm.Subscriber(name):
            pass


@pytest.mark.parametrize("options", [{}, {"mux": "/some"}])
def test_a_long_name_is_not_cut_inside_a_character(options: dict[str, Any]) -> None:
    with pytest.raises(penstock.InvalidArgument, match="/äää") as refused:
        shm.Publisher("/" + "ä" * 150, **options)
    assert "\ufffd" not in str(refused.value) and "ä..." in str(refused.value)


def test_capacity_is_refused_with_names(name: str) -> None:
    with shm.Publisher(name, slots=8), shm.Subscriber(name, max_active_messages=5):
        with pytest.raises(penstock.CapacityError, match=r"8 slots.*publisher 0 \(pid \d+\) may reserve 1, subscriber 0 .* holds 0 and is guaranteed 5"):
            shm.Subscriber(name, max_active_messages=2)


def test_mismatched_options(name: str) -> None:
    with shm.Publisher(name, slots=8, metadata_size=4):
        for options in ({"slots": 9}, {"metadata_size": 5}, {"fixed_size": True}, {"local": True}):
            with pytest.raises(penstock.RefusedError, match=next(iter(options))):
                shm.Publisher(name, **options)  # type: ignore[arg-type]


def test_a_subscriber_may_come_first(name: str) -> None:
    with shm.Subscriber(name) as subscriber:
        assert subscriber.read(0) is None and subscriber.slots == 0
        with shm.Publisher(name, slots=32, slot_size=128) as publisher:
            publisher.publish_many([b"1", b"2"])
            assert [bytes(message) for message in subscriber.read_many(10, 0)] == [b"1", b"2"]
            assert subscriber.slots == 32 and subscriber.max_active_messages > 1
    with shm.Subscriber(name, max_active_messages=7), pytest.raises(penstock.CapacityError, match="too few"):
        shm.Publisher(name, slots=8)


@pytest.mark.parametrize("bad", ["", "/", "camera", "/" + "x" * 300, "/a\nb", "/" + "é" * 80])
def test_bad_names(bad: str) -> None:
    with pytest.raises(penstock.InvalidArgument, match="name"):
        shm.Publisher(bad)


@pytest.mark.parametrize("odd", ["/a b", "/a.b%2F..", "/../../etc", "/ümlaut", "//"])
def test_odd_names(odd: str) -> None:
    with shm.Publisher(odd) as publisher, shm.Subscriber(odd) as subscriber:
        publisher.publish(b"x")
        assert subscriber.read(0) is not None
        assert [channel.name for channel in shm.channels()] == [odd]


def test_bad_options(name: str) -> None:
    for options in ({"slots": 1}, {"slots": 0}, {"slot_size": 0}, {"slot_size": -4}, {"slots": 1 << 30}, {"spin_us": -1}):
        with pytest.raises(penstock.InvalidArgument, match=f"channel '{name}': {next(iter(options))}"):
            shm.Publisher(name, **options)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        shm.Publisher(name, slots="many")  # type: ignore[arg-type]
    with pytest.raises(penstock.InvalidArgument, match="drop_newest"):
        penstock.publisher(f"shm:{name}", overflow="drop_newest")
    with pytest.raises(penstock.InvalidArgument, match="contradict"):
        penstock.publisher(f"shm:{name}", overflow="block", reliable=False)


def test_statistics(name: str) -> None:
    with shm.Publisher(name, slots=8) as publisher, shm.Subscriber(name, reliable=True, max_active_messages=3) as subscriber:
        publisher.publish_many([b"12345"] * 4)
        message = subscriber.read(0)
        (channel,) = (channel for channel in shm.channels() if channel.name == name)
        assert (channel.slots, channel.published, channel.held_slots) == (8, 4, 1)
        (writer,), (reader,) = channel.publishers, channel.subscribers
        assert (writer.pid, writer.messages, writer.total_bytes) == (os.getpid(), 4, 20)
        assert (reader.messages, reader.reliable, reader.alive) == (1, True, True)
        assert channel.memory_bytes > 8 * 4096
        del message


def test_the_last_one_removes_the_files(name: str) -> None:
    directory = Path(os.environ["PENSTOCK_SHM_DIR"])
    publisher = shm.Publisher(name)
    subscriber = shm.Subscriber(name)
    subscriber.wait(0.001)
    publisher.publish(b"x")
    message = subscriber.read(0)
    publisher.close()
    subscriber.close()
    assert any(path.name.startswith("%2Ftest") for path in directory.iterdir()), "the message still holds its slot"
    assert message is not None and bytes(message) == b"x"
    del message
    gc.collect()
    assert not any(path.name.startswith("%2Ftest") for path in directory.iterdir())


def test_all_readers_see_the_messages_of_all_publishers_in_one_order(name: str) -> None:
    """Three publishers at once, two readers: the same sequence for both, with each publisher's own order in it."""
    each = 500
    publishers = [shm.Publisher(name, slots=16, reliable=True) for _ in range(3)]
    readers = [shm.Subscriber(name, reliable=True, max_active_messages=1) for _ in range(2)]
    threads = [
        threading.Thread(target=lambda p=p, i=i: [p.publish(b"%d:%d" % (i, n)) for n in range(each)])  # type: ignore[misc]
        for i, p in enumerate(publishers)
    ]
    seen: list[list[bytes]] = [[], []]

    def follow(reader: shm.Subscriber, into: list[bytes]) -> None:
        while len(into) < each * len(publishers):
            message = reader.read(60)
            assert message is not None
            into.append(bytes(message))
            message.release()

    threads += [threading.Thread(target=follow, args=pair) for pair in zip(readers, seen, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen[0] == seen[1]
    for i in range(len(publishers)):
        own = [entry for entry in seen[0] if entry.startswith(b"%d:" % i)]
        assert own == [b"%d:%d" % (i, n) for n in range(each)]
    for handle in (*publishers, *readers):
        handle.close()


def test_a_batch_that_is_released_while_it_is_published_again_keeps_its_messages(name: str) -> None:
    """By a callback, or by another thread while publishing waits."""
    with shm.Publisher(name, slots=32, slot_size=256) as source, shm.Subscriber(name, max_active_messages=16) as reader:
        sent = [bytes([i]) * 200 for i in range(8)]
        source.publish_many(sent)
        batch = reader.read_many(8, 0)

        def release(*_: object) -> None:
            batch.release()
            for _ in range(64):
                source.publish(b"\xff" * 256)  # into every slot that is free

        other = f"{name}-again"
        with shm.Publisher(other, slots=32, slot_size=64, on_resize=release) as publisher:
            with shm.Subscriber(other, max_active_messages=16) as subscriber:
                assert publisher.publish_many(batch) == 8
                assert [bytes(message) for message in subscriber.read_many(8, 0)] == sent
        source.publish(b"")
        assert source.publish_many([b"x"] * 32) == 32  # everything was given back in the end
        with pytest.raises(penstock.errors.StateError):
            batch.release()


@pytest.mark.parametrize("mux", [None, "/mux"])
def test_lag_beyond_the_slots_is_loss_at_once(name: str, mux: str | None) -> None:
    """The ledger tells it before the reader comes to it, whoever was there first."""
    with shm.Subscriber(name, mux=mux) as early, shm.Publisher(name, mux=mux, slots=8) as publisher:
        with shm.Subscriber(name, mux=mux) as late:
            for _ in range(2):  # and again, in the middle
                for i in range(50):
                    publisher.publish(b"%d" % i)
                for subscriber in (early, late):
                    before = subscriber.ledger
                    assert before.balanced and before.dropped["overflow"] >= 42 and before.in_flight <= 8, before
                    assert before == subscriber.ledger
                    seen = [bytes(message) for message in subscriber.read_many(2, 0)]
                    assert seen == [b"%d" % i for i in range(50 - before.in_flight, 52 - before.in_flight)]
                    after = subscriber.ledger
                    assert after.dropped == before.dropped and after.matched == before.matched
                    assert after.delivered == before.delivered + 2
            assert early.ledger.matched == late.ledger.matched == 100


def test_a_full_reliable_channel_says_who_has_not_read(name: str) -> None:
    with shm.Publisher(name, slots=8, reliable=True) as publisher, shm.Subscriber(name, reliable=True):
        publisher.publish_many([b"x"] * 8)
        with pytest.raises(TimeoutError, match=rf"wait to be read .*subscriber 0 \(pid {os.getpid()}\) 8 of 8 slots"):
            publisher.publish(b"x", timeout=0)


def test_slots_that_can_have_nobody_are_refused(name: str) -> None:
    with pytest.raises(penstock.InvalidArgument, match="slots=2 must be between 3 and"):
        shm.Publisher(name, slots=2)
    with shm.Publisher(name, slots=3) as publisher, shm.Subscriber(name) as subscriber:
        publisher.publish(b"x")
        assert subscriber.read(0) is not None
        with pytest.raises(penstock.CapacityError, match="one is kept for the next message"):
            shm.Subscriber(name)


def test_a_time_limit_of_many(name: str) -> None:
    with shm.Publisher(name, slots=8, reliable=True) as publisher, shm.Subscriber(name, reliable=True):
        with pytest.raises(TimeoutError) as failed:
            publisher.publish_many([b"x"] * 20, timeout=0.01)
        assert failed.value.published == 8  # type: ignore[attr-defined]
        with pytest.raises(TypeError):
            publisher.publish_many([b"x"], metadata=b"")  # type: ignore[call-arg]
        with pytest.raises(penstock.InvalidArgument):
            publisher.publish_many([b"x"], timeout=-1)


def test_addresses_that_would_surprise_are_refused(name: str) -> None:
    for address, word in {
        f"shm:/{name}": "one slash, as in shm:/",
        f"shm:{name}?slots=eight": "slots='eight' must be a whole number",
        f"shm:{name}?reliable=perhaps": "reliable='perhaps' must be true or false",
    }.items():
        with pytest.raises(penstock.InvalidArgument, match=word):
            penstock.publisher(address)
    with pytest.raises(penstock.InvalidArgument, match="cannot be written as UTF-8"):
        shm.Publisher("/\udc80")


def test_a_weak_reference_says_what_it_is(name: str) -> None:
    with shm.Publisher(name) as publisher, shm.Subscriber(name) as subscriber:
        publisher.publish(b"x")
        message = subscriber.receive(0)
        assert repr(subscriber.weak_reference(message)) == f"<shm.WeakReference to slot 0 of {name!r}>"
