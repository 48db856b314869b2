"""Telling systemd that the service is ready, or ending. Does nothing unless systemd asked for it."""

from __future__ import annotations

import contextlib
import os
import socket


def ready(status: str) -> None:
    """The service takes requests."""
    _send(f"READY=1\nSTATUS={status}")


def stopping() -> None:
    """The service is ending."""
    _send("STOPPING=1")


def _send(text: str) -> None:
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(text.encode(), "\0" + address[1:] if address.startswith("@") else address)
