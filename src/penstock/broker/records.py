"""The broker's state records: their kinds, and how the name of what they are about precedes their data. Pure
functions."""

from __future__ import annotations

import struct

KIND_QUEUE, KIND_CHANGE, KIND_DELETE, KIND_PRODUCER, KIND_TRANSACTION, KIND_DELAYED, KIND_ACCOUNT = range(1, 8)
KIND_SCHEMA = 8  # known to penstock.journal.schemas too
KINDS = range(1, 9)  # a journal may hold records of others too


def named(name: str, rest: bytes) -> bytes:
    """A name, followed by data."""
    encoded = name.encode()
    return struct.pack("<H", len(encoded)) + encoded + rest


def unnamed(data: bytes) -> tuple[str, bytes]:
    """The inverse of ``named``."""
    size = struct.unpack_from("<H", data)[0]
    return data[2 : 2 + size].decode(), data[2 + size :]
