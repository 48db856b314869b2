"""Every test that the documents name as a proof exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@pytest.mark.parametrize("page", ["docs/security.md", "docs/guarantees.md"])
def test_every_test_that_is_named_exists(page: str) -> None:
    named = NAMED.findall((ROOT / page).read_text())
    assert len(named) > 20
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / file).exists() or not re.search(rf"def {name}\(", (ROOT / file).read_text())
    ]
    assert missing == []
