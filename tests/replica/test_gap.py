"""Thousands of blocks that a stream has lost are passed over by one question to its leader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.replica.stream import JetStream, StreamError, Target


class Gappy(JetStream):
    """Blocks 1 to 5 and 5000 to 5003; a replica gives batches up to the first gap, as it does in truth."""

    def __init__(self) -> None:
        super().__init__(Target.parse("nats://127.0.0.1:1/s"))
        self.there = [*range(1, 6), *range(5000, 5004)]
        self.questions = 0

    def _batch(self, first: int, most: int) -> Iterator[tuple[int, bytes]]:
        self.questions += 1
        while first in self.there and most:
            yield first, b"%d" % first
            first, most = first + 1, most - 1

    def _ask(self, verb: str, question: dict[str, Any]) -> dict[str, Any]:
        self.questions += 1
        found = [each for each in self.there if each >= question["seq"]]
        if found and (question.get("next_by_subj") == self.subject or found[0] == question["seq"]):
            return {"message": {"seq": found[0], "data": "eA=="}}
        failure = StreamError("no message found")
        failure.number = 10037  # type: ignore[attr-defined]
        raise failure


def test_a_gap_is_passed_over_at_once() -> None:
    blocks = Gappy()
    assert [sequence for sequence, _ in blocks.read_range(1, 6000)] == blocks.there
    assert blocks.questions < 12
    assert [sequence for sequence, _ in blocks.read_range(3, 5001)] == [3, 4, 5, 5000, 5001]
    assert [*blocks.read_range(6, 4999)] == []
    assert blocks.read(5) == b"x" and blocks.read(6) is None
