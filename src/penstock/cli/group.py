"""The command group that loads a command when it is used."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from penstock.cli.help import draw_well
from penstock.errors import InvalidArgument
from penstock.secrecy import hidden

if TYPE_CHECKING:
    from penstock.cli.commands import Entry

__all__ = ["LazyGroup", "application"]

#: The bounds of numeric options, such as seconds: 1e9 seconds are 31 years.
LEAST, MOST = 1e-9, 1e9
ENDLESS = ("drain_timeout",)  # infinity is allowed here: handle everything that is queued, however long it takes
PATHS = ("path", "file", "directory")  # what a type of the command line that is a path is called


def application(entries: Iterable[Entry], help_text: str, examples: str = "") -> LazyGroup:
    """The command group, with a light stand-in for each command that is part of this build."""
    app = typer.Typer(
        cls=LazyGroup,
        help=help_text,
        epilog=examples,
        no_args_is_help=True,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    group = typer.main.get_command(app)
    assert isinstance(group, LazyGroup)
    group.fill(entries)
    return group


def _version(asked: bool) -> None:
    if asked:
        from penstock import __version__

        print(f"penstock {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Replaced by the help text."""


def _end_by_unwinding(command: Any) -> None:
    """Let Ctrl-C and SIGTERM unwind the stack once the command's function runs, so that it closes what it has
    opened.
    """
    from penstock.cli import exits

    if inner := getattr(command, "commands", {}):
        for one in inner.values():
            _end_by_unwinding(one)
    elif command.callback is not None:
        command.callback = exits.unwinding(_with_usable_numbers(command.callback))
        refuse_empty_paths(command)


def refuse_empty_paths(command: Any) -> None:
    """Refuse ``""`` where a command takes a path: it would mean the current directory (``"$UNSET"``)."""
    for param in command.params:
        if param.type.name in PATHS:
            param.type.convert = functools.partial(_named_path, param.type.convert)


def _named_path(convert: Callable[..., Any], value: Any, param: Any, ctx: Any) -> Any:
    if value == "":
        name = param.opts[-1] if param.opts[-1].startswith("-") else param.human_readable_name.upper()
        raise InvalidArgument(f"{name} is empty: name a file or directory (. is the current directory)")
    return convert(value, param, ctx)


def _with_usable_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """A command's function, which refuses numbers that would overflow the system's clock."""

    @functools.wraps(function)
    def checked(*arguments: Any, **options: Any) -> Any:
        for name, value in options.items():
            if isinstance(value, float) and math.isnan(value):
                raise InvalidArgument(f"--{name.replace('_', '-')} {value} is not a number")
            if isinstance(value, float) and value and not LEAST <= abs(value) <= MOST and name not in ENDLESS:
                option = f"--{name.replace('_', '-')}"
                raise InvalidArgument(f"{option} {value:g} is out of range: 0, or from {LEAST:g} to {MOST:g}")
        return function(*arguments, **options)

    return checked


class LazyGroup(TyperGroup):
    """Help and completion see light stand-ins; ``resolve_command`` swaps in the real one."""

    def fill(self, entries: Iterable[Entry]) -> None:
        """Take the commands that are part of this build."""
        self._entries = {entry.name: entry for entry in entries if entry.installed}
        for name, entry in self._entries.items():
            self.add_command(TyperCommand(name, help=entry.summary, rich_help_panel=entry.panel), name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name in self._entries and command is not None:
            command = self.real(name)
            # during completion, an option whose value is being typed would hide the words before it
            if ctx.resilient_parsing:
                rest = rest[:-1] if rest and rest[-1].startswith("-") else rest
            else:
                self._apply_configuration(ctx, name, command)
        return name, command, rest

    def real(self, name: str) -> Any:
        """The command itself, its module imported; a missing extra is told by name."""
        from penstock.cli import exits
        from penstock.cli.commands import EXTRAS, load

        entry = self._entries[name]
        if entry.works_unheard:
            exits.let_output_vanish()
        with exits.guard(EXTRAS):
            app = load(entry)
        app._add_completion = False
        command = typer.main.get_command(app)
        command.name = name
        draw_well(command)
        _end_by_unwinding(command)
        return command

    @staticmethod
    def _apply_configuration(ctx: Any, name: str, command: Any) -> None:
        from penstock.cli import configuration, exits
        from penstock.cli.commands import EXTRAS

        with exits.guard(EXTRAS):
            found = configuration.for_command(name, configuration.option_parameters(command))
        ctx.default_map = {name: found}

    def invoke(self, ctx: Any) -> Any:
        from penstock.cli import exits
        from penstock.cli.commands import EXTRAS

        with exits.guard(EXTRAS):
            try:
                return super().invoke(ctx)
            except Exception as error:
                # Typer's error texts repeat the user's words, which may contain a token: hide it.
                if isinstance(said := getattr(error, "message", None), str):
                    error.message = hidden([said])[0]  # type: ignore[attr-defined]
                raise
