"""What a command prints when nothing happens: once, after a second, on standard error."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from penstock.address import Address, parse, without_secrets
from penstock.cli import exits
from penstock.errors import PenstockError, RefusedError
from penstock.finding import Finding
from penstock.printable import command
from penstock.resolving import UnresolvedError

__all__ = [
    "TELL_AFTER_S", "TRY_ON", "Seldom", "Silences", "hint", "missing", "reason", "refuse_nobody", "refuse_unreachable",
    "tell", "told_after",
]  # fmt: skip

TRY_ON = "; start the publisher, or give --wait to keep trying"
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
        answered = any(session.answered for session in subscriber.sessions)
        raise RefusedError(f"{without_secrets(address)}: {why}{'' if answered else TRY_ON}")


def refuse_nobody(parts: Address, wait: bool | None = None) -> None:
    """Refuse a broker's port where nobody listens at once, instead of retrying until the time is over: of a group
    another may lead in a moment. ``wait`` is the command's --wait; None: it has none that would help."""
    if parts.scheme != "broker" or wait or "," in parts.host:
        return
    from penstock.broker.hosts import NOT_LISTENING_REMEDY, connect

    try:
        connect(parts.host, parts.port or 9876, REACH_S, lambda connection, _: connection.close())
    except ConnectionRefusedError:
        remedy = "" if wait is None else "; --wait keeps trying"
        text = f"{without_secrets(parts.text)}: nobody listens there ({NOT_LISTENING_REMEDY}){remedy}"
        raise RefusedError(text) from None
    except UnresolvedError as error:
        if error.unknown:
            raise RefusedError(f"{without_secrets(parts.text)}: {error}") from None
    except OSError:
        return  # the later connection reports it


@contextlib.contextmanager
def told_after(address: str) -> Iterator[None]:
    """Print a line, once, if the block, which opens the address, takes longer than a second."""
    why = "still opening the journal" if parse(address).scheme == "journal" else "nobody has answered yet; waiting"
    text = f"{without_secrets(address)}: {why}"
    timer = threading.Timer(TELL_AFTER_S, exits.told, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def tell(address: str, handle: Any, where: str) -> None:
    """Print why nothing arrives from an address, if that is known. ``where``: the address as it was opened, with its
    secrets: without them a server would refuse the question, which is not the reason."""
    said = reason(where, handle)
    exits.told(f"{address}: nothing came yet" + (f": {said}" if said else "; waiting"))


class Seldom:
    """Limits checks to a twentieth of the time, however long each takes."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, look: Callable[[], None]) -> None:
        """Run the check, if it is due."""
        began = time.monotonic()
        if began >= self._next:
            look()
            now = time.monotonic()
            self._next = now + 19 * (now - began)


class Silences:
    """Reports why a source that was read gives nothing any more, once per silence. Only for certain reasons (a lost
    connection, no publisher): a source that publishes once a minute is not silent.
    """

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, float]] = {}  # how many messages came, and when that number changed
        self._reported: set[str] = set()
        self._cut: set[str] = set()  # those without a connection

    def mark_reported(self, address: str, handle: Any) -> None:
        """This silence of the address has been explained already."""
        self._reported.add(address)
        (self._cut.add if _cut(handle) else self._cut.discard)(address)

    def look(self, sources: Iterable[tuple[str, Any, int]]) -> None:
        """``sources``: addresses, their subscribers, and how many messages came from each."""
        now = time.monotonic()
        silent = {}
        for address, handle, count in sources:
            known, since = self._counts.setdefault(address, (count, now))
            # the connection was lost or came back: the reason reported before no longer applies
            if (address in self._cut) != bool(_cut(handle)):
                self._cut ^= {address}
                self._counts[address] = known, now
                self._reported.discard(address)
            if known != count:
                self._counts[address] = count, now
                self._reported.discard(address)
            elif now - since >= TELL_AFTER_S and address not in self._reported:
                silent[address] = handle
        for address, said in _ended(silent).items() if silent else ():
            exits.told(f"{address}: nothing comes: {said}; waiting")
            self._reported.add(address)


def _cut(handle: Any) -> str:
    """Why a handle has no connection now; empty if it has one, or needs none."""
    sessions = getattr(handle, "sessions", ())
    if sessions and not any(session.connected for session in sessions):
        return str(sessions[0].last_error or "the publisher closed it")
    return str(getattr(handle, "trouble", ""))


def _ended(handles: Mapping[str, Any]) -> dict[str, str]:
    """The addresses from which nothing can arrive in the current state, each with the reason as a sentence."""
    from penstock.observe import explain

    found = {}
    for address, handle in handles.items():
        if why := _cut(handle):
            found[address] = f"no connection: {why}"
    try:
        more = explain.ended(address for address in handles if address not in found)
    except (PenstockError, OSError):
        return found
    return found | {address: _sentence(finding) for address, finding in more.items()}


def hint(addresses: Sequence[str]) -> str:
    """The reason that ``why`` finds for the first of them, or a hint to call it."""
    said = reason(addresses[0])
    shown = without_secrets(addresses[0])
    return f": {said}" if said else f"; {command('why', shown)} may tell the reason"


def reason(address: str, handle: Any = None) -> str:
    """The likeliest reason for the silence of an address, in one sentence; empty where none is known."""
    if parse(address).scheme == "tcp":  # checking would open a connection to the publisher
        errors = [session.last_error for session in getattr(handle, "sessions", ()) if session.last_error]
        return str(errors[0]) if errors else ""
    from penstock.observe.explain import explain

    try:
        found = [finding for finding in explain(address, WATCH_S, own=False) if finding.grave]
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
