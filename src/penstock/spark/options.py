"""The options of the source: their names, and how they are checked. Knows no Spark class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.errors import InvalidArgument, nearest

OPTIONS = (
    "path", "paths", "topics", "topic",
    "columns", "startOrdinal", "endOrdinal", "startPosition", "endPosition",
    "startTime", "endTime", "mode", "check", "pushdown", "batchBytes", "partitionBytes", "startingOffset",
    "maxMessagesPerTrigger", "maxBytesPerTrigger",
    "failOnDataLoss", "query", "transaction", "token", "tls", "segmentBytes", "properties", "ends",
)  # fmt: skip

SPARKS_OWN = ("checkpointLocation", "queryName", "outputMode")


def check_options(options: Mapping[str, str]) -> None:
    """``InvalidArgument`` for an option that is not one, with the nearest that is."""
    known = {name.lower() for name in (*OPTIONS, *SPARKS_OWN)}
    for name in options:
        if name.lower() not in known:
            raise InvalidArgument(f"the penstock source has no option {name!r}; {nearest(name, OPTIONS)}")


def folded(options: Mapping[str, str]) -> dict[str, str]:
    """Options under the spelling of ``OPTIONS``: Spark hands them over in small letters."""
    spelling = {name.lower(): name for name in OPTIONS}
    return {spelling.get(name.lower(), name): value for name, value in options.items()}


def choice(options: Mapping[str, str], name: str, valid: Iterable[str], default: str) -> str:
    """One of ``valid``, whatever its case."""
    value = options.get(name, default).lower()
    if value not in valid:
        raise InvalidArgument(f"{name}={options[name]!r} is not a choice; {nearest(value, valid)}")
    return value
