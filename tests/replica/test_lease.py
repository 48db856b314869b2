"""The lease: one holder at a time by everybody's own clock, whatever is lost on the way; renewed, given back, taken over."""

from __future__ import annotations

import json
import random
import threading

import pytest

from penstock.errors import InvalidArgument, PenstockError
from penstock.replica.client import UnansweredError
from penstock.replica.lease import MARGIN, Lease
from penstock.replica.stream import Bounds

from .conftest import LONG, until
from .fake_blocks import FakeBlocks, FakeStream


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def lease(stream: FakeStream, clock: Clock, address: str = "a:1", **trouble: float) -> Lease:
    return Lease(FakeBlocks(stream, random.Random(1), **trouble), address, 1.0, clock=clock)


def test_one_leads_until_its_lease_has_ended(stream: FakeStream) -> None:
    clock = Clock()
    first, second = lease(stream, clock), lease(stream, clock, "b:2")
    assert first.take() and first.held
    assert not second.take() and not second.held
    assert second.holder is not None and second.holder.address == "a:1"
    clock.now = 0.9
    assert first.renew()
    clock.now = 1.5
    assert not second.take(), "it was renewed meanwhile"
    clock.now = 1.5 + MARGIN
    assert not first.held
    clock.now += 0.01
    assert second.take() and second.held
    assert not first.renew() and not first.held
    assert not first.take()


def test_what_was_given_back_is_taken_at_once(stream: FakeStream) -> None:
    clock = Clock()
    first, second = lease(stream, clock), lease(stream, clock, "b:2")
    assert first.take()
    assert not second.take()
    first.release()
    assert not first.held
    assert second.take()
    first.release()
    assert second.renew(), "who does not hold it gives nothing back"


def test_a_block_that_landed_without_an_answer_counts_from_when_it_was_sent(stream: FakeStream) -> None:
    clock = Clock()
    blocks = FakeBlocks(stream)
    first, second = Lease(blocks, "a:1", 1.0, clock=clock), lease(stream, clock, "b:2")
    assert first.take()
    landed = stream.last + 1
    stream.append(first._me.encode(), stream.last)
    original, blocks.append = blocks.append, lambda *_: (_ for _ in ()).throw(UnansweredError("lost"))  # type: ignore[method-assign]
    with pytest.raises(UnansweredError):
        first.renew()
    blocks.append = original  # type: ignore[method-assign]
    second.look()
    clock.now = 0.9
    assert first.renew() and stream.last == landed
    clock.now = 1.0
    assert not first.held, "others count from when the block landed"


def test_a_renewal_that_another_block_has_followed_is_none(stream: FakeStream) -> None:
    """It landed without an answer: the servers know the block still when it is sent again."""
    clock = Clock()
    blocks = FakeBlocks(stream)
    first, second = Lease(blocks, "a:1", 1.0, clock=clock), lease(stream, clock, "b:2")
    assert first.take()
    blocks.cut_answers = True
    with pytest.raises(UnansweredError):
        first.renew(offered=True)
    blocks.cut_answers = False
    assert not second.take() and second.claim()
    last = stream.last
    assert not first.renew(offered=True) and not first.held
    assert stream.last == last
    clock.now = MARGIN + 0.01
    assert second.take() and second.held


def test_a_stream_that_was_deleted_is_made_again_when_the_lease_has_ended(stream: FakeStream) -> None:
    clock = Clock()
    first, second, third = (lease(stream, clock, address) for address in ("a:1", "b:2", "c:3"))
    assert first.take() and first.renew()
    assert not second.take() and not third.take()
    stream.delete()
    with pytest.raises(UnansweredError):
        first.renew()
    for standby in (second, third):
        assert not standby.take() and not stream.deleted, "the holder knows nothing of it"
    assert first.held
    clock.now = 0.9 * MARGIN
    assert not second.take()
    clock.now = MARGIN
    assert not first.held and second.take() and second.held
    assert not third.take() and not first.take()


def test_a_signal_while_renewing_begins_leaves_nothing_to_wait_for(
    stream: FakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = lease(stream, Clock())
    assert held.take()
    monkeypatch.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        held.keep(lambda: None)
    held.release(1.0)
    assert not held.held


def test_an_own_block_of_before_is_no_lease(stream: FakeStream) -> None:
    """A server that is behind gives an old end of the stream; those that store know every block that came."""
    clock = Clock()
    blocks = FakeBlocks(stream)
    first, second = Lease(blocks, "a:1", 1.0, clock=clock), lease(stream, clock, "b:2")
    assert first.take() and first.renew() and first.renew()
    assert not second.take()
    clock.now = MARGIN + 0.01
    assert second.take()
    original, blocks.bounds = blocks.bounds, lambda: Bounds(1, 1)  # type: ignore[method-assign]
    assert not first.take() and not first.held and second.held
    blocks.bounds = original  # type: ignore[method-assign]
    assert not first.take() and second.renew()


@pytest.mark.parametrize("data", [b"", b"[]", b"7", b"{", b"\xff", b"[" * 3000, b'{"writer": 5}', b" " * 5000])
def test_a_lease_that_nobody_can_read_ends_as_any_other(stream: FakeStream, data: bytes) -> None:
    clock = Clock()
    mine = lease(stream, clock)
    stream.append(data, 0)
    assert not mine.take()
    clock.now = MARGIN + 0.01
    assert mine.take()


@pytest.mark.parametrize(("leaders", "own"), [(60.0, 0.5), (1.0, 60.0)])
def test_all_go_by_the_length_of_the_leader(stream: FakeStream, leaders: float, own: float) -> None:
    clock = Clock()
    first = Lease(FakeBlocks(stream), "a:1", leaders, clock=clock)
    second = Lease(FakeBlocks(stream), "b:2", own, clock=clock)
    assert first.take() and not second.take()
    clock.now = leaders * MARGIN
    assert not second.take()
    clock.now += 0.01
    assert not first.held and second.take()
    clock.now += own - 0.01
    assert second.held


@pytest.mark.parametrize("length", ["60", None, -1, 0, 1e9, [2]])
def test_a_length_that_cannot_be_right_is_not_believed(stream: FakeStream, length: object) -> None:
    clock = Clock()
    mine = lease(stream, clock)
    stream.append(json.dumps({"writer": "x", "address": "h:1", "lease_s": length}).encode(), 0)
    assert not mine.take()
    clock.now = MARGIN + 0.01
    assert mine.take()


def test_an_end_does_not_wait_for_a_cluster_that_does_not_answer(stream: FakeStream) -> None:
    blocks, asked, answer = FakeBlocks(stream), threading.Event(), threading.Event()
    mine = Lease(blocks, "a:1", 0.5)
    assert mine.take()

    def append(*_: object) -> None:
        asked.set()
        answer.wait(LONG)

    blocks.append = append  # type: ignore[method-assign]
    mine.keep(lambda: None)
    assert asked.wait(LONG)
    mine.release(0.01)
    assert not answer.is_set() and stream.last == 1 and not mine.held
    answer.set()
    assert mine.stop()


def test_never_two_by_anybodys_clock(stream: FakeStream, seed: int) -> None:
    """Steps of several brokers in random order, with answers and blocks lost, late, and clocks that go on meanwhile."""
    claims = 0
    for case in range(200):
        chance = random.Random(seed + case)
        stream, clock = FakeStream(), Clock()
        all_of_them = [
            Lease(FakeBlocks(stream, chance, trouble=0.3), f"h:{number}", number / 2, clock=clock)
            for number in range(1, 4)
        ]
        terms = 0
        for _ in range(300):
            clock.now += chance.random() * 0.3
            one = chance.choice(all_of_them)
            was = one.held
            try:
                if was and chance.random() < 0.05:
                    one.release()
                elif was:
                    one.renew(offered=chance.random() < 0.2)
                elif one.offered and chance.random() < 0.5:
                    claims += one.claim()
                else:
                    terms += one.take()
            except (PenstockError, OSError):
                pass
            assert sum(each.held for each in all_of_them) <= 1, f"--seed {seed}, case {case}"
        assert terms > 1
    assert claims > 200


def test_a_place_that_is_offered_is_claimed_and_had_when_the_lease_has_ended(stream: FakeStream) -> None:
    clock = Clock()
    first, second, third = (lease(stream, clock, f"{name}:1") for name in "abc")
    assert first.take() and not second.take()
    assert not second.offered and not second.claim()
    clock.now = 0.5
    assert first.renew(offered=True) and first.held and not first.offered, "it leads on"
    assert not second.take() and second.offered and second.claim()
    assert not second.held and not second.take(), "the first one may not know yet"
    assert not third.take() and not third.offered and not third.claim(), "the second one comes next"
    assert not first.renew() and not first.held
    clock.now = 1.5
    assert not second.take(), "it claims on"
    clock.now = 0.5 + MARGIN + 0.2
    assert not first.take() and not third.take() and not first.offered, "they count from the last claim"
    assert second.take() and second.held
    assert not first.take() and not third.take()


@pytest.mark.parametrize("lands", [False, True])
def test_a_claim_without_an_answer_is_no_lease(stream: FakeStream, lands: bool) -> None:
    clock = Clock()
    blocks = FakeBlocks(stream)
    first, second = lease(stream, clock), Lease(blocks, "b:2", 1.0, clock=clock)
    assert first.take() and first.renew(offered=True) and not second.take()
    original = blocks.append

    def append(data: bytes, after: int) -> None:
        if lands:
            original(data, after)
        raise UnansweredError("lost")

    blocks.append = append  # type: ignore[method-assign]
    with pytest.raises(UnansweredError):
        second.claim()
    blocks.append = original  # type: ignore[method-assign]
    assert not second.take() and first.held and not second.held
    assert first.renew() is not lands


def test_a_thread_renews_it_and_tells_when_it_is_lost(stream: FakeStream) -> None:
    blocks = FakeBlocks(stream)
    mine, lost = Lease(blocks, "a:1", 0.5), threading.Event()
    assert mine.take()
    mine.keep(lost.set)
    until(lambda: stream.last >= 3, "renewals")
    assert not lost.is_set()
    stream.append(b"{}", stream.last)  # somebody else
    assert lost.wait(LONG)
    assert not mine.held
    mine.stop()


def test_a_thread_that_gets_no_answer_tells_when_the_lease_has_ended(stream: FakeStream) -> None:
    blocks = FakeBlocks(stream)
    mine, lost = Lease(blocks, "a:1", 0.5), threading.Event()
    assert mine.take()
    blocks.trouble = 1.0
    blocks.append = lambda *_: (_ for _ in ()).throw(UnansweredError("cut off"))  # type: ignore[method-assign]
    mine.keep(lost.set)
    assert lost.wait(LONG)
    assert not mine.held
    mine.release()
    assert stream.last == 1


def test_the_end_of_a_lease_is_told_while_a_renewal_waits_for_its_answer(stream: FakeStream) -> None:
    """And what is answered after that is not the beginning of another one that somebody keeps."""
    blocks = FakeBlocks(stream)
    mine, lost, answer = Lease(blocks, "a:1", 0.5), threading.Event(), threading.Event()
    stored = blocks.append

    def append(data: bytes, after: int) -> None:
        answer.wait(LONG)
        stored(data, after)

    assert mine.take()
    blocks.append = append  # type: ignore[method-assign]
    mine.keep(lost.set)
    try:
        assert lost.wait(LONG) and not answer.is_set()
        assert not mine.held
    finally:
        answer.set()
        assert mine.stop()
    assert stream.last == 2, "the one that was waiting"


def test_a_lease_has_a_sensible_length(stream: FakeStream) -> None:
    for length in (0.0, -1.0, float("nan"), 1e9):
        with pytest.raises(InvalidArgument, match="to 3600 seconds"):
            Lease(FakeBlocks(stream), "a:1", length)
