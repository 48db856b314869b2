"""Delivery to a module in its own process: what fails there is tried again."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway import (
    Gateway,
    GatewayMessage,
    LinkOptions,
    Module,
    Policy,
    Restart,
)
from penstock.gateway.worker import Worker
from tests.gateway.conftest import Collector, eventually
from tests.gateway.delivery import (
    AGAIN,
    ALO,
    FromBacklog,
    marked,
    say,
)


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway(cycle_timeout_s=0.2) as made:
        yield made


class Refuses(Module):
    """In its own process: fails at what begins with "bad" until a file is there; passes on the rest."""

    def receive(self, message: GatewayMessage) -> None:
        if bytes(message).startswith(b"bad") and not Path(str(self.configuration)).exists():
            raise OSError("not well")
        self.publish(message)


class RefusesMany(Refuses):
    def receive_many(self, messages: Any) -> None:
        for message in messages:
            self.receive(message)


def add_refusing(gateway: Gateway, options: LinkOptions, well: Path, kind: str = "Refuses", **more: Any) -> None:
    for name in ("a", "out", "dead"):
        gateway.add_module(name, Collector)
    gateway.add_module("p", f"tests.gateway.test_process_delivery:{kind}", str(well), loader="process", **more)
    gateway.add_link("a", "p", None, options, error="dead")
    gateway.add_link("p", "out", None, AGAIN)
    gateway.start()


@pytest.mark.parametrize("kind", ["Refuses", "RefusesMany"])
def test_what_fails_in_a_process_is_tried_again(gateway: Gateway, tmp_path: Path, kind: str) -> None:
    add_refusing(gateway, AGAIN, tmp_path / "well", kind)
    bad = [b"bad %d" % n for n in range(20)]
    say(gateway, "a", *bad, b"1")
    mark = marked(gateway, "a")
    worker = gateway.broker.worker_of(gateway.module("p"))
    eventually(lambda: worker.failed > 60 and b"1" in gateway.module("out").got)
    assert not mark.handled()
    (tmp_path / "well").touch()
    eventually(mark.handled)
    assert set(gateway.module("out").got) == {*bad, b"1"}, "handled is said when all came through"
    assert (worker.lost, gateway.module("dead").got) == (0, [])


def test_after_max_tries_in_a_process_it_goes_to_the_error_link(gateway: Gateway, tmp_path: Path) -> None:
    add_refusing(gateway, LinkOptions(ALO, max_tries=3, backoff_s=0.01), tmp_path / "well")
    say(gateway, "a", b"bad", b"1")
    eventually(lambda: gateway.module("dead").got == [b"bad"])
    properties = gateway.module("dead").messages[0].properties
    assert (properties["error"], properties["error-tries"]) == ("OSError: not well", "3")
    assert (properties["error-module"], properties["error-source"]) == ("p", "a")
    eventually(lambda: gateway.module("out").got == [b"1"])
    assert gateway.broker.worker_of(gateway.module("p")).failed == 3


def test_what_fails_at_most_once_in_a_process_goes_to_the_error_link_or_is_lost(
    gateway: Gateway, tmp_path: Path
) -> None:
    add_refusing(gateway, LinkOptions(), tmp_path / "well")
    say(gateway, "a", b"bad 1")
    eventually(lambda: gateway.module("dead").got == [b"bad 1"])
    gateway.remove_link("p.error", "dead")
    say(gateway, "a", b"bad 2")
    eventually(lambda: gateway.broker.worker_of(gateway.module("p")).lost == 1)


def test_what_fails_in_a_process_that_is_made_anew_is_tried_again(gateway: Gateway, tmp_path: Path) -> None:
    restart = Restart(Policy.ON_FAILURE, backoff_s=0.01, max_backoff_s=0.05, limit=None)
    add_refusing(gateway, AGAIN, tmp_path / "well", restart=restart)
    say(gateway, "a", b"bad", b"1")
    eventually(lambda: gateway.supervisor("p").restarts > 1)
    (tmp_path / "well").touch()
    eventually(lambda: set(gateway.module("out").got) == {b"bad", b"1"})


class RefusesTogether(RefusesMany):
    """As slow as on a busy machine: what is to be tried again has all come when it is next read."""

    def receive_many(self, messages: Any) -> None:
        time.sleep(0.2)
        super().receive_many(messages)


def test_one_that_always_fails_keeps_no_other_from_a_process(gateway: Gateway, tmp_path: Path) -> None:
    add_refusing(gateway, AGAIN, tmp_path / "well", "RefusesTogether")
    say(gateway, "a", *[b"bad %d" % n for n in range(3)], b"1")
    eventually(lambda: b"1" in gateway.module("out").got)
    (tmp_path / "well").touch()
    eventually(lambda: len(set(gateway.module("out").got)) == 4)


def test_what_a_module_lets_go_of_in_a_process_is_counted(gateway: Gateway) -> None:
    gateway.add_module("a", Collector)
    gateway.add_module("limit", "penstock.gateway.modules:Throttle", {"rate_per_s": 0.001}, loader="process")
    gateway.add_link("a", "limit")
    gateway.start()
    say(gateway, "a", b"1", b"2", b"3")
    eventually(lambda: gateway.broker.info(gateway.module("limit")).ledger.dropped.get("filtered") == 2)


class Dies(Module):
    """In its own process: notes what it gets in a file, passes it on, and dies of what begins with "deadly"."""

    def receive(self, message: GatewayMessage) -> None:
        with Path(str(self.configuration)).open("a") as file:
            file.write(bytes(message).decode() + "\n")
        if bytes(message).startswith(b"deadly"):
            os._exit(9)
        self.publish(message)


class DiesMany(Dies):
    def receive_many(self, messages: Any) -> None:
        for message in messages:
            self.receive(message)


class Numbers(FromBacklog):
    """Durable: gives ten messages, one of them deadly."""

    def create(self, broker: Any, configuration: Any) -> None:
        super().create(broker, configuration)
        self.queue.left = deque(range(10))
        self.forwarder._publish = lambda n: self.publish(b"deadly" if n == 4 else b"%d" % n)


SOON = Restart(Policy.ON_FAILURE, backoff_s=0.01, max_backoff_s=0.02, limit=None)
THRICE = LinkOptions(ALO, max_tries=3, backoff_s=0.01, max_backoff_s=0.02)


def add_dying(gateway: Gateway, options: LinkOptions, got: Path, kind: str, source: Any = Collector) -> Any:
    """What it returns counts the module's messages."""
    gateway.add_module("a", source)
    for name in ("out", "dead"):
        gateway.add_module(name, Collector)
    gateway.add_module("p", f"tests.gateway.test_process_delivery:{kind}", str(got), loader="process", restart=SOON)
    gateway.add_link("a", "p", None, options)
    gateway.add_link("p", "out")
    return gateway.broker.worker_of(gateway.module("p"))


@pytest.mark.parametrize("error", [True, False])
@pytest.mark.parametrize("kind", ["Dies", "DiesMany"])
def test_what_a_process_dies_of_is_given_up_after_max_tries(
    gateway: Gateway, tmp_path: Path, kind: str, error: bool
) -> None:
    worker = add_dying(gateway, THRICE, tmp_path / "got", kind, Numbers)
    if error:
        gateway.add_link("p.error", "dead")
    gateway.start()
    queue = gateway.module("a").queue
    eventually(lambda: sorted(queue.acked) == list(range(10)), "the source knows that all of them were handled")
    got = (tmp_path / "got").read_text().split()
    assert got.count("deadly") == 3
    eventually(lambda: set(gateway.module("out").got) == {b"%d" % n for n in range(10) if n != 4})
    if kind == "Dies":
        assert all(got.count(str(n)) == 1 for n in range(10) if n != 4), "it costs its neighbours no try"
    else:
        assert all(got.count(str(n)) <= 2 for n in range(10) if n != 4), "after the first death each comes alone"
    eventually(lambda: (worker.failed, worker.lost, len(gateway.module("dead").got)) == (3, not error, error))
    if error:
        properties = gateway.module("dead").messages[0].properties
        assert properties["error-tries"] == "3"
        assert properties["error"].startswith("its process ended (status 9)")


@pytest.mark.parametrize("kind", ["Dies", "DiesMany"])
def test_what_a_process_dies_of_costs_others_no_try_that_come_one_by_one(
    gateway: Gateway, tmp_path: Path, kind: str
) -> None:
    """As many as die, each is given up for itself; those that are well are not."""
    worker = add_dying(gateway, THRICE, tmp_path / "got", kind)
    gateway.add_link("p.error", "dead")
    gateway.start()
    say(gateway, "a", *[b"deadly%d" % n if n % 3 == 0 else b"%d" % n for n in range(9)])
    eventually(lambda: len(gateway.module("dead").got) == 3 and worker.handled == 9)
    assert sorted(gateway.module("dead").got) == [b"deadly0", b"deadly3", b"deadly6"]
    eventually(lambda: set(gateway.module("out").got) == {b"%d" % n for n in range(9) if n % 3})
    assert worker.lost == 0


@pytest.mark.parametrize("kind", ["Dies", "DiesMany"])
def test_what_a_process_dies_of_comes_once_over_a_link_at_most_once(
    gateway: Gateway, tmp_path: Path, kind: str
) -> None:
    worker = add_dying(gateway, LinkOptions(), tmp_path / "got", kind)
    gateway.start()
    say(gateway, "a", b"deadly")
    eventually(lambda: worker.lost == 1)
    say(gateway, "a", b"1")
    eventually(lambda: gateway.module("out").got == [b"1"])
    assert (tmp_path / "got").read_text().split() == ["deadly", "1"]


def linked_echo(gateway: Gateway, entrypoint: Any) -> Worker:
    """source -> echo, in its own process, -> sink"""
    gateway.add_module("source", Collector)
    gateway.add_module("echo", entrypoint, loader="process")
    gateway.add_module("sink", Collector)
    gateway.add_link("source", "echo", None, AGAIN)
    gateway.add_link("echo", "sink", None, AGAIN)
    gateway.start()
    return gateway.broker.worker_of(gateway.module("echo"))


def test_marks_that_a_process_has_handled_do_not_wait_one_after_the_other(gateway: Gateway) -> None:
    """With many of them the last would come long after its messages were handled."""
    echo = linked_echo(gateway, "tests.gateway.test_process:Echo")
    marks = []
    for n in range(100):
        say(gateway, "source", b"%d" % n)
        marks.append(marked(gateway, "source"))
    eventually(lambda: echo.handled == 100)
    sink = gateway.broker.worker_of(gateway.module("sink"))
    eventually(lambda: sink.handled == 101 and sink.idle, "with what it says at its start")
    eventually(marks[0].handled)
    assert all(mark.handled() for mark in marks[1:])


def test_a_mark_does_not_wait_for_what_a_process_gets_later(gateway: Gateway) -> None:
    place = {"class": "tests.gateway.test_process:Echo", "grace_period_ms": 100}
    echo = linked_echo(gateway, place)
    say(gateway, "source", b"before")
    mark = marked(gateway, "source")
    eventually(lambda: echo.taken == 1)
    say(gateway, "source", b"hang")
    eventually(lambda: echo.taken == 2)
    eventually(mark.handled)
    gateway.remove_module("echo", drain=False, timeout=0.5)
