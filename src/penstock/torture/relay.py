"""A relay on loopback that cuts the connections through it on request: sockets break while processes live on."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import Self


class Relay:
    """Copies bytes between its clients and ``port``. ``cut`` and ``close`` may be called by any thread."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._begin(self._accept)

    def cut(self) -> int:
        """Close every open connection in both directions; returns how many."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            _shut(pair)
        return len(pairs)

    def close(self) -> None:
        """Cut all connections, stop listening, and wait for the threads."""
        with self._lock:
            self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        self.cut()
        while True:
            with self._lock:
                threads = list(self._threads)
            if not threads:
                break
            for thread in threads:
                thread.join()
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, work: object, *arguments: object) -> None:
        def run() -> None:
            try:
                work(*arguments)  # type: ignore[operator]
            finally:
                with self._lock:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run, name="relay", daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._begin(self._serve, near)

    def _connect(self) -> socket.socket | None:
        """Connect to the server; waits while it is down, so that clients' own connect time-outs do not matter."""
        while not self._closed:
            try:
                return socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                time.sleep(0.01)
        return None

    def _serve(self, near: socket.socket) -> None:
        """Copy one direction in a new thread and the other here; the end of one ends both."""
        far = self._connect()
        if far is None:
            near.close()
            return
        pair = (near, far)
        with self._lock:
            self._pairs.add(pair)
            closed = self._closed
        if closed:
            _shut(pair)
        back = threading.Thread(target=_copy, args=(pair[1], pair[0]), name="relay", daemon=True)
        back.start()
        _copy(*pair)
        _shut(pair)
        back.join()
        with self._lock:
            self._pairs.discard(pair)
        for end in pair:
            end.close()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    _shut((source, sink))


def _shut(pair: tuple[socket.socket, socket.socket]) -> None:
    for end in pair:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
