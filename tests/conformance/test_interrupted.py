"""An exception of a signal's function, such as KeyboardInterrupt, at every point of the library's Python code where
Python runs such functions: the handle works afterwards, and nothing is stored or delivered twice."""

from __future__ import annotations

from ..interrupting import each_point
from .reaches import Reach

LONG = 30.0


def test_an_interrupted_publish_comes_once_or_not_at_all_and_the_next_one_comes(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    found: list[bytes] = []
    after = 0
    for _ in each_point(lambda number: publisher.publish(b"interrupted %d" % number)):
        after += 1
        publisher.publish(b"after %d" % after)
        while not found or found[-1] != b"after %d" % after:
            message = subscriber.read(LONG)
            assert message is not None, (after, found[-3:])
            found.append(bytes(message))
            message.release()
    assert [one for one in found if one.startswith(b"after")] == [b"after %d" % one for one in range(1, after + 1)]
    others = [one for one in found if not one.startswith(b"after")]
    assert others == sorted(set(others), key=lambda one: int(one.split()[1]))
    assert others[-1] == b"interrupted %d" % (after - 1), "the last one was not interrupted"


def test_an_interrupted_subscriber_reads_on(reach: Reach) -> None:
    publisher, subscriber = reach.pair()
    number = 0
    publisher.publish(b"0")

    def read(_: int) -> int:
        message = subscriber.read(LONG)
        assert message is not None
        found = int(bytes(message))
        message.release()
        return found

    for _ in each_point(read):
        number += 1
        publisher.publish(b"%d" % number)
        while read(0) != number:
            pass
        publisher.publish(b"%d" % number)  # for the next one
    assert number
