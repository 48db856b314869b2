"""Calls of modules that no audit event shows and whose results differ from one replay to the next: the machine's clock,
and random numbers that are not of the seed. Functions of the library are replaced meanwhile by ones that note the call.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import ctypes
import datetime
import functools
import gc
import importlib
import inspect
import logging
import os
import random
import secrets
import sys
import sysconfig
import time
import types
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import penstock
from penstock.gateway.configuration import imported

__all__ = ["is_of_library", "noted_calls", "replace", "user_of"]

CLOCK = "this is the machine's time, not recorded time; use self.clock or penstock.clock"
RANDOM = "these random numbers do not depend on --seed; use the module random"
PENSTOCK = str(Path(penstock.__file__).parent) + os.sep
INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})
LIBRARY = (sysconfig.get_path("stdlib") + os.sep, "<")  # frozen modules, and methods that dataclasses and others write

#: What notes a call: its name, why that is no part of the promise, and the frame of the caller.
Note = Callable[[str, str, FrameType], None]
#: Whether a call with these arguments counts.
Counts = Callable[[tuple[Any, ...], dict[str, Any]], bool]


def _always(arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    return True


def _without(place: int) -> Counts:
    """Calls whose argument at ``place``, the time or the seed, is missing or None."""

    def without(arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
        return (len(arguments) <= place or arguments[place] is None) and options.get("a") is None  # ``seed(a=3)``

    return without


CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime")
#: The object, the name in it, whether a call counts, why it is noted, and its name for the user, if that is another.
CALLS: tuple[tuple[Any, str, Counts, str, str], ...] = (
    *((time, name + unit, _always, CLOCK, "") for name in CLOCKS for unit in ("", "_ns")),
    *((time, name, _without(0), CLOCK, "") for name in ("localtime", "gmtime", "ctime", "asctime")),
    (time, "strftime", _without(1), CLOCK, ""),
    (os, "times", _always, CLOCK, ""),
    (os, "urandom", _always, RANDOM, ""),
    (os, "getrandom", _always, RANDOM, ""),
    (uuid, "uuid1", _always, RANDOM, ""),
    (uuid, "uuid4", _always, RANDOM, ""),
    # The functions of ``secrets`` call these; numpy calls ``randbits`` for a seed where none is given.
    *((random.SystemRandom, name, _always, RANDOM, "secrets or random.SystemRandom")
      for name in ("random", "getrandbits", "randbytes")),
    (secrets, "randbits", _always, RANDOM, "secrets.randbits or a generator of numpy.random without a seed"),
    (random, "seed", _without(0), RANDOM, "random.seed without a seed"),
    (random.Random, "seed", _without(1), RANDOM, "random.Random without a seed"),
)  # fmt: skip
MADE = random.Random.__init__.__code__  # calls ``seed``
COPIERS = (copy.__file__, copyreg.__file__)
NUMPY = "numpy.random.bit_generator"  # has ``randbits`` by name


@contextlib.contextmanager
def noted_calls(note: Note) -> Iterator[None]:
    """Inside, calls of these functions are noted. A module that is imported meanwhile may keep what stands for one of
    them: ``note`` is called for as long as it does.
    """
    with contextlib.ExitStack() as stack:
        for owner, name, counts, why, shown in CALLS:
            if hasattr(owner, name):
                told = functools.partial(note, shown or f"{owner.__name__}.{name}", why)
                replace(stack, owner, name, _noted(getattr(owner, name), counts, told))
        if (numpy := sys.modules.get(NUMPY)) is not None and hasattr(numpy, "randbits"):
            told = functools.partial(note, "a generator of numpy.random without a seed", RANDOM)
            replace(stack, numpy, "randbits", _noted(numpy.randbits, _always, told))
        if sys.implementation.name == "cpython":
            for kind, name in ((datetime.datetime, "now"), (datetime.datetime, "utcnow"), (datetime.date, "today")):
                _replace_in_datetime(stack, kind, name, note)
        yield


def replace(stack: contextlib.ExitStack, owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Set an attribute until the stack ends. ``function`` looks like what it replaces."""
    before = getattr(owner, name)
    functools.update_wrapper(function, before)
    stack.callback(setattr, owner, name, before)
    is_function = isinstance(before, types.FunctionType)
    setattr(owner, name, function if is_function else _StandIn(function, before, owner, name))


class _StandIn(functools.partial[Any]):
    """Stands for a built-in function or bound method of a module: as an attribute of a class it does not become a
    method, as a function would, and it is pickled by its name. (A ``partial`` adds no frame to the call.)
    """

    __name__: str
    __wrapped__: Any

    def __new__(cls, function: Callable[..., Any], before: Any, owner: types.ModuleType, name: str) -> _StandIn:
        made = super().__new__(cls, function)
        functools.update_wrapper(made, before)
        made.__module__, made.__name__ = owner.__name__, name
        return made

    def __get__(self, instance: object, owner: type | None = None) -> _StandIn:
        return self

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def __copy__(self) -> _StandIn:
        return self

    def __deepcopy__(self, memo: object) -> _StandIn:
        return self

    def __reduce__(self) -> Any:
        module, name = self.__module__, self.__name__
        if getattr(sys.modules.get(module), name, None) is self:
            return name
        return getattr, (_Module(module), name)  # a module of the user's has kept it after the replay


class _Module:
    """Is pickled as a module, by its name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> Any:
        return importlib.import_module, (self._name,)


def _is_made_again(frame: FrameType | None) -> bool:
    """Whether ``copy`` makes an object: it gets its state right after that."""
    return frame is not None and frame.f_code.co_filename in COPIERS


def _noted(function: Callable[..., Any], counts: Counts, note: Callable[[FrameType], None]) -> Callable[..., Any]:
    def noted(*arguments: Any, **options: Any) -> Any:
        if counts(arguments, options):
            caller = sys._getframe(1)
            if caller.f_code is not MADE or not _is_made_again(caller.f_back):
                note(caller)
        return function(*arguments, **options)

    return noted


def _replace_in_datetime(stack: contextlib.ExitStack, kind: type, name: str, note: Note) -> None:
    """Replace a class method of ``datetime`` or ``date``. Python refuses to set attributes of these classes, and others
    in their place would be other types for those who look at annotations; so this writes into their dictionaries.
    """
    attributes = next(iter(gc.get_referents(kind.__dict__)), None)
    if not isinstance(attributes, dict) or name not in attributes:  # a Python that keeps it in another way
        return
    before = attributes[name]

    def noted(cls: type, *arguments: Any, **options: Any) -> Any:
        known = datetime.datetime if issubclass(cls, datetime.datetime) else kind
        note(f"{known.__name__}.{name}", CLOCK, sys._getframe(1))
        return before.__get__(None, cls)(*arguments, **options)

    def put(method: Any) -> None:
        attributes[name] = method
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))  # Python keeps what it has looked up

    functools.update_wrapper(noted, getattr(kind, name))
    with contextlib.suppress(ValueError):  # Python knows none
        signature = inspect.signature(getattr(kind, name))
        first = inspect.Parameter("cls", inspect.Parameter.POSITIONAL_ONLY)
        noted.__signature__ = signature.replace(parameters=[first, *signature.parameters.values()])  # type: ignore[attr-defined]
    del noted.__wrapped__  # type: ignore[attr-defined]  # it has no ``cls``
    stack.callback(put, before)
    put(classmethod(noted))


def is_of_library(frame: FrameType) -> bool:
    """Whether this is code of Python's own library."""
    file = frame.f_code.co_filename
    return file.startswith(LIBRARY) and not file.startswith(INSTALLED)


def user_of(frame: FrameType | None) -> FrameType | None:
    """Whose call this is: the innermost frame of a module or program of the user's, else that of an installed package.
    None: Penstock's, or one of the library's or a package's own that changes no result (a log's time, its import).
    """
    package: FrameType | None = None
    importing = False
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PENSTOCK):
            # A gateway's module may be an installed one; others are imported by Penstock for itself.
            return package if not importing or frame.f_code is imported.__code__ else None
        if file.startswith("<frozen importlib"):
            importing = True
        elif file.startswith(INSTALLED):
            if importing:
                return None
            package = package or frame
        elif not file.startswith(LIBRARY):
            return None if importing else frame
        elif file == logging.__file__:
            return None
        frame = frame.f_back
    return None if importing else package
