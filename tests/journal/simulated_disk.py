"""A disk that loses, reorders and tears what was not synced, fails syncs and fills up.

The journal runs on real files, so that mapped readers work; this records beside them what a power cut would leave. Each
file has the bytes of its last sync and the writes since; the directory has the names of its last sync and the changes
since. ``cut`` makes a directory of what might be found after a power cut: of what was not synced any part, in any order,
torn at any byte. After a failed sync the writes it should have kept are gone or not, nobody knows, and a later sync that
succeeds does not bring them back.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from penstock.journal.disk import Disk
from penstock.journal.layout import FRONTIER_NAME

Pending = tuple[int, bytes, int]  # offset, data, zeros after it


class PowerCut(OSError):
    """The disk is gone: nothing that is asked of it happens any more."""


@dataclass
class File:
    """One inode."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[Pending] = field(default_factory=list)


def put(target: bytearray, offset: int, data: bytes) -> None:
    """Write into the bytes of a file, growing it with zeros."""
    if len(target) < offset + len(data):
        target.extend(bytes(offset + len(data) - len(target)))
    target[offset : offset + len(data)] = data


def tear(chance: random.Random, item: Pending) -> list[Pending]:
    """A part of one write: none, all, a beginning, an end, or some of its sectors."""
    offset, data, zeros = item
    whole = data + bytes(zeros)
    what = chance.randrange(6)
    if what == 0:
        return []
    if what == 1:
        return [item]
    cut = chance.randrange(len(whole) + 1)
    if what == 2:
        return [(offset, whole[:cut], 0)]
    if what == 3:
        return [(offset + cut, whole[cut:], 0)]
    if what == 4:  # cut within the data, not the zeros after it
        cut = chance.randrange(len(data) + 1)
        return [(offset, whole[:cut], 0)]
    parts: list[Pending] = []
    at = 0
    while at < len(whole):
        step = min(512 - (offset + at) % 512, len(whole) - at)
        if chance.random() < 0.5:
            parts.append((offset + at, whole[at : at + step], 0))
        at += step
    return parts


class SimulatedDisk(Disk):
    """``fail(operation, name)`` may give an errno for a ``write`` or ``sync``; ``cut_at`` counts operations down."""

    native = False

    def __init__(
        self,
        directory: Path,
        chance: random.Random,
        *,
        cut_at: int | None = None,
        fail: Callable[[str, str], int] | None = None,
    ) -> None:
        self.directory = directory
        self.chance = chance
        self.cut_at = cut_at
        self.fail = fail
        self.operations = 0
        self.dead = False
        self.names: dict[str, File] = {}  # durable
        self.changes: list[tuple[str, File | None]] = []  # names set or removed since the last sync of the directory
        self.now: dict[str, File] = {}
        self.files: dict[int, tuple[str, File]] = {}
        self.frontiers: list[bytes] = []
        if directory.exists():
            for path in directory.iterdir():
                self.names[path.name] = self.now[path.name] = File(bytearray(path.read_bytes()))

    def _step(self, operation: str, name: str) -> int:
        """One more operation: the power may be cut before it, or it may be told to fail."""
        if self.dead:
            raise PowerCut(errno.EIO, "the power is off")
        self.operations += 1
        path = self.directory / FRONTIER_NAME
        if path.exists():
            words = path.read_bytes()
            if not self.frontiers or self.frontiers[-1] != words:
                self.frontiers.append(words)
        return self.fail(operation, name) if self.fail else 0

    def _cut(self) -> None:
        """The power goes in the middle of the operation that has just been noted."""
        if self.cut_at is not None and self.operations >= self.cut_at:
            self.dead = True
            raise PowerCut(errno.EIO, "the power went")

    def create(self, path: Path, mode: int = 0o600) -> int:
        self._step("create", path.name)
        file = super().create(path, mode)
        model = File()
        self.now[path.name] = model
        self.changes.append((path.name, model))
        self.files[file] = (path.name, model)
        self._cut()
        return file

    def open(self, path: Path) -> int:
        if self.dead:
            raise PowerCut(errno.EIO, "the power is off")
        file = super().open(path)
        self.files[file] = (path.name, self.now[path.name])
        return file

    def close(self, file: int) -> None:
        self.files.pop(file, None)
        super().close(file)

    def write(self, file: int, data: bytes, zeros: int, offset: int) -> None:
        name, model = self.files[file]
        error = self._step("write", name)
        data = bytes(data)
        if error:
            part = data[: self.chance.randrange(len(data) + 1)]
            model.pending.append((offset, part, 0))
            super().write(file, part, 0, offset)
            raise OSError(error, os.strerror(error))
        model.pending.append((offset, data, zeros))
        self._cut()
        super().write(file, data, zeros, offset)

    def sync(self, file: int) -> None:
        name, model = self.files[file]
        error = self._step("sync", name)
        self._cut()
        if error:  # what could not be written is clean in memory and lost, or not
            for item in self._reordered(model.pending):
                for part in tear(self.chance, item):
                    put(model.durable, part[0], part[1] + bytes(part[2]))
            model.pending.clear()
            raise OSError(error, os.strerror(error))
        for offset, data, zeros in model.pending:
            put(model.durable, offset, data + bytes(zeros))
        model.pending.clear()

    def rename(self, old: Path, new: Path) -> None:
        self._step("rename", new.name)
        super().rename(old, new)
        model = self.now.pop(old.name)
        self.now[new.name] = model
        self.changes += [(new.name, model), (old.name, None)]
        for file, (name, opened) in self.files.items():
            if opened is model and name == old.name:
                self.files[file] = (new.name, model)
        self._cut()

    def remove(self, path: Path) -> None:
        self._step("remove", path.name)
        super().remove(path)
        self.now.pop(path.name, None)
        self.changes.append((path.name, None))
        self._cut()

    def sync_directory(self, path: Path) -> None:
        if not path.samefile(self.directory):
            return
        self._step("sync_directory", path.name)
        self._cut()
        self._apply(self.names, self.changes)
        self.changes.clear()

    @staticmethod
    def _apply(names: dict[str, File], changes: list[tuple[str, File | None]]) -> None:
        for name, model in changes:
            if model is None:
                names.pop(name, None)
            else:
                names[name] = model

    def _reordered(self, pending: list[Pending]) -> list[Pending]:
        items = list(pending)
        if self.chance.random() < 0.5:
            self.chance.shuffle(items)
        return items

    def cut(self, target: Path, mode: str = "random") -> None:
        """What is found after the power cut: ``lost`` and ``kept`` lose and keep all that was not synced."""
        names = dict(self.names)
        changes = self.changes
        if mode == "lost":
            changes = []
        elif mode == "random":  # a journalling file system keeps the order of names
            changes = changes[: self.chance.randrange(len(changes) + 1)]
        self._apply(names, changes)
        target.mkdir()
        for name, model in names.items():
            content = bytearray(model.durable)
            if mode != "lost":
                for item in self._reordered(model.pending) if mode == "random" else model.pending:
                    for part in tear(self.chance, item) if mode == "random" else [item]:
                        put(content, part[0], part[1] + bytes(part[2]))
            if name == FRONTIER_NAME and self.frontiers and mode != "lost":  # never synced: any value it has had
                content = bytearray(self.frontiers[-1] if mode == "kept" else self.chance.choice(self.frontiers))
            (target / name).write_bytes(content)
