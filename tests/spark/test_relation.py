"""The seam to Spark: journals in SQL, push-down, and what is left where a Spark does not have what it needs."""

from __future__ import annotations

import collections
import logging

import pytest
from pyspark.errors import PySparkException
from tests.spark.journals import make

from penstock.journal import Journal
from penstock.spark import relation

ROWS = 300


@pytest.fixture(scope="module")
def journal(tmp_path_factory):
    """A path with a blank in it, and how many messages each topic has."""
    path = tmp_path_factory.mktemp("with blank") / "a b"
    rows = make(path, ROWS)
    return path, collections.Counter(row[0] for row in rows)


@pytest.fixture
def table(spark):
    """A name that is free, and is again afterwards."""
    spark.sql("DROP TABLE IF EXISTS measurements")
    yield "measurements"
    spark.sql("DROP TABLE IF EXISTS measurements")


def counts(spark, query):
    return {row[0]: row[1] for row in spark.sql(query).collect()}


@pytest.mark.parametrize("how", ["options", "location", "catalog"])
def test_a_table_of_the_catalog(spark, journal, table, how):
    path, expected = journal
    if how == "catalog":
        spark.catalog.createTable(table, source="penstock", path=str(path))
    else:
        place = f"OPTIONS (path '{path}')" if how == "options" else f"LOCATION '{path}'"
        spark.sql(f"CREATE TABLE {table} USING penstock {place}")
    assert counts(spark, f"SELECT topic, count(*) FROM {table} GROUP BY topic") == expected
    assert spark.sql(f"SELECT position FROM {table} WHERE topic = 'b' AND position > 290").count() == 3
    both = f"SELECT (SELECT max(position) FROM {table} WHERE topic = 'b') - min(position) FROM {table}"
    assert spark.sql(both).first()[0] == 299 - 1, "each scan has its own filters"
    assert spark.table(table).count() == ROWS


def test_a_table_keeps_its_options(spark, journal, table):
    path, expected = journal
    spark.sql(f"CREATE TABLE {table} USING penstock OPTIONS (path '{path}', topics 'a.*', startPosition '11') TBLPROPERTIES ('team'='north')")
    found = counts(spark, f"SELECT topic, count(*) FROM {table} GROUP BY topic")
    assert found.keys() == {"a.x", "a.y"} and sum(found.values()) == expected["a.x"] + expected["a.y"] - 7


@pytest.mark.parametrize("how", ["sql", "frame"])
def test_a_cached_table_is_read_from_the_cache(spark, journal, table, how):
    path, expected = journal
    spark.sql(f"CREATE TABLE {table} USING penstock LOCATION '{path}'")
    if how == "sql":
        spark.sql(f"CACHE TABLE {table}")
    else:
        assert spark.table(table).cache().count() == ROWS
    frame = spark.sql(f"SELECT * FROM {table} WHERE topic = 'b'")
    assert frame.count() == expected["b"] and "InMemory" in frame._jdf.queryExecution().executedPlan().toString()
    assert spark.table(table).where("position > 5").count() == ROWS - 5
    spark.sql(f"UNCACHE TABLE {table}")
    assert spark.table(table).count() == ROWS


def test_a_path_in_a_query(spark, journal):
    path, expected = journal
    assert counts(spark, f"SELECT topic, count(*) FROM penstock.`{path}` GROUP BY topic") == expected
    joined = f"SELECT count(*) FROM penstock.`{path}` a JOIN PENSTOCK.`{path}` b ON a.position = b.position WHERE b.topic = 'b'"
    assert spark.sql(joined).first()[0] == expected["b"]
    scan = spark.sql(f"SELECT ordinal FROM penstock.`{path}` WHERE position = 7")
    assert scan.count() == 1 and "payload" not in scan._jdf.queryExecution().executedPlan().toString()


@pytest.mark.parametrize("how", ["columns", "by name", "select", "frame", "path"])
def test_insert_into(spark, tmp_path, table, how):
    """Rows become messages; what a statement does not name is the journal's to give."""
    path = tmp_path / "with blank"
    make(path, 3, topics=("a",))
    spark.sql(f"CREATE TABLE {table} USING penstock OPTIONS (path '{path}', topics 'a,b', topic 'b')")
    if how == "columns":
        spark.sql(f"INSERT INTO {table} (topic, payload) VALUES ('a', X'01'), (NULL, X'02')")
    elif how == "by name":
        spark.sql(f"INSERT INTO {table} BY NAME SELECT X'01' AS payload, 'a' AS topic UNION ALL SELECT X'02', 'b'")
    elif how == "select":
        spark.sql(f"INSERT INTO {table} SELECT * FROM {table} WHERE position = 1")
    elif how == "frame":
        rows = [("a", bytearray(b"\1"), 7, {"k": "v"}), ("b", bytearray(b"\2"), None, None)]
        frame = spark.createDataFrame(rows, "topic string, payload binary, timestamp_ns bigint, properties map<string,string>")
        frame.coalesce(1).writeTo(table).append()
    else:
        spark.sql(f"INSERT INTO penstock.`{path}` BY NAME SELECT X'01' AS payload, 'a' AS topic UNION ALL SELECT X'02', 'b'")
    with Journal(path, mode="read") as journal:
        messages = list(journal.read_many(1))
    added = [(message.channel, bytes(message)) for message in messages[3:]]
    if how == "select":
        assert added == [("a", bytes(messages[0]))] and messages[3].timestamp_ns == messages[0].timestamp_ns
    else:
        assert sorted(added) == [("a", b"\1"), ("b", b"\2")]
    if how == "frame":
        assert (messages[3].timestamp_ns, messages[3].properties) == (7, {"k": "v"})
    assert spark.table(table).count() == len(messages)


def test_a_table_is_not_written_over(spark, journal, table):
    path, _ = journal
    spark.sql(f"CREATE TABLE {table} USING penstock OPTIONS (path '{path}')")
    with pytest.raises(PySparkException, match="only added to"):
        spark.sql(f"INSERT OVERWRITE {table} SELECT * FROM {table}")
    assert spark.table(table).count() == ROWS


def test_this_spark_is_one_that_was_tried(spark):
    """A new Spark fails here first: run tests/spark with it, then add it to ``TRIED``."""
    assert spark.version.startswith(relation.TRIED)


def test_another_spark_reads_right_and_says_what_is_lost(spark, journal, monkeypatch, caplog):
    path, expected = journal
    monkeypatch.setattr(relation.scans, "JAVA", "package penstock.spark; class TableOfScans extends Nothing {}")
    monkeypatch.setattr(relation, "_compiled", {})
    monkeypatch.setattr(relation, "_with_rules", set())
    monkeypatch.setattr(relation, "TRIED", ("1.",))
    with caplog.at_level(logging.WARNING, "penstock.spark"):
        relation.install(spark)
        frame = spark.read.format("penstock").load(str(path))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3 and all(spark.version in text for text in told), told
    assert frame.filter("topic = 'b'").count() == expected["b"]
    assert frame.filter("topic = 'a.x'").union(frame.filter("topic = 'b'")).count() == expected["a.x"] + expected["b"]
    assert frame.count() == ROWS
