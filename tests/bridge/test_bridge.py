"""Bridges: what is known of a message survives the way over the network, and losses are told by their place."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock
from penstock import shm, tcp
from penstock.bridge import Bridge, read_map
from penstock.broker import Client, Limits, Server
from penstock.journal import Journal

LONG = 30.0


def test_a_bridge_that_was_never_started_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with Bridge("bus:nothing-runs", "bus:nothing-comes") as bridge:
        pass
    bridge.close()
    assert caplog.text.count("neither start() nor run() was called") == 1
    caplog.clear()
    with Bridge("bus:nothing-runs", "bus:nothing-comes") as bridge:
        bridge.run(0)
    with Bridge("bus:nothing-runs", "bus:nothing-comes").start():
        pass
    assert "start()" not in caplog.text


def test_tcp_to_tcp_carries_everything() -> None:
    with tcp.Publisher() as first, Bridge(first.address, "tcp://127.0.0.1:0").start() as bridge:
        assert first.wait_ready(1, LONG)
        second = bridge.publisher
        assert isinstance(second, tcp.Publisher)
        with penstock.subscriber(second.address) as subscriber:
            assert second.wait_ready(1, LONG)
            first.publish(b"one", properties={"unit": "K"}, vchan_id=5)
            first.publish_many([b"two", b"three"])
            found = [subscriber.read(LONG) for _ in range(3)]
            assert [(bytes(m), m.ordinal, m.vchan_id) for m in found if m] == [
                (b"one", 1, 5),
                (b"two", 2, None),
                (b"three", 3, None),
            ]
            assert found[0] is not None and dict(found[0].properties) == {"unit": "K"}
            deadline = time.monotonic() + LONG  # it counts after it has sent
            while bridge.ledger.in_flight and time.monotonic() < deadline:
                time.sleep(0.001)
            assert bridge.ledger == penstock.Ledger(3, 3)
            latency = bridge.latency
            assert latency is not None and latency.clock_offset_ns is not None
            # One machine, one clock: the offset seen is the handshake's travel time alone, and the sum holds.
            assert latency.corrected_ns == latency.apparent_ns + latency.clock_offset_ns


def test_losses_are_told_by_their_place() -> None:
    """Lost before the bridge: a gap in ordinals. Lost on the link: told by the bridge's publisher."""
    with tcp.Publisher() as first:
        options = {"overflow": "drop_oldest", "depth": 4}
        with Bridge(first.address, "tcp://127.0.0.1:0", sink_options=options).start() as bridge:
            assert first.wait_ready(1, LONG)
            with penstock.subscriber(bridge.sink) as subscriber:
                assert bridge.publisher.wait_ready(1, LONG)
                first.publish(b"1", ordinal=1)
                first.publish(b"11", ordinal=11)  # as if 9 had been lost before
                assert [bytes(subscriber.read(LONG) or b"") for _ in range(2)] == [b"1", b"11"]
                assert subscriber.ledger.dropped == {"gap": 9}
                sent = 0
                while bridge.publisher.ledger.lost < 20:
                    first.publish(bytes(60_000))
                    sent += 1
                    assert sent < 10_000
                first.publish(b"last")
                delivered = 2
                while (message := subscriber.read(LONG)) is not None:
                    delivered += 1
                    if message == b"last":
                        break
                ledger = subscriber.ledger
                assert ledger.delivered == delivered and ledger.balanced
                assert ledger.dropped == {"gap": 9, "overflow": bridge.publisher.ledger.lost}
                assert ledger.matched == 11 + sent + 1


def test_shared_memory_over_tcp_and_back() -> None:
    name = f"shm:/bridge-{time.time_ns()}"
    with (
        penstock.publisher(name, slots=64, reliable=True) as camera,
        Bridge(name, "tcp://127.0.0.1:0", source_options={"reliable": True}).start() as out,
        Bridge(out.sink, name + "-copy", sink_options={"slots": 64, "reliable": True}) as back,
        penstock.subscriber(name + "-copy", reliable=True) as viewer,
    ):
        back.start()
        assert camera.wait_ready(1, LONG) and out.publisher.wait_ready(1, LONG)
        sent = [b"%d" % i * (i % 50) for i in range(500)]
        for data in sent:
            camera.publish(data)
        assert [bytes(message) for _ in sent if (message := viewer.read(LONG)) is not None] == sent


def test_vchan_maps(tmp_path: Path) -> None:
    path = tmp_path / "map"
    with tcp.Publisher() as first, tcp.Publisher() as probe:
        port = probe.port
        probe.close()
        path.write_text(f"# cameras\n1 = 10\n2 = tcp://127.0.0.1:{port}\n\n")
        with Bridge(first.address, "tcp://127.0.0.1:0", vchans=read_map(path)).start() as bridge:
            assert first.wait_ready(1, LONG)
            other = bridge.others[f"tcp://127.0.0.1:{port}"]
            with (
                penstock.subscriber(bridge.sink) as main,
                penstock.subscriber(f"tcp://127.0.0.1:{port}") as aside,
            ):
                assert bridge.publisher.wait_ready(1, LONG) and other.wait_ready(1, LONG)
                for vchan in (1, 2, 3):
                    first.publish(b"%d" % vchan, vchan_id=vchan)
                found = [main.read(LONG) for _ in range(2)]
                assert [(bytes(m), m.vchan_id) for m in found if m] == [(b"1", 10), (b"3", 3)]
                assert aside.read(LONG) == b"2"


def test_local_channels_stay_on_the_machine() -> None:
    name = f"/local/{os.getpid()}"
    with shm.Publisher(name, local=True) as secret:
        with pytest.raises(penstock.RefusedError, match="local=True"):
            Bridge(f"shm:{name}", "tcp://127.0.0.1:0")
        with Bridge(f"shm:{name}", f"shm:{name}/copy"), shm.Subscriber(name) as subscriber:
            assert subscriber.local
            with pytest.raises(penstock.RefusedError, match="local=True"):  # nor by way of a copy
                Bridge(f"shm:{name}/copy", "tcp://127.0.0.1:0")
        secret.publish(b"x")
    with Bridge(f"shm:{name}", "tcp://127.0.0.1:0") as bridge, shm.Publisher(name, local=True) as secret:
        secret.publish(b"x")  # it was there first and could not know
        with pytest.raises(penstock.RefusedError, match="local=True"):
            bridge.run(1)
        assert bridge.ledger.delivered == 0


def test_a_local_channel_stays_on_the_machine_with_its_past(tmp_path: Path) -> None:
    source = f"shm:/local-{time.time_ns()}"
    past = f"{source}?start=first&durable={tmp_path}/kept"
    with penstock.publisher(source, local=True, durable=tmp_path / "kept") as secret:
        secret.publish(b"x")
        for address in (f"{source}?start=first", past):
            with pytest.raises(penstock.RefusedError, match="local=True"):
                Bridge(address, "tcp://127.0.0.1:0")
    with (
        Bridge(past, "tcp://127.0.0.1:0") as bridge,
        penstock.publisher(source, local=True, durable=tmp_path / "kept"),
        pytest.raises(penstock.RefusedError, match="local=True"),
    ):
        bridge.run(1)


@pytest.mark.parametrize(
    "bad",
    ["x = 1", "1", "1 = nonsense", "1 = 2\n1 = 3", "-1 = 2", "9" * 5000 + " = 1", "1 = " + "9" * 5000, "\N{SUPERSCRIPT TWO} = 1", f"{2**31 - 1} = 1"],
    ids=range(9),
)
def test_bad_maps_name_the_line(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "map"
    path.write_text("# fine\n" + bad, encoding="utf-8")
    with pytest.raises(penstock.InvalidArgument, match=r"line [23]"):
        read_map(path)


def test_a_bridge_that_cannot_open_closes_what_it_had() -> None:
    with pytest.raises(penstock.InvalidArgument):
        Bridge("nonsense:x", "tcp://127.0.0.1:0")
    with pytest.raises(penstock.InvalidArgument):
        Bridge("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_losses_of_two_bridges() -> None:
    """What was lost before and on the first link is one gap behind the second; the last link's losses are told apart."""
    few = {"overflow": "drop_oldest", "depth": 4}
    with (
        tcp.Publisher() as camera,
        Bridge(camera.address, "tcp://127.0.0.1:0", sink_options=few).start() as first,
        Bridge(first.sink, "tcp://127.0.0.1:0", sink_options=few) as second,
        penstock.subscriber(second.sink) as reader,
    ):
        assert camera.wait_ready(1, LONG) and first.publisher.wait_ready(1, LONG)
        assert second.publisher.wait_ready(1, LONG)
        camera.publish(b"1", ordinal=1)
        camera.publish(b"11", ordinal=11)  # as if 9 had been lost before
        sent = 0
        while first.publisher.ledger.lost < 20:  # nobody reads the first link yet
            camera.publish(bytes(60_000))
            sent += 1
            assert sent < 10_000
        second.start()
        while second.publisher.ledger.lost < 20:  # and now nobody the second
            camera.publish(bytes(60_000))
            sent += 1
            assert sent < 20_000
        camera.publish(b"last")
        while (message := reader.read(LONG)) is not None and message != b"last":
            del message
        ledger, on_first, on_second = reader.ledger, first.publisher.ledger.lost, second.publisher.ledger.lost
        assert ledger.balanced and ledger.matched == 11 + sent + 1
        assert ledger.dropped == {"gap": 9 + on_first, "overflow": on_second}
        assert second.subscriber.ledger.dropped == {"gap": 9, "overflow": on_first}


def test_virtual_channels_over_tcp_into_a_multiplexer(tmp_path: Path) -> None:
    """Ids travel, names come from a file; both machines are this one here, where a name is one channel."""
    shm.write_vchans(tmp_path / "names", {3: "/front", 40: "/back"})
    names = shm.read_vchans(tmp_path / "names")
    here, there = f"/here-{time.time_ns()}", f"/there-{time.time_ns()}"
    options = {"reliable": True, "slots": 64}
    with (
        shm.Publisher("/near-front", mux=here, vchan_id=3, **options) as front,
        shm.Publisher("/near-back", mux=here, vchan_id=40, **options) as back,
        shm.Publisher("/other", mux=here, vchan_id=7, **options) as other,
        Bridge(f"shm:{here}", "tcp://127.0.0.1:0", source_options={"reliable": True}).start() as out,
        Bridge(out.sink, f"shm:{there}?slots=64", names=names, sink_options={"reliable": True}) as into,
        shm.Subscriber("/front", mux=there, reliable=True) as of_front,
        shm.Subscriber("/back", mux=there, reliable=True) as of_back,
        shm.Subscriber(there, reliable=True) as of_all,
    ):
        into.start()
        assert out.publisher.wait_ready(1, LONG)
        for i in range(20):
            for publisher, name in ((front, b"front"), (back, b"back"), (other, b"other")):
                publisher.publish(b"%s %d" % (name, i))
        for subscriber, name, vchan_id in ((of_front, b"front", 3), (of_back, b"back", 40)):
            found = [(bytes(m), m.vchan_id) for _ in range(20) if (m := subscriber.read(LONG))]
            assert found == [(b"%s %d" % (name, i), vchan_id) for i in range(20)]
            assert subscriber.vchan_id == vchan_id
        named = {(bytes(m).split()[0], m.vchan_id) for _ in range(60) if (m := of_all.read(LONG))}
        assert named == {(b"front", 3), (b"back", 40), (b"other", 7)}
        (channel,) = (channel for channel in shm.channels() if channel.name == there)
        assert dict(channel.vchans) == {3: "/front", 40: "/back", 7: f"{there}/vchan-7"}
        eventually(lambda: into.ledger == penstock.Ledger(60, 60))


@pytest.mark.parametrize("kind", [str, Path])
def test_names_and_the_map_may_be_files(tmp_path: Path, kind: Any) -> None:
    """As the command takes them."""
    (tmp_path / "names").write_text("1 /one\n")
    (tmp_path / "map").write_text("9 = 1\n")
    there = f"/there-{time.time_ns()}"
    with (
        tcp.Publisher() as publisher,
        Bridge(publisher.address, f"shm:{there}", names=kind(tmp_path / "names"), vchans=kind(tmp_path / "map")) as bridge,
        shm.Subscriber("/one", mux=there, reliable=True) as subscriber,
    ):
        assert publisher.wait_ready(1, LONG)
        publisher.publish(b"x", vchan_id=9)
        assert bridge.run(1) == 1 and subscriber.read(LONG) == b"x"
    (tmp_path / "names").write_text("no line of names\n")
    with pytest.raises(penstock.InvalidArgument, match="names:1"):
        Bridge("tcp://127.0.0.1:1", f"shm:{there}", names=kind(tmp_path / "names"))


def test_what_has_no_place_is_refused_and_the_rest_goes_on() -> None:
    there = f"/there-{time.time_ns()}"
    with (
        tcp.Publisher() as publisher,
        Bridge(publisher.address, f"shm:{there}", names={1: "/one"}).start() as bridge,
        shm.Subscriber(there, reliable=True) as subscriber,
    ):
        assert publisher.wait_ready(1, LONG)
        publisher.publish(b"first", vchan_id=1)
        publisher.publish(b"no virtual channel")
        publisher.publish(b"no such id", vchan_id=shm.MAX_VCHAN_ID + 1)
        publisher.publish(b"last", vchan_id=1)
        assert [bytes(subscriber.read(LONG) or b"") for _ in range(2)] == [b"first", b"last"]
        eventually(lambda: bridge.ledger == penstock.Ledger(4, 2, {"refused": 2}))
        assert bridge.failure is None


def test_refused_messages_are_logged_once_and_then_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A subscriber that was there first has another id than the messages of the bridge: each of them is refused."""
    quarters = itertools.count()  # each refusal comes a quarter of a second after the one before
    monkeypatch.setattr("penstock.throttle.time", SimpleNamespace(monotonic=lambda: next(quarters) / 4))
    there = f"/there-{time.time_ns()}"
    with (
        shm.Subscriber(f"{there}/vchan-9", mux=there),
        tcp.Publisher() as publisher,
        Bridge(publisher.address, f"shm:{there}", names={}) as bridge,
    ):
        assert publisher.wait_ready(1, LONG)
        for _ in range(51):
            publisher.publish(b"x", vchan_id=9)
        assert bridge.run(51) == 51
        assert bridge.ledger == penstock.Ledger(51, 0, {"refused": 51})
    told = [record.getMessage() for record in caplog.records if record.name == "penstock.carry"]
    assert len(told) == 2 and "give the same vchan_id on both sides" in told[0], told
    assert "39 more like it" in told[1]


def test_a_message_too_large_for_the_sink_is_refused_alone() -> None:
    """In a batch that is handed over whole: those before and after it arrive."""
    there = f"shm:/there-{time.time_ns()}?slots=64&slot_size=64&fixed_size=true&reliable=true"
    with (
        tcp.Publisher() as publisher,
        Bridge(publisher.address, there) as bridge,
        penstock.subscriber(there.partition("?")[0], reliable=True) as subscriber,
    ):
        assert publisher.wait_ready(1, LONG)
        publisher.publish_many([b"1", b"2", bytes(100_000), b"3", b"4"])
        assert bridge.run(5) == 5
        assert [bytes(subscriber.read(LONG) or b"") for _ in range(4)] == [b"1", b"2", b"3", b"4"]
        assert bridge.ledger == penstock.Ledger(5, 4, {"refused": 1})


def test_a_sink_that_stays_full_costs_the_rest_of_the_batch_and_is_counted() -> None:
    there = f"shm:/there-{time.time_ns()}?slots=8&reliable=true&timeout=0.05"
    with (
        tcp.Publisher() as publisher,
        Bridge(publisher.address, there) as bridge,
        penstock.subscriber(there.partition("?")[0], reliable=True) as subscriber,
    ):
        assert publisher.wait_ready(1, LONG)
        publisher.publish_many([b"%d" % i for i in range(30)])
        assert bridge.run(30) == 30
        found = []
        while (message := subscriber.read(0)) is not None:
            found.append(bytes(message))
        ledger = bridge.ledger
        assert 0 < len(found) < 30 and found == [b"%d" % i for i in range(len(found))]
        assert (ledger.matched, ledger.delivered, dict(ledger.dropped)) == (30, len(found), {"overflow": 30 - len(found)})


def numbers(directory: Path) -> list[int]:
    with Journal(directory) as journal:
        return [int(data.as_py()) for batch in journal.batches(columns=["payload"]) for data in batch["payload"]]


def test_a_bridge_of_stored_messages_waits_for_a_broker_that_is_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Longer than the sink's time-out: nothing is lost, nothing is there twice, and the log says what it waits for."""
    with Journal(tmp_path / "j", sync=False) as journal, journal.transaction() as transaction:
        for number in range(3000):
            transaction.append("t", b"%d" % number)
    server = Server(tmp_path / "broker", 0).start()
    with Bridge(f"journal:{tmp_path / 'j'}#t?start=first", f"broker://127.0.0.1:{server.port}/t", most=500) as bridge:
        assert bridge.run(500) == 500
        server.close()
        bridge.publisher._client.timeout = 0.3  # type: ignore[attr-defined]  # less than what opening it may take
        bridge.start()
        eventually(lambda: "which is tried again" in caplog.text)
        with Server(tmp_path / "broker", server.port).start():
            eventually(lambda: bridge.ledger.delivered == 3000)
        assert bridge.ledger == penstock.Ledger(3000, 3000)
    assert numbers(tmp_path / "broker") == list(range(3000))


def test_a_sink_that_does_not_answer_costs_live_messages_counted_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(tmp_path / "broker", 0).start()
    with (
        tcp.Publisher() as publisher,
        Bridge(publisher.address, f"broker://127.0.0.1:{server.port}/t") as bridge,
    ):
        assert publisher.wait_ready(1, LONG)
        publisher.publish_many([b"0", b"1"])
        assert bridge.run(2) == 2
        server.close()
        bridge.publisher._client.timeout = 0.2  # type: ignore[attr-defined]  # less than what opening it may take
        publisher.publish_many([b"2", b"3", b"4"])
        assert bridge.run(3) == 3
        ledger = bridge.ledger
        assert ledger == penstock.Ledger(5, 2, {"overflow": 3})
        assert "messages were not carried: the broker at" in caplog.text


def test_what_a_broker_refuses_is_counted_as_refused(tmp_path: Path) -> None:
    """A broker at its quota confirms nothing: a bridge that called its messages delivered has lost them unnoticed."""
    limits = Limits(quota_bytes=4 << 20)
    with Server(tmp_path / "broker", 0, limits=limits).start() as server, tcp.Publisher() as publisher:
        sink = f"broker://127.0.0.1:{server.port}/t?queue=q"
        with Bridge(publisher.address, sink) as bridge:
            assert publisher.wait_ready(1, LONG)
            for _ in range(20):
                publisher.publish_many([bytes(65_536)] * 5)
                bridge.run(5)
            ledger = bridge.ledger
            with Client(port=server.port) as client:
                (queue,) = client.queues()
            stored = queue["ready"]
            assert 0 < ledger.delivered == stored < 100
            assert ledger == penstock.Ledger(100, stored, {"refused": 100 - stored})


def test_stored_messages_wait_for_a_broker_that_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Journal(tmp_path / "j", sync=False) as journal, journal.transaction() as transaction:
        for number in range(100):
            transaction.append("t", b"%d" % number + bytes(65_536))
    limits = Limits(quota_bytes=4 << 20)
    with Server(tmp_path / "broker", 0, limits=limits).start() as server:
        source, sink = f"journal:{tmp_path / 'j'}#t?start=first", f"broker://127.0.0.1:{server.port}/t?queue=q"
        with Bridge(source, sink, most=10).start() as bridge, Client(port=server.port) as client:
            eventually(lambda: "quota" in caplog.text)
            with client.subscribe("q") as subscriber:
                found = [int(bytes(message).rstrip(b"\0")) for _, message in zip(range(100), subscriber, strict=False)]
            eventually(lambda: bridge.ledger.delivered == 100)
            assert found == list(range(100)) and bridge.ledger == penstock.Ledger(100, 100)


def test_what_was_not_carried_comes_again(tmp_path: Path) -> None:
    """A bridge that ends in the midst of a batch does not acknowledge it: the queue gives it to its next reader."""
    with Server(tmp_path / "broker", 0).start() as server, Client(port=server.port) as client:
        client.queue("q", topics="t")
        for number in range(3):
            client.publish("t", b"%d" % number)
        source = f"broker://127.0.0.1:{server.port}/?queue=q"
        with Bridge(source, "tcp://127.0.0.1:0") as bridge:
            bridge._publisher = Broken()
            with pytest.raises(OSError, match="No space left"):
                bridge.run(3)
        with client.subscribe("q") as subscriber:
            assert [bytes(message) for _, message in zip(range(3), subscriber, strict=False)] == [b"0", b"1", b"2"]


class Broken(tcp.Publisher):
    """A sink whose disk is full, as it were."""

    def forward(self, batch: object) -> int:
        raise OSError(28, "No space left on device")


def test_an_error_in_the_thread_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(tcp, "open_publisher", lambda address: Broken())
    with tcp.Publisher() as publisher, Bridge(publisher.address, "tcp://127.0.0.1:0").start() as bridge:
        assert publisher.wait_ready(1, LONG)
        assert bridge.wait(0) is False and bridge.failure is None
        publisher.publish(b"x")
        with pytest.raises(OSError, match="No space left"):
            bridge.wait(LONG)
        assert isinstance(bridge.failure, OSError) and "No space left" in caplog.text
        assert bridge.ledger == penstock.Ledger(1, 0, {"error": 1})  # taken from the source, and lost with it


class Command:
    """``penstock bridge`` in a process of its own."""

    def __init__(self, source: str, *options: str, sink: str = "tcp://127.0.0.1:0") -> None:
        command = [sys.executable, "-m", "penstock", "bridge", source, sink, *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        assert line.startswith(f"bridge: {source} > "), line + self.process.stderr.read()
        self.sink = line.split(" > ")[1].strip()

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self) -> tuple[int, str]:
        _, text = self.process.communicate(timeout=LONG)
        return self.process.returncode, text


def test_the_command() -> None:
    with (
        tcp.Publisher() as publisher,
        Command(publisher.address, "--count", "3") as command,
        tcp.Subscriber() as subscriber,
    ):
        assert subscriber.add_session("127.0.0.1", int(command.sink.rpartition(":")[2])).wait_connected(LONG)
        assert publisher.wait_ready(1, LONG)
        publisher.publish_many([b"1", b"2", b"3"])
        assert [bytes(subscriber.read(LONG) or b"") for _ in range(3)] == [b"1", b"2", b"3"]
        assert subscriber.ledger == penstock.Ledger(3, 3)
        code, text = command.end()
        assert code == 0 and "carried 3, lost here 0, lost before 0" in text and "by one" in text


def test_the_command_ends_on_ctrl_c() -> None:
    with tcp.Publisher() as publisher, Command(publisher.address) as command:
        assert publisher.wait_ready(1, LONG)
        command.process.send_signal(signal.SIGINT)
        code, text = command.end()
        assert code == 0 and "carried 0" in text


def test_the_command_fails_when_its_bridge_does() -> None:
    """A local channel that comes after the bridge: refused by the thread, told by the command."""
    name = f"shm:/local-{time.time_ns()}"
    with Command(name) as command, penstock.publisher(name, local=True) as publisher:
        publisher.publish(b"secret")
        code, text = command.end()
        assert code == 1 and "local=True" in text and "Traceback" not in text


def test_the_command_tells_what_is_not_carried() -> None:
    name = f"shm:/untold-{time.time_ns()}"
    with penstock.publisher(name, metadata_size=8, retirement=True), Command(name) as command:
        assert command.process.stderr is not None
        said = [command.process.stderr.readline() for _ in range(2)]
        assert "cannot hold metadata of messages" in said[0] and "retirement is not carried" in said[1], said


class FullSink(penstock.Publisher):
    """Takes two messages, then nothing more until it is closed."""

    def __init__(self) -> None:
        self.taken = 0
        self.full, self.shut = threading.Event(), threading.Event()

    def publish(self, data: object) -> int:
        if self.taken == 2:
            self.full.set()
            assert self.shut.wait(LONG)
            raise penstock.ClosedError("this sink was closed")
        self.taken += 1
        return self.taken

    def reserve(self, size: int) -> Any:
        raise NotImplementedError

    def wait_ready(self, subscribers: int = 1, timeout: float | None = None) -> bool:
        return True

    def publish_many(self, batch: Iterable[object]) -> int:
        return sum(self.publish(message) > 0 for message in batch)

    @property
    def ledger(self) -> penstock.Ledger:
        return penstock.Ledger(self.taken, self.taken)

    @property
    def closed(self) -> bool:
        return self.shut.is_set()

    def close(self) -> None:
        self.shut.set()


def test_closing_ends_the_wait_for_a_full_sink_and_counts_what_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = FullSink()
    monkeypatch.setattr("penstock.bridge.bridge._open_sink", lambda *_: sink)
    with tcp.Publisher() as first:
        bridge = Bridge(first.address, "tcp://127.0.0.1:0").start()
        assert first.wait_ready(1, LONG)
        first.publish_many([b"1", b"2", b"3", b"4", b"5"])
        assert sink.full.wait(LONG)
        taken = bridge.ledger.matched
        counts: list[penstock.Ledger] = []
        monkeypatch.setattr(bridge._stack, "close", lambda: counts.append(bridge.ledger))
        closing = threading.Thread(target=bridge.close, args=(0.01,), daemon=True)
        closing.start()
        closing.join(LONG)
        assert not closing.is_alive()
        assert counts == [penstock.Ledger(taken, 2, {"closed": taken - 2})]
        monkeypatch.undo()
        bridge.close()


def test_a_loop_is_refused(tmp_path: Path) -> None:
    for source, sink in (
        ("shm:/loop", "shm:/loop?slots=4"),
        (f"journal:{tmp_path}/j", f"journal:{tmp_path}/../{tmp_path.name}/j#default"),
        ("tcp://127.0.0.1:1588", "tcp://127.0.0.1:1588"),
        (f"journal:{tmp_path}/j#a.>", f"journal:{tmp_path}/j#a.out"),
        ("broker://127.0.0.1:1/a.>", "broker://127.0.0.1:1/a.out"),
        ("broker://127.0.0.1:1/b,a.*", "broker://127.0.0.1:1/a.out"),
        ("broker://127.0.0.1:1,127.0.0.1:2/>?queue=q", "broker://127.0.0.1:2/a.out"),
        ("nats://127.0.0.1:1/a.>", "nats://127.0.0.1:1/a.out"),
        ("nats://127.0.0.1:1/a.*.c", "nats://127.0.0.1:2,127.0.0.1:1/a.out.c?jetstream=true"),
        ("shm:/mux", "shm:/one?mux=/mux"),
        ("shm:/one?mux=/mux", "shm:/mux?slots=8"),
    ):
        with pytest.raises(penstock.InvalidArgument, match="carry its own messages"):
            Bridge(source, sink)
    with pytest.raises(penstock.InvalidArgument, match="carry its own messages"):
        Bridge("shm:/one?mux=/mux", "shm:/mux", names={0: "/one"})
    with pytest.raises(penstock.InvalidArgument, match=r"takes what is published at nats://127\.0\.0\.1:1/a\.out"):
        Bridge("nats://127.0.0.1:1/a.>", "nats://127.0.0.1:1/a.out")


def test_a_queue_that_takes_the_sink_is_refused_too(tmp_path: Path) -> None:
    with Server(tmp_path, 0) as server:
        server.start()
        place = f"broker://127.0.0.1:{server.port}"
        with Client(port=server.port) as client:
            client.queue("q", topics="a.>")
        with pytest.raises(penstock.InvalidArgument, match="takes what is published at"):
            Bridge(f"{place}/?queue=q", f"{place}/a.out")
        with Bridge(f"{place}/?queue=q", f"{place}/b") as bridge:
            assert bridge.not_held == ["topic"]
            bridge.start()


def recorded_with_ids(directory: Path) -> str:
    with Journal(directory) as journal:
        journal.append("a", b"plain")
        for n in range(3):
            journal.append("a", b"%d" % n, message_id=f"m{n}", key=f"k{n}" if n else None)
    return f"journal:{directory}#a?start=first"


def details_of(journal: Journal, message: Any) -> tuple[str, str]:
    found = journal.details(message.position)
    return found.message_id, found.key


IDS = [("", ""), ("m0", ""), ("m1", "k1"), ("m2", "k2")]


def test_ids_and_keys_go_from_journal_to_journal(tmp_path: Path) -> None:
    with Bridge(recorded_with_ids(tmp_path / "from"), f"journal:{tmp_path}/to#b") as bridge:
        assert bridge.run(4) == 4 and bridge.not_held == []
    with Journal(tmp_path / "to", mode="read") as stored:
        found = stored.read_many(1, 10)
        assert [bytes(m) for m in found] == [b"plain", b"0", b"1", b"2"]
        assert [details_of(stored, m) for m in found] == IDS


@pytest.mark.parametrize("ttl", [False, True])
def test_ids_and_keys_go_from_a_journal_to_a_broker(tmp_path: Path, ttl: bool, caplog: pytest.LogCaptureFixture) -> None:
    with Server(tmp_path / "to", 0) as server:
        server.start()
        sink = f"broker://127.0.0.1:{server.port}/b" + "?ttl_s=1000" * ttl
        with Bridge(recorded_with_ids(tmp_path / "from"), sink) as bridge:
            assert bridge.run(4) == 4 and bridge.ledger.dropped == {}
            assert bridge.not_held == (["id", "key"] if ttl else [])
            assert caplog.text.count("cannot hold id and key of messages") == ttl
    with Journal(tmp_path / "to", mode="read") as stored:
        found = [m for m in stored.read_many(1, 100) if m.channel == "b"]
        assert [bytes(m) for m in found] == [b"plain", b"0", b"1", b"2"]
        assert [details_of(stored, m) for m in found] == ([("", "")] * 4 if ttl else IDS)


def test_ids_and_keys_that_the_sink_cannot_hold_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = recorded_with_ids(tmp_path / "from")
    with Bridge(source, "tcp://127.0.0.1:0", most=1) as bridge:
        assert bridge.run(1) == 1 and bridge.not_held == []
        assert bridge.run(3) == 3 and bridge.not_held == ["id", "key"]
        assert caplog.text.count(f"{bridge.sink} cannot hold id and key of messages: they end here") == 1


def test_shared_memory_to_shared_memory_keeps_metadata_type_and_slots() -> None:
    name = f"/keeps-{time.time_ns()}"
    with (
        shm.Publisher(name, type="image", metadata_size=8, slot_size=5000, reliable=True) as camera,
        Bridge(f"shm:{name}", f"shm:{name}-copy?reliable=true", source_options={"reliable": True}) as bridge,
        shm.Subscriber(f"{name}-copy", type="image", reliable=True) as viewer,
    ):
        assert bridge.not_held == []
        bridge.start()
        assert camera.wait_ready(1, LONG)
        for number in range(20):
            camera.publish(b"%d" % number, metadata=b"%08d" % number)
        found = [viewer.read(LONG) for _ in range(20)]
        assert [(bytes(m), m.metadata) for m in found if m] == [(b"%d" % n, b"%08d" % n) for n in range(20)]
        copy = bridge.publisher
        assert isinstance(copy, shm.Publisher) and copy.slot_size == camera.slot_size and copy.metadata_size == 8


def test_what_the_sink_cannot_hold_is_told_at_start_or_refused() -> None:
    name = f"/told-{time.time_ns()}"
    with tcp.Publisher() as first, Bridge(first.address, f"shm:{name}") as back:
        assert back.not_held == ["properties"]
    with (
        shm.Publisher(name, metadata_size=8) as camera,
        Bridge(f"shm:{name}", "tcp://127.0.0.1:0") as out,
        Bridge(f"shm:{name}", f"shm:{name}-copy?metadata_size=4") as cut,
    ):
        assert out.not_held == cut.not_held == ["metadata"]
        camera.publish(b"x", metadata=b"12345678")
        cut.run(1)
        assert cut.ledger.dropped == {"refused": 1} and cut.ledger.delivered == 0


def test_what_a_sink_of_the_map_cannot_hold_is_told_too() -> None:
    here, there = f"/here-{time.time_ns()}", f"/there-{time.time_ns()}"
    aside, alike = "tcp://127.0.0.1:0", f"shm:/alike-{time.time_ns()}"
    with (
        shm.Publisher(f"{here}/1", mux=here, vchan_id=1, metadata_size=8) as one,
        Bridge(f"shm:{here}", f"shm:{there}", names={}, vchans={1: alike, 2: aside}) as bridge,
        penstock.subscriber(alike) as viewer,
    ):
        assert bridge.not_held == ["metadata"]
        assert bridge.losses == [f"{aside} cannot hold metadata of messages: they end here"]
        one.publish(b"x", metadata=b"12345678")
        assert bridge.run(1) == 1
        assert viewer.receive(LONG).metadata == b"12345678"


@pytest.mark.parametrize("size", [0, 8])
def test_a_channel_with_less_room_for_metadata_is_told_to_refuse(size: int) -> None:
    here, there = f"/here-{time.time_ns()}", f"/there-{time.time_ns()}"
    with (
        shm.Publisher(here, metadata_size=24) as source,
        shm.Publisher(there, metadata_size=size),
        Bridge(f"shm:{here}", f"shm:{there}") as bridge,
    ):
        assert bridge.not_held == ["metadata"]
        assert bridge.losses == [
            f"shm:{there} has less room for metadata than messages bring: they are refused and counted"
        ]
        source.publish(b"x")
        bridge.run(1)
        assert bridge.ledger.dropped == {"refused": 1}


def test_virtual_channels_that_become_one_are_told() -> None:
    here = f"/here-{time.time_ns()}"
    with shm.Publisher(f"{here}/1", mux=here, vchan_id=1):
        for sink, names, lost in (
            ("bus:one", None, ["virtual channel"]),
            (f"shm:{here}-one", None, ["virtual channel"]),
            (f"shm:{here}-many", {1: f"{here}/there"}, []),
            ("tcp://127.0.0.1:0", None, []),
        ):
            with Bridge(f"shm:{here}", sink, names=names) as bridge:
                assert bridge.not_held == lost
        with Bridge(f"shm:{here}/1?mux={here}", "bus:one") as bridge:
            assert bridge.not_held == [], "it is one channel"


def test_the_type_of_a_virtual_channel_is_carried_or_told() -> None:
    mux = f"/mux-{time.time_ns()}"
    source = f"shm:{mux}/1?mux={mux}"
    with shm.Publisher(f"{mux}/2", mux=mux), Bridge(source, "bus:first") as first:  # a sibling says nothing of it
        with (
            shm.Publisher(f"{mux}/1", mux=mux, type="image") as camera,
            Bridge(source, f"shm:{mux}-copy") as copying,
            Bridge(source, f"shm:{mux}-there/1?mux={mux}-there") as virtually,
            Bridge(source, "bus:one") as plainly,
            Bridge(f"shm:{mux}", "bus:all") as all_of_them,
            shm.Subscriber(f"{mux}-copy", type="image"),
            shm.Subscriber(f"{mux}-there/1", mux=f"{mux}-there", type="image"),
        ):
            assert copying.not_held == virtually.not_held == [] and plainly.not_held == ["type"]
            assert all_of_them.not_held == ["type", "virtual channel"]
            camera.publish(b"x")
            assert first.run(1) == 1
        assert first.not_held == ["type"]


@pytest.mark.parametrize("sink", ["tcp://127.0.0.1:0", "shm:/MUX-there", "bus:types"])
def test_a_type_that_comes_later_is_told_once(sink: str, caplog: pytest.LogCaptureFixture) -> None:
    mux = f"/mux-{time.time_ns()}"
    names = {} if sink.startswith("shm:") else None
    with (
        shm.Publisher(f"{mux}/1", mux=mux) as first,
        Bridge(f"shm:{mux}", sink.replace("/MUX", mux), names=names) as bridge,
    ):
        first.publish(b"1")
        assert bridge.run(1) == 1 and "type" not in bridge.not_held
        for number in (2, 3):
            with shm.Publisher(f"{mux}/{number}", mux=mux, type=f"image{number}") as later:
                later.publish(b"%d" % number)
                assert bridge.run(1) == 1
            assert "type" in bridge.not_held and caplog.text.count("cannot hold type of messages") == 1


def test_a_type_that_an_open_channel_takes_later_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    name = f"/typed-{time.time_ns()}"
    with shm.Publisher(name) as first, Bridge(f"shm:{name}", "tcp://127.0.0.1:0") as bridge:
        first.publish(b"1")
        assert bridge.run(1) == 1 and bridge.not_held == []
        with shm.Publisher(name, type="image") as later:
            for _ in range(2):
                later.publish(b"2")
                assert bridge.run(1) == 1
    assert bridge.not_held == ["type"] and caplog.text.count("cannot hold type of messages") == 1


@pytest.mark.parametrize("source_first", [True, False])
def test_the_schema_is_declared_before_the_first_message(source_first: bool) -> None:
    source = f"shm:/typed-{time.time_ns()}"
    with contextlib.ExitStack() as stack:
        if source_first:
            camera = stack.enter_context(penstock.publisher(source, type=dict[str, int]))
        bridge = stack.enter_context(Bridge(source, "tcp://127.0.0.1:0").start())
        if not source_first:
            camera = stack.enter_context(penstock.publisher(source, type=dict[str, int]))
            deadline = time.monotonic() + LONG
            while bridge.publisher.schema is None:  # the bridge has found its source
                assert time.monotonic() < deadline
                time.sleep(0.01)
        early = stack.enter_context(penstock.subscriber(bridge.sink))
        assert bridge.publisher.wait_ready(1, LONG)
        wrong = stack.enter_context(penstock.subscriber(bridge.sink, type=str))
        with pytest.raises(penstock.RefusedError):
            wrong.receive(LONG)
        camera.publish({"x": 1})
        assert bytes(early.receive(LONG)) == b'{"x":1}' and early.schema is not None
    assert bridge.not_held == []


def test_a_schema_that_the_sink_refuses_is_in_what_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    name = f"shm:/typed-{time.time_ns()}"
    with (
        penstock.publisher(name, type=dict[str, int]) as camera,
        penstock.publisher(f"{name}-other", type=str),
        Bridge(name, f"{name}-other") as bridge,
    ):
        assert bridge.not_held == ["type"] and "cannot hold type" in bridge.losses[0]
        camera.publish({"x": 1})
        assert bridge.run(1) == 1 and bridge.not_held == ["type"]
    assert caplog.text.count("without their type") == 1


def test_a_closed_bridge_does_not_start() -> None:
    bridge = Bridge(f"shm:/closed-{time.time_ns()}", "bus:closed").start()
    bridge.close()
    with pytest.raises(penstock.ClosedError):
        bridge.start()


def test_a_sink_that_is_there_takes_the_type_or_it_is_told() -> None:
    name = f"/typed-{time.time_ns()}"
    with (
        shm.Publisher(name, type="image"),
        shm.Publisher(f"{name}-bare"),
        shm.Publisher(f"{name}-other", type="sound"),
        Bridge(f"shm:{name}", f"shm:{name}-bare") as into_bare,
        Bridge(f"shm:{name}", f"shm:{name}-other") as into_other,
        shm.Subscriber(f"{name}-bare", type="image"),
    ):
        assert into_bare.not_held == [] and into_other.not_held == ["type"]


@pytest.mark.parametrize("first", ["camera", "bridge"])
def test_a_sink_that_keeps_its_messages_on_disk_holds_no_metadata(tmp_path: Path, first: str) -> None:
    here, there = f"/here-{time.time_ns()}", f"shm:/there-{time.time_ns()}?durable={tmp_path}/kept"
    with contextlib.ExitStack() as stack:
        if first == "camera":
            camera = stack.enter_context(shm.Publisher(here, metadata_size=8))
        bridge = stack.enter_context(Bridge(f"shm:{here}", there))
        if first == "bridge":
            camera = stack.enter_context(shm.Publisher(here, metadata_size=8))
        camera.publish(b"x", metadata=b"12345678")
        assert bridge.run(1) == 1
        assert bridge.not_held == ["metadata"] and bridge.ledger.delivered == 1


def test_a_type_that_is_described_is_held_everywhere() -> None:
    name = f"/described-{time.time_ns()}"
    with (
        penstock.publisher(f"shm:{name}", type=dict) as camera,
        Bridge(f"shm:{name}", "tcp://127.0.0.1:0") as out,
        penstock.subscriber(out.sink, type=dict) as viewer,
    ):
        assert out.not_held == []
        out.start()
        assert out.publisher.wait_ready(1, LONG)
        camera.publish({"x": 1})
        assert viewer.receive(LONG).value == {"x": 1}


def test_into_a_journal_batches_are_committed_whole(tmp_path: Path) -> None:
    """One commit a batch: as many seals as batches were read, and times and properties are the source's."""
    sent = [penstock.Message(b"%d" % n, timestamp_ns=1_000_000 + n, properties={"n": str(n)}) for n in range(2000)]
    with penstock.publisher(f"journal:{tmp_path}/a#t") as source:
        source.forward(sent)
    with Bridge(f"journal:{tmp_path}/a#t?start=1", f"journal:{tmp_path}/b#t") as bridge:
        commits = 0
        journal = bridge.publisher._journal  # type: ignore[attr-defined]
        commit = journal.commit

        def counted(entries: Any) -> Any:
            nonlocal commits
            commits += 1
            return commit(entries)

        journal.commit = counted
        assert bridge.run(2000) == 2000
        assert commits <= 4
    with penstock.subscriber(f"journal:{tmp_path}/b#t?start=1") as reader:
        batch = reader.read_many(2000, LONG)
        assert [(bytes(m), m.timestamp_ns, dict(m.properties)) for m in batch] == [
            (bytes(m), m.timestamp_ns, dict(m.properties)) for m in sent
        ]


def test_one_message_that_a_journal_refuses_costs_itself(tmp_path: Path) -> None:
    with (
        tcp.Publisher() as first,
        Bridge(first.address, f"journal:{tmp_path}/b#t?max_message_bytes=100") as bridge,
    ):
        assert first.wait_ready(1, LONG)
        first.publish_many([b"a", bytes(1000), b"b", b"c"])
        assert bridge.run(4) == 4
        assert bridge.ledger == penstock.Ledger(4, 3, {"refused": 1})
    with penstock.subscriber(f"journal:{tmp_path}/b#t?start=1") as reader:
        assert [bytes(m) for m in reader.read_many(10, LONG)] == [b"a", b"b", b"c"]


def test_a_bridge_that_starts_before_its_camera(caplog: pytest.LogCaptureFixture) -> None:
    """What the source's messages have is known when its first publisher comes: the sink is made then."""
    with (
        Bridge("shm:/late", "shm:/late-there").start() as bridge,
        penstock.subscriber("shm:/late-there") as viewer,
        Bridge("shm:/late", "tcp://127.0.0.1:0").start() as out,
        shm.Publisher("/late", type="image", metadata_size=8, slot_size=1 << 16) as camera,
    ):
        assert camera.wait_ready(2, LONG)
        for i in range(3):
            camera.publish(b"frame", metadata=b"%08d" % i)
        found = [viewer.receive(LONG) for _ in range(3)]
        assert [message.metadata for message in found] == [b"%08d" % i for i in range(3)]
        assert viewer.type == "image" and bridge.not_held == []  # type: ignore[attr-defined]
        assert isinstance(bridge.publisher, shm.Publisher) and bridge.publisher.slot_size == 1 << 16
        deadline = time.monotonic() + LONG
        while not out.ledger.delivered and time.monotonic() < deadline:
            time.sleep(0.001)
        assert out.not_held == ["metadata", "type"]
    assert "cannot hold metadata and type" in caplog.text


def test_the_ledger_outlives_the_bridge() -> None:
    with shm.Publisher("/over", reliable=True) as camera:
        with Bridge("shm:/over?reliable=true", "bus:over").start() as bridge:
            assert camera.wait_ready(1, LONG)
            camera.publish(b"1")
            deadline = time.monotonic() + LONG
            while not bridge.ledger.delivered and time.monotonic() < deadline:
                time.sleep(0.001)
        assert bridge.ledger == penstock.Ledger(1, 1)
        bridge.close()


def test_a_ring_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with Bridge("shm:/ring1", "shm:/ring2"), Bridge("shm:/ring2", "bus:ring3"):
        assert "ring" not in caplog.text.replace("ring1", "").replace("ring2", "").replace("ring3", "")
        with Bridge("bus:ring3", "shm:/ring1"):
            assert "forms a loop with shm:/ring1 > shm:/ring2" in caplog.text and "shm:/ring2 > bus:ring3" in caplog.text


def test_a_source_whose_broker_is_gone_is_tried_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Longer than the subscriber's time-out: told, and what comes after it is carried."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    sink = f"journal:{tmp_path / 'sink'}#t"
    with Server(tmp_path / "broker", port).start():
        bridge: Any = Bridge(f"broker://127.0.0.1:{port}/t?queue=q", sink).start()
        bridge.subscriber._link._give_up_s = 0.1
    with bridge:
        end = time.monotonic() + 60.0
        while "trying again" not in caplog.text:
            assert time.monotonic() < end
            time.sleep(0.01)
        bridge.subscriber._link._give_up_s = 60.0
        with Server(tmp_path / "broker", port).start(), penstock.publisher(f"broker://127.0.0.1:{port}/t") as publisher:
            publisher.publish(b"x")
            with penstock.subscriber(f"{sink}?start=first") as subscriber:
                assert bytes(subscriber.receive(60.0)) == b"x"
