"""The monitor over real rooms: a tail that is asked for, actions that are allowed, the flow of a broker."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import penstock
from penstock import types
from penstock.broker import Client, Server

pytest.importorskip("starlette")

from penstock.monitor.service import Service


@pytest.fixture
def service() -> Iterator[Service]:
    with Service(every_s=0.2, allow_actions=True) as running:
        running.start()
        yield running


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def post(url: str, **body: Any) -> tuple[int, Any]:
    request = urllib.request.Request(url, data=json.dumps(body).encode(), headers={"X-Penstock-Action": "1"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_tail_shows_what_comes_and_lets_go(service: Service) -> None:
    name = f"shm:/test-tail-{uuid.uuid4().hex[:8]}"
    with penstock.publisher(name, slots=32, slot_size=256) as publisher:
        stop = threading.Event()

        def feed() -> None:
            number = 0
            while not stop.wait(0.01):
                number += 1
                publisher.publish(json.dumps({"n": number}).encode())

        feeder = threading.Thread(target=feed)
        feeder.start()
        try:
            records = []
            url = service.url + f"api/tail?address={name}&filter=.n%20%25%202%20%3D%3D%200"
            with urllib.request.urlopen(url, timeout=30) as stream:
                while len(records) < 5:
                    line = stream.readline().decode()
                    if line.startswith("data: "):
                        record = json.loads(line.removeprefix("data: "))
                        if "ordinal" in record:
                            records.append(record)
            assert all(record["payload"]["n"] % 2 == 0 and record["ordinal"] == record["payload"]["n"] for record in records)
        finally:
            stop.set()
            feeder.join()
        deadline = time.monotonic() + 30
        while any(h["where"] == name and h["kind"] == "subscriber" for h in get(service.url + "api/state")["handles"]):
            assert time.monotonic() < deadline, "the tail's subscriber stays open"
            time.sleep(0.1)


def test_a_queue_is_seen_and_purged(service: Service, tmp_path: Path) -> None:
    import os

    with Server(str(tmp_path / "b"), 0).start() as server:
        address = f"broker://127.0.0.1:{server.port}/t"
        with penstock.subscriber(f"{address}?queue=work") as consumer, penstock.publisher(address) as publisher:
            publisher.publish(b"one")
            assert consumer.read(30) is not None
        with penstock.publisher(address) as publisher:
            for _ in range(7):
                publisher.publish(b"x")
        status, said = post(service.url + "api/actions/purge", queue="work", pid=os.getpid())
        assert status == 200 and "messages of work were dropped" in said["done"], said
        with Client("127.0.0.1", server.port) as client:
            (queue,) = [known for known in client.queues() if known["queue"] == "work"]
        status, said = post(service.url + "api/actions/redrive", queue="work", pid=os.getpid())
        assert status == 200 and "0 dead letters" in said["done"]
        assert post(service.url + "api/actions/purge", queue="nothing", pid=os.getpid())[0] == 400
        assert post(service.url + "api/actions/purge", queue=5)[0] == 400
        assert queue["depth"] == 0


def test_a_queue_is_paused_and_resumed(service: Service, tmp_path: Path) -> None:
    import os

    def shown() -> dict[str, Any]:
        handles = get(service.url + "api/state")["handles"]
        mine = (h for h in handles if (h["room"], h["kind"], h["name"]) == ("broker", "queue", "work"))
        return next(mine, {"state": None, "health": None, "depth": None})

    assert get(service.url + "api/state")["actions"] == ["pause", "purge", "redrive", "resume"]
    with Server(str(tmp_path / "b"), 0).start() as server:
        address = f"broker://127.0.0.1:{server.port}/t"
        with penstock.subscriber(f"{address}?queue=work") as consumer, penstock.publisher(address) as publisher:
            status, said = post(service.url + "api/actions/pause", queue="work", pid=os.getpid())
            assert status == 200 and "paused" in said["done"], said
            publisher.publish(b"one")
            assert consumer.read(0.3) is None
            wait_until(lambda: (shown()["state"], shown()["health"], shown()["depth"]) == ("paused", "stuck", 1))
            assert post(service.url + "api/actions/resume", queue="work", pid=os.getpid())[0] == 200
            assert bytes(consumer.read(30) or b"") == b"one"
            wait_until(lambda: shown()["state"] == "" and shown()["health"] != "stuck")
        assert post(service.url + "api/actions/pause", queue="nothing", pid=os.getpid())[0] == 400


def test_slots_lag_and_latency_of_shared_memory(service: Service) -> None:
    """Held slots and lag are read from the channel, the latency is the reader's; the publisher does nothing for them."""
    name = f"shm:/test-memory-{uuid.uuid4().hex[:8]}"

    def shown(kind: str) -> dict[str, Any]:
        handles = get(service.url + "api/state")["handles"]
        return next((h for h in handles if (h["where"], h["kind"]) == (name, kind)), {"depth": None, "lag": None})

    with penstock.publisher(name, slots=16, slot_size=64) as publisher, penstock.subscriber(name) as subscriber:
        for _ in range(5):
            publisher.publish(b"x")
        held = [subscriber.read(30), subscriber.read(30)]
        assert all(held)
        wait_until(lambda: (shown("subscriber")["depth"], shown("subscriber")["lag"]) == (2, 3))
        assert (shown("publisher")["depth"], shown("publisher")["capacity"]) == (2, 16)
        assert shown("publisher")["latency_us"] is None, "who publishes measures nothing"
        assert shown("subscriber")["latency_us"] > 0
        held.clear()
        while subscriber.read(0) is not None:
            pass
        wait_until(lambda: (shown("subscriber")["depth"], shown("subscriber")["lag"]) == (0, 0))


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_flow_of_a_broker(service: Service, tmp_path: Path) -> None:
    with Server(str(tmp_path / "b"), 0).start() as server:
        address = f"broker://127.0.0.1:{server.port}/t"
        with penstock.subscriber(f"{address}?queue=work") as consumer, penstock.publisher(address) as publisher:
            publisher.publish(b"one")
            assert consumer.read(30) is not None
            deadline = time.monotonic() + 30
            while True:
                graph = get(service.url + "api/state")["graph"]
                edges = {(edge["from"], edge["to"]) for edge in graph["edges"]}
                published, read = (any(edge[at] == end for edge in edges) for at, end in ((1, address), (0, "queue work")))
                if (address, "queue work") in edges and published and read:
                    break
                assert time.monotonic() < deadline, edges


def test_a_reader_that_sleeps_and_loses_is_never_green(service: Service) -> None:
    """Not while messages are lost, and not afterwards, when nothing moves any more."""
    name = f"shm:/test-asleep-{uuid.uuid4().hex[:8]}"

    def health() -> tuple[str, int]:
        handles = get(service.url + "api/state")["handles"]
        mine = (h for h in handles if (h["where"], h["kind"]) == (name, "subscriber"))
        return next(((h["health"], h["lost"]) for h in mine), ("", 0))

    with penstock.publisher(name, slots=16, slot_size=64) as publisher, penstock.subscriber(name):
        wait_until(lambda: health()[0] == "idle")
        for _ in range(1000):
            publisher.publish(b"x")
        wait_until(lambda: health()[1] > 900)
        assert health()[0] in ("losing", "stuck")
        wait_until(lambda: health()[0] == "stuck")
        seen = {health()[0] for _ in range(20)}
        assert seen == {"stuck"}


class Scan(msgspec.Struct):
    text: str
    at: dict[str, float]
    ranges: list[float] = []


@pytest.mark.parametrize("kind", [types.plain(Scan, "msgpack"), Scan, None], ids=["msgpack", "json", "bytes"])
def test_the_numbers_of_a_long_message_are_there(service: Service, kind: Any) -> None:
    name = f"shm:/test-tail-{uuid.uuid4().hex[:8]}"
    value = Scan("a" * 3000, {"x": 1.5}, [float(n) for n in range(300)])
    more = {} if kind is None else {"type": kind}
    url = service.url + f"api/tail?address={name}"
    with (
        penstock.publisher(name, slots=32, slot_size=8192, **more) as publisher,
        urllib.request.urlopen(url, timeout=30) as stream,
    ):
        record: dict[str, Any] = {}
        while "ordinal" not in record:
            line = stream.readline().decode()
            if line.startswith("data: "):
                record = json.loads(line.removeprefix("data: "))
            publisher.publish(value if kind else msgspec.json.encode(value))
    assert record["cut"] and len(record["payload"]) == 2048 and "aaa" in record["payload"]
    assert record["numbers"] == {"at.x": 1.5, **{f"ranges[{n}]": float(n) for n in range(199)}}


def test_a_filter_names_the_fields_of_the_type(service: Service) -> None:
    name = f"shm:/test-tail-{uuid.uuid4().hex[:8]}"
    with penstock.publisher(name, type=Scan):
        url = service.url + f"api/tail?address={name}&filter=.tex%20%3D%3D%20%22%22"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(url, timeout=30)
        with refused.value as answer:
            assert "Scan has no field 'tex'" in json.load(answer)["error"]
