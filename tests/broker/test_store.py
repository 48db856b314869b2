"""The broker's own tests over a store that is no file and whose positions have gaps: nothing assumes a journal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.broker import Client, Server, Store
from penstock.broker.fetch import RangeClient

from .conftest import LONG
from .memory_store import Memory, MemoryStore
from .test_details import test_what_is_staged_keeps_them as test_staging_with_details
from .test_fetch import test_staging_becomes_visible_at_once_and_once as test_staging
from .test_properties import test_they_come_back_after_a_restart as test_properties_come_back_after_a_restart
from .test_properties import test_they_travel_to_every_reader as test_properties_travel
from .test_queues import (  # noqa: F401
    test_acknowledged_is_gone_and_the_rest_comes_again,
    test_consumers_share_a_queue,
    test_credit_bounds_what_a_consumer_holds,
    test_dead_letters_and_redrive,
    test_delayed_messages_survive_a_restart,
    test_duplicates_in_the_window_are_stored_once,
    test_everything_survives_a_restart,
    test_exclusive,
    test_nack_with_delay,
    test_purge_delete_list,
    test_redelivery_after_a_timeout,
    test_replay,
    test_time_to_live,
    test_transactions,
    test_wildcards,
)
from .test_raw import (  # noqa: F401
    test_a_new_queue_starts_after_its_first_sub,
    test_a_queue_collects_with_nobody_connected,
    test_a_thousand_in_one_segment,
    test_one_client_a_queue,
    test_the_session_of_the_reference,
)

__all__ = ["test_properties_come_back_after_a_restart", "test_properties_travel", "test_staging", "test_staging_with_details"]


# These say which positions they want to see: 1, 2, 3.
DENSE = ("staging", "credit", "duplicates", "replay", "transactions")


@pytest.fixture
def serve(request: pytest.FixtureRequest) -> Iterator[Callable[..., Server]]:
    """Starts brokers over one memory; all are closed at the end."""
    dense = any(word in request.node.name for word in DENSE)
    memory = Memory(gaps=itertools.repeat(1), first=1) if dense else Memory()
    servers: list[Server] = []

    def store(snapshot: Any) -> Store:
        return MemoryStore(memory, snapshot)

    def start(**options: Any) -> Server:
        servers.append(Server(None, 0, store=store, **options).start())
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_positions_have_gaps_and_each_is_told(server: Server, client: Client) -> None:
    first, last = client.publish_many("t", [b"%d" % i for i in range(10)])
    assert last - first > 9, "this store leaves gaps"
    with RangeClient(port=server.port) as reader:
        (part,) = reader.ranges(1, last + 1)
        found = [message.position for message in part]
    assert (len(found), found[0], found[-1]) == (10, first, last)
    single = client.publish("t", b"x")
    client.queue("q", topics="t", from_position=found[4])
    with client.subscribe("q", ack="manual") as consumer:
        read = [consumer.read(LONG) for _ in range(7)]
        assert [message.position for message in read if message] == [*found[4:], single]
