"""SQL over recordings: DuckDB answers what a plain loop over the messages gives, and reads nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest

import penstock
from penstock import types
from penstock.journal import Entry, Journal

from .command import run

pytest.importorskip("duckdb")
pytest.importorskip("pyarrow")


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    with Journal(tmp_path / "run1") as journal:
        journal.commit(
            Entry("ab"[n % 2], b'{"n": %d}' % n if n % 10 else b"\xff\xfe", {"unit": "C"}, timestamp_ns=10**18 + n)
            for n in range(100)
        )
        journal.append("_recording", b'{"event": "started", "addresses": {}}')
        journal.append("_recording", b'{"event": "ended"}')
    return tmp_path


def ask(folder: Path, query: str, *options: str) -> list[dict[str, object]]:
    done = run("sql", query, "--json", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_counts_and_values(recorded: Path) -> None:
    rows = ask(recorded, "select topic, count(*) as n, sum((json->>'n')::int) as total from run1 group by 1 order by 1")
    even = sum(n for n in range(0, 100, 2) if n % 10)
    assert rows == [{"topic": "a", "n": 50, "total": even}, {"topic": "b", "n": 50, "total": sum(range(1, 100, 2))}]


def test_a_path_in_quotes_properties_and_a_table_used_twice(recorded: Path) -> None:
    folder = recorded / "run1"
    query = f"select count(*) as n, any_value(x.properties['unit']) as unit from '{folder}' x join '{folder}' y using (position)"
    assert ask(Path("/"), query) == [{"n": 100, "unit": "C"}]


def test_messages_that_are_no_text_are_null(recorded: Path) -> None:
    assert ask(recorded, "select count(*) as n from run1 where text is null and size = 2") == [{"n": 10}]


def test_a_plot_has_a_bar_for_each_row(recorded: Path) -> None:
    done = run("sql", "select topic, count(*) from run1 group by 1", "--plot", cwd=recorded)
    assert done.returncode == 0 and done.stdout.count("█" * 40) == 2


@pytest.mark.parametrize("form", ["table", "csv", "json"])
def test_times_keep_their_nanoseconds(tmp_path: Path, form: str) -> None:
    times = (9214646399999999999, 1795031803144272509, 0, -1)
    with Journal(tmp_path / "run") as journal:
        journal.commit(Entry("t", b"x", timestamp_ns=time_ns) for time_ns in times)
    query = "select timestamp, position as number, null::timestamp_ns as none from run order by position; -- all"
    done = run("sql", query, "--format", form, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = [line.replace(" ", "T") for line in done.stdout.splitlines()]
    places = [
        next(place for place, line in enumerate(found) if text in line)
        for text in ("2261-12-31T23:59:59.999999999", "2026-11-18T19:56:43.144272509",
                     "1970-01-01T00:00:00.000000000", "1969-12-31T23:59:59.999999999")
    ]  # fmt: skip
    assert places == sorted(set(places)), "in the order of the query"


@pytest.mark.parametrize(
    "query", ["select * from nowhere", "selct 1", "select * from read_csv('/etc/passwd')", "select * from '/etc/passwd'",
              "copy (select 1) to 'x.csv'", "install httpfs"],
)  # fmt: skip
def test_wrong_queries_and_other_files_are_refused(recorded: Path, query: str) -> None:
    done = run("sql", query, cwd=recorded)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert not (recorded / "x.csv").exists()


def test_a_folder_that_is_not_there_and_a_plot_without_numbers_are_told(recorded: Path) -> None:
    done = run("sql", "select * from nodir", cwd=recorded)
    assert done.returncode == 2 and "there is no folder nodir" in done.stderr
    done = run("sql", "select topic from run1 limit 1", "--plot", cwd=recorded)
    assert done.returncode == 0 and "topic holds no numbers" in done.stderr


def test_a_described_topic_is_json_whatever_its_encoding(tmp_path: Path) -> None:
    packed = types.plain(dict[str, int], "msgpack")
    with penstock.publisher(f"journal:{tmp_path / 'run'}#packed", type=packed) as publisher:
        publisher.publish({"n": 7})
    with penstock.publisher(f"journal:{tmp_path / 'run'}#points", type=numpy.dtype([("x", "<f4")])) as publisher:
        publisher.publish(numpy.zeros(1, [("x", "<f4")]))
    done = run("sql", f"select json from '{tmp_path / 'run'}' order by position", "--json")
    assert [json.loads(line)["json"] for line in done.stdout.splitlines()] == ['{"n": 7}', '[{"x": 0.0}]'], done.stderr


@pytest.mark.parametrize("query", ["", ";", "/* nothing */"])
def test_an_empty_query_is_one_sentence(query: str) -> None:
    done = run("sql", query)
    assert done.returncode == 2 and done.stderr == "penstock: sql: the query is empty\n"


def test_json_has_no_nan_and_no_infinity() -> None:
    assert ask(Path("/"), "select 'nan'::double a, ['inf'::double, 1.5] b, '-inf'::double c") == [
        {"a": None, "b": [None, 1.5], "c": None}
    ]


def test_bars_of_negative_numbers_end_where_those_of_positive_ones_begin() -> None:
    values = "(values ('a', -30::double), ('b', 10), ('c', 'nan'), ('d', 'inf'), ('e', null)) t"
    done = run("sql", f"select * from {values}", "--plot")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.count("█") for line in lines] == [0, 30, 10, 0, 0, 0]
    assert lines[1].rindex("█") + 1 == lines[2].index("█")


def test_a_damaged_recording_is_one_sentence_and_a_remedy(tmp_path: Path) -> None:
    with Journal(tmp_path / "run1") as journal:
        journal.commit(Entry("a", b"payload %06d" % n) for n in range(5000))
    log = next((tmp_path / "run1").glob("*.log"))
    data = bytearray(log.read_bytes())
    at = data.index(b"payload 004000")
    data[at : at + 4] = b"XXXX"
    log.write_bytes(data)
    done = run("sql", "select count(text) from run1", cwd=tmp_path)
    assert done.returncode == 1 and "damaged" in done.stderr
    said = done.stderr.splitlines()
    assert len(said) == 2 and "penstock journal repair run1" in said[1], done.stderr


def test_an_image_is_shown_by_its_shape_and_not_by_its_pixels(tmp_path: Path) -> None:
    with penstock.publisher(f"journal:{tmp_path / 'run1'}#camera", type=penstock.Image) as publisher:
        publisher.publish(numpy.full((50, 100), 65, "u1"))
    with penstock.publisher(f"journal:{tmp_path / 'run1'}#camera") as plain:
        plain.publish(b"no image")
    rows = ask(tmp_path, "select text, json->>'shape' as shape, json->>'data' as data from run1 order by position")
    assert [(row["shape"], row["data"]) for row in rows] == [("[50,100]", "5000 bytes"), (None, None)]
    assert "AAA" not in str(rows[0]["text"]) and rows[1]["text"] is None
