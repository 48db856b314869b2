# ruff: noqa: SIM117 -- nesting shows who outlives whom
"""Virtual channels on a multiplexer."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import shm

LONG = 30.0


def texts(subscriber: shm.Subscriber) -> list[bytes]:
    found = []
    while (message := subscriber.read(0)) is not None:
        found.append(bytes(message))
        message.release()
    return found


def test_each_sees_its_own_and_the_multiplexer_all(name: str) -> None:
    mux = f"{name}/mux"
    one, two = shm.Publisher("/one", mux=mux), shm.Publisher("/two", mux=mux)
    of_one, of_two, of_all = shm.Subscriber("/one", mux=mux), shm.Subscriber("/two", mux=mux), shm.Subscriber(mux)
    assert one.vchan_id == of_one.vchan_id == 0 and two.vchan_id == of_two.vchan_id == 1
    for i in range(5):
        one.publish(b"one %d" % i)
        two.publish(b"two %d" % i)
    assert texts(of_one) == [b"one %d" % i for i in range(5)]
    ordinals = []
    while (message := of_two.read(0)) is not None:
        ordinals.append((message.ordinal, message.vchan_id))
        message.release()
    assert ordinals == [(i, 1) for i in range(1, 6)]
    ids = []
    while (message := of_all.read(0)) is not None:
        ids.append(message.vchan_id)
        message.release()
    assert ids == [0, 1] * 5
    (channel,) = (channel for channel in shm.channels() if channel.name == mux)
    assert channel.mux and dict(channel.vchans) == {0: "/one", 1: "/two"}
    for handle in (one, two, of_one, of_two, of_all):
        handle.close()


def test_ids_given_and_refused(name: str) -> None:
    mux = f"{name}/mux"
    with shm.Publisher("/a", mux=mux, vchan_id=32) as publisher:
        assert publisher.vchan_id == 32
        with pytest.raises(penstock.RefusedError, match="32 belongs to '/a'"):
            shm.Publisher("/b", mux=mux, vchan_id=32)
        with pytest.raises(penstock.RefusedError, match=r"has vchan_id 32, not 5: .* give the same vchan_id on both"):
            shm.Subscriber("/a", mux=mux, vchan_id=5)
        for bad in (-1, shm.MAX_VCHAN_ID):
            with pytest.raises(penstock.InvalidArgument, match="vchan_id"):
                shm.Publisher("/c", mux=mux, vchan_id=bad)
        with pytest.raises(penstock.InvalidArgument, match="needs mux"):
            shm.Publisher("/c", vchan_id=1)
        with pytest.raises(penstock.RefusedError, match="is a multiplexer"):
            shm.Publisher(mux)
        with pytest.raises(penstock.RefusedError, match="slots=9"):
            shm.Publisher("/d", mux=mux, slots=9)
        with pytest.raises(penstock.RefusedError, match="slot_size"):
            shm.Publisher("/d", mux=mux, slot_size=8192)
    with shm.Publisher(f"{name}/plain"):
        with pytest.raises(penstock.RefusedError, match="ordinary channel"):
            shm.Publisher("/a", mux=f"{name}/plain")


def test_subscribers_may_come_first(name: str) -> None:
    mux = f"{name}/mux"
    with shm.Subscriber(mux) as everything, shm.Subscriber("/late", mux=mux) as subscriber:
        assert subscriber.read(0) is None
        with shm.Publisher("/late", mux=mux, slots=32) as publisher:
            publisher.publish(b"x")
            assert texts(subscriber) == [b"x"] and texts(everything) == [b"x"]


def test_losses_are_counted_per_virtual_channel(name: str) -> None:
    mux = f"{name}/mux"
    with shm.Publisher("/busy", mux=mux, slots=8) as busy, shm.Publisher("/rare", mux=mux) as rare:
        with shm.Subscriber("/rare", mux=mux, max_active_messages=1) as subscriber:
            for i in range(3):
                rare.publish(b"lost %d" % i)
            for _ in range(20):  # the oldest slot goes, whatever its virtual channel
                busy.publish(b"x")
            rare.publish(b"seen")
            assert texts(subscriber) == [b"seen"]
            ledger = subscriber.ledger
            assert (ledger.matched, ledger.delivered, dict(ledger.dropped)) == (4, 1, {"overflow": 3})
            rare.publish(b"lost too")
            for _ in range(20):
                busy.publish(b"x")
            assert texts(subscriber) == []
            assert subscriber.ledger.lost == 4 and subscriber.ledger.balanced


def test_wait_wakes_for_its_own_only(name: str) -> None:
    mux = f"{name}/mux"
    with shm.Publisher("/a", mux=mux) as mine, shm.Publisher("/b", mux=mux) as others:
        with shm.Subscriber("/a", mux=mux) as subscriber:
            timer = threading.Timer(0.02, lambda: [others.publish(b"x") for _ in range(10)])
            timer.start()
            assert subscriber.wait(0.2) is False
            timer.join()
            timer = threading.Timer(0.02, mine.publish, args=(b"y",))
            timer.start()
            assert subscriber.wait(LONG) is True
            timer.join()
            assert texts(subscriber) == [b"y"]


def test_a_reliable_reader_of_one_does_not_stop_the_other(name: str) -> None:
    mux = f"{name}/mux"
    options = {"mux": mux, "reliable": True}
    with shm.Publisher("/slow", slots=16, timeout=0.05, **options) as slow, shm.Publisher("/fast", timeout=LONG, **options) as fast:  # type: ignore[arg-type]
        sleeper = shm.Subscriber("/slow", max_active_messages=1, **options)  # type: ignore[arg-type]
        reader = shm.Subscriber("/fast", max_active_messages=1, **options)  # type: ignore[arg-type]
        slow.publish(b"kept")
        for i in range(20):  # far more than there are slots, less than the ring holds
            fast.publish(b"%d" % i)
            assert texts(reader) == [b"%d" % i]
        assert texts(sleeper) == [b"kept"]
        for _ in range(200):
            fast.publish(b"x")
            assert texts(reader) == [b"x"]
            assert texts(sleeper) == []
        sleeper.close()
        reader.close()


def test_a_file_of_ids(tmp_path: Path) -> None:
    path = tmp_path / "vchans"
    shm.write_vchans(path, {3: "/c", 1: "/a b"})
    assert shm.read_vchans(path) == {1: "/a b", 3: "/c"}
    for wrong in ({"/a": 1}, {1: "a"}, {-1: "/a"}, {1: "/a", 2: "/a"}, {shm.MAX_VCHAN_ID: "/a"}, {1: "/a#b"}, {1: "/a\n2 /b"}):
        with pytest.raises(penstock.InvalidArgument, match="vchans: "):
            shm.write_vchans(path, wrong)  # type: ignore[arg-type]
    assert shm.read_vchans(path) == {1: "/a b", 3: "/c"}, "as it was"
    path.write_text("# ours\n1 /a\n1 /b\n")
    with pytest.raises(penstock.InvalidArgument, match=r":3: .*second time"):
        shm.read_vchans(path)
    path.write_text("x /a\n")
    with pytest.raises(penstock.InvalidArgument, match=":1:"):
        shm.read_vchans(path)


def test_each_virtual_channel_has_its_own_type(name: str) -> None:
    mux = f"{name}/mux"
    with shm.Publisher("/image", mux=mux, type="image"), shm.Publisher("/text", mux=mux, type="text") as publisher:
        with shm.Subscriber("/text", mux=mux, type="text") as subscriber, shm.Subscriber("/image", mux=mux) as other:
            assert (subscriber.type, other.type) == ("text", "image")
            publisher.publish(b"x")
            assert texts(subscriber) == [b"x"]
        with pytest.raises(penstock.RefusedError, match=r"'/text' on .* carries type 'text', not 'image'"):
            shm.Subscriber("/text", mux=mux, type="image")
        with pytest.raises(penstock.RefusedError, match="carries type 'image', not 'text'"):
            shm.Publisher("/image", mux=mux, type="text")
        with shm.Subscriber("/later", mux=mux, type="sound"):  # who comes first may say it
            with pytest.raises(penstock.RefusedError, match="'sound'"):
                shm.Publisher("/later", mux=mux, type="text")


def test_ids_are_given_back(name: str) -> None:
    mux = f"{name}-mux"
    with shm.Publisher(f"{name}-keep", slots=16, mux=mux) as keep:
        for i in range(shm.MAX_VCHAN_ID + 50):
            with shm.Publisher(f"{name}-{i}", mux=mux) as publisher:
                assert publisher.vchan_id is not None and publisher.publish(b"x") == 1
        (channel,) = (channel for channel in shm.channels() if channel.name == mux)
        assert list(channel.vchans.values()) == [keep.name]


def test_an_id_that_is_used_again_shows_nothing_of_the_name_before(name: str) -> None:
    mux = f"{name}-mux"
    with shm.Publisher(f"{name}-keep", slots=16, mux=mux):
        with shm.Publisher(f"{name}-a", mux=mux, vchan_id=7) as publisher:
            publisher.publish(b"of a")
        with shm.Publisher(f"{name}-b", mux=mux, vchan_id=7) as publisher:
            assert publisher.publish(b"of b") == 1
            with shm.Subscriber(f"{name}-b", mux=mux) as subscriber:
                found = subscriber.find(0)
                assert found is not None and bytes(found) == b"of b"
                assert [bytes(message) for message in subscriber.read_many(8, 0)] == [b"of b"]
                assert subscriber.ledger.balanced


def test_a_name_that_comes_back_goes_on(name: str) -> None:
    mux = f"{name}-mux"
    with shm.Publisher(f"{name}-keep", slots=16, mux=mux):
        with shm.Publisher(f"{name}-a", mux=mux) as publisher:
            identity = publisher.vchan_id
            assert publisher.publish(b"first") == 1
        with shm.Publisher(f"{name}-a", mux=mux) as publisher, shm.Subscriber(f"{name}-a", mux=mux) as subscriber:
            assert publisher.vchan_id == identity and publisher.publish(b"second") == 2
            assert [bytes(message) for message in subscriber.read_many(8, 0)] == [b"first", b"second"]


@pytest.mark.parametrize("kind", [shm.Publisher, shm.Subscriber])
def test_one_name_is_one_channel(name: str, kind: Any) -> None:
    one, two = f"{name}-one", f"{name}-two"
    with shm.Publisher(name, mux=one):
        with pytest.raises(penstock.RefusedError, match=f"virtual channel on '{one}' already"):
            kind(name, mux=two)
        with pytest.raises(penstock.RefusedError, match=f"virtual channel on '{one}' already"):
            kind(name)
        with pytest.raises(penstock.RefusedError, match=f"'{name}' is a virtual channel on '{one}' already"):
            kind(f"{name}-of-it", mux=name)
    with shm.Subscriber(name):
        with pytest.raises(penstock.RefusedError, match="an ordinary channel already"):
            kind(name, mux=one)
    with shm.Subscriber(f"{name}/one", mux=name):
        with pytest.raises(penstock.RefusedError, match=f"'{name}' is a multiplexer already"):
            kind(name, mux=one)
    with kind(name, mux=two):
        pass
    with kind(name):
        pass


def test_waiting_is_not_ended_by_siblings(name: str) -> None:
    """However far they have gone round the ring: what is theirs, or gone, is nothing to read."""
    mux = f"{name}-mux"
    with shm.Publisher(f"{name}-a", slots=8, mux=mux) as mine, shm.Publisher(f"{name}-b", mux=mux) as other:
        with shm.Subscriber(f"{name}-a", mux=mux) as subscriber:
            for count in (1, 7, 8, 9, 20, 63, 64, 65, 200, 1000):  # the ring has 64 places
                other.publish_many([b"theirs"] * count)
                assert not subscriber.wait(0), count
                assert subscriber.read(0) is None
                other.publish_many([b"theirs"] * count)
                mine.publish(b"mine")
                assert subscriber.wait(0), count
                message = subscriber.read(0)
                assert message is not None and bytes(message) == b"mine"
                del message
            mine.publish(b"gone before it was read")
            other.publish_many([b"theirs"] * 100)
            assert not subscriber.wait(0) and subscriber.read(0) is None
            assert subscriber.ledger.dropped == {"overflow": 1} and subscriber.ledger.balanced
