"""Many subscribers of one channel, or many channels with one subscriber each: the same for every reach and for pyzmq.

All handles are in one process and one thread, which publishes some messages and then reads them with every subscriber.
So a figure is the whole cost of a delivered message, not limited by how many processes the machine can run at once.
"""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack

from harness import Candidate, Curve, compare

import penstock

NUMBERS = (1, 10, 100, 1000)
DATA = bytes(64)
TOGETHER = 50  # messages that wait for a subscriber before it reads: less than any queue here holds
COUNT = 100_000

#: ``make(channels, subscribers)`` gives a function that publishes a message on one channel, and those that read one.
Crowd = tuple[Callable[[int], object], list[Callable[[], object]]]


def penstock_crowd(stack: ExitStack, places: list[str], subscribers: int, **options: object) -> Crowd:
    """On each of the places one publisher; the subscribers are spread over them."""
    publishers = [stack.enter_context(penstock.publisher(place, **options)) for place in places]
    places = [getattr(publisher, "address", place) for publisher, place in zip(publishers, places, strict=True)]
    readers = []
    for number in range(subscribers):
        at = number % len(places)
        reader = stack.enter_context(penstock.subscriber(places[at]))
        readers.append(lambda reader=reader: reader.receive(timeout=30.0))
    for publisher in publishers:
        assert publisher.wait_ready(subscribers // len(places), timeout=60.0)
    return lambda at: publishers[at].publish(DATA), readers


def zmq_crowd(stack: ExitStack, transport: str, channels: int, subscribers: int) -> Crowd:
    """A socket that publishes, channels as topics; a socket for each subscriber."""
    import zmq

    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, subscribers + 10)
    stack.callback(context.term)
    sender = stack.enter_context(context.socket(zmq.XPUB))
    sender.setsockopt(zmq.XPUB_NODROP, 1)
    sender.setsockopt(zmq.XPUB_VERBOSE, 1)
    sender.setsockopt(zmq.RCVTIMEO, 60_000)
    if transport == "ipc":
        place = f"ipc://{stack.enter_context(tempfile.TemporaryDirectory())}/socket"
        sender.bind(place)
    else:
        place = f"tcp://127.0.0.1:{sender.bind_to_random_port('tcp://127.0.0.1')}"
    readers = []
    for number in range(subscribers):
        reader = stack.enter_context(context.socket(zmq.SUB))
        reader.setsockopt(zmq.SUBSCRIBE, b"%04d" % (number % channels))
        reader.connect(place)
        readers.append(reader.recv)
        sender.recv()
    messages = [b"%04d" % channel + DATA for channel in range(channels)]
    return lambda at: sender.send(messages[at]), readers


def candidate(name: str, make: Callable[[ExitStack], Crowd], channels: int, subscribers: int) -> list[Candidate]:
    """What does not start here is named and left out."""
    stack = ExitStack()
    try:
        send, readers = make(stack)
    except Exception as error:
        stack.close()
        print(f"{name}: did not start: {type(error).__name__}: {error}")
        return []

    def run(count: int) -> float:
        began = time.perf_counter()
        for _ in range(max(1, count // TOGETHER)):
            for channel in range(channels):
                for _ in range(TOGETHER):
                    send(channel)
            for read in readers:
                for _ in range(TOGETHER):
                    read()
        return time.perf_counter() - began

    count = max(TOGETHER, COUNT // subscribers // TOGETHER * TOGETHER)
    return [Candidate(name, run, count, quantity=subscribers, close=stack.close)]


def curves(
    reach: str, places: Callable[[int], list[str]], transport: str, arguments: Namespace, **options: object
) -> None:
    """``places(n)``: the addresses of n new channels. ``options`` of publishers may be functions of the subscribers."""
    for what, counts in (("subscribers", lambda n: (1, n)), ("channels", lambda n: (n, n))):
        for number in NUMBERS:
            channels, subscribers = counts(number)
            question = f"{reach}: {number} {what}"
            if arguments.only and not any(part in question for part in arguments.only):
                continue
            each = subscribers // channels
            given = {name: value(each) if callable(value) else value for name, value in options.items()}
            candidates = candidate(
                "penstock",
                lambda stack, c=channels, s=subscribers, o=given: penstock_crowd(stack, places(c), s, **o),
                channels,
                subscribers,
            )
            candidates += candidate(
                f"pyzmq {transport}",
                lambda stack, c=channels, s=subscribers: zmq_crowd(stack, transport, c, s),
                channels,
                subscribers,
            )
            curve = Curve(f"{reach}: messages delivered a second, by number of {what}", what, number)
            compare(question, candidates, f"pyzmq {transport}", arguments, curve=curve)
