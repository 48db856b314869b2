"""Why nothing arrives at a tcp or broker address: probes the network. ``explain`` connects, but does not subscribe."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

from penstock import address as addresses
from penstock.finding import Finding
from penstock.resolving import UnresolvedError, resolving

__all__ = ["describe", "explain", "unreached"]

ANSWER_S = 2.0


def explain(parts: addresses.Address) -> Iterator[Finding]:
    """Report whether a process listens at the address, or why it cannot be reached."""
    where = parts.name or f"{parts.host}:{parts.port}"
    try:
        if parts.name:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(2)
                probe.connect(parts.name)
        else:
            with resolving(parts.host):
                socket.create_connection((parts.host, parts.port or 0), 2).close()
    except ConnectionRefusedError:
        what = "a publisher" if parts.scheme == "tcp" else "a broker"
        yield Finding(f"nobody listens at {where}", f"start {what} there, or check the port")
    except UnresolvedError as error:
        yield Finding(str(error), "check the name, or write the number of the address")
    except TimeoutError:
        yield Finding(f"{where} does not answer within 2 s", "a firewall, a wrong address, or a machine that is off")
    except OSError as error:
        yield Finding(f"{where} cannot be reached: {error.strerror or error}")
    else:
        yield Finding(f"somebody listens at {where}", grave=False)


def unreached(subscriber: Any, deadline: float) -> str:
    """The error of the first session that cannot connect; empty when all are connected or ``deadline`` has passed.

    ``deadline`` is a value of ``time.monotonic``.
    """
    for session in subscriber.sessions:
        while not session.wait_connected(0.02):
            if session.last_error:
                said = str(session.last_error)
                return f"nobody listens there ({said})" if os.strerror(errno.ECONNREFUSED) in said else said
            if time.monotonic() >= deadline:
                break
    return ""


def describe(parts: addresses.Address) -> dict[str, Any]:
    """What a publisher says of itself in the handshake; subscribes for that long. Empty when no publisher answers."""
    from penstock.tcp import open_subscriber

    options = addresses.convert(parts.options, open_subscriber, parts.text)
    with open_subscriber(parts, **options) as subscriber:
        session = subscriber.sessions[0]
        deadline = time.monotonic() + ANSWER_S
        while not session.wait_connected(0.02):
            if session.last_error or time.monotonic() >= deadline:
                return {}
        facts: dict[str, Any] = {"publisher": session.publisher}
        if session.clock_offset_ns is not None:
            facts["its clock"] = f"{session.clock_offset_ns / 1e6:+.3f} ms from this one's, the way included"
        return facts
