"""A connection's requests have a turn of a few milliseconds: one client's questions never stall the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from penstock.broker import Client, Server
from penstock.broker.protocol import LIST_STEP
from tests.broker.conftest import Wire, until


@pytest.fixture
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request takes the whole turn."""
    monkeypatch.setattr("penstock.broker.connection.TURN_S", 0.0)
    monkeypatch.setattr("penstock.broker.server.TURN_S", 0.0)
    monkeypatch.setattr("penstock.broker.server.OBSERVE_S", 0.0, raising=False)


@pytest.mark.usefixtures("short_turns")
@pytest.mark.parametrize("request_line", [b"PEERS t\n", b"PURGE nix\n", b"PING\n", b"STATS\n"])
def test_a_row_of_requests_is_cut_into_turns(server: Server, wire: Callable[[], Wire], request_line: bytes) -> None:
    one, other = wire().hello(), wire().hello()
    before = server.turns
    one.send(request_line * 200)
    other.send(b"PING\n")
    assert other.line() == "PONG"
    for _ in range(200):
        line = one.line()
        if line.startswith("DATA"):
            one.line()
    assert server.turns - before >= 200, "others have had their turns between"


@pytest.mark.usefixtures("short_turns")
def test_a_list_of_many_queues_is_cut_into_turns(server: Server, client: Client) -> None:
    for number in range(20 * LIST_STEP):
        client.queue(f"q{number}", topics="t")
    before = server.turns
    assert len(client.queues()) == 20 * LIST_STEP
    assert server.turns - before >= 20


@pytest.mark.usefixtures("short_turns")
@pytest.mark.parametrize("asks", [True, False])
def test_what_waits_is_counted_a_piece_in_a_turn(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    """By LIST, and by the broker itself once a second."""
    piece, queues = 100, 6
    monkeypatch.setattr("penstock.broker.backlog.PIECE_MESSAGES", piece)
    for number in range(queues):
        client.queue(f"q{number}", topics="t")
    read, looked = server.broker.store.read, Counter[int]()

    def reading(*arguments: Any) -> Any:
        found = read(*arguments)
        looked[server.turns] += len(found[0])
        return found

    server.broker.store.read = reading  # type: ignore[method-assign]
    client.publish_many("t", [b"x"] * 20 * piece)
    if asks:
        client.queues()
    until(lambda: sum(looked.values()) >= queues * 20 * piece)
    assert max(looked.values()) <= 2 * piece, "one of each"


def test_what_was_cut_goes_on_by_itself(server: Server, wire: Callable[[], Wire]) -> None:
    """Also where nothing more comes in, and the client has closed its side."""
    one = wire().hello()
    one.send(b"PEERS t\n" * 20_000)
    for _ in range(20_000):
        assert one.line() == "PEERS 0 0"
    assert not server.internal_errors
