"""``penstock replay``: a recording into a gateway or a bus program, in recorded time, the same way every time."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import exits, show
from penstock.cli.target import TopicOption
from penstock.errors import InvalidArgument
from penstock.printable import printable
from penstock.secrecy import without_secrets

if TYPE_CHECKING:
    from penstock._core import Message
    from penstock.replay import Break, Input, Output, Rule, Script, Target
    from penstock.replay.rule import Shown

app = typer.Typer()
SHOWN_BYTES = 200
SHOWN_INPUTS = 20
CLOCKS = ("virtual", "real")


@app.command()
def replay(
    recording: Annotated[Path | None, typer.Argument(help="A recording, or any journal.", show_default=False)] = None,
    into: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="A gateway's file, or a program (.py) on bus: addresses."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Store the output here; with --bisect the inputs that are needed."),
    ] = None,
    clock: Annotated[
        str, typer.Option(metavar="virtual|real", help="As fast as it goes, or as slowly as it was recorded.")
    ] = "virtual",
    rule: Annotated[
        str | None, typer.Option(metavar="EXPRESSION", help="Find the first output message that breaks this.")
    ] = None,
    bisect: Annotated[
        str | None,
        typer.Option(metavar="EXPRESSION", help="The same; then leave out every input that is not needed for it."),
    ] = None,
    judged: Annotated[
        list[str] | None,
        typer.Option("--about", metavar="TOPIC", help="The rule is about these outputs; * and > as in topics."),
    ] = None,
    mapping: Annotated[
        list[str] | None,
        typer.Option("--map", "-m", metavar="TOPIC=SOURCE", help="The address or module that a topic stands for."),
    ] = None,
    capture: Annotated[
        list[str] | None, typer.Option(metavar="bus:NAME", help="Of a program: where it publishes its output.")
    ] = None,
    topic: TopicOption = None,
    start: Annotated[
        str | None, typer.Option("--from", help="Begin here: an ISO time, or 10s for ten seconds after the start.")
    ] = None,
    length: Annotated[str | None, typer.Option("--for", help="Replay so much of it: 30s, 5m.")] = None,
    seed: Annotated[int, typer.Option(help="What random numbers begin with.")] = 0,
    max_runs: Annotated[int, typer.Option(min=1, help="Replays that --bisect may take.")] = 1000,
    verify: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="OUT1 OUT2", help="Compare two outputs instead; code 4 where they differ."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay a recording into a gateway or a program: same input, same output, byte for byte.

    Messages come in the recorded order with their recorded times and ordinals; timers run in recorded time. All runs on
    one thread. The recording stands for addresses and for modules that reach outside: nothing is opened, nothing is
    sent; the output holds what modules publish and what would have left. Modules in processes of their own and native
    ones are refused. To publish a recording at real addresses, see 'penstock play'.

    A rule is an expression as filters have it ('value.speed < 80', 'size < 1000'), kept by every output message that
    has the fields it names. Code 4 says that it is broken.

    Example: [green]penstock replay run1 --into plant.toml -o out1[/], again to out2, then
    [green]penstock replay --verify out1 out2[/]
    """
    if verify is not None:
        if recording is not None or into is not None:
            raise typer.BadParameter("--verify compares two outputs: it takes no recording and no --into")
        _verify(*verify, as_json)
        return
    exits.choice(clock, CLOCKS, "--clock")
    if recording is None or into is None:
        raise typer.BadParameter("RECORDING --into GATEWAY.toml is what is needed, or --verify OUT1 OUT2")
    if rule is not None and bisect is not None:
        raise typer.BadParameter("give --rule or --bisect, not both")
    from penstock.replay import Rule, Script, target

    expression = bisect if bisect is not None else rule
    found = None if expression is None else Rule(expression, judged)
    place = target(into, mapping, capture or ())
    with Script(recording, topic, start, length) as script:
        sources = _sources(script, place, mapping)
        if found is None:
            _run(script, place, sources, output, seed, clock == "real", as_json)
        else:
            shrinking = _Shrinking(max_runs, output) if bisect is not None else None
            _judge(script, place, sources, found, shrinking, seed, as_json)


def _sources(script: Script, place: Target, mapping: list[str] | None) -> dict[str, str]:
    for gap in script.story.missing():
        exits.told(f"{script.directory}: {gap}")
    found = place.sources(script.topics, script.story.addresses, mapping)
    if not found:
        raise InvalidArgument(
            f"no topic of {script.directory} ({', '.join(script.topics[:5]) or 'there is none'}) belongs to a source "
            "of the gateway; give --map TOPIC=SOURCE"
        )
    if left_out := [name for name in script.topics if name not in found]:
        exits.told(f"left out, no source has them: {', '.join(left_out[:5])} (--map TOPIC=SOURCE)")
    if unfed := place.unfed(found):
        exits.told(f"silent, no topic stands for them: {', '.join(unfed[:5])} (--map TOPIC=SOURCE)")
    return found


def _run(
    script: Script, place: Target, sources: dict[str, str], out: Path | None, seed: int, paced: bool, as_json: bool
) -> None:
    from penstock.replay import replay as run_once

    with _stored(out) as stored:
        report = run_once(
            place,
            script.inputs(sources),
            script.times_ns(sources),
            on_published=stored.published,
            on_left=stored.left,
            seed=seed,
            paced=paced,
        )
    if as_json:
        show.print_json({"inputs": report.inputs, "outputs": stored.messages, "recorded_seconds": report.recorded_s,
                         "seconds": round(report.seconds, 6)})  # fmt: skip
    else:
        print(f"replayed {show.count_text(report.inputs)} messages of {report.recorded_s:.1f} s in "
              f"{report.seconds:.2f} s: {show.count_text(stored.messages)} in the output")  # fmt: skip


class _Counted:
    """An output that nobody wants to keep."""

    messages = 0

    def published(self, name: str, message: Any) -> None:
        self.messages += 1

    left = published


@contextlib.contextmanager
def _stored(out: Path | None) -> Iterator[Output | _Counted]:
    if out is None:
        yield _Counted()
        return
    from penstock.replay import Output

    with Output(out) as stored:
        yield stored


# ---- rules


@dataclass(frozen=True, slots=True)
class _Shrinking:
    """How many replays it may take, and where the inputs that are left go."""

    max_runs: int
    output: Path | None


def _judge(
    script: Script,
    place: Target,
    sources: dict[str, str],
    rule: Rule,
    shrinking: _Shrinking | None,
    seed: int,
    as_json: bool,
) -> None:
    from penstock.replay import first_break, shrink
    from penstock.replay.rule import MAX_INPUTS

    times_ns = script.times_ns(sources)
    found = first_break(place, script.inputs(sources), times_ns, rule, seed=seed)
    if found is None:
        if as_json:
            show.print_json({"rule": rule.expression, "holds": True})
        else:
            print(f"{rule.expression}: holds for every message of the output")
        return
    result = _break_json(rule, found)
    if not as_json:
        _print_break(rule, found)
    if shrinking is not None:
        if found.inputs > MAX_INPUTS:
            raise InvalidArgument(f"{found.inputs} inputs before the break are too many to shrink (--from)")
        inputs = list(islice(script.inputs(sources), found.inputs))
        needed, least, runs = shrink(place, inputs, times_ns, rule, found, seed=seed, max_runs=shrinking.max_runs)
        if shrinking.output is not None:
            _store_inputs(shrinking.output, script, needed, (times_ns[0], found.shown.time_ns))
        result.update(needed=[_input_json(one) for one in needed], least=least, replays=runs)
        if not as_json:
            _print_needed(needed, found.inputs, least, runs, shrinking.output)
    if as_json:
        show.print_json(result)
    raise typer.Exit(exits.WRONG)


def _store_inputs(out: Path, script: Script, needed: list[Input], span_ns: tuple[int, int]) -> None:
    """As a recording that is replayed from and to the same moments: timers tick as they did."""
    from penstock.journal import Entry
    from penstock.recording.tape import Plan, Tape

    topics = {at: name for name, at in script.story.addresses.items()}
    tape = Tape(Plan(out, topics))
    tape.tell({"event": "span", "first_ns": span_ns[0], "last_ns": span_ns[1]})
    entries = [
        Entry(one.message.channel or "", bytes(one.message), dict(one.message.properties),
              timestamp_ns=one.message.timestamp_ns)
        for one in needed
    ]  # fmt: skip
    tape.commit(entries, sum(len(entry.data) for entry in entries))
    tape.end({})


def _print_break(rule: Rule, found: Break) -> None:
    print(f"{rule.expression}: broken by message {found.number} of the output, after {found.inputs} inputs")
    for shown in found.before:
        print(f"  {_line(shown.topic, shown.time_ns, shown.payload)}")
    print(f"> {_line(found.shown.topic, found.shown.time_ns, found.shown.payload)}")
    for shown in found.after:
        print(f"  {_line(shown.topic, shown.time_ns, shown.payload)}")


def _print_needed(needed: list[Input], before: int, least: bool, runs: int, out: Path | None) -> None:
    end = "none can be left out" if least else "not the least: --max-runs ended it"
    stored = f", stored in {out}" if out else ""
    print(f"{len(needed)} of {before} inputs are needed ({runs} replays; {end}){stored}")
    for one in needed[:SHOWN_INPUTS]:
        message = one.message
        print(f"  {_line(message.channel or '', message.timestamp_ns, bytes(message))}")
    if len(needed) > SHOWN_INPUTS:
        print(f"  and {len(needed) - SHOWN_INPUTS} more")


def _line(topic: str, time_ns: int, payload: bytes) -> str:
    text = payload[:SHOWN_BYTES].decode(errors="backslashreplace")
    return printable(f"{_when(time_ns)}  {topic}  {text}{'...' if len(payload) > SHOWN_BYTES else ''}")


def _when(time_ns: int) -> str:
    seconds, rest = divmod(time_ns, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:09d}"


def _break_json(rule: Rule, found: Break) -> dict[str, Any]:
    return {
        "rule": rule.expression,
        "holds": False,
        "message": _shown_json(found.shown),
        "number": found.number,
        "inputs": found.inputs,
        "before": [_shown_json(shown) for shown in found.before],
        "after": [_shown_json(shown) for shown in found.after],
    }


def _shown_json(shown: Shown) -> dict[str, Any]:
    return _message_json(shown.topic, shown.time_ns, shown.properties, shown.payload)


def _input_json(one: Input) -> dict[str, Any]:
    message = one.message
    found = _message_json(message.channel or "", message.timestamp_ns, dict(message.properties), bytes(message))
    return {**found, "source": without_secrets(one.source), "ordinal": message.ordinal}


def _message_json(topic: str, time_ns: int, properties: dict[str, str], payload: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {"topic": topic, "time_ns": time_ns, "properties": properties}
    try:
        return {**found, "payload": payload.decode()}
    except UnicodeDecodeError:
        return {**found, "base64": base64.b64encode(payload).decode()}


# ---- comparing


def _verify(first: Path, second: Path, as_json: bool) -> None:
    from penstock.replay import first_difference

    found, equal = first_difference(first, second)
    if as_json:
        show.print_json({
            "equal": found is None,
            "messages": equal,
            **({} if found is None else {"differ_in": found.fields, "first": _maybe(found.first),
                                         "second": _maybe(found.second)}),
        })  # fmt: skip
    elif found is None:
        print(f"equal: {show.count_text(equal)} messages")
    else:
        what = ", ".join(found.fields)
        print(f"message {found.number} differs in {what}; {show.count_text(equal)} before it are equal")
        for path, message in ((first, found.first), (second, found.second)):
            print(f"  {path}: {'has ended' if message is None else _full_line(message)}")
    if found is not None:
        raise typer.Exit(exits.WRONG)


def _full_line(message: Message) -> str:
    line = _line(message.channel or "", message.timestamp_ns, bytes(message))
    return f"{line}  {printable(json.dumps(dict(message.properties)))} #{message.ordinal}"


def _maybe(message: Message | None) -> dict[str, Any] | None:
    if message is None:
        return None
    found = _message_json(message.channel or "", message.timestamp_ns, dict(message.properties), bytes(message))
    return {**found, "ordinal": message.ordinal}
