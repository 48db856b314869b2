"""What a recording is replayed into: a gateway from its file, or a program on buses.

Recorded topics replace a gateway's addresses, and its modules that do I/O. A program is a
Python file: it opens subscribers and publishers at ``bus:`` addresses when it is run, and its function ``step``, where
there is one, is called after each message and timer; threads of its own and other reaches are refused.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock import address
from penstock.bus import CallbackSubscriber, named_bus
from penstock.clock import VirtualClock, in_use, using
from penstock.errors import InvalidArgument, PenstockError, StateError, nearest
from penstock.gateway import read
from penstock.gateway.configuration import is_address
from penstock.gateway.errors import reason_of
from penstock.gateway.stage import FAILURES, MAX_AT_ONCE, Failure, Stage, cast, noted
from penstock.recording.story import topic_of
from penstock.replay.interrupts import remembered
from penstock.replay.outside import Used, controlled
from penstock.secrecy import without_secrets
from penstock.types import Schema

if TYPE_CHECKING:
    from penstock._core import Message

__all__ = ["Actor", "GatewayTarget", "ProgramError", "ProgramTarget", "Target", "Told", "target"]

Told = Callable[[str, Any], object]


class ProgramError(PenstockError):
    """The program raised an error; the text says where."""


class Actor(Protocol):
    """One run of a target."""

    def start(self) -> None:
        """Begin at the clock's first moment."""

    def put(self, source: str, message: Message, ordinal: int, schema: Schema | None = None) -> None:
        """Handle everything that is due, then one input with all its effects; ``schema`` is its schema."""

    def advance(self, time_ns: int) -> None:
        """Advance the time."""

    def stop(self) -> None:
        """End in order; open windows and the like are published."""

    def close(self) -> None:
        """End at once."""

    @property
    def running(self) -> str:
        """The module that runs, or ran last; empty if that is not known."""

    @property
    def failures(self) -> list[Failure]:
        """Failures so far that did not end the run."""

    @property
    def waiting(self) -> dict[str, int]:
        """Messages that were not handled so far."""

    @property
    def notes(self) -> list[str]:
        """Notes on anything unusual so far, one sentence each: addresses that nobody uses, filters that name no
        field.
        """


class Target(Protocol):
    """Something into which a recording can be replayed, any number of times."""

    @property
    def used(self) -> Used | None:
        """What its modules used when they were imported that a replay does not control; None: they were not yet."""

    def sources(self, topics: Iterable[str], recorded: Mapping[str, str], mapping: list[str] | None) -> dict[str, str]:
        """The source of each topic; topics without one are left out."""

    def unfed(self, sources: Mapping[str, str]) -> list[str]:
        """Sources without a recorded topic."""

    def actor(self, clock: VirtualClock, on_published: Told, on_left: Told) -> Actor:
        """Create a new run; the clock must be in use."""

    def at_home(self) -> contextlib.AbstractContextManager[None]:
        """Inside, modules in the folder of the target's file can be imported."""


def target(file: Path | str, mapping: list[str] | None = None, outputs: Iterable[str] = ()) -> Target:
    """A ``.py`` file is a program, everything else a gateway's file."""
    file = Path(file)
    if file.suffix == ".py":
        return ProgramTarget(file, tuple(outputs))
    if tuple(outputs):
        raise InvalidArgument("--capture is for programs: of a gateway everything is stored")
    return GatewayTarget(file, [name for _, name in _rules(mapping)])


@contextlib.contextmanager
def _beside(file: Path) -> Iterator[None]:
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


@contextlib.contextmanager
def _nothing_opened() -> Iterator[Used]:
    """Inside, a virtual clock is in use, so that modules cannot open handles or start threads when they are imported:
    in a replay these would really send. Gives what they use that is not controlled.
    """
    if in_use():
        yield Used()
        return
    with remembered(), using(VirtualClock()) as clock, controlled() as used:
        clock.replayed = True
        yield used
        if clock.refused is not None:
            raise clock.refused


class GatewayTarget:
    """A gateway from its file, on one thread."""

    def __init__(self, file: Path | str, inputs: Iterable[str] = ()) -> None:
        """``inputs`` names modules that the recording replaces in any case."""
        self._file = Path(file)
        with self.at_home(), _nothing_opened() as used:  # modules are imported here
            self.configuration = read(self._file)
            self.cast = cast(self.configuration, inputs)
        self.used = used
        owners = {link.source for link in self.configuration.links}
        self._speaking = [name for name in self.cast.outside if name in owners]

    def at_home(self) -> contextlib.AbstractContextManager[None]:
        return _beside(self._file)

    def sources(self, topics: Iterable[str], recorded: Mapping[str, str], mapping: list[str] | None) -> dict[str, str]:
        """By ``--map``, by the address that a topic was recorded from, or by the name of a module or address."""
        topics = list(topics)
        rules = _rules_for(topics, mapping)
        for name in rules.values():
            if name not in self.cast.outside:
                known = [*self.cast.outside, *self.cast.made]
                raise InvalidArgument(f"--map: there is no source {without_secrets(name)!r}; "
                                      f"{nearest(name, map(without_secrets, known))}")  # fmt: skip
        places: dict[Any, str] = {}
        for name in self._speaking:
            places[_place(name)] = name
            places.setdefault(topic_of(name) if is_address(name) else name, name)
        found = {}
        for topic in topics:
            if topic in rules:
                found[topic] = rules[topic]
            elif (place := _place(recorded.get(topic, ""))) in places or topic in places:
                found[topic] = places.get(place) or places[topic]
        return found

    def unfed(self, sources: Mapping[str, str]) -> list[str]:
        return [without_secrets(name) for name in self._speaking if name not in sources.values()]

    def actor(self, clock: VirtualClock, on_published: Told, on_left: Told) -> Actor:
        return Stage(self.configuration, self.cast, clock, on_published=on_published, on_left=on_left)


class ProgramTarget:
    """A program on direct buses."""

    used = None  # it is run anew in each replay

    def __init__(self, file: Path | str, outputs: tuple[str, ...]) -> None:
        """``outputs`` are the ``bus:`` addresses whose messages are the program's output."""
        file = Path(file)
        if not file.is_file():
            raise InvalidArgument(f"there is no program {str(file)!r}")
        if not outputs:
            raise InvalidArgument("--capture bus:NAME is missing: where the program publishes its output")
        for text in outputs:
            _check_bus(text, "--capture")
        self._file = file
        self._outputs = outputs
        self._places: dict[str, bool] = {}  # the buses that topics are published to, and whether --map names them

    def at_home(self) -> contextlib.AbstractContextManager[None]:
        return _beside(self._file)

    def sources(self, topics: Iterable[str], recorded: Mapping[str, str], mapping: list[str] | None) -> dict[str, str]:
        """By ``--map TOPIC=bus:NAME``, else to where it was recorded, if that was a bus, else to ``bus:TOPIC``."""
        topics = list(topics)
        rules = _rules_for(topics, mapping)
        for text in rules.values():
            _check_bus(text, "--map")
        found = {
            topic: rules.get(topic) or (at if (at := recorded.get(topic, "")).startswith("bus:") else f"bus:{topic}")
            for topic in topics
        }
        self._places = {place: place in rules.values() for place in found.values()}
        return found

    def unfed(self, sources: Mapping[str, str]) -> list[str]:
        return []

    def actor(self, clock: VirtualClock, on_published: Told, on_left: Told) -> Actor:
        return _Program(self._file, self._outputs, self._places, clock, on_published)


class _Program:
    """A program that was started and waits for messages."""

    def __init__(
        self, file: Path, outputs: tuple[str, ...], places: dict[str, bool], clock: VirtualClock, told: Told
    ) -> None:
        self._file, self._clock = file, clock
        self.running = file.name
        # Keep the buses alive: a program may keep no handle of a bus, which would then be gone before the first
        # message.
        self._held = [named_bus(address.parse(text).name) for text in places]
        self._mapped = places
        self._publishers: dict[str, Any] = {}
        self._heard: dict[str, bool] = {}  # by source: whether it had a subscriber
        self._captured = dict.fromkeys(outputs, 0)
        self._told = told
        self._listeners = []
        for text in outputs:
            parsed = address.parse(text)
            identifier = int(parsed.options.get("id", "0"))
            capture = functools.partial(self._capture, text)
            listener = CallbackSubscriber(capture, ids=(identifier,), max_public_id=65535)
            bus = named_bus(parsed.name)
            bus.add(listener)
            self._listeners.append((bus, listener))
        self._names: dict[str, Any] = {}
        self._at_once = 0  # timers at this moment

    def _capture(self, text: str, message: Any) -> None:
        self._captured[text] += 1
        self._told(text, message)

    def start(self) -> None:
        with self._program_errors():
            self._names = runpy.run_path(str(self._file), run_name="__replay__")
        step = self._names.get("step")
        if step is not None and (not callable(step) or inspect.iscoroutinefunction(step)):
            raise ProgramError(f"{self._file}: step is called after each message: it must be a function, and not async")
        self._step()

    @contextlib.contextmanager
    def _program_errors(self) -> Iterator[None]:
        """Turn an error inside into a ``ProgramError`` that names the line of the program."""
        try:
            yield
        except ProgramError:
            raise
        except FAILURES as error:
            if error is self._clock.refused:
                raise
            raise ProgramError(f"{_place_in(self._file, error)}: {reason_of(error)}") from error

    def put(self, source: str, message: Message, ordinal: int, schema: Schema | None = None) -> None:
        self.advance(message.timestamp_ns)
        if source not in self._publishers:
            self._publishers[source] = address.publisher(source)
        publisher = self._publishers[source]
        self._heard[source] = self._heard.get(source, False) or publisher.wait_ready(1, 0)
        if ordinal > 1:
            publisher.bus._go_on(publisher.id, ordinal - 1)
        with self._program_errors():  # a handler that calls sys.exit
            try:
                publisher.publish(bytes(message))
            except TimeoutError as error:
                raise ProgramError(
                    f"{error}. Nobody reads it: give the program a function step() that does, or open it with "
                    'overflow="drop_oldest"'
                ) from error
        self._step()

    def advance(self, time_ns: int) -> None:
        while self._fire(time_ns):
            self._step()
        self._clock.set_time_ns(time_ns)

    def _fire(self, time_ns: int) -> bool:
        before = self._clock.now()
        with self._program_errors():
            fired = self._clock.fire_next(self._clock.seconds_at(time_ns))
        self._at_once = self._at_once + 1 if self._clock.now() == before else 0
        if self._at_once > MAX_AT_ONCE:
            raise StateError(
                f"more than {MAX_AT_ONCE} timers at one moment: the program goes round in a loop "
                f"({self._clock.place()})"
            )
        return fired

    def _step(self) -> None:
        step = self._names.get("step")
        if step is not None:
            with self._program_errors():
                step()

    @property
    def failures(self) -> list[Failure]:
        return noted(self._clock, lambda error: f"{_place_in(self._file, error)}: {reason_of(error)}")

    @property
    def waiting(self) -> dict[str, int]:
        return {}

    @property
    def notes(self) -> list[str]:
        silent = [f"nothing was published at {text} (--capture)" for text, count in self._captured.items() if not count]
        unheard = [text for text, heard in self._heard.items() if not heard]
        option = {text: " (--map)" if self._mapped.get(text) else "" for text in unheard}
        return silent + [f"nobody listens at {text}, a topic's place{option[text]}" for text in unheard]

    def stop(self) -> None:
        self.close()

    def close(self) -> None:
        self._names.clear()
        for publisher in self._publishers.values():
            publisher.close()
        for bus, listener in self._listeners:
            listener.close()
            bus.close()
        self._listeners.clear()
        self._held.clear()


def _place_in(file: Path, error: BaseException) -> str:
    """The last line of the file in an error's traceback."""
    line = error.lineno if isinstance(error, SyntaxError) else None
    frame = error.__traceback__
    while frame is not None:
        if Path(frame.tb_frame.f_code.co_filename) == file:
            line = frame.tb_lineno
        frame = frame.tb_next
    return f"{file}:{line}" if line else str(file)


def _rules(mapping: list[str] | None) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for rule in mapping or []:
        topic, equals, name = rule.partition("=")
        if not equals or not topic or not name:
            raise InvalidArgument(f"--map {rule!r} is not of the form TOPIC=SOURCE")
        if (other := dict(found).get(topic, name)) != name:
            both = f"--map {topic}={without_secrets(other)} and --map {topic}={without_secrets(name)}"
            raise InvalidArgument(f"{both} contradict each other")
        found.append((topic, name))
    return found


def _rules_for(topics: list[str], mapping: list[str] | None) -> dict[str, str]:
    """The source of each topic that is mapped; ``InvalidArgument`` names a topic that is not there."""
    rules = dict(_rules(mapping))
    for topic in rules:
        if topic not in topics:
            raise InvalidArgument(f"--map: no topic {topic!r} is replayed; {nearest(topic, topics)}")
    return rules


def _check_bus(text: str, option: str) -> None:
    if address.parse(text).scheme != "bus":
        raise InvalidArgument(f"{option} {without_secrets(text)}: a program is replayed over bus: addresses alone")


def _place(text: str) -> Any:
    """An address without its options; any other text unchanged."""
    if not is_address(text):
        return text
    parsed = address.parse(text)
    return parsed.scheme, parsed.name, parsed.host, parsed.port, parsed.topic
