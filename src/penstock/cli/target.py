"""What commands share about addresses: reading them from the command line, options, completion."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, urlencode

import typer

from penstock import address as addresses
from penstock.cli import exits
from penstock.cli.silence import TRY_ON
from penstock.errors import InvalidArgument, RefusedError
from penstock.observe.rates import PRODUCERS
from penstock.secrecy import hidden, without_secrets

if TYPE_CHECKING:
    from penstock.observe.snapshot import Block

__all__ = [
    "AddressArgument", "AddressesArgument", "OptionList", "SeenAddressArgument", "ServiceArgument", "TopicOption",
    "answer_within", "broker_address", "expanded", "fitting", "has_wildcard", "is_folder", "live_addresses",
    "live_brokers", "live_queues", "nobody_like", "opened", "topics_of_recording", "with_options",
]  # fmt: skip


def is_folder(text: str) -> bool:
    """Whether an argument that may be a folder or an address is a folder; ``InvalidArgument`` where it is neither."""
    if text and Path(text).is_dir():  # an empty path would be the current folder
        return True
    if ":" not in text:
        raise InvalidArgument(f"there is no folder {text!r}, and an address has a scheme, as in shm:/{text.strip('/')}")
    return False


def live_addresses(incomplete: str) -> list[str]:
    """Addresses in use on this machine, topics of a journal, queues of brokers."""
    if not incomplete.startswith("journal:"):
        return _begin_with(incomplete, _open)
    return _begin_with(incomplete, _topics if "#" in incomplete else _journals)


def topics_of_recording(ctx: typer.Context, incomplete: str) -> list[str]:
    """The topics of the recording whose directory was typed already."""
    directory = ctx.params.get("directory")
    return _begin_with(incomplete, lambda _: _recorded_topics(directory)) if directory else []


def live_brokers(incomplete: str) -> list[str]:
    """The brokers of this machine, and their queues as ls prints them."""
    return _begin_with(incomplete, lambda _: {b.place for kind in ("broker", "queue") for b in _broker_blocks(kind)})


def live_queues(incomplete: str) -> list[str]:
    """The queues of this machine's brokers, by name."""
    return _begin_with(incomplete, lambda _: {block.name for block in _broker_blocks("queue")})


def _begin_with(incomplete: str, find: Callable[[str], Iterable[str]]) -> list[str]:
    """For completion, which must never print an error into the command line."""
    try:
        return sorted({name for name in find(incomplete) if name.startswith(incomplete)})
    except Exception:
        return []


def _broker_blocks(kind: str) -> list[Block]:
    from penstock.observe.snapshot import live

    return [block for block in live() if (block.room, block.kind) == ("broker", kind)]


def _topics(incomplete: str) -> list[str]:
    from penstock.journal import Journal

    place = incomplete.partition("#")[0]
    with Journal(place.removeprefix("journal:"), mode="read") as journal:
        return [f"{place}#{topic}" for topic in journal.topics]


def _recorded_topics(directory: str) -> set[str]:
    from penstock.recording.span import reader
    from penstock.recording.story import STORY, parts

    found: set[str] = set()
    for folder in parts(Path(directory)):
        with reader(folder) as journal:
            found |= {topic for topic in journal.topics if topic != STORY}
    return found


def _journals(incomplete: str) -> set[str]:
    """Open journals, and those in folders below what is typed; each with its topics once its name is complete."""
    from penstock.journal.layout import MARKER_NAME

    typed = incomplete.removeprefix("journal:")
    found = {name for name in _open(incomplete) if name.startswith("journal:")}
    folders = deque([(os.path.dirname(typed), 0)])
    left = MOST_ENTRIES
    while folders:
        folder, depth = folders.popleft()
        for entry in os.scandir(folder or "."):
            left -= 1
            path = os.path.join(folder, entry.name)
            if left < 0:
                return found
            if not path.startswith(typed) or entry.name.startswith(".") or not entry.is_dir():
                continue
            if os.path.lexists(os.path.join(path, MARKER_NAME)):
                found.add(f"journal:{path}")
            elif depth < MOST_DEPTH:
                folders.append((path, depth + 1))
    if os.path.lexists(os.path.join(typed, MARKER_NAME)):
        found |= set(_topics(f"{incomplete}#"))
    return found


def _open(incomplete: str) -> set[str]:
    from penstock.observe.snapshot import live

    blocks = live()
    # without bridges: the address of a bridge is two addresses
    names = {block.address for block in blocks if block.address and block.room != "bridge"}
    head, queue, _ = incomplete.partition("?queue=")
    if queue:
        names |= {f"{head}?queue={b.name}" for b in blocks if (b.room, b.kind) == ("broker", "queue") and not b.address}
    return names


#: How many entries completion examines when it searches for journals.
MOST_ENTRIES, MOST_DEPTH = 5000, 3

REACHES = "shm:/NAME, tcp://HOST:PORT, journal:DIRECTORY#TOPIC, broker://HOST:PORT/TOPIC or nats://HOST:PORT/SUBJECT"


def opened(given: Any) -> Any:
    """Addresses that a command opens. Refuses a bus, which exists only inside its own process.

    Every argument for such an address has this as its callback.
    """
    for address in [given] if isinstance(given, str) else given or []:
        scheme, _, name = address.partition(":")
        if scheme == "bus":
            raise InvalidArgument(
                f"{address}: a bus exists only inside one process, so a command cannot reach it; use shm:/{name}"
            )
    return given


def _argument(help_text: str, **more: Any) -> Any:
    return typer.Argument(help=help_text, autocompletion=live_addresses, show_default=False, **more)


#: An address to open; one to inspect, which may be inside another process; one with a server; several to open.
AddressArgument = Annotated[str, _argument(REACHES, callback=opened)]
SeenAddressArgument = Annotated[str, _argument(f"{REACHES}; or bus:NAME")]
ServiceArgument = Annotated[str, _argument("shm:/NAME, tcp://HOST:PORT or broker://HOST:PORT/TOPIC", callback=opened)]
AddressesArgument = Annotated[
    list[str], _argument(f"{REACHES}; several, or with '*'.", metavar="ADDRESS", callback=opened)
]
TopicOption = Annotated[
    list[str] | None,
    typer.Option("--topic", "-t", help="Only these; * and > as in topics.", autocompletion=topics_of_recording),
]
OptionList = Annotated[
    list[str] | None,
    typer.Option("--option", "-O", metavar="NAME=VALUE", help="An option of this kind of address, as after '?' in it."),
]


def expanded(given: list[str], wait: bool | None = None) -> list[str]:
    """The addresses, each '*' replaced by what is published on this machine; topics keep their own wildcards. Without
    ``wait`` a '*' that matches nothing is refused; with it, this is reported if other addresses match. None: the
    command has no --wait.
    """
    found: list[str] = []
    empty = []
    for address in map(broker_address, given):
        names = fitting([address]) if has_wildcard(address) else [address]
        found += names
        empty += [] if names else [nobody_like(address)]
    if empty and not wait:
        raise RefusedError(empty[0] + ("" if wait is None else TRY_ON))
    if found:
        for said in empty:
            exits.told(f"{said}; waiting")
    return list(dict.fromkeys(found))


def has_wildcard(address: str) -> bool:
    """Whether a '*' in an address stands for several addresses; in a topic it is the reach's own."""
    scheme, _, rest = address.partition(":")
    return "*" in rest.partition("?")[0] and scheme not in addresses.PATTERNS


def fitting(patterns: Iterable[str]) -> list[str]:
    """The published addresses of this machine that match these patterns with '*', with the options of the patterns."""
    from penstock.observe.snapshot import live, matching

    blocks = [block for block in live() if block.kind in PRODUCERS and block.address]
    found = set()
    for pattern in patterns:
        place, mark, options = pattern.partition("?")
        found |= {block.channel + mark + options for block in matching(blocks, place)}
    return sorted(found)


def nobody_like(pattern: str) -> str:
    """The error text if nothing matches an address with '*'."""
    return f"nobody on this machine publishes to anything like {without_secrets(pattern)}"


def broker_address(address: str) -> str:
    """Turn ``broker:QUEUE``, as ls prints a queue of this machine, into the address of its broker; any other address is
    unchanged.
    """
    from penstock.observe import snapshot

    return snapshot.broker_address(address)


def with_options(address: str, options: list[str] | None, **more: Any) -> str:
    """The address with ``NAME=VALUE`` options added; errors are raised here."""
    pairs = []
    for option in options or []:
        name, equals, value = option.partition("=")
        if not equals or not name:
            raise InvalidArgument(f"--option {hidden([option])[0]!r} is not of the form NAME=VALUE")
        pairs.append((name.replace("-", "_"), value))
    pairs += [(name, str(value)) for name, value in more.items()]
    address = broker_address(address)
    addresses.parse(address)
    if not pairs:
        return address
    return f"{address}{'&' if '?' in address else '?'}{urlencode(pairs, quote_via=quote)}"


def answer_within(
    address: str, options: list[str] | None, timeout_s: float | None, schemes: Sequence[str] = ("broker",)
) -> dict[str, float]:
    """Use a command's ``--timeout`` as the room's time-out, unless the address has one."""
    parts = addresses.parse(broker_address(address))
    named = "timeout" in parts.options or any(option.startswith("timeout=") for option in options or [])
    if timeout_s is None or parts.scheme not in schemes or named:
        return {}
    return {"timeout": max(timeout_s, 0.05)}
