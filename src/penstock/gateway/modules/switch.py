"""Switch: sends each message to the first output whose filter lets it through.

args: ``outputs`` ({"hot": {"properties": {"kind": "warm"}}, ...}: the filters of links, in order). Links take them from
``NAME.hot``; a message that no filter lets through is published as usual, for links from ``NAME``.

Example: {"name": "sorter", "loader": {"name": "python", "entrypoint": "penstock.gateway.modules:Switch"}, "args":
{"outputs": {"hot": {"where": ".celsius > 80"}, "cold": {"where": ".celsius < 5"}}}}
"""

from __future__ import annotations

from typing import Any

from penstock._core.gateway import GatewayMessage
from penstock.gateway.configuration import link_filter
from penstock.gateway.module import Module, Outlet, check_output, options
from penstock.gateway.place import Place


class Switch(Module):
    """Routes by content size and properties, without code."""

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        place = Place(options(args, outputs={}), "")["outputs"]
        if not place.mapping():
            raise ValueError("outputs is empty; give at least one name with its filter")
        return {check_output(name): link_filter(place[name]) for name in place.mapping()}

    def create(self, broker: Outlet, configuration: Any) -> None:
        """Prepare the filters."""
        super().create(broker, configuration)
        self._routes = [(name, one.compile(self.clock.now)) for name, one in configuration.items()]

    def receive(self, message: GatewayMessage) -> None:
        """Publish it once."""
        self.publish(message, output=next((name for name, accepts in self._routes if accepts(message)), ""))
