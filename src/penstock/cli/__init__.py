"""The command ``penstock``: one table of commands, each loaded when it is used.

Rules:

- ``penstock --help`` and completion read the table alone; a command's module is imported when that command runs.
- A command whose module is not installed is not in the table that a user sees; one whose extra is missing says which.
- Every failure ends in one line on standard error and a code of ``penstock.cli.exits``; a stack trace is a bug (set
  ``PENSTOCK_DEBUG=1`` to see it).
- Ctrl-C ends it quietly from the first moment on: nothing is imported here, and ``main`` handles signals before it
  imports the rest.

Called from the main thread of a process of its own.
"""

from __future__ import annotations

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """The entry point: never returns, ends by ``SystemExit``."""
    from penstock.cli import signals

    signals.end_at_once()
    from penstock.cli import commands, completion, exits, group

    exits.escape_logs()
    with exits.ending(), completion.of_words_with_colons():
        group.application(commands.COMMANDS, commands.HELP, commands.EXAMPLES).main(
            args=arguments, prog_name="penstock"
        )
