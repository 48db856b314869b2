"""Files of a journal whose checksums are right and whose numbers lie: told as damage, with bounded memory and time."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from penstock._core import journal as native
from penstock.errors import CorruptionError
from penstock.journal import Journal, layout

FIRST = "00000000000000000001-0000"
READ = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
from penstock.errors import CorruptionError
from penstock._core.journal import Reader
from penstock.journal import Journal
reader = Reader(sys.argv[1], 1 << 26)
reader.find_time(2**62)
reader.find_ordinal(7, 1)
reader.holes()
with Journal(sys.argv[1], mode="read") as journal:
    try:
        print(sum(len(journal.read_many(start, 100)) for start in (1, 65)), journal.topics)
    except CorruptionError as error:
        print("damaged", error)
"""


def read_apart(where: Path) -> str:
    """What a process of its own says: a fault or gigabytes of memory would end it."""
    done = subprocess.run([sys.executable, "-c", READ, str(where)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def put(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def sealed(directory: Path) -> tuple[Path, layout.SegmentHeader]:
    """A journal whose first segment is sealed, says that it may have gaps, and has an index of just one page."""
    with Journal(directory) as journal:
        journal.append_many("t", [b"x"] * 64)
        journal.roll(full=False)
        journal.append("t", b"y")
    path = directory / f"{FIRST}.log"
    header = layout.decode_segment_header(path.read_bytes()[: layout.SEGMENT_HEADER_BYTES], str(path))
    assert header.seal is not None
    return path, header


@pytest.mark.parametrize("last", [False, True], ids=["followed", "last"])
@pytest.mark.parametrize("messages", [2**58 + 64, 2**63, 2**64 - 1])
def test_a_seal_that_counts_more_than_its_index_holds(tmp_path: Path, messages: int, last: bool) -> None:
    """The last segment's index is mapped further than its file goes: a look behind its end would be a fault."""
    path, header = sealed(tmp_path / "j")
    assert header.seal is not None
    seal = header.encode_seal(replace(header.seal, messages=messages))
    put(path, 0, replace(header, flags=layout.SEGMENT_REPAIRED).encode()[: layout.SEAL_OFFSET] + seal)
    assert (tmp_path / "j" / f"{FIRST}.index").stat().st_size == 4096
    for file in (tmp_path / "j").glob("*65-*") if last else ():
        file.unlink()
    assert read_apart(tmp_path / "j").startswith("damaged" if last else "65 ")


def forge_topic(directory: Path, number: int, *, message: bool) -> None:
    """The one topic record of the journal, or the one message, gets another topic's number, and right checksums."""
    path = directory / f"{FIRST}.log"
    data = bytearray(path.read_bytes())
    header = layout.decode_segment_header(bytes(data[: layout.SEGMENT_HEADER_BYTES]), str(path))
    at = layout.SEGMENT_HEADER_BYTES
    while struct.unpack_from("<I", data, at)[0] == 0x54414250:
        first, _, records, size = struct.unpack_from("<QIIQ", data, at + 16)
        sums, record, position = [], at + 64, first
        for _ in range(records):
            length, kind = struct.unpack_from("<IB", data, record + 4)
            if kind == (1 if message else 3):
                struct.pack_into("<I", data, record + 16, number)
            seed = native.crc32c(struct.pack("<QQ", header.nonce, position))
            struct.pack_into("<I", data, record, native.crc32c(bytes(data[record + 4 : record + length]), seed))
            sums.append(bytes(data[record : record + 4]))
            position += kind == 1
            record += length
        struct.pack_into("<I", data, at + 4, native.crc32c(b"".join(sums), native.crc32c(bytes(data[at + 8 : at + 64]))))
        at += size
    path.write_bytes(data)
    for suffix in ("index", "topics"):
        (directory / f"{FIRST}.{suffix}").unlink(missing_ok=True)


@pytest.mark.parametrize("number", [2**20 + 2, 2**24 - 1, 2**24, 2**32 - 1])
@pytest.mark.parametrize("message", [False, True], ids=["topic record", "message"])
def test_a_topic_number_that_cannot_be_is_damage(tmp_path: Path, number: int, message: bool) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.append("t", b"x")
    forge_topic(tmp_path / "j", number, message=message)
    if message:
        assert read_apart(tmp_path / "j").startswith("damaged")
    else:
        assert "{}" in read_apart(tmp_path / "j")
    shutil.copytree(tmp_path / "j", tmp_path / "written")
    with pytest.raises(CorruptionError, match=str(number)):
        Journal(tmp_path / "written")


def test_numbers_with_gaps_are_read(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        for number in range(3000):
            journal.topic_id(f"unused.{number}")
        journal.append("used", b"x")
    with Journal(tmp_path / "j") as journal:
        assert journal.topics == {"used": 3001}
        assert journal.append("used", b"y") == 2


def forged_log(records: int, nonce: int) -> bytes:
    """Records that each hold, as data, the header of a batch that claims all records after it."""
    size = 56 + 64
    end = layout.SEGMENT_HEADER_BYTES + 64 + records * size
    made = []
    for number in range(records):
        at = layout.SEGMENT_HEADER_BYTES + 64 + number * size
        rest = (end - at - size) // size
        head = struct.pack("<QQIIQqQI", nonce, number + 2, rest, rest, end - at - 56, 0, 1, 0)
        batch = struct.pack("<II", 0x54414250, 0) + head + struct.pack("<I", native.crc32c(head))
        words = struct.pack("<IBBHHHIIIIQqq", size, 1, 0, 0, 0, 0, 1, 0, 64, number + 1, number + 1, 1, 1) + batch
        made.append(struct.pack("<I", native.crc32c(words, native.crc32c(struct.pack("<QQ", nonce, number + 1)))) + words)
    return bytes(layout.SEGMENT_HEADER_BYTES) + bytes(64) + b"".join(made)


def test_batches_that_claim_each_other_cost_no_more_than_the_log(tmp_path: Path) -> None:
    """A hundred thousand of them: without a bound the search reads five billion records, which takes minutes."""
    count, nonce = 100_000, 77
    data = forged_log(count, nonce)
    scan = native.scan(data, nonce, 1, 2**63, count + 1, False)
    assert len(scan["index"]) == count * layout.INDEX_ENTRY_BYTES
    assert scan["damage"]


@pytest.mark.parametrize("first", [2**62, 2**63, 2**64 - 1])
def test_a_batch_at_a_position_that_no_journal_reaches_is_none(first: int) -> None:
    words = struct.pack("<IBBHHHIIIIQqq", 56, 1, 0, 0, 0, 0, 1, 0, 0, first & 0xFFFFFFFF, 1, 1, 1)
    checksum = struct.pack("<I", native.crc32c(words, native.crc32c(struct.pack("<QQ", 77, first))))
    head = struct.pack("<QQIIQqQI", 77, first, 1, 1, 64 + 56, 0, 1, 0)
    head += struct.pack("<I", native.crc32c(head))
    batch = struct.pack("<II", 0x54414250, native.crc32c(checksum, native.crc32c(head))) + head
    scan = native.scan(bytes(layout.SEGMENT_HEADER_BYTES) + batch + checksum + words, 77, 1, 2**64 - 1, 0, True)
    assert (scan["index"], scan["next_position"]) == (b"", 1)


def test_columns_split_by_what_stands_beside_the_data(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        for _ in range(8):
            journal.append("t", b"x", properties={"k": "v" * 60_000})
        reader = native.Reader(str(tmp_path / "j"), 1 << 26)
        columns, _, count, following = reader.columns(1, 100, 100, 150_000, None, ["properties", "payload"])
        assert (count, following) == (2, 3)
        assert len(columns["properties"][1]) > 120_000

