"""One short run of Spark whose loaded classes become the start-up class cache: ``python -m penstock.spark.warm
FILE``.
"""

from __future__ import annotations

import sys

from penstock.spark.session import session


def main(archive: str) -> None:
    """Use what queries use, then let the JVM exit, which writes the archive."""
    options = f"-XX:ArchiveClassesAtExit={archive} -Xlog:cds=off"
    spark = session("warm", master="local[2]", class_cache=False, **{"spark.driver.extraJavaOptions": options})
    frame = spark.range(1000).selectExpr("id", "id % 7 as key", "timestamp_seconds(id) as time")
    frame.groupBy("key").count().collect()
    frame.filter("id > 10").join(frame.groupBy("key").count(), "key").toPandas()
    gateway = spark.sparkContext._gateway
    spark.stop()
    if gateway is not None:
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(timeout=120)


if __name__ == "__main__":
    main(sys.argv[1])
