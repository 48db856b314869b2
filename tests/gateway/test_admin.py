"""The admin socket: a gateway at work is looked at and changed from outside."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import InvalidArgument
from penstock.gateway import Gateway
from penstock.gateway.admin import MAX_CONNECTIONS, Admin, ask
from tests.gateway.conftest import Collector, eventually

COLLECTOR = {"name": "python", "entrypoint": "tests.gateway.conftest:Collector"}


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway(name="plant") as made:
        made.add_module("a", Collector)
        made.start()
        yield made


@pytest.fixture
def place(gateway: Gateway, tmp_path: Path) -> Iterator[Path]:
    admin = Admin(gateway, tmp_path / "admin")
    yield admin.path
    admin.close()
    assert not admin.path.exists()


def one(place: Path, do: str, **more: Any) -> Any:
    return next(ask(place, {"do": do, **more}))


def command(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", "gateway", *map(str, words)], capture_output=True, text=True, timeout=110
    )


def test_a_gateway_is_changed_while_it_runs(gateway: Gateway, place: Path) -> None:
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    one(place, "add", module={"name": "b", "loader": COLLECTOR})
    one(place, "link", link={"source": "a", "sink": "b"})
    gateway.module("a").publish(b"x")
    eventually(lambda: gateway.module("b").got == [b"x"])
    found = one(place, "list")
    assert (found["gateway"], found["links"]) == ("plant", [["a", "b"]])
    assert [(module["module"], module["life"], module["handled"]) for module in found["modules"]] == [
        ("a", "running", 0), ("b", "running", 1)]  # fmt: skip
    one(place, "unlink", source="a", sink="b")
    one(place, "remove", module="b")
    assert [module["module"] for module in one(place, "list")["modules"]] == ["a"]


@pytest.mark.parametrize(
    ("request_", "wanted"),
    [
        ({"do": "lits"}, "did you mean list"),
        ({"do": "remove"}, "'module' is missing"),
        ({"do": "remove", "module": "nobody"}, "there is no module 'nobody'"),
        ({"do": "unlink", "source": "a", "sink": "b"}, "there is no link a -> b"),
        ({"do": "add", "module": {"name": "x", "loader": {"name": "python", "entrypoint": "no.such:X"}}}, "importing"),
        ({"do": "link", "link": {"source": "a", "sink": "a", "delivry": 1}}, "did you mean delivery"),
        ({"do": 7}, "an object with"),
        ({"do": "pause", "module": []}, "."),
    ],
)
def test_what_is_wrong_is_answered_and_changes_nothing(
    gateway: Gateway, place: Path, request_: dict[str, Any], wanted: str
) -> None:
    with pytest.raises(InvalidArgument, match=wanted):
        next(ask(place, request_))
    assert [line.name for line in gateway.module_list()] == ["a"]
    assert gateway.links() == []


def test_lines_that_are_no_requests_are_answered_and_bounded(place: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(place))
        lines = connection.makefile("rb")
        for text in (b"[" * 100_000, b"\xff", b"no json", b"[]"):
            connection.sendall(text + b"\n")
            assert "error" in json.loads(lines.readline())
        lines.close()


def test_who_finds_no_room_is_told(place: Path) -> None:
    with contextlib.ExitStack() as idle:
        for _ in range(MAX_CONNECTIONS):
            connection = idle.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            connection.connect(str(place))
        for _ in range(20):
            with pytest.raises(InvalidArgument, match=f"closed the connection: it serves {MAX_CONNECTIONS} at once"):
                list(ask(place, {"do": "list"}))


def test_a_paused_module_receives_nothing_and_then_everything(gateway: Gateway, place: Path) -> None:
    gateway.add_module("b", Collector)
    gateway.add_link("a", "b")
    b = gateway.module("b")
    worker = gateway.broker.worker_of(b)
    b.gate.clear()
    for n in range(10):
        gateway.module("a").publish(b"%d" % n)
    eventually(lambda: worker.busy_since is not None)
    one(place, "pause", module="b")
    b.gate.set()
    eventually(lambda: worker.taken == 1 and worker.busy_since is None, "the one in hand is handled, no other")
    assert one(place, "list")["modules"][1]["life"] == "paused"
    gateway.module("a").publish(b"10")
    assert b.got == [b"0"]
    assert worker.waiting == 10
    one(place, "resume", module="b")
    eventually(lambda: b.got == [b"%d" % n for n in range(11)])


@pytest.mark.parametrize("how", ["destroy", "remove"])
def test_a_paused_module_handles_what_waits_before_its_end(gateway: Gateway, how: str) -> None:
    gateway.add_module("b", Collector)
    gateway.add_link("a", "b")
    b = gateway.module("b")
    gateway.pause("b")
    eventually(lambda: gateway.broker.worker_of(b).idle)
    gateway.module("a").publish(b"x")
    if how == "destroy":
        assert gateway.destroy()
    else:
        gateway.remove_module("b")
    assert (b.got, b.steps) == ([b"x"], ["create", "start", "stop", "destroy"])


def test_events_are_told_until_the_end(gateway: Gateway, place: Path) -> None:
    told: list[Any] = []
    asked = threading.Event()

    def listen() -> None:
        for event in ask(place, {"do": "events"}):
            asked.set()
            told.append(event)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    assert asked.wait(60)
    gateway.add_module("b", Collector)
    eventually(lambda: {"event": "module_list_changed", "context": [["a", []], ["b", []]]} in told)
    gateway.destroy()
    eventually(lambda: {"event": "destroyed", "context": None} in told)


def test_a_socket_that_answers_is_not_taken_over_and_a_dead_one_is(gateway: Gateway, place: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="another gateway answers"):
        Admin(gateway, place)
    dead = tmp_path / "dead"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(dead))
    Admin(gateway, dead).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="no socket"):
        Admin(gateway, tmp_path / "file")
    assert sorted(os.listdir(tmp_path)) == ["admin", "file"]


def test_the_command(gateway: Gateway, place: Path) -> None:
    added = command("add", place, "timer", "penstock.gateway.modules:Timer", "--args", '{"period_s": 0.01}')
    assert added.returncode == 0, added.stderr
    assert command("link", place, "timer", "a", "--options", '{"ttl_s": 5}').returncode == 0
    eventually(lambda: gateway.module("a").got)
    listed = command("list", place)
    assert "timer -> a" in listed.stdout
    assert "running" in listed.stdout
    assert json.loads(command("list", place, "--json").stdout)["gateway"] == "plant"
    wrong = command("remove", place, "tmier")
    assert wrong.returncode != 0
    assert "did you mean timer" in wrong.stderr
    absent = command("list", place.with_name("absent"))
    assert "no gateway answers" in absent.stderr


def test_the_command_tells_what_was_dropped(gateway: Gateway, place: Path) -> None:
    gateway.add_module("source", Collector)
    gateway.add_link("source", "a")
    sink = gateway.module("a")
    sink.gate.clear()
    for _ in range(4):
        gateway.module("source").publish(b"x")
    eventually(lambda: gateway.broker.worker_of(sink).busy_since is not None)
    done = command("remove", place, "a", "--drop", "--timeout", "0")
    sink.gate.set()
    assert (done.returncode, done.stdout) == (0, "a is removed; 4 messages that it had not handled were dropped\n"), done.stderr
    done = command("remove", place, "source", "--json")
    assert json.loads(done.stdout) == {"done": "remove", "lost": 0}


def test_a_signal_while_it_is_being_opened_leaves_no_socket(tmp_path: Path) -> None:
    file, place = tmp_path / "g.json", tmp_path / "admin"
    timer = {"name": "timer", "loader": {"name": "python", "entrypoint": "penstock.gateway.modules:Timer"}}
    file.write_text(json.dumps({"modules": [timer], "links": []}))
    words = [sys.executable, "-m", "penstock", "run", str(file), "--admin", str(place)]
    for _ in range(3):
        with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            eventually(place.exists)
            process.terminate()
            assert process.wait(60) == 0
        assert not place.exists()


def test_run_serves_it_and_takes_it_away_at_its_end(tmp_path: Path) -> None:
    file, place = tmp_path / "g.json", tmp_path / "admin"
    timer = {"name": "timer", "loader": {"name": "python", "entrypoint": "penstock.gateway.modules:Timer"}}
    file.write_text(json.dumps({"modules": [timer], "links": []}))
    words = [sys.executable, "-m", "penstock", "run", str(file), "--admin", str(place)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        eventually(place.exists)
        assert one(place, "list")["modules"][0]["module"] == "timer"
        process.terminate()
        assert process.wait(60) == 0
    assert not place.exists()


@pytest.mark.parametrize("do", ["list", "add", "events"])
def test_a_gateway_that_does_not_answer_is_told_of(tmp_path: Path, do: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as deaf:
        deaf.bind(str(tmp_path / "deaf"))
        deaf.listen(1)
        with pytest.raises(InvalidArgument, match=r"did not answer in 0\.05 s"):
            next(ask(tmp_path / "deaf", {"do": do}, patience_s=0.05))
