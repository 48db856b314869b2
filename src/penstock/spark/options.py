"""The options of the source: their names, and how they are checked. Knows no Spark class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.errors import InvalidArgument, nearest

OPTIONS = (
    "path", "paths", "topics", "topic",
    "columns", "startOrdinal", "endOrdinal", "startPosition", "endPosition",
    "startTime", "endTime", "mode", "check", "pushdown", "batchBytes", "partitionBytes", "startingOffset",
    "maxMessagesPerTrigger", "maxBytesPerTrigger",
    "failOnDataLoss", "decode", "query", "transaction", "token", "tls", "segmentBytes", "properties", "ends",
)  # fmt: skip

SPARKS_OWN = (
    "checkpointLocation", "queryName", "outputMode",
    "owner", "provider", "comment", "external", "is_managed_location", "serialization.format", "location", "collation",
)  # fmt: skip
_MADE_BY_SPARK = ("option.",)  # Spark repeats each option of a table under this prefix
#: Other sources' names for the same options.
ALIASES = {"startingOffsets": "startingOffset", "maxOffsetsPerTrigger": "maxMessagesPerTrigger"}


def check_options(options: Mapping[str, str]) -> None:
    """Raise ``InvalidArgument`` for an unknown option, naming the nearest known one.

    For a new table Spark mixes its properties (TBLPROPERTIES), which are the user's own, with its options; only options
    are there twice, once with the prefix.
    """
    known = {name.lower() for name in (*OPTIONS, *SPARKS_OWN, *ALIASES)}
    given = {name.lower() for name in options}
    for name in options:
        is_property = "provider" in given and not any(prefix + name.lower() in given for prefix in _MADE_BY_SPARK)
        if name.lower() not in known and not name.lower().startswith(_MADE_BY_SPARK) and not is_property:
            raise InvalidArgument(f"the penstock source has no option {name!r}; {nearest(name, OPTIONS)}")


def check_batch_options(options: Mapping[str, str]) -> None:
    """Raise ``InvalidArgument`` for options, as from ``folded``, that have a meaning for streams only."""
    start = options.get("startingOffset", "earliest")
    if start != "earliest":  # with which a table begins anyway
        raise InvalidArgument(
            f"startingOffset={start!r} is for streams (spark.readStream); a table takes startPosition, startOrdinal or "
            "startTime"
        )
    for name in ("maxMessagesPerTrigger", "maxBytesPerTrigger"):
        if name in options:
            raise InvalidArgument(f"{name} is for streams (spark.readStream); a table has no triggers: leave it out")


def folded(options: Mapping[str, str]) -> dict[str, str]:
    """Options with the spelling of ``OPTIONS``: Spark passes them in lower case, and some have two names."""
    spelling = {name.lower(): name for name in OPTIONS}
    found = {spelling[name.lower()]: value for name, value in options.items() if name.lower() in spelling}
    others = {alias.lower(): name for alias, name in ALIASES.items()}
    for name, value in options.items():
        meant = others.get(name.lower())
        if meant is None:
            found.setdefault(spelling.get(name.lower(), name), value)
        elif found.setdefault(meant, value) != value:
            raise InvalidArgument(f"{name}={value!r} and {meant}={found[meant]!r} name the same thing: give one")
    place = next((value for name, value in options.items() if name.lower() == "location"), None)
    if place is not None:  # Spark's name for a table's path, from LOCATION or OPTIONS (path ...)
        found.setdefault("path", place)
    return found


def choice(options: Mapping[str, str], name: str, valid: Iterable[str], default: str) -> str:
    """The option's value, which must be one of ``valid`` regardless of case."""
    value = options.get(name, default).lower()
    if value not in valid:
        raise InvalidArgument(f"{name}={options[name]!r} is not a choice; {nearest(value, valid)}")
    return value
