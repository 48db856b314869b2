"""SerialLine: a serial port, read line by line and written to (``pip install 'penstock[industrial]'``).

args: ``port`` (required, as "/dev/ttyUSB0"), ``baud`` (9600), ``bits`` (8; 5 to 8), ``parity`` ("N"; also "E", "O",
"M", "S"), ``stop_bits`` (1.0; also 1.5, 2.0), ``separator`` ("\\n"; "": publishes the data as it arrives),
``max_line_bytes`` (4096: a longer line comes in pieces), ``timeout_s`` (10.0, for writing). Property: ``port``. A
message that it receives is written to the port, followed by the separator. When the port does not exist or goes away,
the module fails and is started again with a back-off; messages to be written meanwhile fail, and the link may try
again. A serial line has no memory: data that arrives while nobody reads is lost.

Example: {"name": "scale", "loader": {"name": "python", "entrypoint":
"penstock.gateway.modules.serial_line:SerialLine"}, "args": {"port": "/dev/ttyUSB0", "baud": 115200, "separator":
"\\r\\n"}}
"""

from __future__ import annotations

import threading
from typing import Any

from penstock._core.gateway import GatewayMessage
from penstock.gateway.module import Outlet, Source, options

READ_BYTES = 4096
LOOK_S = 0.2  # how long a read waits for data


class SerialLine(Source):
    """Lines from and to a serial port."""

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        given = options(args, port="", baud=9600, bits=8, parity="N", stop_bits=1.0, separator="\n",
                        max_line_bytes=4096, timeout_s=10.0)  # fmt: skip
        if not given["port"]:
            raise ValueError("port is missing")
        for name, valid in (("bits", (5, 6, 7, 8)), ("parity", tuple("NEOMS")), ("stop_bits", (1, 1.5, 2))):
            if given[name] not in valid:
                raise ValueError(f"{name} must be one of {valid}, not {given[name]!r}")
        for name in ("baud", "max_line_bytes", "timeout_s"):
            if not given[name] > 0:
                raise ValueError(f"{name} must be above 0, not {given[name]!r}")
        return given

    def create(self, broker: Outlet, configuration: Any) -> None:
        """Nothing is open yet."""
        super().create(broker, configuration)
        self._separator = configuration["separator"].encode()
        self._line: Any = None
        self._tried = threading.Event()  # set after the first attempt to open the port
        self._closing = threading.Lock()  # held while writing, so that the port is not closed during a write

    def run(self) -> None:
        """Open the port and publish what comes."""
        import serial

        c = self.configuration
        try:
            line = serial.Serial(c["port"], c["baud"], c["bits"], c["parity"], float(c["stop_bits"]), timeout=LOOK_S,
                                 write_timeout=c["timeout_s"], exclusive=True)  # fmt: skip
            self._line, rest = line, b""
        finally:
            self._tried.set()
        try:
            while not self.stopping.is_set():
                rest = self._publish_lines(rest + line.read(max(1, min(line.in_waiting, READ_BYTES))))
        finally:
            with self._closing:
                self._line = None
                line.close()

    def _publish_lines(self, data: bytes) -> bytes:
        """Publish complete lines; returns the rest."""
        separator, most = self._separator, self.configuration["max_line_bytes"]
        *lines, rest = data.split(separator) if separator else (data, b"")
        for line in lines:
            for at in range(0, len(line) or len(separator), most):
                self.publish(line[at : at + most], {"port": self.configuration["port"]})
        while len(rest) >= most + len(separator):
            self.publish(rest[:most], {"port": self.configuration["port"]})
            rest = rest[most:]
        return rest

    def receive(self, message: GatewayMessage) -> None:
        """Write one."""
        # the first messages may arrive while the port is being opened
        self._tried.wait(self.configuration["timeout_s"])
        with self._closing:
            if self._line is None:
                raise ConnectionError(f"{self.configuration['port']} is not open")
            self._line.write(bytes(message) + self._separator)
            self._line.flush()
