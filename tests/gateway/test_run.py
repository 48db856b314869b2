"""``penstock run``: checking, running, reloading on SIGHUP, ending in order; and the example."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

import penstock
from penstock.cli.run import _Lines
from penstock.cli.service import Watch, state
from penstock.gateway import Event, Gateway, Policy, Restart, Source, read
from penstock.gateway.admin import ask
from tests.gateway.conftest import eventually

EDGE = Path(__file__).parents[2] / "examples" / "edge" / "gateway.json"
MODULES = "penstock.gateway.modules"
RUN = [sys.executable, "-m", "penstock", "run"]


def command(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "penstock", "run", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=110, **options)


def module(name: str, kind: str, **args: Any) -> dict[str, Any]:
    return {"name": name, "loader": {"name": "python", "entrypoint": f"{MODULES}:{kind}"}, "args": args}


def write(path: Path, modules: list[dict[str, Any]], links: list[tuple[str, str]]) -> Path:
    ends = [{"source": source, "sink": sink} for source, sink in links]
    path.write_text(json.dumps({"modules": modules, "links": ends}))
    return path


@contextmanager
def running(file: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """The command at work; gives it and the file that its standard error goes to."""
    errors = file.with_suffix(".errors")
    words = [sys.executable, "-m", "penstock", "run", str(file), *arguments]
    with errors.open("w") as target:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=target, text=True)
    try:
        eventually(lambda: "running" in errors.read_text() or process.poll() is not None)
        yield process, errors
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_check_prints_the_graph_and_starts_nothing(tmp_path: Path) -> None:
    timer = module("timer", "Timer")
    file = write(
        tmp_path / "g.json",
        [timer, module("a", "Logger"), module("b", "Logger")],
        [("timer", "a"), ("a", "b"), ("b", "a"), ("*", "bus:out")],
    )
    done = command(file, "--check", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["graph"]["timer"] == ["a", "bus:out"]
    assert found["cycles"] == [["a", "b"]]
    plain = command(file, "--check").stdout
    assert "timer" in plain
    assert "cycle: a -> b -> a" in plain


def test_check_prints_a_cycle_through_an_error_link(tmp_path: Path) -> None:
    file = write(tmp_path / "g.json", [module("timer", "Timer"), module("a", "Logger"), module("b", "Logger")], [])
    links = [{"source": "timer", "sink": "a"}, {"source": "a", "sink": "b", "max_tries": 2, "error": "a"}]
    file.write_text(json.dumps({**json.loads(file.read_text()), "links": links}))
    done = command(file, "--check")
    assert done.returncode == 0, done.stderr
    assert "cycle: a -> b -> a" in done.stdout


def test_check_says_how_each_link_delivers(tmp_path: Path) -> None:
    file = tmp_path / "g.json"
    lines = module("lines", "FileTail", file="in", place="place")
    links: list[dict[str, Any]] = [
        {"source": "lines", "sink": "up", "buffer": "journal:store"},
        {"source": "lines", "sink": "limit"},
        {"source": "limit", "sink": "up", "ordered": True, "error": "dead"},
        {"source": "limit.dropped", "sink": "dead", "filter": {"one_in": 2}},
        {"source": "broker://127.0.0.1:1/t?queue=q", "sink": "dead"},
        {"source": "*", "sink": "dead"},
    ]
    sinks = [module("limit", "Throttle"), module("up", "Logger"), module("dead", "Logger")]
    file.write_text(json.dumps({"modules": [lines, *sinks], "links": links}))
    wanted = [
        "link: lines -> up  at_least_once, buffer journal:store",
        "link: lines -> limit  at_least_once",
        "link: limit -> up  at_least_once, ordered, error dead",
        "link: limit.dropped -> dead  at_most_once, filter",
        "link: broker://127.0.0.1:1/t?queue=q -> dead  at_least_once",
        "link: * -> dead  at_least_once from durable sources, else at_most_once",
    ]
    plain = command(file, "--check")
    assert [line for line in plain.stdout.splitlines() if line.startswith("link: ")] == wanted, plain.stderr
    found = json.loads(command(file, "--check", "--json").stdout)["links"]
    assert found[0] == {
        "source": "lines", "sink": "up", "delivery": "at_least_once", "buffer": "journal:store"
    }  # fmt: skip


def test_the_closing_table_is_whole_when_it_is_piped(tmp_path: Path) -> None:
    name = "a module with a long name " * 4
    timer = module(name.strip(), "Timer", count=1)
    done = command(write(tmp_path / "g.json", [timer], []), "--seconds", "0.1")
    head, row = done.stdout.splitlines()
    assert head.split() == [
        "module", "received", "published", "failed", "filtered", "overflow", "expired", "stored", "backlog", "lost"
    ]  # fmt: skip
    assert row.startswith(name.strip())


def test_who_logs_a_line_is_told(tmp_path: Path) -> None:
    code = "import logging\nfrom penstock.gateway import Module\nclass Mine(Module):\n    def start(self):\n"
    (tmp_path / "mine.py").write_text(code + "        logging.getLogger('plant').warning('low oil')\n        1 / 0\n")
    file = write(tmp_path / "g.json", [{"name": "mine", "loader": {"name": "python", "entrypoint": "mine:Mine"}}], [])
    told = command(file).stderr
    assert "penstock: plant: low oil\n" in told and "penstock: module 'mine' failed in start" in told


def test_a_logger_without_a_file_logs_to_standard_error(tmp_path: Path) -> None:
    modules = [module("timer", "Timer", period_s=0.001, count=3), module("log", "Logger")]
    with running(write(tmp_path / "g.json", modules, [("timer", "log")])) as (process, errors):
        eventually(lambda: errors.read_text().count('"tick"') >= 3)
        process.terminate()
        process.communicate(timeout=60)
    assert "g.json: 2 modules, 1 link, running" in errors.read_text()
    lines = [json.loads(line.removeprefix("penstock: ")) for line in errors.read_text().splitlines() if "{" in line]
    assert [line["properties"]["tick"] for line in lines] == ["1", "2", "3"]
    assert {line["source"] for line in lines} == {"timer"}


def test_a_failure_is_one_line_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(
        "from penstock.gateway import Module\n"
        "class Fails(Module):\n"
        "    def receive(self, message):\n"
        "        raise OSError('the line is down')\n"
    )
    fails = {"name": "up", "loader": {"name": "python", "entrypoint": "failing:Fails"}}
    file = write(tmp_path / "g.json", [module("timer", "Timer", period_s=0.01, count=20), fails], [("timer", "up")])
    with running(file) as (process, errors):
        eventually(lambda: "the line is down" in errors.read_text())
        process.terminate()
        process.communicate(timeout=60)
    told = [line for line in errors.read_text().splitlines() if "the line is down" in line]
    assert len(told) == 1, told
    assert "up" in told[0]
    assert "OSError: the line is down" in told[0]
    assert "Traceback" not in errors.read_text()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('{\n"modules": [,\n', "g.json, line 2, column 13"),
        ('{"modules": [{"name": "a", "loader": {"name": "pyton", "entrypoint": "x:Y"}}], "links": []}',
         "modules[0].loader.name: 'pyton' is not a loader; did you mean python"),
        ('{"modules": [{"name": "a", "loader": {"name": "python", "entrypoint": "no.such:Y"}}], "links": []}',
         "importing 'no.such' failed"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("options", [(), ("--check",)])
def test_a_wrong_file_is_one_clear_line(tmp_path: Path, text: str, wanted: str, options: tuple[str, ...]) -> None:
    file = tmp_path / "g.json"
    file.write_text(text)
    done = command(file, *options)
    assert done.returncode != 0
    assert wanted in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


ENTRYPOINT = "modules[0].loader.entrypoint"


@pytest.mark.parametrize(
    ("entrypoint", "args", "wanted", "code"),
    [
        (f"{MODULES}:Nobody", None, f"{ENTRYPOINT}: '{MODULES}' has no", 2),
        ({"class": "no.such:Class"}, None, f"{ENTRYPOINT}.class: importing 'no.such' failed: ModuleNotFoundError", 2),
        ({"class": "json:dumps"}, None, f"{ENTRYPOINT}.class: 'json:dumps' is no class with a receive method", 2),
        ("broken:Module", None, f"{ENTRYPOINT}: importing 'broken' failed: OSError: not here", 2),
        ("needing:Module", None, f"{ENTRYPOINT}: importing 'needing' failed: ModuleNotFoundError: No module", 69),
        ("explaining:Module", None, f"{ENTRYPOINT}: install it", 69),
        (f"{MODULES}:Timer", {"period": 1}, "modules[0].args: 'period' is not known", 2),
        (f"{MODULES}:Timer", [1], "modules[0].args: ", 2),
        (
            {"activation": "launch", "path": "/nonexistent/program", "control_id": "x"}, None,
            f"{ENTRYPOINT}.path: there is no program '/nonexistent/program'", 2,
        ),
    ],
)  # fmt: skip
def test_check_and_run_refuse_alike_what_is_wrong_with_a_process(
    tmp_path: Path, entrypoint: Any, args: Any, wanted: str, code: int
) -> None:
    (tmp_path / "needing.py").write_text("import no_such_package\n")
    (tmp_path / "explaining.py").write_text(
        "from penstock.errors import InvalidArgument\n"
        "try:\n    import no_such_package\n"
        "except ImportError:\n    raise InvalidArgument('install it') from None\n"
    )
    (tmp_path / "broken.py").write_text("raise OSError('not here')\n")
    loader = {"name": "process", "entrypoint": entrypoint}
    file = write(tmp_path / "g.json", [{"name": "far", "loader": loader, "args": args}], [])
    for options in (("--check",), ("--seconds", "0")):
        done = command(file, *options)
        assert f"{file}: {wanted}" in done.stderr
        assert (done.stdout, done.stderr.count("\n"), done.returncode) == ("", 1, code)


def test_it_ends_by_itself_with_a_table_that_counts(tmp_path: Path) -> None:
    log = tmp_path / "log"
    timer = module("timer", "Timer", period_s=0.001, count=50)
    file = write(tmp_path / "g.json", [timer, module("log", "Logger", file=str(log))], [("timer", "log")])
    done = command(file, "--seconds", "2", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["module"]: row for row in json.loads(done.stdout)}
    assert rows["timer"]["published"] == rows["log"]["received"] == len(log.read_text().splitlines()) == 50
    assert rows["log"]["lost"] == rows["log"]["failed"] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_it_in_order(tmp_path: Path, number: int) -> None:
    log = tmp_path / "log"
    timer = module("timer", "Timer", period_s=0.005)
    file = write(tmp_path / "g.json", [timer, module("log", "Logger", file=str(log))], [("timer", "log")])
    with running(file, "--json") as (process, errors):
        eventually(lambda: log.exists() and len(log.read_text()) > 200)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, errors.read_text()
    rows = {row["module"]: row for row in json.loads(output)}
    assert rows["timer"]["published"] == rows["log"]["received"] == len(log.read_text().splitlines())


def test_a_signal_that_another_thread_gets_ends_it_too(tmp_path: Path) -> None:
    """As does one that comes between the main thread's last look and its sleep: neither wakes it."""
    (tmp_path / "ending.py").write_text(
        "import signal, threading\n"
        "from penstock.gateway import Source\n"
        "class Ends(Source):\n"
        "    def run(self):\n"
        "        self.stopping.wait(0.5)\n"  # the main thread sleeps by then, as a rule
        "        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)\n"
    )
    ends = {"name": "ends", "loader": {"name": "python", "entrypoint": "ending:Ends"}}
    done = command(write(tmp_path / "g.json", [ends], []))
    assert done.returncode == 0, done.stderr


def test_sighup_applies_the_difference_and_a_mistake_leaves_it_as_it_was(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    timer = module("timer", "Timer", period_s=0.005)
    one, two = module("one", "Logger", file=str(first)), module("two", "Logger", file=str(second))
    file = write(tmp_path / "g.json", [timer, one], [("timer", "one")])

    def lines(path: Path) -> int:
        return path.read_text().count("\n") if path.exists() else 0

    with running(file, "--json") as (process, errors):
        eventually(lambda: lines(first) > 3)
        write(file, [timer, two], [("timer", "two")])
        process.send_signal(signal.SIGHUP)
        eventually(lambda: "reloaded: - timer -> one, - one, + two, + timer -> two" in errors.read_text())
        stopped = lines(first)
        eventually(lambda: lines(second) > 3)
        for wrong in ('{"modules": [}', json.dumps({"modules": [], "links": [{"source": "x", "sink": "y"}]})):
            file.write_text(wrong)
            told = errors.read_text().count("goes on as it was")
            process.send_signal(signal.SIGHUP)
            eventually(lambda told=told: errors.read_text().count("goes on as it was") > told)
        before = lines(second)
        eventually(lambda: lines(second) > before + 3)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
    assert lines(first) == stopped
    rows = {row["module"]: row for row in json.loads(output)}
    assert set(rows) == {"timer", "two"}
    ticks = [int(json.loads(line)["properties"]["tick"]) for path in (first, second) for line in path.open()]
    assert ticks == sorted(set(ticks)), "the timer was not disturbed"
    assert rows["timer"]["published"] == ticks[-1]
    assert rows["two"]["received"] == lines(second)


def test_the_example_runs_and_everything_it_says_is_recorded(tmp_path: Path) -> None:
    assert len(read(EDGE).modules) == 6
    done = command(EDGE, "--seconds", "3", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {row["module"]: row for row in json.loads(done.stdout.splitlines()[-1])}
    assert all(row["lost"] == row["failed"] == 0 for row in rows.values())
    published = sum(rows[name]["published"] for name in ("boiler", "pump", "smoother", "alarm"))
    assert rows["recorder"]["received"] == published > 0
    with penstock.subscriber(f"journal:{tmp_path}/build/edge-record#edge.>", start="first") as reader:
        stored = 0
        while stored < published and (message := reader.read(10)) is not None:
            assert message.properties["deviceId"] in ("boiler", "pump")
            stored += 1
    assert stored == published


def test_a_program_that_forgets_its_gateway_ends_cleanly(tmp_path: Path) -> None:
    code = (
        "from penstock.gateway import Gateway\n"
        "from penstock.gateway.modules import Sensor, Metrics\n"
        "gateway = Gateway()\n"
        "gateway.add_module('metrics', Metrics)\n"
        "gateway.add_module('mapper', 'penstock.gateway.modules:PropertyMapper', loader='process')\n"
        "gateway.add_module('sensor', Sensor, {'rate_per_s': 0.0})\n"
        "for ends in (('sensor', 'mapper'), ('mapper', 'metrics')):\n"
        "    gateway.add_link(*ends)\n"
        "gateway.start()\n"
        "print('made')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "made\n"), done.stderr
    assert done.stderr == ""


def test_a_killed_gateway_takes_its_processes_with_it(tmp_path: Path) -> None:
    file = tmp_path / "gateway.json"
    file.write_text(EDGE.read_text().replace("build/", f"{tmp_path}/"))
    for name in ("alarm.py", "smoother.py"):
        (tmp_path / name).write_text((EDGE.parent / name).read_text())
    with running(file) as (process, _):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 1
        process.kill()
        process.wait()

        def gone() -> bool:
            try:
                return Path(f"/proc/{children[0]}/stat").read_text().split()[2] == "Z"
            except FileNotFoundError:
                return True

        eventually(gone, "the module's process has ended")


def test_the_schema_is_printed_without_a_file() -> None:
    import jsonschema

    found = json.loads(subprocess.run([*RUN, "--schema"], capture_output=True, text=True, check=True).stdout)
    example = json.loads(EDGE.read_text())
    jsonschema.validate(example, found)
    references = {"ordered": "${bool:A}", "delivery": "${A}", "overflow": "${A}", "buffer": "${A}"}
    example["links"][0] |= references
    example["modules"][0]["queue"] = {"overflow": "${A}"}
    jsonschema.validate(example, found)
    example["modules"][0]["nmae"] = "x"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(example, found)


def test_a_unit_file_is_printed(tmp_path: Path) -> None:
    file = write(tmp_path / "plant.json", [module("timer", "Timer")], [])
    admin = tmp_path / "plant.sock"
    text = command(file, "--systemd", "--health", "8080", "--admin", str(admin), "--watch").stdout
    assert "Type=notify" in text
    assert f"run {file} --health 8080 --admin {admin} --watch --drain-timeout" in text
    assert f"EnvironmentFile=-{tmp_path / 'plant.env'}\n" in text, "for what the file takes from the environment"


def test_a_unit_file_leaves_time_for_draining_and_takes_any_path(tmp_path: Path) -> None:
    directory = tmp_path / "100%n $HOME"
    directory.mkdir()
    file = write(directory / "g.json", [module("timer", "Timer")], [])
    text = command(file, "--systemd", "--drain-timeout", "60").stdout
    stop = re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert stop is not None and int(stop[1]) > 60
    assert "TimeoutStopSec=infinity\n" in command(file, "--systemd", "--drain-timeout", "inf").stdout
    assert f"run '{tmp_path}/100%%n $$HOME/g.json' --drain-timeout 60.0\n" in text
    assert f"WorkingDirectory={tmp_path}/100%%n $HOME\n" in text


def test_a_port_that_is_taken_is_told_by_its_number(tmp_path: Path) -> None:
    file = write(tmp_path / "g.json", [module("timer", "Timer")], [])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run([*RUN, str(file), "--health", str(port)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and f"--health cannot be answered at 127.0.0.1:{port}: Address already in use" in done.stderr


def test_it_is_ready_healthy_and_watches_its_files(tmp_path: Path) -> None:
    told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    told.bind(str(tmp_path / "notify"))
    told.settimeout(60)
    code = tmp_path / "mine.py"
    text = "from penstock.gateway import Module\nclass Mine(Module):\n    def start(self): print('{}', flush=True)\n"
    code.write_text(text.format("first"))
    mine = {"name": "mine", "loader": {"name": "python", "entrypoint": "mine:Mine"}}
    file = write(tmp_path / "g.json", [mine], [])
    environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), "PYTHONDONTWRITEBYTECODE": "1"}
    command_line = [*RUN, str(file), "--watch", "--health", "0"]
    out, err = (tmp_path / "out").open("w"), (tmp_path / "err").open("w")
    with out, err, subprocess.Popen(command_line, stdout=out, stderr=err, env=environment) as process:
        try:
            assert told.recv(100) == b"READY=1"
            port = int(re.search(r"127\.0\.0\.1:(\d+)/health", (tmp_path / "err").read_text())[1])  # type: ignore[index]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
                found = json.loads(answer.read())
            assert found["healthy"] and found["modules"]["mine"]["life"] == "running"
            code.write_text(text.format("second time"))
            eventually(lambda: "second time" in (tmp_path / "out").read_text())
            write(file, [mine, module("timer", "Timer", period_s=60)], [])
            eventually(lambda: "+ timer" in (tmp_path / "err").read_text())
        finally:
            process.terminate()
            process.wait(60)
    assert told.recv(100) == b"STOPPING=1"
    told.close()


def test_included_files_and_secrets_are_watched_too(tmp_path: Path) -> None:
    more, secret, file = tmp_path / "more.json", tmp_path / "secret", tmp_path / "g.json"
    secret.write_text("one")
    more.write_text(json.dumps({"modules": [module("tick", "Timer", content="of ${file:secret}, $${file:none}")]}))
    file.write_text(json.dumps({"include": ["more.json"], "links": []}))
    changes: list[list[str]] = []
    watch = Watch(file, lambda: read(file), changes.append)
    try:
        for count, one in enumerate((more, secret, file), 1):
            one.write_text(one.read_text() + "\n")
            eventually(lambda: len(changes) == count)  # noqa: B023
    finally:
        watch.close()


MINE = "import {0}help\nfrom penstock.gateway import Module\n\n\nclass Mine(Module):\n    word = {0}help.WORD\n"


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """A directory with a configuration, code of its own and what that imports; and the name that the code begins with."""
    name = f"beside_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}help.py").write_text("WORD = 'one'\n")
    (tmp_path / f"{name}.py").write_text(MINE.format(name))
    entries = [{"name": where, "loader": {"name": where, "entrypoint": f"{name}:Mine"}} for where in ("python", "process")]
    write(tmp_path / "g.json", entries, [])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    importlib.import_module(name)
    yield tmp_path, name
    for loaded in (name, f"{name}help"):
        del sys.modules[loaded]


def test_what_a_modules_code_imports_from_beside_is_watched_too(beside: tuple[Path, str]) -> None:
    directory, name = beside
    changes: list[list[str]] = []
    watch = Watch(directory / "g.json", lambda: read(directory / "g.json"), changes.append)
    try:
        (directory / f"{name}help.py").write_text("WORD = 'another'\n")
        eventually(lambda: changes == [["python"]])
        assert sys.modules[name].Mine.word == "another"
        (directory / f"{name}.py").write_text(MINE.format(name) + "    more = 1\n")
        eventually(lambda: changes == [["python"], ["python", "process"]])
        assert sys.modules[name].Mine.more == 1
    finally:
        watch.close()


@pytest.mark.parametrize(("wrong", "why"), [("raise SystemExit(3)\n", "SystemExit: 3"), ("def\n", "SyntaxError"),
                                            ("class Other: pass\n", "it has no 'Mine' any more")])  # fmt: skip
def test_code_that_cannot_be_loaded_is_told_and_watched_on(
    beside: tuple[Path, str], capsys: pytest.CaptureFixture[str], wrong: str, why: str
) -> None:
    directory, name = beside
    changes: list[list[str]] = []
    told = ""
    watch = Watch(directory / "g.json", lambda: read(directory / "g.json"), changes.append)
    try:
        (directory / f"{name}.py").write_text(wrong)
        eventually(lambda: changes == [["process"]], "its process says itself what is wrong")
        told = capsys.readouterr().err
        assert f"{name}.py: " in told and why in told and "it stays as it was" in told
        (directory / f"{name}.py").write_text(MINE.format(name))
        eventually(lambda: changes == [["process"], ["python", "process"]])
    finally:
        watch.close()


def test_events_of_one_kind_about_one_module_are_told_once_in_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    lines = _Lines()
    for name in ("a", "b", "a", "a"):
        lines.tell(cast(Any, None), Event.MODULE_FAILED, (name, "receive", OSError("100 % gone")), None)
    lines.tell(cast(Any, None), Event.MODULE_STUCK, ("a", 1.0123), None)
    assert capsys.readouterr().err.splitlines() == [
        "penstock: module failed: a receive 100 % gone",
        "penstock: module failed: b receive 100 % gone",
        "penstock: module stuck: a 1.0 s",
    ]


def test_it_answers_that_it_is_not_ready_while_its_modules_start(tmp_path: Path) -> None:
    code = "import pathlib, time\nfrom penstock.gateway import Module\nclass Slow(Module):\n    def start(self):\n"
    (tmp_path / "slow.py").write_text(code + "        while not pathlib.Path('go').exists(): time.sleep(0.01)\n")
    file = write(tmp_path / "g.json", [{"name": "slow", "loader": {"name": "python", "entrypoint": "slow:Slow"}}], [])
    err = tmp_path / "err"

    def ready(port: int) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=60) as answer:
                return bool(json.loads(answer.read())["ready"])
        except urllib.error.HTTPError as error:
            assert error.code == 503
            return False

    command_line = [*RUN, str(file), "--health", "0"]
    with (
        err.open("w") as errors,
        subprocess.Popen(command_line, cwd=tmp_path, stdout=errors, stderr=errors) as process,
    ):
        try:
            eventually(lambda: "/health" in err.read_text())
            port = int(re.search(r"127\.0\.0\.1:(\d+)/health", err.read_text())[1])  # type: ignore[index]
            assert not ready(port) and "running" not in err.read_text()
            (tmp_path / "go").touch()
            eventually(lambda: ready(port))
        finally:
            process.terminate()
            process.wait(60)


@pytest.mark.parametrize("policy", [Policy.NEVER, Policy.ON_FAILURE])
def test_a_source_that_has_given_up_is_not_healthy(policy: Policy) -> None:
    """It publishes nothing any more, and nobody would be told by a device that is watched by ``/health`` alone."""

    class Broken(Source):
        def run(self) -> None:
            raise OSError("no such sensor")

    with Gateway() as gateway:
        restart = Restart(policy, limit=1, backoff_s=0.01, max_backoff_s=0.01)
        gateway.add_module("sensor", Broken, restart=restart)
        gateway.start()
        # Before that it is ill and well in turn, as it is started again.
        eventually(lambda: bool(state(gateway)["modules"]["sensor"]["run_failed"]))
        found = state(gateway)
        assert found["ill"] == ["sensor"] and not found["healthy"] and found["modules"]["sensor"]["life"] == "running"


SLOW = """
import pathlib, time
from penstock.gateway import Module, Source
class Many(Source):
    def run(self):
        for number in range(500): self.publish(b"%d" % number)
        pathlib.Path("published").touch()
class Slow(Module):
    def start(self): pathlib.Path("started").touch()
    def receive(self, message):
        time.sleep(0.05)
"""


def slow(tmp_path: Path) -> Path:
    (tmp_path / "slow.py").write_text(SLOW)
    modules = [{"name": n, "loader": {"name": "python", "entrypoint": f"slow:{n.title()}"}} for n in ("many", "slow")]
    return write(tmp_path / "g.json", modules, [("many", "slow")])


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_while_it_drains_ends_it_with_its_table(tmp_path: Path, first: int) -> None:
    file, err = slow(tmp_path), tmp_path / "err"
    told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    told.bind(str(tmp_path / "notify"))
    told.settimeout(60)
    command_line = [*RUN, str(file), "--json", "--drain-timeout", "10000"]
    environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")}
    with (
        told,
        err.open("w") as errors,
        subprocess.Popen(command_line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=errors, env=environment) as process,
    ):
        try:
            assert told.recv(100) == b"READY=1"
            eventually((tmp_path / "published").exists)
            process.send_signal(first)
            assert told.recv(100) == b"STOPPING=1"
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, err.read_text()
    rows = {row["module"]: row for row in json.loads(output)}
    assert rows["slow"]["lost"] > 0 and rows["slow"]["received"] + rows["slow"]["lost"] == 500
    assert "interrupted" in err.read_text() and "dropped and counted" in err.read_text()


def test_the_last_words_tell_how_long_it_drained(tmp_path: Path) -> None:
    done = command(slow(tmp_path), "--seconds", "1", "--drain-timeout", "1", cwd=tmp_path)
    assert done.returncode == 1
    told = re.search(r"not everything was handled in (\d+\.\d) s; what was left is dropped and counted", done.stderr)
    assert told is not None and float(told[1]) >= 0.5, done.stderr


@pytest.mark.parametrize("option", ["--health", "--admin"])
def test_a_door_that_cannot_be_opened_is_told_before_any_module_starts(tmp_path: Path, option: str) -> None:
    file = slow(tmp_path)
    (tmp_path / "there").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = str(taken.getsockname()[1]) if option == "--health" else str(tmp_path / "there")
        done = command(file, option, where, cwd=tmp_path)
    assert done.returncode in (1, 2)
    assert option in done.stderr and where in done.stderr and "running" not in done.stderr
    assert not (tmp_path / "started").exists()


def test_its_admin_socket_answers_while_its_modules_start(tmp_path: Path) -> None:
    code = "import pathlib, time\nfrom penstock.gateway import Module\nclass Slow(Module):\n    def start(self):\n"
    (tmp_path / "slow.py").write_text(code + "        while not pathlib.Path('go').exists(): time.sleep(0.01)\n")
    file = write(tmp_path / "g.json", [{"name": "slow", "loader": {"name": "python", "entrypoint": "slow:Slow"}}], [])
    admin, err = tmp_path / "admin.sock", tmp_path / "err"

    def lives() -> dict[str, str]:
        return {one["module"]: one["life"] for one in next(ask(admin, {"do": "list"}))["modules"]}

    command_line = [*RUN, str(file), "--admin", str(admin)]
    with (
        err.open("w") as errors,
        subprocess.Popen(command_line, cwd=tmp_path, stdout=errors, stderr=errors) as process,
    ):
        try:
            eventually(admin.exists)
            assert lives()["slow"] != "running"
            kind = {"name": "python", "entrypoint": f"{MODULES}:Printer"}
            next(ask(admin, {"do": "add", "module": {"name": "late", "loader": kind}}))
            assert lives()["late"] in ("running", "made", "starting"), "it starts with the others, or by itself"
            (tmp_path / "go").touch()
            eventually(lambda: lives() == {"slow": "running", "late": "running"})
        finally:
            process.terminate()
            process.wait(60)
    assert process.returncode == 0, err.read_text()
