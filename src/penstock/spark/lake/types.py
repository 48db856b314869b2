"""The types of archived topics: schemas of the journals, kept beside the table, so that ``decode="auto"`` has them when
the journals are gone.

One JSON file a journal, ``_penstock/schemas/UUID.json``: {topic: [texts, the oldest first]}, each with the position
from which it counts (``penstock.types.versions.dated``). It is written before the commit that brings the first messages
of a type; Delta readers and ``vacuum`` pass over folders that begin with ``_``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from penstock.errors import CorruptionError, PenstockError
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
    try:
        known = _read(where, f"{FOLDER}/{journal}.json") if said else {}
    except CorruptionError as error:  # made again from what the journal says
        logger.warning("%s; written anew", error)
        known = {}
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
    return {name.rpartition("/")[2].removesuffix(".json"): _read(where, name) for name in _names(where)}


def _names(where: Store) -> list[str]:
    import pyarrow.fs

    found = where.filesystem().get_file_info(pyarrow.fs.FileSelector(FOLDER, allow_not_found=True))
    names = (entry.base_name for entry in found)
    return sorted(f"{FOLDER}/{name}" for name in names if name.endswith(".json") and name[0] != ".")


def joined(where: Store) -> dict[str, dict[str, str]]:
    """All versions of each topic as one text, by journal."""
    return {
        journal: {topic: "\n".join(lines) for topic, lines in topics.items()}
        for journal, topics in _dated(where).items()
    }


def problems(where: Store) -> Iterator[str]:
    """Files whose types cannot be read."""
    for name in _names(where):
        try:
            _read(where, name)
        except CorruptionError as error:
            yield str(error)


def _read(where: Store, name: str) -> dict[str, list[str]]:
    """A file's texts; nothing where there is none."""
    try:
        with where.filesystem().open_input_file(name) as file:
            data: Any = json.loads(file.read(MAX_BYTES))
        return {topic: [str(text) for text in list(texts)] for topic, texts in data.items() if texts}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptionError(
            f"{name} of {where.uri} is damaged ({error}): it has the types of an archived journal's topics. Where the "
            "journal is still there, delete the file and archive again, which writes it anew",
            name,
        ) from None
