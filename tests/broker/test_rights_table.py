"""The table of rights: for each token, verb and resource whether it is allowed. One test a cell, made from the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.broker import Client, Server
from penstock.broker.fetch import RangeClient
from penstock.broker.protocol import _DATA_VERBS, VERBS
from penstock.broker.rights import NEEDS
from tests.broker.conftest import LONG, Wire, loaded, until


@dataclass(frozen=True)
class Token:
    """Each may do what it names with `mine.*` and queues `mine-*`, and nothing with others'."""

    name: str
    publish: bool = False
    subscribe: bool = False
    manage: bool = False
    statistics: bool = False
    shutdown: bool = False

    def toml(self) -> str:
        flags = "\n".join(
            f"{flag} = {str(getattr(self, flag)).lower()}" for flag in ("manage", "statistics", "shutdown")
        )
        topics = "\n".join(f"{way} = {['mine.>'] if getattr(self, way) else []}" for way in ("publish", "subscribe"))
        return f'[[token]]\nname = "{self.name}"\ntoken = "token-{self.name}"\nqueues = ["mine-*"]\n{topics}\n{flags}\n'

    def allows(self, need: str, mine: bool) -> bool:
        right, _, resource = need.partition(" ")
        if need == "publish or subscribe topic":
            return mine and (self.publish or self.subscribe)
        if right == "use":
            return mine
        return bool(getattr(self, right)) and (mine or not resource)


TOKENS = [
    Token("nothing"),
    Token("publisher", publish=True),
    Token("reader", subscribe=True),
    Token("manager", manage=True),
    Token("observer", statistics=True),
    Token("ender", shutdown=True),
    Token("owner", publish=True, subscribe=True, manage=True),
    Token("editor", subscribe=True, manage=True),
]
ROOT = '[[token]]\nname = "root"\ntoken = "token-root"\npublish = [">"]\nsubscribe = [">"]\nmanage = true\nstatistics = true\n'

#: rows of the table: what is asked; %s is "mine" or "theirs"
REQUESTS = {
    "PUB": b"PUB %s.a 1\nx\n",
    "STAGE": b"STAGE tx %s.a 1\nx\n",
    "LOAD": b"LOAD",  # its length is that of what is in it: made for each cell
    "SUB": b"SUB %s-old\n",
    "QUEUE": b"QUEUE %s-new topics=%s.a\n",
    "QUEUE changed": b"QUEUE %s-old topics=%s.b\n",
    "QUEUE dead_letter": b"QUEUE mine-made topics=mine.a max_tries=1 dead_letter=%s-old\n",
    "SEEK": b"SEEK %s-old from_position=1\n",
    "PURGE": b"PURGE %s-old\n",
    "PAUSE": b"PAUSE %s-old\n",
    "RESUME": b"RESUME %s-old\n",
    "DELETE": b"DELETE %s-old\n",
    "REDRIVE": b"REDRIVE %s-old\n",
    "LIST": b"LIST\n",
    "STATS": b"STATS\n",
    "PEERS": b"PEERS %s.a\n",
    "SCHEMA": b"SCHEMA %s.a\n",
    "SCHEMA changed": b"SCHEMA %s.a 1 eyJkZWZpbml0aW9uIjp7fSwiZW5jb2RpbmciOiJqc29uIiwibmFtZSI6IlgifQ==\n",
    "FETCH": b"FETCH 1 5 topics=%s.a\n",
    "PING": b"PING\n",
    "COMMIT": b"COMMIT tx\n",  # of nothing: refused, but not for want of a right
    "ABORT": b"ABORT tx\n",
    "FETCH queue": b"FETCH 1 5 queue=%s-old\n",
    "SHUTDOWN": b"SHUTDOWN\n",
}
OWN = {"UNSUB", "CREDIT", "ACK", "NACK", "BYE", "HELLO"}  # they need nothing


def test_the_table_has_every_verb() -> None:
    assert {row.split()[0] for row in NEEDS} == {*VERBS, *_DATA_VERBS}
    assert set(REQUESTS) | OWN == set(NEEDS)
    assert not any(NEEDS[verb] for verb in OWN)


def cells() -> Iterator[tuple[Token, str, bool]]:
    for token in TOKENS:
        for row in REQUESTS:
            for mine in (True, False):
                yield token, row, mine


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One broker for all cells: what one changes is put right before the next."""
    directory: Path = tmp_path_factory.mktemp("rights")
    path = directory / "tokens.toml"
    path.write_text(ROOT + "".join(token.toml() for token in TOKENS))
    path.chmod(0o600)
    with Server(directory / "broker", 0, tokens=path).start() as server:
        yield server


def answers(wire: Wire) -> list[str]:
    """The lines of the answers, before the one to PING or with nothing but it; deliveries are no answers."""
    found: list[str] = []
    while (line := wire.line()) != "PONG":
        verb, _, rest = line.partition(" ")
        if verb in ("DATA", "MSG"):
            size = int(rest.rpartition(" ")[2]) + 1
            while len(wire.buffer) < size:
                wire.buffer += wire.socket.recv(65536)
            wire.buffer = wire.buffer[size:]
        if verb != "MSG":
            found.append(line)
    return found or ["PONG"]


@pytest.mark.parametrize(("token", "row", "mine"), list(cells()), ids=lambda value: getattr(value, "name", str(value)))
def test_a_cell(shared: Server, monkeypatch: pytest.MonkeyPatch, token: Token, row: str, mine: bool) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(shared, "shutdown", lambda: ended.append(True))
    with Client(port=shared.port, token="token-root") as root:
        for name in ("mine", "theirs"):
            for queue in (f"{name}-new", "mine-made"):
                if queue in shared.broker.queues:
                    root.delete(queue)
            root.queue(f"{name}-old", topics=f"{name}.a")
    wire = Wire(shared.port).hello(f"token=token-{token.name}")
    whose = "mine" if mine else "theirs"
    asked = loaded("tx", f"{whose}.a", b"x") if row == "LOAD" else REQUESTS[row].replace(b"%s", whose.encode())
    wire.send(asked + (b"" if row == "PING" else b"PING\n"))
    needs = NEEDS[row]
    if row == "SHUTDOWN" and token.shutdown:
        assert wire.closed() == b"" and ended, "the end is its answer"
        return
    answer, *more = answers(wire)
    assert not more and not ended, "one request, one answer"
    if row == "QUEUE dead_letter":
        needs = (*needs, "subscribe topic") if mine else needs
    allowed = all(token.allows(need, mine) for need in needs)
    assert answer.startswith("ERR denied") != allowed, answer
    assert allowed != answer.startswith("ERR") or answer.startswith("ERR unknown_transaction"), answer
    wire.close()
    until(lambda: not any(queue.consumers for queue in shared.broker.queues.values()))


# --- where a message ends up


SECRETS = """
[[token]]
name = "orders"
token = "token-orders"
publish = ["orders.>"]
subscribe = ["orders.>"]
manage = true
[[token]]
name = "evil"
token = "token-evil"
publish = ["b.>"]
subscribe = ["b.>"]
manage = true
[[token]]
name = "star"
token = "token-star"
subscribe = ["*", "*.status", ">"]
"""


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.toml"
    path.write_text(SECRETS)
    path.chmod(0o600)
    return path


def test_dead_letters_are_put_into_no_queue_of_others(serve: Callable[..., Server], secrets: Path) -> None:
    server = serve(tokens=secrets)
    with (
        Client(port=server.port, token="token-orders") as orders,
        Client(port=server.port, token="token-evil") as evil,
    ):
        orders.queue("pay", topics="orders.>")
        orders.queue("pay.dead", topics="orders.late")
        consumer = orders.subscribe("pay", ack="manual")
        with pytest.raises(Exception, match="dead letters would go to queue pay"):
            evil.queue("evil", topics="b.x", max_tries=1, dead_letter="pay")
        with pytest.raises(Exception, match=r"dead letters would go to queue pay\.dead"):
            evil.queue("evil", topics="b.x", max_tries=1, dead_letter="pay.dead")
        with pytest.raises(Exception, match="dead letters would go to queue pay"):  # also while it makes none
            evil.queue("evil", topics="b.x", dead_letter="pay")
        with pytest.raises(Exception, match="dead letters would go to queue pay"):
            evil.subscribe("evil", topics="b.x", dead_letter="pay")
        evil.queue("later", topics="b.x", max_tries=1, dead_letter="refunds")  # not there yet
        orders.queue("refunds", topics="orders.refunds")
        evil.publish("b.x", b"forged")
        with evil.subscribe("later", ack="manual") as bad:
            message = bad.read(LONG)
            assert message is not None
            bad.nack(message)
            until(lambda: "refunds" in str(server.broker.queues["later"].counters.snapshot()["state"]), "it says why")
        assert server.broker.queues["refunds"].options.topics == ("orders.refunds",)
        orders.publish("orders.x", b"real")
        found = consumer.read(LONG)
        assert found is not None and bytes(found) == b"real"
        consumer.close()


def test_the_name_of_a_deleted_queue_brings_nobody_its_rights(serve: Callable[..., Server], secrets: Path) -> None:
    """Its dead letters went to a queue that is there for other topics, which is still bound to them."""
    server = serve(tokens=secrets)
    with (
        Client(port=server.port, token="token-orders") as orders,
        Client(port=server.port, token="token-evil") as evil,
    ):
        orders.queue("pay", topics="orders.>")
        orders.queue("old", topics="orders.x", max_tries=1, dead_letter="pay")
        orders.delete("old")
        for options in ({}, {"dead_letter": "pay"}, {"dead_letter": "mine"}):
            with pytest.raises(Exception, match="dead letters would go to queue pay"):
                evil.queue("old", topics="b.x", max_tries=1, **options)
        evil.queue("old", topics="b.x")
        evil.publish("b.x", b"its own")
        orders.delete("old")
        orders.queue("old", topics="orders.x", max_tries=1, dead_letter="pay")


def test_wildcards_match_nothing_of_the_brokers_own(serve: Callable[..., Server], secrets: Path) -> None:
    server = serve(tokens=secrets)
    with Client(port=server.port, token="token-orders") as orders:
        orders.queue("status", topics="orders.>", max_tries=1)
        orders.publish("orders.x", b"delayed secret", delay_s=600)
        orders.publish("orders.y", b"dead secret")
        with orders.subscribe("status", ack="manual") as consumer:
            message = consumer.read(LONG)
            assert message is not None
            consumer.nack(message)
            until(lambda: "status.dead" in server.broker.queues)
            orders.ping()
        with RangeClient(port=server.port, token="token-star") as reader:
            for patterns in (["*"], ["*.status"], [">"], ["*", "*.status"]):
                found = reader.fetch(1, topics=patterns)
                assert all(not item.topic.startswith("$") for item in found)
                assert not any(name.startswith("$") for name in found.topics.values())
