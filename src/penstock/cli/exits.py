"""How a command ends: the exit codes, and what is printed when something failed.

=====  =====================================================================
0      done (a service that is at its work and is asked to stop by Ctrl-C, SIGTERM or SIGHUP has done it too)
1      failed: the line on standard error says what and what to do
2      wrong usage: an argument or option that cannot be right, or that names a file that does not exist
3      the time was over before what was asked for had happened
4      a check found something wrong (``doctor``, ``why``, ``journal verify``)
69     something is not installed; the line says how to install it
129    the terminal is gone (SIGHUP)
130    Ctrl-C
141    the reader of the output went away (``| head``)
143    told to end (SIGTERM)
=====  =====================================================================
"""

from __future__ import annotations

import errno
import functools
import io
import logging
import os
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from penstock.cli.signals import ENDING, handle
from penstock.errors import CorruptionError, InvalidArgument, PenstockError, describe, nearest
from penstock.printable import printable

__all__ = [
    "FAILED", "USAGE", "TIME_OVER", "WRONG", "NOT_INSTALLED", "INTERRUPTED", "STOPPED",
    "Terminated", "choice", "ending", "escape_logs", "guard", "let_output_vanish", "log_to_stderr",
    "need_output", "told", "undisturbed", "unwinding",
]  # fmt: skip

FAILED, USAGE, TIME_OVER, WRONG, NOT_INSTALLED = 1, 2, 3, 4, 69
INTERRUPTED, PIPE_CLOSED = 130, 141
#: Refusal codes of a broker that mean a wrong argument, as if the command itself had checked it.
WRONG_WORDS = ("bad_name", "bad_number", "bad_option", "unknown_queue")


class Terminated(BaseException):
    """SIGTERM or SIGHUP came: unwinds through every ``with`` block like Ctrl-C does."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(number)
        self.number = number

    @property
    def code(self) -> int:
        """The exit code, as a shell gives it."""
        return 128 + self.number


OUTPUT = "standard output"

#: Which of stdout and stderr were closed when this began.
closed: set[str] = set()

#: How a person (Ctrl-C), a supervisor (SIGTERM) or a terminal that closes (SIGHUP) ends a command: handled alike.
STOPPED = (KeyboardInterrupt, Terminated)


def choice(value: str, valid: Sequence[str], option: str) -> str:
    """``value`` if it is one of ``valid``."""
    if value not in valid:
        raise InvalidArgument(f"{option} {value!r} is not a choice; {nearest(value, valid)}")
    return value


@contextmanager
def undisturbed() -> Iterator[None]:
    """Delay Ctrl-C, SIGTERM and SIGHUP until the end of the block, for example between opening something and noting
    that it must be closed. For short blocks of the main thread."""
    # A signal mask would not help: another thread would take the signal, and Python would run the handler in this one.
    noted: list[int] = []
    before = {number: signal.getsignal(number) for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, lambda came, _frame: noted.append(came))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if noted:
            signal.raise_signal(noted[0])


def unwinding(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a command's function: once it runs, Ctrl-C, SIGTERM and SIGHUP unwind the stack."""

    def raise_terminated(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _forget_terminal()
        raise Terminated(number)

    @functools.wraps(function)
    def begun(*arguments: Any, **options: Any) -> Any:
        sys.unraisablehook = _send_again
        handle(signal.default_int_handler, raise_terminated)
        return function(*arguments, **options)

    return begun


def _forget_terminal() -> None:
    """Discard output to a terminal that is gone: its error must not change how a command ends."""
    for descriptor in (1, 2):
        looked = select.poll()
        looked.register(descriptor, 0)
        if any(state & (select.POLLHUP | select.POLLERR) for _, state in looked.poll(0)) and _is_device(descriptor):
            hole = os.open(os.devnull, os.O_WRONLY)
            os.dup2(hole, descriptor)
            os.close(hole)


def _is_device(descriptor: int) -> bool:
    return stat.S_ISCHR(os.fstat(descriptor).st_mode)


def _send_again(dropped: sys.UnraisableHookArgs) -> None:
    """Send the signal again if its exception was raised in a finaliser or a callback, and so was lost."""
    if not issubclass(dropped.exc_type, STOPPED):
        sys.__unraisablehook__(dropped)
        return
    number = dropped.exc_value.number if isinstance(dropped.exc_value, Terminated) else signal.SIGINT
    threading.Thread(target=_send_outside, args=(number, threading.get_ident()), daemon=True).start()


def _send_outside(number: int, thread: int) -> None:
    """Send a signal when ``thread`` has left ``_send_again``, where the exception would be lost like the first."""
    while _is_inside(thread):
        time.sleep(0.001)
    os.kill(os.getpid(), number)


def _is_inside(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not _send_again.__code__:
        frame = frame.f_back
    return frame is not None


def let_output_vanish() -> None:
    """If standard output was closed at the start, discard what is printed instead of failing."""
    if "stdout" in closed:
        _forget_output()


def need_output() -> None:
    """For a command that waits: fail at once if its output cannot be written."""
    if "stdout" in closed:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


@contextmanager
def about(path: Path) -> Iterator[None]:
    """An error of the file system in this block names ``path``, if it names no file itself."""
    try:
        yield
    except OSError as error:
        if error.errno:  # a TimeoutError of a peer has none
            error.filename = error.filename or str(path)
        raise


def told(text: str) -> None:
    """Print one line on standard error, in red on a terminal; text of peers and files is escaped."""
    line = f"penstock: {printable(text)}"
    try:
        if sys.stderr.isatty() and "NO_COLOR" not in os.environ:
            line = f"\x1b[31m{line}\x1b[0m"
        print(line, file=sys.stderr, flush=True)
    except (BrokenPipeError, ValueError):
        pass


class _Printable(logging.Formatter):
    """Escapes text of peers, files and programs in log lines."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _Named(_Printable):
    """Adds the logger's name to lines that are not Penstock's own: a library's, or a program's."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.name.partition(".")[0] not in ("penstock", "root"):
            record.message = f"{record.name}: {record.message}"
        return super().formatMessage(record)


def log_to_stderr(text: str | None = None, level: int = logging.WARNING) -> None:
    """Send the rooms' log lines to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Named("penstock: %(message)s") if text is None else _Printable(text))
    logging.basicConfig(level=level, handlers=[handler])


def escape_logs() -> None:
    """Escape log lines, also if a command has not called ``log_to_stderr``."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Printable("%(message)s"))


@contextmanager
def ending() -> Iterator[None]:
    """Around the whole run: what happens outside a command (help, completion, the last flush) ends as quietly.

    The libraries that print help and errors turn a closed pipe into ``SystemExit(1)``; here it becomes 141, so that
    ``penstock --help | head`` is no failure.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            closed.add(name)
            setattr(sys, name, _closed_stream(1 if name == "stdout" else 2))
    if sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _named(sys.stdout)
    try:
        yield
        code = 0
    except SystemExit as end:
        code = PIPE_CLOSED if isinstance(end.__context__, BrokenPipeError) else _number(end.code)
    except BrokenPipeError:
        code = PIPE_CLOSED
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Terminated as end:
        code = end.code
    except OSError as error:
        _print_error(error)
        code = FAILED
    code = _flushed(code)
    # After Ctrl-C inside an exec() of text (dataclasses are made by one), `python -m` ends by the signal, whatever the
    # code is. Another exec() makes Python forget it.
    exec("")  # noqa: S102
    raise SystemExit(code)


class _Output(io.FileIO):
    """Standard output; its errors name it."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = OUTPUT
            raise


def _named(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    raw = _Output(1, "w", closefd=False)
    return io.TextIOWrapper(
        raw if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",  # a payload that cannot be encoded is no failure
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _closed_stream(descriptor: int) -> TextIO:
    """Replaces a stream that was closed at the start: writing to standard output fails, to standard error does nothing.
    The descriptor must be occupied, otherwise the next file that is opened gets it, and everything that is printed.
    """
    flags = os.O_RDONLY if descriptor == 1 else os.O_WRONLY
    taken = os.open(os.devnull, flags)
    if taken != descriptor:
        os.dup2(taken, descriptor)
        os.close(taken)
    return open(descriptor, "w", closefd=False)


def _print_error(error: BaseException) -> None:
    nowhere = isinstance(error, OSError) and error.errno == errno.EBADF and "stdout" in closed
    told(f"{OUTPUT} is closed: there is nowhere to print to" if nowhere else describe(error))
    if nowhere or (isinstance(error, OSError) and error.filename == OUTPUT):
        _forget_output()  # the unwritten rest is still buffered, and would fail again


def _number(code: object) -> int:
    if isinstance(code, int):
        return code
    return 0 if code is None else FAILED


def _flushed(code: int) -> int:
    """The exit code, after the output was flushed, or can never be."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = PIPE_CLOSED
    except OSError as error:
        _print_error(error)
        code = FAILED if code in (0, WRONG) else code  # the result of a check was lost with the output
        _forget_output()
    if code == PIPE_CLOSED:
        _forget_output()
    return code


@contextmanager
def guard(extras: dict[str, str]) -> Iterator[None]:
    """Turns whatever a command raises into one line and an exit code."""
    import typer

    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt as end:
        for note in getattr(end, "__notes__", ()):
            told(note)
        raise typer.Exit(INTERRUPTED) from None
    except Terminated as end:
        raise typer.Exit(end.code) from None
    except BrokenPipeError:
        _forget_output()
        raise typer.Exit(PIPE_CLOSED) from None
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in extras:
            raise
        told(f"this needs the package {name!r}: pip install 'penstock[{extras[name]}]'")
        raise typer.Exit(NOT_INSTALLED) from None
    except (PenstockError, OSError, TimeoutError, ValueError, TypeError) as error:
        if os.environ.get("PENSTOCK_DEBUG"):
            raise
        _print_error(error)
        if isinstance(error, CorruptionError):
            _print_remedy(error)
        raise typer.Exit(_code(error)) from None


def _print_remedy(error: CorruptionError) -> None:
    """How to repair the journal in which the damage is, unless the error says so itself."""
    from penstock.journal.layout import MARKER_NAME
    from penstock.journal.recovery import mended_by

    directory = os.path.dirname(error.place or "")
    if os.path.exists(os.path.join(directory, MARKER_NAME)) and (remedy := mended_by(directory)) not in str(error):
        told(remedy)


def _code(error: BaseException) -> int:
    # a room has explained the missing package itself
    if isinstance(error.__cause__ or error.__context__, ModuleNotFoundError):
        return NOT_INSTALLED
    if isinstance(error, TimeoutError):
        return TIME_OVER
    if getattr(error, "code", "") in WRONG_WORDS or _names_no_file(error):
        return USAGE
    return USAGE if isinstance(error, InvalidArgument | TypeError) else FAILED


def _names_no_file(error: BaseException) -> bool:
    """Whether the command line names a file that does not exist, by itself or in an option of an address."""
    if not isinstance(error, FileNotFoundError) or not error.filename:
        return False
    name = os.fsdecode(error.filename)
    return any(name == given or given.endswith(f"={name}") or f"={name}&" in given for given in sys.argv[1:])


def _forget_output() -> None:
    """Nothing more can be written: the interpreter's last flush must not complain about that.

    Standard error goes too where it is the same pipe (``2>&1 | head``); a terminal or a file is left as it is.
    """
    hole = os.open(os.devnull, os.O_WRONLY)
    output, errors = os.fstat(1), os.fstat(2)
    os.dup2(hole, 1)
    if (output.st_dev, output.st_ino) == (errors.st_dev, errors.st_ino) and stat.S_ISFIFO(errors.st_mode):
        os.dup2(hole, 2)
    os.close(hole)
