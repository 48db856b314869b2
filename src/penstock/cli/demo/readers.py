"""The readers on the other side of shared memory, TCP and the broker: one thread each, counting and timing."""

from __future__ import annotations

import threading
import time
from typing import Any

import penstock
from penstock.cli.demo.latency import Latencies
from penstock.cli.demo.part import Stage


class _Reader:
    def __init__(self, reach: str, address: str, stop: threading.Event) -> None:
        self.reach = reach
        self.subscriber = penstock.subscriber(address)
        self.latencies = Latencies()
        self.wrong_order = 0
        self._last = 0
        self._stop = stop
        self._thread = threading.Thread(target=self._run, name=reach)
        self._thread.start()

    def _run(self) -> None:
        while self._step() or not self._stop.is_set():
            pass

    def _step(self) -> int:
        """Read what has arrived; the messages are released when this returns."""
        batch = self.subscriber.read_many(256, 0.2)
        now_ns = time.time_ns()
        for message in batch:
            self.latencies.add(now_ns - message.timestamp_ns)
            if message.ordinal <= self._last:
                self.wrong_order += 1
            self._last = message.ordinal
        return len(batch)

    def report(self) -> dict[str, Any]:
        ledger = self.subscriber.ledger
        return {
            "delivered": ledger.delivered, "lost": ledger.lost, "balanced": ledger.balanced,
            "wrong_order": self.wrong_order, **self.latencies.figures(),
        }  # fmt: skip

    def end(self) -> None:
        self._thread.join(20)
        self.subscriber.close()


def run(stage: Stage) -> None:
    """Read until told to stop and nothing more comes."""
    readers = [_Reader(reach, address, stage.stop) for reach, address in stage.configuration["addresses"].items()]
    stage.tell(ready=True)
    while not stage.stop.wait(0.5):
        stage.tell(readers={reader.reach: reader.report() for reader in readers})
    for reader in readers:
        reader._thread.join(20)
    stage.tell(readers={reader.reach: reader.report() for reader in readers}, finished=True)
    for reader in readers:
        reader.end()
