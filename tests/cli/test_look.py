"""``ls``, ``info``, ``top``, ``hz``, ``bw``: what they print is what other processes counted."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.bus import Bus
from tests.monitor.handles import Handles

from .command import HERE, environment, run, start


@pytest.fixture
def name() -> str:
    return f"/test-look-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def handles(name: str) -> Iterator[Handles]:
    with Handles() as running:
        running.do(
            f"open shm publisher {name}", f"add {name}/publisher matched 120", f"add {name}/publisher delivered 120",
            f"add {name}/publisher bytes 12000", f"set {name}/publisher last_ns now",
            f"open shm subscriber {name}", f"add {name}/subscriber matched 120", f"add {name}/subscriber delivered 100",
            f"drop {name}/subscriber overflow 15", f"set {name}/subscriber depth 5", f"set {name}/subscriber capacity 8",
            f"set {name}/subscriber lag 7",
        )  # fmt: skip
        yield running


def test_ls_prints_every_handle(handles: Handles, name: str) -> None:
    done = run("ls", f"shm:{name}")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and all(str(handles.pid) in line for line in lines[1:])
    publisher, subscriber = lines[1].split(), lines[2].split()
    assert publisher[:2] == [f"shm:{name}", "publisher"] and "120" in publisher and "12" in publisher
    assert "100" in subscriber and "15" in subscriber and "7" in subscriber


def test_ls_json_balances(handles: Handles, name: str) -> None:
    records = [json.loads(line) for line in run("ls", f"shm:{name}", "--json").stdout.splitlines()]
    by_kind = {record["kind"]: record for record in records}
    assert by_kind["subscriber"]["dropped"]["overflow"] == 15
    assert by_kind["subscriber"]["in_flight"] == 120 - 100 - 15
    assert by_kind["publisher"]["address"] == f"shm:{name}"


def test_ls_of_nothing() -> None:
    assert "nobody" in run("ls", "shm:/test-nothing-of-this-name").stdout


def test_info_shows_the_books(handles: Handles, name: str) -> None:
    done = run("info", f"shm:{name}")
    assert done.returncode == 0, done.stderr
    assert "matched 120 = delivered 100 + dropped 15 + expired 0 + in flight 5" in done.stdout
    assert "15 overflow" in done.stdout


def test_subscribers_of_a_bus_are_shown_on_it_by_their_names(name: str) -> None:
    place = f"bus:{name.strip('/')}"
    with Bus(place.removeprefix("bus:"), mode="direct") as bus, bus.subscribe(1, name="cars"):
        bus.subscribe(2, kind="callback", handler=print, name="lights")
        told = [line.split()[:2] for line in run("ls", place).stdout.splitlines()]
        assert [f"{place}?subscriber=cars", "queue"] in told and [f"{place}?subscriber=lights", "callback"] in told
        assert f"queue {place}?subscriber=cars in process {os.getpid()}" in run("info", place).stdout


def test_top_json_and_plain(handles: Handles, name: str) -> None:
    done = run("top", "--count", "2", "--every", "0.2", "--match", name, "--json")
    looks = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(looks) == 2
    assert {row["kind"]: row["lost"] for row in looks[-1]["rows"]} == {"publisher": 0, "subscriber": 15}
    assert f"shm:{name}" in run("top", "--count", "1", "--every", "0.1", "--match", name).stdout


def test_hz_and_bw_count_what_was_added(handles: Handles, name: str) -> None:
    running = start("hz", f"shm:{name}", "--count", "3", "--every", "0.5", "--window", "60", "--json")
    for _ in range(10):
        handles.do(f"add {name}/publisher matched 10", f"add {name}/publisher bytes 100")
    assert running.stdout is not None
    first = json.loads(running.stdout.readline())
    for _ in range(10):
        handles.do(f"add {name}/publisher matched 10", f"add {name}/publisher bytes 100")
    out, _ = running.communicate(timeout=60)
    last = json.loads(out.splitlines()[-1])
    counted = last["messages_hz"] * last["window_s"]
    assert 100 - 1e-6 <= counted <= 200 + 1e-6 and abs(counted / 10 - round(counted / 10)) < 1e-6
    assert last["bytes_hz"] == pytest.approx(10 * last["messages_hz"])
    assert first["of"] == "1 publisher"
    assert "messages/s" in run("hz", f"shm:{name}", "--count", "1", "--every", "0.1").stdout
    assert "a message" in run("bw", f"shm:{name}", "--count", "1", "--every", "0.1").stdout


def test_rates_of_nobody_are_refused() -> None:
    done = run("hz", "shm:/test-nothing-of-this-name")
    assert done.returncode == 1 and "nobody" in done.stderr


def test_ls_watches_in_json_too(handles: Handles, name: str) -> None:
    watching = start("ls", f"shm:{name}", "--watch", "0.1", "--json")
    assert watching.stdout is not None
    lines = [json.loads(watching.stdout.readline()) for _ in range(6)]
    watching.send_signal(signal.SIGTERM)
    _, err = watching.communicate(timeout=60)
    assert [line["kind"] for line in lines] == ["publisher", "subscriber"] * 3
    assert watching.returncode == 143 and not err


def test_ls_prints_each_look_into_a_pipe(handles: Handles, name: str) -> None:
    watching = start("ls", f"shm:{name}", "--watch", "0.1")
    assert watching.stdout is not None
    lines = [watching.stdout.readline() for _ in range(6)]
    watching.send_signal(signal.SIGTERM)
    _, err = watching.communicate(timeout=60)
    assert [line.split()[1] for line in lines] == ["kind", "publisher", "subscriber"] * 2
    assert watching.returncode == 143 and not err


@pytest.mark.parametrize("words", ["top --every 0.1", "ls --watch 0.1"])
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"])
def test_a_view_ends_with_the_same_code_on_a_terminal(words: str, number: signal.Signals, code: int) -> None:
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [*HERE, *words.split()], stdin=theirs, stdout=theirs, stderr=subprocess.PIPE,
            env=environment(TERM="xterm"), start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        drawn = b""
        while drawn.count(b"address") < 2:  # in the midst of its work
            drawn += os.read(ours, 1 << 16)
        process.send_signal(number)
        threading.Thread(target=_read_all, args=(ours,), daemon=True).start()
        _, err = process.communicate(timeout=60)
        assert process.returncode == code and not err
    finally:
        os.close(ours)


def _read_all(terminal: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(terminal, 1 << 16):
            pass


def test_what_waits_is_the_same_in_ls_and_info(handles: Handles, name: str) -> None:
    record = json.loads(run("ls", f"shm:{name}", "--json").stdout.splitlines()[1])
    told = run("info", f"shm:{name}").stdout.partition("subscriber in process")[2]
    assert record["lag"] == 7 and "waiting        7" in told and "held           5 of 8" in told


def test_calls_have_a_row_for_each_side_and_no_more(name: str) -> None:
    def serve(data: bytes) -> bytes:
        if data == b"no":
            raise ValueError("no")
        return data

    with penstock.server(f"shm:{name}", serve), penstock.client(f"shm:{name}") as client:
        assert client.wait_ready(1, 60) and bytes(client.call(b"x", 60)) == b"x"
        with pytest.raises(penstock.CallFailed):
            client.call(b"no", 60)
        rows = [json.loads(line) for line in run("ls", f"shm:{name}", "--json").stdout.splitlines()]
        assert {row["kind"]: (row["matched"], row["lost"]) for row in rows} == {"client": (2, 0), "server": (2, 0)}
        assert len(rows) == 2
        assert len(run("ls", f"shm:{name}", "--all", "--json").stdout.splitlines()) > 2
        looks = run("top", "-n", "1", "--every", "0.1", "--match", name, "--json").stdout
        assert len(json.loads(looks)["rows"]) == 2


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert f"no folder {tmp_path}/absent" in run("ls", PENSTOCK_SHM_DIR=f"{tmp_path}/absent").stdout


def test_why_prints_where_only_ascii_is() -> None:
    done = run("why", "shm:/test-nobody-here", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", LC_ALL="C")
    assert done.returncode == 4 and "-> penstock pub" in done.stdout, done.stderr


def test_options_that_cannot_be_right_are_wrong_usage() -> None:
    assert run("pub", "shm:/test-x?slots=abc", "hi").returncode == 2
    done = run("pub", "-O", "nosuch=1", "shm:/test-x", "hi")
    assert done.returncode == 2 and "has no option 'nosuch'" in done.stderr, done.stderr
    assert "timeout=30" not in done.stderr
