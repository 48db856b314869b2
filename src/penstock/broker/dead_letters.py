"""Dead letters: messages that were delivered too often move to a queue of their own, and back by the command REDRIVE.
Loop thread only.

A move is one commit, of the copy in the new queue and the acknowledgement in the old one. If that commit fails, the
message waits in the old queue again.
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

PREFIX = "$dead."  # prefix of the topic of a queue's dead letters
REDRIVE_MESSAGES = 65_536  # most messages that one REDRIVE moves
STEP_MESSAGES, STEP_BYTES = 128, 4 << 20  # most that is moved in one step
RETRY_NS = 1_000_000_000  # pause after a failed commit
_BURIAL = ("$queue", "$reason", "$position")


def bury(broker: Broker, queue: Queue, position: int, deliveries: int, reason: str) -> None:
    """Move a message to the queue of dead letters."""
    message = _read(broker, position)
    if message is not None:
        broker.check_own_room()
        name = _target_name(queue)
        target = f"{PREFIX}{queue.name}"
        options = QueueOptions(topics=(target,), ack_timeout_s=queue.options.ack_timeout_s)
        dead = broker.queue(name, options, bounded=False)  # not bounded: each queue has at most one
        # another client may have created it meanwhile for topics that this one may not read
        if not dead.wants(target) and not broker.trusting:
            raise RefusedError(f"its dead letters go to queue {name}, which is bound to other topics")
        bind(broker, queue)
        properties = dict(message.properties)
        properties.setdefault("$topic", message.channel or words.DEFAULT_TOPIC)
        properties.update({"$queue": queue.name, "$reason": reason, "$position": str(position)})
        _stage_copy(broker, position, target, properties)
        queue.dead_lettered += 1
    else:
        queue.expire(1)  # retention has freed it while it waited
    _mark_done(broker, queue, position, deliveries)


def bind(broker: Broker, queue: Queue) -> None:
    """Bind the dead-letter queue, if it exists for other topics already, to the dead letters of ``queue`` too."""
    dead = broker.queues.get(_target_name(queue)) if queue.options.max_tries else None
    target = f"{PREFIX}{queue.name}"
    if dead is not None and not dead.wants(target):
        broker.rebind(dead, dead.with_options(topics=(*dead.options.topics, target)))


def redrive(broker: Broker, queue: Queue) -> Generator[str, None, int]:
    """Send dead letters of ``queue`` back to it, and to it alone; gives how many (bounded: there may be more).

    Other messages of the dead-letter queue (of its own topics, and of other queues) stay there. Each step moves some,
    with the commit of its turn.
    """
    count, at, end = 0, 1, broker.store.next
    alone = True
    while count < REDRIVE_MESSAGES:
        dead = broker.queues.get(_target_name(queue))
        if dead is None or broker.queues.get(queue.name) is not queue:  # one of the two was deleted meanwhile
            break
        alone = alone and dead.options.topics == (f"{PREFIX}{queue.name}",)
        broker.check_own_room()
        if at < dead.state.cursor and (waiting := dead.state.waiting_from(at, STEP_MESSAGES)):
            at = waiting[-1][0] + 1
            count += _redrive_waiting(broker, queue, dead, waiting, alone)
        else:
            dead.pass_freed()
            at = max(at, dead.state.cursor)
            if at >= end:  # messages that have become dead letters since this command began are left for the next one
                break
            moved, at = _redrive_new(broker, queue, dead, at, end, alone)
            count += moved
        yield BUSY
    return count


def _redrive_waiting(broker: Broker, queue: Queue, dead: Queue, waiting: list[tuple[int, int]], alone: bool) -> int:
    """Move messages that were delivered, or returned, before."""
    count = 0
    for position, deliveries in waiting:
        message = _read(broker, position)
        if message is None:
            dead.expire(1)  # retention has freed it while it waited
        elif alone or message.channel == f"{PREFIX}{queue.name}":
            _drive_back(broker, queue, position, message)
            count += 1
        else:
            continue
        _mark_done(broker, dead, position, deliveries)
    return count


def _redrive_new(broker: Broker, queue: Queue, dead: Queue, at: int, end: int, alone: bool) -> tuple[int, int]:
    """Move some that were never delivered; returns how many, and where to continue. Each is marked as done ahead of the
    cursor; if the queue holds nothing else, the cursor moves past them.
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


def _target_name(queue: Queue) -> str:
    return queue.options.dead_letter or f"{queue.name}.dead"


def _read(broker: Broker, position: int) -> Message | None:
    batch, *_ = broker.store.read(position, 1, 1 << 62)
    return batch[0] if len(batch) == 1 and batch.positions[0] == position else None


def _stage_copy(broker: Broker, position: int, topic: str, properties: dict[str, str]) -> None:
    batch, *_ = broker.store.read(position, 1, 1 << 62)
    broker.publish(batch, topic=topic, properties=encode_properties(properties), timestamps_ns=batch.timestamps_ns)


def _mark_done(broker: Broker, queue: Queue, position: int, deliveries: int) -> None:
    queue.state.acknowledge(0, position, position)
    broker.on_failure(lambda: queue.state.put_back(position, deliveries, _later_ns()))
    broker.touch(queue)


def _drive_back(broker: Broker, queue: Queue, position: int, message: Message) -> None:
    properties = {key: value for key, value in message.properties.items() if key not in _BURIAL}
    _stage_copy(broker, position, f"$queue.{queue.name}", properties)
