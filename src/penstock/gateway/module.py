"""What a module is: something that a gateway makes, starts, hands messages to and ends.

Any class with a ``receive`` method serves; the others are optional and these are their meanings. ``Module`` gives them
all a body, and ``Source`` adds the thread that a module needs which speaks of its own accord.

Calls for one module never overlap: ``create``, ``start``, ``receive`` for each message in order, ``stop``, ``destroy``.
``create`` runs on the thread that changes the gateway, the others on the module's own worker thread; all but ``create``
may be ``async def``. A module may publish from any thread and from inside ``receive``.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from penstock import clock as clocks
from penstock._core.gateway import GatewayMessage
from penstock.errors import InvalidArgument
from penstock.types import Codec, Schema, codec_of
from penstock.types.fields import Reader, Step, check_paths, reader_of
from penstock.types.handles import Decoding

if TYPE_CHECKING:
    import asyncio

MAX_SECONDS = 1e9  # more cannot be waited for
log = logging.getLogger("penstock.gateway")


class Outlet(Protocol):
    """The broker as a module sees it, in this process or in the module's own."""

    def publish(self, source: Any, message: GatewayMessage, /) -> None:
        """Send ``message`` to every sink linked to ``source``, which is the module itself."""

    def mark(self, source: Any, since: int = 0, after: Any = None, /) -> Any:
        """What ``source`` has published so far, after the loss ``since`` and the mark ``after``, to ask whether it was
        ``handled()``."""

    def linked(self, source: Any, /) -> bool:
        """Whether anybody gets what ``source`` publishes. A durable source takes nothing from its input until then."""

    def note_refused(self, source: Any, /) -> None:
        """What ``source`` had to publish for messages that count as handled was refused: those are to come again."""

    def publish_output(self, source: Any, output: str, message: GatewayMessage, /) -> None:
        """Send ``message`` to every sink linked to the ``output`` of ``source``."""


class Module:
    """A module that does nothing; override what matters."""

    name: str = ""
    broker: Outlet
    configuration: Any = None
    #: What time it is: the machine's clock, or in a replay the recorded time.
    clock: clocks.Clock
    #: Set by whoever supervises: told when a thread or process of the module's own has failed.
    on_failure: Callable[[BaseException], object] | None = None
    #: Whether what it publishes is kept where it came from until it was handled: its links then deliver at least once.
    durable: bool = False
    #: Messages that it keeps on disk and that were not handled yet (a property; any thread may ask for it).
    backlog: int = 0
    #: Whether what it publishes inside ``receive`` may come from earlier messages too, which count as handled by then.
    gathers: ClassVar[bool] = False
    #: Whether it has a thread or process of its own, which is started again when it fails unless a policy was chosen.
    restarts: ClassVar[bool] = False
    #: Whether it speaks with the world (sockets, devices, files). A replay does not make it: the recording stands for
    #: what it publishes, and what comes for it is stored.
    reaches_outside: ClassVar[bool] = False
    #: What messages that come are made of: ``self.value(message)`` gives it. As ``type=`` of ``penstock.subscriber``.
    input_type: ClassVar[Any] = None
    #: What ``self.publish`` takes. As ``type=`` of ``penstock.publisher``.
    output_type: ClassVar[Any] = None

    @classmethod
    def parse(cls, args: Any) -> Any:
        """The configuration out of the ``args`` of the gateway's file; raise ValueError to refuse them."""
        return {} if args is None else args

    @classmethod
    def durable_with(cls, configuration: Any) -> bool:
        """Whether a module of this configuration is ``durable``, where that depends on it: known before it is made."""
        return cls.durable

    def create(self, broker: Outlet, configuration: Any) -> None:
        """Take the broker and the configuration that ``parse`` gave."""
        self.broker = broker
        self.configuration = configuration
        self.clock = clocks.current()

    def start(self) -> None:
        """Every module has been made and the links are there: begin."""

    def receive(self, message: GatewayMessage) -> None:
        """One message of a linked source."""

    def stop(self) -> None:
        """Say nothing more of your own accord; nothing is received after this."""

    def destroy(self) -> None:
        """Give everything back."""

    def publish(self, content: Any = b"", properties: Mapping[str, str] | None = None, output: str = "") -> None:
        """Send to whoever is linked to this module, or to its ``output`` of that name (``NAME.OUTPUT`` in a link). A
        GatewayMessage without new properties goes as it is. With an ``output_type``, objects of it are sent. What goes
        to the output ``dropped`` is counted as filtered by this module."""
        if self.output_type is not None and not isinstance(content, GatewayMessage):
            content = self._codec("output_type").encode(content)
        if properties is not None or not isinstance(content, GatewayMessage):
            content = GatewayMessage(content, properties)
        if output == "":
            self.broker.publish(self, content)
        else:
            self.broker.publish_output(self, check_output(output), content)

    def value(self, message: GatewayMessage) -> Any:
        """The message as an object of the ``input_type``; ``DecodeError`` where it is none, which is a failure of
        ``receive`` like any other. Without an ``input_type`` the content as bytes."""
        if self.input_type is None:
            return bytes(message)
        found = vars(self).get("_values")
        if found is None:
            found = self._values = Decoding(self._codec("input_type"))
        return found.decode(message)

    def _codec(self, which: str) -> Codec[Any]:
        known = vars(self).setdefault("_codecs", {})
        if which not in known:
            known[which] = codec_of(getattr(self, which))
        return known[which]  # type: ignore[no-any-return]


def check_output(output: Any) -> str:
    """Refuse what no link can name as ``MODULE.OUTPUT``: the message would go nowhere."""
    if not isinstance(output, str):
        raise TypeError(f"output is the name of an output, not {output!r}")
    if "." in output:
        raise InvalidArgument(f"output={output!r}: the name of an output has no dot")
    return output


class Source(Module):
    """A module with a thread of its own that runs ``run`` (also ``async def``) from start to stop. When ``run`` raises,
    that is a failure of the module, which is then made anew unless its restart policy says otherwise; when it returns,
    it is done."""

    restarts = True
    reaches_outside = True  # unless it says otherwise: one that uses messages and ``self.clock`` alone runs in a replay

    def start(self) -> None:
        """Begin the thread."""
        clock = clocks.current()
        self.stopping = clock.event()
        self._thread = clock.thread(self._guarded, f"{self.name or type(self).__name__} source")
        self._thread.start()

    def run(self) -> None:
        """Publish until ``self.stopping`` is set; wait with ``self.stopping.wait(seconds)``."""

    def stop(self) -> None:
        """End the thread and wait for it."""
        if hasattr(self, "stopping"):
            self.stopping.set()
            if self._thread is not threading.current_thread():
                self._thread.join()

    def destroy(self) -> None:
        """Make sure that the thread has ended."""
        self.stop()

    def _guarded(self) -> None:
        try:
            run: Callable[[], Any] = self.run
            result = run()
            if inspect.iscoroutine(result):
                import asyncio

                with asyncio.Runner(loop_factory=self._loop_factory()) as runner:
                    runner.run(result)
        except Exception as error:
            if self.stopping.is_set():
                return
            if self.on_failure is not None:
                self.on_failure(error)
            else:
                log.exception("module %r: its source thread ended by an error", self.name)


    def _loop_factory(self) -> Callable[[], asyncio.AbstractEventLoop] | None:
        clock = clocks.current()
        if not isinstance(clock, clocks.VirtualClock):
            return None
        from penstock.gateway.virtual_loop import SourceLoop

        return lambda: SourceLoop(clock)


def typed(module: Any, which: str) -> Schema | None:
    """The schema of a module's ``input_type`` or ``output_type``; None if it has none."""
    kind = getattr(module, which, None)
    return None if kind is None else codec_of(kind).described()


def published_values(module: Any) -> Reader:
    """How the fields of what it publishes are read: as its ``output_type`` or its channel says, else as JSON."""
    schema = typed(module, "output_type")
    if schema is not None:
        return reader_of(schema)
    found: Reader = getattr(module, "channel_value", None) or (lambda message: json.loads(bytes(message)))
    return found


class PublishedValues:
    """The same of whoever is the module of a worker now: it may be replaced while its links stay."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._module: Any = None
        self._read: Reader = bytes

    def __call__(self, message: Any) -> Any:
        module = self._worker.module
        if module is not self._module:
            self._read = published_values(module)
            self._module = module
        return self._read(message)

    def check(self, paths: Iterable[Sequence[Step]]) -> None:
        """``InvalidArgument`` where it is known what the module publishes, and that has no such field."""
        module = self._worker.module
        schema = typed(module, "output_type")
        if schema is not None:
            check_paths([schema], paths)
        elif hasattr(module, "check_fields"):
            module.check_fields(paths)


def refuse_generators(module: Any) -> None:
    """A step with a ``yield`` in it would be called and never run; ``module`` may be its class."""
    for step in ("create", "start", "receive", "receive_many", "run", "stop", "destroy"):
        function = getattr(module, step, None)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"{step} is a generator (it has a yield), which would never run")


def options(args: Any, **defaults: Any) -> dict[str, Any]:
    """``args`` over ``defaults``, for a module's ``parse``: unknown names and other kinds of value are refused."""
    given = {} if args is None else args
    if not isinstance(given, Mapping):
        raise ValueError(f"args is an object with named values, not {given!r}")
    for name, value in given.items():
        if name not in defaults:
            raise ValueError(f"{name!r} is not known; valid: {', '.join(defaults)}")
        wanted = defaults[name]
        if wanted is not None and not _same_kind(value, wanted):
            raise ValueError(f"{name} is like {wanted!r}, not {value!r}")
        if name.endswith("_s") and isinstance(value, int | float) and value > MAX_SECONDS:
            raise ValueError(f"{name} is at most {MAX_SECONDS:.0f} seconds, not {value!r}")
    return {**defaults, **given}


def _same_kind(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, float):
        return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf
    return type(value) is type(wanted)
