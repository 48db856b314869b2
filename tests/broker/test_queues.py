"""Queues: topics, acknowledgement, redelivery, dead letters, sharing, replay, time to live, delay, duplicates."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.broker import Client, Limits, Server, words
from penstock.errors import RefusedError, StateError

from .conftest import LONG, Wire, until


def summary(client: Client, name: str) -> dict[str, object]:
    return next(entry for entry in client.queues() if entry["queue"] == name)


def test_wildcards(client: Client) -> None:
    client.queue("one", topics="sensors.*.temp")
    client.queue("all", topics="sensors.>")
    client.queue("two", topics=["a", "b"])
    for topic in ("sensors.north.temp", "sensors.north.wind", "sensors.temp", "sensors", "a", "b", "c"):
        client.publish(topic, topic.encode())
    wanted = {
        "one": ["sensors.north.temp"],
        "all": ["sensors.north.temp", "sensors.north.wind", "sensors.temp"],
        "two": ["a", "b"],
    }
    for name, topics in wanted.items():
        with client.subscribe(name) as consumer:
            found = [consumer.receive(LONG) for _ in topics]
            assert [message.channel for message in found] == topics
            assert [bytes(message).decode() for message in found] == topics
            assert consumer.read(0.3) is None


def test_acknowledged_is_gone_and_the_rest_comes_again(client: Client) -> None:
    client.queue("q", topics="t")
    client.publish_many("t", [b"%d" % i for i in range(10)])
    with client.subscribe("q", ack="manual") as consumer:
        messages = [consumer.read(LONG) for _ in range(10)]
        for message in messages[:3] + messages[7:]:
            assert message is not None
            consumer.ack(message)
        consumer.ack(messages[4].position or 0, confirm=True)  # type: ignore[union-attr]
    with client.subscribe("q", ack="manual") as consumer:
        again = [consumer.read(LONG) for _ in range(3)]
        assert [bytes(message) for message in again if message] == [b"3", b"5", b"6"]
        assert consumer.read(0.2) is None


def test_nack_with_delay(client: Client) -> None:
    client.queue("q", topics="t")
    client.publish_many("t", [b"a", b"b"])
    with client.subscribe("q", ack="manual") as consumer:
        first = consumer.read(LONG)
        assert first is not None and consumer.deliveries(first) == 1
        began = time.monotonic()
        consumer.nack(first, delay_s=0.3)
        second = consumer.read(LONG)
        assert second is not None and bytes(second) == b"b"
        consumer.ack(second)
        again = consumer.read(LONG)
        assert again is not None and bytes(again) == b"a" and consumer.deliveries(again) == 2
        assert time.monotonic() - began >= 0.3
        consumer.ack(again)
        assert consumer.read(0.2) is None


def test_redelivery_after_a_timeout(client: Client) -> None:
    client.queue("q", topics="t", ack_timeout_s=0.3)
    client.publish("t", b"x")
    with client.subscribe("q", ack="manual") as consumer:
        assert consumer.read(LONG) is not None
        again = consumer.read(LONG)
        assert again is not None and consumer.deliveries(again) == 2


@pytest.mark.parametrize("say", ["ack", "nack"])
def test_what_was_sent_ahead_to_a_reader_at_work_does_not_expire(server: Server, client: Client, say: str) -> None:
    client.queue("q", topics="t", ack_timeout_s=3600)
    client.publish_many("t", [b"a", b"b", b"c"])
    queue, noted = server.broker.queues["q"], threading.Event()
    state, heard = queue.state, queue.heard
    queue.heard = lambda *given: (heard(*given), noted.set())  # type: ignore[assignment, method-assign]
    with client.subscribe("q", ack="manual") as consumer:
        first = consumer.read(LONG)
        assert first is not None
        until(lambda: state.in_flight == 3)
        due_ns = state.next_time_ns
        until(lambda: time.time_ns() > due_ns - 3600 * 10**9, "the clock has moved since they were sent")
        if say == "ack":
            consumer.ack(first, confirm=True)
        else:
            consumer.nack(first, delay_s=7200)
        assert noted.wait(LONG)
        assert state.in_flight == 2
        assert state.expire(due_ns) == 0, "those behind it wait to be read"
        assert state.next_time_ns > due_ns
        assert state.expire(state.next_time_ns) == 2, "nothing was heard of the reader since"


def test_the_ledger_of_a_subscriber_counts_what_comes_again(client: Client) -> None:
    client.queue("q", topics="t")
    client.publish_many("t", [b"a", b"b"])
    with client.subscribe("q", ack="manual") as consumer:
        for _ in range(2):
            message = consumer.read(LONG)
            assert message is not None
            consumer.nack(message)
        for _ in range(2):
            message = consumer.read(LONG)
            assert message is not None and consumer.deliveries(message) == 2
            consumer.ack(message)
        assert consumer.ledger.redelivered == 2
        assert consumer.ledger.balanced
    assert consumer.ledger.redelivered == 2


def test_what_is_done_when_it_is_read_cannot_be_given_back(client: Client) -> None:
    client.queue("q", topics="t")
    client.publish("t", b"a")
    with client.subscribe("q", ack="read") as consumer:
        message = consumer.read(LONG)
        assert message is not None
        with pytest.raises(StateError, match="acknowledged when it is read"):
            consumer.nack(message)


def test_dead_letters_and_redrive(client: Client) -> None:
    client.queue("q", topics="t", max_tries=3)
    client.queue("bystander", topics="t")
    client.publish_many("t", [b"poison", b"fine"])
    with client.subscribe("q", ack="manual") as consumer:
        for _ in range(3):
            message = consumer.read(LONG)
            while message is not None and bytes(message) == b"fine":
                consumer.ack(message)
                message = consumer.read(LONG)
            assert message is not None and bytes(message) == b"poison"
            consumer.nack(message)
        until(lambda: "q.dead" in [entry["queue"] for entry in client.queues()])
    assert summary(client, "q.dead")["depth"] == 1
    assert summary(client, "q")["dead_lettered"] == 1
    with client.subscribe("q.dead", ack="manual") as dead:
        message = dead.read(LONG)
        assert message is not None and (bytes(message), message.channel) == (b"poison", "t")
    until(lambda: summary(client, "q.dead")["consumers"] == 0)
    assert client.redrive("q") == 1
    assert summary(client, "q.dead")["depth"] == 0
    with client.subscribe("q") as consumer:
        message = consumer.read(LONG)
        assert message is not None and (bytes(message), message.channel) == (b"poison", "t")
    with client.subscribe("bystander") as other:
        assert [bytes(m) for m in (other.read(LONG), other.read(LONG)) if m] == [b"poison", b"fine"]
        assert other.read(0.2) is None, "a re-driven message goes to its queue alone"


def test_a_redrive_takes_the_dead_letters_of_its_queue_alone(serve: Callable[..., Server]) -> None:
    """Queues may share a queue of dead letters, which may have topics of its own."""
    server = serve()
    with Client(port=server.port) as client:
        client.queue("grave", topics="own")
        for name in "ab":
            client.queue(name, topics=name, max_tries=1, dead_letter="grave")
        for number in range(3):
            for topic in ("own", "a", "b"):
                client.publish(topic, b"%s%d" % (topic.encode(), number))
        for name in "ab":
            with client.subscribe(name, ack="manual") as consumer:
                for _ in range(3):
                    consumer.nack(consumer.receive(timeout=LONG))
                until(lambda name=name: summary(client, name)["dead_lettered"] == 3)
        with client.subscribe("grave", ack="manual", credit=5) as consumer:  # some were looked at before, some not
            assert bytes(consumer.receive(timeout=LONG)) == b"own0"
            until(lambda: summary(client, "grave")["in_flight"] == 5)
        until(lambda: summary(client, "grave")["consumers"] == 0)
        assert client.redrive("b") == 3
        assert client.redrive("b") == 0
        assert summary(client, "grave")["depth"] == 6
        with client.subscribe("b") as consumer:
            assert [bytes(consumer.receive(timeout=LONG)) for _ in range(3)] == [b"b0", b"b1", b"b2"]
    server.close()
    server = serve()
    with Client(port=server.port) as client:
        assert (summary(client, "grave")["depth"], summary(client, "b")["depth"]) == (6, 0)
        assert client.redrive("a") == 3
        with client.subscribe("grave") as consumer:
            assert [bytes(consumer.receive(timeout=LONG)) for _ in range(3)] == [b"own0", b"own1", b"own2"]
        until(lambda: summary(client, "grave")["depth"] == 0)


@pytest.mark.parametrize("killed", [False, True])
def test_deliveries_before_a_restart_count(serve: Callable[..., Server], tmp_path: Path, killed: bool) -> None:
    """Also of messages that were under way when the broker ended."""
    server = serve(drain_s=0.0)
    with Client(port=server.port) as client:
        client.queue("q", topics="t", max_tries=2)
        client.publish_many("t", [b"poison", b"fine", b"late"])
        with client.subscribe("q", ack="manual", credit=2) as consumer:
            first = [consumer.receive(timeout=LONG) for _ in range(2)]
            consumer.nack(first[0])
            again = consumer.receive(timeout=LONG)
            assert (bytes(again), consumer.deliveries(again)) == (b"poison", 2)
            until(lambda: not server.broker.dirty, "that it was delivered is on disk")
            if killed:
                shutil.copytree(tmp_path / "broker", tmp_path / "after")
            server.close()
    server = serve(directory=tmp_path / ("after" if killed else "broker"))
    with Client(port=server.port) as client, client.subscribe("q", ack="manual") as consumer:
        found = {}
        for _ in range(2):
            message = consumer.receive(timeout=LONG)
            found[bytes(message)] = consumer.deliveries(message)
        assert found == {b"fine": 2, b"late": 1}
        with client.subscribe("q.dead") as dead:
            assert bytes(dead.receive(timeout=LONG)) == b"poison"
        assert summary(client, "q")["dead_lettered"] == 1


def test_what_reached_nobody_before_a_restart_was_not_delivered(serve: Callable[..., Server]) -> None:
    """A consumer that gives back what it has not read costs no delivery."""
    for _ in range(3):
        server = serve()
        with Client(port=server.port) as client:
            if server.broker.store.next == 1:
                client.queue("q", topics="t", max_tries=1)
                client.publish_many("t", [b"a", b"b"])
            wire = Wire(server.port).hello().send(b"SUB q credit=2\n")
            assert wire.line() == "OK"
            for _ in range(2):
                assert wire.line().startswith("MSG q t ") and wire.line()
            wire.send(b"BYE unread\n")
            assert wire.closed() == b""
            wire.close()
        server.close()
    with Client(port=serve().port) as client, client.subscribe("q") as consumer:
        assert [bytes(consumer.receive(timeout=LONG)) for _ in range(2)] == [b"a", b"b"]


def test_consumers_share_a_queue(client: Client) -> None:
    client.queue("q", topics="t")
    with client.subscribe("q", credit=10) as one, client.subscribe("q", credit=10) as two:
        client.publish_many("t", [b"%d" % i for i in range(200)])
        found: dict[str, list[int]] = {"one": [], "two": []}
        deadline = time.monotonic() + LONG
        while sum(map(len, found.values())) < 200 and time.monotonic() < deadline:
            for name, consumer in (("one", one), ("two", two)):
                found[name] += [int(bytes(message)) for message in consumer.read_many(5, 0.01)]
        assert sorted(found["one"] + found["two"]) == list(range(200))
        assert found["one"] and found["two"]
        assert found["one"] == sorted(found["one"]) and found["two"] == sorted(found["two"])


def test_who_waits_before_each_read_goes_on_past_its_credit(client: Client) -> None:
    client.queue("q", topics="t")
    client.publish_many("t", [b"%d" % i for i in range(20)])
    found: list[int] = []
    with client.subscribe("q", credit=4) as consumer:
        while len(found) < 20:
            assert consumer.wait(LONG), f"nothing comes after {len(found)}"
            found += [int(bytes(message)) for message in consumer.read_many(100, 0)]
    assert found == list(range(20))


def test_credit_bounds_what_a_consumer_holds(client: Client, wire: Callable[[], Wire]) -> None:
    client.queue("q", topics="t")
    client.publish_many("t", [b"%d" % i for i in range(10)])
    connection = wire().hello().send(b"SUB q credit=3\n")
    assert connection.line() == "OK"
    for i in range(3):
        assert connection.line().split()[:2] == ["MSG", "q"]
        connection.exactly(b"%d\n" % i)
    connection.nothing()
    connection.send(b"ACK q 1\n")
    assert connection.line().split()[3] == "4"
    connection.exactly(b"3\n")
    connection.nothing()
    connection.send(b"CREDIT q 5\n")
    assert connection.line().split()[3] == "5"


def test_exclusive(client: Client) -> None:
    client.queue("q", topics="t", exclusive=True)
    with client.subscribe("q"), pytest.raises(RefusedError, match="exclusive"):
        client.subscribe("q")


def test_temporary_queues_go_with_their_consumer(client: Client) -> None:
    with client.subscribe(topics="t") as consumer:
        assert len(client.queues()) == 1
        client.publish("t", b"x")
        assert consumer.read(LONG) is not None
    until(lambda: client.queues() == [])


def test_replay(client: Client) -> None:
    client.publish_many("t", [b"%d" % i for i in range(10)])
    with client.subscribe("a", topics="t", from_ordinal=4) as consumer:
        assert bytes(consumer.read(LONG) or b"") == b"3"
    middle = time.time_ns()
    client.publish("t", b"late")
    with client.subscribe("b", topics="t", from_time_ns=middle) as consumer:
        assert bytes(consumer.read(LONG) or b"") == b"late"
    with client.subscribe("c", topics="t", from_position=10) as consumer:
        assert bytes(consumer.read(LONG) or b"") == b"9"
    client.seek("a", position=1)
    with client.subscribe("a") as consumer:
        assert [bytes(consumer.read(LONG) or b"") for _ in range(2)] == [b"0", b"1"]


def test_time_to_live(client: Client) -> None:
    client.queue("q", topics="t")
    client.queue("short", topics="t", ttl_s=0.1)
    client.publish("t", b"old", ttl_s=0.05)
    client.publish("t", b"lasting")
    time.sleep(0.2)  # let both expire
    with client.subscribe("q") as consumer:
        assert bytes(consumer.read(LONG) or b"") == b"lasting"
    with client.subscribe("short") as consumer:
        assert consumer.read(0.1) is None
        client.queue("short", ttl_s=3600)  # a busy machine may deliver more slowly than the old one allowed
        client.publish("t", b"new")
        assert bytes(consumer.read(LONG) or b"") == b"new"
    assert summary(client, "short")["expired"] == 2


def test_delayed_messages_survive_a_restart(serve: Callable[..., Server]) -> None:
    server = serve()
    with Client(port=server.port) as client:
        client.queue("q", topics=">")
        began = time.time_ns()
        due = began + 2_000_000_000  # after the restart; on a machine that is slower than that this shows less
        client.publish("t", b"at", at_ns=due)
        client.publish("t", b"soon", delay_s=0.2)
        client.publish("t", b"now")
        with client.subscribe("q") as consumer:
            found = {}
            while not {b"now", b"soon"} <= set(found):  # in the order in which they are due, which load may turn around
                message = consumer.read(LONG)
                assert message is not None and message.channel == "t"
                found[bytes(message)] = time.time_ns()
            assert found[b"soon"] >= began + 200_000_000
    server.close()
    server = serve()
    with Client(port=server.port) as client, client.subscribe("q") as consumer:
        if b"at" not in found:
            assert bytes(consumer.read(LONG) or b"") == b"at"
            found[b"at"] = time.time_ns()
        assert found[b"at"] >= due
        assert consumer.read(0.2) is None


def test_duplicates_in_the_window_are_stored_once(serve: Callable[..., Server]) -> None:
    server = serve()
    with Client(port=server.port) as client:
        first = client.publish("t", b"x", message_id="order-1")
        assert client.publish("t", b"x", message_id="order-1") == first
        assert client.publish("t", b"y", message_id="order-2") == first + 1
    server.close()
    server = serve()
    with Client(port=server.port) as client:
        assert client.publish("t", b"x", message_id="order-1") == first
        assert client.statistics()["next"] == first + 2


def test_purge_delete_list(client: Client) -> None:
    client.queue("q", topics="t")
    client.publish_many("t", [b"x"] * 50)
    assert summary(client, "q")["depth"] == 50
    assert client.purge("q") == 50
    assert summary(client, "q")["depth"] == 0
    client.publish("t", b"new")
    with client.subscribe("q") as consumer:
        assert bytes(consumer.read(LONG) or b"") == b"new"
        with pytest.raises(RefusedError, match="consumer"):
            client.delete("q")
    until(lambda: summary(client, "q")["consumers"] == 0)
    client.delete("q")
    assert client.queues() == []
    with pytest.raises(RefusedError, match="no queue"):
        client.purge("q")


def test_everything_survives_a_restart(serve: Callable[..., Server]) -> None:
    server = serve()
    with Client(port=server.port) as client:
        client.queue("q", topics=["t", "u"], max_tries=7, ack_timeout_s=5)
        client.publish_many("t", [b"%d" % i for i in range(10)])
        with client.subscribe("q", ack="manual", credit=6) as consumer:
            messages = [consumer.read(LONG) for _ in range(6)]
            for message in messages[1:3]:
                assert message is not None
                consumer.ack(message, confirm=True)
        before = summary(client, "q")
    server.close()
    server = serve()
    with Client(port=server.port) as client:
        after = summary(client, "q")
        assert after["depth"] == 8
        assert {key: after[key] for key in ("topics", "max_tries", "ack_timeout_s")} == {
            key: before[key] for key in ("topics", "max_tries", "ack_timeout_s")
        }
        with client.subscribe("q") as consumer:
            found = [consumer.read(LONG) for _ in range(8)]
            assert [bytes(m) for m in found if m] == [b"0", b"3", b"4", b"5", b"6", b"7", b"8", b"9"]
            assert [consumer.deliveries(m) for m in found if m] == [2] * 6 + [1] * 2


def test_state_survives_many_segments(serve: Callable[..., Server], tmp_path: Path) -> None:
    options = {"segment_bytes": 1 << 16}
    server = serve(**options)
    with Client(port=server.port) as client:
        client.queue("q", topics="t")
        client.queue("idle", topics="t")
        for i in range(30):
            client.publish_many("t", [b"%06d" % (i * 1000 + k) for k in range(1000)])
        with client.subscribe("q") as consumer:
            count = 0
            while count < 20_000:
                count += len(consumer.read_many(1000, LONG))
    server.close()
    server = serve(**options)
    with Client(port=server.port) as client:
        assert summary(client, "idle")["depth"] == 30_000
        with client.subscribe("q") as consumer:
            message = consumer.read(LONG)
            assert message is not None and 15_000 <= int(bytes(message)) <= count


def test_transactions(client: Client) -> None:
    client.queue("q", topics="out")
    client.stage("job", "out", [b"a", b"b"])
    client.stage("job", "out", [b"c"])
    client.stage("other", "out", [b"never"])
    client.publish("out", b"between")
    with client.subscribe("q") as consumer:
        assert bytes(consumer.read(LONG) or b"") == b"between"
        first, last, again = client.commit("job")
        assert (last - first, again) == (2, False)
        assert [bytes(consumer.read(LONG) or b"") for _ in range(3)] == [b"a", b"b", b"c"]
        assert client.commit("job") == (first, last, True)
        client.abort("other")
        assert consumer.read(0.2) is None


def test_a_transaction_that_is_not_all_there_is_told_as_unknown(serve: Callable[..., Server]) -> None:
    """Staged messages go with the broker's end: who commits them is told so, and the id is free for another try."""
    server = serve()
    port = server.port
    with Client(port=port, timeout=LONG) as client:
        for half in (False, True):
            client.stage("job", "t", [b"a", b"b"])
            server.close()
            server = Server(server.broker.store._journal.directory, port).start()  # type: ignore[attr-defined]
            client.ping()
            if half:
                client.stage("job", "t", [b"c"])
            with pytest.raises(RefusedError, match=r"stage (it|all of them) again"):
                client.commit("job")
        assert client.statistics()["next"] == 1
        client.stage("job", "t", [b"a", b"b", b"c"])
        assert client.commit("job") == (1, 3, False)
        assert client.commit("job") == (1, 3, True)
        with pytest.raises(RefusedError, match="nothing is staged under never"):
            client.commit("never")
        client.stage("never", "t", [b"d"])
        assert client.commit("never") == (4, 4, False), "its id was not burnt"
    server.close()


def test_what_every_queue_has_passed_is_freed_when_asked_for(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.broker.server.TRIM_S", 0.0)
    server = serve(segment_bytes=1 << 16, retain_queues=True)
    with Client(port=server.port) as client:
        client.queue("fast", topics="t")
        client.queue("slow", topics="t")
        for _ in range(10):
            client.publish_many("t", [b"x" * 100] * 1000)
        with client.subscribe("fast") as consumer:
            count = 0
            while count < 10_000:
                count += len(consumer.read_many(1000, LONG))
        assert client.statistics()["first"] == 1, "another queue still needs it"
        client.purge("slow")
        until(lambda: client.statistics()["first"] > 5000)
        client.publish("t", b"still works")
        with client.subscribe("slow") as consumer:
            assert bytes(consumer.read(LONG) or b"") == b"still works"


def test_dead_letters_go_to_a_queue_that_is_there_for_other_topics(client: Client) -> None:
    client.queue("graveyard", topics="other")
    client.queue("q", topics="t", max_tries=1, dead_letter="graveyard")
    client.publish("t", b"poison")
    client.publish("other", b"its own")
    with client.subscribe("q", ack="manual") as consumer, client.subscribe("graveyard") as grave:
        assert bytes(grave.read(LONG) or b"") == b"its own"
        message = consumer.read(LONG)
        assert message is not None
        consumer.nack(message)
        assert bytes(grave.read(LONG) or b"") == b"poison"


def test_dead_letters_are_kept_when_there_are_as_many_queues_as_allowed(serve: Callable[..., Server]) -> None:
    server = serve(limits=Limits(max_queues=1))
    with Client(port=server.port) as client:
        client.queue("q", topics="t", max_tries=1)
        client.publish("t", b"poison")
        with client.subscribe("q", ack="manual") as consumer:
            message = consumer.read(LONG)
            assert message is not None
            consumer.nack(message)
            until(lambda: len(client.queues()) == 2)
        with client.subscribe("q.dead") as grave:
            assert bytes(grave.read(LONG) or b"") == b"poison"


@pytest.mark.parametrize("name", [".q", "q.", "a..b", "*", ">", "a.*", "a.>.b"])
def test_a_name_that_cannot_be_a_topic_s_is_refused_and_ends_nothing(
    client: Client, name: str, wire: Callable[[], Wire]
) -> None:
    with pytest.raises(RefusedError, match="no empty parts and no wildcards"):
        client.queue(name, topics="t")
    connection = wire().hello()
    for line in (f"QUEUE {name} topics=t", f"SUB {name}", f"QUEUE good topics=t dead_letter={name}"):
        connection.send(f"{line}\n".encode())
        assert connection.line().startswith("ERR bad_name")
    client.publish("t", b"on it goes")
    assert client.queues() == []


def test_a_queue_of_the_log_that_cannot_be_served_is_left_out(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve()
    with Client(port=server.port) as client, monkeypatch.context() as patched:
        patched.setattr(words, "check_queue", lambda name: name)
        client.queue(".bad", topics="t")
        client.queue("good", topics="t")
        client.publish("t", b"x")
    server.close()
    with Client(port=serve().port) as client:
        assert [entry["queue"] for entry in client.queues()] == ["good"]
        with client.subscribe("good") as consumer:
            message = consumer.read(LONG)
            assert message is not None and bytes(message) == b"x"
    assert "'.bad' of the log is left out" in caplog.text


def test_listing_looks_at_no_message_twice(server: Server, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.queue("q", topics="t.>")
    client.publish_many("t.a", [b"x"] * 100)
    client.publish_many("other", [b"x"] * 100)
    assert summary(client, "q")["depth"] == 100
    store, reads = server.broker.store, []

    def read(start: int, *rest: object) -> object:
        reads.append(start)
        return type(store).read(store, start, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "read", read)
    assert summary(client, "q")["depth"] == 100 and not reads
    client.publish_many("t.b", [b"y"] * 5)
    assert summary(client, "q")["depth"] == 105 and len(reads) == 1
    with client.subscribe("q", ack="manual", credit=10) as consumer:
        for _ in range(10):
            message = consumer.read(LONG)
            assert message is not None
            consumer.ack(message, confirm=True)
        until(lambda: summary(client, "q")["in_flight"] == 10)  # what came after the ten that are gone
        assert summary(client, "q")["depth"] == 95
    assert summary(client, "q")["depth"] == 95
    assert client.purge("q") == 95 and summary(client, "q")["depth"] == 0
