"""Whether the lake has what a journal is about to delete.

The position that the table records says only that the messages were archived once: files may be gone since, or another
program may have set the table back to an older version. ``trim`` deletes the last other copy, so it counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy
import pyarrow

from penstock.errors import CorruptionError, StateError
from penstock.printable import command
from penstock.spark.bounds import Bounds
from penstock.spark.lake import delta, schema
from penstock.spark.lake.files import read_parts, read_rows
from penstock.spark.lake.store import Store
from penstock.spark.places import DirectoryPlace, Place, Reading, shown

WINDOW = 1 << 22  # positions that are compared at once
_POSITION = pyarrow.schema([schema.SCHEMA.field("position")])


def check_holds(where: Store, table: Any, text: str, place: Place, end: int) -> None:
    """Raise ``StateError`` unless the lake has every message that the journal has before position ``end``.

    Of a broker's journal only the files are looked at: its index would have to be sent here.
    """
    actions = delta.live_files(table)
    sizes = where.sizes(action["path"] for action in actions)
    for action in actions:
        size = sizes[action["path"]]
        if size != action["size_bytes"]:
            seen = "is missing" if size is None else f"has {size} bytes, the log says {action['size_bytes']}"
            raise _refused(where, f"{action['path']} {seen}")
    if not isinstance(place, DirectoryPlace):
        return
    first = max(1, place.first)
    for action in actions:
        # The journal's copy is the last other one: the lake's is read whole, its pages' checksums too.
        if _overlaps(action, place.uuid, first, end):
            try:
                for _ in read_parts(where, action["path"]):
                    pass
            except CorruptionError as error:
                raise _refused(where, str(error)) from None
    for start in range(first, end, WINDOW):
        stop = min(end, start + WINDOW)
        reading = Reading(_POSITION, Bounds(), lossy=True)
        wanted = _joined(batch["position"].to_numpy() for batch in place.batches(start, stop, reading))
        lacking = wanted[~numpy.isin(wanted, _held(where, actions, place.uuid, start, stop))]
        if len(lacking):
            count = f"{len(lacking)} messages" if len(lacking) > 1 else "a message"
            raise _refused(where, f"it does not have {count} of {shown(text)}, the first at position {int(lacking[0])}")


def _held(where: Store, actions: Iterable[dict[str, Any]], journal: str, start: int, stop: int) -> Any:
    """The positions of a journal from ``start`` to ``stop - 1`` that are in the files."""
    found = []
    for action in actions:
        if not _overlaps(action, journal, start, stop):
            continue
        try:
            rows = read_rows(where, action["path"], ["position"], journal, start, stop)
        except (pyarrow.ArrowException, OSError) as error:
            raise _refused(where, f"{action['path']} cannot be read: {error}") from None
        found.append(rows["position"].to_numpy())
    return _joined(found)


def _overlaps(action: Mapping[str, Any], journal: str, start: int, stop: int) -> bool:
    """Whether a file may have rows of a journal from position ``start`` to ``stop - 1``."""
    low, high = action["min"], action["max"]
    same = bool(low["journal"] <= journal <= high["journal"])
    return same and bool(low["position"] < stop and high["position"] >= start)


def _joined(parts: Iterable[Any]) -> Any:
    return numpy.concatenate([numpy.empty(0, numpy.int64), *parts])


def _refused(where: Store, why: str) -> StateError:
    run = command("lake", "verify", where.uri)
    return StateError(f"nothing was trimmed: {where.uri} does not hold all that it archived ({why}); run: {run}")
