"""The table of docs/reaches.md says nothing that no case looks at, and no reach is left out."""

from __future__ import annotations

import re
from pathlib import Path

from .reaches import REACHES, capabilities

NEEDS = re.compile(r'pytest\.mark\.needs\("([^)]*)"\)')


def test_every_capability_has_a_case_and_every_reach_is_opened() -> None:
    rows = capabilities()
    assert set(rows) == set(REACHES)
    texts = [path.read_text() for path in Path(__file__).parent.glob("test_*.py")]
    looked_at = {name for text in texts for names in NEEDS.findall(text) for name in names.split('", "')}
    assert {name for row in rows.values() for name in row} - {"set on"} == looked_at
