"""An ``Image`` as the viewer knows it: ``foxglove.RawImage``, or ``foxglove.PointCloud`` where it is named as a cloud.

What is made of it is protobuf. Its last field has a number that the viewer passes over, and holds what describes the
image here: so ``original`` gives the very message back.
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

from penstock.types.image import Image, decode, describe

__all__ = ["Kind", "kind_of", "original", "picture_of"]

SECOND_NS = 1_000_000_000
#: By the channels and type of an image that has no name of an encoding.
UNNAMED = {
    (1, "|u1"): "mono8", (3, "|u1"): "rgb8", (4, "|u1"): "rgba8", (1, "<u2"): "16UC1", (1, "<f4"): "32FC1",
}  # fmt: skip
#: The names that mean something to the viewer under another name.
RENAMED = {"depth16": "16UC1", "depth32": "32FC1"}
#: What the names of clouds stand for, before the number of bits: xyz32, xyzi32, xyzrgb32 ...
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
DATA_FIELD = 6  # of both protobuf messages
DESCRIPTION_FIELD = 7001  # of our own


class Kind(enum.Enum):
    """What the viewer takes it for."""

    PICTURE = RawImage
    CLOUD = PointCloud

    @property
    def schema(self) -> foxglove.Schema:
        """Its name and descriptors."""
        return self.value.get_schema()


def kind_of(message: Any) -> Kind | None:
    """What a message is; None where it is no image at all."""
    try:
        return _kind(decode(message))
    except ValueError:
        return None


def _kind(image: Image) -> Kind:
    """By the name of its encoding."""
    return Kind.CLOUD if _fields(image.encoding) else Kind.PICTURE


def picture_of(message: Any, kind: Kind | None = None) -> tuple[Kind, bytes]:
    """What it is, and the viewer's form of it; ``ValueError`` where it is no image, or not of that kind."""
    image: Any = decode(message)
    if image.dtype.byteorder == ">":
        image = image.astype(image.dtype.newbyteorder("<"))
    found = _kind(image)
    if kind is not None and found is not kind:
        raise ValueError(f"{image.encoding or 'this'} is no {kind.name.lower()}, as the first of its topic was")
    at = Timestamp(*divmod(message.timestamp_ns, SECOND_NS))
    made = _raw_image(image, at) if found is Kind.PICTURE else _point_cloud(image, at)
    return found, made + _field(DESCRIPTION_FIELD, describe(image))


def _raw_image(image: Any, at: Timestamp) -> bytes:
    if not 2 <= image.ndim <= 3:
        raise ValueError(f"an image of {image.ndim} dimensions is no picture")
    height, width = image.shape[:2]
    channels = image.shape[2] if image.ndim == 3 else 1
    encoding = RENAMED.get(image.encoding, image.encoding) or UNNAMED.get((channels, image.dtype.str), "")
    if not encoding:
        raise ValueError(f"an image of {channels} channels of {image.dtype} has no name of its encoding")
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


# --- the way back


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*made, number])


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def original(body: bytes) -> bytes:
    """The message that ``picture_of`` made this of; ``ValueError`` where it was not made there."""
    parts: dict[int, memoryview] = {}
    view = memoryview(body)
    place = 0
    while place < len(view):
        tag, place = _read_varint(view, place)
        if tag & 7 == 2:
            size, place = _read_varint(view, place)
            parts[tag >> 3] = view[place : place + size]
            place += size
        elif tag & 7 == 0:
            _, place = _read_varint(view, place)
        elif tag & 7 in (1, 5):
            place += 8 if tag & 7 == 1 else 4
        else:
            raise ValueError("this is no picture")
    found = bytes(parts.get(DATA_FIELD, b"")) + bytes(parts.get(DESCRIPTION_FIELD, b""))
    decode(found)  # the description fits the data
    return found


def _read_varint(view: memoryview, place: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        if place >= len(view) or shift > 63:
            raise ValueError("this is no picture")
        byte = view[place]
        number |= (byte & 0x7F) << shift
        shift, place = shift + 7, place + 1
        if byte < 0x80:
            return number, place
