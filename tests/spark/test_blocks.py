"""Rows as ranges: what Arrow columns become, without Spark."""

from __future__ import annotations

import pyarrow
import pytest

from penstock._core.broker import batch_details, batch_names, range_batch
from penstock.broker.words import OWN_PROPERTIES
from penstock.errors import CorruptionError, InvalidArgument
from penstock.journal import Journal
from penstock.spark import blocks
from penstock.spark.staging import DirectoryStaging

ROWS = [
    {"topic": "a", "payload": b"1", "timestamp_ns": 10**18, "properties": [("k", "v")], "message_id": "id", "key": None},
    {"topic": "b", "payload": b"", "timestamp_ns": None, "properties": None, "message_id": None, "key": "key"},
    {"topic": "a", "payload": b"", "timestamp_ns": 10**18 + 5, "properties": [("x", ""), ("", "y")], "message_id": "", "key": ""},
    {"topic": "c", "payload": b"4" * 100, "timestamp_ns": 7, "properties": [], "message_id": None, "key": None},
]  # fmt: skip
WANTED = [
    ("a", b"1", {"k": "v"}, b"id", b""),
    ("b", b"", {}, b"", b"key"),
    ("a", b"", {"x": "", "": "y"}, b"", b""),
    ("c", b"4" * 100, {}, b"", b""),
]


def batch(rows):
    return pyarrow.RecordBatch.from_pylist(rows, schema=blocks.SHAPE)


def decoded(rows, **options):
    found = []
    for block in blocks.encode(rows, **options):
        made = range_batch(block.index, block.data, dict(enumerate(block.topics)), foreign=False)
        for message, details in zip(made, batch_details(made), strict=True):
            found.append((message.channel, bytes(message), dict(message.properties), *details))
    return found


@pytest.mark.parametrize("block_rows", [1, 2, 3, 8192])
def test_what_goes_in_comes_out(monkeypatch, block_rows):
    """Whole, cut, and as a slice of a larger batch, whose columns begin somewhere in their memory."""
    monkeypatch.setattr(blocks, "BLOCK_ROWS", block_rows)
    assert decoded(batch(ROWS)) == WANTED
    assert decoded(batch(ROWS * 5).slice(3, 9)) == (WANTED * 5)[3:12]
    assert decoded(batch(ROWS).slice(1, 0)) == []
    assert decoded(batch([ROWS[3], ROWS[1]]).slice(1)) == [WANTED[1]]
    beside = dict(ROWS[0], properties=[("k", "\0")])
    assert decoded(batch([beside, ROWS[0], beside]).slice(1, 1)) == [WANTED[0]], "what is not in the slice does not count"


def test_large_payloads_are_cut_into_blocks():
    rows = [dict(ROWS[0], payload=b"x" * 900_000) for _ in range(7)]
    found = list(blocks.encode(batch(rows)))
    assert len(found) == 4
    assert decoded(batch(rows)) == [("a", b"x" * 900_000, {"k": "v"}, b"id", b"")] * 7


def test_properties_of_the_receiver_are_left_out():
    rows = [dict(ROWS[0], properties=[("$topic", "t"), ("k", "v"), ("$reason", "r")]), dict(ROWS[1]),
            dict(ROWS[3], properties=[("$topic", "t")])]  # fmt: skip
    assert [row[2] for row in decoded(batch(rows), own=OWN_PROPERTIES)] == [{"k": "v"}, {}, {}]
    assert decoded(batch(rows))[0][2] == {"$topic": "t", "k": "v", "$reason": "r"}
    with pytest.raises(InvalidArgument, match=r"mine.*broker's own"):
        decoded(batch([dict(ROWS[0], properties=[("$mine", "v")])]), own=OWN_PROPERTIES)


@pytest.mark.parametrize(("change", "text"), [
    ({"topic": None}, "1 rows have no topic"),
    ({"payload": None}, "1 rows have a null payload"),
    ({"properties": [("k", None)]}, "have no value"),
    ({"properties": [("k", "a\0b")]}, "NUL"),
    ({"properties": [("k\0", "b")]}, "NUL"),
    ({"message_id": "i" * 65536}, "message_id has at most 65535"),
    ({"key": "k" * 65536}, "key has at most 65535"),
])  # fmt: skip
def test_rows_that_are_no_messages(change, text):
    with pytest.raises(InvalidArgument, match=text):
        decoded(batch([ROWS[1], dict(ROWS[0], **change)]))


def shorter(stream):
    """Where the first of two equal batches of an Arrow stream ends."""
    with pyarrow.ipc.open_stream(stream) as reader:
        head = reader.schema.serialize().size
    return head + (len(stream) - 8 - head) // 2


def test_the_driver_takes_no_other_file(tmp_path):
    """A staged file with other columns, cut short or changed: an error, and nothing of the job in the journal."""
    staging = DirectoryStaging(tmp_path / "j", "job")
    staging.begin()
    good, _ = staging.write(0, 0, iter([batch(ROWS)]))
    bad, _ = staging.write(1, 0, iter([pyarrow.RecordBatch.from_pylist([{"payload": b"x"}])]))
    with pytest.raises(CorruptionError, match="other columns"):
        staging.commit([good, bad], once=True, batch=None)
    twice, rows = staging.write(2, 0, iter([batch(ROWS), batch(ROWS)]))
    whole = (staging.directory / twice).read_bytes()
    for size, text in ((len(whole) - 200, "no file of staged rows"), (shorter(whole), f"4 rows, not as many.*{rows}?")):
        (staging.directory / twice).write_bytes(whole[:size])
        with pytest.raises(CorruptionError, match=text):
            staging.commit([good, twice], once=True, batch=None)
    with pytest.raises(CorruptionError, match="no file of staged rows"):
        staging.commit([good, "000003-0-5.arrow"], once=True, batch=None)
    with Journal(tmp_path / "j") as journal:
        assert journal.frontier == 1
    staging.commit([good], once=True, batch=None)
    with Journal(tmp_path / "j", mode="read") as journal:
        found = journal.read_many(1)
        assert [(m.channel, bytes(m), dict(m.properties)) for m in found] == [row[:3] for row in WANTED]
        assert [m.timestamp_ns for m in found][0:4:3] == [10**18, 7]
        assert [(d.message_id, d.key) for d in map(journal.details, range(1, 5))] == [("id", ""), ("", "key"), ("", ""), ("", "")]
        assert batch_names(found)[1:] == ("a", "b", "c")


def test_times_are_kept_as_given_and_those_not_given_are_the_time_of_storing(tmp_path):
    given = [None, 0, -1, 5, -(10**18)]
    rows = {"topic": ["t"] * 5, "payload": [b"x"] * 5, "timestamp_ns": given, "properties": [[]] * 5}
    batch = pyarrow.RecordBatch.from_pydict({**rows, "message_id": [None] * 5, "key": [None] * 5}, schema=blocks.SHAPE)
    with Journal(tmp_path / "j") as journal, journal.transaction() as transaction:
        for block in blocks.encode(batch):
            made = range_batch(block.index, block.data, dict(enumerate(block.topics)), foreign=False)
            transaction.append_batch(made, batch_names(made))
    with Journal(tmp_path / "j", mode="read") as journal:
        found = journal.read_many(1)
        stored = list(found.stored_ns)
        assert list(found.timestamps_ns) == [stored[0], *given[1:]] and stored == sorted(stored) and stored[0] > 0


def test_the_least_number_is_no_time():
    """It stands for the time of storing in a journal, so it would be stored as another time."""
    row = pyarrow.RecordBatch.from_pylist([{"topic": "a", "payload": b"", "timestamp_ns": -(2**63)}], schema=blocks.SHAPE)
    with pytest.raises(InvalidArgument, match="timestamp_ns=-9223372036854775808 is no time"):
        next(blocks.encode(row))
