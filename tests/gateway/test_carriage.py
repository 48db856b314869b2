"""Addresses as ends of links: properties travel along, whatever the channel knows of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.gateway import AddLinkError, Gateway, GatewayMessage, modules
from penstock.gateway.carriage import arrived
from tests.gateway.conftest import Collector, eventually


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway() as made:
        for name in ("source", "sink"):
            made.add_module(name, Collector)
        made.start()
        yield made


def address_of(reach: str, directory: Path) -> str:
    unique = f"gateway-{os.getpid()}-{os.urandom(3).hex()}"
    return {"bus": f"bus:{unique}", "shm": f"shm:/{unique}", "journal": f"journal:{directory / unique}#topic"}[reach]


MESSAGES: list[tuple[bytes, dict[str, str]]] = [
    (b"plain", {}),
    (b"with properties", {"deviceId": "d1", "ä": ""}),
    (b"", {"only": "properties"}),
    (b"\xa1\x60 begins like one", {}),
]


@pytest.mark.parametrize("reach", ["bus", "shm", "journal"])
def test_what_goes_out_over_a_channel_comes_back_the_same(gateway: Gateway, reach: str, tmp_path: Path) -> None:
    address = address_of(reach, tmp_path)
    gateway.add_link("source", address)  # a journal is made by who writes it
    gateway.add_link(address, "sink")
    for content, properties in MESSAGES:
        gateway.module("source").publish(content, properties)
    sink = gateway.module("sink")
    eventually(lambda: len(sink.got) == len(MESSAGES))
    assert [(bytes(m), dict(m.properties)) for m in sink.messages] == MESSAGES
    assert [m.channel for m in sink.messages] == [address] * len(MESSAGES)


def test_times_that_were_given_stay(gateway: Gateway, tmp_path: Path) -> None:
    """Within the gateway, out of it and back in: 0 and times before 1970 too, in any order."""
    address = address_of("journal", tmp_path)
    gateway.add_link("source", address)
    gateway.add_link(address, "sink")
    times = [9 * 10**18, -9 * 10**18, -1, 0, 1]
    source, sink = gateway.module("source"), gateway.module("sink")
    for number, when in enumerate(times):
        source.broker.publish(source, GatewayMessage(b"%d" % number, timestamp_ns=when))
    eventually(lambda: len(sink.got) == len(times))
    assert [message.timestamp_ns for message in sink.messages] == times
    assert abs(GatewayMessage(b"").timestamp_ns - time.time_ns()) < 3600 * 10**9


def test_a_message_has_the_time_of_its_channel_with_properties_or_without(gateway: Gateway, tmp_path: Path) -> None:
    address = address_of("shm", tmp_path)
    with penstock.subscriber(address) as beside:
        gateway.add_link("source", address)
        gateway.add_link(address, "sink")
        for content, properties in MESSAGES:
            gateway.module("source").publish(content, properties)
        sink = gateway.module("sink")
        eventually(lambda: len(sink.got) == len(MESSAGES))
        times = [message.timestamp_ns for message in beside.read_many(len(MESSAGES), 30)]
        assert [message.timestamp_ns for message in sink.messages] == times


def test_that_modules_do_not_see_metadata_is_told_once(
    gateway: Gateway, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = address_of("shm", tmp_path)
    with penstock.publisher(address, metadata_size=8) as camera:
        gateway.add_link(address, "sink")
        for _ in range(2):
            camera.publish(b"x", metadata=b"12345678")  # type: ignore[call-arg]
        sink = gateway.module("sink")
        eventually(lambda: len(sink.got) == 2)
    assert caplog.text.count(f"{address}: modules do not see metadata of messages") == 1


def test_over_tcp(gateway: Gateway) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    gateway.add_link("source", address)
    gateway.add_link(address, "sink")
    assert gateway.module(address)._publisher.wait_ready(1, 60)
    for content, properties in MESSAGES:
        gateway.module("source").publish(content, properties)
    sink = gateway.module("sink")
    eventually(lambda: len(sink.got) == len(MESSAGES))
    assert [(bytes(m), dict(m.properties)) for m in sink.messages] == MESSAGES


def test_over_a_broker(gateway: Gateway, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "penstock", "broker", str(tmp_path / "broker"), str(port)])
    try:
        eventually(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
        gateway.add_link(f"broker://127.0.0.1:{port}/topic?queue=sink", "sink")
        gateway.add_link("source", f"broker://127.0.0.1:{port}/topic")
        for content, properties in MESSAGES:
            gateway.module("source").publish(content, properties)
        sink = gateway.module("sink")
        eventually(lambda: len(sink.got) == len(MESSAGES))
        found = [(bytes(m), {**m.properties}) for m in sink.messages]
        for _, properties in found:
            properties.pop("deliveries", None)  # the broker's own
        assert found == MESSAGES
        gateway.destroy()
    finally:
        server.terminate()
        server.wait(30)


def test_what_others_publish_comes_in_as_it_is(gateway: Gateway, tmp_path: Path) -> None:
    address = address_of("bus", tmp_path)
    gateway.add_link(address, "sink")
    sink = gateway.module("sink")
    with penstock.publisher(address) as publisher:
        publisher.publish(b"raw")
        publisher.publish(GatewayMessage(b"formed", {"k": "v"}).to_bytes())
        eventually(lambda: sink.got == [b"raw", b"formed"])
    assert [dict(m.properties) for m in sink.messages] == [{}, {"k": "v"}]
    assert sink.messages[0].timestamp_ns > 0


def test_an_endpoint_lives_as_long_as_a_link_names_it(gateway: Gateway, tmp_path: Path) -> None:
    address = address_of("bus", tmp_path)
    gateway.add_link(address, "sink")
    gateway.add_link("source", address)
    assert address in [line.name for line in gateway.module_list()]
    gateway.remove_link(address, "sink")
    assert address in [line.name for line in gateway.module_list()]
    gateway.remove_module("source")
    assert [line.name for line in gateway.module_list()] == ["sink"]


def test_a_star_into_an_address_records_everything(gateway: Gateway, tmp_path: Path) -> None:
    incoming, record = address_of("bus", tmp_path), f"journal:{tmp_path / 'all'}#all"
    gateway.add_link(incoming, "sink")
    gateway.add_link("*", record)
    gateway.module("source").publish(b"from a module", {"a": "1"})
    with penstock.publisher(incoming) as publisher:
        publisher.publish(b"from a channel")
        eventually(lambda: gateway.module("sink").got == [b"from a channel"])
    assert gateway.destroy()
    with penstock.subscriber(record, start="first") as reader:
        stored = [reader.read(30), reader.read(30)]
    assert sorted((bytes(m), dict(m.properties)) for m in stored if m) == [
        (b"from a channel", {}),
        (b"from a module", {"a": "1"}),
    ]


def test_an_address_that_cannot_be_opened_leaves_the_gateway_as_it_was(gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    before = gateway.module_list()
    with pytest.raises((penstock.PenstockError, OSError)):
        gateway.add_link("source", f"journal:{tmp_path / 'file'}#x")
    with pytest.raises(AddLinkError):
        gateway.add_link("nobody", address_of("bus", tmp_path))
    assert gateway.module_list() == before


def test_the_recorder_writes_a_topic_a_device(gateway: Gateway, tmp_path: Path) -> None:
    directory = tmp_path / "record"
    gateway.add_module("recorder", modules.Recorder, {"directory": str(directory), "topic": "device.{deviceId}"})
    gateway.add_link("source", "recorder")
    for number in range(20):
        gateway.module("source").publish(b"%d" % number, {"deviceId": f"d{number % 2}"})
    gateway.remove_module("recorder")
    for device in range(2):
        with penstock.subscriber(f"journal:{directory}#device.d{device}", start="first") as reader:
            found: Any = [reader.read(30) for _ in range(10)]
        assert [int(bytes(m)) for m in found] == list(range(device, 20, 2))
        assert {m.properties["deviceId"] for m in found} == {f"d{device}"}


def test_a_message_of_any_channel_becomes_a_gateways() -> None:
    message = penstock.Message(b"content", properties={"k": "v"}, timestamp_ns=5)
    made = arrived(message)
    assert (bytes(made), dict(made.properties), made.timestamp_ns) == (b"content", {"k": "v"}, 5)
