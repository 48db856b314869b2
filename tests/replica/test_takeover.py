"""Several brokers with one stream: one leads, another takes over; clients find it, and each confirmed message is there once."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.broker import Client, Server
from penstock.broker.fetch import RangeClient
from penstock.broker.hosts import hosts_of, nobody_leads
from penstock.broker.store import JournalStore
from penstock.cli.exits import Terminated
from penstock.cli.lead import Turns
from penstock.errors import ClosedError, InvalidArgument, RefusedError
from penstock.journal import Journal
from penstock.observe.explain import explain
from penstock.replica.lease import Lease
from penstock.replica.refill import check_directory
from penstock.replica.standby import stand_by
from penstock.replica.stream import Bounds
from tests.cli.command import start

from .conftest import LONG, replicated_server, until
from .fake_blocks import FakeBlocks, FakeStream
from .test_refill import opened


class CountedBlocks(FakeBlocks):
    asked = 0

    def bounds(self) -> Bounds:
        self.asked += 1
        return super().bounds()


class Member:
    """One broker of a group, in a thread."""

    def __init__(self, directory: Path, log: FakeStream, leases: FakeStream, port: int, lease_s: float = 1.0) -> None:
        self.blocks, self.lease_blocks = FakeBlocks(log), CountedBlocks(leases)
        self.port = port
        self.lease = Lease(self.lease_blocks, f"127.0.0.1:{port}", lease_s)
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


def test_another_leads_when_the_leader_is_cut_off(group: list[Member], caplog: pytest.LogCaptureFixture) -> None:
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
    assert "failed" not in caplog.text, "a take-over is no damage"


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


def test_a_leader_whose_cluster_is_silent_drops_its_clients_when_its_lease_has_ended(group: list[Member]) -> None:
    """By its own clock: the renewal of the lease and the commit still wait for an answer."""
    first, second = group
    answer = threading.Event()
    waiting: set[str] = set()

    def silence(blocks: FakeBlocks, name: str) -> None:
        def append(data: bytes, after: int, identity: str = "") -> None:
            waiting.add(name)
            answer.wait(2 * LONG)
            raise ConnectionError("cut off")

        blocks.append = append  # type: ignore[method-assign]

    with (
        socket.create_connection(("127.0.0.1", first.port)) as idle,
        Client(port=first.port, timeout=LONG, reconnect=False) as publishing,
        Client(port=first.port, timeout=LONG, reconnect=False) as asking,
    ):
        asking.ping()
        idle.settimeout(LONG)
        try:
            for blocks, name in ((first.blocks, "the commit"), (first.lease_blocks, "the lease")):
                silence(blocks, name)
            with pytest.raises(ClosedError):
                publishing.publish("t", b"not confirmed")
            assert idle.recv(1) == b""
            with pytest.raises(ClosedError):
                asking.ping()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", first.port), LONG)
            assert waiting == {"the commit", "the lease"} and not answer.is_set()
            until(lambda: second.leads, "the second one leads")
        finally:
            answer.set()
            for blocks in (first.blocks, first.lease_blocks):
                del blocks.append


def test_somebody_leads_again_after_the_stream_of_the_lease_was_deleted(group: list[Member]) -> None:
    with client_of(group) as client:
        client.publish("t", b"before")
        group[0].lease_blocks.stream.delete()
        until(lambda: not group[0].leads, "the lease cannot be renewed")
        client.publish("t", b"after")
        # Not at every moment: a lease of a second may end while its thread does not get a turn.
        until(lambda: any(member.leads for member in group), "somebody leads")


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


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A partition of 16 MB."""
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)], capture_output=True)
    if made.returncode:
        pytest.skip("mounting needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(client: Client) -> int:
    """Publish until the leader's disk is full; returns how many were stored."""
    count = 0
    with pytest.raises(RefusedError, match="disk is full"):
        while count < 10_000:
            client.publish("t", bytes(20_000))
            count += 1
    return count


def test_a_leader_whose_disk_is_full_makes_way_for_one_with_room(
    tmp_path: Path, small: Path, free_ports: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    log, leases = FakeStream(), FakeStream()
    members = [Member(small / "first", log, leases, free_ports[0], 2.0)]
    try:
        first = members[0]
        until(lambda: first.leads, "the first one leads")
        with Client(port=first.port, timeout=LONG) as client:
            client.queue("q", topics="t")
            count = fill(client)
            until(lambda: "may take the lead" in caplog.text, "it offers the lead")
            before = leases.last
            until(lambda: leases.last > before + 3, "nobody is there who takes it")
            assert first.leads, "it is alone"
            client.ping()
        members.append(Member(tmp_path / "second", log, leases, free_ports[1], 2.0))
        second = members[1]
        until(lambda: second.leads, "the second one leads")
        with client_of(members) as client:
            client.publish_many("t", [bytes(20_000)] * 400)  # more than what is left of the first one's disk
            client.publish("t", b"there is room")
            before = leases.last
            until(lambda: leases.last > before + 12, "renewals")  # for two leases
            assert second.leads and not first.leads, "it does not come back while its disk is full"
        found = read_all(members, count + 401)
        assert found == [bytes(20_000)] * (count + 400) + [b"there is room"]
        said = f"the disk of {small}/first is full, and another broker has room"
        until(lambda: said in caplog.text, "the first one says why")
        until(lambda: f"standing by: [Errno {errno.ENOSPC}]" in caplog.text, "it cannot follow either")
        second.end()
        looks = first.lease_blocks.asked
        until(lambda: first.lease_blocks.asked > looks + 6, "it sees that nobody leads")
        assert first.thread.is_alive() and not first.leads, "it could not open its journal"
    finally:
        for member in members:
            member.end()


def test_of_two_leaders_whose_disks_are_full_one_leads_on(
    tmp_path: Path,
    small: Path,
    free_ports: list[int],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.replica.standby.has_room", lambda directory: False)
    log, leases = FakeStream(), FakeStream()
    members = [Member(small / "first", log, leases, free_ports[0], 2.0)]
    try:
        first = members[0]
        until(lambda: first.leads, "the first one leads")
        members.append(Member(tmp_path / "second", log, leases, free_ports[1], 2.0))
        with Client(port=first.port, timeout=LONG) as client:
            client.queue("q", topics="t")
            fill(client)
        with Client(port=first.port, timeout=LONG, reconnect=False) as client:
            until(lambda: "may take the lead" in caplog.text, "it offers the lead")
            before = leases.last
            until(lambda: leases.last > before + 12, "renewals")  # for two leases
            assert first.leads and not members[1].leads
            client.ping()  # by the same connection
    finally:
        for member in members:
            member.end()


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


def test_a_broker_whose_place_was_taken_does_not_call_it_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = FakeStream()
    errors: list[OSError] = []

    def run() -> None:
        try:
            first.run()
        except OSError as error:
            errors.append(error)

    with replicated_server(tmp_path / "a", FakeBlocks(log)) as first:
        thread = threading.Thread(target=run)
        thread.start()
        with Client(port=first.port, reconnect=False) as client:
            opened(tmp_path / "b", log).close()
            with pytest.raises((ClosedError, RefusedError)):
                client.publish("t", b"one")
        thread.join(LONG)
    assert [error.errno for error in errors] == [errno.ESTALE]
    assert not [record for record in caplog.records if record.levelname == "CRITICAL"]


def test_who_publishes_to_a_group_whose_broker_was_fenced_is_told_its_members(
    tmp_path: Path, free_ports: list[int]
) -> None:
    log = FakeStream()
    with replicated_server(tmp_path / "a", FakeBlocks(log)) as first:

        def run() -> None:
            with contextlib.suppress(OSError):
                first.run()

        thread = threading.Thread(target=run)
        thread.start()
        with penstock.publisher(
            f"broker://127.0.0.1:{first.port},127.0.0.1:{free_ports[1]}/t", timeout=LONG
        ) as publisher:
            publisher.publish(b"one")
            opened(tmp_path / "b", log).close()  # another broker, which does not listen
            with Client(port=first.port, reconnect=False) as client, pytest.raises((ClosedError, RefusedError)):
                client.publish("t", b"of another one")
            thread.join(LONG)
            said = f"none of 127.0.0.1:{first.port}, 127.0.0.1:{free_ports[1]} leads at the moment"
            with pytest.raises(TimeoutError, match=said):
                publisher.publish(b"two", timeout=3.0)


def test_a_standby_that_could_never_lead_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, leases = FakeStream(), FakeStream()
    opened(tmp_path / "a", log).close()
    with Journal(tmp_path / "other") as journal:
        journal.append("t", b"own")
        with pytest.raises(RefusedError, match="being written"):
            check_directory(tmp_path / "other")
    check_directory(tmp_path / "other")
    assert Lease(FakeBlocks(leases), "h:1").take()
    with pytest.raises(InvalidArgument, match="not touched"):
        stand_by(tmp_path / "other", FakeBlocks(log), Lease(FakeBlocks(leases), "h:2"), lambda: False)
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(OSError, match="in use; each broker of a group"),
    ):
        Server(tmp_path / "b", taken.getsockname()[1], leads=lambda: True)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(PermissionError, match="sealed"):
        check_directory(tmp_path / "sealed")


def test_a_signal_ends_a_standby_that_waits_for_an_answer(tmp_path: Path) -> None:
    """By an exception where it waits; the main thread is not asked."""
    waits = threading.Event()

    class Silent(FakeBlocks):
        def bounds(self) -> Bounds:
            waits.set()
            threading.Event().wait(LONG)
            return super().bounds()

    lease = Lease(Silent(FakeStream()), "h:1")
    turns = Turns(tmp_path / "a", FakeBlocks(FakeStream()), lease, None, None, 1.0)  # type: ignore[arg-type]
    before = signal.signal(signal.SIGUSR1, turns.end)
    try:
        killer = threading.Thread(target=lambda: waits.wait(LONG) and os.kill(os.getpid(), signal.SIGUSR1))
        killer.start()
        with pytest.raises(Terminated):
            turns.run()
        killer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_while_nobody_leads_clients_try_on_and_say_so(tmp_path: Path, free_ports: list[int]) -> None:
    where = f"broker://127.0.0.1:{free_ports[0]},127.0.0.1:{free_ports[1]}/t"
    said = f"none of 127.0.0.1:{free_ports[0]}, 127.0.0.1:{free_ports[1]} leads at the moment"
    for open_handle in (penstock.publisher, penstock.subscriber):
        with pytest.raises(TimeoutError, match=said):
            open_handle(where, timeout=0.1)
    with pytest.raises(ConnectionError, match=said):
        RangeClient(f"127.0.0.1:{free_ports[0]},127.0.0.1", free_ports[1], timeout=0.1)
    grave = [finding.text for finding in explain(where, 0.0) if finding.grave]
    assert grave == [said]
    published = start("pub", f"{where}?queue=q", "cron", "--timeout", "1000")
    read = start("sub", f"{where}?queue=q", "-n", "1")
    try:
        for command in (published, read):  # which would have ended by now
            assert command.stderr is not None and "nobody has answered yet" in command.stderr.readline()
        with Server(tmp_path, free_ports[1]) as server:
            server.start()
            assert read.communicate(timeout=LONG)[0] == "cron\n" and read.returncode == 0
            assert published.wait(LONG) == 0
    finally:
        for command in (published, read):
            command.kill()
            command.communicate()


def test_brokers_of_two_logs_are_no_group(tmp_path: Path) -> None:
    with Server(tmp_path / "b", 0).start() as second:
        first = Server(tmp_path / "a", 0, drain_s=0.0).start()
        place = f"127.0.0.1:{first.port},127.0.0.1:{second.port}"
        with (
            Client(f"127.0.0.1:{first.port},127.0.0.1", second.port, timeout=LONG) as client,
            penstock.publisher(f"broker://{place}/t", timeout=LONG) as publisher,
            penstock.subscriber(f"broker://{place}/t", timeout=LONG) as subscriber,
        ):
            publisher.publish(b"one")
            assert subscriber.read(LONG) is not None
            client.ping()
            first.close()
            for ask in (lambda: publisher.publish(b"two"), lambda: subscriber.read(LONG), client.ping):
                for _ in range(2):  # it stays so
                    with pytest.raises(RefusedError, match="must keep the same one"):
                        ask()
        with RangeClient(port=second.port) as other:
            assert not list(other.fetch(1, 10)), "nothing went over to the other log"


def test_a_group_is_written_as_one_host() -> None:
    assert hosts_of("a", 9876) == [("a", 9876)]
    assert hosts_of("a:1,b", 2) == [("a", 1), ("b", 2)]
    assert hosts_of("[::1]:1,[::2]", 2) == [("::1", 1), ("::2", 2)]
    assert hosts_of("a,b:2,c,d:4", 9876) == [("a", 4), ("b", 2), ("c", 4), ("d", 4)]
    assert nobody_leads("[::1]:1,[::2],b", 2) == "none of [::1]:1, [::2]:2, b:2 leads at the moment"
    parts = penstock.address.parse("broker://a,b:2/t")
    assert hosts_of(parts.host, parts.port or 0) == [("a", 2), ("b", 2)], "the last one's port holds for those without"
    parts = penstock.address.parse("broker://[::1]:1,b:2/t")
    assert hosts_of(parts.host, parts.port or 0) == [("::1", 1), ("b", 2)]
    for wrong in ("a,,b", "a:x,b", "a:0,b", "a/b,c", ",", "a," * 20 + "b"):
        with pytest.raises(InvalidArgument):
            hosts_of(wrong, 9876)
    with pytest.raises(InvalidArgument, match="secret at more than one host") as told:
        penstock.address.parse("broker://tok@a:1,tok2@b:2/t")
    assert "tok" not in str(told.value)
    assert penstock.address.parse("broker://t@k@a:1,b:2/t").options == {"token": "t@k"}
    with pytest.raises(InvalidArgument, match="several hosts"):
        penstock.subscriber("tcp://a:1,b:2")


@pytest.mark.parametrize("wrong", ["a:1/t,b:2/t", "a:1/t,broker://b:2/t", "a:1/t,b:2"])
def test_a_group_has_one_topic(wrong: str) -> None:
    """What looks like a second address is not silently a part of the topic."""
    with pytest.raises(InvalidArgument, match=r"write the name once, after the last host: broker://A:PORT,B:PORT/NAME"):
        penstock.address.parse(f"broker://{wrong}")
    assert penstock.address.parse("broker://a:1,b:2/of,two:parts").topic == "of,two:parts"
