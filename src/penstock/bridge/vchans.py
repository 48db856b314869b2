"""The map of virtual channels: a text file with lines ``FROM = TO``.

``TO`` is another id (messages get that id) or an address (messages go there instead of to the sink). ``#`` begins a
comment. Ids that are not named stay as they are. Any thread may call this.
"""

from __future__ import annotations

import os
from pathlib import Path

from penstock.address import parse
from penstock.errors import InvalidArgument

MAX_ID = 2**31 - 2
MAX_DIGITS = 20


def read_map(path: str | os.PathLike[str]) -> dict[int, int | str]:
    """Read the map from a file; ``InvalidArgument`` names the line that is wrong."""
    found: dict[int, int | str] = {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise InvalidArgument(f"{path} is not UTF-8") from None
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        before, equals, after = (part.strip() for part in text.partition("="))
        try:
            identity = _identity(before)
            if not equals or identity is None or identity in found:
                raise InvalidArgument("not of the form ID = ID or ID = ADDRESS, or twice")
            found[identity] = _target(after)
        except InvalidArgument as error:
            raise InvalidArgument(f"{path}, line {number} ({line.strip()!r}): {error}") from None
    return found


def _identity(text: str) -> int | None:
    """The id, or None: Python refuses to read thousands of digits, and reads no superscripts."""
    identity = int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else MAX_ID + 1
    return identity if identity <= MAX_ID else None


def _target(text: str) -> int | str:
    identity = _identity(text)
    return parse(text).text if identity is None else identity
