"""Messages as tables and streams on Apache Spark.

``session()`` starts a Spark that is set up for Penstock; ``spark.read.format("penstock").load(directory)`` and
``spark.readStream`` read journals; ``df.write`` and ``df.writeStream`` write them. ``decode`` decodes payloads and
``pipelines`` holds whole pipelines as functions from DataFrame to DataFrame. Importing this loads neither PySpark nor
native code.
"""

from __future__ import annotations

from penstock.spark.java import find_java
from penstock.spark.relation import push_down
from penstock.spark.session import make_class_cache, session

__all__ = ["session", "push_down", "make_class_cache", "find_java"]


def __getattr__(name: str) -> object:
    """Load ``table`` and ``arrow_batches`` on first use: they need pyarrow, which a plain import must not load."""
    if name == "arrow_batches":
        from penstock.spark.batches import arrow_batches

        return arrow_batches
    if name == "table":
        from penstock.spark.lake import table

        return table
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
