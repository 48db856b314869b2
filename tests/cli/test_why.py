"""``penstock why``: each kind of silence has its sentence."""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.bridge import Bridge
from penstock.broker import Client, Server
from penstock.gateway import Gateway, Module
from penstock.journal import Journal
from penstock.observe.memory import seen
from tests.monitor.handles import Handles

from .command import run, start


@pytest.fixture
def name() -> str:
    return f"/test-why-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def handles() -> Iterator[Handles]:
    with Handles() as running:
        yield running


def reasons(*arguments: str) -> tuple[int, str]:
    done = run("why", *arguments, "--json")
    findings = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == (4 if any(f["grave"] for f in findings) else 0), done.stderr
    return done.returncode, "\n".join(f["text"] for f in findings)


def test_nobody_publishes(name: str) -> None:
    code, text = reasons(f"shm:{name}")
    assert code == 4 and "nobody publishes" in text


@pytest.mark.parametrize("scheme", ["shm:", "bus:"])
def test_who_reads_a_durable_channel_from_disk(scheme: str, name: str, tmp_path: Path) -> None:
    where = f"{scheme}{name}" if scheme == "shm:" else f"{scheme}{name}?id=3"
    kept = tmp_path.resolve() / "kept & more"
    with penstock.publisher(where, durable=kept) as publisher:
        publisher.publish_many([b"x"] * 10)
        publisher.flush()
        assert "messages wait" not in reasons(where)[1]
        with penstock.subscriber(where, start="first") as first, penstock.subscriber(where, start="new"):
            first.receive(60).release()
            code, text = reasons(where)
            assert code == 4 and "nobody reads it" not in text, text
            assert re.search(rf"9 messages wait for the subscriber in process {os.getpid()} .* which took none", text)
            if scheme == "shm:":
                assert f"2 subscribers read it from disk (journal:{kept})" in text
            rows = [json.loads(line) for line in run("ls", where, "--json").stdout.splitlines()]
            readers = [row for row in rows if row["room"] == "journal"]
            assert sorted(row["lag"] for row in readers) == [0, 9]
            assert re.search(r"subscriber\b.*\b9\b", run("ls", where).stdout)
            if scheme == "shm:":  # a listed address can be read
                assert len(run("sub", readers[0]["address"], "-n", "10", "-f", "raw").stdout) == 10
            told = json.loads(run("info", where, "--json").stdout)
            assert sum(row["room"] == "journal" for row in told["handles"]) == 2
        assert "messages wait" not in reasons(where)[1]
        if scheme == "shm:":
            assert "nobody reads it" in reasons(where)[1]
            facts = json.loads(run("info", where, "--json").stdout)["facts"]
            assert facts["on disk"] == f"journal:{kept}"


def test_a_publisher_that_is_silent(handles: Handles, name: str) -> None:
    handles.do(f"open shm publisher {name}")
    code, text = reasons(f"shm:{name}")
    assert code == 4 and "has published nothing" in text and str(handles.pid) in text


def test_a_publisher_that_fell_silent(handles: Handles, name: str) -> None:
    handles.do(
        f"open shm publisher {name}", f"add {name}/publisher matched 9", f"set {name}/publisher last_ns 1000000000"
    )
    assert "the last one" in reasons(f"shm:{name}")[1]


def test_all_is_well(handles: Handles, name: str) -> None:
    handles.do(
        f"open shm publisher {name}", f"add {name}/publisher matched 9", f"set {name}/publisher last_ns now",
        f"open shm subscriber {name}", f"add {name}/subscriber matched 9", f"add {name}/subscriber delivered 9",
        f"set {name}/subscriber last_ns now",
    )  # fmt: skip
    code, text = reasons(f"shm:{name}")
    assert code == 0 and "publishes" in text


def test_a_reader_that_holds_everything(handles: Handles, name: str) -> None:
    handles.do(
        f"open shm publisher {name}", f"add {name}/publisher matched 9", f"set {name}/publisher last_ns now",
        f"open shm subscriber {name}", f"set {name}/subscriber depth 4", f"set {name}/subscriber capacity 4",
        f"set {name}/subscriber last_ns 1000000000",
    )  # fmt: skip
    assert "places" not in reasons(f"shm:{name}")[1], "nothing waits for it"
    handles.do(f"set {name}/subscriber lag 1")
    code, text = reasons(f"shm:{name}")
    assert code == 4 and "holds all its 4 places" in text and str(handles.pid) in text


@pytest.mark.parametrize("state", ["", "stuck: its bus waits for it"])
def test_a_full_queue_of_a_bus_is_told_of_once(handles: Handles, name: str, state: str) -> None:
    place = name.strip("/")
    handles.do(
        f"open bus publisher {place}", f"add {place}/publisher matched 9", f"set {place}/publisher last_ns now",
        f"open bus queue {place}", f"set {place}/queue depth 4", f"set {place}/queue capacity 4",
        f"add {place}/queue matched 9", f"set {place}/queue last_ns 1000000000",
    )  # fmt: skip
    if state:
        handles.do(f"state {place}/queue {state}")
    code, text = reasons(f"bus:{place}")
    mine = [line for line in text.splitlines() if place in line or str(handles.pid) in line]
    about = [line for line in mine if "queue" in line or "subscriber" in line]
    assert code == 4 and len(about) == 1, text
    assert str(handles.pid) in about[0]


def test_a_reader_that_moves_slowly_is_not_stuck(handles: Handles, name: str) -> None:
    handles.do(
        f"open shm publisher {name}", f"add {name}/publisher matched 9", f"set {name}/publisher last_ns now",
        f"open shm subscriber {name}", f"set {name}/subscriber lag 7", f"add {name}/subscriber matched 9",
        f"set {name}/subscriber last_ns 1000000000",
    )  # fmt: skip
    code, text = reasons(f"shm:{name}")
    assert code == 4 and "7 messages wait for the subscriber" in text and "took none for " in text
    looking = start("why", f"shm:{name}", "--json")
    while looking.poll() is None:  # a handle notes the time of some messages only
        handles.do(f"add {name}/subscriber delivered 1", f"set {name}/publisher last_ns now")
        time.sleep(0.05)
    out, err = looking.communicate(timeout=60)
    assert looking.returncode == 0 and "reads, and 7 messages wait for it" in out, out + err


def test_when_a_slow_reader_took_its_last_message_is_known(name: str) -> None:
    """It is behind all the time, so that it never waits; each of its reads notes the time."""
    with penstock.publisher(f"shm:{name}", slots=16) as publisher, penstock.subscriber(f"shm:{name}") as subscriber:
        publisher.publish_many([b"x"] * 8)

        def last_ns() -> int:
            return next(block.last_ns for block in seen() if block.kind == "subscriber" and block.name == name)

        for _ in range(3):
            subscriber.receive(5).release()
            noted = last_ns()
            assert time.time_ns() - noted < 30e9
            until = time.monotonic() + 60
            while time.time_ns() < noted + 20_000_000 and time.monotonic() < until:  # the clock's tick is 4 ms
                time.sleep(0.005)
            assert last_ns() == noted
        before = last_ns()
        assert len(subscriber.read_many(2, 5)) == 2
        assert last_ns() > before and "<" not in run("ls", f"shm:{name}").stdout


def test_how_long_a_reader_took_nothing_is_told(handles: Handles, name: str) -> None:
    handles.do(
        f"open shm subscriber {name}", f"set {name}/subscriber lag 7", f"add {name}/subscriber delivered 1",
        f"set {name}/subscriber last_ns {time.time_ns() - 100_000_000_000}",
    )  # fmt: skip
    told = re.search(r"which took none for (\d+) s", reasons(f"shm:{name}")[1])
    assert told is not None and 100 <= int(told[1]) < 200


def test_a_queue_without_a_consumer(handles: Handles, name: str) -> None:
    handles.do("open broker queue 127.0.0.1:1/t?queue=q", "set 127.0.0.1:1/t?queue=q/queue depth 12")
    assert "no consumer" in reasons("broker://127.0.0.1:1/t")[1]


def test_a_stopped_process(handles: Handles, name: str) -> None:
    handles.do(f"open shm publisher {name}")
    os.kill(handles.pid, signal.SIGSTOP)
    try:
        assert f"process {handles.pid} is stopped" in reasons(f"shm:{name}")[1]
    finally:
        os.kill(handles.pid, signal.SIGCONT)


def test_an_address_that_answers_was_meant(handles: Handles) -> None:
    """Whose handles cannot be seen from here, as in a container."""
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        port = elsewhere.getsockname()[1]
        handles.do(f"open tcp publisher 127.0.0.1:{port - 1}")
        text = reasons(f"tcp://127.0.0.1:{port}")[1]
        assert "somebody listens" in text and "was that meant" not in text


def test_a_misspelt_address(handles: Handles, name: str) -> None:
    handles.do(f"open shm publisher {name}-front")
    assert f"shm:{name}-front is open: was that meant?" in reasons(f"shm:{name}-fornt")[1]


@pytest.mark.parametrize("ending", ["", "/"])
def test_a_channel_below_is_another_one(handles: Handles, name: str, ending: str) -> None:
    below = f"{name}/front" if not ending else name
    handles.do(
        f"open shm publisher {below}", f"add {below}/publisher matched 9", f"set {below}/publisher last_ns now",
        f"open shm subscriber {name}{ending}",
    )  # fmt: skip
    code, text = reasons(f"shm:{name}{ending}")
    assert code == 4 and f"nobody publishes shm:{name}{ending}" in text
    assert f"shm:{below} is open: was that meant?" in text


def test_a_multiplexer_gets_what_its_virtual_channels_publish(name: str) -> None:
    with (
        penstock.publisher(f"shm:{name}-one", mux=f"{name}-all") as one,
        penstock.subscriber(f"shm:{name}-all") as reader,
    ):
        one.publish(b"x")
        assert bytes(reader.receive(timeout=30)) == b"x"
        text = reasons(f"shm:{name}-all")[1]  # on a slow machine the publisher is quiet for long by then
        assert "the publisher in process" in text and "nobody" not in text


def test_what_keeps_a_bridge_from_getting_messages(name: str) -> None:
    with Bridge(f"shm:{name}-a", f"shm:{name}-b").start(), Bridge(f"shm:{name}-b", f"shm:{name}-a").start():
        code, text = reasons(f"shm:{name}-b")  # a ring of bridges: this ends
        assert code == 4
    with Bridge(f"shm:{name}-c", f"shm:{name}-d").start():
        code, text = reasons(f"shm:{name}-d")
        assert code == 4 and f"the bridge from shm:{name}-c in process {os.getpid()} gets nothing: nobody" in text
        with penstock.publisher(f"shm:{name}-c") as source, penstock.subscriber(f"shm:{name}-d") as sink:
            source.publish(b"x")
            sink.receive(timeout=30)
            text = reasons(f"shm:{name}-d")[1]
            assert f"the bridge from shm:{name}-c" in text and "nobody" not in text


def test_a_full_channel_whose_reader_holds_a_message(name: str) -> None:
    with (
        penstock.publisher(f"shm:{name}", slots=8, reliable=True, timeout=0) as publisher,
        penstock.subscriber(f"shm:{name}", reliable=True) as reader,
    ):
        publisher.publish(b"held")
        held = reader.receive(timeout=30)
        with pytest.raises(TimeoutError):
            publisher.publish_many([b"x"] * 20)
        assert "the channel is full" in reasons(f"shm:{name}")[1]
        held.release()


def test_a_reliable_publisher_without_a_subscriber_waits(name: str) -> None:
    with penstock.publisher(f"shm:{name}", reliable=True):
        assert "until somebody subscribes" in reasons(f"shm:{name}")[1]


def test_a_file_that_is_no_channel_is_to_be_removed_by_hand(name: str) -> None:
    directory = Path(os.environ["PENSTOCK_SHM_DIR"])
    file = directory / f"{name.replace('/', '%2F')}.channel"
    file.write_bytes(bytes(20000))
    done = run("why", f"shm:{name}")
    file.unlink()
    assert done.returncode == 4 and "remove its files" in done.stdout and str(directory) in done.stdout
    assert "shm clean" not in done.stdout  # which leaves alone what it does not know


def test_nobody_listens() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert "nobody listens" in reasons(f"tcp://127.0.0.1:{port}")[1]


def test_a_bus_is_one_process(handles: Handles, name: str) -> None:
    code, text = reasons("bus:plant")
    assert code == 4 and "one process" in text
    place = name.strip("/")
    handles.do(
        f"open bus publisher {place}", f"add {place}/publisher matched 9", f"set {place}/publisher last_ns now",
        f"open bus queue {place}", f"add {place}/queue matched 9", f"add {place}/queue delivered 9",
        f"set {place}/queue last_ns now",
    )  # fmt: skip
    code, text = reasons(f"bus:{place}")
    assert code == 0 and "one process" in text, "where it is read, that is no reason"


def test_a_module_of_a_gateway_by_the_name_that_ls_prints() -> None:
    class Sink(Module):
        def receive(self, message: Any) -> None:
            pass

    name = f"gateway:why-{os.getpid()}"
    with Gateway() as gateway:
        gateway.add_module(name.partition(":")[2], Sink)
        gateway.start()
        assert name in run("ls").stdout
        assert f"{name} is no address, but a module inside process {os.getpid()}" in reasons(name)[1]
        told = run("info", name)
        assert told.returncode == 0 and name in told.stdout and "module in process" in told.stdout
        assert "peers          -" in told.stdout
    assert run("why", name).returncode != 0 and run("info", name).returncode != 0


def test_info_tells_no_time_that_a_bus_does_not_record(name: str) -> None:
    with penstock.publisher(f"bus:{name}") as publisher:
        assert "last message   none" in run("info", f"bus:{name}").stdout
        publisher.publish(b"1")
        assert "last message   not recorded" in run("info", f"bus:{name}").stdout


def test_journals(tmp_path: Path) -> None:
    assert "no journal yet" in reasons(f"journal:{tmp_path}/none#a")[1]
    with Journal(tmp_path / "j") as journal:
        journal.append("sensors.hall", b'{"celsius": 20}')
    assert "no topic 'sensors.hal'" in reasons(f"journal:{tmp_path}/j#sensors.hal")[1]


def test_a_journal_that_has_the_topic_was_meant(tmp_path: Path) -> None:
    """Though nobody writes it now, and others are open."""
    with Journal(tmp_path / "j1") as journal:
        journal.append("t", b"1")
    with Journal(tmp_path / "j2"):
        assert "was that meant" not in reasons(f"journal:{tmp_path}/j1#t")[1]
        assert f"journal:{tmp_path}/j2 is open: was that meant?" in reasons(f"journal:{tmp_path}/j3#t")[1]


def test_every_topic_of_a_journal_is_named_the_nearest_first(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        for name in ("hall", "x1", "x2", "x3", "x4", "x5"):
            journal.append(name, b"1")
    assert "it has hall, x1, x2, x3, x4, x5" in run("why", f"journal:{tmp_path}/j#hal").stdout


def test_a_filter_that_matches_nothing(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.append("t", b'{"celsius": 20}')
    address = f"journal:{tmp_path}/j#t?start=first"
    text = reasons(address, "--filter", ".fahrenheit > 1", "--seconds", "1")[1]
    assert "matches none of 1 message;" in text and "celsius" in text
    assert "lets 1 of 1 message pass" in reasons(address, "--filter", ".celsius > 1", "--seconds", "1")[1]


def test_another_type(name: str) -> None:
    with penstock.publisher(f"shm:{name}", type="frame/rgb8") as publisher:
        publisher.publish(b"x")
        code, text = reasons(f"shm:{name}?type=frame/mono8")
        assert code == 4 and f"type mismatch: {name} carries 'frame/rgb8', not 'frame/mono8'" in text
        assert "type mismatch" not in reasons(f"shm:{name}", "-O", "type=frame/rgb8")[1]
        assert "of type 'frame/rgb8'" in reasons(f"shm:{name}")[1]


def test_slots_held_by_a_process_and_since_when(name: str) -> None:
    with (
        penstock.publisher(f"shm:{name}", slots=4, slot_size=64, overflow="drop_oldest") as publisher,
        penstock.subscriber(f"shm:{name}", max_active_messages=2) as subscriber,
    ):
        held = []
        for number in range(10):
            publisher.publish(b"%d" % number)
            if (message := subscriber.read(0) if len(held) < 2 else None) is not None:
                held.append(message)
        code, text = reasons(f"shm:{name}")
        first = datetime.datetime.fromtimestamp(held[0].timestamp_ns // 10**9, datetime.UTC)
        assert code == 4 and f"2 of 4 slots held by pid {os.getpid()}" in text, text
        assert f"the oldest message was published at {first:%Y-%m-%dT%H:%M:%S}" in text
        held.clear()
        del message
        assert "slots held" not in reasons(f"shm:{name}")[1]


def test_a_queue_without_credit_then_paused(tmp_path: Path) -> None:
    with Server(str(tmp_path / "b"), 0).start() as server, Client(port=server.port) as client:
        address = f"broker://127.0.0.1:{server.port}/t?queue=work"
        client.queue("work", topics="t")
        client.publish_many("t", [b"x"] * 10)
        assert "the queue work has 10 messages and no consumer" in reasons(address)[1]
        with client.subscribe("work", ack="manual", credit=4) as consumer:
            assert consumer.read(30) is not None
            code, text = reasons(address)
            assert code == 4
            assert "the queue work says: no credit: 1 consumer(s) hold 4 unacknowledged, 6 wait" in text
            client.pause("work")
            assert "the queue work is paused, 10 messages wait" in reasons(address)[1]
        client.queue("other", topics="else")
        assert "bound to else, which 't' does not match" in reasons(address.replace("work", "other"))[1]
        assert "no queue 'wrok'" in reasons(address.replace("work", "wrok"))[1]


def test_a_subscriber_whose_filter_matches_nothing(handles: Handles, name: str) -> None:
    handles.do(
        f"open shm publisher {name}", f"add {name}/publisher matched 9", f"set {name}/publisher last_ns now",
        f"open shm subscriber {name}", f"add {name}/subscriber matched 9", f"drop {name}/subscriber filtered 9",
    )  # fmt: skip
    code, text = reasons(f"shm:{name}")
    assert code == 4 and "matched none of 9 messages" in text


def test_a_broker_that_refuses_the_connection(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text('[[token]]\nname = "n"\ntoken = "secret"\npublish = [">"]\nsubscribe = [">"]\nqueues = ["*"]\n')
    tokens.chmod(0o600)
    with Server(tmp_path / "d", 0, tokens=tokens).start() as server:
        code, text = reasons(f"broker://127.0.0.1:{server.port}/t")
        assert code == 4 and "refused the connection" in text
        code, text = reasons(f"broker://127.0.0.1:{server.port}/t?token=secret")
        assert code == 0 and "does not tell about its queues" in text
