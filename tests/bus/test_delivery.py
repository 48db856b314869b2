"""Kinds, order, subscribing, priorities: what arrives where."""

from __future__ import annotations

import pytest

from penstock.bus import Bus

LONG = 30.0
KINDS = ["callback", "queue", "fifo"]


@pytest.mark.parametrize("kind", KINDS)
def test_adding_and_removing(kind: str) -> None:
    with Bus() as bus:
        found: list[tuple[int, bytes]] = []
        subscriber = bus.subscribe(0, kind=kind, handler=lambda message: found.append((message.id, bytes(message))))

        def round_() -> list[tuple[int, bytes]]:
            found.clear()
            bus.publish(b"x", 0)
            assert bus.flush(LONG)
            if kind != "callback":
                subscriber.process_all()
            return list(found)

        assert round_() == [(0, b"x")]
        bus.remove(subscriber)
        assert round_() == []
        bus.add(subscriber)
        assert round_() == [(0, b"x")]
