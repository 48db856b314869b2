"""A failure that nobody had foreseen, in any verb: its connection ends, everybody else and what is stored go on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.broker import Client, Server, dead_letters, protocol
from penstock.broker.protocol import VERBS
from penstock.broker.queue import Queue
from penstock.broker.words import Disconnect
from tests.broker.conftest import LONG, Wire, loaded, until

#: what each verb is asked with, after the connection has staged "t1" and consumes queue "held" with one message
REQUESTS = {
    "HELLO": b"HELLO 1\n",
    "PUB": b"PUB t 1\nx",
    "STAGE": b"STAGE t2 t 1\nx",
    "LOAD": loaded("t2", "t", b"x"),
    "COMMIT": b"COMMIT t1\n",
    "ABORT": b"ABORT t1\n",
    "SUB": b"SUB fresh topics=t\n",
    "UNSUB": b"UNSUB held\n",
    "CREDIT": b"CREDIT held 5\n",
    "ACK": b"ACK held 1\n",
    "NACK": b"NACK held 1\n",
    "QUEUE": b"QUEUE fresh topics=t\n",
    "SEEK": b"SEEK held from_position=1\n",
    "PURGE": b"PURGE held\n",
    "PAUSE": b"PAUSE held\n",
    "RESUME": b"RESUME held\n",
    "DELETE": b"DELETE spare\n",
    "REDRIVE": b"REDRIVE held\n",
    "LIST": b"LIST\n",
    "STATS": b"STATS\n",
    "PEERS": b"PEERS t\n",
    "SCHEMA": b"SCHEMA t\n",
    "FETCH": b"FETCH 1 5\n",
    "PING": b"PING\n",
    "BYE": b"BYE\n",
    "SHUTDOWN": b"SHUTDOWN\n",
}


def test_every_verb_is_injected() -> None:
    assert set(REQUESTS) == {*VERBS, *protocol._DATA_VERBS}


def break_verb(monkeypatch: pytest.MonkeyPatch, verb: str, before: bool) -> None:
    """The verb raises what nobody expects, before it has done anything or when it has done everything."""

    def broken(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(session: Any, *arguments: Any) -> Any:
            if not before:
                with contextlib.suppress(Disconnect):  # what BYE is about
                    answer = method(session, *arguments)
                    if hasattr(answer, "send"):
                        for _ in answer:
                            pass
                session.broker.touch()  # as one who has changed something
            raise ZeroDivisionError("injected")

        return run

    if verb in VERBS:
        monkeypatch.setitem(VERBS, verb, replace(VERBS[verb], method=broken(VERBS[verb].method)))
    else:
        monkeypatch.setitem(protocol._DATA_VERBS, verb, broken(protocol._DATA_VERBS[verb]))


@pytest.mark.parametrize(
    ("verb", "when"),
    [(verb, when) for verb in REQUESTS for when in ("before", "after") if (verb, when) != ("SHUTDOWN", "after")],
)  # after SHUTDOWN there is nothing that could go on
def test_a_fault_in_a_verb_ends_its_connection_alone(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, verb: str, when: str
) -> None:
    server = serve()
    with Client(port=server.port) as bystander:
        bystander.queue("held", topics="t", ack_timeout_s=600)
        bystander.queue("spare", topics="t")
        bystander.queue("watched", topics="t")
        bystander.publish("t", b"first")
        consumer = bystander.subscribe("watched", ack="manual")
        seen = consumer.read(LONG)
        assert seen is not None
        consumer.ack(seen, confirm=True)
        victim = Wire(server.port).hello()
        victim.send(b"STAGE t1 t 6\nstaged\nSUB held\n")
        assert [victim.line(), victim.line()] == ["STAGED 1", "OK"]
        assert victim.line().startswith("MSG held t 1 ")
        with monkeypatch.context() as patch:
            break_verb(patch, verb, when == "before")
            if verb == "HELLO":
                victim = Wire(server.port)
            victim.send(REQUESTS[verb])
            told = victim.closed()
            assert b"OK" not in told and b"COMMITTED" not in told, "nothing of it is confirmed"
        until(lambda: server.internal_errors == 1)
        assert bystander.statistics()["internal_errors"] == 1
        position = bystander.publish("t", b"later")
        later = consumer.read(LONG)
        assert later is not None and (bytes(later), later.position) == (b"later", position)
        consumer.ack(later, confirm=True)
        consumer.close()
        told_now = {queue["queue"]: (queue["depth"], queue["paused"], queue["topics"]) for queue in bystander.queues()}
    server.close()
    again = serve()
    with Client(port=again.port) as client:
        told_after = {queue["queue"]: (queue["depth"], queue["paused"], queue["topics"]) for queue in client.queues()}
    assert told_after == told_now, "what the broker went on with is what is in its log"


def test_one_documented_line_does_not_end_it(serve: Callable[..., Server]) -> None:
    server = serve()
    other = Wire(server.port).hello()
    odd = Wire(server.port).hello().send(b"SUB q topics=nothing.here from_position=1 ack=none\n")
    assert odd.line() == "OK"
    assert other.send(b"PUB nothing.here 2\nhi").line() == "OK 1"
    assert odd.line().startswith("MSG q nothing.here 1 ")
    assert server.internal_errors == 0


def test_a_consumer_without_acknowledgements_comes_back_after_a_restart(serve: Callable[..., Server]) -> None:
    server = serve()
    wire = Wire(server.port).hello().send(b"SUB q topics=t ack=none\nPUB t 2\nhi")
    assert [wire.line(), wire.line()] == ["OK", "OK 1"]
    assert wire.line().startswith("MSG q t 1 ")
    until(lambda: server.broker.queues["q"].state.outstanding == 0)
    wire.close()
    server.close()
    server = serve()
    wire = Wire(server.port).hello().send(b"SUB q ack=none\nPUB t 3\nyou")
    assert [wire.line(), wire.line()] == ["OK", "OK 2"]
    assert wire.line().startswith("MSG q t 2 ")


@pytest.mark.parametrize("place", ["pump", "commit", "release", "observing"])
def test_a_fault_in_the_loop_itself_is_survived(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    server = serve()
    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        client.publish("t", b"1")
        owner: Any = {
            "pump": Queue,
            "commit": type(server.broker),
            "release": type(server.broker.delayed),
            "observing": type(server.broker),
        }[place]
        with monkeypatch.context() as patch:
            patch.setattr(owner, place, lambda *_: 1 / 0)
            wire = Wire(server.port).hello().send(b"SUB q\nPUB unread 1 delay_ms=1\nx")
            until(lambda: server.internal_errors > 0)
        wire.close()
        client.publish("t", b"2")
        with client.subscribe("q") as consumer:
            assert [bytes(consumer.read(LONG) or b"") for _ in range(2)] == [b"1", b"2"]


def test_what_others_published_in_the_same_turn_is_sent_again_and_stored_once(
    serve: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        wrong = iter([True])
        commit = server.broker.commit

        def fails_once() -> None:
            if server.broker.staged_anything and next(wrong, False):
                raise ZeroDivisionError("injected")
            commit()

        monkeypatch.setattr(server.broker, "commit", fails_once)
        first, last = client.publish_many("t", [b"%d" % i for i in range(50)])
        assert last - first == 49 and server.internal_errors == 1
        with client.subscribe("q") as consumer:
            assert [bytes(consumer.read(LONG) or b"") for _ in range(50)] == [b"%d" % i for i in range(50)]
            assert consumer.read(0.2) is None


def test_dead_letters_go_on_after_a_fault(serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    with Client(port=server.port) as client:
        client.queue("q", topics="t", max_tries=1)
        client.publish("t", b"poison")
        with monkeypatch.context() as patch:
            patch.setattr(dead_letters, "_stage_copy", lambda *_: 1 / 0)
            with client.subscribe("q", ack="manual") as consumer:
                message = consumer.read(LONG)
                assert message is not None
                consumer.nack(message)
                until(lambda: server.internal_errors > 0)
        client.queue("other", topics="u")
        client.publish("u", b"goes on")
        with client.subscribe("other") as unharmed:
            assert bytes(unharmed.read(LONG) or b"") == b"goes on"
        client.seek("q", position=1)  # or after ten seconds
        with client.subscribe("q", ack="manual") as consumer:
            message = consumer.read(LONG)
            assert message is not None
            consumer.nack(message)
            until(lambda: "q.dead" in server.broker.queues)
        with client.subscribe("q.dead") as dead:
            assert bytes(dead.read(LONG) or b"") == b"poison"
