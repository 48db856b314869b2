"""The numpy reader against the native writer: same bytes, same answers, no native code loaded by it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

numpy = pytest.importorskip("numpy")
pytest.importorskip("pyarrow")

from penstock._core import journal as native  # noqa: E402
from penstock.errors import CorruptionError, InvalidArgument  # noqa: E402
from penstock.journal import Journal, layout  # noqa: E402
from penstock.journal import format as reading  # noqa: E402

ALL = ["position", "topic", "ordinal", "timestamp_ns", "size", "data", "message_id", "key", "properties"]


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


def test_everything_is_read_back(tmp_path: Path) -> None:
    held = fill(tmp_path / "j")
    directory = reading.open_directory(tmp_path / "j")
    assert len(directory.segments) > 2
    rows = [row for batch in directory.batches(columns=ALL, rows=100) for row in batch.to_pylist()]
    assert [(row["position"], row["topic"], row["data"]) for row in rows] == held
    assert [row["size"] for row in rows] == [len(data) for _, _, data in held]
    assert dict(rows[10]["properties"]) == {"i": "10"}
    assert rows[10]["key"] == "k2"
    assert directory.holes() == []
    ordinals = [row["ordinal"] for row in rows if row["topic"] == "sensors.1.temp"]
    assert ordinals == list(range(1, 101))


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
    rows = [row for batch in directory.batches(columns=["position", "data"]) for row in batch.to_pylist()]
    assert [(row["position"], row["data"]) for row in rows] == [(p, data) for p, _, data in held]
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
