"""Where a server listens: the socket, TLS, and how many connections this process can have. Functions without state."""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
import ssl
from pathlib import Path

from penstock.errors import InvalidArgument
from penstock.resolving import UnresolvedError, resolving


def descriptors() -> int:
    """How many files this process may have open, after raising the soft limit to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


#: What to do where a port is in use.
FREE_PORT, OWN_PORT = "port 0 takes a free one", "each broker of a group needs its own"


def listen(host: str, port: int, advice: str = FREE_PORT) -> socket.socket:
    """A listening socket that does not block. ``advice``: for who finds the port in use."""
    listener = None
    try:
        with resolving(host):
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(1024)
    except UnresolvedError as error:
        raise InvalidArgument(f"cannot listen at {host}:{port}: {error}") from error
    except OSError as error:
        if listener is not None:
            listener.close()
        hint = f"; {advice}" if error.errno == errno.EADDRINUSE else ""
        raise OSError(error.errno, f"cannot listen at {host}:{port}: {error.strerror}{hint}") from error
    return listener


def tls_context(
    certificate: str | Path | None, key: str | Path | None, authority: str | Path | None
) -> ssl.SSLContext | None:
    """The server's side of TLS; None without a certificate."""
    if certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for path in (certificate, key, authority):
        if path is not None:
            Path(path).open("rb").close()  # its error names the file, that of ssl does not
    try:
        context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        with_key = f" with the key {key}" if key is not None else ""
        raise InvalidArgument(f"{certificate}{with_key} is no certificate in PEM form: {error}") from error
    if authority is not None:
        try:
            context.load_verify_locations(authority)
        except ssl.SSLError as error:
            raise InvalidArgument(f"{authority} is no certificate in PEM form: {error}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context
