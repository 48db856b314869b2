from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.broker import Server
from penstock.broker.store import JournalStore
from penstock.replica import Blocks, Replica
from tests.broker.conftest import LONG, client, server, until, wire

from .fake_blocks import FakeBlocks, FakeStream

__all__ = ["LONG", "client", "connect", "free_ports", "replicated_server", "serve", "server", "stream", "until", "wire"]


def replicated_server(directory: Path, blocks: Blocks, **options: Any) -> Server:
    """A broker whose store is replicated."""
    replica = Replica(directory, blocks)
    kept = {name: options.pop(name) for name in ("keep", "segment_bytes", "retain_queues") if name in options}
    return Server(
        None, 0, store=lambda snapshot: JournalStore(directory, snapshot, disk=replica.disk(), **kept), **options
    )


@pytest.fixture
def stream() -> FakeStream:
    return FakeStream()


@pytest.fixture
def connect(stream: FakeStream) -> Callable[[], Blocks]:
    """Connects to the stream of the test."""
    return lambda: FakeBlocks(stream)


@pytest.fixture
def serve(tmp_path: Path, connect: Callable[[], Blocks]) -> Iterator[Callable[..., Server]]:
    """Starts brokers over one stream, each on an empty directory; all are closed at the end."""
    servers: list[Server] = []
    numbers = itertools.count()

    def start(**options: Any) -> Server:
        directory = options.pop("directory", tmp_path / f"broker{next(numbers)}")
        servers.append(replicated_server(directory, connect(), **options).start())
        return servers[-1]

    yield start
    for started in servers:
        started.close()


@pytest.fixture
def free_ports() -> list[int]:
    from penstock.broker.endpoint import listen

    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(contextlib.closing(listen("127.0.0.1", 0))) for _ in range(2)]
        return [listener.getsockname()[1] for listener in listeners]
