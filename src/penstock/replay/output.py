"""The output of a replay: a journal with what was published and what would have been sent. Topics: what a module
publishes is stored under its name (``NAME`` or ``NAME.OUTPUT``), a message for an address or a replaced module under
``to.`` and its topic. Times are virtual, so that two outputs can be compared byte for byte. The topic ``_recording``
says, as in a recording, whether the replay was completed.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.errors import InvalidArgument, PenstockError
from penstock.gateway.configuration import is_address
from penstock.journal import Entry, Journal
from penstock.recording.story import STORY, topic_of
from penstock.topics import topic_for

__all__ = ["Output", "topic_of_sink", "topic_of_source"]

BATCH = 1024
BATCH_BYTES = 4 << 20
MAX_MESSAGE_BYTES = 512 << 20  # the maximum of a journal: the module's message was accepted where it ran


def topic_of_source(name: str) -> str:
    """The topic for what ``name`` publishes."""
    return topic_of(name) if is_address(name) else topic_for(name)


def topic_of_sink(name: str) -> str:
    """The topic for messages to ``name``."""
    return f"to.{topic_of_source(name)}"


class _Kept(Journal):
    _refused_in_replay = False


class Output:
    """Written in batches; ``with`` closes it. The folder is created when there is something to store. Modules are not
    told that something could not be stored, since it is not their fault: ``error`` holds it, and the end of ``with``
    raises it.
    """

    def __init__(self, directory: Path | str) -> None:
        self._directory = Path(directory).absolute()  # a module may change the working directory
        self._check_free()
        self._opened: _Kept | None = None
        self._entries: list[Entry] = []
        self._bytes = 0
        self._topics: dict[tuple[bool, str], str] = {}
        self.messages = 0
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        try:
            self._write()
            if kind is None and self.error is not None:
                raise self.error
            if kind is None:  # otherwise the output is incomplete, which the missing end shows
                self._append_event("ended")
        finally:
            if self._opened is not None:
                self._opened.close()

    def _check_free(self) -> None:
        if self._directory.exists() and (not self._directory.is_dir() or any(self._directory.iterdir())):
            raise InvalidArgument(f"{self._directory} is not empty; the output of a replay is a folder of its own")

    @property
    def _journal(self) -> Journal:
        if self._opened is None:
            self._check_free()
            existed = self._directory.exists()
            try:
                self._opened = _Kept(self._directory, max_message_bytes=MAX_MESSAGE_BYTES)
                self._append_event("started")
            except BaseException:
                self._discard(existed)
                raise
        return self._opened

    def _discard(self, existed: bool) -> None:
        """Remove what was begun: nothing is stored in it. A folder that was there stays, empty."""
        opened, self._opened = self._opened, None
        if opened is not None:
            with contextlib.suppress(OSError, PenstockError):
                opened.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        if existed:
            self._directory.mkdir(mode=0o700, exist_ok=True)

    def _append_event(self, event: str) -> None:
        self._journal.append(STORY, json.dumps({"event": event}).encode())

    def published(self, name: str, message: Any) -> None:
        """Store what ``name`` published."""
        self._add(False, name, message)

    def left(self, name: str, message: Any) -> None:
        """Store a message to ``name``."""
        self._add(True, name, message)

    def _add(self, leaves: bool, name: str, message: Any) -> None:
        topic = self._topics.get((leaves, name))
        if topic is None:
            topic = self._topics[leaves, name] = (topic_of_sink if leaves else topic_of_source)(name)
        if self.error is not None:
            return
        data = bytes(message)
        self._entries.append(Entry(topic, data, dict(message.properties), timestamp_ns=message.timestamp_ns))
        self._bytes += len(data)
        self.messages += 1
        if len(self._entries) >= BATCH or self._bytes >= BATCH_BYTES:
            self._write()

    def _write(self) -> None:
        entries, self._entries, self._bytes = self._entries, [], 0
        if not entries or self.error is not None:
            return
        try:
            self._journal.commit(entries)
        except Exception as error:
            self.error = error
