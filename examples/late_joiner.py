"""Late joiners: a state that is there at once, the last messages, and the whole past from the disk.

Run it as it is; in real life publisher and subscribers are in several processes (shm:) or on several machines (tcp://).
"""

from __future__ import annotations

import tempfile

import penstock


def state() -> None:
    """A door's state: who joins gets the last value at once."""
    with penstock.publisher("shm:/example/door", latest=True) as door:
        door.set(b"open")
        door.set(b"closed")
        with penstock.subscriber("shm:/example/door") as viewer:
            print("the door is", bytes(viewer.receive(timeout=10.0)).decode())


def last_messages() -> None:
    """The publisher is ready before anybody has connected: nothing is lost for that."""
    with penstock.publisher("tcp://127.0.0.1:0", history=3) as engine:
        engine.publish_many([b"%d rpm" % speed for speed in range(1000, 1010)])
        with penstock.subscriber(f"tcp://127.0.0.1:{engine.port}") as late:
            print("the last three:", [bytes(late.receive(timeout=10.0)).decode() for _ in range(3)])


def whole_past(directory: str) -> None:
    """Kept on disk on the way: a subscriber begins where it likes and goes on with what comes, each message once."""
    with penstock.publisher("tcp://127.0.0.1:0", durable=directory) as flight:
        flight.publish_many([b"%d m" % height for height in range(5)])
        with penstock.subscriber(f"tcp://127.0.0.1:{flight.port}", start="first") as reader:
            past = [bytes(reader.receive(timeout=10.0)).decode() for _ in range(5)]
            flight.publish(b"5 m")
            print("past:", past, "live:", bytes(reader.receive(timeout=10.0)).decode())
    with penstock.publisher("tcp://127.0.0.1:0", durable=directory) as flight:
        print("the next publisher goes on with", flight.publish(b"6 m"))


def main() -> None:
    state()
    last_messages()
    with tempfile.TemporaryDirectory() as directory:
        whole_past(directory)


if __name__ == "__main__":
    main()
