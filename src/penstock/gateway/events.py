"""Events of a gateway, delivered to callbacks on a thread of their own.

Callbacks run in order of registration, one event after the other, with (gateway, event, context, parameter); one that
raises is logged and the next ones still run. The thread starts with the first event that has a callback and ends after
DESTROYED. Waiting events are bounded: beyond ``MAX_WAITING`` events about failures are dropped and counted, but never
the four of a gateway's life cycle.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from penstock.gateway.worker import Deadline

MAX_WAITING = 1024
log = logging.getLogger("penstock.gateway")


class Event(enum.StrEnum):
    """What a callback can be told."""

    CREATED = "created"
    STARTED = "started"
    MODULE_LIST_CHANGED = "module_list_changed"
    DESTROYED = "destroyed"
    MODULE_FAILED = "module_failed"
    MODULE_RESTARTED = "module_restarted"
    MODULE_STUCK = "module_stuck"
    MODULE_ABANDONED = "module_abandoned"
    PUBLISH_REFUSED = "publish_refused"


_LIFE = frozenset({Event.CREATED, Event.STARTED, Event.MODULE_LIST_CHANGED, Event.DESTROYED})
Callback = Callable[[Any, Event, Any, Any], object]


class Events:
    """The callbacks of one gateway and the thread that calls them."""

    def __init__(self, gateway: object, name: str) -> None:
        self._gateway = gateway
        self._name = name
        self._condition = threading.Condition()
        self._callbacks: list[tuple[Event, Callback, Any]] = []
        self._waiting: deque[tuple[Event, Any]] = deque()
        self._thread: threading.Thread | None = None
        self._closed = self._calling = False
        self.dropped = 0

    def add(self, event: Event, callback: Callback, parameter: Any = None) -> None:
        """Call ``callback`` at each ``event`` from now on."""
        if not callable(callback):
            raise TypeError(f"an event's callback is a function, not {type(callback).__name__}")
        with self._condition:
            self._callbacks = [*self._callbacks, (Event(event), callback, parameter)]

    def wanted(self, event: Event) -> bool:
        """Whether it has a callback."""
        return any(wanted is event for wanted, _, _ in self._callbacks)

    def tell(self, event: Event, context: Any = None) -> None:
        """Queue an event, if it has a callback."""
        with self._condition:
            if self._closed or not self.wanted(event):
                return
            if len(self._waiting) >= MAX_WAITING and event not in _LIFE:
                self.dropped += 1
                return
            self._waiting.append((event, context))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"{self._name} events", daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def wait_told(self, deadline: Deadline) -> None:
        """Wait for the callbacks of all events so far. Called from a callback, it does not wait."""
        if threading.current_thread() is self._thread:
            return
        with self._condition:
            self._condition.wait_for(lambda: not self._waiting and not self._calling, deadline.left_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for the callbacks of all events so far; no events are delivered afterwards. Called from a callback, it
        does not wait."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
            if thread.is_alive():
                log.error("%s: a callback has not come back; its thread is left to itself", self._name)

    def _run(self) -> None:
        while True:
            with self._condition:
                self._calling = False
                self._condition.notify_all()
                while not self._waiting:
                    if self._closed:
                        return
                    self._condition.wait()
                self._calling = True
                event, context = self._waiting.popleft()
                callbacks = self._callbacks
            for wanted, callback, parameter in callbacks:
                if wanted is event:
                    self._call(callback, event, context, parameter)

    def _call(self, callback: Callback, event: Event, context: Any, parameter: Any) -> None:
        try:
            callback(self._gateway, event, context, parameter)
        except Exception:
            log.exception("%s: a callback for %s raised", self._name, event.value)
