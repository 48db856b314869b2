"""Marks: whether what a source has published so far has been handled.

A queue is first in, first out, and its worker counts what it has taken; so a message is handled when its sink has come
as far as the queue reached when the message had been put in. That costs the message nothing. A mark remembers these
places, waits for the sinks that are linked at least once, and then for theirs: what a module publishes inside
``receive`` is in its sinks' queues when it is handled. All links of one step are waited for before the next step, so
that a message is found by whichever way it comes; after as many steps as there are modules every way is a circle.

A mark may wait for more than its own messages (those of others in front of them), never for less. It is ``lost`` when a
module that it passes has lost messages, or a link on its way was taken away, after its messages were taken at the
source, however late the mark comes there: its source does not acknowledge, and what it holds comes again. For that,
losses are numbered in the order in which they happen (``losses.py``), and a source asks for the number before it
publishes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.gateway.links import Delivery

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.gateway.worker import Output, Worker


class Mark:
    """Everything that one module had published when this was made, after the loss number ``since``. One thread."""

    def __init__(self, worker: Worker, since: int) -> None:
        self.lost = False
        self._since = since
        self._waits: list[_Wait] = []  # of this step
        self._passed: dict[Worker, None] = {}  # sinks of this step that have come so far
        self._known: set[Worker] = set()
        self._steps = 0
        self._follow(worker)

    def handled(self) -> bool:
        """Whether all of it was handled. Looks once; ask again."""
        while self._waits:
            wait = self._waits[-1]
            over = wait.over()
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
                self._follow(sink)

    def _follow(self, worker: Worker) -> None:
        for output in (worker.output, *worker.outputs.values()):
            sinks = list(output.sinks.items())
            if output.parted > self._since:  # looked at after the sinks: one of them may be gone
                self.lost = True
            for sink, joint in sinks:
                if joint.options.delivery is Delivery.AT_LEAST_ONCE:
                    self._known.add(sink)
                    self._waits.append(_Wait(output, sink, self._since))


class _Wait:
    """For one sink to come as far as its queue reaches now."""

    def __init__(self, output: Output, sink: Worker, since: int) -> None:
        self.sink = sink
        self._source = output.port.id
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
        sink = self.sink
        if sink.taken < self._place and sink.waiting:
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
        if any(message.id == self._source for message, _, _ in list(sink.given_back)):
            return False
        if any(one.position < self._place and one.message.id == self._source for one in list(sink.aside)):
            return False
        return mark is None or self._state == (sink.module, sink.resent)
