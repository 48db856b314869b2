"""Where a subscriber begins: ``--since`` and ``--from`` as the options that each reach has for it."""

from __future__ import annotations

from typing import Any

from penstock import address as addresses
from penstock.cli.target import moment_ns
from penstock.errors import InvalidArgument

__all__ = ["start_options"]


def start_options(address: str, since: str | None, first: int | None) -> dict[str, Any]:
    """Keyword arguments for ``penstock.subscriber``; ``InvalidArgument`` where the reach keeps nothing."""
    if since is None and first is None:
        return {}
    if since is not None and first is not None:
        raise InvalidArgument("give --since or --from, not both")
    scheme = addresses.parse(address).scheme
    names = addresses.option_names(addresses.room(scheme).open_subscriber)
    if first is not None:
        return {_option(names, ("from_ordinal", "start_ordinal", "ordinal"), "--from", address): first}
    assert since is not None
    return {
        _option(names, ("since_ns", "from_timestamp_ns", "start_ns"), "--since", address): moment_ns(since, "--since")
    }


def _option(names: Any, candidates: tuple[str, ...], flag: str, address: str) -> str:
    for name in candidates:
        if name in names:
            return name
    raise InvalidArgument(f"{flag}: {address} keeps no old messages; journal: and broker:// addresses do")
