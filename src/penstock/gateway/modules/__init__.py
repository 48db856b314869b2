"""Ready modules. In a gateway's file: ``{"name": "python", "entrypoint": "penstock.gateway.modules:Timer"}``."""

from penstock.gateway.modules.aggregator import Aggregator
from penstock.gateway.modules.file_tail import FileTail
from penstock.gateway.modules.http_poster import HttpPoster
from penstock.gateway.modules.logger import Logger
from penstock.gateway.modules.metrics import Metrics
from penstock.gateway.modules.printer import Printer
from penstock.gateway.modules.property_mapper import PropertyMapper
from penstock.gateway.modules.recorder import Recorder
from penstock.gateway.modules.sensor import Sensor
from penstock.gateway.modules.timer import Timer

__all__ = [
    "Aggregator",
    "FileTail",
    "HttpPoster",
    "Logger",
    "Metrics",
    "Printer",
    "PropertyMapper",
    "Recorder",
    "Sensor",
    "Timer",
]
