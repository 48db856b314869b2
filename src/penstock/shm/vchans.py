"""A file that maps virtual channel ids to names, the same on every machine: ``ID NAME`` a line, ``#`` comments.

A bridge carries the vchan_id alone; with the same file on both sides it means the same channel.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from penstock._core.shm import MAX_VCHAN_ID
from penstock.errors import InvalidArgument

MAX_DIGITS = 20  # more are no id; Python refuses to read thousands of them


def read_vchans(path: str | os.PathLike[str]) -> dict[int, str]:
    """The mapping in the file; ``InvalidArgument`` names the line that is wrong."""
    found: dict[int, str] = {}
    names: set[str] = set()
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise InvalidArgument(f"{path} is not UTF-8") from None
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        identity, _, name = text.partition(" ")
        name = name.strip()
        value = int(identity) if identity.isdecimal() and len(identity) <= MAX_DIGITS else MAX_VCHAN_ID
        if value >= MAX_VCHAN_ID or not name.startswith("/"):
            told = f"is not an id below {MAX_VCHAN_ID} and a channel's name"
            raise InvalidArgument(f"{path}:{number}: {text[:80]!r} {told}")
        if value in found or name in names:
            raise InvalidArgument(f"{path}:{number}: {text[:80]!r} gives an id or a name a second time")
        found[value] = name
        names.add(name)
    return found


def write_vchans(path: str | os.PathLike[str], vchans: Mapping[int, str]) -> None:
    """Write the mapping, by id; what ``read_vchans`` would refuse is refused here, and nothing is written."""
    if len(set(vchans.values())) < len(vchans):
        raise InvalidArgument(f"{path}: a name is given to two ids")
    for identity, name in vchans.items():
        known = isinstance(identity, int) and isinstance(name, str) and 0 <= identity < MAX_VCHAN_ID
        if not known or not name.startswith("/") or name != name.strip() or "#" in name or len(name.splitlines()) > 1:
            told = f"is not an id below {MAX_VCHAN_ID} and a channel's name"
            raise InvalidArgument(f"{path}: {identity!r}: {name!r} {told}")
    lines = [f"{identity} {name}" for identity, name in sorted(vchans.items())]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
