"""A part of the demo from both sides: ``Part`` in the parent, ``Stage`` in the process itself."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from penstock.errors import StateError

__all__ = ["Part", "Stage"]

TELL_S = 10.0


class Stage:
    """The part's own side: its configuration, when to stop, and how to report."""

    def __init__(self, configuration: dict[str, Any]) -> None:
        self.configuration = configuration
        self.stop = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._wait_for_the_end, name="end", daemon=True).start()

    def _wait_for_the_end(self) -> None:
        sys.stdin.read()
        self.stop.set()

    def tell(self, **report: Any) -> None:
        """One report to the parent."""
        with self._lock:
            try:
                print(json.dumps(report), flush=True)
            except (BrokenPipeError, ValueError):
                self.stop.set()


class Part:
    """A running part: its newest report, and how it ended."""

    def __init__(self, role: str, configuration: dict[str, Any], log: Path, environment: dict[str, str] | None = None):
        self.role = role
        self.report: dict[str, Any] = {}
        self.log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "penstock.cli.demo", role],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env={**os.environ, **(environment or {})},
                process_group=0,  # so that Ctrl-C on a terminal reaches only the parent, from the start
            )  # fmt: skip
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(configuration) + "\n")
        self.process.stdin.flush()
        self._reader = threading.Thread(target=self._read, name=f"demo {role}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # otherwise a line of something else, such as Spark's Java
                self.report = {**self.report, **json.loads(line)}

    @property
    def failed(self) -> bool:
        return self.process.poll() not in (None, 0)

    def wait_for(self, word: str, timeout: float) -> None:
        """Wait for a report with ``word``; if the part has ended instead, raise an error with its last log line."""
        deadline = time.monotonic() + timeout
        while word not in self.report:
            if self.process.poll() is not None or time.monotonic() > deadline:
                ended = f"ended with code {self.process.poll()}" if self.process.poll() is not None else "is too slow"
                raise StateError(f"the demo's {self.role} {ended}: {self.last_words()}")
            time.sleep(0.02)

    def last_words(self) -> str:
        """The last line that it wrote to its log."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"nothing in {self.log}"

    def end(self, timeout: float) -> bool:
        """Ask it to end and wait, saying so every ten seconds. One that does not end is killed: False."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        ended, began = False, time.monotonic()
        while not ended and (left := began + timeout - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(min(left, TELL_S))
                ended = True
            if not ended and left > TELL_S:
                print(f"waiting for {self.role}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        if not ended:
            self.process.kill()
            self.process.wait()
        self._reader.join(5)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return ended
