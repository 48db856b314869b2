"""Schemas: the structure of messages as one short text that any reach can carry.

A schema is a name, an encoding and a definition: one entry whose key says the language (``jsonschema``, ``protobuf``,
``arrow``, ``dtype``, ``text``), or none if only the name is known. Equal schemas have equal texts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import InvalidArgument, ProtocolError, RefusedError
from penstock.types.compatibility import first_difference

MAX_TEXT_BYTES = 40_960  # fits into one line of a broker, one field of a handshake, one file of a channel
MAX_NAME_BYTES = 112
MAX_VERSIONS = 64  # of a channel or topic; the oldest are forgotten first


def digest_of(text: str) -> str:
    """16 hexadecimal digits of a hash of a schema's text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Schema:
    """The structure of the messages of a channel or topic."""

    name: str
    encoding: str
    definition: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The schema as JSON; equal schemas have equal texts."""
        whole = {"name": self.name, "encoding": self.encoding, "definition": self.definition}
        return json.dumps(whole, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @property
    def language(self) -> str:
        """Which language the definition is written in; empty where there is none."""
        return next(iter(self.definition), "")

    @property
    def digest(self) -> str:
        """16 hexadecimal digits of a hash of the text."""
        return digest_of(self.text)

    def checked(self) -> Schema:
        """This schema; ``InvalidArgument`` if it cannot be encoded, or is too large."""
        name, encoding, definition = self.name, self.encoding, self.definition
        if not (isinstance(name, str) and isinstance(encoding, str) and isinstance(definition, Mapping)):
            told = f"{name!r}, {encoding!r}, {definition!r}"
            raise InvalidArgument(f"a codec has a name, an encoding and a dict as its schema, not {told}")
        if len(definition) > 1:
            told = f"such as {{'jsonschema': ...}}, not {list(definition)}"
            raise InvalidArgument(f"the schema of {name} has one entry, its language, {told}")
        try:
            self.text  # noqa: B018 - whether it can be made
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"the schema of {name} is no JSON: {error}") from None
        size, name_size = len(self.text.encode()), len(self.name.encode())
        if not 0 < name_size <= MAX_NAME_BYTES or not self.name.isprintable():
            raise InvalidArgument(f"a type's name has 1 to {MAX_NAME_BYTES} printable bytes: {self.name!r}")
        if size > MAX_TEXT_BYTES:
            raise InvalidArgument(f"the schema of {self.name} has {size} bytes; at most {MAX_TEXT_BYTES} are allowed")
        return self

    @classmethod
    def parse(cls, text: str) -> Schema:
        """Parse ``text``, which another program may have written; ``ProtocolError`` if it is not a schema."""
        try:
            if len(text) > MAX_TEXT_BYTES:
                raise ValueError(f"{len(text)} bytes are too many")
            found = json.loads(text)
            name, encoding, definition = found["name"], found["encoding"], found["definition"]
            if not (isinstance(name, str) and isinstance(encoding, str) and isinstance(definition, dict)):
                raise ValueError("its parts are of the wrong kind")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ProtocolError(f"this is not a schema: {error}") from None
        return cls(name, encoding, definition)


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms by which a typed handle joins a channel: its schema, and whether it accepts a different one there.

    A reader must be able to read what is written. A writer's messages must be readable by readers of the channel's
    schema, and the other way round. ``lenient`` accepts any schema.
    """

    schema: Schema
    writes: bool
    lenient: bool = False

    @property
    def replaces(self) -> bool:
        """Whether it replaces a schema that is not compatible with it."""
        return self.lenient and self.writes

    @property
    def name(self) -> str:
        """The type's name."""
        return self.schema.name

    @property
    def text(self) -> str:
        """The schema as it travels."""
        return self.schema.text

    @property
    def digest(self) -> str:
        """16 hexadecimal digits of a hash of the text."""
        return self.schema.digest

    def check(self, there: str, where: str) -> bool:
        """Whether ``there`` is the same schema; ``RefusedError`` names both if the two are not compatible."""
        mine = self.text
        if there == mine:
            return True
        if self.lenient or not there:
            return False
        other = Schema.parse(there)
        ways = ((self.schema, other), (other, self.schema)) if self.writes else ((other, self.schema),)
        for writer, reader in ways:
            difference = first_difference(writer, reader)
            if difference is not None:
                raise RefusedError(
                    f"{where} carries {other.name} ({other.encoding}), not this {self.name} ({self.schema.encoding}): "
                    f"{difference}"
                )
        return False

    def added_to(self, versions: Sequence[str], where: str) -> list[str] | None:
        """The channel's versions, oldest first, with this one added; None if there is nothing to add. ``RefusedError``
        if it is not compatible with one of them. Versions before one that replaced an incompatible schema
        (``evolve="any"``) do not count.
        """
        if not versions:
            return [self.text]
        if self.check(versions[-1], where):
            return None
        if not self.lenient:
            self._check_older(versions, where)
        if not self.writes or (self.text in versions and not self.replaces):
            return None
        return [*(text for text in versions if text != self.text), self.text][-MAX_VERSIONS:]

    def _check_older(self, versions: Sequence[str], where: str) -> None:
        for place in reversed(range(len(versions) - 1)):
            try:
                self.check(versions[place], where)
            except RefusedError:
                older = Schema.parse(versions[place])
                newer = [Schema.parse(text) for text in versions[place + 1 :]]
                if any(first_difference(older, one) or first_difference(one, older) for one in newer):
                    return
                raise

    def check_name(self, there: str, where: str) -> None:
        """The same if only the name of the channel's schema is known."""
        if there and there != self.name and not self.lenient:
            raise RefusedError(f"{where} carries type {there!r}, not {self.name!r}")
