"""A tail on its way to the page: what was read is shown, and a tail that has ended says so."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")

from penstock.errors import ClosedError
from penstock.monitor import server


class Visitor:
    """As much of a request as a tail looks at."""

    async def is_disconnected(self) -> bool:
        return False


class Source:
    """Numbered records, so many and then an error; ``closed`` when the tail has let go of it."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.closed = threading.Event()
        self._records = self._run(count, error)

    def _run(self, count: int, error: Exception | None) -> Iterator[dict[str, Any]]:
        for number in range(count):
            yield {"number": number}
        if error is not None:
            raise error

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._records

    def close(self) -> None:
        self.closed.set()


async def shown(source: Source, stall: bool = False) -> list[dict[str, Any]]:
    """All that the page gets, when it takes nothing until the tail has ended (``stall``), or at once."""
    relay = server._relay(Visitor(), {"opened": "x"}, source, lambda: False)  # type: ignore[arg-type]
    records = [json.loads((await anext(relay)).removeprefix("data: "))]
    if stall:
        assert await asyncio.to_thread(source.closed.wait, 30)
    quiet = 0
    async for event in relay:
        if event.startswith("data: "):
            records.append(json.loads(event.removeprefix("data: ")))
        else:
            quiet += 1
            assert quiet < 20, f"the tail has ended, and the page hears {event!r} for ever after {records[-1]}"
    return records


def test_a_page_that_stalls_is_told_that_its_tail_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STALLED_S", 0.2)
    records = asyncio.run(shown(Source(1000), stall=True))
    assert records[1:-1] == [{"number": number} for number in range(256)]
    assert "the page took no message" in records[-1]["error"]


@pytest.mark.parametrize("error", [ClosedError("the channel went"), ValueError("odd"), None])
def test_what_came_before_the_end_is_shown_and_then_the_reason(error: Exception | None) -> None:
    records = asyncio.run(shown(Source(300, error)))
    assert records[1:-1] == [{"number": number} for number in range(300)]
    assert records[-1] == {"error": str(error) if error else "ended"}
