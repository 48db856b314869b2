"""Control messages: the vectors, every form of damage, streams cut anywhere."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidArgument, ProtocolError
from penstock.gateway import control

VECTORS = [
    (control.Create(), "A1 6C 01 01 00 00 00 12 01 00 00 00 00 00 00 00 00 00"),
    (control.Reply(control.Status.OK), "A1 6C 01 02 00 00 00 09 00"),
    (
        control.Reply(control.Status.MISSING, reason="x", step=control.Step.LOAD),
        "A1 6C 01 02 00 00 00 17 02 00 00 00 00 00 00 00 00 00 00 00 00 05 78",
    ),
    (control.Reply(control.Status.DETACH), "A1 6C 01 02 00 00 00 09 FF"),
    (control.Start(), "A1 6C 01 03 00 00 00 08"),
    (control.Destroy(), "A1 6C 01 04 00 00 00 08"),
]
TEXTS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=40)
MESSAGES = st.one_of(
    st.builds(control.Create, uri=TEXTS, args=TEXTS, uri_type=st.integers(0, 255)),
    st.builds(control.Reply, st.sampled_from(control.Status)),
    st.just(control.Start()),
    st.just(control.Destroy()),
)


@pytest.mark.parametrize(("message", "text"), VECTORS)
def test_vectors(message: control.Control, text: str) -> None:
    data = bytes.fromhex(text)
    assert control.encode(message) == data
    assert control.decode(data) == message


@given(MESSAGES)
def test_what_is_encoded_decodes_to_the_same(message: control.Control) -> None:
    assert control.decode(control.encode(message)) == message


@given(st.lists(MESSAGES, max_size=6), st.integers(1, 40))
def test_a_stream_cut_anywhere_gives_the_same_messages(messages: list[control.Control], piece: int) -> None:
    stream = b"".join(map(control.encode, messages))
    decoder = control.Decoder()
    found = [m for at in range(0, len(stream), piece) for m in decoder.feed(stream[at : at + piece])]
    assert found == messages


@given(st.binary(max_size=64))
def test_garbage_is_a_protocol_error_or_a_message(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert control.encode(control.decode(data)) == data


@given(MESSAGES, st.data())
def test_a_flipped_byte_is_refused_or_means_something_else(message: control.Control, data: st.DataObject) -> None:
    encoded = bytearray(control.encode(message))
    place = data.draw(st.integers(0, len(encoded) - 1))
    encoded[place] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(ProtocolError):
        assert control.decode(bytes(encoded)) != message


@pytest.mark.parametrize(
    "text",
    [
        "",
        "A1 6C 01 03 00 00 00",  # short
        "A1 60 01 03 00 00 00 08",  # another magic
        "A1 6C 02 03 00 00 00 08",  # version
        "A1 6C 01 05 00 00 00 08",  # type
        "A1 6C 01 03 00 00 00 09",  # says more than there is
        "A1 6C 01 03 00 00 00 09 00",  # a body where there is none
        "A1 6C 01 02 00 00 00 09 07",  # unknown status
        "A1 6C 01 02 00 00 00 08",  # no status
        "A1 6C 01 01 00 00 00 12 02 00 00 00 00 00 00 00 00 00",  # message version
        "A1 6C 01 01 00 00 00 12 01 00 00 00 00 09 00 00 00 00",  # uri runs over
        "A1 6C 01 01 00 00 00 13 01 00 00 00 00 01 41 00 00 00 00",  # uri without NUL
    ],
)
def test_damage_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError):
        control.decode(bytes.fromhex(text))


def test_an_absurd_size_is_refused_before_anything_is_kept() -> None:
    with pytest.raises(ProtocolError, match="allowed"):
        control.Decoder().feed(bytes.fromhex("A1 6C 01 01 7F FF FF FF"))
    with pytest.raises(InvalidArgument, match="allowed"):
        control.encode(control.Create(args="x" * control.MAX_CONTROL_BYTES))
