"""A process that stands still is told of; one that works, or gets no processor, never is."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from penstock.gateway import Event, Gateway, GatewayMessage, Module
from penstock.gateway.stillness import Stillness, state_of
from tests.gateway.conftest import Collector, eventually


class Echo(Module):
    """Publishes what it gets."""

    def receive(self, message: GatewayMessage) -> None:
        self.publish(message)


def test_a_process_that_is_stopped_while_idle_is_told_of_killed_and_started_again() -> None:
    stuck: list[Any] = []
    contents = [b"%d" % number for number in range(10)]
    with Gateway(callbacks=[(Event.MODULE_STUCK, lambda _, __, what, ___: stuck.append(what[0]))]) as gateway:
        gateway.add_module("source", Collector)
        gateway.add_module("echo", f"{__name__}:Echo", loader="process", stuck_after_s=1.0)
        gateway.add_module("well", f"{__name__}:Echo", loader="process", stuck_after_s=1.0)
        gateway.add_module("sink", Collector)
        gateway.add_link("source", "echo")
        gateway.add_link("source", "well")
        gateway.add_link("echo", "sink")
        gateway.start()
        sink, well = gateway.module("sink"), gateway.module("well").process
        gateway.module("source").publish(b"first")
        eventually(lambda: sink.got == [b"first"])
        stopped = gateway.module("echo").process
        os.kill(stopped.pid, signal.SIGSTOP)
        for content in contents:
            gateway.module("source").publish(content)
        infos = {info.name: info for info in gateway.modules()}
        assert infos["echo"].handled <= 1, "what waits there is not handled"
        eventually(lambda: sink.got[1:] == contents, "the next process has them")
        assert stopped.returncode == -signal.SIGKILL
        assert stuck == ["echo"]
        assert well.poll() is None
        assert gateway.destroy() is True


@pytest.mark.parametrize(
    ("states", "still"),
    [
        ([("T", 5)] * 9, True),
        ([("S", 5)] * 9, True),
        ([("R", 5)] * 9, False),  # it gets no processor
        ([("D", 5)] * 9, False),
        ([("S", ticks) for ticks in range(9)], False),  # it works
        ([("S", 5)] * 4 + [("R", 5)] + [("S", 5)] * 4, False),
        ([None] * 9, False),
    ],
)
def test_only_what_uses_no_processor_and_asks_for_none_stands_still(states: list[Any], still: bool) -> None:
    found = iter(states)
    stillness = Stillness(lambda _: next(found))
    seconds = [stillness.look(1, number * 0.25, 3) for number in range(len(states))]
    assert (max(seconds) > 1.2) is still


def test_who_looks_may_have_stood_still_himself() -> None:
    stillness = Stillness(lambda _: ("S", 5))
    stillness.look(1, 0.0, 3)
    assert stillness.look(1, 3600.0, 3) < 1, "he was stopped too, and has seen nothing of that hour"


def test_what_was_handled_meanwhile_is_progress() -> None:
    stillness = Stillness(lambda _: ("S", 5))
    assert [stillness.look(1, number * 0.25, number) for number in range(9)] == [0.0] * 9


def test_the_state_of_a_process_is_read() -> None:
    found = state_of(os.getpid())
    assert found is not None and found[0] in "RS" and found[1] >= 0
    assert state_of(2**22 + 1) is None
