"""A work queue that survives: two workers share the jobs, one job is poison, and a broker holds it all on disk.

    python examples/work_queue.py
"""

from __future__ import annotations

import tempfile
import threading

from penstock.broker import Client, Server


def work(port: int, name: str, done: list[str], lock: threading.Lock) -> None:
    """Take jobs until none comes for a while; a job that fails is given back."""
    with Client(port=port) as client, client.subscribe("jobs", ack="manual", credit=4) as consumer:
        while (job := consumer.read(timeout=1.0)) is not None:
            text = bytes(job).decode()
            if text == "poison":
                consumer.nack(job)  # after three deliveries it goes to the dead letters
                continue
            with lock:
                done.append(f"{name}: {text}")
            consumer.ack(job)


def main() -> None:
    """Run it all in one process; the broker could as well be `penstock broker DIRECTORY`."""
    with (
        tempfile.TemporaryDirectory() as directory,
        Server(directory, 0).start() as server,
        Client(port=server.port) as client,
    ):
        client.queue("jobs", topics="jobs.>", max_tries=3)
        client.publish_many("jobs.resize", [f"picture {number}".encode() for number in range(20)])
        client.publish("jobs.resize", b"poison")
        done: list[str] = []
        lock = threading.Lock()
        workers = [threading.Thread(target=work, args=(server.port, name, done, lock)) for name in ("ann", "bob")]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        dead = next(queue for queue in client.queues() if queue["queue"] == "jobs.dead")
        print(f"{len(done)} jobs done, {dead['depth']} dead letter")


if __name__ == "__main__":
    main()
