"""A streaming query from one journal to another, as a process.

``python -m penstock.torture.query SOURCE TARGET CHECKPOINT follow|finish``: one runs until it is killed, the other
until everything is copied. Prints a line for each batch that made progress.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from penstock.spark import session


def main(source: str, target: str, checkpoint: str, how: str) -> None:
    """Run the query."""
    quiet: dict[str, Any] = {"spark.log.level": "OFF"}
    spark = session("torture", master="local[2]", **quiet)
    reader = spark.readStream.format("penstock").option("maxMessagesPerTrigger", 500 if how == "follow" else 20_000)
    frame = reader.load(source).select("topic", "payload", "properties", "message_id", "timestamp_ns")
    writer = frame.writeStream.format("penstock").option("checkpointLocation", checkpoint)
    writer = writer.trigger(availableNow=True) if how == "finish" else writer.trigger(processingTime="0 seconds")
    query = writer.start(target)
    seen = -1
    while query.isActive:
        for progress in query.recentProgress:
            if progress["batchId"] > seen:
                seen = progress["batchId"]
                print(f"batch {seen} {progress['numInputRows']}", flush=True)
        time.sleep(0.05)
    query.awaitTermination()
    spark.stop()
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
