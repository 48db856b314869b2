"""The schemas of each topic, by version, as state records.

The journal keeps its own under kind 2 with the internal flag; a broker's are in its journal under the broker's kind 8.
Both have the same format: u16 bytes of the topic's name, u32 version, the name, the schema's text
(UTF-8), which ends with the position from which the version counts (``penstock.types.versions.dated``).

One thread at a time may change ``Schemas``; any thread may read it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from penstock._core import journal as native
from penstock.errors import PenstockError
from penstock.journal import layout
from penstock.journal.disk import read_all
from penstock.types import Schema
from penstock.types.versions import dated, joined, undated

KIND = 2  # kind of the journal's own records
BROKER_KIND = 8  # kind of a broker's records
MAX_VERSIONS = 64  # versions per topic; the oldest are dropped first
_HEAD = struct.Struct("<HI")


class Schemas:
    """The versions of each topic."""

    def __init__(self, records: Iterable[bytes] = ()) -> None:
        self._versions: dict[str, dict[int, str]] = {}
        self._since: dict[tuple[str, int], int] = {}  # (topic, version): the first position
        for record in records:
            self.note(record)

    @property
    def topics(self) -> list[str]:
        """The topics that have a schema."""
        return sorted(self._versions)

    def versions(self, topic: str) -> dict[int, str]:
        """The texts by version, the oldest first."""
        return dict(self._versions.get(topic, {}))

    def newest(self, topic: str) -> tuple[int, str]:
        """Version and text; 0 and an empty text if there is none."""
        return next(reversed(self._versions.get(topic, {0: ""}).items()))

    def dated(self, topic: str) -> list[tuple[int, str]]:
        """(the first position, the text) of each version, the oldest first."""
        return [(self._since.get((topic, version), 0), text) for version, text in self.versions(topic).items()]

    def joined(self, topic: str) -> str:
        """All versions as one text (see ``penstock.types.versions``)."""
        return joined(self.dated(topic))

    @property
    def total_bytes(self) -> int:
        """The size of all texts."""
        return sum(len(text) for versions in list(self._versions.values()) for text in versions.values())

    def add(self, topic: str, text: str, since: int) -> bytes:
        """Add a version, of messages from the position ``since`` on; returns its record."""
        record = _record(topic, self.newest(topic)[0] + 1, since, text)
        self.note(record)
        return record

    def remove_newest(self, topic: str) -> None:
        """Undo ``add``: the record could not be stored."""
        versions = self.versions(topic)
        versions.popitem()
        self._put(topic, versions)

    def note(self, record: bytes) -> None:
        """Apply a record; an invalid one is skipped."""
        if len(record) < _HEAD.size:
            return
        size, version = _HEAD.unpack_from(record)
        at = _HEAD.size + size
        topic = bytes(record[_HEAD.size : at]).decode("utf-8", "replace")
        since, text = undated(bytes(record[at:]).decode("utf-8", "replace"))
        versions = {**self.versions(topic), version: text}
        self._since[topic, version] = since
        self._put(topic, {number: versions[number] for number in sorted(versions)[-MAX_VERSIONS:]})

    def _put(self, topic: str, versions: dict[int, str]) -> None:
        """Replaces the topic's mapping instead of changing it, so that threads can read the old one undisturbed."""
        for version in self._versions.get(topic, {}).keys() - versions.keys():
            self._since.pop((topic, version), None)
        if versions:
            self._versions[topic] = versions
        else:
            self._versions.pop(topic, None)

    def records(self) -> Iterator[bytes]:
        """The records of all versions, for a snapshot."""
        for topic, versions in list(self._versions.items()):
            for version, text in versions.items():
                yield _record(topic, version, self._since.get((topic, version), 0), text)


def _record(topic: str, version: int, since: int, text: str) -> bytes:
    name = topic.encode()
    return _HEAD.pack(len(name), version) + name + dated(text, since).encode()


def records_in(states: Iterable[tuple[int, int, bytes]], brokers: bool = False) -> Iterator[bytes]:
    """The records among state records (kind, flags, data)."""
    for kind, flags, data in states:
        internal = bool(flags & layout.FLAG_INTERNAL)
        if (internal and kind == KIND) or (brokers and not internal and kind == BROKER_KIND and _is_one(data)):
            yield data


def _is_one(record: bytes) -> bool:
    """Whether it is a broker's record: other programs may use that kind for anything."""
    schemas = Schemas([record])
    try:
        return bool(schemas.topics) and bool(Schema.parse(schemas.newest(schemas.topics[0])[1]))
    except PenstockError:
        return False


def read_schemas(directory: Path) -> Schemas:
    """Read the schemas from a journal's last segment, whose head repeats those before. Needs no lock."""
    for first, revision in reversed(layout.latest_segments(os.listdir(directory))):
        path = directory / layout.segment_name(first, revision)
        try:
            data = read_all(path)
            header = layout.decode_segment_header(data[: layout.SEGMENT_HEADER_BYTES], str(path))
            scan = native.scan(data, header.nonce, header.first, 2**63, header.first, header.gaps)
        except (FileNotFoundError, PenstockError):  # just removed, or damaged: the one before it has the same or less
            continue
        return Schemas(records_in(scan["states"], brokers=True))
    return Schemas()
