"""Redaction: removes secrets from addresses, command lines and settings before they are printed, logged or stored.

Pure functions; any thread may call them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

__all__ = ["HIDDEN", "SECRETS", "hidden", "hidden_values", "without_secrets"]

#: Options whose values are secret.
SECRETS = ("token", "password")

#: Replaces a secret's value where the option's name is shown.
HIDDEN = "***"


# ``USER:PASSWORD@`` or ``TOKEN@`` in front of an address's host. Where no HOST:PORT follows `://`, a secret may hold a
# slash or a question mark that nobody encoded: then all up to the last @ is taken for one.
_PLACE = r"[^/?@'\"\s]*:\d+(?=[/?'\"\s)]|$)"
_LOGIN = re.compile(rf"://(?:[^/?]*@(?={_PLACE})|(?!{_PLACE}|/).*@)", re.DOTALL)


def without_secrets(text: str) -> str:
    """An address without its token, user and password, fit to be printed, logged, stored and used as the name of
    counters."""
    head, mark, query = _LOGIN.sub("://", text).partition("?")
    if not any(name in unquote(query) for name in SECRETS):
        return head + mark + query
    kept = [pair for pair in query.split("&") if unquote(pair.partition("=")[0]) not in SECRETS]
    return head + (mark + "&".join(kept) if kept else "")


def _encodable_pattern(name: str) -> str:
    """A pattern for ``name`` in which any character may be percent-encoded, as in an address."""
    return "".join(f"(?:{character}|%{ord(character):02x}|%{ord(character.upper()):02x})" for character in name)


_NAMES = "|".join(map(_encodable_pattern, SECRETS))
_ASSIGNMENT = re.compile(rf"((?:{_NAMES})['\"]?\s*(?:[=:]|%3[ad])|-(?:{_NAMES})\s).+", re.IGNORECASE | re.DOTALL)
_FLAG = re.compile(rf"-.*(?:{_NAMES})", re.IGNORECASE | re.DOTALL)


def hidden(words: Iterable[str]) -> list[str]:
    """The words of a command line as they may be shown: ``--token X``, ``-O token=X``, ``?token=X``, ``tcp://X@HOST:1``
    with ``***`` for X.

    The rest of the word after a secret is hidden too: only the program itself knows where the value ends.
    """
    shown: list[str] = []
    value_next = False
    for word in words:
        login_hidden = _LOGIN.sub(f"://{HIDDEN}@", word)
        shown.append(HIDDEN if value_next else _ASSIGNMENT.sub(rf"\1{HIDDEN}", login_hidden))
        value_next = not value_next and _FLAG.fullmatch(word) is not None
    return shown


def hidden_values(value: Any, name: str = "") -> Any:
    """Plain data (of JSON or TOML) with secrets hidden; ``name`` is the key of ``value``."""
    if value is not None and name in SECRETS:
        return HIDDEN
    if isinstance(value, dict):
        return {key: hidden_values(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        texts = iter(hidden(inner for inner in value if isinstance(inner, str)))
        return [next(texts) if isinstance(inner, str) else hidden_values(inner) for inner in value]
    return hidden([value])[0] if isinstance(value, str) else value
