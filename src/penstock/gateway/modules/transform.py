"""Transform: sets properties and content by assignments and templates, without code.

args: ``where`` ({}: a filter as links have it; what it does not let through passes unchanged), ``assign`` ([]: as
[".fahrenheit = .celsius * 1.8 + 32", "properties.alarm = .celsius > 30"]: expressions as filters have them, assigned to
fields of the content, a JSON object, or to properties, where null removes the property), ``set`` ({"name":
"template"}), ``content`` (null: unchanged; else a template, or an object of templates that becomes JSON), ``drop`` ([]:
properties to leave out). In a template ``{NAME}`` stands for a property, ``{content}`` for the content as text,
``{size}``, ``{source}``, and ``{json.a.b}`` for a value of the JSON content; a missing value is "-". In an object
of templates, one that is a single ``{json...}`` keeps its type (number, list). All of them see the original message.

Example: {"name": "units", "loader": {"name": "python", "entrypoint": "penstock.gateway.modules:Transform"}, "args":
{"assign": [".fahrenheit = .celsius * 1.8 + 32"]}}
"""

from __future__ import annotations

import json
import re
from typing import Any

from penstock._core.gateway import GatewayMessage
from penstock.filter import Subject, compile_assignment
from penstock.gateway.configuration import link_filter
from penstock.gateway.module import Module, Outlet, options
from penstock.gateway.place import Place

_NAME = re.compile(r"\{([^{}]*)\}")


class Transform(Module):
    """Applies assignments and templates."""

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        given = options(args, where={}, assign=[], set={}, content=None, drop=[])
        if not all(isinstance(text, str) for text in given["assign"]):
            raise ValueError("assign must be a list of texts such as '.fahrenheit = .celsius * 1.8 + 32'")
        assigned = [compile_assignment(text) for text in given["assign"]]
        if given["content"] is not None and any(not path[0] for path, _ in assigned):
            raise ValueError("give content or assign to fields, not both: content would replace what assign has set")
        templates = [*given["set"].values(), *(given["content"].values() if isinstance(given["content"], dict) else ())]
        if not all(isinstance(text, str) for text in templates) or not isinstance(given["content"], str | dict | None):
            raise ValueError("templates must be texts")
        return {**given, "where": link_filter(Place(given["where"], "where"))}

    def create(self, broker: Outlet, configuration: Any) -> None:
        """Prepare the filter."""
        super().create(broker, configuration)
        where = configuration["where"]
        self._assigned = [compile_assignment(text) for text in configuration["assign"]]
        self._to_fields = any(not path[0] for path, _ in self._assigned)
        self._accepts = None if where.empty else where.compile(self.clock.now)

    def receive(self, message: GatewayMessage) -> None:
        """Publish it changed."""
        if self._accepts is not None and not self._accepts(message):
            self.publish(message)
            return
        c, values = self.configuration, _Values(message)
        properties = {name: text for name, text in message.properties.items() if name not in c["drop"]}
        properties.update({name: values.filled(template) for name, template in c["set"].items()})
        content = self._assign(message, properties) if self._assigned else None
        if content is not None:
            self.publish(content, properties)
        elif c["content"] is None:
            self.publish(message.with_properties(properties))
        elif isinstance(c["content"], str):
            self.publish(values.filled(c["content"]).encode(), properties)
        else:
            self.publish(json.dumps({k: values.typed(t) for k, t in c["content"].items()}).encode(), properties)


    def _assign(self, message: GatewayMessage, properties: dict[str, str]) -> bytes | None:
        """Carry out the assignments to properties and to fields of the content."""
        subject = Subject(message)
        found = [(path, evaluate(subject)) for path, evaluate in self._assigned]
        if not self._to_fields:
            for (_, name), value in found:
                _set_property(properties, name, value)
            return None
        content = json.loads(bytes(message))
        for (first, *path), value in found:
            if first:
                _set_property(properties, path[0], value)
            else:
                _set_field(content, path, value)
        return json.dumps(content, allow_nan=False).encode()


def _set_property(properties: dict[str, str], name: str, value: Any) -> None:
    properties.pop(name, None)
    if value is not None:
        properties[name] = value if isinstance(value, str) else json.dumps(value)


def _set_field(content: Any, path: list[str], value: Any) -> None:
    for name in path[:-1]:
        content = content.setdefault(name, {}) if isinstance(content, dict) else None
    if not isinstance(content, dict):
        raise ValueError(f"{'.'.join(['', *path])} cannot be assigned to: there is no JSON object at that place")
    content[path[-1]] = value


class _Values:
    """The values that templates may name; the JSON content is parsed at first use."""

    def __init__(self, message: GatewayMessage) -> None:
        self._message = message
        self._json: Any = None

    def filled(self, template: str) -> str:
        return _NAME.sub(lambda match: self._shown(self._value(match[1])), template)

    def typed(self, template: str) -> Any:
        match = _NAME.fullmatch(template)
        return self._value(match[1]) if match and match[1].startswith("json") else self.filled(template)

    def _shown(self, value: Any) -> str:
        return "-" if value is None else value if isinstance(value, str) else json.dumps(value)

    def _value(self, name: str) -> Any:
        first, *path = name.split(".")
        if first == "json":
            if self._json is None:
                self._json = json.loads(bytes(self._message))
            found = self._json
            for part in path:
                found = found.get(part) if isinstance(found, dict) else None
            return found
        if name == "content":
            return bytes(self._message).decode(errors="backslashreplace")
        if name in ("size", "source"):
            return self._message.size if name == "size" else str(self._message.channel)
        return self._message.properties.get(name)
