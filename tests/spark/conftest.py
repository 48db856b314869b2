"""One Spark session for all tests here: starting one takes longer than most tests."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

pyspark = pytest.importorskip("pyspark")

from penstock.spark import session  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything that asks for the session carries the marker ``spark``."""
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker("spark")
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(600))  # a busy machine starts a JVM slowly
            item.add_marker(pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas"))
            item.add_marker(pytest.mark.filterwarnings("ignore:The copy keyword is deprecated"))


@pytest.fixture(scope="session")
def spark() -> Iterator[pyspark.sql.SparkSession]:
    started = session("tests", master="local[2]", **{"spark.sql.shuffle.partitions": 2, "spark.log.level": "ERROR"})
    # PySpark's own handler of Ctrl-C cancels the jobs, which fails the test under way, and the run would go on.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gateway = started.sparkContext._gateway
    yield started
    started.stop()
    if gateway is not None and gateway.proc is not None:
        gateway.shutdown()
        gateway.proc.stdin.close()
        try:
            gateway.proc.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.kill(gateway.proc.pid, 9)


@pytest.fixture
def days() -> Iterator[None]:
    """Days by the publisher's time, which a test can choose; the stored one is the clock's."""
    from penstock.spark.lake import schema

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "STORED_NS", "timestamp_ns")
        yield
