"""``penstock queue``: every command against a broker, for people and for machines."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import penstock
from penstock.broker import Client, Server
from penstock.broker.words import Refusal
from penstock.cli import exits
from penstock.cli.target import live_brokers
from penstock.errors import RefusedError
from tests.broker.conftest import LONG, until


@pytest.fixture
def queue(server: Server) -> Callable[..., str]:
    def run(command: str, *arguments: str, code: int = 0, address: str = "") -> str:
        where = address or f"broker://127.0.0.1:{server.port}"
        line = [sys.executable, "-m", "penstock", "queue", command, where, *arguments]
        done = subprocess.run(line, capture_output=True, text=True, timeout=10 * LONG, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def test_a_queue_from_its_making_to_its_end(queue: Callable[..., str], client: Client, server: Server) -> None:
    assert "no queues" in queue("list")
    queue("create", "jobs", "--topic", "work.>", "--max-tries", "1", "--ack-timeout", "2m")
    queue("create", "jobs", "--topic", "work.>", "--max-tries", "1", "--ack-timeout", "2m")
    told = queue("create", "jobs", "--max-tries", "9", code=1)
    assert "max_tries=1, not 9" in told, "it names the option that differs"
    for number in range(5):
        client.publish("work.a", b"job %d" % number)
    told = queue("list")
    assert "jobs" in told and "work.>" in told and " 5 " in told
    shown: dict[str, Any] = json.loads(queue("show", "jobs", "--json"))
    assert (shown["depth"], shown["ack_timeout_s"], shown["keep"]) == (5, 120.0, "1GiB")
    assert shown["exclusive"] is False and "exclusive        no\n" in queue("show", "jobs")
    assert "job 0" in queue("peek", "jobs", "-n", "2")
    peeked = [json.loads(line) for line in queue("peek", "jobs", "-n", "2", "--json").splitlines()]
    assert [message["payload"] for message in peeked] == ["job 0", "job 1"]
    assert json.loads(queue("set", "jobs", "--ttl", "1h", "--json"))["changed"] == ["ttl_s"]
    queue("pause", "jobs")
    assert "paused" in queue("list")
    queue("resume", "jobs")
    with client.subscribe("jobs", ack="manual") as consumer:
        message = consumer.read(LONG)
        assert message is not None
        consumer.nack(message)
        until(lambda: "jobs.dead" in server.broker.queues)
        client.ping()
    assert "job 0" in queue("peek", "jobs.dead"), "dead letters are looked at before they are sent back"
    assert json.loads(queue("redrive", "jobs", "--json"))["redriven"] == 1
    assert "5 messages" in queue("purge", "jobs")
    queue("delete", "jobs")
    assert "there is no queue jobs" in queue("show", "jobs", code=2)


def test_the_address_that_ls_prints(queue: Callable[..., str], client: Client) -> None:
    client.queue("printed-by-ls", topics="work.>")
    client.publish("work.a", b"hello")
    assert live_brokers("broker:pr") == ["broker:printed-by-ls"], "completion offers it"
    for name in (["printed-by-ls"], []):
        assert json.loads(queue("show", *name, "--json", address="broker:printed-by-ls"))["depth"] == 1
    for line in (["info", "broker:printed-by-ls"], ["why", "broker:printed-by-ls"],
                 ["sub", "broker:printed-by-ls", "--count", "1"]):  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "penstock", *line], capture_output=True, text=True, timeout=10 * LONG
        )
        assert "no known reach" not in done.stderr and "is not of the form" not in done.stderr, done.stderr
        assert done.returncode in (0, 4), done.stdout + done.stderr
    assert "hello" in done.stdout


def test_an_address_of_no_queue_says_so(queue: Callable[..., str]) -> None:
    assert "no broker of this machine has one" in queue("list", address="broker:nobody-has-this", code=2)


def test_who_listens_nowhere_is_told_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        where = f"broker://127.0.0.1:{taken.getsockname()[1]}"
        for line in (["queue", "list", where], ["pub", f"{where}/t", "x"], ["sub", f"{where}/t"]):
            done = subprocess.run(
                [sys.executable, "-m", "penstock", *line], capture_output=True, text=True, timeout=10 * LONG
            )
            assert done.returncode == 1 and "nobody listens there" in done.stderr, done.stderr
            assert ("--wait keeps trying" in done.stderr) == (line[0] == "sub")
        waits = [sys.executable, "-m", "penstock", "sub", f"{where}/t", "--wait", "--timeout", "3"]
        done = subprocess.run(waits, capture_output=True, text=True, timeout=10 * LONG)
        assert done.returncode == 3 and "nobody has answered yet; waiting" in done.stderr, done.stderr


def test_a_command_spends_no_delivery_of_what_it_does_not_show(server: Server, client: Client) -> None:
    client.queue("one", topics="t", max_tries=1)
    client.publish_many("t", [b"%d" % number for number in range(5)])
    line = [sys.executable, "-m", "penstock", "sub", f"broker://127.0.0.1:{server.port}/?queue=one", "-n", "1"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=10 * LONG)
    assert done.stdout == "0\n", done.stderr
    with client.subscribe("one") as consumer:
        assert [bytes(consumer.receive(timeout=LONG)) for _ in range(4)] == [b"1", b"2", b"3", b"4"]


def test_what_a_subscriber_was_sent_ahead_and_did_not_read_is_not_counted(server: Server, client: Client) -> None:
    client.queue("q", topics="t", max_tries=2)
    client.publish_many("t", [b"%d" % number for number in range(5)])
    for _ in range(5):
        with client.subscribe("q") as consumer:
            until(lambda: server.broker.queues["q"].state.in_flight == 5)
            assert consumer.wait(LONG)
        until(lambda: not server.broker.queues["q"].consumers)
    with pytest.raises(RuntimeError), client.subscribe("q") as consumer:
        assert bytes(consumer.receive(timeout=LONG)) == b"0"
        raise RuntimeError("in the middle of it")
    until(lambda: not server.broker.queues["q"].consumers)
    with client.subscribe("q", ack="manual") as consumer:
        found = {bytes(message): consumer.deliveries(message) for message in (consumer.receive(LONG) for _ in range(5))}
    assert found == {b"0": 2, b"1": 1, b"2": 1, b"3": 1, b"4": 1}, "one was tried, the others were never read"


@pytest.mark.parametrize("verb", ["show", "set", "purge", "pause", "resume", "peek", "redrive", "delete"])
def test_a_queue_that_is_not_there_is_a_wrong_argument(queue: Callable[..., str], verb: str) -> None:
    assert "there is no queue nix" in queue(verb, "nix", *(["--ttl", "5s"] if verb == "set" else []), code=2)


def test_what_no_broker_takes_is_a_wrong_argument(queue: Callable[..., str], client: Client) -> None:
    assert "no blanks" in queue("create", "bad name", code=2)
    for verb in (client.purge, client.delete, client.pause, client.resume, client.redrive, client.seek):
        with pytest.raises(RefusedError, match="no blanks") as refused:
            verb("bad name", **({"position": 1} if verb == client.seek else {}))
        assert exits._code(refused.value) == 2
    for code in (Refusal("bad_option", ""), Refusal("unknown_queue", "")):
        assert exits._code(code) == 2
    for code in (Refusal("exists", ""), Refusal("denied", ""), RefusedError("")):
        assert exits._code(code) == 1


def test_the_topic_of_a_new_queue_may_stand_in_the_address(queue: Callable[..., str], client: Client) -> None:
    address = f"broker://127.0.0.1:{client._link.port}/work.a"
    assert "for work.a" in queue("create", "jobs", address=address)
    assert client.queues()[0]["topics"] == ["work.a"]
    assert "a new one needs its topics" in queue("create", "other", code=2)
    assert "queue jobs is there" in queue("create", "jobs"), "as it is"


def test_topics_are_not_replaced_over_what_waits(queue: Callable[..., str], client: Client) -> None:
    client.queue("jobs", topics="old")
    client.publish_many("old", [b"1", b"2", b"3"])
    assert "would drop 3 waiting messages of topics" in queue("set", "jobs", "--topic", "new", code=1)
    assert client.queues()[0]["topics"] == ["old"] and client.queues()[0]["depth"] == 3
    assert "dropped" not in queue("set", "jobs", "--topic", "old", "--topic", "new")
    client.publish("new", b"4")
    assert json.loads(queue("set", "jobs", "--topic", "new", "--drop-waiting", "--json"))["dropped"] == 3
    with client.subscribe("jobs", ack="read") as consumer:
        assert bytes(consumer.receive(LONG)) == b"4"
    assert "dropped" not in json.loads(queue("set", "jobs", "--topic", "newest", "--json"))


def test_what_is_dropped_with_topics_is_in_the_ledger(server: Server, client: Client) -> None:
    client.queue("jobs", topics=["a", "b"])
    for topic in ("a", "b", "a"):
        client.publish_many(topic, [b"x"] * 5)
    with pytest.raises(RefusedError, match="would drop 10 waiting messages"):
        client.queue("jobs", topics=["b", "c"])
    with client.subscribe("jobs", ack="manual", credit=7) as consumer:
        assert len([consumer.receive(LONG) for _ in range(7)]) == 7
        client.queue("jobs", topics=["b", "c"], drop_waiting=True)
        (found,) = client.queues()
        assert (found["dropped"], found["in_flight"], found["depth"]) == (5, 7, 10), (
            "held ones stay with their consumer"
        )
    counted = server.broker.queues["jobs"].counters.snapshot()
    assert counted["matched"] == 7 + 5 and counted["dropped"]["filtered"] == 5


def test_what_would_be_lost_is_counted_in_turns(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is handed out meanwhile, so that the number is right."""
    client.queue("jobs", topics="old")
    client.publish_many("old", [b"x"] * 1000)
    before = server.turns
    with monkeypatch.context() as patch:
        patch.setattr("penstock.broker.queue.PIECE_MESSAGES", 10)
        patch.setattr("penstock.broker.backlog.PIECE_MESSAGES", 10)
        patch.setattr("penstock.broker.server.TURN_S", 0.0)
        with pytest.raises(RefusedError, match="would drop 1000 waiting messages"):
            client.queue("jobs", topics="new")
    assert server.turns - before >= 100
    with client.subscribe("jobs", ack="read") as consumer:
        assert sum(1 for _ in range(1000) if consumer.read(LONG)) == 1000, "it hands out again"


def test_a_wildcard_is_a_whole_part(queue: Callable[..., str], client: Client) -> None:
    assert "a wildcard is a whole part" in queue("create", "jobs", "--topic", "sensors.a*", code=2)
    assert client.queues() == []


def test_a_misspelt_queue_makes_none(server: Server, client: Client) -> None:
    client.queue("jobs", topics="work.>")
    place = f"broker://127.0.0.1:{server.port}/?queue=jbos"
    for use in (lambda: client.subscribe("jbos"), lambda: penstock.subscriber(place), lambda: client.queue("jbos")):
        with pytest.raises(
            RefusedError, match=r"there is no queue jbos \(did you mean jobs\?\); a new one needs its topics"
        ):
            use()
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "sub", place], capture_output=True, text=True, timeout=10 * LONG
    )
    assert done.returncode == 2 and "did you mean jobs?" in done.stderr, done.stderr
    assert [entry["queue"] for entry in client.queues()] == ["jobs"]
    penstock.subscriber(place.replace("/?", "/work.a?")).close()
    with client.subscribe("jobs"), client.subscribe("jbos"):
        pass
