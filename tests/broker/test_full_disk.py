"""A disk that is really full: told so, everything else served, and room again as soon as messages are consumed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.broker import Client, Server
from penstock.broker.store import Reserve
from penstock.errors import RefusedError
from tests.broker.conftest import LONG, until


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A partition of 16 MB."""
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)], capture_output=True)
    if made.returncode:
        pytest.skip("mounting needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(client: Client) -> int:
    count = 0
    with pytest.raises(RefusedError, match="disk is full"):
        for _ in range(10_000):
            client.publish("t", bytes(20_000))
            count += 1
    return count


@pytest.mark.parametrize("options", [{}, {"keep": "0"}, {"segment_bytes": 1 << 20}], ids=["default", "keep 0", "small"])
def test_consuming_makes_room(serve: Callable[..., Server], small: Path, options: dict[str, object]) -> None:
    server = serve(directory=small / "broker", **options)
    with Client(port=server.port, timeout=LONG) as client:
        client.queue("q", topics="t")
        for _ in range(3):  # again and again
            count = fill(client)
            assert count > 50
            client.queue("other", topics="u")
            with client.subscribe("q") as consumer:
                for _ in range(count):
                    assert consumer.receive(timeout=LONG) is not None
            until(lambda: has_room(client))
            client.purge("q")


def has_room(client: Client) -> bool:
    try:
        client.publish("t", b"room")
    except RefusedError:
        return False
    return True


def test_a_restarted_broker_accepts_messages_when_its_reserve_is_complete_again(
    serve: Callable[..., Server], small: Path
) -> None:
    server = serve(directory=small / "broker")
    with Client(port=server.port, timeout=LONG) as client:
        client.queue("q", topics="t")
        count = fill(client)
    reserve = small / "broker" / "reserve"
    for _ in range(3):
        server.close()
        assert reserve.stat().st_size < Reserve.BYTES
        server = serve(directory=small / "broker")
        with Client(port=server.port, timeout=LONG) as client, pytest.raises(RefusedError, match="disk is full"):
            client.publish("t", b"in what is left")
    with Client(port=server.port, timeout=LONG) as client:
        with client.subscribe("q") as consumer:
            for _ in range(count):
                assert consumer.receive(timeout=LONG) is not None
        until(lambda: has_room(client))
    assert reserve.stat().st_size == Reserve.BYTES


def test_acknowledgements_alone_never_take_what_a_new_segment_needs(serve: Callable[..., Server], small: Path) -> None:
    server = serve(directory=small / "broker")
    with Client(port=server.port, timeout=LONG) as client:
        client.queue("q", topics="t")
        client.queue("w", topics="t")
        count = fill(client)
        with client.subscribe("w", ack="manual") as consumer:
            for number in range(2 * count):  # each a record of its own
                message = consumer.receive(timeout=LONG)
                if number < count:
                    consumer.nack(message)
                else:
                    consumer.ack(message, confirm=True)
        client.purge("q")
        until(lambda: has_room(client))
