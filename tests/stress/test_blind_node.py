"""A cluster of two workers, one of which does not see the directory: an error that names the node, and the way out."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest
from tests.spark.journals import make
from tests.spark.test_cluster import standalone

from penstock.broker import Server
from penstock.journal import Journal
from penstock.spark import lake

DRIVER = """
import json, sys
from penstock.errors import PenstockError
from penstock.spark import lake, session
from penstock.spark.failure import unwrap

master, hidden, broker = sys.argv[1:]
spark = session("blind", master=master, **{
    "spark.executor.memory": "512m", "spark.executor.cores": "1", "spark.cores.max": "2", "spark.log.level": "OFF",
    "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", "spark.ui.enabled": False,
    "spark.task.maxFailures": 1, "spark.pyspark.python": sys.executable, "spark.default.parallelism": 4,
    "spark.scheduler.minRegisteredResourcesRatio": 1.0, "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
    "spark.locality.wait": 0,
})
told = {}

def attempt(name, job):
    try:
        told[name] = ["", str(job())]
    except Exception as error:
        ours = error if isinstance(error, PenstockError) else unwrap(error)
        told[name] = [type(ours).__name__, str(ours if ours is not None else error)]

frame = spark.read.format("penstock").option("partitionBytes", 50_000)
attempt("read", lambda: frame.load(hidden + "/j").selectExpr("sum(length(payload))").first())
rows = spark.range(0, 100, 1, 8).selectExpr("'t' AS topic", "CAST(id AS string) AS payload")
attempt("sink", lambda: rows.write.format("penstock").mode("append").save(hidden + "/sink"))
attempt("archive", lambda: lake.archive(spark, hidden + "/j", hidden + "/lake"))
attempt("broker", lambda: frame.load(broker).selectExpr("count(*)", "sum(length(payload))").first())
print(json.dumps(told))
spark.stop()
"""


@pytest.mark.timeout(900)
def test_a_node_that_does_not_see_the_directory(tmp_path):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    if subprocess.run(["unshare", "-Urm", "mount", "-t", "tmpfs", "none", str(hidden)], check=False).returncode:
        pytest.skip("this user may not make mounts of its own")
    rows = make(hidden / "j", 16_000, size=1000, segment_bytes=1 << 20)
    with Server(hidden / "j", 0).start() as server, standalone(tmp_path, hidden) as url:
        command = [sys.executable, "-c", DRIVER, url, str(hidden), f"broker://127.0.0.1:{server.port}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.strip().splitlines()[-1])
    for job in ("read", "sink", "archive"):
        kind, text = told[job]
        assert kind == "StateError" and socket.gethostname() in text and "does not see" in text, told[job]
    assert "broker://" in told["read"][1] and "broker://" in told["sink"][1]
    assert lake.info(hidden / "lake").rows == 0
    assert not (hidden / "sink").exists() or Journal(hidden / "sink", mode="read").frontier == 1
    assert told["broker"] == ["", f"Row(count(1)={len(rows)}, sum(length(payload))={sum(len(row[3]) for row in rows)})"]
