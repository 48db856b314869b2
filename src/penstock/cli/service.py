"""What a gateway needs to run as a service: readiness and health for others, a unit for systemd, a look at its files.

``notify`` speaks systemd's protocol (one datagram to ``$NOTIFY_SOCKET``); ``Health`` answers ``GET /health`` and
``GET /ready`` on loopback; ``Watch`` tells when a configuration file or the code of a module has changed.
"""

from __future__ import annotations

import importlib
import json
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


def notify(text: str) -> None:
    """Tell systemd, where it started this and wants to know."""
    place = os.environ.get("NOTIFY_SOCKET")
    if not place:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.sendto(text.encode(), "\0" + place[1:] if place.startswith("@") else place)
        except OSError:
            return  # systemd has gone: nothing to tell


def unit(file: Path, options: Iterable[str]) -> str:
    """A unit file that runs the gateway of ``file``."""
    command = shlex.join([sys.executable, "-m", "penstock", "run", str(file.resolve()), *options])
    return f"""[Unit]
Description=Penstock gateway {file.stem}
After=network-online.target
Wants=network-online.target

[Service]
Type=notify
NotifyAccess=main
ExecStart={command}
ExecReload=/bin/kill -HUP $MAINPID
Restart=on-failure
RestartSec=2
TimeoutStopSec=30
WorkingDirectory={file.resolve().parent}
UMask=0077
NoNewPrivileges=true

[Install]
WantedBy=multi-user.target
"""


def state(gateway: Gateway) -> dict[str, Any]:
    """How each module is: healthy means that none has failed or is stuck or abandoned."""
    modules = {}
    for info in gateway.modules():
        worker = gateway.broker.worker_of(info.handle)
        modules[info.name] = {
            "life": worker.life.value,
            "stuck": worker.stuck,
            "waiting": info.waiting,
            "handled": info.handled,
            "failed": info.failed,
            "filtered": info.ledger.dropped.get("filtered", 0),
            "lost": info.lost,
            "backlog": info.backlog,
        }
    ill = [name for name, one in modules.items() if one["life"] != "running" or one["stuck"]]
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

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="gateway health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()


class Watch:
    """Looks twice a second; ``changed`` is called with the names of the modules whose code has changed."""

    def __init__(
        self, file: Path, configuration: Callable[[], Configuration], changed: Callable[[list[str]], None]
    ) -> None:
        self._file = file
        self._configuration = configuration
        self._changed = changed
        self._ending = threading.Event()
        self._seen = self._look()
        self._thread = threading.Thread(target=self._run, name="gateway watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._ending.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._ending.wait(0.5):
            now = self._look()
            if now != self._seen:
                different = [path for path in now if now[path] != self._seen.get(path)]
                self._seen = now
                names = self._reloaded(different)
                if names or not set(different).isdisjoint(self._files()):
                    self._changed(names)

    def _look(self) -> dict[str, tuple[int, int]]:
        found = {}
        for path in (*self._files(), *self._code()):
            try:
                there = os.stat(path)
            except OSError:
                continue  # it is being replaced: the next look finds it
            found[path] = (there.st_mtime_ns, there.st_size)
        return found

    def _files(self) -> Iterable[str]:
        """The configuration's file, those that it includes, and its secrets."""
        return self._configuration().files or (str(self._file),)

    def _code(self) -> dict[str, list[tuple[str, ModuleType]]]:
        """The files of the modules' classes, beside the configuration, with who uses them."""
        found: dict[str, list[tuple[str, ModuleType]]] = {}
        for entry in self._configuration().modules:
            kind = entry.entrypoint.get("class") if isinstance(entry.entrypoint, dict) else entry.entrypoint
            module = sys.modules.get(str(kind).partition(":")[0])
            path = getattr(module, "__file__", None)
            if module is not None and path is not None and Path(path).resolve().parent == self._file.resolve().parent:
                found.setdefault(path, []).append((entry.name, module))
        return found

    def _reloaded(self, paths: list[str]) -> list[str]:
        code, names = self._code(), []
        for path in paths:
            for name, module in code.get(path, ()):
                try:
                    importlib.reload(module)
                except Exception as error:
                    print(f"penstock: {path}: {type(error).__name__}: {error}; it stays as it was", file=sys.stderr)
                else:
                    names.append(name)
        return names
