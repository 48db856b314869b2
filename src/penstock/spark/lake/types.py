"""The types of archived topics: schemas of the journals, kept beside the table, so that ``decode="auto"`` has them when
the journals are gone.

One JSON file a journal, ``_penstock/schemas/UUID.json``: {topic: [texts, the oldest first]}, each with the position
from which it counts (``penstock.types.versions.dated``). It is written before the commit that brings the first messages
of a type; Delta readers and ``vacuum`` pass over folders that begin with ``_``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.errors import PenstockError
from penstock.spark.lake.store import Store
from penstock.spark.places import Place
from penstock.types.schema import MAX_VERSIONS
from penstock.types.versions import undated

FOLDER = "_penstock/schemas"
MAX_BYTES = 64 << 20  # of one journal's file
logger = logging.getLogger("penstock.spark")


def keep(where: Store, places: Iterable[Place]) -> None:
    """Add what the journals say of their topics now. What cannot be had is logged: the messages count for more."""
    for place in places:
        try:
            _add(where, place.uuid, place.schemas())
        except (OSError, PenstockError, ModuleNotFoundError) as error:
            logger.warning("the types of journal %s are not kept in %s: %s", place.uuid, where.uri, error)


def _add(where: Store, journal: str, said: Mapping[str, str]) -> None:
    known = _read(where, f"{FOLDER}/{journal}.json") if said else {}
    more = {}
    for topic, text in said.items():
        before = known.get(topic, [])
        added = [line for line in text.split("\n") if line not in before]
        if added:
            more[topic] = [*before, *added][-MAX_VERSIONS:]
    if more:
        where.replace(f"{FOLDER}/{journal}.json", json.dumps({**known, **more}, sort_keys=True).encode())


def versions(where: Store) -> dict[str, dict[str, list[str]]]:
    """All that was said, by journal and topic, the oldest first."""
    return {
        journal: {topic: [undated(line)[1] for line in lines] for topic, lines in topics.items()}
        for journal, topics in _dated(where).items()
    }


def _dated(where: Store) -> dict[str, dict[str, list[str]]]:
    import pyarrow.fs

    found = where.filesystem().get_file_info(pyarrow.fs.FileSelector(FOLDER, allow_not_found=True))
    names = sorted(
        entry.base_name for entry in found if entry.base_name.endswith(".json") and entry.base_name[0] != "."
    )
    return {name.removesuffix(".json"): _read(where, f"{FOLDER}/{name}") for name in names}


def joined(where: Store) -> dict[str, dict[str, str]]:
    """All versions of each topic as one text, by journal."""
    return {
        journal: {topic: "\n".join(lines) for topic, lines in topics.items()}
        for journal, topics in _dated(where).items()
    }


def _read(where: Store, name: str) -> dict[str, list[str]]:
    """A file's texts; what is damaged counts as not said."""
    try:
        with where.filesystem().open_input_file(name) as file:
            data: Any = json.loads(file.read(MAX_BYTES))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    items = data.items() if isinstance(data, dict) else ()
    return {topic: [str(text) for text in texts] for topic, texts in items if isinstance(texts, list) and texts}
