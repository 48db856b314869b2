"""``penstock serve``: answer each call by a process of a command.

Rules: the command is split into words here and no shell sees it; a request reaches it by standard input alone; at most
``--processes`` run at a time; one whose client no longer waits is killed, and so are all of them when this ends, by
kill -9 too: then the kernel does it, and what a command has started itself goes on.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import time
from typing import Annotated

import typer

import penstock
from penstock.calls import Request
from penstock.cli import exits, show
from penstock.cli.target import OptionList, ServiceArgument, with_options
from penstock.errors import InvalidArgument
from penstock.system import dying_with_parent

app = typer.Typer()
LOOK_S = 0.05  # how often to check whether the client of a running command still waits
MAX_ERROR_BYTES = 500
MAX_ANSWER_BYTES = 64 << 20
PIPE_BYTES = 1 << 16


class Failed(Exception):
    """The command ended with another code than 0."""


class Runner:
    """Runs the command for one request at a time in each worker."""

    def __init__(self, words: list[str], limit_s: float) -> None:
        self._words = words
        self._limit_s = limit_s
        self._prepare = dying_with_parent()

    def __call__(self, payload: bytes, request: Request) -> bytes | None:
        """Run the command and return its output. If it fails, the client is told; nothing is logged."""
        try:
            return self._run(payload, request)
        except Failed as failure:
            request.fail(str(failure))
            return None

    def _run(self, payload: bytes, request: Request) -> bytes:
        process = subprocess.Popen(
            self._words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=self._prepare,  # noqa: PLW1509 - two system calls, of a library that is loaded
        )
        try:
            output, errors = self._talk(process, payload, request)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # kill also what it has started: it leads a session of its own
            raise
        finally:
            for pipe in (process.stdin, process.stdout, process.stderr):
                assert pipe is not None
                with contextlib.suppress(OSError):  # what it did not read
                    pipe.close()
            process.wait()
        if process.returncode:
            said = errors.decode("utf-8", "replace").strip()[-MAX_ERROR_BYTES:]
            raise Failed(f"{self._words[0]} ended with code {process.returncode}{': ' if said else ''}{said}")
        return output

    def _talk(self, process: subprocess.Popen[bytes], payload: bytes, request: Request) -> tuple[bytes, bytes]:
        """Write its input and read its output until both are closed; check regularly whether the client still waits.
        ``communicate`` is not used: it stops writing at its first time-out, and its output has no bound.
        """
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        begun = time.monotonic()
        printed: dict[int, bytearray] = {pipe.fileno(): bytearray() for pipe in (process.stdout, process.stderr)}
        rest = memoryview(payload)
        with selectors.DefaultSelector() as selector:
            for descriptor in printed:
                selector.register(descriptor, selectors.EVENT_READ)
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
            while any(descriptor in selector.get_map() for descriptor in printed):
                for key, _ in selector.select(LOOK_S):
                    if key.fileobj is process.stdin:
                        rest = _feed(process.stdin.fileno(), rest)
                        if not rest:
                            selector.unregister(process.stdin)
                            with contextlib.suppress(OSError):
                                process.stdin.close()
                    elif part := os.read(key.fd, PIPE_BYTES):
                        self._keep(printed[key.fd], part, error=key.fd == process.stderr.fileno())
                    else:
                        selector.unregister(key.fileobj)
                if request.cancelled:
                    raise Failed("the client no longer waits")
                if time.monotonic() - begun > self._limit_s:
                    raise Failed(f"{self._words[0]} took longer than {self._limit_s:g} s (--limit)")
        output, errors = printed.values()
        return bytes(output), bytes(errors)

    def _keep(self, kept: bytearray, part: bytes, error: bool) -> None:
        kept += part
        if error:
            del kept[: -4 * MAX_ERROR_BYTES]  # the end of an error text says most
        elif len(kept) > MAX_ANSWER_BYTES:
            raise Failed(f"{self._words[0]} printed more than {MAX_ANSWER_BYTES >> 20} MiB")


def _feed(descriptor: int, rest: memoryview) -> memoryview:
    """Write as much as the pipe accepts; returns the rest. A command that has closed its input needs no more."""
    try:
        return rest[os.write(descriptor, rest[:PIPE_BYTES]) :]
    except BlockingIOError:
        return rest
    except OSError:
        return rest[:0]


@app.command()
def serve(
    address: ServiceArgument,
    command: Annotated[str, typer.Argument(help="The command; it reads a request from its standard input.")],
    processes: Annotated[int, typer.Option(min=1, max=256, help="How many may run at a time.")] = 4,
    limit: Annotated[float, typer.Option(min=0.1, help="Seconds after which a command is killed.")] = 60.0,
    option: OptionList = None,
    as_json: Annotated[bool, typer.Option("--json", help="Tell the address and the counts as JSON objects.")] = False,
) -> None:
    """Answer calls: each request runs the command once; what it prints is the answer.

    A command that ends with another code than 0 makes the call fail with what it said on standard error. No shell is
    involved: quote as you would for exec.

    Example: [green]penstock serve shm:/upper 'tr a-z A-Z'[/], then [green]penstock call shm:/upper hello[/]
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InvalidArgument(f"{command!r} is no command: {error}") from None
    if not words or shutil.which(words[0]) is None:
        raise InvalidArgument(f"{words[0] if words else command!r} is no command that can be run")
    runner = Runner(words, limit)
    with penstock.server(with_options(address, option), runner, workers=processes) as server:
        if as_json:
            show.print_json({"address": server.address, "port": server.port})
        else:
            print(f"answering calls at {server.address}; Ctrl-C ends", file=sys.stderr, flush=True)
        try:
            while True:
                time.sleep(3600)
        except exits.STOPPED:  # a service that was asked to stop has done its work
            ledger = server.ledger
            if as_json:
                show.print_json({"calls": ledger.matched, "answered": ledger.delivered})
            else:
                print(f"answered {ledger.delivered} of {ledger.matched} calls", file=sys.stderr)
