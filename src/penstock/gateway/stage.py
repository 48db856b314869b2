"""A gateway on one thread, in the time of a virtual clock: the same input gives the same output, byte for byte.

Rules

- Messages are handled one by one in the order in which they were published; of one message's sinks, the one of the
  lower ``queue.priority`` comes first, then the one that was linked first. Time stands still meanwhile, so no queue
  fills and nothing waits too long: ``queue``, ``ttl_s``, ``max_messages``, ``max_bytes``, ``buffer`` change nothing.
- Between two inputs the clock goes from timer to timer: ticks of sources, tries of failed messages (``backoff_s``),
  restarts. What is due at the moment of an input comes before it.
- The recording replaces everything that does I/O: addresses are not opened, and modules with ``reaches_outside`` are
  not created. Messages for them are passed to ``on_left``. A sink that cannot read the type of a source's first message
  is refused, as in a gateway; a later type that it cannot read is noted.
- While a step that is ``async`` waits (``asyncio.sleep``, in recorded time), its module receives nothing and the others
  go on. At the end nothing waits: sleeps of unfinished steps, and of ``stop`` and ``destroy``, take no time.
- Modules in their own processes and native ones are refused: their order of events is not reproducible.
- The promise holds for modules that use messages, ``self.clock`` (or ``penstock.clock``) and the seed, and that keep no
  state outside of themselves.

One thread makes and runs a stage; a ``Source`` that runs on it has a thread of the clock's.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock import address
from penstock._core.gateway import GatewayMessage, Port
from penstock.bus import Bus, QueueSubscriber
from penstock.clock import GivenUpError, Timer, VirtualClock, in_order, note_failure, refuse_if_virtual
from penstock.errors import InvalidArgument, PenstockError, RefusedError, StateError
from penstock.gateway import carriage
from penstock.gateway.configuration import Configuration, ModuleEntry, is_address
from penstock.gateway.errors import AddLinkError, reason_of
from penstock.gateway.filters import Predicate, any_of
from penstock.gateway.keeper import UNLESS_CHOSEN
from penstock.gateway.links import Delivery, Link, LinkOptions, LinkTable, drain_order
from penstock.gateway.loaders import Recipe, recipe
from penstock.gateway.module import check_types, published_values, typed
from penstock.gateway.supervision import Restart, Supervisor
from penstock.gateway.virtual_loop import StageLoop
from penstock.gateway.worker import ERROR, backoff_s
from penstock.throttle import Throttle
from penstock.types import Schema
from penstock.types.fields import Reader, reader_of

MAX_AT_ONCE = 1_000_000  # messages and timers at one moment; more than that is a loop
# What a step of a module may raise without ending the replay. Ctrl-C is no failure of a module.
FAILURES = (Exception, SystemExit, GeneratorExit, asyncio.CancelledError)
OURS = f"{Path(__file__).parents[1]}{os.sep}"  # Penstock's own files
log = logging.getLogger("penstock.gateway")

#: Called with a message: (the name of the module or address, or NAME.OUTPUT; the message).
Told = Callable[[str, GatewayMessage], object]


@dataclass(frozen=True, slots=True)
class Cast:
    """Which modules run in a replay of a gateway, and which are replaced by the recording."""

    made: Mapping[str, Recipe]  # modules that run
    outside: tuple[str, ...]  # addresses and modules that the recording replaces


def cast(configuration: Configuration, inputs: Iterable[str] = ()) -> Cast:
    """Load every module's class and decide which ones run; ``RefusedError`` names those that cannot be run
    reproducibly. ``inputs`` are modules that the recording replaces in any case.
    """
    given, made, outside, refused = set(inputs), {}, list(configuration.addresses), []
    loaders = {loader.name: loader for loader in configuration.loaders}
    for entry in configuration.modules:
        kind = loaders[entry.loader].kind if entry.loader in loaders else entry.loader
        if entry.name in given:
            outside.append(entry.name)
        elif kind != "python":
            refused.append(f"{entry.name} ({kind})")
        else:
            found = recipe(entry, loaders)
            if getattr(found.build, "reaches_outside", False):
                outside.append(entry.name)
            else:
                made[entry.name] = found
    if refused:
        raise RefusedError(
            f"{', '.join(refused)}: modules in processes of their own and native ones cannot be replayed the same way "
            "twice; let the recording stand for them (--map TOPIC=MODULE)"
        )
    return Cast(made, tuple(outside))


@dataclass(slots=True, eq=False)
class Node:
    """A module or address, its outputs and the links that lead to it."""

    name: str
    recipe: Recipe | None  # None: outside
    supervisor: Supervisor
    keeps_state: bool  # a failure in receive costs only the message
    priority: int = 0
    durable: bool = False
    module: Any = None
    ports: dict[str, Port] = field(default_factory=dict)  # by the name of the output; "": its own
    held: deque[tuple[GatewayMessage, LinkOptions, int]] = field(default_factory=deque)  # while it ``waits``
    down: bool = False  # it failed, and will be restarted
    blocked: bool = False  # a failed message is tried again before the later ones
    task: asyncio.Task[None] | None = None  # the async step that has not ended yet
    dead: bool = False
    tried: int = 0  # messages that wait for another try
    schema: Schema | None = None  # of a node that the recording replaces: the type of its last message
    read: Reader | None = None  # and how to decode it
    compared: set[str] = field(default_factory=set)  # types that its links were compared with

    @property
    def written(self) -> Schema | None:
        """The type that the module publishes, if it declares one."""
        return None if self.recipe is None else typed(self.recipe.build, "output_type")

    @property
    def reads(self) -> Schema | None:
        """The type that the module receives, if it declares one."""
        return None if self.recipe is None else typed(self.recipe.build, "input_type")

    def value_of(self, message: Any) -> Any:
        """The value of the last recorded message; ``ValueError`` if it cannot be decoded."""
        return json.loads(bytes(message)) if self.read is None else self.read(message)

    @property
    def waits(self) -> bool:
        """Whether it cannot receive now."""
        return self.down or self.blocked or self.task is not None


@dataclass(slots=True)
class Failure:
    """How often a module failed in a step, and its first error. ``handled``: the message is tried again or goes to an
    error link, or the module is restarted.
    """

    name: str
    step: str
    error: str
    handled: bool
    count: int = 0


def noted(clock: VirtualClock, words: Callable[[BaseException], str] = reason_of) -> list[Failure]:
    """The failures in the clock's threads and in handlers on buses."""
    found: dict[str, Failure] = {}
    for where, error in clock.failures:
        found.setdefault(where, Failure(where, "run", words(error), handled=False)).count += 1
    return list(found.values())


class Stage:
    """Modules joined by links, as an ``Outlet`` for each."""

    def __init__(
        self,
        configuration: Configuration,
        roles: Cast,
        clock: VirtualClock,
        *,
        on_published: Told = lambda *_: None,
        on_left: Told = lambda *_: None,
    ) -> None:
        """The clock must be in use (``penstock.clock.using``). ``on_published`` is called with everything that modules
        publish, except inputs; ``on_left`` with the messages for addresses and modules that the recording replaces.
        """
        self._clock = clock
        self._on_published, self._on_left = on_published, on_left
        # messages to handle, with the tries so far
        self._ready: deque[tuple[Node, GatewayMessage, LinkOptions, int]] = deque()
        # nodes that can receive again; the messages they hold are older than those in ``_ready``
        self._released: deque[Node] = deque()
        self._bus = Bus("replay", mode="direct")
        self._stamped = QueueSubscriber(name="replay", depth=1, max_public_id=65535)
        self._bus.add(self._stamped)
        # The method of the class, because under a virtual clock the instance's own method checks a time-out, which is
        # slower.
        self._take = functools.partial(QueueSubscriber.read_many, self._stamped, 1, 0)
        self._sources: dict[int, tuple[Node, str]] = {}  # by the id of the port
        self._routes: dict[int, list[tuple[Node, Predicate | None, LinkOptions]]] = {}
        self._at_once = 0
        self.running = ""  #: the module that is in one of its steps, or was last; empty: a timer's function
        self._thread = threading.get_ident()
        self._loop: StageLoop | None = None
        self._turn_timer: Timer | None = None
        self._throttle = Throttle(log)
        self._failures: dict[tuple[str, str, bool], Failure] = {}
        entries = {entry.name: entry for entry in configuration.modules}
        names = [*entries, *configuration.addresses]
        self.nodes = {name: self._node(name, entries.get(name), roles) for name in names}
        self._table = _table(names, configuration.links)
        self._links = configuration.links
        self._notes: list[str] = []
        for link in self._links:
            if (source := self.nodes.get(self._table.owner(link.source))) and not link.source.endswith(f".{ERROR}"):
                check_types(link, source.written, self.nodes[link.sink].reads)
        self._by_module: dict[int, Node] = {}

    def _node(self, name: str, entry: ModuleEntry | None, roles: Cast) -> Node:
        restart = entry.restart if entry is not None else None
        made = roles.made.get(name)
        if restart is None and made is not None and getattr(made.build, "restarts", False):
            supervisor = Supervisor(UNLESS_CHOSEN)
        else:
            supervisor = Supervisor(restart or Restart())
        node = Node(name, made, supervisor, restart is None)
        node.priority = entry.queue.priority if entry is not None else 0
        if is_address(name):
            parsed = address.parse(name)
            node.durable = parsed.scheme == "broker" and "queue" in parsed.options and "ack" not in parsed.options
        elif made is not None:
            node.durable = bool(getattr(made.build, "durable", False))
        return node

    # ---- life

    def start(self) -> None:
        """Create and start the modules in the order of the file."""
        for node in self.nodes.values():
            self._port(node, "")
            if node.recipe is not None:
                self._adopt(node)
        for node in self.nodes.values():
            if node.module is not None:
                self._begin(node, "start", lambda: None)
        self._run()

    def put(self, source: str, message: Any, ordinal: int, schema: Schema | None = None) -> None:
        """Publish a recorded message of ``source``, after everything that is due before it, and handle it with all its
        effects. ``schema`` is its type, if that is known.
        """
        self.advance(message.timestamp_ns)
        node = self.nodes[source]
        if schema is not node.schema:
            node.schema, node.read = schema, None if schema is None else _reader_of(schema.text)
            if schema is not None and schema.text not in node.compared:
                self._compare(node, schema)
        port = node.ports[""]
        port.published = max(port.published, ordinal - 1)
        self._send(port, carriage.arrived(message))
        self._run()

    def _compare(self, node: Node, schema: Schema) -> None:
        """``AddLinkError`` where a sink of ``node`` cannot read its first type; a word where it cannot read a later
        one, or where a filter names fields that there are not."""
        for link in self._links:
            if link.source != node.name:
                continue
            try:
                check_types(link, schema, self.nodes[link.sink].reads)
            except AddLinkError as error:
                if not node.compared:
                    raise
                self._notes.append(f"later {error}")
            if link.filter is not None:
                try:
                    link.filter.check(schema)
                except InvalidArgument as error:
                    self._notes.append(f"link {link}: filter {link.filter.where!r}: {error}")
        node.compared.add(schema.text)

    def advance(self, time_ns: int) -> None:
        """Advance the clock to a moment, and handle what becomes due on the way."""
        until = self._clock.seconds_at(time_ns)
        while self._fire(until):
            self._run()
        self._clock.set_time_ns(time_ns)
        self._at_once = 0

    def _fire(self, until: float) -> bool:
        before, self.running = self._clock.now(), ""
        try:
            fired = self._clock.fire_next(until)
        except GivenUpError:  # a source that holds up all others
            raise
        except FAILURES as error:  # a real gateway would log it and go on
            fired = True
            note_failure(f"a timer's function ({_last_line(error)})", error)
            log.debug("where the timer's function failed", exc_info=error)
        if self._clock.now() != before:
            self._at_once = 0
        self._count()
        return fired

    def _count(self) -> None:
        self._clock.check()
        self._at_once += 1
        if self._at_once > MAX_AT_ONCE:
            raise StateError(
                f"more than {MAX_AT_ONCE} messages and timers at one moment: modules go round in a loop "
                f"({self._clock.place()})"
            )

    def stop(self) -> None:
        """Stop and drain in link order, then destroy."""
        for group in drain_order(self._table.graph()):
            self._settle([self.nodes[name] for name in group])
            for name in group:
                self._step(self.nodes[name], "stop")
            self._run()
            for name in group:
                self._step(self.nodes[name], "end")
            self._run()
        self.close()

    def _settle(self, nodes: list[Node]) -> None:
        """Run the async steps of these modules to their end, and handle the messages that wait for them."""
        self._run()
        while tasks := [node.task for node in nodes if node.task is not None]:
            try:
                self._event_loop().hurry(asyncio.wait(tasks))
            except StateError:
                return  # they are reported as waiting
            self._run()

    def close(self) -> None:
        """Destroy every module."""
        for node in self.nodes.values():
            self._step(node, "destroy")
            node.module = None
        self._by_module.clear()  # so that a thread that was given up cannot publish
        self._bus.close()
        if self._loop is not None:
            self._loop.end()
            self._loop = None

    def _step(self, node: Node, step: str) -> None:
        if node.module is None:
            return
        self.running = node.name
        try:
            function = getattr(node.module, step, None)
            result = function() if function is not None else None
            if inspect.isawaitable(result):
                self._event_loop().hurry(_outcome(result))
        except FAILURES as error:
            self._tell(node, step, error)

    def _begin(self, node: Node, step: str, begun: Callable[[], object]) -> None:
        """Start a module; ``begun`` is called when that has ended well."""

        def ended(error: BaseException | None) -> None:
            if error is None:
                begun()
            else:
                self._failed(node, step, error)

        self._perform(node, getattr(node.module, "start", None), (), ended)

    def _perform(
        self,
        node: Node,
        function: Callable[..., Any] | None,
        arguments: tuple[Any, ...],
        ended: Callable[[BaseException | None], None],
    ) -> None:
        """Call a step; ``ended`` is called with its error or None, at once or when the returned awaitable is done."""
        self.running = node.name
        try:
            result = function(*arguments) if function is not None else None
        except FAILURES as error:
            ended(error)
            return
        if not inspect.isawaitable(result):
            ended(None)
            return
        module = node.module

        async def awaited() -> None:
            error: BaseException | None = None
            try:
                await result
            except FAILURES as found:
                error = found
            if node.module is module:  # otherwise the stage was closed meanwhile
                node.task = None
                ended(error)
                self._release(node)

        node.task = self._event_loop().create_task(awaited())
        self._turn()

    def _event_loop(self) -> StageLoop:
        if self._loop is None:
            self._loop = StageLoop(self._clock)
        return self._loop

    def _turn(self) -> None:
        """Run the async steps until all of them wait; the clock calls this again when the first wait is over."""
        assert self._loop is not None
        due_s = self._loop.run_until_idle()
        if self._turn_timer is not None:
            self._turn_timer.cancel()
        self._turn_timer = None if due_s is None else self._clock.call_at(due_s, self._turn)

    def _adopt(self, node: Node) -> None:
        assert node.recipe is not None
        self.running = node.name
        module = node.recipe.make(self)
        if node.module is not None:
            del self._by_module[id(node.module)]
        node.module, node.task = module, None
        self._by_module[id(module)] = node
        if hasattr(module, "on_failure"):
            module.on_failure = functools.partial(self._failed, node, "run")

    # ---- as modules see it (``Outlet``)

    def publish(self, source: Any, message: GatewayMessage) -> None:
        """Send to every sink that is linked to ``source``."""
        self._publish(self._owner(source), "", message)

    def publish_output(self, source: Any, output: str, message: GatewayMessage) -> None:
        """Send to every sink that is linked to an output of ``source``."""
        self._publish(self._owner(source), output, message)

    def mark(self, source: Any, since: int = 0, after: Any = None) -> Any:
        """For durable sources: on a stage everything is handled before the source can ask."""
        return _Handled()

    def linked(self, source: Any) -> bool:
        """For sources that wait for their first link: on a stage all links exist from the beginning."""
        return True

    def note_refused(self, source: Any) -> None:
        """Does nothing: no sink refuses a message on a stage."""

    def _owner(self, source: Any) -> Node:
        if not in_order(self._thread):
            refuse_if_virtual(f"a message of {getattr(source, 'name', source)!r} from a thread of its own")
        node = self._by_module.get(id(source))
        if node is None:
            name = getattr(source, "name", "") or type(source).__name__
            raise StateError(f"module {name!r} publishes before it was created, or after it ended or was made anew")
        return node

    def _port(self, node: Node, output: str) -> Port:
        """The port of a node's output; its sinks are looked up once."""
        port = node.ports.get(output)
        if port is not None:
            return port
        name = f"{node.name}.{output}" if output else node.name
        port = Port(self._bus, len(self._sources) + 1, address.without_secrets(name))
        self._sources[port.id] = node, name
        found = []
        for sink, filters in self._table.sinks(name).items():
            read: Reader | None = node.value_of if node.recipe is None else published_values(node.recipe.build)
            read = None if output == ERROR else read
            compiled = [one.compile(self._clock.now, read) for one in filters if not one.empty]
            accepts = any_of(compiled) if compiled and len(compiled) == len(filters) else None
            options = self._table.options(name, sink).chosen(node.durable)
            found.append((self.nodes[sink], accepts, options))
        self._routes[port.id] = sorted(found, key=lambda route: route[0].priority)
        self._stamped.subscribe(port.id)
        node.ports[output] = port
        return port

    def _publish(self, node: Node, output: str, message: GatewayMessage) -> None:
        port = self._port(node, output)
        self._on_published(self._sources[port.id][1], self._send(port, message))

    def _send(self, port: Port, message: GatewayMessage) -> GatewayMessage:
        """Stamp a message and queue it for every sink whose filter accepts it."""
        port.publish(message)
        stamped = self._take()[0]
        assert isinstance(stamped, GatewayMessage)
        self._route(port.id, stamped)
        return stamped

    def _route(self, number: int, message: GatewayMessage) -> None:
        node, _ = self._sources[number]
        for sink, accepts, options in self._routes[number]:
            try:
                wanted = accepts is None or accepts(message)
            except Exception as error:
                self._tell(node, "filter", error)
                continue
            if wanted:
                self._ready.append((sink, message, options, 0))

    # ---- messages

    def _run(self) -> None:
        while self._released or self._ready or (self._loop is not None and self._loop.woken):
            if self._released:
                self._handle_held(self._released[0])
                continue
            self._count()
            if not self._ready:
                self._turn()
                continue
            node, message, options, tries = self._ready.popleft()
            if node.recipe is None:
                self._on_left(node.name, message)
            elif node.waits:
                node.held.append((message, options, tries))
            else:
                self._receive(node, message, options, tries)

    def _handle_held(self, node: Node) -> None:
        if node.waits or not node.held:
            self._released.popleft()
        else:
            self._count()
            self._receive(node, *node.held.popleft())

    def _receive(self, node: Node, message: GatewayMessage, options: LinkOptions, tries: int) -> None:
        if node.dead or node.module is None:
            return
        many = getattr(node.module, "receive_many", None)

        def ended(error: BaseException | None) -> None:
            if error is not None:
                self._message_failed(node, message, options, tries + 1, error)

        if many is not None:
            self._perform(node, many, ([message],), ended)
        else:
            self._perform(node, node.module.receive, (message,), ended)

    def _message_failed(
        self, node: Node, message: GatewayMessage, options: LinkOptions, tries: int, error: BaseException
    ) -> None:
        if options.delivery is Delivery.AT_LEAST_ONCE and (options.max_tries is None or tries < options.max_tries):
            node.blocked = node.blocked or options.ordered
            node.tried += 1
            again = functools.partial(self._retry_later, node, message, options, tries)
            self._clock.call_at(self._clock.now() + backoff_s(options, tries), again)
            handled = True
        else:
            handled = self._give_up(node, message, tries, error)
        self._tell(node, "receive", error, handled)
        if not node.keeps_state:
            self._plan_restart(node, "receive")

    def _retry_later(self, node: Node, message: GatewayMessage, options: LinkOptions, tries: int) -> None:
        node.tried -= 1
        if options.ordered:
            node.blocked = False
        if node.waits:
            node.held.appendleft((message, options, tries))
        else:
            self._receive(node, message, options, tries)
            self._release(node)

    def _release(self, node: Node) -> None:
        """Let the node receive again: the messages that it holds come before all others, as long as it does not have to
        wait again.
        """
        if node.held and not node.waits:
            self._released.appendleft(node)

    def _give_up(self, node: Node, message: GatewayMessage, tries: int, error: BaseException) -> bool:
        """Send a dead letter to the output ``error``; if nothing is linked to it, the message is lost."""
        port = self._port(node, ERROR)
        if not self._routes[port.id]:
            return False
        reason = {
            "error": reason_of(error),
            "error-module": node.name,
            "error-source": str(message.channel),
            "error-tries": str(tries),
        }
        self._publish(node, ERROR, message.with_properties({**message.properties, **reason}))
        return True

    # ---- failures

    @property
    def failures(self) -> list[Failure]:
        """The failures so far, by module and step."""
        return [*self._failures.values(), *noted(self._clock)]

    @property
    def waiting(self) -> dict[str, int]:
        """How many messages were not handled so far: their module was down, or they will be tried again."""
        counts = {name: len(node.held) + node.tried + (node.task is not None) for name, node in self.nodes.items()}
        return {address.without_secrets(name): count for name, count in counts.items() if count}

    @property
    def notes(self) -> list[str]:
        """Recorded types that sinks or filters cannot read."""
        return self._notes

    def _tell(self, node: Node, step: str, error: BaseException, handled: bool = False) -> None:
        shown, reason = address.without_secrets(node.name), reason_of(error)
        failure = self._failures.setdefault((node.name, step, handled), Failure(shown, step, reason, handled))
        failure.count += 1
        if self._throttle.error("module %r failed in %s: %s", shown, step, reason):
            log.debug("module %r: where it failed", shown, exc_info=error)

    def _failed(self, node: Node, step: str, error: BaseException) -> bool:
        """Handle a failure after which the policy may restart the module; its messages wait meanwhile."""
        self._tell(node, step, error, self._plan_restart(node, step))
        return True

    def _plan_restart(self, node: Node, step: str) -> bool:
        """Schedule a restart by the policy; returns whether there will be one."""
        delay_s = node.supervisor.failed(self._clock.now())
        if delay_s is None:
            node.dead = node.dead or step == "start"
            return False
        node.down = True
        self._clock.call_at(self._clock.now() + delay_s, functools.partial(self._make_anew, node))
        return True

    def _make_anew(self, node: Node) -> None:
        if node.module is None:
            return
        self._step(node, "destroy")
        node.down = False
        try:
            self._adopt(node)
        except FAILURES as error:
            self._failed(node, "restart", error)
            return
        self._begin(node, "restart", lambda: self._restarted(node))

    def _restarted(self, node: Node) -> None:
        node.supervisor.restarted()
        self._release(node)


@functools.lru_cache(256)
def _reader_of(text: str) -> Reader | None:
    """What gives the values of a schema; None where it cannot be read here."""
    try:
        return reader_of(Schema.parse(text))
    except (PenstockError, ModuleNotFoundError):
        return None


class _Handled:
    """A mark whose messages count as handled."""

    lost = stalled = False

    def handled(self) -> bool:
        return True


def _table(names: Iterable[str], links: Iterable[Link]) -> LinkTable:
    table = LinkTable()
    for name in names:
        table.add_name(name)
    for link in links:
        table.add(link)
    for link in links:
        if link.error is not None and (f"{link.sink}.{ERROR}", link.error) not in table:
            table.add(Link(f"{link.sink}.{ERROR}", link.error))
    return table


def _last_line(error: BaseException) -> str:
    """The source line where it was raised, or the last one before Penstock's own."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((one for one in reversed(frames) if not one.filename.startswith(OURS)), frames[-1])
    return f"{Path(frame.filename).name}:{frame.lineno}"


async def _outcome(awaitable: Any) -> Any:
    return await awaitable
