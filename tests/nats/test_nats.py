"""NATS as a neighbour: core and JetStream, in and out, headers as properties, from and to every other reach."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import datetime
import itertools
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

import penstock
from penstock.bridge import Bridge
from penstock.cli.start import start_options
from penstock.errors import CapacityError, ClosedError, InvalidArgument, RefusedError, StateError
from penstock.nats import subscribing
from penstock.nats.connection import check_subject, headers_of, properties_of
from penstock.nats.subscribing import _nanoseconds
from penstock.observe.explain import explain
from tests.tcp.test_security import Authority

pytest.importorskip("nats", reason="nats-py is not installed")
LONG = 60.0


class Server:
    """A nats-server on loopback, with JetStream if there is a directory for it."""

    def __init__(self, directory: Path | None, *options: str) -> None:
        from penstock.replica.cluster import server_program

        with contextlib.closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._command = [server_program(), "-a", "127.0.0.1", "-p", str(self.port), *options]
        if directory is not None:
            self._command += ["-js", "-sd", str(directory)]
        self.start()

    def start(self) -> None:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(self._command, **quiet)  # type: ignore[call-overload]
        end = time.monotonic() + LONG
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert time.monotonic() < end and self.process.poll() is None
                time.sleep(0.01)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def address(self, subject: str, options: str = "") -> str:
        return f"nats://127.0.0.1:{self.port}/{subject}{options}"

    def make_stream(self, name: str, subjects: list[str], reader_that_waits_s: float = 0.0, **reader: Any) -> None:
        import asyncio

        import nats

        async def make() -> None:
            client = await nats.connect(f"nats://127.0.0.1:{self.port}")
            await client.jetstream().add_stream(name=name, subjects=subjects)
            if reader_that_waits_s:
                reader["ack_wait"] = reader_that_waits_s
            if reader:
                await client.jetstream().add_consumer(name, durable_name="reader", **reader)
            await client.close()

        asyncio.run(make())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(tmp_path_factory.mktemp("nats"))
    yield started
    started.end()


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def read(subscriber: Any, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        batch = subscriber.read_many(1024, LONG)
        assert len(batch), f"{len(found)} of {count}"
        found += batch
    return found


def test_core_both_ways_with_headers_and_times(server: Server) -> None:
    with (
        penstock.subscriber(server.address("core.>")) as subscriber,
        penstock.publisher(server.address("core.a")) as publisher,
    ):
        publisher.publish(b"one", properties={"unit": "mm", "empty": ""}, timestamp_ns=7)  # type: ignore[call-arg]
        publisher.publish_many(b"%d" % number for number in range(1000))
        with publisher.reserve(4) as draft:
            draft[:] = b"last"
        first, *rest, last = read(subscriber, 1002)
        assert (bytes(first), first.timestamp_ns, first.channel) == (b"one", 7, "core.a")
        assert dict(first.properties) == {"unit": "mm", "empty": ""}
        assert [bytes(message) for message in rest] == [b"%d" % number for number in range(1000)]
        assert bytes(last) == b"last"
        assert [message.ordinal for message in (first, *rest, last)] == list(range(1, 1003))
        assert subscriber.read(0) is None
        assert publisher.ledger.balanced and publisher.ledger.delivered == 1002
        assert subscriber.ledger.balanced and subscriber.ledger.delivered == 1002
    assert subscriber.ledger.balanced
    for method in (lambda: subscriber.read(0), lambda: publisher.publish(b"late")):
        with pytest.raises(ClosedError):
            method()


@pytest.mark.parametrize("kind", [object, [("size", "i4"), ("value", "O")]])
def test_addresses_of_objects_are_not_published(server: Server, kind: Any) -> None:
    with penstock.publisher(server.address("objects")) as publisher:
        for publish in (publisher.publish, lambda data: publisher.publish_many([data])):
            with pytest.raises(TypeError, match="ndarray of Python objects"):
                publish(numpy.zeros(2, kind))
            with pytest.raises(TypeError, match=r"py_object_Array_1 of Python objects"):
                publish((ctypes.py_object * 1)())


def test_a_queue_group_shares(server: Server) -> None:
    with (
        penstock.subscriber(server.address("shared", "?queue=g")) as one,
        penstock.subscriber(server.address("shared", "?queue=g")) as two,
        penstock.publisher(server.address("shared")) as publisher,
    ):
        publisher.publish_many(b"%d" % number for number in range(100))
        found: list[bytes] = []
        end = time.monotonic() + LONG
        while len(found) < 100 and time.monotonic() < end:
            found += [bytes(message) for each in (one, two) for message in each.read_many(100, 0.05)]
        assert sorted(found, key=int) == [b"%d" % number for number in range(100)]


def test_a_stream_gives_again_what_was_not_acknowledged(server: Server) -> None:
    server.make_stream("kept", ["kept.*"])
    with penstock.publisher(server.address("kept.a", "?jetstream=true")) as publisher:
        publisher.publish_many(b"%d" % number for number in range(10))
    where = server.address("kept.*", "?stream=kept&durable=reader")
    with penstock.subscriber(where) as subscriber:
        messages = [subscriber.receive(LONG) for _ in range(5)]
        assert [message.position for message in messages] == [1, 2, 3, 4, 5]
    with penstock.subscriber(where) as subscriber:
        assert bytes(subscriber.receive(LONG)) == b"5", "0 to 4 were acknowledged when the block was left"
        with pytest.raises(ZeroDivisionError), subscriber:
            raise ZeroDivisionError
    assert subscriber.closed
    with penstock.subscriber(server.address("kept.*", "?stream=kept")) as everything:
        assert [bytes(message) for message in read(everything, 10)] == [b"%d" % number for number in range(10)]


def _ask_server(server: Server, ask: Callable[[Any], Any]) -> Any:
    """What a coroutine gives that is called with JetStream."""

    async def asked() -> Any:
        import nats

        client = await nats.connect(f"nats://127.0.0.1:{server.port}")
        try:
            return await ask(client.jetstream())
        finally:
            await client.close()

    return asyncio.run(asked())


@pytest.mark.parametrize("options", ["", "&durable=reader", "&new=true"])
def test_a_consumer_that_the_server_removed_is_made_anew_where_it_was(
    server: Server, options: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As it removes one without a durable name whose reader was stopped for some seconds."""
    stream = f"gone-{len(options)}"
    server.make_stream(stream, [f"{stream}.*"])

    async def delete(jetstream: Any) -> None:
        for one in await jetstream.consumers_info(stream):
            await jetstream.delete_consumer(stream, one.name)

    with penstock.publisher(server.address(f"{stream}.a", "?jetstream=true")) as publisher:
        publisher.publish(b"before")
        with penstock.subscriber(server.address(f"{stream}.*", f"?stream={stream}{options}")) as subscriber:
            if "new" not in options:
                assert bytes(subscriber.receive(LONG)) == b"before"
            for number in range(2):
                assert subscriber.read(0) is None  # acknowledges
                _ask_server(server, delete)
                publisher.publish(b"%d" % number)
                assert bytes(subscriber.receive(LONG)) == b"%d" % number
    assert caplog.text.count(f"of stream {stream}; reading goes on at message") == 2


def test_a_consumer_that_gives_less_than_is_asked_for_is_told_and_not_asked_without_a_pause(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there, so it is not made anew."""
    server.make_stream("small", ["small.*"])
    config = {"durable_name": "one", "ack_policy": "explicit", "filter_subject": "small.*", "max_batch": 1}
    body = json.dumps({"stream_name": "small", "config": config}).encode()
    subject = "$JS.API.CONSUMER.DURABLE.CREATE.small.one"
    answer = _ask_server(server, lambda jetstream: jetstream._nc.request(subject, body, timeout=LONG))
    assert json.loads(answer.data)["config"]["max_batch"] == 1
    looks: list[float] = []
    restore = subscribing.Subscriber._restore_consumer

    async def counted(self: subscribing.Subscriber) -> bool:
        looks.append(time.monotonic())
        return await restore(self)

    monkeypatch.setattr(subscribing.Subscriber, "_restore_consumer", counted)
    with penstock.subscriber(server.address("small.*", "?stream=small&durable=one")):
        wait_until(lambda: len(looks) >= 4)
    assert min(later - before for before, later in itertools.pairwise(looks)) >= subscribing.RETRY_S
    assert "the consumer of small: " in caplog.text and "reading goes on" not in caplog.text


def test_a_stream_without_a_leader_is_waited_for(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of a cluster was killed: for seconds nobody answers for the stream, although it is there."""
    from nats.js.errors import NoStreamResponseError

    server.make_stream("led", ["led.*"])
    with penstock.publisher(server.address("led.a", "?jetstream=true")) as publisher:
        publish, asked = publisher._jetstream.publish, []  # type: ignore[attr-defined]

        async def without_leader(subject: str, data: bytes, **options: Any) -> Any:
            asked.append(data)
            if len(asked) <= 4 and data != b"2":
                raise NoStreamResponseError
            return await publish(subject, data, **options)

        monkeypatch.setattr(publisher._jetstream, "publish", without_leader)  # type: ignore[attr-defined]
        assert publisher.publish_many([b"1", b"2", b"3"]) == 3
        assert asked == [b"1", b"2", b"3", b"1", b"3", b"1"], "only what was not stored goes again"
        monkeypatch.setattr(publisher._jetstream, "publish", _nobody)  # type: ignore[attr-defined]
        with pytest.raises(TimeoutError, match=r"no leader|did not answer"):
            publisher.publish(b"x", timeout=0.5)
    with penstock.subscriber(server.address("led.*", "?stream=led")) as subscriber:
        assert sorted(map(bytes, read(subscriber, 3))) == [b"1", b"2", b"3"]


async def _nobody(*_: Any, **__: Any) -> Any:
    from nats.js.errors import NoStreamResponseError

    raise NoStreamResponseError


def test_a_stream_that_is_made_anew_is_read_from_its_beginning(server: Server) -> None:
    server.make_stream("anew", ["anew.*"])
    with penstock.publisher(server.address("anew.a", "?jetstream=true")) as publisher:
        publisher.publish_many([b"1", b"2", b"3"])
        with penstock.subscriber(server.address("anew.*", "?stream=anew")) as subscriber:
            assert len(read(subscriber, 3)) == 3
            _ask_server(server, lambda jetstream: jetstream.delete_stream("anew"))
            server.make_stream("anew", ["anew.*"])
            publisher.publish(b"other")
            assert bytes(subscriber.receive(LONG)) == b"other"


def test_where_a_reader_of_a_stream_begins(server: Server) -> None:
    server.make_stream("begun", ["begun.*"])
    where = server.address("begun.*", "?stream=begun")
    with (
        penstock.publisher(server.address("begun.a", "?jetstream=true")) as publisher,
        contextlib.ExitStack() as stack,
    ):

        def reader(**options: str) -> penstock.Subscriber:
            words = {"since": None, "first": None, **options}
            return stack.enter_context(penstock.subscriber(where, **start_options(where, words["since"], words["first"])))

        publisher.publish(b"0")
        first = reader(first="start")
        stored = first.receive(LONG)
        assert bytes(stored) == b"0"
        wait_until(lambda: time.time_ns() // 1000 > stored.timestamp_ns // 1000)  # a time after it, the server's clock
        moment = datetime.datetime.fromtimestamp(time.time_ns() // 1000 / 1e6, datetime.UTC)
        end = reader(first="end")
        publisher.publish(b"1")
        assert [bytes(reader(since=f"{moment:%Y-%m-%dT%H:%M:%S.%f}+00:00").receive(LONG)) for _ in range(2)] == [b"1"] * 2
        assert [bytes(each.receive(LONG)) for each in (first, end)] == [b"1", b"1"]
        assert [bytes(message) for message in read(reader(), 2)] == [b"0", b"1"]
        assert bytes(reader(since="1600-01-01").receive(LONG)) == b"0"
        for wrong in (float("nan"), True, "1"):
            with pytest.raises((TypeError, InvalidArgument), match="from_time_ns"):
                penstock.subscriber(where, from_time_ns=wrong)


@pytest.mark.parametrize(
    ("options", "words", "told"),
    [
        ("", {"first": "start"}, "core NATS keeps no old messages"),
        ("", {"since": "5m"}, "stream=NAME reads what a stream has stored"),
        ("?stream=s", {"first": "5"}, "does not count by subject"),
        ("?stream=s", {"last": 5}, "does not count by subject"),
        ("?stream=s&durable=d", {"first": "start"}, "goes on where it was"),
    ],
)
def test_a_beginning_that_a_server_cannot_give_is_refused(options: str, words: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        start_options(f"nats://127.0.0.1/s{options}", **{"since": None, "first": None, **words})


def test_beginnings_that_do_not_go_together_are_refused() -> None:
    for options in ("new=true", "from_time_ns=1", "stream=s&durable=d&new=true", "stream=s&new=true&from_time_ns=1"):
        with pytest.raises(InvalidArgument, match=r"new=|from_time_ns="):
            penstock.subscriber(f"nats://127.0.0.1:1/s?{options}")


def test_a_host_without_a_port_has_that_of_nats() -> None:
    for hosts, places in {
        "h": [("h", 4222)],
        "[::1]": [("::1", 4222)],
        "u:p@h": [("h", 4222)],
        "a,b:5000,[::1]": [("a", 4222), ("b", 5000), ("::1", 4222)],
    }.items():
        parts = penstock.address.parse(f"nats://{hosts}/s")
        assert penstock.address.places_of(parts.host, parts.port or 0) == places
    for wrong in ("nats:///s", "nats://h:x/s", "nats://h:/s", "nats://h:0/s", "nats://a:0,b/s", "broker://h/s", "tcp://h"):
        with pytest.raises(InvalidArgument, match="is not of the form"):
            penstock.address.parse(wrong)


def test_what_came_out_of_order_is_given_back_in_order(server: Server) -> None:
    """So that what one reader that left early has mixed up does not stay so."""
    server.make_stream("TURNS", ["turns.>"])
    with penstock.publisher(server.address("turns.a", "?jetstream=true")) as publisher:
        publisher.publish_many([b"%d" % number for number in range(20)])
    where = server.address("turns.a", "?stream=TURNS&durable=d")
    with penstock.subscriber(where) as subscriber:
        held: Any = subscriber
        end = time.monotonic() + LONG
        while len(held._waiting) < 20:
            assert time.monotonic() < end
            time.sleep(0.01)
        held._waiting.rotate(7)
    with penstock.subscriber(where) as subscriber:
        assert [int(bytes(message)) for message in read(subscriber, 20)] == list(range(20))


@pytest.mark.parametrize("fetch", [256, 7])
def test_many_short_readers_one_after_the_other_read_in_order(
    server: Server, fetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much of what was given back a reader had fetched when it left. What was acknowledged comes once."""
    monkeypatch.setattr("penstock.nats.subscribing.FETCH", fetch)
    name = f"SHORT{fetch}"
    server.make_stream(name, [f"{name}.>"])
    with penstock.publisher(server.address(f"{name}.a", "?jetstream=true")) as publisher:
        publisher.publish_many([b"%d" % number for number in range(300)])
    where = server.address(f"{name}.a", f"?stream={name}&durable=d")
    found = []
    for reader in range(100):
        if reader % 10 == 5:  # its message is the next one's
            with pytest.raises(ZeroDivisionError), penstock.subscriber(where) as subscriber:
                assert int(bytes(subscriber.receive(LONG))) == len(found)
                raise ZeroDivisionError
        with penstock.subscriber(where) as subscriber:
            found += [int(bytes(subscriber.receive(LONG))) for _ in range(3)]
    assert found == list(range(300))
    with penstock.subscriber(where) as subscriber, penstock.publisher(server.address(f"{name}.a")) as publisher:
        publisher.publish(b"300")
        assert bytes(subscriber.receive(LONG)) == b"300", "all others were acknowledged"


@pytest.mark.parametrize("fails", [False, True])
def test_a_reader_that_leaves_gives_back_what_is_not_done(server: Server, fails: bool) -> None:
    """The next one has it at once and in order, not after the consumer's ack wait."""
    name = f"left{fails:d}"
    server.make_stream(name, [f"{name}.*"], reader_that_waits_s=3600.0)
    with penstock.publisher(server.address(f"{name}.a", "?jetstream=true")) as publisher:
        publisher.publish_many(b"%d" % number for number in range(20))
    where = server.address(f"{name}.*", f"?stream={name}&durable=reader")
    with contextlib.suppress(ZeroDivisionError), penstock.subscriber(where) as subscriber:
        assert [bytes(subscriber.receive(LONG)) for _ in range(3)] == [b"0", b"1", b"2"]
        if fails:
            raise ZeroDivisionError
    left = range(2 if fails else 3, 20)
    with penstock.subscriber(where) as subscriber:
        assert [bytes(message) for message in read(subscriber, len(left))] == [b"%d" % number for number in left]


def test_a_server_that_is_started_again_is_gone_on_with(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(tmp_path)
    try:
        with (
            penstock.subscriber(server.address("again")) as subscriber,
            penstock.publisher(server.address("again"), timeout=1.0) as publisher,
        ):
            publisher.publish(b"before")
            assert bytes(subscriber.receive(LONG)) == b"before"
            server.end()
            server.start()
            end = time.monotonic() + LONG
            while subscriber.read(0.1) is None:  # at most once: what is sent before both are back is lost
                assert time.monotonic() < end
                with contextlib.suppress(TimeoutError, ConnectionError, penstock.PenstockError):
                    publisher.publish(b"after")
            wanted = {"the connection was lost; connecting again", "connected again"}
            while not wanted <= (told := {record.getMessage().partition(": ")[2] for record in caplog.records}):
                assert time.monotonic() < end, told  # messages may come again before the client says that it is back
                time.sleep(0.01)
    finally:
        server.end()


@pytest.mark.timeout(120)
def test_a_server_that_is_stopped_is_left_for_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel still takes what is sent."""
    monkeypatch.setattr("penstock.nats.connection.PING_S", 0.5)
    first, second = Server(tmp_path / "first"), Server(tmp_path / "second")
    try:
        hosts = f"127.0.0.1:{first.port},127.0.0.1:{second.port}"
        with penstock.publisher(f"nats://{hosts}/left", timeout=2.0) as publisher:
            stopped = first if publisher._connection.client.connected_url.port == first.port else second  # type: ignore[attr-defined]
            stopped.process.send_signal(signal.SIGSTOP)

            def published() -> bool:
                try:
                    publisher.publish(b"x", timeout=1.0)
                except TimeoutError:
                    return False
                return True

            wait_until(published)
            stopped.process.send_signal(signal.SIGCONT)
    finally:
        first.end()
        second.end()


def test_a_late_answer_costs_no_later_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(tmp_path)
    try:
        with (
            penstock.subscriber(server.address("late")) as subscriber,
            penstock.publisher(server.address("late"), timeout=1.0) as publisher,
        ):
            server.process.send_signal(signal.SIGSTOP)
            os.waitpid(server.process.pid, os.WUNTRACED)  # until all of its threads are stopped
            with pytest.raises(TimeoutError):
                publisher.publish(b"while it is stopped")
            server.process.send_signal(signal.SIGCONT)
            assert bytes(subscriber.receive(timeout=LONG)) == b"while it is stopped"
            publisher.publish(b"later", timeout=LONG)
            assert bytes(subscriber.receive(timeout=LONG)) == b"later"
            assert "Traceback" not in caplog.text and "the connection was lost" not in caplog.text
            server.end()
            with pytest.raises(TimeoutError):  # no server has it
                publisher.publish(b"nobody is there", timeout=1.0)
    finally:
        server.end()


def test_what_is_published_during_a_reconnect_is_confirmed_by_the_server(tmp_path: Path) -> None:
    server = Server(tmp_path)
    try:
        with penstock.publisher(server.address("gone"), timeout=1.0) as publisher:
            server.end()
            wait_until(lambda: not publisher._connection.client.is_connected)  # type: ignore[attr-defined]
            with pytest.raises(TimeoutError):
                publisher.publish(b"nobody is there")
            assert publisher.ledger.delivered == 0
            server.start()
            publisher.publish(b"again", timeout=LONG)
            assert publisher.ledger.delivered == 1
    finally:
        server.end()


@pytest.mark.parametrize("options", ["", "?stream=CALLED", "?stream=CALLED&durable=d"])
@pytest.mark.parametrize("kind", [None, dict])
def test_a_function_is_called_with_every_message(server: Server, options: str, kind: type | None) -> None:
    """By a thread of its own, until ``close``. What the function raises is counted, and the next message comes; that at
    which it raised comes again from a stream, after those that wait.
    """
    server.make_stream("CALLED", ["called.>"])
    subject = f"called.{len(options)}.{kind is dict}"
    options = options.replace("durable=d", f"durable=d{kind is dict}")
    found: list[int] = []

    def note(message: penstock.Message) -> None:
        found.append(int(bytes(message)[5:-1]))
        if found.count(3) == 1 and found[-1] == 3:
            raise ValueError("of the function")

    def publish(*numbers: int) -> None:
        with penstock.publisher(server.address(subject)) as publisher:
            publisher.publish_many(b'{"n":%d}' % number for number in numbers)

    again = [3] if options else []
    with penstock.subscriber(server.address(subject, options), on_message=note, type=kind) as subscriber:
        publish(*range(20))
        wait_until(lambda: len(found) == 20 + len(again) or subscriber.errors > 1)
        assert (found[:4], sorted(found), subscriber.errors) == ([0, 1, 2, 3], sorted([*range(20), *again]), 1)
        for read_it in (subscriber.read, subscriber.read_many):
            with pytest.raises(StateError, match="open another subscriber to read"):
                read_it()
    publish(20)
    assert len(found) == 20 + len(again) and subscriber.closed
    if "durable" in options:
        with penstock.subscriber(server.address(subject, options)) as reader:
            assert bytes(reader.receive(LONG)) == b'{"n":20}', "all others were acknowledged"


@pytest.mark.parametrize("kind", [None, dict])
@pytest.mark.parametrize("outcome", ["returns", "raises", "runs on"])
def test_a_message_is_acknowledged_when_its_function_has_returned(
    server: Server, outcome: str, kind: type | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is closed meanwhile."""
    name = f"ENDED{outcome[-2:]}{kind is dict}".replace(" ", "")
    server.make_stream(name, [f"{name}.*"], reader_that_waits_s=3600.0)
    with penstock.publisher(server.address(f"{name}.a", "?jetstream=true")) as publisher:
        publisher.publish_many([b"1", b"2"])
    where = server.address(f"{name}.*", f"?stream={name}&durable=reader")
    begun, go_on = threading.Event(), threading.Event()

    def note(message: penstock.Message) -> None:
        begun.set()
        go_on.wait(LONG)
        if outcome == "raises":
            raise ValueError("of the function")

    if outcome == "runs on":
        monkeypatch.setattr("penstock.channel.END_S", 0.01)
    subscriber = penstock.subscriber(where, on_message=note, type=kind)
    assert begun.wait(LONG)
    closing = threading.Thread(target=subscriber.close)
    closing.start()
    if outcome != "runs on":
        wait_until(lambda: subscriber.closed)
        go_on.set()
    closing.join()
    with penstock.subscriber(where) as again:
        wanted = [b"2"] if outcome == "returns" else [b"1", b"2"]
        assert sorted(bytes(again.receive(LONG)) for _ in wanted) == wanted
    go_on.set()


def in_a_child(act: Callable[[], object], said: Path) -> str:
    """What a forked child says of it."""
    child = os.fork()
    if child == 0:
        signal.alarm(int(LONG))
        try:
            said.write_text(f"returned {act()!r}")
        except BaseException as error:
            said.write_text(f"{type(error).__name__} {error}")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return said.read_text()


def test_a_forked_child_does_not_use_its_parents_handles(server: Server, tmp_path: Path) -> None:
    with (
        penstock.subscriber(server.address("forked")) as subscriber,
        penstock.publisher(server.address("forked")) as publisher,
    ):
        publisher.publish(b"before")
        assert subscriber.wait(LONG)
        subscriber.on_message(lambda message: None)
        uses: dict[str, Callable[[], object]] = {
            "read": lambda: subscriber.read(0),
            "read_many": lambda: subscriber.read_many(1, 0),
            "wait": lambda: subscriber.wait(0),
            "fileno": subscriber.fileno,
            "process_all": subscriber.process_all,
            "publish": lambda: publisher.publish(b"of the child"),
            "publish_many": lambda: publisher.publish_many([b"of the child"]),
            "reserve": lambda: publisher.reserve(1),
            "wait_ready": lambda: publisher.wait_ready(0),
        }
        said = {name: in_a_child(use, tmp_path / name) for name, use in uses.items()}
        again = "was opened before this process was forked; open it again in the child"
        of = {name: "publisher" if use_of_publisher(name) else "subscriber" for name in said}
        assert said == {name: f"StateError this {handle} {again}" for name, handle in of.items()}
        for handle in (subscriber, publisher):  # leaves the parent's connection as it is
            assert in_a_child(handle.close, tmp_path / "close") == "returned None"
        assert in_a_child(lambda: open_and_publish(server, b"own"), tmp_path / "own") == "returned None"
        publisher.publish(b"after")
        assert [bytes(message) for message in read(subscriber, 3)] == [b"before", b"own", b"after"]


def use_of_publisher(name: str) -> bool:
    return name.startswith("publish") or name in ("reserve", "wait_ready")


def open_and_publish(server: Server, data: bytes) -> None:
    with penstock.publisher(server.address("forked")) as publisher:
        publisher.publish(data)


def test_an_error_of_many_says_how_many_were_published_before(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.nats.publishing.UNDER_WAY", 2)
    subject = server.address("some")
    with penstock.subscriber(subject) as subscriber, penstock.publisher(subject) as publisher:
        wrong: list[tuple[Any, dict[str, Any]]] = [
            ([b"a", bytes(9 << 20), b"b"], {}),
            ([b"a", "text"], {}),
            ([b"a"], {"properties": {"two\nlines": ""}}),
            ([b"a"], {"timeout": -1.0}),
        ]
        for batch, options in wrong:
            with pytest.raises((CapacityError, InvalidArgument, TypeError)) as raised:
                publisher.publish_many(batch, **options)
            assert raised.value.published == 0  # type: ignore[union-attr]
        deliver: Any = publisher._deliver  # type: ignore[attr-defined]

        def refuse(items: list[Any], within: float | None) -> None:
            if items[0][0] == b"2":
                raise RefusedError("of the test")
            deliver(items, within)

        monkeypatch.setattr(publisher, "_deliver", refuse)
        with pytest.raises(RefusedError) as refused:
            publisher.publish_many([b"0", b"1", b"2", b"3"])
        found = read(subscriber, 2)
        assert refused.value.published == len(found)  # type: ignore[attr-defined]
        assert [bytes(message) for message in found] == [b"0", b"1"] and subscriber.read(0.05) is None


def test_the_room_opens_handles_more_than_once(server: Server) -> None:
    for _ in range(2):
        with (
            penstock.nats.subscriber(server.address("twice")) as subscriber,
            penstock.nats.publisher(f"127.0.0.1:{server.port}/twice") as publisher,
        ):
            publisher.publish(b"x")
            assert bytes(subscriber.receive(LONG)) == b"x"


def test_names_that_no_server_takes_and_calls_are_refused(server: Server) -> None:
    server.make_stream("NAMES", ["names.>"])
    for option, name in (("durable", "a.b"), ("durable", "a b"), ("stream", "a*")):
        with pytest.raises(InvalidArgument, match=f"{option}='.*' is no name at a NATS server"):
            penstock.subscriber(server.address("names.a"), **{"stream": "NAMES", option: name})
    with penstock.publisher(server.address("names.a")) as publisher, pytest.raises(TypeError, match="text to text"):
        publisher.publish(b"x", properties={"number": 1})  # type: ignore[call-arg]
    with pytest.raises(InvalidArgument, match="calls do not go over NATS"):
        penstock.client(server.address("names.a"))
    with pytest.raises(InvalidArgument, match="calls do not go over NATS"):
        penstock.server(server.address("names.a"), bytes.upper)


def test_empty_options_and_negative_times_are_refused(server: Server) -> None:
    for option in ("creds", "token", "user", "queue", "stream", "durable"):
        with pytest.raises(InvalidArgument, match=f"{option}= is empty"):
            penstock.subscriber(server.address("a", f"?{option}="))
    for option in ("creds", "token", "user"):
        with pytest.raises(InvalidArgument, match=f"{option}= is empty"):
            penstock.publisher(server.address("a"), **{option: ""})
    for opened in (penstock.publisher, penstock.subscriber):
        with pytest.raises(InvalidArgument, match="timeout=-1 must be 0 or more"):
            opened(server.address("a", "?timeout=-1"))
    with pytest.raises(InvalidArgument, match=r"durable= is for subscribers there.*jetstream=true"):
        penstock.publisher(server.address("a", "?durable=x"))


def test_times_of_a_stream_are_not_rounded() -> None:
    at = datetime.datetime(2026, 11, 17, 21, 19, 11, 939243, datetime.UTC)
    assert _nanoseconds(at) == 1_794_950_351_939_243_000


def test_bridges_to_and_from_other_reaches(server: Server, tmp_path: Path) -> None:
    with Bridge(server.address("in"), f"journal:{tmp_path}/log#in").start():
        with penstock.publisher(server.address("in")) as publisher:
            publisher.publish(b"one", properties={"a": "b"}, timestamp_ns=1_000)  # type: ignore[call-arg]
        with penstock.subscriber(f"journal:{tmp_path}/log#in", start="first") as reader:
            message = reader.receive(LONG)
            assert (bytes(message), dict(message.properties), message.timestamp_ns) == (b"one", {"a": "b"}, 1_000)
    with (
        penstock.subscriber(server.address("out")) as subscriber,
        Bridge(f"journal:{tmp_path}/log#in", server.address("out"), source_options={"start": "first"}).start(),
    ):
        message = subscriber.receive(LONG)
        assert (bytes(message), dict(message.properties), message.timestamp_ns) == (b"one", {"a": "b"}, 1_000)


def test_what_cannot_be_is_refused(server: Server, tmp_path: Path) -> None:
    with penstock.publisher(server.address("door")) as publisher:
        with pytest.raises(CapacityError, match="longer than the server takes"):
            publisher.publish(bytes(2 << 20))
        for name, value in (("a:b", "x"), ("", "x"), ("é", "x"), ("a", "x\r\nb"), ("Nats-Msg-Id", "x")):
            with pytest.raises(InvalidArgument):
                publisher.publish(b"", properties={name: value})  # type: ignore[call-arg]
        publisher.publish(b"")
    with (
        pytest.raises(RefusedError, match=r"no stream takes the subject no\.stream"),
        penstock.publisher(server.address("no.stream", "?jetstream=true")) as publisher,
    ):
        publisher.publish(b"nobody stores it")
    with (
        penstock.subscriber(server.address("no.>")),  # who reads it stores nothing
        penstock.publisher(server.address("no.stream", "?jetstream=true")) as publisher,
        pytest.raises(RefusedError, match=r"no stream takes the subject no\.stream"),
    ):
        publisher.publish(b"nobody stores it", timeout=0.1)
    with pytest.raises(RefusedError, match="has no stream nothere"):
        penstock.subscriber(server.address("a", "?stream=nothere"))
    server.make_stream("some", ["some.*"])
    for durable in ("", "&durable=d"):
        with pytest.raises(RefusedError, match=r"stream some never has other\.a: its subjects are some\.\*"):
            penstock.subscriber(server.address("other.a", f"?stream=some{durable}"))
    for wrong in ("a..b", "", "a b", ">.a"):
        with pytest.raises(InvalidArgument, match="subject"):
            penstock.subscriber(server.address(wrong))
    with pytest.raises(InvalidArgument, match="subject"):
        penstock.publisher(server.address("a.*"))
    for nobody in ("nats://127.0.0.1:1/a", "nats://127.0.0.1:1,127.0.0.1:2/a"):
        with pytest.raises(ConnectionError, match="no NATS server answers"):
            penstock.publisher(nobody, timeout=LONG)
    with penstock.publisher(f"nats://127.0.0.1:1,127.0.0.1:{server.port}/a") as publisher:
        publisher.publish(b"the second one is there")
        with pytest.raises(TypeError, match="encode it first"):
            publisher.publish("text")  # type: ignore[arg-type]


def test_a_server_without_jetstream_is_told_at_once() -> None:
    plain = Server(None)
    try:
        for options in ("?stream=s", "?stream=s&durable=d"):
            with pytest.raises(RefusedError, match=r"^nats://\S+ has no JetStream, so no stream s: [^\n]+$"):
                penstock.subscriber(plain.address("a", options), timeout=1000 * LONG)
    finally:
        plain.end()


@pytest.mark.parametrize(
    ("reader", "told"),
    [
        ({"filter_subject": "%s.b"}, r"reads %s\.b, not %s\.a: take another name"),
        ({"filter_subject": "%s.*"}, r"reads %s\.\*, not %s\.a: take another name"),
        ({"filter_subjects": ["%s.a", "%s.b"]}, r"reads %s\.a, %s\.b, not %s\.a: take another name"),
        ({"ack_wait": 30.0}, r"reads every subject, not %s\.a alone: take another name"),
        ({"deliver_subject": "elsewhere"}, "is a push consumer, which cannot be read like this: take another name"),
    ],
)
def test_a_durable_of_another_subject_is_refused(
    server: Server, reader: dict[str, Any], told: str, request: pytest.FixtureRequest
) -> None:
    name = f"filtered{abs(hash(request.node.name))}"

    def named(value: Any) -> Any:
        return [named(each) for each in value] if isinstance(value, list) else str(value).replace("%s", name)

    server.make_stream(name, [f"{name}.*"], **{
        key: value if isinstance(value, float) else named(value) for key, value in reader.items()
    })  # fmt: skip
    said = f"^durable reader of stream {name} {named(told)}$"
    with pytest.raises(RefusedError, match=said):
        penstock.subscriber(server.address(f"{name}.a", f"?stream={name}&durable=reader"), timeout=1000 * LONG)


def test_a_durable_of_the_same_subject_is_read(server: Server) -> None:
    server.make_stream("same", ["same.*"], filter_subject="same.a")
    server.make_stream("every", ["every.*"], ack_wait=30.0)  # without a filter
    for subject in ("same.a", "every.*", "every.>", ">"):
        stream = "same" if subject == "same.a" else "every"
        with (
            penstock.subscriber(server.address(subject, f"?stream={stream}&durable=reader")) as subscriber,
            penstock.publisher(server.address(f"{stream}.a", "?jetstream=true")) as publisher,
        ):
            publisher.publish(subject.encode())
            assert bytes(subscriber.receive(LONG)) == subject.encode()


@pytest.mark.parametrize(("options", "login", "query"), [
    (("--auth", "hush"), "hush@", "?token=hush"),
    (("--user", "me", "--pass", "hu/sh"), "me:hu%2Fsh@", "?user=me&password=hu/sh"),
])  # fmt: skip
def test_who_is_let_in(tmp_path: Path, options: tuple[str, ...], login: str, query: str) -> None:
    closed = Server(tmp_path, *options)
    try:
        address = closed.address("a")
        for known in (address + query, address.replace("//", f"//{login}")):
            with penstock.subscriber(known) as subscriber, penstock.publisher(known) as publisher:
                publisher.publish(b"let in")
                assert subscriber.receive(LONG) is not None
        for stranger in (address, address.replace("//", "//hu:sh@")):  # told at once, not when the time is over
            with pytest.raises(RefusedError, match="does not let this client in") as error:
                penstock.publisher(stranger, timeout=1000 * LONG)
            assert "hu:sh" not in str(error.value)
    finally:
        closed.end()


def test_a_server_that_is_not_trusted_is_told_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    node = theirs.issue("node")
    encrypted = Server(tmp_path / "store", "--tls", "--tlscert", str(node), "--tlskey", str(node))
    try:
        with pytest.raises(RefusedError, match="is not trusted"):
            penstock.publisher(encrypted.address("a", f"?tls={ours.path}"), timeout=1000 * LONG)
        with penstock.publisher(encrypted.address("a", f"?tls={theirs.path}")) as publisher:
            publisher.publish(b"trusted")
            encrypted.end()  # the end of the connection reaches the client
            while "the connection was lost" not in caplog.text:
                time.sleep(0.01)
        assert "eof_received" not in caplog.text
    finally:
        encrypted.end()


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_file_that_is_no_authority_is_named(tmp_path: Path, server: Server, content: str | None) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)
    for opened in (penstock.publisher, penstock.subscriber):
        with pytest.raises(InvalidArgument, match=str(path)):
            opened(server.address("a", f"?tls={path}"))


def test_handles_are_closed_inside_of_an_event_loop(server: Server) -> None:
    async def talk() -> bytes:
        where = server.address("loop")
        with penstock.subscriber(where) as subscriber, penstock.publisher(where) as publisher:
            await publisher.publish_async(b"x")
            return bytes(await subscriber.receive_async(LONG))

    assert asyncio.run(talk()) == b"x"


def test_subjects_and_headers() -> None:
    assert check_subject("a.*.>", wildcards=True) == "a.*.>"
    for when in (-(2**63) + 1, -9_000_000_000_000_000_000, -5, 0, 1, 2**63 - 1):
        assert properties_of(headers_of({"a": "b"}, when)) == ({"a": "b"}, when)
    for wrong in ("-", "", "9" * 19, "-" + "9" * 19, "1" * 20, "\u0661", "-9223372036854775808"):
        assert properties_of({"Penstock-Time-Ns": wrong}) == ({}, None)
    assert properties_of({"Nats-Sequence": "4", "Penstock-Time-Ns": "x"}) == ({}, None)
    assert headers_of({}, None) is None and properties_of(None) == ({}, None)
    assert headers_of({"inner": "a b", "full": "x" * 65_523}, None)
    for refused in ({"a": "line\nend"}, {"a": " b"}, {"a": "b\t"}, {"a b": ""}, {"a:": ""}, {"full": "x" * 65_533}):
        with pytest.raises(InvalidArgument, match=r"cannot be a header|longer than 65536 bytes"):
            headers_of(refused, None)
    for when in (float("nan"), 1.5, "7", True, 2**63, -(2**63)):
        with pytest.raises((TypeError, InvalidArgument), match="timestamp_ns"):
            headers_of({}, when)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"property 'a' .*is not UTF-8"):
        headers_of({"a": "\ud800"}, None)
    with pytest.raises(InvalidArgument, match="timestamp_ns="):
        headers_of({"penstock-time-ns": "1"}, None)
    with pytest.raises(InvalidArgument, match="4000 bytes"):
        check_subject("x" * 4000, wildcards=False)


def test_with_tls_nothing_is_sent_to_a_server_that_has_none() -> None:
    """Whoever answers says whether there is TLS: a client that asked for it tells nobody else its token."""
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(1)
                    connection.sendall(b'INFO {"server_id":"x","version":"2.12.0","proto":1,"max_payload":1048576}\r\n')
                    while data := connection.recv(4096):
                        heard.extend(data)

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"nats://127.0.0.1:{listener.getsockname()[1]}/s?tls=true"
        for opened in (penstock.publisher, penstock.subscriber):
            with pytest.raises(RefusedError, match="offers no TLS"):
                opened(address, token="hidden")
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(LONG)
    assert not heard


@pytest.mark.parametrize(("greeting", "text"), [
    (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not greet as one"),
    (b"", "does not greet as one"),
    (b"INFO []\r\n", "does not greet as one"),
    (b"INFO {" + b"x" * (1 << 22), "no NATS server answers at 127.0.0.1:.*: its greeting"),
], ids=["another", "silent", "no object", "endless"])  # fmt: skip
def test_what_is_no_server_of_nats_is_told_at_once(greeting: bytes, text: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with listener.accept()[0] as connection, contextlib.suppress(ConnectionError):
                        connection.sendall(greeting)

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(ConnectionError, match=text):
            penstock.publisher(f"nats://127.0.0.1:{listener.getsockname()[1]}/a", timeout=1000 * LONG)
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(LONG)


def test_why_knows_who_reads_by_a_pattern(server: Server) -> None:
    with penstock.subscriber(server.address("why.>")), penstock.publisher(server.address("why.cellar")) as publisher:
        publisher.publish(b"x")
        for subject in ("why.cellar", "why.*"):
            told = [finding.text for finding in explain(server.address(subject, "?jetstream=yes"))]
            assert "nobody reads it on this machine" not in told, told
            assert any("publishes: 1 message" in text for text in told), told
        other = [finding.text for finding in explain(server.address("other.cellar"))]
        assert "nobody reads it on this machine" in other and not any("publishes: 1" in text for text in other)


def test_a_wildcard_of_nats_stays_a_wildcard() -> None:
    """The commands give it to the server, as they do at a broker."""
    from penstock.cli.target import expanded

    assert expanded(["nats://127.0.0.1:1/a.*"]) == ["nats://127.0.0.1:1/a.*"]


def test_a_bridge_tells_that_subjects_end_there(server: Server, tmp_path: Path) -> None:
    for subject, lost in (("in.>", ["topic"]), ("in.a", [])):
        with Bridge(server.address(subject), f"journal:{tmp_path}/log#in") as bridge:
            assert bridge.not_held == lost
            bridge.start()
