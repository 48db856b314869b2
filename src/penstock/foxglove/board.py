"""Board: the topics offered to viewers, each as a channel of the protocol, and how many viewers subscribe to each."""

from __future__ import annotations

import logging
import re
import threading
import time
from typing import Any

import foxglove

from penstock.channel import LOG_FAILURES_S
from penstock.foxglove.pictures import kind_of
from penstock.foxglove.presentation import Line, Presentation, presentation_of
from penstock.types.versions import Place

__all__ = ["Board", "Shown", "viewer_topic"]

MAX_TOPICS = 1000
logger = logging.getLogger("penstock.foxglove")


def viewer_topic(name: str) -> str:
    """``camera.front`` as ``/camera/front``: in the viewer's message paths a dot starts a field, and other signs end a
    name."""
    return "/" + re.sub(r"[^A-Za-z0-9_/-]", "_", name.replace(".", "/")).strip("/")


class Shown:
    """One topic. ``log`` may be called by one thread."""

    def __init__(self, topic: str, source: str, line: Line, context: Any, sample: Any = None) -> None:
        self.topic, self.source, self.line = topic, source, line
        self.failures = 0
        self._told_at = 0.0
        self._context = context
        self._presentation: Presentation = presentation_of(line, sample)
        self._sure = self._presentation.kind is None or (sample is not None and kind_of(sample) is not None)
        self.channel = self._advertise()

    def _advertise(self) -> Any:
        return foxglove.Channel(
            self.topic,
            schema=self._presentation.schema,
            message_encoding=self._presentation.encoding,
            context=self._context,
            metadata={"source": self.source},
        )

    def _make_sure(self, message: Any) -> None:
        """The first message says whether it is a picture or a point cloud. If it was advertised as the other one,
        advertise it again.
        """
        kind = kind_of(message)
        self._sure = kind is not None
        if kind is not None and kind is not self._presentation.kind:
            self._presentation = presentation_of(self.line, message)
            self.channel.close()
            self.channel = self._advertise()

    def log(self, message: Any, place: Place | None = None) -> None:
        """Send it to the viewers; ``place`` is where it was recorded. A message that does not match its schema is
        counted, skipped, and logged now and then."""
        refused = self.send(message, place)
        if refused is None:
            return
        now = time.monotonic()
        if not self._told_at or now - self._told_at >= LOG_FAILURES_S:
            self._told_at = now
            logger.warning("%s: a message is not shown: %s (%d so far)", self.source, refused, self.failures + 1)
        self.failures += 1  # count after logging: who sees the count finds the line in the log

    def send(self, message: Any, place: Place | None = None) -> str | None:
        """Send it to the viewers; the reason if it does not match its schema. A text: the error itself would keep the
        message, and whoever reads it, until the garbage is collected."""
        if not self._sure:
            self._make_sure(message)
        try:
            body = self._presentation.convert(message, place)
        except ValueError as error:
            return str(error)
        if message.timestamp_ns < 0:
            return "its time is before 1970, which viewers cannot show"
        self.channel.log(body, log_time=message.timestamp_ns)
        return None


class Board:
    """All topics by the name of their source. The server's thread changes it; the protocol's threads read it."""

    def __init__(self) -> None:
        self.context = foxglove.Context()
        self._lock = threading.Lock()  # guards the two below
        self._shown: dict[str, Shown] = {}
        self._viewers: dict[int, int] = {}  # by the channel's id

    def show(self, source: str, name: str, line: Line, sample: Any = None) -> Shown | None:
        """Announce the topic to viewers, again if there are other versions of its schema. ``sample`` is one of its
        messages.

        None: there are too many topics.
        """
        with self._lock:
            there = self._shown.get(source)
            if there is not None and there.line == line:
                return there
            if there is None and len(self._shown) >= MAX_TOPICS:
                return None
            taken = {one.topic for key, one in self._shown.items() if key != source}
        topic = wanted = viewer_topic(name)
        number = 1
        while topic in taken:
            number += 1
            topic = f"{wanted}_{number}"
        if there is not None:
            self.hide(source)
        shown = Shown(topic, source, line, self.context, sample)
        with self._lock:
            self._shown[source] = shown
        return shown

    def hide(self, source: str) -> None:
        """Withdraw the topic."""
        with self._lock:
            shown = self._shown.pop(source, None)
            if shown is not None:
                self._viewers.pop(shown.channel.id(), None)
        if shown is not None:
            shown.channel.close()  # without the lock: this calls back into `note_viewer`

    @property
    def topics(self) -> dict[str, Shown]:
        """What is shown now, by source."""
        with self._lock:
            return dict(self._shown)

    def note_viewer(self, channel: int, change: int) -> None:
        """One viewer more or fewer subscribes to the topic."""
        with self._lock:
            self._viewers[channel] = max(0, self._viewers.get(channel, 0) + change)

    def watched(self, shown: Shown) -> bool:
        """Whether a viewer subscribes to it."""
        with self._lock:
            return self._viewers.get(shown.channel.id(), 0) > 0

    @property
    def any_watched(self) -> bool:
        """Whether a viewer subscribes to anything."""
        with self._lock:
            return any(self._viewers.values())
