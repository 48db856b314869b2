"""A message id is its account's and topic's: the same one elsewhere is another; a duplicate's confirm says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.broker import Client, Server
from penstock.broker.fetch import RangeClient
from tests.broker.conftest import LONG, Wire

TOKENS = "".join(
    f'[[token]]\nname = "{name}"\ntoken = "token-{name}"\npublish = [">"]\nsubscribe = [">"]\n' for name in ("a", "b")
)


@pytest.fixture
def accounts(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.toml"
    path.write_text(TOKENS)
    path.chmod(0o600)
    return path


def test_one_id_in_two_topics_is_two_messages(client: Client) -> None:
    client.queue("qa", topics="a")
    client.queue("qb", topics="b")
    assert client.publish("a", b"from a", message_id="1") == 1
    assert client.publish("b", b"from b", message_id="1") == 2
    with client.subscribe("qb") as consumer:
        assert bytes(consumer.read(LONG) or b"") == b"from b"


def test_a_duplicates_confirm_says_so_and_gives_the_first_position(client: Client, wire: Callable[[], Wire]) -> None:
    first = client.publish("a", b"1", message_id="x")
    client.publish("a", b"between")
    again = client.publish("a", b"1", message_id="x")
    assert (first, first.duplicate, again, again.duplicate) == (1, False, 1, True)
    assert wire().hello().send(b"PUB a 1 id=x\n1").line() == "OK 1", "version 1 does not know the word"
    other = wire().send(b"HELLO 2\nPUB a 1 id=x\n1PUB a 1 id=y\n2PUB a 1 id=y\n2")
    assert [other.line() for _ in range(4)][1:] == ["OK 1 duplicate", "OK 3", "OK 3 duplicate"]


@pytest.mark.parametrize("restart", [False, True])
def test_an_id_is_its_accounts(serve: Callable[..., Server], accounts: Path, restart: bool) -> None:
    server = serve(tokens=accounts)
    with Client(port=server.port, token="token-a") as a, Client(port=server.port, token="token-b") as b:
        assert a.publish("t", b"from a", message_id="1") == 1
        if restart:
            server.close()
            server = serve(tokens=accounts)
            a = Client(port=server.port, token="token-a")
            b = Client(port=server.port, token="token-b")
        assert b.publish("t", b"from b", message_id="1") == 2
        assert [a.publish("t", b"from a", message_id="1").duplicate, b.publish("t", b"", message_id="1")] == [True, 2]
        a.close()
        b.close()


def test_accounts_survive_a_new_segment(serve: Callable[..., Server], accounts: Path) -> None:
    server = serve(tokens=accounts, segment_bytes=1 << 16)
    with Client(port=server.port, token="token-a") as a:
        assert a.publish("t", b"from a", message_id="1") == 1
        a.publish_many("other", [bytes(10_000)] * 30)
    server.close()
    server = serve(tokens=accounts, segment_bytes=1 << 16)
    with Client(port=server.port, token="token-a") as a, Client(port=server.port, token="token-b") as b:
        assert a.publish("t", b"from a", message_id="1") == 1
        assert b.publish("t", b"from b", message_id="1") > 30


@pytest.mark.parametrize("restart", [False, True])
def test_a_delayed_message_has_the_id_of_its_topic(serve: Callable[..., Server], restart: bool) -> None:
    server = serve()
    with Client(port=server.port) as client:
        assert client.publish("t", b"later", message_id="1", delay_s=600) == 1
    if restart:
        server.close()
        server = serve()
    with Client(port=server.port) as client:
        again = client.publish("t", b"later", message_id="1", delay_s=600)
        assert (again, again.duplicate) == (1, True)
        assert client.publish("u", b"other", message_id="1") == 2


def test_what_a_transaction_stores_is_known_by_topic(serve: Callable[..., Server]) -> None:
    server = serve()
    with RangeClient(port=server.port) as staging, Client(port=server.port) as client:
        staging.stage("tx", "t", [b"1", b"2"], message_ids=["a", "b"])
        staging.commit("tx")
        assert client.publish("t", b"2", message_id="b") == 2
        assert client.publish("u", b"2", message_id="b") == 3
