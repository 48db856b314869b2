"""The examples run: the plain one, and the project of Spark Declarative Pipelines."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest
from tests.spark.journals import make

from penstock.spark import find_java

PROJECT = Path(__file__).parents[2] / "examples" / "spark_declarative"


@pytest.mark.spark
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


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_the_plain_example(tmp_path):
    example = PROJECT.parent / "spark_journal.py"
    done = subprocess.run(
        [sys.executable, str(example)], env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True,
        timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "corrupt: 1" in done.stdout and "answers: 3" in done.stdout
