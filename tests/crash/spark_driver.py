"""A streaming query from one journal to another, in a process of its own that a test can kill.

Arguments: source, target, checkpoint, "follow" or "finish". Prints a line for each batch that made progress.
"""

from __future__ import annotations

import sys
import time

from penstock.spark import session


def main(source: str, target: str, checkpoint: str, how: str) -> None:
    spark = session("killed", master="local[2]", **{"spark.log.level": "OFF"})
    reader = spark.readStream.format("penstock").option("maxMessagesPerTrigger", 500 if how == "follow" else 20_000)
    frame = reader.load(source).select("topic", "payload", "properties", "message_id", "timestamp_ns")
    writer = frame.writeStream.format("penstock").option("checkpointLocation", checkpoint)
    writer = writer.trigger(availableNow=True) if how == "finish" else writer.trigger(processingTime="0 seconds")
    query = writer.start(target)
    print("started", flush=True)
    seen = -1
    while query.isActive:
        for progress in query.recentProgress:
            if progress["batchId"] > seen:
                seen = progress["batchId"]
                print(f"batch {seen} {progress['numInputRows']}", flush=True)
        time.sleep(0.02)
    query.awaitTermination()
    spark.stop()
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
