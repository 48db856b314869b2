"""Tables declared over a journal: Spark works out the order and keeps them up to date."""

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

JOURNAL = os.environ.get("PENSTOCK_JOURNAL", "/tmp/penstock-example-journal")


@dp.table
def messages() -> DataFrame:
    """Every message, read once as it comes."""
    spark = SparkSession.getActiveSession()
    assert spark is not None
    return spark.readStream.format("penstock").load(JOURNAL)


@dp.materialized_view
def topics() -> DataFrame:
    """How much there is of each topic."""
    spark = SparkSession.getActiveSession()
    assert spark is not None
    return spark.read.table("messages").groupBy("topic").count()
