"""Where a subscriber begins: ``--since``, ``--from`` and ``--last`` as the options that each reach has for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import address as addresses
from penstock.errors import InvalidArgument
from penstock.quantities import moment_ns
from penstock.topics import is_pattern

if TYPE_CHECKING:
    from penstock.journal import Journal

__all__ = ["start_options"]

#: Words for --from, and the journal's names for them.
WORDS = {"start": "first", "end": "new"}


def start_options(address: str, since: str | None, first: str | None, last: int | None = None) -> dict[str, Any]:
    """Keyword arguments for ``penstock.subscriber``; ``InvalidArgument`` where the reach keeps nothing."""
    given = [flag for flag, value in (("--since", since), ("--from", first), ("--last", last)) if value is not None]
    if not given:
        return {}
    if len(given) > 1:
        raise InvalidArgument(f"give {given[0]} or {given[1]}, not both")
    parts = addresses.parse(address)
    ordinal = None if first is None or first in WORDS else _ordinal(first)
    if parts.scheme == "journal":
        return {"start": _journal_start(parts, since, first, ordinal, last)}
    if parts.scheme == "nats":
        return _nats_start(parts, since, first, ordinal, last)
    names = addresses.option_names(addresses.room(parts.scheme).open_subscriber)
    if since is not None:
        return {_option(names, "from_time_ns", "--since", parts.text): moment_ns(since, "--since")}
    if last is not None:
        raise InvalidArgument(f"--last: {parts.text} cannot be read backwards; journal: addresses can")
    if first == "end":
        return {"history": False} if "history" in names else {}
    option = _option(names, "from_ordinal", "--from", parts.text)
    if "*" in parts.topic or ">" in parts.topic:
        raise InvalidArgument(f"--from: {parts.text} names several topics; give each by its name, or use --since")
    return {option: 1 if ordinal is None else ordinal}


def _nats_start(
    parts: addresses.Address, since: str | None, first: str | None, ordinal: int | None, last: int | None
) -> dict[str, Any]:
    """Where a subscriber of NATS begins: core NATS keeps nothing, a stream is read from its first message on."""
    if "stream" not in parts.options:
        if first == "end":
            return {}
        flag = "--since" if since is not None else "--last" if last is not None else "--from"
        raise InvalidArgument(f"{flag}: core NATS keeps no old messages; ?stream=NAME reads what a stream has stored")
    if "durable" in parts.options:
        raise InvalidArgument(f"{parts.text}: durable= goes on where it was; leave it out to choose where to begin")
    if ordinal is not None or last is not None:
        flag = "--last" if last is not None else "--from"
        raise InvalidArgument(f"{flag}: a NATS server does not count by subject; --from start, --from end or --since")
    if since is not None:
        return {"from_time_ns": moment_ns(since, "--since")}
    return {"new": True} if first == "end" else {}


def _ordinal(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise InvalidArgument(f"--from {text!r} is neither an ordinal nor {' or '.join(WORDS)}")
    return int(text)


def _journal_start(
    parts: addresses.Address, since: str | None, first: str | None, ordinal: int | None, last: int | None
) -> int | str:
    """The position in a journal of a topic's ordinal or of a time; one that does not exist yet is waited for."""
    from penstock.journal import Journal
    from penstock.journal.layout import MARKER_NAME

    if first in WORDS:
        return WORDS[first]
    topic = parts.topic or "default"
    if ordinal is not None and is_pattern(topic):
        raise InvalidArgument(f"--from counts the messages of one topic, and {topic!r} is a pattern; use --since")
    if not (Path(parts.name) / MARKER_NAME).exists():
        return "first"
    with Journal(parts.name, mode="read") as journal:
        if last is not None:
            return _last(journal, topic, last)
        if ordinal is not None:
            return journal.find_ordinal(topic, ordinal) or "new"
        assert since is not None
        return journal.find_time(moment_ns(since, "--since"), None if is_pattern(topic) else topic) or "new"


def _last(journal: Journal, topic: str, count: int) -> int | str:
    """Where the last ``count`` messages of a topic or pattern begin: searches twice as far back each time until it
    finds them."""
    count = min(count, journal.frontier)
    span = count
    while True:
        start = max(journal.first, journal.frontier - span)
        found = [message.position for message in journal.read_many(start, span, topics=[topic])]
        if len(found) >= count or start == journal.first:
            return found[-count:][0] or "new" if found else "new"
        span *= 2


def _option(names: Any, wanted: str, flag: str, address: str) -> str:
    if wanted in names:
        return wanted
    raise InvalidArgument(
        f"{flag}: {address} keeps no old messages; journal: and broker:// addresses do, and --start reads what a "
        "publisher with --durable keeps"
    )
