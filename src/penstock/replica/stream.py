"""Blocks: the interface behind which blocks are replicated. ``JetStream`` keeps them in a stream of a NATS cluster.

Sequences count from 1 without gaps. ``append`` puts a block right after the sequence ``after`` or nowhere. Without an
answer the outcome is unknown: the block may be stored now, later, or never. One thread uses it at a time.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import re
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qsl, unquote

from penstock.errors import InvalidArgument, PenstockError
from penstock.nats_credentials import read_credentials
from penstock.printable import command
from penstock.replica.client import (
    LEAST_MESSAGE_BYTES,
    NO_RESPONDERS,
    PORT,
    Access,
    Client,
    Connection,
    UnansweredError,
)
from penstock.replica.outage import SLOW_S, TELL_S
from penstock.replica.protocol import Message, fields_of

log = logging.getLogger("penstock.replica")
T = TypeVar("T")
ANSWER_S = 2.0
REACH_S = 1.0  # how long to wait for the greetings of servers, to say how many answer
PATIENCE_S = 30.0  # how long to try to read blocks that are needed to go on
PAUSE_S = 0.1
BATCH_BLOCKS, BATCH_BYTES = 256, 8 << 20
HEADERS_BYTES = 512  # bytes of a message besides the block
WRONG_LAST = (10071, 10164)
NOT_FOUND, NO_MESSAGE = 404, 10037
STREAM_NOT_FOUND = 10059
NOT_CLUSTERED = 10074  # more than one copy was asked of a server that is alone
TOO_LONG = 10054  # the message is longer than the stream takes
NO_PEERS = 10005  # fewer servers than copies
LIMITS_REACHED = (10023, 10077, 10110, 10122)
MAX_BLOCK_BYTES = 8 << 20
_NAME = re.compile(r"^[A-Za-z0-9_-]{1,64}$")
_HOST = re.compile(r"^(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]]+))(?::(\d{1,5}))?$")


class Seldom:
    """Logs what goes wrong again and again: at once, and then every ``TELL_S``."""

    def __init__(self) -> None:
        self._told = -TELL_S

    @property
    def due(self) -> bool:
        """Whether the last warning is long ago."""
        return time.monotonic() - self._told >= TELL_S

    def warn(self, text: str, *arguments: object) -> None:
        """A warning, if the last one is long ago."""
        if self.due:
            self._told = time.monotonic()
            log.warning(text, *arguments)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The sequences that a stream has: ``last < first`` when it is empty, ``last`` is 0 when nothing was ever there."""

    first: int
    last: int
    missing: int = 0  #: blocks between them that the stream has lost


class WrongLastError(PenstockError):
    """The stream does not end where the caller believes it does."""


class StreamError(PenstockError):
    """The server refused a request, with its reason; another attempt may succeed."""


class NoStreamError(StreamError):
    """There is no stream of that name."""


class Blocks(Protocol):
    """What the replicated store needs of a store of blocks."""

    name: str  #: for messages to the user

    @property
    def max_bytes(self) -> int:
        """Bytes of the longest block that the connected server takes; may change at a reconnect. ConnectionError."""

    def make(self) -> None:
        """Make the store if it is not there; before the first block. What it takes is waited for."""

    def bounds(self) -> Bounds:
        """Which sequences there are."""

    def append(self, data: bytes, after: int, identity: str = "") -> None:
        """Add a block. WrongLastError: the last one is not ``after``. UnansweredError: the outcome is unknown.
        ``identity``: of these bytes alone; a server that has it right after ``after`` stores nothing more, whatever
        came since.
        """

    def read(self, sequence: int) -> bytes | None:
        """One block, from the leader; None: it does not exist (yet, or any more)."""

    def read_range(self, first: int, last: int) -> Iterator[tuple[int, bytes]]:
        """The existing blocks from ``first`` to ``last``, in order."""

    def purge(self, below: int) -> None:
        """Free the blocks below a sequence."""

    def reach(self) -> str:
        """How many of its servers answer, for messages to the user. Any thread."""

    def close(self) -> None:
        """Let go of the connection."""


@dataclass(frozen=True)
class Target:
    """``nats://h1:4222,h2:4222,h3:4222/STREAM``, parsed."""

    servers: tuple[tuple[str, int], ...]
    stream: str
    access: Access
    replicas: int

    @classmethod
    def parse(cls, address: str, tls: ssl.SSLContext | None = None, token: str = "") -> Target:
        """``nats://`` or ``tls://``, with ``user:password@`` or ``token@`` in front, and ``?replicas=1`` or
        ``?creds=FILE`` at the end.

        ``token``: for an address that has none of them.
        """
        scheme, mark, rest = address.partition("://")
        if not mark or scheme not in ("nats", "tls"):
            raise InvalidArgument("a store's address is nats://HOST:PORT,HOST:PORT/STREAM")
        rest, _, query = rest.partition("?")
        places, _, stream = rest.rpartition("/")
        secret, _, hosts = places.rpartition("@")
        if not _NAME.match(stream):
            raise InvalidArgument("a store's address ends with /STREAM: up to 64 letters, digits, - and _")
        if "/" in hosts:
            raise InvalidArgument(
                f"a store's address is nats://HOST:PORT/STREAM: {hosts.partition('/')[2]}/{stream} "
                "is no name of a stream, which has no /"
            )
        user, colon, password = secret.partition(":")
        written = parse_qsl(query, keep_blank_values=True)
        options = dict(written)
        for name, value in written:
            if options[name] != value:
                raise InvalidArgument(f"?{query} has {name!r} twice, with different values")
        if options.get("creds") == "":
            raise InvalidArgument("creds= is empty: give it a credentials file, or leave it out")
        replicas = options.pop("replicas", "3")
        creds = options.pop("creds", "")
        if options or replicas not in ("1", "3", "5"):
            raise InvalidArgument(f"?{query} is not a store's option; valid: replicas=1, 3 or 5, creds=FILE")
        if creds:
            if secret:
                raise InvalidArgument("creds=FILE goes without a token, a user and a password")
            read_credentials(creds)  # what is wrong with it is said now
        if scheme == "tls" and tls is None:
            tls = ssl.create_default_context()
        access = Access(
            token="" if colon or creds else unquote(user) or token,
            user=unquote(user) if colon else "",
            password=unquote(password),
            tls=tls,
            creds=creds,
        )
        return cls(tuple(map(_server, hosts.split(","))), stream, access, int(replicas))


def tls_context(authority: Path | None, certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """The TLS context that verifies the cluster's servers and presents the client's certificate; None if neither is
    given.
    """
    if key is not None and certificate is None:
        raise InvalidArgument(f"the key {key} goes with a certificate: --store-certificate FILE")
    if authority is None and certificate is None:
        return None
    for path in (authority, certificate, key):
        if path is not None:
            path.open("rb").close()  # its error names the file, that of ssl does not
    try:
        context = ssl.create_default_context(cafile=authority)
    except ssl.SSLError as error:
        raise InvalidArgument(f"{authority} is no certificate in PEM form: {error}") from None
    if certificate is not None:
        _load(context, certificate, key)
    return context


def _load(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    try:
        context.load_cert_chain(certificate, key)
        return
    except ssl.SSLError as error:
        problem = error
    if problem.reason == "KEY_VALUES_MISMATCH":
        raise InvalidArgument(f"{key or certificate} has not the key of the certificate {certificate}")
    if key is None and b"PRIVATE KEY-----" not in certificate.read_bytes():
        raise InvalidArgument(f"{certificate} has no key in it: --store-key FILE names it")
    files = f"{certificate} or its key {key}" if key is not None else f"{certificate}"
    raise InvalidArgument(f"{files} is no certificate in PEM form: {problem}")


def _settings(found: dict[str, Any]) -> dict[str, Any]:
    """The configuration in a stream's description."""
    settings = found.get("config")
    return settings if isinstance(settings, dict) else {}


def _server(text: str) -> tuple[str, int]:
    found = _HOST.match(text)
    if not found or int(found[3] or PORT) > 65535:
        raise InvalidArgument(f"{text!r} is not HOST or HOST:PORT of a NATS server")
    return found[1] or found[2], int(found[3] or PORT)


class JetStream:
    """A stream of a NATS cluster. ``limits``: settings of a new stream that differ from those of a log of blocks."""

    def __init__(self, target: Target, *, answer_s: float = ANSWER_S, limits: Mapping[str, Any] | None = None) -> None:
        self.target = target
        self._limits = limits or {}
        self.name = f"stream {target.stream}"
        self.subject = f"penstock.{target.stream}"
        self.client = Client(target.servers, target.access)
        self._answer_s = answer_s
        self._largest = MAX_BLOCK_BYTES + HEADERS_BYTES  # in one message, as the stream's settings say
        self._absent = False

    def find(self) -> None:
        """``open``, but a stream that does not exist is only made by ``make``, and counts as an empty one until then: a
        start that is refused leaves nothing behind.
        """
        self._absent = True
        self._found()

    def _found(self) -> dict[str, Any]:
        if not self._absent:
            return self.describe()
        try:
            found = self.describe_fit()
        except NoStreamError:
            return {"state": {"first_seq": 1, "last_seq": 0, "messages": 0}}
        self._absent = False
        return found

    def make(self) -> None:
        """Waits for a quorum."""
        self.open_patiently()
        self._absent = False

    def open(self) -> dict[str, Any]:
        """Create the stream if it does not exist; returns its description. InvalidArgument: it is there and unfit.
        StreamError, UnansweredError, ConnectionError.
        """
        with contextlib.suppress(NoStreamError):
            return self.describe_fit()
        configuration = {
            "name": self.target.stream,
            "subjects": [self.subject],
            "storage": "file",
            "num_replicas": self.target.replicas,
            "retention": "limits",
            "discard": "new",
            "max_consumers": -1,
            "max_msgs": -1,
            "max_bytes": -1,
            "max_age": 0,
            "allow_direct": True,
            "deny_delete": True,
            **self._limits,
        }
        try:
            self._ask(f"STREAM.CREATE.{self.target.stream}", configuration)
        except StreamError as error:
            if getattr(error, "number", 0) == NO_PEERS:  # not final: more nodes may join, so the caller may try again
                needs = f"{self.target.replicas} copies need {self.target.replicas} nodes with JetStream"
                remedy = "start more, or give another ?replicas= in the store's address"
                raise StreamError(f"{self.name}: {needs}, and there are fewer now: {remedy}") from None
            if getattr(error, "number", 0) != NOT_CLUSTERED:
                raise
            servers = ",".join(f"{host}:{port}" for host, port in self.target.servers)
            text = f"the server at {servers} is of no cluster and keeps one copy, not {self.target.replicas}"
            raise InvalidArgument(f"{text}: add ?replicas=1 to the store's address, or start three servers") from None
        try:
            return self.describe_fit()
        except NoStreamError:
            raise UnansweredError(f"{self.name} is made, and not every server knows it yet") from None

    def describe_fit(self) -> dict[str, Any]:
        """``describe``, of a stream that keeps every block. InvalidArgument: it does not, or is another program's."""
        found = self.describe()
        problem = next(self.unfit(found), None)
        if problem is not None:
            raise InvalidArgument(f"{problem}: name another stream, or make it anew")
        return found

    @property
    def max_bytes(self) -> int:
        """What both the stream and the server of the connection take."""
        longest = min(self._largest, self.client.connection().max_payload)
        return max(longest, LEAST_MESSAGE_BYTES) - HEADERS_BYTES

    def unfit(self, found: dict[str, Any]) -> Iterator[str]:
        """Why a stream of this description must not be used, a sentence each: it is another program's, or its servers
        drop or refuse blocks by themselves, so that what was confirmed would be lost.
        """
        settings = _settings(found)
        if settings.get("subjects") != [self.subject]:
            subjects = ", ".join(map(str, settings.get("subjects") or ())) or "none"
            yield f"{self.name} belongs to something else: its subjects are {subjects}, those of a log {self.subject}"
        wanted: dict[str, Any] = {"max_msgs": -1, **self._limits}
        if self._limits:
            for name, value in wanted.items():
                if settings.get(name) != value:
                    yield f"{self.name} is no lease of brokers: {name} is {settings.get(name)}"
            return
        refuses = settings.get("discard") == "new"  # then a limit costs nothing that was confirmed
        for name in ("max_msgs", "max_bytes"):
            if settings.get(name, -1) > 0 and not refuses:
                yield f"{self.name} drops its oldest blocks: {name} is {settings[name]}"
        if settings.get("max_msgs_per_subject", -1) > 0:
            yield f"{self.name} drops its oldest blocks: max_msgs_per_subject is {settings['max_msgs_per_subject']}"
        if settings.get("max_age", 0) > 0:
            yield f"{self.name} drops its oldest blocks: max_age is {settings['max_age'] / 1e9:g} s"
        if settings.get("retention", "limits") != "limits":
            yield f"{self.name} drops blocks by itself: retention is {settings['retention']}"
        if settings.get("storage") != "file":
            yield f"{self.name} is not kept on disk: storage is {settings.get('storage')}"
        if 0 < settings.get("max_msg_size", -1) < LEAST_MESSAGE_BYTES:
            least = f"max_msg_size is {settings['max_msg_size']}, and {LEAST_MESSAGE_BYTES} is the least"
            yield f"{self.name} refuses blocks: {least}"
        for name, why in (("no_ack", "confirms nothing"), ("sealed", "takes nothing more")):
            if settings.get(name):
                yield f"{self.name} {why}: {name} is set"

    def open_patiently(self, seconds: float = 60.0) -> None:
        """``open``, again while there is no quorum: nodes and brokers may be started together."""
        self.patiently(self.open, seconds)

    def patiently(self, act: Callable[[], T], seconds: float = 60.0) -> T:
        """What ``act`` gives; it is tried again while the stream is not there or does not answer. The servers need a
        moment for a stream that was just made: that one does not answer is told when it lasts.
        """
        began = time.monotonic()
        deadline = began + seconds
        seldom = Seldom()
        text = f"{self.name} has not answered yet"
        slow = threading.Timer(SLOW_S, lambda: seldom.warn("%s; trying again", text))
        slow.daemon = True
        slow.start()
        try:
            while True:
                try:
                    return act()
                except (UnansweredError, ConnectionError, StreamError) as error:
                    self.client.disconnect()
                    if time.monotonic() >= deadline:
                        raise TimeoutError(self._explain(error)) from error
                    lasts = not isinstance(error, UnansweredError) or time.monotonic() - began >= SLOW_S
                    if lasts and seldom.due:  # not each time: _explain asks every server
                        seldom.warn("%s; trying again", self._explain(error))
                time.sleep(PAUSE_S)
        finally:
            slow.cancel()

    def _explain(self, error: Exception) -> str:
        """Why the stream cannot be used yet."""
        if isinstance(error, NoStreamError):
            return f"there is no {self.name} there; {command('broker', 'DIRECTORY', '--store')} ADDRESS makes it"
        if not isinstance(error, UnansweredError):
            return str(error)
        return f"{self.name} cannot be used yet, {self.reach()}: {str(error).removeprefix(f'{self.name}: ')}"

    def describe(self) -> dict[str, Any]:
        """The cluster's description of the stream. A node that is cut off, or whose disk is full, answers too, with
        what it had then: it names no leader, and counts as one that does not answer.
        """
        found = self._ask(f"STREAM.INFO.{self.target.stream}", {})
        cluster = found.get("cluster")
        if isinstance(cluster, dict) and not cluster.get("leader"):
            server = self.client.name
            self._leave()
            raise UnansweredError(f"{server} does not know who leads {self.name}")
        largest = _settings(found).get("max_msg_size", -1)
        self._largest = min(MAX_BLOCK_BYTES + HEADERS_BYTES, largest if largest > 0 else sys.maxsize)
        return found

    def _leave(self) -> None:
        """Ask another server next, where there is one: this one may be the only one that has no quorum."""
        if len(self.client.servers) > 1:
            self.client.disconnect()

    def _ask(self, verb: str, question: dict[str, Any]) -> dict[str, Any]:
        message = self.client.request(f"$JS.API.{verb}", json.dumps(question).encode(), timeout=self._answer_s)
        return self._fields(message)

    def _fields(self, message: Message) -> dict[str, Any]:
        """The fields of an answer. If no server is responsible, this counts as no answer."""
        if message.status == NO_RESPONDERS:
            # the others of its cluster may have JetStream, so this alone is no reason to give up
            why = "" if self.client.connection().info.get("jetstream") else f": {self.client.name} has no JetStream"
            self._leave()
            raise UnansweredError(f"no server answers for {self.name} at the moment{why}")
        fields = fields_of(message.data, "answer")
        error = fields.get("error")
        if not isinstance(error, dict):
            return fields
        number, code = error.get("err_code", 0), error.get("code", 0)
        text = f"{self.name}: {error.get('description', 'refused')}"
        if number in WRONG_LAST:
            raise WrongLastError(text)
        if code == NO_RESPONDERS and number not in LIMITS_REACHED:  # no leader or no quorum: there may be one later
            self._leave()
            raise UnansweredError(text)
        failure = NoStreamError(text) if number == STREAM_NOT_FOUND else StreamError(text)
        failure.number = number  # type: ignore[attr-defined]
        raise failure

    def bounds(self) -> Bounds:
        """As the stream's leader says."""
        state = self._found().get("state")
        names = ("first_seq", "last_seq", "messages")
        first, last, count = (state.get(name) if isinstance(state, dict) else None for name in names)
        if not isinstance(first, int) or not isinstance(last, int) or not isinstance(count, int):
            raise StreamError(f"{self.name}: the server does not say which sequences it has")
        return Bounds(first, last, max(0, last - max(1, first) + 1 - count))

    def append(self, data: bytes, after: int, identity: str = "") -> None:
        """Acknowledged when a quorum has it on disk."""
        headers = {"Nats-Expected-Stream": self.target.stream, "Nats-Expected-Last-Sequence": str(after)}
        if identity:
            headers["Nats-Msg-Id"] = identity
        try:
            fields = self._fields(self.client.request(self.subject, data, headers, timeout=self._answer_s))
        except StreamError as error:
            if getattr(error, "number", 0) == TOO_LONG:  # the stream's settings were changed
                self.describe()
            raise
        if fields.get("seq") != after + 1:
            raise WrongLastError(f"{self.name}: the block is number {fields.get('seq')}, not {after + 1}")

    def read(self, sequence: int) -> bytes | None:
        """From the leader: a replica may lag."""
        found = self._stored({"seq": sequence})
        return None if found is None else found[1]

    def _stored(self, question: dict[str, Any]) -> tuple[int, bytes] | None:
        try:
            found = self._ask(f"STREAM.MSG.GET.{self.target.stream}", question).get("message")
        except StreamError as error:
            if getattr(error, "number", 0) == NO_MESSAGE:
                return None
            raise
        try:
            if not isinstance(found, dict):
                return None
            return int(found.get("seq", 0)), base64.b64decode(found.get("data", ""), validate=True)
        except (ValueError, TypeError):
            raise StreamError(f"{self.name}: block {question['seq']} cannot be decoded") from None

    def read_range(self, first: int, last: int) -> Iterator[tuple[int, bytes]]:
        """Read in batches from any replica; blocks that it does not have are read from the leader."""
        following = first
        while following <= last:
            before = following
            with contextlib.suppress(UnansweredError, ConnectionError):
                for sequence, data in self._batch(following, min(BATCH_BLOCKS, last - following + 1)):
                    yield sequence, data
                    following = sequence + 1
            if following == before:
                found = self._next_patiently(following)  # past all that is lost, at once: it may be thousands
                if found is None or not following <= found[0] <= last:
                    return
                yield found
                following = found[0] + 1

    def _next_patiently(self, sequence: int) -> tuple[int, bytes] | None:
        """The first block from this one on that the leader has, with its sequence."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self._stored({"seq": sequence, "next_by_subj": self.subject})
            except (UnansweredError, ConnectionError):
                if time.monotonic() >= deadline:
                    raise
                time.sleep(PAUSE_S)

    def _batch(self, first: int, most: int) -> Iterator[tuple[int, bytes]]:
        question = json.dumps({"seq": first, "batch": most, "max_bytes": BATCH_BYTES}).encode()
        subject = f"$JS.API.DIRECT.GET.{self.target.stream}"
        expected = first
        for message in self.client.requests(subject, question, timeout=self._answer_s):
            sequence = message.headers.get("Nats-Sequence", "")
            if message.status or not sequence.isdigit() or int(sequence) != expected:
                return  # the end of the batch, or the replica lacks blocks: the leader is asked for them
            yield expected, message.data
            expected += 1
            if expected == first + most:
                return

    def step_down(self, preferred: str) -> None:
        """Ask the stream's leader to hand over to the node of that name."""
        self._ask(f"STREAM.LEADER.STEPDOWN.{self.target.stream}", {"placement": {"preferred": preferred}})

    def purge(self, below: int) -> None:
        """Delete whole blocks, on all replicas."""
        self._ask(f"STREAM.PURGE.{self.target.stream}", {"seq": below})

    def reach(self) -> str:
        """Asks each of the address for its greeting, all at the same time: one that is stopped takes ``REACH_S``."""
        servers = self.target.servers
        here: list[tuple[str, int]] = []

        def ask(server: tuple[str, int]) -> None:
            with contextlib.suppress(OSError, PenstockError):
                Connection(server, self.target.access, REACH_S).close()
                here.append(server)

        asking = [threading.Thread(target=ask, args=(server,), daemon=True) for server in servers]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        count = f"{len(here) or 'none'} of {len(servers)} {'node' if len(servers) == 1 else 'nodes'}"
        away = ", ".join(f"{host}:{port}" for host, port in servers if (host, port) not in here)
        return f"{count} {'answers' if len(here) < 2 else 'answer'}" + (f" (not {away})" if here and away else "")

    def close(self) -> None:
        """Let go of the connection."""
        self.client.close()
