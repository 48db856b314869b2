"""The counts of a module mean the same whatever its loader, however it receives, and however its links deliver."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from penstock.cli.run import _row
from penstock.gateway import Delivery, Gateway, GatewayMessage, LinkOptions, Module
from tests.gateway.conftest import Collector, eventually

HERE = "tests.gateway.test_counts"


class FailsAtBad(Module):
    """Fails at what begins with "bad"."""

    def receive(self, message: GatewayMessage) -> None:
        if bytes(message).startswith(b"bad"):
            raise OSError("bad")


class FailsAtBadMany(FailsAtBad):
    """The same, several at once."""

    def receive_many(self, messages: list[GatewayMessage]) -> None:
        for message in messages:
            self.receive(message)


class FailsAtBadAsync(FailsAtBad):
    """The same, async."""

    async def receive(self, message: GatewayMessage) -> None:  # type: ignore[override]
        super().receive(message)


LOADERS = [("python", "FailsAtBad"), ("python", "FailsAtBadMany"), ("python", "FailsAtBadAsync"),
           ("process", "FailsAtBad"), ("process", "FailsAtBadMany"), ("process", "FailsAtBadAsync")]  # fmt: skip
TWICE = LinkOptions(delivery=Delivery.AT_LEAST_ONCE, max_tries=2, backoff_s=0.001, max_backoff_s=0.001)
IN_ORDER = LinkOptions(delivery=Delivery.AT_LEAST_ONCE, max_tries=2, backoff_s=0.001, max_backoff_s=0.001, ordered=True)
DELIVERIES = [("at_most_once", LinkOptions(delivery=Delivery.AT_MOST_ONCE), 1), ("at_least_once", TWICE, 2),
              ("ordered", IN_ORDER, 2)]  # fmt: skip


LOADERS_ANEW = [(*one, None) for one in LOADERS] + [(loader, "FailsAtBad", "on_failure") for loader in ("python", "process")]


@pytest.mark.parametrize(("loader", "kind", "restart"), LOADERS_ANEW)
@pytest.mark.parametrize(("options", "tries"), [one[1:] for one in DELIVERIES], ids=[one[0] for one in DELIVERIES])
@pytest.mark.parametrize("error_link", [False, True])
def test_a_failure_is_counted_by_one_rule(
    loader: str, kind: str, options: LinkOptions, tries: int, restart: str | None, error_link: bool
) -> None:
    with Gateway() as gateway:
        gateway.add_module("source", Collector)
        how: dict[str, Any] = {"restart": {"policy": restart, "backoff_s": 0.001, "limit": None}} if restart else {}
        sink = {"name": "sink", "loader": {"name": loader, "entrypoint": f"{HERE}:{kind}"}, **how}
        gateway.update({"modules": [sink], "links": []})
        gateway.add_module("dead", Collector)
        gateway.add_link("source", "sink", None, options, error="dead" if error_link else None)
        gateway.start()

        def counts() -> dict[str, int]:
            info = next(info for info in gateway.modules() if info.name == "sink")
            return {"handled": info.handled, "lost": info.lost, "failed": info.failed, "waiting": info.waiting,
                    "expired": info.ledger.expired, "dropped": sum(info.ledger.dropped.values())}  # fmt: skip

        contents = [b"good", b"bad 1", b"good", b"good", b"bad 2", b"good"]
        for number, content in enumerate(contents, 1):
            gateway.module("source").publish(content)
            eventually(lambda number=number: counts()["handled"] + counts()["lost"] == number, "it is counted once")
        lost = 0 if error_link else 2
        # A failure counts before its loss does, and what is lost in `destroy` would make that False.
        eventually(lambda: (counts()["failed"], counts()["lost"]) == (2 * tries, lost))
        assert gateway.destroy(120) is True  # a process that ends slowly is no failure
        assert len(gateway.modules()) == 3
        expected = {"handled": 6 - lost, "lost": lost, "failed": 2 * tries, "waiting": 0, "expired": 0, "dropped": 0}
        assert counts() == expected
        assert {info.name: info.handled for info in gateway.modules()}["dead"] == 2 - lost


class Slow(Module):
    """Takes 20 ms for a message."""

    def receive(self, message: GatewayMessage) -> None:
        time.sleep(0.02)


class SlowMany(Slow):
    """The same, of one at a time."""

    def receive_many(self, messages: list[GatewayMessage]) -> None:
        time.sleep(0.02 * len(messages))


@pytest.mark.parametrize(("loader", "kind"), [("python", "Slow"), ("process", "Slow"), ("process", "SlowMany")])
def test_what_has_waited_too_long_expires_whatever_the_loader(loader: str, kind: str) -> None:
    with Gateway() as gateway:
        gateway.add_module("source", Collector)
        gateway.add_module("sink", f"{HERE}:{kind}", loader=loader)
        gateway.add_link("source", "sink", None, LinkOptions(ttl_s=0.5))
        gateway.start()
        for turn in (1, 2):
            for _ in range(200):  # four seconds of work
                gateway.module("source").publish(b"")

            def info() -> Any:
                return next(info for info in gateway.modules() if info.name == "sink")

            eventually(lambda turn=turn: info().handled + info().ledger.expired == 200 * turn)
        assert info().ledger.expired > 0
        if kind == "Slow":
            assert info().handled < 200
        assert (info().lost, info().failed, info().waiting) == (0, 0, 0)
        assert gateway.destroy() is True


class Hangs(Module):
    """Does not return from ``receive`` until it is told to end."""

    def __init__(self) -> None:
        self.entered, self.free = threading.Event(), threading.Event()

    def receive(self, message: GatewayMessage) -> None:
        self.entered.set()
        self.free.wait()


def test_what_is_dropped_at_the_end_counts_as_lost() -> None:
    with Gateway() as gateway:
        gateway.add_module("source", Collector)
        gateway.add_module("sink", Hangs)
        gateway.add_link("source", "sink")
        gateway.start()
        sink = gateway.module("sink")
        gateway.module("source").publish(b"first")
        assert sink.entered.wait(60)
        for _ in range(600):  # more than are taken from the queue at once
            gateway.module("source").publish(b"more")
        assert gateway.destroy(0.5) is False
        info = next(info for info in gateway.modules() if info.name == "sink")
        sink.free.set()
        assert (info.lost, info.handled, info.waiting, info.stored, info.ledger.expired) == (601, 0, 0, 0, 0)
        assert _row(info)["lost"] == 601
