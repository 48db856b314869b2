"""Makes Arrow arrays of many byte ranges of one buffer, without a Python loop. Needs numpy and pyarrow; any thread.

The buffer is treated as one binary array in which wanted and unwanted ranges alternate; one ``take`` in C++ gathers
every second value. The caller has checked that the ranges ascend and lie inside the buffer.
"""

from __future__ import annotations

from typing import Any

import numpy
import pyarrow
import pyarrow.compute
from numpy.typing import NDArray

Array = NDArray[Any]


def stretches(data: Array, begins: Array, sizes: Array) -> Any:
    """The bytes at ``begins`` (ascending), ``sizes`` each, as a binary array."""
    count = len(begins)
    if count == 0 or not sizes.any():
        zeros = pyarrow.py_buffer(numpy.zeros(count + 1, numpy.int32))
        return pyarrow.Array.from_buffers(pyarrow.binary(), count, [None, zeros, pyarrow.py_buffer(b"")])
    if not sizes.all():  # an empty range must still have an offset between its neighbours
        reached = numpy.maximum.accumulate(numpy.where(sizes > 0, begins + sizes, begins[0]))
        begins = numpy.where(sizes > 0, begins, reached)
    first, last = int(begins[0]), int(begins[-1] + sizes[-1])
    kind, number = (pyarrow.binary(), numpy.int32) if last - first < 2**31 else (pyarrow.large_binary(), numpy.int64)
    edges = numpy.empty(2 * count, number)
    edges[0::2] = begins - first
    edges[1::2] = begins - first + sizes
    values = pyarrow.py_buffer(data[first:last])
    whole = pyarrow.Array.from_buffers(kind, 2 * count - 1, [None, pyarrow.py_buffer(edges), values])
    taken = whole.take(pyarrow.array(numpy.arange(0, 2 * count, 2, dtype=numpy.int32)))
    return taken.cast(pyarrow.binary()) if number is numpy.int64 else taken


def texts(data: Array, begins: Array, sizes: Array) -> Any:
    """The same as text: null where there is none; bytes that are no UTF-8 are replaced, as ``Journal.details`` does."""
    if not sizes.any():
        return pyarrow.nulls(len(sizes), pyarrow.string())
    values = stretches(data, begins, sizes)
    try:
        text = values.cast(pyarrow.string())  # looks at every byte
    except pyarrow.ArrowInvalid:
        replaced = [value.decode(errors="replace") for value in values.to_pylist()]  # the writer stored invalid UTF-8
        text = pyarrow.array(replaced, pyarrow.string())
    return pyarrow.compute.if_else(pyarrow.array(sizes > 0), text, pyarrow.scalar(None, pyarrow.string()))
