"""Ask and answer: request and reply over the reaches.

``server(address, function)`` answers, ``client(address).call(data)`` asks, at ``bus:``, ``shm:``, ``tcp://`` and
``broker://`` addresses. ``docs/rooms/calls.md`` says what each reach promises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.calls.answer import Request, Server
from penstock.calls.ask import Client

__all__ = ["Client", "Request", "Server", "client", "server"]


def client(address: str, *, max_calls: int = 32, **options: Any) -> Client:
    """A client of the servers at ``address``: ``penstock.client("shm:/plan").call(b"where?", timeout=1.0)``."""
    return Client(address, max_calls=max_calls, **options)


def server(address: str, function: Callable[..., Any] | None = None, *, workers: int = 1, **options: Any) -> Server:
    """A server at ``address`` that answers by ``function``, or by ``for request in server: request.reply(...)``."""
    return Server(address, function, workers=workers, **options)
