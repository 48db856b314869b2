"""Modules that think in objects: ``input_type``, ``output_type``, and links that compare them."""

from __future__ import annotations

import dataclasses
import os
import queue
import time

import pytest

import penstock
from penstock.errors import DecodeError, InvalidArgument
from penstock.gateway import Filter, Gateway, Module
from penstock.gateway.errors import AddLinkError
from penstock.types import Schema, plain


@dataclasses.dataclass
class Reading:
    celsius: float
    place: str = "hall"


@dataclasses.dataclass
class Other:
    celsius: str


class Speaker(Module):
    output_type = Reading


class Ear(Module):
    input_type = Reading

    def create(self, broker, configuration):
        super().create(broker, configuration)
        self.heard = configuration["heard"]

    def receive(self, message):
        try:
            self.heard.put(self.value(message))
        except DecodeError as error:
            self.heard.put(error)


class Stranger(Module):
    input_type = Other


class Plain(Module):
    pass


def joined(gateway, source, heard):
    gateway.add_module("source", source)
    gateway.add_module("ear", Ear, {"heard": heard})
    gateway.add_link("source", "ear")
    gateway.start()
    return gateway._kept["source"].module


def test_objects_go_in_and_come_out():
    heard = queue.Queue()
    with Gateway() as gateway:
        speaker = joined(gateway, Speaker, heard)
        speaker.publish(Reading(21.5), {"kind": "warm"})
        assert heard.get(timeout=30) == Reading(21.5, "hall")
        with pytest.raises(TypeError, match="expected a Reading, not bytes"):
            speaker.publish(b"{}")


def test_what_does_not_decode_says_where_it_stands():
    heard = queue.Queue()
    with Gateway() as gateway:
        plain = joined(gateway, Plain, heard)
        plain.publish(b'{"celsius": "warm"}')
        error = heard.get(timeout=30)
        assert isinstance(error, DecodeError) and "of source" in str(error) and "celsius" in str(error)
        assert Plain().value(b"bytes") == b"bytes"


def test_a_link_between_types_that_differ_is_refused():
    with Gateway() as gateway:
        gateway.add_module("speaker", Speaker)
        gateway.add_module("stranger", Stranger)
        with pytest.raises(AddLinkError, match=r"Reading is published, and Other is read: field 'celsius' is number"):
            gateway.add_link("speaker", "stranger")
        gateway.add_module("plain", Plain)
        gateway.add_link("speaker", "plain")
        gateway.add_link("plain", "stranger")


def test_addresses_are_described_and_compared(tmp_path):
    address = f"journal:{tmp_path / 'j'}#readings"
    with Gateway() as gateway:
        gateway.add_module("speaker", Speaker)
        gateway.add_link("speaker", address)
        gateway.start()
        with penstock.subscriber(address, type=Reading) as subscriber:
            assert Schema.parse(subscriber.schema).name == "Reading"
            gateway._kept["speaker"].module.publish(Reading(1.5))
            assert subscriber.receive(30).value == Reading(1.5)
        gateway.add_module("stranger", Stranger)
        with pytest.raises(AddLinkError, match=r"carries Reading \(json\), not this Other \(json\): field 'celsius'"):
            gateway.add_link(address, "stranger")
    with Gateway() as gateway, penstock.publisher(f"journal:{tmp_path / 'k'}#readings", type=Other):
        pass
    with Gateway() as gateway:
        gateway.add_module("speaker", Speaker)
        with pytest.raises(AddLinkError, match="carries Other"):
            gateway.add_link("speaker", f"journal:{tmp_path / 'k'}#readings")


class Packer(Module):
    output_type = plain(Reading, "msgpack")


@pytest.mark.parametrize("scheme", ["shm:/", "bus:"])
def test_channels_without_properties_are_described_and_compared(scheme):
    address = f"{scheme}gateway-typed-{os.getpid()}"
    with Gateway() as gateway:
        gateway.add_module("speaker", Speaker)
        gateway.add_link("speaker", address)
        gateway.start()
        with penstock.subscriber(address, type=Reading) as subscriber:
            assert Schema.parse(subscriber.schema).name == "Reading"
            speaker = gateway._kept["speaker"].module
            speaker.publish(Reading(1.5), {"kind": "warm"})
            assert subscriber.receive(30).value == Reading(1.5)
        gateway.add_module("packer", Packer)
        with pytest.raises(AddLinkError, match="written as msgpack and read as json"):
            gateway.add_link("packer", address)


PACKED = plain(Reading, "msgpack")


class Relay(Module):
    def receive(self, message):
        self.publish(bytes(message))


class TypedRelay(Module):
    input_type = output_type = PACKED

    def receive(self, message):
        self.publish(self.value(message))


class PackedEar(Ear):
    input_type = PACKED


@pytest.mark.parametrize("relay", [None, TypedRelay, Relay], ids=["by the channel", "by the module", "by nobody"])
def test_a_filter_sees_the_fields_of_what_its_source_says(relay, caplog):
    """Of every encoding, without ``type=``; where nobody says it, that is told."""
    heard = queue.Queue()
    where = f"shm:/gateway-filter-{os.getpid()}"
    with penstock.publisher(where, type=PACKED) as publisher, Gateway() as gateway:
        gateway.add_module("ear", PackedEar, {"heard": heard})
        if relay is not None:
            gateway.add_module("relay", relay)
            gateway.add_link(where, "relay")
        gateway.add_link(where if relay is None else "relay", "ear", Filter(where=".celsius > 2"))
        gateway.start()
        assert publisher.wait_ready(1, 60)
        for celsius in (1.0, 3.0, 2.0, 5.0):
            publisher.publish(Reading(celsius))
        if relay is Relay:
            deadline = time.monotonic() + 60
            while "a message cannot be read and has no fields" not in caplog.text:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        else:
            assert [heard.get(timeout=60).celsius for _ in range(2)] == [3.0, 5.0]
    assert heard.empty() and ("cannot be read" in caplog.text) == (relay is Relay)


@pytest.mark.parametrize("relay", [None, TypedRelay], ids=["by the channel", "by the module"])
def test_a_filter_by_a_field_that_its_source_does_not_have_is_told(relay, caplog):
    where = f"shm:/gateway-filter-{os.getpid()}"
    with penstock.publisher(where, type=PACKED) as publisher, Gateway() as gateway:
        gateway.add_module("ear", PackedEar, {"heard": queue.Queue()})
        if relay is not None:
            gateway.add_module("relay", relay)
            gateway.add_link(where, "relay")
        gateway.add_link(where if relay is None else "relay", "ear", Filter(where=".kelvin > 2"))
        gateway.start()
        assert publisher.wait_ready(1, 60)
        publisher.publish_many([Reading(1.0), Reading(3.0)])
        deadline = time.monotonic() + 60
        while "has no field 'kelvin'" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert caplog.text.count("has no field 'kelvin'") == 1


def test_a_filter_of_a_type_names_its_fields():
    with pytest.raises(InvalidArgument, match="Reading has no field 'celsus'; did you mean"):
        Filter(where=".celsus > 2", type=PACKED)
