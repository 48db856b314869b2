"""Calls: request and reply over the reaches.

``server(address, function)`` answers, ``client(address).call(data)`` asks, at ``bus:``, ``shm:``, ``tcp://`` and
``broker://`` addresses. ``docs/rooms/calls.md`` says what each reach promises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from penstock.calls.answer import Request, Server
from penstock.calls.ask import Client

Q = TypeVar("Q")
A = TypeVar("A")

__all__ = ["Client", "Request", "Server", "client", "server"]


@overload
def client(
    address: str, *, max_calls: int = ..., type: type[Q], reply_type: type[A], **options: Any
) -> Client[Q, A]: ...
@overload
def client(address: str, *, max_calls: int = ..., **options: Any) -> Client: ...
def client(address: str, *, max_calls: int = 32, **options: Any) -> Client[Any, Any]:
    """A client of the servers at ``address``: ``penstock.client("shm:/plan").call(b"where?", timeout=1.0)``.

    With ``type=`` it sends objects, with ``reply_type=`` it returns objects: docs/types.md lists the types. Options of
    the reach (docs/rooms/calls.md):

    - ``shm``: spin_us=0
    - ``tcp``: token=None, tls=None, connect_timeout=10.0, max_message_bytes=67108864, keepalive=15.0
    - ``broker``: queue='', token=None, tls=None, timeout=30.0
    """
    return Client(address, max_calls=max_calls, **options)


def server(address: str, function: Callable[..., Any] | None = None, *, workers: int = 1, **options: Any) -> Server:
    """A server at ``address`` that answers by ``function``, or by ``for request in server: request.reply(...)``.

    With ``type=`` the function gets objects, with ``reply_type=`` it gives them. Options of the reach
    (docs/rooms/calls.md):

    - ``shm``: spin_us=0
    - ``tcp``: token=None, tls=None, insecure=False, handshake_timeout=10.0, max_clients=1000,
      max_message_bytes=67108864, keepalive=15.0
    - ``broker``: queue='', token=None, tls=None, timeout=30.0
    """
    return Server(address, function, workers=workers, **options)
