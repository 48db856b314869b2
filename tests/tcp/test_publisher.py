"""The publisher: queues and their bounds, peers that stall or go, closing, where it listens, forks."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import tcp

from .plain import LONG, PlainSubscriber
from .test_sessions import eventually


def counters_of(publisher: tcp.Publisher) -> dict[str, Any]:
    """What the monitor sees of it."""
    from penstock import _core

    (row,) = (row for row in _core.counters_read() if row["kind"] == "publisher" and row["name"] == publisher.address)
    return dict(row)


@pytest.mark.parametrize("overflow", ["drop_oldest", "drop_newest"])
def test_a_stalled_subscriber_does_not_slow_a_fast_one(overflow: str) -> None:
    """And memory stays under the bound: every message the stalled one could not take is dropped and counted."""
    bound = 64
    with tcp.Publisher(depth=bound, depth_bytes=1 << 20, overflow=overflow) as publisher:
        stalled = PlainSubscriber(publisher.port)
        assert publisher.wait_ready(1, LONG)
        with tcp.Subscriber() as fast:
            fast.add_session("127.0.0.1", publisher.port)
            assert publisher.wait_ready(2, LONG)
            payload = bytes(16_000)
            read = 0
            sent = 0
            while not any(state.ledger.dropped.get("overflow", 0) > 500 for state in publisher.subscribers):
                publisher.publish(payload)
                sent += 1
                while fast.read(0) is not None:
                    read += 1
                assert publisher.memory_bytes < 4 << 20
                assert sent < 100_000
            slow_state = next(state for state in publisher.subscribers if not state.extended)
            assert slow_state.ledger.balanced and slow_state.queued_messages <= bound + 64
            fast_state = next(state for state in publisher.subscribers if state.extended)
            while read + fast_state.ledger.lost < sent:
                assert fast.read(LONG) is not None
                read += 1
            assert fast.read(0) is None
            assert fast.ledger.delivered == read and fast.ledger.balanced
        stalled.close()


def test_drop_newest_with_a_trickle_holds_no_more_than_its_bound() -> None:
    """Messages far apart in the stream are kept without what lay between them."""
    with tcp.Publisher(depth=32, overflow="drop_newest") as publisher:
        stalled = PlainSubscriber(publisher.port)
        assert publisher.wait_ready(1, LONG)
        for _ in range(30_000):
            publisher.publish(bytes(2000))
        assert publisher.memory_bytes < 1 << 20
        assert publisher.ledger.dropped["overflow"] > 0
        for _ in range(100):  # a little room now and then
            stalled.socket.recv(65536)
            publisher.publish_many([bytes(2000)] * 20)
        assert publisher.memory_bytes < 1 << 20
        stalled.close()


def test_a_blocked_publish_ends_when_the_subscriber_reads() -> None:
    with tcp.Publisher(depth=8) as publisher, tcp.Subscriber() as subscriber:
        subscriber.add_session("127.0.0.1", publisher.port)
        assert publisher.wait_ready(1, LONG)
        sent = [os.urandom(200_000) for _ in range(100)]
        thread = threading.Thread(target=lambda: [publisher.publish(data) for data in sent])
        thread.start()
        thread.join(0.1)
        assert thread.is_alive(), "20 MB do not fit into socket buffers and 8 messages"
        for data in sent:
            assert subscriber.read(LONG) == data
        thread.join()
        eventually(lambda: publisher.ledger.in_flight == 0)
        assert publisher.ledger == penstock.Ledger(100, 100)


def test_a_blocked_publish_ends_when_the_subscriber_dies() -> None:
    with tcp.Publisher(depth=4) as publisher:
        peer = PlainSubscriber(publisher.port)
        assert publisher.wait_ready(1, LONG)
        thread = threading.Thread(target=lambda: [publisher.publish(bytes(500_000)) for _ in range(50)])
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        peer.close()
        thread.join(LONG)
        assert not thread.is_alive() and publisher.subscriber_count == 0
        ledger = publisher.ledger
        assert ledger.balanced and ledger.in_flight == 0 and ledger.dropped["closed"] > 0


def test_close_wakes_a_blocked_publish() -> None:
    publisher = tcp.Publisher(depth=4, close_timeout=0.1)
    peer = PlainSubscriber(publisher.port)
    assert publisher.wait_ready(1, LONG)
    errors: list[BaseException] = []

    def publish() -> None:
        try:
            while True:
                publisher.publish(bytes(500_000))
        except penstock.ClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=publish)
    thread.start()
    thread.join(0.1)
    publisher.close()
    thread.join(LONG)
    assert len(errors) == 1
    peer.close()


def test_a_gone_peer_is_noticed_without_publishing() -> None:
    with tcp.Publisher() as publisher:
        peer = PlainSubscriber(publisher.port)
        assert publisher.wait_ready(1, LONG)
        peer.close()
        eventually(lambda: publisher.subscriber_count == 0)


def test_what_a_subscriber_says_after_its_handshake_is_ignored() -> None:
    with tcp.Publisher() as publisher:
        peer = PlainSubscriber(publisher.port)
        assert peer.frame()[1] == 1
        peer.socket.sendall(b"x" * 1_000_000)
        publisher.publish(b"still there")
        assert peer.frame()[3] == b"still there"
        peer.close()


def test_close_flushes() -> None:
    with tcp.Subscriber() as subscriber:
        publisher = tcp.Publisher()
        subscriber.add_session("127.0.0.1", publisher.port)
        assert publisher.wait_ready(1, LONG)
        reader = threading.Thread(target=lambda: publisher.publish_many([bytes(1000)] * 10_000))
        reader.start()
        found = 0
        closer = threading.Thread(target=lambda: (reader.join(), publisher.close(LONG)))
        closer.start()
        while found < 10_000:
            batch = subscriber.read_many(1000, LONG)
            assert len(batch)
            found += len(batch)
        closer.join()


def test_close_gives_up_after_its_time() -> None:
    publisher = tcp.Publisher(overflow="drop_newest")
    peer = PlainSubscriber(publisher.port)
    assert publisher.wait_ready(1, LONG)
    for _ in range(100):
        publisher.publish(bytes(1 << 20))
    assert publisher.ledger.in_flight > 0
    publisher.close(timeout=0.05)
    ledger = publisher.ledger
    assert ledger.balanced and ledger.dropped["closed"] > 0
    peer.close()


def test_messages_are_flushed_at_exit_without_close() -> None:
    with tcp.Subscriber() as subscriber:
        program = (
            "import sys; from penstock import tcp; p = tcp.Publisher(); print(p.port, flush=True);"
            "p.wait_ready(1, 30); p.publish_many([b'x'] * 500); p.publish(b'last')"
        )
        child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        subscriber.add_session("127.0.0.1", int(child.stdout.readline()))
        found = [subscriber.read(LONG) for _ in range(501)]
        assert found[-1] == b"last"
        assert child.wait(LONG) == 0
        child.stdout.close()


def test_no_subscriber_no_work() -> None:
    with tcp.Publisher() as publisher:
        assert [publisher.publish(b"x"), publisher.send([b"x", b"y"]), publisher.publish_many([b"x"] * 3)] == [1, 2, 3]
        assert publisher.memory_bytes == 0
        assert publisher.ledger == penstock.Ledger(5, 5)  # published; nobody was there to miss them
        assert publisher.subscriber_count == 0


def test_a_message_counts_once_however_many_subscribers() -> None:
    sizes = [0, 64, 5_000, 40_000] * 25  # every way of sending
    with tcp.Publisher() as publisher, contextlib.ExitStack() as opened:
        subscribers = [opened.enter_context(penstock.subscriber(publisher.address)) for _ in range(3)]
        assert publisher.wait_ready(3, LONG)
        for size in sizes:
            publisher.publish(bytes(size))
        for subscriber in subscribers:
            found = [subscriber.read(LONG) for _ in sizes]
            assert [len(message) for message in found if message is not None] == sizes
        eventually(lambda: publisher.ledger.in_flight == 0)
        assert publisher.ledger == penstock.Ledger(100, 100)
        assert [one.ledger for one in publisher.subscribers] == [penstock.Ledger(100, 100)] * 3
        row = counters_of(publisher)
        assert (row["matched"], row["bytes"], row["depth"], row["peers"]) == (100, sum(sizes), 0, 3)


def test_a_large_message_is_stored_once_for_ten_subscribers() -> None:
    size = 24 << 20  # more than sockets take
    with tcp.Publisher(close_timeout=0.0) as publisher:
        stalled = [PlainSubscriber(publisher.port) for _ in range(10)]
        assert publisher.wait_ready(10, LONG)
        publisher.publish(bytes(size))
        assert size <= publisher.memory_bytes < size + (4 << 20)
        for one in stalled:
            one.close()
        eventually(lambda: publisher.memory_bytes == 0)


@pytest.mark.parametrize("overflow", ["drop_oldest", "drop_newest"])
def test_a_message_that_one_subscriber_lost_is_lost_once(overflow: str) -> None:
    with tcp.Publisher(overflow=overflow, depth=10) as publisher, penstock.subscriber(publisher.address) as fast:
        stalled = [PlainSubscriber(publisher.port) for _ in range(2)]
        assert publisher.wait_ready(3, LONG)
        count = 0
        while publisher.ledger.lost < 50:
            publisher.publish(bytes(30_000))
            count += 1
            assert fast.read(LONG) is not None
        lost = [one.ledger.lost for one in publisher.subscribers]
        assert sorted(lost)[0] == 0 and max(lost) <= publisher.ledger.lost <= sum(lost)
        for one in stalled:
            one.close()
        eventually(lambda: publisher.subscriber_count == 1 and publisher.ledger.in_flight == 0)
        ledger = publisher.ledger
        assert ledger.matched == count and ledger.balanced and set(ledger.dropped) == {"overflow", "closed"}
        assert counters_of(publisher)["depth"] == 0


def test_several_threads_publish() -> None:
    with tcp.Publisher() as publisher, tcp.Subscriber() as subscriber:
        subscriber.add_session("127.0.0.1", publisher.port)
        assert publisher.wait_ready(1, LONG)

        def publish(name: int) -> None:
            for i in range(2000):
                publisher.publish(b"%d %d" % (name, i))

        threads = [threading.Thread(target=publish, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        last = dict.fromkeys(range(4), -1)
        ordinals = []
        for _ in range(8000):
            message = subscriber.read(LONG)
            assert message is not None
            name, number = map(int, bytes(message).split())
            assert number == last[name] + 1
            last[name] = number
            ordinals.append(message.ordinal)
        assert ordinals == list(range(1, 8001))
        for thread in threads:
            thread.join()


# --- where it listens


def test_ports() -> None:
    with tcp.Publisher() as publisher:
        assert publisher.port > 0 and publisher.host == "127.0.0.1"
        with pytest.raises(OSError, match="in use"):
            tcp.Publisher(publisher.port)
    for bad in (-1, 65536, True, "1588"):
        with pytest.raises(penstock.InvalidArgument):
            tcp.Publisher(bad)  # type: ignore[arg-type]
    with pytest.raises(penstock.InvalidArgument):
        tcp.Publisher(host="no.such.host.invalid", insecure=True)


def test_ipv6() -> None:
    if not Path("/proc/net/if_inet6").exists() or "1" not in Path("/proc/net/if_inet6").read_text():
        pytest.skip("this machine has no IPv6 loopback address")
    with tcp.Publisher(host="::1") as publisher:
        assert publisher.address == f"tcp://[::1]:{publisher.port}"
        with penstock.subscriber(publisher.address) as subscriber:
            assert publisher.wait_ready(1, LONG)
            publisher.publish(b"six")
            assert subscriber.read(LONG) == b"six"


def test_unix_sockets(tmp_path: Path) -> None:
    path = tmp_path / "camera"
    with penstock.publisher(f"tcp://{path}") as publisher:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(penstock.RefusedError, match="another publisher"):
            penstock.publisher(f"tcp://{path}")
        with penstock.subscriber(f"tcp://{path}") as subscriber:
            assert publisher.wait_ready(1, LONG)
            publisher.publish(b"unix" * 100_000)
            assert subscriber.read(LONG) == b"unix" * 100_000
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # as a killed process leaves it
    penstock.publisher(f"tcp://{path}").close()
    path.write_text("no socket")
    with pytest.raises(penstock.RefusedError, match="no socket"):
        penstock.publisher(f"tcp://{path}")


def test_a_forked_child_is_told(tmp_path: Path) -> None:
    with tcp.Publisher() as publisher, tcp.Subscriber() as subscriber:
        subscriber.add_session("127.0.0.1", publisher.port)
        assert publisher.wait_ready(1, LONG)
        result = tmp_path / "result"
        pid = os.fork()
        if pid == 0:
            told = 0
            for use in (lambda: publisher.publish(b"x"), lambda: subscriber.read(0), lambda: publisher.reserve(1)):
                try:
                    use()
                except penstock.StateError:
                    told += 1
            publisher.close()
            subscriber.close()
            with tcp.Publisher() as own, tcp.Subscriber() as reader:  # new ones work
                reader.add_session("127.0.0.1", own.port)
                assert own.wait_ready(1, LONG)
                own.publish(b"child")
                told += reader.read(LONG) == b"child"
            result.write_text(str(told))
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert result.read_text() == "4"
        publisher.publish(b"parent")
        assert subscriber.read(LONG) == b"parent"


def test_control_c_ends_a_blocked_read_and_a_blocked_publish() -> None:
    program = """
import signal, sys, threading, os, time
from penstock import tcp
publisher = tcp.Publisher(depth=2)
subscriber = tcp.Subscriber()
subscriber.add_session("127.0.0.1", publisher.port)
publisher.wait_ready(1, 30)
def later(): time.sleep(0.2); os.kill(os.getpid(), signal.SIGINT)
for use in (lambda: subscriber.read(None), lambda: [publisher.publish(bytes(1 << 20)) for _ in range(100)]):
    try:
        threading.Thread(target=later).start()
        use()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
publisher.close(0.1)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "interrupted\ninterrupted\n", done.stderr


# --- what a message carries


def test_what_is_known_of_a_message_travels() -> None:
    with tcp.Publisher() as publisher, tcp.Subscriber() as subscriber:
        subscriber.add_session("127.0.0.1", publisher.port)
        assert publisher.wait_ready(1, LONG)
        publisher.publish(b"x", ordinal=7, timestamp_ns=123, vchan_id=4, properties={"a": "ä"})
        message = subscriber.read(LONG)
        assert message is not None
        assert (message.ordinal, message.timestamp_ns, message.vchan_id) == (7, 123, 4)
        assert dict(message.properties) == {"a": "ä"}
        publisher.publish(b"y")
        message = subscriber.read(LONG)
        assert message is not None and (message.ordinal, message.vchan_id) == (8, None)
        before = time.time_ns()
        assert abs(message.timestamp_ns - before) < 60_000_000_000
        for bad in ({"a": "\0"}, {"a": "x" * 70_000}):
            with pytest.raises(penstock.InvalidArgument):
                publisher.publish(b"", properties=bad)
        with pytest.raises(TypeError):
            publisher.publish(b"", properties={"a": 1})  # type: ignore[dict-item]
        with pytest.raises(penstock.InvalidArgument):
            publisher.publish(b"", vchan_id=-5)


def test_a_batch_is_forwarded_as_it_is() -> None:
    with tcp.Publisher() as first, tcp.Publisher() as second, tcp.Subscriber() as middle, tcp.Subscriber() as last:
        middle.add_session("127.0.0.1", first.port)
        last.add_session("127.0.0.1", second.port)
        assert first.wait_ready(1, LONG) and second.wait_ready(1, LONG)
        first.publish_many([b"1", b"2"])
        first.publish(b"3", properties={"k": "v"}, vchan_id=1)
        passed = 0
        while passed < 3:
            passed += second.forward(middle.read_many(10, LONG))
        found = [last.read(LONG) for _ in range(3)]
        assert [(bytes(m), m.ordinal, m.vchan_id) for m in found if m] == [
            (b"1", 1, None),
            (b"2", 2, None),
            (b"3", 3, 1),
        ]
        assert found[2] is not None and dict(found[2].properties) == {"k": "v"}


def test_a_living_subscriber_that_does_not_read_is_kept() -> None:
    """Its kernel answers the probes of its closed window, ever more seldom: that is no silence."""
    with tcp.Publisher(keepalive=0.5) as publisher, tcp.Subscriber() as subscriber:
        subscriber.add_session("127.0.0.1", publisher.port)
        assert publisher.wait_ready(1, LONG)
        thread = threading.Thread(target=lambda: [publisher.publish(b"x" * 262_144) for _ in range(200)])
        thread.start()
        # The probes come after 0.2, 0.4, 0.8, 1.6, 3.2 s: by then the last answer is older than twice the keepalive.
        thread.join(5)
        assert thread.is_alive() and publisher.subscriber_count == 1
        for _ in range(200):
            message = subscriber.read(LONG)
            assert message is not None
            del message
        thread.join(LONG)
        assert publisher.ledger.lost == 0
