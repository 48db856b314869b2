"""``penstock sub``: messages of any addresses on standard output, losses on standard error as they happen."""

from __future__ import annotations

import contextlib
import json
import select
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

import penstock
from penstock.address import parse, without_secrets
from penstock.channel import Subscriber
from penstock.cli import exits, silence
from penstock.cli.start import start_options
from penstock.cli.target import AddressesArgument, OptionList, answer_within, expanded, with_options
from penstock.errors import InvalidArgument, RefusedError
from penstock.filter import compile_filter
from penstock.observe import decode
from penstock.printable import printable
from penstock.types import Schema
from penstock.types.fields import Step, Values, at, check_paths, json_text, parse_path, split_paths

if TYPE_CHECKING:
    from penstock._core import Message

app = typer.Typer()

_UNREADABLE: set[str | None] = set()  # channels of which it was told
Write = Callable[["Message", Values], bytes]
#: How long a reach without stored messages may be silent before --exit-at-end counts that as the end.
QUIET_AT_END_S = 1.0
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
        str | None, typer.Option("--from", help="From an ordinal on, from 'start' or 'end' (kept messages only).")
    ] = None,
    last: Annotated[int | None, typer.Option(min=1, help="Begin with so many of the last ones (journals).")] = None,
    start: Annotated[
        str | None,
        typer.Option(help="From the disk of a durable publisher: first, a position, a time or 'last 10 min'."),
    ] = None,
    exit_at_end: Annotated[
        bool, typer.Option("--exit-at-end", "-e", help="End when all that is there has been printed.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for a publisher that nobody can reach yet.")] = False,
    timeout: Annotated[
        float | None, typer.Option(min=0.0, help="End with code 3 when nothing was printed for so long (s).")
    ] = None,
    option: OptionList = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a message, with all that it carries.")
    ] = False,
    ledger: Annotated[bool, typer.Option(help="Print the ledger on standard error at the end.")] = False,
) -> None:
    """Read messages from any addresses; '*' in one stands for any characters ('shm:/cam/*'): what is published when
    this begins, not what comes later.

    Losses are printed on standard error as they happen, and if nothing came within a second of the start, why.
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
    addresses = expanded(given)
    with contextlib.ExitStack() as stack:
        sources = []
        known: list[list[Schema]] = []
        for address in addresses:
            more = start_options(address, since, first, last)
            more |= answer_within(address, option, timeout)
            where = with_options(address, option, **({} if start is None else {"start": start}))
            if count is not None and passes is None:
                more |= _credit(where, count)
            silence.refuse_nobody(parse(where), wait)
            began_ns = time.time_ns()
            with silence.told_after(address):
                subscriber = stack.enter_context(_opened(where, more, wait))
            if not wait:
                silence.refuse_unreachable(address, subscriber, timeout)
            head = "" if len(addresses) == 1 or as_json or template or form is decode.Format.RAW else f"{address}: "
            values = Values(subscriber)
            known.append(values.schemas(parse(where).topic or None))
            losses = _Losses(subscriber, as_json)
            made = Source(without_secrets(address), subscriber, values, losses, head.encode(), began_ns)
            made.takes = parse(where).scheme == "broker"
            if "start" in parse(where).options:
                made.past = "network" if parse(where).scheme == "tcp" else "disk"
            sources.append(made)
        if all(known):  # of several addresses, one that has a field is enough
            check_paths([one for schemas in known for one in schemas], [*paths, *(passes.paths if passes else ())])
        reader = Reader(sources, write, passes, expression or "")
        try:
            complete = reader.run(count, timeout, exit_at_end)
            hint = "" if complete else f": {reader.unmatched()}" if reader.unmatched() else silence.hint(addresses)
        finally:
            for source in sources:
                source.losses.look()
                if ledger:
                    _print_ledger(source.subscriber)
    if not complete:
        exits.told(f"{', '.join(s.address for s in sources)}: nothing came for {timeout:g} s{hint}")
        raise typer.Exit(exits.TIME_OVER)
    if exit_at_end and (lacking := [said for address in addresses if (said := silence.missing(address))]):
        for said in lacking:  # a misspelt name looks like the end of the messages
            exits.told(said)
        raise typer.Exit(exits.FAILED)


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
    unless it is inside of an object or list. Of a message that is not what is said of it, all are null, told once."""
    try:
        value = values(message)
    except ValueError as error:
        value = None
        if message.channel not in _UNREADABLE:
            _UNREADABLE.add(message.channel)
            exits.told(f"a message of {message.channel} cannot be read, its fields are null: {error} (told once)")
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


class _Losses:
    """Compares the ledger with its last state and reports what was lost in between."""

    def __init__(self, subscriber: Subscriber, as_json: bool) -> None:
        self._subscriber = subscriber
        self._json = as_json
        self._known: dict[str, int] = {}  # losses before the first check are reported too

    def _counts(self) -> dict[str, int]:
        """Losses by reason; what the user's own filter left out is no loss."""
        return {reason: count for reason, count in self._subscriber.ledger.dropped.items() if reason != "filtered"}

    def look(self) -> None:
        dropped = self._counts()
        if dropped == self._known:
            return
        fresh = {
            reason: n - self._known.get(reason, 0) for reason, n in dropped.items() if n != self._known.get(reason, 0)
        }
        self._known = dropped
        for reason, number in fresh.items():
            if self._json:
                print(json.dumps({"lost": number, "reason": reason}), file=sys.stderr, flush=True)
            else:
                exits.told(f"lost {number} message{'s' * (number != 1)}: {reason}")


@dataclass(slots=True)
class Source:
    """One address that is read; with several, ``head`` is printed before each of its messages."""

    address: str
    subscriber: Subscriber
    values: Values
    losses: _Losses
    head: bytes
    began_ns: int
    seen: int = 0
    takes: bool = False  # what it reads is gone for others: all of it is printed
    past: str = ""  # where reading starts; empty: with new messages, or with the history that the reach keeps
    last: int = 0  # the ordinal that was read last
    passed: bool = False  # a message came that was not there when it was opened

    @property
    def quiet_s(self) -> float:
        """How long it may be silent before that counts as its end; on disk one read is enough."""
        return 0.0 if self.past == "disk" or self.address.startswith("journal:") else QUIET_AT_END_S

    @property
    def _session(self) -> Any:
        """Its connection, where a publisher reads the past for it and has said how much that is."""
        sessions: Any = getattr(self.subscriber, "sessions", ()) if self.past == "network" else ()
        return next((one for one in sessions if one.frontier), None)

    @property
    def ended(self) -> bool:
        """Whether everything that existed when it was opened has been read."""
        session = self._session
        return self.passed or bool(session is not None and max(self.last + 1, session.place) >= session.frontier)

    def is_new(self, message: Message) -> bool:
        """Whether a message came after this was opened: by its number, else by its publisher's clock."""
        session = self._session
        if session is not None:
            new = bool(message.ordinal >= session.frontier)
        else:
            sessions: Any = getattr(self.subscriber, "sessions", ())
            offset = next((one.clock_offset_ns for one in sessions if one.clock_offset_ns is not None), 0)
            new = message.timestamp_ns > self.began_ns + offset
        self.passed = self.passed or new
        return new

    def missing(self) -> str:
        """What is missing of a past that its publisher does not send any more, in words; empty while it may come."""
        session = self._session
        if session is None or self.ended or session.connected:
            return ""
        read, all_of_it = max(0, self.last + 1 - session.place), session.frontier - session.place
        return f"{self.address}: its publisher is gone after {read} of the {all_of_it} messages that were there"


@dataclass(slots=True)
class Reader:
    """Prints the messages of all sources, and reports once why nothing arrives."""

    sources: list[Source]
    write: Write
    passes: Callable[..., bool] | None
    expression: str
    printed: int = 0
    silence_told: bool = False
    example: str = ""
    began: float = field(default_factory=time.monotonic)
    to_the_end: bool = False  # what comes after the start of this command is not printed

    def run(self, count: int | None, timeout: float | None, exit_at_end: bool) -> bool:
        """Run until the count or the end is reached (True), or nothing came for too long (False)."""
        read_at = printed_at = time.monotonic()
        at_end_s = max((source.quiet_s for source in self.sources), default=0.0)
        self.to_the_end = exit_at_end
        while count is None or self.printed < count:
            ends = [printed_at + timeout] if timeout is not None else []
            ends += [read_at + at_end_s] if exit_at_end else []
            before, wait_s = self.printed, min([0.5, *(end - time.monotonic() for end in ends)])
            came = self._round(None if count is None else count - self.printed, max(0.0, wait_s))
            now = time.monotonic()
            read_at = now if came else read_at
            if exit_at_end and all(source.ended for source in self.sources):
                return True
            if self.printed > before:
                printed_at = now
            elif exit_at_end and not came and now - read_at >= at_end_s and self._is_over():
                return True
            elif timeout is not None and now - printed_at >= timeout:
                return False
            else:
                self._tell_silence()
        return True

    def _is_over(self) -> bool:
        """Whether the silence of all sources is their end; raises where one broke off before its end."""
        for source in self.sources:
            if said := source.missing():
                exits.told(said)
                raise typer.Exit(exits.FAILED)
        return all(source._session is None or source.ended for source in self.sources)

    def _round(self, most: int | None, wait_s: float) -> int:
        """Wait for one of the sources, then print what each has; returns how many messages came."""
        if len(self.sources) == 1:
            return self._some(self.sources[0], most, wait_s)
        came = 0
        for source in self.sources:
            if most is None or came < most:
                came += self._some(source, None if most is None else most - came, 0)
        if not came:
            waiting = select.poll()  # select takes no descriptor above 1023
            for source in self.sources:
                waiting.register(source.subscriber.fileno(), select.POLLIN)
            waiting.poll(wait_s * 1000)
        return came

    def _some(self, source: Source, most: int | None, wait_s: float) -> int:
        """Print some messages; all of them are released when this returns."""
        out = sys.stdout.buffer
        batch = source.subscriber.read_many(min(256, most or 256), wait_s)
        before = self.printed
        for message in batch:
            if self.to_the_end and source.is_new(message) and not source.takes:
                break
            if self.passes is None or self.passes(message, source.values):
                out.write(source.head + self.write(message, source.values))
                self.printed += 1
            source.last = message.ordinal
        if self.printed > before:
            out.flush()
        elif len(batch):
            self.example = self.example or decode.example(batch[0], source.values)
        source.seen += len(batch)
        source.losses.look()
        return len(batch)

    def unmatched(self) -> str:
        """Says how many messages the filter held back, if all that came were; else empty."""
        seen = sum(source.seen for source in self.sources)
        if self.printed or not seen:
            return ""
        return f"{seen} came, and none passes the filter {self.expression!r}; one of them: {self.example}"

    def _tell_silence(self) -> None:
        """Print one line if nothing was printed for a second."""
        if self.silence_told or self.printed or time.monotonic() - self.began < silence.TELL_AFTER_S:
            return
        self.silence_told = True
        if said := self.unmatched():
            exits.told(said)
        elif len(self.sources) == 1:
            silence.tell(self.sources[0].address, self.sources[0].subscriber)
        else:
            exits.told(f"nothing came yet from any of {len(self.sources)} addresses")


def _print_ledger(subscriber: Subscriber) -> None:
    ledger: Any = subscriber.ledger
    fields = {name: getattr(ledger, name) for name in ("matched", "delivered", "expired", "in_flight", "redelivered")}
    print(json.dumps({**fields, "dropped": dict(ledger.dropped), "balanced": ledger.balanced}), file=sys.stderr)
