"""Sessions: reconnecting, host lists, limits, cancelling, several publishers, callbacks, asyncio."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import penstock
from penstock import tcp

from .plain import LONG, REQUEST, PlainPublisher, payload


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until it is so; fails after a long time only."""
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def free_port() -> int:
    """A port on which nobody listens (bound once, so that it is not given out again at once)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_two_publishers_one_subscriber() -> None:
    with tcp.Publisher() as one, tcp.Publisher() as two, tcp.Subscriber() as subscriber:
        first = subscriber.add_session("127.0.0.1", one.port)
        second = subscriber.add_session("localhost", two.port)
        assert one.wait_ready(1, LONG) and two.wait_ready(1, LONG)
        for i in range(100):
            one.publish(b"one %d" % i)
            two.publish(b"two %d" % i)
        by_session: dict[Any, list[bytes]] = {first: [], second: []}
        for _ in range(200):
            message = subscriber.read(LONG)
            assert message is not None
            by_session[message.source].append(bytes(message))
        assert by_session[first] == [b"one %d" % i for i in range(100)]
        assert by_session[second] == [b"two %d" % i for i in range(100)]
        assert subscriber.sessions == [first, second]
        assert first.connected and first.publisher == f"tcp://127.0.0.1:{one.port}"


def test_it_connects_again_to_a_publisher_that_comes_back() -> None:
    subscriber = tcp.Subscriber()
    first = tcp.Publisher()
    session = subscriber.add_session("127.0.0.1", first.port)
    assert first.wait_ready(1, LONG)
    first.publish(b"before")
    first.close()  # what was sent is still read
    with tcp.Publisher(first.port) as second, subscriber:
        assert second.wait_ready(1, LONG)
        second.publish(b"after")
        assert [bytes(subscriber.read(LONG) or b"") for _ in range(2)] == [b"before", b"after"]
        assert session.connections == 2
        assert subscriber.ledger == penstock.Ledger(2, 2)


def test_what_was_missed_between_two_connections_is_counted() -> None:
    """The same publisher: its ordinals tell."""
    with tcp.Publisher() as publisher, tcp.Subscriber(reconnect_delay=0.3) as subscriber:
        subscriber.add_session("127.0.0.1", publisher.port)
        assert publisher.wait_ready(1, LONG)
        publisher.publish(b"1")
        assert subscriber.read(LONG) == b"1"
        publisher._outlet.remove(publisher._outlet.peers()[0][0])  # as if the connection had broken
        assert publisher.subscriber_count == 0
        publisher.publish_many([b"2", b"3", b"4"])
        assert subscriber.read(0) is None
        assert publisher.wait_ready(1, LONG)
        publisher.publish(b"5")
        message = subscriber.read(LONG)
        assert message is not None and (bytes(message), message.ordinal) == (b"5", 5)
        assert subscriber.ledger == penstock.Ledger(5, 2, {"gap": 3})


def test_what_the_publisher_before_had_sent_keeps_its_address_and_its_count() -> None:
    """It is read after the session has gone on to another publisher, whose ordinals begin anew."""
    with tcp.Publisher() as second, tcp.Subscriber() as subscriber:
        first = tcp.Publisher()
        addresses = (first.address, second.address)
        session = subscriber.add_session([("127.0.0.1", first.port), ("127.0.0.1", second.port)])
        assert first.wait_ready(1, LONG)
        first.publish_many([b"1"] * 5)
        first.close()
        assert second.wait_ready(1, LONG)
        eventually(lambda: session.connections == 2)
        second.publish(b"2")
        found = [subscriber.read(LONG) for _ in range(6)]
        assert [(message.ordinal, message.channel) for message in found if message is not None] == [
            *((ordinal, addresses[0]) for ordinal in range(1, 6)),
            (1, addresses[1]),
        ]
        assert subscriber.ledger == penstock.Ledger(6, 6)


def test_a_host_list_goes_on_after_any_failure() -> None:
    with tcp.Publisher() as publisher, tcp.Subscriber() as subscriber:
        hosts: list[str | tuple[str, int]] = [
            "no.such.host.invalid",
            ("127.0.0.1", free_port()),
            ("127.0.0.1", publisher.port),
        ]
        session = subscriber.add_session(hosts, publisher.port)
        assert session.wait_connected(LONG)
        assert session.publisher.endswith(f":{publisher.port}")


def test_refused_connections_back_off() -> None:
    """The reference tried 22,176 times in 5 s."""
    attempts = 0
    listener = socket.create_server(("127.0.0.1", 0))
    with tcp.Subscriber(reconnect_delay=0.05, reconnect_delay_max=0.2) as subscriber:
        subscriber.add_session("127.0.0.1", listener.getsockname()[1])
        listener.settimeout(0.05)
        end = time.monotonic() + 1.5
        while time.monotonic() < end or attempts < 3:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            attempts += 1
            connection.close()
        listener.close()
    assert 3 <= attempts <= 40, attempts


def test_a_limited_session_ends_and_the_reader_learns_it() -> None:
    with tcp.Subscriber(reconnect_delay=0.01) as subscriber:
        session = subscriber.add_session("127.0.0.1", free_port(), max_reconnects=3)
        with pytest.raises(penstock.ClosedError, match="every session"):
            subscriber.read(LONG)
        assert session.state is tcp.SessionState.ENDED
        assert "refused" in (session.last_error or "").lower()
        with tcp.Publisher() as publisher:  # it can be given another one
            subscriber.add_session("127.0.0.1", publisher.port)
            assert publisher.wait_ready(1, LONG)
            publisher.publish(b"x")
            assert subscriber.read(LONG) == b"x"


def test_the_limit_counts_anew_after_a_message() -> None:
    plain = PlainPublisher()
    with tcp.Subscriber(reconnect_delay=0.01) as subscriber:
        session = subscriber.add_session("127.0.0.1", plain.port, max_reconnects=1)
        for i in range(4):
            connection, _ = plain.accept()
            connection.sendall(payload(b"%d" % i))
            assert subscriber.read(LONG) == b"%d" % i
            connection.close()
            assert subscriber.read(0.01) is None
        assert session.state is not tcp.SessionState.ENDED
    plain.close()


def test_cancel_ends_one_session_only() -> None:
    with tcp.Publisher() as one, tcp.Publisher() as two, tcp.Subscriber() as subscriber:
        first = subscriber.add_session("127.0.0.1", one.port)
        subscriber.add_session("127.0.0.1", two.port)
        assert one.wait_ready(1, LONG) and two.wait_ready(1, LONG)
        first.cancel()
        first.cancel()
        assert first.state is tcp.SessionState.ENDED and len(subscriber.sessions) == 1
        eventually(lambda: one.subscriber_count == 0)
        two.publish(b"x")
        assert subscriber.read(LONG) == b"x"


def test_cancel_while_a_reader_sleeps() -> None:
    with tcp.Publisher() as publisher, tcp.Subscriber() as subscriber:
        session = subscriber.add_session("127.0.0.1", publisher.port)
        assert publisher.wait_ready(1, LONG)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(subscriber.read(LONG)))
        thread.start()
        session.cancel()
        eventually(lambda: publisher.subscriber_count == 0)
        subscriber.add_session("127.0.0.1", publisher.port)
        eventually(lambda: publisher.subscriber_count == 1)
        publisher.publish(b"x")
        thread.join()
        assert found == [b"x"]


# --- callbacks


def test_a_synchronous_callback_gets_everything_in_order() -> None:
    with tcp.Publisher() as publisher, tcp.Subscriber() as subscriber:
        session = subscriber.add_session("127.0.0.1", publisher.port)
        found: list[bytes] = []
        sources: set[Any] = set()
        done = threading.Event()

        def take(message: Any) -> None:
            found.append(bytes(message))
            sources.add((message.source, message.channel))
            if len(found) == 3000:
                done.set()

        subscriber.on_message(take, delivery="synchronous")
        assert publisher.wait_ready(1, LONG)
        for i in range(3000):
            publisher.publish(b"%d" % i)
        assert done.wait(LONG)
        assert found == [b"%d" % i for i in range(3000)]
        assert sources == {(session, publisher.address)}
        with pytest.raises(penstock.StateError):
            subscriber.read(0)
        subscriber.on_message(None)
        publisher.publish(b"read again")
        assert subscriber.read(LONG) == b"read again"


def test_what_was_received_ahead_is_delivered_too() -> None:
    """More messages in one read than a turn of the executor delivers: the rest does not show at the descriptor."""
    total = 1_100
    with tcp.Publisher() as publisher, tcp.Subscriber() as subscriber:
        subscriber.add_session("127.0.0.1", publisher.port)
        found: list[bytes] = []
        all_sent, done = threading.Event(), threading.Event()

        def take(message: Any) -> None:
            all_sent.wait(LONG)
            found.append(bytes(message))
            if len(found) == total:
                done.set()

        subscriber.on_message(take, delivery="synchronous")
        assert publisher.wait_ready(1, LONG)
        publisher.publish(b"x")
        publisher.publish_many([b"x"] * (total - 1))
        deadline = time.monotonic() + LONG
        while publisher.ledger.in_flight and time.monotonic() < deadline:
            time.sleep(0.001)
        all_sent.set()
        assert done.wait(LONG), len(found)


def test_a_slow_synchronous_callback_slows_the_publisher() -> None:
    with tcp.Publisher(depth=4, timeout=0.2) as publisher, tcp.Subscriber() as subscriber:
        subscriber.add_session("127.0.0.1", publisher.port)
        go = threading.Event()
        subscriber.on_message(lambda message: go.wait(), delivery="synchronous")
        assert publisher.wait_ready(1, LONG)
        with pytest.raises(TimeoutError, match="was not published"):
            for _ in range(10_000):
                publisher.publish(bytes(100_000))
        go.set()


def test_the_newest_wins_and_the_rest_is_counted() -> None:
    with tcp.Publisher() as publisher, tcp.Subscriber() as subscriber:
        subscriber.add_session("127.0.0.1", publisher.port)
        entered, go = threading.Event(), threading.Event()
        found: list[bytes] = []

        def slow(message: Any) -> None:
            found.append(bytes(message))
            entered.set()
            go.wait()

        subscriber.on_message(slow, delivery="newest")
        assert publisher.wait_ready(1, LONG)
        publisher.publish(b"0")
        assert entered.wait(LONG)
        for i in range(1, 1001):
            publisher.publish(b"%d" % i)
        eventually(lambda: publisher.ledger.in_flight == 0)
        time.sleep(0.05)  # let the bytes cross; more callbacks than one afterwards would be right too
        go.set()
        eventually(lambda: bool(found) and found[-1] == b"1000")
        ledger = subscriber.ledger
        assert ledger.balanced and ledger.matched == 1001
        assert ledger.delivered == len(found) < 1001
        assert ledger.dropped == {"overflow": 1001 - len(found)}


def test_a_callback_may_change_or_cancel_itself() -> None:
    with tcp.Publisher() as publisher, tcp.Subscriber() as subscriber:
        session = subscriber.add_session("127.0.0.1", publisher.port)
        found: list[bytes] = []
        done = threading.Event()

        def first(message: Any) -> None:
            found.append(b"first " + bytes(message))
            subscriber.on_message(second, delivery="synchronous")

        def second(message: Any) -> None:
            found.append(b"second " + bytes(message))
            session.cancel()
            subscriber.on_message(None)
            done.set()

        subscriber.on_message(first, delivery="synchronous")
        assert publisher.wait_ready(1, LONG)
        publisher.publish_many([b"1", b"2", b"3"])
        assert done.wait(LONG)
        eventually(lambda: publisher.subscriber_count == 0)
        assert found == [b"first 1", b"second 2"]


def test_cancel_waits_for_the_running_callback() -> None:
    with tcp.Publisher() as publisher, tcp.Subscriber() as subscriber:
        session = subscriber.add_session("127.0.0.1", publisher.port)
        entered, go = threading.Event(), threading.Event()
        order: list[str] = []

        def slow(message: Any) -> None:
            entered.set()
            go.wait()
            order.append("callback")

        subscriber.on_message(slow, delivery="synchronous")
        assert publisher.wait_ready(1, LONG)
        publisher.publish(b"x")
        assert entered.wait(LONG)
        thread = threading.Thread(target=lambda: (session.cancel(), order.append("cancelled")))
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
        go.set()
        thread.join()
        assert order == ["callback", "cancelled"]


def test_a_failing_callback_is_counted_and_the_next_message_comes(caplog: pytest.LogCaptureFixture) -> None:
    with tcp.Publisher() as publisher, tcp.Subscriber() as subscriber:
        subscriber.add_session("127.0.0.1", publisher.port)
        found: list[bytes] = []

        def fails(message: Any) -> None:
            found.append(bytes(message))
            raise RuntimeError("on purpose")

        subscriber.on_message(fails, delivery="synchronous")
        assert publisher.wait_ready(1, LONG)
        publisher.publish_many([b"1", b"2"])
        eventually(lambda: found == [b"1", b"2"])
        subscriber.on_message(None)
        assert "on purpose" in caplog.text


def test_asyncio_over_two_sessions() -> None:
    async def main() -> set[bytes]:
        with tcp.Publisher() as one, tcp.Publisher() as two:
            async with tcp.Subscriber() as subscriber:
                subscriber.add_session("127.0.0.1", one.port)
                subscriber.add_session("127.0.0.1", two.port)
                ready = asyncio.to_thread(lambda: one.wait_ready(1, LONG) and two.wait_ready(1, LONG))
                assert await ready
                one.publish(b"one")
                two.publish(b"two")
                found = set()
                async for message in subscriber:
                    found.add(bytes(message))
                    if len(found) == 2:
                        return found
        raise AssertionError

    assert asyncio.run(asyncio.wait_for(main(), LONG)) == {b"one", b"two"}


@pytest.mark.parametrize("host", [5, None, b"127.0.0.1", "", [5], [b"127.0.0.1"], [("", 5)], [("127.0.0.1", 5, 6)]])
def test_a_host_is_text(host: Any) -> None:
    must = "^host=.* must be text, such as '127[.]0[.]0[.]1' or 'localhost'$"
    with tcp.Subscriber() as subscriber, pytest.raises(penstock.InvalidArgument, match=must):
        subscriber.add_session(host, 5)
    with pytest.raises(penstock.InvalidArgument, match=must):
        tcp.Publisher(host=host)


def test_arguments() -> None:
    with tcp.Subscriber() as subscriber:
        with pytest.raises(penstock.InvalidArgument, match="at least one host"):
            subscriber.add_session([])
        with pytest.raises(penstock.InvalidArgument, match="port"):
            subscriber.add_session("127.0.0.1", 70000)
        with pytest.raises(penstock.InvalidArgument, match="did you mean"):
            subscriber.on_message(print, delivery="newes")
    with pytest.raises(penstock.ClosedError):
        subscriber.add_session("127.0.0.1", 1)
    with pytest.raises(penstock.InvalidArgument, match="port"):
        penstock.subscriber("tcp://127.0.0.1:0")


# --- publishers that misbehave ---------------------------------------------------------------------------------------


def _greets_and_breaks(kind: str) -> tuple[socket.socket, list[float]]:
    """A publisher that greets everybody and then breaks the connection; when it was asked."""
    listener = socket.create_server(("127.0.0.1", 0))
    asked: list[float] = []

    def serve() -> None:
        kept = []
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.recv(1000)
            asked.append(time.monotonic())
            connection.sendall(REQUEST)
            if kind == "message":
                connection.sendall(payload(b"good"))
            if kind == "close":
                connection.close()
            else:
                connection.sendall(payload(b"")[:4] + (300 << 20).to_bytes(8, "little"))  # more than may be
                kept.append(connection)

    threading.Thread(target=serve, daemon=True).start()
    return listener, asked


@pytest.mark.parametrize("kind", ["too large", "close", "message"])
def test_a_publisher_that_greets_and_then_breaks_is_asked_less_and_less(kind: str) -> None:
    listener, asked = _greets_and_breaks(kind)
    with listener, tcp.Subscriber(reconnect_delay=0.01, reconnect_delay_max=1.0) as subscriber:
        subscriber.add_session("127.0.0.1", listener.getsockname()[1])
        while len(asked) < 8:
            subscriber.read(0.05)
        # The pause after the n-th failure is at least half of 0.01 * 2^n: twice as long within two steps, whatever jitter.
        assert asked[7] - asked[6] >= 0.5 * 0.01 * 2**5
        assert asked[7] - asked[0] >= sum(0.5 * 0.01 * 2**step for step in range(7))


def test_failures_after_a_greeting_end_a_session() -> None:
    listener, asked = _greets_and_breaks("too large")
    with listener, tcp.Subscriber(reconnect_delay=0.001) as subscriber:
        session = subscriber.add_session("127.0.0.1", listener.getsockname()[1], max_reconnects=3)
        with pytest.raises(penstock.ClosedError):
            while True:
                subscriber.read(LONG)
        assert session.state == tcp.SessionState.ENDED and len(asked) == 4


def test_a_publisher_that_comes_and_goes_is_no_failure() -> None:
    with tcp.Subscriber(reconnect_delay=0.001, reconnect_delay_max=0.01) as subscriber:
        publisher = tcp.Publisher()
        session = subscriber.add_session("127.0.0.1", publisher.port, max_reconnects=1000)
        for number in range(5):
            assert publisher.wait_ready(1, LONG)
            publisher.publish(b"%d" % number)
            message = subscriber.read(LONG)
            assert message is not None and bytes(message) == b"%d" % number
            del message
            port = publisher.port
            publisher.close()
            publisher = _open_again(port)
        publisher.close()
        assert session.state is not tcp.SessionState.ENDED


def _open_again(port: int) -> tcp.Publisher:
    deadline = time.monotonic() + LONG
    while True:
        try:
            return tcp.Publisher(port)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
