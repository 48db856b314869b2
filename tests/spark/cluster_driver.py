"""What the cluster tests submit: jobs on a standalone cluster, an executor killed during each.

Arguments: master, journal, working directory, names of jobs. Each job leaves what it is named by there, ``batch`` as
Parquet, ``sink`` and ``stream`` as journals. Prints which executors were killed as one JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from penstock.spark import session

COLUMNS = "topic string, ordinal bigint, position bigint, timestamp_ns bigint, payload binary, properties map<string,string>, message_id string"
SMALL_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


class Kill:
    """Kills the first executor that has begun a task of a job, while that task runs."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = str(folder)
        self.killed: list[int] = []
        self.thread = threading.Thread(target=self._run)

    def slowly(self) -> Callable[[Iterator[Any]], Iterator[Any]]:
        """For ``mapInArrow``: the rows as they are, slowly, after a note of which process has begun."""
        folder = self.folder

        def slow(batches: Iterator[Any]) -> Iterator[Any]:
            for batch in batches:
                open(os.path.join(folder, str(os.getppid())), "w").close()
                time.sleep(0.1)
                yield batch

        return slow

    def _run(self) -> None:
        while not (begun := os.listdir(self.folder)):
            time.sleep(0.01)
        executor = psutil.Process(int(begun[0])).parent()  # begun by the executor's Python daemon
        assert executor is not None and "CoarseGrainedExecutorBackend" in " ".join(executor.cmdline())
        os.kill(executor.pid, signal.SIGKILL)
        self.killed.append(executor.pid)

    def __enter__(self) -> Kill:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.join()


def main(master: str, journal: str, work: str, *jobs: str) -> None:
    settings = {
        "spark.executor.memory": "512m", "spark.executor.cores": "1", "spark.cores.max": "2", "spark.log.level": "OFF",
        "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", "spark.ui.enabled": False,
        "spark.sql.shuffle.partitions": 2, "spark.pyspark.python": sys.executable, "spark.task.maxFailures": 8,
        "spark.driver.extraJavaOptions": SMALL_JVM, "spark.executor.extraJavaOptions": SMALL_JVM,
    }  # fmt: skip
    spark = session("cluster", master=master, **settings)
    names = [field.split()[0] for field in COLUMNS.split(", ")]
    reading = {"partitionBytes": 200_000, "batchBytes": 50_000}
    frame = spark.read.format("penstock").options(**reading).load(journal).select(*names)
    stream = spark.readStream.format("penstock").options(**reading, maxMessagesPerTrigger=3000).load(journal)
    killed = {}
    for job in jobs:
        place = str(Path(work) / job)
        with Kill(Path(work) / f"begun-{job}") as kill:
            rows = (stream.select(*names) if job == "stream" else frame).mapInArrow(kill.slowly(), COLUMNS)
            if job == "batch":
                rows.write.parquet(place)
            elif job == "sink":
                rows.write.format("penstock").mode("append").save(place)
            else:
                writing = rows.writeStream.format("penstock").option("checkpointLocation", f"{place}-checkpoint")
                writing.trigger(availableNow=True).start(place).awaitTermination()
        killed[job] = kill.killed
    spark.stop()
    print(json.dumps(killed), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
