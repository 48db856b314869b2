"""Lanes through a broker: requests wait on disk for a server, answers go to a temporary queue of the client.

Requests are messages of the address's topic; servers take them from one queue (``?queue=``, by default the topic): each
one goes to one of them. Answers are messages of ``TOPIC.@answers.CLIENT``, cancellations of ``TOPIC.@cancels``, which
every server sees. So the rights to call are the rights to these topics.

Rules:

- A request is acknowledged after its answer is on disk; if a server dies in between, the next one gets the request, and
  the client ignores a second answer.
- A request that has a time limit carries it as its TTL, so that the broker drops it when the client no longer waits.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Hashable
from typing import Any

from penstock.address import Address
from penstock.calls.envelope import Envelope, aged, unpack
from penstock.calls.lanes import ClientLane, ServerLane, held
from penstock.errors import ClosedError, InvalidArgument, PenstockError, ProtocolError, RefusedError, UnreachedError

ANSWER_TTL_S = 3600.0  # TTL of an answer that is not read
CANCEL_S = 1.0  # how long a cancellation waits for a broker that cannot be reached


def answers_topic(topic: str, origin: bytes) -> str:
    """Where the answers for a client go."""
    return f"{topic}.@answers.{origin.hex()}"


def cancels_topic(topic: str) -> str:
    """The topic of cancellations."""
    return f"{topic}.@cancels"


def _read(subscriber: Any, timeout: float) -> Any:
    """The next message, if one comes: a broker that is gone may come back, and calls have time limits of their own."""
    with contextlib.suppress(UnreachedError):
        return subscriber.read(timeout)
    return None


class QueuedClient(ClientLane):
    """The client's lane. Its peer is the broker, which outlives every server.

    It connects at its first call. The queue for its answers is temporary and keeps its place over a reconnect, so that
    an answer that arrives while the connection is down is not missed.
    """

    durable = True
    ready = False  # the broker syncs before it confirms

    def __init__(self, address: Address, origin: bytes, queue: str, options: dict[str, Any]) -> None:
        from penstock.broker import Client

        self._address = address
        self._place = (address.host, address.port or 9876)
        self._away = f"the broker at {self._place[0]}:{self._place[1]} did not answer in time"
        self._topic = _topic_of(address)
        self._queue = queue or self._topic
        self._answers_topic = answers_topic(self._topic, origin)
        self._options = options
        self._client = Client(*self._place, **options)
        self._answers: Any = None
        self._made = False  # set when the queue of requests is known to exist
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._closed = False

    def _ask(self, deadline: float | None, method: Any, *arguments: Any, **more: Any) -> Any:
        """One request to the broker, which must answer before the deadline."""
        with held(self._lock, deadline, self._away):
            self._client.timeout = self._time_for(deadline)
            return method(*arguments, **more)

    def _time_for(self, deadline: float | None) -> float:
        timeout = float(self._options["timeout"])
        return timeout if deadline is None else max(0.001, min(timeout, deadline - time.monotonic()))

    def _open(self, deadline: float | None) -> None:
        """Create the two queues; that of the answers before the first request."""
        from penstock.broker import Subscriber

        with held(self._opening, deadline, self._away):
            if self._answers is None:
                options = {**self._options, "timeout": self._time_for(deadline)}
                self._answers = Subscriber(*self._place, topics=self._answers_topic, ack="read", **options)
            if not self._made:
                # Create the queue so that requests wait for a server. Without the right to, rely on the server's own.
                with contextlib.suppress(RefusedError):
                    self._ask(deadline, self._client.queue, self._queue, create=True, topics=self._topic)
                self._made = True

    def send(self, data: bytes, deadline: float | None) -> Hashable:
        if self._closed:
            raise ClosedError(f"the client of {self._address} was closed")
        if self._answers is None or not self._made:
            self._open(deadline)
        left = None if deadline is None else max(0.001, deadline - time.monotonic())
        self._ask(deadline, self._client.publish, self._topic, data, ttl_s=left)
        return "broker"

    def cancel(self, peer: Hashable, data: bytes) -> None:
        # If it does not arrive, the TTL of the request ends the call.
        with contextlib.suppress(PenstockError, TimeoutError, OSError):
            self._ask(time.monotonic() + CANCEL_S, self._client.publish, cancels_topic(self._topic), data, ttl_s=60.0)

    def receive(self, timeout: float) -> Envelope | None:
        message = _read(self._answers, timeout)
        return None if message is None else unpack(bytes(message))

    def gone(self, peer: Hashable) -> bool:
        return False  # the request is on disk; a server may come

    def wait_ready(self, servers: int, timeout: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with contextlib.suppress(TimeoutError):
                if self._ask(deadline, self._client.peers, self._topic)[1] >= servers:
                    return True
            left = 0.02 if deadline is None else min(0.02, deadline - time.monotonic())
            if left <= 0:
                return False
            time.sleep(left)

    def fileno(self) -> int:
        return int(self._answers.fileno())

    def close(self) -> None:
        self._closed = True
        if self._answers is not None:
            self._answers.close()
        self._client.close()


def _topic_of(address: Address) -> str:
    """The topic of the requests: one, by name."""
    topic = address.topic or ""
    if not topic or "*" in topic or ">" in topic:
        raise InvalidArgument(f"{address.text!r}: calls need one topic: broker://HOST:PORT/TOPIC")
    return topic


class QueuedServer(ServerLane):
    """The server's lane. The way back is the message that brought the request."""

    def __init__(self, address: Address, queue: str, options: dict[str, Any]) -> None:
        from penstock.broker import Client, Subscriber

        port = address.port or 9876
        self._topic = _topic_of(address)
        self._client = Client(address.host, port, **options)
        self._cancels: Any = None
        try:
            self._cancels = Subscriber(address.host, port, topics=cancels_topic(self._topic), ack="read", **options)
            self._requests: Any = Subscriber(
                address.host, port, queue=queue or self._topic, topics=self._topic, ack="manual", credit=64, **options
            )
        except BaseException:
            if self._cancels is not None:
                self._cancels.close()
            self._client.close()
            raise
        self._answering = threading.Lock()
        self._settled: list[Any] = []  # acknowledged by the receiving thread, which alone may use the subscriber
        self._lock = threading.Lock()

    def receive(self, timeout: float | None) -> tuple[Any, Envelope] | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._acknowledge()
            cancel = _read(self._cancels, 0)
            if cancel is not None:
                return None, unpack(bytes(cancel))
            left = 0.05 if deadline is None else max(0.0, min(0.05, deadline - time.monotonic()))
            message = _read(self._requests, left)
            if message is not None:
                break
            if deadline is not None and time.monotonic() >= deadline:
                return None
        try:
            envelope = aged(unpack(bytes(message)), time.time_ns() - message.timestamp_ns)
        except ProtocolError:
            self._requests.ack(message)  # otherwise it would be redelivered for ever
            raise
        return (message, envelope.origin), envelope

    def _acknowledge(self) -> None:
        with self._lock:
            settled, self._settled = self._settled, []
        for message in settled:
            self._requests.ack(message)

    def answer(self, way: Any, data: bytes) -> bool:
        with self._answering:
            self._client.publish(answers_topic(self._topic, way[1]), data, ttl_s=ANSWER_TTL_S)
        self.drop(way)
        return True

    def drop(self, way: Any) -> None:
        if way is not None:  # a cancellation has nothing to settle
            with self._lock:
                self._settled.append(way[0])

    def close(self, goodbye: bytes) -> None:
        """Says no goodbye: requests without an answer go to the next server."""
        with contextlib.suppress(PenstockError, OSError):  # they are redelivered; the client ignores a second answer
            self._acknowledge()
        self._requests.close()
        self._cancels.close()
        with self._answering:
            self._client.close()


def open_client(
    address: Address,
    origin: bytes,
    most: int,
    *,
    queue: str = "",
    token: str | None = None,
    tls: bool | str | None = None,
    timeout: float = 30.0,
) -> ClientLane:
    """A client's lane through ``broker://HOST:PORT/TOPIC``; ``timeout`` is for the broker's own answers."""
    return QueuedClient(address, origin, queue, {"token": token, "tls": tls, "timeout": timeout})


def open_server(
    address: Address,
    *,
    queue: str = "",
    token: str | None = None,
    tls: bool | str | None = None,
    timeout: float = 30.0,
) -> ServerLane:
    """A server's lane at ``broker://HOST:PORT/TOPIC?queue=NAME``."""
    return QueuedServer(address, queue, {"token": token, "tls": tls, "timeout": timeout})
