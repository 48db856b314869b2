"""Makes ``spark.read.format("penstock")`` work: Spark imports packages named ``pyspark_*`` and takes
``DefaultSource``.

Nothing is to be registered. Executors import it too, so it needs PySpark, numpy and pyarrow and no compiled code of
ours.
"""

from __future__ import annotations

from penstock.spark.source import PenstockSource as DefaultSource

__all__ = ["DefaultSource"]
