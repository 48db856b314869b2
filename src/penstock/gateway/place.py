"""A value in a configuration together with its path, so that errors can name the path; and options made of such values,
which are checked alike in a file and in Python."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from penstock.errors import InvalidArgument, PenstockError, nearest
from penstock.gateway.errors import ModuleError

Member = TypeVar("Member", bound=enum.StrEnum)
UNBOUNDED = 1 << 62


class ConfigurationError(InvalidArgument):
    """A gateway's configuration is wrong; the text names the file and the line, or the path of the value."""


def located(where: tuple[str, str | None], error: Exception) -> Exception:
    """The same error with the path and the file that it is about."""
    place = ": ".join(part for part in reversed(where) if part)
    if not place or isinstance(error, ConfigurationError) or str(error).startswith(place):
        return error
    if isinstance(error, PenstockError):
        error.args = (f"{place}: {error}", *error.args[1:])
        return error
    told = ModuleError(f"{place}: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told


class Place:
    """One value, its path (``modules[2].loader``) and its file."""

    def __init__(self, value: Any, path: str, file: str | None = None) -> None:
        self.value = value
        self.path = path
        self.file = file

    def fail(self, text: str, cause: BaseException | None = None) -> NoReturn:
        """Refuse the value."""
        where = ": ".join(part for part in (self.file, self.path) if part)
        raise ConfigurationError(f"{where}: {text}" if where else text) from cause

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Add this path to errors raised inside."""
        try:
            yield
        except ConfigurationError:
            raise
        except (ValueError, TypeError) as error:
            self.fail(str(error), error)

    def __getitem__(self, key: str | int) -> Place:
        path = f"{self.path}[{key}]" if isinstance(key, int) else f"{self.path}.{key}".lstrip(".")
        value = self.value[key] if isinstance(key, int) else self.mapping()[key]
        return Place(value, path, self.file)

    def __contains__(self, key: str) -> bool:
        return key in self.mapping()

    def mapping(self) -> Mapping[str, Any]:
        """The value as an object."""
        if not isinstance(self.value, Mapping):
            self.fail(f"must be an object with named values, not {_kind(self.value)}")
        return self.value

    def items(self, key: str) -> list[Place]:
        """The places of a list; none where it is missing."""
        if key not in self:
            return []
        place = self[key]
        if not isinstance(place.value, list | tuple):
            place.fail(f"must be a list, not {_kind(place.value)}")
        return [place[index] for index in range(len(place.value))]

    def only(self, *names: str) -> None:
        """Refuse unknown keys."""
        for key in self.mapping():
            if key not in names:
                self[key].fail(f"is not known here; {nearest(str(key), names)}")

    def need(self, *names: str) -> None:
        """Refuse a missing key."""
        for name in names:
            if name not in self:
                Place(None, f"{self.path}.{name}".lstrip("."), self.file).fail("is missing")

    def text(self) -> str:
        """A text that is not empty."""
        if not isinstance(self.value, str):
            self.fail(f"must be a text, not {_kind(self.value)}")
        if not self.value or "\0" in self.value:
            self.fail("is empty" if not self.value else "holds a NUL")
        return self.value

    def choice(self, valid: Sequence[str], what: str = "choice") -> str:
        """One of a few texts."""
        text = self.text()
        if text not in valid:
            self.fail(f"{text!r} is not a {what}; {nearest(text, valid)}")
        return text

    def member(self, kind: type[Member]) -> Member:
        """One of the texts that ``kind`` lists."""
        return kind(self.choice([one.value for one in kind]))

    def truth(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            self.fail(f"must be true or false, not {_kind(self.value)}")
        return self.value

    def seconds(self, *, optional: bool = False) -> Any:
        """A number above 0; with ``optional`` also null."""
        found = self.number(optional=optional)
        if found is not None and not found > 0:
            self.fail(f"is {self.value}; it must be above 0 seconds{', or null' if optional else ''}")
        return found

    def number(self, least: float = -math.inf, *, optional: bool = False) -> Any:
        """A number of at least ``least``; with ``optional`` also null."""
        if self.value is None and optional:
            return None
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or not math.isfinite(self.value):
            self.fail(f"must be a number, not {_kind(self.value)}")
        if self.value < least:
            self.fail(f"is {self.value}; it must be {least} or more")
        return float(self.value)

    def integer(self, least: int, most: int = UNBOUNDED, *, optional: bool = False) -> Any:
        """An integer between two bounds; with ``optional`` also null."""
        if self.value is None and optional:
            return None
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            self.fail(f"must be a whole number, not {_kind(self.value)}")
        if not least <= self.value <= most:
            below = most == UNBOUNDED and self.value < least
            bounds = f"it must be {least} or more" if below else f"{least} to {most} are allowed"
            self.fail(f"is {self.value}; {bounds}")
        return self.value


Checks = Mapping[str, Callable[[Place], Any]]


def checked(place: Place, checks: Checks) -> dict[str, Any]:
    """The options at a place of a file."""
    return {name: check(place[name]) for name, check in checks.items() if name in place}


def check_options(options: Any, checks: Checks) -> None:
    """The same for a frozen dataclass that is being made; its defaults need no check."""
    for name, check in checks.items():
        value = getattr(options, name)
        if value is not type(options).__dataclass_fields__[name].default:
            object.__setattr__(options, name, check(Place(value, name)))


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return {"dict": "an object", "list": "a list", "str": f"the text {value!r}"}.get(type(value).__name__, repr(value))
