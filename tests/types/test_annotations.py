"""What type checkers know of typed handles (``mypy tests/types/test_annotations.py``); it runs too."""

from __future__ import annotations

from typing import Any, assert_type

import numpy

import penstock
from penstock import Image
from penstock.types import TypedPublisher, TypedSubscriber


def test_arrays_and_images() -> None:
    with penstock.publisher("bus:annotated-image", type=Image) as images:
        assert_type(images, TypedPublisher[numpy.ndarray])
        with penstock.subscriber("bus:annotated-image", type=Image) as seen:
            assert_type(seen, TypedSubscriber[Image])
            images.publish(numpy.zeros((2, 3), "uint8"))
            assert seen.receive(30).value.shape == (2, 3)
            with images.reserve((4, 5)) as pixels:
                assert_type(pixels, numpy.ndarray[Any, Any])
                pixels[:] = 1
            assert seen.receive(30).value.sum() == 20


def test_numbers_of_numpy() -> None:
    with penstock.subscriber("bus:annotated-number", type=numpy.float32) as seen:
        assert_type(seen, TypedSubscriber[numpy.ndarray])
        with penstock.publisher("bus:annotated-number", type=numpy.float32) as numbers:
            numbers.publish(numpy.ones(3, "float32"))
        assert seen.receive(30).value.tolist() == [1.0, 1.0, 1.0]
