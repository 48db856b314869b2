"""Access rights: a file of tokens with rights per topic and verb, read again on SIGHUP.

The file is TOML, readable by its owner alone::

    [[token]]
    name = "north"                     # shown in logs, never the token itself
    sha256 = "9f86d081884c7d65..."        # of the token; or  token = "..."
    publish = ["sensors.north.>"]         # topics it may publish to
    subscribe = ["sensors.>"]             # topics whose queues it may make and consume, and that it may fetch
    queues = ["north-*"]                  # queues it may use; default: all
    manage = true                         # change, purge, pause, seek, delete, re-drive
    statistics = true
    shutdown = false

Producers and transactions belong to the name of the token that created them: tokens with different names never share
one.

Used by the broker's loop thread only.
"""

from __future__ import annotations

import fnmatch
import hashlib
import hmac
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock import topics
from penstock.broker import words
from penstock.errors import InvalidArgument


@dataclass(frozen=True)
class Rights:
    """What one token allows. The default allows everything, as in a broker without tokens."""

    name: str = "anyone"
    publish: tuple[str, ...] = (">",)
    subscribe: tuple[str, ...] = (">",)
    queues: tuple[str, ...] = ("*",)
    manage: bool = True
    statistics: bool = True
    shutdown: bool = False
    owner: str = ""  #: prefix of the names of its producers and transactions

    def may_publish(self, topic: str) -> bool:
        """Whether it may publish to ``topic``."""
        return any(words.matches(pattern, topic) for pattern in self.publish)

    def may_publish_all(self, pattern: str) -> bool:
        """Whether it may publish to every topic of ``pattern``."""
        return any(topics.covers(allowed, pattern) for allowed in self.publish)

    def may_subscribe(self, pattern: str) -> bool:
        """Whether a queue may be bound to ``pattern``."""
        return any(topics.covers(allowed, pattern) for allowed in self.subscribe)

    def may_use(self, queue: str) -> bool:
        """Whether the queue may be used by name."""
        return any(fnmatch.fnmatchcase(queue, allowed) for allowed in self.queues)


EVERYTHING = Rights()
#: Of a connection that has shown no token yet, where one is needed.
NOTHING = Rights("nobody", (), (), (), manage=False, statistics=False)

#: What each verb needs: rights, and the resources they are needed for. ``topic``: those that messages go to or come
#: from (of a queue: its own, and of dead letters those of where they come from); ``queue``: by name; ``target``: a
#: queue of dead letters that is there for other topics. Nothing: every connection may, for what belongs to it.
NEEDS: dict[str, tuple[str, ...]] = {
    "PUB": ("publish topic",),
    "STAGE": ("publish topic",),
    "LOAD": ("publish topic",),
    "COMMIT": (),
    "ABORT": (),
    "SUB": ("use queue", "subscribe topic"),
    "UNSUB": (),
    "CREDIT": (),
    "ACK": (),
    "NACK": (),
    "QUEUE": ("use queue", "subscribe topic"),
    "QUEUE changed": ("use queue", "subscribe topic", "manage"),
    "QUEUE dead_letter": ("use target", "publish target", "manage"),
    "SEEK": ("use queue", "manage"),
    "PURGE": ("use queue", "manage"),
    "PAUSE": ("use queue", "manage"),
    "RESUME": ("use queue", "manage"),
    "DELETE": ("use queue", "manage"),
    "REDRIVE": ("use queue", "manage"),
    "LIST": ("statistics",),
    "STATS": ("statistics",),
    "PEERS": ("publish or subscribe topic",),
    "SCHEMA": ("publish or subscribe topic",),
    "SCHEMA changed": ("publish topic",),
    "FETCH": ("subscribe topic",),
    "FETCH queue": ("use queue", "subscribe topic"),
    "PING": (),
    "BYE": (),
    "HELLO": (),
    "SHUTDOWN": ("shutdown",),
}
_KNOWN = {"name": str, "token": str, "sha256": str, "publish": list, "subscribe": list, "queues": list,
          "manage": bool, "statistics": bool, "shutdown": bool}  # fmt: skip


@dataclass
class Tokens:
    """The tokens of a file. Without a file: no authentication."""

    path: Path | None = None
    _by_digest: dict[bytes, Rights] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reload()

    @property
    def required(self) -> bool:
        """Whether a client must show a token."""
        return self.path is not None

    def reload(self) -> None:
        """Read the file again; on an error the old rights stay and InvalidArgument says what is wrong."""
        if self.path is None:
            return
        if self.path.stat().st_mode & 0o077:
            raise InvalidArgument(f"{self.path}: others may read it; chmod 600 {self.path}")
        try:
            content = tomllib.loads(self.path.read_text())
        except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, a number of thousands of digits
            raise InvalidArgument(f"{self.path}: {error}") from None
        entries = content.get("token", [])
        if set(content) - {"token"} or not isinstance(entries, list):
            raise InvalidArgument(f"{self.path}: only [[token]] tables may stand here")
        found: dict[bytes, Rights] = {}
        for number, entry in enumerate(entries, 1):
            digest, rights = self._entry(entry, number)
            if digest in found:
                raise InvalidArgument(f"{self.path}: token {number} repeats an earlier one: merge the two tables")
            found[digest] = rights
        self._by_digest = found

    def _entry(self, entry: dict[str, Any], number: int) -> tuple[bytes, Rights]:
        for key, value in entry.items():
            if key not in _KNOWN or not isinstance(value, _KNOWN[key]):
                raise InvalidArgument(f"{self.path}: token {number}: {key!r} is not known or of a wrong type")
        if ("token" in entry) == ("sha256" in entry):
            raise InvalidArgument(f"{self.path}: token {number} needs token or sha256, one of them")
        self._check(entry, number)
        name = entry.get("name", f"token {number}")
        rights = Rights(
            name=name,
            publish=tuple(entry.get("publish", ())),
            subscribe=tuple(entry.get("subscribe", ())),
            queues=tuple(entry.get("queues", ("*",))),
            manage=entry.get("manage", False),
            statistics=entry.get("statistics", False),
            shutdown=entry.get("shutdown", False),
            owner=hashlib.sha256(name.encode()).hexdigest()[:32] + "\n",  # a newline cannot occur in a peer's name
        )
        if "sha256" in entry:
            return bytes.fromhex(entry["sha256"]), rights
        return hashlib.sha256(entry["token"].encode()).digest(), rights

    def _check(self, entry: dict[str, Any], number: int) -> None:
        """Refuse a token that no client could send, and patterns that match nothing."""
        where = f"{self.path}: token {number}"
        if not re.fullmatch("[0-9a-fA-F]{64}", entry.get("sha256", "0" * 64)):
            raise InvalidArgument(f"{where}: sha256 has 64 hexadecimal digits")
        token = entry.get("token", "x")
        if not token or not token.isprintable() or " " in token:
            raise InvalidArgument(f"{where}: a token is text without blanks or control characters")
        for key in ("publish", "subscribe", "queues"):
            for text in entry.get(key, ()):
                if not isinstance(text, str) or not text:
                    raise InvalidArgument(f"{where}: {key} is a list of names, not {text!r}")
                if key != "queues":
                    try:
                        topics.check_wildcards(text)
                    except InvalidArgument as error:
                        raise InvalidArgument(f"{where}: {key}: {error}") from None

    def rights(self, token: str) -> Rights | None:
        """The rights of a token; None if it is not valid. Compares with all tokens in constant time."""
        if self.path is None:
            return EVERYTHING
        digest = hashlib.sha256(token.encode(errors="surrogateescape")).digest()
        found: Rights | None = None
        for known, rights in self._by_digest.items():
            if hmac.compare_digest(known, digest):
                found = rights
        return found
