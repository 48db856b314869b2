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
from penstock.types.fields import Reader, Rows, check_items, fitted, reader_of
from penstock.types.schema import Schema
from penstock.types.shape import Shape, dtype_of, holds_rows, shape_of, union

__all__ = ["SEEN", "Versions", "dated", "distinct", "joined", "parse_versions", "undated"]

Place = tuple[int, int]  # (part of a recording, position in it); a journal alone is part 0
SEEN: Place = (0, 0)  # the place of every version that was seen live: the version of a message is not known
_SINCE = re.compile(r',"since":(\d{1,19})\}$')


def dated(text: str, since: int) -> str:
    """A schema's text with the position of the first message that may have it; 0 (from the start) is not written."""
    return f'{text[:-1]},"since":{since}}}' if since and text.endswith("}") else text


def undated(line: str) -> tuple[int, str]:
    """The position and the text of what ``dated`` gave."""
    found = _SINCE.search(line)
    return (0, line) if found is None else (int(found[1]), f"{line[: found.start()]}}}")


def joined(versions: Iterable[tuple[int, str]]) -> str:
    """One text for all pairs (position, text of a schema), the oldest first."""
    return "\n".join(dated(text, since) for since, text in versions)


def parse_versions(text: str, part: int = 0) -> Iterator[tuple[Place, Schema]]:
    """Parse the text of ``joined``, which another program may have written; damaged versions are left out."""
    for line in text.split("\n"):
        since, one = undated(line)
        with contextlib.suppress(PenstockError):
            yield (part, since), Schema.parse(one)


def distinct(versions: Iterable[tuple[Place, Schema]]) -> Iterator[tuple[Place, Schema]]:
    """The versions without repetitions: each part of a recording repeats the current version at its head."""
    before: Schema | None = None
    for since, schema in versions:
        if schema != before:
            yield since, schema
        before = schema


class _Version:
    """One version. A value that is no record becomes a record with one field, ``value``."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._read: Reader = reader_of(schema)
        self._item_bytes = dtype_of(schema.definition["dtype"]).itemsize if schema.encoding == "numpy" else 0
        self.shape = shape_of(schema)
        self.wraps = self.shape.kind != "struct"
        self.record = Shape("struct", None, (("value", self.shape),)) if self.wraps else self.shape
        self.holds_rows = holds_rows(schema)
        self.takes_null = _takes_null(schema)

    def read(self, message: Any) -> Any:
        """The value; ``ValueError`` where the message is not of this version."""
        value = self._read(message)
        if self.schema.language == "jsonschema":
            check_json(value, self.schema.definition["jsonschema"])
        return value

    def check(self, value: Any) -> None:
        """``ValueError`` where a column could not hold the value."""
        if value is None and self.takes_null:
            return
        for row in value if self.holds_rows and isinstance(value, Rows) else [value]:
            if fitted(row, self.shape) is None:
                raise ValueError("its type does not allow null")

    def is_of(self, message: Any) -> None:
        """``ValueError`` where the message is not of this version; cheaper than its value."""
        if self._item_bytes:
            check_items(message, self._item_bytes)
        else:
            self.check(self.read(message))


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
        # includes those that cannot be decoded here, with the reason
        self._line: list[tuple[Place, _Version | Exception]] = []
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
        """Decode the message; ``ValueError`` if it matches no version of the schema or if its value fits no column."""
        version, value = self._read(message, place)
        if len(self._versions) == 1:  # with several versions, the choice has checked it already
            version.check(value)
        return value

    def schema(self, message: Any, place: Place) -> Schema | None:
        """The schema of the message's version; ``ValueError`` if it matches none, None if that cannot be known here."""
        first = self._version_at(place)
        if isinstance(first, Exception):
            return None
        failure: ValueError | None = None
        for version in self._in_turn(first):
            try:
                version.is_of(message)
            except ValueError as error:
                failure = failure or error
                continue
            return version.schema
        assert failure is not None
        raise failure

    def rows(self, message: Any, place: Place | None = None, record: Shape | None = None) -> list[dict[str, Any]]:
        """Its rows as columns of ``record`` (its own, or one of other widths) take them, a null as a row of nulls;
        ``ValueError`` where the message is of no version."""
        version, value = self._read(message, place)
        if value is None and not version.takes_null:
            raise ValueError("its type does not allow null")
        found = value if version.holds_rows and isinstance(value, Rows) else [value]
        rows = ({"value": row} if version.wraps else row or {} for row in found)
        return [fitted(row, record or self.record) for row in rows]

    def _read(self, message: Any, place: Place | None) -> tuple[_Version, Any]:
        first = self._version_at(place)
        if isinstance(first, Exception):
            raise ValueError(f"it is of a type that is not read here: {first}")
        if len(self._versions) == 1:
            return first, first.read(message)
        # A publisher may still use a type that another publisher has replaced: then an older version matches.
        failure: ValueError | None = None
        for version in self._in_turn(first):
            try:
                value = version.read(message)
                version.check(value)
            except ValueError as error:
                failure = failure or error
                continue
            return version, value
        assert failure is not None
        raise failure

    def _in_turn(self, first: _Version) -> Iterator[_Version]:
        yield first
        yield from (one for one in reversed(self._versions) if one is not first)

    def _version_at(self, place: Place | None) -> _Version | Exception:
        if place is None:
            return self._versions[-1]
        return next((one for since, one in reversed(self._line) if since <= place), self._line[0][1])
