"""The archive: exactly once, resumable, compacted; and history plus tail without overlap or gap."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from tests.spark.journals import extend, make
from tests.spark.test_stream import forget_before

from penstock.errors import CorruptionError, InvalidArgument, RefusedError, StateError
from penstock.journal import Journal
from penstock.spark.pipelines import archive, history, read_all, read_manifest

module = sys.modules[archive.__module__]
_alone, compact, topics = module._alone, module.compact, module.topics


def positions(frame):
    return sorted(row.position for row in frame.select("position").collect())


def test_archive_then_read_all(spark, tmp_path):
    rows = make(tmp_path / "j", 2000, step_ns=60 * 10**9)  # over two days
    done = archive(spark, str(tmp_path / "j"), tmp_path / "archive", most_messages=1500)
    assert done.rows == 2000 and done.lag == 0 and done.payload_bytes == sum(len(row[3]) for row in rows)
    manifest = read_manifest(tmp_path / "archive")
    assert list(manifest.reached.values()) == [2001] and manifest.rows == 2000
    assert len(topics(manifest)["a.x"]) == 2
    with Journal(tmp_path / "j") as journal:
        rows += extend(journal, 500, step_ns=60 * 10**9)
    everything = read_all(spark, str(tmp_path / "j"), tmp_path / "archive")
    got = everything.select("topic", "position", "timestamp_ns", "payload", "properties", "message_id").collect()
    assert sorted((r[0], r[1], r[2], bytes(r[3]), r[4] or {}, r[5]) for r in got) == sorted(rows)
    assert archive(spark, str(tmp_path / "j"), tmp_path / "archive").rows == 500
    assert archive(spark, str(tmp_path / "j"), tmp_path / "archive").rows == 0
    assert positions(history(spark, tmp_path / "archive")) == list(range(1, 2501))
    plan = everything.filter("topic = 'b'")._jdf.queryExecution().executedPlan().toString()
    assert "PartitionFilters: [isnotnull(topic" in plan


def test_a_round_that_died_is_done_again(spark, tmp_path, monkeypatch):
    make(tmp_path / "j", 300)
    keep = module._write_manifest

    def dies(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_write_manifest", dies)
    with pytest.raises(KeyboardInterrupt):
        archive(spark, str(tmp_path / "j"), tmp_path / "archive")
    assert list((tmp_path / "archive").glob("topic=*/*/*.parquet")), "it died before it wrote anything"
    assert positions(read_all(spark, str(tmp_path / "j"), tmp_path / "archive")) == list(range(1, 301))
    monkeypatch.setattr(module, "_write_manifest", keep)
    archive(spark, str(tmp_path / "j"), tmp_path / "archive")
    assert positions(history(spark, tmp_path / "archive")) == list(range(1, 301))
    files = {str(path.relative_to(tmp_path / "archive")) for path in (tmp_path / "archive").glob("topic=*/*/*.parquet")}
    assert files == set(read_manifest(tmp_path / "archive").files)


def test_small_files_are_put_together(spark, tmp_path):
    make(tmp_path / "j", 400, topics=("a",))
    archive(spark, str(tmp_path / "j"), tmp_path / "archive", most_messages=100, compact_files=100)
    before = history(spark, tmp_path / "archive")
    assert len(read_manifest(tmp_path / "archive").files) >= 4
    compact(spark, tmp_path / "archive", 2)
    assert len(read_manifest(tmp_path / "archive").files) == 1
    assert positions(before) == positions(history(spark, tmp_path / "archive")) == list(range(1, 401))
    module.sweep(tmp_path / "archive", dropped=True)
    plain = spark.read.parquet(str(tmp_path / "archive"))
    assert positions(plain) == list(range(1, 401)), "whoever reads every file of the directory sees each row once"


class Watched:
    """What a power cut would take: directories whose names, and files whose bytes, were not synced yet."""

    def __init__(self, monkeypatch):
        self.unsynced, self.synced, self.manifests = set(), set(), 0
        self.real = {name: getattr(os, name) for name in ("fsync", "mkdir", "replace")}
        for name in self.real:
            monkeypatch.setattr(os, name, getattr(self, name))

    def fsync(self, descriptor):
        self.real["fsync"](descriptor)
        self.unsynced.discard(os.readlink(f"/proc/self/fd/{descriptor}"))
        self.synced.add(os.fstat(descriptor).st_ino)

    def mkdir(self, path, *rest, **options):
        self.real["mkdir"](path, *rest, **options)
        self.unsynced.add(os.path.dirname(path))

    def replace(self, source, target):
        if os.path.basename(target) == "manifest.json":
            self.manifests += 1
            root = Path(target).parent.parent
            files = [root / name for name in json.loads(Path(source).read_bytes())["files"]]
            assert files and not [path for path in files if path.stat().st_ino not in self.synced]
            assert not self.unsynced
        self.real["replace"](source, target)
        self.unsynced.add(os.path.dirname(target))


def test_the_manifest_names_only_what_is_on_the_disk(spark, tmp_path, monkeypatch):
    make(tmp_path / "j", 200, step_ns=10 * 60 * 10**9)  # over two days
    watched = Watched(monkeypatch)
    root = tmp_path / "not" / "there" / "yet"
    archive(spark, str(tmp_path / "j"), root, most_messages=50, compact_files=2)
    assert watched.manifests > 4, "rounds and compactions"
    assert not watched.unsynced
    assert positions(history(spark, root)) == list(range(1, 201))


def test_segments_may_go_once_archived(spark, tmp_path):
    make(tmp_path / "j", 5000)
    archive(spark, str(tmp_path / "j"), tmp_path / "archive")
    forget_before(tmp_path / "j", 3)
    assert positions(read_all(spark, str(tmp_path / "j"), tmp_path / "archive")) == list(range(1, 5001))
    assert archive(spark, str(tmp_path / "j"), tmp_path / "archive").rows == 0


def test_what_went_before_it_was_archived_is_told(spark, tmp_path):
    make(tmp_path / "j", 100)
    archive(spark, str(tmp_path / "j"), tmp_path / "archive")
    with Journal(tmp_path / "j", segment_bytes=1 << 16, sync=False) as journal:
        extend(journal, 5000)
    forget_before(tmp_path / "j", 3)
    with pytest.raises(StateError, match="went by retention before they were archived"):
        archive(spark, str(tmp_path / "j"), tmp_path / "archive")
    with pytest.raises(StateError, match="went by retention"):
        read_all(spark, str(tmp_path / "j"), tmp_path / "archive")


def test_what_goes_while_it_is_archived_is_told(spark, tmp_path, monkeypatch):
    """Retention between planning and reading: the round fails, and nothing counts as archived that is not."""
    make(tmp_path / "j", 5000)
    tail = read_all(spark, str(tmp_path / "j"), tmp_path / "archive")
    keep = module._write

    def write(frame, root):
        forget_before(tmp_path / "j", 3)
        return keep(frame, root)

    monkeypatch.setattr(module, "_write", write)
    with pytest.raises(PySparkException, match="went by retention before they were read"):
        archive(spark, str(tmp_path / "j"), tmp_path / "archive")
    assert read_manifest(tmp_path / "archive").reached == {}
    with pytest.raises(PySparkException, match="went by retention before they were read"):
        tail.count()


def test_an_archive_of_some_topics_stays_one(spark, tmp_path):
    """What was left out counts as archived: other topics are refused, and the tail is of the same ones."""
    make(tmp_path / "j", 90)
    archive(spark, str(tmp_path / "j"), tmp_path / "archive", options={"topics": "b,a.x"})
    with Journal(tmp_path / "j") as journal:
        extend(journal, 90)
    for options in ({}, {"topics": "a.y"}, {"topics": "a.x,b", "startTime": "0"}):
        with pytest.raises(InvalidArgument, match=r"is one of topics=a\.x,b, not of .*another directory"):
            archive(spark, str(tmp_path / "j"), tmp_path / "archive", options=options)
    wanted = [number for number in range(1, 181) if number % 3 != 1]
    for options in (None, {"topics": "a.x, b"}):
        assert positions(read_all(spark, str(tmp_path / "j"), tmp_path / "archive", options=options)) == wanted
    with pytest.raises(InvalidArgument, match=r"not of topics=a\.y"):
        read_all(spark, str(tmp_path / "j"), tmp_path / "archive", options={"topics": "a.y"})
    archive(spark, str(tmp_path / "j"), tmp_path / "archive", options={"topics": "a.x,b"}, compact_files=1)
    assert positions(history(spark, tmp_path / "archive")) == wanted
    assert read_manifest(tmp_path / "archive").filters == {"topics": "a.x,b"}


def test_one_journal_under_two_names_is_not_archived_twice(tmp_path):
    make(tmp_path / "journals" / "j", 10)
    shutil.copytree(tmp_path / "journals" / "j", tmp_path / "journals" / "j.bak")
    with pytest.raises(InvalidArgument, match="are the same journal"):
        archive(None, f"{tmp_path}/journals/*", tmp_path / "archive")


def test_an_older_copy_of_an_archived_journal_is_told(tmp_path):
    make(tmp_path / "j", 10)
    with Journal(tmp_path / "j", mode="read") as journal:
        reached = {str(journal.uuid): 21}
    with _alone(tmp_path / "archive"):
        module._write_manifest(tmp_path / "archive", module.Manifest(reached, rows=20))
    with pytest.raises(StateError, match="older copy"):
        archive(None, str(tmp_path / "j"), tmp_path / "archive")
    assert read_manifest(tmp_path / "archive").reached == reached


def test_the_archive_is_its_makers_alone(tmp_path):
    (tmp_path / "own").mkdir(mode=0o755)
    for place, mode in (("new/archive", 0o700), ("own", 0o755)):
        with _alone(tmp_path / place):
            assert (tmp_path / place).stat().st_mode & 0o777 == mode
            assert (tmp_path / place / "_penstock").stat().st_mode & 0o777 == 0o700


def test_two_at_once_and_a_damaged_manifest(spark, tmp_path):
    make(tmp_path / "j", 10)
    with _alone(tmp_path / "archive"), pytest.raises(RefusedError, match="another process archives"):
        archive(spark, str(tmp_path / "j"), tmp_path / "archive")
    (tmp_path / "archive" / "_penstock" / "manifest.json").write_text("{")
    with pytest.raises(CorruptionError, match="is damaged"):
        read_all(spark, str(tmp_path / "j"), tmp_path / "archive")
