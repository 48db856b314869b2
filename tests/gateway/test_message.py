"""GatewayMessage: the byte form by its vectors, by what goes in and comes out, and by every kind of damage."""

import contextlib
import gc
import struct
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import InvalidArgument, Message, ProtocolError
from penstock.gateway import GatewayMessage

SMALLEST = bytes.fromhex("A1 60 00 00 00 0E 00 00 00 00 00 00 00 00")
TWO = bytes.fromhex("A1 60 00 00 00 17 00 00 00 02 7A 00 31 00 61 00 00 00 00 00 02 68 69")
TEXTS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=12)
PROPERTIES = st.dictionaries(TEXTS, TEXTS, max_size=20)


def by_hand(properties: list[tuple[bytes, bytes]], content: bytes, count: int | None = None) -> bytes:
    pairs = b"".join(key + b"\0" + value + b"\0" for key, value in properties)
    count = len(properties) if count is None else count
    total = 14 + len(pairs) + len(content)
    return struct.pack(">HII", 0xA160, total, count) + pairs + struct.pack(">I", len(content)) + content


def test_vectors() -> None:
    assert GatewayMessage().to_bytes() == SMALLEST
    assert GatewayMessage(b"hi", {"z": "1", "a": ""}).to_bytes() == TWO
    message = GatewayMessage.from_bytes(TWO)
    assert list(message.properties.items()) == [("z", "1"), ("a", "")]
    assert bytes(message) == b"hi"


@given(st.binary(max_size=300), PROPERTIES)
def test_the_byte_form_is_what_the_layout_says_and_comes_back(content: bytes, properties: dict[str, str]) -> None:
    message = GatewayMessage(content, properties)
    encoded = message.to_bytes()
    assert encoded == by_hand([(k.encode(), v.encode()) for k, v in properties.items()], content)
    assert len(encoded) == message.encoded_size
    for source in (encoded, bytearray(encoded), memoryview(encoded), Message(encoded)):
        again = GatewayMessage.from_bytes(source)
        assert dict(again.properties) == properties
        assert bytes(again) == content
        assert again.to_bytes() == encoded
    room = bytearray(len(encoded) + 5)
    assert message.encode_into(room, 5) == len(encoded)
    assert room[5:] == encoded


@given(st.binary(max_size=300), PROPERTIES)
def test_a_frame_is_the_sources_number_and_the_byte_form(content: bytes, properties: dict[str, str]) -> None:
    message = GatewayMessage(content, properties)
    assert message.to_frame() == bytes(8) + message.to_bytes()
    frame = (513).to_bytes(8, "big") + message.to_bytes()
    for source in (frame, bytearray(frame), Message(frame)):
        again = GatewayMessage.from_frame(source)
        assert (again.id, again.to_bytes()) == (513, message.to_bytes())
        assert again.to_frame() == frame
    large = GatewayMessage.from_frame((1).to_bytes(8, "big") + GatewayMessage(bytes(100_000)).to_bytes())
    assert (large.id, large.size) == (1, 100_000)


@pytest.mark.parametrize(
    "frame", [b"", bytes(7), bytes(8), (65536).to_bytes(8, "big") + SMALLEST, bytes(8) + SMALLEST[:-1]]
)
def test_a_frame_that_is_none_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        GatewayMessage.from_frame(frame)


@given(st.binary(max_size=80))
def test_garbage_is_refused_or_is_a_message(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert GatewayMessage.from_bytes(data).to_bytes() == data


@given(st.binary(max_size=30), PROPERTIES, st.data())
def test_a_changed_byte_never_gives_the_same_message(
    content: bytes, properties: dict[str, str], draw: st.DataObject
) -> None:
    encoded = bytearray(GatewayMessage(content, properties).to_bytes())
    encoded[draw.draw(st.integers(0, len(encoded) - 1))] ^= draw.draw(st.integers(1, 255))
    with contextlib.suppress(ProtocolError):
        assert GatewayMessage.from_bytes(encoded).to_bytes() == encoded


@given(st.binary(max_size=30), PROPERTIES, st.data())
def test_a_cut_message_is_refused(content: bytes, properties: dict[str, str], draw: st.DataObject) -> None:
    encoded = GatewayMessage(content, properties).to_bytes()
    with pytest.raises(ProtocolError):
        GatewayMessage.from_bytes(encoded[: draw.draw(st.integers(0, len(encoded) - 1))])
    with pytest.raises(ProtocolError):
        GatewayMessage.from_bytes(encoded + b"\0")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (SMALLEST[:13], "14 bytes"),
        (b"\xa1\x6c" + SMALLEST[2:], "A1 60"),
        (SMALLEST + b"x", "total size"),
        (struct.pack(">HII", 0xA160, 18, 1) + b"key4byte", "key has no NUL"),
        (struct.pack(">HII", 0xA160, 18, 1) + b"key\0more", "value has no NUL"),
        (struct.pack(">HII", 0xA160, 17, 1) + b"a\0bbb\0c", "no room"),
        (by_hand([], b"", count=0xFFFFFFFF), "more properties"),
        (by_hand([], b"", count=0x80000000), "more properties"),
        (by_hand([(b"a", b"1"), (b"a", b"2")], b""), "twice"),
        (by_hand([(str(i).encode(), b"") for i in range(40)] + [(b"3", b"")], b""), "twice"),
        (by_hand([(b"\xff", b"1")], b""), "UTF-8"),
        (by_hand([(b"\xed\xa0\x80", b"1")], b""), "UTF-8"),
        (by_hand([(b"\xc0\xaf", b"1")], b""), "UTF-8"),
        (by_hand([(b"a", b"1")], b"", count=0), "does not fill|content"),
        (SMALLEST[:10] + b"\0\0\0\1", "does not fill"),
    ],
)
def test_damage_is_refused_by_name(data: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        GatewayMessage.from_bytes(data)


def test_an_empty_key_and_an_empty_value_are_accepted() -> None:
    message = GatewayMessage(b"", {"": ""})
    assert dict(GatewayMessage.from_bytes(message.to_bytes()).properties) == {"": ""}


@pytest.mark.parametrize(
    ("properties", "kind"),
    [
        ({"a\0b": "1"}, InvalidArgument),
        ({"a": "1\0"}, InvalidArgument),
        ({"a": 1}, TypeError),
        ({1: "a"}, TypeError),
        ({"a": "\ud800"}, UnicodeEncodeError),
        ([1, 2], TypeError),
        (7, TypeError),
    ],
)
def test_properties_that_cannot_be_encoded_are_refused(properties: object, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        GatewayMessage(b"", properties)  # type: ignore[arg-type]


def test_content_is_shared_where_it_cannot_change_and_copied_where_it_can() -> None:
    content = bytes(range(100))
    message = GatewayMessage(content, {"a": "1"})
    other = message.with_properties({"b": "2"})
    assert other.address == message.address
    assert dict(other.properties) == {"b": "2"}
    changing = bytearray(content)
    copied = GatewayMessage(changing)
    changing[0] = 99
    assert copied.content[0] == 0
    del content, message
    gc.collect()
    assert bytes(other) == bytes(range(100))


def test_a_message_passed_on_again_and_again_holds_the_first_one_and_none_between() -> None:
    first = GatewayMessage(b"the content", {"hop": "0"})
    address, between = first.address, []
    message = first
    for hop in range(3):
        message = message.with_properties({"hop": str(hop)})
        between.append(weakref.ref(message))
    del first
    gc.collect()
    assert [one() is None for one in between] == [True, True, False]
    assert (message.address, bytes(message), dict(message.properties)) == (address, b"the content", {"hop": "2"})


def test_nobody_can_take_a_message_away_from_the_others() -> None:
    message = GatewayMessage(b"kept", {"a": "1"})
    message.release()
    with message:
        pass
    assert bytes(message) == b"kept"
    assert message.properties["a"] == "1"
    with pytest.raises(TypeError):
        message.properties["a"] = "2"  # type: ignore[index]
    assert message.content.readonly


def test_a_buffer_too_small_is_refused() -> None:
    for room, offset in ((bytearray(13), 0), (bytearray(20), 7), (bytearray(20), -1), (bytearray(20), 21)):
        with pytest.raises(InvalidArgument):
            GatewayMessage().encode_into(room, offset)
