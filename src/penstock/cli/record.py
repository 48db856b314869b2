"""``penstock record``: records addresses into a journal."""

from __future__ import annotations

import contextlib
import itertools
import math
import select
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.address import without_secrets
from penstock.cli import exits, show, silence
from penstock.cli.silence import REACH_S, TELL_AFTER_S, TRY_ON
from penstock.cli.target import broker_address, expanded, fitting, has_wildcard, live_addresses, nobody_like, opened
from penstock.errors import InvalidArgument, RefusedError, describe
from penstock.quantities import duration_s, is_duration, is_size, size_bytes
from penstock.recording.recorder import Plan, Recorder
from penstock.recording.story import topic_of

app = typer.Typer()

EVERYTHING = ["shm:*", "tcp:*"]  #: what --all records
LOOK_S = 0.2


@app.command()
def record(
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of the recording; new or empty.")],
    addresses: Annotated[
        list[str] | None,
        typer.Argument(
            help="What to record; with '*' also what comes later.", autocompletion=live_addresses, show_default=False,
            callback=opened,
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Everything published over shm: and tcp:// on this machine.")
    ] = False,
    split: Annotated[
        str | None, typer.Option(help="Begin a new part after this many bytes (500M) or this much time (10min, 1h).")
    ] = None,
    max_size: Annotated[
        str | None, typer.Option(help="Keep at most this many bytes; the oldest are removed, and 'play' says so.")
    ] = None,
    pre_buffer: Annotated[
        str | None, typer.Option(help="Hold so much time in memory; on SIGUSR1 or Enter store it and go on.")
    ] = None,
    names: Annotated[
        list[str] | None, typer.Option("--as", metavar="TOPIC", help="The topics, in the order of the addresses.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for publishers that cannot be reached yet.")] = False,
    seconds: Annotated[float | None, typer.Option(min=0.0, help="End after so long; otherwise Ctrl-C ends it.")] = None,
    count: Annotated[int | None, typer.Option("--count", "-n", min=1, help="End after so many messages.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was recorded as one JSON object.")] = False,
) -> None:
    """Record addresses into a journal, which 'play', 'export', 'journal' and Spark read as it is.

    Messages keep their bodies, timestamps and properties; what was lost before it could be recorded is recorded as a
    loss. After kill -9 of the recorder everything synced is there, and 'penstock play' says that the end is missing.
    Ctrl-C stores what was published until then; a second one does not wait for that. An address that fails or does not
    answer is reported at once, the others go on, and the exit code is 1. At shared memory, the messages that are still
    in its slots are recorded too.

    Example: [green]penstock record shm:/camera tcp://127.0.0.1:1588 -o run1 --seconds 60[/]
    """
    patterns = EVERYTHING if everything else [address for address in addresses or [] if has_wildcard(address)]
    unfit: dict[str, str] = {}  # addresses that a pattern has found but that cannot be recorded, and why
    chosen = _chosen(addresses or [], everything, wait, None if names else unfit)
    plan = _plan(chosen, names, output, split, max_size, pre_buffer, count, wait, apart=bool(patterns))
    if not names:
        plan = replace(plan, found=frozenset(chosen) - set(map(broker_address, addresses or [])))
    recorder = Recorder(plan)
    # before it is seen to record: by default the signal would end it
    signal.signal(signal.SIGUSR1, lambda *_: recorder.trigger())
    with exits.about(output), recorder:
        told: dict[str, str] = {}
        for address, why in unfit.items():
            recorder.refuse(address, why)
        with contextlib.suppress(*exits.STOPPED):  # the usual end of a recording
            _watch(recorder, seconds, told, [] if names else patterns)
        try:
            recorder.stop()
        finally:  # an end that could not be written is reported too, after the earlier errors
            _tell_errors(recorder, told)
        totals = recorder.totals()
    _report(recorder, totals, as_json)
    if recorder.errors:
        raise typer.Exit(exits.FAILED)


def _chosen(given: list[str], everything: bool, wait: bool, unfit: dict[str, str] | None) -> list[str]:
    """The addresses; those that a pattern has found and that cannot be a topic go to ``unfit`` if that is given."""
    if everything and given:
        raise InvalidArgument("give addresses or --all, not both")
    if not everything and not given:
        raise InvalidArgument("say what to record: addresses, or --all")
    told_at = time.monotonic() + TELL_AFTER_S
    while True:
        found = fitting(EVERYTHING) if everything else expanded(given, wait)
        if unfit is not None:
            written = set(map(broker_address, given))  # addresses given by name: an unusable one is an error
            unfit |= {address: why for address in found if address not in written and (why := _unfit(address))}
            found = [address for address in found if address not in unfit]
        if found:
            return found
        nobody = "--all: nobody on this machine publishes over shm: or tcp:// now"
        if not wait:
            raise InvalidArgument(next(iter(unfit.values()))) if unfit else RefusedError(nobody + TRY_ON)
        if time.monotonic() >= told_at:
            told_at = math.inf
            exits.told(f"{nobody if everything else nobody_like(given[0])}; waiting")
        time.sleep(LOOK_S)


def _unfit(address: str) -> str:
    """Why an address cannot be a topic; empty where it can."""
    try:
        topic_of(address)
    except InvalidArgument as error:
        return describe(error)
    return ""


def _topics(given: list[str], apart: bool) -> list[str]:
    """A topic for each address. Two addresses may give the same topic (shm:/a/b and shm:/a.b): with ``apart``, for
    addresses found by a pattern, they are numbered; otherwise the user is asked for names.
    """
    topics: dict[str, str] = {}
    for address in given:
        topic = _named(address, topics) if apart else topic_of(address)
        if topic in topics:
            both = f"{without_secrets(topics[topic])} and {without_secrets(address)}"
            raise InvalidArgument(f"{both} would share the topic {topic}; name them with --as")
        topics[topic] = address
    return list(topics)


def _named(address: str, taken: Collection[str]) -> str:
    """The topic for an address; with a number where another address has it."""
    topic = topic_of(address)
    numbered = (f"{topic}.{n}" for n in itertools.count(2))
    free = next(name for name in itertools.chain([topic], numbered) if name not in taken)
    if free != topic:
        exits.told(f"{without_secrets(address)} is recorded as {free}: another address is {topic}")
    return free


def _plan(
    given: list[str],
    names: list[str] | None,
    output: Path,
    split: str | None,
    max_size: str | None,
    pre: str | None,
    count: int | None,
    wait: bool,
    apart: bool,
) -> Plan:
    topics = names or _topics(given, apart)
    if len(topics) != len(given):
        raise InvalidArgument(f"--as was given {len(topics)} times for {len(given)} addresses")
    if len(set(topics)) != len(topics):
        raise InvalidArgument(f"--as gives two addresses the same topic ({', '.join(topics)})")
    sized = split is not None and is_size(split)
    if split is not None and not (sized or is_duration(split) or split.replace(".", "", 1).isdecimal()):
        raise InvalidArgument(f"--split {split!r} is neither a size (500M) nor a duration (10min, 1h)")
    if sized and max_size is not None:
        raise InvalidArgument("--split by size and --max-size exclude each other: the size of a part is its bound")
    return Plan(
        output,
        dict(zip(given, topics, strict=True)),
        split_bytes=size_bytes(split, "--split") if split is not None and sized else None,
        split_s=duration_s(split, "--split") if split is not None and not sized else None,
        max_bytes=size_bytes(max_size, "--max-size") if max_size is not None else None,
        pre_buffer_s=duration_s(pre, "--pre-buffer") if pre is not None else None,
        max_messages=count,
        reach_s=None if wait else REACH_S,
    )


def _watch(recorder: Recorder, seconds: float | None, told: dict[str, str], patterns: Sequence[str]) -> None:
    deadline = None if seconds is None else time.monotonic() + seconds
    seldom, topics = silence.Seldom(), dict(recorder.plan.topics)
    silent_at: float | None = time.monotonic() + TELL_AFTER_S
    silences = silence.Silences()
    with _display() as update:
        while recorder.running:
            update(recorder, recorder.totals())
            _tell_errors(recorder, told)
            if silent_at is not None and time.monotonic() >= silent_at:
                silent_at = None
                _tell_silence(recorder, silences, {without_secrets(address): address for address in topics})
            seldom(lambda: _add_new_sources(recorder, silences, patterns, topics))
            left = 0.2 if deadline is None else min(0.2, deadline - time.monotonic())
            if left <= 0:
                return
            _pause(recorder, left)


def _add_new_sources(
    recorder: Recorder, silences: silence.Silences, patterns: Sequence[str], topics: dict[str, str]
) -> None:
    """Record what has been published since and matches an address with '*'; report sources that have become silent."""
    for address in fitting(patterns) if patterns else ():
        if address in topics or without_secrets(address) in recorder.errors:
            continue
        if why := _unfit(address):
            recorder.refuse(address, why)
        else:
            topics[address] = _named(address, topics.values())
            recorder.add(address, topics[address])
    silences.look((s.address, s.subscriber, s.messages + len(s.waiting)) for s in recorder.sources)


def _tell_silence(recorder: Recorder, silences: silence.Silences, opened_as: Mapping[str, str]) -> None:
    """Report once which addresses gave nothing, and why if that is known: a misspelt name would cost the whole
    recording.
    """
    for source in recorder.sources:
        if not source.messages and not source.waiting and not source.error:
            silence.tell(source.address, source.subscriber, opened_as.get(source.address, source.address))
            silences.mark_reported(source.address, source.subscriber)


def _tell_errors(recorder: Recorder, told: dict[str, str]) -> None:
    """Print each error at once: the other addresses may go on for hours."""
    for address, error in recorder.errors.items():
        if told.get(address) != error:
            told[address] = error
            exits.told(f"{address}: {error}")


def _pause(recorder: Recorder, left: float) -> None:
    """Sleep; Enter on a terminal triggers the recording."""
    if not recorder.recording and sys.stdin.isatty() and select.select([sys.stdin], [], [], left)[0]:
        sys.stdin.readline()
        recorder.trigger()
    else:
        time.sleep(left)


@contextlib.contextmanager
def _display() -> Any:
    """A line that moves on a terminal; silence when piped."""
    if not sys.stderr.isatty():
        yield lambda recorder, totals: None
        return
    from rich.status import Status

    with Status("", console=show.console(stderr=True)) as status:

        def update(recorder: Recorder, totals: dict[str, Any]) -> None:
            word = "recording" if recorder.recording else "holding back (Enter or SIGUSR1 stores)"
            held = "" if recorder.recording else f", {sum(len(s.waiting) for s in recorder.sources)} held"
            status.update(
                f"{word}: {show.count_text(totals['messages'])} messages, {show.bytes_text(totals['bytes'])}, "
                f"{totals['lost']} lost{held}"
            )

        yield update


def _report(recorder: Recorder, totals: dict[str, Any], as_json: bool) -> None:
    if as_json:
        errors = {"errors": recorder.errors} if recorder.errors else {}
        show.print_json({"directory": str(recorder.plan.directory), "parts": recorder.part, **totals, **errors})
        return
    parts = f" in {show.number_of(recorder.part, 'part')}" if recorder.plan.split else ""
    bound = recorder.plan.max_bytes
    kept = "" if bound is None else f"; of these the newest are kept, {show.bytes_text(bound)} at most"
    print(
        f"recorded {show.number_of(totals['messages'], 'message')}, {show.bytes_text(totals['bytes'])}, "
        f"{totals['lost']} lost, to {recorder.plan.directory}{parts}{kept}"
    )
    for topic, number in totals["topics"].items():
        print(f"  {topic:<30} {show.count_text(number)}")
