"""``penstock export``: a recording as MCAP, Parquet, CSV or JSON lines."""

from __future__ import annotations

import base64
import contextlib
import csv
import enum
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import exits, show
from penstock.cli.target import TopicOption
from penstock.errors import InvalidArgument, PenstockError
from penstock.observe import decode
from penstock.recording.span import OPTIONS, Span, check_topics, located, reader, topic_names
from penstock.recording.story import STORY, parts, read_story
from penstock.recording.tables import Columns, Described
from penstock.types import Schema
from penstock.types.fields import at as value_at
from penstock.types.fields import iso_text, json_text
from penstock.types.shape import ANY, Shape, arrow_type, json_schema, shape_of

if TYPE_CHECKING:
    from penstock._core import Message
    from penstock.journal import Journal

app = typer.Typer()


Chosen = Iterator[tuple["Journal", "Message"]]
SCHEMA_KEY = "penstock_schema"  # key in a channel's metadata in MCAP: the schema's text, in any language


class Kind(enum.StrEnum):
    """What a recording can become."""

    MCAP = "mcap"
    PARQUET = "parquet"
    CSV = "csv"
    JSONL = "jsonl"
    LEROBOT = "lerobot"


@app.command()
def export(
    directory: Annotated[Path, typer.Argument(help="A recording, or any journal.")],
    to: Annotated[Kind, typer.Option(help="The format.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file; '-' is standard output (csv, jsonl).")
    ] = None,
    topic: TopicOption = None,
    start: Annotated[
        str | None, typer.Option("--from", help="Begin here: an ISO time, or 10s after the start.")
    ] = None,
    length: Annotated[str | None, typer.Option("--for", help="Only this much: 30s, 5m.")] = None,
    feature: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=TOPIC[:FIELD]", help="lerobot: a feature, such as 'action=commands:target'."),
    ] = None,
    fps: Annotated[int | None, typer.Option(min=1, help="lerobot: frames a second.")] = None,
    episodes: Annotated[
        str | None, typer.Option(metavar="TOPIC", help="lerobot: each message of it begins an episode.")
    ] = None,
    task: Annotated[str, typer.Option(help="lerobot: the name of the task, if no message gives it.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as one JSON object.")] = False,
) -> None:
    """Turn a recording into MCAP, Parquet, CSV, JSON lines or a LeRobot dataset.

    Topics that a typed publisher has described have a column for each field in CSV and Parquet (named TOPIC.FIELD where
    there are several such topics), and their fields in JSON lines. Other bodies stay bytes in Parquet; in CSV and JSON
    lines they are written as JSON or text if they are valid, else as hexadecimal. MCAP has all as bytes, with their
    schemas; images are foxglove.RawImage, clouds foxglove.PointCloud.

    A LeRobot dataset (v3.0) has --fps frames a second; each frame holds the latest numbers of every --feature.

    Example: [green]penstock export run1 --to parquet -o run1.parquet --topic 'camera.>'[/]
    """
    target = output or Path(f"{directory.name.rstrip('/') or 'recording'}.{to.value}")
    if to is Kind.LEROBOT:
        if str(target) == "-":
            raise InvalidArgument("--to lerobot is a folder; give -o FOLDER")
        _lerobot(directory, target, _features(feature, topic), fps, episodes, task, (start, length), as_json)
        return
    if feature or fps or episodes or task:
        raise InvalidArgument("--feature, --fps, --episodes and --task are for --to lerobot")
    if str(target) == "-" and to not in (Kind.CSV, Kind.JSONL):
        raise InvalidArgument(f"--to {to.value} is a file with an index at its end; give -o FILE")
    for gap in read_story(directory).missing():
        exits.told(f"{directory}: {gap}")
    journals = [reader(folder) for folder in parts(directory)]
    try:
        check_topics(journals, topic)
        chosen = located(journals, topic, Span.of(journals, start, length, OPTIONS))
        described = Described(journals)
        topics = {name for journal in journals for name in topic_names(journal, topic)}
        fields = Fields(described, () if to is Kind.MCAP else sorted(topics))
        with _replacing(target) as file:
            if to is Kind.MCAP:
                count = _mcap(chosen, file, described, fields, described.topics(topic))
            else:
                count = _WRITERS[to](chosen, file, fields)
    finally:
        for journal in journals:
            journal.close()
    kept = "as they are, without a schema" if to is Kind.MCAP else "as payload"
    for name, (number, reason) in fields.failed.items():
        told = f"{name}: {show.number_of(number, 'message')} not of the topic's type"
        exits.told(f"{told}; the bytes are kept {kept}. The first: {reason}")
    if as_json:  # on standard error if the data goes to standard output
        show.print_json({"file": str(target), "messages": count}, sys.stderr if str(target) == "-" else sys.stdout)
    elif str(target) != "-":
        print(f"wrote {show.number_of(count, 'message')} to {target}", file=sys.stderr)


def _features(given: list[str] | None, topics: list[str] | None) -> dict[str, str]:
    if topics:
        raise InvalidArgument("--to lerobot takes its topics by --feature NAME=TOPIC[:FIELD]")
    found: dict[str, str] = {}
    for text in given or ():
        name, sign, where = text.partition("=")
        if not sign or not where or name in found:
            raise InvalidArgument(f"--feature {text!r} is not of the form NAME=TOPIC[:FIELD], each name once")
        found[name] = where
    return found


def _lerobot(
    directory: Path, target: Path, features: dict[str, str], fps: int | None, episodes: str | None, task: str,
    span: tuple[str | None, str | None], as_json: bool,
) -> None:  # fmt: skip
    from penstock.recording import lerobot

    if fps is None:
        raise InvalidArgument("--to lerobot needs --fps: its frames have a fixed rate")
    for gap in read_story(directory).missing():
        exits.told(f"{directory}: {gap}")
    start, length = span
    done = lerobot.write(
        directory, target, features, fps=fps, episodes=episodes, task=task, start=start, length=length, names=OPTIONS
    )
    if done.empty:
        exits.told(f"{show.number_of(len(done.empty), 'episode')} without a frame left out: {done.empty}")
    if as_json:
        show.print_json({"directory": str(target), "episodes": done.episodes, "frames": done.frames})
    else:
        told = f"{show.number_of(done.frames, 'frame')} of {show.number_of(done.episodes, 'episode')}"
        print(f"wrote {told} to {target}", file=sys.stderr)


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A temporary file that replaces the target when it is complete: the old file stays until then, and an incomplete
    file never has its name.
    """
    if str(target) == "-" or (target.exists() and not target.is_file()):  # a pipe or a device cannot be replaced
        yield target
        return
    beside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with exits.about(target):
            yield beside
            beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def _open(target: Path) -> IO[str]:
    """Open the file, or standard output. A lone surrogate, which JSON can contain, is escaped instead of refused."""
    if str(target) != "-":
        return target.open("w", encoding="utf-8", errors="backslashreplace", newline="")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return sys.stdout


class Fields:
    """The columns of all topics with a schema, side by side, and their values."""

    def __init__(self, described: Described, topics: Iterable[str]) -> None:
        self._columns: dict[str, Columns] = {}
        for name in topics:
            if described.newest(name) is None:
                continue
            try:
                self._columns[name] = described.columns(name)
            except (PenstockError, ModuleNotFoundError) as error:  # a user's own codec, or a missing package
                exits.told(f"{name}: its fields are not read, the bytes are kept as payload: {error}")
        #: by topic, how many messages do not match its schema, and the first error
        self.failed: dict[str, tuple[int, str]] = {}
        self._first: dict[str, int] = {}  # by topic, the index of its first column
        self.all: list[tuple[str, Shape]] = []  #: every column
        for name, columns in self._columns.items():
            self._first[name] = len(self.all)
            head = f"{name}." if len(self._columns) > 1 else ""
            self.all += [(f"{head}{field}", shape) for field, shape in columns.fields]

    def rows(self, journal: Journal, message: Message) -> list[list[Any]] | None:
        """The rows of a message over all columns; None if its topic has no columns, or it does not match: then its
        bytes are kept.
        """
        name = message.channel or ""
        columns = self._columns.get(name)
        if columns is None:
            return None
        try:
            found = columns.rows(journal, message)
        except ValueError as error:
            self.note_failure(message, error)
            return None
        before = [None] * self._first[name]
        after = [None] * (len(self.all) - len(before) - len(columns.fields))
        return [[*before, *row, *after] for row in found]

    def value(self, journal: Journal, message: Message) -> Any:
        """The decoded message; None if its topic has no schema, or it does not match."""
        columns = self._columns.get(message.channel or "")
        try:
            return None if columns is None else columns.read(journal, message)
        except ValueError as error:
            self.note_failure(message, error)
            return None

    def note_failure(self, message: Message, error: ValueError) -> None:
        """Count a message that does not match its topic's schema."""
        name = message.channel or ""
        number, first = self.failed.get(name, (0, f"position {message.position}, {error}"))
        self.failed[name] = number + 1, first

    def labels(self, taken: Sequence[str]) -> list[str]:
        """The names of the columns; a name that the table already has becomes ``value.NAME``."""
        return [f"value.{name}" if name in taken else name for name, _ in self.all]


def _jsonl(chosen: Chosen, target: Path, fields: Fields) -> int:
    count = 0
    stream = _open(target)
    try:
        for count, (journal, message) in enumerate(chosen, 1):  # noqa: B007 - the count is the result
            value = fields.value(journal, message)
            record = decode.record(message) if value is None else decode.record(message, b"")
            if value is not None:
                record |= {"size": message.size, "payload": value}
            stream.write(json_text(record) + "\n")
    finally:
        if stream is not sys.stdout:
            stream.close()
    return count


CSV_COLUMNS = ("position", "topic", "ordinal", "timestamp_ns", "size", "properties", "payload")


def _csv(chosen: Chosen, target: Path, fields: Fields) -> int:
    count = 0
    stream = _open(target)
    try:
        writer = csv.writer(stream)
        plain = decode.printable if stream.isatty() else str  # a message must not control the terminal
        leaves = [
            (at, label, path, part)
            for at, (name, (_, shape)) in enumerate(zip(fields.labels(CSV_COLUMNS), fields.all, strict=True))
            for label, path, part in _leaves(name, shape, ())
        ]
        writer.writerow((*CSV_COLUMNS, *(label for _, label, _, _ in leaves)))
        for count, (journal, message) in enumerate(chosen, 1):  # noqa: B007 - the count is the result
            rows = fields.rows(journal, message)
            body = ""
            if rows is None:
                value = decode.body_value(bytes(message))
                body = plain(value) if isinstance(value, str) else json.dumps(value)
            properties = json.dumps(dict(message.properties)) if message.properties else ""
            head = (message.position, message.channel, message.ordinal, message.timestamp_ns, message.size)
            for row in [None] if rows is None else rows:
                cells = [] if row is None else [_cell(value_at(row[at], p), one, plain) for at, _, p, one in leaves]
                writer.writerow((*head, properties, body, *(cells or [""] * len(leaves))))
    finally:
        if stream is not sys.stdout:
            stream.close()
    return count


def _leaves(label: str, shape: Shape, path: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...], Shape]]:
    """The columns of a shape: nested structs are flattened."""
    if shape.kind != "struct":
        yield label, path, shape
    for name, part in shape.fields:
        yield from _leaves(f"{label}.{name}", part, (*path, name))


def _cell(value: Any, shape: Shape, plain: Callable[[str], str]) -> str:
    if value is None:
        return ""
    if shape.kind.startswith("timestamp"):
        return iso_text(value, shape)
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # inf and nan, which JSON does not have and CSV does
    return base64.b64encode(value).decode() if isinstance(value, bytes) else json_text(_as_json(value, shape))


def _as_json(value: Any, shape: Shape) -> Any:
    """The value of a column for JSON: maps become objects, times become texts."""
    if value is None:
        return None
    if shape.kind == "struct":
        return {name: _as_json(value[name], part) for name, part in shape.fields}
    if shape.kind == "map":
        return {key: _as_json(one, shape.item or ANY) for key, one in value}
    if shape.kind == "list":
        return [_as_json(one, shape.item or ANY) for one in value]
    if shape.kind == "any":
        return json.loads(value)  # the JSON value itself, not a text that contains it
    return iso_text(value, shape) if shape.kind.startswith("timestamp") else value


PARQUET_COLUMNS = ("position", "topic", "ordinal", "timestamp", "payload", "properties")


def _parquet(chosen: Chosen, target: Path, fields: Fields) -> int:
    import pyarrow
    import pyarrow.parquet

    text = pyarrow.string()
    kinds = (
        pyarrow.int64(), pyarrow.dictionary(pyarrow.int32(), text), pyarrow.int64(), pyarrow.timestamp("ns", "UTC"),
        pyarrow.binary(), pyarrow.map_(text, text),
    )  # fmt: skip
    named = zip(fields.labels(PARQUET_COLUMNS), fields.all, strict=True)
    typed = [(name, arrow_type(shape)) for name, (_, shape) in named]
    schema = pyarrow.schema([*zip(PARQUET_COLUMNS, kinds, strict=True), *typed])
    count = 0
    with pyarrow.parquet.ParquetWriter(target, schema, compression="zstd") as writer:
        for read, rows in _chunks(chosen, fields):
            count += read
            if not rows:  # no message has a row
                continue
            columns = [list(column) for column in zip(*rows, strict=True)]
            arrays = [pyarrow.array(c, f.type) for c, f in zip(columns, schema, strict=True)]
            writer.write_batch(pyarrow.record_batch(arrays, schema=schema))
    return count


def _chunks(
    chosen: Chosen, fields: Fields, most: int = 20_000, most_bytes: int = 32 << 20
) -> Iterator[tuple[int, list[Any]]]:
    """Chunks of rows, each with the number of messages that they come from."""
    rows: list[Any] = []
    size = read = 0
    nothing = [None] * len(fields.all)
    for journal, message in chosen:
        found = fields.rows(journal, message)
        body = bytes(message) if found is None else None
        properties = list(message.properties.items())
        head = (message.position, message.channel, message.ordinal, message.timestamp_ns, body, properties)
        rows += [(*head, *row) for row in ([nothing] if found is None else found)]
        read += 1
        size += message.size
        if len(rows) >= most or size >= most_bytes:
            yield read, rows
            rows, size, read = [], 0, 0
    if read:
        yield read, rows


def _mcap(chosen: Chosen, target: Path, schemas: Described, fields: Fields, topics: Iterable[str]) -> int:
    from mcap.writer import Writer

    count = 0
    pictures = _Pictures()
    with target.open("wb") as stream:
        writer = Writer(stream)
        writer.start(library="penstock")
        channels: dict[tuple[str, str, str], int] = {}  # a topic may have several encodings and versions
        for count, (journal, message) in enumerate(chosen, 1):  # noqa: B007 - the count is the result
            body = bytes(message)
            topic = message.channel or STORY
            if message.timestamp_ns < 0:
                raise InvalidArgument(
                    f"message {message.position} (topic {topic}) has a time before 1970, which MCAP cannot hold; "
                    "export it --to parquet, jsonl or csv, or other topics (--topic)"
                )
            try:
                described = schemas.schema_of(journal, message)
            except ValueError as error:
                fields.note_failure(message, error)
                described = None
            encoding = _encoding(body) if described is None else described.encoding
            picture = pictures(message) if encoding == "image" else None
            if picture is not None:
                encoding, body = picture.schema["name"], picture.body
            key = topic, encoding, "" if described is None else described.text
            if key not in channels:
                known = {} if described is None else _mcap_schema(described) if picture is None else picture.schema
                number = writer.register_schema(**known) if known else 0
                told = {} if described is None else {SCHEMA_KEY: described.text}
                channels[key] = writer.register_channel(
                    topic=topic, message_encoding=known["encoding"] if picture else encoding, schema_id=number,
                    metadata=told,
                )  # fmt: skip
            writer.add_message(
                channel_id=channels[key],
                log_time=message.timestamp_ns,
                publish_time=message.timestamp_ns,
                sequence=message.ordinal & 0xFFFFFFFF,
                data=body,
            )
        written = {(topic, text) for topic, _, text in channels}
        for topic in topics:  # keep also schemas that no message has used yet
            newest = schemas.newest(topic)
            if newest is not None and (topic, newest.text) not in written:
                writer.register_channel(
                    topic=topic, message_encoding=newest.encoding, metadata={SCHEMA_KEY: newest.text},
                    schema_id=writer.register_schema(**_mcap_schema(newest)),
                )  # fmt: skip
        writer.finish()  # type: ignore[no-untyped-call]
    return count


@dataclass(frozen=True, slots=True)
class _Picture:
    schema: dict[str, Any]
    body: bytes


class _Pictures:
    """Converts images to the messages that viewers know: ``foxglove.RawImage`` and ``foxglove.PointCloud``."""

    def __init__(self) -> None:
        self._missing = False

    def __call__(self, message: Message) -> _Picture | None:
        """The converted image; None if it is not an image, or the package is missing."""
        if self._missing:
            return None
        try:
            from penstock.foxglove.pictures import picture_of
        except ModuleNotFoundError:
            self._missing = True
            exits.told("images are written in an encoding that viewers do not show: pip install 'penstock[foxglove]'")
            return None
        try:
            kind, body = picture_of(message)
        except ValueError:
            return None
        schema = kind.schema
        return _Picture({"name": schema.name, "encoding": schema.encoding, "data": schema.data}, body)


def _mcap_schema(described: Schema) -> dict[str, Any]:
    """The schema in a form that other programs understand: JSON Schema or protobuf descriptors; otherwise its text
    under a name of our own.
    """
    definition: Any = described.definition.get(described.language)
    with contextlib.suppress(PenstockError, KeyError, TypeError, ValueError):  # a damaged schema is written unchanged
        if described.language == "jsonschema" and described.encoding == "json":
            shape = shape_of(described)  # without references, which viewers do not follow
            plain = json_schema(shape) if shape.kind in ("struct", "map") else definition
            return {"name": described.name, "encoding": "jsonschema", "data": json.dumps(plain).encode()}
        if described.language == "protobuf":
            return {"name": described.name, "encoding": "protobuf", "data": base64.b64decode(definition["files"])}
    return {"name": described.name, "encoding": "x-penstock", "data": described.text.encode()}


def _encoding(body: bytes) -> str:
    """MCAP's name of the encoding: its "json" means a JSON object in UTF-8, nothing else."""
    try:
        return "json" if isinstance(decode.json_value(body), dict) else "application/octet-stream"
    except ValueError:
        return "application/octet-stream"


_WRITERS = {Kind.PARQUET: _parquet, Kind.CSV: _csv, Kind.JSONL: _jsonl}
