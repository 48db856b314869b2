"""A call and its answer between two processes, 64 bytes each way, one at a time: both on one core, and on two.

The reference is Penstock's own bare round trip over two channels, which does no bookkeeping of calls. The peers are
pyzmq's REQ and REP, and iceoryx2's request and response, which has no way to sleep: it looks again and again.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from harness import Candidate, compare, options
from shm_peers import FIRST, SMALL, Pair, penstock_round_trip, round_trip
from wishes import ahead_of, at_most

Made = tuple[Callable[[int], list[float]], Callable[[], None]]
SECOND = FIRST + 1


def penstock_serve(pipe: Connection, address: str) -> None:
    import penstock

    with penstock.server(address) as server:
        pipe.send("there")
        for request in server:
            request.reply(request.payload)


def penstock_call(core: int, spin_us: int) -> Made:
    import penstock

    address = f"shm:/bench/{os.getpid()}/calls/{core}/{spin_us}"
    pair = Pair(penstock_serve, address, core=core)
    client = penstock.client(address, spin_us=spin_us)
    client.wait_ready(1, 30)
    data = bytes(SMALL)
    return round_trip(lambda: client.call(data, 10.0)), lambda: (client.close(), pair.close())[0]


def zmq_serve(pipe: Connection, where: str) -> None:
    import zmq

    socket = zmq.Context().socket(zmq.REP)
    socket.connect(where)
    pipe.send("there")
    while True:
        socket.send(socket.recv())


def zmq_call(core: int) -> Made:
    import zmq

    directory = tempfile.mkdtemp()
    socket = zmq.Context().socket(zmq.REQ)
    socket.bind(f"ipc://{directory}/socket")
    pair = Pair(zmq_serve, f"ipc://{directory}/socket", core=core)
    data = bytes(SMALL)
    once = lambda: (socket.send(data), socket.recv())  # noqa: E731
    return round_trip(once), lambda: (pair.close(), socket.close(0), shutil.rmtree(directory))[0]


def _iceoryx_service(name: str) -> tuple[Any, Any]:
    import ctypes

    import iceoryx2

    class Payload(ctypes.Structure):
        _fields_ = [("data", ctypes.c_uint8 * SMALL)]

    node = iceoryx2.NodeBuilder.new().create(iceoryx2.ServiceType.Ipc)
    builder = node.service_builder(iceoryx2.ServiceName.new(name)).request_response(Payload, Payload)
    return (node, builder.open_or_create()), Payload


def iceoryx_serve(pipe: Connection, name: str) -> None:
    (_node, service), payload = _iceoryx_service(name)
    server = service.server_builder().create()
    pipe.send("there")
    answer = payload()
    while True:
        request = server.receive()
        if request is not None:
            request.send_copy(answer)


def iceoryx_call(core: int) -> Made:
    name = f"bench/{os.getpid()}/calls/{core}"
    (node, service), payload = _iceoryx_service(name)
    pair = Pair(iceoryx_serve, name, core=core)
    client = service.client_builder().create()
    data = payload()

    def once() -> None:
        pending = client.send_copy(data)
        while pending.receive() is None:
            pass

    return round_trip(once), lambda: (pair.close(), node)[0]


def candidate(name: str, make: Callable[[], Made], count: int, **more: Any) -> list[Candidate]:
    """The candidate, or none where the peer cannot be opened here."""
    try:
        run, close = make()
    except Exception as error:
        print(f"{name} does not run here: {error}")
        return []
    return [Candidate(name, run, count, latency=True, close=close, **more)]


def main() -> None:
    arguments = options()
    for core, cores in ((FIRST, "one core"), (SECOND, "two cores")):
        wishes = (at_most(2, "bare round trip"), ahead_of("pyzmq REQ/REP"))
        candidates = candidate("bare round trip", lambda core=core: penstock_round_trip(core, 0), 5000)
        candidates += candidate("penstock call", lambda core=core: penstock_call(core, 0), 5000, wishes=wishes)
        candidates += candidate("pyzmq REQ/REP", lambda core=core: zmq_call(core), 3000)
        if cores == "two cores":
            candidates += candidate("iceoryx2 polling", lambda core=core: iceoryx_call(core), 3000)
        compare(f"call and answer, shm, 64 B, {cores}", candidates, "bare round trip", arguments, unit="s")


if __name__ == "__main__":
    main()
