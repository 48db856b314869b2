"""What a client is given is checked at the door: hosts, ports, times, numbers; and what it says once it is closed."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import broker
from penstock.broker import AsyncClient, Client, Limits, Server
from penstock.broker.client.publisher import Publisher
from penstock.broker.fetch import RangeClient
from penstock.errors import ClosedError, InvalidArgument, RefusedError

from .conftest import LONG, until

NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    "host",
    ["broker://127.0.0.1:9876", "127.0.0.1/topic", "127.0.0.1:9876/topic", "", ":9876", "127.0.0.1\0evil", "a b"],
)
def test_what_is_no_host_is_refused_with_the_form_of_one(host: str) -> None:
    with pytest.raises(InvalidArgument, match=r"is no host: Client\('127.0.0.1:9876'\)"):
        Client(host)


@pytest.mark.parametrize("host", ["127.0.0.1:", "127.0.0.1:x", "127.0.0.1:0", "127.0.0.1:65536", "[::1]:99999"])
def test_a_port_after_a_host_is_one_that_can_be(host: str) -> None:
    with pytest.raises(InvalidArgument, match=r"is not HOST or HOST:PORT|must be a number from 1 to 65535"):
        Client(host)


def test_a_host_may_bring_its_port(server: Server) -> None:
    place = f"127.0.0.1:{server.port}"
    with Client(place) as client, RangeClient(place) as reader, Publisher(place, topic="t") as publisher:
        client.queue("q", topics="t")
        publisher.publish(b"x")
        with client.subscribe("q") as subscriber, broker.Subscriber(place, queue="other", topics="t"):
            assert subscriber.read(LONG) is not None
        assert reader.frontier == 2
        assert client._link.silence(3).startswith(f"the broker at {place} did not answer")
    for host in ("[::1]:9877", "::1"):
        with Client(host) as client:
            assert client._link.host == "::1"


@pytest.mark.parametrize("port", [0, -1, 65536, 99999, "9876", None, True, 1.5])
def test_a_port_is_one_that_can_be(port: Any) -> None:
    with pytest.raises(InvalidArgument, match="port="):
        Client(port=port)


@pytest.mark.parametrize("timeout", [NAN, -1, INFINITE, 1e300])
def test_a_time_limit_is_one_that_can_be(timeout: float) -> None:
    with pytest.raises(InvalidArgument, match="timeout="):
        Client(timeout=timeout)


@pytest.mark.parametrize("timeout", ["5", True])
def test_a_time_limit_is_a_number(timeout: Any) -> None:
    with pytest.raises(TypeError, match="timeout must be seconds"):
        Client(timeout=timeout)


def test_an_address_of_version_6_is_a_host() -> None:
    Client("::1").close()


@pytest.mark.parametrize(
    "options",
    [
        {"ack_timeout_s": INFINITE},
        {"ack_timeout_s": 1e300},
        {"ttl_s": NAN},
        {"ttl_s": -1},
        {"max_tries": -1},
        {"exclusive": "maybe"},
        {"from_position": 1 << 80},
    ],
)
def test_options_of_a_queue_are_numbers_that_can_be(options: dict[str, Any]) -> None:
    with Client() as client, pytest.raises(InvalidArgument, match=f"{next(iter(options)).removeprefix('from_')}="):
        client.queue("q", **options)  # nothing was asked: there is no broker


@pytest.mark.parametrize("options", [{"max_tries": 1.5}, {"from_position": 1.5}, {"ack_timeout_s": "30"}])
def test_options_of_a_queue_are_of_their_type(options: dict[str, Any]) -> None:
    with Client() as client, pytest.raises(TypeError, match=r"whole number|number of seconds"):
        client.queue("q", **options)


def test_an_option_that_a_queue_does_not_have_is_refused_by_name() -> None:
    with Client() as client, pytest.raises(InvalidArgument, match=r"'ack_timeout'; did you mean ack_timeout_s"):
        client.queue("q", ack_timeout=3)
    with pytest.raises(InvalidArgument, match=r"'ack_timeout'; did you mean ack_timeout_s"):
        penstock.broker.Subscriber(queue="q", ack_timeout=3)


def test_a_message_is_due_at_one_time() -> None:
    with Client() as client:
        with pytest.raises(InvalidArgument, match="both say when"):
            client.publish("t", b"x", delay_s=1, at_ns=5)
        with pytest.raises(TypeError, match="at_ns must be a whole number"):
            client.publish("t", b"x", at_ns=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("unconfirmed", [1.5, NAN, "x"])
def test_unconfirmed_is_a_whole_number(unconfirmed: Any) -> None:
    with pytest.raises(TypeError, match="unconfirmed must be a whole number"):
        Publisher(unconfirmed=unconfirmed)


def test_the_names_of_the_room_are_listed() -> None:
    assert set(broker.__all__) <= set(dir(broker))


def test_only_bytes_are_published(server: Server) -> None:
    told = "publish takes bytes or a buffer, not str; encode it, or open the publisher with type= "
    with Client(port=server.port) as client:
        uses: list[Callable[[], Any]] = [
            lambda: client.publish("t", "text"),  # type: ignore[arg-type]
            lambda: client.publish_many("t", ["text"]),  # type: ignore[list-item]
            lambda: client.stage("x", "t", ["text"]),  # type: ignore[list-item]
        ]
        for use in uses:
            with pytest.raises(TypeError, match=f"^{told}"):
                use()


# --- close gives everything back


def _use_client(port: int) -> Client:
    with Client(port=port) as client:
        client.ping()
    return client


def _use_asyncio(port: int) -> AsyncClient:
    async def use() -> AsyncClient:
        async with AsyncClient(port=port) as client:
            await client.ping()
        return client

    return asyncio.run(use())


def _use_publisher(port: int) -> Publisher:
    with Publisher(port=port) as publisher:
        publisher.publish(b"x")
    return publisher


def _use_subscriber(port: int) -> broker.Subscriber:
    with broker.Subscriber(port=port, queue="q", topics="t") as subscriber:
        assert asyncio.run(subscriber.read_async(0.001)) is None
    return subscriber


@pytest.mark.parametrize("use", [_use_client, _use_asyncio, _use_publisher, _use_subscriber])
def test_close_gives_every_descriptor_back(server: Server, use: Callable[[int], Any]) -> None:
    def descriptors() -> int:
        until(lambda: not server.connections)  # the server's side of a connection ends a little later
        gc.collect()  # event loops
        return len(os.listdir("/proc/self/fd"))

    kept = [use(server.port)]  # the first one brings what the process has once
    before = descriptors()
    kept += [use(server.port) for _ in range(5)]
    assert descriptors() == before


# --- after a fork


def test_a_forked_child_is_told_so_and_says_nothing(server: Server, tmp_path: Path) -> None:
    client = Client(port=server.port)
    client.queue("q", topics="t")
    client.publish_many("t", [b"1", b"2"])
    with client.subscribe("q") as subscriber:
        assert subscriber.wait(LONG)
        uses: list[Callable[[], Any]] = [
            client.ping,
            lambda: client.publish("t", b"of the child"),
            lambda: subscriber.read(0),
            lambda: subscriber.ack(1),
            subscriber.fileno,
        ]
        said = tmp_path / "said"
        child = os.fork()
        if child == 0:
            told = []
            for use in uses:
                try:
                    told.append(f"{use()}")
                except BaseException as error:
                    told.append(f"{type(error).__name__}: {error}")
            client.close()
            subscriber.close()
            said.write_text("\n".join(told))
            os._exit(0)
        os.waitpid(child, 0)
        found = said.read_text().splitlines()
        assert len(found) == len(uses)
        for line in found:
            assert line.startswith("StateError: this ") and "was opened before this process was forked" in line
        assert [bytes(subscriber.receive(LONG)) for _ in range(2)] == [b"1", b"2"]
        client.publish("t", b"3")
        assert bytes(subscriber.receive(LONG)) == b"3"
    client.close()


# --- after the end


def test_what_is_asked_after_the_end_was_never_sent(server: Server) -> None:
    client = Client(port=server.port)
    client.publish("t", b"1")
    client.close()
    for ask in (lambda: client.publish("t", b"2"), client.ping, client.queues):
        with pytest.raises(ClosedError, match=r"^this client was closed$"):
            ask()


def test_what_is_asked_after_the_end_was_never_sent_with_asyncio(server: Server) -> None:
    async def talk() -> None:
        client = AsyncClient(port=server.port)
        await client.publish("t", b"1")
        for _ in range(2):
            await client.close()  # as all that it does; without await it closes too
            client.close()
        with pytest.raises(ClosedError, match=r"^this client was closed$"):
            await client.publish("t", b"2")

    asyncio.run(talk())


@pytest.mark.parametrize(
    "say",
    [
        lambda subscriber, message: subscriber.ack(message),
        lambda subscriber, message: subscriber.ack(message, confirm=True),
        lambda subscriber, message: subscriber.nack(message),
        lambda subscriber, message: subscriber.ack_many([message]),
    ],
)
def test_a_closed_subscriber_takes_no_acknowledgement(server: Server, say: Callable[..., None]) -> None:
    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        client.publish("t", b"1")
        subscriber = client.subscribe("q", ack="manual")
        message = subscriber.receive(LONG)
        subscriber.close()
        with pytest.raises(ClosedError, match="this subscriber was closed"):
            say(subscriber, message)


@pytest.mark.parametrize("wrong", ["x", None, b"1", 1.5])
def test_only_a_message_is_acknowledged(server: Server, wrong: Any) -> None:
    with Client(port=server.port) as client, client.subscribe("q", topics="t", ack="manual") as subscriber:
        with pytest.raises(TypeError, match="a message of this subscriber is wanted"):
            subscriber.ack(wrong)
        with pytest.raises(InvalidArgument, match="position="):
            subscriber.ack(-1)


def test_a_subscriber_that_nobody_holds_consumes_nothing(server: Server) -> None:
    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        client.publish_many("t", [b"1", b"2"])
        gc.disable()  # nothing but the last reference to it counts
        try:
            read = client.subscribe("q", ack="manual").receive(LONG)  # the subscriber is dropped here, without close
            assert bytes(read) == b"1"
            until(lambda: client.queues()[0]["consumers"] == 0)
        finally:
            gc.enable()
        with client.subscribe("q") as other:
            assert [bytes(other.receive(LONG)), bytes(other.receive(LONG))] == [b"1", b"2"]


def test_a_closed_publisher_has_nothing_in_flight(tmp_path: Path) -> None:
    limits = Limits(quota_bytes=2 << 20)
    with Server(tmp_path / "log", 0, limits=limits).start() as server, Client(port=server.port) as client:
        client.queue("q", topics="t")  # what it needs is not freed
        publisher = penstock.broker.publisher(f"127.0.0.1:{server.port}/t", unconfirmed=1000)
        for _ in range(60):
            publisher.publish(bytes(60_000))
        with pytest.raises(RefusedError, match="quota"):
            publisher.close()
        ledger = publisher.ledger
        assert ledger.in_flight == 0
        assert ledger.matched == 60 == ledger.delivered + ledger.dropped["refused"]
        assert ledger.delivered == client.statistics()["next"] - 1


# --- the end of the broker


@pytest.mark.parametrize("before", [False, True])
def test_shutdown_ends_the_broker_and_returns(tmp_path: Path, before: bool) -> None:
    with Server(tmp_path / "log", 0).start() as server:
        with Client(port=server.port) as client:
            if before:
                client.ping()
            assert client.shutdown() is None
        until(lambda: server._thread is not None and not server._thread.is_alive())


def test_shutdown_with_asyncio(tmp_path: Path) -> None:
    async def talk(port: int) -> None:
        async with AsyncClient(port=port) as client:
            assert await client.shutdown() is None

    with Server(tmp_path / "log", 0).start() as server:
        asyncio.run(talk(server.port))
        until(lambda: server._thread is not None and not server._thread.is_alive())


def test_shutdown_without_the_right_is_refused(tmp_path: Path, tokens: Path) -> None:
    with Server(tmp_path / "log", 0, tokens=tokens).start() as server:
        with Client(port=server.port, token="secret-north") as client, pytest.raises(RefusedError, match="shutdown"):
            client.shutdown()
        with Client(port=server.port, token="secret-north") as client:
            client.ping()
