"""The examples run: the plain one, and the project of Spark Declarative Pipelines."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pyspark
import pytest
from tests.spark.journals import make

from penstock.spark import find_java

PROJECT = Path(__file__).parents[2] / "examples" / "spark_declarative"


@pytest.mark.spark
@pytest.mark.jvm
@pytest.mark.timeout(600)
def test_the_declarative_example(tmp_path):
    pytest.importorskip("grpc")
    make(tmp_path / "j", 300)
    project = tmp_path / "project"
    shutil.copytree(PROJECT, project)
    spec = project / "spark-pipeline.yml"
    spec.write_text(spec.read_text().replace("file:///tmp/penstock-example-storage", f"file://{tmp_path / 'storage'}"))
    home = Path(pyspark.__file__).parent
    environment = os.environ | {
        "JAVA_HOME": str(find_java().home), "SPARK_HOME": str(home), "PYSPARK_PYTHON": sys.executable,
        "PENSTOCK_JOURNAL": str(tmp_path / "j"), "SPARK_LOCAL_IP": "127.0.0.1",
    }  # fmt: skip
    done = subprocess.run(
        [str(home / "bin" / "spark-pipelines"), "run", "--spec", str(spec)], cwd=project, env=environment,
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert list(project.rglob("messages/*.parquet")), done.stdout[-2000:]


def test_the_plain_example(spark, tmp_path, monkeypatch, capsys):
    """In this process and on the tests' own session, which the example must not stop for the others."""
    monkeypatch.setattr(pyspark.sql.SparkSession, "stop", lambda _: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    runpy.run_path(str(PROJECT.parent / "spark_journal.py"), run_name="__main__")
    told = capsys.readouterr().out
    assert "corrupt: 1" in told and "answers: 3" in told
