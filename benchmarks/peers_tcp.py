"""The candidates of the TCP benchmarks: each sends from here and receives in a child (this file run as a program).

A child is told on its standard input how many messages to take (``rate N SIZE``, ``echo N SIZE``), says ``ready`` when
it is connected and ``done`` when it has them. Nothing is lost in any of them; all readers sleep when there is nothing.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

HEADER = struct.Struct("<HBBQ")
C_SOURCE = Path(__file__).with_name("tcp_floor.c")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def exactly(connection: socket.socket, size: int) -> bytes:
    data = connection.recv(size)
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


class Child:
    """The receiving process, pinned to a core."""

    def __init__(self, kind: str, port: int, core: int | None) -> None:
        environment = dict(os.environ, BENCH_CORE="" if core is None else str(core))
        self.process = subprocess.Popen(
            [sys.executable, __file__, kind, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def expect(self, word: str) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if line != word:
            raise RuntimeError(f"the receiver said {line!r} instead of {word!r}")

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Side:
    """One candidate: ``send(n, data)`` sends n messages; ``echo(n)`` gives the times of n round trips."""

    kind = ""

    def __init__(self, core: int | None = 1, children: int = 1) -> None:
        self.port = self.open()
        self.children = [Child(self.kind, self.port, core) for _ in range(children)]
        self.connected()
        for child in self.children:
            child.expect("ready")

    def open(self) -> int:
        raise NotImplementedError

    def connected(self) -> None: ...

    def send(self, count: int, data: bytes) -> None:
        raise NotImplementedError

    def rate(self, count: int, data: bytes) -> float:
        for child in self.children:
            child.say(f"rate {count} {len(data)}")
            child.expect("go")
        began = time.perf_counter()
        self.send(count, data)
        for child in self.children:
            child.expect("done")
        return time.perf_counter() - began

    def ping(self, data: bytes) -> None:
        raise NotImplementedError

    def echo(self, count: int, data: bytes) -> list[float] | float:
        self.children[0].say(f"echo {count} {len(data)}")
        self.children[0].expect("go")
        took = []
        for _ in range(count):
            began = time.perf_counter()
            self.ping(data)
            took.append(time.perf_counter() - began)
        self.children[0].expect("done")
        return took

    def close(self) -> None:
        for child in self.children:
            child.close()


# ---- senders


class Penstock(Side):
    kind = "penstock"

    def open(self) -> int:
        from penstock import tcp

        self.publisher = tcp.Publisher()
        self.back = tcp.Subscriber()
        return self.publisher.port

    def connected(self) -> None:
        assert self.publisher.wait_ready(len(self.children), 30)

    def send(self, count: int, data: bytes) -> None:
        publish = self.publisher.publish
        for _ in range(count):
            publish(data)

    def ping(self, data: bytes) -> None:
        self.publisher.publish(data)
        self.back.read()

    def echo(self, count: int, data: bytes) -> list[float] | float:
        if not self.back.sessions:
            self.children[0].say("port 0 0")
            assert self.children[0].process.stdout is not None
            session = self.back.add_session("127.0.0.1", int(self.children[0].process.stdout.readline()))
            assert session.wait_connected(30)
            self.children[0].expect("heard")
        return super().echo(count, data)

    def close(self) -> None:
        super().close()
        self.back.close()
        self.publisher.close()


class PenstockStalled(Penstock):
    """Beside a subscriber that never reads: its queue is full, every message is dropped for it."""

    def open(self) -> int:
        from penstock import tcp

        self.publisher = tcp.Publisher(overflow="drop_oldest", depth=1000)
        self.back = tcp.Subscriber()
        self.stalled = socket.create_connection(("127.0.0.1", self.publisher.port))
        self.stalled.sendall(HEADER.pack(12, 1, 0, 1) + bytes(1))
        self.publisher.wait_ready(1, 30)
        while not self.publisher.ledger.lost:
            self.publisher.publish(bytes(10_000))
        return self.publisher.port

    def connected(self) -> None:
        assert self.publisher.wait_ready(1 + len(self.children), 30)

    def close(self) -> None:
        self.stalled.close()
        super().close()


class PenstockBatched(Penstock):
    kind = "penstock-batched"

    def send(self, count: int, data: bytes) -> None:
        batch = [data] * 512
        for _ in range(count // 512):
            self.publisher.publish_many(batch)
        self.publisher.publish_many(batch[: count % 512])


class Raw(Side):
    kind = "raw"

    def open(self) -> int:
        self.listener = socket.create_server(("127.0.0.1", 0))
        return int(self.listener.getsockname()[1])

    def connected(self) -> None:
        self.connections = [self.listener.accept()[0] for _ in self.children]
        for connection in self.connections:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, count: int, data: bytes) -> None:
        header = HEADER.pack(12, 0, 0, len(data))
        for _ in range(count):
            for connection in self.connections:
                connection.sendall(header + data)

    def ping(self, data: bytes) -> None:
        connection = self.connections[0]
        connection.sendall(HEADER.pack(12, 0, 0, len(data)) + data)
        _, _, _, size = HEADER.unpack(exactly(connection, 12))
        exactly(connection, size)

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        self.listener.close()
        super().close()


class RawBuffered(Raw):
    kind = "raw-buffered"

    def send(self, count: int, data: bytes) -> None:
        (connection,) = self.connections
        header = HEADER.pack(12, 0, 0, len(data))
        together = max(1, 65536 // (12 + len(data)))
        for first in range(0, count, together):
            connection.sendall(b"".join([header + data for _ in range(min(together, count - first))]))


class Zmq(Side):
    kind = "pyzmq"

    def open(self) -> int:
        import zmq

        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.XPUB)
        self.socket.setsockopt(zmq.XPUB_NODROP, 1)
        self.socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # else only the first of equal subscriptions is told
        self.socket.setsockopt(zmq.RCVTIMEO, 20_000)
        self.back = self.context.socket(zmq.SUB)
        self.back.setsockopt(zmq.SUBSCRIBE, b"")
        self.met = False
        return int(self.socket.bind_to_random_port("tcp://127.0.0.1"))

    def connected(self) -> None:
        for _ in self.children:
            self.socket.recv()  # the subscription

    def send(self, count: int, data: bytes) -> None:
        send = self.socket.send
        for _ in range(count):
            send(data)

    def ping(self, data: bytes) -> None:
        self.socket.send(data)
        self.back.recv()

    def echo(self, count: int, data: bytes) -> list[float] | float:
        if not self.met:
            self.met = True
            self.children[0].say("port 0 0")
            assert self.children[0].process.stdout is not None
            self.back.connect(f"tcp://127.0.0.1:{self.children[0].process.stdout.readline().strip()}")
            self.children[0].expect("heard")
        return super().echo(count, data)

    def close(self) -> None:
        super().close()
        self.socket.close(0)
        self.back.close(0)
        self.context.term()


class Pynng(Side):
    kind = "pynng"

    def open(self) -> int:
        import pynng

        port = free_port()
        self.socket = pynng.Pair0(listen=f"tcp://127.0.0.1:{port}")
        return port

    def send(self, count: int, data: bytes) -> None:
        send = self.socket.send
        for _ in range(count):
            send(data)

    def ping(self, data: bytes) -> None:
        self.socket.send(data)
        self.socket.recv()

    def close(self) -> None:
        super().close()
        self.socket.close()


class Zenoh(Side):
    kind = "zenoh"

    def open(self) -> int:
        import zenoh

        port = free_port()
        self.session = zenoh.open(_zenoh_config("listen", port))
        self.publisher = self.session.declare_publisher("there", congestion_control=zenoh.CongestionControl.BLOCK)
        self.back = threading.Semaphore(0)
        self.subscriber = self.session.declare_subscriber("back", lambda _: self.back.release())
        return port

    def connected(self) -> None:
        while not self.publisher.matching_status.matching:
            time.sleep(0.01)

    def send(self, count: int, data: bytes) -> None:
        put = self.publisher.put
        for _ in range(count):
            put(data)

    def ping(self, data: bytes) -> None:
        self.publisher.put(data)
        self.back.acquire()

    def close(self) -> None:
        super().close()
        self.session.close()


class CFloor(Side):
    """The same frames from C to C, one write a message (a header and its data in one call)."""

    kind = "c"

    def __init__(self, core: int | None = 1, children: int = 1) -> None:
        self.core = core
        self.many = children
        self.directory = tempfile.TemporaryDirectory()
        self.program = str(Path(self.directory.name) / "floor")
        subprocess.run(["cc", "-O2", "-o", self.program, str(C_SOURCE)], check=True)

    def rate(self, count: int, data: bytes) -> float:
        command = [self.program, "rate", str(count), str(len(data)), str(self.many)]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    def echo(self, count: int, data: bytes) -> float:
        cores = "same" if self.core == 0 else "two"
        command = [self.program, "echo", str(count), str(len(data)), cores]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    def close(self) -> None:
        self.directory.cleanup()


def _zenoh_config(direction: str, port: int):  # type: ignore[no-untyped-def]
    import zenoh

    config = zenoh.Config()
    config.insert_json5(f"{direction}/endpoints", f'["tcp/127.0.0.1:{port}"]')
    config.insert_json5("mode", '"peer"')
    config.insert_json5("scouting/multicast/enabled", "false")
    return config


# ---- receivers


def tell(word: str) -> None:
    print(word, flush=True)


def orders(handlers: dict[str, Callable[[int, int], None]]) -> None:
    """Do what standard input says."""
    tell("ready")
    for line in sys.stdin:
        word, count, size = line.split()
        if word != "port":
            tell("go")
        handlers[word](int(count), int(size))
        tell("heard" if word == "port" else "done")


def receive_penstock(port: int, batched: bool) -> None:
    from penstock import tcp

    subscriber = tcp.Subscriber()
    subscriber.add_session("127.0.0.1", port).wait_connected(30)
    publisher = tcp.Publisher()

    def one_by_one(count: int, size: int) -> None:
        read = subscriber.read
        for _ in range(count):
            read()

    def many(count: int, size: int) -> None:
        while count > 0:
            count -= len(subscriber.read_many(4096))

    def echo(count: int, size: int) -> None:
        read, publish = subscriber.read, publisher.publish
        for _ in range(count):
            publish(read())

    def meet(_: int, __: int) -> None:
        tell(str(publisher.port))
        publisher.wait_ready(1, 30)

    orders({"rate": many if batched else one_by_one, "echo": echo, "port": meet})
    subscriber.close()
    publisher.close()


def receive_raw(port: int, buffered: bool) -> None:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def one_by_one(count: int, size: int) -> None:
        for _ in range(count):
            exactly(connection, HEADER.unpack(exactly(connection, 12))[3])

    def from_buffer(count: int, size: int) -> None:
        unpack = HEADER.unpack_from
        rest = b""
        while count:
            data = rest + connection.recv(262144)
            at, end = 0, len(data)
            while end - at >= 12:
                header, _, _, length = unpack(data, at)
                begin = at + header
                after = begin + length
                if after > end:
                    break
                data[begin:after]
                at = after
                count -= 1
            rest = data[at:]

    def echo(count: int, size: int) -> None:
        for _ in range(count):
            _, _, _, length = HEADER.unpack(exactly(connection, 12))
            connection.sendall(HEADER.pack(12, 0, 0, length) + exactly(connection, length))

    orders({"rate": from_buffer if buffered else one_by_one, "echo": echo})


def receive_zmq(port: int) -> None:
    import zmq

    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    subscriber.connect(f"tcp://127.0.0.1:{port}")
    back = context.socket(zmq.XPUB)
    back.linger = subscriber.linger = 0

    def rate(count: int, size: int) -> None:
        receive = subscriber.recv
        for _ in range(count):
            receive()

    def meet(_: int, __: int) -> None:
        tell(str(back.bind_to_random_port("tcp://127.0.0.1")))
        back.recv()  # the subscription

    def echo(count: int, size: int) -> None:
        for _ in range(count):
            back.send(subscriber.recv())

    orders({"rate": rate, "echo": echo, "port": meet})


def receive_pynng(port: int) -> None:
    import pynng

    pair = pynng.Pair0(dial=f"tcp://127.0.0.1:{port}")

    def rate(count: int, size: int) -> None:
        receive = pair.recv
        for _ in range(count):
            receive()

    def echo(count: int, size: int) -> None:
        for _ in range(count):
            pair.send(pair.recv())

    orders({"rate": rate, "echo": echo})


def receive_zenoh(port: int) -> None:
    import zenoh

    session = zenoh.open(_zenoh_config("connect", port))
    subscriber = session.declare_subscriber("there", zenoh.handlers.FifoChannel(1000))
    publisher = session.declare_publisher("back", congestion_control=zenoh.CongestionControl.BLOCK)

    def rate(count: int, size: int) -> None:
        for _ in range(count):
            subscriber.recv()

    def echo(count: int, size: int) -> None:
        for _ in range(count):
            publisher.put(subscriber.recv().payload)

    orders({"rate": rate, "echo": echo})
    session.close()


def main() -> None:
    kind, port = sys.argv[1], int(sys.argv[2])
    core = os.environ.get("BENCH_CORE")
    if core and int(core) < (os.cpu_count() or 1):
        os.sched_setaffinity(0, {int(core)})
    receivers: dict[str, Callable[[], None]] = {
        "penstock": lambda: receive_penstock(port, False),
        "penstock-batched": lambda: receive_penstock(port, True),
        "raw": lambda: receive_raw(port, False),
        "raw-buffered": lambda: receive_raw(port, True),
        "pyzmq": lambda: receive_zmq(port),
        "pynng": lambda: receive_pynng(port),
        "zenoh": lambda: receive_zenoh(port),
    }
    receivers[kind]()


if __name__ == "__main__":
    main()
