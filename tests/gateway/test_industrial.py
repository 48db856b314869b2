"""Serial lines over a pty; Modbus TCP and OPC UA against servers of their own packages, in this process."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway import Delivery, Event, Gateway, LinkOptions
from penstock.gateway.modules.modbus import ModbusIn, ModbusOut
from penstock.gateway.modules.opcua import OpcUaIn, OpcUaOut
from penstock.gateway.modules.serial_line import SerialLine
from tests.gateway.conftest import Collector, eventually

AGAIN = LinkOptions(delivery=Delivery.AT_LEAST_ONCE, backoff_s=0.05, max_backoff_s=0.1)


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway() as made:
        made.add_module("source", Collector)
        made.add_module("sink", Collector)
        yield made


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Loop:
    """An event loop in a thread, for servers."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(60)
        self.loop.close()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def refused(module: Any, args: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        module.parse(args)


# ---- serial


class Pty:
    """The other end of a serial line, at a path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.other, self._port = os.openpty()
        tty.setraw(self._port)
        path.symlink_to(os.ttyname(self._port))

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        for number in (self.other, self._port):
            os.close(number)


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Pty]:
    pytest.importorskip("serial")
    made = Pty(tmp_path / "port")
    yield made
    made.close()


def test_lines_come_from_a_serial_port_and_go_to_it(line: Pty, gateway: Gateway) -> None:
    args = {"port": str(line.path), "baud": 115200, "separator": "\r\n", "max_line_bytes": 8}
    gateway.add_module("scale", SerialLine, args)
    gateway.add_link("scale", "sink")
    gateway.add_link("source", "scale", None, AGAIN)
    gateway.start()
    sink = gateway.module("sink")
    eventually(lambda: gateway.module("scale")._line is not None)  # what came before is gone
    os.write(line.other, b"12.5 kg\r\n13")
    eventually(lambda: sink.got == [b"12.5 kg"])
    os.write(line.other, b".0 kg\r\n\r\nmuch too long\r\n")
    eventually(lambda: sink.got[1:] == [b"13.0 kg", b"", b"much too", b" long"])
    assert sink.messages[0].properties == {"port": str(line.path)}
    gateway.module("source").publish(b"TARE")
    eventually(lambda: os.read(line.other, 64) == b"TARE\r\n")


def test_a_serial_port_that_comes_later_is_waited_for(gateway: Gateway, tmp_path: Path) -> None:
    pytest.importorskip("serial")
    failed = threading.Event()
    gateway.add_event_callback(Event.MODULE_FAILED, lambda *_: failed.set())
    gateway.add_module("scale", SerialLine, {"port": str(tmp_path / "port"), "separator": ""})
    gateway.add_link("scale", "sink")
    gateway.start()
    assert failed.wait(60)
    line = Pty(tmp_path / "port")
    try:
        eventually(lambda: gateway.module("scale")._line is not None)
        os.write(line.other, b"raw")
        eventually(lambda: b"".join(gateway.module("sink").got) == b"raw")
    finally:
        gateway.destroy()
        line.close()


def test_what_no_serial_line_is_is_refused() -> None:
    refused(SerialLine, {}, "port is missing")
    refused(SerialLine, {"port": "/dev/x", "parity": "X"}, "parity must be one of")
    refused(SerialLine, {"port": "/dev/x", "baud": 0}, "baud must be above 0")


# ---- Modbus


class Device:
    """A Modbus device with holding registers and coils, which may go away."""

    def __init__(self, loop: Loop, port: int) -> None:
        from pymodbus.server import ModbusTcpServer
        from pymodbus.simulator import DataType, SimData, SimDevice

        self._loop = loop
        data = [SimData(0, values=[0] * 16, datatype=DataType.REGISTERS)]
        bits = [SimData(0, values=[False] * 16, datatype=DataType.BITS)]
        self._make = lambda: ModbusTcpServer(
            SimDevice(1, simdata=(bits, bits, data, data)), address=("127.0.0.1", port)
        )
        self._start()

    def _start(self) -> None:
        async def serve() -> Any:
            server = self._make()
            await server.serve_forever(background=True)
            return server

        self._server = self._loop.run(serve())

    def close(self) -> None:
        self._loop.run(self._server.shutdown())


@pytest.fixture
def modbus(loop: Loop) -> Iterator[tuple[int, Callable[[], Device]]]:
    pytest.importorskip("pymodbus")
    port = free_port()
    made: list[Device] = []

    def make() -> Device:
        made.append(Device(loop, port))
        return made[-1]

    yield port, make
    for device in made:
        device.close()


def test_registers_are_written_and_polled(modbus: tuple[int, Callable[[], Device]], gateway: Gateway) -> None:
    port, make = modbus
    make()
    address = {"port": port}
    registers = {
        "volts": {"address": 0, "type": "float32"},
        "level": {"address": 4, "type": "int16", "scale": 0.5, "offset": 10.0},
        "door": {"address": 2, "kind": "coil"},
    }
    outs = {
        "volts": {"register": registers["volts"]},
        "level": {"register": registers["level"], "field": "level"},
        "door": {"register": registers["door"]},
    }
    for name, args in outs.items():
        gateway.add_module(f"set {name}", ModbusOut, {**address, **args})
        gateway.add_module(f"say {name}", Collector)
        gateway.add_link(f"say {name}", f"set {name}", None, AGAIN)
    gateway.add_module(
        "device", ModbusIn, {**address, "registers": registers, "poll_s": 0.02, "changes_only": True}
    )
    gateway.add_link("device", "sink")
    gateway.start()
    sink = gateway.module("sink")
    eventually(lambda: sink.got and json.loads(sink.got[-1]) == {"volts": 0.0, "level": 10.0, "door": False})
    gateway.module("say volts").publish(b"12.5")
    gateway.module("say level").publish(b'{"level": -3.5}')
    gateway.module("say door").publish(b"true")
    eventually(lambda: json.loads(sink.got[-1]) == {"volts": 12.5, "level": -3.5, "door": True})
    assert sink.messages[-1].properties == {"device": f"127.0.0.1:{port}/1"}
    assert len({*sink.got}) == len(sink.got), "changes only"


def test_a_device_that_is_away_is_a_failure_and_is_found_again(
    modbus: tuple[int, Callable[[], Device]], gateway: Gateway
) -> None:
    port, make = modbus
    failed = threading.Event()
    gateway.add_event_callback(Event.MODULE_FAILED, lambda *_: failed.set())
    register = {"address": 1}
    gateway.add_module("out", ModbusOut, {"port": port, "timeout_s": 1.0, "register": register})
    gateway.add_module("in", ModbusIn, {"port": port, "timeout_s": 1.0, "poll_s": 0.02, "registers": {"n": register}})
    gateway.add_link("source", "out", None, AGAIN)
    gateway.add_link("in", "sink")
    gateway.start()
    gateway.module("source").publish(b"7")
    assert failed.wait(60)
    make()
    sink = gateway.module("sink")
    eventually(lambda: sink.got and json.loads(sink.got[-1]) == {"n": 7})


def test_what_no_register_is_is_refused() -> None:
    refused(ModbusIn, {}, "registers is missing")
    refused(ModbusIn, {"registers": {"a": {"kind": "word"}}}, "registers.a: kind must be one of")
    refused(ModbusOut, {"register": {"address": 1, "kind": "input"}}, "register: kind must be one of holding, coil")
    refused(ModbusOut, {"register": {"address": 1, "type": "text"}}, "type must be one of")
    refused(ModbusIn, {"registers": {"a": {"address": 65535, "type": "float32"}}}, "registers.a: float32 needs 2 registers")
    assert ModbusIn.parse({"registers": {"a": {"address": 65534, "type": "float32"}, "b": {"address": 65535}}})
    for unit in (300, -1):
        refused(ModbusOut, {"register": {"address": 1}, "unit": unit}, "unit must be 0 to 255")
    refused(ModbusOut, {"register": {"address": 1}, "port": 70000}, "port must be 1 to 65535")


# ---- OPC UA


class UaServer:
    """A server with two variables, which may go away."""

    def __init__(self, loop: Loop, port: int) -> None:
        self._loop = loop
        self.url = f"opc.tcp://127.0.0.1:{port}"
        self._server = loop.run(self._start())

    async def _start(self) -> Any:
        from asyncua import Server

        server = Server()
        await server.init()
        server.set_endpoint(self.url)
        space = await server.register_namespace("plant")
        self.volts = await server.nodes.objects.add_variable(f"ns={space};s=volts", "volts", 1.5)
        self.door = await server.nodes.objects.add_variable(f"ns={space};s=door", "door", False)
        await self.volts.set_writable()
        await server.start()
        return server

    def set(self, node: Any, value: Any) -> None:
        self._loop.run(node.write_value(value))

    def close(self) -> None:
        self._loop.run(self._server.stop())


def test_values_of_a_server_come_as_they_change_and_are_written(gateway: Gateway, loop: Loop) -> None:
    pytest.importorskip("asyncua")
    server = UaServer(loop, free_port())
    try:
        nodes = {"volts": "ns=2;s=volts", "door": "ns=2;s=door"}
        gateway.add_module("plc", OpcUaIn, {"url": server.url, "nodes": nodes, "period_s": 0.02})
        gateway.add_module("out", OpcUaOut, {"url": server.url, "node": "ns=2;s=volts", "field": "volts"})
        gateway.add_link("plc", "sink")
        gateway.add_link("source", "out", None, AGAIN)
        gateway.start()
        sink = gateway.module("sink")

        def last() -> dict[str, Any]:
            return {m.properties["name"]: json.loads(bytes(m)) for m in list(sink.messages)}

        eventually(lambda: last() == {"volts": 1.5, "door": False})
        server.set(server.door, True)
        eventually(lambda: last() == {"volts": 1.5, "door": True})
        gateway.module("source").publish(b'{"volts": 3}')
        eventually(lambda: last() == {"volts": 3.0, "door": True})
        properties = sink.messages[-1].properties
        assert (properties["node"], properties["status"]) == ("ns=2;s=volts", "Good")
        assert "source_time" in properties
        gateway.destroy()
    finally:
        server.close()


def test_a_node_that_the_server_does_not_have_is_a_failure(gateway: Gateway, loop: Loop) -> None:
    pytest.importorskip("asyncua")
    server = UaServer(loop, free_port())
    told: list[str] = []
    gateway.add_event_callback(Event.MODULE_FAILED, lambda _, __, context, ___: told.append(str(context[2])))
    try:
        nodes = {"volts": "ns=2;s=volts", "amps": "ns=2;s=amps"}
        gateway.add_module("plc", OpcUaIn, {"url": server.url, "nodes": nodes, "period_s": 0.02})
        gateway.start()
        eventually(lambda: any("refuses the node amps (ns=2;s=amps): BadNodeIdUnknown" in text for text in told))
        gateway.destroy()
    finally:
        server.close()


def test_a_server_that_comes_later_is_waited_for(gateway: Gateway, loop: Loop) -> None:
    pytest.importorskip("asyncua")
    port = free_port()
    failed = threading.Event()
    gateway.add_event_callback(Event.MODULE_FAILED, lambda *_: failed.set())
    url = f"opc.tcp://127.0.0.1:{port}"
    gateway.add_module("plc", OpcUaIn, {"url": url, "nodes": {"volts": "ns=2;s=volts"}, "period_s": 0.02})
    gateway.add_module("out", OpcUaOut, {"url": url, "node": "ns=2;s=volts"})
    gateway.add_link("plc", "sink")
    gateway.add_link("source", "out", None, AGAIN)
    gateway.start()
    gateway.module("source").publish(b"2.5")
    assert failed.wait(60)
    server = UaServer(loop, port)
    try:
        sink = gateway.module("sink")
        eventually(lambda: sink.got[-1:] == [b"2.5"])
        gateway.destroy()
    finally:
        server.close()


def test_what_no_node_is_is_refused() -> None:
    refused(OpcUaIn, {}, "nodes is missing")
    refused(OpcUaIn, {"nodes": {"a": 3}}, "nodes.a must be a node id")
    refused(OpcUaOut, {"node": "i=1", "url": "http://x"}, "must begin with opc.tcp")
    for node in ("nonsense", "ns=2", "ns=x;i=3", "ns=70000;i=3", "i=-1", "i=4294967296", "s=", "g=12"):
        refused(OpcUaIn, {"nodes": {"a": node}}, "nodes.a must be a node id")
        refused(OpcUaOut, {"node": node}, "node must be a node id")


@pytest.mark.parametrize(
    "node", ["i=1", "ns=2;i=3", "ns=2;s=Door.Open", "s=a;b=c", "nsu=urn:plant;s=x", "ns=1;b=AQI=",
             "g=00000000-0000-0000-0000-00000000002a"],
)  # fmt: skip
def test_what_the_client_takes_for_a_node_is_taken(node: str) -> None:
    from asyncua import ua

    assert ua.NodeId.from_string(node) is not None
    assert OpcUaIn.parse({"nodes": {"a": node}})["nodes"] == {"a": node}
