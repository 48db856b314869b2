"""Bridges: what is known of a message survives the way over the network, and losses are told by their place."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import penstock
from penstock import shm, tcp
from penstock.bridge import Bridge, read_map

LONG = 30.0


def test_tcp_to_tcp_carries_everything() -> None:
    with tcp.Publisher() as first, Bridge(first.address, "tcp://127.0.0.1:0").start() as bridge:
        assert first.wait_ready(1, LONG)
        second = bridge.publisher
        assert isinstance(second, tcp.Publisher)
        with penstock.subscriber(second.address) as subscriber:
            assert second.wait_ready(1, LONG)
            first.publish(b"one", properties={"unit": "K"}, vchan_id=5)
            first.publish_many([b"two", b"three"])
            found = [subscriber.read(LONG) for _ in range(3)]
            assert [(bytes(m), m.ordinal, m.vchan_id) for m in found if m] == [
                (b"one", 1, 5),
                (b"two", 2, None),
                (b"three", 3, None),
            ]
            assert found[0] is not None and dict(found[0].properties) == {"unit": "K"}
            deadline = time.monotonic() + LONG  # it counts after it has sent
            while bridge.ledger.in_flight and time.monotonic() < deadline:
                time.sleep(0.001)
            assert bridge.ledger == penstock.Ledger(3, 3)
            latency = bridge.latency
            assert latency is not None and latency.clock_offset_ns is not None
            # One machine, one clock: the offset seen is the handshake's travel time alone, and the sum holds.
            assert latency.corrected_ns == latency.apparent_ns + latency.clock_offset_ns


def test_losses_are_told_by_their_place() -> None:
    """Lost before the bridge: a gap in ordinals. Lost on the link: told by the bridge's publisher."""
    with tcp.Publisher() as first:
        options = {"overflow": "drop_oldest", "depth": 4}
        with Bridge(first.address, "tcp://127.0.0.1:0", sink_options=options).start() as bridge:
            assert first.wait_ready(1, LONG)
            with penstock.subscriber(bridge.publisher.address) as subscriber:  # type: ignore[attr-defined]
                assert bridge.publisher.wait_ready(1, LONG)
                first.publish(b"1", ordinal=1)
                first.publish(b"11", ordinal=11)  # as if 9 had been lost before
                assert [bytes(subscriber.read(LONG) or b"") for _ in range(2)] == [b"1", b"11"]
                assert subscriber.ledger.dropped == {"gap": 9}
                sent = 0
                while bridge.publisher.ledger.lost < 20:
                    first.publish(bytes(60_000))
                    sent += 1
                    assert sent < 10_000
                first.publish(b"last")
                delivered = 2
                while (message := subscriber.read(LONG)) is not None:
                    delivered += 1
                    if message == b"last":
                        break
                ledger = subscriber.ledger
                assert ledger.delivered == delivered and ledger.balanced
                assert ledger.dropped == {"gap": 9, "overflow": bridge.publisher.ledger.lost}
                assert ledger.matched == 11 + sent + 1


def test_shared_memory_over_tcp_and_back() -> None:
    name = f"shm:/bridge-{time.time_ns()}"
    with (
        penstock.publisher(name, slots=64, reliable=True) as camera,
        Bridge(name, "tcp://127.0.0.1:0", source_options={"reliable": True}).start() as out,
        Bridge(out.publisher.address, name + "-copy", sink_options={"slots": 64, "reliable": True}) as back,  # type: ignore[attr-defined]
        penstock.subscriber(name + "-copy", reliable=True) as viewer,
    ):
        back.start()
        assert camera.wait_ready(1, LONG) and out.publisher.wait_ready(1, LONG)
        sent = [b"%d" % i * (i % 50) for i in range(500)]
        for data in sent:
            camera.publish(data)
        assert [bytes(message) for _ in sent if (message := viewer.read(LONG)) is not None] == sent


def test_vchan_maps(tmp_path: Path) -> None:
    path = tmp_path / "map"
    with tcp.Publisher() as first, tcp.Publisher() as probe:
        port = probe.port
        probe.close()
        path.write_text(f"# cameras\n1 = 10\n2 = tcp://127.0.0.1:{port}\n\n")
        with Bridge(first.address, "tcp://127.0.0.1:0", vchans=read_map(path)).start() as bridge:
            assert first.wait_ready(1, LONG)
            other = bridge._others[f"tcp://127.0.0.1:{port}"]
            with (
                penstock.subscriber(bridge.publisher.address) as main,  # type: ignore[attr-defined]
                penstock.subscriber(f"tcp://127.0.0.1:{port}") as aside,
            ):
                assert bridge.publisher.wait_ready(1, LONG) and other.wait_ready(1, LONG)
                for vchan in (1, 2, 3):
                    first.publish(b"%d" % vchan, vchan_id=vchan)
                found = [main.read(LONG) for _ in range(2)]
                assert [(bytes(m), m.vchan_id) for m in found if m] == [(b"1", 10), (b"3", 3)]
                assert aside.read(LONG) == b"2"


def test_local_channels_stay_on_the_machine() -> None:
    name = f"/local/{os.getpid()}"
    with shm.Publisher(name, local=True) as secret:
        with pytest.raises(penstock.RefusedError, match="local=True"):
            Bridge(f"shm:{name}", "tcp://127.0.0.1:0")
        with Bridge(f"shm:{name}", f"shm:{name}/copy"), shm.Subscriber(name) as subscriber:
            assert subscriber.local
        secret.publish(b"x")
    with Bridge(f"shm:{name}", "tcp://127.0.0.1:0") as bridge, shm.Publisher(name, local=True) as secret:
        secret.publish(b"x")  # it was there first and could not know
        with pytest.raises(penstock.RefusedError, match="local=True"):
            bridge.run(1)
        assert bridge.ledger.delivered == 0


@pytest.mark.parametrize("bad", ["x = 1", "1", "1 = nonsense", "1 = 2\n1 = 3", "-1 = 2"])
def test_bad_maps_name_the_line(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "map"
    path.write_text("# fine\n" + bad)
    with pytest.raises(penstock.InvalidArgument, match=r"line [23]"):
        read_map(path)


def test_a_bridge_that_cannot_open_closes_what_it_had() -> None:
    with pytest.raises(penstock.InvalidArgument):
        Bridge("nonsense:x", "tcp://127.0.0.1:0")
    with pytest.raises(penstock.InvalidArgument):
        Bridge("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")


def test_the_command() -> None:
    with tcp.Publisher() as publisher:
        command = [sys.executable, "-m", "penstock", "bridge", publisher.address, "tcp://127.0.0.1:0", "--count", "3"]
        child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert child.stderr is not None
        line = child.stderr.readline()
        assert line.startswith(f"bridge: {publisher.address} > tcp://127.0.0.1:"), line + child.stderr.read()
        with penstock.subscriber(line.split(" > ")[1].strip()) as subscriber:
            assert publisher.wait_ready(1, LONG)
            time.sleep(0.2)  # the subscriber may join later than this: then it gets fewer, which is not what is tested
            publisher.publish_many([b"1", b"2", b"3"])
            assert child.wait(LONG) == 0
            assert "carried 3, lost here 0" in child.stderr.read()
            assert subscriber is not None
        child.stderr.close()
