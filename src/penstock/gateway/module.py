"""Modules: objects that a gateway creates, starts, passes messages to and ends. Any class with a method ``receive`` is
a module; the other methods are optional. ``Module`` defines all of them, and ``Source`` adds a thread for modules that
publish on their own.

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
from penstock.gateway.errors import AddLinkError
from penstock.types import Codec, Schema, codec_of, first_difference
from penstock.types.fields import Reader, Step, check_paths, reader_of
from penstock.types.handles import Decoding

if TYPE_CHECKING:
    import asyncio

MAX_SECONDS = 1e9  # the longest wait
log = logging.getLogger("penstock.gateway")


class Outlet(Protocol):
    """The broker as a module sees it, in the gateway's process or in the module's own."""

    def publish(self, source: Any, message: GatewayMessage, /) -> None:
        """Send ``message`` to every sink linked to ``source``, which is the module itself."""

    def mark(self, source: Any, since: int = 0, after: Any = None, /) -> Any:
        """A mark of what ``source`` has published so far, after the loss ``since`` and the mark ``after``; its
        ``handled()`` says whether it was handled.
        """

    def linked(self, source: Any, /) -> bool:
        """Whether anything is linked to ``source``. A durable source reads nothing from its input until then."""

    def note_refused(self, source: Any, /) -> None:
        """Note that a sink refused what ``source`` published for messages that count as handled: those must be
        redelivered.
        """

    def publish_output(self, source: Any, output: str, message: GatewayMessage, /) -> None:
        """Send ``message`` to every sink linked to the ``output`` of ``source``."""


class Module:
    """A module that does nothing; override what matters."""

    name: str = ""
    broker: Outlet
    configuration: Any = None
    #: The clock to use: the machine's, or in a replay the recorded time.
    clock: clocks.Clock
    #: Set by the supervisor, which is called when a thread or process of the module has failed.
    on_failure: Callable[[BaseException], object] | None = None
    #: Whether its input keeps the messages until they were handled: its links then deliver at least once.
    durable: bool = False
    #: Messages that it keeps on disk and that were not handled yet (a property that any thread may read).
    backlog: int = 0
    #: Whether what it publishes inside ``receive`` may belong to earlier messages too, which count as handled by then.
    gathers: ClassVar[bool] = False
    #: Whether it has its own thread or process, which is started again after a failure unless another policy was
    #: chosen.
    restarts: ClassVar[bool] = False
    #: Whether it does I/O (sockets, devices, files). A replay does not create it: the recording replaces what it
    #: publishes, and the messages sent to it are stored.
    reaches_outside: ClassVar[bool] = False
    #: The type of received messages, for ``self.value(message)``. As ``type=`` of ``penstock.subscriber``.
    input_type: ClassVar[Any] = None
    #: The type of the objects that ``self.publish`` accepts. As ``type=`` of ``penstock.publisher``.
    output_type: ClassVar[Any] = None

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Make the configuration from the ``args`` of the gateway's file; raise ValueError to refuse them."""
        return {} if args is None else args

    @classmethod
    def durable_with(cls, configuration: Any) -> bool:
        """Whether a module with this configuration is ``durable``, if that depends on it. Called before it is
        created.
        """
        return cls.durable

    def create(self, broker: Outlet, configuration: Any) -> None:
        """Keep the broker and the configuration that ``parse`` returned."""
        self.broker = broker
        self.configuration = configuration
        self.clock = clocks.current()

    def start(self) -> None:
        """Begin: every module was created and the links exist."""

    def receive(self, message: GatewayMessage) -> None:
        """Handle one message of a linked source."""

    def stop(self) -> None:
        """Stop publishing on your own; nothing is received after this."""

    def destroy(self) -> None:
        """Give everything back."""

    def publish(self, content: Any = b"", properties: Mapping[str, str] | None = None, output: str = "") -> None:
        """Send to whoever is linked to this module, or to its ``output`` of that name (``NAME.OUTPUT`` in a link). A
        GatewayMessage without new properties is sent unchanged. With an ``output_type``, pass objects of that type. A
        message to the output ``dropped`` counts as filtered by this module.
        """
        if self.output_type is not None and not isinstance(content, GatewayMessage):
            content = self._codec("output_type").encode(content)
        if properties is not None or not isinstance(content, GatewayMessage):
            content = GatewayMessage(content, properties)
        if output == "":
            self.broker.publish(self, content)
        else:
            self.broker.publish_output(self, check_output(output), content)

    def value(self, message: GatewayMessage) -> Any:
        """The message as an object of the ``input_type``; ``DecodeError`` if it does not match, which is a failure of
        ``receive`` like any other. Without an ``input_type`` the content as bytes.
        """
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
    """Refuse a name that no link can use as ``MODULE.OUTPUT``: the message would be lost."""
    if not isinstance(output, str):
        raise TypeError(f"output is the name of an output, not {output!r}")
    if "." in output:
        raise InvalidArgument(f"output={output!r}: the name of an output has no dot")
    return output


class Source(Module):
    """A module with a thread of its own that calls ``run`` (which may be ``async def``) from start to stop. If ``run``
    raises, the module has failed and is restarted, unless its policy says otherwise; if ``run`` returns, the source is
    done.
    """

    restarts = True
    # the default; a source that uses only messages and ``self.clock`` may set it to False and runs in a replay
    reaches_outside = True

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


def check_types(link: object, written: Schema | None, read: Schema | None) -> None:
    """``AddLinkError`` where the sink of a link cannot read what its source publishes, as far as both are known."""
    difference = None if written is None or read is None else first_difference(written, read)
    if difference is not None and written is not None and read is not None:
        raise AddLinkError(f"link {link}: {written.name} is published, and {read.name} is read: {difference}")


def published_values(module: Any) -> Reader:
    """How filters decode what it publishes: by its ``output_type`` or its channel's schema, else as JSON."""
    schema = typed(module, "output_type")
    if schema is not None:
        return reader_of(schema)
    found: Reader = getattr(module, "channel_value", None) or (lambda message: json.loads(bytes(message)))
    return found


class PublishedValues:
    """As ``published_values``, for the current module of a worker, which may be replaced while its links stay."""

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
        """``InvalidArgument`` if the schema of what the module publishes is known and has no such field."""
        module = self._worker.module
        schema = typed(module, "output_type")
        if schema is not None:
            check_paths([schema], paths)
        elif hasattr(module, "check_fields"):
            module.check_fields(paths)


def refuse_generators(module: Any) -> None:
    """Refuse steps that contain ``yield``: calling them would run nothing. ``module`` may be its class."""
    for step in ("create", "start", "receive", "receive_many", "run", "stop", "destroy"):
        function = getattr(module, step, None)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"{step} is a generator (it has a yield), which would never run")


def options(args: Any, **defaults: Any) -> dict[str, Any]:
    """``defaults`` updated by ``args``, for a module's ``parse``: unknown names and values of another type are
    refused.
    """
    given = {} if args is None else args
    if not isinstance(given, Mapping):
        raise ValueError(f"args must be an object with named values, not {given!r}")
    for name, value in given.items():
        if name not in defaults:
            raise ValueError(f"{name!r} is not known; valid: {', '.join(defaults)}")
        wanted = defaults[name]
        if wanted is not None and not _same_kind(value, wanted):
            raise ValueError(f"{name} must be {_kind(wanted)}, such as {wanted!r}, not {value!r}")
        if name.endswith("_s") and isinstance(value, int | float) and value > MAX_SECONDS:
            raise ValueError(f"{name} must be at most {MAX_SECONDS:.0f} seconds, not {value!r}")
    return {**defaults, **given}


_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}


def _kind(wanted: Any) -> str:
    """The type of a default, in the words of a configuration file."""
    return _KINDS.get(type(wanted), f"a {type(wanted).__name__}")


def _same_kind(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, float):
        return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf
    return type(value) is type(wanted)
