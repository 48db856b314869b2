"""What went between planning and reading is told, never left out in silence; one journal under two names is told too."""

from __future__ import annotations

import shutil

import pyarrow
import pytest
from tests.spark.journals import make
from tests.spark.test_broker import free_port
from tests.spark.test_stream import forget_before

from penstock.broker import Client, Server
from penstock.errors import CorruptionError, InvalidArgument, StateError
from penstock.journal import Journal
from penstock.spark.bounds import Bounds
from penstock.spark.directory import Directory
from penstock.spark.options import check_options, folded
from penstock.spark.places import Reading, open_place, open_places, resolve
from penstock.spark.source import JournalReader
from penstock.spark.stream import JournalStreamReader

POSITION = pyarrow.schema([("position", pyarrow.int64())])


def schema():
    from pyspark.sql.types import LongType, StructField, StructType

    return StructType([StructField("position", LongType())])


def positions(reader, parts):
    return [number for part in parts for batch in reader.read(part) for number in batch.column(0).to_pylist()]


def stream_reader(path, **options):
    reader = JournalStreamReader({"path": str(path), **options}, schema())
    ((uuid, first),) = reader.initialOffset().items()
    return reader, {uuid: first}, {uuid: 5001}


def take(path, count):
    """Retention before it is announced: the files are gone, the frontier does not say so yet."""
    announced = (path / "frontier").read_bytes()
    first = forget_before(path, count)
    (path / "frontier").write_bytes(announced)
    return first


def test_a_stream_tells_what_went_after_it_was_planned(tmp_path):
    make(tmp_path / "j", 5000)
    reader, start, end = stream_reader(tmp_path / "j", partitionBytes="50000")
    careless, _, _ = stream_reader(tmp_path / "j", failOnDataLoss="false")
    parts, others = reader.partitions(start, end), careless.partitions(start, end)
    assert len(parts) > 3
    first = take(tmp_path / "j", 3)
    with pytest.raises(StateError, match=f"positions 1 to {first - 1} of .* were deleted by retention"):
        positions(reader, parts)
    assert positions(careless, others) == list(range(first, 5001))
    assert positions(reader, parts[-1:])[-1] == 5000, "what is still there can be read"


def test_a_stream_tells_what_went_before_it_was_announced(tmp_path):
    make(tmp_path / "j", 5000)
    reader, start, end = stream_reader(tmp_path / "j")
    take(tmp_path / "j", 3)
    with pytest.raises(StateError, match=r"positions 1 to .* were deleted by retention"):
        reader.partitions(start, end)


def test_a_table_that_must_be_whole(tmp_path):
    """``failOnDataLoss`` of a batch query: from ``startPosition`` on; without it the table is what there is."""
    make(tmp_path / "j", 5000)
    options = {"path": str(tmp_path / "j"), "startPosition": "1"}
    whole = JournalReader({**options, "failOnDataLoss": "true"}, schema())
    parts = whole.partitions()
    assert positions(whole, parts) == list(range(1, 5001))
    first = forget_before(tmp_path / "j", 3)
    for again in (whole.partitions, lambda: positions(whole, parts)):
        with pytest.raises(StateError, match=r"positions 1 to .* were deleted by retention"):
            again()
    plain = JournalReader(options, schema())
    assert positions(plain, plain.partitions()) == list(range(first, 5001))


@pytest.mark.parametrize("fail", ["true", "false"])
def test_another_journal_in_its_place_is_told_by_the_task(tmp_path, fail):
    make(tmp_path / "j", 5000)
    reader, start, end = stream_reader(tmp_path / "j", failOnDataLoss=fail)
    parts = reader.partitions(start, end)
    shutil.rmtree(tmp_path / "j")
    make(tmp_path / "j", 5000)
    with pytest.raises(StateError, match="was made anew"):
        positions(reader, parts)


@pytest.mark.parametrize("whole", [True, False])
def test_a_segment_that_goes_while_it_is_read(tmp_path, whole):
    make(tmp_path / "j", 5000)
    stretches = Directory(tmp_path / "j").stretches(1, 5001, Bounds(), log=True, fail_if_deleted=whole)
    assert next(stretches).index["position"][0] == 1
    first = take(tmp_path / "j", 3)
    if whole:
        with pytest.raises(StateError, match="were deleted by retention"):
            list(stretches)
    else:
        assert [int(number) for stretch in stretches for number in stretch.index["position"]] == list(range(first, 5001))


def test_a_segment_that_is_compacted_while_it_is_read(tmp_path):
    with Journal(tmp_path / "j", segment_bytes=1 << 16, compact_topics=["c"], sync=False) as journal:
        for number in range(40):
            journal.append_many("t", [bytes(1000)] * 10)
            journal.append("c", b"x", key=f"{number % 2}")
        end = journal.frontier
        stretches = Directory(tmp_path / "j").stretches(1, end, Bounds(), log=True, fail_if_deleted=True)
        reached = int(next(stretches).index["position"][-1])
        assert journal.compact() > 0
        seen = [int(number) for stretch in stretches for number in stretch.index["position"]]
        anew = Directory(tmp_path / "j").stretches(reached + 1, end, Bounds(), log=True, fail_if_deleted=True)
        assert seen == [int(number) for stretch in anew for number in stretch.index["position"]]
        assert len(set(range(reached + 1, end)) - set(seen)) > 20, "nothing was compacted"


def test_a_broker_whose_retention_was_faster_is_told(tmp_path):
    make(tmp_path / "j", 5000)
    port = free_port()
    with Server(tmp_path / "j", port).start():
        place = open_place(f"broker://127.0.0.1:{port}")
        assert len(list(place.ranges(1, 5001, Bounds(), 1 << 62, fail_if_deleted=True))) == 1
    first = forget_before(tmp_path / "j", 3)
    with Server(tmp_path / "j", port).start():
        for end in (10, 5001):
            with pytest.raises(StateError, match=f"positions 1 to {first - 1} .* were deleted by retention"):
                list(place.batches(1, end, Reading(POSITION, Bounds(), fail_if_deleted=True)))
        assert sum(batch.num_rows for batch in place.batches(1, 5001, Reading(POSITION, Bounds()))) == 5001 - first


def test_a_broker_with_another_journal_is_told(tmp_path):
    port = free_port()
    with Server(tmp_path / "one", port).start():
        place = open_place(f"broker://127.0.0.1:{port}")
    with Server(tmp_path / "two", port).start(), Client(port=port) as client:
        client.publish("a", b"x")
        with pytest.raises(StateError, match="was made anew"):
            list(place.batches(1, 2, Reading(POSITION, Bounds())))


def test_one_journal_under_two_names(tmp_path):
    """A link is looked through; a copy, or a broker beside its directory, is refused: which one is meant is not known."""
    make(tmp_path / "j", 100)
    (tmp_path / "link").symlink_to(tmp_path / "j")
    places = resolve({"path": f"{tmp_path}/*"})
    assert places == [str(tmp_path / "j")] and len(open_places(places)) == 1
    shutil.copytree(tmp_path / "j", tmp_path / "j.bak")
    options = {"path": f"{tmp_path}/*"}
    both = r"/j and .*/j\.bak are the same journal"
    with pytest.raises(InvalidArgument, match=both):
        JournalReader(options, schema()).partitions()
    with pytest.raises(InvalidArgument, match=both):
        JournalStreamReader(options, schema()).initialOffset()
    port = free_port()
    with Server(tmp_path / "j", port).start(), pytest.raises(InvalidArgument, match=r"broker://127.* are the same journal"):
        open_places([f"broker://127.0.0.1:{port}?token=secret", str(tmp_path / "j")])


def test_options_by_the_names_of_another_source():
    given = {"startingoffsets": "latest", "maxOffsetsPerTrigger": "5", "PATH": "/x", "owner": "me"}
    check_options(given)
    wanted = {"startingOffset": "latest", "maxMessagesPerTrigger": "5", "path": "/x", "owner": "me"}
    assert folded(given) == wanted
    with pytest.raises(InvalidArgument, match="name the same thing"):
        folded({"startingOffsets": "latest", "startingOffset": "earliest"})


def test_properties_of_a_table_are_no_options():
    """As Spark gives them for CREATE TABLE ... OPTIONS (topics 'a') TBLPROPERTIES ('team'='north')."""
    given = {"topics": "a", "option.topics": "a", "owner": "root", "provider": "penstock", "team": "north"}
    check_options(given)
    with pytest.raises(InvalidArgument, match="no option 'topcis'; did you mean topics"):
        check_options(given | {"topcis": "a", "option.topcis": "a"})
    with pytest.raises(InvalidArgument, match="no option 'team'"):
        check_options({"path": "/x", "team": "north"})


def lose(path, number):
    """Lose the segment of this number as a disk does: nobody announces it. Gives its positions."""
    logs = sorted(path.glob("*.log"))
    for part in path.glob(logs[number].stem + ".*"):
        part.unlink()
    first, following = (int(log.name.split("-")[0]) for log in logs[number : number + 2])
    return range(first, following)


def test_a_missing_segment_is_damage_for_a_table(tmp_path):
    make(tmp_path / "j", 5000)
    lost = lose(tmp_path / "j", 2)
    for options in ({}, {"failOnDataLoss": "true"}, {"topics": "a.x"}):
        reader = JournalReader({"path": str(tmp_path / "j"), "columns": "position", **options}, schema())
        with pytest.raises(CorruptionError, match=f"positions {lost[0]} to {lost[-1]}: .*journal verify"):
            reader.partitions()
    reader = JournalReader({"path": str(tmp_path / "j"), "failOnDataLoss": "false"}, schema())
    assert positions(reader, reader.partitions()) == [*range(1, lost[0]), *range(lost[-1] + 1, 5001)]
    for first, last in ((1, lost[0] - 1), (lost[-1] + 1, 5000)):
        options = {"path": str(tmp_path / "j"), "startPosition": str(first), "endPosition": str(last)}
        reader = JournalReader(options, schema())
        assert positions(reader, reader.partitions()) == list(range(first, last + 1)), "what is asked for is there"


def test_a_stream_tells_of_a_missing_segment_or_jumps_over_it_in_one_step(tmp_path, caplog):
    make(tmp_path / "j", 5000)
    lost = lose(tmp_path / "j", 2)
    reader, start, end = stream_reader(tmp_path / "j")
    with pytest.raises(CorruptionError, match=r"failOnDataLoss=false .*goes on without them"):
        reader.partitions(start, end)
    gone = forget_before(tmp_path / "j", 1)
    reader, _, end = stream_reader(tmp_path / "j", failOnDataLoss="false", maxMessagesPerTrigger="100")
    (uuid,) = end
    offset, batches = {uuid: 1}, []
    while offset != end:
        following = reader.latestOffset(offset, reader.getDefaultReadLimit())
        batches.append(positions(reader, reader.partitions(offset, following)))
        offset = following
    assert all(batches), "no batch is empty"
    assert [number for batch in batches for number in batch] == [*range(gone, lost[0]), *range(lost[-1] + 1, 5001)]
    assert f"positions 1 to {gone - 1} of journal {uuid} were deleted by retention" in caplog.text
    assert f"positions {lost[0]} to {lost[-1]} of journal {uuid} are in no segment" in caplog.text
