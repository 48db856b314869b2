"""``penstock sub`` of typed channels: what it prints, fields by name, filters over fields of every encoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
from google.protobuf import timestamp_pb2

import penstock
from penstock import types

from .command import run


class Point(msgspec.Struct):
    x: float
    name: str = ""


class Pose(msgspec.Struct):
    at: Point


@pytest.fixture
def journal(tmp_path: Path) -> str:
    where = f"journal:{tmp_path / 'j'}"
    published: dict[str, tuple[Any, list[Any]]] = {
        "json": (Pose, [Pose(Point(1.5, "a")), Pose(Point(2.5, "b\tc"))]),
        "packed": (types.plain(Pose, "msgpack"), [Pose(Point(1.5, "a")), Pose(Point(2.5))]),
        "time": (timestamp_pb2.Timestamp, [timestamp_pb2.Timestamp(seconds=n) for n in (1, 2)]),
        "record": (numpy.dtype([("x", "<f8")]), [numpy.array([(n,)], [("x", "<f8")]) for n in (1.5, 2.5)]),
        "image": (penstock.Image, [numpy.zeros((100, 100), "u1")]),
    }
    for topic, (kind, values) in published.items():
        with penstock.publisher(f"{where}#{topic}", type=kind) as publisher:
            publisher.publish_many(values)
    return where


def sub(address: str, *options: str) -> list[str]:
    done = run("sub", address, "--from", "start", "--exit-at-end", *options)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_fields_are_printed_by_name(journal: str) -> None:
    assert sub(f"{journal}#json", "--fields", "at.x,at.name") == ["1.5\ta", "2.5\tb\\tc"]
    assert sub(f"{journal}#packed", "--fields", "at.x", "--fields", "at") == [
        '1.5\t{"x": 1.5, "name": "a"}', '2.5\t{"x": 2.5, "name": ""}',
    ]  # fmt: skip
    assert sub(f"{journal}#time", "--fields", "seconds") == ["1", "2"]
    assert sub(f"{journal}#record", "--fields", "x") == ["1.5", "2.5"]
    assert sub(f"{journal}#image", "--fields", "shape[1]") == ["100"]
    assert [json.loads(line) for line in sub(f"{journal}#time", "--fields", "nanos", "--json")] == [{"nanos": 0}] * 2


def test_what_is_no_text_is_printed_as_json(journal: str) -> None:
    assert sub(f"{journal}#packed")[0] == '{"at": {"x": 1.5, "name": "a"}}'
    assert sub(f"{journal}#packed", "--format", "json")[0] == '{"at": {"x": 1.5, "name": "a"}}'
    assert json.loads(sub(f"{journal}#image")[0])["data"] == "10000 bytes"
    record = json.loads(sub(f"{journal}#time", "--json")[1])
    assert (record["payload"], record["size"]) == ({"seconds": 2, "nanos": 0}, 2)
    assert sub(f"{journal}#json")[0] == '{"at":{"x":1.5,"name":"a"}}'  # as it was published


@pytest.mark.parametrize(
    ("topic", "expression"), [("json", ".at.x > 2"), ("packed", ".at.x > 2"), ("time", ".seconds == 2"), ("record", ".x > 2")]
)
def test_filters_see_fields_of_every_encoding(journal: str, topic: str, expression: str) -> None:
    assert len(sub(f"{journal}#{topic}", "--filter", expression)) == 1
    found = sub(f"{journal}#>", "--filter", f"channel == '{topic}' and {expression}", "--template", "{channel}")
    assert found == [topic]


def test_a_field_that_is_not_there_is_told(journal: str) -> None:
    done = run("sub", f"{journal}#json", "--from", "start", "--exit-at-end", "--fields", "at.z")
    assert done.returncode == 2 and "Pose has no field 'z'" in done.stderr
    done = run("sub", f"{journal}#json", "--fields", "a..b")
    assert done.returncode == 2 and "is no field" in done.stderr
    done = run("sub", f"{journal}#json", "--fields", "at", "--template", "{payload}")
    assert done.returncode == 2 and "not both" in done.stderr
    done = run("sub", f"{journal}#json", "--from", "start", "--exit-at-end", "--fields", "at", "--format", "hex")
    assert done.returncode == 2 and "not both" in done.stderr
    assert sub(f"{journal}#>", "--fields", "nothing") == ["null"] * 9


def test_a_message_that_cannot_be_read_is_told_once(tmp_path: Path) -> None:
    where = f"journal:{tmp_path / 'j'}#pose"
    with penstock.publisher(where, type=Pose) as publisher:
        publisher.publish(Pose(Point(1.5)))
    with penstock.publisher(where) as plain:
        plain.publish_many([b"junk", b"junk"])
    done = run("sub", where, "--start", "first", "-e", "--fields", "at.x")
    assert done.stdout == "1.5\nnull\nnull\n"
    assert done.stderr.count("cannot be read") == 1


def test_a_filter_with_a_field_that_the_type_does_not_have_is_refused(journal: str, tmp_path: Path) -> None:
    for topic in ("json", "packed", "record"):
        for expression in ("payload == 'x' and .att.x > 2", "value.att == 1"):
            done = run("sub", f"{journal}#{topic}", "--from", "start", "--exit-at-end", "--filter", expression)
            assert done.returncode == 2 and "has no field 'att'" in done.stderr, done.stderr
    done = run("why", f"{journal}#packed", "--filter", ".att == 1", "--seconds", "0.1")
    assert done.returncode == 4 and "Pose has no field 'att'" in done.stdout
    # of several addresses one that has it is enough, and so is an older version of the type
    both = ("sub", f"{journal}#json", f"{journal}#record", "--from", "start", "--exit-at-end")
    assert len(run(*both, "--filter", ".at.x > 2").stdout.splitlines()) == 1
    assert run(*both, "--filter", ".a.x > 2").returncode == 2
    with penstock.publisher(f"{journal}#packed", type=Point, evolve="any") as publisher:
        publisher.publish(Point(3.0))
    assert sub(f"{journal}#packed", "--filter", ".at.x > 2", "--fields", "at.x") == ["2.5"]
    assert sub(f"{journal}#packed", "--filter", ".x > 2", "--fields", "x") == ["3.0"]


def test_what_does_not_pass_is_shown_by_its_type(journal: str) -> None:
    done = run("sub", f"{journal}#packed", "--from", "start", "--timeout", "1.5", "--filter", ".at.x > 9")
    assert """one of them: {"at": {"x": 1.5, "name": "a"}}""" in done.stderr
    done = run("why", f"{journal}#packed?start=first", "--filter", ".at.x > 9", "--seconds", "0.5")
    assert """one of them: {"at": {"x": 1.5, "name": "a"}}""" in done.stdout.replace("\n", " ")
