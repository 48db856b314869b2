"""Converts the viewer's protobuf messages back into an ``Image``, without the viewer's package.

``foxglove.RawImage`` and ``foxglove.PointCloud`` have the elements in one field. The description that makes a message
of them (``penstock.types.image``) is added in a field whose number is unknown to viewers, which skip it.
"""

from __future__ import annotations

from penstock.types.image import Image, decode, describe

__all__ = ["description_field", "original"]

DATA_FIELD = 6  # the number of the field ``data`` in both protobuf messages
DESCRIPTION_FIELD = 7001  # our own field, unknown to viewers


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*made, number])


def description_field(image: Image) -> bytes:
    """The field that is added to the protobuf message."""
    data = describe(image)
    return _varint(DESCRIPTION_FIELD << 3 | 2) + _varint(len(data)) + data


def original(body: bytes) -> bytes:
    """The image that ``penstock.foxglove.pictures`` has converted to ``body``; ``ValueError`` if ``body`` was not made
    there.
    """
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
    decode(found)  # checks that the description fits the data
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
