"""``penstock pipeline``: every pipeline through the command, again and again until Ctrl-C, with its counts in view."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from tests.spark.journals import extend, make
from typer.testing import CliRunner

from penstock.cli import pipeline as command
from penstock.errors import InvalidArgument, PenstockError, StateError
from penstock.journal import Journal
from penstock.observe.snapshot import live
from penstock.spark import lake
from penstock.spark.pipelines import align, sessions


@pytest.fixture
def run(spark, monkeypatch):
    """The command in this process and on the tests' own session: a JVM for each would take most of the time."""

    @contextlib.contextmanager
    def shared(master):
        yield spark

    monkeypatch.setattr(command, "_session", shared)

    def invoke(*arguments):
        done = CliRunner().invoke(command.app, [str(argument) for argument in arguments], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout, done.stderr

    return invoke


def test_the_end_of_the_jvm_is_told_in_words():
    from penstock.cli.pipeline import _plain_errors

    with pytest.raises(StateError, match="JVM has ended"), _plain_errors():
        raise ConnectionRefusedError(111, "Connection refused")


def test_archive(run, tmp_path):
    rows = make(tmp_path / "j", 300)
    _, told = run("archive", "--from", tmp_path / "j", "--to", tmp_path / "a", "--set", "most_messages=200")
    assert lake.info(tmp_path / "a").rows == 300
    assert "300 rows" in told and "B" in told and sum(len(row[3]) for row in rows) > 0


def test_archive_without_what_is_lost(run, tmp_path):
    make(tmp_path / "j", 3000)
    lost = sorted((tmp_path / "j").glob("*.log"))[1]
    for part in (tmp_path / "j").glob(lost.stem + ".*"):
        part.unlink()
    with pytest.raises(PenstockError, match="--skip-lost"):
        run("archive", "--from", tmp_path / "j", "--to", tmp_path / "a")
    run("archive", "--from", tmp_path / "j", "--to", tmp_path / "a", "--skip-lost")
    assert 0 < lake.info(tmp_path / "a").rows < 3000


def test_following_without_a_terminal_tells_the_lag(run, tmp_path, monkeypatch):
    def follow(spark, source, target, *, on_progress, **_):
        on_progress(lake.Archived(rows=1200, lag=34))

    make(tmp_path / "j", 10)
    monkeypatch.setattr(lake, "follow", follow)
    _, told = run("archive", "--from", tmp_path / "j", "--to", tmp_path / "a", "--follow")
    assert "1,200 rows, 34 behind" in told


@pytest.mark.parametrize("name", ["quality", "align", "rollup", "sessions"])
def test_a_lake_is_read_by_its_log(run, spark, tmp_path, name):
    """From a lake the same rows as from its journal, though files that its log does not name lie beside them."""
    make(tmp_path / "j", 300)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "a", most_messages=100)
    lake.compact(None, tmp_path / "a", 1)
    settings = {"quality": "window=1 hour", "align": "onto=a.x", "rollup": "n=count(*)", "sessions": "gap_s=3600"}
    rows = []
    for source in ("j", "a"):
        run(name, "--from", tmp_path / source, "--to", tmp_path / f"of_{source}", "--set", settings[name])
        made = spark.read.parquet(str(tmp_path / f"of_{source}" / f"{name}.parquet"))
        made = made.drop("stored_ns", "key", "journal", "date")  # a lake has them by default, a journal on request
        rows.append(sorted(map(str, made.collect())))
    assert rows[0] and rows[0] == rows[1]


def test_quality(run, tmp_path):
    make(tmp_path / "j", 500)
    out, told = run("quality", "--from", tmp_path / "j", "--to", tmp_path / "report", "--set", "window=1 hour")
    assert (tmp_path / "report" / "quality.html").read_text().startswith("<!doctype html>")
    assert "Worst windows" in out and "500 rows" in told


def test_a_table_stays_until_its_successor_is_whole(run, spark, tmp_path):
    make(tmp_path / "j", 50)
    arguments = ("rollup", "--from", tmp_path / "j", "--to", tmp_path / "out", "--set", "window=1 hour", "--set")
    run(*arguments, "n=count(*)")
    with pytest.raises(PenstockError):
        run(*arguments, "n=sum(raise_error(topic))")
    assert sum(row.n for row in spark.read.parquet(str(tmp_path / "out" / "rollup.parquet")).collect()) == 50
    run(*arguments, "n=2 * count(*)")
    assert sum(row.n for row in spark.read.parquet(str(tmp_path / "out" / "rollup.parquet")).collect()) == 100
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["rollup.parquet"]
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700


def test_align(run, spark, tmp_path):
    make(tmp_path / "j", 90)
    run("align", "--from", tmp_path / "j", "--to", tmp_path / "out", "--set", "onto=b", "--set", "columns=ordinal")
    got = spark.read.parquet(str(tmp_path / "out" / "align.parquet"))
    frame = spark.read.format("penstock").load(str(tmp_path / "j"))
    assert sorted(got.collect()) == sorted(align(frame, "b", columns=["ordinal"]).collect()) and got.count() == 30


def test_rollup(run, spark, tmp_path):
    rows = make(tmp_path / "j", 300)
    settings = ("--set", "n=count(*)", "--set", "size=sum(octet_length(payload))", "--set", "window=1 hour")
    _, told = run("rollup", "--from", tmp_path / "j", "--to", tmp_path / "out", "--topics", "a.*", *settings)
    got = {row.topic: (row.n, row.size) for row in spark.read.parquet(str(tmp_path / "out" / "rollup.parquet")).collect()}
    for topic in ("a.x", "a.y"):
        sizes = [len(row[3]) for row in rows if row[0] == topic]
        assert got[topic] == (len(sizes), sum(sizes))
    assert "b" not in got and "200 rows" in told


def test_sessions(run, spark, tmp_path):
    make(tmp_path / "j", 60)
    run("sessions", "--from", tmp_path / "j", "--to", tmp_path / "out", "--set", "gap_s=30")
    got = spark.read.parquet(str(tmp_path / "out" / "sessions.parquet"))
    frame = spark.read.format("penstock").load(str(tmp_path / "j"))
    assert sorted(got.collect()) == sorted(sessions(frame, gap_s=30).collect()) and got.count() == 3


def test_replay(run, tmp_path):
    rows = make(tmp_path / "j", 50)
    _, told = run("replay", "--from", tmp_path / "j", "--to", f"journal:{tmp_path / 'k'}#{{topic}}", "--set", "speed=1e6")
    with Journal(tmp_path / "k", mode="read") as journal:
        got = [(message.channel, bytes(message)) for message in journal.read_many(1, 100)]
    assert got == [(row[0], row[3]) for row in rows] and "50 rows" in told


def test_replay_keeps_keys(run, tmp_path):
    with Journal(tmp_path / "j", sync=False) as journal, journal.transaction() as transaction:
        transaction.append("t", b"x", key="k", message_id="m", properties={"n": "1"}, timestamp_ns=-7)
    run("replay", "--from", tmp_path / "j", "--to", f"journal:{tmp_path / 'k'}#{{topic}}", "--set", "speed=0")
    with Journal(tmp_path / "k", mode="read") as journal:
        (message,) = journal.read_many(1, 9)
        details = journal.details(1)
        assert (details.key, details.message_id, message.timestamp_ns) == ("k", "m", -7)
        assert dict(message.properties) == {"n": "1"}


@pytest.mark.parametrize("streaming", [False, True])
def test_a_file(run, spark, tmp_path, streaming):
    rows = make(tmp_path / "j", 40)
    (tmp_path / "p.toml").write_text(
        f"""streaming = {str(streaming).lower()}
[source]
path = "{tmp_path / "j"}"
[[steps]]
do = "filter"
where = "topic = 'b'"
[sink]
path = "{tmp_path / "out"}"
checkpoint = "{tmp_path / "checkpoint"}"
"""
    )
    _, told = run(tmp_path / "p.toml")
    assert spark.read.parquet(str(tmp_path / "out")).count() == len([row for row in rows if row[0] == "b"])
    assert "40 rows" in told and " 0 B" not in told, told


def wait_for(condition, process, timeout_s=240):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)


def archived(directory):
    """How many rows a lake has; none before it is there."""
    try:
        return lake.info(directory).rows
    except InvalidArgument:
        return 0


def seen(pid):
    """What the monitor sees of the pipeline: (delivered, lag)."""
    return [(block.delivered, block.lag) for block in live() if block.pid == pid and block.room == "spark"]


def test_after_ctrl_c_py4j_logs_nothing(caplog):
    """A call to the JVM that is cut off ends in stack traces, by py4j's own loggers and by the root."""

    def log_all(text):
        for name in ("", "py4j.clientserver", "py4j.java_gateway"):
            logger = logging.getLogger(name)
            for path in ("/lib/py4j/clientserver.py", "/lib/other/module.py"):
                logger.handle(logger.makeRecord(name, logging.ERROR, path, 1, text, (), None))

    quiet = threading.Event()
    with pytest.raises(KeyboardInterrupt), command._interruptible(quiet, ignored=False):
        log_all("before")
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        finally:
            log_all("after")
    assert quiet.is_set() and [record.message for record in caplog.records].count("before") == 6
    after = [record.pathname for record in caplog.records if record.message == "after"]
    assert after == ["/lib/other/module.py"] * 3


def test_what_an_interrupted_run_has_done_counts(capsys):
    """``--follow`` always ends so: its rounds are in the lake."""
    with contextlib.suppress(KeyboardInterrupt), command._Progress("archive", None) as progress:
        progress.add(1000, 2000, 0)
        progress.show(200, 300, 7)
        progress.show(500, 600, 0)
        raise KeyboardInterrupt
    assert "1,500 rows" in capsys.readouterr().err


@pytest.mark.spark
@pytest.mark.jvm
@pytest.mark.timeout(600)
def test_again_and_again_until_ctrl_c(tmp_path):
    make(tmp_path / "j", 100)
    arguments = ["archive", "--from", str(tmp_path / "j"), "--to", str(tmp_path / "a"), "--every", "0.2s"]
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "pipeline", *arguments, "--master", "local[1]"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_for(lambda: archived(tmp_path / "a") == 100, process)
        with Journal(tmp_path / "j") as journal:
            extend(journal, 50)
        wait_for(lambda: seen(process.pid) == [(150, 0)], process)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode in (0, 130) and "150 rows" in told, told
    assert len(told.split("\n")) <= 3 and told.strip().startswith("archive:"), f"Spark's own words, too: {told}"
    assert lake.info(tmp_path / "a").rows == 150
