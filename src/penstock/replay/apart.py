"""Runs a call in a forked copy of this process, so that global state of modules is not changed here. Only for a process
whose other threads hold no locks that the call needs: the command has no other threads.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

from penstock import errors
from penstock._core import counters_hide
from penstock.errors import PenstockError, StateError
from penstock.gateway.stage import Failure
from penstock.replay.place import Place, keep_in
from penstock.replay.rule import Break, Shown, Verdict
from penstock.replay.run import Report
from penstock.system import dying_with_parent

__all__ = ["ProcessEnded", "apart"]

Result = TypeVar("Result")
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
RECORDS = {kind.__name__: kind for kind in (Break, Failure, Report, Shown, Verdict)}


class ProcessEnded(StateError):
    """The process ended without an answer: native code of a module ended it, or somebody killed it."""


def apart(function: Callable[[], Result]) -> Result:
    """Return or raise what ``function`` does, in a forked process. It must return a plain value, or a ``Verdict``. Of
    an error that is not Penstock's own only the text is passed on.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # otherwise the copy would print it again
    reading, writing = os.pipe()
    place = Place()
    die_with_parent = dying_with_parent()
    # Until the copy has its own handlers: the parent's would make it go on with the parent's work.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        child = os.fork()
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise
    if child == 0:
        die_with_parent()
        # Otherwise each replay would be a death, and drive those of the user's programs out of the file of deaths.
        counters_hide()
        keep_in(place)
        _leave_signals_to_parent()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(reading)
        _answer(function, writing)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(writing)
        with open(reading, "rb") as answer:
            given = answer.read()
    except BaseException:  # Ctrl-C, which may have reached only this process
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(child, 0)
    if not given:
        code = os.waitstatus_to_exitcode(status)
        how = f"by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"with code {code}"
        raise ProcessEnded(
            f"the process of a replay ended {how}, {place.get() or 'before the first input'}; native code of a module "
            "did that, or somebody else"
        )
    succeeded, result = _from_plain(json.loads(given))
    if not succeeded:
        kind = getattr(errors, result[0], None)
        known = isinstance(kind, type) and issubclass(kind, PenstockError)
        raise kind(result[1]) if known and kind is not None else StateError(": ".join(result))
    return cast("Result", result)


def _leave_signals_to_parent() -> None:
    """Ctrl-C reaches both processes, and the parent kills this one: an answer about it would come first or second."""
    for number in ENDING:
        # A function, since a program that is started would inherit that a signal is ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def _answer(function: Callable[[], object], writing: int) -> NoReturn:
    try:  # whatever happens, the copy must not continue the parent's work
        with open(writing, "wb") as answer:
            answer.write(_outcome(function))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(0)


def _outcome(function: Callable[[], object]) -> bytes:
    try:
        outcome = True, function()
    except BaseException as error:
        # an error class that only one room has becomes its nearest base class in `errors`; the text says the rest
        kinds = [kind.__name__ for kind in type(error).__mro__ if hasattr(errors, kind.__name__)]
        text = str(error) or ", ".join(getattr(error, "__notes__", ()))  # a KeyboardInterrupt has notes alone
        outcome = False, (kinds[0] if kinds else type(error).__name__, text)
    return json.dumps(_to_plain(outcome)).encode()


def _to_plain(value: Any) -> Any:
    """The value for JSON; a type that JSON does not have becomes an object with one key."""
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, tuple):
        return {"tuple": [_to_plain(one) for one in value]}
    if isinstance(value, list):
        return [_to_plain(one) for one in value]
    if isinstance(value, dict):
        return {"dict": [[_to_plain(key), _to_plain(one)] for key, one in value.items()]}
    if type(value).__name__ in RECORDS:
        fields = {field.name: _to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {type(value).__name__: fields}
    return value


def _from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_plain(one) for one in value]
    if not isinstance(value, dict):
        return value
    ((name, inner),) = value.items()
    if name == "bytes":
        return base64.b64decode(inner)
    if name == "tuple":
        return tuple(_from_plain(one) for one in inner)
    if name == "dict":
        return {_from_plain(key): _from_plain(one) for key, one in inner}
    return RECORDS[name](**{field: _from_plain(one) for field, one in inner.items()})
