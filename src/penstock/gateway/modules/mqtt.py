"""MqttIn and MqttOut: messages from and to an MQTT 3.1.1 server (``pip install 'penstock[mqtt]'``).

args: of both ``host`` ("127.0.0.1"), ``port`` (1883), ``client_id`` ("penstock-NAME"; must be unique: a second client
with the same id, of another gateway too, disconnects the first), ``username`` and ``password`` (null), ``tls`` (null;
true, or the path of an authority's certificate), ``keepalive_s`` (60), ``will`` (null; {"topic", "payload", "qos",
"retain"}), ``qos`` (1). While the server cannot be reached, the module reports it and keeps trying.
MqttIn: ``topics`` (["#"]), ``clean`` (false: the server keeps the session). Properties: ``topic``, ``qos``, ``retain``.
With QoS 1 and a kept session it is a durable source: it acknowledges a message when that was handled.
MqttOut: ``topic`` ("penstock"; ``{NAME}`` stands for a property), ``retain`` (false), ``timeout_s`` (10.0). With QoS 1
a message is handled when the server has confirmed it; otherwise it fails, and the link may try again.

Example: {"name": "sensors", "loader": {"name": "python", "entrypoint": "penstock.gateway.modules.mqtt:MqttIn"}, "args":
{"host": "10.0.0.2", "topics": ["plant/+/temperature"], "username": "gateway", "password": "${file:mqtt.password}"}}
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Sequence
from typing import Any

from penstock._core.gateway import GatewayMessage
from penstock.gateway.durable import Forwarder
from penstock.gateway.errors import StepFailed, give_back
from penstock.gateway.module import Module, Outlet
from penstock.gateway.mqtt_args import checked, client_of, publish_all

MAX_WAITING = 65536


class _Mqtt(Module):
    """The connection, which is opened in the background and opened again when it is lost."""

    reaches_outside = True
    _client: Any

    def create(self, broker: Outlet, configuration: Any) -> None:
        """Prepare; nothing is known about the server yet."""
        super().create(broker, configuration)
        self._first_outcome = threading.Event()  # set when the server has answered or could not be reached

    def _connect(self, clean: bool, **more: Any) -> Any:
        c = self.configuration
        client = client_of(c, self._client_id, clean, **more)
        client.on_connect, client.on_disconnect = self._connected, self._disconnected
        client.on_connect_fail = lambda *_: self._report(f"cannot be reached: {sys.exc_info()[1]}")
        client.connect_async(c["host"], c["port"], c["keepalive_s"])
        return client

    @property
    def _client_id(self) -> str:
        return str(self.configuration["client_id"] or f"penstock-{self.name}")

    def _connected(self, client: Any, _: Any, __: Any, reason: Any, ___: Any) -> None:
        if reason.is_failure:
            self._report(f"refused the connection: {reason}")
        self._first_outcome.set()

    def _disconnected(self, _: Any, __: Any, ___: Any, reason: Any, ____: Any) -> None:
        if reason.is_failure:
            # The server cannot say why: MQTT 3.1.1 has no field for it.
            self._report(f"is gone: {reason} (or another client with the client_id {self._client_id!r} took its place)")

    def _report(self, what: str) -> None:
        """Report a failure, after which the client tries again by itself."""
        if self.on_failure is not None:
            c = self.configuration
            self.on_failure(StepFailed(f"{c['host']}:{c['port']} {what}", "run"))
        self._first_outcome.set()  # after the report: whoever waits for it finds the reason

    def kill(self) -> None:
        """Disconnect at once: another client may take over the session."""
        self._first_outcome.set()
        self._client.disconnect()

    def destroy(self) -> None:
        """Disconnect in order."""
        self._client.disconnect()
        self._client.loop_stop()


class MqttIn(_Mqtt):
    """Publishes what it receives from the server."""

    acks_in_order = True  # required by the protocol

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        return checked(args, topics=["#"], clean=False)

    @classmethod
    def durable_with(cls, configuration: Any) -> bool:
        """As its args say."""
        return configuration["qos"] == 1 and not configuration["clean"]

    def create(self, broker: Outlet, configuration: Any) -> None:
        """Prepare the connection."""
        super().create(broker, configuration)
        self.durable = self.durable_with(configuration)
        self._inbox: queue.Queue[Any] = queue.Queue(MAX_WAITING)
        self._client = self._connect(configuration["clean"], manual_ack=True)
        self._client.on_subscribe = self._subscribed
        self._client.on_message = self._arrived
        self._forwarder = Forwarder(self, lambda: self, self._forward)

    def start(self) -> None:
        """Connect and read."""
        self._client.loop_start()
        self._forwarder.start()

    def _connected(self, client: Any, _: Any, __: Any, reason: Any, ___: Any) -> None:
        super()._connected(client, _, __, reason, ___)
        if not reason.is_failure:
            client.subscribe([(topic, self.configuration["qos"]) for topic in self.configuration["topics"]])

    def _subscribed(self, _: Any, __: Any, ___: Any, reasons: Any, ____: Any) -> None:
        for topic, reason in zip(self.configuration["topics"], reasons, strict=False):
            if reason.is_failure:
                self._report(f"refused the topic {topic!r}: {reason}")

    def _arrived(self, client: Any, _: Any, message: Any) -> None:
        try:
            message.topic  # noqa: B018 - it is decoded here
        except UnicodeDecodeError:
            self._report("sent a message on a topic that is no UTF-8, which is lost")
            if message.qos:  # otherwise the server would redeliver it for ever
                client.ack(message.mid, message.qos)
        else:
            self._inbox.put(message)

    def read_many(self, most: int, timeout: float) -> Sequence[Any]:
        """The messages that have arrived."""
        found: list[Any] = []
        with contextlib.suppress(queue.Empty):
            while len(found) < most:
                found.append(self._inbox.get(not found, timeout))
        return found

    def ack_many(self, batch: Sequence[Any], begin: int, end: int) -> None:
        """Tell the server that they were handled."""
        for message in (one for one in batch[begin:end] if one.qos):
            self._client.ack(message.mid, message.qos)

    def nack_many(self, batch: Sequence[Any], begin: int, end: int) -> None:
        """Reconnect, so that the server redelivers them; it does not keep those of QoS 0."""
        if any(message.qos for message in batch[begin:end]):
            self._client.reconnect()

    def _forward(self, message: Any) -> None:
        properties = {"topic": message.topic, "qos": str(message.qos), "retain": str(bool(message.retain)).lower()}
        self.publish(message.payload, properties)

    def stop(self) -> None:
        """Stop reading."""
        self._forwarder.stop()

    def kill(self) -> None:
        """Stop waiting for messages to be handled: the server redelivers them."""
        self._forwarder.cut()
        super().kill()


class MqttOut(_Mqtt):
    """Publishes to the server."""

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        return checked(args, topic="penstock", retain=False, timeout_s=10.0)

    def create(self, broker: Outlet, configuration: Any) -> None:
        """Prepare the connection."""
        super().create(broker, configuration)
        self._client = self._connect(clean=True)

    def start(self) -> None:
        """Connect."""
        self._client.loop_start()

    def receive_many(self, messages: Sequence[GatewayMessage]) -> None:
        """Publish them together and wait for the server's confirmations."""
        c = self.configuration
        self._first_outcome.wait(c["timeout_s"])  # the first messages may arrive while the connection is being made
        if not self._client.is_connected():
            raise ConnectionError(f"not connected to {c['host']}:{c['port']}")
        failures = publish_all(self._client, c, messages)
        if len(failures) == len(messages):
            raise failures[0][0]
        for failure, message in failures:
            give_back(self, failure, message)

    def receive(self, message: GatewayMessage) -> None:
        """Publish one."""
        self.receive_many([message])
