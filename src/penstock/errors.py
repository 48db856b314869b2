"""Errors: whose fault it is and what can be done.

Bad arguments are ``ValueError`` or ``TypeError``, time-outs ``TimeoutError``, failures of the system ``OSError``;
errors that only Penstock has are the few classes under ``PenstockError``.
"""

from __future__ import annotations

import difflib
import os
import sys
import warnings
from collections.abc import Iterable
from typing import Any


class PenstockError(Exception):
    """Base class of the errors that only Penstock raises."""


class InvalidArgument(PenstockError, ValueError):
    """The caller's fault: a value that cannot be right, named in the text."""


class ClosedError(PenstockError):
    """The handle was closed, or its peer has gone for good."""


class UnreachedError(ClosedError):
    """A broker could not be reached for as long as its subscriber's time-out; the next read tries again."""


class StateError(PenstockError):
    """A step out of order: published twice, released twice, used before it was set up."""


class CapacityError(PenstockError):
    """A bound was reached; the text says which one, and which process holds what."""


class CorruptionError(PenstockError):
    """Bytes on disk or in shared memory are not what they must be; ``place`` says where. ``positions``, where a
    journal's reader knows them: the first damaged one, and the next one after the damage.
    """

    positions: tuple[int, int] | None = None

    def __init__(self, text: str, place: str | None = None) -> None:
        super().__init__(text)
        self.place = place


class DecodeError(PenstockError, ValueError):
    """A message does not match its subscriber's type; the text says where, ``message`` has the bytes."""

    def __init__(self, text: str, message: Any = None) -> None:
        super().__init__(text)
        self.message = message


class ProtocolError(PenstockError):
    """The peer's fault: what it sent breaks the protocol."""


class RefusedError(PenstockError):
    """The other side, or this machine's rules, said no: wrong token, missing right, name taken."""


class PeerGone(PenstockError, ConnectionError):
    """Whoever should have answered a call has died, has closed, or is not there."""


class CallFailed(PenstockError):
    """The function of a server raised an exception; the text is its class and message."""


MOST_NAMES = 50  # in an error text


def nearest(given: str, valid: Iterable[str]) -> str:
    """The part of an error text that names the valid choices, the nearest first."""
    names = sorted(valid)
    close = difflib.get_close_matches(given, names, n=3, cutoff=0.55)
    if close:
        return f"did you mean {' or '.join(close)}?"
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"valid: {', '.join(names[:MOST_NAMES])}{more}" if names else "there are none"


def warn_user(text: str) -> None:
    """A warning at the line outside of Penstock that led here."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "penstock":
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def describe(error: BaseException) -> str:
    """An error as one sentence; an ``OSError`` names its file."""
    if isinstance(error, OSError) and error.strerror:
        if isinstance(error, FileExistsError | NotADirectoryError) and os.path.isfile(error.filename or ""):
            return f"{error.filename} is a file; give the name of a directory"
        about = f"{error.filename}: " if error.filename else ""
        # the numbers of TLS and of resolvers are none of the system, and an error of Penstock says why itself
        number = error.errno or 0
        why = os.strerror(number) if number > 0 and type(error).__module__ == "builtins" else ""
        return f"{about}{error.strerror}{f' ({why})' if why not in error.strerror else ''}"
    return str(error) or type(error).__name__
