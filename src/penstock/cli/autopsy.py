"""``penstock autopsy``: what a killed process last published, what it held, what it never read."""

from __future__ import annotations

import base64
import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import exits, show
from penstock.cli.target import live_addresses
from penstock.errors import InvalidArgument
from penstock.printable import printable
from penstock.secrecy import without_secrets
from penstock.system import process, state_directory, who

if TYPE_CHECKING:
    from penstock.shm import DeadMember, Death

app = typer.Typer()


@app.command()
def autopsy(
    subject: Annotated[
        str | None,
        typer.Argument(
            metavar="CHANNEL|PID",
            help="A channel (shm:/camera, /camera) or a process; left out: all.",
            show_default=False,
            autocompletion=live_addresses,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what is known of processes that died as members of shared-memory channels.

    Whoever finds a dead member of a channel writes down what it left before putting that right: its last message, what
    it held or had reserved, how many messages it never read. The last 32 processes are kept, in a file of this user
    (of mode 0600, in ~/.local/state/penstock or XDG_STATE_HOME). Code 1 where nothing is known.

    Example: [green]penstock autopsy shm:/camera[/]
    """
    from penstock.shm import deaths

    if subject is not None and not subject.isdigit() and not subject.startswith(("shm:", "/")):
        raise InvalidArgument(
            f"{without_secrets(subject)!r} is neither a pid nor a channel of shared memory (shm:/NAME); what a killed "
            "process did elsewhere is in the ledgers of its peers (penstock ls, penstock queue)"
        )
    found = [death for death in (_about(death, subject) for death in deaths()) if death is not None]
    if as_json:
        show.print_json({"deaths": [_death_json(death) for death in found]})
    for death in found if not as_json else ():
        _print(death)
    if problem := _cannot_write():
        exits.told(problem)
    if not found:
        if not as_json:
            exits.told(_nothing(subject))
        raise typer.Exit(exits.FAILED)


def _cannot_write() -> str | None:
    """Why what this user's programs find is not written down."""
    folder = state_directory()
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return None
    return f"{folder} cannot be written, so deaths are not written down: {there} " + (
        "is a file" if not there.is_dir() else "belongs to somebody else or is read-only"
    )


def _nothing(subject: str | None) -> str:
    if subject is not None and subject.isdigit() and process(int(subject)) is not None:
        return f"{who(int(subject))} is alive; penstock ls shows what it has open"
    return f"nothing is known of a dead {_words(subject)}; the last 32 processes that died are kept"


def _words(subject: str | None) -> str:
    if subject is None:
        return "process"
    return f"process {subject}" if subject.isdigit() else f"member of {printable(subject)}"


def _about(death: Death, subject: str | None) -> Death | None:
    """What of a death is asked for: all of a process, or its part in a channel."""
    if subject is None or (subject.isdigit() and death.pid == int(subject)):
        return death
    if subject.isdigit():
        return None
    from dataclasses import replace

    wanted = subject.removeprefix("shm:").partition("?")[0]
    members = tuple(member for member in death.members if member.channel == wanted)
    return replace(death, members=members) if members else None


def _print(death: Death) -> None:
    program = f" ({printable(death.program)})" if death.program else ""
    print(f"pid {death.pid}{program}, found dead at {_when(death.found_ns)} by {who(death.found_by)}")
    for member in death.members:
        print(f"  {printable(_line(member))}")
        if member.beginning:
            dots = "..." if member.last_size > len(member.beginning) else ""
            print(f"    {printable(member.beginning.decode(errors='backslashreplace'))}{dots}")
    if death.left_out:
        print(f"  and {death.left_out} more members")


def _line(member: DeadMember) -> str:
    place = f"shm:{member.channel}" + (f" (virtual channel {member.vchan_id})" if member.vchan_id is not None else "")
    count = show.count_text(member.messages)
    if member.kind == "publisher":
        last = "its last message is no more in the channel" if member.messages else "nothing"
        if member.last_ordinal:
            last = f"the last, #{member.last_ordinal} of {member.last_size} bytes, at {_when(member.last_ns)}"
        return f"published at {place}: {count}, {last}; reserved and never published: {member.held}"
    held = f"held {member.held}" + (f", the oldest of {_when(member.last_ns)}" if member.held else "")
    return f"read from {place}: {count}, the last #{member.last_ordinal}; {held}; never read: {member.unread}"


def _when(time_ns: int) -> str:
    return f"{datetime.fromtimestamp(time_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3] + "Z"


def _death_json(death: Death) -> dict[str, Any]:
    return {
        "pid": death.pid,
        "program": death.program,
        "found_ns": death.found_ns,
        "found_by": death.found_by,
        "left_out": death.left_out,
        "members": [_member_json(member) for member in death.members],
    }


def _member_json(member: DeadMember) -> dict[str, Any]:
    found = {name: getattr(member, name) for name in type(member).__slots__ if name != "beginning"}
    return {**found, "beginning_base64": base64.b64encode(member.beginning).decode()}
