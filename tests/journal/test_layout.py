"""The two places that know the journal's bytes, native/journal/format.hpp and layout.py, say the same."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import numpy
import pytest

from penstock.journal import layout
from penstock.journal.format import INDEX, RECORD, TOPICS
from penstock.topics import MAX_NAME_BYTES

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
    [
        ("SegmentHeader", layout.SEGMENT),
        ("Seal", layout.SEAL),
        ("BatchHeader", layout.BATCH),
        ("RecordHeader", layout.RECORD),
        ("IndexEntry", layout.INDEX_ENTRY),
        ("TopicSummary", layout.TOPIC_SUMMARY),
        ("FrontierHead", layout.FRONTIER_HEAD),
        ("FrontierCopy", layout.FRONTIER_COPY),
    ],
)
def test_structures(name: str, ours: struct.Struct) -> None:
    theirs = "<" + "".join(f"{count}s" if count > 1 else code for _, code, count in fields(name))
    assert ours.format in (theirs, theirs.replace("<I", "<4s")), "the magic of a batch is a number there and text here"
    native = "@" + "".join(f"{count}s" if count > 1 else code for _, code, count in fields(name))
    assert struct.calcsize(native) == ours.size, "the compiler adds no padding"


@pytest.mark.parametrize(("name", "ours"), [("IndexEntry", INDEX), ("RecordHeader", RECORD), ("TopicSummary", TOPICS)])
def test_what_numpy_reads(name: str, ours: numpy.dtype[Any]) -> None:
    kinds = {"Q": "<u8", "q": "<i8", "I": "<u4", "H": "<u2", "B": "|u1"}
    theirs = [(field, kinds[code]) for field, code, _ in fields(name)]
    assert ours.names is not None and ours.fields is not None
    assert [(field, str(ours.fields[field][0].str)) for field in ours.names] == theirs


def test_constants() -> None:
    ours = {
        "format_version": layout.VERSION,
        "seal_offset": layout.SEAL_OFFSET,
        "batch_open": layout.BATCH_OPEN,
        "frontier_first_copy": layout.FRONTIER_COPIES[0],
        "frontier_second_copy": layout.FRONTIER_COPIES[1],
        "segment_compacted": layout.SEGMENT_COMPACTED,
        "segment_repaired": layout.SEGMENT_REPAIRED,
        "segment_after_loss": layout.SEGMENT_AFTER_LOSS,
        "segment_header_bytes": layout.SEGMENT_HEADER_BYTES,
        "block_bytes": layout.BLOCK_BYTES,
        "batch_magic": int.from_bytes(layout.BATCH_MAGIC, "little"),
        "batch_snapshot": layout.BATCH_SNAPSHOT,
        "batch_topics": layout.BATCH_TOPICS,
        "max_name_bytes": MAX_NAME_BYTES,
        "kind_message": layout.KIND_MESSAGE,
        "kind_state": layout.KIND_STATE,
        "kind_topic": layout.KIND_TOPIC,
        "flag_internal": layout.FLAG_INTERNAL,
        "flag_compacted_topic": layout.FLAG_COMPACTED_TOPIC,
        "frontier_bytes": layout.FRONTIER_BYTES,
    }
    assert {name: constant(name) for name in ours} == ours
