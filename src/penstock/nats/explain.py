"""Why nothing arrives at a ``nats://`` address: connects, and asks the stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.address import Address, convert, option_names
from penstock.errors import PenstockError
from penstock.finding import Finding
from penstock.nats import open_subscriber

__all__ = ["explain"]

ANSWER_S = 2.0


def explain(parts: Address) -> Iterator[Finding]:
    """Whether a server answers there, lets this user in and takes the subscription."""
    known = {name: text for name, text in parts.options.items() if name in option_names(open_subscriber)}
    options = convert(known, open_subscriber, parts.text)
    options = {**options, "timeout": min(ANSWER_S, options.get("timeout", ANSWER_S)), "durable": ""}
    try:
        with open_subscriber(replace(parts, topic=parts.topic or ">"), **options):
            yield Finding(f"a NATS server answers at {parts.host}:{parts.port}", grave=False)
    except (PenstockError, OSError) as error:
        yield Finding(str(error), "start a server there, or check port, token and stream")
