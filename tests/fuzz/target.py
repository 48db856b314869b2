"""What a fuzzed decoder is. A target takes bytes; files are changed by patches: file, place, width, value."""

from __future__ import annotations

import os
import struct
import tempfile
from pathlib import Path

from penstock.errors import PenstockError

PATCH = struct.Struct("<BHB8s")


def memory_folder() -> Path:
    """A folder of our own on a file system in memory, where there is one: a million inputs are written to it."""
    return Path(tempfile.mkdtemp(prefix="penstock-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))


class Target:
    """One decoder."""

    allowed: tuple[type[BaseException], ...] = (PenstockError,)
    words: list[bytes] = [b"\0", b"\xff"]

    @property
    def process_id(self) -> int:
        """The process whose memory is looked at."""
        return os.getpid()

    def decode(self, data: bytes) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Give back what was made."""


class Patched(Target):
    """Files: the template's, with the patches of the input."""

    names: list[str]
    template: dict[str, bytes]

    def patched(self, data: bytes) -> dict[str, bytes]:
        files: dict[str, bytearray] = {}
        for at in range(0, len(data) - PATCH.size + 1, PATCH.size):
            which, place, width, value = PATCH.unpack_from(data, at)
            name = self.names[which % len(self.names)]
            content = files.setdefault(name, bytearray(self.template[name]))
            if not content:
                continue
            place %= len(content)
            if width % 16 == 9:
                del content[place:]
            else:
                content[place : place + width % 9] = value[: min(width % 9, len(content) - place)]
        return {name: bytes(files[name]) if name in files else content for name, content in self.template.items()}
