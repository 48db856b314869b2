"""Sizes and checksums of a journal's records, computed from their index entries. Pure functions over arrays."""

from __future__ import annotations

from typing import Any

import numpy

from penstock.journal import format as journal_format
from penstock.journal import layout

Array = numpy.ndarray[Any, Any]


def record_bytes(entries: Array) -> Array:
    """The size of each entry's record: header, data, properties, message id and key, up to a multiple of 8."""
    sizes: Array = (entries["length"].astype(numpy.int64) + entries["extra_bytes"] + layout.RECORD.size + 7) & ~7
    return sizes


def wrong_records(log: Array, begins: Array, ends: Array, entries: Array, nonce: int) -> Array:
    """Which records fail their CRC32C (over nonce, position and all bytes after it); groups records of equal size."""
    wrong = numpy.zeros(len(begins), numpy.bool_)
    sizes = ends - begins
    head = numpy.frombuffer(nonce.to_bytes(8, "little"), numpy.uint8)
    for size in numpy.unique(sizes).tolist():
        places = numpy.flatnonzero(sizes == size)
        step = max(1, (16 << 20) // size)
        for part in (places[at : at + step] for at in range(0, len(places), step)):
            rows = log[begins[part][:, None] + numpy.arange(size)]
            positions = numpy.ascontiguousarray(entries["position"][part]).view(numpy.uint8).reshape(-1, 8)
            seeds = numpy.zeros(len(part), numpy.uint32)
            for piece in (numpy.broadcast_to(head, (len(part), 8)), positions, rows[:, 4:]):
                seeds = journal_format.crc32c_rows(piece, seeds)
            wrong[part] = seeds != entries["checksum"][part]
            wrong[part] |= seeds != numpy.ascontiguousarray(rows[:, :4]).view(numpy.uint32)[:, 0]
    return wrong
