"""``penstock import``: an MCAP file as a recording."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli import show
from penstock.cli.export import SCHEMA_KEY
from penstock.errors import CorruptionError, InvalidArgument, PenstockError
from penstock.recording.story import STORY
from penstock.topics import topic_for
from penstock.types import Schema

app = typer.Typer()

PICTURES = ("foxglove.RawImage", "foxglove.PointCloud")
BATCH = 1000
BATCH_BYTES = 16 << 20


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="An MCAP file.", exists=True, dir_okay=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of the recording; new or empty.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was read as one JSON object.")] = False,
) -> None:
    """Turn an MCAP file into a recording: a journal with a topic for each channel, in order of time.

    Example: [green]penstock import drive.mcap -o drive[/]
    """
    from mcap.reader import make_reader
    from mcap.writer import MCAP0_MAGIC

    from penstock.journal import Entry, Journal

    if output.exists() and any(output.iterdir()):
        raise InvalidArgument(f"{output} is not empty; a recording begins in a folder of its own")
    with file.open("rb") as stream:
        if stream.read(len(MCAP0_MAGIC)) != MCAP0_MAGIC:
            raise CorruptionError(f"{file} is not an MCAP file: it does not begin with the mark of one", str(file))
    counts: dict[str, int] = {}
    channels: dict[str, int] = {}  # by topic, the channel of its last message
    said: dict[str, str] = {}
    seen: set[int] = set()  # channels that have a message
    with file.open("rb") as stream, Journal(output) as journal:
        started = {"event": "started", "addresses": {}, "imported": file.name, "time_ns": time.time_ns()}
        journal.append(STORY, json.dumps(started).encode())
        pending: list[Any] = []
        size = 0
        with _told_as_damage(file):
            reader = make_reader(stream, validate_crcs=True)
        for schema, channel, message in _messages(file, reader):
            topic = topic_for(channel.topic)
            if channels.get(topic) != channel.id:  # each channel of a topic is a version of its schema
                channels[topic] = channel.id
                seen.add(channel.id)
                text = schema_text(schema, channel)
                if text is not None and said.get(topic) != text:
                    said[topic] = text
                    journal.commit(pending)
                    pending, size = [], 0
                    journal.declare_schema(topic, text)
            counts[topic] = counts.get(topic, 0) + 1
            properties = {"mcap_encoding": channel.message_encoding} if channel.message_encoding else None
            body = _body(schema, channel, message)
            pending.append(Entry(topic, body, properties, timestamp_ns=message.log_time))
            size += len(body)
            if len(pending) >= BATCH or size >= BATCH_BYTES:
                journal.commit(pending)
                pending, size = [], 0
        journal.commit(pending)
        with _told_as_damage(file):
            summary = reader.get_summary()
        for channel in summary.channels.values() if summary else ():
            text = schema_text(summary.schemas.get(channel.schema_id), channel) if summary else None
            if text is not None and channel.id not in seen:
                journal.declare_schema(topic_for(channel.topic), text)
        total = sum(counts.values())
        journal.append(STORY, json.dumps({"event": "ended", "messages": total, "topics": counts}).encode())
    if as_json:
        show.print_json({"directory": str(output), "messages": total, "topics": counts})
    else:
        print(f"read {show.number_of(total, 'message')} of {show.number_of(len(counts), 'topic')} into {output}")


@contextlib.contextmanager
def _told_as_damage(file: Path) -> Iterator[None]:
    """What the reader raises at a damaged file: its own errors, those of struct, of the decompressors, of text."""
    try:
        yield
    except Exception as error:
        raise CorruptionError(f"{file}: {error or type(error).__name__}", str(file)) from None


def _messages(file: Path, reader: Any) -> Iterator[Any]:
    """Of each message its schema, its channel and itself. What fails afterwards is not the file's."""
    with _told_as_damage(file):
        yield from reader.iter_messages()


def _body(schema: Any, channel: Any, message: Any) -> bytes:
    """The payload; an image that ``export`` converted for viewers is converted back."""
    data: bytes = message.data
    if schema is None or schema.name not in PICTURES or SCHEMA_KEY not in channel.metadata:
        return data
    from penstock.foxglove.original import original

    try:
        return original(data)
    except ValueError:
        return data


def schema_text(schema: Any, channel: Any) -> str | None:
    """The schema of a channel's messages: from our metadata, or a JSON Schema; otherwise only its name."""
    told = channel.metadata.get(SCHEMA_KEY)
    try:
        if told:
            return Schema.parse(told).checked().text
        if schema is None:
            return None
        definition = {"jsonschema": json.loads(schema.data)} if schema.encoding == "jsonschema" else {}
        return Schema(schema.name, channel.message_encoding, definition).checked().text
    except (PenstockError, ValueError):  # the schema is too large or invalid: import the messages without it
        return None
