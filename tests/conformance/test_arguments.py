"""Options, arguments, what is measured and what travels along, on every reach."""

from __future__ import annotations

import copy
import ctypes
import inspect
import os
import pydoc
import re
import time
from collections.abc import Iterator
from typing import Any

import numpy
import pytest

import penstock
from penstock import address
from penstock._core import counters_read

from .reaches import Reach
from .reading import LONG, read_all


def test_unknown_options_are_refused_by_name(reach: Reach) -> None:
    for opener in (reach.publisher, reach.subscriber):
        with pytest.raises(penstock.InvalidArgument, match="no_such_option"):
            opener(no_such_option=1)


def test_unknown_values_name_the_nearest(reach: Reach) -> None:
    if reach.can["set on"] not in ("publisher", "subscriber"):
        pytest.skip(f"docs/reaches.md: {reach.name} has no overflow option")
    opener = reach.subscriber if reach.can["set on"] == "subscriber" else reach.publisher
    with pytest.raises(penstock.InvalidArgument, match=r"did you mean .*drop_(old|new)est"):
        opener(overflow="drop_oldes")


def test_an_opener_refuses_the_address_of_another_reach(reach: Reach) -> None:
    scheme = reach.address.partition(":")[0]
    for kind in ("publisher", "subscriber"):
        for other in ("bus:x", "shm:/x", "journal:x#t", "tcp://h:1", "broker://h:1/t"):
            if not other.startswith(scheme):
                with pytest.raises(penstock.InvalidArgument, match="address"):
                    getattr(address.room(scheme), kind)(other)


def _help(thing: object) -> str:
    return " ".join(pydoc.plain(pydoc.render_doc(thing)).split())


@pytest.mark.parametrize("kind", ["publisher", "subscriber"])
def test_help_lists_every_option_with_its_default(reach: Reach, kind: str) -> None:
    scheme = reach.address.partition(":")[0]
    everywhere, room = getattr(penstock, kind), address.room(scheme)
    own = getattr(room, kind)
    assert "<" not in str(inspect.signature(own)) and "Ellipsis" not in _help(own)
    for option in inspect.signature(own).parameters.values():
        if option.kind is inspect.Parameter.KEYWORD_ONLY:
            assert f"{option.name}={option.default!r}" in _help(everywhere), f"{scheme}: name it in address.py"


@pytest.mark.parametrize("kind", ["publisher", "subscriber"])
def test_an_opener_takes_what_its_help_lists_and_no_more(reach: Reach, kind: str) -> None:
    scheme = reach.address.partition(":")[0]
    own = getattr(address.room(scheme), kind)
    if kind == "subscriber":
        reach.publisher()  # which makes a journal, and knows a port
    place, _, query = reach.address.partition("?")
    listed = {p.name: p.default for p in inspect.signature(own).parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert {"type", "evolve"} <= set(listed)
    assert ("durable" in listed) == (scheme in ("bus", "shm") or (scheme, kind) == ("tcp", "publisher"))
    given = dict(option.partition("=")[::2] for option in query.split("&") if option)
    with own(place, **{**listed, **given}) as opened:  # a default asks for nothing
        assert not opened.closed
    every = {name for room in address.ROOMS for name in inspect.signature(getattr(address.room(room), kind)).parameters}
    for option in every - set(listed) - {"name"}:
        with pytest.raises(penstock.InvalidArgument, match=r"has no option|durable= is for"):
            own(place, **{option: 1})


def test_help_of_methods_lists_their_options(reach: Reach) -> None:
    publisher = type(reach.publisher())
    for name in ("publish", "publish_many", "reserve"):
        told, told_async = _help(getattr(publisher, name)), _help(getattr(publisher, f"{name}_async"))
        assert "Ellipsis" not in told and "**" not in told_async, (told, told_async)
        for option in inspect.signature(getattr(publisher, name)).parameters:
            assert option in told_async, f"{name}_async hides {option}"


@pytest.mark.parametrize("bad", ["text", 5, None, {"a": 1}, object()])
def test_only_bytes_are_published(reach: Reach, bad: Any) -> None:
    publisher, subscriber = reach.pair()
    told = f"publish takes bytes or a buffer, not {type(bad).__name__}; encode it, or open the publisher with type= "
    with pytest.raises(TypeError, match=f"^{told}"):
        publisher.publish(bad)
    with pytest.raises(TypeError, match=f"^{told}"):
        publisher.publish_many([bad])
    publisher.publish(b"fine")
    assert read_all(subscriber, 1) == [b"fine"]


class _Odd(numpy.ndarray[Any, Any]):
    pass


_OBJECTS = numpy.array([object(), None])
_STRUCTURED = numpy.zeros(2, [("size", "i4"), ("value", "O")])


@pytest.mark.parametrize(
    "bad",
    [_OBJECTS, _STRUCTURED, _OBJECTS.view(_Odd), memoryview(_OBJECTS), (ctypes.py_object * 2)()],
    ids=["array", "structured", "subclass", "memoryview", "ctypes"],
)
def test_addresses_of_objects_are_not_published(reach: Reach, bad: Any) -> None:
    publisher, subscriber = reach.pair()
    for publish in (publisher.publish, lambda data: publisher.publish_many([data])):
        with pytest.raises(TypeError, match=rf"of values, not \S*{type(bad).__name__} of Python objects \(dtype object\)"):
            publish(bad)
    publisher.publish(numpy.zeros(2, [("O", "i4"), ("stamp", "f8")]))
    assert len(read_all(subscriber, 1)[0]) == 24


def _messages_until(error: type[Exception]) -> Iterator[Any]:
    yield b"1"
    yield b"2"
    if error is TypeError:
        yield 3
    raise error


@pytest.mark.parametrize("error", [ValueError, TypeError])
def test_an_error_in_the_middle_of_many_says_how_many_were_published(reach: Reach, error: type[Exception]) -> None:
    """A journal publishes all or none, the others perhaps those before it: what is said is what arrives."""
    publisher, subscriber = reach.pair()
    with pytest.raises(error) as raised:
        publisher.publish_many(_messages_until(error))
    published = raised.value.published  # type: ignore[attr-defined]
    publisher.publish(b"last")
    expected = [b"1", b"2"][:published]
    assert read_all(subscriber, len(expected) + 1) == [*expected, b"last"]


def test_a_reader_measures_latency_and_a_publisher_measures_nothing(reach: Reach) -> None:
    began_ns = time.time_ns()
    publisher, subscriber = reach.pair()
    assert subscriber.read(0.05) is None
    publisher.publish(b"x")
    assert subscriber.read(LONG) is not None
    mine = [b for b in counters_read() if b["pid"] == os.getpid() and b["opened_ns"] >= began_ns]
    measured = [block for block in mine if block["latency_ns"]]
    assert measured and not [block for block in measured if block["kind"] == "publisher"]
    for block in measured:
        assert block["latency_ns"] <= time.time_ns() - began_ns and began_ns < block["last_ns"] <= time.time_ns()


def test_the_publisher_says_what_the_table_says_of_properties(reach: Reach) -> None:
    publisher = reach.publisher()
    assert publisher.carries_properties is (reach.can["properties"] == "yes")
    assert publisher.carries_properties or not publisher.carries_properties_of_many


def test_properties_of_many_are_those_of_all_or_of_each(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    if not publisher.carries_properties_of_many:
        pytest.skip("this reach carries no properties with publish_many")
    many: Any = publisher.publish_many
    assert many([b"1", b"2"], properties={"unit": "K"}) == 2
    assert many([b"3", b"4"], properties=[{"unit": "m"}, {}]) == 2
    found = [dict(subscriber.receive(LONG).properties) for _ in range(4)]
    assert found == [{"unit": "K"}, {"unit": "K"}, {"unit": "m"}, {}]
    with pytest.raises(ValueError):
        many([b"5", b"6"], properties=[{}])


def test_messages_are_forwarded(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    named = [penstock.Message(b"1", properties={"unit": "K"}), penstock.Message(b"2"), penstock.Message(b"3")]
    assert publisher.forward(named) == 3
    assert publisher.forward([]) == 0
    for number in (1, 2, 3):
        message = subscriber.receive(LONG)
        assert bytes(message) == b"%d" % number
        assert dict(message.properties) == ({"unit": "K"} if number == 1 and publisher.carries_properties else {})
        message.release()


def test_a_batch_is_forwarded(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    publisher.publish_many([b"1", b"2"])
    found: list[bytes] = []
    while len(found) < 2:
        batch = subscriber.read_many(10, LONG)
        assert publisher.forward(batch) == len(batch)
        found += [bytes(message) for message in batch]
        del batch
    assert found == [b"1", b"2"]
    assert read_all(subscriber, 2) == [b"1", b"2"]


def test_handles_have_a_repr(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    for handle in (publisher, subscriber):
        assert " object at " not in repr(handle)
        assert re.search(r"'.+'|//.+:", repr(handle)), "it says which one it is"
        handle.close()
        assert " object at " not in repr(handle) and "closed" in repr(handle)


def test_a_message_is_copied(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    publisher.publish(b"kept")
    message = subscriber.receive(LONG)
    for copied in (copy.copy(message), copy.deepcopy(message)):
        assert copied is not message and isinstance(copied, penstock.Message)
        assert bytes(copied) == b"kept"
        for name in ("ordinal", "timestamp_ns", "channel", "position", "id", "vchan_id"):
            assert getattr(copied, name) == getattr(message, name)
        assert dict(copied.properties) == dict(message.properties)
    message.release()
    assert bytes(copied) == b"kept"
    assert not copy.copy(copied).released
    subscriber.close()
    assert bytes(copied) == b"kept", "a deep copy has memory of its own"
    with pytest.raises(BufferError):
        copy.copy(message)


@pytest.mark.needs("properties")
def test_properties_travel(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    publisher.publish(b"x", properties={"unit": "°C", "empty": ""})  # type: ignore[call-arg]
    message = subscriber.read(LONG)
    assert message is not None
    assert dict(message.properties) == {"unit": "°C", "empty": ""}
    with pytest.raises(TypeError):
        message.properties["unit"] = "K"  # type: ignore[index]


def test_fewer_than_no_subscribers_are_refused(reach: Reach) -> None:
    with pytest.raises(penstock.InvalidArgument, match="subscribers=-1"):
        reach.publisher().wait_ready(-1, timeout=0)
