"""Lanes: how envelopes travel at one reach. A client and a server each have one; nothing else knows the reach.

Rules:

- ``receive`` of a lane is called by one thread at a time; everything else by any thread.
- A lane's ``receive(0)`` that gave None has armed ``fileno()``: the descriptor becomes readable when there is more.
- A client's ``send`` returns the peer that the request went to; ``gone(peer)`` says later whether that peer has died.
- A call waits for another call no longer than its own time-out: a lock that may be held while waiting for a peer is
  acquired with ``held``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from typing import Any

from penstock.address import Address, convert, option_names, parse, without_secrets
from penstock.calls.envelope import Envelope
from penstock.errors import InvalidArgument, nearest

OTHERS = "use bus:, shm:, tcp:// or broker://"


@contextlib.contextmanager
def held(lock: threading.Lock, deadline: float | None, told: str) -> Iterator[None]:
    """Hold a lock; ``TimeoutError`` with the text ``told`` if another call still has it at the deadline."""
    if not lock.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic())):
        raise TimeoutError(told)
    try:
        yield
    finally:
        lock.release()


class ClientLane(ABC):
    """The client's side."""

    #: Whether a request waits for a server that is not there.
    durable = False

    @property
    def ready(self) -> bool:
        """Whether ``send`` would not block; if it would, an event loop lets a thread send."""
        return True

    @abstractmethod
    def send(self, data: bytes, deadline: float | None) -> Hashable:
        """Send a request; gives its peer. ``PeerGone``: there is none. ``TimeoutError``: no room in time."""

    @abstractmethod
    def cancel(self, peer: Hashable, data: bytes) -> None:
        """Send a cancellation to a peer if that can be done at once; it may be dead."""

    @abstractmethod
    def receive(self, timeout: float) -> Envelope | None:
        """The next envelope, or None when the time is over. A goodbye's payload names the peer. ``PeerGone``: all
        peers are gone."""

    def renew(self) -> None:  # noqa: B027 - few lanes have a connection
        """Called before ``send`` when no other call is in flight: drop a peer that has died meanwhile."""

    def settled(self, peer: Hashable, answered: bool) -> None:  # noqa: B027 - few lanes count
        """A call to that peer has ended: ``answered``, or given up."""

    @abstractmethod
    def gone(self, peer: Hashable) -> bool:
        """Whether that peer will never answer."""

    @abstractmethod
    def wait_ready(self, servers: int, timeout: float | None) -> bool:
        """Wait until so many servers are there."""

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable when something may have come."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; a running ``receive`` ends with ``ClosedError``."""

    def abandon(self) -> None:  # noqa: B027 - most lanes share nothing with a forked child
        """Called instead of ``close`` in a forked child: release what belongs to the child, and leave what belongs to
        the parent."""


class ServerLane(ABC):
    """The server's side. ``way`` is what the lane needs to send the answer."""

    #: The port that it listens at, where it has one.
    port: int | None = None

    @abstractmethod
    def receive(self, timeout: float | None) -> tuple[Any, Envelope] | None:
        """The next envelope with its way back, or None when the time is over."""

    @abstractmethod
    def answer(self, way: Any, data: bytes) -> bool:
        """Send an answer; False if the client is gone. The request is settled."""

    def gone(self, way: Any) -> bool:
        """Whether the client of that request has died; False where that cannot be known."""
        return False

    @abstractmethod
    def drop(self, way: Any) -> None:
        """The request gets no answer: nobody waits for one. It is settled."""

    @abstractmethod
    def close(self, goodbye: bytes) -> None:
        """Tell the clients that the server closes, then release everything."""

    def abandon(self) -> None:  # noqa: B027 - as for clients
        """Instead of ``close`` in a forked child."""


def address_of(text: str, options: dict[str, Any], function: Any, whole: Any) -> tuple[Address, dict[str, Any]]:
    """The parsed address, and the options of the lane: those in the address and those given.

    ``whole`` takes the options that every reach has; the error for a misspelt one knows them too.
    """
    address = parse(text)
    found = {**convert(address.options, function, address.text), **options}
    valid = option_names(function)
    for name in found:
        if name not in valid:
            known = [*valid, *option_names(whole)]
            raise InvalidArgument(f"calls at {address.text!r} have no option {name!r}; {nearest(name, known)}")
    return address, found


def module_of(text: str) -> Any:
    """The module whose ``open_client`` and ``open_server`` open lanes of this address."""
    import importlib

    scheme = text.partition(":")[0] if isinstance(text, str) else ""
    if scheme == "journal":
        raise InvalidArgument(f"address {text!r}: a journal cannot answer calls; {OTHERS}")
    if scheme == "nats":
        raise InvalidArgument(f"address {without_secrets(text)!r}: calls do not go over NATS; {OTHERS}")
    modules = {"bus": "paired", "shm": "paired", "tcp": "stream", "broker": "queued"}
    if scheme not in modules:
        parse(text)  # raises with the valid schemes
    return importlib.import_module(f"penstock.calls.{modules[scheme]}")


def open_client(text: str, options: dict[str, Any], origin: bytes, most: int, whole: Any) -> ClientLane:
    """The client's lane for an address."""
    function = module_of(text).open_client
    address, found = address_of(text, options, function, whole)
    lane: ClientLane = function(address, origin, most, **found)
    return lane


def open_server(text: str, options: dict[str, Any], whole: Any) -> ServerLane:
    """The server's lane for an address."""
    function = module_of(text).open_server
    address, found = address_of(text, options, function, whole)
    lane: ServerLane = function(address, **found)
    return lane
