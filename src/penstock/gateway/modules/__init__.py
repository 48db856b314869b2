"""Ready modules. In a gateway's file: ``{"name": "python", "entrypoint": "penstock.gateway.modules:Timer"}``.

Modules that need an extra package are imported by their own path: ``penstock.gateway.modules.mqtt:MqttIn``.
"""

from penstock.gateway.modules.aggregator import Aggregator
from penstock.gateway.modules.deduplicate import Deduplicate
from penstock.gateway.modules.file_out import FileOut
from penstock.gateway.modules.file_tail import FileTail
from penstock.gateway.modules.http_in import HttpIn
from penstock.gateway.modules.http_poster import HttpPoster
from penstock.gateway.modules.influx_out import InfluxOut
from penstock.gateway.modules.logger import Logger
from penstock.gateway.modules.metrics import Metrics
from penstock.gateway.modules.printer import Printer
from penstock.gateway.modules.property_mapper import PropertyMapper
from penstock.gateway.modules.recorder import Recorder
from penstock.gateway.modules.sensor import Sensor
from penstock.gateway.modules.sql_out import SqlOut
from penstock.gateway.modules.switch import Switch
from penstock.gateway.modules.throttle import Throttle
from penstock.gateway.modules.timer import Timer
from penstock.gateway.modules.transform import Transform
from penstock.gateway.modules.window import Window

__all__ = [
    "Aggregator",
    "Deduplicate",
    "FileOut",
    "FileTail",
    "HttpIn",
    "HttpPoster",
    "InfluxOut",
    "Logger",
    "Metrics",
    "Printer",
    "PropertyMapper",
    "Recorder",
    "Sensor",
    "SqlOut",
    "Switch",
    "Throttle",
    "Timer",
    "Transform",
    "Window",
]
