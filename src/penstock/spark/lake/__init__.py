"""The lake: a journal's messages as a Delta table that every lakehouse tool reads.

``archive`` moves messages from journals to the table, exactly once; ``compact`` puts small files together; ``vacuum``
deletes what no version needs; ``info``, ``versions`` and ``verify`` look at it; ``table``, ``history`` and ``read_all``
give it back as Spark frames. With ``spark=None`` one process does the work of all tasks: only ``deltalake``,
``pyarrow`` and ``numpy`` are needed then (``pip install 'penstock[lake]'``).
"""

from __future__ import annotations

from penstock.spark.lake.archiving import Archived, archive, follow
from penstock.spark.lake.compaction import compact
from penstock.spark.lake.frames import history, read_all, table
from penstock.spark.lake.inspection import Info, Verified, info, vacuum, verify, versions

__all__ = [
    "archive",
    "Archived",
    "compact",
    "follow",
    "history",
    "info",
    "Info",
    "read_all",
    "table",
    "vacuum",
    "Verified",
    "verify",
    "versions",
]
