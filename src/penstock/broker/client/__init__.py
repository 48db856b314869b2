"""The broker's clients: the protocol without I/O (``dialogue``), its connection (``link``), handles over both."""

from penstock.broker.client.clients import AsyncClient, Client
from penstock.broker.client.publisher import Publisher
from penstock.broker.client.subscriber import Subscriber

__all__ = ["AsyncClient", "Client", "Publisher", "Subscriber"]
