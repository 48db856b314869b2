"""Typed handles: objects in, objects out, the same at every reach."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from typing import Any, TypedDict

import msgspec
import numpy
import pydantic
import pytest

import penstock
from penstock import types

from .reaches import Reach
from .reading import LONG


class Pose(msgspec.Struct):
    x: float
    y: float = 0.0
    name: str = ""


class PoseWithTime(msgspec.Struct):
    """The same with a field that may be left out."""

    x: float
    y: float = 0.0
    name: str = ""
    stamp: int | None = None


class Angle(msgspec.Struct):
    x: str


@dataclasses.dataclass
class Point:
    x: int
    tags: list[str] = dataclasses.field(default_factory=list)


class Reading(TypedDict):
    sensor: str
    value: float


class Model(pydantic.BaseModel):
    x: int
    deep: dict[str, float] = {}


RECORD = numpy.dtype([("t", "<i8"), ("xyz", "<f4", (3,))])
MSGPACK: types.Codec[Pose] = types.plain(Pose, "msgpack")

VALUES: list[tuple[Any, Any]] = [
    (str, "grüße\n"),
    (dict, {"a": [1, 2.5, None], "b": {"c": "d"}}),
    (Pose, Pose(1.5, -2.0, "left")),
    (MSGPACK, Pose(1.5, -2.0, "left")),
    (Point, Point(7, ["a", "b"])),
    (Reading, {"sensor": "a", "value": 0.25}),
    (Model, Model(x=3, deep={"k": 1.0})),
    (list[int], [1, 2, 3]),
]


def pair(reach: Reach, kind: Any, **options: Any) -> tuple[Any, Any]:
    """A typed publisher and a typed subscriber that are connected."""
    for_publisher, for_subscriber = reach.lossless()
    return reach.pair(({**for_publisher, "type": kind, **options}, {**for_subscriber, "type": kind, **options}))


@pytest.mark.parametrize(("kind", "value"), VALUES, ids=[str(getattr(kind, "__name__", "codec")) for kind, _ in VALUES])
def test_an_object_arrives(reach: Reach, kind: Any, value: Any) -> None:
    publisher, subscriber = pair(reach, kind)
    publisher.publish(value)
    message = subscriber.read(LONG)
    assert message is not None
    assert message.value == value
    assert type(message.value) is type(value)
    assert len(bytes(message)) == message.size > 0  # the bytes stay reachable


def test_records_are_views(reach: Reach) -> None:
    publisher, subscriber = pair(reach, RECORD)
    sent = numpy.zeros(4, RECORD)
    sent["t"] = [1, 2, 3, 4]
    sent["xyz"][2] = [0.5, 1.5, 2.5]
    publisher.publish(sent)
    with publisher.reserve(2) as array:
        assert array.dtype == RECORD and array.shape == (2,)
        array["t"] = [5, 6]
        array["xyz"] = 9.0
    del array
    message = subscriber.read(LONG)
    assert message is not None
    assert numpy.array_equal(message.value, sent)
    assert not message.value.flags.writeable
    assert message.value.ctypes.data == message.address  # no copy
    message = subscriber.read(LONG)
    assert message is not None
    assert message.value["t"].tolist() == [5, 6] and (message.value["xyz"] == 9.0).all()


def test_values_and_batches(reach: Reach) -> None:
    publisher, subscriber = pair(reach, Pose)
    sent = [Pose(float(i)) for i in range(20)]
    assert publisher.publish_many(sent[:10]) == 10
    found: list[Pose] = []
    while len(found) < 10:
        found += [message.value for message in subscriber.read_many(4, LONG)]
    assert found == sent[:10]
    for value in sent[10:]:
        publisher.publish(value)
    for value in subscriber.values(LONG):
        found.append(value)
        if len(found) == 20:
            break
    assert found == sent


def test_iteration_ends_with_close(reach: Reach) -> None:
    publisher, subscriber = pair(reach, Pose)
    publisher.publish(Pose(1.0))
    found = []
    for value in subscriber.values():
        found.append(value)
        subscriber.close()
    assert found == [Pose(1.0)]


def test_what_does_not_decode_has_a_place_and_does_not_end_the_loop(reach: Reach) -> None:
    publisher, subscriber = pair(reach, Pose)
    publisher.inner.publish(b"not json")
    publisher.publish(Pose(2.0))
    message = subscriber.read(LONG)
    assert message is not None
    with pytest.raises(penstock.DecodeError, match=rf"message {message.ordinal} of .*8 bytes, is not Pose"):
        message.value
    assert bytes(message) == b"not json"
    assert subscriber.decode_errors == 1
    publisher.inner.publish(b"[]")
    publisher.publish(Pose(3.0))
    found = []
    for value in subscriber.values(LONG):
        found.append(value.x)
        if len(found) == 2:
            break
    assert found == [2.0, 3.0]
    assert subscriber.decode_errors == 2
    publisher.inner.publish(b"{}")
    with pytest.raises(penstock.DecodeError):
        next(subscriber.values(LONG, errors="raise"))
    with pytest.raises(penstock.InvalidArgument, match="valid: skip, raise"):
        next(subscriber.values(0, errors="never"))


def test_another_object_is_not_published(reach: Reach) -> None:
    publisher, subscriber = pair(reach, Pose)
    with pytest.raises(TypeError, match="expected a Pose, not Angle"):
        publisher.publish(Angle("1"))
    with pytest.raises(TypeError):
        publisher.publish_many([Pose(1.0), b"bytes"])
    assert subscriber.read(0) is None


def test_a_subscriber_without_a_type_is_admitted(reach: Reach) -> None:
    for_publisher, for_subscriber = reach.lossless()
    publisher, subscriber = reach.pair(({**for_publisher, "type": Pose}, for_subscriber))
    publisher.publish(Pose(1.0))
    message = subscriber.read(LONG)
    assert message is not None
    assert message.value == bytes(message) == b'{"x":1.0,"y":0.0,"name":""}'


def test_functions_get_messages_with_values(reach: Reach) -> None:
    found: list[Pose] = []
    done = threading.Event()

    def take(message: Any) -> None:
        found.append(message.value)
        if len(found) == 3:
            done.set()

    for_publisher, for_subscriber = reach.lossless()
    options = {**for_publisher, "type": Pose}, {**for_subscriber, "type": Pose, "on_message": take}
    publisher, _ = reach.pair(options)
    for i in range(3):
        publisher.publish(Pose(float(i)))
    assert done.wait(LONG)
    assert [pose.x for pose in found] == [0.0, 1.0, 2.0]


def test_process_all_too(reach: Reach) -> None:
    publisher, subscriber = pair(reach, Pose)
    found: list[float] = []
    subscriber.on_message(lambda message: found.append(message.value.x))
    publisher.publish(Pose(4.0))
    deadline = time.monotonic() + LONG
    while not found and time.monotonic() < deadline:
        subscriber.wait(1)
        subscriber.process_all()
    assert found == [4.0]


def test_in_an_event_loop(reach: Reach) -> None:
    publisher, subscriber = pair(reach, Pose)

    async def talk() -> list[Pose]:
        found = []
        for i in range(3):
            await publisher.publish_async(Pose(float(i)))
        await publisher.publish_many_async([Pose(3.0)])
        message = await subscriber.receive_async(LONG)
        found.append(message.value)
        async for value in subscriber.values_async(LONG):
            found.append(value)
            if len(found) == 4:
                break
        return found

    assert [pose.x for pose in asyncio.run(talk())] == [0.0, 1.0, 2.0, 3.0]


def test_a_value_outlives_its_message_and_handle(reach: Reach) -> None:
    publisher, subscriber = pair(reach, RECORD)
    sent = numpy.zeros(1, RECORD)
    sent["t"] = 77
    publisher.publish(sent)
    value = subscriber.receive(LONG).value
    subscriber.close()
    publisher.close()
    assert value["t"][0] == 77


def test_a_value_outlives_the_release_of_its_message(reach: Reach) -> None:
    publisher, subscriber = pair(reach, RECORD)
    sent = numpy.zeros(1000, RECORD)
    sent["t"] = 77
    publisher.publish(sent)
    with subscriber.receive(LONG) as message:
        value = message.value
    for _ in range(20):
        publisher.publish(numpy.ones(1000, RECORD))
        with subscriber.receive(LONG):
            pass
    assert (value["t"] == 77).all()


def test_an_exception_gives_up_the_array_at_once(reach: Reach) -> None:
    publisher, subscriber = pair(reach, RECORD)
    for number in range(4):
        try:
            with publisher.reserve(2) as array:  # it keeps its name
                array["t"] = number
                if number % 2 == 0:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass
    assert [subscriber.receive(LONG).value["t"].tolist() for _ in range(2)] == [[1, 1], [3, 3]]
    assert subscriber.read(0) is None


def test_a_field_that_has_a_name_does_not_stop_the_publishing(reach: Reach) -> None:
    publisher, subscriber = pair(reach, RECORD)
    found = []
    for number in range(4):
        with publisher.reserve(2) as array:
            times = array["t"]  # a view that could write: readers get a copy
            times[:] = number
        times[:] = 99
        found.append(subscriber.receive(LONG).value["t"].tolist())
    assert found == [[number, number] for number in range(4)]


def test_evolve_and_types_that_have_no_codec(reach: Reach) -> None:
    with pytest.raises(penstock.InvalidArgument, match="valid: any, compatible"):
        reach.publisher(type=Pose, evolve="never")
    with pytest.raises(penstock.InvalidArgument, match="evolve= is for handles with a type"):
        reach.publisher(evolve="any")
    with pytest.raises(penstock.InvalidArgument, match="has no codec"):
        reach.publisher(type=object)
    with pytest.raises(penstock.InvalidArgument, match="has no option 'typ'"):
        reach.publisher(typ=Pose)


# --- schemas travel


class PoseWithName(msgspec.Struct):
    """Goes with Pose, and not with PoseWithTime."""

    x: float
    y: float = 0.0
    name: str = ""
    stamp: str = ""


def test_two_changes_that_do_not_go_together_do_not_meet(reach: Reach) -> None:
    if reach.name == "tcp":  # a publisher has its port for itself
        return
    for_publisher, _ = reach.lossless()
    for kind in (Pose, PoseWithTime):
        reach.publisher(type=kind, **for_publisher)
    with pytest.raises(penstock.RefusedError, match="'stamp'"):
        reach.publisher(type=PoseWithName, **for_publisher)


def test_a_change_goes_with_older_versions_too(reach: Reach) -> None:
    if reach.name in ("tcp", "broker"):  # a broker's clients know the newest version alone
        return
    for_publisher, for_subscriber = reach.lossless()
    for kind in (PoseWithTime, Pose):
        reach.publisher(type=kind, **for_publisher)
    for attempt in (reach.publisher, reach.subscriber):
        with pytest.raises(penstock.RefusedError, match="'stamp'"):
            attempt(type=PoseWithName, **(for_publisher if attempt == reach.publisher else for_subscriber))
    replacing = reach.publisher(type=Angle, evolve="any", **for_publisher)
    assert types.Schema.parse(replacing.schema or "").name == "Angle"
    reach.publisher(type=Angle, **for_publisher)  # what was before the break is of no account
    reach.subscriber(type=Angle, **for_subscriber)


def test_a_refused_function_is_not_called(reach: Reach) -> None:
    publisher, _ = pair(reach, Pose)
    called: list[Any] = []
    try:
        subscriber = reach.subscriber(type=Angle, on_message=called.append)
    except penstock.RefusedError:
        return  # at opening, where the reach knows it then
    deadline = time.monotonic() + LONG
    while subscriber.refusal is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    publisher.publish(Pose(1.0))
    thread = subscriber._caller
    subscriber.close()  # before that a publisher of its type may come
    thread.join(LONG)
    assert not thread.is_alive()
    assert (subscriber.errors, called) == (0, [])


def refused(open_it: Any) -> str:
    """What is said to who comes with another type: at opening, or where the reach learns it later, when reading."""
    with pytest.raises(penstock.RefusedError) as told, open_it() as subscriber:
        subscriber.read(LONG)
    return str(told.value)


def test_another_type_is_refused_with_both_names_and_the_field(reach: Reach) -> None:
    publisher, subscriber = pair(reach, Pose)
    told = refused(lambda: reach.subscriber(type=Angle))
    assert "Pose (json)" in told and "Angle (json)" in told and "'x' is number, and is read as string" in told
    publisher.publish(Pose(1.0))  # nobody else is disturbed
    assert subscriber.receive(LONG).value == Pose(1.0)


def test_the_schema_is_there_for_who_asks(reach: Reach) -> None:
    for_publisher, for_subscriber = reach.lossless()
    publisher, subscriber = reach.pair(({**for_publisher, "type": Pose}, for_subscriber))
    wanted = types.codec_of(Pose).described()
    assert publisher.schema == wanted.text
    deadline = time.monotonic() + LONG
    while subscriber.schema is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert types.Schema.parse(subscriber.schema or "") == wanted


def test_nothing_is_said_without_a_type(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    assert publisher.schema is None and subscriber.schema is None
    typed = reach.subscriber(type=Pose)  # a publisher without a type: taken message by message
    assert typed.read(0) is None


def test_a_compatible_change_is_taken(reach: Reach) -> None:
    publisher, _ = pair(reach, Pose)
    for_publisher, for_subscriber = reach.lossless()
    newer = reach.subscriber(type=PoseWithTime, **{k: v for k, v in for_subscriber.items() if k != "start"})
    assert newer.read(0) is None
    if reach.name == "tcp":  # a publisher has its port for itself
        assert publisher.wait_ready(2, timeout=LONG)
    else:
        publisher = reach.publisher(type=PoseWithTime, **for_publisher)
    with pytest.raises(TypeError):
        publisher.publish(b"x")


def test_what_does_not_go_together_is_taken_when_asked(reach: Reach) -> None:
    publisher, _ = pair(reach, Pose)
    other = reach.subscriber(type=Angle, evolve="any")
    assert publisher.wait_ready(1, timeout=LONG)
    assert other.read(0) is None
    if reach.name == "tcp":
        return
    for_publisher, _ = reach.lossless()
    with pytest.raises(penstock.RefusedError, match=r"Pose \(json\), not this Angle \(json\)"):
        reach.publisher(type=Angle, **for_publisher)
    replacing = reach.publisher(type=Angle, evolve="any", **for_publisher)
    assert types.Schema.parse(replacing.schema or "").name == "Angle"
    with pytest.raises(penstock.RefusedError, match=r"Angle \(json\), not this Pose \(json\)"):
        reach.publisher(type=Pose, **for_publisher)
