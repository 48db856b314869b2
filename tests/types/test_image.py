"""Images: arrays that say what they are, in one header, as views."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import penstock
from penstock import Image, types
from penstock.types import image as images


@given(
    arrays.arrays(
        st.sampled_from(["u1", "<u2", ">u2", "<f4", "<f8", "?", "<c8"]),
        arrays.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4),
    ),
    st.text(max_size=4).filter(lambda name: "\0" not in name),
)
@settings(max_examples=100, deadline=None)
def test_an_array_is_the_same_on_the_other_side(array: Any, encoding: str) -> None:
    found = images.decode(images.encode(penstock.Image(array, encoding)))
    assert found.shape == array.shape and found.dtype == array.dtype and found.encoding == encoding
    assert found.tobytes() == array.tobytes()


@given(st.binary(max_size=200))
def test_hostile_bytes_are_refused(data: bytes) -> None:
    for body in (
        data,
        data + images.encode(numpy.zeros((2, 2), "u1"))[4:],
        images.encode(numpy.zeros((2, 2), "u1"))[:40] + data,
    ):
        try:
            images.decode(body)
        except (ValueError, TypeError):
            continue


@pytest.mark.parametrize("address", ["shm:/types-image", "bus:types-image"])
def test_an_image_in_the_reachs_own_memory(address: str) -> None:
    with (
        penstock.publisher(address, type=penstock.Image) as publisher,
        penstock.subscriber(address, type=penstock.Image) as subscriber,
    ):
        with publisher.reserve((4, 6, 3), "uint8", "rgb8") as pixels:
            assert pixels.shape == (4, 6, 3)
            pixels[:] = 7
            pixels[1, 2] = [1, 2, 3]
        del pixels
        message = subscriber.receive(10)
        image = message.value
        assert isinstance(image, penstock.Image) and image.encoding == "rgb8"
        assert image[1, 2].tolist() == [1, 2, 3] and image.sum() == 7 * 23 * 3 + 6
        assert not image.flags.writeable
        assert (
            numpy.from_dlpack(image).ctypes.data == message.address
        )  # by DLPack 1.0, which can say that it is read-only
        assert image.ctypes.data == message.address  # no copy
        publisher.publish(penstock.Image(numpy.zeros((2, 2), "<u2"), "depth16"))
        assert subscriber.receive(10).value.encoding == "depth16"
        publisher.publish(numpy.ones(3))
        assert subscriber.receive(10).value.encoding == ""
        with pytest.raises(TypeError, match="an Image or an array"):
            publisher.publish(b"x")  # type: ignore[arg-type]
        with pytest.raises(penstock.InvalidArgument, match="dimensions of numbers"):
            publisher.publish(numpy.array(["text"]))  # type: ignore[arg-type]
        with pytest.raises(penstock.InvalidArgument, match="more than 16 bytes"):
            publisher.reserve((1,), "u1", "a name that is too long")
        for odd in ((5, "u1"), ("a", "u1"), ((2.5, 2), "u1"), ((2, 2), "zz"), ((2, 2), "u1", 5)):
            with pytest.raises(penstock.InvalidArgument):
                publisher.reserve(*odd)
        assert subscriber.read(0) is None


def test_it_is_an_array_with_a_name() -> None:
    image = penstock.Image([[1, 2], [3, 4]], "mono8")
    assert (image * 2).encoding == "mono8" and image[0].encoding == "mono8"
    assert numpy.from_dlpack(image).tolist() == [[1, 2], [3, 4]]
    assert types.Image is penstock.Image
    assert types.codec_of(penstock.Image).name == "penstock.Image"


def test_a_pickle_and_a_copy_keep_the_encoding() -> None:
    image = Image(numpy.zeros((2, 3), "uint8"), "mono8")
    for other in (pickle.loads(pickle.dumps(image)), copy.deepcopy(image), image.copy()):
        assert type(other) is Image and other.encoding == "mono8" and other.shape == (2, 3)


def test_what_is_computed_to_a_number_is_a_number() -> None:
    image = Image(numpy.arange(6, dtype="uint8").reshape(2, 3), "mono8")
    for number in (image.mean(), image.max(), numpy.mean(image), image.sum(), image[1, 2]):
        assert isinstance(number, numpy.generic) and not isinstance(number, numpy.ndarray)
    assert image.mean() == 2.5
    for array in (image * 2, image.mean(axis=0), image[:1]):
        assert isinstance(array, Image) and array.encoding == "mono8"
