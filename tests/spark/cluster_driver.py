"""What the cluster test submits: batch, streaming and sink on a standalone cluster, an executor killed in between.

Arguments: master, journal, working directory. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

import psutil
from pyspark.sql import functions as F

from penstock.spark import session


def executors() -> list[psutil.Process]:
    """Executors on this machine that belong to our workers."""
    mine = [int(pid) for pid in os.environ["PENSTOCK_TEST_WORKERS"].split(",")]
    children = [child for pid in mine for child in psutil.Process(pid).children(recursive=True)]
    return [child for child in children if "CoarseGrainedExecutorBackend" in command(child)]


def command(process: psutil.Process) -> str:
    """Its command line; nothing where it has just ended (executors' own children come and go)."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def kill_one(killed: list[int], marker: str) -> None:
    """Kill the first executor as soon as a task has begun."""
    while not os.path.exists(marker):
        time.sleep(0.02)
    victim = executors()[0]
    os.kill(victim.pid, signal.SIGKILL)
    killed.append(victim.pid)


def main(master: str, journal: str, work: str) -> None:
    settings = {
        "spark.executor.memory": "512m", "spark.executor.cores": "1", "spark.cores.max": "2", "spark.log.level": "OFF",
        "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", "spark.ui.enabled": False,
        "spark.sql.shuffle.partitions": 2, "spark.pyspark.python": sys.executable, "spark.task.maxFailures": 8,
    }  # fmt: skip
    spark = session("cluster", master=master, **settings)
    frame = spark.read.format("penstock").option("partitionBytes", 200_000).load(journal)
    marker = os.path.join(work, "begun")
    killed: list[int] = []
    killer = threading.Thread(target=kill_one, args=(killed, marker))
    killer.start()

    def slow(batches):
        for batch in batches:
            open(marker, "w").close()
            time.sleep(0.1)
            yield batch

    rows = frame.select("position", "payload").mapInArrow(slow, "position bigint, payload binary")
    digest = rows.select(F.count("*").alias("n"), F.sum(F.crc32("payload")).alias("sum")).first()
    killer.join()
    copy = os.path.join(work, "copy")
    stream = spark.readStream.format("penstock").option("maxMessagesPerTrigger", 3000).load(journal)
    query = (
        stream.select("topic", "payload").writeStream.format("penstock")
        .option("checkpointLocation", os.path.join(work, "checkpoint")).trigger(availableNow=True).start(copy)
    )  # fmt: skip
    query.awaitTermination()
    back = (
        spark.read.format("penstock")
        .load(copy)
        .select(F.count("*").alias("n"), F.sum(F.crc32("payload")).alias("sum"))
        .first()
    )
    by_topic = {row.topic: row["count"] for row in frame.groupBy("topic").count().collect()}
    result = {
        "n": digest.n,
        "sum": digest.sum,
        "killed": len(killed),
        "copy_n": back.n,
        "copy_sum": back.sum,
        "topics": by_topic,
    }
    spark.stop()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
