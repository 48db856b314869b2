"""Calls through a broker that goes away and comes back: nothing hangs, nothing answered is missed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.broker import Client, Server, Subscriber
from tests.broker.conftest import until

LONG = 60.0


class Broker:
    """One that can be taken away and brought back at the same port."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._server = Server(directory, 0).start()
        self.port = self._server.port
        self.address = f"broker://127.0.0.1:{self.port}/plan"

    def go_away(self) -> None:
        self._server.close()

    def come_back(self) -> None:
        self._server = Server(self._directory, self.port).start()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    made = Broker(tmp_path / "broker")
    yield made
    made.go_away()


def test_the_first_call_after_a_restart_is_answered(broker: Broker) -> None:
    """The client's queue of answers went with the broker; the server may answer before the client is back."""
    with penstock.server(broker.address, lambda payload: payload):
        clients = [penstock.client(broker.address) for _ in range(3)]
        for client in clients:
            assert client.call(b"before", LONG) == b"before"
        broker.go_away()
        broker.come_back()
        for client in clients:
            assert client.call(b"after", LONG) == b"after"
            client.close()


def test_a_restart_while_the_function_runs_costs_no_answer(broker: Broker) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def function(payload: bytes) -> bytes:
        begun.set()
        go_on.wait(LONG)
        return payload

    answers: list[bytes] = []
    with penstock.server(broker.address, function), penstock.client(broker.address) as client:
        caller = threading.Thread(target=lambda: answers.append(client.call(b"long", LONG)))
        caller.start()
        assert begun.wait(LONG)
        broker.go_away()
        broker.come_back()
        go_on.set()
        caller.join(LONG)
    assert answers == [b"long"]


def test_a_broker_that_is_away_costs_a_call_its_time_and_no_more(broker: Broker) -> None:
    with penstock.server(broker.address, lambda payload: payload), penstock.client(broker.address) as client:
        assert client.call(b"before", LONG) == b"before"
        broker.go_away()
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            client.call(b"nobody", 0.5)
        assert not client.wait_ready(1, 0.5)
        assert time.monotonic() - began < 25, "the client's own time-out of 30 s is not what was asked for"
        broker.come_back()
        assert client.call(b"after", LONG) == b"after"


@pytest.mark.parametrize("connected", [False, True])
def test_a_call_waits_no_longer_than_its_own_time_for_a_call_that_may_wait_long(broker: Broker, connected: bool) -> None:
    answers: list[bytes] = []
    with penstock.server(broker.address, lambda payload: payload), penstock.client(broker.address) as client:
        if connected:
            assert client.call(b"before", LONG) == b"before"
        broker.go_away()
        patient = threading.Thread(target=lambda: answers.append(client.call(b"patient", LONG)))
        patient.start()
        until(lambda: client.ledger.in_flight == 1)
        with pytest.raises(TimeoutError):
            client.call(b"short", 0.2)
        assert not client.wait_ready(1, 0.2)
        assert patient.is_alive(), "the short call has waited for the long one"
        broker.come_back()
        patient.join(LONG)
    assert answers == [b"patient"]


def test_a_client_that_is_opened_before_its_broker_waits_with_its_first_call(broker: Broker) -> None:
    broker.go_away()
    with penstock.client(broker.address) as client:
        with pytest.raises(TimeoutError, match=f"127.0.0.1:{broker.port}"):
            client.call(b"nobody", 0.5)
        broker.come_back()
        with penstock.server(broker.address, lambda payload: payload):
            assert client.call(b"there", LONG) == b"there"


def test_a_temporary_queue_goes_on_where_it_was_after_a_reconnect(broker: Broker) -> None:
    with Subscriber(port=broker.port, topics="plan") as reader, Client(port=broker.port) as writer:
        writer.publish("plan", b"1")
        assert bytes(reader.receive(LONG)) == b"1"
        broker.go_away()
        broker.come_back()
        writer.publish_many("plan", [b"2", b"3"])  # its reader has not looked since
        assert [bytes(reader.receive(LONG)) for _ in range(2)] == [b"2", b"3"]
        until(lambda: len([queue for queue in writer.queues() if queue["queue"].startswith("temporary.")]) == 1)
