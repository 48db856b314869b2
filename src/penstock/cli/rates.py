"""``penstock hz`` and ``penstock bw``: rates from shared counters, without subscribing."""

from __future__ import annotations

import time
from collections import deque
from typing import Annotated

import typer

from penstock import address as addresses
from penstock.cli import exits, show
from penstock.cli.target import SeenAddressArgument
from penstock.observe.rates import PRODUCERS, flow
from penstock.observe.snapshot import Block, live, matching
from penstock.printable import command

hz_app = typer.Typer()
bw_app = typer.Typer()

Window = Annotated[float, typer.Option(min=0.1, help="Seconds that the rolling mean reaches back.")]
Every = Annotated[float, typer.Option(min=0.05, help="Seconds between two lines.")]
Count = Annotated[int | None, typer.Option("--count", "-n", min=1, help="End after so many lines.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]


@hz_app.command()
def hz(
    address: SeenAddressArgument, window: Window = 5.0, every: Every = 1.0, count: Count = None, as_json: Json = False
) -> None:
    """Messages per second of an address, rolling, without disturbing the publisher.

    Example: [green]penstock hz shm:/camera --count 5[/]
    """
    _roll(address, window, every, count, as_json, "messages")


@bw_app.command()
def bw(
    address: SeenAddressArgument, window: Window = 5.0, every: Every = 1.0, count: Count = None, as_json: Json = False
) -> None:
    """Bytes per second of an address, rolling, without disturbing the publisher.

    Example: [green]penstock bw shm:/camera --count 5[/]
    """
    _roll(address, window, every, count, as_json, "bytes")


class Meter:
    """Sums what the blocks of one address counted; handles that come and go do not make the sum jump."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._known: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.messages = self.bytes = 0
        self.role = "nobody"

    def look(self) -> None:
        """Add what was counted since the last call."""
        chosen = self._choose(matching(live(), self.address))
        fresh = {}
        for block in chosen:
            now = (flow(block), block.bytes)
            before = self._known.get(block.key, now)
            self.messages += max(0, now[0] - before[0])
            self.bytes += max(0, now[1] - before[1])
            fresh[block.key] = now
        self._known = fresh

    def _choose(self, blocks: list[Block]) -> list[Block]:
        """The publishers; if none is visible (they are on another machine), the busiest reader."""
        publishers = [block for block in blocks if block.kind in PRODUCERS]
        if publishers:
            self.role = f"{len(publishers)} publisher{'s' * (len(publishers) != 1)}"
            return publishers
        if writers := [block for block in blocks if block.kind == "writer"]:
            self.role = f"{len(writers)} writer{'s' * (len(writers) != 1)}"
            return writers
        self.role = "a subscriber (no publisher on this machine)" if blocks else "nobody"
        return sorted(blocks, key=flow)[-1:]


def _roll(address: str, window: float, every: float, count: int | None, as_json: bool, what: str) -> None:
    shown = addresses.without_secrets(address)
    meter = Meter(address)
    meter.look()
    if meter.role == "nobody":
        addresses.parse(address)
        far = "; what others publish is measured where they are" if shown.startswith(("tcp:", "broker:")) else ""
        exits.told(f"nobody on this machine has {shown} open{far}; {command('why', shown)} may tell more")
        raise typer.Exit(exits.FAILED)
    samples = deque([(time.monotonic(), meter.messages, meter.bytes)])
    printed = 0
    while count is None or printed < count:
        time.sleep(every)
        meter.look()
        now = time.monotonic()
        samples.append((now, meter.messages, meter.bytes))
        while len(samples) > 2 and samples[1][0] <= now - window:
            samples.popleft()
        seconds = now - samples[0][0]
        rate = (meter.messages - samples[0][1]) / seconds
        speed = (meter.bytes - samples[0][2]) / seconds
        printed += 1
        if as_json:
            show.print_json(
                {"address": shown, "messages_hz": rate, "bytes_hz": speed, "window_s": seconds, "of": meter.role}
            )
        elif what == "messages":
            print(f"{rate:12.2f} messages/s  over {seconds:4.1f} s  of {meter.role}", flush=True)
        else:
            each = show.bytes_text(speed / rate) if rate else "-"
            print(
                f"{show.bytes_text(speed, '/s'):>12}  mean {each} a message  over {seconds:4.1f} s  of {meter.role}",
                flush=True,
            )
