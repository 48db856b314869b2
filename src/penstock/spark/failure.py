"""Finds the Penstock error inside an exception of Spark.

Spark wraps what a Python worker raises into its own exception with both stack traces as text. ``unwrap`` finds ours
in it, so that a command can print one sentence.
"""

from __future__ import annotations

import re

from penstock import errors

_OURS = re.compile(r"penstock\.errors\.(\w+): (.+?)(?:\n|$)")


def unwrap(error: BaseException) -> errors.PenstockError | None:
    """The Penstock error inside one of Spark's, or None."""
    found = None
    for match in _OURS.finditer(str(error)):
        found = match
    if found is None:
        return None
    kind = getattr(errors, found.group(1), None)
    if not (isinstance(kind, type) and issubclass(kind, errors.PenstockError)):
        kind = errors.PenstockError
    return kind(found.group(2).strip())
