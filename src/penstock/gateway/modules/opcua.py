"""OpcUaIn and OpcUaOut: values of an OPC UA server (``pip install 'penstock[industrial]'``).

args: of both ``url`` ("opc.tcp://127.0.0.1:4840"), ``username`` and ``password`` (null), ``security`` (null; as
"Basic256Sha256,SignAndEncrypt,CERTIFICATE,KEY"), ``timeout_s`` (4.0).
OpcUaIn: ``nodes`` (required; names to node ids, as {"volts": "ns=2;i=3"}), ``period_s`` (0.5, how often the server
samples a node; of several changes in between only the last one is published). Publishes a value as JSON when it has
changed. Properties: ``name``, ``node``, ``status`` ("Good" or what is wrong), ``source_time`` (ISO, if the server gives
it). When the server goes away, the module fails and is started again with a back-off; then it publishes the present
value of each node, and changes from there on.
OpcUaOut: ``node`` (required), ``field`` (null: the content is the value as JSON; else the name of a field of the
content, a JSON object). The value is converted to the node's type. A message is handled when the server has confirmed
it; otherwise it fails, and the link may try again.

Example: {"name": "plc", "loader": {"name": "python", "entrypoint": "penstock.gateway.modules.opcua:OpcUaIn"}, "args":
{"url": "opc.tcp://10.0.0.9:4840", "nodes": {"volts": "ns=2;i=3", "door": "ns=2;s=Door.Open"}}}
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import Any

from penstock._core.gateway import GatewayMessage
from penstock.gateway.module import Module, Outlet, Source, options
from penstock.secrecy import without_secrets

COMMON = {"url": "opc.tcp://127.0.0.1:4840", "username": None, "password": None, "security": None, "timeout_s": 4.0}
LOOK_S = 0.1  # how often to check whether the module is stopped
CHECK_S = 1.0  # how often to check the connection
_NODE = re.compile(
    r"(?:srv=\d+;)?(?:ns=(?P<space>\d{1,5});|nsu=[^;]+;)?"
    r"(?:i=(?P<number>\d{1,10})|s=.+|g=[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|b=[A-Za-z0-9+/]+={0,2})",
    re.ASCII | re.DOTALL,
)


async def _connected(configuration: Any) -> Any:
    from asyncua import Client

    c = configuration
    client = Client(c["url"], timeout=c["timeout_s"])
    if c["username"] is not None:
        client.set_user(c["username"])
        client.set_password(c["password"] or "")
    if c["security"] is not None:
        await client.set_security_string(c["security"])
    await client.connect()
    return client


async def _disconnect(client: Any) -> None:
    """Disconnect; errors are ignored, because the server may be gone."""
    with contextlib.suppress(Exception):
        await client.disconnect()


def _checked(args: Any, **more: Any) -> dict[str, Any]:
    given = options(args, **COMMON, **more)
    if not given["url"].startswith("opc.tcp://"):
        raise ValueError(f"url must begin with opc.tcp://, unlike {without_secrets(given['url'])!r}")
    for name in ("timeout_s", "period_s"):
        if name in given and not given[name] > 0:
            raise ValueError(f"{name} must be above 0, not {given[name]!r}")
    return given


def _check_node(node: Any, name: str) -> None:
    found = _NODE.fullmatch(node) if isinstance(node, str) else None
    if found is None or int(found["space"] or 0) > 65535 or int(found["number"] or 0) >= 1 << 32:
        raise ValueError(f"{name} must be a node id such as 'ns=2;i=3', not {node!r}")


class OpcUaIn(Source):
    """Publishes what changes."""

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        given = _checked(args, nodes={}, period_s=0.5)
        if not given["nodes"]:
            raise ValueError("nodes is missing")
        for name, node in given["nodes"].items():
            _check_node(node, f"nodes.{name}")
        return given

    async def run(self) -> None:  # type: ignore[override]
        """Subscribe, and publish until the end."""
        c = self.configuration
        client = await _connected(c)
        try:
            names = {client.get_node(node): name for name, node in c["nodes"].items()}
            subscription = await client.create_subscription(c["period_s"] * 1000, _Changes(self, names))
            watched = await subscription.subscribe_data_change(list(names))
            for name, found in zip(c["nodes"], watched, strict=True):
                if not isinstance(found, int):
                    said = f"refuses the node {name} ({c['nodes'][name]}): {found.name}"
                    raise LookupError(f"{without_secrets(c['url'])} {said}")
            looks = 0
            while not self.stopping.is_set():
                await asyncio.sleep(LOOK_S)
                looks += 1
                if looks % round(CHECK_S / LOOK_S) == 0:
                    await client.check_connection()  # raises if the connection is lost
        finally:
            await _disconnect(client)


class _Changes:
    """Receives the client's notifications."""

    def __init__(self, module: OpcUaIn, names: dict[Any, str]) -> None:
        self._module, self._names = module, names

    def datachange_notification(self, node: Any, value: Any, data: Any) -> None:
        """Publish the new value of a node."""
        found = data.monitored_item.Value
        properties = {"name": self._names[node], "node": node.nodeid.to_string(), "status": found.StatusCode.name}
        if found.SourceTimestamp is not None:
            properties["source_time"] = found.SourceTimestamp.isoformat()
        self._module.publish(json.dumps(value, default=str).encode(), properties)


class OpcUaOut(Module):
    """Sets a node."""

    reaches_outside = True

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        given = _checked(args, node="", field=None)
        if not given["node"]:
            raise ValueError("node is missing")
        _check_node(given["node"], "node")
        return given

    def create(self, broker: Outlet, configuration: Any) -> None:
        """Prepare; the first message opens the connection."""
        super().create(broker, configuration)
        self._client: Any = None

    async def receive(self, message: GatewayMessage) -> None:  # type: ignore[override]
        """Write one value."""
        value = json.loads(bytes(message))
        if self.configuration["field"] is not None:
            value = value[self.configuration["field"]]
        try:
            if self._client is None:
                self._client = await _connected(self.configuration)
            node = self._client.get_node(self.configuration["node"])
            await node.write_value(value, await node.read_data_type_as_variant_type())
        except BaseException:
            client, self._client = self._client, None
            if client is not None:
                await _disconnect(client)
            raise

    async def destroy(self) -> None:  # type: ignore[override]
        """Disconnect."""
        if self._client is not None:
            await _disconnect(self._client)
