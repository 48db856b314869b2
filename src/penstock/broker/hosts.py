"""Where a broker is: one host and port, or several brokers of which one leads, as in ``broker://a:9876,b:9876/TOPIC``.

Such a group is written as one host text: ``"a:9876,b"`` with port 9876 is the same as that address. Who connects tries
each in turn: a broker that stands by does not listen.
"""

from __future__ import annotations

import socket

from penstock.errors import InvalidArgument

FORM = "Client('127.0.0.1', 9876), or penstock.subscriber('broker://127.0.0.1:9876/TOPIC')"
MAX_HOSTS = 16


def hosts_of(host: str, port: int) -> list[tuple[str, int]]:
    """Each broker's host and port. What is no host or no port is refused: nobody would ever answer there."""
    if not isinstance(host, str):
        raise TypeError(f"a broker's host is a str, not {type(host).__name__}")
    texts = host.split(",") if "," in host else []
    if len(texts) > MAX_HOSTS:
        raise InvalidArgument(f"host= names {len(texts)} brokers; {MAX_HOSTS} is the most")
    found = [_split(text, port) for text in texts] or [(host, port)]
    for each, its_port in found:
        if "/" in each or each.count(":") == 1:  # an address of version 6 has more of them
            raise InvalidArgument(f"host={host!r} is a host alone, without scheme and port: {FORM}")
        if not each or not each.isprintable() or " " in each:
            raise InvalidArgument(f"host={host!r} is no host: {FORM}")
        if isinstance(its_port, bool) or not isinstance(its_port, int) or not 1 <= its_port <= 65535:
            raise InvalidArgument(f"port={its_port!r} must be a number from 1 to 65535")
    return found


def _split(text: str, port: int) -> tuple[str, int]:
    """One of several: HOST or HOST:PORT, where an address of version 6 stands in brackets."""
    name, colon, number = text.rpartition(":")
    if not colon or text.endswith("]"):
        name, number = text, ""
    elif not number.isascii() or not number.isdigit():
        raise InvalidArgument(f"{text!r} is not HOST or HOST:PORT of a broker")
    return name.removeprefix("[").removesuffix("]"), int(number) if number else port


def connect(host: str, port: int, timeout: float | None) -> tuple[socket.socket, str]:
    """A connection to the first broker that takes one, and its host. OSError: that of the last one."""
    problem: OSError | None = None
    for each, its_port in hosts_of(host, port):
        try:
            return socket.create_connection((each, its_port), timeout), each
        except OSError as error:
            problem = error
    assert problem is not None
    raise problem
