"""Why nothing arrives at an address: what its journal knows about it. Only reads."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from penstock import address as addresses
from penstock import topics
from penstock.errors import CorruptionError
from penstock.finding import Finding
from penstock.printable import command
from penstock.quantities import iso_time, number_of

__all__ = ["describe", "end_of", "explain", "no_topic", "publishing"]

MOST_NAMES = 20  # topics that an answer lists, the nearest first


def explain(parts: addresses.Address) -> Iterator[Finding]:
    from penstock.journal import Journal
    from penstock.journal.commands import info
    from penstock.journal.layout import MARKER_NAME

    directory = Path(parts.name)
    if not (directory / MARKER_NAME).exists():
        yield Finding(f"{directory} is no journal yet: nobody has written to it", command("pub", parts.text, "hello"))
        return
    if not os.access(directory, os.R_OK | os.X_OK):
        yield Finding(f"{directory} cannot be read by this user", "chmod, or run as its owner")
        return
    topic = parts.topic or "default"
    with Journal(directory, mode="read") as journal:
        lacking = no_topic(directory, topic, journal.topics)
        if lacking is not None:
            yield lacking
        else:
            kept = sum(found.messages for found in info(directory).topics if topics.matches(topic, found.name))
            yield Finding(f"it keeps {number_of(kept, 'message')} of {topic}", grave=False)
            yield Finding("a reader that begins with new messages does not see those", "--from 1", grave=False)


def no_topic(directory: Path, topic: str, known: Collection[str]) -> Finding | None:
    """That none of the topics ``known`` is ``topic``, or matches that pattern; None: one does."""
    if any(topics.matches(topic, name) for name in known):
        return None
    near = difflib.get_close_matches(topic, known, n=3, cutoff=0.4)
    names = [*near, *sorted(set(known) - set(near))]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return Finding(f"no topic {topic!r} in {directory}", f"it has {', '.join(names[:MOST_NAMES]) or 'none yet'}{more}")


def publishing(parts: addresses.Address) -> set[int]:
    """The process that writes the journal; none where there is no journal yet."""
    from penstock.journal.lock import writer_pid

    try:
        pid = writer_pid(Path(parts.name))
    except OSError:
        return set()
    return set() if pid is None else {pid}


def end_of(directory: str) -> int | None:
    """The position after the last durable message; None where there is no journal that this process can read."""
    from penstock.journal import layout
    from penstock.journal.disk import read_part
    from penstock.journal.recovery import read_frontier

    marker = Path(directory) / layout.MARKER_NAME
    try:
        identity = layout.decode_marker(read_part(marker, 0, layout.MARKER_BYTES), str(marker))
        words = read_frontier(Path(directory), identity)
    except (OSError, CorruptionError):
        return None
    return words.frontier if words is not None else None


def describe(parts: addresses.Address) -> dict[str, Any]:
    """What is stored for an address: for its topic, or for all if it names none."""
    from penstock.journal.commands import info
    from penstock.journal.layout import MARKER_NAME

    directory = Path(parts.name)
    if not (directory / MARKER_NAME).exists():
        return {}
    known = info(directory)
    found = [topic for topic in known.topics if not parts.topic or topics.matches(parts.topic, topic.name)]
    facts: dict[str, Any] = {"journal": str(directory.resolve()), "messages": sum(topic.messages for topic in found)}
    if len(found) == 1 and found[0].messages:
        facts["ordinals"] = f"{found[0].least_ordinal} to {found[0].greatest_ordinal}"
    if last_ns := max((topic.greatest_stored_ns for topic in found), default=0):
        facts["last stored"] = iso_time(last_ns)
    facts["topics"] = ", ".join(topic.name for topic in found[:8]) + (" ..." if len(found) > 8 else "") or "none"
    if not parts.topic:
        facts["bytes"] = known.bytes
    facts["writer"] = "none" if known.writer_pid is None else f"process {known.writer_pid}"
    return facts
