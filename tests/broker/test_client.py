"""Clients: reconnecting, sending again, asyncio, threads, closing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import penstock
from penstock.address import parse
from penstock.broker import AsyncClient, Client, Server, Subscriber
from penstock.broker.client.publisher import Publisher
from penstock.broker.fetch import RangeClient
from penstock.broker.hosts import NOBODY_LEADS_REMEDY, NOT_LISTENING_REMEDY
from penstock.cli.silence import refuse_nobody
from penstock.errors import ClosedError, InvalidArgument, RefusedError, StateError

from .conftest import LONG, Wire, until


class Proxy:
    """Passes bytes on between clients and a broker, and cuts the connections when told."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.sockets: list[socket.socket] = []
        self.drop_replies = False
        self.thread = threading.Thread(target=self.accept, daemon=True)
        self.thread.start()

    def accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.target))
            self.sockets += [near, far]
            threading.Thread(target=self.copy, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self.copy, args=(far, near, True), daemon=True).start()

    def copy(self, source: socket.socket, sink: socket.socket, reply: bool) -> None:
        try:
            while data := source.recv(65536):
                if not (reply and self.drop_replies):
                    sink.sendall(data)
        except OSError:
            pass

    def cut(self) -> None:
        sockets, self.sockets = self.sockets, []
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.cut()
        self.thread.join()


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    opened = Proxy(server.port)
    yield opened
    opened.close()


def test_a_lost_confirm_does_not_store_twice(proxy: Proxy, client: Client) -> None:
    with Client(port=proxy.port) as through:
        assert through.publish("t", b"first") == 1
        proxy.drop_replies = True
        answer: list[object] = []
        thread = threading.Thread(
            target=lambda: answer.append(through.publish_many("t", [b"%d" % i for i in range(100)]))
        )
        thread.start()
        until(lambda: client.statistics()["next"] == 102)  # stored, but the confirm is on its way to nowhere
        proxy.drop_replies = False
        proxy.cut()
        thread.join(LONG)
        assert answer == [(2, 101)]
        assert through.publish("t", b"last") == 102
        assert through.connections == 2


def test_closing_while_a_publish_is_awaited_says_that_the_outcome_is_not_known(proxy: Proxy) -> None:
    async def talk() -> None:
        client = AsyncClient(port=proxy.port)
        await client.ping()
        proxy.drop_replies = True
        task = asyncio.ensure_future(client.publish("t", b"x"))
        await asyncio.sleep(0)  # the task's turn: it waits for the answer, which does not come
        client.close()
        with pytest.raises(ClosedError, match="not known"):
            await task

    asyncio.run(talk())


def test_a_subscriber_goes_on_after_a_cut(proxy: Proxy, client: Client) -> None:
    client.queue("q", topics="t")
    with Client(port=proxy.port) as through, through.subscribe("q") as consumer:
        found = []
        for part in range(5):
            client.publish_many("t", [b"%d" % (part * 10 + i) for i in range(10)])
            while (part + 1) * 10 > len(set(found)):
                message = consumer.read(LONG)
                assert message is not None
                found.append(int(bytes(message)))
            proxy.cut()
        assert sorted(set(found)) == list(range(50))
        first_seen = list(dict.fromkeys(found))
        assert first_seen == sorted(first_seen)


@pytest.mark.parametrize("start", ["", "from_position", "from_ordinal", "from_time_ns"])
@pytest.mark.parametrize("queue", ["", "named"])
def test_where_a_subscription_begins_is_said_once(serve: Callable[..., Server], start: str, queue: str) -> None:
    """After a restart of the broker it goes on where it was: nothing is missing, nothing that was done comes again."""
    server = serve()
    place = f"broker://127.0.0.1:{server.port}/t{f'?queue={queue}' if queue else ''}"
    with Client(port=server.port, timeout=LONG) as client:
        if start:
            client.publish_many("t", [b"%d" % n for n in range(50)])
        with penstock.subscriber(place, **({start: 1} if start else {}), credit=8, ack="manual") as subscriber:
            if not start:
                client.publish_many("t", [b"%d" % n for n in range(50)])
            done: set[int] = set()
            seen: set[int] = set()
            for end in (20, 40, 60):
                found = -1
                while found < end - 1:  # what was sent ahead and not acknowledged may come twice
                    message = subscriber.receive(LONG)
                    found = int(bytes(message))
                    assert found not in done
                    seen.add(found)
                    subscriber.ack(message, confirm=found == end - 1)
                done = set(range(end))
                assert done <= seen
                server.close()
                server = serve(port=server.port)
                client.publish_many("t", [b"%d" % n for n in range(end + 30, end + 50)])
            assert int(bytes(subscriber.receive(LONG))) == 60


def test_a_subscription_that_is_refused_after_a_reconnect_says_so(server: Server, proxy: Proxy) -> None:
    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        place = f"broker://127.0.0.1:{proxy.port}/t?queue=q"
        with penstock.subscriber(place, max_tries=0, timeout=LONG) as subscriber:
            client.publish("t", b"1")
            assert bytes(subscriber.receive(LONG)) == b"1"
            client.queue("q", max_tries=3)
            proxy.cut()
            with pytest.raises(RefusedError, match="max_tries=3, not 0"):
                subscriber.receive(LONG)


def test_a_message_at_which_its_function_failed_comes_again(serve: Callable[..., Server]) -> None:
    server = serve()
    seen: list[bytes] = []

    def once(message: penstock.Message) -> None:
        seen.append(bytes(message))
        if bytes(message) == b"bad" and seen.count(b"bad") == 1:
            raise ValueError("not now")

    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        with penstock.subscriber(f"broker://127.0.0.1:{server.port}/t?queue=q", on_message=once) as subscriber:
            for body in (b"1", b"bad", b"2"):
                client.publish("t", body)
            until(lambda: seen.count(b"bad") == 2)
            until(lambda: client.queues()[0]["depth"] == 0)
            assert subscriber.errors == 1
    assert sorted(seen) == [b"1", b"2", b"bad", b"bad"]


@pytest.mark.parametrize("kind", [None, dict])
@pytest.mark.parametrize("outcome", ["returns", "raises", "runs on"])
def test_a_message_is_acknowledged_when_its_function_has_returned(
    serve: Callable[..., Server], outcome: str, kind: type | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is closed meanwhile."""
    where = f"broker://127.0.0.1:{serve().port}/t?queue=q"
    begun, go_on = threading.Event(), threading.Event()

    def note(message: penstock.Message) -> None:
        if bytes(message) == b"1":
            begun.set()
            go_on.wait(LONG)
            if outcome == "raises":
                raise ValueError("of the function")

    if outcome == "runs on":
        monkeypatch.setattr("penstock.channel.END_S", 0.01)
    with penstock.publisher(where) as publisher:
        subscriber = penstock.subscriber(where, on_message=note, type=kind)
        publisher.publish_many([b"0", b"1", b"2"])
        assert begun.wait(LONG)
        closing = threading.Thread(target=subscriber.close)
        closing.start()
        if outcome != "runs on":
            until(lambda: subscriber.closed)
            go_on.set()
        closing.join()
        with penstock.subscriber(where) as again:
            wanted = [b"2"] if outcome == "returns" else [b"1", b"2"]
            assert sorted(bytes(again.receive(LONG)) for _ in wanted) == wanted
        go_on.set()


def test_a_server_is_started_once(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve()
    with pytest.raises(StateError, match="is running"):
        server.start()
    server.close()
    with pytest.raises(StateError, match="was closed"):
        server.start()
    for wrong in ({"port": 70_000}, {"port": -1}, {"client_authority": "nofile"}, {"key": "nofile"}):
        with pytest.raises(InvalidArgument, match=next(iter(wrong))):
            serve(**wrong)


def test_a_queue_that_is_there_stays_where_it_is(serve: Callable[..., Server]) -> None:
    server = serve()
    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        client.publish_many("t", [b"1", b"2", b"3"])
        wire = Wire(server.port).hello()
        for place in (1, 3, 100):
            assert wire.send(b"QUEUE q topics=t from_position=%d create\n" % place).line() == "OK"
            assert [entry["depth"] for entry in client.queues()] == [3]
        assert wire.send(b"QUEUE q topics=t from_position=3\n").line() == "OK"
        assert [entry["depth"] for entry in client.queues()] == [1], "without create it is moved"


def test_it_waits_for_a_broker_that_restarts(serve: Callable[..., Server]) -> None:
    server = serve()
    port = server.port
    with Client(port=port, timeout=LONG) as client:
        client.publish("t", b"1")
        server.close()
        answer: list[int] = []
        thread = threading.Thread(target=lambda: answer.append(client.publish("t", b"2")))
        thread.start()
        again = Server(server.broker.store._journal.directory, port).start()  # type: ignore[attr-defined]
        thread.join(LONG)
        again.close()
    assert answer == [2]


def test_without_reconnecting_it_says_so(serve: Callable[..., Server]) -> None:
    server = serve()
    with Client(port=server.port, reconnect=False) as client:
        client.ping()
        server.close()
        with pytest.raises(ClosedError, match="no connection"):
            client.publish("t", b"x")


def test_no_broker_there() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with Client(port=port, timeout=0.3) as client, pytest.raises((TimeoutError, ClosedError)):
        client.ping()


def test_asyncio(server: Server) -> None:
    async def main() -> None:
        async with AsyncClient(port=server.port) as client:
            await client.queue("q", topics="t")
            positions = await asyncio.gather(*(client.publish("t", b"%d" % i) for i in range(200)))
            assert sorted(positions) == list(range(1, 201))
            assert await client.publish_many("t", [b"x"] * 10) == (201, 210)
            with pytest.raises(RefusedError, match="no queue"):
                await client.purge("none")
            found = []
            consumer = client.subscribe("q")
            async for message in consumer:
                found.append(bytes(message))
                if len(found) == 210:
                    break
            consumer.close()
            assert found == [b"%d" % i for i in range(200)] + [b"x"] * 10

    asyncio.run(asyncio.wait_for(main(), LONG))


def test_a_window_of_unconfirmed_messages(server: Server, client: Client) -> None:
    with Publisher(port=server.port, topic="t", unconfirmed=100) as publisher:
        for i in range(1000):
            publisher.publish(b"%d" % i)
        publisher.flush()
        assert publisher.position == 1000
        assert publisher.ledger == penstock.Ledger(matched=1000, delivered=1000)
    assert client.statistics()["next"] == 1001


def test_many_subscribers_each_get_everything(server: Server) -> None:
    address = f"broker://127.0.0.1:{server.port}/news"
    with penstock.publisher(address) as publisher:
        subscribers = [penstock.subscriber(address) for _ in range(3)]
        assert publisher.wait_ready(3, LONG)
        publisher.publish_many([b"1", b"2"])
        for subscriber in subscribers:
            assert [bytes(subscriber.read(LONG) or b"") for _ in range(2)] == [b"1", b"2"]
            subscriber.close()


def test_an_exception_brings_the_message_again(server: Server, client: Client) -> None:
    client.queue("q", topics="t")
    client.publish_many("t", [b"1", b"2"])
    with pytest.raises(RuntimeError), client.subscribe("q") as consumer:
        assert consumer.read(LONG) is not None
        raise RuntimeError("in the middle of it")
    with client.subscribe("q") as consumer:
        message = consumer.read(LONG)
        assert message is not None and bytes(message) == b"1"
        assert consumer.read(LONG) is not None  # which says that the first one is done
    until(lambda: client.queues()[0]["depth"] == 0)


@pytest.mark.parametrize("topic", ["", "a b", "a..b", "*", "x" * 256, "$own", "a\n"])
def test_bad_topics_are_refused_here(client: Client, topic: str) -> None:
    with pytest.raises(RefusedError):
        client.publish(topic, b"x")


def test_bad_arguments(server: Server, client: Client) -> None:
    with pytest.raises(InvalidArgument, match="credit"):
        client.subscribe("q", credit=0)
    with pytest.raises(InvalidArgument, match="did you mean"):
        client.subscribe("q", ack="nex")
    with pytest.raises(TypeError):
        client.publish_many("t", [1, 2])  # type: ignore[list-item]
    with pytest.raises(InvalidArgument):
        client.publish("t", b"x", ttl_s=-1)
    client.publish("t", b"goes on")


def test_closing_while_another_thread_waits(server: Server) -> None:
    client = Client(port=server.port)
    consumer = client.subscribe("q", topics="t")
    threading.Timer(0.1, consumer.close).start()
    began = time.monotonic()
    with pytest.raises(ClosedError):
        consumer.read(LONG)
    assert time.monotonic() - began < LONG
    client.close()
    with pytest.raises(ClosedError):
        client.ping()


def refused_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.mark.parametrize(
    ("hosts", "remedy"), [("127.0.0.1", NOT_LISTENING_REMEDY), ("127.0.0.1,127.0.0.1", NOBODY_LEADS_REMEDY)]
)
def test_who_finds_no_broker_is_told_where_to_look(hosts: str, remedy: str) -> None:
    """At one address as at several, however it is asked."""
    with socket.socket() as held:  # nobody listens there, and nobody else can
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        with Client(hosts, port, timeout=0.3) as client, pytest.raises(TimeoutError) as asked:
            client.publish("t", b"x")
        with pytest.raises(ConnectionError) as read:
            RangeClient(hosts, port, timeout=0.3)
        with pytest.raises((RefusedError, TimeoutError)) as begun:
            refuse_nobody(parse(f"broker://{hosts}:{port}/t"))  # a command does this first
            penstock.publisher(f"broker://{hosts}:{port}/t", timeout=0.3)
    for told in (asked, read, begun):
        assert f"127.0.0.1:{port}" in str(told.value) and remedy in str(told.value)


def test_a_client_that_was_long_without_a_broker_is_as_good_as_new(tmp_path: Path) -> None:
    """What is asked fails after its time; what is asked later connects again."""
    port = refused_port()
    with Client(port=port, timeout=0.3) as client:
        for _ in range(3):
            with pytest.raises(TimeoutError, match="Connection refused"):
                client.publish("t", b"never sent")
        with Server(tmp_path / "broker", port).start():
            client.timeout = LONG
            assert client.publish("t", b"x") == 1, "what nobody waited for any more was not sent"
            subscriber = client.subscribe("q", topics="t", timeout=LONG)
            subscriber._link._give_up_s = 0.3
        with pytest.raises(ClosedError, match="no connection"):
            subscriber.read(LONG)
        with Server(tmp_path / "broker", port).start():
            client.publish("t", b"y")
            subscriber._link._give_up_s = LONG
            assert bytes(subscriber.read(LONG) or b"") == b"y"
        subscriber.close()


def test_the_brokers_of_a_group_are_named_as_they_are() -> None:
    port = refused_port()
    with Client(f"127.0.0.1:{port},localhost:{port}", timeout=0.1) as client, pytest.raises(TimeoutError) as told:
        client.ping()
    assert f"the broker at 127.0.0.1:{port},localhost:{port} did not answer" in str(told.value)


@pytest.mark.parametrize("wait_s", [0.0, 0.05])
def test_a_worker_that_polls_learns_that_its_broker_is_gone(tmp_path: Path, wait_s: float) -> None:
    """The time without a connection counts from one read to the next, however short each is."""

    def polled(subscriber: penstock.Subscriber) -> None:
        end = time.monotonic() + LONG
        while time.monotonic() < end:
            assert subscriber.read(wait_s) is None
            time.sleep(0.01)

    port = refused_port()
    with Server(tmp_path / "broker", port).start(), Client(port=port) as client:
        subscriber = client.subscribe("q", topics="t")
    subscriber._link._give_up_s = 0.3
    for _ in range(2):  # it tries again after that
        with pytest.raises(ClosedError, match="no connection"):
            polled(subscriber)
    with Server(tmp_path / "broker", port).start(), Client(port=port) as client:
        client.publish("t", b"x")
        subscriber._link._give_up_s = LONG
        assert bytes(subscriber.read(LONG) or b"") == b"x"
    subscriber.close()


def test_what_is_not_tried_does_not_count_as_without_a_connection(tmp_path: Path) -> None:
    """A read after a long pause is not told of a broker that is back by then."""
    port = refused_port()
    with Server(tmp_path / "broker", port).start(), Client(port=port) as client:
        subscriber = client.subscribe("q", topics="t")
    assert subscriber.read(0.05) is None
    subscriber._link._missed_at -= 1000.0  # as if it had handled a message meanwhile
    assert subscriber.read(0.05) is None
    # An attempt of before must not fail only now, in the read below.
    until(lambda: subscriber.read(0) is None and subscriber._link._socket is None)
    subscriber._link._give_up_s = 0.01
    with Server(tmp_path / "broker", port).start(), Client(port=port) as client:
        subscriber._link._retry_at = 0.0
        assert subscriber.read(0) is None, "this attempt has not failed"
        subscriber._link._give_up_s = LONG
        client.publish("t", b"x")
        assert bytes(subscriber.read(LONG) or b"") == b"x"
    subscriber.close()


def test_a_publish_that_was_sent_and_not_answered_is_stored_once(proxy: Proxy, client: Client) -> None:
    """After a TimeoutError the message is on its way: it is in flight, not dropped, and not sent as another one."""
    publisher = Publisher("127.0.0.1", proxy.port, "t", timeout=LONG)
    publisher.publish(b"0")
    proxy.drop_replies = True
    with pytest.raises(TimeoutError) as raised:
        publisher.publish(b"1", timeout=0.2)
    assert raised.value.published == 1, "it was sent"  # type: ignore[attr-defined]
    assert publisher.ledger == penstock.Ledger(2, 1, {}, 0, 1)
    proxy.drop_replies = False
    proxy.cut()
    publisher.flush()
    assert publisher.ledger == penstock.Ledger(2, 2)
    publisher.close()
    with client.subscribe("q", topics="t", from_position=1) as subscriber:
        assert [bytes(message) for _, message in zip(range(2), subscriber, strict=False)] == [b"0", b"1"]
        assert subscriber.read(0) is None


def test_a_publish_that_was_never_sent_is_taken_back(tmp_path: Path) -> None:
    """What a call could not even send is not sent later, and counted; its error says how many were."""
    server = Server(tmp_path / "broker", 0).start()
    port = server.port
    with Publisher("127.0.0.1", port, "t", timeout=LONG) as publisher:
        publisher.publish(b"0")
        server.close()
        with pytest.raises(TimeoutError) as raised:
            publisher.publish(b"1", timeout=0.2)
        sent = raised.value.published  # type: ignore[attr-defined]  # on the connection that was about to end, or not
        for batch in ([b"2", b"3"], [b"%d" % number for number in range(20_000)]):
            with pytest.raises(TimeoutError) as raised:
                publisher.publish_many(batch, timeout=0.2)
            assert raised.value.published == 0  # type: ignore[attr-defined]
        ledger = publisher.ledger
        assert (ledger.delivered, ledger.in_flight) == (1, sent) and ledger.balanced
        with Server(tmp_path / "broker", port).start():
            publisher.publish(b"4")
            assert publisher.position == 2 + sent


def test_close_does_not_wait_again_for_what_was_not_answered(proxy: Proxy) -> None:
    publisher = Publisher("127.0.0.1", proxy.port, "t", timeout=LONG)
    publisher.publish(b"0")
    proxy.drop_replies = True
    with pytest.raises(TimeoutError):
        publisher.publish(b"1", timeout=0.1)
    publisher._client._link.wait = None  # type: ignore[assignment,method-assign]  # any further wait fails
    publisher.close()
    assert publisher.ledger == penstock.Ledger(2, 1, {"error": 1})


def test_an_asyncio_client_that_was_long_without_a_broker_is_as_good_as_new(tmp_path: Path) -> None:
    port = refused_port()

    async def talk() -> None:
        async with AsyncClient(port=port, timeout=0.3) as client:
            asked = [client.publish("t", b"never sent") for _ in range(3)]
            for answer in await asyncio.gather(*asked, return_exceptions=True):
                assert isinstance(answer, TimeoutError) and "Connection refused" in str(answer)
            server = await asyncio.to_thread(Server(tmp_path / "broker", port).start)
            client.timeout = LONG
            assert await client.publish("t", b"x") == 1
            await asyncio.to_thread(server.close)

    asyncio.run(talk())


def test_in_an_event_loop_a_subscriber_goes_on_after_a_cut(proxy: Proxy, client: Client) -> None:
    """The descriptor tells when it is time to connect again: nothing else wakes an event loop."""
    client.queue("q", topics="t")

    async def talk() -> None:
        with Subscriber(port=proxy.port, queue="q") as consumer:
            for number in range(3):
                waiting = asyncio.ensure_future(consumer.read_async(LONG))
                await asyncio.sleep(0)
                proxy.cut()
                await asyncio.to_thread(client.publish, "t", b"%d" % number)
                found = await waiting
                while found is not None and bytes(found) != b"%d" % number:  # those before, whose acknowledgement was cut
                    found = await consumer.read_async(LONG)
                assert found is not None

    asyncio.run(talk())


@pytest.mark.parametrize("confirm", [False, True])
def test_a_batch_is_acknowledged_at_once(tmp_path: Path, confirm: bool) -> None:
    """Also one with gaps, which takes 300 spans; positions in any order, and a message twice."""
    with Server(tmp_path / "broker", 0).start() as server, Client(port=server.port) as client:
        client.queue("q", topics="mine")
        places = [f"broker://127.0.0.1:{server.port}/{topic}" for topic in ("mine", "other")]
        with penstock.publisher(places[0]) as mine, penstock.publisher(places[1]) as other:
            for _ in range(300):  # in turn, so that each five stand alone
                mine.publish_many([b"x"] * 5)
                other.publish(b"x")
        with client.subscribe("q", ack="manual", credit=2000) as consumer:
            read: list[penstock.Message] = []
            while len(read) < 1500:
                batch = consumer.read_many(2000, LONG)
                if not read:
                    consumer.ack(batch, confirm=confirm)
                read += batch
            consumer.ack([message.position or 0 for message in reversed(read)] + read, confirm=confirm)
            for wrong in (b"abc", "abc", [b"abc"], None):
                with pytest.raises(TypeError):
                    consumer.ack(wrong)  # type: ignore[arg-type]
            consumer.ack(read[0], confirm=True)  # what was told before is done by then
            assert [(one["depth"], one["in_flight"]) for one in client.queues() if one["queue"] == "q"] == [(0, 0)]
        with client.subscribe("q", ack="manual") as consumer:
            assert consumer.read(0.1) is None
