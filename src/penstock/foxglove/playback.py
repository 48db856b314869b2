"""Playback: plays a recording to viewers, at any speed and from any moment.

One thread sends. Controls (the viewer's buttons, parameters) set the wanted state under one lock and wake that thread.
The playback's clock stands still while there is no viewer, and never runs ahead of the messages sent. A seek sends the
last message of each topic before that moment, then continues from there. Where the recording cannot be read it pauses
and says why; a seek may go beyond that place.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from penstock.errors import InvalidArgument, PenstockError, describe
from penstock.foxglove.board import Board
from penstock.foxglove.presentation import is_image
from penstock.recording.span import Span, last_until, located, reader, time_range, topic_names
from penstock.recording.story import parts
from penstock.recording.tables import Described

if TYPE_CHECKING:
    from penstock._core import Message
    from penstock.journal import Journal

__all__ = ["Playback", "State"]

MIN_SPEED, MAX_SPEED = 0.01, 100.0
TELL_S = 0.1  # how often the playback's time is sent to viewers
LATE_S = 0.5  # if sending lags by more than this, the clock waits
logger = logging.getLogger("penstock.foxglove")


@dataclass(frozen=True, slots=True)
class State:
    """What viewers are told of a playback: ``playing``, ``paused`` or ``ended``, the moment, the speed."""

    status: Literal["playing", "paused", "ended"]
    now_ns: int
    speed: float
    did_seek: bool = False


class Playback:
    """``tell`` is called with the state when the playback itself has changed it, and regularly while it plays; ``warn``
    with the reason when the recording cannot be read."""

    def __init__(
        self,
        board: Board,
        directory: Path,
        tell: Callable[[State], None],
        warn: Callable[[str], None],
        *,
        paused: bool = False,
        loop: bool = False,
    ) -> None:
        self.board = board
        self._tell, self._warn = tell, warn
        self._loop = loop
        self._stack = contextlib.ExitStack()
        self._journals = [self._stack.enter_context(reader(folder)) for folder in parts(directory)]
        self.range_ns = time_range(self._journals)
        self._topics = sorted({name for journal in self._journals for name in topic_names(journal, None)})
        if not self._topics:
            self._stack.close()
            raise InvalidArgument(f"{directory} has no messages to show")
        self._described = Described(self._journals)
        for name in self._topics:
            line = self._described.line(name)
            sample = next(located(self._journals, [name], Span(None, None)), None) if is_image(line) else None
            board.show(name, name, line, None if sample is None else bytes(sample[1]))
        self._thread = threading.Thread(target=self._run, name="foxglove playback", daemon=True)
        self._changed = threading.Condition()  # guards all below
        self._paused = paused
        self._watched = self._subscribed = self._ended = self._stopped = False
        self._speed = 1.0
        self._seek_ns: int | None = self.range_ns[0]
        self._anchor = (time.monotonic(), self.range_ns[0])  # a monotonic time, and the recording's time at that moment
        self._told_at = 0.0
        # used by the thread only: by topic, the last message that was not sent
        self._passed: dict[str, tuple[Journal, Message]] = {}

    def start(self) -> None:
        """Start the thread; ``tell`` may be called from now on."""
        self._thread.start()

    def close(self) -> None:
        """End it; waits for the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
        self._stack.close()

    # --- controls, from any thread

    def control(self, *, paused: bool | None = None, speed: float | None = None, seek_ns: int | None = None) -> State:
        """Change what is given; returns the new state."""
        with self._changed:
            self._anchor = (time.monotonic(), self._now_ns())
            if seek_ns is not None:
                self._go_to(min(max(seek_ns, self.range_ns[0]), self.range_ns[1]))
            elif paused is False and self._ended:  # play again after the end
                self._go_to(self.range_ns[0])
            if paused is not None:
                self._paused = paused
            if speed is not None and math.isfinite(speed) and speed > 0:
                self._speed = min(max(speed, MIN_SPEED), MAX_SPEED)
            self._changed.notify()
            return self._state(self._anchor[1], did_seek=seek_ns is not None)

    def look(self) -> None:
        """A viewer has subscribed or left. One that comes while the playback is paused gets the current messages; while
        it plays, the last one of a topic that nobody had subscribed to before."""
        watched = self.board.any_watched
        with self._changed:
            self._anchor = (time.monotonic(), self._now_ns())
            self._watched, self._subscribed = watched, True
            if watched and not self._moving:
                self._seek_ns = self._anchor[1]
            self._changed.notify()

    @property
    def state(self) -> State:
        """The current state."""
        with self._changed:
            return self._state(self._now_ns())

    # --- under the lock

    def _go_to(self, moment_ns: int) -> None:
        self._seek_ns, self._ended = moment_ns, False
        self._anchor = (time.monotonic(), moment_ns)

    @property
    def _moving(self) -> bool:
        return self._watched and not self._paused and not self._ended

    def _now_ns(self) -> int:
        at, moment_ns = self._anchor
        if not self._moving:
            return moment_ns
        return min(moment_ns + int((time.monotonic() - at) * 1e9 * self._speed), self.range_ns[1])

    def _state(self, now_ns: int, did_seek: bool = False) -> State:
        status: Literal["playing", "paused", "ended"]
        status = "ended" if self._ended else "paused" if self._paused else "playing"
        return State(status, now_ns, self._speed, did_seek)

    # --- the thread

    def _run(self) -> None:
        self._coming: Iterator[tuple[Journal, Message]] = iter(())
        following: tuple[Journal, Message] | None = None
        while (step := self._next_step(None if following is None else following[1])) != "stop":
            try:
                following = self._perform(step, following)
            except (PenstockError, OSError) as error:
                self._coming, following = iter(()), None
                with self._changed:
                    self._anchor, self._paused = (time.monotonic(), self._now_ns()), True
                self._tell_failure(error)
                self._tell(self.state)

    def _perform(self, step: str, following: tuple[Journal, Message] | None) -> tuple[Journal, Message] | None:
        """Do what is next; returns the message that is shown after it."""
        if step == "tell":
            self._tell(self.state)
        elif step == "show" and following is not None:
            self._show(*following)
            return next(self._coming, None)
        elif step == "catch up":
            for one in list(self._passed.values()):
                self._show(*one)
        elif step == "seek":
            self._passed.clear()
            with self._changed:
                seek_ns, self._seek_ns = self._seek_ns or 0, None
            later = seek_ns > self.range_ns[0]
            self._coming = located(self._journals, None, Span(seek_ns + later, None))
            if later:
                try:
                    for one in last_until(self._journals, self._topics, seek_ns, self._given_up).values():
                        self._show(*one)
                # the messages before that moment cannot be read; playback continues from there all the same
                except (PenstockError, OSError) as error:
                    self._tell_failure(error)
            return next(self._coming, None)
        return following

    def _tell_failure(self, error: Exception) -> None:
        logger.warning("%s", describe(error))
        self._warn(describe(error))

    def _next_step(self, message: Message | None) -> Literal["stop", "seek", "catch up", "show", "tell"]:
        """Wait until there is something to do, and return it."""
        with self._changed:
            while not self._stopped and self._seek_ns is None:
                if not self._moving:
                    self._changed.wait()
                    continue
                if self._subscribed:
                    self._subscribed = False
                    return "catch up"
                now = time.monotonic()
                if message is None:
                    if self._loop:
                        self._go_to(self.range_ns[0])
                        continue
                    self._anchor, self._ended = (now, self.range_ns[1]), True
                    return "tell"
                if now - self._told_at >= TELL_S:
                    self._told_at = now
                    return "tell"
                at, moment_ns = self._anchor
                left_s = at + (message.timestamp_ns - moment_ns) / 1e9 / self._speed - now
                if left_s <= 0:
                    # Sending lags: let the clock wait instead of sending a burst to catch up.
                    if left_s < -LATE_S and message.timestamp_ns > moment_ns:
                        self._anchor = (now, message.timestamp_ns)
                    return "show"
                self._changed.wait(min(left_s, TELL_S))
            return "stop" if self._stopped else "seek"

    def _given_up(self) -> bool:
        return self._stopped or self._seek_ns is not None

    def _show(self, journal: Journal, message: Message) -> None:
        name = message.channel or ""
        shown = self.board.topics.get(name)
        if shown is None or not self.board.watched(shown):
            self._passed[name] = journal, message
        else:
            self._passed.pop(name, None)
            shown.log(message, self._described.place(journal, message))
