"""What the contract's tests share: how long a wait may be, and reading a number of messages."""

from __future__ import annotations

import penstock

LONG = 30.0  # more than enough on a loaded machine; nothing here waits for it when things work


def read_all(subscriber: penstock.Subscriber, count: int) -> list[bytes]:
    """``count`` messages one by one, as copies."""
    found = []
    for _ in range(count):
        message = subscriber.read(LONG)
        assert message is not None, f"only {len(found)} of {count} came"
        found.append(bytes(message))
        message.release()
    return found
