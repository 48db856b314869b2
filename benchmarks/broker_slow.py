"""Slow consumers cost the others nothing: 1,000 queues, 500 consumers of which 50 are slow, or 450 without these.

Half of the slow ones read nothing at all, half acknowledge one message every 20 ms. A round publishes to all queues and
ends when every fast consumer has read and acknowledged what its queue got. The consumers share one process, so the
rounds are as long as that process takes; what is looked for is the ratio, and the broker's memory from round to round.
"""

from __future__ import annotations

import os
import select
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from harness import Candidate, compare, options
from peers_broker import BrokerPeer
from wishes import at_least

from penstock.broker import Client, Subscriber

QUEUES, FAST, SLOW, TOPICS = 1000, 450, 50, 10
SLOW_S = 0.02


class Fast:
    """The fast consumers, read in turn by one thread."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.client = Client(port=port, timeout=60)
        for number in range(QUEUES):
            self.client.queue(f"q{number}", topics=f"t{number % TOPICS}")
        self.consumers = [Subscriber(port=port, queue=f"q{number}", ack="next", timeout=60) for number in range(FAST)]
        self.poll = select.epoll()
        self.by_number = {consumer.fileno(): consumer for consumer in self.consumers}
        for number in self.by_number:
            self.poll.register(number, select.EPOLLIN)

    def round(self, count: int) -> float:
        """``count`` messages to each queue; how long until the fast ones have all of them."""
        began = time.perf_counter()
        publisher = threading.Thread(target=self._publish, args=(count,))
        publisher.start()
        left = dict.fromkeys(self.by_number, count)
        while any(left.values()):
            for number, _ in self.poll.poll(10):
                left[number] -= len(self.by_number[number].read_many(4096, timeout=0))
        took = time.perf_counter() - began
        publisher.join()
        for number in range(FAST + SLOW, QUEUES):  # nobody consumes these
            self.client.purge(f"q{number}")
        return took

    def _publish(self, count: int) -> None:
        with Client(port=self.port, timeout=60) as client:
            for topic in range(TOPICS):
                client.publish_many(f"t{topic}", [b"x" * 64] * count)

    def close(self) -> None:
        for consumer in self.consumers:
            consumer.close()
        self.client.close()


class Slow:
    """Half of them read nothing, half a message now and then."""

    def __init__(self, port: int) -> None:
        self.consumers = [
            Subscriber(port=port, queue=f"q{FAST + number}", ack="manual", credit=65_536, timeout=60)
            for number in range(SLOW)
        ]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(SLOW_S):
            for consumer in self.consumers[::2]:
                message = consumer.read(timeout=0)
                if message is not None:
                    consumer.ack(message)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for consumer in self.consumers:
            consumer.close()


def resident_mib(pid: int) -> float:
    """Of the broker's process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def main() -> None:
    arguments = options()
    scratch = os.environ.get("PENSTOCK_BENCH_DIR") or str(Path(__file__).parents[1] / "build")
    Path(scratch).mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        broker = BrokerPeer(directory)
        fast = Fast(broker.port)
        memory: list[float] = []

        def without(count: int) -> float:
            return fast.round(count)

        def beside(count: int) -> float:
            slow = Slow(broker.port)
            try:
                return fast.round(count)
            finally:
                slow.close()
                for number in range(FAST, FAST + SLOW):
                    fast.client.purge(f"q{number}")
                memory.append(resident_mib(broker.process.pid))

        try:
            slowed = Candidate("beside 50 slow ones", beside, 1000, quantity=FAST)
            slowed.wishes = (at_least(1 / 1.2, "without slow ones"),)
            candidates = [Candidate("without slow ones", without, 1000, quantity=FAST), slowed]
            compare("broker, 450 fast consumers of 1,000 queues", candidates, "without slow ones", arguments)
            print("memory of the broker after each round, MiB:", " ".join(f"{found:.0f}" for found in memory))
        finally:
            fast.close()
            broker.close()


if __name__ == "__main__":
    main()
