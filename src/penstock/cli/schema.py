"""``penstock schema``: the schema of the messages of an address, a journal or a recording."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

import penstock
from penstock import address as addresses
from penstock.cli import exits, show, silence
from penstock.cli.target import is_folder
from penstock.errors import InvalidArgument, RefusedError
from penstock.shm import directory
from penstock.types import Schema

app = typer.Typer()

LOOK_S = 0.02


@app.command()
def schema(
    target: Annotated[str, typer.Argument(help="An address, or the folder of a journal, recording or lake.")],
    every: Annotated[bool, typer.Option("--all", help="Every stored version, not only the newest.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a publisher's greeting.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a schema.")] = False,
) -> None:
    """Show the schema of messages that a typed publisher publishes: JSON Schema, protobuf, Arrow or dtype.

    Example: [green]penstock schema shm:/pose[/]
    """
    found = 0
    journal = Path(target.removeprefix("journal:"))  # without a topic, all of them are shown
    said = _of_folder(journal, every) if journal.is_dir() or is_folder(target) else _of_address(target, every, timeout)
    for where, version, text in said:
        found += 1
        described = Schema.parse(text)
        if as_json:
            whole = {"name": described.name, "encoding": described.encoding, "digest": described.digest}
            show.print_json({"of": where, "version": version, **whole, "definition": described.definition})
        else:
            told = f", version {version}" if version else ""
            print(f"{where}: {described.name} as {described.encoding}{told}")
            print("".join(f"  {line}\n" for line in lines(described)))
    if not found:
        exits.told(f"{addresses.without_secrets(target)}: no publisher has declared a type (publish with type=)")
        raise typer.Exit(exits.FAILED)


def _of_folder(folder: Path, every: bool) -> Iterator[tuple[str, int, str]]:
    from penstock.journal.schemas import read_schemas
    from penstock.recording.story import parts

    if (folder / "_delta_log").is_dir():
        yield from _of_lake(folder, every)
        return
    for part in parts(folder):
        schemas = read_schemas(part)
        for topic in schemas.topics:
            versions = list(schemas.versions(topic).items())
            for version, text in versions if every else versions[-1:]:
                yield f"{part}#{topic}", version, text


def _of_lake(folder: Path, every: bool) -> Iterator[tuple[str, int, str]]:
    from penstock.spark.lake import types
    from penstock.spark.lake.store import store

    for topics in types.versions(store(folder)).values():
        for topic, texts in topics.items():
            numbered = list(enumerate(texts, 1))
            for version, text in numbered if every else numbered[-1:]:
                yield f"{folder}#{topic}", version, text


def _of_address(target: str, every: bool, timeout: float) -> Iterator[tuple[str, int, str]]:
    parts = addresses.parse(target)
    if parts.scheme == "bus":
        raise InvalidArgument(f"{parts.text}: a bus is seen only by its own process")
    silence.refuse_nobody(parts)
    if parts.scheme == "shm" and "mux" not in parts.options and (seen := directory.schemas(parts.name)):
        for one in seen if every else seen[-1:]:  # without joining: a publisher may wait for its first subscriber
            yield parts.text, 0, one
        return
    deadline = time.monotonic() + timeout
    with penstock.subscriber(target) as subscriber:
        text = subscriber.schema
        while text is None and parts.scheme == "tcp" and time.monotonic() < deadline:
            time.sleep(LOOK_S)
            text = subscriber.schema
        versions = subscriber.schemas_of(parts.topic) if every else []
        if not text and not versions and (nobody := _why_no_schema(parts, subscriber)):
            raise RefusedError(f"{addresses.without_secrets(target)}: {nobody}")
    for one in versions or ([text] if text else []):
        yield parts.text, 0, one


def _why_no_schema(parts: addresses.Address, subscriber: Any) -> str:
    """Why there is no schema: nobody publishes there. Empty if somebody does, or if that cannot be known."""
    if parts.scheme == "tcp":
        from penstock.tcp.explain import unreached

        return unreached(subscriber, time.monotonic())
    if parts.scheme == "shm":
        from penstock.shm import channels
        from penstock.shm.explain import publishing

        if not publishing(parts, {channel.name: channel for channel in channels()}):
            return "nobody publishes it on this machine"
    return ""


def lines(described: Schema) -> list[str]:
    """A schema as readable lines; a damaged one unchanged."""
    with contextlib.suppress(AttributeError, IndexError, KeyError, TypeError, ValueError):
        return _lines(described)
    return json.dumps(described.definition, indent=2).splitlines()


def _lines(described: Schema) -> list[str]:
    definition: Any = described.definition.get(described.language)
    if described.language == "protobuf":
        return list(_protobuf(described.name, definition))
    if described.language == "arrow":
        return [f"{name}: {kind}{'' if nullable else ' not null'}" for name, kind, nullable in definition["fields"]]
    if described.language == "dtype" and isinstance(definition, list):
        return [f"{field[0]}: {field[1]}{f' {tuple(field[2])}' if len(field) > 2 else ''}" for field in definition]
    if definition is None:
        return ["only its name is known"]
    return json.dumps(definition, indent=2).splitlines()


def _protobuf(name: str, definition: Any) -> Iterator[str]:
    for message, fields in {name: definition, **definition.get("messages", {})}.items():
        yield f"message {message} {{"
        for number, field in fields["fields"].items():
            yield f"  {field['label']} {field.get('message', field['type'])} {field['name']} = {number};"
        yield "}"
