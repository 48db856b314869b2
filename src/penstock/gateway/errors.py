"""What a broker of modules refuses, by the names its reference gives the results."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from penstock._core.gateway import GatewayMessage
from penstock.errors import PenstockError
from penstock.printable import printable

MAX_REASON = 500  # letters of an error's text that are told


class BrokerError(PenstockError):
    """The broker could not do it: an unknown module, a broker that has been destroyed."""


class AddLinkError(BrokerError):
    """The link could not be added: one of its ends is not attached, or it is there already."""


class RemoveLinkError(BrokerError):
    """The link could not be removed: there is none between these ends."""


class ModuleError(PenstockError):
    """A module could not be loaded, made or started; the text says which step and why."""


class MessageFailed(ModuleError):
    """A module failed at some messages, outside of its worker, and goes on; ``lost`` of them were stored and are gone,
    ``given_back`` (each with the times it was tried) may be tried again."""

    def __init__(self, text: str, lost: int = 0, given_back: Sequence[tuple[GatewayMessage, int]] = ()) -> None:
        super().__init__(text)
        self.lost = lost
        self.given_back = given_back


def give_back(module: Any, error: Exception, *messages: GatewayMessage) -> None:
    """Tell that ``module`` failed at these messages of a batch, and at no others. Whatever fails the whole batch comes
    before this: they would fail twice."""
    if module.on_failure is None:
        raise error
    module.on_failure(MessageFailed(reason_of(error), given_back=[(message, 1) for message in messages]))


class StepFailed(ModuleError):
    """A module failed in a step other than ``receive``, in its process or on a thread of its own, and goes on."""

    def __init__(self, text: str, step: str) -> None:
        super().__init__(text)
        self.step = step


class EndedByFailure(ModuleError):
    """A module's process ended because of a failure that was told and counted before: no other failure."""


class DrainError(PenstockError, TimeoutError):
    """What was queued for a module was not handled in time; the text says how much and what can be done. ``hung``: it
    has not come back from one call in all that time."""

    hung = False


def reason_of(error: BaseException) -> str:
    """Why something failed, in one line: the kind of error and its text. What the gateway says itself needs no kind.

    The text may be anything, a message's own bytes too: what does not print is escaped, and a long one is cut."""
    try:
        text = str(error)
    except Exception:  # it is a module's own class
        text = "its text cannot be read"
    most = MAX_REASON if not isinstance(error, ModuleError) else 2 * MAX_REASON  # that one may quote another
    text = text if len(text) <= most else f"{text[:most]}..."
    told = text if isinstance(error, ModuleError) else f"{type(error).__name__}: {text}"
    if isinstance(error, OSError) and error.errno and (what := os.strerror(error.errno)) not in told:
        told = f"{told} ({what})"
    return printable(" ".join(told.split()))
