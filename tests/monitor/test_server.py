"""The monitor's API: figures equal to the counters, metrics, health, who is let in, what is refused."""

from __future__ import annotations

import dataclasses
import gzip
import http.client
import http.server
import itertools
import json
import re
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import InvalidArgument
from penstock.broker import Client, Server

pytest.importorskip("starlette")

from penstock.gateway import Gateway, Module
from penstock.monitor.grafana import dashboard
from penstock.monitor.server import MAX_BODY_BYTES
from penstock.monitor.service import Service
from penstock.observe.history_file import DAY_S, HistoryFile
from penstock.observe.rates import READERS
from penstock.observe.snapshot import live

from ..cli.command import start
from .handles import Handles


def get(url: str, **headers: str) -> tuple[int, bytes, Any]:
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


@pytest.fixture
def service() -> Iterator[Service]:
    with Service(every_s=0.2) as running:
        running.start()
        yield running


def seen(service: Service, name: str, **wanted: Any) -> dict[str, Any]:
    """The handle of that name once the API shows the wanted values."""
    deadline = time.monotonic() + 30
    while True:
        state = json.loads(get(service.url + "api/state")[1])
        for handle in state["handles"]:
            if name in handle["where"] and all(handle[key] == value for key, value in wanted.items()):
                return dict(handle)
        assert time.monotonic() < deadline, state["handles"]
        time.sleep(0.05)


def test_state_is_what_was_counted(service: Service, handles: Handles, name: str) -> None:
    handles.do(
        f"open shm subscriber {name}", f"add {name}/subscriber matched 120", f"add {name}/subscriber delivered 100",
        f"drop {name}/subscriber overflow 15", f"add {name}/subscriber expired 2", f"set {name}/subscriber capacity 8",
        f"set {name}/subscriber depth 3",
    )  # fmt: skip
    handle = seen(service, name, matched=120, depth=3)
    assert handle["delivered"] == 100 and handle["dropped"] == {"overflow": 15} and handle["expired"] == 2
    assert handle["in_flight"] == 120 - 100 - 15 - 2 and handle["pid"] == handles.pid
    state = json.loads(get(service.url + "api/state")[1])
    assert any(process["pid"] == handles.pid for process in state["processes"])
    ids = {node["id"] for node in state["graph"]["nodes"]}
    assert f"shm:{name}" in ids
    assert any(edge["from"] == f"shm:{name}" for edge in state["graph"]["edges"])


def test_a_program_that_stands_in_its_command_line_has_a_name(service: Service, name: str) -> None:
    """The same as its handles have."""
    code = f"from penstock import _core; c = _core.Counters('shm', 'publisher', '{name}'); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        handle = seen(service, name)
        state = json.loads(get(service.url + "api/state")[1])
        child.communicate(b"\n")
    (process,) = [one for one in state["processes"] if one["pid"] == child.pid]
    assert process["program"] == handle["program"] != ""


def test_metrics_are_what_was_counted(service: Service, handles: Handles, name: str) -> None:
    handles.do(f"open shm publisher {name}", f"add {name}/publisher matched 42", f"drop {name}/publisher closed 3")
    seen(service, name, matched=42, lost=3)
    status, body, headers = get(service.url + "metrics")
    text = body.decode()
    assert status == 200 and headers["content-type"].startswith("text/plain")
    (line,) = [one for one in text.splitlines() if one.startswith("penstock_matched_total") and name in one]
    assert float(line.split()[-1]) == 42 and f'pid="{handles.pid}"' in line
    (line,) = [one for one in text.splitlines() if one.startswith("penstock_dropped_total") and name in one]
    assert float(line.split()[-1]) == 3 and 'reason="closed"' in line


def test_history_and_events(service: Service, handles: Handles, name: str) -> None:
    handles.do(f"open shm publisher {name}")
    seen(service, name)
    handles.do(f"add {name}/publisher matched 500")
    seen(service, name, matched=500)
    history = json.loads(get(service.url + "api/history?last=50")[1])
    values = [value for value in history["series"][f"rate/in/shm:{name}"] if value is not None]
    assert max(values) > 0 and len(history["times"]) <= 50
    assert get(service.url + "api/history?last=x")[0] == 400
    with urllib.request.urlopen(service.url + "api/events", timeout=30) as stream:
        line = stream.readline().decode()
    event = json.loads(line.removeprefix("data: "))
    assert any(name in handle["where"] for handle in event["state"]["handles"])
    assert event["sample"]["times"]


def test_health(service: Service) -> None:
    status, body, _ = get(service.url + "health")
    assert status == 200 and json.loads(body)["status"] == "ok"


def test_health_while_looks_fail_and_afterwards(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    watcher, source = service.watcher, service.watcher._source

    def fail() -> list[Any]:
        raise OSError("cannot be read")

    watcher._source = fail
    deadline = time.monotonic() + 30
    while "reading the counters failed" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    watcher._state = dataclasses.replace(watcher.state, time_ns=watcher.state.time_ns - 60_000_000_000)  # a minute goes by
    status, body, _ = get(service.url + "health")
    assert status == 503 and json.loads(body)["status"] == "stale"
    watcher._source = source
    before = watcher.state.time_ns
    assert watcher.wait(before, 30).time_ns > before and get(service.url + "health")[0] == 200


def test_the_page_loads_nothing_from_outside(service: Service) -> None:
    for path in ("", "page.js", "page.css", "plots.js", "graph.js", "icon.svg"):
        status, body, headers = get(service.url + path)
        assert status == 200
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        links = re.findall(rb"(?:https?:)?//[a-z0-9.-]+\.[a-z]+", body)
        assert set(links) <= {b"http://www.w3.org"}, links


def test_another_host_name_is_refused(service: Service) -> None:
    """A page elsewhere that resolves its own name to loopback must not reach the monitor."""
    assert get(service.url + "api/state", Host="evil.example")[0] == 421


def raw(service: Service, *headers: str, path: str = "/api/state") -> int:
    """The status of a request whose headers are sent as they are."""
    port = int(re.search(r":(\d+)/", service.url)[1])  # type: ignore[index]
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall("\r\n".join((f"GET {path} HTTP/1.1", *headers, "Connection: close", "", "")).encode("latin-1"))
        return int(connection.makefile("rb").readline().split()[1])


@pytest.mark.parametrize(
    "host",
    ["evil.example:x", "evil.example:99999999", "evil_example", "evil.example#", "[::1", "evil.example/127.0.0.1", "",
     "user@127.0.0.1", "127.0.0.1 evil.example", "\xe9vil.example", "127.0.0.1.evil.example", "localhost.evil.example"],
)  # fmt: skip
def test_a_host_that_is_not_loopback_is_refused_however_it_is_written(service: Service, host: str) -> None:
    assert raw(service, f"Host: {host}") in (400, 421)


def test_each_name_of_loopback_is_taken(service: Service) -> None:
    for host in ("127.0.0.1", "127.0.0.1:8765", "LOCALHOST:1", "localhost", "[::1]:8765", "127.0.0.2"):
        assert raw(service, f"Host: {host}") == 200, host
    assert raw(service) in (400, 421) and raw(service, "Host: localhost", "Host: evil.example") in (400, 421)


def test_a_page_elsewhere_cannot_ask_the_api(service: Service, handles: Handles, name: str) -> None:
    """It could not read the answer; but asking for a tail subscribes, and that is for the monitor's own page alone."""
    handles.do(f"open shm publisher {name}")
    tail = f"/api/tail?address=shm:{name}"
    for site in ("cross-site", "same-site"):
        for path in ("/api/state", "/api/events", tail):
            assert raw(service, "Host: localhost", f"Sec-Fetch-Site: {site}", path=path) == 403
    assert not any(b.kind == "subscriber" and b.name == name for b in live())
    for site in ("same-origin", "none"):
        assert raw(service, "Host: localhost", f"Sec-Fetch-Site: {site}") == 200
    assert raw(service, "Host: localhost", "Sec-Fetch-Site: cross-site", path="/") == 200, "a link to the page works"


def test_any_token_can_be_shown_by_the_link_that_is_printed() -> None:
    with Service(token='a b&c=d#e%41+;"ü水/?') as running:
        running.start()
        status, _, headers = visit(running.url)
        assert status == 303
        assert get(running.url.partition("?")[0] + "api/state", Cookie=headers["set-cookie"].split(";")[0])[0] == 200


def test_monitors_of_one_host_do_not_take_each_others_cookies() -> None:
    with Service(token="first-token") as first, Service(token="second-token") as second:
        cookies = []
        for page in (first, second):
            page.start()
            cookies.append(visit(page.url)[2]["set-cookie"].split(";")[0])
        assert cookies[0].partition("=")[0] != cookies[1].partition("=")[0]  # a browser sends both to both
        for page in (first, second):
            assert get(page.url.partition("?")[0] + "api/state", Cookie="; ".join(cookies))[0] == 200


def visit(url: str, certificate: str | None = None) -> tuple[int, bytes, Any]:
    """One answer, redirections not followed."""
    trusted = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=certificate))

    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            return None

    try:
        with urllib.request.build_opener(Stay, trusted).open(url, timeout=30) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers


def test_token_is_needed_off_loopback(handles: Handles) -> None:
    with Service("0.0.0.0", 0, insecure=True) as running:
        running.start()
        assert running.token is not None and len(running.token) > 16
        port = re.search(r":(\d+)/", running.url)[1]  # type: ignore[index]
        url = f"http://127.0.0.1:{port}/"
        assert get(url)[0] == 401 and get(url + "api/state")[0] == 401 and get(url + "metrics")[0] == 401
        assert get(url + "?token=wrong-token-wrong")[0] == 401
        assert get(url + "api/state", Authorization=f"Bearer {running.token}")[0] == 200
        assert get(url + "api/state", Authorization=f"bearer {running.token}")[0] == 200
        assert get(url + "api/state", Authorization=f"Basic {running.token}")[0] == 401
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)
        connection.request("GET", f"/?token={running.token}")
        answer = connection.getresponse()
        cookie = answer.getheader("set-cookie") or ""
        assert answer.status == 303 and "HttpOnly" in cookie and "SameSite=strict" in cookie
        connection.close()
        assert get(url + "api/state", Cookie=cookie.split(";")[0])[0] == 200
    with pytest.raises(InvalidArgument, match="8 characters"):
        Service("0.0.0.0", 0, token="short")


def test_actions_are_refused_unless_allowed(service: Service) -> None:
    request = urllib.request.Request(service.url + "api/actions/purge", data=b"{}", headers={"X-Penstock-Action": "1"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)
    assert caught.value.code == 403
    caught.value.close()
    with Service(allow_actions=True) as allowed:
        allowed.start()
        plain = urllib.request.Request(allowed.url + "api/actions/purge", data=b"{}")
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(plain, timeout=30)
        assert caught.value.code == 403
        caught.value.close()
        unknown = urllib.request.Request(
            allowed.url + "api/actions/explode", data=b"{}", headers={"X-Penstock-Action": "1"}
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(unknown, timeout=30)
        assert caught.value.code == 400
        caught.value.close()


def test_tail_refuses_what_is_not_open_and_bad_filters(service: Service, handles: Handles, name: str) -> None:
    status, body, _ = get(service.url + "api/tail?address=journal:/etc")
    assert status == 400 and b"nobody" in body
    assert get(service.url + "api/tail?address=bus:x")[0] == 400
    handles.do(f"open shm publisher {name}")
    status, body, _ = get(service.url + f"api/tail?address=shm:{name}&filter=size%20%3E")
    assert status == 400 and b"filter" in body


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_and_ends_cleanly(number: signal.Signals) -> None:
    running = start("monitor", "--port", "0")
    try:
        assert running.stdout is not None
        line = running.stdout.readline()
        url = line.split()[-1]
        assert url.startswith("http://127.0.0.1:"), line
        deadline = time.monotonic() + 30
        while True:
            try:
                assert get(url + "health")[0] == 200
                break
            except urllib.error.URLError:
                assert time.monotonic() < deadline
        with urllib.request.urlopen(url + "api/events", timeout=30):  # an open page keeps it not from ending
            running.send_signal(number)
            _, err = running.communicate(timeout=60)
        assert running.returncode == 0 and "Traceback" not in err, err
    finally:
        running.kill()
        running.wait()


def test_a_taken_port_is_told_in_one_line(service: Service) -> None:
    from ..cli.command import run

    port = re.search(r":(\d+)/", service.url)[1]  # type: ignore[index]
    done = run("monitor", "--port", port)
    assert done.returncode == 1 and port in done.stderr and "Traceback" not in done.stderr


def test_a_page_elsewhere_is_refused_by_its_origin(service: Service) -> None:
    own = service.url.rstrip("/")
    assert get(service.url + "api/state", Origin=own)[0] == 200
    for origin in ("http://evil.example", "null", own.replace("http:", "https:"), own + "0"):
        assert get(service.url + "api/state", Origin=origin)[0] == 403, origin


def test_a_body_is_bounded(name: str) -> None:
    with Service(every_s=0.2, allow_actions=True) as acting:
        acting.start()
        host = acting.url.split("/")[2]
        with socket.create_connection(tuple(host.split(":")), timeout=30) as line:  # type: ignore[arg-type]
            line.sendall(
                f"POST /api/actions/purge HTTP/1.1\r\nHost: {host}\r\nX-Penstock-Action: 1\r\n"
                f"Content-Length: {1 << 40}\r\n\r\n".encode() + bytes(MAX_BODY_BYTES + 1)
            )
            assert line.recv(100).startswith(b"HTTP/1.1 413")


def test_off_loopback_it_wants_tls_or_to_be_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="certificate"):
        Service("0.0.0.0")
    with pytest.raises(InvalidArgument, match="key"):
        Service(certificate="a.pem")
    with pytest.raises(InvalidArgument, match="cannot be used"):
        Service(certificate=str(tmp_path / "none.pem"), key=str(tmp_path / "none.pem"))
    with Service("0.0.0.0", insecure=True) as page:
        assert page.token and page.url.startswith("http://")


def test_by_tls(tmp_path: Path) -> None:
    certificate, key = certificate_of("127.0.0.1", tmp_path)
    with Service(certificate=certificate, key=key, token="a-long-secret") as page:
        page.start()
        trusted = ssl.create_default_context(cafile=certificate)
        bare = page.url.partition("?")[0]
        request = urllib.request.Request(bare, headers={"Authorization": "Bearer a-long-secret"})
        with urllib.request.urlopen(request, timeout=30, context=trusted) as answer:
            assert bare.startswith("https://") and b"<title>Penstock</title>" in answer.read()
        assert "secure" in visit(page.url, certificate)[2]["set-cookie"].lower()


def certificate_of(host: str, folder: Path) -> tuple[str, str]:
    """A certificate that signed itself, and its key, as files."""
    made = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-subj", f"/CN={host}", "-addext", f"subjectAltName=IP:{host}", "-out", made[0], "-keyout", made[1]],
        check=True, capture_output=True,
    )  # fmt: skip
    return str(made[0]), str(made[1])


def test_a_day_is_kept_on_disk_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "state" / "monitor.sqlite"
    kept = HistoryFile(path)
    assert path.stat().st_mode & 0o777 == 0o600
    now = 1_800_000_000.0
    for second in range(0, 3 * DAY_S // 2, 30):
        kept.add(now + second, {"rate/in/a": second, **({"rate/in/b": 1.0} if second < 120 else {})})
    end = now + 3 * DAY_S // 2
    hour = kept.series(3600, end)
    assert 58 <= len(hour["times"]) <= 61 and list(hour["series"]) == ["rate/in/a"]
    kept.close()
    again = HistoryFile(path)
    day = again.series(10 * DAY_S, end)
    assert 1438 <= len(day["times"]) <= 1441, "older ones are gone"
    assert day["series"]["rate/in/a"][-1] == pytest.approx(3 * DAY_S // 2 - 75, abs=60)
    again.close()
    with sqlite3.connect(path) as file:
        file.execute("UPDATE minutes SET series = x'00' WHERE minute % 2 = 0")
    hurt = HistoryFile(path)
    assert 715 <= len(hurt.series(DAY_S, end)["times"]) <= 722, "damaged minutes are gaps"
    hurt.close()


def test_the_page_reads_it(tmp_path: Path) -> None:
    kept = HistoryFile(tmp_path / "h.sqlite")
    kept.add(time.time() - 180, {"rate/in/x": 5.0})
    kept.add(time.time() - 60, {})
    kept.close()
    with Service(every_s=0.2, history=tmp_path / "h.sqlite") as page:
        page.start()
        record = json.loads(get(page.url + "api/history?span=3600")[1])
        assert record["series"]["rate/in/x"][0] == 5.0
        assert get(page.url + "api/history?span=day")[0] == 400


def test_a_file_that_cannot_be_kept_is_told_and_the_page_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "h.sqlite").write_bytes(b"no database at all" * 100)
    with Service(every_s=0.2, history=tmp_path / "h.sqlite") as page:
        page.start()
        assert get(page.url + "api/history?span=3600")[0] == 200
    assert "cannot keep the history" in caplog.text


def test_the_dashboard_asks_for_figures_that_there_are(service: Service, handles: Handles, name: str) -> None:
    handles.do(f"open shm subscriber {name}", f"drop {name}/subscriber gap 3", f"latency {name}/subscriber 5000")
    seen(service, name, lost=3)
    told = set(re.findall(r"^(penstock_\w+)", get(service.url + "metrics")[1].decode(), re.MULTILINE))
    shown = json.loads(get(service.url + "grafana.json")[1])
    queries = [target["expr"] for panel in shown["panels"] for target in panel["targets"]]
    assert len(queries) >= 8
    asked = {word for query in queries for word in re.findall(r"penstock_\w+", query)}
    assert asked <= told, asked - told
    for panel in shown["panels"]:
        for target in panel["targets"]:
            groups = re.search(r"sum by \(([^)]*)\)", target["expr"])
            if groups is not None:  # a name means something in its room only
                assert {"room", "name"} <= set(groups[1].split(", ")), target
                assert target["legendFormat"].startswith("{{room}} {{name}}"), target


def test_the_dashboard_counts_as_delivered_what_the_page_does(service: Service, handles: Handles, name: str) -> None:
    queries = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    (delivered,) = (query for query in queries if "penstock_delivered_total" in query)
    assert {kind for kind in (*READERS, "queue", "pipeline", "module") if kind in delivered} == {
        *READERS, "queue", "pipeline", "module",
    }  # fmt: skip
    assert not any(kind in delivered for kind in ("!~\"publisher", "writer", "broker", "server", "client", "link"))
    for figure in ("penstock_lag", "penstock_depth", "penstock_latency_seconds_bucket"):
        assert all(f'{figure}{{kind!="tail"}}' in query for query in queries if figure in query), figure


def test_the_dashboard_counts_what_a_gateway_s_module_gets_once(service: Service, name: str) -> None:
    (delivered,) = (t["expr"] for p in dashboard()["panels"] for t in p["targets"] if "penstock_delivered" in t["expr"])
    (inside,) = re.findall(r'kind="queue",name!~"([^"]*)"', delivered)
    module = name.strip("/")
    with Gateway() as gateway:
        gateway.add_module(module, Silent)
        gateway.start()
        deadline = time.monotonic() + 30
        while True:
            lines = [line for line in get(service.url + "metrics")[1].decode().splitlines() if module in line]
            queues = {found for line in lines if 'kind="queue"' in line for found in re.findall(r',name="([^"]*)"', line)}
            if queues:
                break
            assert time.monotonic() < deadline, lines
        assert all(re.fullmatch(inside, queue) for queue in queues), queues
        assert any('kind="module"' in line for line in lines)


class Silent(Module):
    def receive(self, message: object) -> None:
        pass


def test_a_bus_has_one_name_in_the_figures(service: Service, name: str) -> None:
    with penstock.publisher(f"bus:{name}"), penstock.subscriber(f"bus:{name}"):
        deadline = time.monotonic() + 30
        while True:
            lines = get(service.url + "metrics")[1].decode().splitlines()
            kinds = {line for line in lines if line.startswith("penstock_matched_total") and name in line}
            if len(kinds) >= 3:
                break
            assert time.monotonic() < deadline, kinds
        assert all(f'name="{name}"' in line for line in kinds), kinds


def why(service: Service, address: str) -> dict[str, Any]:
    return dict(json.loads(get(service.url + "api/channel?address=" + urllib.parse.quote(address))[1]))


def test_no_host_is_tried_that_nobody_here_has_open(service: Service) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.5)
        for scheme in ("tcp", "broker"):
            told = why(service, f"{scheme}://127.0.0.1:{listener.getsockname()[1]}/x")
            assert "nobody on this machine has it open" in told["error"]
        with pytest.raises(TimeoutError):
            listener.accept()


def test_why_of_a_queue_is_what_the_command_says(service: Service, name: str, tmp_path: Path) -> None:
    with Server(str(tmp_path / "b"), 0).start() as broker, Client(port=broker.port) as client:
        client.queue(name, topics="t")
        client.publish("t", b"waits")
        deadline = time.monotonic() + 30
        while not any("no consumer" in finding["text"] for finding in why(service, f"broker:{name}").get("why", ())):
            assert time.monotonic() < deadline, why(service, f"broker:{name}")


def test_between_two_looks_the_page_hears_that_the_server_is_there() -> None:
    with Service(every_s=3600) as monitor:
        monitor.start()
        with urllib.request.urlopen(monitor.url + "api/events", timeout=30) as stream:
            names = [line for line in itertools.islice(stream, 8) if line.startswith(b"event:")]
    assert names and set(names) == {b"event: beat\n"}


def test_counters_reach_an_opentelemetry_collector(service: Service, handles: Handles, name: str) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    from penstock.monitor.otlp import exporting

    got: list[bytes] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    handles.do(f"open shm publisher {name}", f"add {name}/publisher matched 42")
    seen(service, name, matched=42)
    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with exporting(service.watcher, f"http://127.0.0.1:{server.server_port}", last_s=60):
                pass  # the end exports once more
        finally:
            server.shutdown()
            thread.join()
    message = ExportMetricsServiceRequest.FromString(got[-1])
    points = {
        (metric.name, attribute.value.string_value): point.as_int
        for metric in message.resource_metrics[0].scope_metrics[0].metrics
        for point in metric.sum.data_points
        for attribute in point.attributes
        if attribute.key == "name"
    }
    assert points["penstock.matched", name] == 42


@pytest.mark.parametrize("body", [b"[]", b"null", b'"x"', b"{", b"[" * 60_000])
def test_an_action_whose_body_is_no_object_is_refused(body: bytes) -> None:
    with Service(every_s=0.2, allow_actions=True) as acting:
        acting.start()
        request = urllib.request.Request(
            acting.url + "api/actions/purge", data=body, headers={"X-Penstock-Action": "1"}
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=30)
        with caught.value as error:
            assert error.code == 400


def test_a_collector_that_never_answers_is_not_waited_for_at_the_end(
    service: Service, handles: Handles, name: str
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from penstock.monitor.otlp import exporting

    handles.do(f"open shm publisher {name}", f"add {name}/publisher matched 42")
    seen(service, name, matched=42)  # without figures nothing is sent
    with socket.create_server(("127.0.0.1", 0)) as collector:
        with exporting(service.watcher, f"http://127.0.0.1:{collector.getsockname()[1]}", last_s=0.05):
            pass
        collector.settimeout(60)
        connection, _ = collector.accept()
    with connection:
        connection.setblocking(False)
        with pytest.raises(BlockingIOError):  # it still waits for an answer: the end has come before that
            while connection.recv(65536):
                pass


def test_a_collector_is_an_http_address(service: Service) -> None:
    from penstock.monitor.otlp import exporting

    with pytest.raises(InvalidArgument, match="http://"), exporting(service.watcher, "nonsense"):
        pass
