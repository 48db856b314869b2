"""Types: objects in, objects out, at every reach, with schemas that travel.

``penstock.publisher("shm:/pose", type=Pose)`` and ``penstock.subscriber("shm:/pose", type=Pose)`` open typed handles;
``docs/types.md`` has the kinds. A ``Codec`` says how a type becomes bytes; ``add`` makes another one known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.errors import DecodeError
from penstock.types.builtin import plain
from penstock.types.codec import ArrayDraft, Codec, add, codec_of, remove
from penstock.types.compatibility import first_difference
from penstock.types.handles import TypedPublisher, TypedSubscriber
from penstock.types.schema import Schema, Terms

if TYPE_CHECKING:
    from penstock.types.image import Image

__all__ = [
    "ArrayDraft",
    "Codec",
    "DecodeError",
    "Image",
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


def __getattr__(name: str) -> Any:
    if name == "Image":  # loaded on first use, because it imports numpy
        from penstock.types.image import Image

        return Image
    raise AttributeError(f"module 'penstock.types' has no attribute {name!r}")
