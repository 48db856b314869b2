"""What a command prints when nothing happens: once, after a second, on standard error."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.address import Address, parse, without_secrets
from penstock.cli import exits
from penstock.errors import PenstockError, RefusedError
from penstock.finding import Finding

__all__ = [
    "TELL_AFTER_S", "hint", "missing", "reason", "refuse_nobody", "refuse_unreachable", "tell", "told_after",
]  # fmt: skip

TELL_AFTER_S = 1.0
REACH_S = 2.0
#: How long a reader is watched before it counts as stalled; short, because a hint must not delay a command.
WATCH_S = 0.5


def refuse_unreachable(address: str, subscriber: Any, timeout: float | None) -> None:
    """Refuse a TCP publisher that cannot be reached at once, instead of retrying for ever."""
    if parse(address).scheme != "tcp":
        return
    from penstock.tcp.explain import unreached

    why = unreached(subscriber, time.monotonic() + (REACH_S if timeout is None else min(timeout, REACH_S)))
    if why:
        raise RefusedError(f"{without_secrets(address)}: {why}; --wait tries until somebody is there")


def refuse_nobody(parts: Address, wait: bool = False) -> None:
    """Refuse a broker's port where nobody listens at once, instead of retrying until the time is over."""
    if parts.scheme != "broker" or wait:
        return
    from penstock.broker.hosts import connect

    try:
        connect(parts.host, parts.port or 9876, REACH_S)[0].close()
    except ConnectionRefusedError:
        raise RefusedError(f"{without_secrets(parts.text)}: nobody listens there") from None
    except OSError:
        return  # the later connection reports it


@contextlib.contextmanager
def told_after(address: str) -> Iterator[None]:
    """Print a line, once, if the block takes longer than a second."""
    text = f"{without_secrets(address)}: nobody has answered yet; waiting"
    timer = threading.Timer(TELL_AFTER_S, exits.told, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def tell(address: str, handle: Any) -> None:
    """Print why nothing arrives from an address, if that is known."""
    said = reason(address, handle)
    exits.told(f"{address}: nothing came yet" + (f": {said}" if said else "; waiting"))


def hint(addresses: Sequence[str]) -> str:
    """The reason that ``why`` finds for the first of them, or a hint to call it."""
    said = reason(addresses[0])
    shown = without_secrets(addresses[0])
    return f": {said}" if said else f"; 'penstock why {shown}' may tell the reason"


def reason(address: str, handle: Any = None) -> str:
    """The likeliest reason for the silence of an address, in one sentence; empty where none is known."""
    if parse(address).scheme == "tcp":  # looking would open a connection to it
        errors = [session.last_error for session in getattr(handle, "sessions", ()) if session.last_error]
        return str(errors[0]) if errors else ""
    from penstock.observe.explain import explain

    try:
        found = [finding for finding in explain(address, WATCH_S) if finding.grave]
    except (PenstockError, OSError):
        return ""
    return "; ".join(_sentence(finding) for finding in found[:1] + [f for f in found[1:] if f.meant])


def missing(address: str) -> str:
    """What is missing in a journal that is being read; empty if nothing is, and for other reaches."""
    if parse(address).scheme != "journal":
        return ""
    from penstock.journal.explain import explain

    return next((_sentence(finding) for finding in explain(parse(address)) if finding.grave), "")


def _sentence(finding: Finding) -> str:
    return f"{finding.text} ({finding.remedy})" if finding.remedy else finding.text
