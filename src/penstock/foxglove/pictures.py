"""Converts an ``Image`` into the viewer's ``foxglove.RawImage``, or ``foxglove.PointCloud`` if its encoding is that of
a cloud. The result is protobuf, with the image's own description in a field that viewers skip
(``penstock.foxglove.original``), so that it can be converted back exactly.
"""

from __future__ import annotations

import enum
from typing import Any

import foxglove
from foxglove.messages import (
    PackedElementField,
    PackedElementFieldNumericType,
    PointCloud,
    Pose,
    Quaternion,
    RawImage,
    Timestamp,
    Vector3,
)

from penstock.foxglove.original import description_field
from penstock.types.image import Image, decode

__all__ = ["Kind", "kind_of", "picture_of"]

SECOND_NS = 1_000_000_000
#: The encoding of an image without a name, by its channels and type.
UNNAMED = {
    (1, "|u1"): "mono8", (3, "|u1"): "rgb8", (4, "|u1"): "rgba8", (1, "<u2"): "16UC1", (1, "<f4"): "32FC1",
}  # fmt: skip
#: Channels and type of the encodings that viewers know.
KNOWN = {
    "mono8": (1, "|u1"), "8UC1": (1, "|u1"), "rgb8": (3, "|u1"), "bgr8": (3, "|u1"), "8UC3": (3, "|u1"),
    "rgba8": (4, "|u1"), "bgra8": (4, "|u1"), "mono16": (1, "<u2"), "16UC1": (1, "<u2"), "32FC1": (1, "<f4"),
    "yuv422": (2, "|u1"), "yuv422_yuy2": (2, "|u1"), "uyvy": (2, "|u1"), "yuyv": (2, "|u1"),
    "bayer_rggb8": (1, "|u1"), "bayer_bggr8": (1, "|u1"), "bayer_gbrg8": (1, "|u1"), "bayer_grbg8": (1, "|u1"),
}  # fmt: skip
#: Our names of encodings that have another name in the viewer.
RENAMED = {"depth16": "16UC1", "depth32": "32FC1"}
#: The fields of a cloud by its name without the number of bits: xyz32, xyzi32, xyzrgb32 ...
CLOUDS = {
    "xyz": ("x", "y", "z"),
    "xyzi": ("x", "y", "z", "intensity"),
    "xyzrgb": ("x", "y", "z", "red", "green", "blue"),
    "xyzrgba": ("x", "y", "z", "red", "green", "blue", "alpha"),
}
NUMBERS = {
    "|u1": "Uint8", "|i1": "Int8", "<u2": "Uint16", "<i2": "Int16", "<u4": "Uint32", "<i4": "Int32", "<f4": "Float32",
    "<f8": "Float64",
}  # fmt: skip


class Kind(enum.Enum):
    """The viewer's type for an image."""

    PICTURE = RawImage
    CLOUD = PointCloud

    @property
    def schema(self) -> foxglove.Schema:
        """Its name and descriptors."""
        return self.value.get_schema()


def kind_of(message: Any) -> Kind | None:
    """The viewer's type for a message; None if it is not an image."""
    try:
        return _kind(decode(message))
    except ValueError:
        return None


def _kind(image: Image) -> Kind:
    """By the name of its encoding."""
    return Kind.CLOUD if _fields(image.encoding) else Kind.PICTURE


def picture_of(message: Any, kind: Kind | None = None) -> tuple[Kind, bytes]:
    """The viewer's type and the converted message; ``ValueError`` if it is no image, or not of that kind."""
    image: Any = decode(message)
    if image.dtype.byteorder == ">":
        image = image.astype(image.dtype.newbyteorder("<"))
    found = _kind(image)
    if kind is not None and found is not kind:
        raise ValueError(f"{image.encoding or 'this'} is no {kind.name.lower()}, as the first of its topic was")
    at = Timestamp(*divmod(message.timestamp_ns, SECOND_NS))
    made = _raw_image(image, at) if found is Kind.PICTURE else _point_cloud(image, at)
    return found, made + description_field(image)


def _raw_image(image: Any, at: Timestamp) -> bytes:
    if not 2 <= image.ndim <= 3:
        raise ValueError(f"an image of {image.ndim} dimensions is no picture")
    height, width = image.shape[:2]
    channels = image.shape[2] if image.ndim == 3 else 1
    encoding = RENAMED.get(image.encoding, image.encoding) or UNNAMED.get((channels, image.dtype.str), "")
    if not encoding:
        raise ValueError(f"an image of {channels} channels of {image.dtype} has no name of its encoding")
    wanted = KNOWN.get(encoding)
    if wanted is not None and wanted != (channels, image.dtype.str):
        raise ValueError(f"{encoding} has {wanted[0]} channels of {wanted[1]}, not {channels} of {image.dtype.str}")
    made: bytes = RawImage(
        timestamp=at, frame_id="", width=width, height=height, encoding=encoding,
        step=width * channels * image.dtype.itemsize, data=image.tobytes(),
    ).encode()  # fmt: skip
    return made


def _point_cloud(image: Any, at: Timestamp) -> bytes:
    names = _fields(image.encoding)
    number = NUMBERS.get(image.dtype.str)
    if number is None or image.shape[-1] != len(names):
        shown = f"{image.shape} of {image.dtype}"
        raise ValueError(f"a cloud of {image.encoding} has {len(names)} numbers for each point, not {shown}")
    size = image.dtype.itemsize
    kind = getattr(PackedElementFieldNumericType, number)
    fields = [PackedElementField(name=name, offset=size * place, type=kind) for place, name in enumerate(names)]
    here = Pose(position=Vector3(x=0, y=0, z=0), orientation=Quaternion(x=0, y=0, z=0, w=1))
    made: bytes = PointCloud(
        timestamp=at, frame_id="", pose=here, point_stride=size * len(names), fields=fields, data=image.tobytes()
    ).encode()
    return made


def _fields(encoding: str) -> tuple[str, ...]:
    return CLOUDS.get(encoding.rstrip("0123456789"), ())
