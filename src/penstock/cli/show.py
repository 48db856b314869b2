"""How commands print numbers and tables: for people on a terminal, plain when piped, JSON for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING, Any

from penstock.observe.latency import BOUNDS_NS
from penstock.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["bytes_text", "console", "count_text", "latency_text", "print_json", "rate_text", "seconds_text", "table"]

_PREFIXES = ("", "k", "M", "G", "T")


def console(stderr: bool = False) -> Console:
    """A console that is as wide as the terminal, and wide enough for every column when there is none.

    What is no text to print in a string is escaped: names come from other processes, files and peers.
    """
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:  # rich would end the process with code 1
            raise BrokenPipeError

        def print(self, *objects: Any, **options: Any) -> None:
            super().print(*(printable(item) if isinstance(item, str) else item for item in objects), **options)

    stream = sys.stderr if stderr else sys.stdout
    return Piped(
        stderr=stderr, width=None if stream.isatty() else 200, highlight=False, soft_wrap=not stream.isatty()
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = (), title: str = "") -> Table:
    """A table without a frame; the columns named in ``right`` are aligned to the right."""
    from rich.markup import escape
    from rich.table import Table

    made = Table(box=None, header_style="bold", pad_edge=False, title=title or None, title_justify="left")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    for row in rows:
        made.add_row(*(escape(printable(cell)) for cell in row))
    return made


def print_json(value: Any, stream: IO[str] | None = None) -> None:
    """One line of JSON, on standard output where nothing else is said."""
    print(json.dumps(value), file=stream, flush=True)


def _scaled(value: float, step: float) -> tuple[float, str]:
    for prefix in _PREFIXES:
        if abs(value) < step or prefix == _PREFIXES[-1]:
            return value, prefix
        value /= step
    raise AssertionError


def rate_text(messages_hz: float) -> str:
    """``1.23 k/s``."""
    value, prefix = _scaled(messages_hz, 1000)
    return f"{value:.3g} {prefix}/s" if value < 999.5 else f"{value:.0f} {prefix}/s"


def count_text(count: int) -> str:
    """All digits, in groups of three."""
    return f"{count:,}"


def bytes_text(count: float, per: str = "") -> str:
    """``1.5 MB``; ``per`` is added to the unit."""
    value, prefix = _scaled(float(count), 1000)
    number = f"{value:.0f}" if value >= 100 or not prefix else f"{value:.3g}"
    return f"{number} {prefix}B{per}"


def latency_text(latency_ns: float) -> str:
    """A latency out of the counts by size, whose last bucket has no end."""
    if latency_ns >= BOUNDS_NS[-1]:
        return f"> {BOUNDS_NS[-1] / 1e9:.0f} s"
    return seconds_text(latency_ns / 1e9)


def seconds_text(seconds: float | None) -> str:
    """A duration in the unit that suits it; a dash for None."""
    if seconds is None:
        return "-"
    for bound, factor, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "us"), (1.0, 1e3, "ms"), (120.0, 1.0, "s")):
        if abs(seconds) < bound:
            return f"{seconds * factor:.3g} {unit}"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.1f} d"
