"""The promises of docs/security.md that no single room's tests show."""

from __future__ import annotations

import ast
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
#: Modules and functions with which data could become code.
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
FUNCTIONS = {"eval", "exec", "compile", "__import__"}


def test_no_pickle_and_no_eval_anywhere() -> None:
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            names: set[str] = set()
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names} & MODULES
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").partition(".")[0]} & MODULES
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names = {node.func.id} & FUNCTIONS
            found += [f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)} {name}" for name in names]
    assert found == []


def test_no_shell_is_ever_used() -> None:
    shell = re.compile(r"shell\s*=\s*True|os\.system\(|os\.popen\(")
    assert [path for path in SOURCES if shell.search(path.read_text())] == []


def modes(directory: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.rglob("*") if path.is_file()}


def test_journal_files_are_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with penstock.publisher(f"journal:{tmp_path / 'log'}#t") as publisher:
            publisher.publish(b"x")
            found = modes(tmp_path / "log")
    finally:
        os.umask(before)
    assert found and all(mode & 0o077 == 0 for mode in found.values()), found


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
