"""A real cluster: master and two workers on loopback, executors killed under way, every row that of a plain reader."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow
import pyspark
import pytest
from tests.spark.journals import make

from penstock.spark import find_java
from penstock.spark.bounds import Bounds
from penstock.spark.places import Reading, open_place

KINDS = {
    "topic": pyarrow.string(), "ordinal": pyarrow.int64(), "position": pyarrow.int64(), "timestamp_ns": pyarrow.int64(),
    "payload": pyarrow.binary(), "properties": pyarrow.map_(pyarrow.string(), pyarrow.string()),
    "message_id": pyarrow.string(),
}  # fmt: skip
DRIVER = Path(__file__).with_name("cluster_driver.py")
HOME = Path(pyspark.__file__).parent


@pytest.fixture
def cluster(tmp_path):
    with standalone(tmp_path) as url:
        yield url


@contextlib.contextmanager
def standalone(tmp_path, hidden=None):
    """The address of a cluster with two workers; the second one sees an empty directory in place of ``hidden``."""
    java = find_java()
    environment = os.environ | {
        "JAVA_HOME": str(java.home), "SPARK_HOME": str(HOME), "SPARK_DAEMON_MEMORY": "256m", "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable, "SPARK_NO_DAEMONIZE": "1",
        "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }  # fmt: skip
    processes: list[subprocess.Popen[bytes]] = []

    def run(name, *arguments):
        log = (tmp_path / f"{name}.log").open("wb")
        command = [str(HOME / "bin" / "spark-class"), *arguments]
        if name == "worker2" and hidden is not None:
            mount = 'mount -t tmpfs none "$0" && exec "$@"'
            command = ["unshare", "-Urm", "sh", "-c", mount, str(hidden), *command]
        processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        log.close()
        return processes[-1]

    try:
        deploy = "org.apache.spark.deploy"
        run("master", f"{deploy}.master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        url = wait_for(tmp_path / "master.log", r"Starting Spark master at (spark://\S+)")
        for number in (1, 2):
            run(
                f"worker{number}", f"{deploy}.worker.Worker", "--host", "127.0.0.1", "--webui-port", "0", "--cores", "1",
                "--memory", "700m", "--work-dir", str(tmp_path / f"worker{number}"), url,
            )  # fmt: skip
        for number in (1, 2):
            wait_for(tmp_path / f"worker{number}.log", r"Successfully registered with master (\S+)")
        yield url
    finally:
        family = [child for process in processes for child in children(process.pid)]
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        _, alive = psutil.wait_procs(family, timeout=30)
        for child in alive:
            child.kill()


def children(pid):
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def wait_for(log, pattern, timeout_s=120):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = re.search(pattern, log.read_text(errors="replace"))
        if found:
            return found.group(1)
        time.sleep(0.1)
    raise AssertionError(f"{pattern} did not appear in {log}:\n{log.read_text(errors='replace')[-2000:]}")


@pytest.mark.spark
@pytest.mark.jvm
@pytest.mark.timeout(600)
def test_a_cluster_reads_and_writes(cluster, tmp_path):
    """One job; each kind of job is in ``tests/stress/test_cluster.py``."""
    expected = run_jobs(cluster, tmp_path, "sink")
    assert without_places(local_rows(tmp_path / "sink")) == without_places(expected)


def run_jobs(url, place, *jobs):
    """Run them on the cluster, an executor killed during each; gives the rows of the journal that they read."""
    make(place / "j", 8000, size=100)
    command = [sys.executable, str(DRIVER), url, str(place / "j"), str(place), *jobs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    killed = json.loads(done.stdout.strip().splitlines()[-1])
    assert list(killed) == list(jobs)
    assert all(len(pids) == 1 for pids in killed.values()) and len({pid for (pid,) in killed.values()}) == len(jobs)
    return local_rows(place / "j")


def without_places(rows):
    """The rows without what a journal gives them itself, in an order that does not depend on it: payloads differ."""
    return sorted(((row[0], *row[3:]) for row in rows), key=lambda row: row[2])


def by_position(row):
    return row[2]


def rows_of(table):
    rows = (row.values() for row in table.to_pylist(maps_as_pydicts="strict"))
    return [tuple({} if value is None and at == 5 else value for at, value in enumerate(row)) for row in rows]


def local_rows(path):
    """The rows as the source gives them in this process, without a cluster."""
    place = open_place(str(path))
    schema = pyarrow.schema(list(KINDS.items()))
    batches = list(place.batches(1, place.frontier, Reading(schema, Bounds())))
    return sorted(rows_of(pyarrow.Table.from_batches(batches)), key=by_position)
