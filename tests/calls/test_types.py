"""Calls by objects: what is asked and answered has a type, at every reach that has calls."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

import penstock
from penstock.calls import Request


class Question(msgspec.Struct):
    a: int
    b: int = 1


class Answer(msgspec.Struct):
    product: int


def multiply(question: Question) -> Answer:
    return Answer(question.a * question.b)


@pytest.mark.parametrize("address", ["bus:typed-calls", "shm:/typed-calls"])
def test_objects_are_asked_and_answered(address: str) -> None:
    with (
        penstock.server(address, multiply, type=Question, reply_type=Answer),
        penstock.client(address, type=Question, reply_type=Answer) as client,
    ):
        assert client.call(Question(6, 7), timeout=30) == Answer(42)
        assert asyncio.run(client.call_async(Question(2, 3), timeout=30)) == Answer(6)
        with pytest.raises(TypeError, match=r"^expected a Question, not Answer"):
            client.call(Answer(1), timeout=30)  # type: ignore[arg-type]
        with penstock.client(address) as plain:  # the bytes stay reachable
            assert plain.call(b'{"a":2,"b":5}', timeout=30) == b'{"product":10}'
            with pytest.raises(penstock.CallFailed, match="a request of 2 bytes is not Question"):
                plain.call(b"{}", timeout=30)


def test_an_answer_of_another_type() -> None:
    with (
        penstock.server("bus:typed-calls-2", lambda payload: b"[]"),
        penstock.client("bus:typed-calls-2", type=Question, reply_type=Answer) as client,
        pytest.raises(penstock.DecodeError, match="an answer of 2 bytes is not Answer"),
    ):
        client.call(Question(1), timeout=30)


def test_a_function_that_gives_another_type_fails_the_call() -> None:
    with (
        penstock.server("bus:typed-calls-3", lambda question: question, type=Question, reply_type=Answer),
        penstock.client("bus:typed-calls-3", type=Question, reply_type=Answer) as client,
        pytest.raises(penstock.CallFailed, match="expected an Answer, not Question"),
    ):
        client.call(Question(1), timeout=30)


def test_requests_have_values_and_coroutines_give_objects() -> None:
    async def later(question: Question, request: Request) -> Answer:
        await asyncio.sleep(0)
        return Answer(question.a + request.value.b)

    with (
        penstock.server("bus:typed-calls-4", later, type=Question, reply_type=Answer),
        penstock.client("bus:typed-calls-4", type=Question, reply_type=Answer) as client,
    ):
        assert client.call(Question(1, 2), timeout=30).product == 3
