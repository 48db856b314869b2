"""Completion in bash, which treats a colon as the end of a word.

``penstock sub shm:/cam`` arrives as the words ``shm``, ``:`` and ``/cam``, and bash puts what it gets in the place of
the last one. So the words are joined before they are used, and of each answer only the part after the last typed colon
is returned.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
from collections.abc import Iterator


@contextlib.contextmanager
def of_words_with_colons() -> Iterator[None]:
    """Wraps a whole command; does nothing unless bash asks for completions."""
    if os.environ.get("_PENSTOCK_COMPLETE") != "complete_bash":
        yield
        return
    text = os.environ.get("COMP_WORDS", "")
    words = text.split("\n" if "\n" in text else " ")  # the function in the shell joins them by line ends
    current = int(os.environ.get("COMP_CWORD", "0"))
    joined, at = _join(words + [""] * (current + 1 - len(words)), current)
    typed = joined[at]
    os.environ["COMP_WORDS"] = "\n".join(shlex.quote(word) if word else "" for word in joined)
    os.environ["COMP_CWORD"] = str(at)
    answer = io.StringIO()
    try:
        with contextlib.redirect_stdout(answer):
            yield
    finally:
        there = typed[: typed.rfind(":") + 1]
        for line in answer.getvalue().splitlines():
            print(line.removeprefix(there))


def _join(words: list[str], current: int) -> tuple[list[str], int]:
    """Join words around colons; also returns the new index of the word being typed."""
    joined: list[str] = []
    at = 0
    for number, word in enumerate(words):
        follows = bool(joined) and len(joined) > 1 and (word.startswith(":") or joined[-1].endswith(":"))
        if follows and not (number == current and not word):
            joined[-1] += word
        else:
            joined.append(word)
        if number == current:
            at = len(joined) - 1
    return joined, at
