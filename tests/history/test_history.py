"""What of a history one reach alone has: connections that break, slots that are shared, ids of a bus."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import penstock
from penstock import bus, durable_publisher, shm, tcp
from penstock.journal import follow
from penstock.tcp import past
from penstock.tcp.protocol import Request, Wanted
from tests.broker.conftest import until
from tests.conformance.reaches import unique

LONG = 60.0


def cut_all(publisher: tcp.Publisher) -> None:
    """Breaks every connection, as a network would."""
    for number, *_ in publisher._outlet.peers():
        publisher._outlet.remove(number)


def test_tcp_without_wait_ready_loses_nothing() -> None:
    with tcp.Publisher() as first:
        port = first.port
    where = f"tcp://127.0.0.1:{port}"
    with penstock.subscriber(where) as subscriber, penstock.publisher(where, history=50) as publisher:
        publisher.publish_many([b"%d" % i for i in range(50)])
        found = [bytes(subscriber.receive(LONG)) for _ in range(50)]
    assert found == [b"%d" % i for i in range(50)]


def test_tcp_after_reconnects_none_comes_twice_and_none_is_missing() -> None:
    with penstock.publisher("tcp://127.0.0.1:0", history=100_000) as publisher:
        where = f"tcp://127.0.0.1:{publisher.port}"
        with penstock.subscriber(where, reconnect_delay=0.001, reconnect_delay_max=0.01) as subscriber:
            assert publisher.wait_ready(1, timeout=LONG)

            def publish() -> None:
                for number in range(1, 3001):
                    publisher.publish(b"%d" % number)
                    if number % 100 == 0:
                        cut_all(publisher)
                        publisher.wait_ready(1, timeout=LONG)

            thread = threading.Thread(target=publish)
            thread.start()
            found = []
            while len(found) < 3000:
                found += [int(bytes(message)) for message in subscriber.read_many(50, LONG)]
            thread.join()
            assert found == list(range(1, 3001))
            assert subscriber.read(0) is None
            assert subscriber.ledger.balanced and not subscriber.ledger.lost
            assert subscriber.sessions[0].connections > 10


def test_tcp_what_the_history_did_not_reach_is_counted() -> None:
    with penstock.publisher("tcp://127.0.0.1:0", history=10) as publisher:
        where = f"tcp://127.0.0.1:{publisher.port}"
        with penstock.subscriber(where, reconnect_delay=0.001, reconnect_delay_max=0.01) as subscriber:
            assert publisher.wait_ready(1, timeout=LONG)
            publisher.publish(b"1")
            assert subscriber.receive(LONG) == b"1"
            cut_all(publisher)
            publisher.publish_many([b"%d" % i for i in range(2, 101)])  # who reconnects meanwhile gets the rest live
            found = [1]
            while found[-1] != 100:
                with subscriber.receive(LONG) as message:
                    found.append(int(bytes(message)))
            assert found == sorted(set(found))
            assert subscriber.ledger.balanced
            assert subscriber.ledger.lost == 100 - len(found)


def test_tcp_another_publisher_at_the_port_is_another_flow() -> None:
    with penstock.publisher("tcp://127.0.0.1:0", history=3) as first:
        port = first.port
        subscriber = penstock.subscriber(f"tcp://127.0.0.1:{port}", reconnect_delay=0.001, reconnect_delay_max=0.01)
        first.publish_many([b"1", b"2", b"3"])
        assert [bytes(subscriber.receive(LONG)) for _ in range(3)] == [b"1", b"2", b"3"]
    with subscriber, penstock.publisher(f"tcp://127.0.0.1:{port}", history=3) as second:
        second.publish_many([b"a", b"b"])
        assert [bytes(subscriber.receive(LONG)) for _ in range(2)] == [b"a", b"b"]


@pytest.mark.parametrize("start", ["0001-01-01T00:00:00", "9999-12-31T00:00:00", "last 99999999999999999 d", "first", "1"])
def test_tcp_any_place_in_the_past_is_found_or_refused(tmp_path: Path, start: str) -> None:
    with (
        penstock.publisher("tcp://127.0.0.1:0", durable=str(tmp_path / "kept")) as publisher,
        penstock.subscriber(f"tcp://127.0.0.1:{publisher.port}", start=start) as subscriber,
    ):
        assert publisher.wait_ready(1, timeout=LONG)
        publisher.publish(b"1")
        assert subscriber.receive(LONG) == b"1"


def test_tcp_a_peer_that_asks_for_nonsense_is_closed_alone(tmp_path: Path) -> None:
    with (
        penstock.publisher("tcp://127.0.0.1:0", durable=str(tmp_path / "kept")) as publisher,
        tcp.Subscriber(start="first", reconnect_delay=0.01) as hostile,
        penstock.subscriber(f"tcp://127.0.0.1:{publisher.port}", start="first") as subscriber,
    ):
        hostile._wanted = Wanted(start="\0nonsense" * 50)
        hostile.add_session("127.0.0.1", publisher.port)
        publisher.publish(b"1")
        assert subscriber.receive(LONG) == b"1"
        assert hostile.read(0) is None


def test_tcp_one_too_many_in_the_past_is_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[tcp.Publisher.__module__], "MAX_FEEDERS", 1)
    with penstock.publisher("tcp://127.0.0.1:0", durable=str(tmp_path / "kept")) as publisher:
        publisher.publish(b"1")
        where = f"tcp://127.0.0.1:{publisher.port}"
        with penstock.subscriber(where, start="first") as first:
            assert bytes(first.receive(LONG)) == b"1"
            with penstock.subscriber(where, start="first") as second:
                session = second.sessions[0]
                until(lambda: "1 subscribers read the past already" in (session.last_error or ""))


def test_tcp_a_peer_that_does_not_read_its_past_costs_little_memory(tmp_path: Path) -> None:
    kept = str(tmp_path / "kept")
    with penstock.publisher("tcp://127.0.0.1:0", durable=kept, depth_bytes=1 << 28) as publisher:
        publisher.publish_many([bytes(100_000)] * 300)
        publisher.flush()
        with socket.create_connection(("127.0.0.1", publisher.port)) as stalled:
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stalled.sendall(Request(wanted=Wanted(start="first")).outgoing)
            until(lambda: any(peer.queued_bytes > past.QUEUED_BYTES // 2 for peer in publisher.subscribers))
            with penstock.subscriber(f"tcp://127.0.0.1:{publisher.port}", start="first") as reader:
                assert sum(len(reader.receive(LONG)) for _ in range(300)) == 30_000_000
            assert max(peer.queued_bytes for peer in publisher.subscribers) <= past.QUEUED_BYTES + 200_000


def test_tcp_plain_peers_begin_with_what_comes() -> None:
    with penstock.publisher("tcp://127.0.0.1:0", history=3) as publisher:
        publisher.publish(b"past")
        with penstock.subscriber(f"tcp://127.0.0.1:{publisher.port}", extended=False) as subscriber:
            assert publisher.wait_ready(1, timeout=LONG)
            publisher.publish(b"live")
            assert subscriber.receive(LONG) == b"live"


def test_tcp_a_history_longer_than_the_queue_arrives_whole() -> None:
    options = {"history": 500, "depth": 10, "overflow": "drop_oldest"}
    with penstock.publisher("tcp://127.0.0.1:0", **options) as publisher:
        publisher.publish_many([b"%d" % i * 1000 for i in range(500)])
        with penstock.subscriber(f"tcp://127.0.0.1:{publisher.port}") as subscriber:
            for number in range(500):
                assert subscriber.receive(LONG) == b"%d" % number * 1000


def test_tcp_the_ledger_does_not_wait_for_the_history() -> None:
    with penstock.publisher("tcp://127.0.0.1:0", history=10) as publisher:
        publisher.publish_many([b"x"] * 20)
        ledger = publisher.ledger
        assert (ledger.matched, ledger.delivered, ledger.in_flight) == (20, 20, 0)


@pytest.mark.parametrize("reliable", [False, True])
def test_shm_gives_the_history_to_reliable_subscribers_too(reliable: bool) -> None:
    name = f"/{unique()}"
    with shm.Publisher(name, slots=5, history=10) as publisher:
        assert publisher.slots == 15
        publisher.publish_many([b"%d" % i for i in range(40)])
        with shm.Subscriber(name, reliable=reliable) as subscriber:
            for number in range(30, 40):
                with subscriber.receive(LONG) as message:
                    assert message == b"%d" % number


def test_shm_held_messages_take_nothing_from_the_history() -> None:
    name = f"/{unique()}"
    with shm.Publisher(name, slots=8, history=10) as publisher, shm.Subscriber(name, max_active_messages=4) as holder:
        publisher.publish_many([b"first"] * 3)
        held = holder.read_all()
        publisher.publish_many([b"%d" % i for i in range(100)])
        held += holder.read_all()
        assert len(held) == 4
        with shm.Subscriber(name, max_active_messages=1) as subscriber:
            for number in range(90, 100):
                with subscriber.receive(LONG) as message:
                    assert message == b"%d" % number


def test_shm_publishers_agree_on_the_history() -> None:
    name = f"/{unique()}"
    with shm.Publisher(name, slots=8, history=10):
        with pytest.raises(penstock.RefusedError, match="history"):
            shm.Publisher(name, history=5)
        with pytest.raises(penstock.RefusedError, match="slots=18 but the channel has 8"):
            shm.Publisher(name, slots=18)
        with shm.Publisher(name, slots=8), shm.Publisher(name, history=10):
            pass


def test_shm_a_virtual_channel_has_no_history() -> None:
    with pytest.raises(penstock.InvalidArgument, match="virtual"):
        penstock.publisher(f"shm:/{unique()}", mux=f"/{unique()}", history=3)


def test_bus_keeps_each_id_by_itself_and_in_every_mode() -> None:
    for mode in ("direct", "thread"):
        with bus.Bus(unique(), mode=mode) as one:
            one._keep(1, 2, 0, 1 << 20)
            for number in range(5):
                one.publish(b"%d" % number, 1)
                one.publish(b"other", 2)
            assert one.flush(LONG)
            queue = one.subscribe(1, 2)
            one.publish(b"5", 1)
            assert [bytes(queue.receive(LONG)) for _ in range(3)] == [b"3", b"4", b"5"]
            late = one.subscribe(2)
            late.subscribe(1)
            assert [bytes(late.receive(LONG)) for _ in range(2)] == [b"4", b"5"]


def test_bus_what_a_handler_publishes_reaches_who_joins_in_it_once() -> None:
    with bus.Bus(unique(), mode="direct") as one:
        one._keep(1, 10, 0, 1 << 20)
        queues = []

        @one.on(2)
        def join(message: penstock.Message) -> None:
            one.publish(b"within", 1)
            queues.append(one.subscribe(1))

        one.publish(b"before", 1)
        one.publish(b"go", 2)
        assert [bytes(message) for message in queues[0].read_many(10, 0)] == [b"before", b"within"]


def test_bus_gives_the_memory_of_its_history_back() -> None:
    one = bus.Bus(unique(), mode="direct")
    one._keep(0, 3, 0, 1 << 20)
    one.publish_many([b"x"] * 10)
    assert one.heap_in_use == 3
    one.close()
    assert one.heap_in_use == 0


def test_what_was_published_is_on_disk_when_the_program_has_ended(tmp_path: Path) -> None:
    code = "import sys, penstock; p = penstock.publisher('bus:end', durable=sys.argv[1]); p.publish(b'last words')"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "kept")], check=True, timeout=LONG)
    with penstock.subscriber("bus:end", start="first", durable=str(tmp_path / "kept")) as subscriber:
        assert subscriber.receive(LONG) == b"last words"


def test_a_commit_of_more_messages_than_slots_loses_none_of_a_reader_that_keeps_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_publisher, "KEEP_UP_S", LONG)  # however seldom the reader runs on a busy machine, it keeps up
    where = f"shm:/{unique()}"
    publisher = penstock.publisher(where, durable=str(tmp_path), slots=16)
    with publisher, penstock.subscriber(where, history=False) as subscriber:
        publisher.publish_many([b"%d" % i for i in range(500)])  # one commit
        found = [bytes(subscriber.receive(LONG)) for _ in range(500)]
        assert found == [b"%d" % i for i in range(500)] and not subscriber.ledger.lost


def test_a_reader_that_does_not_read_holds_no_commit_up(tmp_path: Path) -> None:
    where = f"shm:/{unique()}"
    publisher = penstock.publisher(where, durable=str(tmp_path), slots=16)
    with publisher, penstock.subscriber(where, history=False) as subscriber:
        publisher.publish_many([b"%d" % i for i in range(500)])
        until(lambda: publisher.last_ordinal == 500)
        assert publisher.unread == 500 and subscriber.ledger.matched == 500


def test_bus_a_durable_publisher_is_the_only_one_of_its_id(tmp_path: Path) -> None:
    """Another one's messages would not be on disk, and would shift the ordinals away from the positions."""
    where = f"bus:{unique()}"
    with penstock.publisher(where, durable=tmp_path / "a"), penstock.publisher(f"{where}?id=1"):
        for options in ({}, {"durable": tmp_path / "b"}):
            with pytest.raises(penstock.RefusedError, match="durable"):
                penstock.publisher(where, **options)
    with penstock.publisher(where):
        with pytest.raises(penstock.RefusedError, match="another publisher"):
            penstock.publisher(where, durable=tmp_path / "a")
        penstock.publisher(where).close()
    penstock.publisher(where, durable=tmp_path / "a").close()


def test_shm_a_durable_channel_has_one_publisher(tmp_path: Path) -> None:
    with pytest.raises(penstock.InvalidArgument, match="one publisher"):
        penstock.publisher(f"shm:/{unique()}", durable=tmp_path / "a", max_publishers=2)


def test_shm_a_durable_channel_has_one_publisher_whoever_comes_first(tmp_path: Path) -> None:
    where = f"shm:/{unique()}"
    with penstock.publisher(where):
        with pytest.raises(penstock.RefusedError, match=rf"a durable channel has one publisher, .* already: pid {os.getpid()};"):
            penstock.publisher(where, durable=tmp_path / "a")
        penstock.publisher(where).close()  # the one that was refused has limited nothing
    with penstock.publisher(where, durable=tmp_path / "a"):
        told = rf"has a durable publisher, .*{tmp_path}/a' and is its only one: 1 of pid {os.getpid()};"
        with pytest.raises(penstock.CapacityError, match=told):
            penstock.publisher(where)
        with pytest.raises(penstock.RefusedError, match="a durable channel has one publisher"):
            penstock.publisher(where, durable=tmp_path / "b")


def test_shm_a_durable_channel_knows_its_last_ordinal(tmp_path: Path) -> None:
    with pytest.raises(penstock.InvalidArgument, match="before= does not go with durable="):
        penstock.publisher(f"shm:/{unique()}", durable=tmp_path / "a", before=5)
    assert not (tmp_path / "a").exists()


def test_shm_metadata_is_not_kept_on_disk(tmp_path: Path) -> None:
    with pytest.raises(penstock.InvalidArgument, match="metadata_size= does not go with durable="):
        penstock.publisher(f"shm:/{unique()}", durable=tmp_path / "a", metadata_size=8)
    assert not (tmp_path / "a").exists()


def test_bus_the_next_publisher_continues_with_what_was_not_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(durable_publisher, "CLOSE_S", 0.01)
    where = f"bus:{unique()}"
    with penstock.subscriber(where, depth=2) as subscriber:
        with caplog.at_level(logging.WARNING, "penstock"), penstock.publisher(where, durable=tmp_path / "a") as first:
            first.publish_many([b"%d" % i for i in range(1, 11)])
        assert "did not reach" in caplog.text
        with penstock.publisher(where, durable=tmp_path / "a") as publisher:
            publisher.publish(b"11")
            found = []
            while 11 not in found:
                message = subscriber.receive(LONG)
                found.append(message.ordinal)
                assert bytes(message) == b"%d" % message.ordinal
        assert found == sorted(set(found))
        assert subscriber.ledger.matched == 11 == len(found) + subscriber.ledger.lost


@pytest.mark.parametrize("where", ["bus:{}", "shm:/{}"])
def test_a_directory_of_another_channel_is_refused(tmp_path: Path, where: str) -> None:
    with penstock.publisher(where.format(unique()), durable=tmp_path / "a") as publisher:
        publisher.publish(b"1")
    with pytest.raises(penstock.RefusedError, match="keeps"):
        penstock.subscriber(where.format(unique()), start="first", durable=str(tmp_path / "a"))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("where", ["bus:{}", "shm:/{}"])
def test_a_reader_whose_directory_was_removed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, again: bool
) -> None:
    monkeypatch.setattr(follow, "LOOK_S", 0.01)
    where = where.format(unique())
    kept = tmp_path / "a"
    with penstock.publisher(where, durable=kept) as publisher:
        publisher.publish(b"1")
        publisher.flush()
        subscriber = penstock.subscriber(where, start="first")
    with subscriber:
        assert bytes(subscriber.receive(LONG)) == b"1"
        assert subscriber.read(0.05) is None
        shutil.rmtree(kept)
        if again:
            penstock.publisher(where, durable=kept).close()
        with pytest.raises(penstock.CorruptionError, match="removed or made anew"):
            subscriber.receive(LONG)


def test_a_refused_start_names_the_channel_without_its_options() -> None:
    where = f"shm:/{unique('nobody')}"
    with penstock.publisher(where), pytest.raises(penstock.RefusedError, match=f"{where} has no messages on disk"):
        penstock.subscriber(f"{where}?start=first")
