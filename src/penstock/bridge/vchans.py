"""The map of virtual channels: a text file with lines ``FROM = TO``.

``TO`` is another id (messages get that id) or an address (messages go there instead of to the sink). ``#`` begins a
comment. Ids that are not named stay as they are. Any thread may call this.
"""

from __future__ import annotations

from pathlib import Path

from penstock.address import parse
from penstock.errors import InvalidArgument

MAX_ID = 2**31 - 2


def read_map(path: str | Path) -> dict[int, int | str]:
    """Read the map from a file; ``InvalidArgument`` names the line that is wrong."""
    found: dict[int, int | str] = {}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        before, equals, after = (part.strip() for part in text.partition("="))
        try:
            if not equals or not before.isdigit() or int(before) > MAX_ID or int(before) in found:
                raise InvalidArgument("not of the form ID = ID or ID = ADDRESS, or twice")
            found[int(before)] = _target(after)
        except InvalidArgument as error:
            raise InvalidArgument(f"{path}, line {number} ({line.strip()!r}): {error}") from None
    return found


def _target(text: str) -> int | str:
    if text.isdigit() and int(text) <= MAX_ID:
        return int(text)
    return parse(text).text
