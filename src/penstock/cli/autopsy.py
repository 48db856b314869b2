"""``penstock autopsy``: what a killed process last published, what it held, what it never read."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import exits, show
from penstock.cli.target import live_addresses
from penstock.printable import printable
from penstock.secrecy import without_secrets
from penstock.system import process, who

if TYPE_CHECKING:
    from penstock.observe.snapshot import Block
    from penstock.shm import DeadMember, Death
    from penstock.shm.deaths import DeathFile

app = typer.Typer()


@app.command()
def autopsy(
    subject: Annotated[
        str | None,
        typer.Argument(
            metavar="CHANNEL|PID",
            help="An address or a part of one (shm:/camera, broker://host:4222/orders, cam), or a pid; left out: all.",
            show_default=False,
            autocompletion=live_addresses,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what killed processes left: those that had publishers, subscribers or other handles open.

    The process that finds another one dead records what it left, then cleans up: in shared memory its last message,
    what it held or had reserved, how many messages it never read; elsewhere what its counters say. The last 32
    processes are kept, in a file of this user (of mode 0600, in ~/.local/state/penstock or XDG_STATE_HOME). Code 1
    where nothing is known.

    Example: [green]penstock autopsy shm:/camera[/]
    """
    from penstock.shm.deaths import death_file

    file = death_file()
    found = [death for death in (_about(death, subject) for death in file.deaths) if death is not None]
    if as_json:
        deaths = [_death_json(death) for death in found]
        show.print_json({"deaths": deaths, "damaged": file.damaged, "problem": file.problem or None})
    for death in found if not as_json else ():
        _print(death)
    if file.problem:
        exits.told(
            f"{file.path or 'no file of deaths'} cannot be written, so deaths are not written down: {file.problem}"
        )
    if file.damaged:
        exits.told(f"{file.damaged} of 32 records of {file.path} are damaged or of another version, and left out")
    if not found:
        if not as_json:
            exits.told(_nothing(subject, file))
        raise typer.Exit(exits.FAILED)


def _nothing(subject: str | None, file: DeathFile) -> str:
    if subject is not None and subject.isdigit() and process(int(subject)) is not None:
        return f"{who(int(subject))} is alive; penstock ls shows what it has open"
    not_kept = [f"{_left_out(death)} of pid {death.pid}" for death in file.deaths if death.left_out]
    more = "" if subject is None or subject.isdigit() or not not_kept else f"; handles not kept: {', '.join(not_kept)}"
    return (
        f"nothing is known of a dead {_words(subject)} in {file.path}; records of the last 32 dead processes are "
        f"kept, for the user whose process found them{more}"
    )


def _words(subject: str | None) -> str:
    if subject is None:
        return "process"
    return f"process {subject}" if subject.isdigit() else f"member of {printable(without_secrets(subject))}"


def _about(death: Death, subject: str | None) -> Death | None:
    """The part of a death that was asked for: the whole process, or its handles of one channel."""
    if subject is None or (subject.isdigit() and death.pid == int(subject)):
        return death
    if subject.isdigit():
        return None
    from dataclasses import replace

    from penstock.observe.snapshot import matching

    wanted = f"shm:{subject}" if subject.startswith("/") else subject
    members = tuple(member for member in death.members if matching([_block(member)], wanted))
    return replace(death, members=members) if members else None


def _block(member: DeadMember) -> Block:
    """The handle as ``penstock ls`` would have shown it."""
    from penstock.observe.snapshot import Block

    return Block(0, 0, 0, "", member.room, member.kind, member.channel, "", member.joined_ns, 0)


def _print(death: Death) -> None:
    dead, finder = _process(death.pid, death.program), _process(death.found_by, death.found_by_program)
    print(f"{dead}, found dead at {_when(death.found_ns)} by {finder}")
    for member in death.members:
        print(f"  {printable(_line(member), keep='')}")
        if member.beginning:
            dots = "..." if member.last_size > len(member.beginning) else ""
            print(f"    {printable(member.beginning.decode(errors='backslashreplace'), keep='')}{dots}")
    if death.left_out:
        print(f"  not kept: {_left_out(death)} more handles")


def _left_out(death: Death) -> str:
    from penstock.shm.deaths import MOST_LEFT_OUT

    return f"{death.left_out} or more" if death.left_out >= MOST_LEFT_OUT else str(death.left_out)


def _process(pid: int, program: str) -> str:
    return f"pid {pid}" + (f" ({printable(program, keep='')})" if program else "")


def _line(member: DeadMember) -> str:
    return _shm_line(member) if member.room == "shm" else _counters_line(member)


def _counters_line(member: DeadMember) -> str:
    """A line for a handle of another reach than shared memory, from its counters."""
    place = _block(member).place
    verb = {"publisher": "published at ", "subscriber": "read from "}.get(member.kind, f"{member.kind} ")
    parts = [f"{verb}{place}: {show.count_text(member.messages)}"]
    if member.last_ns:
        parts.append(f"the last at {_when(member.last_ns)}")
    on_their_way = member.in_flight - member.unread
    numbers = {"on their way": on_their_way, "waiting": member.unread, "dropped": member.dropped}
    return ", ".join(parts) + "".join(f"; {words}: {number}" for words, number in numbers.items() if number > 0)


def _shm_line(member: DeadMember) -> str:
    place = f"shm:{member.channel}" + (f" (virtual channel {member.vchan_id})" if member.vchan_id is not None else "")
    count = show.count_text(member.messages)
    if member.kind == "publisher":
        last = "its last message is no more in the channel" if member.messages else "nothing"
        if member.last_ordinal:
            last = f"the last, #{member.last_ordinal} of {member.last_size} bytes, at {_when(member.last_ns)}"
        return f"published at {place}: {count}, {last}; reserved and never published: {member.held}"
    held = f"held {member.held}" + (f", the oldest of {_when(member.last_ns)}" if member.held else "")
    lost = f"; lost before: {member.dropped}" if member.dropped else ""  # overwritten before it could be read
    last = f"the last #{member.last_ordinal}" if member.last_ordinal else "nothing"
    return f"read from {place}: {count}, {last}; {held}; never read: {member.unread}{lost}"


def _when(time_ns: int) -> str:
    return f"{datetime.fromtimestamp(time_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3] + "Z"


def _death_json(death: Death) -> dict[str, Any]:
    return {
        "pid": death.pid,
        "program": death.program,
        "found_ns": death.found_ns,
        "found_by": death.found_by,
        "found_by_program": death.found_by_program,
        "left_out": death.left_out,
        "members": [_member_json(member) for member in death.members],
    }


def _member_json(member: DeadMember) -> dict[str, Any]:
    found = {name: getattr(member, name) for name in type(member).__slots__ if name != "beginning"}
    return {**found, "beginning_base64": base64.b64encode(member.beginning).decode()}
