from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.bus import Bus, SlabAllocator

LONG = 30.0


class House:
    """A fresh bus with a slab of 32 blocks of 8 bytes, ids 0 to 7 public, and what its handlers received."""

    def __init__(self) -> None:
        self.bus = Bus("house", on_error=self.failed)
        self.slab = SlabAllocator(8, 32, name="house")
        self.bus.add_allocator(self.slab)
        self.found: dict[Any, list[int]] = {}
        self.order: list[Any] = []
        self.errors: list[BaseException] = []

    def failed(self, subscriber: Any, message: Any, error: BaseException) -> None:
        self.errors.append(error)

    def subscribe(self, key: Any, *ids: int, kind: str = "callback", **options: Any) -> Any:
        self.found[key] = []

        def handler(message: Any) -> None:
            self.found[key].append(message.id)
            self.order.append(key)

        options.setdefault("max_public_id", 7)
        return self.bus.subscribe(*ids, kind=kind, handler=handler, **options)

    def publish(self, *ids: int) -> None:
        for number in ids:
            draft = self.bus.allocate(number, 8, self.slab)
            assert draft is not None
            draft.write(bytes([number] * 8))
            self.bus.publish(draft)
            del draft
        assert self.bus.flush(LONG)

    def handle(self, *subscribers: Any) -> None:
        for subscriber in subscribers:
            if type(subscriber).__name__ != "CallbackSubscriber":
                subscriber.process_all()

    def take(self, key: Any) -> list[int]:
        taken, self.found[key] = self.found[key], []
        return taken


@pytest.fixture
def house() -> Iterator[House]:
    opened = House()
    yield opened
    assert not opened.errors
    opened.bus.close()
    assert opened.slab.in_use == 0, opened.slab.outstanding()
