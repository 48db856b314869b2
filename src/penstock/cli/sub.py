"""``penstock sub``: messages of any addresses on standard output, losses on standard error as they happen."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

import penstock
from penstock.address import parse, without_secrets
from penstock.channel import Subscriber
from penstock.cli import exits, silence
from penstock.cli.sources import Losses, Reader, Source, Write
from penstock.cli.start import start_options
from penstock.cli.target import (
    AddressesArgument,
    OptionList,
    answer_within,
    broker_address,
    expanded,
    fitting,
    has_wildcard,
    nobody_like,
    with_options,
)
from penstock.errors import InvalidArgument, PenstockError, RefusedError, describe
from penstock.filter import compile_filter
from penstock.observe import decode
from penstock.printable import printable
from penstock.types.fields import Step, Values, at, check_paths, json_text, parse_path, split_paths

if TYPE_CHECKING:
    from penstock._core import Message

app = typer.Typer()

_UNREADABLE: set[str | None] = set()  # channels whose unreadable fields were reported
LOOK_S = 0.2


@app.command()
def sub(
    given: AddressesArgument,
    count: Annotated[int | None, typer.Option("--count", "-n", min=1, help="End after so many messages.")] = None,
    form: Annotated[
        decode.Format, typer.Option("--format", "-f", help="How payloads are printed; raw adds nothing between them.")
    ] = decode.Format.TEXT,
    template: Annotated[
        str | None,
        typer.Option("--template", "-t", help="A line of your own, such as '{ordinal} {time} {channel} {payload}'."),
    ] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option("--fields", metavar="FIELD,...", help="Only these of the value, such as 'pose.x,joints[2]'."),
    ] = None,
    expression: Annotated[
        str | None,
        typer.Option("--filter", help="Only messages for which this holds, such as 'size > 100 and .ok == true'."),
    ] = None,
    since: Annotated[str | None, typer.Option(help="From a time on: an ISO time or '5m' (kept messages only).")] = None,
    first: Annotated[
        str | None, typer.Option("--from", help="Begin at this ordinal, at 'start' or at 'end' (kept messages only).")
    ] = None,
    last: Annotated[int | None, typer.Option(min=1, help="Begin with the last N messages (journals).")] = None,
    start: Annotated[
        str | None,
        typer.Option(help="From the disk of a durable publisher: first, a position, a time or 'last 10 min'."),
    ] = None,
    exit_at_end: Annotated[
        bool, typer.Option("--exit-at-end", "-e", help="End when all that is there has been printed.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for a publisher that cannot be reached yet.")] = False,
    timeout: Annotated[
        float | None, typer.Option(min=0.0, help="End with code 3 when nothing was printed for so long (s).")
    ] = None,
    option: OptionList = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per message, with all its fields.")
    ] = False,
    ledger: Annotated[bool, typer.Option(help="Print the ledger on standard error at the end.")] = False,
) -> None:
    """Read messages from any addresses; '*' in one stands for any characters ('shm:/cam/*'), also for what is published
    there later.

    Losses are printed on standard error as they happen, and why nothing comes: after the first second without a
    message, and whenever a publisher is gone or stopped.
    Filters know size, ordinal, timestamp, age, channel, position, id, vchan_id, payload, properties.NAME and fields of
    the value as .name; and, or, not, in, contains, startswith, endswith, like. If the publisher is typed, fields of
    every encoding are known, and what is no text is printed as JSON; --fields prints one line of values, separated by
    tabs.

    Example: [green]penstock sub shm:/room --filter '.celsius > 20.5' --count 10[/]
    """
    exits.need_output()
    passes = compile_filter(expression) if expression else None
    paths = [path for given_fields in fields or [] for path in split_paths(given_fields)]
    write = _writer(form, template, as_json, paths)
    patterns = [address for address in given if has_wildcard(address)]
    addresses = expanded(given, wait)
    several = len(addresses) > 1 or bool(patterns)
    with contextlib.ExitStack() as stack:

        def opened(address: str) -> Source:
            where = with_options(address, option, **({} if start is None else {"start": start}))
            more = start_options(where, since, first, last)
            more |= answer_within(address, option, timeout)
            if count is not None and passes is None:
                more |= _credit(where, count)
            silence.refuse_nobody(parse(where), wait)
            began_ns = time.time_ns()
            with silence.told_after(address):
                subscriber = stack.enter_context(_opened(where, more, wait))
            if not wait:
                silence.refuse_unreachable(address, subscriber, timeout)
            named = several and not (as_json or template or form is decode.Format.RAW)
            head = f"{without_secrets(address)}: " if named else ""
            values = Values(subscriber)
            losses = Losses(subscriber, as_json)
            made = Source(without_secrets(address), where, subscriber, values, losses, head.encode(), began_ns)
            made.frontier = getattr(subscriber, "frontier", None)
            made.takes = parse(where).scheme == "broker"
            if "start" in parse(where).options:
                made.past = "network" if parse(where).scheme == "tcp" else "disk"
            return made

        def join() -> list[Source]:
            new = [address for address in fitting(patterns) if address not in addresses] if patterns else []
            addresses.extend(new)
            return [source for address in new if (source := _attempted(opened, address)) is not None]

        written = set(map(broker_address, given))  # addresses given by name: an unusable one is an error
        opening = [opened(address) if address in written else _attempted(opened, address) for address in addresses]
        sources = [source for source in opening if source is not None]
        if addresses and not sources:
            raise typer.Exit(exits.FAILED)
        known = [source.values.schemas(parse(source.address).topic or None) for source in sources]
        if known and all(known):  # with several addresses it is enough if one has the field
            check_paths([one for schemas in known for one in schemas], [*paths, *(passes.paths if passes else ())])
        waits_for = nobody_like(patterns[0]) if patterns else ""
        reader = Reader(sources, write, passes, expression or "", join, waits_for)
        try:
            complete = reader.run(count, timeout, exit_at_end)
            unmatched = reader.unmatched()
            opened_as = [source.where for source in sources] or addresses or patterns
            hint = "" if complete else f": {unmatched}" if unmatched else silence.hint(opened_as)
        finally:
            for source in sources:
                source.losses.look()
                if ledger:
                    _print_ledger(source.subscriber)
    if not complete:
        names = [source.address for source in sources] or patterns
        exits.told(f"{', '.join(names)}: nothing came for {timeout:g} s{hint}")
        raise typer.Exit(exits.TIME_OVER)
    if exit_at_end and (lacking := [said for address in addresses if (said := silence.missing(address))]):
        for said in lacking:  # report it: a misspelt topic would look like the end of the messages
            exits.told(said)
        raise typer.Exit(exits.FAILED)


def _attempted(opened: Callable[[str], Source], address: str) -> Source | None:
    """The source for an address that a pattern has found; the others go on if it cannot be opened."""
    try:
        return opened(address)
    except (PenstockError, OSError) as error:
        exits.told(f"{without_secrets(address)}: not read: {describe(error)}")
        return None


def _opened(where: str, more: dict[str, Any], wait: bool) -> Subscriber:
    """The subscriber; with ``--wait`` and ``--start``, as soon as a publisher says where it keeps its messages."""
    while True:
        try:
            made: Subscriber = penstock.subscriber(where, **more)
            return made
        except RefusedError:
            if not wait or "start" not in parse(where).options:
                raise
            time.sleep(LOOK_S)


def _credit(where: str, count: int) -> dict[str, int]:
    """Limit what a broker sends ahead: messages that are not printed would be withheld from other consumers."""
    parts = parse(where)
    return {"credit": min(count, 2048)} if parts.scheme == "broker" and "credit" not in parts.options else {}


def _writer(form: decode.Format, template: str | None, as_json: bool, paths: list[str]) -> Write:
    if template is not None and (as_json or paths):
        raise InvalidArgument(f"give {'--json' if as_json else '--fields'} or --template, not both")
    if paths and form is not decode.Format.TEXT:
        raise InvalidArgument("give --fields or --format, not both; with --json the fields are an object")
    if paths:
        steps = {path: parse_path(path) for path in paths}
        return lambda message, values: _fields(message, values, steps, as_json)
    if as_json:
        return _record
    if template is not None:
        fill = decode.formatter(template)
        return lambda message, values: fill(message).encode() + b"\n"
    return _WRITERS[form]


def _fields(message: Message, values: Values, steps: dict[str, list[Step]], as_json: bool) -> bytes:
    """The fields of a message as a line. A missing field is null, as in filters; a text is printed without quotes
    unless it is inside of an object or list. If a message does not match its schema, all fields are null, which is
    reported once.
    """
    try:
        value = values(message)
    except ValueError as error:
        value = None
        if message.channel not in _UNREADABLE:
            _UNREADABLE.add(message.channel)
            exits.told(f"a message of {message.channel} cannot be read, its fields are null: {error} (reported once)")
    found = {path: at(value, way) for path, way in steps.items()}
    if as_json:
        return json_text(found).encode() + b"\n"
    shown = [printable(one, keep="") if isinstance(one, str) else json_text(one) for one in found.values()]
    return "\t".join(shown).encode() + b"\n"


def _record(message: Message, values: Values) -> bytes:
    shown = decode.described(message, values)
    if shown is None:
        return json.dumps(decode.record(message)).encode() + b"\n"
    whole = {**decode.record(message, b""), "size": message.size, "payload": json.loads(shown)}
    return json.dumps(whole).encode() + b"\n"


def _one_json(message: Message, values: Values) -> bytes:
    shown = decode.described(message, values)
    return (json.dumps(decode.body_value(bytes(message))) if shown is None else shown).encode() + b"\n"


def _one_text(message: Message, values: Values) -> bytes:
    shown = decode.described(message, values)
    return (decode.body_text(bytes(message)) if shown is None else shown).encode() + b"\n"


def _one_hex(message: Message, values: Values) -> bytes:
    head = f"# ordinal {message.ordinal}, {message.size} bytes, {decode.iso_time(message.timestamp_ns)}\n"
    return head.encode() + decode.hexadecimal(bytes(message)).encode() + b"\n"


_WRITERS: dict[decode.Format, Write] = {
    decode.Format.TEXT: _one_text,
    decode.Format.HEX: _one_hex,
    decode.Format.JSON: _one_json,
    decode.Format.RAW: lambda message, values: bytes(message),
}


def _print_ledger(subscriber: Subscriber) -> None:
    ledger: Any = subscriber.ledger
    fields = {name: getattr(ledger, name) for name in ("matched", "delivered", "expired", "in_flight", "redelivered")}
    print(json.dumps({**fields, "dropped": dict(ledger.dropped), "balanced": ledger.balanced}), file=sys.stderr)
