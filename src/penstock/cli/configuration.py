"""Where the defaults of options come from.

From weak to strong: the command's own defaults, ``penstock.toml`` of the user (``~/.config/penstock/``), the
``penstock.toml`` of the working directory (or the file that ``PENSTOCK_CONFIG`` names, instead of both), variables such
as ``PENSTOCK_SUB_FORMAT``, and the command line. In the file a table is a command, a key an option::

    [sub]
    format = "json"

An unknown table or key is an error that names the nearest one: a mistyped setting is never ignored silently.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import InvalidArgument, nearest

__all__ = ["Setting", "files", "for_command", "option_parameters", "read_file", "settings"]

MAX_FILE_BYTES = 1 << 20

#: Variables that are not options of a command.
VARIABLES = {
    "PENSTOCK_CONFIG": "the configuration file to read instead of the usual two",
    "PENSTOCK_DEBUG": "1 shows stack traces of failed commands",
    "PENSTOCK_LOG": "debug logs connects, handshakes and drops",
    "PENSTOCK_SHM_DIR": "where shared memory and counters are kept",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One value and its origin: a file's path, the name of a variable, or ``default``."""

    command: str
    option: str
    value: Any
    origin: str


def files(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """The files that are read, weak before strong; only those that exist, except the one named by the variable."""
    named = environment.get("PENSTOCK_CONFIG")
    if named:
        return [Path(named)]
    home = environment.get("XDG_CONFIG_HOME") or str(Path(environment.get("HOME", "/")) / ".config")
    candidates = [Path(home) / "penstock" / "penstock.toml", Path("penstock.toml")]
    return [path for path in candidates if path.is_file()]


def read_file(path: Path) -> dict[str, dict[str, Any]]:
    """The tables of one file; ``InvalidArgument`` names the file and the line."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{path}: cannot be read ({error.strerror})") from None
    if len(raw) > MAX_FILE_BYTES:
        raise InvalidArgument(f"{path}: larger than {MAX_FILE_BYTES} bytes, which no configuration is")
    try:
        tables = tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path}: {error}") from None
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise InvalidArgument(f"{path}: {name!r} stands outside of a table; options stand under [COMMAND]")
    return tables


def settings() -> Iterator[Setting]:
    """Every value set in a file or by a variable, weak before strong."""
    for path in files():
        for command, table in read_file(path).items():
            for option, value in table.items():
                yield Setting(command, option.replace("-", "_"), value, str(path))
    yield from _variables(os.environ)


def _variables(environment: Mapping[str, str]) -> Iterator[Setting]:
    """``PENSTOCK_SUB_FORMAT=json`` sets ``format`` of ``sub``."""
    from penstock.cli.commands import COMMANDS

    for name, value in sorted(environment.items()):
        prefix, _, rest = name.partition("_")
        command, _, option = rest.lower().partition("_")
        if (
            prefix == "PENSTOCK"
            and option
            and name not in VARIABLES
            and any(entry.name == command for entry in COMMANDS)
        ):
            yield Setting(command, option, value, name)


def option_parameters(command: Any) -> dict[str, str]:
    """The options of a command as a user writes them (``format``), and the parameters that they fill (``form``)."""
    found = {}
    for parameter in command.params:
        for flag in parameter.opts:
            if flag.startswith("--") and parameter.name != "help":
                found[flag[2:].replace("-", "_")] = parameter.name
    return found


def for_command(command: str, options: Mapping[str, str]) -> dict[str, Any]:
    """The settings of one command from files and variables, by parameter; unknown names are refused."""
    found: dict[str, Any] = {}
    for setting in settings():
        if setting.command != command:
            continue
        if isinstance(setting.value, dict):
            found[setting.option] = setting.value  # a table of a sub-command
        elif setting.option in options:
            found[options[setting.option]] = setting.value
        else:
            hint = nearest(setting.option, options)
            raise InvalidArgument(f"{setting.origin}: {command} has no option {setting.option!r}; {hint}")
    return found
