"""A real cluster: master and two workers on loopback, an executor killed under way, the result that of a plain reader."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import zlib
from pathlib import Path

import psutil
import pyspark
import pytest
from tests.spark.journals import make

from penstock.spark import find_java

DRIVER = Path(__file__).with_name("cluster_driver.py")
HOME = Path(pyspark.__file__).parent


@pytest.fixture
def cluster(tmp_path):
    java = find_java()
    environment = os.environ | {
        "JAVA_HOME": str(java.home), "SPARK_HOME": str(HOME), "SPARK_DAEMON_MEMORY": "256m", "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable, "SPARK_NO_DAEMONIZE": "1",
    }  # fmt: skip
    processes: list[subprocess.Popen[bytes]] = []

    def run(name, *arguments):
        log = (tmp_path / f"{name}.log").open("wb")
        command = [str(HOME / "bin" / "spark-class"), *arguments]
        processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        log.close()
        return processes[-1]

    try:
        deploy = "org.apache.spark.deploy"
        run("master", f"{deploy}.master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        url = wait_for(tmp_path / "master.log", r"Starting Spark master at (spark://\S+)")
        workers = []
        for number in (1, 2):
            folder = tmp_path / f"worker{number}"
            workers.append(run(
                f"worker{number}", f"{deploy}.worker.Worker", "--host", "127.0.0.1", "--webui-port", "0", "--cores", "1",
                "--memory", "700m", "--work-dir", str(folder), url,
            ))  # fmt: skip
        for number in (1, 2):
            wait_for(tmp_path / f"worker{number}.log", r"Successfully registered with master (\S+)")
        yield url, ",".join(str(worker.pid) for worker in workers)
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
@pytest.mark.timeout(600)
def test_batch_streaming_and_sink_on_a_cluster(cluster, tmp_path):
    url, workers = cluster
    rows = make(tmp_path / "j", 8000, size=100)
    work = tmp_path / "work"
    work.mkdir()
    done = subprocess.run(
        [sys.executable, str(DRIVER), url, str(tmp_path / "j"), str(work)], env=os.environ | {"PENSTOCK_TEST_WORKERS": workers},
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    got = json.loads(done.stdout.strip().splitlines()[-1])
    digest = sum(zlib.crc32(row[3]) for row in rows)
    assert got["killed"] == 1
    assert (got["n"], got["sum"]) == (8000, digest)
    assert (got["copy_n"], got["copy_sum"]) == (8000, digest)
    assert got["topics"] == {topic: sum(row[0] == topic for row in rows) for topic in {row[0] for row in rows}}
