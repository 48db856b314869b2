"""Calls: what holds at every reach that declares them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import penstock
from penstock.calls import Client, Request, Server

from .reaches import Reach

pytestmark = pytest.mark.needs("calls")


def pair(reach: Reach, function: Callable[..., Any] | None, **options: Any) -> tuple[Server, Client]:
    server = reach.stack.enter_context(penstock.server(reach.address, function, **options))
    address = reach.address if server.port is None else f"tcp://127.0.0.1:{server.port}"
    client = reach.stack.enter_context(penstock.client(address))
    assert client.wait_ready(1, timeout=30)
    return server, client


def test_an_answer_is_what_the_function_gives(reach: Reach) -> None:
    server, client = pair(reach, lambda payload: payload.upper())
    assert client.call(b"hello", timeout=30) == b"HELLO"
    assert client.call(b"", timeout=30) == b""
    assert client.call(bytearray(b"x" * 200_000), timeout=30) == b"X" * 200_000
    assert client.ledger.balanced and client.ledger.delivered == 3
    server.close()  # waits for the function, which counts after it has answered
    assert server.ledger.balanced and server.ledger.delivered == 3


def test_an_exception_arrives_as_its_text_and_the_server_goes_on(reach: Reach) -> None:
    def function(payload: bytes) -> bytes:
        if payload == b"bad":
            raise KeyError("no such plan")
        return payload

    _, client = pair(reach, function)
    with pytest.raises(penstock.CallFailed, match=r"KeyError.*no such plan"):
        client.call(b"bad", timeout=30)
    assert client.call(b"good", timeout=30) == b"good"
    assert client.ledger.dropped.get("error") == 1 and client.ledger.balanced


def test_requests_by_iteration(reach: Reach) -> None:
    server, client = pair(reach, None)

    def serve() -> None:
        for request in server:
            request.reply(request.payload[::-1])

    thread = threading.Thread(target=serve)
    thread.start()
    assert client.call(b"abc", timeout=30) == b"cba"
    server.close()
    thread.join(30)
    assert not thread.is_alive()


def test_many_calls_from_many_threads_each_get_their_own_answer(reach: Reach) -> None:
    _, client = pair(reach, lambda payload: b"<" + payload + b">")
    wrong: list[bytes] = []

    def ask(thread: int) -> None:
        for number in range(20):
            data = b"%d-%d" % (thread, number)
            if client.call(data, timeout=60) != b"<" + data + b">":
                wrong.append(data)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not wrong
    assert client.ledger.delivered == 100 and client.ledger.balanced


def test_calls_from_asyncio_beside_calls_from_a_thread(reach: Reach) -> None:
    _, client = pair(reach, lambda payload: payload + b"!")
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.extend(client.call(b"t%d" % i, 60) for i in range(20)))

    async def ask() -> list[bytes]:
        return await asyncio.gather(*(client.call_async(b"a%d" % number, timeout=60) for number in range(50)))

    thread.start()
    assert asyncio.run(ask()) == [b"a%d!" % number for number in range(50)]
    thread.join(100)
    assert found == [b"t%d!" % number for number in range(20)]


def test_an_async_function_answers(reach: Reach) -> None:
    async def function(payload: bytes) -> bytes:
        await asyncio.sleep(0)
        return payload * 2

    _, client = pair(reach, function)
    assert client.call(b"ab", timeout=30) == b"abab"


def test_time_is_over_and_the_server_sees_it(reach: Reach) -> None:
    begun, seen, told = threading.Event(), threading.Event(), threading.Event()

    def function(payload: bytes, request: Request) -> bytes:
        if payload != b"slow":
            return payload
        begun.set()
        while not request.cancelled:
            time.sleep(0.005)
        seen.set()
        told.wait(60)  # an answer now might still reach a client that looks late
        return b"too late"

    _, client = pair(reach, function)
    with pytest.raises(TimeoutError):
        client.call(b"slow", timeout=0.5)
    told.set()
    assert not begun.is_set() or seen.wait(30)
    assert client.call(b"next", timeout=30) == b"next"
    assert client.ledger.expired == 1 and client.ledger.balanced


async def cancelled(client: Client, begun: threading.Event) -> None:
    """A call, cancelled when its server has begun."""
    task = asyncio.create_task(client.call_async(b"long"))
    await asyncio.to_thread(begun.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_cancelling_an_awaited_call_reaches_the_server(reach: Reach) -> None:
    seen, begun = threading.Event(), threading.Event()

    def function(payload: bytes, request: Request) -> bytes:
        begun.set()
        while not request.cancelled:
            time.sleep(0.005)
        seen.set()
        return b""

    _, client = pair(reach, function)

    asyncio.run(cancelled(client, begun))
    assert seen.wait(60)


def test_a_cancellation_that_is_seen_late_counts(reach: Reach) -> None:
    """A function that asks seldom finds the cancellation and looks whether its client is alive in one step."""
    asked, seen, begun = threading.Event(), threading.Event(), threading.Event()

    def function(payload: bytes, request: Request) -> bytes:
        begun.set()
        assert asked.wait(60)
        while not request.cancelled:
            time.sleep(0.1)
        seen.set()
        return b""

    _, client = pair(reach, function)

    asyncio.run(cancelled(client, begun))
    time.sleep(0.06)  # longer than a client's death is left unlooked at
    asked.set()
    assert seen.wait(60)


def test_one_request_has_one_answer(reach: Reach) -> None:
    def function(payload: bytes, request: Request) -> None:
        assert request.reply(b"first")
        with pytest.raises(penstock.StateError):
            request.reply(b"second")

    _, client = pair(reach, function)
    assert client.call(b"x", timeout=30) == b"first"
    assert client.call(b"y", timeout=30) == b"first"


def test_a_forgotten_request_fails(reach: Reach) -> None:
    server, client = pair(reach, None)
    thread = threading.Thread(target=lambda: server.receive(timeout=60))
    thread.start()
    with pytest.raises(penstock.CallFailed, match="gave no answer"):
        client.call(b"x", timeout=60)
    thread.join(60)


def test_what_is_wrong_is_refused(reach: Reach) -> None:
    _, client = pair(reach, lambda payload: "text")
    with pytest.raises(TypeError, match="bytes"):
        client.call("text")
    with pytest.raises(ValueError, match="timeout"):
        client.call(b"x", timeout=-1)
    with pytest.raises(penstock.CallFailed, match="TypeError"):
        client.call(b"x", timeout=30)
    client.close()
    client.close()
    with pytest.raises(penstock.ClosedError):
        client.call(b"x")
    with pytest.raises(ValueError, match="max_calls"):
        penstock.client(reach.address, max_calls=0)


def test_closing_ends_a_call_of_another_thread(reach: Reach) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def function(payload: bytes) -> bytes:
        begun.set()
        go_on.wait(60)
        return b""

    _, client = pair(reach, function)
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            client.call(b"x")
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert begun.wait(60)
    client.close()
    thread.join(60)
    go_on.set()
    assert [type(error) for error in errors] == [penstock.ClosedError]
    assert client.ledger.balanced


def test_closing_ends_a_call_that_waits_for_room(reach: Reach) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def function(payload: bytes) -> bytes:
        begun.set()
        go_on.wait(60)
        return b""

    server = reach.stack.enter_context(penstock.server(reach.address, function))
    address = reach.address if server.port is None else f"tcp://127.0.0.1:{server.port}"
    client = reach.stack.enter_context(penstock.client(address, max_calls=1))
    errors: list[type[BaseException]] = []

    def ask() -> None:
        try:
            client.call(b"x")
        except BaseException as error:
            errors.append(type(error))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    client.close()
    for thread in threads:
        thread.join(60)
    go_on.set()
    assert errors == [penstock.ClosedError] * 3


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), Wordless(), KeyError()])
def test_whatever_the_function_raises_ends_that_call_alone(reach: Reach, error: BaseException) -> None:
    def function(payload: bytes) -> bytes:
        if payload == b"bad":
            raise error
        return payload

    server, client = pair(reach, function)
    with pytest.raises(penstock.CallFailed, match=type(error).__name__):
        client.call(b"bad", timeout=30)
    assert client.call(b"good", timeout=30) == b"good"
    server.close()
    assert server.ledger.dropped["error"] == 1 and server.ledger.balanced


def test_what_a_function_gives_when_it_gives_up_is_no_answer(reach: Reach) -> None:
    def function(payload: bytes, request: Request) -> bytes:
        while not request.cancelled:
            time.sleep(0.001)
        return b"given up"

    _, client = pair(reach, function)
    for _ in range(10):
        with pytest.raises(TimeoutError):
            client.call(b"x", timeout=0.05)


@pytest.mark.parametrize("timeout", [float("inf"), 1e30])
def test_a_time_longer_than_any_is_no_limit(reach: Reach, timeout: float) -> None:
    _, client = pair(reach, lambda payload: payload)
    assert client.call(b"x", timeout=timeout) == b"x"


def test_a_server_counts_as_expired_what_it_did_not_begin(reach: Reach) -> None:
    """What was begun and then given up by its client counts as given up, whoever notices first."""
    begun = threading.Event()

    def function(payload: bytes, request: Request) -> bytes:
        if payload == b"given up":
            begun.set()
        deadline = time.monotonic() + 60
        while payload == b"given up" and not request.cancelled and time.monotonic() < deadline:
            time.sleep(0.005)  # until the server knows it too: the client's clock began earlier
        return payload

    server, client = pair(reach, function)
    while not begun.is_set():  # on a slow machine a request may be over before it was begun
        with pytest.raises(TimeoutError):
            client.call(b"given up", timeout=1.0)
    assert client.call(b"last", timeout=60) == b"last"
    server.close()
    books = server.ledger
    assert books.balanced and books.dropped.get("filtered") == 1
    assert books.matched == books.delivered + books.expired + 1 and books.delivered == 1
