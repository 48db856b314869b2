"""``penstock replay``: a recording into a gateway or a bus program, in recorded time, the same way every time."""

from __future__ import annotations

import base64
import contextlib
import faulthandler
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import exits, show
from penstock.cli.target import TopicOption
from penstock.errors import InvalidArgument, PenstockError
from penstock.printable import printable
from penstock.secrecy import without_secrets

if TYPE_CHECKING:
    from penstock._core import Message
    from penstock.replay import Break, Failure, Input, Output, Report, Rule, Script, Target, Verdict
    from penstock.replay.rule import Shown

app = typer.Typer()
SHOWN_BYTES = 200
SHOWN_INPUTS = 20
TELL_TRIES_S = 2.0
LONG_NS = 366 * 86_400 * 10**9  # longer than anybody records: some publisher's clock was wrong
CLOCKS = ("virtual", "real")
#: Options that mean nothing beside another one: by what is asked for.
WITHOUT = {
    "--verify": ("into", "output", "clock", "rule", "bisect", "judged", "mapping", "capture", "topic", "start",
                 "length", "seed", "max_runs"),
    "--rule": ("output", "clock", "max_runs"),
    "--bisect": ("clock",),
    "a replay without a rule": ("judged", "max_runs"),
}  # fmt: skip


@app.command()
def replay(
    ctx: typer.Context,
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
        list[str] | None,
        typer.Option(metavar="EXPRESSION", help="Find the first output message that breaks this; also several."),
    ] = None,
    bisect: Annotated[
        list[str] | None,
        typer.Option(metavar="EXPRESSION", help="The same; then find the few inputs that suffice to break it."),
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
        list[str] | None,
        typer.Option(metavar="bus:NAME", help="For a program: the address on which it publishes its output."),
    ] = None,
    topic: TopicOption = None,
    start: Annotated[
        str | None, typer.Option("--from", help="Begin here: an ISO time, or 10s for ten seconds after the start.")
    ] = None,
    length: Annotated[str | None, typer.Option("--for", help="Replay so much of it: 30s, 5m.")] = None,
    seed: Annotated[int, typer.Option(help="The seed of the random numbers.")] = 0,
    max_runs: Annotated[int, typer.Option(min=1, help="How many replays --bisect may run.")] = 1000,
    verify: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="OUT1 OUT2", help="Compare two outputs instead; code 4 where they differ."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay a recording into a gateway or a program: same input, same output, byte for byte.

    Messages come in the recorded order with their recorded times and the ordinals of the recording, 1, 2, 3 ... in each
    topic; timers run in recorded time. All runs on one thread. The recording replaces all addresses and the modules
    that do I/O: nothing is opened, nothing is sent; the output holds what modules publish and what would have left.
    Modules in processes of their own and native ones are refused. To publish a recording at real addresses, see
    'penstock play'.

    A rule is an expression as filters have it ('value.speed < 80', 'size < 1000'), kept by every output message that
    has the fields it names. Code 4: a rule was broken, a rule applied to no message, or a module failed.

    Example: [green]penstock replay run1 --into plant.toml -o out1[/], again to out2, then
    [green]penstock replay --verify out1 out2[/]
    """
    if verify is not None:
        _refuse_beside(ctx, "--verify")
        if recording is not None:
            raise typer.BadParameter("--verify compares two outputs: it takes no recording")
        _verify(*verify, as_json)
        return
    if rule and bisect:
        raise typer.BadParameter("give --rule or --bisect, not both")
    if bisect and len(bisect) > 1:
        raise typer.BadParameter("give one --bisect, inputs are shrunk for one rule; --rule may be given several times")
    _refuse_beside(ctx, "--bisect" if bisect else "--rule" if rule else "a replay without a rule")
    exits.choice(clock, CLOCKS, "--clock")
    if recording is None:
        raise typer.BadParameter("a recording is missing: penstock replay RECORDING --into GATEWAY.toml, or "
                                 "penstock replay --verify OUT1 OUT2")  # fmt: skip
    if into is None:
        raise typer.BadParameter(f"--into is missing: what {recording} is replayed into, a gateway's file (.toml) "
                                 "or a program (.py). To publish it at addresses: penstock play")  # fmt: skip
    from penstock.recording.span import OPTIONS
    from penstock.replay import Rule, Script, target
    from penstock.replay.run import seeded

    rules = [_rule(Rule, expression, judged, "--bisect" if bisect else "--rule") for expression in bisect or rule or ()]
    if output is not None:
        _check_free(output, recording)
    _show_failures()
    with _stdout_kept(as_json), seeded(seed):  # modules are imported here
        place = target(into, mapping, capture or ())
    with Script(recording, topic, start, length, names=OPTIONS) as script:
        sources = _sources(script, place, mapping)
        if not rules:
            _run(script, place, sources, output, seed, clock == "real", as_json)
        elif bisect:
            again = ["--into", str(into), "--seed", str(seed)]
            for option, values in (("--map", mapping), ("--capture", capture)):
                again += [word for value in values or () for word in (option, value)]
            _bisect(script, place, sources, rules[0], _Shrinking(max_runs, output, again), seed, as_json)
        else:
            _judge(script, place, sources, rules, seed, as_json)


def _rule(kind: type[Rule], expression: str, judged: list[str] | None, option: str) -> Rule:
    if not expression.strip():
        raise InvalidArgument(f"{option} is empty; write a condition such as 'value.speed < 80'")
    try:
        return kind(expression, judged)
    except InvalidArgument as error:
        raise InvalidArgument(f"{option}: {str(error).removeprefix('filter: ')}") from error


def _refuse_beside(ctx: typer.Context, asked: str) -> None:
    """An option that would be ignored is a mistake of the caller."""
    flags = {one.name: max(one.opts, key=len) for one in ctx.command.params}
    given = [name for name in WITHOUT[asked] if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    if given:
        raise typer.BadParameter(f"{', '.join(flags[name] for name in given)} means nothing with {asked}")


def _check_free(out: Path, recording: Path) -> None:
    """Before the work, not after it."""
    from penstock.recording.story import is_journal

    # Inside of a recording it would be taken for a part of that, by the next reader or by whoever copies it.
    for folder in out.resolve().parents:
        if folder == recording.resolve() or is_journal(folder):
            raise InvalidArgument(f"{out} lies in the recording {folder}; what is stored needs a folder elsewhere")
    if out.exists() and not out.is_dir():
        raise InvalidArgument(f"{out} is no folder; what is stored needs a folder of its own")
    if out.exists() and any(out.iterdir()):
        raise InvalidArgument(f"{out} is not empty; what is stored needs a folder of its own")
    parent = next(one for one in (out, *out.absolute().parents) if one.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise InvalidArgument(f"{out} cannot be made: {parent} cannot be written")


@contextlib.contextmanager
def _stdout_kept(as_json: bool) -> Iterator[None]:
    """With --json standard output is for the object alone: what modules and their processes print meanwhile goes to
    standard error."""
    if not as_json:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _show_failures() -> None:
    """PENSTOCK_DEBUG shows where modules fail; else one line each stands at the end."""
    gateway = logging.getLogger("penstock.gateway")
    exits.log_to_stderr()
    if sys.stderr is sys.__stderr__:
        faulthandler.enable()  # the line of a module whose native code crashes
    if os.environ.get("PENSTOCK_DEBUG"):
        gateway.setLevel(logging.DEBUG)
    else:
        gateway.setLevel(logging.CRITICAL)
        logging.getLogger("penstock.bus").setLevel(logging.CRITICAL)


class _Sources(dict[str, str]):
    """The source of each topic; ``notes`` is what was told of them and of the recording."""

    def __init__(self, found: dict[str, str], notes: list[str]) -> None:
        super().__init__(found)
        self.notes = notes


def _sources(script: Script, place: Target, mapping: list[str] | None) -> _Sources:
    notes: list[str] = []

    def tell(text: str) -> None:
        notes.append(text)
        exits.told(text)

    for gap in script.story.missing():
        tell(f"{script.directory}: {gap}")
    if script.story.lost:
        were = "message was" if script.story.lost == 1 else "messages were"
        tell(f"{script.directory}: {show.count_text(script.story.lost)} {were} lost while it was recorded")
    if not script.topics:
        raise InvalidArgument(f"there is no message in {script.directory}: nothing to replay")
    found = place.sources(script.topics, script.story.addresses, mapping)
    if not found:
        raise InvalidArgument(
            f"no topic of {script.directory} ({', '.join(script.topics[:5])}) belongs to a source "
            "of the gateway; give --map TOPIC=SOURCE"
        )
    if left_out := [name for name in script.topics if name not in found]:
        tell(f"left out, no source has them: {', '.join(left_out[:5])} (--map TOPIC=SOURCE)")
    first_ns, last_ns = script.times_ns(found)
    if last_ns - first_ns > LONG_NS:
        tell(f"the recording goes from {_when(first_ns)} to {_when(last_ns)}: timers tick all the way (--from, --for)")
    if unfed := place.unfed(found):
        tell(f"silent, no topic stands for them: {', '.join(unfed[:5])} (--map TOPIC=SOURCE)")
    return _Sources(found, notes)


def _run(
    script: Script, place: Target, sources: _Sources, out: Path | None, seed: int, paced: bool, as_json: bool
) -> None:
    from penstock.replay import replay as run_once

    with _stored(out) as stored, _stdout_kept(as_json):
        report = run_once(
            place,
            script.inputs(sources),
            script.times_ns(sources),
            on_published=stored.published,
            on_left=stored.left,
            seed=seed,
            paced=paced,
            enough=lambda: stored.error is not None,
        )
    if as_json:
        show.print_json({"inputs": report.inputs, "outputs": stored.messages, "recorded_seconds": report.recorded_s,
                         "seconds": round(report.seconds, 6), **_report_json(report, sources)})  # fmt: skip
    else:
        print(f"replayed {_counted(report.inputs, 'message')} of {report.recorded_s:.1f} s in "
              f"{report.seconds:.2f} s: {show.count_text(stored.messages)} in the output")  # fmt: skip
    _tell(report)
    if not report.succeeded:
        raise typer.Exit(exits.WRONG)


def _tell(report: Report) -> None:
    """What a user must know beside the output."""
    if not report.inputs:
        exits.told("no message of the recording lies in the part that was asked for (--from, --for, --topic)")
    for failure in report.failures:
        exits.told(_failure_line(failure))
    for name, count in report.waiting.items():
        exits.told(f"at the end {show.count_text(count)} messages still waited for {name}")
    for sentence in report.notes:
        exits.told(sentence)


def _failure_line(failure: Failure) -> str:
    times = "" if failure.count == 1 else f", {show.count_text(failure.count)} times; the first"
    handled = " (tried again, sent to its error link, or made anew)" if failure.handled else ""
    return f"{failure.name} failed in {failure.step}{handled}{times}: {failure.error}"


def _report_json(report: Report, sources: _Sources) -> dict[str, Any]:
    failures = [{name: getattr(failure, name) for name in type(failure).__slots__} for failure in report.failures]
    return {"failures": failures, "waiting": report.waiting, "notes": [*sources.notes, *report.notes]}


class _Counted:
    """An output that nobody wants to keep."""

    messages = 0
    error = None

    def published(self, name: str, message: Any) -> None:
        self.messages += 1

    left = published


@contextlib.contextmanager
def _stored(out: Path | None) -> Iterator[Output | _Counted]:
    if out is None:
        yield _Counted()
        return
    from penstock.replay import Output

    with exits.about(out), Output(out) as stored:
        yield stored


# ---- rules


@dataclass(frozen=True, slots=True)
class _Shrinking:
    """Options for shrinking a failing input to the fewest messages that still break the rule: replays at most, the
    directory for the inputs that are left, and the options of the command that replays those.
    """

    max_runs: int
    output: Path | None
    again: list[str]


def _judge(script: Script, place: Target, sources: _Sources, rules: list[Rule], seed: int, as_json: bool) -> None:
    from penstock.replay import judge_all

    with _stdout_kept(as_json):
        verdicts = judge_all(place, script.inputs(sources), script.times_ns(sources), rules, seed=seed)
    if as_json:
        results = [_verdict_json(rule, verdict, sources) for rule, verdict in zip(rules, verdicts, strict=True)]
        show.print_json(results[0] if len(results) == 1 else {"rules": results})
    else:
        for rule, verdict in zip(rules, verdicts, strict=True):
            _print_verdict(rule, verdict)
    _tell(verdicts[0].report)  # one replay, one report
    if not all(verdict.holds and verdict.report.succeeded for verdict in verdicts):
        raise typer.Exit(exits.WRONG)


def _bisect(
    script: Script,
    place: Target,
    sources: _Sources,
    rule: Rule,
    shrinking: _Shrinking,
    seed: int,
    as_json: bool,
) -> None:
    from penstock.replay import apart, judge, shrink, store_inputs
    from penstock.replay.rule import MAX_INPUTS

    stopped: BaseException | None = None

    times_ns = script.times_ns(sources)
    # Each replay has a process of its own: what modules keep in classes and globals would change the next one.
    with _stdout_kept(as_json):
        verdict = apart(lambda: judge(place, script.inputs(sources), times_ns, rule, seed=seed))
    found, result = verdict.found, _verdict_json(rule, verdict, sources)
    if not as_json:
        _print_verdict(rule, verdict)
    _tell(verdict.report)
    if found is not None:
        if found.inputs > MAX_INPUTS:
            many = _counted(found.inputs, "input")
            raise InvalidArgument(f"{many} before the break are too many to shrink (--from)")
        least, confirmed = False, None
        try:
            with exits.undisturbed():  # reading many inputs takes seconds; who ends it then gets all of them
                tries = _Tries(list(islice(script.inputs(sources), found.inputs)))
            with _stdout_kept(as_json):
                _, least, _ = shrink(place, tries.left, times_ns, rule, found, seed=seed, max_runs=shrinking.max_runs,
                                     run=tries.run, on_smaller=tries.keep)  # fmt: skip
        except exits.STOPPED as stop:  # the inputs kept so far still break the rule, so they are a valid result
            stopped = stop
        with _folder(shrinking.output) as folder, exits.about(folder):
            try:
                with exits.undisturbed():
                    tries.tell()
                    if not as_json:
                        _print_needed(tries, found.inputs, least, stopped is not None)
                    if stopped is None or shrinking.output is not None:
                        store_inputs(folder, script, tries.left, (times_ns[0], found.shown.time_ns))
                    if not as_json and shrinking.output is not None:
                        print(f"stored in {shrinking.output}", flush=True)
                if stopped is None:
                    confirmed = _breaks_alone(folder, rule, found, shrinking.again)
            except exits.STOPPED as stop:
                stopped = stopped or stop
        needed = [_input_json(one) for one in tries.left]
        result.update(needed=needed, least=least, replays=tries.count, confirmed=confirmed)
        if confirmed is False:
            exits.told("in a new process these inputs do not break the rule: the modules use what a replay does not "
                       "control (the machine's time, files, random numbers of their own)")  # fmt: skip
    if as_json:
        show.print_json(result)
    if stopped is not None:
        raise stopped
    if found is not None or not verdict.holds or not verdict.report.succeeded:
        raise typer.Exit(exits.WRONG)


class _Tries:
    """The replays of a shrinking, each in a process of its own, and the inputs that are left."""

    def __init__(self, inputs: list[Input]) -> None:
        self.left = inputs
        self.count = 0
        self._failed = 0  # that came to no end
        self._first: PenstockError | None = None
        self._told_s = time.monotonic()

    def keep(self, left: list[Input]) -> None:
        self.left = left

    def run(self, replays: Callable[[], bool]) -> bool:
        from penstock.replay import apart

        self.count += 1
        if sys.stderr.isatty() and time.monotonic() > self._told_s + TELL_TRIES_S:
            self._told_s = time.monotonic()
            print(f"shrinking: replay {self.count}, {_counted(len(self.left), 'input')} left", file=sys.stderr)
        shown = self._first is not None

        def run_once() -> bool:
            if shown:
                faulthandler.disable()  # one stack is enough where many of these crash
            return replays()

        try:
            return apart(run_once)
        except PenstockError as error:  # with fewer inputs modules may do what they did not do with all of them
            self._failed += 1
            self._first = self._first or error
            return False

    def tell(self) -> None:
        if self._first is not None:
            first = "" if self._failed == 1 else "the first: "
            exits.told(f"{_counted(self._failed, 'replay')} with fewer inputs came to no end, which counts as not "
                       f"breaking the rule; {first}{self._first}")  # fmt: skip


@contextlib.contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """Where the inputs are stored: for good, or for one look."""
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="penstock-replay-") as name:
        yield Path(name)


def _breaks_alone(recording: Path, rule: Rule, found: Break, again: list[str]) -> bool:
    """Whether a recording breaks the rule by the same moment in a new process, which no earlier replay has touched."""
    options = ["--rule", rule.expression, "--about", found.shown.topic, "--json", *again]
    command = [sys.executable, "-m", "penstock", "replay", str(recording), *options]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode != exits.WRONG:
        return False
    seen = json.loads(done.stdout).get("message")
    return seen is not None and seen["time_ns"] <= found.shown.time_ns


def _print_verdict(rule: Rule, verdict: Verdict) -> None:
    if verdict.found is not None:
        _print_break(rule, verdict.found)
    elif verdict.judged:
        print(f"{rule.expression}: holds for {_counted(verdict.judged, 'message')} of the output")
    else:
        where = f" under {' or '.join(rule.topics)}" if rule.topics else ""
        print(f"{rule.expression}: no message of the output{where} has what it names, so nothing was judged")


def _print_break(rule: Rule, found: Break) -> None:
    number, inputs = show.count_text(found.number), _counted(found.inputs, "input")
    print(f"{rule.expression}: broken by message {number} of the output, after {inputs}")
    for shown in found.before:
        print(f"  {_shown_line(shown)}")
    print(f"> {_shown_line(found.shown)}")
    for shown in found.after:
        print(f"  {_shown_line(shown)}")


def _shown_line(shown: Shown) -> str:
    properties = f"  {printable(json.dumps(shown.properties))}" if shown.properties else ""
    return _line(shown.topic, shown.time_ns, shown.payload) + properties


def _print_needed(tries: _Tries, before: int, least: bool, interrupted: bool) -> None:
    ended = "it was interrupted" if interrupted else "--max-runs ended it"
    end = "none can be left out" if least else f"not the least: {ended}"
    needed = tries.left
    are = f"{'is' if len(needed) == 1 else 'are'} {'needed' if least else 'left'}"
    count, replays = show.count_text(len(needed)), _counted(tries.count, "replay")
    print(f"{count} of {_counted(before, 'input')} {are} ({replays}; {end})")
    for one in needed[:SHOWN_INPUTS]:
        message = one.message
        print(f"  {_line(message.channel or '', message.timestamp_ns, bytes(message))}")
    if len(needed) > SHOWN_INPUTS:
        print(f"  and {show.count_text(len(needed) - SHOWN_INPUTS)} more")


def _counted(count: int, thing: str) -> str:
    return f"{show.count_text(count)} {thing}{'' if count == 1 else 's'}"


def _line(topic: str, time_ns: int, payload: bytes) -> str:
    text = payload[:SHOWN_BYTES].decode(errors="backslashreplace")
    dots = "..." if len(payload) > SHOWN_BYTES else ""
    return printable(f"{_when(time_ns)}  {topic}  {text}{dots}", keep="\t")  # one line, whatever is in it


def _when(time_ns: int) -> str:
    seconds, rest = divmod(time_ns, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:09d}"


def _verdict_json(rule: Rule, verdict: Verdict, sources: _Sources) -> dict[str, Any]:
    begin = {"rule": rule.expression, "holds": verdict.holds, "judged": verdict.judged}
    begin |= _report_json(verdict.report, sources)
    return begin if verdict.found is None else {**begin, **_break_json(verdict.found)}


def _break_json(found: Break) -> dict[str, Any]:
    return {
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
    return {**found, "source": without_secrets(one.source), "ordinal": one.ordinal}


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
        print(f"equal: {_counted(equal, 'message')}")
    else:
        what = ", ".join(found.fields)
        before = f"the {_counted(equal, 'message')} before it {'is' if equal == 1 else 'are'} equal"
        end = before if equal else "it is the first one"
        print(f"message {show.count_text(found.number)} differs in {what}; {end}")
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
