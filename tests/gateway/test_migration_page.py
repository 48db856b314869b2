"""docs/howto/migrate.md: its files run, with the module that it shows."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway import Gateway
from tests.gateway.conftest import eventually
from tests.gateway.test_field_modules import Taker

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "migrate.md").read_text()
FILES = re.findall(r"^```json\n(.*?)^```", PAGE, re.M | re.S)


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    code = re.search(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    assert code is not None
    (tmp_path / "identity_map.py").write_text(code[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "identity_map", raising=False)
    return tmp_path


@pytest.fixture
def uplink() -> Iterator[Taker]:
    made = Taker()
    yield made
    made.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_hello_world(there: Path) -> None:
    (there / "hello_world.json").write_text(FILES[0])
    with Gateway.from_file("hello_world.json"):
        eventually(lambda: lines(there / "log.txt"))
    assert lines(there / "log.txt")[0]["properties"]["helloWorld"] == "from the gateway"


def test_the_simulated_device_reaches_the_uplink_under_its_name(
    there: Path, uplink: Taker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPLINK", uplink.url)
    (there / "simulated_device.json").write_text(FILES[1])
    with Gateway.from_file("simulated_device.json"):
        eventually(lambda: uplink.posted)
        eventually(lambda: {"device", "address", "map"} <= {line["source"] for line in lines(there / "devices.txt")})
    mapped = [line for line in lines(there / "devices.txt") if line["source"] == "map"]
    assert mapped[0]["properties"]["deviceName"] == "boiler"
    assert mapped[0]["properties"]["macAddress"] == "01:01:01:01:01:01"
