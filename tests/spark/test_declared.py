"""Pipelines from TOML files and from the command."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.spark.journals import make

from penstock.errors import CorruptionError, InvalidArgument, StateError
from penstock.journal import Journal
from penstock.spark.failure import unwrap
from penstock.spark.pipelines.declared import check, load

GOOD = """
name = "speeds"
[source]
path = "{journal}"
topics = "car.*"
[[steps]]
do = "json"
schema = "speed double"
[[steps]]
do = "filter"
where = "_corrupt is null"
[[steps]]
do = "rollup"
window = "1 hour"
aggregates = {{ mean = "avg(value.speed)", n = "count(*)" }}
[sink]
format = "parquet"
path = "{out}"
"""


def cars(path):
    with Journal(path) as journal:
        journal.append_many("car.a", [b'{"speed": 1}', b'{"speed": 3}', b"bad"])
        journal.append("other", b"{}")


def test_a_file_in_batch(spark, tmp_path):
    cars(tmp_path / "j")
    (tmp_path / "p.toml").write_text(GOOD.format(journal=tmp_path / "j", out=tmp_path / "out"))
    declared = load(tmp_path / "p.toml")
    assert declared.run(spark) is None
    (row,) = spark.read.parquet(str(tmp_path / "out")).collect()
    assert (row.topic, row.mean, row.n) == ("car.a", 2.0, 2)
    with pytest.raises(StateError, match=r'out exists: choose mode = "overwrite" or "append" in \[sink\]'):
        declared.run(spark)
    assert spark.read.parquet(str(tmp_path / "out")).count() == 1, "not stored twice"


def test_several_topics_as_a_list(spark, tmp_path):
    cars(tmp_path / "j")
    source = {"path": str(tmp_path / "j"), "topics": ["car.*", "other"]}
    assert check({"source": source, "sink": {"path": "out"}}, "p.toml").frame(spark).count() == 4


def test_a_file_in_streaming(spark, tmp_path):
    cars(tmp_path / "j")
    (tmp_path / "p.toml").write_text(
        f"""streaming = true
[source]
path = "{tmp_path / "j"}"
[[steps]]
do = "select"
columns = ["topic", "payload"]
[sink]
format = "penstock"
path = "{tmp_path / "copy"}"
checkpoint = "{tmp_path / "checkpoint"}"
"""
    )
    query = load(tmp_path / "p.toml").run(spark)
    query.awaitTermination()
    with Journal(tmp_path / "copy", mode="read") as journal:
        assert len(journal.read_many(1, 100)) == 4


@pytest.mark.parametrize(("data", "text"), [
    ({}, r"table \[source\] is missing"),
    ({"source": {"path": "j"}}, r"table \[sink\] is missing"),
    ({"source": {}, "sink": {}}, "needs a path"),
    ({"sorce": {}}, "did you mean source"),
    ({"source": {"path": "j"}, "sink": {}, "steps": [{"do": "jsn"}]}, "did you mean json"),
    ({"source": {"path": "j"}, "sink": {}, "steps": [{"do": "filter", "were": "x"}]}, "did you mean where"),
    ({"source": {"path": "j"}, "sink": {}, "steps": [{"do": "filter"}]}, "needs where"),
    ({"source": {"path": "j"}, "sink": {"chekpoint": "c"}}, "did you mean checkpoint"),
    ({"source": {"path": "j"}, "sink": {}, "streaming": True}, "needs a checkpoint"),
])  # fmt: skip
def test_what_is_wrong_is_named(data, text):
    with pytest.raises(InvalidArgument, match=text):
        check(data, "p.toml")


def test_no_toml(tmp_path):
    (tmp_path / "p.toml").write_text("= 1")
    with pytest.raises(InvalidArgument, match="is not TOML"):
        load(tmp_path / "p.toml")


def command(*arguments):
    done = subprocess.run(
        [sys.executable, "-c", "from penstock.cli import main; main()", "pipeline", *arguments],
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("arguments", "text"), [
    (("archve", "--from", "j", "--to", "a"), "did you mean archive"),
    (("archive",), "needs --from JOURNAL"),
    (("archive", "--from", "/nowhere/at/all", "--to", "a"), "is not a journal"),
    (("quality", "--from", "{j}", "--to", "a", "--set", "windw=1s"), "did you mean window"),
    (("quality", "--from", "{j}", "--to", "a", "--once", "--every", "1s"), "not both"),
    (("quality", "--from", "{j}", "--to", "a", "--every", "soon"), "is no duration"),
])  # fmt: skip
def test_wrong_commands_end_before_spark_starts(tmp_path, arguments, text):
    make(tmp_path / "j", 3)
    code, _, err = command(*(argument.replace("{j}", str(tmp_path / "j")) for argument in arguments))
    assert code == 2 and text in err and len(err.strip().splitlines()) <= 2, err


def test_our_error_is_found_in_sparks():
    error = Exception("Traceback...\npenstock.errors.CorruptionError: /j/1.log:4160: position 7 is damaged\nmore")
    assert isinstance(unwrap(error), CorruptionError) and "position 7" in str(unwrap(error))
    assert unwrap(Exception("other")) is None
