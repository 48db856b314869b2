"""The broker's state records: their kinds, and names in front of what they are about. Pure functions."""

from __future__ import annotations

import struct
from collections.abc import Mapping

KIND_QUEUE, KIND_CHANGE, KIND_DELETE, KIND_PRODUCER, KIND_TRANSACTION, KIND_DELAYED = range(1, 7)


def named(name: str, rest: bytes) -> bytes:
    """A name and what follows it."""
    encoded = name.encode()
    return struct.pack("<H", len(encoded)) + encoded + rest


def unnamed(data: bytes) -> tuple[str, bytes]:
    """The inverse of ``named``."""
    size = struct.unpack_from("<H", data)[0]
    return data[2 : 2 + size].decode(), data[2 + size :]


def encode_properties(properties: Mapping[str, str]) -> bytes:
    """``key NUL value NUL ...``; the broker's own have ``$`` in front and stand after those of users."""
    return b"".join(f"{key}\0{value}\0".encode(errors="surrogateescape") for key, value in properties.items())
