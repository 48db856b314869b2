"""The admin socket: other processes of the same user inspect a running gateway and change it.

A Unix socket of mode 0600. A request is a JSON object on a line, ``{"do": WORD, ...}``; its answer is a line, ``{"ok":
...}`` or ``{"error": TEXT}``. After ``events`` a line follows for each event until the client disconnects. A
connection's requests are answered one after the other, on a thread of its own; at most ``MAX_CONNECTIONS`` are served.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.address import without_secrets
from penstock.errors import InvalidArgument, PenstockError, nearest
from penstock.gateway.events import Event

if TYPE_CHECKING:
    from penstock.gateway.gateway import Gateway

MAX_LINE_BYTES = 1 << 20
MAX_CONNECTIONS = 16
MAX_WAITING = 1024
ANSWER_S = 10.0  # how long a client waits for an answer that needs no waiting
CHANGE_S = 120.0  # how long it waits for a change: modules and endpoints are started, or drained, before the answer
MAX_TIMEOUT_S = 1e6  # a longer time-out of a request counts as none


class Admin:
    """Serves one gateway until ``close``."""

    def __init__(self, gateway: Gateway, path: str | Path) -> None:
        self._gateway = gateway
        self.path = Path(path)
        self._words: dict[str, Callable[[dict[str, Any]], Any]] = {
            "list": self._list, "add": self._add, "remove": self._remove, "link": self._link, "unlink": self._unlink,
            "pause": self._pause, "resume": self._resume,
        }  # fmt: skip
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._listeners: set[queue.Queue[dict[str, Any] | None]] = set()
        self._closed = False
        self._socket = _bound(self.path)
        for event in Event:
            gateway.add_event_callback(event, self._send_event)
        self._thread = threading.Thread(target=self._accept, name=f"{gateway.name} admin reader", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        with self._lock:
            self._closed = True
            connections, listeners = list(self._connections), list(self._listeners)
        self.path.unlink(missing_ok=True)
        for connection in (self._socket, *connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for listener in listeners:
            with contextlib.suppress(queue.Full):
                listener.put_nowait(None)
        self._thread.join()
        self._socket.close()

    # ---- connections

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # the listening socket was shut down
            with self._lock:
                refused = self._closed or len(self._connections) >= MAX_CONNECTIONS
                if not refused:
                    self._connections.add(connection)
            if refused:
                connection.close()
            else:
                name = f"{self._gateway.name} admin connection reader"
                threading.Thread(target=self._serve, args=(connection,), name=name, daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rb") as lines, contextlib.suppress(OSError):
                while line := lines.readline(MAX_LINE_BYTES + 1):
                    if len(line) > MAX_LINE_BYTES:
                        _send(connection, {"error": f"a request is at most {MAX_LINE_BYTES} bytes"})
                        return
                    for answer in self._answers(line):
                        _send(connection, answer)
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _answers(self, line: bytes) -> Iterator[dict[str, Any]]:
        try:
            request = json.loads(line)
            if not isinstance(request, dict) or not isinstance(request.get("do"), str):
                raise InvalidArgument('a request is an object with "do"')
            word = request.pop("do")
            if word == "events":
                yield from self._events()
                return
            if word not in self._words:
                raise InvalidArgument(f"{word!r} is not known; {nearest(word, (*self._words, 'events'))}")
            yield {"ok": self._words[word](request)}
        except KeyError as error:
            yield {"error": f"{error.args[0]!r} is missing"}
        except (PenstockError, OSError, ValueError, TypeError, RecursionError) as error:
            yield {"error": f"{error}"}

    # ---- words

    def _list(self, _: dict[str, Any]) -> Any:
        modules = []
        for info in self._gateway.modules():
            worker = self._gateway.broker.worker_of(info.handle)
            modules.append({
                "module": info.name, "kind": info.kind, "life": "paused" if worker.paused else worker.life.value,
                "stuck": worker.stuck, "waiting": info.waiting, "handled": info.handled, "published": info.published,
                "failed": info.failed, "filtered": info.ledger.dropped.get("filtered", 0), "lost": info.lost,
                "backlog": info.backlog,
            })  # fmt: skip
        links = [[without_secrets(end) for end in link.ends] for link in self._gateway.links()]
        return {"gateway": self._gateway.name, "modules": modules, "links": links}

    def _add(self, request: dict[str, Any]) -> None:
        self._gateway.update({"modules": [request["module"]]})

    def _remove(self, request: dict[str, Any]) -> Any:
        drain, timeout = bool(request.get("drain", True)), float(request.get("timeout", 10.0))
        return {"lost": self._gateway.remove_module(request["module"], drain=drain, timeout=timeout)}

    def _link(self, request: dict[str, Any]) -> None:
        self._gateway.update({"links": [request["link"]]})

    def _unlink(self, request: dict[str, Any]) -> None:
        ends = request["source"], request["sink"]
        if ends not in [link.ends for link in self._gateway.links()]:
            raise InvalidArgument(f"there is no link {without_secrets(ends[0])} -> {without_secrets(ends[1])}")
        self._gateway.remove_link(*ends)

    def _pause(self, request: dict[str, Any]) -> None:
        self._gateway.pause(request["module"])

    def _resume(self, request: dict[str, Any]) -> None:
        self._gateway.resume(request["module"])

    # ---- events

    def _send_event(self, _: Any, event: Event, context: Any, __: Any) -> None:
        with self._lock:
            listeners = list(self._listeners)
        if event is Event.MODULE_LIST_CHANGED:
            context = [[one.name, list(one.sources)] for one in context]
        parts = [str(one) if isinstance(one, BaseException) else one for one in context] if isinstance(
            context, tuple
        ) else context  # fmt: skip
        for listener in listeners:
            with contextlib.suppress(queue.Full):  # a client that does not read misses events
                listener.put_nowait({"event": event.value, "context": parts})

    def _events(self) -> Iterator[dict[str, Any]]:
        listener: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_WAITING)
        with self._lock:
            self._listeners.add(listener)
        try:
            yield {"ok": None}
            while not self._closed:
                try:
                    told = listener.get(timeout=1.0)
                except queue.Empty:
                    continue
                if told is None:
                    return
                yield told
        finally:
            with self._lock:
                self._listeners.discard(listener)


def ask(path: str | Path, request: dict[str, Any], patience_s: float | None = None) -> Iterator[Any]:
    """Yield the answers of the gateway at ``path``; after ``events``, each event. ``patience_s``: how long to wait for
    an answer; None: as long as such a request may take.
    """
    if patience_s is None:
        quick = request.get("do") in ("list", "pause", "resume", "events")
        patience_s = ANSWER_S if quick else CHANGE_S + min(float(request.get("timeout", 0.0)), MAX_TIMEOUT_S)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(patience_s)
        try:
            connection.connect(str(path))
        except OSError as error:
            raise InvalidArgument(f"no gateway answers at {path}: {error.strerror}; see penstock run --admin") from None
        try:
            yield from _answers_to(connection, path, request)
        except TimeoutError:
            raise InvalidArgument(
                f"the gateway at {path} did not answer in {patience_s:g} s: it is stopped, or busy with another change"
            ) from None


def _answers_to(connection: socket.socket, path: str | Path, request: dict[str, Any]) -> Iterator[Any]:
    # it disconnected; its last answer may still be readable
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        _send(connection, request)
    with connection.makefile("rb") as lines:
        for line in _until_hung_up(lines):
            answer = json.loads(line)
            if "error" in answer:
                raise InvalidArgument(answer["error"])
            connection.settimeout(None)  # the next event may be far away
            yield answer.get("ok") if "ok" in answer else answer
            if request.get("do") != "events":
                return
    if request.get("do") != "events":
        raise InvalidArgument(f"the gateway at {path} closed the connection: it serves {MAX_CONNECTIONS} at once")


def _until_hung_up(lines: Iterable[bytes]) -> Iterator[bytes]:
    with contextlib.suppress(ConnectionResetError):
        yield from lines


def _send(connection: socket.socket, data: dict[str, Any]) -> None:
    connection.sendall(json.dumps(data, default=str).encode() + b"\n")


def _bound(path: Path) -> socket.socket:
    """A listening socket of mode 0600 at ``path``. It is set up under a temporary name, so that nobody can connect
    before its mode is set.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise InvalidArgument(f"{path} is there and is no socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(ConnectionRefusedError):
            probe.connect(str(path))
            raise InvalidArgument(f"another gateway answers at {path}")
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        made.bind(str(temporary))
        temporary.chmod(0o600)
        made.listen(MAX_CONNECTIONS)
        temporary.replace(path)
    except OSError as error:
        made.close()
        temporary.unlink(missing_ok=True)
        raise InvalidArgument(f"no socket can be made at {path}: {error}") from None
    return made
