"""What a gateway needs to run as a service: readiness and health for others, a unit for systemd, a look at its files.

``notify`` speaks systemd's protocol (one datagram to ``$NOTIFY_SOCKET``); ``Health`` answers ``GET /health`` and
``GET /ready`` on loopback; ``Watch`` tells when a configuration file or the code of a module has changed.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import shlex
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.gateway import Configuration, Gateway

STOP_S = 20  # time for ending, beyond the time for draining, before systemd kills the service


def notify(text: str) -> None:
    """Notify systemd, if it has started this process and asked for it."""
    place = os.environ.get("NOTIFY_SOCKET")
    if not place:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.sendto(text.encode(), "\0" + place[1:] if place.startswith("@") else place)
        except OSError:
            return  # systemd is gone


def unit(file: Path, options: Iterable[str], drain_timeout_s: float) -> str:
    """A unit file that runs the gateway of ``file``."""
    words = [sys.executable, "-m", "penstock", "run", str(file.resolve()), *options]
    command = _plain(shlex.join([*words, "--drain-timeout", str(drain_timeout_s)])).replace("$", "$$")
    return f"""[Unit]
Description=Penstock gateway {_plain(file.stem)}
After=network-online.target
Wants=network-online.target

[Service]
Type=notify
NotifyAccess=main
ExecStart={command}
ExecReload=/bin/kill -HUP $MAINPID
Restart=on-failure
RestartSec=2
TimeoutStopSec={math.ceil(drain_timeout_s) + STOP_S if drain_timeout_s < math.inf else "infinity"}
WorkingDirectory={_plain(str(file.resolve().parent))}
EnvironmentFile=-{_plain(str(file.resolve().with_suffix(".env")))}
UMask=0077
NoNewPrivileges=true

[Install]
WantedBy=multi-user.target
"""


def _plain(text: str) -> str:
    """Escape % for a unit file, where it begins a specifier."""
    return text.replace("%", "%%")


def state(gateway: Gateway) -> dict[str, Any]:
    """The state of each module; healthy means that none has failed, is stuck or was abandoned, and that no source has
    ended in a failure for good.
    """
    modules = {}
    for info in gateway.modules():
        worker = gateway.broker.worker_of(info.handle)
        modules[info.name] = {
            "life": worker.life.value,
            "stuck": worker.stuck,
            "run_failed": worker.run_failed,
            "waiting": info.waiting,
            "handled": info.handled,
            "failed": info.failed,
            "filtered": info.ledger.dropped.get("filtered", 0),
            "lost": info.lost,
            "backlog": info.backlog,
        }
    ill = [name for name, one in modules.items() if one["life"] != "running" or one["stuck"] or one["run_failed"]]
    return {"healthy": not ill and not gateway.abandoned, "ill": ill, "modules": modules}


class Health:
    """``/ready``: every module runs. ``/health``: the same, with figures. 200, or 503 where that is not so."""

    def __init__(self, gateway: Gateway, port: int) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path not in ("/health", "/ready"):
                    self.send_error(404)
                    return
                found = state(gateway)
                body = json.dumps(found if self.path == "/health" else {"ready": found["healthy"]}).encode()
                self.send_response(200 if found["healthy"] else 503)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except OSError as error:
            told = f"--health cannot be answered at 127.0.0.1:{port}: {error.strerror}"
            raise type(error)(error.errno, told) from error
        self._server.daemon_threads = True
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="gateway health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()


class Watch:
    """Checks twice a second; ``changed`` is called with the names of the modules whose code has changed. Code means
    files that were imported from the configuration's folder. If the file of a class has changed, the modules of that
    class are created again; if any other file has changed, all of them, since any module may use it. For modules in
    their own processes, which import everything anew, only the file of the class is checked.
    """

    def __init__(
        self, file: Path, configuration: Callable[[], Configuration], changed: Callable[[list[str]], None]
    ) -> None:
        self._file = file
        self._beside = str(file.resolve().parent)
        self._configuration = configuration
        self._changed = changed
        self._ending = threading.Event()
        self._seen: dict[str, tuple[int, int]] = {}
        self._seen = self._file_stamps()
        self._thread = threading.Thread(target=self._run, name="gateway watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop checking."""
        self._ending.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._ending.wait(0.5):
            now = self._file_stamps()
            if now != self._seen:
                before, self._seen = self._seen, now
                different = {path for path in now if now[path] != before.get(path)}
                different &= {*before, *self._files()}  # files imported since the last check have not changed
                names = [*self._reloaded(different), *self._in_processes(different)]
                if names or not different.isdisjoint(self._files()):
                    self._changed(names)

    def _file_stamps(self) -> dict[str, tuple[int, int]]:
        found = {}
        for path in (*self._files(), *self._code(), *self._process_code()):
            try:
                there = os.stat(path)
            except OSError:  # it is being replaced: the next check finds it
                if path in self._seen:
                    found[path] = self._seen[path]
                continue
            found[path] = (there.st_mtime_ns, there.st_size)
        return found

    def _files(self) -> Iterable[str]:
        """The configuration's file, those that it includes, and its secrets."""
        return self._configuration().files or (str(self._file),)

    def _code(self) -> dict[str, ModuleType]:
        """The files imported from the configuration's folder; imported ones come before those that import them."""
        found = {}
        for name, module in sys.modules.copy().items():
            path = getattr(module, "__file__", None)
            top = os.path.join(self._beside, name.partition(".")[0])
            if isinstance(path, str) and (path == f"{top}.py" or path.startswith(f"{top}{os.sep}")):
                found[path] = module
        return found

    def _classes(self, *, in_process: bool) -> Iterable[tuple[str, str, str]]:
        """The name of each module, with its Python module and class."""
        configuration = self._configuration()
        kinds = {loader.name: loader.kind for loader in configuration.loaders}
        for entry in configuration.modules:
            kind = entry.entrypoint.get("class") if isinstance(entry.entrypoint, dict) else entry.entrypoint
            python, colon, cls = str(kind).partition(":")
            if colon and (kinds.get(entry.loader, entry.loader) == "process") is in_process:
                yield entry.name, python, cls.partition(".")[0]

    def _process_code(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, python, _ in self._classes(in_process=True):
            place = os.path.join(self._beside, *python.split("."))
            for path in (f"{place}.py", os.path.join(place, "__init__.py")):
                found.setdefault(path, []).append(name)
        return found

    def _in_processes(self, paths: set[str]) -> list[str]:
        return [name for path, names in self._process_code().items() if path in paths for name in names]

    def _reloaded(self, paths: set[str]) -> list[str]:
        """Reload these files; returns the names of the modules that must be created again."""
        code = self._code()
        users: dict[str, list[tuple[str, str]]] = {}
        for name, python, cls in self._classes(in_process=False):
            users.setdefault(python, []).append((name, cls))
        changed = [path for path in code if path in paths]
        if any(code[path].__name__ not in users for path in changed):
            changed = [*code]
        names: list[str] = []
        for path in changed:
            module = code[path]
            of_it = users.get(module.__name__, [])
            try:
                _reload(module, {cls for _, cls in of_it})
            except BaseException as error:  # SystemExit too: the watch goes on
                print(f"penstock: {path}: {type(error).__name__}: {error}; it stays as it was", file=sys.stderr)
                if not of_it:
                    return names  # modules that import it would get a half-loaded one
            else:
                names += [name for name, _ in of_it]
        return names


def _reload(module: ModuleType, classes: set[str]) -> None:
    """Reload a Python module. Names that its file no longer defines would stay, so a class that is missing now is
    reported.
    """
    before = {name: getattr(module, name, None) for name in classes}
    importlib.reload(module)
    for name, old in before.items():
        if getattr(module, name, None) is old and getattr(old, "__module__", None) == module.__name__:
            raise AttributeError(f"it has no {name!r} any more")
