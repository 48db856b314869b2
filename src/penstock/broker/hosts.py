"""Where a broker is: ``HOST`` or ``HOST:PORT``, or several brokers of which one leads, as in
``broker://a:9876,b:9876/TOPIC``.

Such a group is written as one host text: ``"a:9876,b"`` with port 9876 is the same as that address. A client tries each
in turn: a broker that is on stand-by does not listen.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from typing import TypeVar

from penstock.address import NO_BROKER, place_text, places_of
from penstock.errors import ClosedError, InvalidArgument, ProtocolError, RefusedError
from penstock.resolving import resolving

Greeted = TypeVar("Greeted")
FORM = "Client('127.0.0.1:9876'); an address is for penstock.subscriber('broker://127.0.0.1:9876/TOPIC')"
MAX_HOSTS = 16
PAUSE_S = 0.1  # before all of a group are tried again


def hosts_of(host: str, port: int) -> list[tuple[str, int]]:
    """Each broker's host and port. An invalid host or port is refused: a client would wait for it for ever."""
    if not isinstance(host, str):
        raise TypeError(f"a broker's host is a str, not {type(host).__name__}")
    if "@" in host:  # what stands before it is a secret, which no message repeats
        raise InvalidArgument("host= is a host alone; a token is given as token=")
    if "/" in host:
        raise InvalidArgument(f"host={host!r} is no host: {FORM}")
    found = places_of(host, port)
    if len(found) > 1:
        found = places_of(host, found[-1][1])  # hosts without a port have that of the last
    if len(found) > MAX_HOSTS:
        raise InvalidArgument(f"host= names {len(found)} brokers; {MAX_HOSTS} is the most")
    for each, its_port in found:
        if not each or not each.isprintable() or " " in each:
            raise InvalidArgument(f"host={host!r} is no host: {FORM}")
        if isinstance(its_port, bool) or not isinstance(its_port, int) or not 1 <= its_port <= 65535:
            raise InvalidArgument(f"port={its_port!r} must be a number from 1 to 65535")
    return found


def settled(host: str, port: int) -> tuple[str, int]:
    """Host and port of one broker, which may be given as ``HOST:PORT``; a group stays as it is written."""
    found = hosts_of(host, port)
    return found[0] if len(found) == 1 else (host, port)


def nobody_leads(host: str, port: int) -> str:
    """What is said of a group of which no broker takes a connection."""
    return f"none of {', '.join(place_text(*place) for place in hosts_of(host, port))} leads at the moment"


#: What to do about it.
NOBODY_LEADS_REMEDY = "they may stand by, have no quorum, or not run: their logs and penstock doctor --store tell"
#: The same of one broker, at whose port nobody listens.
NOT_LISTENING_REMEDY = (
    "start it with: penstock broker DIRECTORY PORT. If it is a standby broker, name all brokers: "
    "broker://A:PORT,B:PORT/TOPIC"
)


def connect(host: str, port: int, timeout: float | None, greet: Callable[[socket.socket, str], Greeted]) -> Greeted:
    """What ``greet`` makes of a connection to the first broker that accepts one, and of its host. Several brokers are
    tried until ``timeout`` is over: one of them may lead by then, and something else may listen at one's place."""
    deadline = time.monotonic() + (timeout or 0.0)
    places = hosts_of(host, port)
    while True:
        for each, its_port in places:
            try:
                with resolving(each):
                    connection = socket.create_connection((each, its_port), timeout)
                with contextlib.ExitStack() as undo:
                    undo.callback(connection.close)
                    greeted = greet(connection, each)
                    undo.pop_all()
                    return greeted
            except (OSError, ProtocolError, ClosedError, RefusedError) as error:
                if isinstance(error, RefusedError) and NO_BROKER not in str(error):
                    raise
                problem: Exception = error
        if isinstance(problem, ConnectionRefusedError) and len(places) == 1:  # the system's error names no place
            text = f"the broker at {place_text(each, its_port)} does not listen ({NOT_LISTENING_REMEDY})"
            raise ConnectionRefusedError(problem.errno, text) from None
        if len(places) == 1:
            raise problem
        if time.monotonic() >= deadline:
            raise ConnectionError(f"{nobody_leads(host, port)}: {problem}; {NOBODY_LEADS_REMEDY}")
        time.sleep(PAUSE_S)
