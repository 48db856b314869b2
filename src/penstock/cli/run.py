"""``penstock run``: a gateway from its file, until Ctrl-C or SIGTERM; SIGHUP applies what has changed in the file."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from penstock.cli import exits, show
from penstock.cli.service import Health, Watch, notify, unit
from penstock.errors import InvalidArgument, PenstockError
from penstock.gateway import Configuration, Event, Gateway, read
from penstock.gateway.admin import Admin
from penstock.gateway.broker import ModuleInfo
from penstock.gateway.buffer import Buffer
from penstock.gateway.endpoint import is_durable
from penstock.gateway.links import DEFAULT, STAR, Delivery, Link, LinkTable, drain_order
from penstock.gateway.loaders import recipe
from penstock.gateway.schema import schema
from penstock.gateway.worker import ERROR
from penstock.quantities import number_of
from penstock.secrecy import hidden_values, without_secrets
from penstock.throttle import Throttle

app = typer.Typer()
LOOK_S = 0.5
_TOLD = (Event.MODULE_RESTARTED,)  # events printed as lines; the others are logged

FileArgument = Annotated[
    Path | None,
    typer.Argument(exists=True, dir_okay=False, help="JSON; TOML or YAML when it ends in .toml, .yaml or .yml."),
]


@app.command()
def run(
    file: FileArgument = None,
    show_schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of such files, for editors, and end.")
    ] = False,
    systemd: Annotated[
        bool, typer.Option("--systemd", help="Print a unit file that runs this gateway, and end.")
    ] = False,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Apply changes of the file, its includes, its secrets and code beside it, when saved."
        ),
    ] = False,
    health: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Answer GET /health and /ready at this port on loopback.")
    ] = None,
    admin: Annotated[
        Path | None, typer.Option(metavar="SOCKET", help="Serve penstock gateway at this socket, of mode 0600.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Check the file, print the graph and start nothing.")] = False,
    seconds: Annotated[float | None, typer.Option(min=0.0, help="End by itself after so long.")] = None,
    drain_timeout: Annotated[
        float, typer.Option(min=0.0, help="At the end: seconds for handling what is queued, in link order.")
    ] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the graph or the closing table as JSON.")] = False,
) -> None:
    """Run a gateway: modules joined by links, as a file describes them.

    Classes beside the file can be named without a package. SIGHUP applies the difference after the file has changed;
    when that fails, the gateway goes on as it was. Ctrl-C and SIGTERM stop it in order and drain it.

    Example: [green]penstock run examples/edge/gateway.json --check[/], then without [green]--check[/]
    """
    if show_schema:
        print(json.dumps(schema(), indent=2))
        return
    if file is None:
        raise typer.BadParameter("a gateway's file is missing; --schema alone needs none")
    if systemd:
        options = ["--health", str(health)] if health is not None else []
        options += ["--admin", str(admin.resolve())] if admin is not None else []
        options += ["--watch"] if watch else []
        print(unit(file, options, drain_timeout), end="")
        return
    sys.path.insert(0, str(file.resolve().parent))
    configuration = read(file)
    if check:
        loaders = {loader.name: loader for loader in configuration.loaders}
        recipes = [recipe(entry, loaders, check=True) for entry in configuration.modules]
        durable = {one.name for one in recipes if one.durable} | set(filter(is_durable, configuration.addresses))
        _print_graph(configuration, durable, as_json)
        return
    _serve(file, configuration, seconds, drain_timeout, as_json, watch, health, admin)


def _serve(
    file: Path,
    configuration: Configuration,
    seconds: float | None,
    drain_timeout: float,
    as_json: bool,
    watch: bool,
    health: int | None,
    admin: Path | None,
) -> None:
    exits.log_to_stderr()
    if os.environ.get("PENSTOCK_DEBUG"):  # print tracebacks of failures
        logging.getLogger("penstock.gateway").setLevel(logging.DEBUG)
    lines = _Lines()
    told = [(event, lines.tell) for event in _TOLD]
    gateway = Gateway(configuration, name=file.stem, callbacks=told)
    interrupted: BaseException | None = None
    drained = True
    ending = threading.Event()
    signal_before = _interrupting(gateway, ending)
    try:
        with _requests() as asked, ExitStack() as beside:
            # Opened before the start, which may take long: meanwhile it reports "not ready", and which modules are
            # starting.
            with exits.undisturbed():
                if health is not None:
                    answers = Health(gateway, health)
                    beside.callback(answers.close)
                    _print_line(f"http://127.0.0.1:{answers.port}/health and /ready")
                if admin is not None:
                    beside.callback(_admin(gateway, admin).close)
            gateway.start()
            modules = number_of(len(configuration.modules), "module")
            _print_line(f"{file}: {modules}, {number_of(len(configuration.links), 'link')}, running")
            with exits.undisturbed():
                if watch:
                    looks = Watch(file, lambda: gateway._applied, lambda names: asked.put(("reload", names)))
                    beside.callback(looks.close)
            notify("READY=1")
            _listen(gateway, file, asked, seconds)
    except (KeyboardInterrupt, exits.Terminated):
        pass  # a service that was asked to stop has done its work
    finally:
        ending.set()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the end has begun: ignore further signals
        notify("STOPPING=1")
        asked_at = time.monotonic()
        try:
            drained = gateway.destroy(drain_timeout)
        except KeyboardInterrupt as error:
            interrupted, drained = error, False
        took_s = time.monotonic() - asked_at
        signal.signal(signal.SIGINT, signal_before)
    infos = gateway.modules()
    _print_rows([_row(info) for info in infos], as_json)
    if kept := _count_kept(infos):
        _print_line(f"{kept} messages were not handled; their sources keep them, and they come with the next start")
    if not drained:
        given_up = ", ".join(map(without_secrets, gateway.abandoned))
        exits.told(
            f"abandoned, because they did not come back: {given_up}"
            if given_up
            else f"interrupted after {took_s:.1f} s; what was not handled is dropped and counted"
            if interrupted
            else f"not everything was handled in {took_s:.1f} s; what was left is dropped and counted"
        )
        raise interrupted or typer.Exit(exits.FAILED)


def _admin(gateway: Gateway, path: Path) -> Admin:
    try:
        return Admin(gateway, path)
    except InvalidArgument as error:
        raise InvalidArgument(f"--admin: {error}") from None


def _interrupting(gateway: Gateway, ending: threading.Event) -> Any:
    """Let the first Ctrl-C end the gateway. While it is ``ending``, a second one ends only the draining: the remaining
    steps are short, and then the result is reported. Returns the previous handler.
    """
    before = signal.getsignal(signal.SIGINT)

    def interrupt(number: int, _: FrameType | None) -> None:
        if gateway.draining or not ending.is_set():
            ending.set()
            raise KeyboardInterrupt
        if gateway.draining is None:  # it is about to drain
            again = threading.Timer(0.05, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()

    if before is not signal.SIG_IGN:  # a shell's job in the background
        signal.signal(signal.SIGINT, interrupt)
    return before


@contextmanager
def _requests() -> Iterator[queue.SimpleQueue[tuple[str, list[str]]]]:
    """A queue of requests by signals and by the watch: a word, and for a reload the modules whose code has changed."""
    asked: queue.SimpleQueue[tuple[str, list[str]]] = queue.SimpleQueue()

    def note(_: int, __: FrameType | None) -> None:
        asked.put(("reload", []))

    before = signal.signal(signal.SIGHUP, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGHUP, before)


def _listen(
    gateway: Gateway, file: Path, asked: queue.SimpleQueue[tuple[str, list[str]]], seconds: float | None
) -> None:
    timer = None if seconds is None else threading.Timer(seconds, asked.put, (("end", []),))
    if timer is not None:
        timer.daemon = True
        timer.start()
    try:
        while (order := _next(asked))[0] == "reload":
            _reload(gateway, file, order[1])
    finally:
        if timer is not None:
            timer.cancel()


def _next(asked: queue.SimpleQueue[tuple[str, list[str]]]) -> tuple[str, list[str]]:
    """The next request. A signal that arrives just before the wait begins, or on another thread, does not end the wait,
    and Python runs its handler only when this thread runs: so wake up regularly.
    """
    while True:
        with contextlib.suppress(queue.Empty):
            return asked.get(timeout=LOOK_S)


def _reload(gateway: Gateway, file: Path, again: list[str]) -> None:
    before = [one.name for one in gateway.modules()]
    try:
        done = gateway.apply(file, again=again)
    except (PenstockError, OSError) as error:
        there = {one.name for one in gateway.modules()}
        gone = ", ".join(without_secrets(name) for name in before if name not in there)
        how = f"without {gone}, which could not be put back" if gone else "as it was"
        exits.told(f"{error}; the gateway goes on {how}")
    else:
        _print_line("reloaded: " + (", ".join(done) or "nothing has changed"))


class _Lines:
    """Prints events as lines; at most one line in ten seconds for the same event of the same module."""

    def __init__(self) -> None:
        self._throttles: dict[tuple[Event, str], Throttle] = {}

    def tell(self, _: Gateway, event: Event, context: Any, __: Any) -> None:
        name, *more = context if isinstance(context, tuple) else (context,)
        words = [f"{one:.1f} s" if isinstance(one, float) else str(one) for one in more]
        text = f"{event.value.replace('_', ' ')}: {name} {' '.join(words)}".rstrip()
        self._throttles.setdefault((event, name), Throttle(self)).error("%s", text)

    def log(self, _: int, text: str, *arguments: Any) -> None:
        _print_line(text % arguments)


def _print_line(text: str) -> None:
    print(f"penstock: {text}", file=sys.stderr, flush=True)


# ---- what is printed


def _row(info: ModuleInfo) -> dict[str, Any]:
    ledger = info.ledger
    return {
        "module": info.name,
        "received": info.handled,
        "published": info.published,
        "failed": info.failed,
        "filtered": ledger.dropped.get("filtered", 0),
        "overflow": ledger.dropped.get("overflow", 0),
        "expired": ledger.expired,
        "stored": info.stored,
        "backlog": info.backlog,
        "lost": info.waiting + info.lost,
    }


def _count_kept(infos: Sequence[ModuleInfo]) -> int:
    """How many messages will be redelivered after the next start. A buffer's backlog includes what its sink, and the
    modules behind that, have not handled.
    """
    behind = {info.name for info in infos if info.kind == Buffer.__name__}
    while more := {info.name for info in infos if not behind.isdisjoint(info.sources)} - behind:
        behind |= more
    elsewhere = [info for info in infos if info.name not in behind]
    return sum(info.backlog for info in infos) + sum(info.stored for info in elsewhere)


def _print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows))
        return
    columns = tuple(rows[0] if rows else ())
    cells = [[str(value) for value in row.values()] for row in rows]
    show.console().print(show.table(columns, cells, right=columns[1:], names=columns[:1]))


def _link_row(link: Link, durable: bool) -> dict[str, Any]:
    """A link with its options; the delivery guarantee is shown even if it follows from the source."""
    from_buffer = Delivery.AT_LEAST_ONCE if link.buffer is not None else None
    options = replace(link.options, delivery=link.options.delivery or from_buffer)
    told = {field.name: getattr(options, field.name) for field in fields(options)}
    row = {"source": without_secrets(link.source), "sink": without_secrets(link.sink),
           "delivery": str(options.chosen(durable).delivery)}  # fmt: skip
    if link.source == STAR and options.delivery is None and not options.tries_again:
        row["delivery"] = "at_least_once from durable sources, else at_most_once"
    row |= {name: value for name, value in told.items() if name != "delivery" and value != getattr(DEFAULT, name)}
    row |= {name: without_secrets(value) for name in ("buffer", "error") if (value := getattr(link, name)) is not None}
    return row | ({"filter": True} if link.filter is not None and not link.filter.empty else {})


def _print_graph(configuration: Configuration, durable: Collection[str], as_json: bool) -> None:
    table = LinkTable()
    for name in (*(entry.name for entry in configuration.modules), *configuration.addresses):
        table.add_name(name)
    for link in configuration.links:
        table.add(link)
    for ends in [(f"{link.sink}.{ERROR}", link.error) for link in configuration.links if link.error is not None]:
        if ends not in table:
            table.add(Link(*ends))
    graph = table.graph()
    cycles = [group for group in drain_order(graph) if len(group) > 1 or group[0] in graph[group[0]]]
    kinds = {e.name: f"{e.loader} {json.dumps(hidden_values(e.entrypoint))}" for e in configuration.modules}
    rows = [(without_secrets(name), kinds.get(name, "address"), _shown(sinks)) for name, sinks in graph.items()]
    links = [_link_row(link, table.owner(link.source) in durable) for link in configuration.links]
    if as_json:
        found = {"graph": {name: sinks for name, _, sinks in rows}, "links": links, "cycles": [*map(_shown, cycles)]}
        print(json.dumps(found, default=str))
        return
    width = max((len(name) for name, _, _ in rows), default=0)
    for name, kind, sinks in rows:
        print(f"{name:{width}}  {kind}" + (f" -> {', '.join(sinks)}" if sinks else ""))
    for one in links:
        more = [name if value is True else f"{name} {value}" for name, value in [*one.items()][3:]]
        print(f"link: {one['source']} -> {one['sink']}  {', '.join((one['delivery'], *more))}")
    for cycle in map(_shown, cycles):
        print(f"cycle: {' -> '.join((*cycle, cycle[0]))} (a publish that would wait on it fails after a second)")


def _shown(names: Iterable[str]) -> list[str]:
    return [without_secrets(name) for name in names]
