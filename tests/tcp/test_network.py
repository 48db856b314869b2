"""A network that loses, is cut, is slow: between namespaces, and through a proxy that delays."""

from __future__ import annotations

import socket
import subprocess
import threading
import time

import pytest

import penstock
from penstock import tcp
from penstock.tcp import sockets

from .network import Network, network
from .plain import LONG
from .test_sessions import eventually

__all__ = ["network"]

PUBLISHER = """
import sys
from penstock import tcp
from penstock.tcp import sockets
publisher = tcp.Publisher(1588, "10.77.0.2", keepalive=1.0, insecure=True, overflow={overflow!r})
print("listening", flush=True)
assert publisher.wait_ready(1, 60)
for line in sys.stdin:
    word, number = line.split()
    if word == "send":
        for i in range(int(number)):
            publisher.publish(b"%d " % publisher._outlet.last_ordinal + bytes(1000))
        print("sent", flush=True)
    elif word == "count":
        print(publisher.subscriber_count, flush=True)
    elif word == "wait":
        print(publisher.wait_ready(1, 60), flush=True)
publisher.close()
"""
SUBSCRIBER = """
import sys
import penstock
from penstock import tcp
from penstock.tcp import sockets
subscriber = tcp.Subscriber(keepalive=1.0, reconnect_delay=0.05, reconnect_delay_max=0.5)
session = subscriber.add_session("10.77.0.2", 1588)
for line in sys.stdin:
    ordinal = 0
    while ordinal < int(line):
        message = subscriber.read(90)
        assert message is not None
        ordinal = message.ordinal
    print(ordinal, subscriber.ledger.delivered, subscriber.ledger.lost, session.connections, flush=True)
subscriber.close()
"""


def ask(program: subprocess.Popen[str], line: str) -> str:
    assert program.stdin is not None and program.stdout is not None
    if line:
        program.stdin.write(line + "\n")
        program.stdin.flush()
    return program.stdout.readline().strip()


def finish(*programs: subprocess.Popen[str]) -> None:
    for program in programs:
        try:
            program.communicate(timeout=LONG)
        finally:
            program.kill()
            program.wait()


@pytest.mark.timeout(180)
def test_packets_are_lost_messages_are_not(network: Network) -> None:
    publisher = network.program(network.far, PUBLISHER.format(overflow="block"))
    assert ask(publisher, "") == "listening"
    network.lose(3)
    subscriber = network.program(network.near, SUBSCRIBER)
    assert ask(publisher, "wait 0") == "True"
    assert ask(publisher, "send 3000") == "sent"
    assert ask(subscriber, "3000") == "3000 3000 0 1"
    finish(publisher, subscriber)


@pytest.mark.timeout(180)
def test_a_cut_cable_is_noticed_on_both_sides_and_mended(network: Network) -> None:
    publisher = network.program(network.far, PUBLISHER.format(overflow="drop_newest"))
    assert ask(publisher, "") == "listening"
    subscriber = network.program(network.near, SUBSCRIBER)
    assert ask(publisher, "wait 0") == "True"
    assert ask(publisher, "send 10") == "sent"
    assert ask(subscriber, "10") == "10 10 0 1"
    network.cut(True)
    assert ask(publisher, "send 20") == "sent"  # into the void
    deadline = time.monotonic() + 60
    while ask(publisher, "count 0") != "0":  # nothing is acknowledged: it has gone
        assert time.monotonic() < deadline
        time.sleep(0.1)
    network.cut(False)
    assert subscriber.stdin is not None
    subscriber.stdin.write("40\n")  # reading: it must notice that its publisher's side has gone
    subscriber.stdin.flush()
    assert ask(publisher, "wait 0") == "True"
    assert ask(publisher, "send 10") == "sent"
    ordinal, delivered, lost, connections = map(int, ask(subscriber, "").split())
    # What was under way in the kernel when the cable was cut may still arrive, or not: either way it is counted.
    assert (ordinal, delivered + lost, connections) == (40, 40, 2)
    finish(publisher, subscriber)


class DelayProxy:
    """Passes bytes on, each a fixed time late; one connection."""

    def __init__(self, port: int, delay_s: float) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self._target, self._delay = port, delay_s
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        near, _ = self.listener.accept()
        far = socket.create_connection(("127.0.0.1", self._target))
        other = threading.Thread(target=self._pass, args=(near, far))
        other.start()
        self._pass(far, near)
        other.join()
        near.close()
        far.close()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(65536):
            time.sleep(self._delay)
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._threads[0].join()
        self.listener.close()


def test_a_slow_link_delays_and_loses_nothing() -> None:
    delay = 0.03
    with tcp.Publisher() as publisher:
        proxy = DelayProxy(publisher.port, delay)
        with tcp.Subscriber() as subscriber:
            session = subscriber.add_session("127.0.0.1", proxy.port)
            assert publisher.wait_ready(1, LONG)
            for i in range(5):
                publisher.publish(b"%d" % i)
                message = subscriber.read(LONG)
                assert message is not None and message == b"%d" % i
                assert time.time_ns() - message.timestamp_ns >= delay * 0.9e9
            assert session.clock_offset_ns is not None and session.clock_offset_ns <= -delay * 0.9e9  # travel time
            publisher.publish_many([b"x"] * 500)
            found = 0
            while found < 500:
                found += len(subscriber.read_many(500, LONG))
            assert subscriber.ledger == penstock.Ledger(505, 505)
        eventually(lambda: publisher.subscriber_count == 0)
        proxy.close()


@pytest.mark.parametrize("keepalive", [3.0, 15.0, 100.0])
def test_probes_and_looks_find_a_dead_peer_within_the_time(keepalive: float) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as one:
        sockets.prepare(one, keepalive)
        idle, interval, count = (
            one.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
    assert idle + interval * count <= keepalive
    silence_s = sockets.silence_s(keepalive)
    assert silence_s + 2 * silence_s / 4 <= keepalive  # what is owed is seen at the next look, and so is that it is late
    assert silence_s > idle, "a probe that is lost is sent again in this time"
