"""Message ids and keys: they come with a fetched range, and with what is staged; null where a message has none."""

from __future__ import annotations

import errno
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock._core.broker import batch_details, range_batch
from penstock.broker import Client, ConnectionLimits, Limits, Server
from penstock.broker.fetch import RangeClient
from penstock.broker.ranges import ENTRY, Range, decode_range, encode_entry, encode_head
from penstock.errors import InvalidArgument, ProtocolError, RefusedError
from penstock.journal import Journal
from penstock.journal.layout import TIME_NOW

from .conftest import LONG, Wire, until
from .test_disk_failures import Failing

ROWS = [
    ("a", b"1", {"k": "v"}, "id-1", "key-1"),
    ("a", b"", None, "id-2", None),
    ("b", b"", {"k": ""}, None, "schlüssel"),
    ("b", b"4", None, None, None),
    ("a", b"5" * 300, {"x": "y", "z": ""}, "", ""),  # nothing is what a journal has of an empty one
    ("c", b"6", None, "i" * 65535, "k" * 65535),
]


def expected() -> list[tuple[str, bytes, dict[str, str], str | None, str | None]]:
    return [(topic, data, more or {}, name or None, key or None) for topic, data, more, name, key in ROWS]


def fetched(reader: RangeClient) -> list[tuple[str, bytes, dict[str, str], str | None, str | None]]:
    found = [message for part in reader.ranges(1, reader.frontier, most_bytes=400) for message in part]
    return [(row.topic, row.payload, row.properties, row.message_id, row.key) for row in found]


def test_a_range_has_what_the_journal_has(serve: Callable[..., Server], tmp_path: Path) -> None:
    with Journal(tmp_path / "broker") as journal:
        for topic, data, more, name, key in ROWS:
            journal.append(topic, data, properties=more, message_id=name, key=key)
    with RangeClient(port=serve().port) as reader:
        assert fetched(reader) == expected()
        pytest.importorskip("pyarrow")
        table = reader.fetch(1).record_batch(["payload", "message_id", "key"])
        wanted = expected()
        assert table.column("payload").to_pylist() == [row[1] for row in wanted]
        assert table.column("message_id").to_pylist() == [row[3] for row in wanted]
        assert table.column("key").to_pylist() == [row[4] for row in wanted]


def test_what_is_staged_keeps_them(serve: Callable[..., Server]) -> None:
    server = serve()
    with RangeClient(port=server.port) as writer, RangeClient(port=server.port) as reader:
        for topic, data, more, name, key in ROWS:
            writer.stage("job.0", topic, [data], properties=[more], message_ids=[name], keys=[key])
        assert writer.commit("job", ["job.0"]) == (1, len(ROWS), False)
        assert fetched(reader) == expected()
        writer.stage("job.0", "a", [b"again"], message_ids=["other"])
        assert writer.commit("job", ["job.0"]) == (1, len(ROWS), True), "a batch that runs again stores nothing"
        assert fetched(reader) == expected()
    server.close()
    with RangeClient(port=serve().port) as reader:
        assert fetched(reader) == expected()


def test_ids_of_a_transaction_count_among_duplicates(serve: Callable[..., Server]) -> None:
    """A transaction stores all it has; who publishes with one of its ids later is told where that is."""
    server = serve()
    with RangeClient(port=server.port) as writer, Client(port=server.port) as client:
        before = client.publish("t", b"x", message_id="seen")
        writer.stage("job", "t", [b"x", b"y", b"z"], message_ids=["seen", "fresh", "fresh"])
        first, last, _ = writer.commit("job")
        assert last - first == 2
        assert client.publish("t", b"x", message_id="seen") == before
        assert client.publish("t", b"y", message_id="fresh") == first + 1
    server.close()
    server = serve()
    with Client(port=server.port) as client, RangeClient(port=server.port) as reader:
        assert client.publish("t", b"y", message_id="fresh") in (first + 1, first + 2)
        assert reader.frontier == last + 1, "nothing was stored again"


def test_ids_of_a_transaction_that_was_not_stored_are_unknown(serve: Callable[..., Server]) -> None:
    disk = Failing()
    server = serve(disk=disk)
    with RangeClient(port=server.port) as writer, Client(port=server.port, timeout=LONG) as client:
        writer.stage("job", "t", [b"x"], message_ids=["id"], keys=["key"])
        disk.write_error = errno.ENOSPC
        with pytest.raises(RefusedError, match="full"):
            writer.commit("job")
        disk.write_error = 0
        assert not len(server.broker.identifiers)
        assert client.publish("t", b"first", message_id="id") == 1
        assert writer.commit("job") == (2, 2, False), "it is still staged, and stores all it has"
        assert [(row.payload, row.message_id, row.key) for row in writer.fetch(1)] == [
            (b"first", "id", None),
            (b"x", "id", "key"),
        ]


def test_ids_of_a_transaction_are_bounded_as_others(serve: Callable[..., Server]) -> None:
    """Of many the last ones are kept; one that is too long to be published with is not."""
    server = serve(limits=Limits(deduplication_ids=4))
    with RangeClient(port=server.port) as writer, Client(port=server.port) as client:
        for part in range(3):
            writer.stage(f"job.{part}", "t", [b"x"] * 10, message_ids=[f"{part}-{number}" for number in range(10)])
        writer.stage("job.3", "t", [b"x"], message_ids=["i" * 256])
        first, _, _ = writer.commit("job", [f"job.{part}" for part in range(4)])
        assert len(server.broker.identifiers) <= 4
        assert client.publish("t", b"x", message_id="2-9") == first + 29
        assert client.publish("t", b"x", message_id="0-0") == first + 31, "no longer known: stored again"


def test_messages_of_a_range_count_for_the_rate(serve: Callable[..., Server]) -> None:
    server = serve(connection_limits=ConnectionLimits(max_rate=200))
    with RangeClient(port=server.port) as writer:
        began = time.monotonic()
        writer.stage("job", "t", [b"x"] * 300)
        writer.commit("job")
        assert time.monotonic() - began >= 0.4
    assert max((connection.received_messages for connection in server.connections.values()), default=300) == 300


def test_a_message_that_waits_or_dies_keeps_them(serve: Callable[..., Server], tmp_path: Path) -> None:
    """A delayed message when it is due, a dead letter, and one that is sent back: each is the message that was published."""
    with Journal(tmp_path / "broker") as journal:
        journal.append("t", b"poison", message_id="id-1", key="key-1")
    server = serve()
    with Client(port=server.port) as client:
        client.queue("q", topics="t", max_tries=1, from_position=1)
        client.publish("t", b"late", message_id="id-2", delay_s=0.05)
        with client.subscribe("q", ack="manual") as consumer:
            for wanted in (b"poison", b"late"):
                message = consumer.read(LONG)
                assert message is not None and bytes(message) == wanted
                consumer.nack(message)
            until(lambda: any(entry["queue"] == "q.dead" and entry["depth"] == 2 for entry in client.queues()))
        assert client.redrive("q") == 2
    server.close()
    with Journal(tmp_path / "broker", mode="read") as journal:
        batch = journal.read_many(1, 100)
        found = {
            (message.channel, bytes(message), *details)
            for message, details in zip(batch, batch_details(batch), strict=True)
        }
    poison, late = (b"poison", b"id-1", b"key-1"), (b"late", b"id-2", b"")
    for topic in ("t", "$dead.q", "$queue.q"):
        assert {(topic, *poison), (topic, *late)} <= found
    assert ("$delayed", *late) in found


def test_what_is_no_broker_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def answer() -> None:
            peer, _ = listening.accept()
            with peer:
                peer.recv(100)
                peer.sendall(b"220 ready\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ProtocolError, match="no broker"):
            RangeClient(port=port)
        thread.join()


def test_as_many_details_as_messages(server: Server) -> None:
    with RangeClient(port=server.port) as writer:
        with pytest.raises(ValueError, match="shorter"):
            writer.stage("job", "t", [b"1", b"2"], message_ids=["one"])
        with pytest.raises(InvalidArgument, match="65535"):
            writer.stage("job", "t", [b"1"], keys=["k" * 65536])


def one(
    data: bytes = b"x", more: bytes = b"", name: bytes = b"", key: bytes = b"", offset: int = 0
) -> tuple[bytes, bytes]:
    """The index and the bytes of a range of one message."""
    return encode_entry(offset, len(data), len(more), len(name), len(key)), data + more + name + key


def block(index: bytes, body: bytes, head: bytes | None = None) -> bytes:
    return (encode_head(len(index) // ENTRY.size, ["t"]) if head is None else head) + index + body


GOOD = one(b"data", b"k\0v\0", b"id", b"key")
WRONG = {
    "no range": b"",
    "no JSON": b"{\n" + b"".join(GOOD),
    "deep JSON": b"[" * 100_000 + b"\n",
    "no dict": b"[]\n" + b"".join(GOOD),
    "no topics": block(*GOOD, head=b'{"count": 1}\n'),
    "topics that are none": block(*GOOD, head=b'{"count": 1, "topics": {"0": 5}}\n'),
    "a topic beyond numbers": block(*GOOD, head=b'{"count": 1, "topics": {"99999999999": "t"}}\n'),
    "a topic that is not named": block(*GOOD, head=b'{"count": 1, "topics": {"7": "t"}}\n'),
    "a wildcard": block(*GOOD, head=b'{"count": 1, "topics": {"0": "t.>"}}\n'),
    "the broker's topic": block(*GOOD, head=b'{"count": 1, "topics": {"0": "$dead.q"}}\n'),
    "no messages": block(b"", b""),
    "less than it says": block(*GOOD, head=encode_head(2, ["t"])),
    "a count that is none": block(*GOOD, head=b'{"count": "9", "topics": {"0": "t"}}\n'),
    "a count beyond all": block(*GOOD, head=b'{"count": %d, "topics": {"0": "t"}}\n' % 10**30),
    "below zero": block(*GOOD, head=b'{"count": -1, "topics": {"0": "t"}}\n'),
    "data outside": block(one(b"12345")[0], b"1234"),
    "a key outside": block(one(b"1", key=b"22")[0], b"12"),
    "far outside": block(one(b"x", offset=(1 << 64) - 1)[0], b"x" * 99),
    "one over another": block(one(b"xx")[0] * 2, b"xx"),
    "properties that are no pairs": block(*one(more=b"k\0v")),
    "the broker's own properties": block(*one(more=b"$topic\0v\0")),
    "long properties": block(*one(more=b"k\0" + b"v" * 70_000 + b"\0")),
    "an id that is no text": block(*one(name=b"\xff\xfe")),
    "a key that is no text": block(*one(key=b"\xc3")),
}


@pytest.mark.parametrize("data", WRONG.values(), ids=WRONG)
def test_no_wrong_range_is_staged(server: Server, wire: Callable[[], Wire], data: bytes) -> None:
    connection = wire().send(b"HELLO 1\n")
    assert connection.line().startswith("HELLO")
    connection.send(b"LOAD job %d\n%s" % (len(data), data))
    assert connection.line().startswith(("ERR bad_range", "ERR bad_name"))
    assert not server.broker.transactions.staged and not server.broker.transactions.staged_bytes
    good = block(*GOOD)
    connection.send(b"LOAD job %d\n%s\nCOMMIT job\n" % (len(good), good))
    assert [connection.line(), connection.line()] == ["STAGED 1", "COMMITTED 1-1"]


def test_a_topic_needs_its_right(serve: Callable[..., Server], tmp_path: Path) -> None:
    rights = tmp_path / "rights.toml"
    rights.write_text(
        '[[token]]\nname = "x"\ntoken = "sesame"\npublish = ["mine.>"]\nsubscribe = [">"]\nqueues = [">"]\n'
    )
    rights.chmod(0o600)
    with RangeClient(port=serve(tokens=rights).port, token="sesame") as writer:
        assert writer.stage("job", "mine.a", [b"1"]) == 1
        with pytest.raises(RefusedError, match="not yours to publish to"):
            writer.stage("job", "theirs", [b"2"])
        entries = b"".join(encode_entry(place, 1, 0, 0, 0, topic) for place, topic in ((0, 0), (1, 1)))
        with pytest.raises(RefusedError, match="not yours to publish to"):
            writer.load("job", ["mine.a", "theirs"], entries, b"12")
        assert writer.commit("job") == (1, 1, False)


def test_what_is_staged_is_bounded(serve: Callable[..., Server]) -> None:
    server = serve(limits=Limits(max_staged_bytes=300_000))
    with RangeClient(port=server.port) as writer, pytest.raises(RefusedError, match="more than 300000 bytes"):
        for number in range(100):
            writer.stage(f"job-{number}", "t", [b""], message_ids=["i" * 60_000])
    assert server.broker.transactions.staged_bytes <= 300_000


@pytest.mark.parametrize(("field", "value"), [
    ("offset", 1 << 63), ("offset", 5), ("length", 1 << 31), ("properties_length", 1 << 31), ("message_id_length", 65535),
    ("key_length", 9), ("topic", 3),
])  # fmt: skip
def test_a_hostile_brokers_range_is_refused(field: str, value: int) -> None:
    """By the messages one by one and by columns: nothing points outside of what was sent."""
    head = {"count": 1, "next": 2, "first": 1, "frontier": 2, "journal": "j", "topics": {"0": "t"}}
    fields = {"position": 1, "ordinal": 1, "timestamp_ns": 1, "offset": 0, "length": 4, "topic": 0, "properties_length": 0,
              "message_id_length": 2, "key_length": 3}  # fmt: skip

    def made(**more: int) -> Range:
        return decode_range(json.dumps(head).encode() + b"\n" + ENTRY.pack(*{**fields, **more}.values()) + b"dataidkey")

    (right,) = made()
    assert (right.payload, right.message_id, right.key) == (b"data", "id", "key")
    part = made(**{field: value})
    with pytest.raises(ProtocolError, match="outside of its bytes"):
        list(part)
    pytest.importorskip("pyarrow")
    with pytest.raises(ProtocolError, match="outside of its bytes"):
        part.record_batch(["payload"])


@pytest.mark.parametrize("offsets", [(0, 3), (4, 0)])
def test_a_hostile_brokers_messages_lie_one_after_the_other(offsets: tuple[int, int]) -> None:
    """Columns are gathered by ascending offsets: others would point anywhere."""
    pytest.importorskip("pyarrow")
    head = {"count": 2, "next": 3, "first": 1, "frontier": 3, "journal": "j", "topics": {"0": "t"}}
    index = b"".join(encode_entry(offset, 4, 0, 0, 0) for offset in offsets)
    part = decode_range(json.dumps(head).encode() + b"\n" + index + b"datadata")
    with pytest.raises(ProtocolError, match="over another one"):
        part.record_batch(["payload"])


@pytest.mark.parametrize("head", [
    "", "[", "[]", "5", "{}", '{"count": 5, "next": 2, "first": 1, "frontier": 2, "journal": "j", "topics": {}}',
    '{"count": 0, "next": 2, "first": 1, "frontier": 2, "journal": "j", "topics": {"x": "t"}}',
    '{"count": 0, "next": -2, "first": 1, "frontier": 2, "journal": "j", "topics": {}}',
    '{"count": 0, "next": "2", "first": 1, "frontier": 2, "journal": "j", "topics": {}}',
    '{"count": 0, "next": 1e99, "first": 1, "frontier": 2, "journal": "j", "topics": {}}',
])  # fmt: skip
def test_a_hostile_brokers_head_is_refused(head: str) -> None:
    with pytest.raises(ProtocolError):
        decode_range(head.encode() + b"\n" + bytes(48))


def test_a_batch_of_a_range_keeps_its_memory() -> None:
    index, body = GOOD
    data = bytearray(body)
    batch = range_batch(index, data, {0: "t", 9: "unused"})
    with pytest.raises(BufferError):
        data.extend(b"more")
    assert [(bytes(message), dict(message.properties), message.channel) for message in batch] == [
        (b"data", {"k": "v"}, "t")
    ]
    assert batch_details(batch) == [(b"id", b"key")]
    with pytest.raises(InvalidArgument, match="larger than a message"):
        range_batch(index, data, {0: "t"}, 3)
    with pytest.raises(InvalidArgument, match="no whole number"):
        range_batch(index[:-1], data, {0: "t"})


def test_the_time_of_storing_on_request(serve: Callable[..., Server], tmp_path: Path) -> None:
    with Journal(tmp_path / "broker") as journal:
        for number in range(20):
            journal.append("ab"[number % 2], b"x" * number, timestamp_ns=-number)
    with Journal(tmp_path / "broker", mode="read") as journal:
        wanted = [(message.timestamp_ns, message.stored_ns) for message in journal.read_many(1)]
    assert wanted[5][0] == -5 and wanted[5][1] > 0
    with RangeClient(port=serve().port) as reader:
        parts = list(reader.ranges(1, 20, most_bytes=40, stored=True))
        assert len(parts) > 1
        found = [message for part in parts for message in part]
        assert [(row.timestamp_ns, row.stored_ns) for row in found] == wanted[:19]
        assert [row.payload for row in found] == [b"x" * number for number in range(19)]
        assert [row.stored_ns for row in reader.fetch(1, 3)] == [None, None, None]
        pytest.importorskip("pyarrow")
        columns = [part.record_batch(["stored_ns", "payload"]) for part in parts]
        assert [value for part in columns for value in part.column(0).to_pylist()] == [row[1] for row in wanted[:19]]
        with pytest.raises(InvalidArgument, match="stored=True"):
            reader.fetch(1).record_batch(["stored_ns"])


def test_a_range_keeps_its_times_when_it_says_so(serve: Callable[..., Server]) -> None:
    """Large and small transactions, and after a restart; without the word they are the broker's, as they always were."""
    server = serve()
    begun = time.time_ns()
    times = [-(2**63) + 1, -1, 0, 1, 2**63 - 1, TIME_NOW]
    with RangeClient(port=server.port) as writer:
        for name, copies, given in (("small", 1, True), ("large", 3000, True), ("own", 1, False)):
            rows = times * copies
            index = b"".join(ENTRY.pack(-1, 0, when, 0, 0, 0, 0, 0, 0) for when in rows)
            assert writer.load(name, ["t"], index, b"", times=given) == len(rows)
            writer.commit(name)
    server.close()
    with RangeClient(port=serve().port) as reader:
        found = [row for part in reader.ranges(1, reader.frontier, stored=True) for row in part]
    counted = len(times) * 3001
    kept = [(row.timestamp_ns, when) for row, when in zip(found[:counted], times * 3001, strict=True)]
    assert all(got == when for got, when in kept if when != TIME_NOW)
    now = [row for row, when in zip(found[:counted], times * 3001, strict=True) if when == TIME_NOW]
    now += found[counted:]
    assert len(now) == 3001 + 6
    assert all(row.timestamp_ns == row.stored_ns >= begun for row in now)


def test_a_queue_whose_messages_were_all_sent_ahead_moves_by_what_is_acknowledged(server: Server, client: Client) -> None:
    client.queue("ahead", topics="t")
    client.publish_many("t", [b"1", b"2", b"3"])
    with client.subscribe("ahead", ack="manual") as consumer:
        message = consumer.receive(LONG)
        counters = server.broker.queues["ahead"].counters
        until(lambda: counters.get("delivered") == 3, "all are sent, in one go")
        sent_ns = until(lambda: counters.get("last_ns"))
        consumer.ack(message)
        until(lambda: counters.get("last_ns") > sent_ns, "the acknowledgement is seen")
        assert counters.get("delivered") == 3
