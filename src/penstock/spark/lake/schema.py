"""The columns of the lake: those of the source, and ``date``, the UTC day of the stored time, by which it is parted."""

from __future__ import annotations

import datetime
from typing import Any

import numpy
import pyarrow

from penstock.spark.columns import FIELDS

KINDS = {
    "string": pyarrow.string(),
    "bigint": pyarrow.int64(),
    "int": pyarrow.int32(),
    "timestamp": pyarrow.timestamp("us", tz="UTC"),  # nanoseconds in files break readers; they are in *_ns
    "binary": pyarrow.binary(),
    "map<string,string>": pyarrow.map_(pyarrow.string(), pyarrow.string()),
}
STORED_NS = "stored_ns"
SCHEMA = pyarrow.schema([(name, KINDS[kind]) for name, kind in FIELDS.items()])
READ = pyarrow.schema([field for field in SCHEMA if field.name != "journal"])  # one value a file: made there
TABLE = SCHEMA.append(pyarrow.field("date", pyarrow.date32()))
#: Columns with least and greatest values in the log. Readers believe that what is not there can be anything, but some
#: take a column that is named in the table's settings and has no value for one without a match: name exactly these.
STATISTICS = tuple(
    name for name, kind in FIELDS.items() if kind in ("bigint", "timestamp") or name in ("topic", "journal")
)
DAY_NS = 86_400 * 10**9


def days(stored_ns: Any) -> Any:
    """The UTC day of each stored time, as days since 1970."""
    return numpy.floor_divide(stored_ns, DAY_NS).astype(numpy.int32)


def day_text(day: int) -> str:
    """Days since 1970 as ``2026-11-16``."""
    return (datetime.date(1970, 1, 1) + datetime.timedelta(days=day)).isoformat()


def statistics(table: pyarrow.Table) -> dict[str, Any]:
    """What the log says of a file: rows, and the least and greatest value of each of ``STATISTICS``."""
    least, greatest = {}, {}
    for name in STATISTICS:
        low, high = _edges(table[name])
        least[name], greatest[name] = _plain(low, up=False), _plain(high, up=True)
    nulls = {name: table[name].null_count for name in STATISTICS}
    return {"numRecords": table.num_rows, "minValues": least, "maxValues": greatest, "nullCount": nulls}


def _edges(column: pyarrow.ChunkedArray) -> tuple[Any, Any]:
    import pyarrow.compute

    if pyarrow.types.is_dictionary(column.type):
        known: set[str] = set()
        for chunk in column.chunks:
            known.update(chunk.dictionary.take(pyarrow.compute.unique(chunk.indices)).to_pylist())
        return min(known), max(known)  # code points are in the order of their bytes
    found = pyarrow.compute.min_max(column)
    return found["min"].as_py(), found["max"].as_py()


def _plain(value: Any, *, up: bool) -> Any:
    """A value as JSON has it: times in whole milliseconds, the greatest rounded up, so that no row is outside."""
    if not isinstance(value, datetime.datetime):
        return value
    micro = value.microsecond
    rounded = value - datetime.timedelta(microseconds=micro % 1000)
    if up and micro % 1000:
        rounded += datetime.timedelta(milliseconds=1)
    return rounded.astimezone(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
