"""``penstock queue``: the queues of a broker from the command line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock import address as addresses
from penstock.cli import show, silence
from penstock.cli.target import broker_address, live_brokers, live_queues
from penstock.errors import InvalidArgument, nearest
from penstock.printable import printable
from penstock.quantities import duration_s

if TYPE_CHECKING:
    from penstock.broker import Client

app = typer.Typer(no_args_is_help=True, help="List, make, change and empty the queues of a broker.")

COLUMNS = ("queue", "topics", "depth", "ready", "in flight", "consumers", "delivered", "dead", "kept from", "state")
RIGHT = ("depth", "ready", "in flight", "consumers", "delivered", "dead", "kept from")

Broker = Annotated[
    str,
    typer.Argument(
        help="broker://HOST:PORT, or broker:QUEUE as ls prints it.", autocompletion=live_brokers, show_default=False
    ),
]
Name = Annotated[
    str | None,
    typer.Argument(help="The queue; left out with broker:QUEUE.", autocompletion=live_queues, show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="JSON for machines.")]
Topics = Annotated[list[str] | None, typer.Option("--topic", "-t", help="A topic or pattern; may be given again.")]
AckTimeout = Annotated[str | None, typer.Option(metavar="DURATION", help="Redeliver after this time: 30s.")]
MaxTries = Annotated[int | None, typer.Option(min=0, help="Deliveries until it is a dead letter; 0: no limit.")]
Ttl = Annotated[str | None, typer.Option(metavar="DURATION", help="Skip older messages; 0: none are skipped.")]
Exclusive = Annotated[bool | None, typer.Option("--exclusive/--shared", help="One consumer at a time.")]
DeadLetter = Annotated[str | None, typer.Option(metavar="QUEUE", help="Where dead letters go; QUEUE.dead.")]
FromPosition = Annotated[int | None, typer.Option(min=1, help="Begin at this position.")]


@contextlib.contextmanager
def _client(address: str) -> Iterator[Client]:
    from penstock.broker import Client

    parts = addresses.parse(broker_address(address))
    if parts.scheme != "broker":
        raise InvalidArgument(f"{parts.text} is not a broker's address; write broker://HOST:PORT")
    silence.refuse_nobody(parts)
    tls: Any = parts.options.get("tls")
    tls = True if tls in ("1", "true", "yes") else tls
    timeout = float(parts.options.get("timeout", 10.0))
    with Client(parts.host, parts.port or 9876, token=parts.options.get("token"), tls=tls, timeout=timeout) as client:
        yield client


def _named(broker: str, name: str | None) -> str:
    """The queue that is meant: by its name, or by the address."""
    found = name or addresses.parse(broker_address(broker)).options.get("queue")
    if not found:
        raise InvalidArgument("say which queue: broker://HOST:PORT QUEUE, or broker:QUEUE")
    return str(found)


def _found(client: Client, name: str) -> dict[str, Any]:
    known = {entry["queue"]: entry for entry in client.queues()}
    if name not in known:
        raise InvalidArgument(f"there is no queue {name}; {nearest(name, known)}")
    found: dict[str, Any] = known[name]
    return found


def _options(
    topics: list[str] | None,
    ack_timeout: str | None,
    max_tries: int | None,
    ttl: str | None,
    exclusive: bool | None,
    dead_letter: str | None,
    from_position: int | None,
) -> dict[str, Any]:
    given = {
        "topics": topics or None,
        "ack_timeout_s": None if ack_timeout is None else duration_s(ack_timeout, "--ack-timeout"),
        "max_tries": max_tries,
        "ttl_s": None if ttl is None else duration_s(ttl, "--ttl"),
        "exclusive": exclusive,
        "dead_letter": dead_letter,
        "from_position": from_position,
    }
    return {name: value for name, value in given.items() if value is not None}


def _done(as_json: bool, text: str, **facts: Any) -> None:
    if as_json:
        show.print_json(facts)
    else:
        show.console().print(text, markup=False)


@app.command("list")
def list_queues(broker: Broker = "broker://127.0.0.1:9876", as_json: Json = False) -> None:
    """All queues, with what waits in them.

    Example: [green]penstock queue list broker://127.0.0.1:9876[/]
    """
    with _client(broker) as client:
        known = client.queues()
    if as_json:
        for entry in known:
            show.print_json(entry)
        return
    if not known:
        typer.echo("the broker has no queues")
        return
    show.console().print(show.table(COLUMNS, [_row(entry) for entry in known], RIGHT))


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    counts = (entry["in_flight"], entry["consumers"], entry["delivered"])
    return (
        entry["queue"],
        ",".join(entry["topics"]),
        *(_at_least(entry, key) for key in ("depth", "ready")),
        *(show.count_text(count) for count in counts),
        show.count_text(entry["dead_lettered"]),
        show.count_text(entry["floor"]),
        entry["state"] or ("paused" if entry["paused"] else ""),
    )


def _at_least(entry: dict[str, Any], key: str) -> str:
    """A count; with a plus sign if the broker has not counted everything yet."""
    return f"{entry[key]:,}+" if entry.get("depth_at_least") else show.count_text(entry[key])


@app.command("show")
def show_queue(broker: Broker, name: Name = None, as_json: Json = False) -> None:
    """Everything about one queue: its options, what waits, what the broker keeps.

    Example: [green]penstock queue show broker://127.0.0.1:9876 jobs[/]
    """
    name = _named(broker, name)
    with _client(broker) as client:
        entry, broker_counts = _found(client, name), client.statistics()
    entry = {**entry, "broker_first": broker_counts["first"], "broker_next": broker_counts["next"],
             "stored_bytes": broker_counts["stored_bytes"], "keep": broker_counts.get("keep", "")}  # fmt: skip
    if as_json:
        show.print_json(entry)
        return
    for key, value in entry.items():
        if isinstance(value, bool):
            text = "yes" if value else "no"
        else:
            text = ",".join(value) if isinstance(value, list) else f"{value:,}" if type(value) is int else str(value)
        text += "+" if key in ("depth", "ready") and entry.get("depth_at_least") else ""
        show.console().print(f"{key:<16} {text}", markup=False)


@app.command()
def create(
    broker: Broker,
    name: Name = None,
    topic: Topics = None,
    ack_timeout: AckTimeout = None,
    max_tries: MaxTries = None,
    ttl: Ttl = None,
    exclusive: Exclusive = None,
    dead_letter: DeadLetter = None,
    from_position: FromPosition = None,
    as_json: Json = False,
) -> None:
    """Create a queue. An existing one with the same options stays as it is; with other options this says which differ.

    The topic may stand in the address: broker://HOST:PORT/TOPIC. Without one it is default.

    Example: [green]penstock queue create broker://127.0.0.1:9876 jobs --topic 'work.>' --max-tries 5[/]
    """
    name = _named(broker, name)
    topic = topic or [found for found in [addresses.parse(broker_address(broker)).topic] if found]
    options = _options(topic, ack_timeout, max_tries, ttl, exclusive, dead_letter, from_position)
    with _client(broker) as client:
        client.queue(name, create=True, **options)
    takes = f", for {','.join(topic)}" if topic else ""
    _done(as_json, f"queue {name} is there{takes}", queue=name, **options)


@app.command("set")
def set_options(
    broker: Broker,
    name: Name = None,
    topic: Topics = None,
    ack_timeout: AckTimeout = None,
    max_tries: MaxTries = None,
    ttl: Ttl = None,
    exclusive: Exclusive = None,
    dead_letter: DeadLetter = None,
    from_position: FromPosition = None,
    drop_waiting: Annotated[
        bool, typer.Option("--drop-waiting", help="Drop waiting messages of removed topics.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Change options of a queue; the others stay. New topics replace the old ones; while messages of those wait this is
    refused, unless with --drop-waiting.

    Example: [green]penstock queue set broker://127.0.0.1:9876 jobs --ack-timeout 2m[/]
    """
    name = _named(broker, name)
    options = _options(topic, ack_timeout, max_tries, ttl, exclusive, dead_letter, from_position)
    if not options:
        raise InvalidArgument("say what is to change: --topic, --ack-timeout, --max-tries, --ttl, ...")
    with _client(broker) as client:
        before = _found(client, name)
        client.queue(name, drop_waiting=drop_waiting, **options)
        after = _found(client, name)
    changed = [key for key in before if key in options and before[key] != after[key]]
    texts = [f"{key}: {_text(before[key])} → {_text(after[key])}" for key in changed]
    facts: dict[str, Any] = {}
    if lost := after["dropped"] - before["dropped"]:
        facts["dropped"] = lost
        texts.append(f"{lost:,} waiting messages of topics that it no longer has are dropped")
    _done(as_json, f"queue {name}: {', '.join(texts) or 'as it was'}", queue=name, changed=changed, **facts)


def _text(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else f"{value}"


@app.command()
def purge(broker: Broker, name: Name = None, as_json: Json = False) -> None:
    """Drop everything the queue has.

    Example: [green]penstock queue purge broker://127.0.0.1:9876 jobs[/]
    """
    name = _named(broker, name)
    with _client(broker) as client:
        count = client.purge(name)
    _done(as_json, f"queue {name}: {show.number_of(count, 'message')} dropped", queue=name, dropped=count)


@app.command()
def pause(broker: Broker, name: Name = None, as_json: Json = False) -> None:
    """Deliver nothing until resume, also across restarts.

    Example: [green]penstock queue pause broker://127.0.0.1:9876 jobs[/]
    """
    name = _named(broker, name)
    with _client(broker) as client:
        client.pause(name)
    _done(as_json, f"queue {name} is paused", queue=name, paused=True)


@app.command()
def resume(broker: Broker, name: Name = None, as_json: Json = False) -> None:
    """Deliver again.

    Example: [green]penstock queue resume broker://127.0.0.1:9876 jobs[/]
    """
    name = _named(broker, name)
    with _client(broker) as client:
        client.resume(name)
    _done(as_json, f"queue {name} hands out again", queue=name, paused=False)


@app.command()
def peek(
    broker: Broker,
    name: Name = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=1000, help="At most this many.")] = 10,
    as_json: Json = False,
) -> None:
    """Show the next messages of a queue without consuming them. Needs the right to read its topics.

    Messages that were delivered and not acknowledged are shown too.

    Example: [green]penstock queue peek broker://127.0.0.1:9876 jobs -n 3[/]
    """
    name = _named(broker, name)
    from penstock.broker.client.clients import tls_context
    from penstock.broker.fetch import RangeClient

    parts = addresses.parse(broker_address(broker))
    with _client(broker) as client:
        entry = _found(client, name)
    tls: Any = parts.options.get("tls")
    context = tls_context(True if tls in ("1", "true", "yes") else tls)
    with RangeClient(parts.host, parts.port or 9876, token=parts.options.get("token"), tls=context) as reader:
        found = list(reader.fetch(max(1, entry["floor"]), count, queue=name))
    for message in found:
        if as_json:
            show.print_json({"position": message.position, "topic": message.topic, "ordinal": message.ordinal,
                             "payload": message.payload.decode(errors="backslashreplace"),
                             "properties": message.properties})  # fmt: skip
        else:
            text = printable(message.payload[:200].decode(errors="backslashreplace"))
            show.console().print(f"{message.position:>10}  {message.topic}  {text}", markup=False)
    if not found and not as_json:
        typer.echo(f"queue {name} is empty")


@app.command()
def redrive(broker: Broker, name: Name = None, as_json: Json = False) -> None:
    """Send the queue's dead letters back to it.

    Example: [green]penstock queue redrive broker://127.0.0.1:9876 jobs[/]
    """
    name = _named(broker, name)
    total = 0
    with _client(broker) as client:
        while count := client.redrive(name):
            total += count
    _done(as_json, f"queue {name}: {total:,} dead letters sent back", queue=name, redriven=total)


@app.command()
def delete(broker: Broker, name: Name = None, as_json: Json = False) -> None:
    """Delete a queue without consumers. Its messages stay as long as other queues need them, or --keep keeps them.

    Example: [green]penstock queue delete broker://127.0.0.1:9876 jobs[/]
    """
    name = _named(broker, name)
    with _client(broker) as client:
        client.delete(name)
    _done(as_json, f"queue {name} is deleted", queue=name, deleted=True)
