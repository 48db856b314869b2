"""Lanes over two channels, for ``bus:`` and ``shm:``: a server has one for requests, a client one for answers.

``shm:/plan`` itself is not a channel: a server reads ``shm:/plan/@server-ID``, a client ``shm:/plan/@client-ID``. A
client finds the servers by the names of their channels and chooses the one with the fewest of its own calls in flight,
in turn among equals. An abandoned call counts until its server answers another one.

Rules:

- Answers never wait. A client's channel has room for as many as it may have calls under way; a client that cannot take
  an answer has died or breaks this rule, and is dropped.
- No request goes to a server whose process has ended: the client watches the processes, which costs one check per call.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import Counter
from collections.abc import Hashable
from typing import Any

import penstock
from penstock.address import Address
from penstock.calls.envelope import Envelope, aged, unpack
from penstock.calls.lanes import ClientLane, ServerLane
from penstock.channel import Publisher, Subscriber
from penstock.errors import PeerGone, PenstockError

OLD_NS = 100_000_000  # after waiting this long, the client of a request may have died
MAX_CLIENTS = 1024  # publishers that a server keeps open
REQUEST_SLOTS = 64
SWEEP_S = 1.0  # how often an idle server drops clients that are gone
RESCAN_S = 1.0  # how old the client's list of servers may get

_bus_servers: dict[str, set[str]] = {}
_bus_lock = threading.Lock()


class Place:
    """The channels of one address: their names, and which servers are alive."""

    def __init__(self, address: Address, spin_us: int = 0) -> None:
        self.scheme = address.scheme
        self.base = f"{address.scheme}:{address.name}"
        self._shm = {"reliable": True, "spin_us": spin_us} if address.scheme == "shm" else {}

    def server(self, identity: str) -> str:
        """The channel of a server."""
        return f"{self.base}/@server-{identity}"

    def client(self, origin: bytes) -> str:
        """The channel of a client."""
        return f"{self.base}/@client-{origin.hex()}"

    def reader(self, name: str, depth: int) -> Subscriber:
        """The reading end of a new channel that holds so many messages."""
        if not self._shm:
            return penstock.subscriber(name, depth=depth)
        # only a publisher sets the number of slots; the channel then stays open for its reader
        with self.writer(name, depth):
            return penstock.subscriber(name, **self._shm)

    def writer(self, name: str, slots: int | None) -> Publisher:
        """The writing end of a channel; at shm it may make the slots."""
        return penstock.publisher(name, **({**self._shm, "slots": slots, "timeout": 0.0} if self._shm else {}))

    def publish(self, writer: Publisher, data: bytes, timeout: float) -> None:
        """Publish within the time. A bus has room for every call that clients may have under way."""
        if self._shm:
            writer.publish(data, timeout=timeout)
        else:
            writer.publish(data)

    def servers(self) -> dict[str, int]:
        """The channels of live servers, and the processes that read them (0: this process, on a bus)."""
        if not self._shm:
            with _bus_lock:
                return dict.fromkeys(_bus_servers.get(self.base, ()), 0)
        return self._read_by_the_living(self.server(""))

    def clients(self) -> dict[str, int] | None:
        """The channels of live clients; None on a bus, where a channel ends with its handle."""
        return self._read_by_the_living(self.client(b"")) if self._shm else None

    def _read_by_the_living(self, prefix: str) -> dict[str, int]:
        from penstock import shm

        prefix = prefix.removeprefix("shm:")
        return {
            f"shm:{channel.name}": member.pid
            for channel in shm.channels()
            if channel.name.startswith(prefix)
            for member in channel.subscribers
            if member.alive
        }

    def announce(self, name: str) -> None:
        """Register a server of a bus. In shared memory the existence of its channel is enough."""
        if not self._shm:
            with _bus_lock:
                _bus_servers.setdefault(self.base, set()).add(name)

    def withdraw(self, name: str) -> None:
        """A server of a bus has closed."""
        if not self._shm:
            with _bus_lock:
                _bus_servers.get(self.base, set()).discard(name)
                if not _bus_servers.get(self.base):
                    _bus_servers.pop(self.base, None)


def slots_for(most: int) -> int:
    """Slots for the answers of so many calls, including answers that come too late."""
    return 2 * most + 16


class PairedClient(ClientLane):
    """The client's lane."""

    def __init__(self, place: Place, origin: bytes, most: int) -> None:
        self._place = place
        self._origin = origin
        self._name = place.client(origin)
        self._most = most
        self._answers = place.reader(self._name, slots_for(most))
        self._writers: dict[str, Publisher] = {}
        self._under_way: Counter[str] = Counter()
        self._given_up: Counter[str] = Counter()  # calls to a server since it last answered
        # start at random, so that clients that call only once do not all choose the same server
        self._turn = int.from_bytes(origin[:4])
        self._scanned = 0.0
        self._processes: dict[str, int] = {}  # pidfds of the servers' processes, readable when one has ended
        self._ended = select.poll()
        self._lock = threading.Lock()  # guards the writers: one thread at a time may use a handle
        self._counting = threading.Lock()

    def send(self, data: bytes, deadline: float | None) -> Hashable:
        if not self._lock.acquire(timeout=_seconds_left(deadline)):
            raise TimeoutError(f"{self._place.base}: timed out while earlier calls wait for a free slot")
        try:
            while True:
                name = self._choose()
                try:
                    self._place.publish(self._writers[name], data, min(0.05, max(0.0, _seconds_left(deadline, 0.05))))
                except TimeoutError:
                    if deadline is not None and time.monotonic() >= deadline:
                        raise TimeoutError(f"{self._place.base}: the server is busy, no room for a request") from None
                    self._scan()
                    continue
                with self._counting:
                    self._under_way[name] += 1
                return name
        finally:
            self._lock.release()

    def _choose(self) -> str:
        if time.monotonic() - self._scanned > RESCAN_S or not self._writers or self._ended.poll(0):
            self._scan()
        if not self._writers:
            raise PeerGone(f"no server answers at {self._place.base}")
        if len(self._writers) == 1:
            return next(iter(self._writers))
        loads = {name: self._under_way[name] + self._given_up[name] for name in sorted(self._writers)}
        free = [name for name, load in loads.items() if load == min(loads.values())]
        self._turn += 1
        return free[self._turn % len(free)]

    def _scan(self) -> None:
        """Rebuild the list of servers."""
        ended = [descriptor for descriptor, _ in self._ended.poll(0)]
        living = self._place.servers()
        self._scanned = time.monotonic()
        for descriptor in ended:
            self._ended.unregister(descriptor)  # it has said goodbye
        for name in self._writers.keys() - living.keys():
            self._writers.pop(name).close()
            del self._under_way[name], self._given_up[name]
            self._unwatch(name)
        for name in living.keys() - self._writers.keys():
            self._writers[name] = self._place.writer(name, REQUEST_SLOTS)
            self._watch(name, living[name])

    def _watch(self, name: str, process: int) -> None:
        """Watch for the end of a server's process. Where that is not possible, the next list of servers shows it."""
        if process:
            with contextlib.suppress(OSError):
                descriptor = self._processes[name] = os.pidfd_open(process)
                self._ended.register(descriptor, select.POLLIN)

    def _unwatch(self, name: str) -> None:
        descriptor = self._processes.pop(name, None)
        if descriptor is not None:
            with contextlib.suppress(KeyError):
                self._ended.unregister(descriptor)
            os.close(descriptor)

    def cancel(self, peer: Hashable, data: bytes) -> None:
        with self._lock:
            writer = self._writers.get(str(peer))
            if writer is not None:
                # no room: the server will see the time limit of the request
                with contextlib.suppress(TimeoutError, PenstockError):
                    self._place.publish(writer, data, 0.0)

    def receive(self, timeout: float) -> Envelope | None:
        message = self._answers.read(timeout)
        if message is None:
            return None
        data = bytes(message)
        message.release()
        return unpack(data)

    def settled(self, peer: Hashable, answered: bool) -> None:
        name = str(peer)
        with self._counting:
            if self._under_way[name] > 0:
                self._under_way[name] -= 1
            if answered:
                del self._given_up[name]
            elif name in self._writers:
                self._given_up[name] += 1

    def gone(self, peer: Hashable) -> bool:
        gone = peer not in self._place.servers()
        if gone:
            self._scanned = 0.0  # the next call searches for servers again
        return gone

    def wait_ready(self, servers: int, timeout: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        while len(self._place.servers()) < servers:
            left = _seconds_left(deadline, 0.02)
            if left <= 0:
                return False
            time.sleep(min(0.02, left))
        with self._lock:
            self._scan()  # so that the next calls use all servers that were seen
        return True

    def fileno(self) -> int:
        return self._answers.fileno()

    def close(self) -> None:
        self._answers.close()
        with self._lock:
            for writer in self._writers.values():
                writer.close()
            self._writers.clear()
            self.abandon()

    def abandon(self) -> None:
        for name in list(self._processes):
            self._unwatch(name)


class PairedServer(ServerLane):
    """The server's lane. The way back is the identity of the client."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._name = place.server(os.urandom(8).hex())
        self._requests = place.reader(self._name, REQUEST_SLOTS if place.scheme == "shm" else 1 << 16)
        self._writers: dict[bytes, Publisher] = {}
        self._lock = threading.Lock()
        self._swept = time.monotonic()
        place.announce(self._name)

    def receive(self, timeout: float | None) -> tuple[Any, Envelope] | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            message = self._requests.read(min(SWEEP_S, max(0.0, _seconds_left(deadline, SWEEP_S))))
            if message is not None:
                data, waited_ns = bytes(message), time.time_ns() - message.timestamp_ns
                message.release()
                envelope = aged(unpack(data), waited_ns)
                if waited_ns > OLD_NS and self.gone(envelope.origin):
                    continue
                return envelope.origin, envelope
            self._sweep()
            if deadline is not None and time.monotonic() >= deadline:
                return None

    def _sweep(self) -> None:
        """Close the channels whose clients are gone: an open end would keep their memory."""
        if time.monotonic() - self._swept < SWEEP_S or not self._writers:
            return
        self._swept = time.monotonic()
        living = self._place.clients()
        if living is None:
            return
        with self._lock:
            for origin in [origin for origin in self._writers if self._place.client(origin) not in living]:
                self._writers.pop(origin).close()

    def answer(self, way: Any, data: bytes) -> bool:
        with self._lock:
            writer = self._writers.get(way)
            try:
                if writer is None:
                    writer = self._open(way)
                self._place.publish(writer, data, 0.0)
            except (TimeoutError, PenstockError, OSError):
                if way in self._writers:
                    self._writers.pop(way).close()
                return False
        return True

    def _open(self, origin: bytes) -> Publisher:
        if len(self._writers) >= MAX_CLIENTS:
            self._writers.pop(next(iter(self._writers))).close()
        writer = self._writers[origin] = self._place.writer(self._place.client(origin), None)
        return writer

    def gone(self, way: Any) -> bool:
        living = self._place.clients()
        return living is not None and self._place.client(way) not in living

    def drop(self, way: Any) -> None:
        """Nothing to release."""

    def close(self, goodbye: bytes) -> None:
        self._place.withdraw(self._name)
        self._requests.close()
        with self._lock:
            for writer in self._writers.values():
                # A client without room for this finds soon that the server's channel has no reader.
                with contextlib.suppress(TimeoutError, PenstockError, OSError):
                    self._place.publish(writer, goodbye + self._name.encode(), 0.0)
                writer.close()
            self._writers.clear()


def _seconds_left(deadline: float | None, otherwise: float = -1.0) -> float:
    """Seconds to a deadline, 0 at least; ``otherwise`` without one."""
    return otherwise if deadline is None else max(0.0, deadline - time.monotonic())


def open_client(address: Address, origin: bytes, most: int, *, spin_us: int = 0) -> ClientLane:
    """A client's lane at ``bus:NAME`` or ``shm:/NAME``. ``spin_us``: how long it spins before it sleeps (shm)."""
    return PairedClient(Place(address, spin_us), origin, most)


def open_server(address: Address, *, spin_us: int = 0) -> ServerLane:
    """A server's lane at ``bus:NAME`` or ``shm:/NAME``."""
    return PairedServer(Place(address, spin_us))
