"""What type checkers see: room openers are typed fully; what cannot be published or opened is refused."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

GOOD = """
import asyncio
import dataclasses
import datetime
import pathlib
import typing

import numpy

import penstock
import penstock.types


def forward(source: penstock.Subscriber, sink: penstock.Publisher) -> int:
    return sink.forward(source.read_many(10, 1.0))


camera = penstock.shm.publisher("/camera", slots=8, overflow="drop_oldest")
camera.publish(numpy.zeros((2, 3)))
camera.publish(bytearray(3))
camera.publish(memoryview(b"abc"))
camera.publish(b"abc", metadata=b"x")
viewer = penstock.shm.subscriber("/camera", on_message=lambda message: print(message.ordinal))
robot = penstock.tcp.publisher("127.0.0.1:0", token="secret")
port: int = robot.port
robot.publish(b"x", properties={"unit": "K"})
message = penstock.tcp.subscriber(f"127.0.0.1:{port}", token="secret").receive(1.0)
text: bytes = bytes(message)
robot.publish(message)
jobs = penstock.broker.subscriber("127.0.0.1:9876/work", queue="jobs", ack="manual")
jobs.ack(jobs.receive())
log = penstock.journal.publisher("/data/log#camera", sync=False)
ordinal: int = log.publish(b"x", key="k")
house = penstock.bus.publisher("house", id=1)


def hear(heard: penstock.bus.Message) -> None:
    print(heard.reference_count, heard.allocator_id)


penstock.bus.Bus("hall").subscribe(1, kind="callback", handler=hear)
any_one: penstock.Publisher[bytes] = penstock.publisher("shm:/camera", slots=16)
with any_one.reserve(10) as draft:
    draft.write(b"x")


@dataclasses.dataclass
class Pose:
    x: float


poses: penstock.types.TypedPublisher[Pose] = penstock.shm.publisher("/pose", type=Pose)
poses.publish(Pose(1.0))
x: float = penstock.tcp.subscriber("127.0.0.1:9", type=Pose, evolve="any").receive(1.0).value.x
arrays = penstock.bus.subscriber("arrays", type=numpy.dtype("f4"))
mean = arrays.receive(1.0).value.mean()


penstock.bus.publisher("x", durable=pathlib.Path("x"), durable_wait=True)
penstock.shm.publisher("/x", durable="x", retain_bytes="1G")
penstock.tcp.publisher("h:1", durable="x").flush()
penstock.tcp.publisher("h:1", durable="x", type=Pose).flush()
penstock.publisher("shm:/x", durable=pathlib.Path("x"), slots=8).flush()
penstock.publisher("shm:/x", durable="x", type=Pose).flush()
maybe: str | None = None
penstock.shm.publisher("/x", durable=maybe, durable_wait=False).publish(b"x")
penstock.publisher("shm:/x", durable=maybe).publish(b"x")
penstock.shm.subscriber("/x", start=maybe).receive(1.0)
number: int = penstock.shm.subscriber("/x", start="first").position
penstock.bus.subscriber("x", start=datetime.datetime.now(), durable="x")
penstock.shm.subscriber("/x", start="first")
penstock.tcp.subscriber("h:1", start=datetime.datetime.now())
penstock.shm.publisher("/x", type=float, slots=8, durable="x")
array = penstock.shm.publisher("/x", type=numpy.dtype("f4"), slots=8)


async def main() -> None:
    async with array.reserve_async(4) as numbers:
        typing.assert_type(numbers, "numpy.ndarray[typing.Any, typing.Any]")
    typing.assert_type(await array.reserve_async(4), "penstock.types.ArrayDraft")
    await any_one.publish_async(b"x")
    async with any_one.reserve_async(4) as draft:
        draft.write(b"good")
    async for one in penstock.subscriber("shm:/camera"):
        print(one.ordinal)


asyncio.run(main())
"""

BAD = {
    'penstock.shm.publisher("/x").publish("text")': "arg-type",
    'penstock.tcp.publisher("h:1").publish("text")': "arg-type",
    'penstock.bus.publisher("x").publish("text")': "arg-type",
    'penstock.journal.publisher("x").publish("text")': "arg-type",
    'penstock.broker.publisher("h:1/t").publish("text")': "arg-type",
    'penstock.publisher("shm:/x").publish("text")': "arg-type",
    'penstock.publisher("shm:/x").flush()': "attr-defined",
    'penstock.shm.publisher("/x").flush()': "attr-defined",
    'penstock.bus.publisher("x", durable=None).flush()': "attr-defined",
    'penstock.publisher("shm:/x").publish(5)': "arg-type",
    'penstock.shm.publisher("/x", slots="many")': "call-overload",
    'penstock.shm.publisher("/x", slot=8)': "call-overload",
    'penstock.shm.publisher("/x", type=int, slot=8)': "call-overload",
    'penstock.shm.publisher("/x", type=int, slots="many")': "call-overload",
    'penstock.shm.publisher("/x", durable=5)': "call-overload",
    'penstock.bus.subscriber("x", type=int, depth="deep")': "call-overload",
    'penstock.tcp.publisher("h:1", type=int, depth="deep")': "call-overload",
    'penstock.journal.publisher("x", type=int, sync="yes")': "call-overload",
    'penstock.broker.subscriber("h:1/t", type=int, credit="much")': "call-overload",
    'penstock.tcp.subscriber("h:1", durable="x")': "call-overload",
    'penstock.tcp.publisher("h:1", depth="deep")': "call-overload",
    'penstock.tcp.subscriber("h:1", tls="ca.pem")': "call-overload",
    'penstock.broker.subscriber("h:1/t", credit="much")': "call-overload",
    'penstock.journal.publisher("x", sync="yes")': "call-overload",
    'penstock.bus.subscriber("x", depth="deep")': "call-overload",
    'penstock.shm.publisher("/x", type=int).publish("text")': "arg-type",
    'penstock.subscriber("shm:/x").read("soon")': "arg-type",
    'bytes(penstock.subscriber("shm:/x").read(1))': "arg-type",
}


def test_what_is_right_is_accepted_and_what_is_wrong_is_refused(tmp_path: Path) -> None:
    """In one run, strictly: what that accepts is accepted without --strict too."""
    pytest.importorskip("mypy")
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text("import penstock\n\n" + "\n".join(BAD) + "\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--python-version", "3.11", "good.py", "bad.py"]
    output = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300).stdout
    assert "good.py" not in output, output
    found = {int(line): kind for line, kind in re.findall(r"bad\.py:(\d+): error: .*\[([a-z-]+)\]", output)}
    missed = [text for number, (text, kind) in enumerate(BAD.items(), start=3) if found.get(number) != kind]
    assert not missed, f"accepted, or refused for another reason: {missed}; {output}"


def test_the_types_of_the_openers_are_those_of_their_options() -> None:
    """If this fails: python scripts/openers.py."""
    path = Path(__file__).parents[2] / "scripts" / "openers.py"
    spec = importlib.util.spec_from_file_location("openers", path)
    assert spec is not None and spec.loader is not None
    openers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(openers)
    for scheme in penstock.address.ROOMS:
        assert openers.path(scheme).read_text() == openers.stub(scheme), scheme
