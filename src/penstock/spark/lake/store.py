"""The storage of a lake: a local directory, or an object store that delta-rs accesses itself.

Rules: a file is on the disk before ``create`` returns; names of files are on the disk after ``sync``. An object store
does both by itself. A ``Store`` is small and goes to executors as it is.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from penstock.errors import InvalidArgument, nearest

LOG = "_delta_log"
SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss")
VERSION_1 = "_penstock/manifest.json"  # of an archive of version 1
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # Hadoop prints local paths as file:/directory


@dataclass(frozen=True, slots=True)
class Store:
    """The storage of a table's files; ``options`` go to the object store (keys, endpoint)."""

    uri: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold secrets
    prefix: str = ""  # of the names of files that are written in this round

    @property
    def path(self) -> Path | None:
        """The local directory; None for an object store."""
        return None if "://" in self.uri else Path(self.uri)

    def prepare(self) -> None:
        """Create a local directory that only its owner may read, and sync it and its new parents."""
        path = self.path
        if path is None:
            return
        self._check_empty(path)
        missing = [part for part in (path / LOG, path, *path.parents) if not part.exists()]
        path.mkdir(mode=0o700, parents=True, exist_ok=True)  # the mode applies to the last directory only
        (path / LOG).mkdir(mode=0o700, exist_ok=True)
        for part in missing:
            sync(part.parent)

    def _check_empty(self, path: Path) -> None:
        """Raise ``InvalidArgument`` for a directory that holds something else: a lake is alone in its directory."""
        with contextlib.suppress(FileNotFoundError):
            others = [name for name in sorted(os.listdir(path)) if not name.startswith((".", "_", "date="))]
            others = [name for name in others if name != "lost+found"]  # at the top of a file system
            if others and not (path / VERSION_1).exists():
                text = f"{path} is no lake, and it is not empty (there is {others[0]!r}): name a new directory"
                raise InvalidArgument(text)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[Any]:
        """A new file to write to; its bytes are on disk when the block ends. If the block fails, there is none."""
        path = self.path
        if path is None:
            with self.filesystem().open_output_stream(name) as stream:
                yield stream
            return
        target = path / name
        self._make_folder(target.parent)
        with _whole(target), target.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def _make_folder(self, folder: Path) -> None:
        """A folder of the lake. Whoever may read the lake may read the folders of later days too."""
        missing = [part for part in (folder.parent, folder) if not part.exists()]
        for part in missing:
            part.mkdir(mode=0o700, exist_ok=True)
            part.chmod(stat.S_IMODE(part.parent.stat().st_mode))

    def begin_round(self) -> Store:
        """The same store, for tasks whose files can be found again should one of them fail."""
        return replace(self, prefix=f"{secrets.token_hex(8)}-")

    def forget_round(self, kept: Iterable[str] = ()) -> None:
        """Delete the files of this round but those ``kept``: a task failed, or ran twice. Object stores leave it to
        ``vacuum``.
        """
        path = self.path
        if path is not None and self.prefix:
            names = {str(file.relative_to(path)) for file in path.glob(f"date=*/{self.prefix}*.parquet")}
            self.delete(names - set(kept))

    def replace(self, name: str, data: bytes) -> None:
        """Write a whole file in place of the one of that name, if any: readers see the old bytes or the new ones."""
        path = self.path
        if path is None:
            with self.filesystem().open_output_stream(name) as stream:
                stream.write(data)
            return
        target = path / name
        self._make_folder(target.parent)
        draft = target.with_name(f".{target.name}.{secrets.token_hex(6)}")
        with _whole(draft):
            with draft.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(target)
        for folder in (target.parent, target.parent.parent, path):
            sync(folder)

    def sync(self, names: Iterable[str]) -> None:
        """Sync the directory entries of these files and of their folders."""
        path = self.path
        if path is not None:
            for folder in {path, *((path / name).parent for name in names)}:
                sync(folder)

    def sync_log(self, first: int, last: int) -> None:
        """Sync the log's entries of these versions: their bytes and their names."""
        path = self.path
        if path is None:
            return
        for version in range(first, last + 1):
            with contextlib.suppress(FileNotFoundError):  # a checkpoint has replaced it, and it was cleaned up
                sync(path / LOG / entry_name(version))
        sync(path / LOG)

    def sizes(self, names: Iterable[str]) -> dict[str, int | None]:
        """The size of each file as this process sees it; None for a file that it does not see."""
        wanted = list(names)
        path = self.path
        if path is not None:
            return {name: _size(path / name) for name in wanted}
        found = self.filesystem().get_file_info(wanted) if wanted else []
        return {name: entry.size if entry.is_file else None for name, entry in zip(wanted, found, strict=True)}

    def delete(self, names: Iterable[str]) -> None:
        """Delete files that no version names; those that cannot be deleted are left for ``vacuum``."""
        path = self.path
        for name in names:
            with contextlib.suppress(OSError):
                if path is not None:
                    (path / name).unlink()
                else:
                    self.filesystem().delete_file(name)

    def filesystem(self) -> Any:
        """The table's files for pyarrow, named as in the log."""
        import pyarrow.fs

        path = self.path
        if path is not None:
            return pyarrow.fs.SubTreeFileSystem(str(path), pyarrow.fs.LocalFileSystem())
        from deltalake.fs import DeltaStorageHandler

        return pyarrow.fs.PyFileSystem(DeltaStorageHandler(self.uri, dict(self.options)))


def store(where: str | os.PathLike[str] | Store, options: Mapping[str, str] | None = None) -> Store:
    """A directory, ``file:///directory`` or an object store's address as a ``Store``."""
    if isinstance(where, Store):
        return where
    text = os.fspath(where)
    if not text.strip():
        raise InvalidArgument("a lake needs a directory or an object store's address, and this is empty")
    found = _SCHEME.match(text)
    scheme, parts = found[1].lower() if found else "", urlsplit(text)
    if scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise InvalidArgument(f"{text!r} names a host; a local directory has three slashes: file:///directory")
        text, scheme = unquote(parts.path), ""
    if scheme and scheme not in SCHEMES:
        raise InvalidArgument(f"a lake cannot be at {scheme}:/; {nearest(scheme, ('file', *SCHEMES))}")
    if scheme and not parts.netloc:
        raise InvalidArgument(f"{text!r} names no bucket: {scheme}://BUCKET/FOLDER")
    place = text if scheme else os.path.abspath(text)
    for letter, meaning in (("%", "an escape"), ("\\", "a slash")):
        if letter in place and not scheme:
            raise InvalidArgument(f"a lake cannot be at {place}: delta-rs reads {letter} in a path as {meaning}")
    if scheme and options is None:  # executors need the credentials from this process's environment
        options = {key: value for key, value in os.environ.items() if key.startswith(("AWS_", "GOOGLE_", "AZURE_"))}
    return Store(place, dict(options or {}))


def entry_name(version: int) -> str:
    """The file of one version in the log."""
    return f"{version:020d}.json"


@contextlib.contextmanager
def _whole(target: Path) -> Iterator[None]:
    """If the block fails, its file is deleted and the error names it. The block closes the file: on a full disk that
    fails again, with an error that names none.
    """
    try:
        yield
    except FileExistsError:
        raise  # it is another's
    except BaseException as error:
        target.unlink(missing_ok=True)  # on a full disk the next round needs its room
        if isinstance(error, OSError) and error.filename is None:
            raise OSError(error.errno or 0, error.strerror or str(error), str(target)) from error
        raise


def sync(path: Path) -> None:
    """Sync a file's bytes or a directory's entries to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None
