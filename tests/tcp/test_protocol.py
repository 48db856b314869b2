"""The protocol without a socket: bytes in, events out, for any bytes and any cutting of them."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock._core import tcp as native
from penstock.errors import PenstockError, ProtocolError, RefusedError
from penstock.tcp import protocol
from penstock.tcp.protocol import Agreed, Answer, Frame, FrameReader, FrameType, Negotiation, Request


def feed(side: Negotiation, data: bytes) -> Agreed | None:
    """Feed what is needed, as a connection does; gives the agreement."""
    at = 0
    while at < len(data):
        step = data[at : at + side.needs]
        at += len(step)
        agreed = side.feed(step)
        if agreed is not None:
            assert at == len(data), "it must not swallow what follows the handshake"
            return agreed
    return None


def take(side: Negotiation) -> bytes:
    data = bytes(side.outgoing)
    side.outgoing.clear()
    return data


@pytest.mark.parametrize("token", [None, b"secret"])
@pytest.mark.parametrize("extended", [True, False])
def test_both_sides_agree(token: bytes | None, extended: bool) -> None:
    if token and not extended:
        with pytest.raises(ValueError):
            Request(token, extended=False)
        return
    request, answer = Request(token, extended=extended), Answer(token, identity=b"p" * 16)
    agreed = feed(answer, take(request))
    if token:
        assert agreed is None
        assert feed(request, take(answer)) is None
        agreed = feed(answer, take(request))
    assert agreed is not None and agreed.extended is extended
    last = answer.answer(agreed, clock_ns=5, next_ordinal=9)
    if extended:
        at = protocol.NEXT_ORDINAL_OFFSET
        assert last[at : at + 8] == (9).to_bytes(8, "little")
    result = feed(request, last)
    assert result == (Agreed(0, True, b"p" * 16, 9, 5) if extended else Agreed(0, False))


def test_a_recorded_proof_is_of_no_use() -> None:
    first, second = Answer(b"secret"), Answer(b"secret")
    request = Request(b"secret")
    asked = take(request)
    feed(first, asked)
    feed(request, take(first))
    proof = take(request)
    feed(second, asked)
    with pytest.raises(RefusedError, match="wrong token"):
        feed(second, proof)


def test_bytes_on_the_wire() -> None:
    assert protocol.handshake() == bytes.fromhex("0c000100010000000000000000")
    ours = protocol.handshake(0, protocol.Extension(next_ordinal=7, wants_token=True))
    assert ours[:12] == bytes.fromhex("0c0001005500000000000000"), "a plain header, whatever follows"
    assert ours[12:17] == b"\0PNSK" and ours[17:21] == bytes.fromhex("01000800")
    assert ours[protocol.NEXT_ORDINAL_OFFSET :][:12] == (7).to_bytes(8, "little") + bytes.fromhex("09000800")


def test_fields_that_nobody_knows_are_skipped() -> None:
    ours = protocol.Extension(True, b"n" * 16, b"i" * 16, 7, -5, b"p" * 32)
    assert protocol.Extension.decode(ours.encode()) == ours
    assert protocol.Extension.decode(ours.encode() + bytes.fromhex("ff00 0300 616263")) == ours
    assert protocol.Extension.decode(protocol.MAGIC) == protocol.Extension()
    assert protocol.Extension.decode(b"") is None and protocol.Extension.decode(b"\1\2") is None


@pytest.mark.parametrize("fields", ["01", "0100 0800 00", "0100 0400 00000000", "0200 0000", "ff00 ffff 00"])
def test_fields_that_cannot_be_are_refused(fields: str) -> None:
    with pytest.raises(ProtocolError):
        protocol.Extension.decode(protocol.MAGIC + bytes.fromhex(fields))


@given(st.binary(max_size=200))
def test_any_fields_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert isinstance(protocol.Extension.decode(protocol.MAGIC + data), protocol.Extension)


def test_feeding_more_than_is_needed_is_refused() -> None:
    with pytest.raises(ValueError):
        FrameReader().feed(b"xyz")


frames = st.builds(
    lambda kind, extra, data: (
        (12 + len(extra)).to_bytes(2, "little") + bytes([kind, 0]) + len(data).to_bytes(8, "little") + extra + data
    ),
    st.integers(0, 255),
    st.binary(max_size=80),
    st.binary(max_size=40),
)
anything = st.one_of(
    st.binary(max_size=200), st.lists(st.one_of(frames, st.binary(max_size=5)), max_size=8).map(b"".join)
)


@settings(max_examples=400)
@given(st.sampled_from(["request", "token request", "answer", "token answer"]), anything)
def test_any_bytes_end_in_an_event_or_a_known_error(kind: str, data: bytes) -> None:
    token = b"t" if "token" in kind else None
    side: Negotiation = Request(token) if "request" in kind else Answer(token)
    at = 0
    while at < len(data):
        assert 0 < side.needs <= 65535 + protocol.MAX_HANDSHAKE_DATA
        step = data[at : at + side.needs]
        at += len(step)
        try:
            if side.feed(step) is not None:
                return
        except PenstockError:
            return


@settings(max_examples=400)
@given(st.lists(frames, max_size=6), st.binary(max_size=30), st.integers(1, 7))
def test_the_two_scanners_agree(good: list[bytes], tail: bytes, step: int) -> None:
    """The native one over whole buffers, the other byte by byte."""
    data = b"".join(good) + tail
    found, state = native.scan_frames(data, 1024, False)
    reader = FrameReader()
    slow: list[Frame] = []
    end = "end"
    try:
        at = 0
        while at < len(data):
            piece = data[at : at + min(step, reader.needs)]
            at += len(piece)
            whole = reader.feed(piece)
            end = "end" if whole else "more"
            if whole:
                slow.append(whole)
    except ProtocolError as error:
        end = "bad_header" if "header_size" in str(error) else "too_large"
    assert [(f.kind, len(f.header), len(f.data)) for f in slow] == [row[:3] for row in found]
    assert state == end


def test_frame_types_of_our_own_are_skipped_by_version_0() -> None:
    assert {FrameType.PROOF, FrameType.REFUSED}.isdisjoint({FrameType.PAYLOAD, FrameType.HANDSHAKE})
