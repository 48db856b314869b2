"""``penstock broker DIRECTORY [PORT]``: run the durable broker in the foreground until it is told to end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer.core import TyperCommand

from penstock.cli import exits, show
from penstock.cli.group import refuse_empty_paths
from penstock.errors import CorruptionError, InvalidArgument
from penstock.quantities import size_bytes

if TYPE_CHECKING:
    from penstock.broker import Server, Store
    from penstock.broker.backup import Copied
    from penstock.replica import JetStream, Replica

log = logging.getLogger("penstock.broker")
STORE_TOKEN = "PENSTOCK_STORE_TOKEN"  # noqa: S105 - the name of a variable
app = typer.Typer()
tasks = typer.Typer()  # penstock broker backup | restore: a directory of such a name is written ./backup


@tasks.command()
def backup(
    directory: Annotated[Path, typer.Argument(help="The broker's directory; it may be running.")],
    target: Annotated[Path, typer.Argument(help="The directory of the copy; created if it does not exist.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was copied as one JSON object.")] = False,
) -> None:
    """Copy what is durable in a broker's directory, with queues and positions, while it runs; later only what is new.

    Example: [green]penstock broker backup /var/lib/penstock /backup/penstock[/]
    """
    from penstock.broker.backup import backup as copy

    _print_copied(copy(directory, target), as_json)


@tasks.command()
def restore(
    target: Annotated[Path, typer.Argument(help="Where the copy is.")],
    directory: Annotated[Path, typer.Argument(help="A directory that does not exist, or is empty.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was copied as one JSON object.")] = False,
) -> None:
    """Put a backup back; then start the broker on the directory.

    Example: [green]penstock broker restore /backup/penstock /var/lib/penstock[/]
    """
    from penstock.broker.backup import restore as put_back

    _print_copied(put_back(target, directory), as_json)


def _print_copied(copied: Copied, as_json: bool) -> None:
    if as_json:
        show.print_json(asdict(copied))
        return
    size = show.bytes_text(copied.copied_bytes)
    print(f"{copied.segments} segments; {copied.copied_files} files ({size}) copied, {copied.removed_files} removed")


class _BrokerCommand(TyperCommand):
    """``penstock broker DIRECTORY`` runs a broker; with ``backup`` or ``restore`` in front it does that instead."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        known: Any = typer.main.get_command(tasks)
        if args and args[0] in known.commands:
            name, *rest = args
            refuse_empty_paths(known.commands[name])
            return known.commands[name].make_context(f"{info_name} {name}", rest, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@app.command(cls=_BrokerCommand)
def broker(
    directory: Annotated[Path, typer.Argument(help="The journal's directory; created if it does not exist.")],
    port: Annotated[int, typer.Argument(min=0, max=65535, help="0 takes any free one; it is printed.")] = 9876,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    tokens: Annotated[Path | None, typer.Option(help="A file of tokens and rights (TOML, mode 600).")] = None,
    certificate: Annotated[Path | None, typer.Option(help="The server's certificate chain: switches TLS on.")] = None,
    key: Annotated[Path | None, typer.Option(help="The certificate's key, if not in the same file.")] = None,
    client_authority: Annotated[
        Path | None, typer.Option(help="Clients must present a certificate of this authority.")
    ] = None,
    insecure: Annotated[bool, typer.Option(help="Listen beyond this machine without tokens.")] = False,
    quota: Annotated[str, typer.Option(metavar="SIZE", help="Refuse to publish past this: 10GiB; 0: none.")] = "0",
    max_message: Annotated[int, typer.Option(min=1, metavar="BYTES", help="The longest message.")] = 64 << 20,
    max_topics: Annotated[int, typer.Option(min=1, help="The most topics.")] = 100_000,
    max_rate: Annotated[float, typer.Option(min=0.0, help="Messages per second and connection; 0: any.")] = 0.0,
    max_connections: Annotated[int, typer.Option(min=1, help="Connections at a time.")] = 10_000,
    max_unacknowledged: Annotated[int, typer.Option(min=1, help="Messages that a consumer may hold.")] = 65_536,
    retain_age: Annotated[float | None, typer.Option(min=0, metavar="SECONDS", help="Free what is older.")] = None,
    retain_bytes: Annotated[
        int | None, typer.Option(min=0, metavar="BYTES", help="Free the oldest past this size.")
    ] = None,
    keep: Annotated[
        str, typer.Option(help="How much to keep of what all queues are done with: a size, an age (7d), forever.")
    ] = "1GiB",
    retain_queues: Annotated[bool, typer.Option(help="Free all that the queues are done with: --keep 0.")] = False,
    deduplication: Annotated[
        float, typer.Option(min=0, max=1e9, metavar="SECONDS", help="How long message ids are remembered.")
    ] = 120.0,
    keepalive: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="A client silent for this long counts as gone; 0: never.")
    ] = 15.0,
    drain: Annotated[
        float, typer.Option(min=0, max=1e9, metavar="SECONDS", help="How long to wait for consumers when ending.")
    ] = 5.0,
    sync: Annotated[bool, typer.Option(help="Sync to disk before confirming.")] = True,
    store: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Keep the log on a cluster: nats://H1,H2,H3/STREAM.")
    ] = None,
    standby: Annotated[
        bool, typer.Option("--standby", help="Lead only while no other broker of the stream does; else stand by.")
    ] = False,
    lease: Annotated[
        float | None,
        typer.Option(min=0.5, max=3600, metavar="SECONDS", help="Silence of the leader before another takes over (2)."),
    ] = None,
    seed: Annotated[bool, typer.Option("--seed", help="Start a new stream with a copy of DIRECTORY's log.")] = False,
    store_authority: Annotated[
        Path | None, typer.Option(help="The authority that signed the cluster's certificates; switches TLS on.")
    ] = None,
    store_certificate: Annotated[Path | None, typer.Option(help="The certificate to present to the cluster.")] = None,
    store_key: Annotated[Path | None, typer.Option(help="Its key, if not in the same file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print where it listens as one JSON object.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log connections too.")] = False,
) -> None:
    """Run the durable broker.

    Example: [green]penstock broker /var/lib/penstock 9876[/], then [green]nc 127.0.0.1 9876[/] and
    [green]SUB Hello[/], or [green]penstock pub broker://127.0.0.1:9876/greetings hello[/].

    SIGTERM and Ctrl-C end it gracefully, SIGHUP reads the tokens again. [green]penstock broker backup DIRECTORY
    TARGET[/] copies it while it runs, [green]penstock broker restore TARGET DIRECTORY[/] puts the copy back.

    With [green]--store[/] a message is confirmed when most of the cluster's machines have it on disk, and the directory
    is a copy that is rebuilt if it is missing. The broker that was started last leads; an earlier one ends. With
    [green]--standby[/] on each of several brokers one leads, and another takes over when it is gone; clients use
    [green]broker://HOST:PORT,HOST:PORT/TOPIC[/]. The cluster's token may be given in PENSTOCK_STORE_TOKEN.
    """
    from penstock.broker import ConnectionLimits, Limits, Server
    from penstock.broker.entry import Entry
    from penstock.broker.store import Keep

    exits.log_to_stderr("%(levelname)s %(name)s: %(message)s", logging.DEBUG if verbose else logging.INFO)
    rules = {"retain_age_s": retain_age, "retain_bytes": retain_bytes, "retain_queues": retain_queues}
    journal_options: dict[str, Any] = {name: value for name, value in rules.items() if value}
    journal_options |= {"keep": keep, "sync": sync, "max_message_bytes": max_message}
    if standby and (store is None or port == 0):
        raise InvalidArgument("--standby needs --store ADDRESS and a fixed port (not 0), because clients must know it")
    files = {"authority": store_authority, "certificate": store_certificate, "key": store_key}
    _check_store(store, files, standby=standby, lease=lease, seed=seed, sync=sync)
    limits = Limits(
        max_message_bytes=max_message,
        max_topics=max_topics,
        quota_bytes=size_bytes(quota, "--quota"),
        deduplication_s=deduplication,
    )
    connection_limits = ConnectionLimits(
        max_message_bytes=max_message,
        max_rate=max_rate,
        max_unacknowledged=max_unacknowledged,
        keepalive_s=keepalive,
    )
    access: dict[str, Any] = {"tokens": tokens, "certificate": certificate, "key": key}
    access |= {"client_authority": client_authority, "insecure": insecure}
    # now, not when a broker that stands by is needed
    Keep.parse(keep)
    entry = Entry(host, **access)
    if standby:
        _check_place(directory, host, port)
    replica = None
    if store is not None:
        replica = _replica(directory, store, store_authority, store_certificate, store_key)
        if seed:
            _seed(directory, replica)

    def serve(replica: Replica | None, leads: Callable[[], bool] | None = None) -> Server:
        try:
            return opened(replica, leads)
        except CorruptionError as damage:
            if replica is None:
                raise
            log.warning("%s; every segment of %s is compared with %s", damage, directory, replica.blocks.name)
        replica.check = True
        return opened(replica, leads)

    def opened(replica: Replica | None, leads: Callable[[], bool] | None) -> Server:
        return Server(
            directory,
            port,
            host=host,
            limits=limits,
            connection_limits=connection_limits,
            max_connections=max_connections,
            drain_s=drain,
            store=None if replica is None else _replicated(directory, replica, limits.quota_bytes, journal_options),
            leads=leads,
            entry=entry,
            **journal_options,
        )

    def renew() -> None:
        nonlocal entry
        entry = entry.renewed()

    def tell(server: Server) -> None:
        if as_json:
            show.print_json({"host": server.host, "port": server.port, "directory": str(directory)})
        else:
            print(f"listening on {server.host}:{server.port}", flush=True)

    if standby:
        assert replica is not None
        _take_turns(directory, replica, f"{host}:{port}", lease or 2.0, serve, tell, drain, renew)
    else:
        _run(serve(replica), replica, tell, drain)
    print("ended", file=sys.stderr)


def _check_store(
    store: str | None, files: dict[str, Path | None], *, standby: bool, lease: float | None, seed: bool, sync: bool
) -> None:
    """Refuse options that would do nothing."""
    for name, file in files.items():
        if file is not None and store is None:
            raise InvalidArgument(f"--store-{name} needs --store ADDRESS")
    if lease is not None and not standby:
        raise InvalidArgument("--lease needs --standby")
    if seed and store is None:
        raise InvalidArgument("--seed needs --store ADDRESS")
    if store is not None and not sync:
        raise InvalidArgument("--no-sync does not go with --store: the cluster confirms what it has on disk")


def _check_place(directory: Path, host: str, port: int) -> None:
    """Refuse now what a broker that stands by could not have when it is needed."""
    from penstock.broker.endpoint import OWN_PORT, listen
    from penstock.replica.refill import check_directory

    listen(host, port, OWN_PORT).close()
    check_directory(directory)


def _run(server: Server, replica: Replica | None, tell: Callable[[Server], None], drain_s: float) -> None:
    """Serve until a signal ends it."""

    def stop(*_: object) -> None:
        server.stop()
        if replica is not None:
            replica.end_after(drain_s)

    _on_signals(stop, lambda *_: server.reload())
    tell(server)
    try:
        server.run()
    except OSError:
        if replica is None or replica.fault is None:
            raise
        raise replica.fault from None  # the error of the store, which is the cause
    finally:
        if replica is not None:
            replica.close()


def _take_turns(
    directory: Path,
    replica: Replica,
    address: str,
    lease_s: float,
    serve: Callable[[Replica, Callable[[], bool]], Server],
    tell: Callable[[Server], None],
    drain_s: float,
    renew: Callable[[], None],
) -> None:
    """Stand by and lead in turn with the other brokers of the stream, until a signal ends it."""
    from penstock.cli.lead import Turns
    from penstock.replica.lease import Lease
    from penstock.replica.refill import refuse_messages
    from penstock.replica.standby import lease_stream

    blocks = cast("JetStream", replica.blocks)
    if not blocks.patiently(blocks.bounds).last:
        refuse_messages(directory, blocks.name)
    place = lease_stream(blocks.target)
    place.open_patiently()
    turns = Turns(directory, blocks, Lease(place, address, lease_s), serve, tell, drain_s, renew)
    _on_signals(turns.end, turns.reload)
    try:
        with contextlib.suppress(exits.Terminated):
            turns.run()
    finally:
        place.close()
        blocks.close()


def _on_signals(stop: Callable[..., None], reload: Callable[..., None]) -> None:
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGHUP, reload)


def _replica(
    directory: Path, address: str, authority: Path | None, certificate: Path | None, key: Path | None
) -> Replica:
    from penstock.replica import JetStream, Replica
    from penstock.replica.stream import Target, tls_context

    target = Target.parse(address, tls_context(authority, certificate, key), os.environ.get(STORE_TOKEN, ""))
    blocks = JetStream(target)
    blocks.patiently(blocks.find)
    return Replica(directory, blocks)


def _seed(directory: Path, replica: Replica) -> None:
    from penstock.replica.seed import seed

    seed(directory, replica.blocks)


def _replicated(directory: Path, replica: Replica, quota: int, options: dict[str, Any]) -> Callable[[Any], Store]:
    from penstock.broker.store import JournalStore

    return lambda snapshot: JournalStore(directory, snapshot, disk=replica.disk(), quota_bytes=quota, **options)
