"""A queue that stands still says so in its state, wherever it is looked at, and counts what is behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import address
from penstock.broker import Client, Limits, Server
from penstock.broker.explain import explain
from penstock.broker.queue import Queue
from tests.broker.conftest import LONG, until


def look(client: Client, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(entry for entry in client.queues() if entry["queue"] == name)
    return found


def damage(directory: Path, text: bytes) -> None:
    """Overwrite some bytes of a message where it lies on disk."""
    for path in directory.glob("*.log"):
        data = path.read_bytes()
        if (at := data.find(text)) >= 0:
            with path.open("r+b") as file:
                file.seek(at + 100)
                file.write(b"XXXX")
            return
    raise AssertionError("the message is nowhere")


def test_a_damaged_message_is_told_and_counted(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve()
    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        client.queue("late", topics="t")
        for number in range(5):
            client.publish("t", b"%d" % number * 5000)
        damage(tmp_path / "broker", b"2" * 3000)
        with client.subscribe("q", ack="manual") as consumer:
            assert [consumer.receive(timeout=LONG).position for _ in range(2)] == [1, 2]
            for _ in range(2):  # also after the broker has looked at its queues
                until(lambda: look(client, "q")["state"].startswith("failed to read a message"))
                list(server.broker.observing())
            assert server.broker.queues["q"]._state_text.startswith("failed to read a message"), "ls reads it there"
            found = look(client, "q")
            assert (found["depth"], found["depth_at_least"], found["in_flight"]) == (5, True, 2)
            told = explain(address.parse(f"broker://127.0.0.1:{server.port}/?queue=q"))
            assert any(finding.grave and "failed to read" in finding.text for finding in told)
            assert look(client, "late")["depth"] == 5, "who only looks is not closed for it"
            client.seek("q", position=4)
            assert [consumer.receive(timeout=LONG).position for _ in range(2)] == [4, 5]
            assert look(client, "q")["state"] == ""


def test_dead_letters_that_are_refused_are_told(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, tokens: Path
) -> None:
    server = serve(tokens=tokens)
    north = Client(port=server.port, token="secret-north")
    root = Client(port=server.port, token="secret-root")
    with north, root:
        north.queue("north-q", topics="sensors.north.a", max_tries=1, dead_letter="north-later")
        root.queue("north-later", topics="pay")
        north.publish("sensors.north.a", b"x")
        with north.subscribe("north-q", ack="manual") as consumer:
            consumer.nack(consumer.receive(timeout=LONG))
            for _ in range(2):
                until(lambda: look(root, "north-q")["state"].startswith("dead letters wait: "))
                list(server.broker.observing())
            assert look(root, "north-q")["depth"] == 1


def test_a_depth_that_is_not_counted_to_its_end_is_marked(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.queue("q", topics="t")
    client.publish_many("t", [b""] * 40_000)
    counting = Queue.counting
    monkeypatch.setattr(Queue, "counting", lambda self, most=10_000: counting(self, most))
    monkeypatch.setattr(Queue.backlog, "__defaults__", (10_000,))
    found = look(client, "q")
    assert found["depth_at_least"] and 10_000 <= found["depth"] < 40_000
    assert client.purge("q") == 40_000
    assert not look(client, "q")["depth_at_least"]


def test_the_brokers_own_copies_have_a_bound_beyond_the_quota(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.broker.broker.OWN_BYTES", 65_536)
    server = serve(limits=Limits(quota_bytes=4_000_000))
    with Client(port=server.port) as client:
        client.queue("q", topics="t", max_tries=1)
        client.publish_many("t", [bytes(65_536)] * 40)
        with client.subscribe("q", ack="manual") as consumer:
            for _ in range(40):
                consumer.nack(consumer.receive(timeout=LONG))
            until(lambda: look(client, "q")["state"].startswith("dead letters wait: the disk quota"))
        known = {entry["queue"]: entry for entry in client.queues()}
        assert known["q"]["depth"] + known["q.dead"]["depth"] == 40, "they wait, none is lost"
        assert server.broker.store.statistics().stored_bytes < 4_000_000 * 9 // 8 + (1 << 20) + 65_536
