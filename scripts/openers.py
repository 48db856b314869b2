"""Write ``src/penstock/ROOM/opening.pyi``: the types of each room's ``publisher`` and ``subscriber``.

With ``type=`` they give typed handles; their other options are the room's own and those of ``durable=``. A ParamSpec
allows no keyword beside it, so type checkers get overloads over a TypedDict of the options, written from the signatures
of ``open_publisher`` and ``open_subscriber``. Run ``python scripts/openers.py`` after one of them has changed.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path

from penstock.address import ROOMS, room_options

HEAD = "# Written by scripts/openers.py from the signatures of open_publisher and open_subscriber."
STANDARD = (
    "import datetime",
    "import os",
    "import ssl",
    "from collections.abc import Callable",
    "from typing import Any, TypedDict, TypeVar, Unpack, overload",
)
OWN = (
    "from penstock._core import Message",
    "from penstock.address import ArrayLike",
    "from penstock.channel import Overflow",
    "from penstock.durable_publisher import DurablePublisher",
    "from penstock.journal.follow import Follower",
    "from penstock.types import Codec, TypedPublisher, TypedSubscriber",
    "from penstock.types.image import Image",
)
ROOM = {
    "bus": ("from penstock.bus import Publisher, QueueSubscriber",),
    "shm": ("from penstock.shm import Publisher, Subscriber", "from penstock.shm.publisher import ResizeCallback"),
    "tcp": ("from penstock.tcp import Executor, Publisher, Subscriber", "from penstock.tcp.past import Past"),
    "journal": ("from penstock.journal import JournalPublisher",),
    "broker": ("from penstock.broker import Publisher, Subscriber",),
    "nats": ("from penstock.channel import Publisher, Subscriber",),
}
TYPES = {  # what type= is, and the value that the handle then has
    "publisher": [("type[ArrayLike]", "ndarray"), ("type[T]", "T"), ("Codec[T]", "T"), ("dtype[Any]", "ndarray")],
    "subscriber": [
        ("type[Image]", "Image"), ("type[ArrayLike]", "ndarray"), ("type[T]", "T"), ("Codec[T]", "T"),
        ("dtype[Any]", "ndarray"),
    ],
}  # fmt: skip
#: What asks for a handle that is kept on disk, or read from there; the one that it then gives.
ON_DISK = {"publisher": (["durable"], "DurablePublisher"), "subscriber": (["start", "durable"], "Follower")}


def stub(scheme: str) -> str:
    """The text of a room's ``opening.pyi``."""
    body = "".join(_side(scheme, kind) for kind in TYPES)
    used = set(re.findall(r"\w+", body))
    standard = [line for line in STANDARD if used & set(re.findall(r"\w+", line.partition("import ")[2]))]
    own = [line for line in OWN if used & set(re.findall(r"\w+", line.partition("import ")[2]))]
    imports = sorted([*own, *ROOM[scheme]], key=lambda line: line.split()[1])
    head = [HEAD, *standard, "", "from numpy import dtype, ndarray", "", *imports, "", 'T = TypeVar("T")', ""]
    return "\n".join(head) + body


def _side(scheme: str, kind: str) -> str:
    function = getattr(importlib.import_module(ROOMS[scheme]), f"open_{kind}")
    found = room_options(kind, scheme, function).items()
    options = {name: str(option.annotation).strip(chr(39)) for name, option in found}
    plain = f"type: {options.pop('type', 'None')} = ..."
    asks, handle = ON_DISK[kind] if set(ON_DISK[kind][0]) < set(options) else ([], "")
    asking = {name: options.pop(name) for name in asks}
    given = f"{kind.capitalize()}Options"
    lines = ["", f"class {given}(TypedDict, total=False):"]
    lines += [f"    {name}: {annotation}" for name, annotation in options.items()]
    lines.append("")
    for wanted, value in TYPES[kind]:
        typed = f"Typed{kind.capitalize()}[{'ndarray[Any, Any]' if value == 'ndarray' else value}]"
        lines += ["@overload", f"def {kind}(", f"    name: str, /, *, type: {wanted}, evolve: str = ...,"]
        lines += [f"    {name}: {annotation} = ...," for name, annotation in asking.items()]
        lines += [f"    **options: Unpack[{given}],", f") -> {typed}: ..."]
    for asked in [*asks, None]:  # the first that is given; at last none
        lines += ["@overload", f"def {kind}(", f"    name: str, /, *, {plain}, evolve: str = ...,"]
        annotations = {**asking, **dict.fromkeys(asks[: asks.index(asked)] if asked else asks, "None")}
        for name, annotation in annotations.items():
            needed = annotation.removesuffix(" | None")
            lines.append(f"    {name}: {needed}," if name == asked else f"    {name}: {annotation} = ...,")
        given_by = handle if asked else inspect.signature(function).return_annotation
        lines += [f"    **options: Unpack[{given}],", f") -> {given_by}: ..."]
    lines.append("")
    return "\n".join(lines)


def path(scheme: str) -> Path:
    """Where it is."""
    return Path(__file__).parents[1] / "src" / "penstock" / scheme / "opening.pyi"


if __name__ == "__main__":
    for room in sys.argv[1:] or ROOMS:
        path(room).write_text(stub(room))
