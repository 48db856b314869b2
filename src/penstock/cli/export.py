"""``penstock export``: a recording as MCAP, Parquet, CSV or JSON lines."""

from __future__ import annotations

import base64
import contextlib
import csv
import enum
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import exits, show
from penstock.cli.target import TopicOption
from penstock.errors import InvalidArgument, PenstockError
from penstock.observe import decode
from penstock.recording.span import Span, messages, reader
from penstock.recording.story import STORY, parts, read_story
from penstock.types import Schema

if TYPE_CHECKING:
    from penstock._core import Message
    from penstock.journal import Journal

app = typer.Typer()


SCHEMA_KEY = "penstock_schema"  # of a channel's metadata in MCAP: the schema's text, whatever language it is in


class Kind(enum.StrEnum):
    """What a recording can become."""

    MCAP = "mcap"
    PARQUET = "parquet"
    CSV = "csv"
    JSONL = "jsonl"


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
    length: Annotated[str | None, typer.Option("--for", help="So much of it: 30s, 5m.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as one JSON object.")] = False,
) -> None:
    """Turn a recording into MCAP, Parquet, CSV or JSON lines.

    Bodies stay bytes in MCAP and Parquet; in CSV and JSON lines they are JSON or text where they are, else hexadecimal.

    Example: [green]penstock export run1 --to parquet -o run1.parquet --topic 'camera.>'[/]
    """
    target = output or Path(f"{directory.name.rstrip('/') or 'recording'}.{to.value}")
    if str(target) == "-" and to not in (Kind.CSV, Kind.JSONL):
        raise InvalidArgument(f"--to {to.value} is a file with an index at its end; give -o FILE")
    for gap in read_story(directory).missing():
        exits.told(f"{directory}: {gap}")
    journals = [reader(folder) for folder in parts(directory)]
    try:
        chosen = messages(journals, topic, Span.of(journals, start, length))
        count = _mcap(chosen, target, _schemas(journals)) if to is Kind.MCAP else _WRITERS[to](chosen, target)
    finally:
        for journal in journals:
            journal.close()
    if as_json:  # beside the data, not in it
        show.print_json({"file": str(target), "messages": count}, sys.stderr if str(target) == "-" else sys.stdout)
    elif str(target) != "-":
        print(f"wrote {show.count_text(count)} messages to {target}", file=sys.stderr)


def _open(target: Path) -> IO[str]:
    """The file, or standard output, where half a character (JSON can say one) is escaped instead of refused."""
    if str(target) != "-":
        return target.open("w", encoding="utf-8", errors="backslashreplace", newline="")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return sys.stdout


def _jsonl(chosen: Iterator[Message], target: Path) -> int:
    count = 0
    stream = _open(target)
    try:
        for count, message in enumerate(chosen, 1):  # noqa: B007 - the count is the result
            stream.write(json.dumps(decode.record(message)) + "\n")
    finally:
        if stream is not sys.stdout:
            stream.close()
    return count


def _csv(chosen: Iterator[Message], target: Path) -> int:
    count = 0
    stream = _open(target)
    try:
        writer = csv.writer(stream)
        plain = decode.printable if stream.isatty() else str  # a message must not steer the terminal
        writer.writerow(("position", "topic", "ordinal", "timestamp_ns", "size", "properties", "payload"))
        for count, message in enumerate(chosen, 1):  # noqa: B007 - the count is the result
            value = decode.body_value(bytes(message))
            body = plain(value) if isinstance(value, str) else json.dumps(value)
            properties = json.dumps(dict(message.properties)) if message.properties else ""
            row = (message.position, message.channel, message.ordinal, message.timestamp_ns, message.size)
            writer.writerow((*row, properties, body))
    finally:
        if stream is not sys.stdout:
            stream.close()
    return count


def _parquet(chosen: Iterator[Message], target: Path) -> int:
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema(
        [("position", pyarrow.int64()), ("topic", pyarrow.dictionary(pyarrow.int32(), pyarrow.string())),
         ("ordinal", pyarrow.int64()), ("timestamp", pyarrow.timestamp("ns", "UTC")), ("payload", pyarrow.binary()),
         ("properties", pyarrow.map_(pyarrow.string(), pyarrow.string()))]
    )  # fmt: skip
    count = 0
    with pyarrow.parquet.ParquetWriter(target, schema, compression="zstd") as writer:
        for rows in _chunks(chosen):
            columns = [list(column) for column in zip(*rows, strict=True)]
            arrays = [pyarrow.array(c, f.type) for c, f in zip(columns, schema, strict=True)]
            writer.write_batch(pyarrow.record_batch(arrays, schema=schema))
            count += len(rows)
    return count


def _chunks(chosen: Iterator[Message], most: int = 20_000, most_bytes: int = 32 << 20) -> Iterator[list[Any]]:
    rows: list[Any] = []
    size = 0
    for message in chosen:
        body = bytes(message)
        properties = list(message.properties.items())
        rows.append((message.position, message.channel, message.ordinal, message.timestamp_ns, body, properties))
        size += len(body)
        if len(rows) >= most or size >= most_bytes:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def _schemas(journals: list[Journal]) -> dict[str, Schema]:
    """The newest of each topic, in the last part that has one."""
    found: dict[str, Schema] = {}
    for journal in journals:
        schemas = journal.schemas
        for topic in schemas.topics:
            with contextlib.suppress(PenstockError):
                found[topic] = Schema.parse(schemas.newest(topic)[1])
    return found


def _mcap(chosen: Iterator[Message], target: Path, schemas: dict[str, Schema]) -> int:
    from mcap.writer import Writer

    count = 0
    with target.open("wb") as stream:
        writer = Writer(stream)
        writer.start(library="penstock")
        channels: dict[tuple[str, str], int] = {}  # by encoding too: a topic may carry both
        for count, message in enumerate(chosen, 1):  # noqa: B007 - the count is the result
            body = bytes(message)
            topic = message.channel or STORY
            described = schemas.get(topic)
            encoding = _encoding(body) if described is None else described.encoding
            key = topic, encoding
            if key not in channels:
                number = 0 if described is None else writer.register_schema(**_mcap_schema(described))
                told = {} if described is None else {SCHEMA_KEY: described.text}
                channels[key] = writer.register_channel(
                    topic=topic, message_encoding=encoding, schema_id=number, metadata=told
                )
            writer.add_message(
                channel_id=channels[key],
                log_time=message.timestamp_ns,
                publish_time=message.timestamp_ns,
                sequence=message.ordinal & 0xFFFFFFFF,
                data=body,
            )
        writer.finish()  # type: ignore[no-untyped-call]
    return count


def _mcap_schema(described: Schema) -> dict[str, Any]:
    """What other programs understand: JSON Schema and protobuf's descriptors; else the text itself under our name."""
    definition: Any = described.definition.get(described.language)
    if described.language == "jsonschema" and described.encoding == "json":
        return {"name": described.name, "encoding": "jsonschema", "data": json.dumps(definition).encode()}
    if described.language == "protobuf":
        return {"name": described.name, "encoding": "protobuf", "data": base64.b64decode(definition["files"])}
    return {"name": described.name, "encoding": "x-penstock", "data": described.text.encode()}


def _encoding(body: bytes) -> str:
    """MCAP's name of it: its "json" is a JSON object in UTF-8, nothing else."""
    try:
        return "json" if isinstance(decode.json_value(body), dict) else "application/octet-stream"
    except ValueError:
        return "application/octet-stream"


_WRITERS = {Kind.PARQUET: _parquet, Kind.CSV: _csv, Kind.JSONL: _jsonl}
