"""``penstock delay``: how old messages are when they arrive."""

from __future__ import annotations

import time
from collections import deque
from typing import Annotated, Any

import typer

import penstock
from penstock import address as addresses
from penstock.address import without_secrets
from penstock.cli import exits, show, silence
from penstock.cli.start import start_options
from penstock.cli.target import AddressArgument, OptionList, answer_within, with_options

app = typer.Typer()


@app.command()
def delay(
    address: AddressArgument,
    window: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="How many of the last messages the figures cover.")
    ] = 1000,
    every: Annotated[float, typer.Option(min=0.05, help="Seconds between two lines.")] = 1.0,
    count: Annotated[int | None, typer.Option("--count", "-n", min=1, help="End after so many lines.")] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.0, help="End with code 3 when no message arrives for so many seconds.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for a publisher that cannot be reached yet.")] = False,
    option: OptionList = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """How old messages are when they arrive: now minus the timestamp that the publisher gave.

    It subscribes, because only a reader knows the age of a message, and starts with the next message that is published.
    Between machines the difference of their clocks is part of the figure, and may make it negative.

    Example: [green]penstock delay shm:/camera --count 5[/]
    """
    shown = without_secrets(address)
    ages_s: deque[float] = deque(maxlen=window)
    where = with_options(address, option)
    more = {**_from_now(where), **answer_within(address, option, timeout)}
    silence.refuse_nobody(addresses.parse(where), wait)
    with penstock.subscriber(where, **more) as subscriber:
        if not wait:
            silence.refuse_unreachable(address, subscriber, timeout)
        printed = 0
        silence_told = False
        due = time.monotonic() + every
        heard = time.monotonic()
        while count is None or printed < count:
            fresh = _ages(subscriber, max(0.0, min(0.2, due - time.monotonic())))
            ages_s.extend(fresh)
            if fresh:
                heard = time.monotonic()
            if timeout is not None and time.monotonic() - heard >= timeout:
                exits.told(f"{shown}: nothing came for {timeout:g} s{silence.hint([where])}")
                raise typer.Exit(exits.TIME_OVER)
            if time.monotonic() >= due:
                due += every
                if ages_s:
                    _line(sorted(ages_s), as_json)
                    printed += 1
                elif not silence_told:
                    silence_told = True
                    silence.tell(shown, subscriber, where)


def _from_now(where: str) -> dict[str, Any]:
    """Skip stored messages, whose age says nothing about latency, unless the address asks for them."""
    options = start_options(where, None, "end")
    return {name: value for name, value in options.items() if name not in addresses.parse(where).options}


def _ages(subscriber: penstock.Subscriber, timeout: float) -> list[float]:
    """The ages in seconds; the messages are released when this returns."""
    batch = subscriber.read_many(256, timeout)
    now_ns = time.time_ns()
    return [(now_ns - message.timestamp_ns) / 1e9 for message in batch]


def _line(ages: list[float], as_json: bool) -> None:
    def at(part: float) -> float:
        return ages[min(len(ages) - 1, int(part * len(ages)))]

    mean = sum(ages) / len(ages)
    if as_json:
        show.print_json(
            {
                "messages": len(ages),
                "mean_s": mean,
                "least_s": ages[0],
                "p50_s": at(0.5),
                "p99_s": at(0.99),
                "most_s": ages[-1],
            }
        )
        return
    text = show.seconds_text
    print(
        f"mean {text(mean)}  least {text(ages[0])}  p50 {text(at(0.5))}  p99 {text(at(0.99))}  most {text(ages[-1])}"
        f"  of {show.number_of(len(ages), 'message')}", flush=True,
    )  # fmt: skip
