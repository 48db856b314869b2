"""Marks: whether what a source has published so far has been handled.

A queue is first in, first out, and its worker counts what it has taken; so a message is handled when the sink's count
has reached the length that the queue had when the message was put in. This costs the message nothing. A mark remembers
these counts, waits for the sinks of at_least_once links, and then for their sinks: what a module publishes inside
``receive`` is in its sinks' queues before the received message counts as handled. All links of one step are waited for
before the next step, so that a message is found on any path; after as many steps as there are modules, every path is a
circle. A path ends at a module that is durable itself (a buffer), because it keeps what it has taken.

A message that is tried again holds up the marks that it may belong to (``held``): on the source's own links its number
there decides that, further on the time when it was put aside. Other marks are not held up.

A mark may wait for more than its own messages (those of others in front of them), never for fewer. It is ``lost`` if a
module on its path has lost messages, or a link on its path was removed, after its messages were taken from the source,
however late the mark gets there: the source does not acknowledge then, and redelivers. It is also lost if nothing is
linked to its source, since nobody has handled its messages. For this, losses are numbered in the order in which they
happen (``losses.py``), and a source reads the number before it publishes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.gateway.links import Delivery

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._core.gateway import GatewayMessage
    from penstock.gateway.worker import Output, Worker


class Mark:
    """Everything that one module had published when this was made, after the loss number ``since`` and the mark
    ``after``. One thread."""

    def __init__(self, worker: Worker, since: int, after: Mark | None = None) -> None:
        self.lost = False
        self.held = False  # held up by a message that is tried again, as far as the last check could tell
        self.stalled = False  # held, or behind such a message in a sink's queue
        self.published: dict[int, int] = {}  # by the id of each output: how many messages it had published
        self._since = since
        self._after = after.published if after is not None else {}
        self._waits: list[_Wait] = []  # the sinks that this step waits for
        self._passed: dict[Worker, None] = {}  # sinks of this step that are done
        self._known: set[Worker] = set()
        self._steps = 0
        self._follow(worker)
        self.lost = self.lost or not any(output.sinks for output in (worker.output, *worker.outputs.values()))

    def handled(self) -> bool:
        """Whether everything was handled. Checks once; call it again."""
        while self._waits:
            wait = self._waits[-1]
            over = wait.over()
            self.held, self.stalled = wait.held, wait.stalled
            if self.lost or wait.lost:  # checked last: the messages may have been lost just before the wait was over
                self.lost = True
                return False
            if not over:
                return False
            self._waits.pop()
            self._passed[wait.sink] = None
            if not self._waits:
                self._next_step()
        return not self.lost

    def _next_step(self) -> None:
        passed, self._passed = self._passed, {}
        self._steps += 1
        if self._steps <= len(self._known):
            for sink in passed:
                if not sink.is_durable:  # a durable one keeps what it got until it was handled
                    self._follow(sink)

    def _follow(self, worker: Worker) -> None:
        for output in (worker.output, *worker.outputs.values()):
            if self._steps == 0:
                self.published[output.port.id] = output.port.published
            sinks = list(output.sinks.items())
            if output.parted > self._since:  # checked after the sinks: one of them may have been removed
                self.lost = True
            for sink, joint in sinks:
                if joint.options.delivery is Delivery.AT_LEAST_ONCE:
                    self._known.add(sink)
                    self._waits.append(_Wait(output, sink, self._since, self._after if self._steps == 0 else {}))


class _Wait:
    """Waits until one sink has handled what is in its queue now."""

    def __init__(self, output: Output, sink: Worker, since: int, after: dict[int, int]) -> None:
        self.sink = sink
        self.held = self.stalled = False
        self._source = output.port.id
        self._first, self._last = after.get(output.port.id, 0) + 1, output.port.published
        self._since = since
        _, delivered, _, queued, _ = sink.queue._counts()
        self._place = delivered + queued
        self._refused = sink.queue.closed  # checked last: a message may have been published to a closed queue
        self._state: tuple[object, int] | None = None
        self._passed_on: Callable[[], bool] | None = None

    @property
    def lost(self) -> bool:
        """Whether the sink has lost something since the messages were taken from the source."""
        sink = self.sink
        return self._refused or sink.last_loss > self._since or (sink.queue.closed and sink.taken < self._place)

    def over(self) -> bool:
        """Whether the sink has handled them, also in its own process."""
        sink, self.held, self.stalled = self.sink, False, False
        if sink.taken < self._place and sink.waiting:
            self.stalled = sink.retrying
            return False
        mark = getattr(sink.module, "mark_sent", None)
        if mark is not None:
            # After a restart the unhandled messages went to the next process; failed ones were sent again.
            state = sink.module, sink.resent
            if self._state != state:
                self._state, self._passed_on = state, mark(self._place)
            if self._passed_on is None or not self._passed_on() or sink.owed:
                return False
        # In this order: a message moves from the first to the second, and is counted as resent before it leaves the
        # second.
        self.held = any(self._may_be(message) for message, _, _ in list(sink.given_back)) or any(
            one.number > self._since and self._may_be(one.message) for one in list(sink.aside)
        )
        self.stalled = self.held
        if self.held:
            return False
        return mark is None or self._state == (sink.module, sink.resent)

    def _may_be(self, message: GatewayMessage) -> bool:
        """Whether the message may be one of those that this waits for."""
        return message.id == self._source and self._first <= (message.ordinal or 0) <= self._last
