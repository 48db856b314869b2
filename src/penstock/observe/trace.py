"""OpenTelemetry trace context in message properties, when the user has OpenTelemetry loaded.

``inject`` does nothing in a program that has not imported OpenTelemetry, which pays for two lookups in ``sys.modules``;
one that has pays for its own propagator.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

__all__ = ["extract", "following", "inject"]


def inject(properties: MutableMapping[str, str]) -> None:
    """Add ``traceparent`` (and what else the propagator writes) of the current span to ``properties``."""
    if "opentelemetry.propagate" in sys.modules or "opentelemetry.trace" in sys.modules:
        from opentelemetry import propagate

        propagate.inject(properties)


def extract(properties: Mapping[str, str]) -> Any:
    """The context that a message carries, for ``tracer.start_as_current_span(..., context=...)``; None if it has none.
    """
    if "traceparent" not in properties:
        return None
    from opentelemetry import propagate

    return propagate.extract(properties)


def following(message: Any, name: str = "") -> Any:
    """A span for handling ``message``, in the trace of whoever published it: ``with following(message): ...``.

    Where the message carries no context it begins a trace of its own. Needs OpenTelemetry (extra ``otel``).
    """
    import opentelemetry.trace as tracing

    channel = str(message.channel)
    return tracing.get_tracer("penstock").start_as_current_span(
        name or f"{channel} process", context=extract(message.properties or {}), kind=tracing.SpanKind.CONSUMER,
        attributes={"messaging.system": "penstock", "messaging.destination.name": channel},
    )  # fmt: skip
