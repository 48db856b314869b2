"""Sockets: how they are opened, what is set on them, how their addresses read. Any thread may call these."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import stat

from penstock.errors import InvalidArgument, RefusedError


def check_port(port: int) -> int:
    """``port`` if it can be one."""
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise InvalidArgument(f"port={port!r} must be a number from 0 to 65535")
    return port


def check_secrets(token: str | bytes | None, tls: object, side: str) -> bytes | None:
    """The token as bytes. An empty one would let everybody in; what is no context would encrypt nothing."""
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


def prepare(connection: socket.socket, keepalive: float | None) -> None:
    """Non-blocking, nothing held back, a silent peer asked from time to time whether it is still there."""
    connection.setblocking(False)
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if keepalive is not None:
        seconds = max(1, round(keepalive))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, seconds // 3))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """A listening socket at ``host``; IPv6 where that is one of its addresses only."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise InvalidArgument(f"host={host!r} has no address to listen at: {error.strerror}") from error
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
    """A listening unix socket that only its owner may use. One left behind by a dead process is replaced."""
    _remove_dead(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        before = os.umask(0o177)
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
        probe.connect(path)
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
