"""Where the sockets between Spark's JVM and its Python workers on this machine lie.

Spark connects the two by TCP over loopback unless it is told otherwise; by Unix sockets the same bytes cost a good part
less. Unlike over TCP it asks for no secret there, so the sockets lie in a directory that only this user can enter.
Whoever makes a socket removes it; the directory stays.
"""

from __future__ import annotations

import socket
from pathlib import Path
from uuid import uuid4

from penstock.spark.java import cache_directory

BUFFER_BYTES = 1 << 20


def socket_directory() -> Path | None:
    """The directory, seen to take sockets; None where it cannot (its path is too long, its file system has none)."""
    try:
        directory = cache_directory() / "sockets"
        directory.mkdir(mode=0o700, exist_ok=True)
        directory.chmod(0o700)
        return directory if _takes_sockets(directory) else None
    except OSError:
        return None


def _takes_sockets(directory: Path) -> bool:
    path = directory / f".{uuid4()}.sock"  # as long as the names that Spark gives
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.bind(str(path))
            return True
        except OSError:
            return False
        finally:
            path.unlink(missing_ok=True)
