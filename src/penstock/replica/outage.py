"""Outage: says that a store does not answer, with what that means (once, or every ``again_s``), and once that it does
again.

Which of its servers answer is asked in a thread of its own: a server that hangs must not hold up who waits for the
store. An outage that ends before that is known is not spoken of. One thread calls it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.replica.stream import Blocks

log = logging.getLogger("penstock.replica")
TELL_S = 10.0  # how often to say something again to who waits for a start
SLOW_S = 1.5  # no answer for so long is told; shorter ones are usual while the servers choose a leader


class Outage:
    """``meanwhile`` is the sentence that says what does not happen until the store answers."""

    def __init__(self, blocks: Blocks, meanwhile: str, again_s: float = math.inf) -> None:
        self._blocks = blocks
        self._meanwhile = meanwhile
        self._again_s = again_s
        self._again_at = 0.0
        self.reason = ""  #: why the last thing that was asked for was not done
        self._answered = False  # whether that is the store's own answer
        self._since = time.monotonic()
        self._lock = threading.Lock()
        self._number = 0  # of the outage
        self._noted = False
        self._told = False

    def begin(self) -> None:
        """Something is asked of the store: from here on counts how long it takes."""
        self._since = time.monotonic()
        self.reason, self._answered = "", False

    def note(self, problem: Exception) -> None:
        """It was not done, and is tried again."""
        # what the store itself says tells more than that a request was not answered
        answered = not isinstance(problem, TimeoutError | ConnectionError)
        if answered or not self._answered:
            self.reason, self._answered = str(problem).removeprefix(f"{self._blocks.name}: "), answered
        now = time.monotonic()
        if now - self._since < SLOW_S or (self._noted and now < self._again_at):
            return
        self._noted, self._again_at, self._answered = True, now + self._again_s, False
        telling = threading.Thread(
            target=self._log_outage, args=(self._number, self.reason), name="penstock-replica-reach", daemon=True
        )
        try:
            telling.start()
        except RuntimeError:  # the system allows no more threads
            self._noted = False

    def _log_outage(self, number: int, reason: str) -> None:
        servers = self._blocks.reach()
        with self._lock:
            if number == self._number:
                log.warning("%s, %s: %s; %s", self._blocks.name, servers, reason, self._meanwhile)
                self._told = True

    def end(self) -> None:
        """It was done."""
        if self._noted and self.drop():
            log.warning("%s answers again, after %.0f s", self._blocks.name, time.monotonic() - self._since)

    def drop(self) -> bool:
        """It is not waited for any more: nothing is said from here on. Whether something was."""
        with self._lock:
            self._number += 1
            told, self._noted, self._told = self._told, False, False
        return told
