"""The two places that know the journal's bytes, native/journal/format.hpp and layout.py, say the same."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from penstock.journal import layout
from penstock.journal.format import INDEX

HEADER = (Path(__file__).parents[2] / "native/journal/format.hpp").read_text()
CODES = {
    "std::uint8_t": "B", "std::uint16_t": "H", "std::uint32_t": "I", "std::uint64_t": "Q", "std::int64_t": "q",
    "char": "s",
}  # fmt: skip


def fields(name: str) -> list[tuple[str, str, int]]:
    """(field, code, how many) of a struct in the header."""
    body = re.search(rf"struct {name} {{\n(.*?)\n}};", HEADER, re.DOTALL)
    assert body is not None, name
    found = re.findall(r"^\s*(\S+) (\w+)(?:\[(\d+)\])?;", body[1], re.MULTILINE)
    return [(field, CODES[kind], int(count or 1)) for kind, field, count in found]


def constant(name: str) -> int:
    found = re.search(rf"\b{name} = ([^,;]+?)[,; }}]", HEADER)
    assert found is not None, name
    return int(found[1], 0)


@pytest.mark.parametrize(
    ("name", "ours"),
    [("BatchHeader", layout.BATCH), ("RecordHeader", layout.RECORD), ("FrontierFile", layout.FRONTIER)],
)
def test_structures(name: str, ours: struct.Struct) -> None:
    theirs = "<" + "".join(f"{count}s" if count > 1 else code for _, code, count in fields(name))
    assert ours.format in (theirs, theirs.replace("<I", "<4s")), "the magic of a batch is a number there and text here"
    native = "@" + "".join(f"{count}s" if count > 1 else code for _, code, count in fields(name))
    assert struct.calcsize(native) == ours.size, "the compiler adds no padding"


def test_the_index_that_numpy_reads() -> None:
    theirs = [(field, {"Q": "<u8", "q": "<i8", "I": "<u4"}[code]) for field, code, _ in fields("IndexEntry")]
    assert [kind for _, kind in theirs] == [str(INDEX.fields[name][0].str) for name in INDEX.names]
    assert [name for name, _ in theirs] == list(INDEX.names)
    assert INDEX.itemsize == layout.INDEX_ENTRY_BYTES


def test_constants() -> None:
    ours = {
        "segment_header_bytes": layout.SEGMENT_HEADER_BYTES,
        "block_bytes": layout.BLOCK_BYTES,
        "batch_magic": int.from_bytes(layout.BATCH_MAGIC, "little"),
        "batch_snapshot": layout.BATCH_SNAPSHOT,
        "batch_topics": layout.BATCH_TOPICS,
        "max_name_bytes": layout.MAX_NAME_BYTES,
        "kind_message": layout.KIND_MESSAGE,
        "kind_state": layout.KIND_STATE,
        "kind_topic": layout.KIND_TOPIC,
        "flag_internal": layout.FLAG_INTERNAL,
        "flag_compacted_topic": layout.FLAG_COMPACTED_TOPIC,
        "frontier_bytes": layout.FRONTIER_BYTES,
    }
    assert {name: constant(name) for name in ours} == ours
