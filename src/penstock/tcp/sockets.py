"""Sockets: opening them, setting their options, and their addresses as text. Any thread may call these."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import stat

from penstock.errors import InvalidArgument, RefusedError
from penstock.resolving import UnresolvedError, resolving

PROBES = 3  # intervals of a keepalive time: an idle peer is asked after one, and must have answered after the others


def check_port(port: int) -> int:
    """Return ``port``, or raise ``InvalidArgument`` if it is not a port number."""
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise InvalidArgument(f"port={port!r} must be a number from 0 to 65535")
    return port


def check_secrets(token: str | bytes | None, tls: object, side: str) -> bytes | None:
    """Return the token as bytes. Refuse an empty one (it would let everybody in) and a ``tls`` that is no context."""
    if tls is not None and not isinstance(tls, ssl.SSLContext):
        make = {
            "publisher": "ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) with load_cert_chain(...)",
            "subscriber": "ssl.create_default_context(cafile=...)",
        }[side]
        raise TypeError(f"tls= of a tcp {side} is an ssl.SSLContext (made by {make}), not {type(tls).__name__}")
    if token is None:
        return None
    if not isinstance(token, str | bytes):
        raise TypeError(f"token= is text or bytes, not {type(token).__name__}")
    if not token:
        raise InvalidArgument("token= is empty: give a secret, or leave it out")
    return token.encode() if isinstance(token, str) else token


def silence_s(keepalive: float) -> float:
    """How long a peer may owe an answer: a peer that has vanished is found within ``keepalive``, if its silence is
    looked for every quarter of this time. At least two seconds: a lost packet is sent again only after a while.
    """
    return max(2.0, keepalive * (PROBES - 1) / PROBES)


def prepare(connection: socket.socket, keepalive: float | None) -> None:
    """Make a connection non-blocking, without Nagle's delay, and with probes that detect a dead peer within
    ``keepalive`` seconds while nothing is sent.
    """
    connection.setblocking(False)
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if keepalive is not None:
        seconds = max(1, int(keepalive / PROBES))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES - 1)


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """A listening socket at the first address of ``host``; an IPv6 one takes no IPv4 connections."""
    try:
        with resolving(host):
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnresolvedError as error:
        raise InvalidArgument(f"cannot listen at {host}:{port}: {error}") from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise OSError(error.errno, f"port {port} of {host} is in use; port=0 lets the system choose one") from error
        raise OSError(error.errno, f"cannot listen at {host}:{port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


def listen_unix(path: str, backlog: int) -> socket.socket:
    """A listening unix socket that only its owner may use. Replaces the socket file of a process that has died."""
    _remove_dead(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        before = os.umask(0o177)  # not chmod afterwards: others could connect in between
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen at {path}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


def _remove_dead(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise RefusedError(f"{path} exists and is no socket; choose another path")
    except FileNotFoundError:
        return
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.connect(path)  # only a connect tells a live socket file from one that a dead process left
    except ConnectionRefusedError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    else:
        raise RefusedError(f"another publisher listens at {path}")
    finally:
        probe.close()


def name_of(address: object) -> str:
    """A peer's or listener's address as text."""
    if isinstance(address, tuple):
        host, port = address[0], address[1]
        return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
    return str(address) or "unix"
