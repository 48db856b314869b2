"""Collection, fork, Ctrl-C, interpreter shutdown, signal handlers under load."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from typing import Any

import pytest

from penstock.bus import Bus, CallbackSubscriber, SlabAllocator

from .conftest import LONG


def test_cycles_through_handlers_are_collected() -> None:
    class Component:
        def __init__(self) -> None:
            self.bus = Bus(mode="direct")
            self.subscriber = self.bus.subscribe(1, kind="callback", handler=self.handle, predicate=self.choose)
            self.queue = self.bus.subscribe(1, handler=self.handle)

        def handle(self, message: Any) -> None:
            pass

        def choose(self, message: Any) -> bool:
            return True

    component = Component()
    component.bus.publish(b"", 1)
    gone = [weakref.ref(thing) for thing in (component, component.bus)]
    del component
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_a_queue_nobody_holds_leaves_the_bus() -> None:
    with Bus(mode="direct") as bus:
        bus.subscribe(1, depth=1)
        assert bus.subscribers == []
        for _ in range(5):
            bus.publish(b"", 1)  # would block for ever
        held = bus.subscribe(1, kind="callback", handler=lambda message: None)
        del held
        gc.collect()
        assert len(bus.subscribers) == 1, "a callback stays"


def test_a_callback_may_drop_the_last_reference_to_itself() -> None:
    with Bus(mode="direct") as bus:
        holder: dict[str, Any] = {}

        def handler(message: Any) -> None:
            bus.remove(holder.pop("subscriber"))
            gc.collect()

        holder["subscriber"] = bus.add(CallbackSubscriber(handler, ids=[1]))
        del handler
        bus.publish(b"", 1)
        bus.publish(b"", 1)
        assert bus.heap_in_use == 0


def test_finalisers_may_publish_and_release() -> None:
    with Bus(mode="direct") as bus:
        queue = bus.subscribe(1, 2)

        class Noisy:
            def __del__(self) -> None:
                bus.publish(b"finalised", 2)

        @bus.on(1)
        def handler(message: Any) -> None:
            cycle: list[Any] = [Noisy()]
            cycle.append(cycle)
            del cycle
            gc.collect()

        bus.publish(b"", 1)
        assert [message.id for message in queue.read_many(5, 0)] == [1, 2]


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread")
@pytest.mark.parametrize("mode", ["direct", "thread"])
def test_publishing_in_a_signal_handler_under_load(mode: str) -> None:
    """A signal every millisecond interrupts publishes of this thread, some of which wait for a full queue."""
    bus = Bus(mode=mode, pending_depth=64 if mode == "thread" else None)
    slab = SlabAllocator(8, 100)
    bus.add_allocator(slab)
    queue = bus.subscribe(1, 2, 3, depth=8, max_public_id=3)
    private = CallbackSubscriber(lambda message: None, max_public_id=3)
    sent = {1: 0, 2: 0, 3: 0}

    def on_signal(*_: Any) -> None:
        bus.publish(b"signal", 2)
        sent[2] += 1
        draft = slab.allocate(3, 8, timeout=0)
        if draft is not None:
            bus.publish(draft)
            sent[3] += 1
        secret = slab.allocate(9, 8, timeout=0)
        if secret is not None:
            bus.publish_to(private, secret)

    received = {1: 0, 2: 0, 3: 0}
    last = {1: 0, 2: 0, 3: 0}
    finished = threading.Event()

    def read() -> None:
        while not (finished.is_set() and queue.queued == 0 and bus.pending == 0):
            for message in queue.read_many(100, 0.01):
                received[message.id] += 1
                assert message.ordinal == last[message.id] + 1
                last[message.id] = message.ordinal

    reader = threading.Thread(target=read)
    reader.start()
    previous = signal.signal(signal.SIGALRM, on_signal)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline or sent[2] <= 50:
            bus.publish(b"load", 1)
            sent[1] += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert bus.flush(LONG)
    finished.set()
    reader.join(LONG)
    assert not reader.is_alive()
    assert received == sent
    assert queue.ledger.balanced and queue.ledger.lost == 0
    assert private.ledger.balanced
    bus.close()
    assert slab.in_use == 0


def run(code: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_leaving_everything_open_ends_cleanly() -> None:
    done = run(
        """
        import threading
        from penstock.bus import Bus, DelayedMessage, default_bus
        bus, direct = Bus(), Bus(mode="direct")
        queue = bus.subscribe(1, depth=1)
        bus.subscribe(1, kind="callback", handler=lambda message: None)
        for _ in range(10):
            bus.publish(b"x", 1)          # the bus's thread waits for the queue
        full = direct.subscribe(1, depth=1)
        def flood():
            while True:
                direct.publish(b"x", 1)   # a daemon waits for ever
        threading.Thread(target=flood, daemon=True).start()
        threading.Thread(target=bus.subscribe(7).read, daemon=True).start()
        default_bus().publish(b"x", 1)
        DelayedMessage(queue, 5000).start(3600)
        kept = queue.read(10)
        print("end")
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_ctrl_c_ends_a_wait() -> None:
    done = run(
        """
        import os, signal, threading
        from penstock.bus import Bus
        for wait in ("read", "publish", "allocate"):
            bus = Bus(mode="direct")
            queue = bus.subscribe(1, depth=1)
            try:
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
                if wait == "read":
                    queue.read()
                elif wait == "publish":
                    bus.publish(b"", 1)
                    bus.publish(b"", 1)
                else:
                    from penstock.bus import SlabAllocator
                    slab = SlabAllocator(8, 1)
                    bus.add_allocator(slab)
                    held = slab.allocate(1, 8)
                    slab.allocate(1, 8, timeout=None)
            except KeyboardInterrupt:
                print(wait, queue.ledger.balanced)
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "read True\npublish True\nallocate True\n", "")


def test_a_forked_child_has_a_bus_that_works() -> None:
    done = run(
        """
        import os, select, threading, warnings
        from penstock.bus import Bus
        bus = Bus()
        queue = bus.subscribe(1)
        queue.fileno()
        bus.publish(b"parent", 1)
        assert bytes(queue.read(30)) == b"parent"
        assert queue.read(0) is None
        reader = threading.Thread(target=queue.wait, args=(30,)); reader.start()
        child = os.fork()
        if child == 0:
            bus.publish(b"child", 1)                    # its own thread, made anew
            ok = select.select([queue], [], [], 30)[0] and bytes(queue.read(30)) == b"child"
            bus.close()
            os._exit(0 if ok else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert queue.read(0) is None, "the child's message is the child's"
        assert not select.select([queue], [], [], 0)[0]
        bus.publish(b"again", 1)
        reader.join(30)
        assert bytes(queue.read(30)) == b"again"
        print("fine")
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_descriptors_are_given_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        with Bus(mode="direct") as bus:
            queue = bus.subscribe(1)
            queue.fileno()
            queue.close()
            del queue
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 2


BUSY_AT_EXIT = {
    "a callback message": """
        from penstock.bus import CallbackMessage, QueueSubscriber, publish_to

        def run():
            queue = QueueSubscriber(depth=4)
            message = CallbackMessage(bytearray(8), 5000, lambda message: sum(range(300)))
            while True:
                publish_to(queue, message.acquire())
                queue.read(0)
    """,
    "a custom allocator": """
        from penstock.bus import Bus, CustomAllocator

        class Source:
            def allocate(self, size):
                return bytearray(size + 0 * sum(range(300)))

            def free(self, memory):
                sum(range(300))

        bus = Bus(mode="direct")
        allocator = CustomAllocator(Source(), 64)
        bus.add_allocator(allocator)
        queues = [bus.subscribe(1, overflow="drop_oldest", depth=3) for _ in range(4)]

        def run():
            while True:
                bus.publish(bus.allocate(1, 8, allocator))
    """,
    "a handler": """
        from penstock.bus import Bus

        bus = Bus(mode="direct")
        queues = [bus.subscribe(1, overflow="drop_oldest", depth=3) for _ in range(4)]
        bus.subscribe(1, kind="callback", handler=lambda message: sum(range(300)))

        def run():
            while True:
                bus.publish(b"", 1)
    """,
}


@pytest.mark.parametrize("what", BUSY_AT_EXIT)
def test_the_interpreter_ends_while_a_daemon_thread_is_in(what: str) -> None:
    program = textwrap.dedent(BUSY_AT_EXIT[what]) + textwrap.dedent(
        """
        import threading, time
        for _ in range(8):
            threading.Thread(target=run, daemon=True).start()
        time.sleep(0.1)
        """
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr
