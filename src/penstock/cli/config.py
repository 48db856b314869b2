"""``penstock config``: what is configured, and where each value came from."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from penstock.cli import configuration, show
from penstock.cli.commands import COMMANDS, HELP
from penstock.errors import InvalidArgument, nearest
from penstock.secrecy import hidden_values

app = typer.Typer(help="Show the configuration and where each value came from.", no_args_is_help=True)


@app.callback()
def config() -> None:
    """Show the configuration and where each value came from."""


@app.command("show")
def show_(
    every: Annotated[bool, typer.Option("--all", help="Also show options that are not set.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a value.")] = False,
) -> None:
    """Print each configured value and its origin: a file, a variable, or the command itself. Tokens are not shown.

    Files: ~/.config/penstock/penstock.toml, then ./penstock.toml (or PENSTOCK_CONFIG alone). Variables:
    PENSTOCK_COMMAND_OPTION, such as PENSTOCK_SUB_FORMAT=json.

    Example: [green]PENSTOCK_SUB_FORMAT=hex penstock config show[/]
    """
    rows = _rows(every)
    if as_json:
        for command, option, value, origin in rows:
            show.print_json({"command": command, "option": option, "value": value, "origin": origin})
        return
    for path in configuration.files():
        typer.echo(f"read {path}")
    if rows:
        cells = [(f"{command} {option}".strip(), str(value), origin) for command, option, value, origin in rows]
        show.console().print(show.table(("setting", "value", "from"), cells))
    else:
        typer.echo("nothing is configured: every option has its own default ('penstock config show --all')")


def _rows(every: bool) -> list[tuple[str, str, Any, str]]:
    set_values: dict[tuple[str, str], tuple[Any, str]] = {}
    known = {entry.name: entry for entry in COMMANDS if entry.installed}
    for setting in configuration.settings():
        if setting.command not in known:
            hint = nearest(setting.command, known)
            raise InvalidArgument(f"{setting.origin}: [{setting.command}] is no command; {hint}")
        set_values[setting.command, setting.option] = (setting.value, setting.origin)
    rows = []
    for name in known if every else {command for command, _ in set_values}:
        options = _options(name)
        for option in options if every else ():
            set_values.setdefault((name, option), (options[option], "default"))
        for command, option in set_values:
            if command == name and options and option not in options:
                origin = set_values[command, option][1]
                raise InvalidArgument(f"{origin}: {name} has no option {option!r}; {nearest(option, options)}")
    rows = [
        (command, option, hidden_values(value, option), origin)
        for (command, option), (value, origin) in sorted(set_values.items())
    ]
    rows += [("", name, os.environ[name], "variable") for name in configuration.VARIABLES if name in os.environ]
    return rows


def _options(name: str) -> dict[str, Any]:
    """The options of a command with their own defaults; none for a group of commands."""
    from penstock.cli import group

    command = group.application(COMMANDS, HELP).real(name)
    if hasattr(command, "commands"):
        return {}
    defaults = {parameter.name: parameter.default for parameter in command.params}
    return {flag: _plain(defaults[name]) for flag, name in configuration.option_parameters(command).items()}


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
