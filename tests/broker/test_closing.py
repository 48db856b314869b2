"""``publish`` while another thread closes: ClosedError that says that the outcome is not known, and no long waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from penstock.broker import Client, Publisher, Server
from penstock.errors import ClosedError
from tests.broker.conftest import LONG


def publish_until_closed(publish: Callable[[], Any], found: list[BaseException], started: threading.Event) -> None:
    try:
        while True:
            publish()
            started.set()
    except BaseException as error:  # what it is, is what the test is about
        found.append(error)


@pytest.mark.parametrize("kind", ["client", "publisher", "unconfirmed", "many"])
def test_publishing_while_another_thread_closes(server: Server, kind: str) -> None:
    for _ in range(15):
        handle: Any
        if kind == "client":
            handle = Client(port=server.port)
            publish = lambda handle=handle: handle.publish("t", b"x")  # noqa: E731
        else:
            handle = Publisher(port=server.port, topic="t", unconfirmed=100 if kind == "unconfirmed" else 0)
            publish = lambda handle=handle: handle.publish(b"x")  # noqa: E731
            if kind == "many":
                publish = lambda handle=handle: handle.publish_many([b"x"] * 100)  # noqa: E731
        found: list[BaseException] = []
        started = threading.Event()
        thread = threading.Thread(target=publish_until_closed, args=(publish, found, started))
        thread.start()
        assert started.wait(LONG)
        began = time.monotonic()
        handle.close()
        thread.join(LONG)
        assert not thread.is_alive() and time.monotonic() - began < LONG
        assert type(found[0]) is ClosedError, found
