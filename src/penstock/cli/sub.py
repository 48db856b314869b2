"""``penstock sub``: messages of any address on standard output, losses on standard error as they happen."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

import penstock
from penstock.address import without_secrets
from penstock.channel import Subscriber
from penstock.cli import exits
from penstock.cli.start import start_options
from penstock.cli.target import AddressArgument, OptionList, answer_within, with_options
from penstock.errors import InvalidArgument
from penstock.observe import decode
from penstock.observe.filter import compile_filter

if TYPE_CHECKING:
    from penstock._core import Message

app = typer.Typer()

Write = Callable[["Message"], bytes]


@app.command()
def sub(
    address: AddressArgument,
    count: Annotated[int | None, typer.Option("--count", "-n", min=1, help="End after so many messages.")] = None,
    form: Annotated[
        decode.Format, typer.Option("--format", "-f", help="How bodies are printed; raw adds nothing between them.")
    ] = decode.Format.TEXT,
    template: Annotated[
        str | None,
        typer.Option("--template", "-t", help="A line of your own, such as '{ordinal} {time} {channel} {body}'."),
    ] = None,
    expression: Annotated[
        str | None,
        typer.Option("--filter", help="Only messages for which this holds, such as 'size > 100 and .ok == true'."),
    ] = None,
    since: Annotated[str | None, typer.Option(help="From a time on: an ISO time or '5m' (kept messages only).")] = None,
    first: Annotated[int | None, typer.Option("--from", min=0, help="From an ordinal on (kept messages only).")] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.0, help="End with code 3 when nothing came for so many seconds.")
    ] = None,
    option: OptionList = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a message, with all that it carries.")
    ] = False,
    ledger: Annotated[bool, typer.Option(help="Print the ledger on standard error at the end.")] = False,
) -> None:
    """Read messages from any address.

    What was lost is printed on standard error as it happens. Filters know size, ordinal, timestamp, age, channel,
    position, id, vchan_id, body, properties.NAME and fields of a JSON body as .name; and, or, not, in, contains,
    startswith, endswith, like.

    Example: [green]penstock sub shm:/room --filter '.celsius > 20.5' --count 10[/]
    """
    passes = compile_filter(expression) if expression else None
    write = _writer(form, template, as_json)
    more = start_options(address, since, first)
    with penstock.subscriber(
        with_options(address, option, **answer_within(address, option, timeout)), **more
    ) as subscriber:
        told = _Losses(subscriber, as_json)
        try:
            complete = _listen(subscriber, write, passes, count, timeout, told)
        finally:
            told.look()
            if ledger:
                _print_ledger(subscriber)
    if not complete:
        address = without_secrets(address)
        exits.told(f"{address}: nothing came for {timeout:g} s; 'penstock why {address}' may tell the reason")
        raise typer.Exit(exits.TIME_OVER)


def _writer(form: decode.Format, template: str | None, as_json: bool) -> Write:
    if as_json:
        if template:
            raise InvalidArgument("give --json or --template, not both")
        return lambda message: json.dumps(decode.record(message)).encode() + b"\n"
    if template is not None:
        fill = decode.formatter(template)
        return lambda message: fill(message).encode() + b"\n"
    return _WRITERS[form]


def _one_json(message: Message) -> bytes:
    return json.dumps(decode.body_value(bytes(message))).encode() + b"\n"


def _one_hex(message: Message) -> bytes:
    head = f"# ordinal {message.ordinal}, {message.size} bytes, {decode.iso_time(message.timestamp_ns)}\n"
    return head.encode() + decode.hexadecimal(bytes(message)).encode() + b"\n"


_WRITERS: dict[decode.Format, Write] = {
    decode.Format.TEXT: lambda message: decode.body_text(bytes(message)).encode() + b"\n",
    decode.Format.HEX: _one_hex,
    decode.Format.JSON: _one_json,
    decode.Format.RAW: bytes,
}


class _Losses:
    """Compares the ledger with what it was and tells what was lost in between."""

    def __init__(self, subscriber: Subscriber, as_json: bool) -> None:
        self._subscriber = subscriber
        self._json = as_json
        self._known = self._counts()

    def _counts(self) -> dict[str, int]:
        """By reason; what the user's own filter left out is no loss."""
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


def _listen(
    subscriber: Subscriber,
    write: Write,
    passes: Callable[[Message], bool] | None,
    count: int | None,
    timeout: float | None,
    losses: _Losses,
) -> bool:
    """Print messages until there were enough (True) or none came for too long (False)."""
    left = count
    quiet_since = time.monotonic()
    while left is None or left > 0:
        slice_s = 0.5 if timeout is None else min(0.5, max(0.0, quiet_since + timeout - time.monotonic()))
        came, printed = _print_some(subscriber, write, passes, left, slice_s)
        left = None if left is None else left - printed
        losses.look()
        if came:
            quiet_since = time.monotonic()
        elif timeout is not None and time.monotonic() - quiet_since >= timeout:
            return False
    return True


def _print_some(
    subscriber: Subscriber,
    write: Write,
    passes: Callable[[Message], bool] | None,
    most: int | None,
    timeout: float,
) -> tuple[int, int]:
    """How many came and how many were printed. Every message is given back when this returns."""
    out = sys.stdout.buffer
    batch = subscriber.read_many(min(256, most or 256), timeout)
    printed = 0
    for message in batch:
        if passes is None or passes(message):
            out.write(write(message))
            printed += 1
    if printed:
        out.flush()
    return len(batch), printed


def _print_ledger(subscriber: Subscriber) -> None:
    ledger: Any = subscriber.ledger
    fields = {name: getattr(ledger, name) for name in ("matched", "delivered", "expired", "in_flight", "redelivered")}
    print(json.dumps({**fields, "dropped": dict(ledger.dropped), "balanced": ledger.balanced}), file=sys.stderr)
