"""The lake in an object store: moto's S3 server on loopback, in a process of its own (deltalake waits with the GIL held)."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading

import boto3
import pytest
from deltalake import DeltaTable
from tests.spark.journals import extend, make
from tests.spark.test_lake import Died, as_made

from penstock.errors import StateError
from penstock.journal import Journal
from penstock.spark import lake
from penstock.spark.lake import delta

pytestmark = pytest.mark.usefixtures("days")


@pytest.fixture(scope="module")
def bucket():
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"], stderr=subprocess.PIPE, text=True
    )
    try:
        for line in server.stderr:
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                break
        threading.Thread(target=server.stderr.read, daemon=True).start()  # its log must not fill the pipe
        url = f"http://127.0.0.1:{found[1]}"
        keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
        boto3.client("s3", endpoint_url=url, **keys).create_bucket(Bucket="lake")
        yield {
            "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true", "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip
    finally:
        server.kill()
        server.wait()


def rows_of(where, bucket):
    return DeltaTable(where, storage_options=bucket).to_pyarrow_dataset().to_table()


@pytest.mark.parametrize("step", ["files written", "before commit", "after commit"])
def test_exactly_once_in_an_object_store(tmp_path, bucket, monkeypatch, step):
    where = f"s3://lake/{tmp_path.name}"
    made = make(tmp_path / "j", 300)

    def dies(name):
        if name == step:
            raise Died

    monkeypatch.setattr(delta, "step", dies)
    with pytest.raises(Died):
        lake.archive(None, str(tmp_path / "j"), where, storage=bucket, most_messages=100)
    monkeypatch.undo()
    lake.archive(None, str(tmp_path / "j"), where, storage=bucket, most_messages=100, compact_files=0)
    assert as_made(rows_of(where, bucket)) == made
    assert lake.compact(None, where, 1, storage=bucket) == 1
    assert as_made(rows_of(where, bucket)) == made
    found = lake.info(where, storage=bucket)
    assert (found.rows, found.files, list(found.reached.values())) == (300, 1, [301])
    assert lake.verify(where, deep=True, storage=bucket).problems == []


@pytest.mark.parametrize("wrong", ["endpoint", "bucket"])
def test_a_store_that_does_not_answer_is_no_damage(tmp_path, bucket, wrong):
    """Whatever keeps the store from answering is told with its cause; nobody is sent to look for damage."""
    make(tmp_path / "j", 50)
    with socket.socket() as unused:  # bound and not listening: connections are refused
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        storage = bucket | ({"AWS_ENDPOINT_URL": url, "max_retries": "1"} if wrong == "endpoint" else {})
        where = "s3://other/lake" if wrong == "bucket" else "s3://lake/unreached"
        cause = {"endpoint": "Connection refused", "bucket": "NoSuchBucket"}
        for do in (
            lambda: lake.archive(None, str(tmp_path / "j"), where, storage=storage),
            lambda: lake.info(where, storage=storage),
        ):
            with pytest.raises(StateError, match=cause[wrong]) as told:
                do()
            assert "verify" not in str(told.value) and "\n" not in str(told.value)


def test_settings_come_from_the_environment(tmp_path, bucket, monkeypatch):
    for key, value in bucket.items():
        monkeypatch.setenv(key, value)
    make(tmp_path / "j", 50)
    assert lake.archive(None, str(tmp_path / "j"), "s3://lake/environment").rows == 50
    assert lake.info("s3://lake/environment").rows == 50


def test_spark_writes_and_reads_without_jars(spark, tmp_path, bucket):
    made = make(tmp_path / "j", 300)
    lake.archive(spark, str(tmp_path / "j"), "s3://lake/spark", storage=bucket)
    with Journal(tmp_path / "j") as journal:
        made += extend(journal, 50)
    frame = lake.read_all(spark, str(tmp_path / "j"), "s3://lake/spark", storage=bucket)
    got = frame.select("topic", "position", "timestamp_ns", "payload", "properties", "message_id").collect()
    assert sorted((r[0], r[1], r[2], bytes(r[3]), r[4] or {}, r[5]) for r in got) == sorted(made)
    assert lake.table(spark, "s3://lake/spark", storage=bucket).where("date > '2026-01-01'").count() == 300
