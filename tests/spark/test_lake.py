"""The lake without Spark: exactly once, nothing that is not there, and the same rows for readers that are not ours."""

from __future__ import annotations

import datetime
import errno
import json
import os
import resource
import shutil
import threading
import time
from pathlib import Path

import duckdb
import numpy
import pandas
import polars
import pyarrow
import pyarrow.dataset
import pyarrow.parquet
import pytest
from deltalake import DeltaTable
from tests.spark.journals import BEGIN_NS, extend, make
from tests.spark.test_stream import forget_before, take_segment

import penstock
from penstock.errors import CorruptionError, InvalidArgument, RefusedError, StateError
from penstock.journal import Journal
from penstock.spark import lake
from penstock.spark.lake import archiving, compaction, delta, files, inspection, lineage, planning, schema, types
from penstock.spark.lake.store import store

pytestmark = pytest.mark.usefixtures("days")


def test_the_day_is_that_of_the_stored_time(tmp_path, monkeypatch):
    monkeypatch.setattr(schema, "STORED_NS", "stored_ns")
    make(tmp_path / "j", 100)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    for row in rows_of(tmp_path / "lake").to_pylist():
        day = datetime.datetime.fromtimestamp(row["stored_ns"] // 10**9, datetime.UTC).date()
        assert row["date"] == day and row["timestamp_ns"] < row["stored_ns"] <= time.time_ns()


def rows_of(directory, **options):
    """All rows, by pyarrow over the files that deltalake names."""
    return DeltaTable(str(directory), **options).to_pyarrow_dataset().to_table()


def as_made(table):
    """Rows in the form that ``make`` gives them, sorted by position."""
    found = [
        (row["topic"], row["position"], row["timestamp_ns"], row["payload"], dict(row["properties"]), row["message_id"])
        for row in table.to_pylist()
    ]
    return sorted(found, key=lambda row: row[1])


def read_by_others(directory):
    """The positions as four readers that are not ours give them."""
    dataset = DeltaTable(str(directory)).to_pyarrow_dataset()
    return {
        "pyarrow": sorted(dataset.to_table(columns=["position"])["position"].to_pylist()),
        "duckdb": [row[0] for row in duckdb.sql("SELECT position FROM dataset ORDER BY position").fetchall()],
        "polars": sorted(polars.read_delta(str(directory))["position"].to_list()),
        "pandas": sorted(DeltaTable(str(directory)).to_pandas()["position"].tolist()),
    }


def test_every_row_and_column_is_there_once_for_every_reader(tmp_path):
    made = make(tmp_path / "j", 2000, step_ns=60 * 10**9)  # over two days
    done = lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", most_messages=1500)
    assert (done.rows, done.lag, done.payload_bytes) == (2000, 0, sum(len(row[3]) for row in made))
    table = rows_of(tmp_path / "lake")
    assert as_made(table) == made
    assert set(table.column_names) == {*schema.SCHEMA.names, "date"} and table["journal"].unique().to_pylist() == [
        str(Journal(tmp_path / "j", mode="read").uuid)
    ]
    days = [datetime.datetime.fromtimestamp(row["timestamp_ns"] // 10**9, datetime.UTC).date() for row in table.to_pylist()]
    assert table["date"].to_pylist() == days and len(set(days)) == 2
    for reader, positions in read_by_others(tmp_path / "lake").items():
        assert positions == list(range(1, 2001)), reader
    assert lake.archive(None, str(tmp_path / "j"), tmp_path / "lake").rows == 0
    with Journal(tmp_path / "j") as journal:
        extend(journal, 500)
    assert lake.archive(None, str(tmp_path / "j"), f"file://{tmp_path}/lake").rows == 500
    found = lake.info(tmp_path / "lake")
    assert (found.rows, list(found.reached.values())) == (2500, [2501])
    assert lake.verify(tmp_path / "lake", deep=True).problems == []


def test_the_key_is_kept(tmp_path):
    with Journal(tmp_path / "j") as journal:
        journal.append("a", b"x", key="left")
        journal.append("a", b"y")
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    assert sorted(rows_of(tmp_path / "lake")["key"].to_pylist(), key=str) == [None, "left"]


@pytest.mark.parametrize("topic", ["x" * 255, "a/b", "__HIVE_DEFAULT_PARTITION__", "a=b%2Fc", "é🙂", "date=1"])
def test_any_topic_of_a_journal_works(tmp_path, topic):
    with Journal(tmp_path / "j") as journal:
        journal.append(topic, b"x")
        journal.append("plain", b"y")
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    dataset = DeltaTable(str(tmp_path / "lake")).to_pyarrow_dataset()
    assert dataset.count_rows(filter=pyarrow.dataset.field("topic") == topic) == 1
    assert polars.scan_delta(str(tmp_path / "lake")).filter(polars.col("topic") == topic).collect().height == 1
    assert duckdb.sql("SELECT count(*) FROM dataset WHERE topic = $1", params=[topic]).fetchall() == [(1,)]


def test_statistics_hide_no_row(tmp_path):
    """Filters on every column, with and without statistics, give what a scan of all rows gives."""
    make(tmp_path / "j", 600, step_ns=333_333_333)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", most_messages=100)
    everything = rows_of(tmp_path / "lake").to_pylist()
    table = DeltaTable(str(tmp_path / "lake"))
    dataset = table.to_pyarrow_dataset()
    for name in ("topic", "ordinal", "position", "timestamp", "timestamp_ns", "stored_ns", "message_id", "vchan_id", "journal", "date"):
        for row in everything[::53]:
            value = row[name]
            if value is None:
                continue
            wanted = sum(other[name] == value for other in everything)
            field = pyarrow.dataset.field(name)
            literal = pyarrow.scalar(value, dataset.schema.field(name).type)
            assert dataset.count_rows(filter=field == literal) == wanted, name
            got = polars.scan_delta(str(tmp_path / "lake")).filter(polars.col(name) == value).collect().height
            assert got == wanted, name
    sizes = {action["path"]: action for action in delta.live_files(table)}
    assert len(sizes) == 6 and all(action["num_records"] == 100 for action in sizes.values())
    assert len(table.file_uris(file_pruning_predicate=[("position", "=", 250)])) == 1, "statistics skip files"


def test_files_are_sorted_by_topic_and_parted_by_day_alone(tmp_path):
    make(tmp_path / "j", 3000, topics=tuple(f"t{number:03d}" for number in range(50)), step_ns=40 * 10**9)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", compact_files=0)
    names = [str(path.relative_to(tmp_path / "lake")) for path in (tmp_path / "lake").glob("**/*.parquet")]
    assert len(names) == len({name.split("/")[0] for name in names}) == 2
    for name in names:
        rows = pyarrow.parquet.read_table(tmp_path / "lake" / name, partitioning=None)
        keys = list(zip(rows["topic"].to_pylist(), rows["position"].to_pylist(), strict=True))
        assert keys == sorted(keys) and len(keys) > 100


def test_a_fresh_table_object_with_an_old_position_does_not_commit(tmp_path):
    """deltalake takes an equal or older transaction version from a fresh snapshot; the lake does not."""
    make(tmp_path / "j", 100)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    where = store(tmp_path / "lake")
    journal = next(iter(lake.info(tmp_path / "lake").reached))
    for start, end in ((None, 101), (1, 101), (51, 101)):
        with pytest.raises(delta.Superseded):
            delta.commit(where, delta.open_table(where), [], moved={journal: (start, end)}, note={})
    assert lake.info(tmp_path / "lake").version == 1


def test_archivers_of_the_same_and_of_other_journals_at_once(tmp_path):
    for name in ("one", "two"):
        make(tmp_path / name, 1200)
    failures = []

    def work(name):
        try:
            lake.archive(None, str(tmp_path / name), tmp_path / "lake", most_messages=100, compact_files=3)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "one", "one", "two", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    found = lake.verify(tmp_path / "lake", deep=True)
    assert found.problems == [] and found.rows == 2400
    table = rows_of(tmp_path / "lake")
    for journal in lake.info(tmp_path / "lake").reached:
        positions = table.filter(pyarrow.dataset.field("journal") == journal)["position"].to_pylist()
        assert sorted(positions) == list(range(1, 1201))


STEPS = ("files written", "before commit", "after commit", "after sync")


class Died(BaseException):
    """Stands for a kill: nothing that handles errors may handle it."""


@pytest.mark.parametrize("step", STEPS)
def test_a_round_that_dies_at_a_step_is_done_once(tmp_path, monkeypatch, step):
    make(tmp_path / "j", 300)
    left = [2]

    def dies(name):
        if name == step:
            left[0] -= 1
            if left[0] == 0:
                raise Died

    monkeypatch.setattr(delta, "step", dies)
    with pytest.raises(Died):
        lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", most_messages=100)
    monkeypatch.undo()
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", most_messages=100)
    for reader, positions in read_by_others(tmp_path / "lake").items():
        assert positions == list(range(1, 301)), reader
    found = lake.verify(tmp_path / "lake", deep=True)
    assert found.problems == [] and len(found.orphans) == (1 if step in STEPS[:2] else 0)


def test_a_lost_commit_is_named_and_its_rows_are_archived_again(tmp_path):
    """A power cut leaves the last entry empty: the table opens without its rows and nobody is told."""
    make(tmp_path / "j", 300)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", most_messages=100)
    entry = tmp_path / "lake" / "_delta_log" / f"{3:020d}.json"
    entry.write_bytes(b"")
    assert len(rows_of(tmp_path / "lake")) == 200, "it opens without an error"
    (problem,) = lake.verify(tmp_path / "lake").problems
    assert "00000000000000000003.json is empty" in problem
    assert lake.archive(None, str(tmp_path / "j"), tmp_path / "lake").rows == 100
    assert read_by_others(tmp_path / "lake")["pyarrow"] == list(range(1, 301))
    assert lake.verify(tmp_path / "lake", deep=True).problems == [], "the rows are there again"
    entry.write_bytes(b'{"commitInfo"')
    assert any("is torn" in problem for problem in lake.verify(tmp_path / "lake").problems)


@pytest.mark.parametrize("grows", [True, False])
def test_a_lost_commit_is_named_until_every_journal_was_archived_again(tmp_path, grows):
    """Nobody knows whose rows an empty entry had: each journal of the lake must be archived, new rows or not."""
    for name in ("j", "k"):
        make(tmp_path / name, 100)
        lake.archive(None, str(tmp_path / name), tmp_path / "lake")
    (tmp_path / "lake" / "_delta_log" / f"{2:020d}.json").write_bytes(b"")  # the rows of k
    if grows:
        with Journal(tmp_path / "j", sync=False) as journal:
            extend(journal, 10)
    assert lake.archive(None, str(tmp_path / "j"), tmp_path / "lake").rows == 10 * grows
    assert lake.archive(None, str(tmp_path / "k"), tmp_path / "lake").rows == 100
    assert lake.verify(tmp_path / "lake", deep=True).problems == []
    versions = lake.info(tmp_path / "lake").version
    for name in ("j", "k"):
        lake.archive(None, str(tmp_path / name), tmp_path / "lake")
    assert lake.info(tmp_path / "lake").version == versions, "nothing more to say"


def test_a_lost_commit_behind_which_others_went_on_is_named_with_its_positions(tmp_path):
    """Two archivers, and a power cut that took only the entry of the first: the second had synced its own."""
    make(tmp_path / "j", 300)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", most_messages=100)
    (tmp_path / "lake" / "_delta_log" / f"{2:020d}.json").write_bytes(b"")
    assert lake.archive(None, str(tmp_path / "j"), tmp_path / "lake").rows == 0
    (problem,) = lake.verify(tmp_path / "lake").problems
    assert "is empty" in problem and "from position 101 to 200 are missing" in problem


def test_rows_that_another_program_took_away_are_told(tmp_path):
    make(tmp_path / "j", 300)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", most_messages=100)
    table = DeltaTable(tmp_path / "lake")
    table.delete("position <= 10")
    table.restore(2)
    table.optimize.compact()
    found = lake.verify(tmp_path / "lake", deep=True)
    assert found.problems == [] and found.rows == 200
    assert [note.partition(";")[0] for note in found.notes] == [
        "version 4 (DELETE, by another program) took 10 rows away",
        "version 5 (RESTORE, by another program) took 90 rows away",
    ]


def test_a_file_that_another_program_wrote_anew_is_read_before_a_trim(tmp_path):
    """delta-rs writes texts as string_view, which Arrow does not compare with a string."""
    with Journal(tmp_path / "j", segment_bytes=1 << 16) as journal:
        extend(journal, 2000)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    DeltaTable(tmp_path / "lake").update(predicate="position = 5", updates={"payload": "'redacted'"})
    assert lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", trim=True).segments > 0


@pytest.mark.parametrize("old, new", [('"version":201', '"version":221'), ('"appId":"', '"appId":"x'), ('"to', '"tp')])
def test_a_commit_that_contradicts_itself_is_neither_believed_nor_passed_over(tmp_path, old, new):
    """One flipped bit in the position that it moves a journal to would leave rows out, in its UUID double them."""
    make(tmp_path / "j", 300)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", most_messages=100)
    entry = tmp_path / "lake" / "_delta_log" / f"{2:020d}.json"
    (tmp_path / "lake" / "_delta_log" / f"{3:020d}.json").unlink()
    entry.write_text(entry.read_text().replace(old, new))
    if "to" in old:  # what compares them is damaged itself: nothing is wrong with the rows
        assert lake.archive(None, str(tmp_path / "j"), tmp_path / "lake").rows == 100
        return
    (problem,) = lake.verify(tmp_path / "lake").problems
    assert "is damaged: it moves journal" in problem and "Take it away (rm" in problem
    for trim in (False, True):
        with pytest.raises(CorruptionError, match="is damaged: it moves journal"):
            lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", trim=trim)
    entry.unlink()
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    assert sorted(rows_of(tmp_path / "lake")["position"].to_pylist()) == list(range(1, 301))


def test_a_damaged_page_keeps_the_journal_from_a_trim(tmp_path):
    """The journal has the last intact copy of that row."""
    with Journal(tmp_path / "j", segment_bytes=1 << 16) as journal:
        extend(journal, 2000)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    (file,) = (tmp_path / "lake").glob("date=*/*.parquet")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    before = sorted(path.name for path in (tmp_path / "j").iterdir())
    with pytest.raises(StateError, match=r"nothing was trimmed.*is damaged"):
        lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", trim=True)
    assert sorted(path.name for path in (tmp_path / "j").iterdir()) == before


def test_a_follower_goes_on_while_somebody_writes_the_journal_that_it_trims(tmp_path, caplog):
    with Journal(tmp_path / "j", segment_bytes=1 << 16) as journal:
        extend(journal, 2000)
        rounds = []

        def progress(done):
            rounds.append(done)
            if len(rounds) == 3:
                journal.close()
            if done.segments or len(rounds) > 100:
                stop.set()

        stop = threading.Event()
        done = lake.follow(
            None, str(tmp_path / "j"), tmp_path / "lake", every_s=0.01, stop=stop, trim=True, on_progress=progress
        )
    assert done.segments > 0 and done.rows == 2000 and len(rounds) > 3
    assert caplog.text.count("by journal.retain(passed=P)") == 1


def test_a_lake_that_lacks_a_journals_beginning_says_so(tmp_path, caplog):
    with Journal(tmp_path / "j", segment_bytes=1 << 16) as journal:
        extend(journal, 2000)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", trim=True)
    assert "is new to this lake" not in caplog.text
    for _ in range(2):
        lake.archive(None, str(tmp_path / "j"), tmp_path / "other")
    assert caplog.text.count("is new to this lake, and begins at position") == 1


def test_a_file_without_statistics_is_told(tmp_path):
    make(tmp_path / "j", 100)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    entry = tmp_path / "lake" / "_delta_log" / f"{1:020d}.json"
    entry.write_text(entry.read_text().replace("numRecords", "numRecorts"))
    (problem,) = lake.verify(tmp_path / "lake", deep=True).problems
    assert "does not say how many rows date=" in problem
    with pytest.raises(CorruptionError, match="does not say how many rows"):
        lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", trim=True)


def test_a_lost_and_a_torn_commit_are_both_named(tmp_path):
    make(tmp_path / "j", 300)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", most_messages=100)
    log = tmp_path / "lake" / "_delta_log"
    (log / f"{2:020d}.json").write_bytes(b"")
    (log / f"{3:020d}.json").write_text('{"txn":{"appId')
    problems = lake.verify(tmp_path / "lake").problems
    assert any("is empty" in problem for problem in problems) and any("is torn" in problem for problem in problems)


def test_a_torn_last_commit_can_be_taken_away(tmp_path):
    """A power cut tears the last entry: nothing opens. What ``verify`` says to do brings every row back, once."""
    make(tmp_path / "j", 300)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", most_messages=100)
    entry = tmp_path / "lake" / "_delta_log" / f"{3:020d}.json"
    entry.write_bytes(entry.read_bytes()[:100])
    with pytest.raises(CorruptionError, match="penstock lake verify"):
        lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    problem, *_ = lake.verify(tmp_path / "lake").problems
    assert f"rm {entry}" in problem and "archive again" in problem
    entry.unlink()
    assert lake.archive(None, str(tmp_path / "j"), tmp_path / "lake").rows == 100
    for reader, positions in read_by_others(tmp_path / "lake").items():
        assert positions == list(range(1, 301)), reader
    assert lake.verify(tmp_path / "lake", deep=True).problems == []


def test_a_missing_short_or_foreign_file_is_named(tmp_path):
    make(tmp_path / "j", 300)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", most_messages=100)
    one, two, three = sorted((tmp_path / "lake").glob("date=*/*.parquet"))
    one.unlink()
    two.write_bytes(two.read_bytes()[:-10])
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "lake" / "date=2026-01-01" / "orphan.parquet")
    found = lake.verify(tmp_path / "lake")
    texts = " ".join(found.problems)
    assert f"{one.name} is missing: 100 rows" in texts and f"{two.name} has" in texts and three.name not in texts
    assert [Path(name).name for name in found.orphans] == ["orphan.parquet"]


class Watched:
    """Which files and folders were synced, in which order, and what the log named then."""

    def __init__(self, monkeypatch, root):
        self.synced = []
        real = os.fsync

        def fsync(descriptor):
            real(descriptor)
            self.synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

        monkeypatch.setattr(os, "fsync", fsync)


def flip_payload_bit(path):
    """Turn over a bit in the stored pages of the column payload."""
    footer = pyarrow.parquet.read_metadata(path).row_group(0)
    column = next(footer.column(at) for at in range(footer.num_columns) if footer.column(at).path_in_schema == "payload")
    data = bytearray(path.read_bytes())
    data[column.data_page_offset + column.total_compressed_size - 8] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_in_a_file_is_found_and_never_compacted(tmp_path):
    """Zstandard and Parquet alone find few of them: the value would be read as another one."""
    with Journal(tmp_path / "j", sync=False) as journal:
        journal.append_many("a", [numpy.random.default_rng(at).bytes(100) for at in range(500)])
        lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
        journal.append("a", b"last")
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", compact_files=0)
    damaged = max((tmp_path / "lake").glob("date=*/*.parquet"), key=lambda path: path.stat().st_size)
    assert not inspection.verify(tmp_path / "lake", deep=True).problems
    flip_payload_bit(damaged)
    (problem,) = inspection.verify(tmp_path / "lake", deep=True).problems
    assert damaged.name in problem and "is damaged" in problem
    with pytest.raises(CorruptionError, match=damaged.name):
        compaction.compact(None, tmp_path / "lake", 1)
    assert len(DeltaTable(tmp_path / "lake").file_uris()) == 2


def test_files_are_synced_before_the_commit_and_the_entry_after_it(tmp_path, monkeypatch):
    make(tmp_path / "j", 200, step_ns=10 * 60 * 10**9)  # over two days
    watched = Watched(monkeypatch, tmp_path)
    at_commit = []
    monkeypatch.setattr(delta, "step", lambda name: name == "before commit" and at_commit.append(list(watched.synced)))
    root = tmp_path / "not" / "there" / "yet"
    lake.archive(None, str(tmp_path / "j"), root)
    (before,) = at_commit
    named = [str(path) for path in root.glob("date=*/*.parquet")]
    assert len(named) == 2 and set(named) <= set(before)
    assert {str(root), *(os.path.dirname(name) for name in named)} <= set(before)
    assert {str(tmp_path / "not"), str(tmp_path)} <= set(before), "folders that were made on the way"
    after = watched.synced[len(before) :]
    log = root / "_delta_log"
    assert str(log / f"{1:020d}.json") in after and after.index(str(log)) > after.index(str(log / f"{1:020d}.json"))


@pytest.mark.parametrize("damage", ["rows", "file", "size"])
def test_nothing_is_archived_that_is_not_there(tmp_path, monkeypatch, damage):
    make(tmp_path / "j", 300)
    real = files.Work.__call__

    def wrong(self, number):
        result = real(self, number)
        path = tmp_path / "lake" / result["files"][0]["name"]
        if damage == "rows":
            result["files"][0]["rows"] -= 1
        elif damage == "file":
            path.unlink()
        else:
            path.write_bytes(b"PAR1")
        return {**result, "node": "worker-7"}

    monkeypatch.setattr(files.Work, "__call__", wrong)
    with pytest.raises((CorruptionError, StateError), match="node worker-7 wrote"):
        lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    monkeypatch.undo()
    assert lake.info(tmp_path / "lake").rows == 0
    assert lake.archive(None, str(tmp_path / "j"), tmp_path / "lake").rows == 300


def test_a_node_that_sees_another_directory_says_so(tmp_path, monkeypatch):
    make(tmp_path / "j", 300)
    real = files.Work.__call__

    def elsewhere(self, number):
        os.rename(tmp_path / "lake", tmp_path / "kept")
        (tmp_path / "lake").mkdir()
        return real(self, number)

    monkeypatch.setattr(files.Work, "__call__", elsewhere)
    with pytest.raises(StateError, match=r"node .* does not see the lake"):
        lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    assert list((tmp_path / "lake").iterdir()) == []


def test_a_missing_segment_is_damage(tmp_path):
    make(tmp_path / "j", 5000)
    middle = sorted((tmp_path / "j").glob("*.log"))[2]
    for part in (tmp_path / "j").glob(middle.stem + ".*"):
        part.unlink()
    with pytest.raises(CorruptionError, match="penstock journal verify"):
        lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    assert lake.info(tmp_path / "lake").rows == 0


def test_holes_of_a_compacted_journal_are_no_damage(tmp_path):
    with Journal(tmp_path / "j", segment_bytes=1 << 16, sync=False, compact_topics=["state"]) as journal:
        for number in range(3000):
            journal.append("state", b"%d" % number + b"." * 60, key=f"k{number % 7}")
        journal.append("other", b"end")
        journal.compact()
        frontier = journal.frontier
    done = lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    assert 7 <= done.rows < 3001 and list(lake.info(tmp_path / "lake").reached.values()) == [frontier]
    latest = {row["key"]: row for row in sorted(rows_of(tmp_path / "lake").to_pylist(), key=lambda row: row["position"])}
    assert {latest[f"k{number % 7}"]["payload"][:4] for number in range(2993, 3000)} == {b"%d" % n for n in range(2993, 3000)}


def test_compaction_keeps_rows_and_order_and_older_versions(tmp_path):
    made = make(tmp_path / "j", 400, topics=("b", "a"))
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", most_messages=50, compact_files=0)
    before = lake.info(tmp_path / "lake")
    assert before.files == 8 and lake.compact(None, tmp_path / "lake", 7) == 1
    assert lake.info(tmp_path / "lake").files == 1 and as_made(rows_of(tmp_path / "lake")) == made
    (name,) = DeltaTable(str(tmp_path / "lake")).file_uris()
    rows = pyarrow.parquet.read_table(name, partitioning=None)
    keys = list(zip(rows["topic"].to_pylist(), rows["position"].to_pylist(), strict=True))
    assert keys == sorted(keys)
    assert as_made(rows_of(tmp_path / "lake", version=before.version)) == made, "time travel"
    assert lake.compact(None, tmp_path / "lake", 1) == 0
    assert lake.verify(tmp_path / "lake", deep=True).problems == []


def test_of_two_compactions_one_counts(tmp_path, monkeypatch):
    """deltalake lets both remove the same files, and every row would be there twice."""
    made = make(tmp_path / "j", 400)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", most_messages=50, compact_files=0)
    ran = []

    def first(name):
        if name == "merged" and not ran:
            ran.append(name)
            assert compaction.compact(None, tmp_path / "lake", 1) == 1

    monkeypatch.setattr(delta, "step", first)
    lake.compact(None, tmp_path / "lake", 1)
    assert ran and as_made(rows_of(tmp_path / "lake")) == made


def test_vacuum_takes_old_leftovers_and_nothing_else(tmp_path):
    made = make(tmp_path / "j", 400)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", most_messages=50, compact_files=0)
    live = set((tmp_path / "lake").glob("date=*/*.parquet"))
    folder = next(iter(live)).parent
    for name, age_h in (("young.parquet", 0), ("old.parquet", 3)):
        shutil.copy(next(iter(live)), folder / name)
        os.utime(folder / name, (time.time() - age_h * 3600,) * 2)
    with pytest.raises(InvalidArgument, match="a round may be under way"):
        lake.vacuum(tmp_path / "lake", hours=0)
    assert [Path(name).name for name in lake.vacuum(tmp_path / "lake", hours=1, dry_run=True)] == ["old.parquet"]
    assert (folder / "old.parquet").exists()
    assert [Path(name).name for name in lake.vacuum(tmp_path / "lake", hours=1)] == ["old.parquet"]
    assert {*live, folder / "young.parquet"} == set((tmp_path / "lake").glob("date=*/*.parquet"))
    lake.compact(None, tmp_path / "lake", 1)
    assert lake.vacuum(tmp_path / "lake", hours=1) == [], "readers may still want what was just replaced"
    assert as_made(rows_of(tmp_path / "lake")) == made


def test_a_lake_is_alone_in_its_directory_and_vacuum_takes_only_its_files(tmp_path):
    make(tmp_path / "j", 100)
    for place in (tmp_path / "j", tmp_path):
        with pytest.raises(InvalidArgument, match=r"it is not empty|in the directory of the journal"):
            lake.archive(None, str(tmp_path / "j"), place)
        assert not (place / "_delta_log").exists()
    (tmp_path / "lake" / "lost+found").mkdir(parents=True)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    shutil.copytree(tmp_path / "j", tmp_path / "lake" / "j")
    shutil.copytree(tmp_path / "j", tmp_path / "lake" / "date=2020-01-01" / "j")
    long_ago = (time.time() - 3 * 3600,) * 2
    for path in (tmp_path / "lake").rglob("*"):
        os.utime(path, long_ago)
    before = set((tmp_path / "lake").rglob("*"))
    assert lake.vacuum(tmp_path / "lake", hours=1) == []
    assert set((tmp_path / "lake").rglob("*")) == before


def test_a_round_that_fails_leaves_no_file_and_names_the_one_that_failed(tmp_path, monkeypatch):
    """As on a disk that is full: the next round needs the room."""
    journals = [str(tmp_path / name) for name in ("a", "b")]
    made = [make(journal, 100) for journal in journals]
    written, write = [], pyarrow.parquet.ParquetWriter.write_table

    def fails_at_second(writer, *arguments, **options):
        written.append(writer)
        if len(written) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(writer, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(pyarrow.parquet.ParquetWriter, "write_table", fails_at_second)
        with pytest.raises(OSError, match="No space left") as failed:
            lake.archive(None, journals, tmp_path / "lake")
    assert str(failed.value.filename).startswith(str(tmp_path / "lake" / "date="))
    assert len(written) >= 2 and not list((tmp_path / "lake").glob("date=*/*"))
    lake.archive(None, journals, tmp_path / "lake")
    assert len(rows_of(tmp_path / "lake")) == sum(map(len, made))


def test_a_disk_without_any_room_is_named(tmp_path):
    """Closing the file fails too, and that error names no file."""
    where = store(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for write in (lambda: where.replace("folder/name", b"x"), lambda: create(where, "date=1/name")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            with pytest.raises(OSError, match="name") as found:
                write()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert str(tmp_path) in found.value.filename and not [path for path in tmp_path.rglob("*") if path.is_file()]


def create(where, name):
    with where.create(name) as file:
        file.write(b"x")


def test_a_round_that_outlived_the_retention_does_not_commit(tmp_path, monkeypatch):
    make(tmp_path / "j", 100)
    monkeypatch.setattr(archiving, "ROUND_S", -1.0)
    with pytest.raises(StateError, match="it was not committed: set most_messages"):
        lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    assert lake.info(tmp_path / "lake").rows == 0 and not list((tmp_path / "lake").glob("date=*/*.parquet"))
    assert archiving.ROUND_S * 2 <= inspection.LEAST_RETENTION_H * 3600


def test_checkpoints_are_ours_and_keep_everything(tmp_path, monkeypatch):
    monkeypatch.setattr(delta, "CHECKPOINT_EVERY", 4)
    made = make(tmp_path / "j", 600)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", most_messages=50, compact_files=0)
    assert len(list((tmp_path / "lake" / "_delta_log").glob("*.checkpoint.parquet"))) == 3
    assert as_made(rows_of(tmp_path / "lake")) == made
    assert list(lake.info(tmp_path / "lake").reached.values()) == [601]
    assert lake.verify(tmp_path / "lake", deep=True).problems == []
    assert lake.archive(None, str(tmp_path / "j"), tmp_path / "lake").rows == 0
    newest = max((tmp_path / "lake" / "_delta_log").glob("*.checkpoint.parquet"))
    newest.write_bytes(b"")
    assert any(f"{newest.name} is damaged" in problem for problem in lake.verify(tmp_path / "lake").problems)


def test_trim_takes_segments_that_are_in_the_lake(tmp_path, monkeypatch):
    made = make(tmp_path / "j", 5000)
    segments = len(list((tmp_path / "j").glob("*.log")))

    def dies(name):
        if name == "before trim":
            raise Died

    monkeypatch.setattr(delta, "step", dies)
    with pytest.raises(Died):
        lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", trim=True)
    assert len(list((tmp_path / "j").glob("*.log"))) == segments
    monkeypatch.undo()
    done = lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", trim=True)
    assert done.segments > 0 and len(list((tmp_path / "j").glob("*.log"))) == segments - done.segments
    assert as_made(rows_of(tmp_path / "lake")) == made
    assert lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", trim=True).rows == 0
    with Journal(tmp_path / "j") as journal:
        extend(journal, 100)
        with pytest.raises(RefusedError, match="has a writer"):
            lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", trim=True)


def test_a_checkpoint_that_is_named_and_gone_is_told_with_its_remedy(tmp_path):
    make(tmp_path / "j", 10)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    log = tmp_path / "lake" / "_delta_log"
    delta.checkpoint(store(tmp_path / "lake"), delta.open_table(store(tmp_path / "lake")))
    next(log.glob("*.checkpoint.parquet")).unlink()
    problems = lake.verify(tmp_path / "lake").problems
    assert any(f"rm {log / '_last_checkpoint'}" in problem for problem in problems)
    assert not any("run: penstock lake verify" in problem for problem in problems)
    (log / "_last_checkpoint").unlink()
    assert lake.verify(tmp_path / "lake", deep=True).problems == []


@pytest.mark.parametrize("left", [b"", b'{"t": ["', b"{{", b"[1]", b'{"t": 5}'])
def test_damaged_types_are_told_and_made_again_from_the_journal(tmp_path, caplog, left):
    with penstock.publisher(f"journal:{tmp_path / 'j'}#t", type=dict[str, int]) as publisher:
        publisher.publish({"n": 1})
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    (file,) = (tmp_path / "lake" / "_penstock" / "schemas").glob("*.json")
    whole = file.read_bytes()
    file.write_bytes(left)
    assert any(file.name in problem for problem in lake.verify(tmp_path / "lake").problems)
    with pytest.raises(CorruptionError, match=file.name):
        types.versions(store(tmp_path / "lake"))
    with penstock.publisher(f"journal:{tmp_path / 'j'}#t", type=dict[str, int]) as publisher:
        publisher.publish({"n": 2})
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    assert file.read_bytes() == whole and "written anew" in caplog.text
    assert lake.verify(tmp_path / "lake").problems == []


@pytest.mark.parametrize("text", ["Unable to copy data\n\x1b[31mNo space left on device (os error 28)", "something\nelse"])
def test_a_log_entry_that_cannot_be_written_is_one_sentence_with_its_name(tmp_path, monkeypatch, text):
    made = make(tmp_path / "j", 100)

    def fails(*_, **__):
        raise OSError(text)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", fails)
    with pytest.raises((OSError, StateError), match=r"_delta_log/00000000000000000001\.json") as caught:
        lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value)
    assert getattr(caught.value, "errno", None) == (errno.ENOSPC if "space" in text else None)
    monkeypatch.undo()
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    assert as_made(rows_of(tmp_path / "lake")) == made


@pytest.mark.parametrize("broken", ["file gone", "file cut", "file of other rows", "set back"])
def test_trim_keeps_what_the_lake_lost(tmp_path, broken):
    """An earlier round's rows are in the lake no more, although the table says how far it had archived."""
    for _ in range(2):
        with Journal(tmp_path / "j", segment_bytes=1 << 16, sync=False) as journal:
            extend(journal, 3000)
        lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", compact_files=0)
    segments = len(list((tmp_path / "j").glob("*.log")))
    file = min((tmp_path / "lake").glob("date=*/*.parquet"), key=lambda path: path.stat().st_mtime_ns)
    if broken == "file gone":
        file.unlink()
    elif broken == "file cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif broken == "file of other rows":
        file.write_bytes(b"x" * file.stat().st_size)
    else:
        DeltaTable(tmp_path / "lake").restore(1)
    with pytest.raises(StateError, match="nothing was trimmed"):
        lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", trim=True)
    assert len(list((tmp_path / "j").glob("*.log"))) == segments


@pytest.mark.parametrize("option", [{"topics": "a.*"}, {"startTime": "2001-01-01"}])
def test_trim_of_an_archive_that_leaves_messages_out_is_refused(tmp_path, option):
    made = make(tmp_path / "j", 3000)
    with pytest.raises(InvalidArgument, match=r"messages of .* that are in no lake"):
        lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", trim=True, options=option)
    assert not (tmp_path / "lake").exists()
    lake.archive(None, str(tmp_path / "j"), tmp_path / "whole")
    assert as_made(rows_of(tmp_path / "whole")) == made


@pytest.mark.parametrize("when", ["begun", "planned", "written"])
def test_what_retention_takes_while_a_round_reads_is_skipped_where_asked_and_told(tmp_path, monkeypatch, caplog, when):
    place, name = {"begun": (lineage, "check"), "planned": (planning, "check_plan"), "written": (files, "write")}[when]
    before = getattr(place, name)
    taken = []

    def meanwhile(*arguments):
        found = before(*arguments)
        if not taken:
            taken.append(forget_before(tmp_path / "j", 2))
        return found

    make(tmp_path / "j", 5000)
    monkeypatch.setattr(place, name, meanwhile)
    done = lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", fail_on_data_loss=False)
    first = 1 if when == "written" else taken[0]
    assert done.rows == 5001 - first
    assert sorted(rows_of(tmp_path / "lake")["position"].to_pylist()) == list(range(first, 5001))
    told = f"positions 1 to {taken[0] - 1} of journal" in caplog.text and "deleted by retention" in caplog.text
    assert told == (when != "written"), "what was read before is not called lost"


@pytest.mark.parametrize("when", ["begun", "planned"])
def test_what_retention_takes_while_a_round_reads_is_an_error(tmp_path, monkeypatch, when):
    make(tmp_path / "j", 5000)
    place, name = (lineage, "check") if when == "begun" else (planning, "check_plan")
    monkeypatch.setattr(place, name, lambda *_: forget_before(tmp_path / "j", 2))
    with pytest.raises(StateError, match="deleted by retention"):
        lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    assert rows_of(tmp_path / "lake").num_rows == 0


def test_a_failed_round_trims_nothing(tmp_path, monkeypatch):
    make(tmp_path / "j", 5000)
    segments = len(list((tmp_path / "j").glob("*.log")))
    monkeypatch.setattr(delta, "check_files", lambda *_: (_ for _ in ()).throw(StateError("not seen")))
    with pytest.raises(StateError, match="not seen"):
        lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", trim=True)
    assert len(list((tmp_path / "j").glob("*.log"))) == segments


def test_what_went_before_it_was_archived_is_told(tmp_path):
    make(tmp_path / "j", 100)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    with Journal(tmp_path / "j", segment_bytes=1 << 16, sync=False) as journal:
        extend(journal, 5000)
    forget_before(tmp_path / "j", 3)
    with pytest.raises(StateError, match="were deleted by retention before they were archived"):
        lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")


def test_what_is_gone_can_be_skipped_and_is_told(tmp_path, caplog):
    make(tmp_path / "j", 100)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    with Journal(tmp_path / "j", segment_bytes=1 << 16, sync=False) as journal:
        extend(journal, 5000)
    first = forget_before(tmp_path / "j", 2)
    low, high = take_segment(tmp_path / "j", 1)
    with pytest.raises(StateError, match="--skip-lost"):
        lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", fail_on_data_loss=False)
    kept = [*range(1, 101), *range(first, low), *range(high, 5101)]
    assert sorted(rows_of(tmp_path / "lake")["position"].to_pylist()) == kept
    told = [record.getMessage().split(" of journal")[0] for record in caplog.records if record.name == "penstock.spark"]
    assert told == [f"positions 101 to {first - 1}", f"positions {low} to {high - 1}"]
    assert lake.archive(None, str(tmp_path / "j"), tmp_path / "lake").rows == 0


@pytest.mark.parametrize("name", ["startPosition", "columns", "failOnDataLoss", "maxOffsetsPerTrigger", "token"])
def test_an_option_that_means_nothing_to_an_archive_is_refused(tmp_path, name):
    make(tmp_path / "j", 10)
    with pytest.raises(InvalidArgument, match="means nothing to an archive"):
        lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", options={name: "5"})


def test_an_archive_of_some_topics_stays_one(tmp_path):
    make(tmp_path / "j", 90)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", options={"topics": "b, a.x"})
    table = rows_of(tmp_path / "lake")
    assert set(table["topic"].to_pylist()) == {"a.x", "b"} and len(table) == 60
    with pytest.raises(InvalidArgument, match="asks for all messages"):
        lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", options={"topics": "a.x,b"})
    assert lake.info(tmp_path / "lake").filters == {"topics": "a.x,b"}
    with pytest.raises(InvalidArgument, match="has no option 'topisc'"):
        lake.archive(None, str(tmp_path / "j"), tmp_path / "other", options={"topisc": "a"})


def test_one_journal_under_two_names_or_an_older_copy_is_told(tmp_path):
    make(tmp_path / "journals" / "j", 10)
    shutil.copytree(tmp_path / "journals" / "j", tmp_path / "journals" / "j.bak")
    with pytest.raises(InvalidArgument, match="are the same journal"):
        lake.archive(None, f"{tmp_path}/journals/*", tmp_path / "lake")
    with Journal(tmp_path / "journals" / "j") as journal:
        extend(journal, 10)
    lake.archive(None, str(tmp_path / "journals" / "j"), tmp_path / "lake")
    with pytest.raises(StateError, match="older copy"):
        lake.archive(None, str(tmp_path / "journals" / "j.bak"), tmp_path / "lake")


def test_places_that_cannot_be_a_lake_are_told(tmp_path):
    make(tmp_path / "j", 10)
    for where, text in (
        ("hdfs://host/x", "cannot be at hdfs"), ("file://host/x", "three slashes"), (str(tmp_path / "a%20b"), "escape"),
        ("dbfs:/x", "cannot be at dbfs"), ("", "is empty"), ("s3://", "no bucket"), (str(tmp_path / "a\\b"), "slash"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=text):
            lake.archive(None, str(tmp_path / "j"), where)
    assert os.listdir(tmp_path) == ["j"]
    lake.archive(None, str(tmp_path / "j"), f"file:{tmp_path}/as hadoop prints it")
    assert lake.info(tmp_path / "as hadoop prints it").rows == 10
    with pytest.raises(InvalidArgument, match="is not a lake"):
        lake.info(tmp_path / "nothing")
    DeltaTable.create(str(tmp_path / "other"), pyarrow.schema([("a", pyarrow.int64())]))
    with pytest.raises(InvalidArgument, match="not one that penstock made"):
        lake.archive(None, str(tmp_path / "j"), tmp_path / "other")
    assert (tmp_path / "other").exists()


def test_an_http_endpoint_that_is_not_allowed_names_the_setting(tmp_path):
    """Nobody is asked: the scheme is refused first."""
    make(tmp_path / "j", 10)
    keys = {"access_key_id": "x", "secret_access_key": "x", "region": "us-east-1", "endpoint_url": "http://127.0.0.1:9"}
    storage = {f"AWS_{name.upper()}": value for name, value in keys.items()}
    with pytest.raises(StateError, match="AWS_ALLOW_HTTP=true"):
        lake.archive(None, str(tmp_path / "j"), "s3://bucket/lake", storage=storage)


def test_the_lake_is_its_makers_alone(tmp_path):
    make(tmp_path / "j", 10)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "new" / "lake")
    made = tmp_path / "new" / "lake"
    assert {path.stat().st_mode & 0o777 for path in (made, *made.glob("date=*"))} == {0o700}
    made.chmod(0o2750)  # from here on others may read it, later days too
    with store(made).create("date=2100-01-01/x.parquet") as file:
        file.write(b"x")
    assert (made / "date=2100-01-01").stat().st_mode & 0o7777 == 0o2750


def test_a_forked_process_is_refused_in_words(tmp_path):
    make(tmp_path / "j", 10)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    child = os.fork()
    if child == 0:
        try:
            lake.info(tmp_path / "lake")
        except StateError as error:
            os._exit("by spawn, not by fork" not in str(error))
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def test_a_compaction_that_cannot_be_committed_leaves_no_file(tmp_path, monkeypatch):
    make(tmp_path / "j", 300)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", most_messages=50)

    def full(name):
        if name == "before commit":
            raise OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr(delta, "step", full)
    with pytest.raises(OSError, match="No space left"):
        lake.compact(None, tmp_path / "lake", most_files=1)
    assert lake.verify(tmp_path / "lake").orphans == []


def test_follow_commits_again_and_again_and_compacts_beside(tmp_path):
    make(tmp_path / "j", 100)
    stop = threading.Event()
    lags = []
    with Journal(tmp_path / "j", sync=False) as journal:

        def progress(done):
            lags.append(done.lag)
            if len(lags) < 12:
                extend(journal, 50)
            else:
                stop.set()

        done = lake.follow(
            None, str(tmp_path / "j"), tmp_path / "lake", every_s=0.01, stop=stop, compact_files=2, on_progress=progress
        )
    assert done.rows == 100 + 11 * 50 and lags[-1] == 0
    assert read_by_others(tmp_path / "lake")["pyarrow"] == list(range(1, done.rows + 1))
    assert any("compact" in str(item.get("penstock")) for item in lake.versions(tmp_path / "lake"))


def old_archive(tmp_path, spark=None):
    """An archive of version 1, as it lay on disk: rows by topic and date, a manifest that names files."""
    made = make(tmp_path / "j", 300, step_ns=600 * 10**9)
    root = tmp_path / "lake"
    (root / "_penstock").mkdir(parents=True)
    uuid = str(Journal(tmp_path / "j", mode="read").uuid)
    names = {}
    for topic in ("a.x", "a.y", "b"):
        rows = [row for row in made if row[0] == topic and row[1] <= 200]
        for day in sorted({row[2] // schema.DAY_NS for row in rows}):
            part = [row for row in rows if row[2] // schema.DAY_NS == day]
            name = f"topic={topic}/date={schema.day_text(day)}/{len(names)}.parquet"
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            columns = {
                "ordinal": [row[1] for row in part], "position": [row[1] for row in part],
                "timestamp": pyarrow.array([row[2] // 1000 for row in part], pyarrow.timestamp("us", tz="UTC")),
                "timestamp_ns": [row[2] for row in part], "payload": [row[3] for row in part],
                "properties": pyarrow.array([list(row[4].items()) for row in part], schema.KINDS["map<string,string>"]),
                "message_id": pyarrow.array([row[5] for row in part], pyarrow.string()),
                "vchan_id": pyarrow.nulls(len(part), pyarrow.int32()), "journal": [uuid] * len(part),
            }  # fmt: skip
            pyarrow.parquet.write_table(pyarrow.table(columns), root / name)
            names[name] = (root / name).stat().st_size
    manifest = {"version": 1, "reached": {uuid: 201}, "rows": 200, "files": names, "dropped": [], "filters": {}}
    (root / "_penstock" / "manifest.json").write_text(json.dumps(manifest))
    (root / "topic=b" / "date=2026-01-01" / "leftover.parquet").write_bytes(b"of a round that died")
    return made


@pytest.mark.parametrize("step", [None, "before take-over", "before commit", "after commit", "before old files go"])
def test_an_archive_of_version_1_is_taken_over_once(tmp_path, monkeypatch, step):
    made = old_archive(tmp_path)

    def dies(name):
        if name == step:
            raise Died

    monkeypatch.setattr(delta, "step", dies)
    if step is not None:
        with pytest.raises(Died):
            lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
        monkeypatch.undo()
    assert lake.archive(None, str(tmp_path / "j"), tmp_path / "lake").rows == 100
    assert as_made(rows_of(tmp_path / "lake")) == made
    assert not list((tmp_path / "lake").glob("topic=*")) and not (tmp_path / "lake/_penstock/manifest.json").exists()
    assert lake.verify(tmp_path / "lake", deep=True).problems == []


def test_an_archive_of_version_1_that_lacks_rows_is_left_alone(tmp_path):
    old_archive(tmp_path)
    manifest = json.loads((tmp_path / "lake/_penstock/manifest.json").read_text())
    (tmp_path / "lake/_penstock/manifest.json").write_text(json.dumps({**manifest, "rows": 201}))
    with pytest.raises(StateError, match="nothing was taken over"):
        lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    assert all((tmp_path / "lake" / name).exists() for name in manifest["files"])


def test_more_than_two_gibibytes_are_cut(tmp_path, monkeypatch):
    """What a task holds is bounded: here by a small bound, several files a range, every row once."""
    monkeypatch.setattr(files, "HELD_BYTES", 20_000)
    monkeypatch.setattr(files, "BATCH_BYTES", 5_000)
    made = make(tmp_path / "j", 2000)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", compact_files=0)
    assert lake.info(tmp_path / "lake").files > 4 and as_made(rows_of(tmp_path / "lake")) == made


def test_pandas_reads_times_as_they_were(tmp_path):
    make(tmp_path / "j", 50, step_ns=1_000_001)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    frame = DeltaTable(str(tmp_path / "lake")).to_pandas().sort_values("position")
    wanted = BEGIN_NS + numpy.arange(1, 51) * 1_000_001
    assert frame["timestamp_ns"].tolist() == wanted.tolist()
    assert (frame["timestamp"] == pandas.to_datetime(wanted // 1000 * 1000, utc=True)).all()
