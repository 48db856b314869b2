"""Loaders: how a module's entry point becomes a module. ``python`` is implemented here; ``process`` and ``native`` are
imported when they are used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.address import without_secrets
from penstock.errors import InvalidArgument, nearest
from penstock.gateway.configuration import KINDS, LoaderEntry, ModuleEntry, imported
from penstock.gateway.errors import ModuleError
from penstock.gateway.module import Module, Outlet, refuse_generators
from penstock.gateway.place import ConfigurationError, Place


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything needed to create a module, and to create it again after a failure."""

    name: str
    build: Callable[[], Any]
    configuration: Any

    @property
    def shown(self) -> str:
        """The name without secrets: an endpoint's name is an address, which may contain a token."""
        return without_secrets(self.name)

    @property
    def durable(self) -> bool:
        """Whether the module will be a durable source, as far as its class says."""
        durable_with = getattr(self.build, "durable_with", None)
        return bool(durable_with(self.configuration) if durable_with else getattr(self.build, "durable", False))

    def make(self, broker: Outlet) -> Any:
        """Create the module; ``ModuleError`` names it and the step that failed."""
        try:
            module = self.build()
            refuse_generators(module)
            module.name = self.shown
        except Exception as error:
            raise ModuleError(f"module {self.shown!r} could not be built: {_reason_text(error)}") from error
        try:
            if inspect.iscoroutinefunction(getattr(module, "create", None)):
                raise TypeError("create cannot be async; begin what awaits in start")
            if isinstance(module, Module):  # a subclass's create may not call Module.create
                Module.create(module, broker, self.configuration)
            if hasattr(module, "create"):
                module.create(broker, self.configuration)
        except ConfigurationError:
            raise  # the module's process found an error in the configuration; it names the place itself
        except Exception as error:
            raise ModuleError(f"module {self.shown!r} failed in create: {_reason_text(error)}") from error
        return module


def recipe(entry: ModuleEntry, loaders: Mapping[str, LoaderEntry], *, check: bool = False) -> Recipe:
    """Load the entry point and parse the args; nothing is created yet. With ``check``, also check here what otherwise
    only another process would find.
    """
    path, file = entry.where
    data = {"loader": {"name": entry.loader, "entrypoint": entry.entrypoint}, "args": entry.args}
    place = Place(data, path or entry.name, file)
    loader = loaders.get(entry.loader)
    kind = loader.kind if loader else entry.loader
    shared = loader.configuration if loader else {}
    entrypoint = place["loader"]["entrypoint"]
    if kind == "python":
        built: tuple[Callable[[], Any], Callable[[Any], Any]] = python(entrypoint)
    elif kind == "process":
        from penstock.gateway import process

        built = process.load(entry, entrypoint, shared, place["args"])
        if check:
            process.check(entrypoint, shared, place["args"])
    elif kind == "native":
        from penstock.gateway import native

        built = native.load(entrypoint)
    else:
        raise InvalidArgument(f"{kind!r} is not a loader; {nearest(kind, (*KINDS, *loaders))}")
    build, parse = built
    return Recipe(entry.name, build, parsed(parse, place["args"]))


def parsed(parse: Callable[[Any], Any], args: Place) -> Any:
    """The configuration that a module's ``parse`` makes of its args."""
    try:
        return parse(args.value)
    except Exception as error:
        args.fail(_reason_text(error), error)


def python(entrypoint: Place) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """A class by ``package.module:Class``; how to build one and how to parse its args."""
    if isinstance(entrypoint.value, Mapping):
        entrypoint.only("class")
        entrypoint.need("class")
        entrypoint = entrypoint["class"]
    return of_class(imported(entrypoint), entrypoint)


def of_class(kind: Any, place: Place) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """The same for the class itself, which is named at ``place``."""
    if not callable(kind) or not hasattr(kind, "receive"):
        place.fail(f"{place.value!r} is no class with a receive method")
    try:
        refuse_generators(kind)
    except TypeError as error:
        place.fail(str(error), error)
    return kind, getattr(kind, "parse", _as_given)


def _as_given(args: Any) -> Any:
    return args


def _reason_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
