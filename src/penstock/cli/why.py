"""``penstock why``: explains why nothing arrives."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from penstock.cli import exits, show
from penstock.cli.target import OptionList, SeenAddressArgument, with_options
from penstock.observe.explain import explain, explain_filter
from penstock.observe.memory import seen
from penstock.observe.snapshot import named

app = typer.Typer()


@app.command()
def why(
    address: SeenAddressArgument,
    expression: Annotated[
        str | None, typer.Option("--filter", help="Also read for a while and see whether this filter matches anything.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to read for --filter.")] = 3.0,
    option: OptionList = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a finding.")] = False,
) -> None:
    """Explain why nothing arrives.

    Reasons are for example: nobody publishes, the types differ, a process holds all slots, a queue is paused or without
    credit, a process is stopped, a filter matches nothing. It reads shared counters and asks the broker; only for
    --filter it reads messages. Ends with code 4 when it found a reason.

    Example: [green]penstock why shm:/camera --filter '.celsius > 20'[/]
    """
    where = address if named(seen(), address) else with_options(address, option)
    findings = explain(where)
    if expression is not None:
        findings.append(explain_filter(where, expression, seconds))
    grave = [finding for finding in findings if finding.grave]
    if as_json:
        for finding in findings:
            show.print_json(asdict(finding))
    else:
        console = show.console()
        for finding in findings:
            mark = Text("!!", style="red") if finding.grave else Text("--", style="dim")  # a fact, good or bad
            show.print_indented(console, mark, finding.text)
            if finding.remedy:
                show.print_indented(console, Text("   ->"), finding.remedy)
        if not grave:
            console.print("nothing is wrong that can be seen from here")
    if grave:
        raise typer.Exit(exits.WRONG)
