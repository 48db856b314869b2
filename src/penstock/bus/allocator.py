"""Allocators: where the memory of messages comes from.

- ``SlabAllocator``: a fixed number of blocks; when all are in use, it gives None at once or after a time-out.
  ``HeapAllocator``: any size. ``CustomAllocator``: memory from an object of the user.
- A run-time allocator is added to one bus (``bus.add_allocator``), which assigns its id (128 to 254). A static one is
  declared once, at module level (``static_slab``), has an id of 1 to 127 and serves every bus.
- ``outstanding()`` lists the messages in use; with ``debug=True`` also the line that allocated each.

May be called from any thread; ``allocate`` waits without the GIL.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol, Self

from penstock._core import bus as _native
from penstock.errors import InvalidArgument

DEFAULT_MAX_MESSAGE_BYTES = 1 << 31
PLACE_FRAMES = 8


@dataclass(frozen=True, slots=True)
class Outstanding:
    """A message in use: allocated and not yet released."""

    id: int
    size: int
    reference_count: int
    address: int
    place: tuple[str, ...]  # "file:line in function", innermost first; empty without debug=True


class MemorySource(Protocol):
    """Where a custom allocator gets its memory from."""

    def allocate(self, size: int, /) -> Any:
        """A writable buffer of at least ``size`` bytes, or None when there is none now."""

    def free(self, memory: Any, /) -> None:
        """Free a buffer from ``allocate``."""


class _Allocator(_native.Allocator):
    def outstanding(self) -> list[Outstanding]:
        """The messages in use."""
        return [Outstanding(*fields[:4], place=fields[4] or ()) for fields in self._outstanding()]

    def _place(self) -> tuple[str, ...]:
        """Called by the native core in debug mode: the stack that allocates a message."""
        lines: list[str] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and len(lines) < PLACE_FRAMES:
            code = frame.f_code
            lines.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}")
            frame = frame.f_back
        return tuple(lines)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}, id {self.id}, {self.in_use} out>"


class SlabAllocator(_Allocator):
    """``count`` blocks of ``block_size`` bytes each."""

    block_size: int
    count: int

    def __new__(cls, block_size: int, count: int, *, name: str = "slab", debug: bool = False) -> Self:
        if block_size < 1 or count < 1:
            raise InvalidArgument(f"block_size={block_size} and count={count} must be 1 or more")
        self = super().__new__(cls, "slab", name, block_size, count, None, debug)
        self.block_size = block_size
        self.count = count
        return self


class HeapAllocator(_Allocator):
    """Messages of any size up to ``max_message_bytes``; at most ``max_messages`` in use at a time, if given."""

    def __new__(
        cls,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        max_messages: int | None = None,
        *,
        name: str = "heap",
        debug: bool = False,
    ) -> Self:
        if max_messages is not None and max_messages < 1:
            raise InvalidArgument(f"max_messages={max_messages} must be 1 or more, or None")
        return super().__new__(cls, "heap", name, max_message_bytes, max_messages or 0, None, debug)


class CustomAllocator(_Allocator):
    """Memory from ``source.allocate(size)``, freed with ``source.free(memory)``."""

    def __new__(
        cls,
        source: MemorySource,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        *,
        name: str = "custom",
        debug: bool = False,
    ) -> Self:
        for method in ("allocate", "free"):
            if not callable(getattr(source, method, None)):
                raise TypeError(f"the source of a custom allocator needs a method {method}()")
        return super().__new__(cls, "custom", name, max_message_bytes, 0, source, debug)


def static_slab(block_size: int, count: int, *, name: str = "static slab", debug: bool = False) -> SlabAllocator:
    """A slab for every bus, to be declared at module level; it has its id at once and keeps it."""
    allocator = SlabAllocator(block_size, count, name=name, debug=debug)
    allocator._attach(None)
    _declared.append(allocator)
    return allocator


_declared: list[SlabAllocator] = []  # static ones live as long as the process
