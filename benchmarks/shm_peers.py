# ruff: noqa: E501 -- tables of candidates read better whole
"""Between two processes, Python on both sides: one way and there and back, beside what people use instead.

One way: 64 B, nothing lost, until the reader has them all; and 1 MiB written and read. Round trip: 64 B, readers
asleep, pinned to two cores and to one, beside a bare eventfd in C; spinning beside a bare spin in C. Publish time over the
number of slots, and growing slots with four readers.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import multiprocessing
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness import Candidate, compare, options
from wishes import ahead_of, at_least, at_most, reaching

context = multiprocessing.get_context("spawn")
HERE = Path(__file__).parent
ONE_WAY_PEERS = ("pyzmq ipc nodrop", "multiprocessing.Pipe", "zenoh unix", "eCAL, acknowledged")
ROUND_TRIP_PEERS = ("iceoryx2 event", "pyzmq ipc", "multiprocessing.Pipe", "zenoh unix", "eCAL")
SMALL, LARGE = 64, 1 << 20
CORES = sorted(os.sched_getaffinity(0))
FIRST, SECOND = CORES[0], CORES[-1]


class Pair:
    """A reader in another process, told by a pipe how many to expect; gives the seconds from the first to the last."""

    def __init__(self, work: Callable[..., None], *arguments: Any, core: int = SECOND) -> None:
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_pinned, args=(core, work, other, *arguments), daemon=True)
        self.process.start()
        self.wait()

    def tell(self, value: Any) -> None:
        self.pipe.send(value)

    def wait(self) -> Any:
        if not self.pipe.poll(60):
            raise TimeoutError("the other side says nothing")
        return self.pipe.recv()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()


def _pinned(core: int, work: Callable[..., None], pipe: Connection, *arguments: Any) -> None:
    os.sched_setaffinity(0, {core})
    work(pipe, *arguments)


def one_way(pair: Pair, send: Callable[[int], Any]) -> Callable[[int], float]:
    def run(count: int) -> float:
        pair.tell(count)
        pair.wait()
        began = time.perf_counter()
        send(count)
        pair.wait()
        return time.perf_counter() - began

    return run


def round_trip(once: Callable[[], Any], core: int = FIRST) -> Callable[[int], list[float]]:
    """The times of ``count`` round trips."""

    def run(count: int) -> list[float]:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {core})
        try:
            times = []
            for _ in range(count):
                began = time.perf_counter()
                once()
                times.append(time.perf_counter() - began)
            return times
        finally:
            os.sched_setaffinity(0, before)

    return run


# --- penstock ---------------------------------------------------------------------------------------------------------


def penstock_count(pipe: Connection, name: str, batched: bool, touch: bool, slots: int) -> None:
    from penstock import shm

    subscriber = shm.Subscriber(name, reliable=True, max_active_messages=256 if batched else 2)
    pipe.send("there")
    copy = memoryview(bytearray(LARGE))
    while (count := pipe.recv()) is not None:
        pipe.send("go")
        if batched:
            while count > 0:
                count -= len(subscriber.read_many(256))
        elif touch:
            for _ in range(count):
                message = subscriber.read()
                copy[:] = message  # one pass over it; a bytearray would copy it twice
        else:
            read = subscriber.read
            for _ in range(count):
                read()
        assert subscriber.ledger.lost == 0
        pipe.send("all")


def penstock_one_way(batched: bool, size: int, slots: int) -> tuple[Callable[[int], float], Callable[[], None]]:
    from penstock import shm

    name = f"/bench/{os.getpid()}/{batched}/{size}/{slots}"
    publisher = shm.Publisher(name, slots=slots, slot_size=size, reliable=True)
    pair = Pair(penstock_count, name, batched, size == LARGE, slots)
    data = b"\1" * size  # pages of its own: zeros would all be one page
    block = [data] * 500

    def send(count: int) -> None:
        if batched:
            for _ in range(count // 500):
                publisher.publish_many(block)
            publisher.publish_many(block[: count % 500])
        else:
            publish = publisher.publish
            for _ in range(count):
                publish(data)

    return one_way(pair, send), lambda: (pair.close(), publisher.close())[0]


def penstock_echo(pipe: Connection, name: str, spin_us: int, size: int) -> None:
    from penstock import shm

    subscriber = shm.Subscriber(name + "/there", reliable=True, spin_us=spin_us)
    publisher = shm.Publisher(name + "/back", slots=8, slot_size=size, reliable=True)
    pipe.send("there")
    threading.Thread(target=lambda: (pipe.recv(), os._exit(0)), daemon=True).start()
    data = bytes(SMALL)
    read, publish, reserve = subscriber.read, publisher.publish, publisher.reserve
    if size == SMALL:
        while True:
            read()
            publish(data)
    while True:
        read()
        reserve(size).publish()


def penstock_round_trip(
    core: int, spin_us: int, size: int = SMALL
) -> tuple[Callable[[int], list[float]], Callable[[], None]]:
    from penstock import shm

    name = f"/bench/{os.getpid()}/{core}/{spin_us}/{size}"
    publisher = shm.Publisher(name + "/there", slots=8, slot_size=size, reliable=True)
    subscriber = shm.Subscriber(name + "/back", reliable=True, spin_us=spin_us)
    pair = Pair(penstock_echo, name, spin_us, size, core=core)
    publisher.wait_ready(1, 30)
    publish, reserve, read = publisher.publish, publisher.reserve, subscriber.read
    data = bytes(SMALL)

    def small() -> None:
        publish(data)
        read()

    def large() -> None:
        reserve(size).publish()
        read()

    once = small if size == SMALL else large
    return round_trip(once), lambda: (pair.close(), publisher.close(), subscriber.close())[0]


# --- peers ------------------------------------------------------------------------------------------------------------


def zmq_count(pipe: Connection, address: str) -> None:
    import zmq

    socket = zmq.Context().socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, 10_000)
    socket.connect(address)
    socket.subscribe(b"")
    pipe.send("there")
    while (count := pipe.recv()) is not None:
        pipe.send("go")
        for _ in range(count):
            socket.recv()
        pipe.send("all")
    socket.close(0)


def zmq_one_way(size: int) -> tuple[Callable[[int], float], Callable[[], None]]:
    import zmq

    directory = tempfile.mkdtemp()
    socket = zmq.Context().socket(zmq.XPUB)
    socket.setsockopt(zmq.XPUB_NODROP, 1)
    socket.setsockopt(zmq.SNDHWM, 10_000)
    socket.bind(f"ipc://{directory}/socket")
    pair = Pair(zmq_count, f"ipc://{directory}/socket")
    socket.recv()  # its subscription
    data = bytes(size)

    def send(count: int) -> None:
        for _ in range(count):
            socket.send(data)

    return one_way(pair, send), lambda: (pair.close(), socket.close(0), shutil.rmtree(directory))[0]


def zmq_echo(pipe: Connection, address: str) -> None:
    import zmq

    socket = zmq.Context().socket(zmq.PAIR)
    socket.connect(address)
    pipe.send("there")
    threading.Thread(target=lambda: (pipe.recv(), os._exit(0)), daemon=True).start()
    while True:
        socket.send(socket.recv())


def zmq_round_trip(core: int) -> tuple[Callable[[int], list[float]], Callable[[], None]]:
    import zmq

    directory = tempfile.mkdtemp()
    socket = zmq.Context().socket(zmq.PAIR)
    socket.bind(f"ipc://{directory}/socket")
    pair = Pair(zmq_echo, f"ipc://{directory}/socket", core=core)
    data = bytes(SMALL)
    once = lambda: (socket.send(data), socket.recv())  # noqa: E731
    return round_trip(once), lambda: (pair.close(), socket.close(0), shutil.rmtree(directory))[0]


def pipe_count(pipe: Connection, incoming: Connection) -> None:
    pipe.send("there")
    while (count := pipe.recv()) is not None:
        pipe.send("go")
        for _ in range(count):
            incoming.recv_bytes()
        pipe.send("all")


def pipe_one_way(size: int) -> tuple[Callable[[int], float], Callable[[], None]]:
    incoming, outgoing = context.Pipe(duplex=False)
    pair = Pair(pipe_count, incoming)
    data = bytes(size)

    def send(count: int) -> None:
        for _ in range(count):
            outgoing.send_bytes(data)

    return one_way(pair, send), pair.close


def pipe_echo(pipe: Connection, other: Connection) -> None:
    pipe.send("there")
    threading.Thread(target=lambda: (pipe.recv(), os._exit(0)), daemon=True).start()
    while True:
        other.send_bytes(other.recv_bytes())


def pipe_round_trip(core: int) -> tuple[Callable[[int], list[float]], Callable[[], None]]:
    ours, theirs = context.Pipe()
    pair = Pair(pipe_echo, theirs, core=core)
    data = bytes(SMALL)
    return round_trip(lambda: (ours.send_bytes(data), ours.recv_bytes())), pair.close


class Small(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint8 * SMALL)]


class Iceoryx:
    """Publisher, subscriber, notifier and listener of one iceoryx2 service."""

    def __init__(self, name: str) -> None:
        import iceoryx2

        iceoryx2.set_log_level(iceoryx2.LogLevel.Fatal)
        self.module = iceoryx2
        node = iceoryx2.NodeBuilder.new().create(iceoryx2.ServiceType.Ipc)
        service = node.service_builder(iceoryx2.ServiceName.new(name)).publish_subscribe(Small)
        self.service = service.enable_safe_overflow(False).subscriber_max_buffer_size(64).open_or_create()
        self.event = node.service_builder(iceoryx2.ServiceName.new(name)).event().open_or_create()
        self.node = node

    def publisher(self) -> Callable[[], None]:
        publisher = self.service.publisher_builder().create()
        payload = Small()

        def send() -> None:
            publisher.loan_uninit().write_payload(payload).send()

        return send

    def subscriber(self) -> Any:
        return self.service.subscriber_builder().create().receive


def iceoryx_echo(pipe: Connection, name: str, polling: bool) -> None:
    there, back = Iceoryx(name + "/there"), Iceoryx(name + "/back")
    receive, send = there.subscriber(), back.publisher()
    listener, notifier = there.event.listener_builder().create(), back.event.notifier_builder().create()
    pipe.send("there")
    if polling:  # only while it is measured: it takes a whole core
        while (count := pipe.recv()) is not None:
            for _ in range(count):
                while receive() is None:
                    pass
                send()
        return
    threading.Thread(target=lambda: (pipe.recv(), os._exit(0)), daemon=True).start()
    while True:
        while receive() is None:
            listener.blocking_wait()
        send()
        notifier.notify()


def iceoryx_round_trip(core: int, polling: bool) -> tuple[Callable[[int], list[float]], Callable[[], None]]:
    name = f"bench/{os.getpid()}/{core}/{polling}"
    there, back = Iceoryx(name + "/there"), Iceoryx(name + "/back")
    send, receive = there.publisher(), back.subscriber()
    listener, notifier = back.event.listener_builder().create(), there.event.notifier_builder().create()
    pair = Pair(iceoryx_echo, name, polling, core=core)

    def asleep() -> None:
        send()
        notifier.notify()
        while receive() is None:
            listener.blocking_wait()

    def awake() -> None:
        send()
        while receive() is None:
            pass

    timed = round_trip(awake if polling else asleep)

    def run(count: int) -> list[float]:
        if polling:
            pair.tell(count)
        return timed(count)

    return run, pair.close


def zenoh_session(place: str, listens: bool) -> Any:
    import zenoh

    config = zenoh.Config()
    config.insert_json5("mode", '"peer"')
    config.insert_json5("scouting/multicast/enabled", "false")
    config.insert_json5(f"{'listen' if listens else 'connect'}/endpoints", f'["unixsock-stream//tmp/{place}"]')
    return zenoh.open(config)


def zenoh_publisher(session: Any, key: str) -> Any:
    import zenoh

    return session.declare_publisher(key, congestion_control=zenoh.CongestionControl.BLOCK, express=True)


def zenoh_count(pipe: Connection, key: str, place: str) -> None:
    seen = threading.Semaphore(0)
    with zenoh_session(place, listens=False) as session:
        subscriber = session.declare_subscriber(key, lambda _: seen.release())
        pipe.send("there")
        while (count := pipe.recv()) is not None:
            pipe.send("go")
            for _ in range(count):
                seen.acquire()
            pipe.send("all")
        subscriber.undeclare()


def zenoh_one_way(size: int) -> tuple[Callable[[int], float], Callable[[], None]]:
    import zenoh

    place = f"penstock-bench-zenoh-{os.getpid()}-{size}"
    session = zenoh_session(place, listens=True)
    publisher = session.declare_publisher("bench", congestion_control=zenoh.CongestionControl.BLOCK)
    pair = Pair(zenoh_count, "bench", place)
    wait_until(lambda: publisher.matching_status.matching)
    data = bytes(size)

    def send(count: int) -> None:
        for _ in range(count):
            publisher.put(data)

    return one_way(pair, send), lambda: (pair.close(), session.close())[0]


def zenoh_echo(pipe: Connection, place: str) -> None:
    with zenoh_session(place, listens=False) as session:
        publisher = zenoh_publisher(session, "back")
        subscriber = session.declare_subscriber("there", lambda sample: publisher.put(sample.payload))
        pipe.send("there")
        pipe.recv()
        subscriber.undeclare()


def zenoh_round_trip(core: int) -> tuple[Callable[[int], list[float]], Callable[[], None]]:
    place = f"penstock-bench-zenoh-{os.getpid()}-echo-{core}"
    session = zenoh_session(place, listens=True)
    publisher, back = zenoh_publisher(session, "there"), threading.Semaphore(0)
    session.declare_subscriber("back", lambda _: back.release())
    pair = Pair(zenoh_echo, place, core=core)
    wait_until(lambda: publisher.matching_status.matching)
    data = bytes(SMALL)
    once = lambda: (publisher.put(data), back.acquire(timeout=10) or None)  # noqa: E731
    return round_trip(once), lambda: (pair.close(), session.close())[0]


def ecal_publisher(topic: str, acknowledged: bool = False) -> Any:
    import ecal.nanobind_core as ecal

    if not ecal.is_initialized():
        ecal.initialize("penstock benchmark")
    config = ecal.get_publisher_configuration()
    if acknowledged:  # it loses nearly everything when it is not
        config.layer.shm.acknowledge_timeout_ms = 1000
    return ecal.Publisher(topic, config=config)


def ecal_subscriber(topic: str, function: Callable[[], Any]) -> Any:
    import ecal.nanobind_core as ecal

    if not ecal.is_initialized():
        ecal.initialize("penstock benchmark")
    subscriber = ecal.Subscriber(topic)
    subscriber.set_receive_callback(lambda *_: function())
    return subscriber


def ecal_count(pipe: Connection, topic: str) -> None:
    seen = threading.Semaphore(0)
    subscriber = ecal_subscriber(topic, seen.release)
    pipe.send("there")
    while (count := pipe.recv()) is not None:
        pipe.send("go")
        for _ in range(count):
            if not seen.acquire(timeout=20):
                raise TimeoutError("eCAL lost messages")
        pipe.send("all")
    subscriber.remove_receive_callback()
    os._exit(0)


def ecal_one_way(size: int) -> tuple[Callable[[int], float], Callable[[], None]]:
    topic = f"penstock-bench-{os.getpid()}-{size}"
    publisher = ecal_publisher(topic, acknowledged=True)
    pair = Pair(ecal_count, topic)
    wait_until(lambda: publisher.get_subscriber_count() > 0)
    time.sleep(1)  # the other side may know later than this one
    data = bytes(size)

    def send(count: int) -> None:
        for _ in range(count):
            publisher.send(data)

    return one_way(pair, send), pair.close


def ecal_echo(pipe: Connection, topic: str) -> None:
    publisher, data = ecal_publisher(topic + "-back"), bytes(SMALL)
    subscriber = ecal_subscriber(topic, lambda: publisher.send(data))
    pipe.send("there")
    pipe.recv()
    subscriber.remove_receive_callback()
    os._exit(0)


def ecal_round_trip(core: int) -> tuple[Callable[[int], list[float]], Callable[[], None]]:
    topic, back = f"penstock-bench-{os.getpid()}-echo-{core}", threading.Semaphore(0)
    publisher, data = ecal_publisher(topic), bytes(SMALL)
    subscriber = ecal_subscriber(topic + "-back", back.release)
    pair = Pair(ecal_echo, topic, core=core)
    wait_until(lambda: publisher.get_subscriber_count() > 0 and subscriber.get_publisher_count() > 0)
    time.sleep(1)

    def once() -> None:
        publisher.send(data)
        if not back.acquire(timeout=10):
            raise TimeoutError("eCAL lost a message")

    return round_trip(once), lambda: (pair.close(), subscriber.remove_receive_callback())[0]


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the other side does not show up")
        time.sleep(0.05)


# --- questions --------------------------------------------------------------------------------------------------------


def made(name: str, make: Callable[[], Any], count: int, **more: Any) -> list[Candidate]:
    """A candidate; one that cannot be set up here is named and left out."""
    try:
        run, close = make()
    except Exception as error:
        print(f"{name}: did not start: {type(error).__name__}: {error}")
        return []
    return [Candidate(name, run, count, close=close, **more)]


def asked(arguments: Any, question: str) -> bool:
    return not arguments.only or any(part in question for part in arguments.only)


def floors(directory: str) -> Callable[..., float]:
    program = Path(directory) / "floors"
    subprocess.run([shutil.which("gcc") or "cc", "-O2", "-o", program, HERE / "shm_floors.c"], check=True)
    return lambda *arguments: float(
        subprocess.run([program, *map(str, arguments)], check=True, capture_output=True).stdout
    )


def throughput(arguments: Any) -> None:
    question = "shm: 64 B one way, lossless"
    if not asked(arguments, question):
        return
    os.sched_setaffinity(0, {FIRST})
    candidates = made("penstock", lambda: penstock_one_way(False, SMALL, 4096), 300_000,
                      wishes=[ahead_of(*ONE_WAY_PEERS, times=2.5)])  # fmt: skip
    candidates += made("penstock batched", lambda: penstock_one_way(True, SMALL, 4096), 1_000_000,
                       wishes=[ahead_of(*ONE_WAY_PEERS, times=8)])  # fmt: skip
    candidates += made("pyzmq ipc nodrop", lambda: zmq_one_way(SMALL), 200_000)
    candidates += made("multiprocessing.Pipe", lambda: pipe_one_way(SMALL), 100_000)
    candidates += made("zenoh unix", lambda: zenoh_one_way(SMALL), 50_000)
    candidates += made("eCAL, acknowledged", lambda: ecal_one_way(SMALL), 5_000)
    compare(question, candidates, "pyzmq ipc nodrop", arguments)


def bandwidth(arguments: Any, floor: Callable[..., float]) -> None:
    question = "shm: 1 MiB written and read"
    if not asked(arguments, question):
        return
    os.sched_setaffinity(0, {FIRST})
    handed, twice = "memcpy to another process (C)", "memcpy twice (C)"
    candidates = [
        Candidate(handed, lambda count: count * LARGE / floor("handoff", count, FIRST, SECOND, LARGE, 4), 3000, LARGE,
                  note="two processes, as a message goes"),
        Candidate(twice, lambda count: count * LARGE / floor("memcpy", count, LARGE), 3000, LARGE,
                  note="one process, all of it in its own cache"),
    ]  # fmt: skip
    candidates += made("penstock", lambda: penstock_one_way(False, LARGE, 4), 3000, quantity=LARGE,
                       wishes=[at_least(0.8, twice)])  # fmt: skip
    candidates += made("pyzmq ipc nodrop", lambda: zmq_one_way(LARGE), 1000, quantity=LARGE)
    candidates += made("multiprocessing.Pipe", lambda: pipe_one_way(LARGE), 300, quantity=LARGE)
    candidates += made("zenoh unix", lambda: zenoh_one_way(LARGE), 300, quantity=LARGE)
    candidates += made("eCAL, acknowledged", lambda: ecal_one_way(LARGE), 300, quantity=LARGE)
    compare(question, candidates, handed, arguments, unit="B/s")


def latency(arguments: Any, floor: Callable[..., float]) -> None:
    for core, where, limit in ((SECOND, "two cores", 1.2), (FIRST, "one core", 1.6)):
        asleep(arguments, floor, core, f"shm: 64 B round trip, asleep, {where}", limit)
        spinning(arguments, floor, core, f"shm: 64 B round trip, spinning, {where}")


def asleep(arguments: Any, floor: Callable[..., float], core: int, question: str, limit: float) -> None:
    if not asked(arguments, question):
        return
    reference = "eventfd (C)"
    candidates = [Candidate(reference, lambda count: floor("eventfd", count, FIRST, core), 5000, latency=True)]
    candidates += made("penstock", lambda: penstock_round_trip(core, 0), 5000, latency=True,
                       wishes=[at_most(limit, reference), ahead_of(*ROUND_TRIP_PEERS)])  # fmt: skip
    candidates += made("penstock 1 MiB untouched", lambda: penstock_round_trip(core, 0, LARGE), 5000, latency=True,
                       wishes=[at_most(1.2, "penstock")])  # fmt: skip
    candidates += made("iceoryx2 event", lambda: iceoryx_round_trip(core, False), 3000, latency=True)
    candidates += made("pyzmq ipc", lambda: zmq_round_trip(core), 3000, latency=True)
    candidates += made("multiprocessing.Pipe", lambda: pipe_round_trip(core), 3000, latency=True)
    candidates += made("zenoh unix", lambda: zenoh_round_trip(core), 2000, latency=True)
    candidates += made("eCAL", lambda: ecal_round_trip(core), 2000, latency=True)
    compare(question, candidates, reference, arguments, unit="s")


def spinning(arguments: Any, floor: Callable[..., float], core: int, question: str) -> None:
    if not asked(arguments, question):
        return
    candidates = [Candidate("spin (C)", lambda count: floor("spin", count, FIRST, core), 20_000, latency=True)]
    bound = 1e-6 if core != FIRST else 1e-3  # on one core it must not collapse: spinning gives way
    candidates += made("penstock", lambda: penstock_round_trip(core, 1000), 20_000, latency=True,
                       wishes=[reaching(bound)])  # fmt: skip
    if core != FIRST:  # on one core it takes its whole time slice for each
        candidates += made("iceoryx2 polling", lambda: iceoryx_round_trip(core, True), 5000, latency=True)
    compare(question, candidates, "spin (C)", arguments, unit="s")


def scaling(arguments: Any) -> None:
    from penstock import shm

    def candidate(slots: int) -> Candidate:
        publisher = shm.Publisher(f"/bench/slots/{os.getpid()}/{slots}", slots=slots, slot_size=SMALL)
        data = bytes(SMALL)

        def run(count: int) -> None:
            for _ in range(count):
                publisher.publish(data)

        wishes = [at_most(4, "10 slots")] if slots == 10_000 else []  # as the logarithm grows
        return Candidate(f"{slots} slots", run, 100_000, wishes=wishes, close=publisher.close)

    compare(
        "shm: publish over the number of slots", [candidate(n) for n in (10, 100, 1000, 10_000)], "10 slots", arguments
    )


def growing(arguments: Any) -> None:
    """4 KiB to 8 KiB slots with four readers: how long the reserve takes that does it."""
    from penstock import shm

    def run(count: int) -> list[float]:
        return [once(f"/bench/grow/{os.getpid()}/{next(numbers)}") for _ in range(count)]

    def once(name: str) -> float:
        with shm.Publisher(name, slots=16, slot_size=4096) as publisher, contextlib.ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(shm.Subscriber(name, max_active_messages=1))
            publisher.publish(b"x")
            began = time.perf_counter()
            draft = publisher.reserve(8192)
            took = time.perf_counter() - began
            draft.cancel()
            del draft  # it keeps its publisher, whose end is not to be measured with the next one
            return took

    numbers = itertools.count()
    candidate = Candidate("penstock", run, 100, latency=True, wishes=[reaching(10e-6)], note="the reference says 10 us")
    compare("shm: growing 4 KiB to 8 KiB with 4 readers", [candidate], "penstock", arguments, unit="s")


def main() -> None:
    arguments = options()
    affinity = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory() as directory:
        floor = floors(directory)
        throughput(arguments)
        bandwidth(arguments, floor)
        os.sched_setaffinity(0, affinity)
        latency(arguments, floor)
        scaling(arguments)
        growing(arguments)


if __name__ == "__main__":
    main()
