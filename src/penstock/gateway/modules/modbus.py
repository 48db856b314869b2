"""ModbusIn and ModbusOut: registers of a Modbus TCP device (``pip install 'penstock[industrial]'``).

args: of both ``host`` ("127.0.0.1"), ``port`` (502), ``unit`` (1), ``timeout_s`` (3.0), ``word_order`` ("big"; or
"little").
A register is {"address": N, "kind": "holding" (or "input", "coil", "discrete"), "type": "uint16" (or "int16", "uint32",
"int32", "uint64", "int64", "float32", "float64"), "scale": 1.0, "offset": 0.0}; its value is what the device reports
times ``scale`` plus ``offset``; a coil or discrete input is true or false.
ModbusIn: ``registers`` (required; names to registers), ``poll_s`` (1.0), ``changes_only`` (false). Publishes a JSON
object of all values at each poll, or when one has changed. Property: ``device``. When a device does not answer, the
module fails and is started again with a back-off.
ModbusOut: ``register`` (required; holding or coil), ``field`` (null: the content is the value as JSON; else the name of
a field of the content, a JSON object). A message is handled when the device has confirmed it; otherwise it fails, and
the link may try again.

Example: {"name": "meter", "loader": {"name": "python", "entrypoint": "penstock.gateway.modules.modbus:ModbusIn"},
"args": {"host": "10.0.0.7", "registers": {"volts": {"address": 0, "type": "float32"}, "door": {"address": 3, "kind":
"coil"}}}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock._core.gateway import GatewayMessage
from penstock.gateway.module import Module, Outlet, Source, options

COMMON = {"host": "127.0.0.1", "port": 502, "unit": 1, "timeout_s": 3.0, "word_order": "big"}
REGISTER = {"address": 0, "kind": "holding", "type": "uint16", "scale": 1.0, "offset": 0.0}
KINDS = ("holding", "input", "coil", "discrete")
BITS = ("coil", "discrete")
TYPES = {"uint16": 1, "int16": 1, "uint32": 2, "int32": 2, "float32": 2, "uint64": 4, "int64": 4, "float64": 4}


class _Device:
    """The connection; any one thread."""

    def __init__(self, configuration: Mapping[str, Any]) -> None:
        from pymodbus.client import ModbusTcpClient

        c = configuration
        self.name = f"{c['host']}:{c['port']}/{c['unit']}"
        self._unit, self._words = c["unit"], c["word_order"]
        self._client = ModbusTcpClient(c["host"], port=c["port"], timeout=c["timeout_s"], retries=1)

    def read(self, register: Mapping[str, Any]) -> Any:
        """The register's value."""
        kind, size = register["kind"], 1 if register["kind"] in BITS else TYPES[register["type"]]
        reads = {"holding": "read_holding_registers", "input": "read_input_registers", "coil": "read_coils",
                 "discrete": "read_discrete_inputs"}  # fmt: skip
        found = self._request(reads[kind], register["address"], count=size)
        if kind in BITS:
            return bool(found.bits[0])
        value = self._client.convert_from_registers(found.registers, self._type(register), word_order=self._words)
        if (register["scale"], register["offset"]) == (1, 0):
            return value
        return value * register["scale"] + register["offset"]

    def write(self, register: Mapping[str, Any], value: Any) -> None:
        """Set the register."""
        if register["kind"] == "coil":
            self._request("write_coil", register["address"], bool(value))
            return
        number = (value - register["offset"]) / register["scale"]
        number = number if register["type"].startswith("float") else round(number)
        words = self._client.convert_to_registers(number, self._type(register), word_order=self._words)
        self._request("write_registers", register["address"], words)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _type(self, register: Mapping[str, Any]) -> Any:
        return self._client.DATATYPE[register["type"].upper()]

    def _request(self, method: str, *what: Any, **more: Any) -> Any:
        from pymodbus import ModbusException

        try:
            if not self._client.connect():
                raise ConnectionError(f"{self.name} cannot be reached")
            answer = getattr(self._client, method)(*what, **more, device_id=self._unit)
        except ModbusException as error:
            self._client.close()
            raise ConnectionError(f"{self.name} does not answer: {error}") from error
        if answer.isError():
            raise OSError(f"{self.name} refuses {method.replace('_', ' ')} at {what[0]}: {answer}")
        return answer


def _register(given: Any, name: str, kinds: tuple[str, ...] = KINDS) -> dict[str, Any]:
    try:
        register = options(given, **REGISTER)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if register["kind"] not in kinds:
        raise ValueError(f"{name}: kind must be one of {', '.join(kinds)}, not {register['kind']!r}")
    if register["type"] not in TYPES:
        raise ValueError(f"{name}: type must be one of {', '.join(TYPES)}, not {register['type']!r}")
    if not 0 <= register["address"] <= 65535 or register["scale"] == 0:
        raise ValueError(f"{name}: address must be 0 to 65535, and scale not 0")
    size = 1 if register["kind"] in BITS else TYPES[register["type"]]
    if register["address"] + size > 65536:
        raise ValueError(f"{name}: {register['type']} needs {size} registers: address must be at most {65536 - size}")
    return register


def _checked(args: Any, **more: Any) -> dict[str, Any]:
    given = options(args, **COMMON, **more)
    if given["word_order"] not in ("big", "little"):
        raise ValueError(f'word_order must be "big" or "little", not {given["word_order"]!r}')
    if not 0 <= given["unit"] <= 255:
        raise ValueError(f"unit must be 0 to 255, not {given['unit']}")
    if not 1 <= given["port"] <= 65535:
        raise ValueError(f"port must be 1 to 65535, not {given['port']}")
    if not given["timeout_s"] > 0:
        raise ValueError(f"timeout_s must be above 0, not {given['timeout_s']!r}")
    return given


class ModbusIn(Source):
    """Reads registers at each poll."""

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        given = _checked(args, registers={}, poll_s=1.0, changes_only=False)
        if not given["registers"]:
            raise ValueError("registers is missing")
        if not given["poll_s"] > 0:
            raise ValueError(f"poll_s must be above 0, not {given['poll_s']!r}")
        registers = {name: _register(one, f"registers.{name}") for name, one in given["registers"].items()}
        return {**given, "registers": registers}

    def run(self) -> None:
        """Poll until the end."""
        c, before = self.configuration, None
        device = _Device(c)
        try:
            while not self.stopping.is_set():
                values = {name: device.read(register) for name, register in c["registers"].items()}
                if values != before or not c["changes_only"]:
                    self.publish(json.dumps(values).encode(), {"device": device.name})
                before = values
                self.stopping.wait(c["poll_s"])
        finally:
            device.close()


class ModbusOut(Module):
    """Sets a register."""

    reaches_outside = True

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        given = _checked(args, register={}, field=None)
        if not given["register"]:
            raise ValueError("register is missing")
        return {**given, "register": _register(given["register"], "register", ("holding", "coil"))}

    def create(self, broker: Outlet, configuration: Any) -> None:
        """Prepare the connection, which the first message opens."""
        super().create(broker, configuration)
        self._device = _Device(configuration)

    def receive(self, message: GatewayMessage) -> None:
        """Write one value."""
        value = json.loads(bytes(message))
        if self.configuration["field"] is not None:
            value = value[self.configuration["field"]]
        if not isinstance(value, int | float):
            raise ValueError(f"a register's value must be a number, true or false, not {value!r}")
        self._device.write(self.configuration["register"], value)

    def destroy(self) -> None:
        """Close the connection."""
        self._device.close()
