from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CorruptionError, InvalidArgument
from penstock.replica.block import BEGIN, HEAD, MORE, Block, decode
from penstock.replica.history import chains

words = st.integers(0, 2**64 - 1)
blocks = st.builds(
    Block, st.uuids(), words, words, words, words, words, st.integers(0, 2**32 - 1), words, words,
    st.integers(0, 7), st.binary(max_size=100),
)  # fmt: skip
ONE = Block(UUID(int=1), 1, 7, 1, 2, 1, 0, 0, 0, 0, b"data")


@given(blocks)
def test_a_block_comes_back(block: Block) -> None:
    assert decode(block.encode(), "here") == block


@given(blocks, st.data())
def test_no_flipped_bit_is_taken_for_data(block: Block, data: st.DataObject) -> None:
    encoded = bytearray(block.encode())
    bit = data.draw(st.integers(0, 8 * len(encoded) - 1))
    encoded[bit // 8] ^= 1 << bit % 8
    with pytest.raises((CorruptionError, InvalidArgument), match="here"):
        decode(bytes(encoded), "here")


@given(st.binary(max_size=200))
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises((CorruptionError, InvalidArgument)):
        decode(data, "here")


def test_a_short_one_is_refused() -> None:
    encoded = ONE.encode()
    for size in (0, 4, HEAD.size - 1, HEAD.size, len(encoded) - 1):
        with pytest.raises(CorruptionError):
            decode(encoded[:size], "here")


def test_a_chain_is_one_commit_and_void_without_its_end() -> None:
    first = replace(ONE, flags=BEGIN | MORE, data=b"aa")
    middle = replace(ONE, flags=MORE, offset=2, data=b"bb")
    last = replace(ONE, offset=4, data=b"cc")
    whole = list(chains(enumerate([first, middle, last, replace(ONE, offset=6)], 1)))
    assert [(at, block.data, block.begins, block.more) for at, block in whole] == [
        (1, b"aabbcc", True, False),
        (4, b"data", False, False),
    ]
    assert list(chains([(1, first), (2, middle)])) == []
    other = replace(ONE, writer=8, offset=2)  # another broker came between
    assert list(chains([(1, first), (2, other)])) == [(2, other)]
