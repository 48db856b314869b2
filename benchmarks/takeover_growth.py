"""What a broker that takes over reads before it answers: CPU time of opening a followed directory over a cluster of
three nodes on this machine, by the number of commits since the log's segment began. One message of 64 B is a commit.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import penstock
from penstock.broker import Server
from penstock.broker.store import JournalStore
from penstock.replica import Replica
from penstock.replica.cluster import Cluster
from penstock.replica.follower import follow


def opened(directory: Path, cluster: Cluster) -> Server:
    replica = Replica(directory, cluster.connect())
    return Server(None, 0, store=lambda snapshot: JournalStore(directory, snapshot, disk=replica.disk()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", type=int, nargs="*", default=[1000, 5000, 10_000])
    steps = sorted(parser.parse_args().commits)
    with tempfile.TemporaryDirectory() as scratch, Cluster(Path(scratch, "nodes")) as cluster:
        done = 0
        for commits in steps:
            with (
                opened(Path(scratch, "leader"), cluster).start() as server,
                penstock.publisher(f"broker://127.0.0.1:{server.port}/orders") as publisher,
            ):
                while done < commits:
                    publisher.publish(bytes(64))
                    done += 1
            follow(Path(scratch, "standby"), cluster.connect()).close()
            began, began_cpu = time.monotonic(), time.process_time()
            server = opened(Path(scratch, "standby"), cluster)
            took, cpu = time.monotonic() - began, time.process_time() - began_cpu
            server.close()
            print(f"{commits} commits in the segment: CPU {cpu:.2f} s, {took:.2f} s", flush=True)


if __name__ == "__main__":
    main()
