"""All versions of one topic's schema as one type: its columns are those of every version, and each message is read by
the version that it was written with.

Where versions travel together they are one text: a line a version, the oldest first, each the schema's text with the
position of the first message that may have it (``"since"``).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from penstock.errors import PenstockError, ProtocolError
from penstock.types.conformity import check_json
from penstock.types.fields import Reader, Rows, fitted, reader_of
from penstock.types.schema import Schema
from penstock.types.shape import Shape, holds_rows, shape_of, union

__all__ = ["Versions", "dated", "distinct", "joined", "parse_versions", "undated"]

Place = tuple[int, int]  # (part of a recording, position in it); a journal alone is part 0
_SINCE = re.compile(r',"since":(\d{1,19})\}$')


def dated(text: str, since: int) -> str:
    """A schema's text with the position from which it counts; 0 is from the start, and not written."""
    return f'{text[:-1]},"since":{since}}}' if since and text.endswith("}") else text


def undated(line: str) -> tuple[int, str]:
    """The position and the text of what ``dated`` gave."""
    found = _SINCE.search(line)
    return (0, line) if found is None else (int(found[1]), f"{line[: found.start()]}}}")


def joined(versions: Iterable[tuple[int, str]]) -> str:
    """The one text of (position, text of a schema), the oldest first."""
    return "\n".join(dated(text, since) for since, text in versions)


def parse_versions(text: str, part: int = 0) -> Iterator[tuple[Place, Schema]]:
    """The versions of the one text, which somebody else may have written; damaged ones are left out."""
    for line in text.split("\n"):
        since, one = undated(line)
        with contextlib.suppress(PenstockError):
            yield (part, since), Schema.parse(one)


def distinct(versions: Iterable[tuple[Place, Schema]]) -> Iterator[tuple[Place, Schema]]:
    """Without those that repeat the one before them, as each part of a recording does at its head."""
    before: Schema | None = None
    for since, schema in versions:
        if schema != before:
            yield since, schema
        before = schema


class _Version:
    """One of them. A value that is no record is the record of one field, ``value``."""

    def __init__(self, schema: Schema) -> None:
        self.read: Reader = reader_of(schema)
        self.shape = shape_of(schema)
        self.wraps = self.shape.kind != "struct"
        self.record = Shape("struct", None, (("value", self.shape),)) if self.wraps else self.shape
        self.holds_rows = holds_rows(schema)
        self.takes_null = _takes_null(schema)

    def fits(self, value: Any) -> bool:
        if value is None:
            return self.takes_null
        rows = value if self.holds_rows and isinstance(value, Rows) else [value]
        try:
            return all(fitted(row, self.shape) is not None for row in rows)
        except ValueError:
            return False


def _takes_null(schema: Schema) -> bool:
    if schema.language != "jsonschema":
        return False
    try:
        check_json(None, schema.definition["jsonschema"])
    except ValueError:
        return False
    return True


class Versions:
    """The versions that can be read here. ``ProtocolError`` where there is none, or the package of one is missing."""

    def __init__(self, versions: Iterable[tuple[Place, Schema]]) -> None:
        self._versions: list[_Version] = []
        self._line: list[tuple[Place, _Version | Exception]] = []  # those too that cannot be read here, with the reason
        for since, schema in distinct(versions):
            try:
                self._versions.append(_Version(schema))
                self._line.append((since, self._versions[-1]))
            except (PenstockError, ModuleNotFoundError) as error:
                self._line.append((since, error))
        if not self._versions:
            failure = self._line[-1][1] if self._line else None
            raise failure if isinstance(failure, Exception) else ProtocolError("there is no version of this schema")
        newest_first = self._versions[::-1]
        #: one row: a record with the fields of every version; what differs between them is ``any``
        self.record = union([one.record for one in newest_first])
        #: whether a value is that record; else no version is one, and its only field is ``value``
        self.is_record = not all(one.wraps for one in newest_first)
        self.holds_rows = any(one.holds_rows for one in newest_first)
        self.takes_null = any(one.takes_null for one in newest_first)

    def read(self, message: Any, place: Place | None = None) -> Any:
        """The whole value; ``ValueError`` where the message is of no version."""
        return self._read(message, place)[1]

    def rows(self, message: Any, place: Place | None = None, record: Shape | None = None) -> list[dict[str, Any]]:
        """Its rows as columns of ``record`` (its own, or one of other widths) take them, a null as a row of nulls;
        ``ValueError`` where the message is of no version."""
        version, value = self._read(message, place)
        if value is None and not version.takes_null:
            raise ValueError("null is no value of its type")
        found = value if version.holds_rows and isinstance(value, Rows) else [value]
        rows = ({"value": row} if version.wraps else row or {} for row in found)
        return [fitted(row, record or self.record) for row in rows]

    def _read(self, message: Any, place: Place | None) -> tuple[_Version, Any]:
        first = self._at(place)
        if isinstance(first, Exception):
            raise ValueError(f"it is of a type that is not read here: {first}")
        if len(self._versions) == 1:
            return first, first.read(message)
        # A publisher may go on with a type that another has replaced: then another version reads it.
        failure: ValueError | None = None
        for version in (first, *(one for one in reversed(self._versions) if one is not first)):
            try:
                value = version.read(message)
            except ValueError as error:
                failure = failure or error
                continue
            if version.fits(value):
                return version, value
        raise failure or ValueError(f"it fits none of the {len(self._versions)} versions of its type")

    def _at(self, place: Place | None) -> _Version | Exception:
        if place is None:
            return self._versions[-1]
        return next((one for since, one in reversed(self._line) if since <= place), self._line[0][1])
