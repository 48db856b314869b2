"""The gateway: modules joined by links."""

from penstock._core.gateway import GatewayMessage

__all__ = ["GatewayMessage"]
