"""The program of a module in its own process: ``python -m penstock.gateway.child --control FD_OR_PATH --class P.M:C``.

It gets control messages from the gateway (``control.py``) and messages over two shared-memory channels, ``URI.in`` and
``URI.out``; each is a frame: the source's number, then the byte form. One thread does everything, so ``receive`` is
serial; a module's own threads may publish. If the gateway has passed a shared counter with CREATE, it always holds the
number of messages handled, so that the gateway knows which message was interrupted if this process dies. The process
ends with DESTROY, when the gateway closes the control socket, and (by a native thread, after a grace period) even if
the module never releases the interpreter.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import logging
import mmap
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from penstock import address
from penstock._core.gateway import GatewayMessage, exit_when_hung_up
from penstock.errors import ClosedError, ProtocolError, StateError
from penstock.gateway import carriage, control
from penstock.gateway.configuration import imported
from penstock.gateway.errors import reason_of
from penstock.gateway.loaders import of_class, parsed
from penstock.gateway.module import Module, refuse_generators
from penstock.gateway.place import Place

BATCH = 256
GRACE_MS = 3000
EXIT_ON_FAILURE = 70  # as in process.py, which is not imported here
log = logging.getLogger("penstock.gateway.child")


class RemoteBroker:
    """The broker as the module in this process sees it: what it publishes goes to the gateway."""

    def __init__(self, uri: str, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._publisher = address.publisher(f"{uri}.out", overflow="block", slot_size=slot_bytes)
        # a handle may be used by one thread at a time, and a module may have several threads
        self._lock = threading.Lock()

    def publish(self, _: Any, message: GatewayMessage) -> None:
        """Send to the gateway; waits while the channel is full."""
        frames = carriage.framed((message,), self._slot_bytes)
        with self._lock:
            if len(frames) == 1:
                self._publisher.publish(frames[0])
            else:
                self._publisher.publish_many(frames)

    def publish_output(self, source: Any, output: str, message: GatewayMessage) -> None:
        """Send to the gateway, which finds the output in a property."""
        self.publish(source, message.with_properties({**message.properties, carriage.OUTPUT: output}))

    def mark(self, _: Any, __: int = 0, ___: Any = None) -> Any:
        """Only the gateway knows what was handled."""
        raise StateError("a module in its own process cannot know what was handled; run it in the gateway's")

    def linked(self, _: Any) -> bool:
        """Always True: only the gateway knows, and a module in its own process cannot be durable."""
        return True

    def note_refused(self, _: Any) -> None:
        """Only the gateway knows what was refused, and notes it itself."""

    def close(self) -> None:
        """Give the channel back."""
        self._publisher.close()


class Child:
    """One module and its three connections."""

    def __init__(
        self, connection: socket.socket, kind: str, name: str, exit_on_failure: bool, max_message_bytes: int
    ) -> None:
        self.connection = connection
        self.kind = kind
        self.name = name
        self.exit_on_failure = exit_on_failure
        self.slot_bytes = max_message_bytes + carriage.FRAME_HEAD_SIZE
        self.unframer = carriage.Unframer()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.decoder = control.Decoder()
        # Messages handled, messages begun, failures reported, whether to leave the rest, messages expired, up to which
        # message each is handled by itself; shared with the gateway if it has passed a counter.
        self.handled: Any = [0, 0, 0, 0, 0, 0]
        self.module: Any = None
        self.step = control.Step.CREATE  # what it is doing, or did last, of what the gateway asked for
        self.started = False
        self.broker: RemoteBroker | None = None
        self.subscriber: Any = None

    def serve(self) -> int:
        """Serve until DESTROY or the end of the gateway; returns the exit status."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        while True:
            if self.started and self.work():
                timeout_ms = 0
            else:
                timeout_ms = None
                if self.started:
                    poll.register(self.subscriber.fileno(), select.POLLIN)
            if timeout_ms is None and self.loop is not None:
                self.run_loop()
            ready = poll.poll(timeout_ms)
            if any(number == self.connection.fileno() for number, _ in ready):
                status = self.obey()
                if status is not None:
                    return status

    def run_loop(self) -> None:
        """Let the module's tasks run until something comes."""
        assert self.loop is not None
        came = asyncio.Event()
        watched = [self.connection.fileno(), *([self.subscriber.fileno()] if self.started else [])]
        for number in watched:
            self.loop.add_reader(number, came.set)
        try:
            self.loop.run_until_complete(came.wait())
        finally:
            for number in watched:
                self.loop.remove_reader(number)

    def obey(self) -> int | None:
        """Carry out the gateway's control messages; returns the exit status if that was the last one."""
        data, descriptors, _, _ = socket.recv_fds(self.connection, 65536, 1)
        for number in descriptors:
            # Single stores, so that a death cannot leave a half-written value.
            self.handled = memoryview(mmap.mmap(number, mmap.PAGESIZE)).cast("Q")
            os.close(number)
        if not data:
            self.destroy()
            return 1
        for message in self.decoder.feed(data):
            if isinstance(message, control.Create):
                self.attempt(control.Step.CREATE, self.create, message)
            elif isinstance(message, control.Start):
                self.attempt(control.Step.START, self.call, getattr(self.module, "start", lambda: None))
                self.started = True  # messages that arrived earlier have waited for this
            elif isinstance(message, control.Destroy):
                while self.module is not None and not self.handled[3] and self.work():
                    pass
                self.destroy()
                return 0
        return None

    def attempt(self, step: control.Step, function: Any, *arguments: Any) -> None:
        """Run a step and report the result. The gateway decides what to do about a failure."""
        self.step = step
        try:
            function(*arguments)
        except Exception as error:
            # the gateway logs it
            log.debug("module %r: %s raised", self.name, self.step.name.lower(), exc_info=True)
            missing = isinstance(error.__context__, ModuleNotFoundError)
            status = control.Status.MISSING if missing else control.Status.ERROR
            in_file = self.step in (control.Step.LOAD, control.Step.PARSE)  # the gateway adds the path
            reason = str(error) if in_file else reason_of(error)
            self.reply(control.Reply(status, reason=reason, step=self.step))
        else:
            self.reply(control.Reply(control.Status.OK, step=self.step))

    def reply(self, reply: control.Reply) -> None:
        """Send a reply to the gateway; if the gateway is gone, the loop notices that by itself."""
        try:
            self.connection.sendall(control.encode(reply))
        except OSError:
            log.debug("the gateway has gone")

    def create(self, message: control.Create) -> None:
        """Join the channels, then load the class, parse its args and create the module."""
        self.subscriber = address.subscriber(f"{message.uri}.in", overflow="block")
        self.broker = RemoteBroker(message.uri, self.slot_bytes)
        self.step = control.Step.LOAD
        place = Place(self.kind, "")
        build, parse = of_class(imported(place), place)
        self.step = control.Step.PARSE
        configuration = parsed(parse, Place(json.loads(message.args) if message.args else None, ""))
        self.step = control.Step.CREATE
        self.module = build()
        refuse_generators(self.module)
        self.module.name = self.name
        if isinstance(self.module, Module):  # a subclass's create may not call Module.create
            Module.create(self.module, self.broker, configuration)
        if hasattr(self.module, "create"):
            self.module.create(self.broker, configuration)

    def work(self) -> bool:
        """Handle the messages that have arrived; returns whether there were any."""
        try:
            batch = self.subscriber.read_many(BATCH, 0)
        except ClosedError:
            return False
        if not len(batch):
            return False
        messages = self.unframer.messages(batch, self.skipped)
        del batch  # release its slots
        if hasattr(self.module, "receive_many"):
            # Up to the last one that is tried again, handle messages one by one: those that are tried again may arrive
            # together every time, and one that always fails would then prevent all others from being handled.
            alone = min(max(0, self.handled[5] - self.handled[0]), len(messages))
            self.receive_all([[message] for message in messages[:alone]], self.module.receive_many, 1)
            if alone < len(messages):
                self.receive_all([messages[alone:]], self.module.receive_many, len(messages) - alone)
        else:
            self.receive_all(messages, self.module.receive, 1)
        return True

    def receive_all(self, all_: Sequence[Any], receive: Callable[[Any], Any], step: int) -> None:
        """Pass each item, which stands for ``step`` messages, to the module."""
        handled, count = self.handled, self.handled[0]
        for what in all_:
            if handled[3]:
                return  # the rest is for the next process
            handled[1] = count + step  # from here on it is in hand
            try:
                young, expired = self.young(what) if self.unframer.expiries else (what, 0)
                if expired < step:
                    result = receive(young)
                    if result is not None:
                        self.finish(result)
                if expired:
                    handled[4] += expired
            except Exception as error:
                reason = reason_of(error)
                self.failed(control.Reply(control.Status.ERROR, count, step, reason, control.Step.RECEIVE))
                # set before the message counts as handled, so that whoever sees it handled also sees the failure
                handled[2] += 1
                handled[0] = count + step
                if self.exit_on_failure:
                    os._exit(EXIT_ON_FAILURE)
            count += step
            handled[0] = count

    def young(self, what: Any) -> tuple[Any, int]:
        """The messages that have not expired, and how many have."""
        expiries, now_ns = self.unframer.expiries, time.time_ns()
        if isinstance(what, GatewayMessage):
            return what, expiries.get(id(what), now_ns) < now_ns
        kept = [message for message in what if expiries.get(id(message), now_ns) >= now_ns]
        return kept, len(what) - len(kept)

    def skipped(self, error: ProtocolError) -> None:
        """Report an item that is not a message."""
        log.error("module %r: skipped: %s", self.name, error)

    def failed(self, reply: control.Reply) -> None:
        """Report a failure in receive."""
        log.debug("module %r: receive raised", self.name, exc_info=True)  # the gateway tells of it
        self.reply(reply)

    def call(self, function: Any, *arguments: Any) -> None:
        """Call a step; if it returns an awaitable, await it in the process's event loop."""
        self.finish(function(*arguments))

    def finish(self, result: Any) -> None:
        """Await the result of a step, if it can be awaited."""
        if inspect.isawaitable(result):
            if self.loop is None:
                self.loop = asyncio.new_event_loop()
            self.loop.run_until_complete(result)

    def destroy(self) -> None:
        """Stop, destroy, close; a failure in one does not prevent the next."""
        for step in (control.Step.STOP, control.Step.DESTROY):
            if self.module is not None:
                self.attempt(step, self.call, getattr(self.module, step.name.lower(), lambda: None))
        for handle in (self.subscriber, self.broker):
            if handle is not None:
                handle.close()


def connect(place: str, timeout_s: float = 30.0) -> socket.socket:
    """The control connection: a descriptor's number, or a path to connect to."""
    if place.isdigit():
        return socket.socket(fileno=int(place))
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    connection.connect(place)
    connection.settimeout(None)
    return connection


def main() -> int:
    """Parse the command line, serve, leave."""
    parser = argparse.ArgumentParser(prog="penstock.gateway.child", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--control", required=True, help="descriptor or path of the control socket")
    parser.add_argument("--class", dest="kind", required=True, help="package.module:Class")
    parser.add_argument("--name", default="module")
    parser.add_argument("--exit-on-failure", action="store_true", help="end when receive raises, to be started again")
    parser.add_argument("--max-message-bytes", type=int, default=4096, help="larger ones go to the gateway in pieces")
    given = parser.parse_args()
    # Ctrl-C reaches the gateway too, which then ends this process in order
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the gateway starts this process with it blocked
    logging.basicConfig(format="%(name)s: %(message)s")
    if os.environ.get("PENSTOCK_DEBUG"):  # print tracebacks of failures
        log.setLevel(logging.DEBUG)
    connection = connect(given.control)
    exit_when_hung_up(connection.fileno(), GRACE_MS)
    status = Child(connection, given.kind, given.name, given.exit_on_failure, given.max_message_bytes).serve()
    sys.stdout.flush()
    return status


if __name__ == "__main__":
    sys.exit(main())
