"""A tap on the line: hands bytes on both ways and keeps a copy of all of them."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType


class Tap:
    """Between one client and a server on loopback; ``heard`` is what passed, of both directions."""

    def __init__(self, port: int) -> None:
        self.heard = bytearray()
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = [self._listener]
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Tap:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for one in self._sockets:
            one.close()

    def _serve(self) -> None:
        try:
            near, _ = self._listener.accept()
        except OSError:
            return  # nobody came
        far = socket.create_connection(("127.0.0.1", self._target))
        self._sockets += [near, far]
        back = threading.Thread(target=self._copy, args=(far, near))
        back.start()
        self._copy(near, far)
        back.join()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.heard += data
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
