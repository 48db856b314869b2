"""A recording as a LeRobot dataset (its layout v3.0): Parquet files of frames, with episodes, tasks and statistics.

A dataset has frames at one fixed rate; a recording has messages whenever they came. The caller chooses the features of
a frame: each is a topic, or a field of its messages, whose numbers make a vector of float32. A frame holds for each
feature the last message at or before its time. The frames of an episode begin when every feature has a message in it
and end with the feature that ends first, so that no frame holds what was not recorded. Pictures are not written.

The vectors of all features are held in memory. The dataset gets its name when it is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import InvalidArgument, nearest
from penstock.recording.span import ARGUMENTS, Span, located, reader, topic_names
from penstock.recording.story import parts
from penstock.recording.tables import Columns, Described
from penstock.types import Schema
from penstock.types.fields import Rows, at, check_paths, parse_path
from penstock.types.shape import numeric_paths, shape_of

if TYPE_CHECKING:
    import numpy

    from penstock.journal import Journal

    Array = numpy.ndarray[Any, Any]

__all__ = ["Written", "write"]

VERSION = "v3.0"
FILE_BYTES = 100 << 20
CHUNK_FILES = 1000
MAX_NUMBERS = 65_536  # in one vector
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
OWN = {"timestamp": "float32", **dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), "int64")}
QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}


@dataclass(frozen=True, slots=True)
class Written:
    """What was written; ``empty`` are the numbers of episodes, in the recording, without a single frame."""

    episodes: int
    frames: int
    empty: list[int]


@dataclass(frozen=True, slots=True)
class _Feature:
    """The vectors of one feature, and the times of their messages in nanoseconds."""

    times: Array
    values: Array
    names: list[str] | None


@dataclass(frozen=True, slots=True)
class _Episode:
    begin_ns: int
    end_ns: int
    task: str


def write(
    directory: str | os.PathLike[str],
    target: str | os.PathLike[str],
    features: Mapping[str, str],
    *,
    fps: int,
    episodes: str | None = None,
    task: str = "",
    start: str | None = None,
    length: str | None = None,
    names: tuple[str, str] = ARGUMENTS,
) -> Written:
    """Write the recording in ``directory`` as the dataset ``target``, a folder that is not there yet.

    ``features`` maps a feature's name to ``TOPIC`` or ``TOPIC:FIELD``. ``episodes`` is a topic: each of its messages
    begins an episode, and is its task where it is text; without it the recording is one episode of ``task``.
    ``names`` are what errors call ``start`` and ``length``.
    """
    if fps < 1:
        raise InvalidArgument(f"fps={fps} must be 1 or more")
    if not features:
        raise InvalidArgument("a dataset has features: name some, as in action=commands:target")
    for name in features:
        if not name or name in OWN or "/" in name:
            raise InvalidArgument(f"{name!r} cannot be a feature: its name has no '/' and is none of {', '.join(OWN)}")
    place = Path(target)
    if place.exists():
        raise InvalidArgument(f"{place} is there already: name a new folder")
    with contextlib.ExitStack() as stack:
        journals = [stack.enter_context(reader(folder)) for folder in parts(Path(directory))]
        span = Span.of(journals, start, length, names)
        found = {name: _feature(journals, where, span) for name, where in features.items()}
        split = list(_episodes(journals, episodes, task, span))
    draft = place.with_name(f".{place.name}.{secrets.token_hex(6)}")
    try:
        written = _Dataset(draft, found, fps).write(split)
        draft.rename(place)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return written


# --- out of the recording


def _columns(journals: Sequence[Journal], topic: str) -> tuple[Schema, Columns]:
    topics = sorted({name for journal in journals for name in topic_names(journal, None)})
    if topic not in topics:
        raise InvalidArgument(f"there is no topic {topic!r}; {nearest(topic, topics)}")
    described = Described(journals)
    newest = described.newest(topic)
    if newest is None:
        raise InvalidArgument(f"topic {topic!r} has no type: publish it with type=")
    return newest, described.columns(topic)


def _feature(journals: list[Journal], where: str, span: Span) -> _Feature:
    import numpy

    topic, _, field = where.partition(":")
    schema, columns = _columns(journals, topic)
    if schema.encoding == "image":
        raise InvalidArgument(f"topic {topic!r} has pictures, which are not written: features are numbers")
    steps = parse_path(field) if field else []
    check_paths(Described(journals).schemas(topic), [field] if field else [])
    leaves = _leaves(schema, field)
    times: list[int] = []
    values: list[list[float]] = []
    for journal, message in located(journals, [topic], span):
        try:
            value = at(columns.read(journal, message), steps)
            if isinstance(value, Mapping) and not leaves:
                named = f"{where}.{next(iter(value), '')}" if field else f"{where}:{next(iter(value), '')}"
                raise ValueError(f"a record without numbers of its own; name one of its fields, as in {named}")
            numbers = _vector(value, leaves)
            if values and len(numbers) != len(values[0]):
                raise ValueError(f"{len(numbers)} numbers, and {len(values[0])} in the messages before")
        except ValueError as error:
            raise InvalidArgument(f"position {message.position} of {topic}: {where} is no feature: {error}") from None
        times.append(message.timestamp_ns)
        values.append(numbers)
    if not values:
        raise InvalidArgument(f"topic {topic!r} has no message in this span")
    return _Feature(numpy.array(times, numpy.int64), numpy.array(values, numpy.float32), leaves or None)


def _leaves(schema: Schema, field: str) -> list[str]:
    """The numeric fields below ``field``, if it is a record; their numbers, in this order, make the vector."""
    paths = numeric_paths(shape_of(schema), MAX_NUMBERS)
    return [path[len(field) + 1 :] for path in paths if path.startswith(f"{field}.")] if field else paths


def _vector(value: Any, leaves: Sequence[str]) -> list[float]:
    if isinstance(value, Rows) and len(value) == 1 and not isinstance(value[0], int | float):
        value = value[0]
    if isinstance(value, Mapping):
        value = [at(value, parse_path(leaf)) for leaf in leaves]
    numbers = [*_numbers(value)]
    if not 0 < len(numbers) <= MAX_NUMBERS:
        raise ValueError(f"{len(numbers)} numbers are not 1 to {MAX_NUMBERS}")
    return numbers


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, list | tuple):
        for one in value:
            yield from _numbers(one)
    elif isinstance(value, int | float):
        yield float(value)
    else:
        raise ValueError(f"{'nothing' if value is None else type(value).__name__} where a number is wanted")


def _episodes(journals: list[Journal], topic: str | None, task: str, span: Span) -> Iterator[_Episode]:
    end_ns = (1 << 63) - 1
    if topic is None:
        yield _Episode(-(1 << 63), end_ns, task)
        return
    _, columns = _columns(journals, topic)
    begin: tuple[int, str] | None = None
    for journal, message in located(journals, [topic], span):
        try:
            value = columns.read(journal, message)
        except ValueError:
            value = None
        if begin is not None:
            yield _Episode(begin[0], message.timestamp_ns, begin[1])
        begin = message.timestamp_ns, value if isinstance(value, str) and value else task
    if begin is not None:
        yield _Episode(begin[0], end_ns, begin[1])


# --- into the dataset


class _Dataset:
    """Writes the files; used once."""

    def __init__(self, root: Path, features: Mapping[str, _Feature], fps: int) -> None:
        self._root, self._features, self._fps = root, features, fps
        self._tasks: dict[str, int] = {}
        self._frames = 0
        self._rows: list[dict[str, Any]] = []  # of meta/episodes
        self._chunk = self._file = 0
        self._all: dict[str, list[Array]] = {name: [] for name in (*features, *OWN)}

    def write(self, episodes: Sequence[_Episode]) -> Written:
        import pyarrow.parquet

        empty: list[int] = []
        writer: Any = None
        self._root.mkdir(parents=True)
        try:
            for number, episode in enumerate(episodes):
                columns = self._columns(episode)
                if columns is None:
                    empty.append(number)
                    continue
                table = self._table(columns)
                if writer is None:
                    path = self._root / DATA_PATH.format(chunk_index=self._chunk, file_index=self._file)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    writer = pyarrow.parquet.ParquetWriter(path, table.schema)
                self._add_episode(episode, columns)
                writer.write_table(table)
                if path.stat().st_size >= FILE_BYTES:
                    writer.close()
                    writer = None
                    self._file = (self._file + 1) % CHUNK_FILES
                    self._chunk += self._file == 0
        finally:
            if writer is not None:
                writer.close()
        if not self._rows:
            raise InvalidArgument("no episode has a frame: its features do not overlap in time")
        self._write_meta()
        return Written(len(self._rows), self._frames, empty)

    def _columns(self, episode: _Episode) -> dict[str, Array] | None:
        """The frames of an episode by column; None if there are none."""
        import numpy

        firsts, lasts = [], []
        for feature in self._features.values():
            low, high = numpy.searchsorted(feature.times, [episode.begin_ns, episode.end_ns])
            if low == high:
                return None
            firsts.append(int(feature.times[low]))
            lasts.append(int(feature.times[high - 1]))
        count = (min(lasts) - max(firsts)) * self._fps // 1_000_000_000 + 1
        if count < 1:
            return None
        frames = numpy.arange(count, dtype=numpy.int64)
        times = max(firsts) + frames * 1_000_000_000 // self._fps
        columns: dict[str, Array] = {}
        for name, feature in self._features.items():
            columns[name] = feature.values[numpy.searchsorted(feature.times, times, side="right") - 1]
        columns["timestamp"] = (frames / self._fps).astype(numpy.float32)
        columns["frame_index"] = frames
        columns["episode_index"] = numpy.full(count, len(self._rows), numpy.int64)
        columns["index"] = frames + self._frames
        columns["task_index"] = numpy.full(count, self._tasks.get(episode.task, len(self._tasks)), numpy.int64)
        return columns

    def _table(self, columns: Mapping[str, Array]) -> Any:
        import pyarrow

        made: dict[str, Any] = {}
        for name, values in columns.items():
            flat = pyarrow.array(values.reshape(-1))
            width = values.shape[1] if values.ndim > 1 else 1
            made[name] = flat if width == 1 else pyarrow.FixedSizeListArray.from_arrays(flat, width)
        return pyarrow.table(made)

    def _add_episode(self, episode: _Episode, columns: Mapping[str, Array]) -> None:
        self._tasks.setdefault(episode.task, len(self._tasks))
        count = len(columns["index"])
        row: dict[str, Any] = {
            "episode_index": len(self._rows), "tasks": [episode.task], "length": count,
            "data/chunk_index": self._chunk, "data/file_index": self._file,
            "dataset_from_index": self._frames, "dataset_to_index": self._frames + count,
            "meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0,
        }  # fmt: skip
        for name, values in columns.items():
            row |= {f"stats/{name}/{word}": numbers for word, numbers in _statistics(values).items()}
            self._all[name].append(values)
        self._rows.append(row)
        self._frames += count

    def _write_meta(self) -> None:
        import numpy
        import pandas
        import pyarrow
        import pyarrow.parquet

        meta = self._root / "meta"
        (meta / "episodes/chunk-000").mkdir(parents=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(self._rows), meta / "episodes/chunk-000/file-000.parquet")
        tasks = pandas.DataFrame({"task_index": list(self._tasks.values())}, index=list(self._tasks))
        tasks.to_parquet(meta / "tasks.parquet")
        statistics = {name: _statistics(numpy.concatenate(values)) for name, values in self._all.items()}
        (meta / "stats.json").write_text(json.dumps(statistics, indent=4))
        (meta / "info.json").write_text(json.dumps(self._info(), indent=4))

    def _info(self) -> dict[str, Any]:
        features: dict[str, Any] = {
            name: {"dtype": "float32", "shape": [feature.values.shape[1]], "names": feature.names}
            for name, feature in self._features.items()
        }
        features |= {name: {"dtype": kind, "shape": [1], "names": None} for name, kind in OWN.items()}
        return {
            "codebase_version": VERSION, "robot_type": None, "total_episodes": len(self._rows),
            "total_frames": self._frames, "total_tasks": len(self._tasks), "chunks_size": CHUNK_FILES,
            "data_files_size_in_mb": FILE_BYTES >> 20, "video_files_size_in_mb": 200, "fps": self._fps,
            "splits": {"train": f"0:{len(self._rows)}"}, "data_path": DATA_PATH, "video_path": None,
            "features": features,
        }  # fmt: skip


def _statistics(values: Array) -> dict[str, list[float]]:
    import numpy

    rows = values.reshape(len(values), -1).astype(numpy.float64)
    found = {"min": rows.min(0), "max": rows.max(0), "mean": rows.mean(0), "std": rows.std(0)}
    quantiles = numpy.quantile(rows, list(QUANTILES.values()), axis=0)
    found |= dict(zip(QUANTILES, quantiles, strict=True))
    numbers: dict[str, list[float]] = {word: one.tolist() for word, one in found.items()}
    return {**numbers, "count": [len(rows)]}
