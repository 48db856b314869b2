"""Dead letters: messages delivered too often move to a queue of their own, and back when told to. Loop thread only.

A move is one commit: the copy in the other place and the acknowledgement in the old one. Where that commit fails, the
message waits again where it was.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING

from penstock.broker import words
from penstock.broker.queue import BUSY, Queue, QueueOptions
from penstock.errors import RefusedError
from penstock.journal.layout import encode_properties

if TYPE_CHECKING:
    from penstock._core import Message
    from penstock.broker.broker import Broker

PREFIX = "$dead."  # of the topic of a queue's dead letters
REDRIVE_MESSAGES = 65_536  # of one command
STEP_MESSAGES, STEP_BYTES = 128, 4 << 20  # moved in one step
RETRY_NS = 1_000_000_000  # after a commit that failed
_BURIAL = ("$queue", "$reason", "$position")


def bury(broker: Broker, queue: Queue, position: int, deliveries: int, reason: str) -> None:
    """Move a message to the queue of dead letters."""
    message = _read(broker, position)
    if message is not None:
        broker.check_own_room()
        name = _name(queue)
        target = f"{PREFIX}{queue.name}"
        options = QueueOptions(topics=(target,), ack_timeout_s=queue.options.ack_timeout_s)
        dead = broker.queue(name, options, bounded=False)  # one for each queue at most
        if not dead.wants(target) and not broker.trusting:  # made meanwhile, by whom nobody knows
            raise RefusedError(f"its dead letters go to queue {name}, which is there for other topics")
        bind(broker, queue)
        properties = dict(message.properties)
        properties.setdefault("$topic", message.channel or words.DEFAULT_TOPIC)
        properties.update({"$queue": queue.name, "$reason": reason, "$position": str(position)})
        _move(broker, position, target, properties)
        queue.dead_lettered += 1
    else:
        queue.expire(1)  # freed by retention while it waited
    _done(broker, queue, position, deliveries)


def bind(broker: Broker, queue: Queue) -> None:
    """The queue of dead letters, where it is there for other topics already, takes those of ``queue`` too."""
    dead = broker.queues.get(_name(queue)) if queue.options.max_deliveries else None
    target = f"{PREFIX}{queue.name}"
    if dead is not None and not dead.wants(target):
        broker.rebind(dead, dead.with_options(topics=(*dead.options.topics, target)))


def redrive(broker: Broker, queue: Queue) -> Generator[str, None, int]:
    """Send dead letters of ``queue`` back to it, and to it alone; gives how many (bounded: there may be more).

    What else the queue of dead letters holds, its own topics' and other queues' messages, stays there. A step moves
    some of them, in the commit of its turn.
    """
    count, at, end = 0, 1, broker.store.next
    alone = True
    while count < REDRIVE_MESSAGES:
        dead = broker.queues.get(_name(queue))
        if dead is None or broker.queues.get(queue.name) is not queue:  # deleted meanwhile
            break
        alone = alone and dead.options.topics == (f"{PREFIX}{queue.name}",)
        broker.check_own_room()
        if at < dead.state.cursor and (waiting := dead.state.waiting_from(at, STEP_MESSAGES)):
            at = waiting[-1][0] + 1
            count += _redrive_waiting(broker, queue, dead, waiting, alone)
        else:
            dead.pass_freed()
            at = max(at, dead.state.cursor)
            if at >= end:  # what became a dead letter since the command began is the next command's
                break
            moved, at = _redrive_new(broker, queue, dead, at, end, alone)
            count += moved
        yield BUSY
    return count


def _redrive_waiting(broker: Broker, queue: Queue, dead: Queue, waiting: list[tuple[int, int]], alone: bool) -> int:
    """Move those that were handed out, or put back, before."""
    count = 0
    for position, deliveries in waiting:
        message = _read(broker, position)
        if message is None:
            dead.expire(1)  # freed by retention while it waited
        elif alone or message.channel == f"{PREFIX}{queue.name}":
            _drive_back(broker, queue, position, message)
            count += 1
        else:
            continue
        _done(broker, dead, position, deliveries)
    return count


def _redrive_new(broker: Broker, queue: Queue, dead: Queue, at: int, end: int, alone: bool) -> tuple[int, int]:
    """Move some that nobody was handed yet; how many, and where to go on.

    Each of them is done before the cursor comes; where the queue holds nothing else the cursor goes with them.
    """
    patterns = dead.patterns if alone else (f"{PREFIX}{queue.name}",)
    batch, following, _ = broker.store.read(at, STEP_MESSAGES, STEP_BYTES, patterns)
    following = min(following, end)
    count = 0
    for position, message in zip(batch.positions, batch, strict=True):
        if position < end and dead.state.open(position):
            _drive_back(broker, queue, position, message)
            dead.state.finish_ahead(position)
            broker.on_failure(lambda position=position: dead.state.reopen(position))  # type: ignore[misc]
            count += 1
    if alone:
        dead.state.look_from(following)
        dead.whole = True
    dead.recount()
    broker.touch(dead)
    return count, following


def _later_ns() -> int:
    return time.time_ns() + RETRY_NS


def _name(queue: Queue) -> str:
    return queue.options.dead_letter or f"{queue.name}.dead"


def _read(broker: Broker, position: int) -> Message | None:
    batch, *_ = broker.store.read(position, 1, 1 << 62)
    return batch[0] if len(batch) == 1 and batch.positions[0] == position else None


def _move(broker: Broker, position: int, topic: str, properties: dict[str, str]) -> None:
    batch, *_ = broker.store.read(position, 1, 1 << 62)
    broker.publish(batch, topic=topic, properties=encode_properties(properties), timestamps_ns=batch.timestamps_ns)


def _done(broker: Broker, queue: Queue, position: int, deliveries: int) -> None:
    queue.state.acknowledge(0, position, position)
    broker.on_failure(lambda: queue.state.put_back(position, deliveries, _later_ns()))
    broker.touch(queue)


def _drive_back(broker: Broker, queue: Queue, position: int, message: Message) -> None:
    properties = {key: value for key, value in message.properties.items() if key not in _BURIAL}
    _move(broker, position, f"$queue.{queue.name}", properties)
