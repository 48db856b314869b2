"""Links are counted, for who looks from outside: what a source sent, what a filter kept back."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest

from penstock._core import counters_read
from penstock.gateway import Filter, Gateway
from tests.gateway.conftest import Collector, eventually


def told() -> list[str]:
    """What the rows say that stand for links nobody counts."""
    return [b["state"] for b in counters_read() if (b["pid"], b["kind"]) == (os.getpid(), "links")]


def links() -> dict[str, dict[str, Any]]:
    mine = (block for block in counters_read() if (block["pid"], block["kind"]) == (os.getpid(), "link"))
    return {block["name"]: block for block in mine}


def test_what_a_link_carried_is_counted_from_its_joining() -> None:
    with Gateway() as gateway:
        for name in ("source", "early", "late", "picky"):
            gateway.add_module(name, Collector)
        gateway.start()
        gateway.add_link("source", "early")
        gateway.add_link("source", "picky", Filter(properties={"unit": "C"}))
        for number in range(6):
            gateway.module("source").publish(b"xyz", {"unit": "CF"[number % 2]})
        gateway.add_link("source", "late")
        for _ in range(4):
            gateway.module("source").publish(b"xyz", {"unit": "F"})
        eventually(lambda: len(gateway.module("late").got) == 4)

        def counted() -> bool:
            found = links()
            return (
                [found[f"source -> {sink}"]["delivered"] for sink in ("early", "late", "picky")] == [10, 4, 3]
                and [found[f"source -> {sink}"]["bytes"] for sink in ("early", "late", "picky")] == [30, 12, 9]
                and found["source -> picky"]["matched"] == 10
                and found["source -> picky"]["dropped"] == {"filtered": 7}
            )

        def modules() -> dict[str, int]:
            mine = [block for block in counters_read() if (block["pid"], block["kind"]) == (os.getpid(), "module")]
            return {b["name"]: b["bytes"] for b in mine}

        eventually(counted)
        eventually(lambda: modules() == {"source": 30, "early": 30, "late": 12, "picky": 9})
        gateway.remove_link("source", "late")
        assert "source -> late" not in links()
    assert not links()


class Slow(Collector):
    """Takes a message for each permission it is given."""

    allowed = threading.Semaphore(0)

    def receive(self, message: Any) -> None:
        self.allowed.acquire()
        super().receive(message)


def test_the_count_of_a_slow_module_moves_within_its_batch() -> None:
    with Gateway() as gateway:
        gateway.add_module("source", Collector)
        gateway.add_module("slow", Slow)
        gateway.start()
        gateway.add_link("source", "slow")
        try:
            for _ in range(10):
                gateway.module("source").publish(b"xyz")

            def slow() -> dict[str, Any]:
                return next(b for b in counters_read() if (b["pid"], b["name"]) == (os.getpid(), "slow"))

            for done in (3, 5):
                began = time.time_ns()
                Slow.allowed.release(done - slow()["delivered"])
                eventually(lambda done=done: slow()["delivered"] == done)  # type: ignore[misc]
                assert slow()["last_ns"] >= began and slow()["matched"] == done
        finally:
            Slow.allowed.release(100)


def test_links_past_the_bound_are_carried_and_told_by_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gateway.broker.MAX_FLOWS", 2)
    with Gateway() as gateway:
        for name in ("source", *"abcd"):
            gateway.add_module(name, Collector)
        gateway.start()
        for name in "ab":
            gateway.add_link("source", name)
        assert told() == []
        for name in "cd":
            gateway.add_link("source", name)
        assert len(links()) == 2 and told() == ["2 more, carried and not counted"]
        gateway.module("source").publish(b"x", {})
        eventually(lambda: all(len(gateway.module(name).got) == 1 for name in "abcd"))
        gateway.remove_link("source", "c")
        assert told() == ["1 more, carried and not counted"]
        gateway.remove_link("source", "a")
        gateway.remove_link("source", "d")
        gateway.add_link("source", "d")
        assert set(links()) == {"source -> b", "source -> d"} and told() == []
        gateway.add_link("source", "c")
        assert told()
    assert not told()
