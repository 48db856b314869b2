"""The journals that a query reads: given by path, by glob, as a list, or as a broker's address.

``Place`` is the narrow seam: its journal's UUID, its first position and frontier, ranges of even bytes, and Arrow
batches of a range. A directory and a broker are the two kinds of it. Small and picklable as text: executors open it
again.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import parse_qsl, urlencode, urlsplit

import numpy
import pyarrow

from penstock.errors import CorruptionError, InvalidArgument
from penstock.journal import layout
from penstock.secrecy import without_secrets
from penstock.spark import rows
from penstock.spark.bounds import Bounds
from penstock.spark.columns import IN_INDEX
from penstock.spark.directory import Directory, Segment, Stretch

if TYPE_CHECKING:
    from penstock.spark.described import Values

LOG = logging.getLogger("penstock.spark")
BATCH_BYTES = 2 << 20
MAX_PLACES = 10_000


@dataclass(frozen=True, slots=True)
class Range:
    """Positions ``start`` to ``end - 1`` of one journal, about ``size`` bytes."""

    place: str
    journal: str
    start: int
    end: int
    size: int


@dataclass(frozen=True, slots=True)
class Reading:
    """The options for reading batches."""

    schema: pyarrow.Schema
    bounds: Bounds
    permissive: bool = False
    check: bool = True
    batch_bytes: int = BATCH_BYTES
    fail_if_deleted: bool = False  # positions that retention deleted meanwhile are an error; otherwise they are skipped
    values: Values | None = None  # makes the columns of ``decode=auto``
    lossy: bool = False  # a segment missing between others is skipped; otherwise it is an error

    @property
    def needs_log(self) -> bool:
        """Whether the query uses a column that is not in the index."""
        return any(name not in IN_INDEX for name in self.schema.names)


class Place(Protocol):
    """A journal, in a directory or behind a broker."""

    uuid: str

    @property
    def first(self) -> int:
        """The least position kept."""

    @property
    def frontier(self) -> int:
        """The position after the last one that can be read."""

    def ranges(
        self,
        start: int,
        end: int,
        bounds: Bounds,
        most_bytes: int,
        *,
        log: bool = True,
        fail_if_deleted: bool = False,
        lossy: bool = False,
        permissive: bool = False,
    ) -> Iterator[Range]:
        """Ranges of ``most_bytes`` each that cover all possible matches; without ``log`` only index bytes count."""

    def batches(self, start: int, end: int, reading: Reading) -> Iterator[pyarrow.RecordBatch]:
        """The matching messages of these positions."""

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """Ranges of positions that are lost between others."""

    def schemas(self) -> dict[str, str]:
        """All versions of the schema of each topic that was described, as one text (``penstock.types.versions``)."""

    def find(self, *, time_ns: int | None = None, ordinal: int | None = None, bounds: Bounds, start: int = 1) -> int:
        """The first position from ``start`` on that was stored at or after a time, or has an ordinal or a later one;
        the frontier when there is none.
        """


def open_place(text: str) -> Place:
    """The journal at a path or ``broker://HOST:PORT``."""
    if text.startswith("broker://"):
        from penstock.spark.remote import BrokerPlace

        return BrokerPlace(text)
    return DirectoryPlace(text)


def open_places(texts: Iterable[str]) -> list[Place]:
    """Open several journals; ``InvalidArgument`` if two are the same one, since its messages would come twice."""
    known: dict[str, str] = {}
    opened = []
    for text in texts:
        place = open_place(text)
        if place.uuid in known:
            both = f"{shown(known[place.uuid])} and {shown(text)}"
            raise InvalidArgument(f"{both} are the same journal or copies of it (UUID {place.uuid}): name one of them")
        known[place.uuid] = text
        opened.append(place)
    return opened


def resolve(options: Mapping[str, str]) -> list[str]:
    """The journals that ``load(...)`` named: globs expanded, links resolved, without duplicates, in a stable order."""
    texts = list(json.loads(options["paths"])) if "paths" in options else []
    if options.get("path"):
        texts.append(options["path"])
    if not texts:
        raise InvalidArgument("name a journal: spark.read.format('penstock').load('/path/to/journal')")
    found: dict[str, str] = {}
    for text in texts:
        for place in _expand(with_options(text, options)):
            found.setdefault(place if place.startswith("broker://") else os.path.realpath(place), place)
    if len(found) > MAX_PLACES:
        raise InvalidArgument(f"{len(found)} journals at once are more than {MAX_PLACES}")
    return list(found.values())


def with_options(text: str, options: Mapping[str, str]) -> str:
    """A broker's address with the options ``token`` and ``tls`` in it, where the address itself does not name them."""
    if not text.startswith("broker://"):
        return text
    named = dict(parse_qsl(urlsplit(text).query))
    more = {name: options[name] for name in ("token", "tls") if name in options and name not in named}
    return f"{text}{'&' if named else '?'}{urlencode(more)}" if more else text


def shown(text: str) -> str:
    """A journal's address without a broker's token, fit to be printed."""
    return without_secrets(text).partition("?")[0] if text.startswith("broker://") else text


def local_path(text: str) -> str:
    """The path that ``load(...)``, ``LOCATION`` or a sink named; Spark writes ``file:/path`` for those of tables."""
    return re.sub("^file:/+", "/", text).removeprefix("journal:")


def _expand(text: str) -> Sequence[str]:
    if text.startswith("broker://"):
        return [text]
    path = local_path(text)
    if not glob.has_magic(path):
        return [os.path.abspath(path)]
    matches = sorted(match for match in glob.glob(path) if os.path.exists(os.path.join(match, layout.MARKER_NAME)))
    if not matches:
        raise InvalidArgument(f"no journal matches {text!r}")
    return [os.path.abspath(match) for match in matches]


def log_skipped(place: Place, start: int, end: int, deleted: Sequence[tuple[int, int]] | None = None) -> None:
    """Log each range of positions that a query or an archive with ``failOnDataLoss=false`` goes on without.

    ``deleted``: what retention deleted before it was read; None: all before the first position that is kept now.
    """
    first = min(place.first, end)
    if deleted is None:
        deleted = [(start, first)] if first > start else []
    gone = [(low, high, "were deleted by retention") for low, high in deleted]
    gone += [(low, high, "are in no segment, which is damage") for low, high in place.missing(max(start, first), end)]
    for low, high, why in gone:
        LOG.warning(
            "positions %d to %d of journal %s %s: skipped, since failOnDataLoss=false", low, high - 1, place.uuid, why
        )


class DirectoryPlace:
    """A journal's directory that this process can reach."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.directory = Directory(path)
        self.uuid = self.directory.uuid

    @property
    def first(self) -> int:
        return self.directory.first

    @property
    def frontier(self) -> int:
        return self.directory.frontier

    def ranges(
        self,
        start: int,
        end: int,
        bounds: Bounds,
        most_bytes: int,
        *,
        log: bool = True,
        fail_if_deleted: bool = False,
        lossy: bool = False,
        permissive: bool = False,
    ) -> Iterator[Range]:
        self.directory.permissive = permissive

        def look(segment: Segment, low: int, high: int) -> list[Range]:
            share = self.directory.share(segment, bounds, log)
            if segment.end * share <= most_bytes and (low, high) == (segment.first, segment.next):
                size = int(segment.end * share)
                return [Range(self.path, self.uuid, low, high, size)]  # an uncut segment: its index is not needed
            return [
                Range(self.path, self.uuid, piece_start, piece_end, int(size * share))
                for piece_start, piece_end, size in self.directory.cut(segment, low, high, most_bytes / share)
            ]

        for pieces in self.directory.visit(start, end, bounds, look, fail_if_deleted=fail_if_deleted, lossy=lossy):
            yield from pieces

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        return self.directory.missing(start, end)

    def batches(self, start: int, end: int, reading: Reading) -> Iterator[pyarrow.RecordBatch]:
        names = reading.schema.names
        needs_log = reading.needs_log
        self.directory.permissive = reading.permissive
        for stretch in self.directory.stretches(
            start, end, reading.bounds,
            log=needs_log, named="topic" in names, fail_if_deleted=reading.fail_if_deleted, lossy=reading.lossy,
        ):  # fmt: skip
            lengths = stretch.index["length"] if "payload" in names else numpy.zeros(len(stretch.index), numpy.uint32)
            for low, high in rows.cuts(lengths, rows.row_bytes(names), reading.batch_bytes):
                is_short = stretch.log is not None and len(stretch.log) < stretch.segment.end
                check = needs_log and (reading.check or is_short)
                damaged = self._checked(stretch, low, high, reading) if check else None
                yield rows.batch(
                    stretch.index[low:high],
                    stretch.log,
                    stretch.topics,
                    reading.schema,
                    journal=self.uuid,
                    damaged=damaged,
                )

    def _checked(self, stretch: Stretch, low: int, high: int, reading: Reading) -> rows.Array:
        damaged = self.directory.check(stretch, low, high)
        if stretch.damage:
            text = stretch.damage[0]
            if not reading.permissive:
                hint = "read with mode=permissive to go on without it, or run: penstock journal verify"
                raise CorruptionError(f"{text}; {hint}", text.rpartition(": ")[0])
            for line in stretch.damage:
                LOG.warning("%s; a null payload stands for it", line)
            stretch.damage.clear()
        return damaged

    def schemas(self) -> dict[str, str]:
        from penstock.journal.schemas import read_schemas

        found = read_schemas(Path(self.path))
        return {topic: found.joined(topic) for topic in found.topics}

    def find(self, *, time_ns: int | None = None, ordinal: int | None = None, bounds: Bounds, start: int = 1) -> int:
        narrowed = bounds
        if time_ns is not None:
            narrowed = narrowed.narrowed("stored", low=time_ns)
        if ordinal is not None:
            narrowed = narrowed.narrowed("ordinals", low=ordinal)
        frontier = self.frontier
        for stretch in self.directory.stretches(start, frontier, narrowed, log=False):
            return int(stretch.index["position"][0])
        return frontier
