"""The errors of a broker of modules, named after the result codes of its reference."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from penstock._core.gateway import GatewayMessage
from penstock.errors import PenstockError
from penstock.printable import printable

MAX_REASON = 500  # characters of an error's text that are reported


class BrokerError(PenstockError):
    """The broker could not do it: an unknown module, a broker that has been destroyed."""


class AddLinkError(BrokerError):
    """The link could not be added: one of its ends is not attached, or it is there already."""


class RemoveLinkError(BrokerError):
    """The link could not be removed: there is none between these ends."""


class ModuleError(PenstockError):
    """A module could not be loaded, made or started; the text says which step and why."""


class MessageFailed(ModuleError):
    """A module failed at some messages, outside of its worker, and goes on. ``lost`` of them were stored and are gone;
    those in ``given_back`` (each with the number of tries) may be tried again.
    """

    def __init__(self, text: str, lost: int = 0, given_back: Sequence[tuple[GatewayMessage, int]] = ()) -> None:
        super().__init__(text)
        self.lost = lost
        self.given_back = given_back


def give_back(module: Any, error: Exception, *messages: GatewayMessage) -> None:
    """Report that ``module`` failed at these messages of a batch and at no others. Do this after everything that may
    fail for the whole batch: otherwise these messages would fail twice.
    """
    if module.on_failure is None:
        raise error
    module.on_failure(MessageFailed(reason_of(error), given_back=[(message, 1) for message in messages]))


class StepFailed(ModuleError):
    """A module failed in a step other than ``receive``, in its process or on a thread of its own, and goes on."""

    def __init__(self, text: str, step: str) -> None:
        super().__init__(text)
        self.step = step


class EndedByFailure(ModuleError):
    """A module's process ended because of a failure that was already reported and counted: it is not counted again."""


class DrainError(PenstockError, TimeoutError):
    """What was queued for a module was not handled in time; the text says how much and what can be done. ``hung``: it
    did not return from one call in all that time.
    """

    hung = False


def reason_of(error: BaseException) -> str:
    """Why something failed, in one line: the class of the error and its text (for the gateway's own errors the text
    only). The text may contain anything, even bytes of a message: it is escaped and cut.
    """
    try:
        text = str(error)
    except Exception:  # the text of a module's own error class may raise
        text = "its text cannot be read"
    most = MAX_REASON if not isinstance(error, ModuleError) else 2 * MAX_REASON  # a ModuleError may quote another error
    text = text if len(text) <= most else f"{text[:most]}..."
    told = text if isinstance(error, ModuleError) else f"{type(error).__name__}: {text}"
    if isinstance(error, OSError) and error.errno and (what := os.strerror(error.errno)) not in told:
        told = f"{told} ({what})"
    return printable(" ".join(told.split()))
