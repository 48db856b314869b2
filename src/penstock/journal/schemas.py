"""What the messages of each topic are made of, version by version, as state records.

The journal keeps its own under kind 2 with the internal flag; a broker's stand in its journal under the broker's kind
8. Both have one form: u16 bytes of the topic's name, u32 version, the name, the schema's text (UTF-8), which says from
which position on the version counts (``penstock.types.versions.dated``).

``Schemas`` is changed by one thread at a time; looked at by any.
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

KIND = 2  # of the journal's own state records
BROKER_KIND = 8  # of a broker's
MAX_VERSIONS = 64  # of a topic; the oldest are forgotten first
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
        """Those whose messages are described."""
        return sorted(self._versions)

    def versions(self, topic: str) -> dict[int, str]:
        """The texts by version, the oldest first."""
        return dict(self._versions.get(topic, {}))

    def newest(self, topic: str) -> tuple[int, str]:
        """Version and text; 0 and nothing where none was said."""
        return next(reversed(self._versions.get(topic, {0: ""}).items()))

    def dated(self, topic: str) -> list[tuple[int, str]]:
        """(the first position, the text) of each version, the oldest first."""
        return [(self._since.get((topic, version), 0), text) for version, text in self.versions(topic).items()]

    def joined(self, topic: str) -> str:
        """All versions as one text (see ``penstock.types.versions``)."""
        return joined(self.dated(topic))

    @property
    def total_bytes(self) -> int:
        """Of all texts."""
        return sum(len(text) for versions in list(self._versions.values()) for text in versions.values())

    def add(self, topic: str, text: str, since: int) -> bytes:
        """One more version, of messages from the position ``since`` on; gives its record."""
        record = _record(topic, self.newest(topic)[0] + 1, since, text)
        self.note(record)
        return record

    def remove_newest(self, topic: str) -> None:
        """It could not be stored."""
        versions = self.versions(topic)
        versions.popitem()
        self._put(topic, versions)

    def note(self, record: bytes) -> None:
        """What a record says; one that cannot be is passed over."""
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
        """A new mapping of the topic each time: who looks at the old one is not disturbed."""
        for version in self._versions.get(topic, {}).keys() - versions.keys():
            self._since.pop((topic, version), None)
        if versions:
            self._versions[topic] = versions
        else:
            self._versions.pop(topic, None)

    def records(self) -> Iterator[bytes]:
        """All of it, for a snapshot."""
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
    """Whether it is a broker's: others may use that kind for what they like."""
    schemas = Schemas([record])
    try:
        return bool(schemas.topics) and bool(Schema.parse(schemas.newest(schemas.topics[0])[1]))
    except PenstockError:
        return False


def read_schemas(directory: Path) -> Schemas:
    """Out of the last segment of a journal, which anybody may read: its head repeats what was said before."""
    for first, revision in reversed(layout.latest_segments(os.listdir(directory))):
        path = directory / layout.segment_name(first, revision)
        try:
            data = read_all(path)
            header = layout.decode_segment_header(data[: layout.SEGMENT_HEADER_BYTES], str(path))
            scan = native.scan(data, header.nonce, header.first, 2**63, header.first, header.gaps)
        except (FileNotFoundError, PenstockError):  # just removed, or damaged: the one before it says the same or less
            continue
        return Schemas(records_in(scan["states"], brokers=True))
    return Schemas()
