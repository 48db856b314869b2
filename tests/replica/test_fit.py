"""A stream that would drop, refuse or share blocks, or that is another program's, is refused before anything is
confirmed; an answer of a node that knows no leader is not taken for the cluster's.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, cast

import pytest

import penstock.replica.stream
from penstock.errors import InvalidArgument, RefusedError
from penstock.journal import Journal
from penstock.replica import JetStream, Replica, health
from penstock.replica.client import Access, Client, Connection, UnansweredError
from penstock.replica.cluster import Cluster
from penstock.replica.protocol import Message
from penstock.replica.seed import seed
from penstock.replica.standby import lease_stream
from penstock.replica.stream import Target

from .conftest import LONG, until
from .fake_blocks import FakeBlocks, FakeStream
from .test_model import contents


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JetStream]:
    """The stream of a node of its own."""
    with Cluster(tmp_path_factory.mktemp("node"), 1) as cluster:
        blocks = cluster.connect()
        yield blocks
        blocks.close()


def make(node: JetStream, name: str, **settings: Any) -> JetStream:
    """A stream of somebody's own making, as an administrator may have made it."""
    wanted = {"name": name, "subjects": [f"penstock.{name}"], "storage": "file", "num_replicas": 1, **settings}
    node._ask(f"STREAM.CREATE.{name}", wanted)
    return JetStream(replace(node.target, stream=name))


UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"subjects": ["orders.>"]}, "orders.>"),
    ({"subjects": ["penstock.unfit", "orders.>"]}, "orders.>"),
    ({"storage": "memory"}, "storage"),
    ({"retention": "interest"}, "retention"),
    ({"retention": "workqueue"}, "retention"),
    ({"max_msgs": 20}, "max_msgs"),
    ({"max_bytes": 1 << 20}, "max_bytes"),
    ({"max_age": 3_600_000_000_000}, "max_age"),
    ({"max_msgs_per_subject": 20}, "max_msgs_per_subject"),
    ({"max_msgs_per_subject": 20, "discard": "new"}, "max_msgs_per_subject"),
    ({"max_msg_size": 1000}, "max_msg_size"),
    ({"no_ack": True}, "no_ack"),
]


@pytest.mark.parametrize(("settings", "named"), UNFIT, ids=lambda part: part if isinstance(part, str) else "")
def test_a_stream_that_would_not_keep_every_block_is_refused(
    node: JetStream, settings: dict[str, Any], named: str
) -> None:
    blocks = make(node, "unfit", **settings)
    try:
        with pytest.raises(InvalidArgument, match=named):
            blocks.open()
        found = [finding for finding in health.look(blocks.target) if finding.verdict == "bad"]
        assert any(named in finding.text for finding in found)
        assert not any("repairs the stream" in finding.remedy for finding in found)
    finally:
        blocks._ask("STREAM.DELETE.unfit", {})
        blocks.close()


@pytest.mark.parametrize("settings", [{}, {"max_bytes": 1 << 30, "discard": "new"}, {"max_msg_size": 1 << 20}])
def test_a_stream_of_an_administrator_that_keeps_every_block_is_taken(
    node: JetStream, settings: dict[str, Any]
) -> None:
    blocks = make(node, "fit", **settings)
    try:
        blocks.open()
        blocks.append(bytes(blocks.max_bytes), 0, "a" * 40)  # the longest block fits
        assert blocks.bounds().last == 1
    finally:
        blocks._ask("STREAM.DELETE.fit", {})
        blocks.close()


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ({"max_msgs": 2}, "is full: 2 of at most 2 blocks (max_msgs)"),
        ({"max_bytes": 100_000}, "of at most 100000 bytes (max_bytes)"),
        ({"max_msgs": 3}, ""),
        ({"max_bytes": 1 << 20}, ""),
    ],
)
def test_doctor_tells_that_a_stream_is_full(node: JetStream, limit: dict[str, int], words: str) -> None:
    blocks = make(node, "limited", discard="new", **limit)
    try:
        blocks.append(bytes(50_000), 0)
        blocks.append(b"x", 1)
        found = [one for one in health.look(blocks.target) if "of at most" in one.text]
        assert [one.verdict for one in found] == ["bad"] * bool(words) and all(words in one.text for one in found)
    finally:
        blocks._ask("STREAM.DELETE.limited", {})
        blocks.close()
    assert [one.verdict for one in health._room("stream s", {"max_msgs": 100}, {"messages": 95})] == ["note"]


@pytest.fixture
def node_of_its_own(tmp_path: Path) -> Iterator[Cluster]:
    """A node that the test may end."""
    with Cluster(tmp_path / "own", 1) as cluster:
        cluster.connect().close()
        yield cluster


@pytest.mark.parametrize("server", ["the server", "the stream"])
def test_a_limit_that_was_lowered_meanwhile_cuts_what_is_longer(
    node_of_its_own: Cluster, server: str, tmp_path: Path
) -> None:
    """The limit is that of the connection in use, not of the first one."""
    blocks = node_of_its_own.connect()
    replica = Replica(tmp_path / "a", blocks)
    long = bytes(3 << 20)
    with contextlib.closing(blocks), Journal(tmp_path / "a", disk=replica.disk()) as journal:
        journal.append("t", long)
        before = blocks.bounds().last
        if server == "the server":
            restart(node_of_its_own, 1 << 20)
        else:
            settings = blocks.describe()["config"]
            blocks._ask(f"STREAM.UPDATE.{blocks.target.stream}", {**settings, "max_msg_size": 1 << 20})
        replica.end_after(LONG)
        journal.append("t", long)
        journal.append("t", b"and on")
        assert blocks.bounds().last == before + 5, "three parts of a megabyte, what is left, and the short one"
        assert [len(body) for _, body in sorted(contents(journal).items())] == [3 << 20, 3 << 20, 6]
    with (
        contextlib.closing(node_of_its_own.connect()) as again,
        Journal(tmp_path / "b", disk=Replica(tmp_path / "b", again).disk()) as journal,
    ):
        assert [len(body) for _, body in sorted(contents(journal).items())] == [3 << 20, 3 << 20, 6]


def test_a_server_that_takes_too_little_is_named_with_the_remedy(node_of_its_own: Cluster) -> None:
    restart(node_of_its_own, 4096)
    blocks = JetStream(Target.parse(node_of_its_own.address))
    remedy = "takes 4096 bytes in one message, and 65536 is the least"

    def refused() -> str:
        try:
            blocks.open()
        except ConnectionError as error:
            return str(error)
        return "taken"

    with contextlib.closing(blocks):
        until(lambda: "refused" not in refused(), "the node answers")
        assert f"{remedy}: max_payload: 8MB" in refused()
    found = [finding for finding in health.look(blocks.target) if remedy in finding.text]
    assert found[0].verdict == "bad" and "max_payload: 8MB" in found[0].remedy


def restart(cluster: Cluster, max_payload: int) -> None:
    """End the only node, and start it with another ``max_payload``."""
    (one,) = cluster.nodes
    one.kill()
    path = one.directory / "nats.conf"
    path.write_text(path.read_text().replace(f"max_payload: {8 << 20}", f"max_payload: {max_payload}"))
    one.start()


def test_doctor_tells_that_a_log_was_purged(node: JetStream, tmp_path: Path) -> None:
    blocks = JetStream(replace(node.target, stream="purged"))
    blocks.open()
    with contextlib.closing(blocks), Journal(tmp_path / "a", disk=Replica(tmp_path / "a", blocks).disk()) as journal:
        for number in range(3):
            journal.append("t", b"%d" % number)
        assert not any(finding.verdict == "bad" for finding in health.look(blocks.target))
        blocks.purge(blocks.bounds().last + 1)
        journal.append("t", b"and on")
        found = [finding.text for finding in health.look(blocks.target) if finding.verdict == "bad"]
        assert len(found) == 1 and "was purged, and not by its broker" in found[0], found


def test_doctor_tells_that_a_stream_was_not_filled_to_its_end(node: JetStream, tmp_path: Path) -> None:
    with Journal(tmp_path / "own") as journal:
        journal.append("t", b"one")
    full = FakeStream()
    seed(tmp_path / "own", FakeBlocks(full))
    blocks = make(node, "half", discard="new")
    try:
        blocks.append(full.blocks[1], 0)
        assert "bad" in [one.verdict for one in health.look(blocks.target) if "not filled to its end" in one.text]
        blocks.append(full.blocks[2], 1)
        assert not [one for one in health.look(blocks.target) if one.verdict == "bad"]
    finally:
        blocks._ask("STREAM.DELETE.half", {})
        blocks.close()


def test_a_log_and_the_lease_of_another_one_do_not_share_a_stream(node: JetStream) -> None:
    """``orders`` with ``--standby`` keeps its lease in ``orders_lead``, which may be the name of a log."""
    log = JetStream(replace(node.target, stream="orders_lead"))
    lease = lease_stream(replace(node.target, stream="orders"))
    try:
        log.open()
        log.append(b"block", 0, "a")
        with pytest.raises(InvalidArgument, match="stream orders_lead"):
            lease.open()
        assert log.read(1) == b"block"
        log._ask("STREAM.DELETE.orders_lead", {})
        lease.open()
        with pytest.raises(InvalidArgument, match="stream orders_lead"):
            log.open()
        assert not any(finding.verdict == "bad" for finding in health.look(replace(node.target, stream="penstock")))
    finally:
        log.close()
        lease.close()


class Cast(Client):
    """Three servers: the first is alone with an old state, as one whose disk is full; the others know the leader."""

    def __init__(self, answers: list[dict[str, Any]]) -> None:
        super().__init__([("h", number) for number in range(len(answers))])
        self.answers = answers

    def connection(self) -> Any:
        self._connection = cast("Connection", Standing())
        return self._connection

    def request(self, subject: str, *_: Any, **__: Any) -> Message:
        self.connection()
        return Message(subject, "1", json.dumps(self.answers[self._next % len(self.answers)]).encode(), {})


class Standing:
    max_payload = 8 << 20

    def close(self) -> None:
        pass


def said(last: int, leader: str) -> dict[str, Any]:
    state = {"first_seq": 1, "last_seq": last, "messages": last}
    return {"state": state, "cluster": {"name": "c", **({"leader": leader} if leader else {})}}


UNAVAILABLE = {"error": {"code": 503, "err_code": 10008, "description": "JetStream system temporarily unavailable"}}


@pytest.mark.parametrize("ill", [said(32, ""), UNAVAILABLE], ids=["no leader", "unavailable"])
def test_a_node_that_knows_no_leader_is_not_believed_and_left(ill: dict[str, Any]) -> None:
    blocks = JetStream(Target.parse("nats://h:1,h:2/s"))
    blocks.client = Cast([ill, said(69, "node3")])
    with pytest.raises(UnansweredError):
        blocks.bounds()
    assert blocks.bounds().last == 69
    assert blocks.bounds().last == 69  # one that answers is not left


NOT_FOUND = {"error": {"code": 404, "err_code": 10059, "description": "stream not found"}}
MADE = {"config": {"subjects": ["penstock.s"], "storage": "file"}, **said(0, "node1")}


class Scripted(Cast):
    """One server, whose answers follow each other."""

    def request(self, subject: str, *_: Any, **__: Any) -> Message:
        self.connection()
        return Message(subject, "1", json.dumps(self.answers.pop(0)).encode(), {})


@pytest.mark.parametrize(
    "answers",
    [[NOT_FOUND, MADE, NOT_FOUND, MADE], [NOT_FOUND, MADE, said(0, ""), MADE], [UNAVAILABLE, MADE]],
    ids=["not known everywhere", "no leader yet", "unavailable"],
)
def test_a_stream_that_was_just_made_is_waited_for_without_a_word(
    answers: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As by two brokers that are started together."""
    monkeypatch.setattr(penstock.replica.stream, "SLOW_S", 60.0)
    blocks = JetStream(Target.parse("nats://h:1/s"))
    blocks.client = Scripted(list(answers))
    blocks.open_patiently()
    assert not blocks.client.answers and not caplog.messages


def test_a_stream_that_stays_away_is_told_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(penstock.replica.stream, "SLOW_S", 0.0)
    blocks = JetStream(Target.parse("nats://h:1/s"))
    blocks.client = Scripted([NOT_FOUND, MADE, NOT_FOUND, NOT_FOUND, MADE, MADE])
    blocks.open_patiently()
    assert all(told.endswith("; trying again") for told in caplog.messages) and caplog.messages
    assert "penstock broker" not in caplog.text, "which is what asks"


def test_more_copies_than_nodes_is_told_in_words() -> None:
    blocks = JetStream(Target.parse("nats://h:1/s?replicas=5"))
    no_peers = {"error": {"code": 400, "err_code": 10005, "description": "no suitable peers for placement"}}
    blocks.client = Scripted([NOT_FOUND, no_peers])
    with pytest.raises(penstock.replica.stream.StreamError, match="5 copies need 5 nodes"):
        blocks.open()


@pytest.mark.parametrize(("away", "verdict"), [(0, []), (1, ["note"]), (2, ["bad"])])
def test_doctor_tells_when_most_copies_are_away(away: int, verdict: list[str]) -> None:
    """Also while the last one still leads."""
    replicas = [{"name": f"node{n}", "current": n >= away, "offline": n < away} for n in range(2)]
    found = list(health._copies("stream s", {"leader": "node3", "replicas": replicas}))
    assert [finding.verdict for finding in found] == verdict
    assert all(("nothing can be stored" in finding.remedy) == (away == 2) for finding in found)


def test_doctor_says_nothing_of_syncs_where_jetstream_is_off() -> None:
    class Off(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"disabled": true, "config": {"max_memory": 0}}')

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Off) as server:
        answering = threading.Thread(target=server.handle_request)
        answering.start()
        found = list(health._syncing(f"http://127.0.0.1:{server.server_port}"))
        answering.join()
    assert [finding.verdict for finding in found] == ["note"] and "JetStream is off" in found[0].text


def test_servers_that_do_not_agree_on_tls_are_refused_at_once_with_the_option() -> None:
    """Only where none ever did: one that was changed meanwhile may be changed back."""

    def greet(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b'INFO {"max_payload": 1048576}\r\n')
            connection.recv(4096)
            connection.sendall(b"-ERR 'Unknown Protocol Operation'\r\n")

    for greeted, kind in ((False, RefusedError), (True, ConnectionError)):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            answering = threading.Thread(target=greet, args=(listener,))
            answering.start()
            client = Client([listener.getsockname()], Access(tls=ssl.create_default_context()))
            client._greeted = greeted
            with pytest.raises(kind) as told:
                client.connection()
            answering.join()
        assert ("--store-authority" in str(told.value)) == (not greeted)


@pytest.mark.timeout(120)
def test_a_token_that_is_changed_meanwhile_is_told_and_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Cluster(tmp_path / "nodes", 1, token="first") as cluster:
        (node,) = cluster.nodes
        conf = node.directory / "nats.conf"

        def change(old: str, new: str) -> None:
            conf.write_text(conf.read_text().replace(old, new))
            node.signal(signal.SIGHUP)

        replica = Replica(tmp_path / "a", cluster.connect())
        with Journal(tmp_path / "a", disk=replica.disk()) as journal, ThreadPoolExecutor(1) as thread:
            journal.append("t", b"one")
            change("first", "second")
            until(
                lambda: "Reloaded server configuration" in (node.directory / "log").read_text(),
                "the server has read it",
            )
            appending = thread.submit(journal.append, "t", b"two")
            until(lambda: "Authorization Violation; give its token" in caplog.text, "the refusal is told")
            change("second", "first")
            appending.result(LONG)
            assert len(contents(journal)) == 2
        replica.close()


def test_a_server_that_refuses_is_left_for_one_that_lets_in(tmp_path: Path) -> None:
    with Cluster(tmp_path / "one", 1, token="one") as one, Cluster(tmp_path / "two", 1, token="two") as two:
        one.connect().close()
        two.connect().close()
        servers = [(cluster.nodes[0].host, cluster.nodes[0].ports.client) for cluster in (one, two)]
        for token in ("one", "two"):
            client = Client(servers, Access(token=token))
            client.connection()
            client.close()
        with pytest.raises(RefusedError, match="Authorization Violation"):
            Client(servers, Access(token="three")).connection()
