"""The gateway: modules joined by links, in one process or several.

``Gateway`` makes modules from a file or step by step and changes them while they run; ``ModuleBroker`` is the router
alone; ``GatewayMessage`` is what modules exchange: properties (text to text) and content (bytes). Ready-made modules
are in ``penstock.gateway.modules``.
"""

from __future__ import annotations

from penstock._core.gateway import GatewayMessage
from penstock.gateway.broker import ModuleBroker, ModuleInfo
from penstock.gateway.configuration import Configuration, QueueOptions, read
from penstock.gateway.errors import AddLinkError, BrokerError, DrainError, ModuleError, RemoveLinkError
from penstock.gateway.events import Event
from penstock.gateway.filters import Filter
from penstock.gateway.gateway import Gateway, ListedModule
from penstock.gateway.links import Delivery, Link, LinkOptions
from penstock.gateway.module import Module, Source
from penstock.gateway.native import include_directory
from penstock.gateway.place import ConfigurationError
from penstock.gateway.supervision import Policy, Restart

__all__ = [
    "AddLinkError",
    "BrokerError",
    "Configuration",
    "ConfigurationError",
    "Delivery",
    "DrainError",
    "Event",
    "Filter",
    "Gateway",
    "GatewayMessage",
    "Link",
    "LinkOptions",
    "ListedModule",
    "Module",
    "ModuleBroker",
    "ModuleError",
    "ModuleInfo",
    "Policy",
    "QueueOptions",
    "RemoveLinkError",
    "Restart",
    "Source",
    "include_directory",
    "read",
]
