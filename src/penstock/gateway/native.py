"""The loader ``native``: a module in a shared library with the C interface of ``penstock_module.h``.

The library is called without the GIL; its publish function takes the GIL again. A library is loaded once a process and
stays: unloading code that may still run is not safe.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock._core.gateway import GatewayMessage
from penstock.gateway.module import Module, Outlet
from penstock.gateway.place import Place

VERSION = 1
MAX_CONTENT_BYTES = 0x7FFFFFFF
log = logging.getLogger("penstock.gateway")


def include_directory() -> Path:
    """Where ``penstock_module.h`` is."""
    return Path(__file__).parent


class _Message(ctypes.Structure):
    _fields_ = [
        ("properties", ctypes.c_void_p),
        ("properties_size", ctypes.c_uint64),
        ("content", ctypes.c_void_p),
        ("content_size", ctypes.c_uint64),
    ]


_PUBLISH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(_Message))
_LOG = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)


class _Host(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("publish", _PUBLISH), ("log", _LOG)]


class _Api(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint32),
        ("create", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Host), ctypes.c_void_p, ctypes.c_char_p)),
        ("start", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)),
        ("receive", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(_Message))),
        ("destroy", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    ]


def load(entrypoint: Place) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Open the library and check its table; returns functions that build a module and that parse its args."""
    if isinstance(entrypoint.value, Mapping):
        entrypoint.only("module.path")
        entrypoint.need("module.path")
        entrypoint = entrypoint["module.path"]
    path = _library_path(entrypoint)
    try:
        function = ctypes.CDLL(path).penstock_module
    except OSError as error:
        hint = '; a Python class has "python" as the name of its loader' if re.fullmatch(r"[\w.]+:\w+", path) else ""
        if not hint and not os.path.exists(path) and not os.path.isabs(path):
            hint = f" (looked for in {' and '.join(map(str, _directories(entrypoint)))})"
        entrypoint.fail(f"cannot be loaded: {error}{hint}", error)
    except AttributeError as error:
        entrypoint.fail(f"{path} exports no penstock_module; see {include_directory() / 'penstock_module.h'}", error)
    function.restype = ctypes.POINTER(_Api)
    table = function()
    if not table:
        entrypoint.fail(f"{path}: penstock_module() returned null")
    api = table.contents
    if api.version != VERSION:
        entrypoint.fail(f"{path} was compiled for version {api.version} of the interface; this gateway has {VERSION}")
    if not (api.create and api.receive and api.destroy):
        entrypoint.fail(f"{path}: create, receive and destroy must all be there")
    return lambda: NativeModule(api, path), json.dumps


def _directories(entrypoint: Place) -> list[Path]:
    """Where a relative path leads from: the file, as for Python classes, and the working directory."""
    beside = [] if entrypoint.file is None else [Path(entrypoint.file).resolve().parent]
    return list(dict.fromkeys((*beside, Path.cwd())))


def _library_path(entrypoint: Place) -> str:
    """The library's path; where nothing lies in these directories the system looks for it by its name."""
    given = entrypoint.text()
    return next((str(path / given) for path in _directories(entrypoint) if (path / given).is_file()), given)


class NativeModule(Module):
    """A module in C, seen as one in Python."""

    def __init__(self, api: _Api, path: str) -> None:
        self._api = api
        self._path = path
        self._module: int | None = None
        # Kept alive with this object, because the library holds their addresses.
        self._host = _Host(VERSION, _PUBLISH(self._publish), _LOG(self._log))

    def create(self, broker: Outlet, configuration: Any) -> None:
        """Call the library's create."""
        super().create(broker, configuration)
        self._module = self._api.create(ctypes.byref(self._host), None, configuration.encode())
        if not self._module:
            raise RuntimeError(f"create() of {self._path} returned null: it could not make the module")

    def start(self) -> None:
        """Call the library's start, where it has one."""
        if self._api.start and (status := self._api.start(self._module)):
            raise RuntimeError(f"start() of {self._path} failed with status {status}")

    def receive(self, message: GatewayMessage) -> None:
        """Lend the message to the library for one call."""
        properties = message.encoded_properties
        lent = _Message(
            ctypes.cast(ctypes.c_char_p(properties), ctypes.c_void_p) if properties else None,
            len(properties),
            message.address,
            message.size,
        )
        if status := self._api.receive(self._module, ctypes.byref(lent)):
            raise RuntimeError(f"receive of {self._path} gave {status}")

    def destroy(self) -> None:
        """Call the library's destroy, once."""
        module, self._module = self._module, None
        if module:
            self._api.destroy(module)

    def _publish(self, _: int | None, pointer: Any) -> int:
        """Called by the library; an exception must not pass through C."""
        try:
            given = pointer.contents
            content = _copied("content", given.content, given.content_size)
            pairs = _copied("properties", given.properties, given.properties_size)
            self.broker.publish(self, GatewayMessage(content, _decoded(pairs)))
        except Exception as error:
            log.warning("module %r: a publish of %s was refused: %s", self.name, self._path, error)
            return -1
        return 0

    def _log(self, _: int | None, level: int, text: bytes | None) -> None:
        log.log(level, "module %r: %s", self.name, (text or b"").decode(errors="backslashreplace"))


def _copied(what: str, place: int | None, size: int) -> bytes:
    if not size:
        return b""
    if not place:
        raise ValueError(f"{what} is a null pointer with a size of {size}; give the bytes, or the size 0")
    if size > MAX_CONTENT_BYTES:
        raise ValueError(f"{what} of {size} bytes; at most {MAX_CONTENT_BYTES} are allowed")
    return ctypes.string_at(place, size)


def _decoded(pairs: bytes) -> dict[str, str]:
    if not pairs:
        return {}
    texts = pairs.decode().split("\0")
    if texts[-1] or len(texts) % 2 == 0:
        raise ValueError("properties must be key NUL value NUL ...")
    found = dict(zip(texts[:-1:2], texts[1::2], strict=True))
    if len(found) * 2 != len(texts) - 1:
        raise ValueError("a property's key is there twice")
    return found
