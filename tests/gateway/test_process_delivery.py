"""Delivery to a module in its own process: what fails there is tried again."""

from __future__ import annotations

import time
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
from tests.gateway.conftest import Collector, eventually
from tests.gateway.delivery import (
    AGAIN,
    ALO,
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
