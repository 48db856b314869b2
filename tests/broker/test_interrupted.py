"""An exception of a signal's function, such as KeyboardInterrupt, at every point of a client's code where Python runs
such functions: nothing is stored twice, lost or garbled, and the client works afterwards."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import penstock
from penstock.broker import Server

CLIENT = str(Path(penstock.broker.__file__).parent / "client")
# Python runs the functions of signals after these instructions, and nowhere else; a call of a Python function is
# followed by the RESUME of that function instead.
POINTS = {"RESUME", "JUMP_BACKWARD", "CALL", "CALL_KW", "CALL_FUNCTION_EX"}


class Interrupted(BaseException):
    """What the signal's function raises."""


class At:
    """Raises Interrupted at the point of that number, if there are as many."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.before: dict[FrameType, str] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_back is not None:
            self.before[frame.f_back] = ""
        if not frame.f_code.co_filename.startswith(CLIENT):
            return None
        frame.f_trace_opcodes = True
        return self.look

    def look(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            if self.before.get(frame) in POINTS:
                self.left -= 1
                if self.left < 0:
                    self.before[frame] = ""
                    raise Interrupted
            self.before[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        return self.look


def each_point(call: Callable[[int], object]) -> Iterator[bool]:
    """Calls it again and again, interrupted one point later each time, until it is not; gives whether it was."""
    number = 0
    while True:
        before = sys.gettrace()
        try:
            sys.settrace(At(number))
            try:
                call(number)
            finally:
                sys.settrace(before)
        except Interrupted:
            yield True
        else:
            yield False
            return
        number += 1


@pytest.mark.parametrize("unconfirmed", [0, 100])
def test_what_an_interrupted_publisher_sent_is_stored_once(server: Server, unconfirmed: int) -> None:
    where = f"broker://127.0.0.1:{server.port}/t"
    after = 0
    with penstock.publisher(where, queue="q", unconfirmed=unconfirmed) as publisher:
        for _ in each_point(lambda number: publisher.publish(b"interrupted %d" % number)):
            after += 1
            publisher.publish(b"after %d" % after)
    found = []
    with penstock.subscriber(where, queue="q") as subscriber:
        while (message := subscriber.read(0 if found and found[-1] == b"after %d" % after else 30)) is not None:
            found.append(bytes(message))
    assert after > 20
    assert [one for one in found if one.startswith(b"after")] == [b"after %d" % one for one in range(1, after + 1)]
    others = [one for one in found if not one.startswith(b"after")]
    assert len(others) == len(set(others))
    assert set(others) <= {b"interrupted %d" % one for one in range(after)}
    assert b"interrupted %d" % (after - 1) in others  # the last one was not interrupted


def test_an_interrupted_subscriber_reads_on(server: Server) -> None:
    where = f"broker://127.0.0.1:{server.port}/t"
    count = 400
    with penstock.publisher(where, queue="q") as publisher:
        publisher.publish_many(b"%d" % one for one in range(count))
    found: list[int] = []
    interrupted = 0
    with penstock.subscriber(where, queue="q", ack="manual", credit=7) as subscriber:

        def read(_: int) -> None:
            message = subscriber.read(30)
            assert message is not None
            found.append(int(bytes(message)))
            subscriber.ack(message)

        for was in each_point(read):
            interrupted += was
            read(0)
    with penstock.subscriber(where, queue="q", ack="manual") as subscriber:  # what was read and not acknowledged
        while set(found) != set(range(count)):
            message = subscriber.read(30)
            assert message is not None, "it was acknowledged by nobody, so it comes again"
            found.append(int(bytes(message)))
            subscriber.ack(message)
    assert interrupted > 20
