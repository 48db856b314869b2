"""One worker: ``python -m penstock.torture.worker publish|consume|both ADDRESS ...``.

``publish`` publishes numbered messages and logs each one after publish has returned: what is logged was confirmed.
``consume`` logs every message it receives. ``both`` does the two in one process, in two threads. All end on SIGTERM; a
wrong byte in a received message ends the process with code 3.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import threading
import time
from pathlib import Path

import penstock
from penstock.torture import record

WRONG_BYTES = 3


class Ended(Exception):
    """SIGTERM came."""


ended = threading.Event()  # for threads: only the main thread handles signals


def _end(*_: object) -> None:
    ended.set()
    raise Ended


class Pace:
    """Keeps a mean rate of ``rate_hz``: late messages follow at once."""

    def __init__(self, rate_hz: float) -> None:
        self._interval = 1 / rate_hz if rate_hz else 0.0
        self._due = time.monotonic()

    def wait(self) -> None:
        """Wait until the next message is due. Sleeps too short for the clock's resolution are accumulated."""
        if self._interval:
            self._due += self._interval
            ahead = self._due - time.monotonic()
            if ahead > 0.0005:
                time.sleep(ahead)
            elif ahead < -1:
                self._due = time.monotonic()  # after a SIGSTOP: do not send a burst to catch up


Note = record.Log | record.Tally


def publish(address: str, options: dict[str, object], log: Note, arguments: argparse.Namespace) -> None:
    """Publish until ended, retrying nothing: what raised was not confirmed."""
    pace = Pace(arguments.rate)
    with penstock.publisher(address, **options) as publisher:
        if arguments.ready:
            publisher.wait_ready(arguments.ready, timeout=60)
        sequence = 0
        while (arguments.count == 0 or sequence < arguments.count) and not ended.is_set():
            sequence += 1
            publisher.publish(record.make(arguments.producer, sequence, arguments.most))
            log.add(arguments.producer, sequence)
            pace.wait()


class Latency:
    """Logs the median latency once a second."""

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


def take(message: penstock.Message, log: Note, latency: Latency) -> None:
    """Check and log one message."""
    found = record.look(bytes(message))
    if found is None:
        print(f"wrong bytes in {message!r}", flush=True)
        sys.exit(WRONG_BYTES)
    log.add(*found, message.ordinal)
    latency.note(message.timestamp_ns)
    message.release()


def consume(address: str, options: dict[str, object], log: Note, latency: Latency, tell_ledger: bool) -> None:
    """Log every message; at the end print the ledger if asked for."""
    with penstock.subscriber(address, **options) as subscriber:
        try:
            for message in subscriber:
                take(message, log, latency)
        finally:
            if tell_ledger:
                books = subscriber.ledger
                told = {"matched": books.matched, "delivered": books.delivered, "dropped": dict(books.dropped)}
                print(json.dumps({**told, "balanced": books.balanced}), flush=True)


def both(address: str, logs: tuple[Note, Note], arguments: argparse.Namespace) -> None:
    """Publish in a thread; consume here until the thread has ended and nothing is left."""
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    latency = Latency(arguments.latency)
    with penstock.subscriber(address) as subscriber:
        publishing = threading.Thread(target=publish, args=(address, arguments.options, logs[0], arguments))
        publishing.start()
        while True:
            last = not publishing.is_alive()  # before the read: everything it published is readable by then
            message = subscriber.read(timeout=0.1)
            if message is not None:
                take(message, logs[1], latency)
            elif last:
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["publish", "consume", "both"])
    parser.add_argument("address")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--producer", type=int, default=1)
    parser.add_argument("--count", type=int, default=0, help="0: until ended")
    parser.add_argument("--rate", type=float, default=0, help="messages a second; 0: as fast as it goes")
    parser.add_argument("--most", type=int, default=512, help="longest padding in bytes")
    parser.add_argument("--latency", type=Path, help="note the median latency here, once a second")
    parser.add_argument("--tally", action="store_true", help="the log keeps counts, not each message")
    parser.add_argument("--ledger", action="store_true", help="print the subscriber's ledger in the end")
    parser.add_argument("--received", type=Path, help="the log of what `both` receives")
    parser.add_argument("--ready", type=int, default=0, help="wait for so many subscribers first")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    kind = record.Tally if arguments.tally else record.Log
    logs: list[Note] = [kind(path) for path in (arguments.log, arguments.received) if path is not None]
    try:
        if arguments.role == "publish":
            publish(arguments.address, arguments.options, logs[0], arguments)
        elif arguments.role == "consume":
            consume(arguments.address, arguments.options, logs[0], Latency(arguments.latency), arguments.ledger)
        else:
            both(arguments.address, (logs[0], logs[1]), arguments)
    except (Ended, KeyboardInterrupt):
        pass
    finally:
        for log in logs:
            log.close()


if __name__ == "__main__":
    main()
