"""Endpoints: addresses as ends of links. An endpoint is a module whose other side is a channel.

What comes over the channel is published as the endpoint's own; what modules send to it goes out over the channel, as
many messages together as wait. Properties travel along (``carriage.py``). The two roles are opened when a link asks
for them, and closed together.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from typing import Any

from penstock import address
from penstock._core.gateway import GatewayMessage
from penstock.channel import Publisher, Subscriber
from penstock.errors import ClosedError, PenstockError
from penstock.gateway import carriage
from penstock.gateway.module import Module

BATCH = 256
READ_TIMEOUT_S = 0.2
log = logging.getLogger("penstock.gateway")


class Endpoint(Module):
    """One address, read, written or both."""

    def __init__(self, text: str) -> None:
        self.name = address.without_secrets(text)
        self._text = text
        self._subscriber: Subscriber | None = None
        self._publisher: Publisher | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._started = False

    def open(self, *, reads: bool, writes: bool) -> None:
        """Open the roles that are asked for and not open yet."""
        if writes and self._publisher is None:
            self._publisher = address.publisher(self._text)
        if reads and self._subscriber is None:
            self._subscriber = address.subscriber(self._text)
            if self._started:
                self._read()

    def start(self) -> None:
        """Begin to read, where somebody is linked to this end."""
        self._started = True
        if self._subscriber is not None and self._thread is None:
            self._read()

    def _read(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"{self.name} reader", daemon=True)
        self._thread.start()

    def wait_ready(self, subscribers: int = 1, timeout: float | None = None) -> bool:
        """Wait until so many read what goes out here: nothing sent later is missed for want of a connection."""
        return self._publisher is None or self._publisher.wait_ready(subscribers, timeout)

    def receive(self, message: GatewayMessage) -> None:
        """Send one out."""
        self.receive_many([message])

    def receive_many(self, messages: Sequence[GatewayMessage]) -> None:
        """Send them out together."""
        if self._publisher is not None:
            carriage.send(self._publisher, messages)

    def _run(self) -> None:
        subscriber = self._subscriber
        assert subscriber is not None
        while not self._stopping.is_set():
            try:
                # Not kept here: a batch that is held while the next is read may hold slots of the channel.
                self._forward_all(subscriber.read_many(BATCH, READ_TIMEOUT_S))
            except ClosedError:
                return
            except (PenstockError, OSError) as error:
                log.error("reading %s failed: %s", self.name, error)
                if self._stopping.wait(1.0):
                    return

    def _forward_all(self, batch: Any) -> None:
        for data in batch:
            self._forward(data)

    def _forward(self, data: Any) -> None:
        try:
            self.broker.publish(self, carriage.arrived(data))
        except TimeoutError as error:  # counted where it happened
            log.warning("%s: %s", self.name, error)
        finally:
            with contextlib.suppress(PenstockError):
                data.release()

    def stop(self) -> None:
        """Read no more."""
        self._stopping.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(10)

    def destroy(self) -> None:
        """Close both roles."""
        self.stop()
        for handle in (self._subscriber, self._publisher):
            if handle is not None:
                handle.close()
