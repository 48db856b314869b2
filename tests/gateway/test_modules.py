"""The ready modules, each at its work."""

from __future__ import annotations

import importlib
import json
import pkgutil
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from penstock._core import counters_read
from penstock.errors import InvalidArgument
from penstock.gateway import Gateway, GatewayMessage, modules
from penstock.gateway.configuration import module_entry
from penstock.gateway.loaders import recipe
from tests.gateway.conftest import Collector, eventually


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway() as made:
        made.add_module("source", Collector)
        made.add_module("sink", Collector)
        made.start()
        yield made


def through(gateway: Gateway, kind: type, args: Any = None) -> Collector:
    """source -> the module -> sink; gives the sink."""
    gateway.add_module("it", kind, args)
    gateway.add_link("source", "it")
    gateway.add_link("it", "sink")
    sink: Collector = gateway.module("sink")
    return sink


def say(gateway: Gateway, content: bytes, **properties: str) -> None:
    gateway.module("source").publish(content, properties)


def test_each_is_short_and_says_what_it_takes() -> None:
    for path in Path(modules.__file__).parent.glob("*.py"):
        lines = path.read_text().splitlines()
        assert len(lines) < 200, path.name
        assert path.name == "__init__.py" or "args:" in "\n".join(lines[:10]), path.name


@pytest.mark.parametrize("name", modules.__all__)
def test_each_refuses_args_it_does_not_know(name: str) -> None:
    for wrong in ({"nonsense": 1}, [1], "text"):
        with pytest.raises(ValueError):
            getattr(modules, name).parse(wrong)


def test_timer(gateway: Gateway) -> None:
    gateway.add_link("*", "sink")
    gateway.add_module(
        "timer", modules.Timer, {"period_s": 0.01, "count": 3, "content": "tick", "properties": {"a": "b"}}
    )
    sink = gateway.module("sink")
    eventually(lambda: sink.got == [b"tick"] * 3)
    assert [dict(m.properties) for m in sink.messages] == [{"a": "b", "tick": str(n)} for n in (1, 2, 3)]


def test_sensor(gateway: Gateway) -> None:
    gateway.add_link("*", "sink")
    gateway.add_module("sensor", modules.Sensor, {"device": "d1", "rate_per_s": 0.0, "count": 200, "noise": 0.0})
    sink = gateway.module("sink")
    eventually(lambda: len(sink.got) == 200)
    assert [m.properties["sequence"] for m in sink.messages] == [str(n) for n in range(1, 201)]
    values = [json.loads(content)["value"] for content in sink.got]
    assert values[0] == 20.0
    assert all(15 <= value <= 25 for value in values)


def test_logger(gateway: Gateway, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "log"
    gateway.add_module("file", modules.Logger, {"file": str(file), "max_bytes": 5})
    gateway.add_module("log", modules.Logger, {"level": "WARNING"})
    gateway.add_link("source", "file")
    gateway.add_link("source", "log")
    say(gateway, b"hello\xff world", k="v")
    eventually(lambda: file.exists() and file.read_text())
    line = json.loads(file.read_text())
    assert datetime.fromisoformat(line.pop("time")).tzinfo is not None
    assert line == {"source": "source", "properties": {"k": "v"}, "bytes": 12, "content": "hello"}
    assert file.stat().st_mode & 0o777 == 0o600
    eventually(lambda: "\\\\xff world" in caplog.text)


def test_printer(gateway: Gateway, capfd: pytest.CaptureFixture[str]) -> None:
    through(gateway, modules.Printer, {"format": "{k} {missing} {size} {content.__class__} {content}"})
    say(gateway, b"text", k="v")
    say(gateway, b"\x1b[2J\nforged\x07\tline", k="a\u202eb")
    eventually(lambda: gateway.broker.info(gateway.module("it")).handled == 2)
    assert capfd.readouterr().out == "v - 4 - text\na\\u202eb - 17 - \\x1b[2J\\nforged\\x07\tline\n"


def test_metrics(gateway: Gateway) -> None:
    sink = through(gateway, modules.Metrics, {"period_s": 0.0})
    for number in ("1", "2", "4", "3", "x"):
        say(gateway, b"12", deviceId="d", sequence=number)
    say(gateway, b"12")
    eventually(lambda: len(sink.got) == 6)
    assert json.loads(sink.got[-1]) == {
        "received": 6,
        "bytes": 12,
        "lost": 1,
        "out_of_sequence": 1,
        "non_conforming": 2,
    }


def test_http_poster(gateway: Gateway) -> None:
    posted: list[tuple[str, dict[str, str], bytes]] = []
    answers = [200, 503, 500, 200, 404, 200]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            posted.append((self.path, dict(self.headers), body))
            self.send_response(answers[len(posted) - 1])
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/in?x=1"
        args = {"url": url, "backoff_s": 0.01, "token": "t", "headers": {"X-Site": "north"}}
        through(gateway, modules.HttpPoster, args)
        say(gateway, b"one", k="v\nw")
        say(gateway, b"two")
        say(gateway, b"refused")
        say(gateway, b"three")
        eventually(lambda: gateway.broker.info(gateway.module("it")).handled == 3)
        assert gateway.broker.info(gateway.module("it")).lost == 1
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert [(path, body) for path, _, body in posted] == [
        ("/in?x=1", b"one"),
        ("/in?x=1", b"two"),
        ("/in?x=1", b"two"),
        ("/in?x=1", b"two"),
        ("/in?x=1", b"refused"),
        ("/in?x=1", b"three"),
    ]
    assert posted[0][1]["X-Property-k"] == "v%0Aw"
    assert (posted[0][1]["Authorization"], posted[0][1]["X-Site"]) == ("Bearer t", "north")
    assert gateway.broker.info(gateway.module("it")).failed == 1


def test_file_tail(gateway: Gateway, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    gateway.add_link("*", "sink")
    gateway.add_module(
        "tail", modules.FileTail, {"file": str(file), "poll_s": 0.01, "max_line_bytes": 8, "from_start": True}
    )
    sink = gateway.module("sink")
    file.write_bytes(b"first\nsecond\r\nhalf")
    eventually(lambda: sink.got == [b"first", b"second"])
    with file.open("ab") as more:
        more.write(b" and\n12345678901\n")
    eventually(lambda: sink.got[2:] == [b"half and"[:8], b"", b"12345678", b"901"])
    file.unlink()
    file.write_bytes(b"anew\n")
    eventually(lambda: sink.got[-1] == b"anew")
    assert sink.messages[-1].properties["line"] == "7"


class Slow(Collector):
    def receive(self, message: GatewayMessage) -> None:
        time.sleep(0.002)
        super().receive(message)


def test_file_tail_keeps_its_place_when_its_lines_were_handled(tmp_path: Path) -> None:
    file, place = tmp_path / "lines", tmp_path / "place"
    file.write_bytes(b"".join(b"%d\n" % n for n in range(1000)))
    args = {"file": str(file), "poll_s": 0.01, "from_start": True, "place": str(place)}

    def run(until: Callable[[Collector], bool], timeout: float) -> list[bytes]:
        gateway = Gateway()
        gateway.add_module("sink", Slow)
        gateway.add_module("tail", modules.FileTail, args)
        gateway.add_link("tail", "sink")
        sink: Collector = gateway.module("sink")
        gateway.start()
        eventually(lambda: until(sink))
        gateway.destroy(timeout)
        return sink.got

    first = run(lambda sink: len(sink.got) > 10, 0)
    assert len(first) < 1000, "it ended before all was handled"
    second = run(lambda sink: sink.got[-1:] == [b"999"], 60)
    assert {*first, *second} == {b"%d" % n for n in range(1000)}
    with file.open("ab") as more:
        more.write(b"new\n")
    assert run(lambda sink: len(sink.got) > 0, 60) == [b"new"], "what was handled does not come again"
    assert place.stat().st_mode & 0o777 == 0o600


def test_file_tail_reads_once_more_what_was_lost_on_its_way(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b"".join(b"%d\n" % n for n in range(600)))
    with Gateway() as gateway:
        gateway.add_module("sink", Collector)
        args = {"file": str(file), "poll_s": 0.01, "from_start": True, "place": str(tmp_path / "place")}
        gateway.add_module("tail", modules.FileTail, args)
        gateway.add_link("tail", "sink")
        sink, tail = gateway.module("sink"), gateway.module("tail")
        sink.gate.clear()
        gateway.start()
        worker = gateway.broker.worker_of(sink)
        eventually(lambda: worker.waiting == 600)
        worker.post(lambda: worker.lose(worker.queue.queued and len(worker.queue.read_many(1000, 0))))
        sink.gate.set()
        eventually(lambda: {*sink.got} == {b"%d" % n for n in range(600)})
        assert {(bytes(m), m.properties["line"]) for m in sink.messages} == {
            (b"%d" % n, str(n + 1)) for n in range(600)
        }, "each under the same number"
        eventually(lambda: not tail._in_flight() and tail._place.handled.split()[1] == str(file.stat().st_size))
        # Those of a file that was moved away are read once more too, before the next file is.
        sink.gate.clear()
        with file.open("ab") as more:
            more.write(b"last 1\nlast 2\n")
        eventually(lambda: worker.waiting == 2)
        file.rename(tmp_path / "moved")
        file.write_bytes(b"new\n")
        worker.post(lambda: worker.lose(worker.queue.queued and len(worker.queue.read_many(1000, 0))))
        sink.gate.set()
        eventually(lambda: sink.got[-1:] == [b"new"])
        assert b"last 1" in sink.got
        assert b"last 2" in sink.got


@pytest.mark.parametrize("place", [b"", b"1 2", b"\xb2\0", b"1 2 x"])
def test_file_tail_reads_everything_where_its_place_is_damaged(
    tmp_path: Path, place: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "lines").write_bytes(b"a\nb\n")
    (tmp_path / "place").write_bytes(place)
    with Gateway() as gateway:
        gateway.add_module("sink", Collector)
        args = {"file": str(tmp_path / "lines"), "poll_s": 0.01, "place": str(tmp_path / "place")}
        gateway.add_module("tail", modules.FileTail, args)
        gateway.add_link("tail", "sink")
        gateway.start()
        eventually(lambda: gateway.module("sink").got == [b"a", b"b"])
    assert caplog.text.count(f"its place {tmp_path / 'place'} is damaged") == 1


@pytest.mark.parametrize("how", ["replaced", "truncated"])
def test_file_tail_reads_what_comes_while_its_lines_wait(tmp_path: Path, how: str) -> None:
    """Its sink fails, and the file is replaced or truncated, more than once: a day's files, while an uplink is gone."""
    file = tmp_path / "lines"
    file.write_bytes(b"a 1\na 2\n")
    with Gateway() as gateway:
        gateway.add_module("sink", Collector)
        args = {"file": str(file), "poll_s": 0.01, "from_start": True, "place": str(tmp_path / "place")}
        gateway.add_module("tail", modules.FileTail, args)
        gateway.add_link("tail", "sink")
        sink, tail = gateway.module("sink"), gateway.module("tail")
        sink.gate.clear()
        gateway.start()
        worker = gateway.broker.worker_of(sink)
        eventually(lambda: worker.waiting == 2)
        for number, name in enumerate("bcd" if how == "replaced" else "b", 1):
            if how == "replaced":
                file.rename(tmp_path / f"moved {number}")
            else:
                file.write_bytes(b"")
                eventually(lambda: tail._later)
            file.write_bytes(b"%s 1, as long as the one before\n" % name.encode())
            eventually(lambda: len(tail._later) == number)  # noqa: B023
        sink.gate.set()
        expected = [b"a 1", b"a 2", *(b"%s 1, as long as the one before" % name.encode() for name in "bcd")]
        expected = expected if how == "replaced" else expected[:3]
        eventually(lambda: len(sink.got) == len(expected))
        assert sink.got == expected


def test_file_tail_keeps_the_place_where_it_began(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b"old\n")
    args = {"file": str(file), "poll_s": 0.01, "place": str(tmp_path / "place")}
    for line in (b"", b"new\n"):
        with file.open("ab") as more:
            more.write(line)
        with Gateway() as gateway:
            gateway.add_module("sink", Collector)
            gateway.add_module("tail", modules.FileTail, args)
            gateway.add_link("tail", "sink")
            gateway.start()
            sink = gateway.module("sink")
            eventually(lambda: (tmp_path / "place").exists() and sink.got == [b"new"] * bool(line))  # noqa: B023


def test_property_mapper(gateway: Gateway) -> None:
    sink = through(gateway, modules.PropertyMapper, {"rename": {"a": "b"}, "set": {"c": "3"}, "drop": ["d"]})
    message = GatewayMessage(b"content", {"a": "1", "d": "4", "e": "5"})
    gateway.module("source").publish(message)
    eventually(lambda: sink.got == [b"content"])
    assert dict(sink.messages[0].properties) == {"b": "1", "e": "5", "c": "3"}
    assert sink.messages[0].address == message.address, "nothing was copied"


def test_aggregator(gateway: Gateway) -> None:
    sink = through(gateway, modules.Aggregator, {"window_count": 3})
    for value in (1, 2, 6, 10):
        say(gateway, b'{"value": %d}' % value, deviceId="d")
    eventually(lambda: len(sink.got) == 1)
    assert json.loads(sink.got[0]) == {"count": 3, "min": 1, "max": 6, "last": 6, "mean": 3}
    assert dict(sink.messages[0].properties) == {"kind": "aggregate", "deviceId": "d"}
    gateway.remove_module("it")
    eventually(lambda: len(sink.got) == 2)
    assert json.loads(sink.got[1])["last"] == 10


def test_aggregator_over_time_closes_what_is_over(gateway: Gateway) -> None:
    sink = through(gateway, modules.Aggregator, {"window_s": 0.0, "max_groups": 2})
    for device in ("a", "a", "b", "c"):
        say(gateway, b'{"value": 1}', deviceId=device)
    eventually(lambda: len(sink.got) == 2)
    assert [m.properties["deviceId"] for m in sink.messages] == ["a", "a"], "one is over, one made room"


def test_switch(gateway: Gateway) -> None:
    filters = {"hot": {"properties": {"kind": "warm"}}, "large": {"min_bytes": 5}}
    with pytest.raises(InvalidArgument, match="has no dot"):
        gateway.add_module("it", modules.Switch, {"outputs": {"a.b": {}}})
    gateway.add_module("it", modules.Switch, {"outputs": filters})
    gateway.add_link("source", "it")
    for name in ("hot", "large", "rest"):
        gateway.add_module(name, Collector)
        gateway.add_link("it" if name == "rest" else f"it.{name}", name)
    say(gateway, b"large and hot", kind="warm")
    say(gateway, b"large")
    say(gateway, b"x")
    eventually(lambda: gateway.module("rest").got == [b"x"])
    eventually(lambda: gateway.module("hot").got == [b"large and hot"] and gateway.module("large").got == [b"large"])


def test_deduplicate(gateway: Gateway) -> None:
    sink = through(gateway, modules.Deduplicate, {"by": "id", "max_keys": 2})
    for number in ("1", "1", "2", "1", "3", "1"):
        say(gateway, number.encode(), id=number)
    say(gateway, b"without")
    say(gateway, b"without")
    eventually(lambda: sink.got == [b"1", b"2", b"3", b"1", b"without", b"without"], "the oldest was forgotten")
    assert gateway.broker.info(gateway.module("it")).ledger.dropped == {"filtered": 2}


def test_throttle(gateway: Gateway) -> None:
    sink = through(gateway, modules.Throttle, {"rate_per_s": 0.001, "by": "device"})
    gateway.add_module("dropped", Collector)
    gateway.add_link("it.dropped", "dropped")
    for device in ("a", "a", "b", "a"):
        say(gateway, device.encode(), device=device)
    eventually(lambda: sink.got == [b"a", b"b"] and gateway.module("dropped").got == [b"a", b"a"])
    it = gateway.module("it")
    eventually(lambda: gateway.broker.info(it).handled == 2)
    info = gateway.broker.info(it)
    assert dict(info.ledger.dropped) == {"filtered": 2}
    assert info.ledger.balanced
    (row,) = (row for row in counters_read() if row["kind"] == "module" and row["name"] == "it")
    assert (row["dropped"], row["errors"]) == ({"filtered": 2}, 0)


def test_transform(gateway: Gateway) -> None:
    args = {
        "where": {"properties": {"kind": "raw"}},
        "set": {"site": "north/{device}", "kind": "done"},
        "drop": ["secret"],
        "content": {"value": "{json.reading.c}", "text": "{json.reading.c} C", "missing": "{json.no.such}"},
    }
    sink = through(gateway, modules.Transform, args)
    say(gateway, b'{"reading": {"c": 21.5}}', kind="raw", device="d1", secret="x")
    say(gateway, b"untouched", kind="other")
    eventually(lambda: len(sink.got) == 2)
    assert json.loads(sink.got[0]) == {"value": 21.5, "text": "21.5 C", "missing": None}
    assert dict(sink.messages[0].properties) == {"kind": "done", "device": "d1", "site": "north/d1"}
    assert sink.got[1] == b"untouched"


def test_transform_assigns(gateway: Gateway) -> None:
    assign = [".fahrenheit = .celsius * 1.8 + 32", ".place.floor=2", "properties.alarm = .celsius >= 30", ".celsius = null",
              'properties.site = "lab"', "properties.gone = .nothing"]  # fmt: skip
    sink = through(gateway, modules.Transform, {"assign": assign, "set": {"kind": "{json.celsius}"}})
    source = gateway.module("source")
    source.publish(b'{"celsius": 40, "place": {"name": "hall"}}', {"gone": "x"})
    source.publish(b"[1]")
    source.publish(b'{"place": 1}')
    source.publish(b"{}")
    eventually(lambda: len(sink.got) == 2)
    assert [json.loads(content) for content in sink.got] == [
        {"celsius": None, "place": {"name": "hall", "floor": 2}, "fahrenheit": 104.0},
        {"celsius": None, "place": {"floor": 2}, "fahrenheit": None},
    ]
    assert dict(sink.messages[0].properties) == {"alarm": "true", "site": "lab", "kind": "40"}
    it = gateway.module("it")
    eventually(lambda: gateway.broker.info(it).failed == 2, "what is no object there is a failure of that message alone")


def test_transform_assigns_to_properties_of_any_content(gateway: Gateway) -> None:
    sink = through(gateway, modules.Transform, {"assign": ["properties.large = size > 3"]})
    gateway.module("source").publish(b"\xff\xfe\xfd\xfc")
    eventually(lambda: sink.got == [b"\xff\xfe\xfd\xfc"])
    assert dict(sink.messages[0].properties) == {"large": "true"}


@pytest.mark.parametrize(("kind", "wrong"), [
    (modules.Aggregator, {"window_s": -1}), (modules.Aggregator, {"window_count": 0}),
    (modules.Aggregator, {"window_count": 1.5}), (modules.Aggregator, {"max_groups": 0}), (modules.Throttle, {"max_keys": 0}),
    (modules.Throttle, {"by": 5}), (modules.FileTail, {"file": "f", "poll_s": 0}), (modules.FileTail, {"file": "f", "place": 5}),
    (modules.FileTail, {"file": "f", "max_line_bytes": 0}), (modules.Timer, {"count": 1.5}), (modules.Timer, {"count": -1}),
    (modules.Timer, {"properties": {"a": 1}}), (modules.PropertyMapper, {"keep": "abc"}),
    *((kind, {name: value}) for kind, name in ((modules.Aggregator, "window_s"), (modules.Window, "window_s"),
      (modules.Timer, "period_s"), (modules.Deduplicate, "window_s"), (modules.Sensor, "mean"))
      for value in (float("nan"), float("inf"))),
    (modules.Window, {"window_s": 1e30}), (modules.Timer, {"period_s": 10**400}),
])  # fmt: skip
def test_an_argument_that_could_not_work_is_refused_before_anything_runs(kind: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=[*wrong][-1]):
        kind.parse(wrong)


@pytest.mark.parametrize("wrong", [b'{"value": NaN}', b'{"value": 1e999}', b'{"value": "x"}', b"{}", b"[1]"])
def test_what_is_no_number_costs_itself_alone_and_not_the_window(gateway: Gateway, wrong: bytes) -> None:
    sink = through(gateway, modules.Aggregator, {"window_count": 2})
    for content in (b'{"value": 1}', wrong, b'{"value": 3}'):
        gateway.module("source").publish(content)
    eventually(lambda: len(sink.got) == 1)
    assert json.loads(sink.got[0]) == {"count": 2, "min": 1.0, "max": 3.0, "last": 3.0, "mean": 2.0}


@pytest.mark.parametrize("assign", [[".a"], [".a == 1"], ["size = 1"], [".a = "], [".a[0] = 1"], ["properties = 1"], [1]])
def test_transform_refuses_what_is_no_assignment(assign: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"assign|filter"):
        modules.Transform.parse({"assign": assign})


def test_transform_refuses_two_contents() -> None:
    with pytest.raises(ValueError, match="not both"):
        modules.Transform.parse({"assign": [".a = 1"], "content": "x"})


@pytest.mark.parametrize("name", sorted(one.name for one in pkgutil.iter_modules(modules.__path__)))
def test_the_example_of_each_file_is_one(name: str) -> None:
    """It is an entry of a gateway's file, and the module takes its args."""
    _, marker, text = (importlib.import_module(f"{modules.__name__}.{name}").__doc__ or "").partition("Example: ")
    assert marker, "there is none"
    found = recipe(module_entry(json.loads(" ".join(text.split())), ()), {})
    assert isinstance(found.build, type) and found.build.__module__.endswith(f".{name}")
