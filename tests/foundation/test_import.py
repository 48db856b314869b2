"""Importing penstock is light, whatever is installed beside it."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = {"numpy", "pyarrow", "pyspark", "pandas", "nicegui", "starlette", "typer", "rich", "asyncio", "penstock._core"}


def modules_after(code: str) -> set[str]:
    program = f"import sys, json\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    return set(json.loads(output))


def test_plain_import_loads_nothing_heavy() -> None:
    assert modules_after("import penstock") & HEAVY == set()


def test_native_code_comes_with_the_first_message_type() -> None:
    assert "penstock._core" in modules_after("import penstock; penstock.Message")


def test_import_costs_less_than_starting_python_ten_times() -> None:
    """A ratio, not a time: importing adds little to what an empty interpreter imports anyway."""
    plain = modules_after("")
    assert len(modules_after("import penstock") - plain) < 80


def test_rooms_are_loaded_when_they_are_named() -> None:
    code = (
        "import sys, penstock; assert not [name for name in sys.modules if name.startswith('penstock.s')"
        " and name.count('.') == 1 and name not in ('penstock.secrecy', 'penstock.system')], sys.modules;"
        "penstock.spark.session; penstock.shm.publisher; penstock.tcp.subscriber; penstock.journal; penstock.bus"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
