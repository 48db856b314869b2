"""One case over a real cluster of three nodes: the broker goes on after its leader was killed, and on another machine."""

from __future__ import annotations

import shutil
import ssl
from pathlib import Path
from uuid import UUID

import pytest

from penstock.broker import Client
from penstock.errors import InvalidArgument, RefusedError
from penstock.journal import Journal
from penstock.replica import JetStream, health
from penstock.replica.block import EPOCH, Block
from penstock.replica.client import UnansweredError
from penstock.replica.cluster import Cluster, Encryption
from penstock.replica.follower import Follower
from penstock.replica.stream import Target, WrongLastError, tls_context
from tests.tcp.test_security import Authority

from .conftest import LONG, replicated_server, until
from .test_model import contents


def leader(blocks: JetStream) -> str:
    """The node that leads the stream; waits until one does."""

    def look() -> str:
        try:
            return str(blocks.describe().get("cluster", {}).get("leader", ""))
        except (UnansweredError, ConnectionError):
            return ""

    return str(until(look, "a leader"))


@pytest.mark.timeout(300)
def test_a_broker_outlives_a_node_and_its_own_directory(tmp_path: Path) -> None:
    """Over TLS, and with a token."""
    authority = Authority(tmp_path, "authority")
    certificate = authority.issue("node")
    tls = tls_context(authority.path, None, None)
    with Cluster(tmp_path / "nodes", token="secret", encryption=Encryption(certificate, certificate)) as cluster:
        blocks = cluster.connect(tls)
        with (
            replicated_server(tmp_path / "first", cluster.connect(tls)).start() as server,
            Client(port=server.port) as client,
        ):
            client.queue("q", topics="t")
            client.publish_many("t", [b"%d" % number for number in range(1000)])
            client.publish("t", bytes(10 << 20))  # more than a message of the stream may have
            first = leader(blocks)
            node = next(node for node in cluster.nodes if node.name == first)
            node.kill()
            client.publish("t", b"after the kill")
            journal = server.broker.store.identity
        shutil.rmtree(tmp_path / "first")
        node.start()
        with (
            replicated_server(tmp_path / "second", cluster.connect(tls)).start() as server,
            Client(port=server.port) as client,
        ):
            assert server.broker.store.identity == journal
            with client.subscribe("q", credit=2000) as consumer:
                found = []
                while len(found) < 1002:
                    message = consumer.read(60)
                    assert message is not None
                    found.append(bytes(message))
        followed = cluster.connect(tls, answer_s=LONG)
        Follower(tmp_path / "follower", followed).close()
        followed.close()
        with Journal(tmp_path / "follower", mode="read") as reader:
            assert [body for _, body in sorted(contents(reader).items())] == found
        assert found == [*(b"%d" % number for number in range(1000)), bytes(10 << 20), b"after the kill"]
        blocks.close()
        blocks = cluster.connect(tls, answer_s=LONG)
        check_seam(blocks)
        check_health(cluster, blocks)
        with pytest.raises((RefusedError, ConnectionError), match="Authorization"):
            JetStream(Target.parse(cluster.address, tls)).open()
        with pytest.raises(ConnectionError, match="certificate"):
            JetStream(Target.parse(cluster.address, ssl.create_default_context(), "secret")).open()
        with pytest.raises(ConnectionError, match="certificate"):  # what the server asks for is done, and checked
            JetStream(Target.parse(cluster.address.replace("tls:", "nats:"), token="secret")).open()
        blocks.close()


def check_health(cluster: Cluster, blocks: JetStream) -> None:
    """What doctor says of a cluster that is whole, and of one with a node less."""
    until(lambda: not verdicts(cluster, blocks) - {"ok"}, "all replicas are current")
    cluster.nodes[0].kill()
    until(lambda: "bad" in verdicts(cluster, blocks))
    told = " ".join(finding.text for finding in health.look(blocks.target, cluster.monitors))
    assert f":{cluster.nodes[0].ports.client} does not answer" in told
    assert "whether the nodes sync" in " ".join(finding.text for finding in health.look(blocks.target))


def verdicts(cluster: Cluster, blocks: JetStream) -> set[str]:
    return {finding.verdict for finding in health.look(blocks.target, cluster.monitors)}


def check_seam(blocks: JetStream) -> None:
    """The stream as it really answers: what the tests in memory stand on."""
    last = until(lambda: blocks.bounds().last)
    with pytest.raises(WrongLastError):
        blocks.append(b"not here", last - 1, "a")
    one = Block(UUID(int=1), 1, 1, 1, 1, 1, 0, 0, 0, EPOCH).encode()
    blocks.append(one, last, "b")
    assert blocks.read(last + 1) == one
    assert blocks.read(last + 2) is None
    found = list(blocks.read_range(last - 1, last + 3))
    assert [sequence for sequence, _ in found] == [last - 1, last, last + 1]
    assert found[-1][1] == one
    blocks.purge(last + 1)
    assert until(lambda: blocks.bounds().first) == last + 1
    assert blocks.read(last) is None


def test_any_token_that_a_server_takes(tmp_path: Path) -> None:
    with Cluster(tmp_path / "nodes", 1, token='@a:b/%41 \\"') as cluster:
        cluster.connect().close()
    for token, why in {"$2a$11$" + "x" * 53: "bcrypt hash", "x" * 5000: "1024 are the most"}.items():
        with pytest.raises(InvalidArgument, match=why):
            Cluster(tmp_path / "other", 1, token=token)
    assert not (tmp_path / "other").exists()


def test_addresses_are_taken_apart() -> None:
    target = Target.parse("nats://h1,h2:5000,[::1]:6000/orders?replicas=5")
    assert target.servers == (("h1", 4222), ("h2", 5000), ("::1", 6000))
    assert (target.stream, target.replicas, target.access.tls) == ("orders", 5, None)
    assert Target.parse("nats://a%40b@h/s").access.token == "a@b"
    assert Target.parse("nats://u:p@h/s", token="t").access.words() == {"user": "u", "pass": "p"}
    assert Target.parse("nats://h/s", token="t").access.words() == {"auth_token": "t"}
    assert Target.parse("tls://h/s").access.tls is not None
    assert "secret" not in repr(Target.parse("nats://secret@h/s"))


@pytest.mark.parametrize(
    "address",
    ["h1/s", "http://h/s", "nats://h", "nats://h/", "nats:///s", "nats://h/a.b", "nats://h:99999/s", "nats://h/s?x=1",
     "nats://h/s?replicas=2", "nats://h/s?replicas=1&replicas=3", "nats://h/s?replicas=3&replicas=1", "nats://h,,g/s"],
)  # fmt: skip
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidArgument):
        Target.parse(address)
