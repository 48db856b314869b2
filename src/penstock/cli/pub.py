"""``penstock pub``: publish messages made from a text, a template, a file or the lines of standard input."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

import penstock
from penstock.address import parse, without_secrets
from penstock.channel import Publisher
from penstock.cli import exits, silence
from penstock.cli.target import AddressArgument, OptionList, answer_within, with_options
from penstock.cli.template import compile_template
from penstock.errors import InvalidArgument, describe

app = typer.Typer()
MAX_BYTES = 512 << 20  # the largest body that is generated

#: Reaches at which a message without a subscriber is lost.
LIVE = ("shm", "tcp")


@app.command()
def pub(
    address: AddressArgument,
    body: Annotated[str | None, typer.Argument(help="The body; a template such as '{count} at {time}'.")] = None,
    count: Annotated[
        int | None,
        typer.Option("--count", "-n", min=0, help="How many; 0 for no end. Default: 1, or all of the input."),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.0, help="Messages per second; without it, as fast as it goes.")
    ] = None,
    size: Annotated[
        int | None, typer.Option(min=0, max=MAX_BYTES, help="Cut or fill (with '.') each body to this many bytes.")
    ] = None,
    file: Annotated[
        str | None,
        typer.Option("--file", "-f", help="A file as one body; '-' reads a message from each line of input."),
    ] = None,
    lines: Annotated[bool, typer.Option(help="Each line of --file is a message.")] = False,
    properties: Annotated[
        list[str] | None,
        typer.Option("--property", "-p", metavar="NAME=VALUE", help="Of each message, where messages have properties."),
    ] = None,
    wait: Annotated[
        int | None,
        typer.Option(min=0, help="Wait for so many subscribers first. Default: 1 where nothing is on disk, else 0."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds to wait for subscribers, a broker or room; then code 3.")
    ] = 30.0,
    history: Annotated[
        str | None, typer.Option(help="Keep for later subscribers: a number of messages, or a time such as '5 s'.")
    ] = None,
    latest: Annotated[bool, typer.Option("--latest", help="Keep the last message for later subscribers.")] = False,
    durable: Annotated[
        str | None, typer.Option(metavar="DIRECTORY", help="Store all messages on disk, for subscribers with --start.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same random values each time.")] = None,
    option: OptionList = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was published as one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing.")] = False,
) -> None:
    """Publish messages to any address.

    Templates know {count}, {time}, {time_ns}, {random:LOW:HIGH}, {integer:LOW:HIGH}, {gauss:MIDDLE:DEVIATION},
    {sine:PERIOD}, {choice:a,b}, {uuid}, {pid}; every other brace is left as it is.

    Example: [green]penstock pub shm:/room '{"n": {count}, "celsius": {gauss:20:0.5}}' --count 100 --rate 10[/]
    """
    shown = without_secrets(address)
    bodies = _bodies(body, file, lines, size, seed, count)
    scheme = address.partition(":")[0]
    kept = {"history": history, "latest": latest or None, "durable": durable}
    where = with_options(address, option, **{name: value for name, value in kept.items() if value is not None})
    within = answer_within(address, option, timeout, ("broker", "shm", "tcp"))
    silence.refuse_nobody(parse(where), wait=bool(wait) or None)
    with contextlib.ExitStack() as stack:
        with silence.told_after(address):
            publisher = stack.enter_context(penstock.publisher(where, **within))
        more = _properties(publisher, properties, shown)
        _wait(publisher, wait if wait is not None else int(scheme in LIVE and durable is None), timeout, shown)
        started = time.monotonic()
        try:
            published, total = _publish(publisher, bodies, rate, more)
        except TimeoutError as error:
            # asked now: the channel may disappear when this process ends; a broker's client has told what it knows
            said = "" if scheme == "broker" else silence.reason(address)
            raise TimeoutError(f"{describe(error)}: {said}" if said else describe(error)) from None
        seconds = time.monotonic() - started
        ledger = publisher.ledger
    if quiet:
        return
    if as_json:
        out = {"address": shown, "published": published, "bytes": total, "seconds": round(seconds, 6)}
        print(json.dumps({**out, "dropped": dict(ledger.dropped)}))
    else:
        lost = f", {ledger.lost} dropped" if ledger.lost else ""
        print(
            f"published {published} message{'s' * (published != 1)}, {total} bytes in {seconds:.3f} s{lost}",
            file=sys.stderr,
        )


def _bodies(
    body: str | None, file: str | None, lines: bool, size: int | None, seed: int | None, count: int | None
) -> Iterator[bytes]:
    """The bodies in order, as many as requested. Errors in reading are raised now, not at the first body."""
    if body is not None and file is not None:
        raise InvalidArgument("give a body or --file, not both")
    if body == "-" or (body is None and file is None and size is None):
        body, file = None, "-"
    if file == "-":
        source: Iterator[bytes] = _lines(sys.stdin.buffer)
    elif file is not None and lines:
        source = _lines(Path(file).open("rb"))  # noqa: SIM115 - read to its end below
    elif file is not None:
        content = Path(file).read_bytes()
        source = _repeat(lambda _: content)
        count = 1 if count is None else count
    else:
        source = _repeat(compile_template(body or "", seed))
        count = 1 if count is None else count
    return _limited(source, size, count)


def _limited(source: Iterator[bytes], size: int | None, count: int | None) -> Iterator[bytes]:
    for made in itertools.islice(source, count or None):
        yield made if size is None else made[:size].ljust(size, b".")


def _lines(stream: Iterable[bytes]) -> Iterator[bytes]:
    for line in stream:
        yield line.rstrip(b"\r\n")


def _repeat(make: Any) -> Iterator[bytes]:
    number = 0
    while True:
        number += 1
        yield make(number)


def _wait(publisher: Publisher, subscribers: int, timeout: float, address: str) -> None:
    if subscribers and not publisher.wait_ready(subscribers, 0):
        deadline = time.monotonic() + timeout
        tell_at = time.monotonic() + (0 if sys.stderr.isatty() else silence.TELL_AFTER_S)
        while not publisher.wait_ready(subscribers, min(0.5, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= tell_at:
                tell_at = math.inf
                told = f"waiting for {subscribers} subscriber(s) of {address}; --wait 0 does not wait"
                print(told, file=sys.stderr, flush=True)
            if time.monotonic() >= deadline:
                few = "no subscriber" if subscribers == 1 else f"fewer than {subscribers} subscribers"
                remedy = "start one, or give a longer --timeout, or --wait 0"
                raise TimeoutError(f"{address}: {few} after {timeout:g} s; {remedy}")


def _properties(publisher: Publisher, given: list[str] | None, address: str) -> dict[str, Any]:
    """Keyword arguments for ``publish``: properties where the reach carries them."""
    for pair in given or []:
        if not pair.partition("=")[0] or "=" not in pair:
            raise InvalidArgument(f"--property {pair!r} is not of the form NAME=VALUE")
    pairs = dict(pair.partition("=")[::2] for pair in given or [])
    carried = publisher.carries_properties
    if pairs and not carried:
        raise InvalidArgument(f"{address}: messages of this reach have no properties")
    if carried:
        from penstock.observe.trace import inject

        inject(pairs)
    return {"properties": pairs} if pairs else {}


def _publish(
    publisher: Publisher, bodies: Iterator[bytes], rate: float | None, more: dict[str, Any]
) -> tuple[int, int]:
    published = total = 0
    start = time.monotonic()
    try:
        for made in bodies:
            if rate:
                left = start + published / rate - time.monotonic()
                if left > 0:
                    time.sleep(left)
            publisher.publish(made, **more)
            published += 1
            total += len(made)
    except exits.STOPPED:
        if not published:
            raise
    return published, total
