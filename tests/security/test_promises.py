"""The promises of docs/security.md that no single room's tests show."""

from __future__ import annotations

import ast
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock
from penstock.journal import Journal

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
#: Modules, functions and methods with which data could become code.
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FUNCTIONS = {"eval", "exec", "compile", "__import__"}
METHODS = {"read_pickle", "to_pickle"}
#: What hands a command line to a shell, and the shells.
SHELL_CALLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell"}
SHELLS = {"sh", "bash", "dash", "zsh", "ksh"}
#: Torture mounts a small disk with a fixed line; Spark's Java and its Python workers are reached through fixed scripts.
SHELL_EXEMPT = {"src/penstock/torture/disk.py", "src/penstock/spark/java.py", "src/penstock/spark/session.py"}


def dotted(node: ast.AST) -> str:
    """``a.b`` as it is written; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def code_from_data(node: ast.AST) -> set[str]:
    """By what this node could make code of data."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES}
    if isinstance(node, ast.ImportFrom):
        module = (node.module or "").partition(".")[0]
        names = {alias.name for alias in node.names}
        return ({module} & MODULES) | (names & FUNCTIONS if module == "builtins" else names & METHODS)
    if isinstance(node, ast.Name):
        return {node.id} & FUNCTIONS if isinstance(node.ctx, ast.Load) else set()
    if isinstance(node, ast.Attribute):
        names = {node.attr} & FUNCTIONS if dotted(node.value).endswith("builtins") else set()
        return names | ({node.attr} & METHODS)
    if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
        return set() if isinstance(node.value, ast.Constant) and node.value.value is False else {"allow_pickle"}
    return set()


def shell(node: ast.AST) -> set[str]:
    """By what this node would have a shell read a line."""
    if isinstance(node, ast.Attribute):
        return {dotted(node)} & SHELL_CALLS
    if isinstance(node, ast.ImportFrom):
        return {f"{node.module}.{alias.name}" for alias in node.names} & SHELL_CALLS
    if isinstance(node, ast.keyword) and node.arg == "shell":
        return set() if isinstance(node.value, ast.Constant) and node.value.value is False else {"shell="}
    if isinstance(node, ast.List | ast.Tuple | ast.Call):
        words = node.args if isinstance(node, ast.Call) else node.elts
        texts = [word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)]
        return {text for text in texts if text.rpartition("/")[2] in SHELLS}
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {"#!"} if node.value.startswith("#!") else set()
    return set()


def found(by: Callable[[ast.AST], set[str]], text: str, path: str) -> list[str]:
    nodes = list(ast.walk(ast.parse(text)))
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    fixed = {id(call.func) for call in calls if all(isinstance(given, ast.Constant) for given in call.args)}
    return [f"{path}:{getattr(node, 'lineno', 0)} {name}" for node in nodes if id(node) not in fixed for name in by(node)]


def test_no_pickle_and_no_eval_anywhere() -> None:
    assert [line for path in SOURCES for line in found(code_from_data, path.read_text(), str(path.relative_to(ROOT)))] == []


def test_no_shell_is_used_but_in_three_places() -> None:
    using = {str(path.relative_to(ROOT)) for path in SOURCES if found(shell, path.read_text(), str(path))}
    assert using == SHELL_EXEMPT


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "import os, marshal", "from cloudpickle import loads", "eval(x)", "run = exec", "builtins.eval(x)",
        "from builtins import exec as run", "numpy.load(file, allow_pickle=True)", "numpy.load(file, allow_pickle=given)",
        "pandas.read_pickle(path)", "__import__(name)", "compile(text, name, 'exec')", "exec('' + x)", "exec(f'{x}')",
    ],
)  # fmt: skip
def test_the_search_for_pickle_and_eval_finds(text: str) -> None:
    assert found(code_from_data, text, "x")


@pytest.mark.parametrize(
    "text",
    [
        "run(line, shell=True)", "run(line, shell=given)", "os.system(line)", "from os import popen", "run(['sh', '-c', line])",
        "run([*more, '/bin/bash', script])", "os.execlp('sh', 'sh', '-c', line)", "SCRIPT = '#!/bin/sh'",
        "asyncio.create_subprocess_shell(line)",
    ],
)  # fmt: skip
def test_the_search_for_shells_finds(text: str) -> None:
    assert found(shell, text, "x")


def test_what_is_harmless_is_not_found() -> None:
    text = "re.compile(x); numpy.load(f, allow_pickle=False); run(['ls'], shell=False); frame.eval; 'sh'; 'push'"
    assert not found(code_from_data, text, "x") and not found(shell, text, "x")


def modes(directory: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.rglob("*") if path.is_file()}


def test_journal_files_are_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with Journal(tmp_path / "log", segment_bytes=1 << 16) as journal:
            for _ in range(3):
                journal.append("t", bytes(1 << 16))  # a segment each: the sealed ones have all files that there are
            journal.queue("q")
        found = modes(tmp_path / "log")
    finally:
        os.umask(before)
    endings = {Path(name).suffix for name in found}
    assert {".log", ".index", ".topics", ".sums"} <= endings, endings
    assert set(found.values()) == {0o600}, found
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o700


def test_shared_memory_files_are_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = """
import os, stat, sys
from pathlib import Path
import penstock
os.umask(0)
with penstock.publisher("shm:/private", slots=4) as publisher, penstock.subscriber("shm:/private") as subscriber:
    subscriber.read(0), subscriber.fileno()
    for path in Path(os.environ["PENSTOCK_SHM_DIR"]).rglob("*"):
        if not path.is_dir():
            print(path.name, oct(stat.S_IMODE(path.stat().st_mode)))
"""
    place = Path(os.environ["PENSTOCK_SHM_DIR"]) / "private-test"
    monkeypatch.setenv("PENSTOCK_SHM_DIR", str(place))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    place.rmdir()
    lines = done.stdout.splitlines()
    assert len(lines) >= 3
    assert [line for line in lines if int(line.split()[-1], 8) & 0o077] == []


def test_readers_map_payloads_read_only(tmp_path: Path) -> None:
    program = """
import penstock
with penstock.subscriber("shm:/maps") as subscriber:
    print("up", flush=True)
    message = subscriber.read(30)
    print(*[line for line in open("/proc/self/maps") if ".payload." in line], sep="")
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    with penstock.publisher("shm:/maps", slots=4) as publisher:
        assert publisher.wait_ready(1, timeout=60)
        publisher.publish(b"x")
        out, _ = child.communicate(timeout=60)
    lines = [line for line in out.splitlines() if ".payload." in line]
    assert lines and all(line.split()[1] == "r--s" for line in lines), out


def test_network_listeners_are_on_loopback_by_default(tmp_path: Path) -> None:
    """Whatever listens, with no word about where: every listening socket of this process is looked up in the kernel."""
    from penstock import tcp
    from penstock.broker import Server
    from penstock.monitor.service import Service

    with tcp.Publisher() as publisher, Server(tmp_path / "broker", 0).start() as server, Service(port=0) as page:
        page.start()
        ports = {publisher.port, server.port, int(re.search(r":(\d+)/", page.url)[1])}  # type: ignore[index]
        found: dict[int, set[str]] = {}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                _, place, _, state, *_ = line.split()
                host, _, port = place.rpartition(":")
                if state == "0A" and int(port, 16) in ports:
                    found.setdefault(int(port, 16), set()).add(host)
    assert found == {port: {"0100007F"} for port in ports}


def broker(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", "broker", str(tmp_path / "b"), "0", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_broker_off_loopback_needs_authentication(tmp_path: Path) -> None:
    done = broker(tmp_path, "--host", "0.0.0.0")
    assert done.returncode not in (0, -9)
    assert "insecure" in done.stderr + done.stdout and "Traceback" not in done.stderr
