"""The modules that speak to servers, files and databases, each against a real one where this machine can have it."""

from __future__ import annotations

import http.client
import json
import math
import socket
import sqlite3
import stat
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway import Delivery, Event, Gateway, GatewayMessage, LinkOptions, modules
from tests.gateway.conftest import Collector, Failing, eventually

AGAIN = LinkOptions(delivery=Delivery.AT_LEAST_ONCE, backoff_s=0.01, max_tries=2)


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway() as made:
        made.add_module("source", Collector)
        made.add_module("sink", Collector)
        yield made


def say(gateway: Gateway, *contents: bytes, **properties: str) -> None:
    for content in contents:
        gateway.module("source").publish(content, properties)


class Taker:
    """A server that notes what is posted, and answers as it is told."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, dict[str, str], bytes]] = []
        self.answers: list[int] = []
        taker = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                taker.posted.append((self.path, dict(self.headers), body))
                self.send_response(taker.answers.pop(0) if taker.answers else 204)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def taker() -> Iterator[Taker]:
    made = Taker()
    yield made
    made.close()


# ---- HTTP in


def add_http_in(gateway: Gateway, **args: Any) -> int:
    gateway.add_module("web", modules.HttpIn, {"port": 0, **args})
    return int(gateway.module("web").port)


def post(port: int, path: str = "/", body: bytes = b"x", method: str = "POST", **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        return connection.getresponse().status
    finally:
        connection.close()


def test_what_is_posted_comes_with_its_properties(gateway: Gateway) -> None:
    port = add_http_in(gateway, path="/in", token="secret")
    gateway.add_link("web", "sink")
    gateway.start()
    good = {"Authorization": "Bearer secret"}
    assert post(port, "/in/a?b=c", b"one", Content_Type="text/plain", X_Property_Site="no%0Arth", **good) == 204
    assert post(port, "/in", b"two", "PUT", **good) == 204
    sink = gateway.module("sink")
    eventually(lambda: sink.got == [b"one", b"two"])
    assert dict(sink.messages[0].properties) == {"path": "/in/a", "content-type": "text/plain", "Site": "no\nrth"}
    assert post(port, "/in", b"x") == 401
    assert post(port, "/in", b"x", Authorization="Bearer wrong") == 401
    assert post(port, "/inside", b"x", **good) == 404
    for method in ("GET", "HEAD", "DELETE", "PATCH", "OPTIONS"):
        assert post(port, "/in", b"", method, **good) == 405
    assert sink.got == [b"one", b"two"]


def test_a_body_is_bounded_and_has_a_length(gateway: Gateway) -> None:
    port = add_http_in(gateway, max_body_bytes=10)
    gateway.add_link("web", "sink")
    gateway.start()
    assert post(port, body=bytes(10)) == 204
    assert post(port, body=bytes(11)) == 413
    assert post(port, body=bytes(100_000)) == 413
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/", iter([b"pieces"]), {"Transfer-Encoding": "chunked"}, encode_chunked=True)
    assert connection.getresponse().status == 411
    connection.close()
    eventually(lambda: gateway.module("sink").got == [bytes(10)])


@pytest.mark.parametrize("lengths", ["Content-Length: 2\r\nContent-Length: 5\r\n", "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n"])
def test_a_request_whose_end_can_be_read_in_two_ways_is_refused(gateway: Gateway, lengths: str) -> None:
    """What one server takes for the body, another takes for the next request."""
    port = add_http_in(gateway)
    gateway.add_link("web", "sink")
    gateway.start()
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        connection.sendall(f"POST / HTTP/1.1\r\nHost: a\r\n{lengths}\r\n2\r\nhi\r\n0\r\n\r\n".encode())
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1") == 1
    assert post(port, body=b"next") == 204
    eventually(lambda: gateway.module("sink").got == [b"next"])


def test_a_sender_cannot_say_where_its_request_went(gateway: Gateway) -> None:
    port = add_http_in(gateway)
    gateway.add_link("web", "sink")
    gateway.start()
    headers = {"X-Property-path": "/other", "X-Property-Content-Type": "other", "X-Property-": "nameless"}
    assert post(port, "/in", Content_Type="text/plain", **headers) == 204
    sink = gateway.module("sink")
    eventually(lambda: sink.got == [b"x"])
    properties = dict(sink.messages[0].properties)
    assert properties == {"path": "/in", "content-type": "text/plain", "Content-Type": "other"}


@pytest.mark.parametrize("header", [{"X-Property-a": "%00x"}, {"X-Property-a%00": "x"}])
def test_a_property_that_cannot_be_is_refused(gateway: Gateway, header: dict[str, str]) -> None:
    port = add_http_in(gateway)
    gateway.add_link("web", "sink")
    gateway.start()
    assert post(port, body=b"wrong", **header) == 400
    assert post(port, body=b"good") == 204
    eventually(lambda: gateway.module("sink").got == [b"good"])


def test_the_answer_waits_until_it_was_handled_where_that_is_asked_for(gateway: Gateway) -> None:
    port = add_http_in(gateway, confirm="handled", timeout_s=60.0)
    gateway.add_link("web", "sink")
    gateway.start()
    sink = gateway.module("sink")
    sink.gate.clear()
    status: list[int] = []
    thread = threading.Thread(target=lambda: status.append(post(port)), daemon=True)
    thread.start()
    eventually(lambda: gateway.broker.worker_of(sink).busy_since is not None)
    assert status == []
    sink.gate.set()
    thread.join(60)
    assert status == [204]


def test_what_is_not_handled_in_time_is_not_confirmed(gateway: Gateway) -> None:
    port = add_http_in(gateway, confirm="handled", timeout_s=0.2)
    gateway.add_module("fails", Failing)
    gateway.add_link("web", "fails", None, LinkOptions(backoff_s=30))
    gateway.start()
    assert post(port, body=b"bad") == 503
    gateway.remove_link("web", "fails")
    gateway.remove_module("fails", drain=False)


def test_off_loopback_a_token_is_required() -> None:
    with pytest.raises(ValueError, match="give a token"):
        modules.HttpIn.parse({"host": "0.0.0.0"})
    assert modules.HttpIn.parse({"host": "0.0.0.0", "token": "x"})


def test_the_port_is_free_again_at_the_end(gateway: Gateway) -> None:
    port = add_http_in(gateway)
    gateway.start()
    gateway.remove_module("web")
    assert add_http_in(gateway, port=port) == port


# ---- HTTP out


def at(gateway: Gateway, kind: type, args: Any, options: LinkOptions = AGAIN) -> None:
    """source -> the module, with all that waits at the start in one batch."""
    gateway.add_module("out", kind, args)
    gateway.add_link("source", "out", None, options, error="sink")


@pytest.mark.parametrize(("form", "wanted"), [("lines", b"a\nb\n"), ("json", None)])
def test_what_waits_together_is_posted_together(gateway: Gateway, taker: Taker, form: str, wanted: bytes | None) -> None:
    at(gateway, modules.HttpPoster, {"url": taker.url, "batch": 2, "batch_format": form, "token": "t"})
    say(gateway, b"a", b"b", b"c", k="v")
    gateway.start()
    eventually(lambda: len(taker.posted) == 2)
    _, headers, body = taker.posted[0]
    assert headers["Authorization"] == "Bearer t"
    assert headers["Content-Type"] == ("application/json" if form == "json" else "application/octet-stream")
    if wanted is not None:
        assert [body, taker.posted[1][2]] == [wanted, b"c\n"]
    else:
        assert [(one["content"], one["properties"]) for one in json.loads(body)] == [("a", {"k": "v"}), ("b", {"k": "v"})]


@pytest.mark.parametrize("form", ["lines", "json"])
def test_a_batch_that_is_refused_costs_those_of_the_requests_before_nothing(
    gateway: Gateway, taker: Taker, form: str
) -> None:
    """And who is tried again alone is posted as a batch of one: what a server gets has one form."""
    at(gateway, modules.HttpPoster, {"url": taker.url, "batch": 2, "batch_format": form, "tries": 1})
    taker.answers = [204, 400, 400, 204]
    say(gateway, b"a", b"b", b"c", b"d")
    gateway.start()
    sink = gateway.module("sink")
    eventually(lambda: len(taker.posted) == 4)
    bodies = [body for _, _, body in taker.posted]
    if form == "json":
        bodies = [b"".join(one["content"].encode() + b"\n" for one in json.loads(body)) for body in bodies]
    assert bodies == [b"a\nb\n", b"c\nd\n", b"c\n", b"d\n"]
    assert not any(name.startswith("X-Property") for _, headers, _ in taker.posted for name in headers)
    eventually(lambda: sink.got == [b"c"], "tried twice, then to the error link")


# ---- files


def test_a_property_keeps_its_blanks_over_http(gateway: Gateway) -> None:
    port = add_http_in(gateway)
    gateway.add_link("web", "sink")
    gateway.add_module("out", modules.HttpPoster, {"url": f"http://127.0.0.1:{port}/"})
    gateway.add_link("source", "out")
    gateway.start()
    say(gateway, b"x", ends=" a b ")
    sink = gateway.module("sink")
    eventually(lambda: sink.got == [b"x"])
    assert sink.messages[0].properties["ends"] == " a b "


@pytest.mark.parametrize("kind", [modules.HttpPoster, modules.InfluxOut])
def test_what_is_told_of_a_server_holds_no_secret(gateway: Gateway, taker: Taker, kind: type) -> None:
    told: list[str] = []
    gateway.add_event_callback(Event.MODULE_FAILED, lambda _, __, context, ___: told.append(str(context[2])))
    taker.answers = [401]
    url = taker.url.replace("://", "://me:hidden1@") + "/write?db=d&u=me&p=hidden2"
    at(gateway, kind, {"url": url}, LinkOptions())
    gateway.start()
    say(gateway, b'{"value": 1}')
    eventually(lambda: len(told) == 1)
    assert f"{taker.url}/write answered 401" in told[0] and "hidden" not in told[0]
    assert taker.posted[0][0] == "/write?db=d&u=me&p=hidden2"
    assert taker.posted[0][1]["Authorization"] == "Basic bWU6aGlkZGVuMQ=="


@pytest.mark.parametrize("wrong", [{"url": "file://me:hidden@h/?p=hidden"}, {"url": "http://h/a b"}, {"url": "http://h:99999/"},
                                   {"headers": {"A": "hidden\r\nB: c"}}, {"headers": {"A\n": "b"}}, {"headers": {"A": 1}},
                                   {"token": "hidden\n"}, {"token": 1}, {"timeout_s": 0}, {"timeout_s": math.nan},
                                   {"backoff_s": math.inf}])  # fmt: skip
def test_what_no_request_could_carry_is_refused_without_being_repeated(wrong: dict[str, Any]) -> None:
    for kind in (modules.HttpPoster, modules.InfluxOut):
        with pytest.raises(ValueError, match=next(iter(wrong))) as refused:
            kind.parse({"url": "http://h/", **wrong})
        assert "hidden" not in str(refused.value)


def test_an_argument_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"'measurment' is not known; valid: .*measurement") as refused:
        modules.InfluxOut.parse({"url": "http://h/", "measurment": "m"})
    assert "batch" not in str(refused.value)


def test_lines_go_into_a_file_that_is_turned_over(gateway: Gateway, tmp_path: Path) -> None:
    file = tmp_path / "out"
    gateway.add_module("out", modules.FileOut, {"file": str(file), "max_bytes": 8, "keep": 2, "sync": True})
    gateway.add_link("source", "out")
    gateway.start()
    for count, content in enumerate((b"one", b"two\nlines", b"three", b"four"), 1):
        say(gateway, content)
        eventually(lambda n=count: gateway.broker.info(gateway.module("out")).handled == n)  # type: ignore[misc]
    assert file.read_bytes() == b"four\n"
    assert (tmp_path / "out.1").read_bytes() == b"three\n"
    assert (tmp_path / "out.2").read_bytes() == b"two\\nlines\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.1", "out.2"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_batch_that_is_larger_than_a_file_may_be_goes_into_several(gateway: Gateway, tmp_path: Path) -> None:
    gateway.add_module("out", modules.FileOut, {"file": str(tmp_path / "out"), "max_bytes": 20, "keep": 2})
    out = gateway.module("out")
    out.receive_many([GatewayMessage(b"%d" % number * 7) for number in range(9)])
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes == {"out": 8, "out.1": 16, "out.2": 16}
    assert (tmp_path / "out").read_bytes() == b"8888888\n"


def test_json_lines_hold_everything(gateway: Gateway, tmp_path: Path) -> None:
    at(gateway, modules.FileOut, {"file": str(tmp_path / "out"), "format": "json"})
    say(gateway, b"text", b"\xff", k="v")
    gateway.start()
    eventually(lambda: gateway.broker.info(gateway.module("out")).handled == 2)
    first, second = map(json.loads, (tmp_path / "out").read_text().splitlines())
    assert (first["content"], first["properties"], first["source"]) == ("text", {"k": "v"}, "source")
    assert second["base64"] == "/w=="


# ---- databases

COLUMNS = {"at": "time", "who": "source", "site": "property:site", "value": "json:value", "inner": "json:a.b"}


def test_rows_go_into_a_database_and_what_is_no_row_costs_itself_alone(gateway: Gateway, tmp_path: Path) -> None:
    create = "CREATE TABLE IF NOT EXISTS t (at REAL, who TEXT, site TEXT, value REAL, inner TEXT)"
    connect = {"database": str(tmp_path / "db")}
    told: list[Any] = []
    gateway.add_event_callback(Event.MODULE_FAILED, lambda _, __, context, ___: told.append(context))
    at(gateway, modules.SqlOut, {"connect": connect, "table": "t", "columns": COLUMNS, "create": create})
    say(gateway, b'{"value": 1.5, "a": {"b": [1]}}', b"no json", b'{"value": 2}', site="'; DROP TABLE t; --")
    gateway.start()
    sink = gateway.module("sink")
    eventually(lambda: sink.got == [b"no json"])
    database = sqlite3.connect(connect["database"])
    try:
        rows = database.execute("SELECT who, site, value, inner FROM t ORDER BY value").fetchall()
    finally:
        database.close()
    assert rows == [("source", "'; DROP TABLE t; --", 1.5, "[1]"), ("source", "'; DROP TABLE t; --", 2.0, None)]
    eventually(lambda: told)
    assert told[0][:2] == ("out", "receive")


@pytest.mark.parametrize("wrong", [b'{"value": -1}', b'{"value": 123456789012345678901234567890}'])
def test_a_row_that_the_database_refuses_costs_itself_alone(gateway: Gateway, tmp_path: Path, wrong: bytes) -> None:
    create = "CREATE TABLE IF NOT EXISTS t (value INTEGER CHECK (value >= 0))"
    file = tmp_path / "db"
    args = {"connect": {"database": str(file)}, "table": "t", "columns": {"value": "json:value"}, "create": create}
    at(gateway, modules.SqlOut, args)
    say(gateway, b'{"value": 1}', wrong, b'{"value": 2}', wrong, b'{"value": 3}')  # they wait together
    gateway.start()
    eventually(lambda: gateway.module("sink").got == [wrong, wrong])
    database = sqlite3.connect(file)
    try:
        assert database.execute("SELECT value FROM t ORDER BY value").fetchall() == [(1,), (2,), (3,)]
    finally:
        database.close()


def test_a_database_that_refuses_is_tried_again(gateway: Gateway, tmp_path: Path) -> None:
    file = tmp_path / "db"
    columns = {"content": "content"}
    at(gateway, modules.SqlOut, {"connect": {"database": str(file)}, "table": "t", "columns": columns},
       LinkOptions(delivery=Delivery.AT_LEAST_ONCE, backoff_s=0.01, max_backoff_s=0.05))  # fmt: skip
    say(gateway, b"a", b"b")
    gateway.start()
    eventually(lambda: gateway.broker.info(gateway.module("out")).failed >= 2, "there is no table")
    database = sqlite3.connect(file)
    try:
        database.execute("CREATE TABLE t (content BLOB)")
        database.commit()
        wanted = [(b"a",), (b"b",)]
        eventually(lambda: database.execute("SELECT content FROM t").fetchall() == wanted)
    finally:
        database.close()


@pytest.mark.parametrize("wrong", [{"table": "t; DROP"}, {"columns": {"a b": "content"}}, {"columns": {"a": "nothing"}},
                                   {"driver": "no_such_driver"}, {"driver": "json"}])  # fmt: skip
def test_what_could_be_no_statement_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        modules.SqlOut.parse({"table": "t", "columns": {"a": "content"}, **wrong})


def test_lines_for_influx(gateway: Gateway, taker: Taker) -> None:
    args = {"url": f"{taker.url}/api/v2/write?org=o&bucket=b", "token": "t", "measurement": "m {kind}", "tags": ["site", "no"]}
    at(gateway, modules.InfluxOut, args)
    source = gateway.module("source")
    content = {"i": 3, "f": 1.5, "b": True, "s": 'say "x" \\', "a b": 1, "none": None, "nan": float("nan")}
    for body in (json.dumps(content).encode(), b"no json", b'{"x": null}', b'{"x": 1}'):
        source.broker.publish(
            source, GatewayMessage(body, {"kind": "k,1", "site": "no rth=1"}, timestamp_ns=1_700_000_000_000_000_001)
        )
    gateway.start()
    sink = gateway.module("sink")
    eventually(lambda: sorted(sink.got) == [b"no json", b'{"x": null}'])
    path, headers, body = taker.posted[0]
    assert (path, headers["Authorization"]) == ("/api/v2/write?org=o&bucket=b", "Token t")
    head = r"m\ k\,1,site=no\ rth\=1"
    assert body.decode().splitlines() == [
        head + r' i=3i,f=1.5,b=true,s="say \"x\" \\",a\ b=1i 1700000000000000001',
        head + " x=1i 1700000000000000001",
    ]


# ---- windows


def test_a_window_is_closed_by_its_bounds_by_time_and_at_the_end(gateway: Gateway) -> None:
    gateway.add_module("out", modules.Window, {"window_s": 3600.0, "max_messages": 2, "by": "site", "format": "json"})
    gateway.add_link("source", "out")
    gateway.add_link("out", "sink")
    gateway.start()
    sink = gateway.module("sink")
    for content, site in ((b"1", "n"), (b"text", "s"), (b"2", "n"), (b"3", "n")):
        say(gateway, content, site=site)
    eventually(lambda: sink.got == [b"[1, 2]"])
    assert (sink.messages[0].properties["site"], sink.messages[0].properties["count"]) == ("n", "2")
    gateway.remove_module("out")
    eventually(lambda: sorted(sink.got) == [b'["text"]', b"[1, 2]", b"[3]"])


@pytest.mark.parametrize("wrong", [b'{"value": NaN}', b"-Infinity", b"1e999", b"[" * 100_000])
def test_a_window_is_json_whatever_comes(gateway: Gateway, wrong: bytes) -> None:
    gateway.add_module("out", modules.Window, {"window_s": 3600.0, "max_messages": 2, "format": "json"})
    gateway.add_link("source", "out")
    gateway.add_link("out", "sink")
    gateway.start()
    say(gateway, b'{"value": 1.5}', wrong)
    sink = gateway.module("sink")
    eventually(lambda: sink.got)
    assert json.loads(sink.got[0]) == [{"value": 1.5}, wrong.decode()]


def test_a_window_is_closed_by_time(gateway: Gateway) -> None:
    gateway.add_module("out", modules.Window, {"window_s": 0.05, "max_bytes": 5})
    gateway.add_link("source", "out")
    gateway.add_link("out", "sink")
    gateway.start()
    sink = gateway.module("sink")
    say(gateway, b"a", b"b")
    eventually(lambda: b"\n".join(sink.got) == b"a\nb")
    say(gateway, b"123456789", b"2")
    eventually(lambda: b"\n".join(sink.got) == b"a\nb\n123456789\n2")


@pytest.mark.parametrize("kind", [modules.HttpPoster, modules.InfluxOut])
def test_who_does_not_answer_is_named_without_its_secrets(
    gateway: Gateway, caplog: pytest.LogCaptureFixture, kind: type
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    at(gateway, kind, {"url": f"http://u:secret@127.0.0.1:{port}/in?key=secret", "tries": 1})
    gateway.start()
    gateway.module("source").publish(b'{"a": 1}')
    eventually(lambda: "failed in receive" in caplog.text)
    assert f"http://127.0.0.1:{port}/in did not answer: [Errno 111] Connection refused" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize("options", [LinkOptions(), AGAIN])
def test_what_fails_alone_and_then_with_its_batch_fails_once(
    taker: Taker, tmp_path: Path, options: LinkOptions
) -> None:
    """Each dead letter comes once, and each good message is taken."""
    database = sqlite3.connect(tmp_path / "p.db")
    database.execute("CREATE TABLE r (v REAL NOT NULL)")
    sql = {"connect": {"database": str(tmp_path / "p.db")}, "table": "r", "columns": {"v": "json:v"}}
    influx = {"url": taker.url, "tries": 1}
    taker.answers = [400]
    for kind, args, contents, wanted in (
        (modules.SqlOut, sql, (b'{"v": null}', b"bad"), {b'{"v": null}', b"bad"}),
        (modules.SqlOut, sql, (b'{"v": 1}', b"bad", b'{"v": null}', b'{"v": 2}'), {b'{"v": null}', b"bad"}),
        (modules.InfluxOut, influx, (b'{"v": 1}', b"bad", b'{"v": 2}'),
         {b"bad"} if options.tries_again else {b'{"v": 1}', b"bad", b'{"v": 2}'}),
    ):  # fmt: skip
        with Gateway() as one:
            one.add_module("source", Collector)
            one.add_module("out", kind, args)
            one.add_module("sink", Collector)
            one.add_link("source", "out", None, options, error="sink")
            for content in contents:
                one.module("source").publish(content)
            one.start()
            sink = one.module("sink")
            eventually(lambda: wanted <= set(sink.got))  # noqa: B023
            assert one.destroy()
            assert sorted(sink.got) == sorted(wanted)
    assert database.execute("SELECT v FROM r ORDER BY v").fetchall() == [(1.0,), (2.0,)]
    database.close()
