"""A million inputs to the broker's parser: none crashes it, each is the same however it is cut. ``PENSTOCK_FUZZ=N`` sets how many."""

from __future__ import annotations

import os
import random

from tests.broker.test_protocol_fuzz import WORDS, drain, merged

from penstock._core.broker import Scanner
from penstock.broker import words

COUNT = int(os.environ.get("PENSTOCK_FUZZ", "1000000"))


def test_a_million_inputs(seed: int) -> None:
    chooser = random.Random(seed)
    fed = 0
    while fed < COUNT:
        grammar = chooser.choice(["raw", "hello", "deliveries"])
        scanner, pieces = Scanner(grammar, 1000), Scanner(grammar, 1000)  # type: ignore[arg-type]
        whole, cut = b"", []
        for _ in range(chooser.randrange(1, 200)):
            data = chooser.choice(WORDS) if chooser.random() < 0.8 else chooser.randbytes(chooser.randrange(1, 40))
            whole += data
            fed += 1
            pieces.feed(data)
            if not (cut and cut[-1][0] == words.BROKEN):
                cut += merged(drain(pieces))
        scanner.feed(whole)
        assert merged(drain(scanner)) == cut, whole
