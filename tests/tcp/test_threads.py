"""Threads and signals at one handle: closing, cancelling and publishing in the midst of a wait."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from penstock import tcp
from penstock.errors import ClosedError, StateError

from .plain import LONG
from .test_sessions import eventually


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=LONG, check=True
    )
    return done.stdout


def test_a_signal_handler_may_close_the_subscriber_that_it_interrupts() -> None:
    program = """
        import signal
        from penstock import tcp
        from penstock.errors import ClosedError
        with tcp.Publisher() as publisher, tcp.Subscriber() as subscriber:
            subscriber.add_session("127.0.0.1", publisher.port)
            publisher.wait_ready()
            signal.signal(signal.SIGALRM, lambda *_: subscriber.close())
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            try:
                subscriber.read()
            except ClosedError:
                print("closed")
    """
    assert run(program) == "closed\n"


def test_a_signal_handler_may_publish_where_a_publish_waits() -> None:
    program = """
        import signal, threading
        from penstock import tcp
        with tcp.Publisher(depth=4) as publisher, tcp.Subscriber() as subscriber:
            subscriber.add_session("127.0.0.1", publisher.port)
            publisher.wait_ready()
            def read():
                found = [bytes(subscriber.read()) for _ in range(21)]
                print(len(found), found.count(b"signal"))
            reader = threading.Thread(target=read)
            def interrupted(*_):
                reader.start()
                publisher.publish(b"signal")
            signal.signal(signal.SIGALRM, interrupted)
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            for _ in range(20):
                publisher.publish(bytes(4_000_000))
            reader.join()
    """
    assert run(program) == "21 1\n"


def test_closing_ends_the_wait_for_subscribers() -> None:
    publisher = tcp.Publisher()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            publisher.wait_ready()
        except ClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    eventually(lambda: bool(publisher._changed._waiters))  # type: ignore[attr-defined]
    publisher.close()
    thread.join(LONG)
    assert len(errors) == 1


SIZE = 1_000_000
DEPTH = 4


def fill(publisher: tcp.Publisher, subscriber: tcp.Subscriber) -> int:
    """Publish until the queue is full and stays so, for nobody reads; gives how many that took."""
    subscriber.add_session("127.0.0.1", publisher.port)
    assert publisher.wait_ready(1, LONG)
    count = seen = 0
    while seen < 20:
        if publisher.subscribers[0].queued_messages < DEPTH:
            publisher.publish(bytes(SIZE))
            count, seen = count + 1, 0
        seen += 1
        time.sleep(0.001)
    return count


def test_a_draft_that_waits_to_be_published_is_neither_cancelled_nor_written() -> None:
    with tcp.Publisher(depth=DEPTH) as publisher, tcp.Subscriber() as subscriber:
        count = fill(publisher, subscriber)
        draft = publisher.reserve(SIZE)
        draft.write(b"whole")
        thread = threading.Thread(target=draft.publish, daemon=True)
        thread.start()
        eventually(lambda: not draft.open)
        with pytest.raises(StateError):
            draft.cancel()
        with pytest.raises(BufferError):
            memoryview(draft)
        for _ in range(count + 1):
            message = subscriber.read(LONG)
            assert message is not None
        assert bytes(message)[:5] == b"whole"
        thread.join(LONG)


def test_a_draft_that_nobody_took_in_time_is_open_again() -> None:
    with tcp.Publisher(depth=DEPTH, timeout=0.01) as publisher, tcp.Subscriber() as subscriber:
        count = 0
        subscriber.add_session("127.0.0.1", publisher.port)
        assert publisher.wait_ready(1, LONG)
        draft = publisher.reserve(SIZE)
        with pytest.raises(TimeoutError):
            while True:
                draft.publish()
                count += 1
                draft = publisher.reserve(SIZE)
        assert draft.open
        for _ in range(count):
            assert subscriber.read(LONG) is not None
        draft.publish()
        assert subscriber.read(LONG) is not None


def test_a_batch_that_is_being_sent_may_be_released() -> None:
    with tcp.Publisher() as first, tcp.Subscriber() as source:
        source.add_session("127.0.0.1", first.port)
        assert first.wait_ready(1, LONG)
        first.publish(b"a" * SIZE)
        batch = source.read_many(1, LONG)
        with tcp.Publisher(depth=DEPTH) as publisher, tcp.Subscriber() as subscriber:
            count, sent = fill(publisher, subscriber), 0

            def send() -> None:
                nonlocal sent
                with contextlib.suppress(StateError):  # it was released before this began
                    sent = publisher.publish_many(batch)

            thread = threading.Thread(target=send, daemon=True)
            thread.start()
            time.sleep(0.05)  # it is most likely waiting by now; where it is not, this shows less
            batch.release()
            for _ in range(8):  # whatever memory was given back is used again
                first.publish(b"b" * SIZE)
                with source.read_many(1, LONG) as other:
                    assert len(other) == 1
            for _ in range(count):
                assert subscriber.read(LONG) is not None
            thread.join(LONG)
            assert not thread.is_alive()
            for _ in range(sent):
                assert subscriber.read(LONG) == b"a" * SIZE


def test_a_function_may_hold_more_than_there_is_room_for() -> None:
    with tcp.Publisher() as publisher, tcp.Subscriber(max_message_size=SIZE, held_bytes=0) as subscriber:
        held: list[object] = []
        count = 0

        def keep(message: object) -> None:
            nonlocal count
            count += 1
            held.append(message)

        subscriber.on_message(keep, delivery="synchronous")
        subscriber.add_session("127.0.0.1", publisher.port)
        assert publisher.wait_ready(1, LONG)
        sender = threading.Thread(target=lambda: [publisher.publish(bytes(SIZE)) for _ in range(40)], daemon=True)
        sender.start()
        eventually(lambda: subscriber._full_logged)
        assert count < 40
        while count < 40:
            held.clear()
            time.sleep(0.001)
        sender.join(LONG)
        subscriber.on_message(None)
        held.clear()


def test_a_function_that_leaves_takes_no_thread_with_it() -> None:
    with (
        tcp.Executor(threads=1) as executor,
        tcp.Publisher(executor=executor) as publisher,
        tcp.Subscriber(executor=executor) as subscriber,
    ):
        found: list[bytes] = []

        def leave(message: object) -> None:
            found.append(bytes(message))  # type: ignore[call-overload]
            raise SystemExit

        subscriber.on_message(leave, delivery="synchronous")
        subscriber.add_session("127.0.0.1", publisher.port)
        assert publisher.wait_ready(1, LONG)
        publisher.publish_many([b"a", b"b"])
        eventually(lambda: found == [b"a", b"b"])
        executor.call_soon(leave)  # type: ignore[arg-type]
        done = threading.Event()
        executor.call_soon(done.set)
        assert done.wait(LONG)


def test_the_interpreter_ends_while_daemon_threads_read_and_publish() -> None:
    program = """
        import threading, time
        from penstock import tcp
        publisher, subscriber = tcp.Publisher(), tcp.Subscriber()
        subscriber.add_session("127.0.0.1", publisher.port)
        publisher.wait_ready()
        def run(step):
            while True:
                try:
                    step()
                except Exception:
                    pass
        steps = [lambda: publisher.publish(bytes(100_000)), lambda: subscriber.read(0.001)]
        steps.append(lambda: publisher.publish_many(bytes(100) for _ in range(100)))
        for step in 3 * steps:
            threading.Thread(target=run, args=(step,), daemon=True).start()
        time.sleep(0.2)
    """
    assert run(program) == ""
