"""What type checkers see: room openers are typed fully; what cannot be published or opened is refused."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

GOOD = """
import asyncio
import dataclasses

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


async def main() -> None:
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
    'penstock.publisher("shm:/x").publish(5)': "arg-type",
    'penstock.shm.publisher("/x", slots="many")': "call-overload",
    'penstock.shm.publisher("/x", slot=8)': "call-overload",
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
