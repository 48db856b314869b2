"""PropertyMapper: renames, sets and drops properties; the content stays the same.

args: ``rename`` ({"old": "new"}), ``set`` ({"name": "value"}), ``drop`` (["name"]), ``keep`` (null: all; else a list of
names).
They are applied in this order: keep, drop, rename, set.

Example: {"name": "names", "loader": {"name": "python", "entrypoint": "penstock.gateway.modules:PropertyMapper"},
"args": {"rename": {"deviceId": "device"}, "set": {"site": "north"}}}
"""

from __future__ import annotations

from typing import Any

from penstock._core.gateway import GatewayMessage
from penstock.gateway.module import Module, options


class PropertyMapper(Module):
    """The same content with other properties; nothing is copied."""

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        given = options(args, rename={}, set={}, drop=[], keep=None)
        if not isinstance(given["keep"], list | None):
            raise ValueError(f"keep must be a list of names or null, not {given['keep']!r}")
        texts = [*given["rename"].items(), *given["set"].items(), (*given["drop"], *(given["keep"] or ()))]
        if not all(isinstance(text, str) for group in texts for text in group):
            raise ValueError("names and values of properties must be texts")
        return given

    def receive(self, message: GatewayMessage) -> None:
        """Publish it under its new properties."""
        c = self.configuration
        kept = {
            c["rename"].get(name, name): value
            for name, value in message.properties.items()
            if (c["keep"] is None or name in c["keep"]) and name not in c["drop"]
        }
        self.broker.publish(self, message.with_properties({**kept, **c["set"]}))
