"""Names of hosts: whoever asks the system's resolver does so inside of ``resolving``, and so an unknown name is told in
the same words everywhere. Without state.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["UnresolvedError", "resolving"]


class UnresolvedError(socket.gaierror):
    """A host's name has no address, or none now; the text names the host. The number is the resolver's."""

    @property
    def unknown(self) -> bool:
        """Whether there is no such host: another attempt would help only if somebody adds it."""
        return self.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))

    def __str__(self) -> str:
        return str(self.strerror)


@contextmanager
def resolving(host: str) -> Iterator[None]:
    """Around what resolves ``host``. UnresolvedError says what is wrong with the name."""
    try:
        yield
    except UnicodeError:  # a part of it is empty or longer than 63 characters: no server is asked for such a name
        raise UnresolvedError(socket.EAI_NONAME, f"the host {host} is not known") from None
    except socket.gaierror as error:
        found = UnresolvedError(error.errno, f"the host {host} is not known")
        if not found.unknown:
            found = UnresolvedError(error.errno, f"the host {host} cannot be resolved: {error.strerror}")
        raise found from None
