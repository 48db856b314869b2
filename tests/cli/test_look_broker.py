"""What ``info`` and ``why`` say of a broker's topics and queues is what the broker has."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock import address as addresses
from penstock.broker import Client, Server
from penstock.broker.explain import explain

from .command import run

PATIENT = "timeout=60"  # on a loaded machine a broker may take longer than the two seconds of these commands


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "log", 0).start() as running:
        yield running


@pytest.fixture
def closing() -> Iterator[int]:
    """The port of a listener that closes every connection: no broker."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def close_all() -> None:
            try:
                while True:
                    listener.accept()[0].close()
            except OSError:
                return

        thread = threading.Thread(target=close_all, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(30)


def test_info_tells_what_is_kept_of_a_topic_that_nobody_has_open(server: Server) -> None:
    with Client(port=server.port) as client:
        client.publish("other", b"x")
        client.publish_many("work.a", [b"1", b"2"])
        client.queue("jobs", topics="work.>", from_position=1)
    for place in (f"work.a?{PATIENT}", f"work.a?queue=jobs&{PATIENT}"):
        done = run("info", f"broker://127.0.0.1:{server.port}/{place}", "--json")
        assert done.returncode == 0, done.stderr
        facts = json.loads(done.stdout)["facts"]
        assert facts["kept"].startswith("from ordinal 1 of work.a on, position 2,")
        assert facts["queue jobs"] == "of work.>: 2 wait, 0 in flight, 0 consumers"
    done = run("info", f"broker://127.0.0.1:{server.port}/work.b?{PATIENT}", "--json")
    assert json.loads(done.stdout)["facts"]["kept"] == "nothing"


def test_info_says_who_does_not_answer(closing: int) -> None:
    done = run("info", f"broker://127.0.0.1:{closing}/t")
    assert done.returncode == 1 and "nothing is kept" not in done.stderr and str(closing) in done.stderr


def test_why_finds_that_no_broker_listens_there(closing: int) -> None:
    done = run("why", f"broker://127.0.0.1:{closing}/t")
    assert done.returncode == 4 and "does not answer as a broker" in done.stdout


def test_another_reader_that_is_behind_is_no_reason(server: Server) -> None:
    text = f"broker://127.0.0.1:{server.port}/t"
    with Client(port=server.port) as client, penstock.subscriber(text, credit=1):
        client.publish_many("t", [b"x"] * 10)
        found = list(explain(addresses.parse(text)))
    assert not [finding.text for finding in found if finding.grave]
    assert any("1 read the topic 't'" in finding.text for finding in found)


def test_info_of_a_queue_shows_that_queue(server: Server) -> None:
    with Client(port=server.port) as client:
        client.queue("looked-at", topics="work.>")
        client.publish_many("work.a", [b"1", b"2", b"3"])
        with client.subscribe("looked-at", ack="read") as consumer:
            assert consumer.read(30) is not None
    for address in (f"broker:looked-at?{PATIENT}", f"broker://127.0.0.1:{server.port}/?queue=looked-at&{PATIENT}"):
        handles = json.loads(run("info", address, "--json").stdout)["handles"]
        assert [(handle["kind"], handle["name"]) for handle in handles] == [("queue", "looked-at")], handles
    handles = json.loads(run("info", f"broker://127.0.0.1:{server.port}", "--json").stdout)["handles"]
    assert handles[0]["kind"] == "broker" and handles[0]["last_ns"], "when it got its last message"
    facts = json.loads(run("info", f"broker://127.0.0.1:{server.port}/?queue=lookedat&{PATIENT}", "--json").stdout)["facts"]
    assert facts["queue lookedat"] == "is not there; did you mean looked-at?"


def test_a_token_without_the_right_to_a_topic_is_a_reason(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text('[[token]]\nname = "n"\ntoken = "secret"\npublish = ["t"]\nsubscribe = ["t"]\n')
    tokens.chmod(0o600)
    with Server(tmp_path / "d", 0, tokens=tokens).start() as server, Server(tmp_path / "e", 0).start():
        place = f"broker://127.0.0.1:{server.port}"
        done = run("why", f"{place}/t?token=secret&{PATIENT}")
        assert done.returncode == 0 and "was that meant" not in done.stdout, "the other broker is no reason"
        done = run("why", f"{place}/u?token=secret&{PATIENT}")
        assert done.returncode == 4 and "neither yours to publish to nor to read: u" in done.stdout
        facts = json.loads(run("info", f"{place}/t?token=secret&{PATIENT}", "--json").stdout)["facts"]
        assert facts["kept"] == "nothing" and "right statistics" in facts["queues"]


def test_of_several_brokers_one_that_answers_is_enough(server: Server) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        dead = nobody.getsockname()[1]
        place = f"broker://127.0.0.1:{dead},127.0.0.1:{server.port}/t?{PATIENT}"
        done = run("why", place)
        assert done.returncode == 0 and f"nobody listens at 127.0.0.1:{dead}: it stands by" in done.stdout, done.stdout
        assert "start a broker there" not in done.stdout
        assert json.loads(run("info", place, "--json").stdout)["facts"]["kept"] == "nothing"
        done = run("why", f"broker://127.0.0.1:{dead},127.0.0.1:{dead}/t")
        assert done.returncode == 4 and "nobody listens" in done.stdout, done.stdout
