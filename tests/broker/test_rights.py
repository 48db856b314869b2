"""What a token may read and touch: by queue and by topic, now and after the file of tokens was read again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.broker import Client, Server, Subscriber
from penstock.errors import RefusedError

from .conftest import LONG, Wire, until


@pytest.fixture
def guarded(serve: Callable[..., Server], tokens: Path) -> Server:
    return serve(tokens=tokens)


@pytest.fixture
def root(guarded: Server) -> Iterator[Client]:
    with Client(port=guarded.port, token="secret-root") as client:
        yield client


@pytest.fixture
def north(guarded: Server) -> Iterator[Client]:
    with Client(port=guarded.port, token="secret-north") as client:
        yield client


def poison(client: Client, queue: str) -> None:
    """Bury the one message that the queue has."""
    with client.subscribe(queue, ack="manual") as consumer:
        message = consumer.read(LONG)
        assert message is not None
        consumer.nack(message)
        until(lambda: f"{queue}.dead" in [entry["queue"] for entry in client.queues()])


def test_a_queue_that_is_there_is_read_by_who_may_read_its_topics(root: Client, north: Client) -> None:
    root.queue("north-x", topics="secrets.>")
    root.queue("north-both", topics=["sensors.>", "secrets.>"])
    root.queue("north-1", topics="sensors.south.>")
    root.publish("secrets.key", b"hidden")
    root.publish("sensors.south.a", b"1")
    for queue in ("north-x", "north-both"):
        with pytest.raises(RefusedError, match="not yours to read"):
            north.subscribe(queue)
    with pytest.raises(RefusedError, match="not yours to read"):
        north.subscribe("north-x", topics="secrets.>")
    with north.subscribe("north-1") as consumer:
        assert bytes(consumer.read(LONG) or b"") == b"1"


def test_dead_letters_are_read_by_who_may_read_where_they_come_from(root: Client, north: Client) -> None:
    for queue, topics in (("north-s", "secrets.>"), ("north-1", "sensors.>")):
        root.queue(queue, topics=topics, max_tries=1)
    root.publish("secrets.key", b"hidden")
    root.publish("sensors.south.a", b"1")
    poison(root, "north-s")
    poison(root, "north-1")
    with pytest.raises(RefusedError, match="not yours to read"):
        north.subscribe("north-s.dead")
    with north.subscribe("north-1.dead") as consumer:
        assert bytes(consumer.read(LONG) or b"") == b"1"
    root.delete("north-1")  # nobody knows any more what they may be
    with pytest.raises(RefusedError, match="not yours to read"):
        north.subscribe("north-1.dead")


def test_dead_letters_do_not_go_round(root: Client) -> None:
    root.queue("a", topics="t", max_tries=1, dead_letter="b")
    root.queue("b", topics="u", max_tries=1, dead_letter="c")
    for last in ("c", "a", "b"):
        with pytest.raises(RefusedError, match=r"would come back|its own"):
            root.queue("c", topics="v", max_tries=1, dead_letter=last)
    with pytest.raises(RefusedError, match="would come back"):
        root.queue("b", dead_letter="a")


def test_who_changes_a_queue_may_read_what_gets_into_it(serve: Callable[..., Server], tmp_path: Path) -> None:
    """Before and after; `manage` alone reaches no topics."""
    path = tmp_path / "tokens.toml"
    path.write_text(
        '[[token]]\nname = "root"\ntoken = "r"\npublish = [">"]\nsubscribe = [">"]\nmanage = true\nstatistics = true\n'
        '[[token]]\nname = "b"\ntoken = "b"\nsubscribe = ["b.>"]\nmanage = true\n'
    )
    path.chmod(0o600)
    server = serve(tokens=path)
    with Client(port=server.port, token="r") as root, Client(port=server.port, token="b") as other:
        root.queue("pay", topics="pay.>")
        for options in ({"ttl_s": 0.001}, {"topics": "b.x"}, {"exclusive": True}):
            with pytest.raises(RefusedError, match="not yours to read"):
                other.queue("pay", **options)
        assert root.queues()[0]["topics"] == ["pay.>"]
        other.queue("mine", topics="b.x")
        other.queue("mine", topics="b.y", ttl_s=60)
        with pytest.raises(RefusedError, match="not yours to read"):
            other.queue("mine", topics="pay.x")


def test_a_queue_that_gets_other_topics_loses_who_may_not_read_them(root: Client, north: Client) -> None:
    with north.subscribe("north-1", topics="sensors.>") as consumer:
        root.queue("north-1", topics="secrets.>")
        root.publish("secrets.key", b"hidden")
        with pytest.raises(RefusedError, match="not yours to read"):
            consumer.read(LONG)


def withdraw(server: Server, tokens: Path, old: str, new: str) -> None:
    """Change the file of tokens and wait until the broker goes by it."""
    assert old in tokens.read_text()
    tokens.write_text(tokens.read_text().replace(old, new))
    before = server.tokens.rights("secret-north")
    server.reload()
    until(lambda: server.tokens.rights("secret-north") is not before)


@pytest.mark.parametrize(
    ("old", "new"),
    [('subscribe = ["sensors.>"]', 'subscribe = ["sensors.north.>"]'), ('queues = ["north-*"]', 'queues = ["south-*"]')],
)
def test_what_was_withdrawn_is_not_delivered_any_more(
    guarded: Server, tokens: Path, root: Client, north: Client, old: str, new: str
) -> None:
    plain = Wire(guarded.port).hello("token=secret-north").send(b"SUB north-plain topics=sensors.south.> credit=5\n")
    assert plain.line() == "OK"
    with north.subscribe("north-1", topics="sensors.south.>") as consumer:
        root.publish("sensors.south.a", b"before")
        assert bytes(consumer.read(LONG) or b"") == b"before"
        plain.exactly(b"MSG north-plain sensors.south.a 1 ")
        plain.line()
        plain.exactly(b"before\n")
        withdraw(guarded, tokens, old, new)
        root.publish("sensors.south.a", b"after")
        assert plain.closed() == b"ERR closing queue north-plain is not yours to read any more\n"
        with pytest.raises(RefusedError, match="not yours"):
            consumer.read(LONG)
    plain.close()


def test_what_may_still_be_read_goes_on(guarded: Server, tokens: Path, root: Client, north: Client) -> None:
    with north.subscribe("north-1", topics="sensors.south.>") as consumer:
        withdraw(guarded, tokens, 'subscribe = ["sensors.>"]', 'subscribe = ["sensors.south.>"]')
        root.publish("sensors.south.a", b"after")
        assert bytes(consumer.read(LONG) or b"") == b"after"
        assert consumer._link.connections == 1


def test_a_token_that_is_gone_is_handed_nothing_more(guarded: Server, tokens: Path, root: Client) -> None:
    """Also while what it was handed before is still on its way out."""
    deaf = Wire(guarded.port).hello("token=secret-north")
    deaf.send(b"SUB north-1 topics=sensors.> credit=60000\n")
    assert deaf.line() == "OK"
    root.publish_many("sensors.south.a", [b"x" * 100_000] * 200)  # more than the socket and its output take
    withdraw(guarded, tokens, "secret-north", "another")
    until(lambda: root.queues()[0]["consumers"] == 0)
    received = deaf.closed()
    assert received.endswith(b"ERR closing this token is not known any more\n")
    assert received.count(b"MSG north-1") < 200
    deaf.close()


def test_a_producer_is_its_tokens_own(guarded: Server) -> None:
    """Who knows the name can neither cut the producer off nor spoil the count of what it has stored."""
    first = Wire(guarded.port).hello("token=secret-root producer=p").send(b"PUB t 1\na\n")
    assert first.line() == "OK 1"
    stranger = Wire(guarded.port).send(b"HELLO 1 token=secret-north producer=p\nPUB sensors.north.a 1\nb\n")
    assert stranger.line().endswith(" last=0")
    assert stranger.line() == "OK 2"
    assert first.send(b"PING\n").line() == "PONG"
    again = Wire(guarded.port).send(b"HELLO 1 token=secret-root producer=p\n")
    assert again.line().endswith(" last=1")
    assert first.closed() == b"", "the same token takes over"
    for wire in (first, stranger, again):
        wire.close()


def test_a_transaction_is_its_tokens_own(root: Client, north: Client) -> None:
    root.stage("job", "secrets.key", [b"a", b"b"])
    north.abort("job")
    with pytest.raises(RefusedError, match="nothing is staged under job; stage"):
        north.commit("mine", ["job"])
    with pytest.raises(RefusedError, match="nothing is staged under job; stage"):
        north.commit("job")
    assert root.commit("job") == (1, 2, False)
    assert root.commit("job") == (1, 2, True)


def test_parts_may_be_named_by_the_rest_of_their_names(guarded: Server) -> None:
    """Thousands of them fit into a line that way; a line without an end is still no way to fill the memory."""
    wire = Wire(guarded.port).hello("token=secret-root")
    wire.send(b"".join(b"STAGE job.%d t 1\n%d" % (part, part % 10) for part in range(3000)))
    staged = 0
    while staged < 3000:
        staged += int(wire.line().removeprefix("STAGED "))
    wire.send(b"COMMIT job " + b" ".join(b".%d" % part for part in range(3000)) + b"\n")
    assert wire.line() == "COMMITTED 1-3000"
    wire.send(b"STAGE again.1 t 1\nxCOMMIT again again.1 .1\n")
    assert [wire.line(), wire.line()] == ["STAGED 1", "COMMITTED 3001-3001"], "one that is named twice is one"
    wire.send(b"COMMIT job " + b"." * 70_000)
    assert wire.line().startswith("ERR closing line too long")


def test_a_right_that_is_gone_commits_nothing(guarded: Server, tokens: Path, north: Client) -> None:
    north.stage("job", "sensors.north.a", [b"a"])
    withdraw(guarded, tokens, 'publish = ["sensors.north.>"]', "publish = []")
    with pytest.raises(RefusedError, match="not yours to publish to: sensors"):
        north.commit("job")
    assert guarded.broker.store.next == 1


def test_who_may_neither_publish_nor_read_a_topic_hears_nothing_of_it(root: Client, north: Client) -> None:
    root.queue("q", topics="secrets.>")
    assert root.peers("secrets.key") == (1, 0)
    assert north.peers("sensors.north.a") == north.peers("sensors.south.a") == (0, 0)
    with pytest.raises(RefusedError, match="neither yours"):
        north.peers("secrets.key")


def test_a_subscriber_is_told_why_it_ends(guarded: Server, tokens: Path) -> None:
    """One with a temporary queue of its own, too."""
    with Subscriber(port=guarded.port, token="secret-north", queue="north-t", topics="sensors.>", temporary=True) as one:
        withdraw(guarded, tokens, 'subscribe = ["sensors.>"]', "subscribe = []")
        with pytest.raises(RefusedError, match=r"sensors\.> are not yours"):
            one.read(LONG)


@pytest.mark.parametrize(
    "greeting",
    ["HELLO 2 x=1", "HELLO 2 token=secret-north x=1", f"HELLO 2 token=secret-north producer={'p' * 300}", "HELLO 3", "HELLO"],
)
def test_a_refused_hello_is_the_end_of_the_connection(guarded: Server, root: Client, greeting: str) -> None:
    root.publish("other", b"kept")
    wire = Wire(guarded.port)
    wire.send(greeting.encode() + b"\nLIST\nPUB other 5\nstealFETCH 1 10\nQUEUE evil topics=>\nSHUTDOWN\n")
    assert wire.line().startswith("ERR closing ")
    wire.closed()
    assert root.queues() == []
    assert root.publish("other", b"next") == 2, "nothing was stored, and the broker goes on"
