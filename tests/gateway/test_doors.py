"""What a gateway is given in Python is checked at the door, by the same rules as a file."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

from penstock.errors import InvalidArgument, StateError
from penstock.gateway import Event, Filter, Gateway, LinkOptions, Module, QueueOptions, Restart
from penstock.gateway.configuration import ConfigurationError, module_entry, parse
from tests.gateway.conftest import Collector, Failing, eventually

MODULE = {"name": "a", "loader": {"name": "python", "entrypoint": "penstock.gateway.modules:Printer"}}
LINK = {"source": "a", "sink": "a"}


def in_file(kind: type, values: dict[str, Any]) -> Any:
    """The same values, written to a file."""
    if kind in (QueueOptions, Restart):
        module = {**MODULE, "queue" if kind is QueueOptions else "restart": values}
        entry = module_entry(module, ())
        return entry.queue if kind is QueueOptions else entry.restart
    link = {**LINK, **({"filter": values} if kind is Filter else values)}
    made = parse({"modules": [MODULE], "links": [link]}).links[0]
    return made.filter if kind is Filter else made.options


@pytest.mark.parametrize(
    ("kind", "values", "wanted"),
    [
        (LinkOptions, {"max_bytes": math.nan}, "max_bytes: must be a whole number"),
        (LinkOptions, {"max_messages": 1.5}, "max_messages: must be a whole number"),
        (LinkOptions, {"max_messages": 0}, "max_messages: is 0; it must be 1 or more"),
        (LinkOptions, {"max_tries": True}, "max_tries: must be a whole number"),
        (LinkOptions, {"ttl_s": True}, "ttl_s: must be a number"),
        (LinkOptions, {"ttl_s": "1"}, "ttl_s: must be a number, not the text '1'"),
        (LinkOptions, {"ttl_s": math.inf}, "ttl_s: must be a number"),
        (LinkOptions, {"backoff_s": None}, "backoff_s: must be a number"),
        (LinkOptions, {"ordered": "yes"}, "ordered: must be true or false, not the text 'yes'"),
        (LinkOptions, {"delivery": "twice"}, "delivery: 'twice' is not a choice"),
        (LinkOptions, {"delivery": 5}, "delivery: must be a text"),
        (LinkOptions, {"overflow": "drop_oldest", "max_messages": 1}, "overflow: 'drop_oldest' is not a choice"),
        (LinkOptions, {"overflow": "drop_newest"}, "overflow .* max_messages or max_bytes"),
        (QueueOptions, {"depth": 1.5}, "depth: must be a whole number"),
        (QueueOptions, {"depth": 0}, "depth: is 0"),
        (QueueOptions, {"timeout_s": "x"}, "timeout_s: must be a number"),
        (QueueOptions, {"timeout_s": -1}, "timeout_s: is -1"),
        (QueueOptions, {"priority": 256}, "priority: is 256; 0 to 255 are allowed"),
        (QueueOptions, {"overflow": "drop"}, "overflow: 'drop' is not a choice"),
        (Restart, {"policy": "never", "limit": 1.5}, "limit: must be a whole number"),
        (Restart, {"policy": "never", "backoff_s": "x"}, "backoff_s: must be a number"),
        (Restart, {"policy": "always"}, "policy: 'always' is not a choice"),
        (Filter, {"one_in": 0}, "one_in: is 0; it must be 1 or more"),
        (Filter, {"one_in": 1.5}, "one_in: must be a whole number"),
        (Filter, {"min_bytes": "x"}, "min_bytes: must be a whole number"),
        (Filter, {"rate_per_s": "x"}, "rate_per_s: must be a number"),
        (Filter, {"where": 5}, "where: must be a text"),
        (Filter, {"properties": {"k": 7}}, r"properties\.k: must be a text, a list of texts or null"),
        (Filter, {"properties": ["k"]}, "properties: must be an object"),
    ],
)
def test_options_are_refused_alike_in_python_and_in_a_file(kind: type, values: dict[str, Any], wanted: str) -> None:
    with pytest.raises(InvalidArgument, match=wanted):
        kind(**values)
    with pytest.raises(ConfigurationError, match=wanted):
        in_file(kind, values)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (LinkOptions, {"delivery": "at_least_once", "max_tries": 3, "backoff_s": 1, "ordered": True, "ttl_s": 5}),
        (LinkOptions, {"max_messages": 7, "overflow": "drop_newest", "delivery": "at_most_once"}),
        (LinkOptions, {"max_bytes": None, "ttl_s": None, "max_tries": None}),
        (QueueOptions, {"depth": 7, "overflow": "drop_oldest", "timeout_s": 0, "priority": 3}),
        (Restart, {"policy": "on_failure", "backoff_s": 1, "limit": None}),
        (Filter, {"properties": {"a": "b", "c": None}, "min_bytes": 0, "one_in": 1, "rate_per_s": 2, "where": ".x > 1"}),
    ],
)
def test_options_are_the_same_in_python_and_in_a_file(kind: type, values: dict[str, Any]) -> None:
    assert kind(**values) == in_file(kind, values)


@pytest.mark.parametrize("seconds", ["x", True, math.nan, 0, -1])
def test_seconds_that_mean_nothing_are_refused(seconds: Any) -> None:
    with Gateway() as gateway, pytest.raises(InvalidArgument, match="stuck_after_s"):
        gateway.add_module("a", Collector, stuck_after_s=seconds)
    with pytest.raises(InvalidArgument, match="cycle_timeout_s"):
        Gateway(cycle_timeout_s=seconds)


def test_what_is_no_options_is_told_by_its_name() -> None:
    with Gateway() as gateway:
        with pytest.raises(TypeError, match=r"queue .* QueueOptions\(\.\.\.\), not dict"):
            gateway.add_module("a", Collector, queue={"depth": 5})  # type: ignore[arg-type]
        gateway.add_module("a", Collector)
        with pytest.raises(TypeError, match=r"options are LinkOptions\(\.\.\.\), not dict"):
            gateway.add_link("a", "a", None, {"ttl_s": 1})  # type: ignore[arg-type]
        assert gateway.links() == []


@pytest.mark.parametrize(("timeout", "error"), [(math.nan, InvalidArgument), (-1, InvalidArgument), ("a", TypeError)])
def test_a_time_out_that_means_nothing_is_refused_by_its_name(timeout: Any, error: type[Exception]) -> None:
    with Gateway() as gateway:
        gateway.add_module("a", Collector)
        for call in (gateway.start, lambda timeout: gateway.remove_module("a", timeout=timeout), gateway.destroy):
            with pytest.raises(error, match=r"^timeout"):
                call(timeout)
        assert [line.name for line in gateway.module_list()] == ["a"]


@pytest.mark.parametrize(("ends", "which"), [((None, "a"), "source"), (("a", 5), "sink")])
def test_an_end_of_a_link_that_is_no_text_is_refused(ends: Any, which: str) -> None:
    with Gateway() as gateway:
        gateway.add_module("a", Collector)
        with pytest.raises(InvalidArgument, match=f"a link's {which} is the name of a module or an address, not"):
            gateway.add_link(*ends)


@pytest.mark.parametrize("callback", [5, (), (Event.CREATED,), (Event.CREATED, print, None, None)])
def test_a_callback_that_is_none_is_refused(callback: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"a callback is \(event, function, parameter\), not"):
        Gateway(callbacks=[callback])


class DestroyedMeanwhile(Collector):
    """Its ``start`` returns when the gateway has been destroyed."""

    gateway: Gateway

    def start(self) -> None:
        threading.Thread(target=self.gateway.destroy, args=(0,)).start()
        eventually(lambda: self.gateway.broker.references == 0)


def test_a_start_that_a_destroy_overtakes_says_so() -> None:
    gateway = Gateway()
    gateway.add_module("a", DestroyedMeanwhile)
    gateway.add_module("b", Collector)
    gateway.module("a").gateway = gateway
    with pytest.raises(StateError, match="gateway 'gateway' has been destroyed"):
        gateway.start()


NAMES: list[tuple[Any, str]] = [
    ("a\nb", "line break|printed"),
    ("\x1b[31m", "printed"),
    ("\ud800", "printed"),
    ("a\0", "printed|NUL"),
    ("", "empty"),
    (5, "must be a text, not 5"),
    (None, "must be a text, not null"),
    ("*", "stands for every module"),
    ("shm:/a", "reads as an address"),
]


@pytest.mark.parametrize(("name", "wanted"), NAMES)
def test_names_are_refused_alike_in_python_and_in_a_file(name: Any, wanted: str) -> None:
    with Gateway() as gateway:
        for entrypoint in (Collector, "tests.gateway.conftest:Collector"):
            with pytest.raises(InvalidArgument, match=f"^name: .*({wanted})"):
                gateway.add_module(name, entrypoint)
        assert gateway.module_list() == []
    with pytest.raises(ConfigurationError, match=rf"^modules\[0\]\.name: .*({wanted})"):
        parse({"modules": [{**MODULE, "name": name}], "links": []})


def test_names_of_any_script_are_taken() -> None:
    with Gateway() as gateway:
        for name in ("Kühlung 1", "泵", "a/b c"):
            gateway.add_module(name, Collector)
        gateway.start()
        assert [line.name for line in gateway.module_list()] == ["Kühlung 1", "泵", "a/b c"]


class Without:
    pass


@pytest.mark.parametrize("given", [Collector(), 5, None, Without, int, lambda: Collector()])
def test_who_gives_no_class_is_told_that_a_class_is_wanted(given: Any) -> None:
    with Gateway() as gateway:
        with pytest.raises(InvalidArgument, match="class"):
            gateway.add_module("x", given)
        assert gateway.module_list() == []


class Sorter(Module):
    def receive(self, message: Any) -> None:
        self.publish(message, output=eval(bytes(message)))


@pytest.mark.parametrize("output", [5, None, b"x", True, "a.b"])
@pytest.mark.parametrize("loader", ["python", "process"])
def test_an_output_that_no_link_can_name_is_refused(output: Any, loader: str) -> None:
    failures: list[str] = []
    with Gateway() as gateway:
        gateway.add_module("source", Collector)
        gateway.add_module("sorter", "tests.gateway.test_doors:Sorter", loader=loader)
        gateway.add_module("sink", Collector)
        gateway.add_link("source", "sorter")
        gateway.add_link("sorter.good", "sink")
        gateway.add_event_callback(Event.MODULE_FAILED, lambda _, __, told, ___: failures.append(str(told[2])))
        gateway.start()
        for one in (output, "good"):
            gateway.module("source").publish(repr(one).encode())
        eventually(lambda: gateway.module("sink").got == [b"'good'"])
        eventually(lambda: failures)
    assert "output" in failures[0]


def test_a_module_that_was_made_anew_keeps_its_place_in_the_list() -> None:
    with Gateway() as gateway:
        for name in ("a", "b", "c"):
            gateway.add_module(name, Failing, restart="on_failure")
        gateway.add_link("b", "a")
        gateway.start()
        before = gateway.module("a")
        gateway.module("b").publish(b"bad")
        eventually(lambda: gateway.module("a") is not before)
        assert [info.name for info in gateway.modules()] == ["a", "b", "c"]
