"""The help of one command: no option's name is cut, text fills the width, and the examples come last."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = ["draw_well"]

#: A name longer than this has a line of its own.
NAME_COLUMNS = 24


def draw_well(command: Any) -> None:
    """Let a command, and all commands of a group, print its help by this module."""
    for inner in getattr(command, "commands", {}).values():
        draw_well(inner)
    command.format_help = functools.partial(_print, command)


def _print(command: Any, ctx: Any, _formatter: Any) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, emoji=False)
    console.print(Text(command.get_usage(ctx)), end="\n\n")
    texts, examples = _texts(command), _examples(command)
    for text in texts:
        if text not in examples:
            console.print(Text.from_markup(text), end="\n\n")
    parameters = command.get_params(ctx)
    for kind, title in (("argument", "Arguments"), ("option", "Options")):
        rows = [_row(p, ctx) for p in parameters if p.param_type_name == kind and not p.hidden]
        if rows:
            console.print(title, style="bold")
            for name, told in rows:
                _print_row(console, name, told)
            console.print()
    if commands := getattr(command, "commands", {}):
        console.print("Commands", style="bold")
        for name, inner in commands.items():
            _print_row(console, name, Text.from_markup(_texts(inner)[0]))
        console.print()
    for text in examples:
        console.print(Text.from_markup(text), end="\n\n")


def _texts(command: Any) -> list[str]:
    return [_filled(paragraph) for paragraph in inspect.cleandoc(command.help or "").split("\n\n")]


def _examples(command: Any) -> list[str]:
    """The command's examples; a group without its own has the first one of its commands."""
    own = [text for text in _texts(command) if text.startswith("Example")]
    inner = (_examples(inner) for inner in getattr(command, "commands", {}).values())
    return own or next((found[:1] for found in inner if found), [])


def _filled(paragraph: str) -> str:
    """A paragraph as one line, which the terminal wraps; indented text stays as it is."""
    lines = paragraph.splitlines()
    return paragraph if any(line.startswith(" ") for line in lines) else " ".join(lines)


def _row(parameter: Any, ctx: Any) -> tuple[str, Text]:
    """Names and type; what it is for, with default and range."""
    from rich.text import Text

    name, told = parameter.get_help_record(ctx)
    said = parameter.help or ""
    more = told.removeprefix(said)
    if getattr(parameter, "is_flag", False) and parameter.default is False:
        name, more = name.partition(" / ")[0], ""  # the negative form of a flag is not shown
    name = name.replace(" range>", ">").replace(" <list[str]>", " ...")
    return name, Text.assemble(Text.from_markup(said), (more, "dim"))


def _print_row(console: Console, name: str, told: Text) -> None:
    from rich.table import Table
    from rich.text import Text

    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_column(width=NAME_COLUMNS, no_wrap=True)
    row.add_column()
    if len(name) + 2 > NAME_COLUMNS:
        console.print(Text(f"  {name}", style="cyan"))
        name = ""
    row.add_row(Text(f"  {name}" if name else "", style="cyan"), told)
    console.print(row)
