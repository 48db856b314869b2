"""A call in a copy of this process, so that what modules keep outside of themselves changes nothing here.

Only for a process whose other threads hold no locks that the call needs: the command has none.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar, cast

from penstock.errors import StateError

__all__ = ["apart"]

Result = TypeVar("Result")


def apart(function: Callable[[], Result]) -> Result:
    """What ``function`` gives or raises, in a forked process. What it gives can be pickled."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # else the copy would print it again
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _answer(function, writing)
    os.close(writing)
    try:
        with open(reading, "rb") as answer:
            given = answer.read()
    except BaseException:  # Ctrl-C, which may have come to this process alone
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(child, 0)
    if not given:
        raise StateError(f"a replay ended its process (code {os.waitstatus_to_exitcode(status)})")
    succeeded, result = pickle.loads(given)  # noqa: S301  # written by this very program
    if not succeeded:
        raise result
    return cast("Result", result)


def _answer(function: Callable[[], object], writing: int) -> NoReturn:
    try:  # whatever happens, the copy does not go on with its parent's work
        with open(writing, "wb") as answer:
            answer.write(_outcome(function))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(0)


def _outcome(function: Callable[[], object]) -> bytes:
    try:
        return pickle.dumps((True, function()))
    except KeyboardInterrupt:  # the parent has got it too
        return b""
    except BaseException as error:
        return _pickled(error)


def _pickled(error: BaseException) -> bytes:
    try:
        given = pickle.dumps((False, error))
        pickle.loads(given)  # noqa: S301  # an error with arguments of its own often cannot be made again
    except Exception:
        return pickle.dumps((False, StateError(f"{type(error).__name__}: {error}")))
    return given
