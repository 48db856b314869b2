"""The rooms that ARCHITECTURE.md draws are the layers that import-linter checks, in the same order."""

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
