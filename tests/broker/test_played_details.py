"""What is played or replayed into a broker keeps times, properties, message ids and keys."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock
from penstock.broker import Client, Publisher, Server
from penstock.broker.client import publisher as publisher_module
from penstock.broker.fetch import RangeClient
from penstock.errors import InvalidArgument, RefusedError
from penstock.journal import Details, Journal
from penstock.recording.player import Player

from .conftest import LONG, until

ROWS: list[tuple[str, bytes, dict[str, str], str, str, int]] = [
    ("a", b"0", {"n": "0"}, "m0", "k", -9_000_000_000_000_000_000),
    ("a", b"1", {}, "m1", "", -1),
    ("b", b"2", {"ä": ""}, "", "with blanks", 0),
    ("b", b"", {}, "", "", 1),
    ("a", b"4" * 5000, {"n": "4"}, "m0", "k", 9_000_000_000_000_000_000),  # an id that was there before
]


def record(directory: Path) -> None:
    with Journal(directory) as journal:
        for topic, data, properties, name, key, when in ROWS:
            journal.append(
                topic, data, properties=properties or None, message_id=name or None, key=key or None, timestamp_ns=when
            )


def play(directory: Path, port: int) -> int:
    with contextlib.ExitStack() as stack:
        recorded = stack.enter_context(Journal(directory, mode="read"))
        player = Player(stack, {name: f"broker://127.0.0.1:{port}/{name}" for name in "ab"}, 0, 0.0)
        return player.play(((recorded, message) for message in recorded.read_many(1, 100)), 0, lambda count: None)


def rows_of(port: int) -> list[tuple[str, bytes, dict[str, str], str, str, int]]:
    with RangeClient(port=port) as client:
        return [
            (row.topic, row.payload, row.properties, row.message_id or "", row.key or "", row.timestamp_ns)
            for part in client.ranges(1, client.frontier)
            for row in part
        ]


def stored(directory: Path) -> list[tuple[str, bytes, dict[str, str], str, str, int]]:
    """What is in a broker's directory, which is a journal."""
    with Journal(directory, mode="read") as journal:
        found = []
        for message in journal.read_many(1, 100):
            details = journal.details(message.position or 0)
            row = (message.channel or "", bytes(message), dict(message.properties), details.message_id, details.key)
            found.append((*row, message.timestamp_ns))
        return found


def test_a_recording_that_is_played_into_a_broker_is_the_same_there(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    record(tmp_path / "recording")
    server = serve()
    with penstock.subscriber(f"broker://127.0.0.1:{server.port}/*") as subscriber:
        assert play(tmp_path / "recording", server.port) == len(ROWS)
        found: list[Any] = []
        while len(found) < len(ROWS):
            message = subscriber.receive(LONG)
            properties = {name: value for name, value in message.properties.items() if name != "deliveries"}
            found.append((message.channel, bytes(message), properties, message.timestamp_ns))
    assert found == [(topic, data, properties, when) for topic, data, properties, _, _, when in ROWS]
    assert rows_of(server.port) == ROWS
    server.close()
    assert stored(tmp_path / "broker") == ROWS


def test_it_may_be_played_again_and_its_ids_count_for_others(serve: Callable[..., Server], tmp_path: Path) -> None:
    """Playing leaves nothing out, however often; a later publish with one of the ids is a duplicate."""
    record(tmp_path / "recording")
    server = serve()
    assert [play(tmp_path / "recording", server.port) for _ in range(2)] == 2 * [len(ROWS)]
    assert rows_of(server.port) == 2 * ROWS
    with Client(port=server.port) as client:
        assert client.publish("a", b"again", message_id="m1").duplicate
        assert not client.publish("a", b"new", message_id="m2").duplicate


@pytest.mark.parametrize("stored_first", [False, True])
def test_a_range_whose_answer_is_lost_is_stored_once(
    serve: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored_first: bool
) -> None:
    """The broker ends after a range was sent: whether it has stored it is not known, or it has, and nobody has read
    its answer.
    """
    record(tmp_path / "recording")
    server = serve()
    monkeypatch.setattr(publisher_module, "RANGE_BYTES", 1)  # each message is a range
    settle = Publisher._settle
    calls = 0

    def disturbed(self: Publisher, most: int, deadline: Any = None) -> None:
        nonlocal server, calls
        calls += 1
        if calls == 2:
            if stored_first:
                until(lambda: len(rows_of(server.port)) == calls)
            server.close()
            server = serve(port=server.port)
        settle(self, most, deadline)

    monkeypatch.setattr(Publisher, "_settle", disturbed)
    play(tmp_path / "recording", server.port)
    assert rows_of(server.port) == ROWS


def test_a_refused_range_is_one_refusal(serve: Callable[..., Server]) -> None:
    server = serve()
    with Publisher(port=server.port, topic="t") as publisher:
        wrong = [penstock.Message(b"1", properties={"k": "v" * 70_000}), penstock.Message(b"2")]
        details = [Details("m1", "k1"), Details("m2", "k2")]
        with pytest.raises(RefusedError):
            publisher.forward_details(wrong, details)
        assert publisher.ledger.dropped == {"refused": 2}
        assert publisher.forward_details([penstock.Message(b"1"), penstock.Message(b"2")], details) == 2
        publisher.publish(b"3")
        assert publisher.ledger.delivered == 3 and publisher.ledger.in_flight == 0
    assert [row[1] for row in rows_of(server.port)] == [b"1", b"2", b"3"]


def test_what_cannot_be_kept_is_refused(server: Server) -> None:
    message = [penstock.Message(b"1")]
    with Publisher(port=server.port, topic="t") as publisher:
        publisher._client._dialogue.ranges = False  # an older broker
        with pytest.raises(RefusedError, match="older version"):
            publisher.forward_details(message, [Details("m", "")])
        assert publisher.forward_details(message, [Details("", "")]) == 1
    with Publisher(port=server.port, topic="t", ttl_s=5) as mortal, pytest.raises(InvalidArgument, match="ttl_s"):
        mortal.forward_details(message, [Details("", "k")])


def test_rows_of_a_frame_that_are_replayed(server: Server) -> None:
    replay = pytest.importorskip("penstock.spark.pipelines.replay")
    names = ("topic", "payload", "properties", "message_id", "key", "timestamp_ns")
    rows = [SimpleNamespace(**dict(zip(names, row, strict=True))) for row in ROWS]
    with replay._Publishers(f"broker://127.0.0.1:{server.port}/{{topic}}", {}) as publishers:
        replay._play(iter(rows), publishers, speed=None, on_progress=None, clock=lambda: 0.0, sleep=lambda s: None)
    assert rows_of(server.port) == ROWS
