"""Marks: whether what a source has published so far has been handled.

A queue is first in, first out, and its worker counts what it has taken; so a message is handled when its sink has come
as far as the queue reached when the message had been put in. That costs the message nothing. A mark remembers these
places, waits for the sinks that are linked at least once, and then for theirs: what a module publishes inside
``receive`` is in its sinks' queues when it is handled. All links of one step are waited for before the next step, so
that a message is found by whichever way it comes; after as many steps as there are modules every way is a circle. A
way ends at a module that is durable itself (a buffer): what it has taken, it keeps.

A message that is tried again holds the marks whose message it may be: on the source's own links that is told by its
number there, further on by the time when it was put aside. Other marks go on (``held``).

A mark may wait for more than its own messages (those of others in front of them), never for less. It is ``lost`` when a
module that it passes has lost messages, or a link on its way was taken away, after its messages were taken at the
source, however late the mark comes there: its source does not acknowledge, and what it holds comes again. So it is
when nobody is linked to its source: nobody has handled what went nowhere. For that,
losses are numbered in the order in which they happen (``losses.py``), and a source asks for the number before it
publishes.
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
        self.held = False  # by a message that is tried again, as far as the last look could tell
        self.stalled = False  # held, or behind such a message in a sink's queue
        self.published: dict[int, int] = {}  # by the source's outputs, each by its id
        self._since = since
        self._after = after.published if after is not None else {}
        self._waits: list[_Wait] = []  # of this step
        self._passed: dict[Worker, None] = {}  # sinks of this step that have come so far
        self._known: set[Worker] = set()
        self._steps = 0
        self._follow(worker)
        self.lost = self.lost or not any(output.sinks for output in (worker.output, *worker.outputs.values()))

    def handled(self) -> bool:
        """Whether all of it was handled. Looks once; ask again."""
        while self._waits:
            wait = self._waits[-1]
            over = wait.over()
            self.held, self.stalled = wait.held, wait.stalled
            if self.lost or wait.lost:  # asked last: what is over may have been lost on its last step
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
                if not sink.is_durable:  # else it keeps what it got until that was handled
                    self._follow(sink)

    def _follow(self, worker: Worker) -> None:
        for output in (worker.output, *worker.outputs.values()):
            if self._steps == 0:
                self.published[output.port.id] = output.port.published
            sinks = list(output.sinks.items())
            if output.parted > self._since:  # looked at after the sinks: one of them may be gone
                self.lost = True
            for sink, joint in sinks:
                if joint.options.delivery is Delivery.AT_LEAST_ONCE:
                    self._known.add(sink)
                    self._waits.append(_Wait(output, sink, self._since, self._after if self._steps == 0 else {}))


class _Wait:
    """For one sink to come as far as its queue reaches now."""

    def __init__(self, output: Output, sink: Worker, since: int, after: dict[int, int]) -> None:
        self.sink = sink
        self.held = self.stalled = False
        self._source = output.port.id
        self._first, self._last = after.get(output.port.id, 0) + 1, output.port.published
        self._since = since
        _, delivered, _, queued, _ = sink.queue._counts()
        self._place = delivered + queued
        self._refused = sink.queue.closed  # looked at last: what was published may have met a closed queue
        self._state: tuple[object, int] | None = None
        self._passed_on: Callable[[], bool] | None = None

    @property
    def lost(self) -> bool:
        """Whether something was lost there since the messages were taken."""
        sink = self.sink
        return self._refused or sink.last_loss > self._since or (sink.queue.closed and sink.taken < self._place)

    def over(self) -> bool:
        """Whether it has come so far, in a process of its own included."""
        sink, self.held, self.stalled = self.sink, False, False
        if sink.taken < self._place and sink.waiting:
            self.stalled = sink.retrying
            return False
        mark = getattr(sink.module, "mark_sent", None)
        if mark is not None:
            # Made anew, what was left went to the next one; and what failed in it was sent once more.
            state = sink.module, sink.resent
            if self._state != state:
                self._state, self._passed_on = state, mark()
            if self._passed_on is None or not self._passed_on():
                return False
        # In this order: a message goes from the first to the second, and is counted as resent before it leaves that.
        self.held = any(self._may_be(message) for message, _, _ in list(sink.given_back)) or any(
            one.number > self._since and self._may_be(one.message) for one in list(sink.aside)
        )
        self.stalled = self.held
        if self.held:
            return False
        return mark is None or self._state == (sink.module, sink.resent)

    def _may_be(self, message: GatewayMessage) -> bool:
        """Whether it is one of those that are waited for."""
        return message.id == self._source and self._first <= (message.ordinal or 0) <= self._last
