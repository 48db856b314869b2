"""The words of the text protocol: names, patterns, options, replies. Pure functions over text; any thread.

Names (topics, queues, transactions) are as ``penstock.topics`` says; those with ``$`` in front are the broker's own.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import quote

from penstock import topics
from penstock.errors import InvalidArgument, RefusedError
from penstock.journal import layout

MAX_NUMBER = 1 << 62  # so that the sum of two still fits into 64 bits
MAX_MILLISECONDS = 10**12  # some thirty years
PUBLISH_RANGE = "$publish"  # in place of a transaction: publish the range at once
DEFAULT_TOPIC = "default"
OWN_PROPERTIES = frozenset({"$topic", "$due_ns", "$expires_ns", "$queue", "$reason", "$position"})  #: the broker's
TEMPORARY = "temporary."  #: prefix of queues that our subscribers make for themselves
COMPATIBLE = "compatible."  #: prefix of names that only clients of the compatible mode can have
NEW_TOPIC, REFUSED, BROKEN = "\n?", "\n!", "\n#"  #: scanner events; no peer can send a newline in a verb


class Refusal(RefusedError):
    """A request was refused. The peer gets ``ERR code text``, and the connection goes on."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text

    @property
    def passing(self) -> bool:
        """Whether the same request may be accepted later."""
        return self.code in ("busy", "full", "limit", "unavailable")


class Disconnect(Exception):
    """The connection must be closed; ``reason`` is sent to peers that understand replies."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


def check_name(name: str, what: str, internal: bool = False) -> str:
    """``name`` if it can be one; Refusal otherwise."""
    if isinstance(name, str) and name.startswith("$") and not internal:
        raise Refusal("bad_name", f"{what} names that begin with $ are the broker's own")
    return _refused(topics.check_name, name, what)


def check_topic(name: str) -> str:
    """A topic to publish to: a name without wildcards or empty parts."""
    return _refused(topics.check_topic, check_name(name, "topic"))


def check_queue(name: str) -> str:
    """A queue's name. It becomes part of internal topics of the broker, so the rules of topics apply."""
    return _refused(topics.check_topic, check_name(name, "queue"), "queue")


def compatible_queue(name: str) -> str:
    """The queue that a client of the compatible mode means: it may name any bytes.

    A valid queue name means that queue. All other names get a prefix of their own, so that none has a special meaning:
    ``$dead.pay`` does not reach the dead letters of ``pay``.
    """
    given = name.encode(errors="surrogateescape")
    if not given:
        raise Disconnect("the name of the queue is missing")
    if not name.startswith(COMPATIBLE):
        with contextlib.suppress(Refusal):
            return check_queue(name)
    quoted = COMPATIBLE + quote(given, safe="").replace(".", "%2E")
    long = len(quoted) > topics.MAX_NAME_BYTES
    return f"{COMPATIBLE}sha256.{hashlib.sha256(given).hexdigest()}" if long else quoted


def check_pattern(pattern: str) -> str:
    """A pattern of topics."""
    return _refused(topics.check_wildcards, check_name(pattern, "topic"))


def _refused(check: Callable[..., str], *arguments: str) -> str:
    """Run ``check`` and turn its error into a refusal for the peer."""
    try:
        return check(*arguments)
    except InvalidArgument as error:
        raise Refusal("bad_name", str(error)) from None


def matches(pattern: str, topic: str) -> bool:
    """Whether ``pattern`` matches ``topic``. The broker's internal topics match only by their full name."""
    return pattern == topic or (not topic.startswith("$") and topics.matches(pattern, topic))


def split_options(words: Iterable[str], known: Mapping[str, type]) -> dict[str, str | int]:
    """``key=value`` words as a dict; numbers where ``known`` says int, a bare word is 1. Refusal for unknown ones."""
    options: dict[str, str | int] = {}
    for word in words:
        key, equals, value = word.partition("=")
        kind = known.get(key)
        if kind is None:
            raise Refusal("bad_option", f"option {key[:40]!r} is not known here; known: {', '.join(known) or 'none'}")
        if kind is int:
            options[key] = number(value if equals else "1", key)
            if key.endswith("_ms") and int(options[key]) > MAX_MILLISECONDS:
                raise Refusal("bad_number", f"{key} must be at most {MAX_MILLISECONDS}")
        else:
            options[key] = value
    return options


def encode_properties(properties: Mapping[str, str] | None) -> bytes:
    """A user's properties, encoded as they follow a message's data; without those of the broker."""
    if not properties:
        return b""
    # those of the broker are dropped: the message came from a broker
    given = {key: value for key, value in properties.items() if key not in OWN_PROPERTIES}
    for key in given:
        if isinstance(key, str) and key.startswith("$"):
            raise InvalidArgument(f"property {key!r}: names that begin with $ are the broker's own")
    return layout.encode_properties(given)


def number(text: str, what: str) -> int:
    """A decimal number of 0 or more; Refusal otherwise."""
    if not text.isascii() or not text.isdigit() or len(text) > 19 or int(text) > MAX_NUMBER:
        raise Refusal("bad_number", f"{what} must be a number from 0 to {MAX_NUMBER}")
    return int(text)


def span(text: str) -> tuple[int, int]:
    """``5`` or ``5-9`` as first and last."""
    first, dash, last = text.partition("-")
    low = number(first, "position")
    high = number(last, "position") if dash else low
    if high < low:
        raise Refusal("bad_number", f"the range {text} ends before it begins")
    return low, high


def ok_line(first: int, last: int) -> bytes:
    """The confirmation of one message or of a run of messages."""
    return b"OK %d\n" % first if first == last else b"OK %d-%d\n" % (first, last)


def error_line(code: str, text: str) -> bytes:
    """``ERR code text``, on one line whatever the text holds."""
    flat = " ".join(text.split())[:500]
    return f"ERR {code} {flat}\n".encode(errors="replace")
