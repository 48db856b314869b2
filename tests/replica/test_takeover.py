"""Several brokers with one stream: one leads, another takes over; clients find it, and each confirmed message is there once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.broker import Client, Server
from penstock.broker.hosts import hosts_of
from penstock.broker.store import JournalStore
from penstock.cli.lead import Turns
from penstock.errors import ClosedError, InvalidArgument
from penstock.replica.lease import Lease

from .conftest import LONG, until
from .fake_blocks import FakeBlocks, FakeStream


class Member:
    """One broker of a group, in a thread."""

    def __init__(self, directory: Path, log: FakeStream, leases: FakeStream, port: int) -> None:
        self.blocks, self.lease_blocks = FakeBlocks(log), FakeBlocks(leases)
        self.port = port
        self.lease = Lease(self.lease_blocks, f"127.0.0.1:{port}", 1.0)
        self.server: Server | None = None
        self.turns = Turns(directory, self.blocks, self.lease, self._serve, self._leading, 1.0)  # type: ignore[arg-type]
        self.thread = threading.Thread(target=self.turns.run, daemon=True)
        self.thread.start()

    def _serve(self, replica: Any, leads: Callable[[], bool]) -> Server:
        made = lambda snapshot: JournalStore(replica.directory, snapshot, disk=replica.disk())  # noqa: E731
        return Server(None, self.port, store=made, leads=leads, drain_s=1.0)

    def _leading(self, server: Server) -> None:
        self.server = server

    @property
    def leads(self) -> bool:
        return self.server is not None and self.lease.held

    def cut_off(self) -> None:
        """From the cluster; its clients still reach it."""
        self.blocks.cut = self.lease_blocks.cut = True

    def reconnect(self) -> None:
        self.blocks.cut = self.lease_blocks.cut = False

    def end(self) -> None:
        self.turns.stop()
        self.thread.join(LONG)
        assert not self.thread.is_alive()


@pytest.fixture
def group(tmp_path: Path, free_ports: list[int]) -> Iterator[list[Member]]:
    """Two brokers; the first one leads."""
    log, leases = FakeStream(), FakeStream()
    first = Member(tmp_path / "first", log, leases, free_ports[0])
    until(lambda: first.leads, "the first one leads")
    second = Member(tmp_path / "second", log, leases, free_ports[1])
    yield [first, second]
    for member in (first, second):
        member.reconnect()
        member.end()


@pytest.fixture
def free_ports() -> list[int]:
    from penstock.broker.endpoint import listen

    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(contextlib.closing(listen("127.0.0.1", 0))) for _ in range(2)]
        return [listener.getsockname()[1] for listener in listeners]


def address(group: list[Member]) -> str:
    return ",".join(f"127.0.0.1:{member.port}" for member in group)


def client_of(group: list[Member]) -> Client:
    first, second = group
    return Client(f"127.0.0.1:{first.port},127.0.0.1", second.port, timeout=LONG)


def read_all(group: list[Member], count: int) -> list[bytes]:
    with penstock.subscriber(f"broker://{address(group)}/t?queue=q", ack="next") as consumer:
        found = []
        while len(found) < count:
            message = consumer.read(LONG)
            assert message is not None
            found.append(bytes(message))
        assert consumer.read(0.2) is None
        return found


def test_another_leads_when_the_leader_is_cut_off(group: list[Member]) -> None:
    first, second = group
    with client_of(group) as client:
        client.queue("q", topics="t")
        for number in range(10):
            client.publish("t", b"%d" % number)
        assert first.server is not None and first.server.accepted > 0
        first.cut_off()
        client.publish("t", b"over there")  # unanswered by the first one; sent again to the second one
        assert second.leads
        assert not first.lease.held
    assert read_all(group, 11) == [*(b"%d" % number for number in range(10)), b"over there"]


def test_a_leader_that_was_cut_off_drops_its_clients_and_stands_by(group: list[Member]) -> None:
    first, second = group
    with Client(port=first.port, timeout=LONG, reconnect=False) as alone:
        alone.queue("q", topics="t")
        alone.publish("t", b"one")
        first.cut_off()
        until(lambda: second.leads, "the second one leads")
        with pytest.raises(ClosedError):
            until(lambda: alone.ping() and False, "its end")
    first.reconnect()
    with client_of(group) as client:
        client.publish("t", b"two")
    second.end()
    until(lambda: first.leads, "the first one leads again")
    assert read_all(group, 2) == [b"one", b"two"]


def test_a_leader_that_ends_gives_the_lead_back(group: list[Member]) -> None:
    first, second = group
    with client_of(group) as client:
        client.queue("q", topics="t")
        client.publish("t", b"one")
        first.end()
        assert first.lease.holder is not None and not first.lease.holder.address
        client.publish("t", b"two")
        assert second.leads
    assert read_all(group, 2) == [b"one", b"two"]


def test_a_leader_whose_lease_has_ended_hands_nothing_out(tmp_path: Path) -> None:
    leads = True
    with Server(tmp_path, 0, leads=lambda: leads) as server:
        server.start()
        with (
            Client(port=server.port, reconnect=False) as client,
            penstock.subscriber(f"broker://127.0.0.1:{server.port}/t?queue=q", reconnect=False) as consumer,
        ):
            client.publish("t", b"one")
            assert consumer.read(LONG) is not None
            leads = False
            server.wake()
            with pytest.raises(ClosedError):
                consumer.read(LONG)


def test_a_group_is_written_as_one_host() -> None:
    assert hosts_of("a", 9876) == [("a", 9876)]
    assert hosts_of("a:1,b", 2) == [("a", 1), ("b", 2)]
    assert hosts_of("[::1]:1,[::2]", 2) == [("::1", 1), ("::2", 2)]
    parts = penstock.address.parse("broker://[::1]:1,b:2/t")
    assert hosts_of(parts.host, parts.port or 0) == [("::1", 1), ("b", 2)]
    for wrong in ("a,,b", "a:x,b", "a:0,b", "a/b,c", ",", "a," * 20 + "b"):
        with pytest.raises(InvalidArgument):
            hosts_of(wrong, 9876)
    with pytest.raises(InvalidArgument, match="several hosts"):
        penstock.subscriber("tcp://a:1,b:2")
