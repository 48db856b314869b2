"""What the room's pages say is so: the example runs, the tests they name exist, every requirement has a line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "rooms" / "gateway.md").read_text()
DESIGN = (ROOT / "docs" / "design" / "gateway.md").read_text()


def test_the_example_runs() -> None:
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert code is not None
    done = subprocess.run([sys.executable, "-c", code[1]], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [["boiler", n] for n in "13579"]


def test_every_test_that_is_named_exists() -> None:
    there = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"\btest_[a-z_]{12,}\b", PAGE + DESIGN)) - {"test_gateway_process"}
    assert len(named) > 30
    assert [name for name in sorted(named) if f"def {name}(" not in there and f"{name}.py" not in PAGE + DESIGN] == []


def test_every_requirement_of_the_reference_has_a_line() -> None:
    table = DESIGN.partition("## Requirements of the Azure broker")[2].partition("\n## ")[0]
    numbers = re.findall(r"(?<!\d)(\d\d_\d\d\d)\b", table)
    assert len(numbers) == len(set(numbers)) == 81
