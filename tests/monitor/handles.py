"""Handles as other processes keep them: blocks of counters that move by known numbers. Run as a program.

It reads commands from standard input, one a line, does each and answers ``ok``::

    open ROOM KIND NAME
    add NAME/KIND FIELD NUMBER        matched, delivered, bytes, ...
    set NAME/KIND FIELD NUMBER        depth, capacity, last_ns, ...
    drop NAME/KIND REASON NUMBER
    state NAME/KIND TEXT
    latency NAME/KIND NANOSECONDS     of one message
    close NAME/KIND
"""

from __future__ import annotations

import subprocess
import sys
import time
from types import TracebackType

from penstock import _core


def serve() -> None:
    handles: dict[str, _core.Counters] = {}
    for line in sys.stdin:
        verb, *words = line.split()
        if verb == "open":
            room, kind, name = words
            handles[f"{name}/{kind}"] = _core.Counters(room, kind, name)
        elif verb == "close":
            handles.pop(words[0]).close()
        elif verb == "state":
            handles[words[0]].state(" ".join(words[1:]))
        elif verb == "latency":
            handles[words[0]].note_latency(int(words[1]))
        elif verb == "drop":
            handles[words[0]].drop(words[1], int(words[2]))
        else:
            getattr(handles[words[0]], verb)(words[1], int(words[2]) if words[2] != "now" else time.time_ns())
        print("ok", flush=True)


class Handles:
    """The program above in a process of its own."""

    def __enter__(self) -> Handles:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def do(self, *commands: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        for command in commands:
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
            assert self.process.stdout.readline() == "ok\n", command


if __name__ == "__main__":
    serve()
