"""One worker: ``python -m penstock.torture.worker publish|consume ADDRESS ...``.

``publish`` publishes numbered messages and, when publish has returned, notes them in its log: noted means confirmed.
``consume`` notes every message it receives. Both end on SIGTERM; a wrong byte in a received message ends with code 3.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from pathlib import Path

import penstock
from penstock.torture import record

WRONG_BYTES = 3


class Ended(Exception):
    """SIGTERM came."""


def _end(*_: object) -> None:
    raise Ended


def publish(address: str, options: dict[str, object], log: record.Log, arguments: argparse.Namespace) -> None:
    """Publish until ended, retrying nothing: what raised was not confirmed."""
    pause = 0 if arguments.rate == 0 else 1 / arguments.rate
    with penstock.publisher(address, **options) as publisher:
        if arguments.ready:
            publisher.wait_ready(arguments.ready, timeout=60)
        sequence = 0
        while arguments.count == 0 or sequence < arguments.count:
            sequence += 1
            publisher.publish(record.make(arguments.producer, sequence, arguments.most))
            log.add(arguments.producer, sequence)
            if pause:
                time.sleep(pause)


class Latency:
    """The median time from publish to here, noted once a second."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("w", buffering=1)
        self._seconds: list[float] = []
        self._next = 0.0

    def note(self, timestamp_ns: int) -> None:
        """One message; ``timestamp_ns`` is the publisher's, of the same clock."""
        if self._file is None:
            return
        now = time.time()
        self._seconds.append(now - timestamp_ns / 1e9)
        if now >= self._next:
            self._file.write(f"{now} {statistics.median(self._seconds)}\n")
            self._seconds.clear()
            self._next = now + 1


def consume(address: str, options: dict[str, object], log: record.Log, latency: Latency) -> None:
    """Note everything that comes."""
    with penstock.subscriber(address, **options) as subscriber:
        for message in subscriber:
            found = record.look(bytes(message))
            if found is None:
                print(f"wrong bytes in {message!r}", flush=True)
                sys.exit(WRONG_BYTES)
            log.add(*found, message.ordinal)
            latency.note(message.timestamp_ns)
            message.release()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["publish", "consume"])
    parser.add_argument("address")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--producer", type=int, default=1)
    parser.add_argument("--count", type=int, default=0, help="0: until ended")
    parser.add_argument("--rate", type=float, default=0, help="messages a second; 0: as fast as it goes")
    parser.add_argument("--most", type=int, default=512, help="longest padding in bytes")
    parser.add_argument("--latency", type=Path, help="note the median latency here, once a second")
    parser.add_argument("--ready", type=int, default=0, help="wait for so many subscribers first")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    log = record.Log(arguments.log)
    try:
        if arguments.role == "publish":
            publish(arguments.address, arguments.options, log, arguments)
        else:
            consume(arguments.address, arguments.options, log, Latency(arguments.latency))
    except (Ended, KeyboardInterrupt):
        pass


if __name__ == "__main__":
    main()
