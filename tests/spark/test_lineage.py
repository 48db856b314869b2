"""A journal that was restored from a copy has the same UUID and other messages: it is neither archived nor trimmed."""

from __future__ import annotations

import shutil
import threading

import pytest
from deltalake import DeltaTable
from tests.spark.journals import extend, make

from penstock.errors import CorruptionError, StateError
from penstock.journal import Journal
from penstock.spark import lake
from penstock.spark.lake import archiving, delta, lineage

SMALL = 1 << 16


def grow(path, messages, tag=b"", *, key=None):
    with Journal(path, segment_bytes=SMALL, sync=False) as journal:
        for begin in range(0, messages, 100):
            with journal.transaction() as transaction:
                for number in range(begin, min(begin + 100, messages)):
                    transaction.append("a", tag + b"%0100d" % number, key=key)


def restored(tmp_path, *, grown):
    """A journal of which the lake has 2,000 messages; then a copy with the first 1,000 takes its place and grows."""
    grow(tmp_path / "j", 1000, b"old")
    shutil.copytree(tmp_path / "j", tmp_path / "copy")
    grow(tmp_path / "j", 1000, b"lost")
    assert lake.archive(None, str(tmp_path / "j"), tmp_path / "lake").rows == 2000
    shutil.rmtree(tmp_path / "j")
    shutil.copytree(tmp_path / "copy", tmp_path / "j")
    grow(tmp_path / "j", grown, b"new")
    return str(tmp_path / "j")


def kept(path):
    with Journal(path, mode="read") as journal:
        return journal.first, journal.frontier, len(list(path.glob("*.log")))


def without_records(monkeypatch):
    """Commits of an older Penstock, which recorded nothing of the last message."""
    commit = delta.commit
    monkeypatch.setattr(delta, "commit", lambda *arguments, last=None, **more: commit(*arguments, **more))


@pytest.mark.parametrize("grown", [1000, 1001, 3000])
@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("older", [False, True])
def test_a_restored_copy_that_grew_past_the_lake_is_refused(tmp_path, monkeypatch, grown, trim, older):
    if older:
        without_records(monkeypatch)
    journal = restored(tmp_path, grown=grown)
    before, version = kept(tmp_path / "j"), lake.info(tmp_path / "lake").version
    with pytest.raises(StateError, match=r"at position 2000 the lake has topic 'a', stored .*; the journal has .* another lake"):
        lake.archive(None, journal, tmp_path / "lake", trim=trim)
    assert kept(tmp_path / "j") == before and lake.info(tmp_path / "lake").version == version
    assert lake.archive(None, journal, tmp_path / "other", trim=True).rows == 1000 + grown


def test_a_copy_that_went_another_way_is_refused_and_the_first_goes_on(tmp_path):
    grow(tmp_path / "j", 500)
    shutil.copytree(tmp_path / "j", tmp_path / "copy")
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    assert lake.archive(None, str(tmp_path / "copy"), tmp_path / "lake").rows == 0, "still the same messages"
    grow(tmp_path / "j", 100, b"mine")
    grow(tmp_path / "copy", 200, b"other")
    assert lake.archive(None, str(tmp_path / "j"), tmp_path / "lake").rows == 100
    with pytest.raises(StateError, match="at position 600 the lake has"):
        lake.archive(None, str(tmp_path / "copy"), tmp_path / "lake")
    grow(tmp_path / "j", 100, b"mine")
    assert lake.archive(None, str(tmp_path / "j"), tmp_path / "lake").rows == 100


def test_one_wrong_journal_of_several_stops_the_round(tmp_path):
    journal = restored(tmp_path, grown=3000)
    grow(tmp_path / "good", 3000)
    before = kept(tmp_path / "good")
    with pytest.raises(StateError, match="other messages"):
        lake.archive(None, [str(tmp_path / "good"), journal], tmp_path / "lake", trim=True)
    assert lake.info(tmp_path / "lake").rows == 2000 and kept(tmp_path / "good") == before


def test_following_ends_when_the_journal_is_replaced(tmp_path):
    grow(tmp_path / "j", 1000)
    shutil.copytree(tmp_path / "j", tmp_path / "copy")
    grow(tmp_path / "j", 1000, b"lost")

    def replaced(done):
        shutil.rmtree(tmp_path / "j")
        shutil.copytree(tmp_path / "copy", tmp_path / "j")
        grow(tmp_path / "j", 1000 + done.rows, b"new")

    with pytest.raises(StateError, match="at position 2000 the lake has"):
        lake.follow(
            None, str(tmp_path / "j"), tmp_path / "lake", every_s=0.01, stop=threading.Event(), on_progress=replaced
        )
    assert lake.info(tmp_path / "lake").rows == 2000


def test_trim_compares_again_when_nobody_else_can_write(tmp_path, monkeypatch):
    """The journal is replaced after its last round and before segments go from it."""
    grow(tmp_path / "j", 1000)
    shutil.copytree(tmp_path / "j", tmp_path / "copy")
    grow(tmp_path / "copy", 3000, b"new")
    grow(tmp_path / "j", 1000, b"lost")
    trim, before = archiving._trim_directory, kept(tmp_path / "copy")

    def late(*arguments):
        shutil.rmtree(tmp_path / "j")
        shutil.copytree(tmp_path / "copy", tmp_path / "j")
        return trim(*arguments)

    monkeypatch.setattr(archiving, "_trim_directory", late)
    with pytest.raises(StateError, match="other messages"):
        lake.archive(None, str(tmp_path / "j"), tmp_path / "lake", trim=True)
    assert kept(tmp_path / "j") == before


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("options", [{}, {"topics": "b"}])
def test_the_journal_itself_goes_on(tmp_path, monkeypatch, older, options):
    """Through several rounds, compaction of the lake, trimming (of an archive of all), and beside a journal that rests."""
    if older:
        without_records(monkeypatch)
    make(tmp_path / "j", 2000, topics=("a", "b", "c"))
    make(tmp_path / "rests", 100)
    lake.archive(None, [str(tmp_path / "j"), str(tmp_path / "rests")], tmp_path / "lake", most_messages=300, options=options)
    for _ in range(3):
        lake.compact(None, tmp_path / "lake", 1)
        with Journal(tmp_path / "j", segment_bytes=SMALL) as journal:
            extend(journal, 1001, topics=("a", "b", "c"))
        both = [str(tmp_path / "j"), str(tmp_path / "rests")]
        done = lake.archive(None, both, tmp_path / "lake", trim=not options, options=options)
        assert done.rows in ((333, 334) if options else (1001,))
        lineage._known.clear()
    assert (kept(tmp_path / "j")[0] > 1) == (not options), "segments went where they were trimmed"
    positions = DeltaTable(str(tmp_path / "lake")).to_pyarrow_dataset().to_table(columns=["journal", "position"]).to_pylist()
    assert len(positions) == len({(row["journal"], row["position"]) for row in positions})
    assert lake.verify(tmp_path / "lake", deep=True).problems == []


@pytest.mark.parametrize("older", [False, True])
def test_a_journal_whose_archived_messages_are_gone(tmp_path, monkeypatch, older):
    """Retention took all that the lake has. What is left was stored later; a journal that was stored before is not it."""
    if older:
        without_records(monkeypatch)
    grow(tmp_path / "j", 2000)
    with Journal(tmp_path / "j", segment_bytes=SMALL) as journal:
        journal.roll(full=False)
    for name in ("lake", "lake2"):
        lake.archive(None, str(tmp_path / "j"), tmp_path / name)
    with Journal(tmp_path / "j", segment_bytes=SMALL, retain_queues=True) as journal:
        journal.append_many("a", [b"later"] * 4)
        journal.retain(passed=2000)
        assert journal.first == 2001
    assert lake.archive(None, str(tmp_path / "j"), tmp_path / "lake").rows == 4
    future = 2**62
    monkeypatch.setattr(lineage, "recorded", lambda *_: lineage.Message(2000, "a", future, future, 0))
    with pytest.raises(StateError, match="the last message that was archived was stored"):
        lake.archive(None, str(tmp_path / "j"), tmp_path / "lake2")


def test_a_last_message_that_was_compacted_away(tmp_path):
    """The last one that is left is compared with its row in the table."""

    def write(path, keys, tag=b""):
        with Journal(path, segment_bytes=SMALL, sync=False, compact_topics=["a"]) as journal:
            for key in keys:
                journal.append("a", tag + bytes(100), key=key)
            journal.roll(full=False)
            journal.compact()

    write(tmp_path / "j", map(str, range(500)))
    shutil.copytree(tmp_path / "j", tmp_path / "copy")
    write(tmp_path / "j", [*map(str, range(500, 1000)), "last"])
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    write(tmp_path / "j", ["last"] * 1000)
    write(tmp_path / "copy", [*map(str, range(500, 1000)), *["last"] * 1001], b"new")
    for name in ("j", "copy"):
        with Journal(tmp_path / name, mode="read") as journal, pytest.raises(LookupError):
            journal.read(1001)
    assert lake.archive(None, str(tmp_path / "j"), tmp_path / "lake").rows > 0
    with pytest.raises(StateError, match="the lake has"):
        lake.archive(None, str(tmp_path / "copy"), tmp_path / "lake")


def test_a_damaged_message_that_is_in_the_lake_keeps_nothing_back(tmp_path):
    grow(tmp_path / "j", 100)
    lake.archive(None, str(tmp_path / "j"), tmp_path / "lake")
    log = next((tmp_path / "j").glob("*.log"))
    data = log.read_bytes()
    at = data.rindex(b"0099")
    with log.open("r+b") as file:
        file.seek(at)
        file.write(b"9999")
    assert lake.archive(None, str(tmp_path / "j"), tmp_path / "lake").rows == 0
    with pytest.raises(CorruptionError):
        lake.archive(None, str(tmp_path / "j"), tmp_path / "fresh")


def test_a_record_that_is_no_message_counts_as_none(tmp_path, monkeypatch):
    monkeypatch.setattr(lineage, "text_of", lambda messages: '{"x": [1]}')
    journal = restored(tmp_path, grown=1500)
    with pytest.raises(StateError, match="at position 2000 the lake has"):
        lake.archive(None, journal, tmp_path / "lake")


def test_by_spark_and_read_all(spark, tmp_path):
    grow(tmp_path / "j", 300)
    assert lake.archive(spark, str(tmp_path / "j"), tmp_path / "lake").rows == 300
    shutil.copytree(tmp_path / "j", tmp_path / "copy")
    grow(tmp_path / "j", 100, b"lost")
    assert lake.archive(spark, str(tmp_path / "j"), tmp_path / "lake").rows == 100
    assert lake.read_all(spark, str(tmp_path / "j"), tmp_path / "lake").count() == 400
    grow(tmp_path / "copy", 200, b"new")
    for call in (lake.archive, lake.read_all):
        with pytest.raises(StateError, match="at position 400 the lake has"):
            call(spark, str(tmp_path / "copy"), tmp_path / "lake")
