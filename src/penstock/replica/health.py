"""Whether a cluster is fit to keep a broker's log: its servers, its quorum, the lag of its replicas, how it syncs. What
a server tells only an administrator (``sync_interval``) is read from its monitoring port, if one is given.
"""

from __future__ import annotations

import ssl
import time
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from penstock.errors import CorruptionError, InvalidArgument, PenstockError, RefusedError, describe
from penstock.replica.block import decode
from penstock.replica.client import LEAST_MESSAGE_BYTES, LET_IN, MORE_PAYLOAD, NEW_CREDS, Connection, UnansweredError
from penstock.replica.history import FILL_ANOTHER, History
from penstock.replica.lease import LEASE_S, MARGIN, Holder
from penstock.replica.protocol import fields_of
from penstock.replica.standby import lease_stream
from penstock.replica.stream import MAX_BLOCK_BYTES, PAUSE_S, JetStream, StreamError, Target
from penstock.secrecy import without_secrets

LEAST_VERSION = (2, 11)
LAG_BLOCKS = 1000
NEARLY_FULL = 0.9  # of what a stream may have
ASK_S = 5.0
WATCH_S = 5.0  # so long at most for a lease to be renewed
LEASE_READS = 10
MAX_ANSWER = 1 << 20


class Finding(NamedTuple):
    """``verdict`` is ok, note or bad."""

    verdict: str
    text: str
    remedy: str = ""


def look(target: Target, monitors: Iterable[str] = ()) -> Iterator[Finding]:
    """All findings about the cluster."""
    for server in target.servers:
        yield from _server(server, target)
    answers = {server: _answer(server, target) for server in target.servers}
    yield from _stream(target, answers)
    well = tuple(server for server, answer in answers.items() if isinstance(answer, dict))
    yield from _leader(replace(target, servers=well or target.servers))
    asked = False
    for monitor in monitors:
        asked = True
        yield from _syncing(monitor)
    if not asked:
        remedy = "give --store-monitor http://HOST:8222 of each node"
        yield Finding("note", "whether the nodes sync every message was not asked", remedy)


def _server(server: tuple[str, int], target: Target) -> Iterator[Finding]:
    name = f"{server[0]}:{server[1]}"
    try:
        connection = Connection(server, target.access, ASK_S)
    except (OSError, PenstockError) as error:
        yield _no_entry(name, error)
        return
    connection.close()
    version = str(connection.info.get("version", ""))
    parts = [int(part) if part.isdigit() else 0 for part in version.split(".")[:2]]
    if tuple(parts) < LEAST_VERSION:
        yield Finding("bad", f"{name} is nats-server {version}", "2.11 or newer is needed")
    else:
        yield Finding("ok", f"{name} is nats-server {version}")
    if not connection.info.get("jetstream"):
        text = f"{name} has no JetStream: it is not configured, or the server has ended it, as on a full disk"
        remedy = "its log tells; jetstream { store_dir: ..., sync_interval: always }; after a full disk: restart it"
        yield Finding("bad", text, remedy)
    if connection.too_little:
        yield Finding("bad", connection.too_little, f"{MORE_PAYLOAD}; the broker stores without it")
    elif connection.max_payload < MAX_BLOCK_BYTES:
        text = f"{name} takes {connection.max_payload} bytes in one message: larger commits are cut in pieces"
        yield Finding("note", text, MORE_PAYLOAD)


def _no_entry(name: str, error: Exception) -> Finding:
    """Why no connection to a server could be made."""
    if isinstance(error, RefusedError):
        remedy = NEW_CREDS if "refuses the credentials file" in str(error) else LET_IN
        return Finding("bad", f"{name} lets nobody in: {error}".removesuffix(f"; {LET_IN}"), remedy)
    if isinstance(error, ssl.SSLError):
        remedy = "--store-authority FILE, and where it asks for a certificate --store-certificate FILE"
        return Finding("bad", f"{name} and this machine do not agree on TLS: {describe(error)}", remedy)
    return Finding("bad", f"{name} does not answer: {error}", "start it; two of three are needed to store anything")


def _answer(server: tuple[str, int], target: Target) -> dict[str, Any] | Exception:
    """What this server says of the stream: one may be ill where the others are well."""
    blocks = JetStream(replace(target, servers=(server,)), answer_s=ASK_S)
    try:
        return blocks.describe()
    except (OSError, PenstockError) as error:
        return error
    finally:
        blocks.close()


def _stream(target: Target, answers: dict[tuple[str, int], dict[str, Any] | Exception]) -> Iterator[Finding]:
    """``answers``: what each server says of the stream."""
    told = {server: answer for server, answer in answers.items() if isinstance(answer, dict)}
    if not told:
        # a server that answers knows more than one that is away
        error = min(answers.values(), key=lambda answer: isinstance(answer, ConnectionError))
        yield Finding("bad", f"{error}", "nothing can be stored while there is no quorum, or no stream")
        return
    for server, answer in answers.items():
        if isinstance(answer, UnansweredError):
            text = f"{server[0]}:{server[1]} is of no use for stream {target.stream}: {answer}"
            yield Finding("bad", text, "look into its log, and whether its disk is full; the others store without it")
    found = next(iter(told.values()))
    blocks = JetStream(replace(target, servers=tuple(told)), answer_s=ASK_S)
    unfit = list(blocks.unfit(found))
    for problem in unfit:
        yield Finding("bad", problem, "name another stream, or make it anew")
    try:
        last = _fields(found, "state").get("last_seq")
        data = blocks.read(last) if isinstance(last, int) and last and not unfit else None
        begin = 0
        if data is not None and isinstance(last, int):
            block = decode(data, f"block {last} of {blocks.name}")
            begin = block.begin_sequence(last)
            if block.epoch == 0 and (unfinished := History(blocks, blocks.bounds()).unfinished):
                yield Finding("bad", unfinished, FILL_ANOTHER)
        first = _fields(found, "state").get("first_seq")
        if isinstance(first, int) and 0 < begin < first:
            text = f"{blocks.name} was purged, and not by its broker: its last segment begins with block {begin}"
            yield Finding("bad", f"{text}, and that is gone", "keep the broker's directory: it puts it right")
    except CorruptionError as damage:
        remedy = "start the broker on the directory that was written last; it repairs the stream"
        yield Finding("bad", f"{damage}", remedy)
    except (OSError, PenstockError) as failure:
        yield Finding("bad", f"{failure}", "nothing can be stored while there is no quorum, or no stream")
        return
    finally:
        blocks.close()
    settings, cluster = _fields(found, "config"), _fields(found, "cluster")
    state = _fields(found, "state")
    leader = cluster.get("leader")
    who = f"{leader} leads" if cluster else "on one server"
    yield Finding("ok", f"{blocks.name}: {state.get('messages')} blocks, {state.get('bytes')} bytes, {who}")
    yield from _room(blocks.name, settings, state)
    if settings.get("num_replicas", 1) < 3:
        yield Finding("note", f"{blocks.name} has {settings.get('num_replicas', 1)} copy", "three survive a machine")
    if state.get("num_deleted"):
        text = f"{blocks.name} has lost {state['num_deleted']} blocks: they may be needed on another machine"
        yield Finding("bad", text, "start the broker on its own directory: it puts back what is needed")
    yield from _copies(blocks.name, cluster)


def _room(stream: str, settings: dict[str, Any], state: dict[str, Any]) -> Iterator[Finding]:
    """Whether a limit of the stream, if it has one, leaves room for a block."""
    bounds = ("max_bytes", "bytes", "bytes", LEAST_MESSAGE_BYTES), ("max_msgs", "messages", "blocks", 1)
    for limit, used, what, block in bounds:
        most, has = settings.get(limit, -1), state.get(used)
        if not isinstance(most, int) or not isinstance(has, int) or most <= 0:
            continue
        text = f"{has} of at most {most} {what} ({limit})"
        if most - has < block:
            yield Finding("bad", f"{stream} is full: {text}: publishers wait", f"raise {limit} of the stream")
        elif has > NEARLY_FULL * most:
            yield Finding("note", f"{stream} has {text}", f"raise {limit} before it is full: then publishers wait")


def _copies(stream: str, cluster: dict[str, Any]) -> Iterator[Finding]:
    """The copies that are not the leader's, as it sees them: right after most of them were lost it leads on."""
    replicas = [one for one in cluster.get("replicas") or [] if isinstance(one, dict)]
    behind = [f"{one.get('name')} ({one.get('lag', 0)} blocks)" for one in replicas if _lags(one)]
    if 2 * len(behind) > len(replicas):
        text = f"behind or away: {', '.join(behind)}: that is most copies of {stream}"
        yield Finding("bad", text, "nothing can be stored while they are away: start them")
    elif behind:
        yield Finding("note", f"behind or away: {', '.join(behind)}", "one more must not be lost until they are back")


def _leader(target: Target) -> Iterator[Finding]:
    """Which broker leads, where they are started with ``--standby``: the one that renews the lease."""
    blocks = lease_stream(target, ASK_S)
    try:
        before, data = 0, None
        for _ in range(LEASE_READS):  # the next one takes its place at once
            before = blocks.bounds().last
            data = blocks.read(before) if before else None
            if data is not None:
                break
        if data is None:
            return
        holder = Holder.decode(data)
        end = time.monotonic() + min(WATCH_S, (holder.lease_s or LEASE_S) * MARGIN)
        while holder.address and blocks.bounds().last == before:
            if time.monotonic() >= end:
                text = f"the broker at {holder.address} led last and has not renewed its lease"
                yield Finding("note", text, "start one with --standby, or wait until another takes over")
                return
            time.sleep(PAUSE_S)
        if holder.address:
            yield Finding("ok", f"the broker at {holder.address} leads")
        else:
            yield Finding("note", "no broker holds the lease: the last one has ended", "start one with --standby")
    except StreamError:
        return  # no lease: the brokers of this stream do not stand by
    except (OSError, PenstockError) as error:
        yield Finding("note", f"which broker leads was not told: {error}")
    finally:
        blocks.close()


def _lags(replica: dict[str, Any]) -> bool:
    lag = replica.get("lag", 0)
    return bool(replica.get("offline")) or not replica.get("current") or (isinstance(lag, int) and lag > LAG_BLOCKS)


def _fields(found: dict[str, Any], name: str) -> dict[str, Any]:
    part = found.get(name)
    return part if isinstance(part, dict) else {}


def _syncing(monitor: str) -> Iterator[Finding]:
    if urlsplit(monitor).scheme not in ("http", "https") or "@" in monitor:  # nobody asks for a user there
        wanted = "http://HOST:PORT of a node's monitoring port, without a user"
        raise InvalidArgument(f"{without_secrets(monitor)!r} is not {wanted}")
    try:
        with urllib.request.urlopen(f"{monitor.rstrip('/')}/jsz", timeout=ASK_S) as answer:  # noqa: S310 - http, above
            told = fields_of(answer.read(MAX_ANSWER), "answer")
    except (OSError, PenstockError) as error:
        yield Finding("note", f"{monitor} does not tell: {error}", "http: HOST:8222 in the node's configuration")
        return
    settings = _fields(told, "config")
    if told.get("disabled"):
        yield Finding("note", f"{monitor}: JetStream is off there, so it does not tell whether it syncs")
    elif settings.get("sync_always"):
        yield Finding("ok", f"{monitor}: every message is synced")
    else:
        seconds = settings.get("sync_interval", 0) / 1e9
        text = f"{monitor}: synced every {seconds:g} s: a power cut of most nodes loses what was confirmed"
        yield Finding("bad", text, "jetstream { sync_interval: always }")
