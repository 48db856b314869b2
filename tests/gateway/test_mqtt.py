"""MQTT in and out, against a real server (mosquitto), which is started for each test and may go away."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from penstock.gateway import Delivery, Event, Gateway, LinkOptions
from penstock.gateway.modules.mqtt import MqttIn, MqttOut
from tests.gateway.conftest import Collector, eventually

paho = pytest.importorskip("paho.mqtt.client")
MOSQUITTO = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin")
pytestmark = pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed")
AGAIN = LinkOptions(delivery=Delivery.AT_LEAST_ONCE, backoff_s=0.05, max_backoff_s=0.1)


class Broker:
    """A mosquitto of the test's own; it keeps its sessions over a restart."""

    def __init__(self, directory: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self._file = directory / "mosquitto.conf"
        self._file.write_text(
            f"listener {self.port} 127.0.0.1\nallow_anonymous true\npersistence true\n"
            f"persistence_location {directory}/\nuser root\n"
        )
        self.start()

    def start(self) -> None:
        command = [str(MOSQUITTO), "-c", str(self._file)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        eventually(self.answers)

    def answers(self) -> bool:
        """Whether it greets a client. One that only listens has not begun its work, and forgets a SIGTERM that comes
        before that."""
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", self.port)):
                return False
            probe.settimeout(60)
            probe.sendall(b"\x10\x0c\x00\x04MQTT\x04\x02\x00\x3c\x00\x00")
            return probe.recv(4) == b"\x20\x02\x00\x00"

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    made = Broker(tmp_path)
    yield made
    made.stop()


def made(broker: Broker) -> Gateway:
    """source -> server -> sink."""
    gateway = Gateway()
    for name in ("source", "sink"):
        gateway.add_module(name, Collector)
    here = "penstock.gateway.modules.mqtt"
    gateway.add_module("in", f"{here}:MqttIn", {"port": broker.port, "topics": ["plant/#"]})
    gateway.add_module("out", f"{here}:MqttOut", {"port": broker.port, "topic": "plant/{device}"})
    gateway.add_link("source", "out", None, AGAIN)
    gateway.add_link("in", "sink")
    gateway.start()
    return gateway


def test_there_and_back(broker: Broker) -> None:
    with made(broker) as gateway:
        sink = gateway.module("sink")
        eventually(lambda: gateway.module("in")._client.is_connected())
        eventually(lambda: sink.got or gateway.module("source").publish(b"probe", {"device": "d"}))
        gateway.module("source").publish(b"21.5", {"device": "boiler"})
        eventually(lambda: sink.got[-1] == b"21.5")
        assert sink.messages[-1].properties["topic"] == "plant/boiler"
        assert sink.messages[-1].properties["qos"] == "1"


def test_a_server_that_goes_away_for_a_while_loses_nothing(broker: Broker) -> None:
    with made(broker) as gateway:
        sink, source = gateway.module("sink"), gateway.module("source")
        eventually(lambda: sink.got or source.publish(b"probe", {"device": "d"}))
        broker.stop()
        for n in range(50):
            source.publish(b"%d" % n, {"device": "d"})
        broker.start()
        eventually(lambda: {b"%d" % n for n in range(50)} <= set(sink.got))


def test_what_was_not_handled_comes_again(broker: Broker) -> None:
    gateway = made(broker)
    sink, source = gateway.module("sink"), gateway.module("source")
    eventually(lambda: sink.got or source.publish(b"probe", {"device": "d"}))
    sink.gate.clear()
    for n in range(5):
        source.publish(b"%d" % n, {"device": "d"})
    worker = gateway.broker.worker_of(sink)
    eventually(lambda: worker.waiting >= 5)
    gateway.destroy(4.0)
    sink.gate.set()
    with made(broker) as gateway:
        eventually(lambda: {b"%d" % n for n in range(5)} <= set(gateway.module("sink").got))


def test_wrong_args_are_refused() -> None:
    for kind in (MqttIn, MqttOut):
        for wrong in ({"qos": 2}, {"nonsense": 1}, {"port": "x"}, {"port": 0}, {"port": 70000}, {"host": ""},
                      {"keepalive_s": 10**9}, {"keepalive_s": -1}, {"password": 5, "username": "u"}, {"password": "p"},
                      {"client_id": 5}, {"tls": 5}, {"will": 5}, {"will": {}}, {"will": {"topic": "a/#"}},
                      {"will": {"topic": "a", "payload": 5}}, {"will": {"topic": "a", "qos": 3}}):  # fmt: skip
            with pytest.raises(ValueError, match=next(iter(wrong))):
                kind.parse(wrong)
    with pytest.raises(ValueError, match="topics is empty"):
        MqttIn.parse({"topics": []})
    for topic in ("", "a/#", "+"):
        with pytest.raises(ValueError, match="topic must be a topic to publish to"):
            MqttOut.parse({"topic": topic})


def test_those_that_come_before_the_connection_is_made_wait_for_it(broker: Broker) -> None:
    with Gateway() as gateway:
        gateway.add_module("source", Collector)
        gateway.add_module("out", MqttOut, {"port": broker.port})
        gateway.add_link("source", "out")
        for n in range(20):
            gateway.module("source").publish(b"%d" % n)  # they are there when it starts
        gateway.start()
        eventually(lambda: gateway.broker.info(gateway.module("out")).handled == 20)
        assert gateway.broker.info(gateway.module("out")).failed == 0


def test_a_server_that_is_not_there_or_goes_away_is_told_of(broker: Broker) -> None:
    told: list[tuple[str, str]] = []
    gateway = Gateway(callbacks=[(Event.MODULE_FAILED, lambda _, __, c, ___: told.append((c[0], str(c[2]))))])
    broker.stop()
    with gateway:
        for name, kind in (("in", MqttIn), ("out", MqttOut)):
            gateway.add_module(name, kind, {"port": broker.port})
        gateway.start()
        eventually(lambda: {name for name, text in told if "cannot be reached" in text} == {"in", "out"})
        broker.start()
        eventually(lambda: all(gateway.module(name)._client.is_connected() for name in ("in", "out")))
        assert not any("is gone" in text for _, text in told)
        broker.stop()
        eventually(lambda: {name for name, text in told if "is gone" in text} == {"in", "out"})
        assert all(info.failed for info in gateway.modules())
    broker.start()


def test_a_server_that_speaks_no_tls_is_told_of(broker: Broker) -> None:
    told: list[str] = []
    with Gateway(callbacks=[(Event.MODULE_FAILED, lambda _, __, c, ___: told.append(str(c[2])))]) as gateway:
        gateway.add_module("in", MqttIn, {"port": broker.port, "tls": True})
        gateway.start()
        eventually(lambda: any("cannot be reached" in text for text in told))


@pytest.mark.parametrize("topic", ["#", "+", "a", "/", "a/", "/a", "a//b", "+/a/#", "a/+/b", "$SYS/#"])
def test_filters_of_topics(topic: str) -> None:
    assert MqttIn.parse({"topics": [topic]})["topics"] == [topic]


@pytest.mark.parametrize("topic", ["", "a#", "#/a", "a+", "a/#/b", "a/+b", "a\0b", 1])
def test_what_is_no_filter_of_topics_is_refused(topic: object) -> None:
    with pytest.raises(ValueError, match="not a topic filter"):
        MqttIn.parse({"topics": [topic]})


def test_an_authority_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"there is no file 'none\.pem'"):
        MqttIn.parse({"tls": "none.pem"})


def test_who_is_cut_off_by_another_of_its_name_is_told_why(broker: Broker) -> None:
    told: list[str] = []
    with Gateway(callbacks=[(Event.MODULE_FAILED, lambda _, __, c, ___: told.append(str(c[2])))]) as gateway:
        gateway.add_module("in", MqttIn, {"port": broker.port})
        gateway.start()
        eventually(lambda: gateway.module("in")._client.is_connected())
        with Gateway() as other:
            other.add_module("in", MqttIn, {"port": broker.port})
            other.start()
            eventually(lambda: any("another client with the client_id 'penstock-in'" in text for text in told))


@pytest.mark.parametrize("qos", [0, 1])
def test_a_topic_that_is_no_text_costs_its_message_alone_and_is_told(qos: int) -> None:
    """From a server that does not look at topics, as mosquitto does."""
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        callbacks = [(Event.MODULE_FAILED, lambda _, __, c, ___: told.append(str(c[2])))]
        with Gateway(callbacks=callbacks) as gateway:
            gateway.add_module("in", MqttIn, {"port": server.getsockname()[1]})
            gateway.add_module("sink", Collector)
            gateway.add_link("in", "sink")
            gateway.start()
            client = server.accept()[0]
            with client, client.makefile("rb") as said:
                client.settimeout(60)
                assert packet(said)[0] == 0x10  # CONNECT
                client.sendall(b"\x20\x02\x00\x00")
                number = packet(said)[1][:2]  # SUBSCRIBE
                client.sendall(b"\x90\x03" + number + b"\x01")
                given = b"\x00\x07" if qos else b""
                body = b"\x00\x02\xff\xfe" + given + b"bad"
                client.sendall(bytes([0x30 | qos << 1, len(body)]) + body)
                client.sendall(b"\x30\x07\x00\x01tgood")
                eventually(lambda: gateway.module("sink").got == [b"good"])
                eventually(lambda: any("a topic that is no UTF-8" in text for text in told))
                assert gateway.broker.info(gateway.module("in")).failed == 1
                if qos:
                    assert packet(said) == (0x40, b"\x00\x07")  # else it would come for ever


def packet(said: BinaryIO) -> tuple[int, bytes]:
    """The next short MQTT packet."""
    kind, size = said.read(2)
    return kind, said.read(size)


@pytest.mark.parametrize("options", [LinkOptions(), LinkOptions(max_tries=2, backoff_s=0.05)])
@pytest.mark.parametrize("qos", [0, 1])
def test_a_topic_that_cannot_be_published_to_costs_its_message_alone(
    broker: Broker, qos: int, options: LinkOptions
) -> None:
    with Gateway() as gateway:
        for name in ("source", "sink", "dead"):
            gateway.add_module(name, Collector)
        gateway.add_module("in", MqttIn, {"port": broker.port, "topics": ["plant/#"]})
        gateway.add_module("out", MqttOut, {"port": broker.port, "topic": "plant/{device}", "qos": qos})
        gateway.add_link("source", "out", None, options, error="dead")
        gateway.add_link("in", "sink")
        gateway.start()
        sink, source, dead = (gateway.module(name) for name in ("sink", "source", "dead"))
        eventually(lambda: sink.got or source.publish(b"probe", {"device": "d"}))
        gateway.pause("out")
        for n in range(10):
            source.publish(b"%d" % n, {"device": "#" if n == 5 else "d"})
        gateway.resume("out")
        good = [b"%d" % n for n in range(10) if n != 5]
        eventually(lambda: dead.got == [b"5"] and [one for one in sink.got if one != b"probe"] == good)
        assert "wildcards" in dead.messages[0].properties["error"]
