"""Links are counted, for who looks from outside: what a source sent, what a filter kept back."""

from __future__ import annotations

import os
from typing import Any

from penstock._core import counters_read
from penstock.gateway import Filter, Gateway
from tests.gateway.conftest import Collector, eventually


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
            gateway.module("source").publish(b"x", {"unit": "CF"[number % 2]})
        gateway.add_link("source", "late")
        for _ in range(4):
            gateway.module("source").publish(b"x", {"unit": "F"})
        eventually(lambda: len(gateway.module("late").got) == 4)

        def counted() -> bool:
            found = links()
            return (
                [found[f"source -> {sink}"]["delivered"] for sink in ("early", "late", "picky")] == [10, 4, 3]
                and found["source -> picky"]["matched"] == 10
                and found["source -> picky"]["dropped"] == {"filtered": 7}
            )

        eventually(counted)
        gateway.remove_link("source", "late")
        assert "source -> late" not in links()
    assert not links()
