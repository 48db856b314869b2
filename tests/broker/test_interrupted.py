"""An exception of a signal's function, such as KeyboardInterrupt, at every point of a client's code where Python runs
such functions: nothing is stored twice, lost or garbled, and the client works afterwards."""

from __future__ import annotations

import pytest

import penstock
from penstock.broker import Server

from ..interrupting import each_point


@pytest.mark.parametrize("unconfirmed", [0, 100])
def test_what_an_interrupted_publisher_sent_is_stored_once(server: Server, unconfirmed: int) -> None:
    where = f"broker://127.0.0.1:{server.port}/t"
    after = 0
    with penstock.publisher(where, queue="q", unconfirmed=unconfirmed) as publisher:
        for _ in each_point(lambda number: publisher.publish(b"interrupted %d" % number)):
            after += 1
            publisher.publish(b"after %d" % after)
    found = []
    with penstock.subscriber(where, queue="q") as subscriber:
        while (message := subscriber.read(0 if found and found[-1] == b"after %d" % after else 30)) is not None:
            found.append(bytes(message))
    assert after > 20
    assert [one for one in found if one.startswith(b"after")] == [b"after %d" % one for one in range(1, after + 1)]
    others = [one for one in found if not one.startswith(b"after")]
    assert len(others) == len(set(others))
    assert set(others) <= {b"interrupted %d" % one for one in range(after)}
    assert b"interrupted %d" % (after - 1) in others  # the last one was not interrupted


def test_an_interrupted_subscriber_reads_on(server: Server) -> None:
    where = f"broker://127.0.0.1:{server.port}/t"
    count = 400
    with penstock.publisher(where, queue="q") as publisher:
        publisher.publish_many(b"%d" % one for one in range(count))
    found: list[int] = []
    interrupted = 0
    with penstock.subscriber(where, queue="q", ack="manual", credit=7) as subscriber:

        def read(_: int) -> None:
            message = subscriber.read(30)
            assert message is not None
            found.append(int(bytes(message)))
            subscriber.ack(message)

        for was in each_point(read):
            interrupted += was
            read(0)
    with penstock.subscriber(where, queue="q", ack="manual") as subscriber:  # what was read and not acknowledged
        while set(found) != set(range(count)):
            message = subscriber.read(30)
            assert message is not None, "it was acknowledged by nobody, so it comes again"
            found.append(int(bytes(message)))
            subscriber.ack(message)
    assert interrupted > 20
