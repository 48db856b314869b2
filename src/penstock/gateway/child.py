"""The program of a module in its own process: ``python -m penstock.gateway.child --control FD_OR_PATH --class P.M:C``.

It takes control messages from the gateway (``control.py``) and messages over two shared-memory channels, ``URI.in`` and
``URI.out``; each is a frame: the source's number, then the byte form. One thread does everything, so ``receive`` is
serial; a module's own threads may publish. Where the gateway lent a counter with CREATE, the number of messages handled
stands in it at all times, so that the gateway knows what a death interrupted.

The process ends with DESTROY, when the gateway's end of the control socket closes, and (by a native thread, after a
grace period) even when the module never gives the interpreter back.
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
from penstock.gateway.module import Module, refuse_generators
from penstock.gateway.place import Place

BATCH = 256
GRACE_MS = 3000
EXIT_ON_FAILURE = 70  # the same as in process.py, which this does not load
log = logging.getLogger("penstock.gateway.child")


class RemoteBroker:
    """The broker as the module in this process sees it: what it publishes goes to the gateway."""

    def __init__(self, uri: str, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._publisher = address.publisher(f"{uri}.out", overflow="block", slot_size=slot_bytes)
        self._lock = threading.Lock()  # a handle is one thread's at a time, a module may have several

    def publish(self, _: Any, message: GatewayMessage) -> None:
        """Send to the gateway; waits while it is behind."""
        frames = carriage.framed((message,), self._slot_bytes)
        with self._lock:
            if len(frames) == 1:
                self._publisher.publish(frames[0])
            else:
                self._publisher.publish_many(frames)

    def publish_output(self, source: Any, output: str, message: GatewayMessage) -> None:
        """Send to the gateway, which knows the output by a property."""
        self.publish(source, message.with_properties({**message.properties, carriage.OUTPUT: output}))

    def mark(self, _: Any, __: int = 0, ___: Any = None) -> Any:
        """Only the gateway knows what was handled."""
        raise StateError("a module in its own process cannot know what was handled; run it in the gateway's")

    def linked(self, _: Any) -> bool:
        """Only the gateway knows; nobody can be durable here."""
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
        self.alone = 0  # so many more messages are handed over one by one
        self.exit_on_failure = exit_on_failure
        self.slot_bytes = max_message_bytes + carriage.FRAME_HEAD_SIZE
        self.unframer = carriage.Unframer()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.decoder = control.Decoder()
        # Handled, begun, failures told, whether to leave the rest, and expired; or the counters that the gateway lent.
        self.handled: Any = [0, 0, 0, 0, 0]
        self.module: Any = None
        self.started = False
        self.broker: RemoteBroker | None = None
        self.subscriber: Any = None

    def serve(self) -> int:
        """Until DESTROY or the end of the gateway; gives the exit status."""
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
        """Do what the gateway says; the exit status when that was the last thing."""
        data, descriptors, _, _ = socket.recv_fds(self.connection, 65536, 1)
        for number in descriptors:
            # One store each time, which a death cannot tear.
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
                self.started = True  # messages that came before have waited for this
            elif isinstance(message, control.Destroy):
                while self.module is not None and not self.handled[3] and self.work():
                    pass
                self.destroy()
                return 0
        return None

    def attempt(self, step: control.Step, function: Any, *arguments: Any) -> None:
        """Take a step and say how it went. The gateway decides what is done about a failure."""
        try:
            function(*arguments)
        except Exception as error:
            log.debug("module %r: %s raised", self.name, step.name.lower(), exc_info=True)  # the gateway tells of it
            reason = reason_of(error)
            self.reply(control.Reply(control.Status.ERROR, reason=reason, step=step))
        else:
            self.reply(control.Reply(control.Status.OK, step=step))

    def reply(self, reply: control.Reply) -> None:
        """Tell the gateway; when it has gone, the loop finds out by itself."""
        try:
            self.connection.sendall(control.encode(reply))
        except OSError:
            log.debug("the gateway has gone")

    def create(self, message: control.Create) -> None:
        """Join the channels, then make the module."""
        self.subscriber = address.subscriber(f"{message.uri}.in", overflow="block")
        self.broker = RemoteBroker(message.uri, self.slot_bytes)
        args = json.loads(message.args) if message.args else None
        kind = imported(Place(self.kind, "class"))
        self.module = kind()
        refuse_generators(self.module)
        self.module.name = self.name
        configuration = kind.parse(args) if hasattr(kind, "parse") else args
        if isinstance(self.module, Module):  # its own create may leave out to call this one
            Module.create(self.module, self.broker, configuration)
        if hasattr(self.module, "create"):
            self.module.create(self.broker, configuration)

    def work(self) -> bool:
        """Handle what is there; whether there was anything."""
        try:
            batch = self.subscriber.read_many(BATCH, 0)
        except ClosedError:
            return False
        if not len(batch):
            return False
        messages = self.unframer.messages(batch, self.skipped)
        del batch  # its slots are free again
        if hasattr(self.module, "receive_many"):
            # After a failure one by one: messages that are tried again may come together every time, and one that
            # always fails would then keep all others from being handled.
            alone = min(self.alone, len(messages))
            self.receive_all([[message] for message in messages[:alone]], self.module.receive_many, 1)
            if alone < len(messages):
                self.receive_all([messages[alone:]], self.module.receive_many, len(messages) - alone)
        else:
            self.receive_all(messages, self.module.receive, 1)
        return True

    def receive_all(self, all_: Sequence[Any], receive: Callable[[Any], Any], step: int) -> None:
        """Hand over each of them, which stands for ``step`` messages."""
        handled, count = self.handled, self.handled[0]
        for what in all_:
            if handled[3]:
                return  # they are for the next process
            handled[1] = count + 1  # in hand from here on
            self.alone = max(0, self.alone - step)
            try:
                young, expired = self.young(what) if self.unframer.expiries else (what, 0)
                if expired < step:
                    result = receive(young)
                    if result is not None:
                        self.finish(result)
                if expired:
                    handled[4] += expired
            except Exception as error:
                self.alone = BATCH
                reason = reason_of(error)
                self.failed(control.Reply(control.Status.ERROR, count, step, reason, control.Step.RECEIVE))
                handled[2] += 1  # before it counts as handled: who sees that knows how many failures were told
                handled[0] = count + step
                if self.exit_on_failure:
                    os._exit(EXIT_ON_FAILURE)
            count += step
            handled[0] = count

    def young(self, what: Any) -> tuple[Any, int]:
        """What of a message, or of several, may still be handled, and how many may not."""
        expiries, now_ns = self.unframer.expiries, time.time_ns()
        if isinstance(what, GatewayMessage):
            return what, expiries.get(id(what), now_ns) < now_ns
        kept = [message for message in what if expiries.get(id(message), now_ns) >= now_ns]
        return kept, len(what) - len(kept)

    def skipped(self, error: ProtocolError) -> None:
        """Something came that is no message."""
        log.error("module %r: skipped: %s", self.name, error)

    def failed(self, reply: control.Reply) -> None:
        """Tell of a failure in receive."""
        log.debug("module %r: receive raised", self.name, exc_info=True)  # the gateway tells of it
        self.reply(reply)

    def call(self, function: Any, *arguments: Any) -> None:
        """Call a step; what it gives to await is awaited in the process's event loop."""
        self.finish(function(*arguments))

    def finish(self, result: Any) -> None:
        """What a step has given is awaited, where it can be."""
        if inspect.isawaitable(result):
            if self.loop is None:
                self.loop = asyncio.new_event_loop()
            self.loop.run_until_complete(result)

    def destroy(self) -> None:
        """Stop, destroy, close; as far as each goes."""
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the gateway, which then ends this in order
    logging.basicConfig(format="%(name)s: %(message)s")
    if os.environ.get("PENSTOCK_DEBUG"):  # where a failure was
        log.setLevel(logging.DEBUG)
    connection = connect(given.control)
    exit_when_hung_up(connection.fileno(), GRACE_MS)
    status = Child(connection, given.kind, given.name, given.exit_on_failure, given.max_message_bytes).serve()
    sys.stdout.flush()
    return status


if __name__ == "__main__":
    sys.exit(main())
