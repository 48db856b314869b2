"""How commands print numbers and tables: for people on a terminal, plain when piped, JSON for machines."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any

from rich.cells import cell_len, set_cell_size

from penstock.observe.latency import BOUNDS_NS
from penstock.printable import printable
from penstock.quantities import number_of

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

__all__ = [
    "Cell", "age_text", "bytes_text", "columns_of", "console", "count_text", "latency_text", "number_of",
    "print_indented", "print_json", "rate_text", "seconds_text", "table", "watched",
]  # fmt: skip

#: Text, or text and its style.
Cell = str | tuple[str, str]
PIPED_COLUMNS = 1000
LEAST_NAME = 12
LEAST_TEXT = 6
_PREFIXES = ("", "k", "M", "G", "T")


def console(stderr: bool = False) -> Console:
    """A console that is as wide as the terminal, and wide enough for every column when there is none.

    Strings are printed as plain text, because names come from other processes, files and peers: ``[`` and ``:car:`` are
    printed as they are, control characters escaped. A style is given as a ``Text`` or by ``style=``.
    """
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:  # rich would end the process with code 1
            raise BrokenPipeError

        def print(self, *objects: Any, **options: Any) -> None:
            super().print(*(printable(item) if isinstance(item, str) else item for item in objects), **options)

    stream = sys.stderr if stderr else sys.stdout
    return Piped(
        stderr=stderr, width=None if stream.isatty() else PIPED_COLUMNS, highlight=False, markup=False, emoji=False,
        soft_wrap=not stream.isatty(),
    )  # fmt: skip


def print_indented(out: Console, mark: Text, text: str) -> None:
    """Print a mark and a text beside it; further lines of the text are indented."""
    from rich.table import Table
    from rich.text import Text

    if not out.is_terminal:
        out.print(Text.assemble(mark, " ", printable(text)))
        return
    row = Table.grid(padding=(0, 1, 0, 0))
    row.add_column(width=mark.cell_len)
    row.add_column(overflow="fold")
    row.add_row(mark, Text(printable(text)))
    out.print(row)


def watched(render: Callable[[], RenderableType], every: float | None) -> None:
    """Print the result of ``render``; with ``every`` again after that many seconds, in place on a terminal, until
    interrupted.
    """
    out = console()
    if every is None or not out.is_terminal:
        while True:
            out.print(render())
            sys.stdout.flush()
            if every is None:
                return
            time.sleep(every)
    from rich.live import Live

    with Live(console=out, screen=True, auto_refresh=False) as view:
        while True:
            view.update(render(), refresh=True)
            time.sleep(every)


def columns_of(stream: IO[str]) -> int:
    """How wide a table may be there."""
    return shutil.get_terminal_size((80, 24)).columns if stream.isatty() else PIPED_COLUMNS


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    right: Sequence[str] = (),
    title: str = "",
    *,
    width: int | None = None,
    least: Mapping[str, int] = MappingProxyType({}),
    names: Sequence[str] = ("address", "topic", "name", "channel"),
    spare: Sequence[str] = ("program", "state", "why"),
    yields: Sequence[str] = (),
    last: Sequence[str] = (),
) -> Table:
    """A table without a frame; the columns named in ``right`` are aligned to the right.

    If it is wider than ``width`` (default: the terminal), ``spare`` columns of free text are cut at their end first,
    then left out; then the columns that ``yields`` lists are left out, one after another; then ``names`` are shortened
    in their middle; then the columns that ``last`` lists are left out, and then further numbers from the right, which
    a line below the table names. Numbers are never cut. ``least`` is how wide a column is at least.
    """
    from rich.table import Table
    from rich.text import Text

    cells = [[cell if isinstance(cell, tuple) else (cell, "") for cell in row] for row in rows]
    shown = [[(printable(text), style) for text, style in row] for row in cells]
    widths = [
        max([len(name), least.get(name, 0), *(cell_len(row[at][0]) for row in shown)])
        for at, name in enumerate(columns)
    ]
    most = width or columns_of(sys.stdout)
    gap, widths = _fitted(columns, widths, most, names, spare, yields)
    widths, missing = _left_out(columns, widths, most, right, last)
    kept = [at for at, wide in enumerate(widths) if wide]
    made = Table(
        box=None, header_style="bold", pad_edge=False, title=Text(title) if title else None, title_justify="left",
        padding=(0, gap, 0, 0), caption=Text(f"no room for {', '.join(missing)}", style="dim") if missing else None,
        caption_justify="left",
    )  # fmt: skip
    for at in kept:
        name = columns[at]
        made.add_column(name, justify="right" if name in right else "left", no_wrap=True, min_width=widths[at])
    short = {at: _short_names([row[at][0] for row in shown], widths[at]) for at in kept if columns[at] in names}
    for row in shown:
        cut = [short[at][row[at][0]] if at in short else _cut(row[at][0], widths[at]) for at in kept]
        made.add_row(*(Text(text, style=row[at][1]) for at, text in zip(kept, cut, strict=True)))
    return made


def _fitted(
    columns: Sequence[str],
    widths: list[int],
    most: int,
    names: Sequence[str],
    spare: Sequence[str],
    yields: Sequence[str],
) -> tuple[int, list[int]]:
    """The gap between columns, and the width of each; 0 for one that is left out."""
    widths = list(widths)
    for gap in (2, 1):
        over = sum(widths) + gap * (len(widths) - 1) - most
        if over <= 0:
            return gap, widths
    for at, name in reversed(list(enumerate(columns))):  # columns of free text, from the right
        if name in spare and over > 0:
            left = widths[at] - over
            over -= widths[at] - (left if left >= LEAST_TEXT else -1)
            widths[at] = left if left >= LEAST_TEXT else 0
    for name in yields:
        if name in columns and over > 0:
            at = columns.index(name)
            over -= widths[at] + 1
            widths[at] = 0
    for at, name in enumerate(columns):
        if name in names and over > 0:
            left = max(LEAST_NAME, widths[at] - over)
            over -= max(0, widths[at] - left)
            widths[at] = min(widths[at], left)
    return 1, widths


def _left_out(
    columns: Sequence[str], widths: list[int], most: int, right: Sequence[str], last: Sequence[str]
) -> tuple[list[int], list[str]]:
    """The widths, 0 for columns that do not fit, and the names of the columns whose absence must be mentioned."""
    widths, missing = list(widths), list[str]()
    expected = [columns.index(name) for name in last if name in columns]
    numbers = [at for at in reversed(range(len(columns))) if columns[at] in right and at not in expected]
    for at in [*expected, *numbers]:
        kept = [wide for wide in widths if wide]
        if sum(kept) + len(kept) - 1 <= most or len(kept) == 1:
            break
        if widths[at]:
            widths[at] = 0
            missing += [] if at in expected else [columns[at]]
    return widths, missing[::-1]


def _cut(text: str, width: int) -> str:
    """``text`` cut to ``width`` characters."""
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)).rstrip() + "…"


def _short_names(names: list[str], width: int) -> dict[str, str]:
    """Names cut to ``width`` characters in their middle. If that makes two alike, first remove the common beginning of
    the long ones, or both their common beginning and end.
    """
    long = {name for name in names if cell_len(name) > width}
    head = _common(long)
    tail = _common({name[len(head) :][::-1] for name in long})
    for begin, end in (("", ""), (head, ""), (head, tail)):
        short = {name: name for name in names}
        for name in long:
            own = name[len(begin) : len(name) - len(end)]
            short[name] = _cut_middle(f"{'…' * bool(begin)}{own}{'…' * bool(end)}", width)
        if len(set(short.values())) == len(short):
            break
    return short


def _common(names: set[str]) -> str:
    return os.path.commonprefix(list(names)).rpartition("/")[0]  # noqa: RUF071 - and cut at a slash


def _cut_middle(text: str, width: int) -> str:
    if cell_len(text) <= width:
        return text
    tail = (width - 1) // 2
    return set_cell_size(text, width - 1 - tail) + "…" + text[len(text) - tail :]


def print_json(value: Any, stream: IO[str] | None = None) -> None:
    """Print one line of JSON, by default on standard output."""
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
    """A latency from a histogram, whose last bucket has no upper bound."""
    if latency_ns >= BOUNDS_NS[-1]:
        return f"> {BOUNDS_NS[-1] / 1e9:.0f} s"
    return seconds_text(latency_ns / 1e9)


def age_text(seconds: float | None) -> str:
    """How long ago something was; a dash for None."""
    return "now" if seconds is not None and seconds < 1e-3 else seconds_text(seconds)


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
