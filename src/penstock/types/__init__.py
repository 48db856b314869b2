"""Types: objects in, objects out, at every reach, with schemas that travel.

``penstock.publisher("shm:/pose", type=Pose)`` and ``penstock.subscriber("shm:/pose", type=Pose)`` open typed handles;
``docs/types.md`` has the kinds. A ``Codec`` says how a type becomes bytes; ``add`` makes another one known.
"""

from __future__ import annotations

from penstock.errors import DecodeError
from penstock.types.builtin import plain
from penstock.types.codec import Codec, add, codec_of, remove
from penstock.types.compatibility import first_difference
from penstock.types.handles import TypedPublisher, TypedSubscriber
from penstock.types.schema import Schema, Terms

__all__ = [
    "Codec",
    "DecodeError",
    "Schema",
    "Terms",
    "TypedPublisher",
    "TypedSubscriber",
    "add",
    "codec_of",
    "first_difference",
    "plain",
    "remove",
]
