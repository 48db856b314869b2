"""The plain example runs. The project of Spark Declarative Pipelines: ``tests/stress/test_spark_programs.py``."""

from __future__ import annotations

import runpy
import tempfile
from pathlib import Path

import pyspark

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_plain_example(spark, tmp_path, monkeypatch, capsys):
    """In this process and on the tests' own session, which the example must not stop for the others."""
    monkeypatch.setattr(pyspark.sql.SparkSession, "stop", lambda _: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    runpy.run_path(str(EXAMPLES / "spark_journal.py"), run_name="__main__")
    told = capsys.readouterr().out
    assert "corrupt: 1" in told and "answers: 3" in told
