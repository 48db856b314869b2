"""Bridge: carries messages from any reach to any other, most often shared memory to TCP and back on another machine."""

from penstock.bridge.bridge import Bridge, Latency
from penstock.bridge.multiplexer import Multiplexer
from penstock.bridge.vchans import read_map

__all__ = ["Bridge", "Latency", "Multiplexer", "read_map"]
