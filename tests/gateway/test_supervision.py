"""Restart policy and events, without a gateway; what is logged of a failure."""

import logging
import threading

import pytest

from penstock import InvalidArgument
from penstock.gateway import Gateway
from penstock.gateway.events import MAX_WAITING, Event, Events
from penstock.gateway.supervision import Policy, Restart, Supervisor
from tests.gateway.conftest import Collector, Failing, eventually


def test_never_leaves_the_module_as_it_is() -> None:
    supervisor = Supervisor(Restart())
    assert [supervisor.failed(n) for n in range(3)] == [None, None, None]
    assert supervisor.failures == 3


def test_the_back_off_doubles_up_to_its_most_and_gives_up_at_the_limit() -> None:
    supervisor = Supervisor(Restart(Policy.ON_FAILURE, backoff_s=1, max_backoff_s=5, limit=5))
    assert [supervisor.failed(n) for n in range(5)] == [1, 2, 4, 5, 5]
    assert not supervisor.gave_up
    assert supervisor.failed(5) is None
    assert supervisor.gave_up
    assert supervisor.failures == 6


def test_a_module_that_ran_well_begins_again_at_the_first_back_off() -> None:
    supervisor = Supervisor(Restart(Policy.ON_FAILURE, backoff_s=1, max_backoff_s=5, limit=2))
    assert [supervisor.failed(0), supervisor.failed(1)] == [1, 2]
    assert supervisor.failed(7) == 1


def test_no_limit_never_gives_up() -> None:
    supervisor = Supervisor(Restart(Policy.ON_FAILURE, limit=None))
    assert all(supervisor.failed(0) is not None for _ in range(2000))


def test_senseless_policies_are_refused() -> None:
    for wrong in ({"backoff_s": 0}, {"backoff_s": 9, "max_backoff_s": 1}, {"limit": 0}):
        with pytest.raises(InvalidArgument):
            Restart(**wrong)  # type: ignore[arg-type]


def test_callbacks_run_on_another_thread_in_order_with_their_parameter() -> None:
    told: list[tuple[object, ...]] = []

    def note(gateway: object, event: Event, context: object, parameter: object) -> None:
        told.append((gateway, event, context, parameter, threading.current_thread() is not threading.main_thread()))

    events = Events("gateway", "test")
    for parameter in ("first", "second"):
        events.add(Event.STARTED, note, parameter)
    events.add(Event.DESTROYED, note, "third")
    events.tell(Event.CREATED)
    events.tell(Event.STARTED, 1)
    events.tell(Event.DESTROYED, 2)
    events.close()
    assert told == [
        ("gateway", Event.STARTED, 1, "first", True),
        ("gateway", Event.STARTED, 1, "second", True),
        ("gateway", Event.DESTROYED, 2, "third", True),
    ]


def test_a_callback_that_raises_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Event] = []
    events = Events(None, "test")
    events.add(Event.STARTED, lambda *_: 1 / 0)
    events.add(Event.STARTED, lambda _, event, *__: told.append(event))
    events.tell(Event.STARTED)
    events.close()
    assert told == [Event.STARTED]
    assert "a callback for started raised" in caplog.text


def test_tellings_of_failures_are_bounded_and_the_rest_is_counted() -> None:
    go = threading.Event()
    events = Events(None, "test")
    events.add(Event.MODULE_FAILED, lambda *_: go.wait(30))
    for _ in range(MAX_WAITING + 100):
        events.tell(Event.MODULE_FAILED)
    assert 98 <= events.dropped <= 100
    go.set()
    events.close()


def test_nobody_interested_means_no_thread() -> None:
    before = threading.active_count()
    events = Events(None, "test")
    events.tell(Event.STARTED)
    assert threading.active_count() == before
    events.close()


def test_a_failure_is_told_in_one_line_and_where_it_was_at_debug_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "penstock.gateway")
    with Gateway() as gateway:
        gateway.add_module("a", Collector)
        gateway.add_module("b", Failing)
        gateway.add_link("a", "b")
        gateway.start()
        gateway.module("a").publish(b"bad")
        eventually(lambda: gateway.supervisor("b").failures == 1)
    told = [record for record in caplog.records if "failed" in record.getMessage()]
    assert [(record.levelname, record.getMessage(), record.exc_info is None) for record in told] == [
        ("ERROR", "module 'b' failed in receive: RuntimeError: cannot take b'bad'", True),
        ("DEBUG", "module 'b': where it failed", False),
    ]
