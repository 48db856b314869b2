"""A reload replaces a module in place: its queue and its links stay, so that nothing is lost and nothing comes twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import StateError
from penstock.gateway import Gateway, GatewayMessage, Module, ModuleError, Source
from tests.gateway.conftest import Collector, eventually

HERE = "tests.gateway.test_replace"


class Noted(Module):
    """Appends each number that it gets to a file."""

    def receive(self, message: GatewayMessage) -> None:
        with open(self.configuration["file"], "ab") as file:
            file.write(bytes(message) + b"\n")


class NotedMany(Noted):
    """The same, several at once."""

    def receive_many(self, messages: list[GatewayMessage]) -> None:
        for message in messages:
            self.receive(message)


class NotedAsync(Noted):
    """The same, async."""

    async def receive(self, message: GatewayMessage) -> None:  # type: ignore[override]
        super().receive(message)


class NotedSlowly(Noted):
    """The same, and slow."""

    def receive(self, message: GatewayMessage) -> None:
        time.sleep(0.01)
        super().receive(message)


class Refuses(Noted):
    """Does not start, or cannot be created."""

    def create(self, broker: Any, configuration: Any) -> None:
        super().create(broker, configuration)
        if configuration["refuses"] == "create":
            raise OSError("no")

    def start(self) -> None:
        if self.configuration["refuses"] == "start":
            raise OSError("no")


def entry(name: str, kind: str, loader: str = "python", **args: Any) -> dict[str, Any]:
    return {"name": name, "loader": {"name": loader, "entrypoint": f"{HERE}:{kind}"}, "args": args}


def numbers(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().split()] if file.exists() else []


class Publishing:
    """Publishes 0, 1, 2, ... as a module, until it is ended; keeps about 50 of them waiting."""

    def __init__(self, gateway: Gateway, source: str, sink: str) -> None:
        self.published = 0
        self._gateway, self._source, self._sink = gateway, source, sink
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        source = self._gateway.module(self._source)
        while not self._end.is_set():
            source.publish(b"%d" % self.published)
            self.published += 1
            self._end.wait(0.0005)

    def more(self, count: int) -> None:
        seen = self.published
        eventually(lambda: self.published >= seen + count)

    def end(self) -> None:
        self._end.set()
        self._thread.join()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "numbers"


KINDS = [("Noted", "python"), ("NotedMany", "python"), ("NotedAsync", "python"), ("Noted", "process"),
         ("NotedMany", "process")]  # fmt: skip


@pytest.mark.parametrize(("kind", "loader"), KINDS)
@pytest.mark.parametrize("delivery", ["at_most_once", "at_least_once"])
def test_a_sink_that_is_replaced_at_work_gets_everything_once(
    file: Path, kind: str, loader: str, delivery: str
) -> None:
    whole = {
        "modules": [entry("source", "Noted"), entry("sink", kind, loader, file=str(file))],
        "links": [{"source": "source", "sink": "sink", "delivery": delivery}],
    }
    with Gateway(whole) as gateway:
        gateway.start()
        publishing = Publishing(gateway, "source", "sink")
        try:
            for _ in range(3):
                publishing.more(50)
                assert gateway.apply(whole, again=["sink"]) == ["~ sink"]
        finally:
            publishing.end()
        assert gateway.destroy() is True
        ended = {info.name: info for info in gateway.modules()}["sink"]
    assert numbers(file) == list(range(publishing.published))
    assert (ended.handled, ended.lost, ended.ledger.lost) == (publishing.published, 0, 0)


def test_what_waits_at_the_time_goes_to_the_next_one_whatever_its_loader(file: Path) -> None:
    def whole(kind: str, loader: str) -> dict[str, Any]:
        sink = entry("sink", kind, loader, file=str(file))
        return {"modules": [entry("source", "Noted"), sink], "links": [{"source": "source", "sink": "sink"}]}

    with Gateway(whole("NotedSlowly", "process")) as gateway:
        gateway.start()
        for number in range(300):
            gateway.module("source").publish(b"%d" % number)
        for loader in ("python", "process"):
            seen = len(numbers(file))
            eventually(lambda seen=seen: len(numbers(file)) > seen)
            gateway.apply(whole("NotedSlowly", loader))
        gateway.apply(whole("NotedMany", "python"))
        assert gateway.destroy() is True
    assert numbers(file) == list(range(300))


@pytest.mark.parametrize("refuses", ["create", "start"])
@pytest.mark.parametrize("loader", ["python", "process"])
def test_a_replacement_that_fails_puts_the_old_one_back_and_loses_nothing(
    file: Path, loader: str, refuses: str
) -> None:
    sink = entry("sink", "Noted", loader, file=str(file))
    links = [{"source": "source", "sink": "sink"}]
    with Gateway({"modules": [entry("source", "Noted"), sink], "links": links}) as gateway:
        gateway.start()
        publishing = Publishing(gateway, "source", "sink")
        try:
            publishing.more(50)
            wrong = entry("sink", "Refuses", loader, file=str(file), refuses=refuses)
            with pytest.raises(ModuleError, match="OSError: no"):
                gateway.apply({"modules": [entry("source", "Noted"), wrong], "links": links})
            publishing.more(50)
        finally:
            publishing.end()
        assert gateway.destroy() is True
    assert numbers(file) == list(range(publishing.published))


def test_both_ends_of_a_busy_link_are_replaced_together(file: Path) -> None:
    """A source that waits for room in its sink's queue is stopped before the sink is."""
    source = {"name": "source", "loader": {"name": "python", "entrypoint": f"{HERE}:Counts"}}
    sink = {**entry("sink", "NotedSlowly", file=str(file)), "queue": {"depth": 4}}
    whole = {"modules": [sink, source], "links": [{"source": "source", "sink": "sink"}]}
    Counts.number = 0
    with Gateway(whole) as gateway:
        gateway.start()
        for _ in range(3):
            seen = Counts.number
            eventually(lambda seen=seen: Counts.number >= seen + 10)
            assert gateway.apply(whole, again=["source", "sink"]) == ["~ sink", "~ source"]
        assert gateway.abandoned == []
        assert gateway.destroy() is True
    assert numbers(file) == list(range(Counts.number))



class Counts(Source):
    number = 0

    def run(self) -> None:
        while not self.stopping.is_set():
            self.publish(b"%d" % Counts.number)
            Counts.number += 1


def test_a_module_that_waits_for_its_restart_is_replaced_at_once(file: Path) -> None:
    links = [{"source": "source", "sink": "sink"}]
    bad = {**entry("sink", "Dies", "process"), "restart": {"policy": "on_failure", "backoff_s": 600, "max_backoff_s": 600}}
    with Gateway({"modules": [entry("source", "Noted"), bad], "links": links}) as gateway:
        gateway.start()
        for number in range(5):
            gateway.module("source").publish(b"%d" % number)
        eventually(lambda: gateway.supervisor("sink").failures == 1)
        good = entry("sink", "Noted", file=str(file))
        assert gateway.apply({"modules": [entry("source", "Noted"), good], "links": links}) == ["~ sink"]
        eventually(lambda: numbers(file) == [1, 2, 3, 4], "all but the one that was in the hand of the process")
        assert gateway.modules()[1].lost == 1


class Dies(Module):
    def receive(self, message: GatewayMessage) -> None:
        import os

        os._exit(3)


def test_a_link_that_changes_loses_nothing(file: Path) -> None:
    def whole(**of_link: Any) -> dict[str, Any]:
        sink = entry("sink", "Noted", file=str(file))
        link = {"source": "source", "sink": "sink", **of_link}
        return {"modules": [entry("source", "Noted"), sink], "links": [link]}

    with Gateway(whole()) as gateway:
        gateway.start()
        publishing = Publishing(gateway, "source", "sink")
        try:
            for number in range(20):
                publishing.more(20)
                done = gateway.apply(whole(ttl_s=100 + number, max_messages=500))
                assert done == ["- source -> sink", "+ source -> sink"]
        finally:
            publishing.end()
        assert gateway.destroy() is True
    assert numbers(file) == list(range(publishing.published))


class ReplacesItself(Collector):
    def receive(self, message: GatewayMessage) -> None:
        gateway, whole = self.configuration
        try:
            gateway.apply(whole, again=["me"])
        except StateError as error:
            self.got.append(str(error).encode())


def test_a_module_cannot_replace_itself() -> None:
    me = entry("me", "ReplacesItself")
    whole = {"modules": [me], "links": [{"source": "me", "sink": "me"}]}
    with Gateway(whole) as gateway:
        module = gateway.module("me")
        module.configuration = gateway, whole
        gateway.start()
        module.publish(b"go")
        eventually(lambda: module.got)
        assert b"'me' cannot be replaced by itself" in module.got[0]
        assert gateway.module("me") is module
