"""A day of every series on disk, one value per minute, so that a restarted monitor still has the past.

The file is SQLite's, one row a minute, in the user's state directory, mode 0600; rows older than a day are deleted.
Several monitors of one user may share it: they see the same machine, and the first one writes the minute. One thread
writes, any thread may read.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
import zlib
from pathlib import Path
from typing import Any

__all__ = ["DAY_S", "HistoryFile"]

DAY_S = 24 * 60 * 60
MINUTE_S = 60
MAX_SERIES = 500
MAX_ROW_BYTES = 4 << 20


class HistoryFile:
    """Means over a minute (for losses too) of at most ``MAX_SERIES`` series, the largest ones."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Created here, because SQLite would create it with a mode that depends on the umask.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        self._lock = threading.Lock()
        self._file = sqlite3.connect(path, timeout=1.0, check_same_thread=False, isolation_level=None)
        self._file.execute("PRAGMA journal_mode=WAL")
        self._file.execute("PRAGMA synchronous=OFF")  # losing a minute in a power cut does no harm
        self._file.execute("CREATE TABLE IF NOT EXISTS minutes (minute INTEGER PRIMARY KEY, series BLOB NOT NULL)")
        self._minute = 0
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, time_s: float, values: dict[str, float]) -> None:
        """Add one sample; writes when a minute is over."""
        minute = int(time_s // MINUTE_S)
        if minute != self._minute:
            self._write()
            self._minute = minute
        for name, value in values.items():
            total, many = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + value, many + 1)

    def _write(self) -> None:
        means = {name: round(total / many, 3) for name, (total, many) in self._sums.items()}
        self._sums = {}
        if not means:
            return
        largest = dict(sorted(means.items(), key=lambda item: -item[1])[:MAX_SERIES])
        row = zlib.compress(json.dumps(largest).encode(), 1)
        # Another monitor of this user may hold the file, or the disk may be full: the plot has a gap then.
        with self._lock, contextlib.suppress(sqlite3.Error):
            self._file.execute("INSERT OR IGNORE INTO minutes VALUES (?, ?)", (self._minute, row))
            self._file.execute("DELETE FROM minutes WHERE minute < ?", (self._minute - DAY_S // MINUTE_S,))

    def series(self, span_s: float, now_s: float) -> dict[str, Any]:
        """``{"times": [...], "series": {name: [...]}}`` of the last ``span_s``, oldest first, holes as None."""
        first = int((now_s - min(span_s, DAY_S)) // MINUTE_S)
        with self._lock:
            rows = self._file.execute(
                "SELECT minute, series FROM minutes WHERE minute >= ? ORDER BY minute", (first,)
            ).fetchall()
        read = [(minute, values) for minute, row in rows if (values := _values(row)) is not None]
        names = {name for _, values in read for name in values}
        return {
            "times": [(minute + 1) * MINUTE_S for minute, _ in read],
            "series": {name: [values.get(name) for _, values in read] for name in sorted(names)},
        }

    def close(self) -> None:
        with self._lock:
            self._file.close()


def _values(row: bytes) -> dict[str, float] | None:
    """One minute's values; None for a row that is not ours or damaged."""
    try:
        values = json.loads(zlib.decompressobj().decompress(row, MAX_ROW_BYTES))
    except (ValueError, zlib.error):
        return None
    if not isinstance(values, dict):
        return None
    return {name: value for name, value in values.items() if isinstance(value, int | float)}
