"""The monitor's API: figures equal to the counters, metrics, health, who is let in, what is refused."""

from __future__ import annotations

import dataclasses
import http.client
import json
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from penstock import InvalidArgument

pytest.importorskip("starlette")

from penstock.monitor.service import Service
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
    while "a look failed" not in caplog.text:
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


def visit(url: str) -> tuple[int, bytes, Any]:
    """One answer, redirections not followed."""

    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            return None

    try:
        with urllib.request.build_opener(Stay).open(url, timeout=30) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers


def test_token_is_needed_off_loopback(handles: Handles) -> None:
    with Service("0.0.0.0", 0) as running:
        running.start()
        assert running.token is not None and len(running.token) > 16
        port = re.search(r":(\d+)/", running.url)[1]  # type: ignore[index]
        url = f"http://127.0.0.1:{port}/"
        assert get(url)[0] == 401 and get(url + "api/state")[0] == 401 and get(url + "metrics")[0] == 401
        assert get(url + "?token=wrong-token-wrong")[0] == 401
        assert get(url + "api/state", Authorization=f"Bearer {running.token}")[0] == 200
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
        events = threading.Thread(target=lambda: get(url + "api/events"), daemon=True)
        events.start()  # a page that stays open must not keep the service from ending
        running.send_signal(number)
        _, err = running.communicate(timeout=60)
        assert running.returncode == 0 and "Traceback" not in err, err
        events.join(30)
    finally:
        running.kill()
        running.wait()


def test_a_taken_port_is_told_in_one_line(service: Service) -> None:
    from ..cli.command import run

    port = re.search(r":(\d+)/", service.url)[1]  # type: ignore[index]
    done = run("monitor", "--port", port)
    assert done.returncode == 1 and port in done.stderr and "Traceback" not in done.stderr
