"""Writes the tables of docs/guarantees.md from docs/guarantees.toml."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "guarantees.toml"
PAGE = ROOT / "docs" / "guarantees.md"
SHORT = ("returned", "lost", "order", "crash")


@dataclass(frozen=True)
class Part:
    """One statement of a cell, and the tests that show it (none, where nothing is promised)."""

    says: str
    shown: tuple[str, ...]
    promise: bool


@dataclass(frozen=True)
class Cell:
    """What one reach promises on one question."""

    reach: str
    question: str
    parts: tuple[Part, ...]


def cells(text: str) -> Iterator[Cell]:
    """Every cell of the table. Raises ValueError where a reach does not answer a question, or a promise has no test."""
    table: dict[str, Any] = tomllib.loads(text)
    names = [question["name"] for question in table["questions"]]
    for reach in table["reaches"]:
        if unknown := reach.keys() - {*names, "title"}:
            raise ValueError(f"{reach['title']}: {', '.join(sorted(unknown))} is no question of the table")
        for name in names:
            if not reach.get(name):
                raise ValueError(f"{reach['title']}: there is no answer to {name!r}")
            parts = tuple(
                Part(
                    says=part["says"],
                    shown=tuple(f"tests/{place}" for place in part.get("shown", ())),
                    promise=part.get("promise", True),
                )
                for part in reach[name]
            )
            for part in parts:
                if part.promise != bool(part.shown):
                    wrong = "a promise without a test" if part.promise else "a test of no promise"
                    raise ValueError(f"{reach['title']}, {name}: {part.says!r} is {wrong}")
            yield Cell(reach["title"], name, parts)


def _rows(head: Sequence[str], rows: Iterator[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def tables(text: str) -> dict[str, list[str]]:
    """The tables of the page, by name: the short form, the rest of the questions, the proofs."""
    titles = {question["name"]: question["title"] for question in tomllib.loads(text)["questions"]}
    found = {(cell.reach, cell.question): cell.parts for cell in cells(text)}
    reaches = list(dict.fromkeys(reach for reach, _ in found))

    def short(names: Sequence[str]) -> list[str]:
        said = {place: "; ".join(part.says for part in parts) for place, parts in found.items()}
        return _rows(["reach", *(titles[name] for name in names)], ([r, *(said[r, n] for n in names)] for r in reaches))

    proofs = (
        [reach, titles[name], part.says, ", ".join(f"`{place}`" for place in part.shown)]
        for (reach, name), parts in found.items()
        for part in parts
        if part.promise
    )
    return {
        "short": short(SHORT),
        "more": short([name for name in titles if name not in SHORT]),
        "proofs": _rows(["reach", "question", "promise", "shown by"], proofs),
    }


def page(before: str, text: str) -> str:
    """The page with the tables of ``text`` between their comments."""
    for name, lines in tables(text).items():
        between = re.compile(rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)", re.DOTALL)
        if not between.search(before):
            raise ValueError(f"{PAGE.name} has no place for the table {name!r}")
        before = between.sub(lambda match, lines=lines: match[1] + "\n".join(lines) + "\n" + match[2], before)
    return before


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), TABLE.read_text()))
