"""Image: frames and clouds as numpy arrays that say what they are.

A message is the elements, row by row, then 64 bytes that describe them (docs/formats.md): so the elements begin where
the reach's memory does, and the array that ``reserve`` gives is the draft's own. Reading gives a view of the message,
``publisher.reserve(shape, dtype, encoding)`` an array in the reach's own memory. Importing this loads numpy.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from penstock.errors import InvalidArgument
from penstock.types.codec import ArrayDraft, Codec

if TYPE_CHECKING:
    from penstock._core import Draft

TRAILER = struct.Struct("<4sHH8s4I16s16x")
MAGIC, VERSION = b"PIMG", 1
MAX_DIMENSIONS = 4


class Image(numpy.ndarray[Any, Any]):
    """An array with the name of its encoding: ``rgb8``, ``bgr8``, ``mono8``, ``depth16``, ``xyz32``, or your own.

    ``Image(array, "rgb8")`` is a view of ``array``. It is an array in all else: DLPack, slices,
    sums; arrays that are computed from it keep the name, and so do copies and pickles.
    """

    encoding: str

    def __new__(cls, array: Any, encoding: str = "") -> Image:
        found = numpy.asarray(array).view(cls)
        found.encoding = encoding
        return found

    def __array_finalize__(self, other: Any) -> None:
        self.encoding = getattr(other, "encoding", "")

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        if array.ndim == 0:
            return array[()]  # a mean is a number, as numpy's own arrays give it
        return super().__array_wrap__(array, context, return_scalar)

    def __reduce__(self) -> Any:
        reduced: Any = super().__reduce__()
        make, arguments, state = reduced
        return make, arguments, (state, self.encoding)

    def __setstate__(self, state: Any) -> None:
        own, self.encoding = state
        super().__setstate__(own)


def _trailer(shape: Sequence[int], dtype: Any, encoding: str) -> bytes:
    if not isinstance(encoding, str):
        raise InvalidArgument(f"encoding={encoding!r} is no text")
    if dtype.names is not None:
        raise InvalidArgument(f"an image has numbers, not records: these are published with type={dtype}")
    kind = dtype.str.encode()
    name = encoding.encode()
    if not 1 <= len(shape) <= MAX_DIMENSIONS or dtype.kind not in "biufc" or len(kind) > 8:
        raise InvalidArgument(f"an image has 1 to {MAX_DIMENSIONS} dimensions of numbers, not {len(shape)} of {dtype}")
    if len(name) > 16 or b"\0" in name:
        raise InvalidArgument(f"encoding={encoding!r} has more than 16 bytes")
    if any(not 0 <= size < 1 << 32 for size in shape):
        raise InvalidArgument(f"shape={tuple(shape)} is out of bounds")
    return TRAILER.pack(MAGIC, VERSION, len(shape), kind, *shape, *[0] * (MAX_DIMENSIONS - len(shape)), name)


def describe(image: Image) -> bytes:
    """The description that follows the elements in its message."""
    return _trailer(image.shape, image.dtype, image.encoding)


def encode(value: Any) -> bytes:
    """A copy of the elements, followed by their description. Any array of numbers is an image without a name."""
    if not isinstance(value, numpy.ndarray):
        raise TypeError(f"expected an Image or an array, not {type(value).__name__}")
    encoding = value.encoding if isinstance(value, Image) else ""
    return value.tobytes() + _trailer(value.shape, value.dtype, encoding)


def decode(message: Any) -> Image:
    """A view of the message."""
    size = len(message)
    if size < TRAILER.size:
        raise ValueError(f"{size} bytes are less than what describes an image")
    magic, version, dimensions, kind, *sizes, name = TRAILER.unpack_from(message, size - TRAILER.size)
    if magic != MAGIC or version != VERSION or not 1 <= dimensions <= MAX_DIMENSIONS:
        raise ValueError("its end does not describe an image")
    try:
        dtype = numpy.dtype(kind.rstrip(b"\0").decode("ascii"))
    except (TypeError, SyntaxError):  # what numpy raises depends on the text
        raise ValueError(f"the items of an image must be numbers, not {kind!r}") from None
    if dtype.kind not in "biufc":
        raise ValueError(f"the items of an image must be numbers, not {dtype}")
    shape = sizes[:dimensions]
    count = math.prod(shape)
    if count * dtype.itemsize != size - TRAILER.size:
        raise ValueError(f"shape {tuple(shape)} of {dtype} does not fill its {size - TRAILER.size} bytes")
    flat = numpy.frombuffer(message, dtype, count) if count else numpy.empty(0, dtype)
    return Image(flat.reshape(shape), name.rstrip(b"\0").decode("utf-8", "replace"))


def reserve(
    take: Callable[..., Draft], shape: Sequence[int], dtype: Any = "uint8", encoding: str = "", **options: Any
) -> ArrayDraft:
    """An image of that shape in memory that ``take`` gives."""
    try:
        shape = tuple(map(operator.index, shape))
        kind = numpy.dtype(dtype)
    except TypeError as error:
        raise InvalidArgument(f"shape={shape!r}, dtype={dtype!r} are no image: {error}") from None
    trailer = _trailer(shape, kind, encoding)
    size = math.prod(shape) * kind.itemsize
    draft = take(size + TRAILER.size, **options)
    draft.write(trailer, size)
    return ArrayDraft(draft, draft.array(shape, kind))


CODEC: Codec[Image] = Codec("penstock.Image", "image", {"text": "penstock image 1"}, encode, decode, draft=reserve)
