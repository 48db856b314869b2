"""``penstock pipeline``: run a Spark pipeline over a journal, once or again and again, with a progress bar."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.address import without_secrets
from penstock.cli import show
from penstock.cli.held import held_back
from penstock.errors import InvalidArgument

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

app = typer.Typer()
WATCH_S = 0.5
STOP_S = 30.0
FOLLOW_S = 2.0


class Name(StrEnum):
    """The pipelines that need no file."""

    ARCHIVE = "archive"
    QUALITY = "quality"
    ALIGN = "align"
    ROLLUP = "rollup"
    SESSIONS = "sessions"
    REPLAY = "replay"


def _completed_name(incomplete: str) -> list[str]:
    found = {name.value for name in Name} | {str(path) for path in Path().glob("*.toml")}
    return sorted(name for name in found if name.startswith(incomplete))


@app.command()
def pipeline(
    name: Annotated[
        str,
        typer.Argument(
            help="archive, quality, align, rollup, sessions, replay, or a file.toml.", autocompletion=_completed_name
        ),
    ],
    source: Annotated[
        str | None, typer.Option("--from", help="A journal's directory, a glob, broker://HOST:PORT, or a lake.")
    ] = None,
    target: Annotated[str | None, typer.Option("--to", help="A directory; an address for replay.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Process what is there, then end (the default).")] = False,
    every: Annotated[
        str | None, typer.Option("--every", help="Run repeatedly at this interval: 10s or '1 minute'.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="archive: a commit every 2 s (or --every), compaction beside it.")
    ] = False,
    trim: Annotated[
        bool, typer.Option("--trim", help="archive: delete journal segments that are in the lake.")
    ] = False,
    skip_lost: Annotated[
        bool, typer.Option("--skip-lost", help="archive: go on without positions that are gone, and name them.")
    ] = False,
    master: Annotated[str, typer.Option(help="Where Spark runs.")] = "local[*]",
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="KEY=VALUE for the pipeline; more than once. align: onto=TOPIC or every_s=SECONDS; rollup: "
            "NAME='avg(...)', window='10 seconds'.",
        ),
    ] = None,
    topics: Annotated[str | None, typer.Option(help="Topic patterns, separated by commas.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was done as one JSON object.")] = False,
) -> None:
    """Run a Spark pipeline over a journal.

    Example: [green]penstock pipeline archive --from /var/lib/measurements --to /data/archive --every 1m[/]

    Example: [green]penstock pipeline quality --from /var/lib/measurements --to report[/] writes report/quality.html
    """
    from penstock.quantities import interval_s

    if once and every is not None:
        raise InvalidArgument("give --once or --every, not both")
    if (follow or trim or skip_lost) and name != Name.ARCHIVE:
        raise InvalidArgument("--follow, --trim and --skip-lost are for the pipeline archive")
    pause = None if every is None else interval_s(every, "--every")
    settings = dict(_pair(text) for text in option or ())
    if follow:
        settings["every_s"], pause = str(FOLLOW_S if pause is None else pause), None
    if trim:
        settings["trim"] = "true"
    if skip_lost:
        settings["fail_on_data_loss"] = "false"
    run = _prepared(name, source, target, settings, topics, again=pause is not None)
    with _session(master) as spark, _Progress(name, source, as_json) as progress:
        while True:
            progress.state("")
            with _plain_errors():
                run(spark, progress)
            if pause is None:
                return
            progress.state("waiting")
            time.sleep(pause)


Run = Callable[["SparkSession", "_Progress"], None]


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise InvalidArgument(f"--set {text!r} is not KEY=VALUE")
    return key, value


def _prepared(
    name: str, source: str | None, target: str | None, settings: dict[str, str], topics: str | None, *, again: bool
) -> Run:
    """What to run; raises all errors that can be found before Spark starts."""
    if name.endswith(".toml"):
        from penstock.spark.pipelines.declared import load

        declared = load(name)
        if again and not declared.streaming and declared.sink.get("mode", "append") == "append":
            raise InvalidArgument(
                f"{name} would append all its rows at every run: set streaming = true, or mode = 'overwrite' in [sink]"
            )
        return lambda spark, progress: _declared(spark, declared, progress)
    try:
        kind = Name(name)
    except ValueError:
        from penstock.errors import nearest

        raise InvalidArgument(f"there is no pipeline {name!r}; {nearest(name, list(Name))}, or a file.toml") from None
    if source is None or target is None:
        raise InvalidArgument(
            f"pipeline {name} needs --from JOURNAL and --to {'ADDRESS' if kind is Name.REPLAY else 'DIRECTORY'}"
        )
    _check_source(source)
    arguments = _arguments(kind, settings)
    options = {} if topics is None else {"topics": topics}
    if kind is Name.ARCHIVE:
        return lambda spark, progress: _archive(spark, source, target, {**arguments, "options": options}, progress)
    if kind is Name.REPLAY:
        options["columns"] = ",".join(_REPLAYED)  # keys are read only where they are asked for
        return lambda spark, progress: _replay(_load(spark, source, options), target, arguments, progress)
    return lambda spark, progress: _table(kind, _load(spark, source, options), Path(target), arguments, progress)


def _is_lake(source: str) -> bool:
    from penstock.spark.lake.store import LOG, SCHEMES

    if source.partition("://")[0] in SCHEMES:
        return True
    return os.path.isdir(os.path.join(source.removeprefix("file://"), LOG))


def _check_source(source: str) -> None:
    if _is_lake(source):
        from penstock.spark.lake import info

        info(source)
        return
    from penstock.spark.places import open_places, resolve

    open_places(resolve({"path": source}))


def _arguments(kind: Name, settings: dict[str, str]) -> dict[str, Any]:
    """``--set`` values as the pipeline's own arguments; rollup takes its aggregates by name."""
    import importlib

    from penstock.address import check_options, convert, option_names

    if kind is Name.ARCHIVE:
        from penstock.spark.lake import archive

        kept = {"every_s": float(settings.pop("every_s"))} if "every_s" in settings else {}
        check_options(settings, archive, f"pipeline {kind}")
        return {**convert(settings, archive, kind), **kept}
    function = getattr(importlib.import_module(f"penstock.spark.pipelines.{kind.value}"), kind.value)
    if kind is Name.ROLLUP:
        known = option_names(function)
        aggregates = {key: value for key, value in settings.items() if key not in known}
        rest = {key: value for key, value in settings.items() if key in known}
        wrong = next((key for key, value in aggregates.items() if "(" not in value), None)
        if wrong is not None:  # a mistyped setting, which Spark would take as a column
            raise InvalidArgument(
                f"--set {wrong}={aggregates[wrong]} is no aggregate, as in --set 'mean=avg(length(payload))', "
                f"and no setting of rollup ({', '.join(sorted(known))})"
            )
        if not aggregates:
            raise InvalidArgument("rollup needs at least one aggregate, as in --set 'mean=avg(length(payload))'")
        return {**_lists(convert(rest, function, kind)), "aggregates": aggregates}
    if kind is Name.ALIGN and ("onto" in settings) == ("every_s" in settings):
        raise InvalidArgument("align needs --set onto=TOPIC, or --set every_s=SECONDS for a regular grid")
    positional = {"onto": settings.pop("onto")} if "onto" in settings and kind is Name.ALIGN else {}
    check_options(settings, function, f"pipeline {kind}")
    return {**positional, **_lists(convert(settings, function, kind))}


def _lists(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        key: str(value).split(",") if key in ("by", "columns", "topics") else value for key, value in arguments.items()
    }


_REPLAYED = ("topic", "position", "ordinal", "timestamp_ns", "payload", "properties", "message_id", "key")


def _load(spark: SparkSession, source: str, options: dict[str, str]) -> DataFrame:
    """A journal, or a lake read by its log."""
    if _is_lake(source):
        from penstock.spark.lake import table

        return table(spark, source, topics=options.get("topics"))
    return spark.read.format("penstock").options(**options).load(source)


PY4J_LOGGERS = ("py4j.clientserver", "py4j.java_gateway", "py4j.finalizer", "py4j.signals")


@contextmanager
def _session(master: str) -> Iterator[SparkSession]:
    from penstock.spark import session

    settings: dict[str, Any] = {"spark.log.level": "ERROR"}
    before = signal.getsignal(signal.SIGINT)
    with held_back() as quiet:
        spark = session("penstock pipeline", master=master, **settings)
    logging.getLogger("DataFrameQueryContextLogger").disabled = True  # it prints what is told as an error anyway
    try:
        with _interruptible(quiet, ignored=before is signal.SIG_IGN):
            yield spark
    except BaseException as error:
        if (cut_off := _interruption(error)) is not None:
            quiet.set()  # cancelled jobs are expected after Ctrl-C
            raise cut_off from None
        raise
    finally:
        _stop(spark)


@contextmanager
def _interruptible(quiet: threading.Event, *, ignored: bool) -> Iterator[None]:
    """Ctrl-C raises ``KeyboardInterrupt`` and sets ``quiet``; from then on py4j logs nothing.

    ``ignored``: Ctrl-C does nothing, as a shell wants it for a job in the background. PySpark's own handler would call
    the JVM from within the call that it interrupts. That fails, and py4j prints a stack trace for each of the two.
    """

    def interrupted(*_: object) -> None:
        quiet.set()
        raise KeyboardInterrupt

    def wanted(record: logging.LogRecord) -> bool:
        return not quiet.is_set() or Path(record.pathname).parent.name != "py4j"

    # By loggers of its own and, in places, by the root; a logger's filter is asked for what is logged to it directly.
    loggers = [logging.getLogger(name) for name in ("", "py4j", *PY4J_LOGGERS)]
    for logger in loggers:
        logger.addFilter(wanted)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        for logger in loggers:
            logger.removeFilter(wanted)


def _interruption(error: BaseException | None) -> BaseException | None:
    """Ctrl-C or SIGTERM, also if it interrupted a call to the JVM and other errors followed from that."""
    while error is not None and isinstance(error, Exception):
        error = error.__context__
    return error


def _stop(spark: SparkSession) -> None:
    """End Spark from another thread: a connection to the JVM belongs to a thread, and ours may be in the middle of a
    call.

    The JVM may have ended by the same signal; it ends with this process in any case.
    """

    def stop() -> None:
        with warnings.catch_warnings(), suppress(Exception):
            warnings.simplefilter("ignore")
            spark.stop()

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    thread.join(STOP_S)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise an error of Penstock from inside a Spark job as itself, and an error of Spark with its first line only."""
    from py4j.protocol import Py4JJavaError, Py4JNetworkError
    from pyspark.errors import PySparkException

    from penstock.errors import PenstockError, StateError
    from penstock.spark.failure import unwrap

    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        ours = unwrap(error)
        text = error.java_exception.toString() if isinstance(error, Py4JJavaError) else str(error)
        raise (ours or PenstockError(text.strip().splitlines()[0])) from None
    except (ConnectionError, Py4JNetworkError):  # handles of Penstock raise errors of their own for connections
        raise StateError(
            "Spark's JVM has ended: was it killed, or out of memory? Start the pipeline again; it goes on where it was"
        ) from None


def _archive(spark: SparkSession, source: str, target: str, arguments: dict[str, Any], progress: _Progress) -> None:
    from penstock.spark import lake

    def shown(now: lake.Archived) -> None:
        progress.show(now.rows, now.payload_bytes, now.lag)
        console = progress.bar.console
        if "every_s" in arguments and not console.is_terminal:  # there is no bar
            console.print(f"{show.count_text(now.rows)} rows, {show.count_text(now.lag)} behind")

    if "every_s" in arguments:
        lake.follow(spark, source, target, stop=threading.Event(), on_progress=shown, **arguments)  # until Ctrl-C
        return
    done = lake.archive(spark, source, target, on_progress=shown, **arguments)
    progress.add(done.rows, done.payload_bytes, done.lag)
    if done.segments:
        progress.tell(f"{done.segments} segments went from the journal", segments=done.segments)


def _replay(frame: DataFrame, target: str, arguments: dict[str, Any], progress: _Progress) -> None:
    from penstock.spark.pipelines import replay

    done = replay(frame, target, on_progress=lambda rows, size: progress.show(rows, size, 0), **arguments)
    progress.add(done.messages, done.payload_bytes, 0)


def _table(kind: Name, frame: DataFrame, target: Path, arguments: dict[str, Any], progress: _Progress) -> None:
    import importlib

    from pyspark.sql import Observation

    from penstock.spark.pipelines.declared import observed

    seen = Observation()
    watched = frame if kind is Name.ALIGN else observed(frame, seen)  # align reads each topic by itself
    result = getattr(importlib.import_module(f"penstock.spark.pipelines.{kind.value}"), kind.value)(
        watched, **arguments
    )
    # it may contain payloads, and only the owner may read journals
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    table = target / f"{kind.value}.parquet"
    with progress.watching(frame.sparkSession):
        _replace(result, table)
    made = frame.sparkSession.read.parquet(str(table))
    if kind is Name.ALIGN:
        progress.add(made.count(), 0, 0)
    else:
        progress.add(int(seen.get["rows"]), int(seen.get["bytes"]), 0)
    if kind is Name.QUALITY:
        from penstock.spark.pipelines.report import report, terminal

        page = report(made, target / "quality.html")
        progress.tell(terminal(made))
        progress.tell(f"report: {page}", report=str(page))
    written = made.count()
    progress.tell(f"{written} rows in {table}", table=str(table), table_rows=written)


def _replace(result: DataFrame, table: Path) -> None:
    """Write a table beside the old one, which stays valid until the new one is complete."""
    fresh = table.with_name(f".{table.name}.{os.getpid()}")
    old = table.with_name(f".{table.name}.old")
    try:
        result.write.mode("overwrite").parquet(str(fresh))
        shutil.rmtree(old, ignore_errors=True)
        with suppress(FileNotFoundError):
            os.rename(table, old)
        os.rename(fresh, table)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        if old.exists() and not table.exists():
            os.rename(old, table)
        shutil.rmtree(old, ignore_errors=True)


def _declared(spark: SparkSession, declared: Any, progress: _Progress) -> None:
    from pyspark.sql import Observation

    if not declared.streaming:
        seen = Observation()
        with progress.watching(spark):
            declared.run(spark, seen)
        progress.add(int(seen.get["rows"]), int(seen.get["bytes"]), 0)
        return
    query = declared.run(spark, "source")
    try:
        _follow(query, progress)
    finally:
        query.stop()


def _follow(query: Any, progress: _Progress) -> None:
    """Show a streaming query's progress until it ends."""
    from penstock.spark.stream import lag

    rows = payload_bytes = 0
    seen = -1
    while True:
        ended = query.awaitTermination(1)
        for step in query.recentProgress:
            if step["batchId"] > seen:
                seen = step["batchId"]
                rows += step["numInputRows"]
                counted = step["observedMetrics"].get("source")
                payload_bytes += int(counted["bytes"]) if counted is not None else 0
        if ended:
            progress.add(rows, payload_bytes, 0)
            return
        progress.show(rows, payload_bytes, lag(query) or 0)


class _Progress:
    """A bar on the terminal (a line when piped), and the same counts where the monitor finds them."""

    def __init__(self, name: str, source: str | None, as_json: bool = False) -> None:
        self.name = name
        self.source = source
        self.as_json = as_json
        self.told: dict[str, Any] = {}
        self.rows = self.payload_bytes = 0
        self.running = (0, 0)  # rows and bytes of the current run; they count too if it is interrupted
        self.begun = time.monotonic()
        self.bar: Any = None
        self.counters: Any = None

    def __enter__(self) -> _Progress:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        from penstock._core import Counters

        local = self.source is not None and "://" not in self.source
        where = f"journal:{Path(self.source or '').resolve()}" if local else without_secrets(self.source or "")
        self.counters = Counters("spark", "pipeline", f"{self.name} <- {where}" if where else self.name)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"))
        self.bar = Progress(*columns, TimeElapsedColumn(), console=show.console(stderr=True), transient=True)
        self.task = self.bar.add_task(self.name, total=None, text="")
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.bar.stop()
        self.counters.close()
        spent = max(1e-9, time.monotonic() - self.begun)
        rows, payload_bytes = self.rows + self.running[0], self.payload_bytes + self.running[1]
        if self.as_json:
            counts = {"rows": rows, "bytes": payload_bytes, "seconds": round(spent, 3)}
            show.print_json({"pipeline": self.name, **counts, **self.told, "complete": kind is None})
            return
        show.console(stderr=True).print(
            f"{self.name}: {show.count_text(rows)} rows, {show.bytes_text(payload_bytes)}, "
            f"{show.rate_text(rows / spent)}"
        )

    def show(self, rows: int, payload_bytes: int, lag: int) -> None:
        """Show the progress of the current run."""
        self.running = (rows, payload_bytes)
        rows, payload_bytes = self.rows + rows, self.payload_bytes + payload_bytes
        text = f"{show.count_text(rows)} rows  {show.bytes_text(payload_bytes)}  {show.count_text(lag)} behind"
        self.bar.update(self.task, text=text, completed=rows, total=rows + lag)
        for field, value in (
            ("matched", rows + lag),
            ("delivered", rows),
            ("bytes", payload_bytes),
            ("lag", lag),
        ):
            self.counters.set(field, value)
        self.counters.state("running")

    @contextmanager
    def watching(self, spark: SparkSession) -> Iterator[None]:
        """While a query runs whose rows are counted only at its end, show how many of its tasks are done."""
        ended = threading.Event()
        tracker = spark.sparkContext.statusTracker()

        def watch() -> None:
            while not ended.wait(WATCH_S):
                try:
                    stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
                except Exception:
                    return  # the JVM has ended: the thread that waits for the query gets the error
                done = sum(stage.numCompletedTasks for stage in stages if stage is not None)
                tasks = sum(stage.numTasks for stage in stages if stage is not None)
                if tasks:
                    self.bar.update(self.task, text=f"{done} of {tasks} tasks", completed=done, total=tasks)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def add(self, rows: int, payload_bytes: int, lag: int) -> None:
        """One run is done."""
        self.rows += rows
        self.payload_bytes += payload_bytes
        self.show(0, 0, lag)

    def tell(self, text: Any, **fields: Any) -> None:
        """Report a result: a line for people, fields of the final JSON object for machines."""
        self.told.update(fields)
        if not self.as_json:
            self.bar.update(self.task, text="")
            show.console().print(text)

    def state(self, text: str) -> None:
        """What the monitor shows beside the counts: whether it waits for its next run."""
        self.counters.state(text)
