"""Where a subscriber begins: ``--since`` and ``--from`` as the options that each reach has for it."""

from __future__ import annotations

from typing import Any

from penstock import address as addresses
from penstock.errors import InvalidArgument
from penstock.quantities import moment_ns
from penstock.topics import is_pattern

__all__ = ["start_options"]


def start_options(address: str, since: str | None, first: int | None) -> dict[str, Any]:
    """Keyword arguments for ``penstock.subscriber``; ``InvalidArgument`` where the reach keeps nothing."""
    if since is None and first is None:
        return {}
    if since is not None and first is not None:
        raise InvalidArgument("give --since or --from, not both")
    parts = addresses.parse(address)
    if parts.scheme == "journal":
        return {"start": _journal_position(parts, since, first)}
    names = addresses.option_names(addresses.room(parts.scheme).open_subscriber)
    if first is not None:
        return {_option(names, "from_ordinal", "--from", parts.text): first}
    assert since is not None
    return {_option(names, "from_time_ns", "--since", parts.text): moment_ns(since, "--since")}


def _journal_position(parts: addresses.Address, since: str | None, first: int | None) -> int | str:
    """The position in a journal where a topic's ordinal or a time begins; what is not there yet is awaited."""
    from penstock.journal import Journal

    topic = parts.topic or "default"
    pattern = is_pattern(topic)
    if first is not None and pattern:
        raise InvalidArgument(f"--from counts the messages of one topic, and {topic!r} is a pattern; use --since")
    with Journal(parts.name, mode="read") as journal:
        if first is not None:
            return journal.find_ordinal(topic, first) or "new"
        assert since is not None
        return journal.find_time(moment_ns(since, "--since"), None if pattern else topic) or "new"


def _option(names: Any, wanted: str, flag: str, address: str) -> str:
    if wanted in names:
        return wanted
    raise InvalidArgument(f"{flag}: {address} keeps no old messages; journal: and broker:// addresses do")
