"""Makes ``spark.read.format("penstock")`` work: Spark imports packages named ``pyspark_*`` and takes
``DefaultSource``.

Nothing is to be registered. Executors import it too, so it needs PySpark, numpy and pyarrow; compiled code of ours is
used where it is installed and not needed.
"""

from __future__ import annotations

from penstock.spark.source import PenstockSource as DefaultSource

__all__ = ["DefaultSource"]
