"""``penstock gateway``: a gateway at work, by the admin socket of ``penstock run --admin``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli import show
from penstock.errors import InvalidArgument
from penstock.gateway.admin import ask
from penstock.quantities import number_of

app = typer.Typer(no_args_is_help=True, help="Look at a gateway at work and change it, by its admin socket.")

COLUMNS = ("module", "kind", "life", "waiting", "handled", "published", "failed", "filtered", "lost", "backlog")
Socket = Annotated[Path, typer.Argument(help="The socket of penstock run --admin.", show_default=False)]
Module = Annotated[str, typer.Argument(help="The module.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="JSON for machines.")]


def _one(socket: Path, do: str, **more: Any) -> Any:
    return next(ask(socket, {"do": do, **more}))


def _change(as_json: bool, socket: Path, do: str, **more: Any) -> None:
    _one(socket, do, **more)
    if as_json:
        print(json.dumps({"done": do}))


@app.command("list")
def list_(socket: Socket, as_json: Json = False) -> None:
    """Every module with its figures, and every link.

    Example: [green]penstock gateway list plant.sock[/]
    """
    found = _one(socket, "list")
    if as_json:
        print(json.dumps(found))
        return
    rows = [[str(one[name]) for name in COLUMNS] for one in found["modules"]]
    show.console().print(show.table(COLUMNS, rows, right=COLUMNS[3:]))
    for source, sink in found["links"]:
        print(f"{source} -> {sink}")


@app.command()
def add(
    socket: Socket,
    module: Module,
    entrypoint: Annotated[str, typer.Argument(help="package.module:Class, or what the loader takes.")],
    args: Annotated[str | None, typer.Option(help="JSON for the module.")] = None,
    loader: Annotated[str, typer.Option(help="python, process, native, or one of the file's.")] = "python",
    as_json: Json = False,
) -> None:
    """Add a module and start it.

    Example: [green]penstock gateway add plant.sock tick penstock.gateway.modules:Timer --args '{"period_s": 5}'[/]
    """
    entry = {"name": module, "loader": {"name": loader, "entrypoint": entrypoint}, "args": _data(args)}
    _change(as_json, socket, "add", module=entry)


@app.command()
def remove(
    socket: Socket,
    module: Module,
    drop: Annotated[bool, typer.Option("--drop", help="Drop its waiting messages at once, and say how many.")] = False,
    timeout: Annotated[float, typer.Option(min=0.0, help="Seconds for handling what waits.")] = 10.0,
    as_json: Json = False,
) -> None:
    """Remove a module and its links, after it has handled its waiting messages.

    Example: [green]penstock gateway remove plant.sock tick[/]
    """
    lost = _one(socket, "remove", module=module, drain=not drop, timeout=timeout)["lost"]
    if as_json:
        print(json.dumps({"done": "remove", "lost": lost}))
    elif lost:
        what = number_of(lost, "message that it had not handled was", "messages that it had not handled were")
        print(f"{module} is removed; {what} dropped")


@app.command()
def link(
    socket: Socket,
    source: Annotated[str, typer.Argument(help="A module, MODULE.OUTPUT, an address, or *.")],
    sink: Annotated[str, typer.Argument(help="A module or an address.")],
    options: Annotated[str | None, typer.Option(help='JSON, as in a file: {"delivery": "at_least_once"}.')] = None,
    as_json: Json = False,
) -> None:
    """Link two modules or addresses.

    Example: [green]penstock gateway link plant.sock tick rows[/]
    """
    more = _data(options)
    if not isinstance(more, dict | None):
        raise InvalidArgument("--options is a JSON object")
    _change(as_json, socket, "link", link={"source": source, "sink": sink, **(more or {})})


@app.command()
def unlink(socket: Socket, source: str, sink: str, as_json: Json = False) -> None:
    """Remove a link; messages that wait are still handled.

    Example: [green]penstock gateway unlink plant.sock tick rows[/]
    """
    _change(as_json, socket, "unlink", source=source, sink=sink)


@app.command()
def pause(socket: Socket, module: Module, as_json: Json = False) -> None:
    """Pause a module; its messages wait.

    Example: [green]penstock gateway pause plant.sock rows[/]
    """
    _change(as_json, socket, "pause", module=module)


@app.command()
def resume(socket: Socket, module: Module, as_json: Json = False) -> None:
    """Resume a paused module.

    Example: [green]penstock gateway resume plant.sock rows[/]
    """
    _change(as_json, socket, "resume", module=module)


@app.command()
def events(socket: Socket, as_json: Json = True) -> None:
    """A line of JSON for each event, until Ctrl-C or the gateway's end.

    Example: [green]penstock gateway events plant.sock[/]
    """
    for told in ask(socket, {"do": "events"}):
        if told is not None:
            print(json.dumps(told), flush=True)


def _data(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"{text!r} is no JSON: {error}") from None
