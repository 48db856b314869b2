"""The numpy reader against the native writer: same bytes, same answers, no native code loaded by it."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

numpy = pytest.importorskip("numpy")
pytest.importorskip("pyarrow")

from penstock._core import journal as native  # noqa: E402
from penstock.errors import CorruptionError, InvalidArgument  # noqa: E402
from penstock.journal import Journal, layout  # noqa: E402
from penstock.journal import format as reading  # noqa: E402

ALL = ["position", "topic", "ordinal", "timestamp_ns", "size", "payload", "message_id", "key", "properties"]


def fill(directory: Path, **options: int) -> list[tuple[int, str, bytes]]:
    """A journal of several segments, topics and sizes; what it holds."""
    held = []
    with Journal(directory, segment_bytes=65536, **options) as journal:  # type: ignore[arg-type]
        for i in range(300):
            topic = f"sensors.{i % 3}.temp"
            data = bytes([i % 251]) * (i * 7 % 900)
            position = journal.append(topic, data, properties={"i": str(i)} if i % 5 == 0 else None, key=f"k{i % 4}")
            held.append((position, topic, data))
        first, _ = journal.append_many("many", [b"%d" % i for i in range(1000)])
        held += [(first + i, "many", b"%d" % i) for i in range(1000)]
        for i in range(20):
            held.append((journal.append("last", b"last %d" % i), "last", b"last %d" % i))
    return held


def test_checksums_agree_with_known_values_and_each_other() -> None:
    assert native.crc32c(b"123456789") == 0xE3069283
    data = bytes(range(256)) * 9 + b"tail"
    for cut in (0, 1, 7, 8, 100):
        part = data[cut:]
        assert native.crc32c(part) == native.crc32c_table(part) == layout.crc32c(part)
        assert native.crc32c(part[9:], native.crc32c(part[:9])) == native.crc32c(part)
        rows = numpy.frombuffer(part, numpy.uint8).reshape(1, -1)
        assert reading.crc32c_rows(rows, numpy.zeros(1, numpy.uint32))[0] == native.crc32c(part)
    import zlib

    assert native.crc32(data) == zlib.crc32(data)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 66, 1000, 4096, 4097, 100_003])
@pytest.mark.parametrize("count", [1, 2, 30])
def test_checksums_of_long_rows_are_those_of_the_core(size: int, count: int) -> None:
    chosen = numpy.random.default_rng(size * 31 + count)
    rows = chosen.integers(0, 256, (count, size), dtype=numpy.uint8)
    seeds = chosen.integers(0, 1 << 32, count, dtype=numpy.uint32)
    expected = [native.crc32c(row.tobytes(), int(seed)) for row, seed in zip(rows, seeds, strict=True)]
    assert reading.crc32c_rows(rows, seeds).tolist() == expected


def test_a_long_row_takes_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each byte of a large message would take seconds a MiB."""
    steps = 0
    before = reading._crc_of_columns

    def counting(rows: Any, crc: Any) -> Any:
        nonlocal steps
        steps += rows.shape[1]
        return before(rows, crc)

    monkeypatch.setattr(reading, "_crc_of_columns", counting)
    reading.crc32c_rows(numpy.zeros((1, 1 << 20), numpy.uint8), numpy.zeros(1, numpy.uint32))
    assert 0 < steps < 5000


def test_everything_is_read_back(tmp_path: Path) -> None:
    held = fill(tmp_path / "j")
    directory = reading.open_directory(tmp_path / "j")
    assert len(directory.segments) > 2
    rows = [row for batch in directory.batches(columns=ALL, rows=100) for row in batch.to_pylist()]
    assert [(row["position"], row["topic"], row["payload"]) for row in rows] == held
    assert [row["size"] for row in rows] == [len(data) for _, _, data in held]
    assert dict(rows[10]["properties"]) == {"i": "10"}
    assert rows[10]["key"] == "k2"
    ordinals = [row["ordinal"] for row in rows if row["topic"] == "sensors.1.temp"]
    assert ordinals == list(range(1, 101))


EVERY = [
    "position",
    "topic",
    "ordinal",
    "timestamp_ns",
    "stored_ns",
    "size",
    "payload",
    "message_id",
    "key",
    "properties",
]


def rows_of(read: Any, start: int, stop: int, most: int, size: int, chosen: Any, wanted: list[str]) -> list[Any]:
    """What a reader's ``columns`` gives for a range, by row."""
    rows: list[Any] = []
    while start < stop:
        columns, names, count, following = read(start, stop, most, size, chosen, frozenset(wanted))
        assert count <= most and (columns.keys() == set(wanted) or not count)
        parts = []
        for name in wanted if count else []:
            if name == "topic":
                parts.append([names[number] for number in numpy.frombuffer(columns[name], numpy.uint32)])
            elif name in reading.PARTS:
                offsets, data = numpy.frombuffer(columns[name][0], numpy.int32).tolist(), columns[name][1]
                assert (offsets[0] == 0 and offsets[-1] == len(data) and len(data) <= size) or count == 1
                parts.append([data[begin:end] for begin, end in itertools.pairwise(offsets)])
            else:
                parts.append(numpy.frombuffer(columns[name], numpy.int64).tolist())
        rows += zip(*parts, strict=True)
        assert following > start or not count
        start = following if following > start else stop
    return rows


@pytest.mark.parametrize("kind", ["plain", "compacted", "retained", "without index", "without names"])
def test_the_native_reader_and_its_plain_twin_give_the_same(tmp_path: Path, kind: str, seed: int) -> None:
    path = tmp_path / "j"
    chance = random.Random(seed)
    with Journal(path, segment_bytes=65536, compact_topics=["state"]) as journal:
        for i in range(400):
            properties = {"i": str(i), "unit": "ä"} if i % 3 == 0 else None
            key, identity = f"k{i % 5}", f"id{i}" if i % 2 else None
            data = chance.randbytes(chance.choice([0, 5, 120, 600]))
            journal.append(
                chance.choice(["state", "a.b", "a.c"]), data, properties=properties, key=key, message_id=identity
            )
        journal.append_many("many", [b"%d" % i for i in range(700)])
        if kind == "compacted":
            assert journal.compact() > 0
        if kind == "retained":
            journal.retain_bytes = 80_000
            journal.retain()  # some may have gone already, in a thread of the journal's
            assert journal.first > 1
        last = sorted(path.glob("*.log"))[-1]
    if kind == "without index":
        for place in chance.sample(sorted(path.glob("*.index")), 2):
            place.unlink()
    if kind == "without names":  # of the newest segment: the others tell
        with last.open("r+b") as file:
            file.seek(layout.SEGMENT_HEADER_BYTES + layout.BATCH.size + layout.RECORD.size)
            file.write(b"?")
    with Journal(path, mode="read") as journal:
        plain = reading.open_directory(path)
        assert plain.frontier == journal.frontier and plain.first == journal.first
        wholes = 0
        for patterns in (None, ["a.*"], ["state", "many"], ["nothing"]):
            for wanted in (EVERY, chance.choice([["ordinal", "size"], ["key"], ["topic", "payload"]])):
                start, stop = sorted(chance.sample(range(1, journal.frontier + 1), 2))
                for begin, end in ((1, journal.frontier), (start, stop)):
                    most, size = chance.choice(
                        [(65536, 4 << 20), (chance.randrange(10, 90), chance.randrange(500, 9000))]
                    )
                    chosen = None if patterns is None else native.TopicFilter(patterns)
                    found = rows_of(journal._live_reader().columns, begin, end, most, size, chosen, wanted)
                    assert found == rows_of(plain.columns, begin, end, most, size, patterns, wanted)
                    wholes += begin == 1 and patterns is None and len(found) == journal.frontier - journal.first
        assert wholes == (0 if kind == "compacted" else 2)
        messages = [
            m for at in range(journal.first, journal.frontier) for m in journal.read_many(at, 1) if m.position == at
        ]
        rows = rows_of(plain.columns, 1, plain.frontier, 1000, 1 << 20, None, ["position", "topic", "payload"])
        assert rows == [(m.position, m.channel, bytes(m)) for m in messages]


def test_ranges_and_patterns(tmp_path: Path) -> None:
    held = fill(tmp_path / "j")
    directory = reading.open_directory(tmp_path / "j")
    rows = [
        row
        for batch in directory.batches(100, 320, columns=["position", "topic"], topics=["sensors.*.temp"], bytes=4096)
        for row in batch.to_pylist()
    ]
    assert [row["position"] for row in rows] == [
        p for p, topic, _ in held if 100 <= p < 320 and topic.startswith("sensors")
    ]
    with pytest.raises(InvalidArgument, match="did you mean position"):
        list(directory.batches(columns=["positon"]))


@pytest.mark.parametrize("suffix", ["index", "sums", "topics"])
def test_lost_caches_cost_time_and_nothing_else(tmp_path: Path, suffix: str) -> None:
    held = fill(tmp_path / "j")
    for path in (tmp_path / "j").glob(f"*.{suffix}"):
        path.unlink()
    directory = reading.open_directory(tmp_path / "j")
    rows = [row for batch in directory.batches(columns=["position", "payload"]) for row in batch.to_pylist()]
    assert [(row["position"], row["payload"]) for row in rows] == [(p, data) for p, _, data in held]
    with Journal(tmp_path / "j", mode="read") as journal:
        found = []
        at = 1
        while at < journal.frontier:
            batch, at = journal.read_from(at, 1000)
            found += [(message.position, bytes(message)) for message in batch]
    assert found == [(p, data) for p, _, data in held]


@pytest.mark.parametrize("part", ["sealed", "active"])
def test_a_flipped_bit_is_told_with_its_place(tmp_path: Path, part: str) -> None:
    held = fill(tmp_path / "j")
    directory = reading.open_directory(tmp_path / "j")
    segment = directory.segments[0 if part == "sealed" else -1]
    entry = segment.index()[5]
    place = int(entry["offset"]) + reading.HEAD
    position = int(entry["position"])
    assert held[position - 1][2]
    with segment.path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 4]))
    with pytest.raises(CorruptionError) as caught:
        list(directory.batches())
    assert str(position) in str(caught.value)
    assert caught.value.place == f"{segment.path}:{int(entry['offset'])}"
    with Journal(tmp_path / "j", mode="read") as journal:
        with pytest.raises(CorruptionError, match=f"positions {position} to {position}") as caught:
            journal.read(position)
        assert str(segment.path) in str(caught.value.place)
        assert bytes(journal.read(position - 1)) == held[position - 2][2]
        assert bytes(journal.read(position + 1)) == held[position][2]


def test_the_numpy_reader_loads_no_native_code(tmp_path: Path) -> None:
    fill(tmp_path / "j")
    code = (
        "import sys\n"
        "from penstock.journal import format\n"
        f"d = format.open_directory({str(tmp_path / 'j')!r})\n"
        "assert sum(b.num_rows for b in d.batches()) == 1320\n"
        "assert not any(name.startswith('penstock._core') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
