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

    A step moves some of them, in the commit of its turn.
    """
    count, end = 0, broker.store.next
    while count < REDRIVE_MESSAGES:
        dead = broker.queues.get(_name(queue))
        if dead is None or broker.queues.get(queue.name) is not queue:  # deleted meanwhile
            break
        moved = _redrive_some(broker, queue, dead, end)
        if moved is None:
            break
        count += moved
        yield BUSY
    return count


def _redrive_some(broker: Broker, queue: Queue, dead: Queue, end: int) -> int | None:
    """Move a few; None when there are none before ``end``."""
    broker.check_own_room()
    count = 0
    due = dead.state.due(1 << 62, STEP_MESSAGES)
    for position, deliveries in due:
        driven = _drive_back(broker, queue, position)
        count += driven
        dead.expire(1 - driven)  # freed by retention while it waited
        _done(broker, dead, position, deliveries)
    dead.pass_freed()
    if not due and dead.state.cursor >= end:
        return None
    if not due:
        batch, following, _ = broker.store.read(dead.state.cursor, STEP_MESSAGES, STEP_BYTES, dead.patterns)
        # What became a dead letter since the command began is the next command's.
        positions = [position for position in batch.positions if position < end and dead.state.open(position)]
        dead.state.look_from(min(following, end))
        for position in positions:
            count += _drive_back(broker, queue, position)
            broker.on_failure(lambda position=position: dead.state.put_back(position, 0, _later_ns()))  # type: ignore[misc]
    dead.recount()
    dead.whole = True
    broker.touch(dead)
    return count


def _later_ns() -> int:
    return time.time_ns() + RETRY_NS


def _name(queue: Queue) -> str:
    return queue.options.dead_letter or f"{queue.name}.dead"


def _read(broker: Broker, position: int) -> Message | None:
    batch, *_ = broker.store.read(position, 1, 1 << 62)
    return batch[0] if len(batch) == 1 and batch.positions[0] == position else None


def _move(broker: Broker, position: int, topic: str, properties: dict[str, str]) -> None:
    batch, *_ = broker.store.read(position, 1, 1 << 62)
    broker.publish(batch, topic=topic, properties=encode_properties(properties))


def _done(broker: Broker, queue: Queue, position: int, deliveries: int) -> None:
    queue.state.acknowledge(0, position, position)
    broker.on_failure(lambda: queue.state.put_back(position, deliveries, _later_ns()))
    broker.touch(queue)


def _drive_back(broker: Broker, queue: Queue, position: int) -> int:
    message = _read(broker, position)
    if message is None:
        return 0
    properties = {key: value for key, value in message.properties.items() if key not in _BURIAL}
    _move(broker, position, f"$queue.{queue.name}", properties)
    return 1
