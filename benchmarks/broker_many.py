"""50 publishers and 50 consumers at one broker: messages a second, and the CPU time that its threads take for each.

Each publisher has a topic, a queue and a consumer of its own; four client processes share the connections. The rate is
what the whole machine gives, clients included; the CPU time of the broker's loop says how far that thread could go if
the clients and the disk were no bound.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from penstock.broker import Client, Publisher, Subscriber

PAIRS, PROCESSES = 50, 2  # of each kind
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def publish(port: int, numbers: range, count: int, batch: int) -> None:
    """``count`` messages to each topic, two batches of each under way."""
    publishers = [Publisher(port=port, topic=f"t{number}", unconfirmed=2 * batch, timeout=300) for number in numbers]
    body = [b"x" * 64] * batch
    for _ in range(count // batch):
        for publisher in publishers:
            publisher.publish_many(body)
    for publisher in publishers:
        publisher.close()


def consume(port: int, numbers: range, count: int) -> None:
    """All that these queues get."""
    consumers = [Subscriber(port=port, queue=f"q{number}", ack="next", timeout=300) for number in numbers]
    left = {consumer.fileno(): count for consumer in consumers}
    by_number = {consumer.fileno(): consumer for consumer in consumers}
    poll = select.epoll()
    for number in by_number:
        poll.register(number, select.EPOLLIN)
    while any(left.values()):
        for number, _ in poll.poll(60):
            left[number] -= len(by_number[number].read_many(4096, timeout=0))
    for consumer in consumers:
        consumer.close()


def cpu_s(pid: int) -> tuple[float, float]:
    """Of the loop, which is the first thread, and of all others."""
    times = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        times[int(task.name)] = (int(fields[11]) + int(fields[12])) * TICK_S
    loop = times.pop(pid)
    return loop, sum(times.values())


def measure(count: int, batch: int) -> tuple[float, float, float]:
    """Messages a second, and microseconds of the loop and of the other threads for each message."""
    scratch = os.environ.get("PENSTOCK_BENCH_DIR") or str(Path(__file__).parents[1] / "build")
    Path(scratch).mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        command = [sys.executable, "-m", "penstock", "broker", f"{directory}/broker", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as broker:
            try:
                assert broker.stdout is not None
                port = int(broker.stdout.readline().rpartition(":")[2])
                with Client(port=port) as client:
                    for number in range(PAIRS):
                        client.queue(f"q{number}", topics=f"t{number}")
                share = PAIRS // PROCESSES
                spans = [range(begin, begin + share) for begin in range(0, PAIRS, share)]
                work = [multiprocessing.Process(target=consume, args=(port, span, count)) for span in spans]
                work += [multiprocessing.Process(target=publish, args=(port, span, count, batch)) for span in spans]
                before, began = cpu_s(broker.pid), time.perf_counter()
                for process in work:
                    process.start()
                for process in work:
                    process.join()
                took, after = time.perf_counter() - began, cpu_s(broker.pid)
            finally:
                broker.terminate()
    total = count * PAIRS
    return total / took, (after[0] - before[0]) / total * 1e6, (after[1] - before[1]) / total * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--count", type=int, default=20_000, help="messages of each publisher")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    arguments, _ = parser.parse_known_args()  # the harness has more of them
    count = 2_000 if arguments.quick else arguments.count
    print(f"{PAIRS} publishers, {PAIRS} consumers, batches of {arguments.batch}, load {os.getloadavg()[0]:.1f}")
    for _ in range(1 if arguments.quick else arguments.repeats):
        rate, loop, others = measure(count, arguments.batch)
        print(f"{rate:12,.0f} messages/s   loop {loop:6.2f} us   other threads {others:6.2f} us a message", flush=True)


if __name__ == "__main__":
    main()
