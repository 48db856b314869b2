"""What ARCHITECTURE.md says of rooms and files holds: the layers that import-linter checks, the files that know Python."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def drawn() -> list[set[str]]:
    """The names on each line of the picture: single words, with blanks of two or more before the explanation."""
    picture = re.search(r"## Rooms\n\n```\n(.*?)```", (ROOT / "ARCHITECTURE.md").read_text(), re.DOTALL)
    assert picture is not None
    lines = [re.split(r" {4,}", line, maxsplit=1)[0].split() for line in picture[1].splitlines()]
    return [set(names) for names in lines if names[0] != "_core"]


def checked() -> list[set[str]]:
    """The layers of the contract, from the top; ``durable`` is one concept in three modules."""
    contract = configparser.ConfigParser()
    contract.read(ROOT / ".importlinter")
    layers = contract["importlinter:contract:rooms"]["layers"].split("\n")
    found = [set(re.findall(r"\w+", layer)) for layer in layers if layer.strip()]
    return [layer for layer in found if layer not in ({"durable_subscriber"}, {"durable_publisher"})]


def test_the_picture_of_the_rooms_is_what_is_checked() -> None:
    assert drawn() == checked()


def test_only_the_named_files_of_a_native_room_know_python() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    said = re.search(r"In `native/ROOM` only the\s+files (.*?) know Python; in `native/bus`,.*?Python objects, (.*?) do too", text, re.DOTALL)
    assert said is not None
    named, of_the_bus = (re.findall(r"`([^`]+)`", part) for part in said.groups())
    native = ROOT / "native"
    rooms = [folder for folder in native.iterdir() if folder.is_dir() and folder.name not in ("tests", "message")]
    sources = [path for room in rooms for path in room.rglob("*.[ch]pp")]
    knowing = {path for path in sources if re.search(r"Python\.h|PyObject|nanobind", path.read_text())}
    allowed = {path for path in knowing if any(path.match(name) for name in named)}
    assert {path.relative_to(native) for path in knowing - allowed} == {Path("bus", name) for name in of_the_bus}
