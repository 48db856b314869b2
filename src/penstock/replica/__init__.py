"""A broker's log on a replicated stream: one commit is one block, confirmed when a quorum of machines has it.

``Replica(directory, JetStream(Target.parse("nats://h1,h2,h3/STREAM"))).disk()`` is the disk that a journal is opened
with (``Target`` is in ``penstock.replica.stream``). What the journal
writes and syncs is appended to the stream; the directory is a copy of it, which is rebuilt if it is missing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.replica.appender import FencedError
    from penstock.replica.replica import Replica
    from penstock.replica.stream import Blocks, JetStream

_PLACES = {"Blocks": "stream", "FencedError": "appender", "JetStream": "stream", "Replica": "replica"}

__all__ = ["Blocks", "FencedError", "JetStream", "Replica"]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(f"penstock.replica.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'penstock.replica' has no attribute {name!r}")
