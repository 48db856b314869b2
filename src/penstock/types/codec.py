"""Codec: how objects of one type become bytes and bytes objects. Users add their own by ``add`` or an entry point."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from penstock.errors import InvalidArgument
from penstock.types.schema import Schema

if TYPE_CHECKING:
    from numpy import ndarray

    from penstock._core import Draft

T = TypeVar("T")
Maker = Callable[[Any], "Codec[Any] | None"]

ENTRY_POINTS = "penstock.codecs"  #: the group of entry points; each names a function as ``add`` takes


class ArrayDraft:
    """What ``reserve`` of a publisher of arrays returns; its ``with`` block gives an array over memory that is
    published at the end.
    """

    __slots__ = ("_draft", "array", "take_another")

    def __init__(self, draft: Draft, array: Any) -> None:
        self._draft = draft
        self.array = array
        self.take_another: Callable[[], Draft] | None = None  #: of the same size and options

    @property
    def open(self) -> bool:
        """Neither published nor cancelled yet."""
        return self._draft.open

    def publish(self) -> int | None:
        """Publish it; gives its ordinal where the reach knows it.

        If a view of the array is still referenced (``xyz = points["xyz"]``), a copy is published, because the view
        could change what others read.
        """
        try:
            return self._draft.publish()
        except BufferError:
            if self.take_another is None:
                raise
        data = bytes(self._draft)
        self.cancel()
        other = self.take_another()
        other.write(data)
        return other.publish()

    def cancel(self) -> None:
        """Give the memory back unpublished."""
        self._draft.cancel()

    def __enter__(self) -> ndarray[Any, Any]:
        return self.array  # type: ignore[no-any-return]

    def __exit__(self, kind: object, *_: object) -> None:
        if not self._draft.open:
            return
        if kind is not None:
            self.cancel()
        else:
            self.publish()


@dataclass(frozen=True, slots=True)
class Codec(Generic[T]):
    """How a typed handle encodes and decodes a type.

    ``schema`` is a definition as ``Schema.definition`` has it; empty: only the name is known to others. ``decode`` gets
    the message itself, which has a buffer. ``draft(take, ...)`` is what ``reserve(...)`` of its publishers does: it
    gives an ``ArrayDraft`` over the draft that ``take(size)`` gives. ``fast`` may be given where a C function does what
    ``decode`` does for most messages: it is asked first, and ``decode`` where it raises.
    """

    name: str
    encoding: str
    schema: Mapping[str, Any]
    encode: Callable[[T], Any]
    decode: Callable[[Any], T]
    draft: Callable[..., ArrayDraft] | None = field(default=None, compare=False)
    fast: Callable[[Any], T] | None = field(default=None, compare=False, repr=False)

    def described(self) -> Schema:
        """The schema that travels; ``InvalidArgument`` where it is too large."""
        return Schema(self.name, self.encoding, self.schema).checked()


_makers: list[Maker] = []
_loaded: list[Maker] | None = None
_loading = threading.Lock()


def add(maker: Maker) -> Maker:
    """Register ``maker(type)``, which is asked for a codec before all others; it returns None for types that it does
    not know.
    """
    if not callable(maker):
        raise TypeError(f"a function from a type to its codec is wanted, not {type(maker).__name__}")
    _makers.insert(0, maker)
    return maker


def remove(maker: Maker) -> None:
    """Undo ``add``."""
    _makers.remove(maker)


def codec_of(kind: Any) -> Codec[Any]:
    """The codec of a type, or ``kind`` itself if it is a codec. ``InvalidArgument`` lists the types that have one."""
    if isinstance(kind, Codec):
        return kind
    from penstock.types.builtin import make

    for maker in (*_makers, make, *_entry_points()):
        found = maker(kind)
        if found is not None:
            if not isinstance(found, Codec):
                raise TypeError(f"{maker!r} gave {found!r} for {kind!r}, which is no Codec")
            return found
    if isinstance(kind, str):
        raise InvalidArgument(f"type={kind!r} is a name, which shm alone compares: give the class itself")
    if not isinstance(kind, type) and make(type(kind)) is not None:
        name = type(kind).__name__
        raise InvalidArgument(f"type= is an object of class {name}; give the class itself: type={name}")
    if (hint := _INSTEAD.get(f"{kind.__module__}.{kind.__name__}" if isinstance(kind, type) else "")) is not None:
        raise InvalidArgument(f"type={kind.__name__} does not say what is in it; {hint}")
    raise InvalidArgument(
        f"type={kind!r} has no codec: a msgspec.Struct, dataclass, TypedDict, pydantic model, protobuf message, numpy "
        "dtype, pyarrow schema, str, bytes, dict, int, float, bool, Enum, datetime, a tuple, list or union of such, or "
        "a penstock.types.Codec is wanted (penstock.types.add makes others known)"
    )


_INSTEAD = {
    "numpy.ndarray": "give the dtype of its items, such as numpy.dtype('f8'), or penstock.Image",
    "pyarrow.lib.RecordBatch": "give its pyarrow.schema",
    "pyarrow.lib.Table": "give its pyarrow.schema and publish its batches",
}


def _entry_points() -> list[Maker]:
    """Loaded once, and only for a type that no other maker knows."""
    global _loaded  # noqa: PLW0603
    with _loading:
        if _loaded is None:
            from importlib.metadata import entry_points

            _loaded = [entry.load() for entry in entry_points(group=ENTRY_POINTS)]
        return _loaded
