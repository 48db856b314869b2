"""Hierarchical state machines driven by messages.

States nest up to 8 deep. A message goes to the current state; its handler consumes it (returns None), passes it to the
parent (``PASS``) or transitions (returns a ``State``). A transition runs the exits from the current state up to the
common ancestor, then the entries down to the target; to the current state itself it runs nothing. A parent may
transition for its child.

A machine is called with a message, so it can be a subscriber's handler. One message at a time: what reaches it while it
handles another (from inside an action, or from another thread) is handled afterwards, in order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from penstock.channel import called
from penstock.errors import CapacityError, InvalidArgument, StateError

MAX_LEVELS = 8
MAX_WAITING = 65536


class _Pass:
    def __repr__(self) -> str:
        return "PASS"


PASS: Final = _Pass()

Action = Callable[[], Any]
Handler = Callable[[Any], "State | _Pass | None"]


class State:
    """One state. Give its actions as arguments, by decorator, or by overriding the methods in a subclass."""

    def __init__(
        self,
        name: str,
        parent: State | None = None,
        *,
        on_enter: Action | None = None,
        on_exit: Action | None = None,
        on_message: Handler | None = None,
    ) -> None:
        self.name = name
        self.parent = parent
        self.level: int = 1 if parent is None else parent.level + 1
        if self.level > MAX_LEVELS:
            raise InvalidArgument(f"state {name!r} would be {self.level} levels deep; states nest up to {MAX_LEVELS}")
        self._on_enter = on_enter
        self._on_exit = on_exit
        self._on_message = on_message
        self._by_id: dict[int, Handler] = {}

    def on(self, *ids: int) -> Callable[[Handler], Handler]:
        """Decorator: the function handles messages of these ids in this state."""

        def decorate(function: Handler) -> Handler:
            for identifier in ids:
                self._by_id[identifier] = function
            return function

        return decorate

    @called
    def on_enter(self, function: Action) -> Action:
        """Decorator: what to do on entering."""
        self._on_enter = function
        return function

    @called
    def on_exit(self, function: Action) -> Action:
        """Decorator: what to do on leaving."""
        self._on_exit = function
        return function

    def enter(self) -> None:
        """Called on entering."""
        if self._on_enter is not None:
            self._on_enter()

    def exit(self) -> None:
        """Called on leaving."""
        if self._on_exit is not None:
            self._on_exit()

    def handle(self, message: Any) -> State | _Pass | None:
        """None: consumed; ``PASS``: for the parent; a state: go there. Without a handler: ``PASS``."""
        handler = self._by_id.get(getattr(message, "id", None), self._on_message)  # type: ignore[arg-type]
        return PASS if handler is None else handler(message)

    @property
    def ancestors(self) -> list[State]:
        """From the top down to this state itself."""
        line = [] if self.parent is None else self.parent.ancestors
        return [*line, self]

    def __repr__(self) -> str:
        return f"<State {'/'.join(state.name for state in self.ancestors)}>"


class StateMachine:
    """The machine. ``start`` enters the initial state from its top down; call it with messages."""

    def __init__(self, initial: State) -> None:
        self.initial = initial
        self.unhandled = 0
        self._current: State | None = None
        self._moving = False
        self._waiting: deque[Any] = deque()
        self._lock = threading.Lock()
        self._busy = False

    @property
    def current(self) -> State:
        """The state it is in."""
        if self._current is None:
            raise StateError("the state machine was not started; call start()")
        return self._current

    def start(self) -> StateMachine:
        """Enter the initial state; gives the machine itself."""
        if self._current is not None:
            raise StateError("the state machine was started before")
        self._enter(self.initial.ancestors)
        return self

    def is_in(self, state: State) -> bool:
        """Whether the current state is ``state`` or inside it."""
        return state in self.current.ancestors

    def __call__(self, message: Any) -> None:
        """Handle one message, or leave it to whoever handles one now."""
        self.current  # noqa: B018 - not started is told here
        with self._lock:
            if len(self._waiting) >= MAX_WAITING:
                raise CapacityError(f"{MAX_WAITING} messages wait for this state machine; its actions do not return")
            self._waiting.append(message)
            if self._busy:
                return
            self._busy = True
        while True:
            with self._lock:
                if not self._waiting:
                    self._busy = False
                    return
                message = self._waiting.popleft()
            try:
                self._handle(message)
            except BaseException:
                with self._lock:  # the rest is for the next call; this one tells the error
                    self._busy = False
                raise

    def transition(self, target: State) -> None:
        """Go to ``target`` now, from outside any handler."""
        if self._busy:
            raise StateError("a handler goes to another state by returning it")
        self._move_to(target)

    def _handle(self, message: Any) -> None:
        state: State | None = self.current
        while state is not None:
            answer = state.handle(message)
            if answer is None:
                return
            if isinstance(answer, State):
                self._move_to(answer)
                return
            if answer is not PASS:
                raise TypeError(f"a handler of {state!r} returned {answer!r}: None, PASS or a State is wanted")
            state = state.parent
        self.unhandled += 1

    def _move_to(self, target: State) -> None:
        if self._moving:
            raise StateError("an enter or exit action cannot itself go to another state")
        if target is self.current:
            return
        line = target.ancestors
        self._moving = True
        try:
            while self._current is not None and self._current not in line:
                self._current.exit()
                self._current = self._current.parent
        finally:
            self._moving = False
        self._enter(line if self._current is None else line[self._current.level :])

    def _enter(self, states: list[State]) -> None:
        self._moving = True
        try:
            for state in states:
                self._current = state  # first: where entering raises, this is where the machine is
                state.enter()
        finally:
            self._moving = False
