"""The checksum of a journal's blocks, by the fastest implementation that is installed.

A block's sum is CRC-32 as zlib computes it, so that a Python with nothing but the standard library can check it. Where
Penstock's compiled core is installed it computes the same number several times faster; an executor that has
the plain files of the package only falls back on zlib. Any thread; the GIL is released meanwhile.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

Checksum = Callable[[Any], int]


def fastest() -> Checksum:
    """``crc32(data)`` of the compiled core if it is installed, otherwise zlib's."""
    try:
        from penstock._core import journal
    except ImportError:
        return zlib.crc32
    return journal.crc32


def fastest_crc32c() -> Callable[..., int]:
    """``crc32c(data, value=0)`` likewise; records and index entries carry this checksum."""
    try:
        from penstock._core import journal
    except ImportError:
        from penstock.journal.layout import crc32c as plain

        return plain
    return journal.crc32c


crc32: Checksum = fastest()
crc32c: Callable[..., int] = fastest_crc32c()
