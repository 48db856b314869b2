"""Why nothing arrives: what a journal can tell about the silence of an address. Looks, and joins nothing."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from pathlib import Path

from penstock import address as addresses
from penstock import topics
from penstock.finding import Finding

__all__ = ["explain"]


def explain(parts: addresses.Address) -> Iterator[Finding]:
    from penstock.journal import Journal
    from penstock.journal.layout import MARKER_NAME

    directory = Path(parts.name)
    if not (directory / MARKER_NAME).exists():
        yield Finding(f"{directory} is no journal yet: nobody has written to it", f"penstock pub {parts.text} 'hello'")
        return
    if not os.access(directory, os.R_OK | os.X_OK):
        yield Finding(f"{directory} cannot be read by this user", "chmod, or run as its owner")
        return
    topic = parts.topic or "default"
    with Journal(directory, mode="read") as journal:
        known = journal.topics
        if not any(topics.matches(topic, name) for name in known):
            near = difflib.get_close_matches(topic, known, n=3, cutoff=0.4) or sorted(known)[:3]
            yield Finding(f"no topic {topic!r} in {directory}", f"it has {', '.join(near) or 'none yet'}")
        else:
            yield Finding(f"{journal.frontier - journal.first} messages are kept there", grave=False)
            yield Finding("a reader that begins with new messages does not see those", "--from 1", grave=False)
