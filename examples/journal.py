"""A measuring station that may lose power at any moment: store durably, work through a queue, hand over to Arrow.

Run it twice: the second run goes on where the first one stopped.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from penstock.journal import Journal


def main(directory: Path) -> int:
    with Journal(directory) as journal:
        workers = journal.queue("workers", topics=["sensors.*.temp"], start="first", max_tries=5)
        # one at a time: each is on disk when append returns
        for station in ("north", "south"):
            journal.append(f"sensors.{station}.temp", b"21.5", key=station, properties={"unit": "C"})
        # many at once: one sync for all of them
        journal.append_many("sensors.north.temp", [b"%.1f" % (20 + i / 10) for i in range(100)])

        done = 0
        while batch := workers.read_many(50, timeout=0):
            done += workers.ack_many(batch)
        workers.flush()  # the acknowledgements are on disk, too

        try:
            rows = sum(batch.num_rows for batch in journal.batches(columns=["position", "topic", "payload"]))
        except ModuleNotFoundError:  # numpy and pyarrow are optional
            rows = journal.frontier - journal.first
        print(f"{done} worked through, {rows} stored, next position {journal.frontier}")
        return done


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary) / "journal")
