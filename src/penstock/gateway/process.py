"""The loader ``process``: a module in a process of its own, over the control protocol and shared memory.

In the gateway such a module is a ``ProcessModule``: ``receive_many`` writes frames to the channel ``URI.in``; a thread
of its own publishes what arrives on ``URI.out`` and watches the control socket. Every message sent is kept until the
counter that the child shares shows that it was handled. So when the child dies, that try has failed for the messages
that it had in hand (``in_hand``), and the others are sent to the next child (``unhandled``).

Entry point: ``"package.module:Class"``, or an object with ``class`` (run by ``child.py``), or with ``activation``:
``"launch"`` with ``path`` and ``args`` (any program), or ``"none"`` (the user starts it); ``control_id`` is then the
path of the socket that it connects to. Also ``timeout_ms``, ``grace_period_ms``, ``slots``, ``max_message_bytes``
(larger ones go in pieces).
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import logging
import mmap
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock import address
from penstock._core.gateway import GatewayMessage
from penstock.errors import ClosedError, PenstockError
from penstock.gateway import carriage, control
from penstock.gateway.configuration import ModuleEntry, imported
from penstock.gateway.errors import BrokerError, EndedByFailure, MessageFailed, ModuleError, StepFailed, reason_of
from penstock.gateway.loaders import of_class, parsed
from penstock.gateway.module import Module, Outlet
from penstock.gateway.place import Place
from penstock.gateway.stillness import Stillness
from penstock.gateway.supervision import Policy
from penstock.quantities import number_of
from penstock.throttle import Throttle

BATCH = 256
MAX_NOTES = 1024  # how many positions of the queue are remembered with the number sent by then
START_LOOK_S = 0.1
CREATE_TOLD_S = 3.0  # a process that has not answered ``create`` after this time is reported
EXIT_ON_FAILURE = 70  # the status of a process that ends to be started again after a failure
log = logging.getLogger("penstock.gateway")
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Launch:
    """How the process is started and how long to wait for it."""

    kind: str | None = None
    path: str | None = None
    args: tuple[str, ...] = ()
    control_id: str | None = None
    timeout_s: float = 30.0
    grace_period_s: float = 3.0
    slots: int = 1024
    max_message_bytes: int = 4096
    exit_on_failure: bool = False


def load(
    entry: ModuleEntry, entrypoint: Place, shared: Mapping[str, Any], args: Place
) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """How to build the module's stand-in, and how to parse its args (which go to the process as JSON)."""
    launch = _launch(entrypoint, shared, entry.restart is not None and entry.restart.policy is Policy.ON_FAILURE)
    if launch.path is not None and shutil.which(launch.path) is None:
        own = "path" in entrypoint.mapping()
        (entrypoint["path"] if own else entrypoint).fail(f"there is no program {launch.path!r}")
    places = {control.Step.LOAD: _class_place(entrypoint, launch), control.Step.PARSE: args}
    return lambda: ProcessModule(launch, places), json.dumps


def check(entrypoint: Place, shared: Mapping[str, Any], args: Place) -> None:
    """Check beforehand what otherwise only the process would find: that its class exists and accepts its args."""
    launch = _launch(entrypoint, shared, False)
    if launch.kind is not None:
        place = _class_place(entrypoint, launch)
        _, parse = of_class(imported(place), place)
        parsed(parse, args)


def _class_place(entrypoint: Place, launch: Launch) -> Place:
    own = entrypoint["class"] if isinstance(entrypoint.value, Mapping) and "class" in entrypoint else entrypoint
    return Place(launch.kind, own.path, own.file)


def _launch(place: Place, shared: Mapping[str, Any], exit_on_failure: bool) -> Launch:
    if isinstance(place.value, str):
        place = Place({**shared, "class": place.value}, place.path, place.file)
    else:
        place = Place({**shared, **place.mapping()}, place.path, place.file)
    place.only("class", "activation", "path", "args", "control_id", "timeout_ms", "grace_period_ms", "slots",
               "max_message_bytes")  # fmt: skip
    given: dict[str, Any] = {"exit_on_failure": exit_on_failure}
    if "class" in place:
        given["kind"] = place["class"].text()
        if ":" not in given["kind"]:
            place["class"].fail(f"{given['kind']!r} is not of the form package.module:Class")
    else:
        place.need("activation", "control_id")
        given["control_id"] = place["control_id"].text()
        if place["activation"].choice(("none", "launch")) == "launch":
            place.need("path")
            given["path"] = place["path"].text()
            given["args"] = tuple(item.text() for item in place.items("args"))
    for name, unit in (("timeout_ms", "timeout_s"), ("grace_period_ms", "grace_period_s")):
        if name in place:
            given[unit] = place[name].number(1) / 1000
    if "slots" in place:
        given["slots"] = place["slots"].integer(3, 1 << 16)
    if "max_message_bytes" in place:
        given["max_message_bytes"] = place["max_message_bytes"].integer(64, 1 << 30)
    return Launch(**given)


class ProcessModule(Module):
    """The stand-in of a module that lives in another process."""

    restarts = True
    accounted = False  # set once its unhandled messages have been counted
    #: Set by its worker: until when each of some messages may be handled, in nanoseconds since 1970; None: for ever.
    expiries: Callable[[Sequence[GatewayMessage]], list[int | None] | None] | None = None

    def __init__(self, launch: Launch, places: Mapping[control.Step, Place]) -> None:
        """``places``: where in the file stands what each step reads that the process carries out before create."""
        self._launch = launch
        self._places = places
        self._unframer = carriage.Unframer()
        self._throttle = Throttle(log)
        self.sent = 0
        # messages sent together, and how often each was tried
        self._window: deque[tuple[Sequence[GatewayMessage], int]] = deque()
        self._first = 0  # messages sent before those in the window
        self._window_lock = threading.Lock()
        # (messages taken from the gateway's queue, messages sent by then); a mark that finds its position forgotten
        # waits for more than its own messages
        self._sent_by: deque[tuple[int, int]] = deque(maxlen=MAX_NOTES)
        self._resent_to = 0  # the number of the last message that was sent again
        self._passed_on = -1  # so many were handled and what was sent in reply was published, as far as marks have seen
        self._failures_told = self._failures_heard = 0
        self._closing = threading.Event()
        self._closed = self._pumping = self._abandoned = False
        self._handing_over = threading.Lock()  # decides which of the two threads closes everything
        self._handled = self._begun = self._settled = self.expired = 0
        self._seen_handled, self._seen_s = -1, 0.0
        self._stillness = Stillness()
        self._passes = 0  # how often the pump has read everything
        self.dead: BaseException | None = None
        self._answered = threading.Event()  # set when the process has answered start, or will not any more
        self._answer_lock = threading.Lock()
        self._starting = self._awaited = False  # start was sent and not answered yet, and a thread waits for the answer
        self._start_error: BaseException | None = None
        self._publishing, self._published = False, 0
        self.process: subprocess.Popen[bytes] | None = None

    # ---- life

    def create(self, broker: Outlet, configuration: Any) -> None:
        """Start the process, let it create the module, and wait for its answer."""
        super().create(broker, configuration)
        with contextlib.ExitStack() as undo:
            uri = f"shm:/gateway-{os.getpid()}-{next(_numbers)}"
            self._slot_bytes = self._launch.max_message_bytes + carriage.FRAME_HEAD_SIZE
            channel = {"slots": self._launch.slots, "slot_size": self._slot_bytes, "overflow": "block"}
            self._publisher = undo.enter_context(address.publisher(f"{uri}.in", **channel))
            self._subscriber = undo.enter_context(address.subscriber(f"{uri}.out", overflow="block"))
            # A counter shared with the process: it survives the process, so that the gateway knows which message was
            # interrupted.
            descriptor = os.memfd_create("handled")
            undo.callback(os.close, descriptor)
            os.truncate(descriptor, mmap.PAGESIZE)
            self._counter = undo.enter_context(mmap.mmap(descriptor, mmap.PAGESIZE))
            undo.callback(self._end_process)
            self._connection = self._connect()
            undo.callback(self._connection.close)
            self._connection.settimeout(self._launch.timeout_s)
            message = control.encode(control.Create(uri, configuration))
            socket.send_fds(self._connection, [message], [descriptor])
            self._await_reply()
            # From here on `destroy` closes everything.
            undo.pop_all()
            os.close(descriptor)
        self._connection.setblocking(False)
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._waking = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"{self.name} process", daemon=True)
        self._pumping = True
        self._thread.start()

    def start(self) -> None:
        """Let the process start the module, and wait for its answer; programs other than ours may give none."""
        self._starting = self._awaited = self._launch.kind is not None
        self._send(control.Start())
        if not self._awaited:
            return
        try:
            answered = self._await_start(time.monotonic() + self._launch.timeout_s)
        finally:
            with self._answer_lock:
                self._awaited = False
        if (error := self._start_error or self.dead) is not None:
            raise error
        if not answered:
            log.warning("module %r: in start() its process publishes more than its sinks accept; the gateway does not "
                        "wait for it", self.name)  # fmt: skip

    def _await_start(self, until_s: float) -> bool:
        """Whether the process has answered. Not while a sink is full: that one may be started after this one."""
        seen: tuple[bool, int] = (False, 0)
        while not self._answered.wait(START_LOOK_S):
            if time.monotonic() >= until_s:
                raise ModuleError(f"its process did not answer start in {self._launch.timeout_s} s")
            before, seen = seen, (self._publishing, self._published)
            if seen[0] and seen == before:
                return False
        return True

    def receive(self, message: GatewayMessage) -> None:
        """Send one message."""
        self.receive_many([message])

    def receive_many(self, messages: Sequence[GatewayMessage]) -> None:
        """Send messages; waits while the process is behind."""
        self._send_messages([(messages, 1)])

    def receive_again(self, message: GatewayMessage, tries: int) -> None:
        """Send a message that has failed before, for the ``tries``-th time."""
        self._send_messages([([message], tries)])
        self._resent_to = self.sent

    def _send_messages(self, sending: Sequence[tuple[Sequence[GatewayMessage], int]]) -> None:
        """Send messages, each group of them with its number of tries."""
        handled = self.handled
        with self._window_lock:
            if self._failures_heard >= self._failures_told:  # otherwise a failure is still to be reported
                while self._window and self._first + len(self._window[0][0]) <= handled:
                    self._first += len(self._window.popleft()[0])
            for several, tries in sending:
                self._window.append((several, tries))
                self.sent += len(several)
                if tries > 1:
                    self._handle_alone(self.sent)
        messages = sending[0][0] if len(sending) == 1 else [message for several, _ in sending for message in several]
        self._check_alive()
        try:
            expiries = self.expiries(messages) if self.expiries is not None and self._launch.kind is not None else None
            self._publisher.publish_many(carriage.framed(messages, self._slot_bytes, expiries))
        except ClosedError:
            if self.dead is None:
                raise
        self._check_alive()  # if it died while publish waited, the next process is sent these messages from the window

    def _handle_alone(self, number: int) -> None:
        """Let the process handle each message up to this one by itself."""
        if not self._closed:
            with contextlib.suppress(ValueError):  # another thread has closed it meanwhile
                self._counter[40:48] = number.to_bytes(8, sys.byteorder)

    def _check_alive(self) -> None:
        if self.dead is not None:
            kind = EndedByFailure if isinstance(self.dead, EndedByFailure) else ModuleError
            raise kind(f"module {self.name!r}: {self.dead}") from self.dead

    @property
    def handled(self) -> int:
        """Messages that the process has handled."""
        if not self._closed:
            with contextlib.suppress(ValueError):  # another thread has closed it meanwhile
                self._handled = int.from_bytes(self._counter[:8], sys.byteorder)
                self._begun = int.from_bytes(self._counter[8:16], sys.byteorder)
                self._failures_told = int.from_bytes(self._counter[16:24], sys.byteorder)
                self.expired = int.from_bytes(self._counter[32:40], sys.byteorder)
        return self._handled

    @property
    def settled(self) -> int:
        """Of the messages that the process has handled, those whose outcome is known here too: the report of a failure
        comes a little later than the count."""
        done = self.handled
        if self._closed or self.dead is not None or self._failures_heard >= self._failures_told:
            self._settled = max(self._settled, done)
        return self._settled

    def resend(self, left: Sequence[tuple[GatewayMessage, int]]) -> None:
        """Send what another process left (``unhandled``), each for the time that it was sent there."""
        each_try = itertools.groupby(left, key=lambda one: one[1])
        self._send_messages([([message for message, _ in several], tries) for tries, several in each_try])
        self._resent_to = self.sent

    def in_hand(self) -> list[tuple[GatewayMessage, int]]:
        """What a process that has died was handling, with the times it was tried, this one included."""
        done = self.handled
        with self._window_lock:
            return list(itertools.islice(self._sent_from(done), max(0, self._begun - done)))

    def unhandled(self) -> list[tuple[GatewayMessage, int]]:
        """What a process that has died leaves for the next one: everything sent after what it had in hand, with the
        times it was tried, this one included."""
        done = max(self.handled, self._begun)
        with self._window_lock:
            return list(self._sent_from(done))

    def _sent_from(self, number: int) -> Iterator[tuple[GatewayMessage, int]]:
        """The messages of the window from a number on, with their tries. Called under its lock."""
        each = ((message, tries) for messages, tries in self._window for message in messages)
        return itertools.islice(each, max(0, number - self._first), None)

    def note_sent(self, taken: int) -> None:
        """Note that the first ``taken`` messages of the gateway's queue have been sent."""
        self._sent_by.append((taken, self.sent))

    def mark_sent(self, taken: int | None = None) -> Callable[[], bool]:
        """A function that says whether everything sent so far was handled, and what the process sent in reply was
        published. With ``taken``, everything means the first ``taken`` messages of the gateway's queue and what was
        sent again so far."""
        sent = self.sent if taken is None else self._sent_for(taken)
        done, wanted = 0, None

        def handled() -> bool:
            nonlocal done, wanted
            if taken is not None and self._passed_on >= sent:
                return True
            if wanted is None and (done := self.handled) >= sent:
                wanted = self._passes + 2  # one pass may have begun before
            if wanted is not None and self._passes >= wanted:
                self._passed_on = max(self._passed_on, done)  # the marks behind this one need not wait for passes
                return True
            if wanted is not None:
                self._wake()
            return False

        return handled

    def _sent_for(self, taken: int) -> int:
        notes = list(self._sent_by)
        first = bisect.bisect_left(notes, (taken, 0))
        return max(notes[first][1], self._resent_to) if first < len(notes) else self.sent

    def seconds_in_hand(self, now_s: float) -> float:
        """For how long the process has been handling its current message, as far as callers of this have observed."""
        done = self.handled
        if (self._begun <= done and not self._starting) or done != self._seen_handled or self.dead is not None:
            self._seen_handled, self._seen_s = done, now_s
        return now_s - self._seen_s

    def seconds_still(self, now_s: float) -> float:
        """For how long the process has made no progress outside of a call while messages waited, as far as callers of
        this have observed. Only known for our own child program: others do not report what they have handled.
        """
        done = self.handled
        if self.process is None or self._launch.kind is None or self.dead is not None or self._closing.is_set():
            return 0.0
        if self.sent <= done or self._begun > done or self._starting:
            self._stillness.clear()
            return 0.0
        return self._stillness.look(self.process.pid, now_s, done)

    def leave_rest(self) -> None:
        """Let the process handle nothing after its current message: the others are for the next process."""
        if not self._closed:
            self._counter[24:32] = (1).to_bytes(8, sys.byteorder)

    def kill(self) -> None:
        """End the process by force, without waiting for anything."""
        if self.process is not None:
            self.process.kill()

    def give_up(self, error: BaseException) -> None:
        """End the process by force, because its module has failed: that is no failure of its own."""
        self.dead = self.dead or error
        self.kill()

    def end(self) -> None:
        """End the process gracefully, by force after the grace period. Its last messages are still published."""
        if self._closing.is_set():
            return
        self._closing.set()
        with contextlib.suppress(OSError):
            self._send(control.Destroy())
        self._end_process()
        if self._closing_killed():
            self._report_failure(StepFailed("its process did not end in order; it was killed", "stop"))
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join(self._launch.grace_period_s)
            if self._thread.is_alive():
                log.warning("module %r: a sink stays full; the last messages of its process are published when there "
                            "is room", self.name)  # fmt: skip

    def _closing_killed(self) -> bool:
        return self.dead is None and self.process is not None and self.process.returncode == -signal.SIGKILL

    def destroy(self) -> None:
        """End the process if that has not been done; close everything."""
        self.end()
        with self._handing_over:
            if self._closed:
                return
            self._handled = self.handled  # so that `unhandled` can be asked afterwards
            self._closed = True
            if self._pumping:
                # the pump still waits for a full sink (or has called this); it closes everything when it is done
                return
        self._close_handles()

    def _close_handles(self) -> None:
        self._counter.close()
        for handle in (self._publisher, self._subscriber, self._connection):
            handle.close()
        del self._publisher, self._subscriber, handle  # a reference to this module must not keep their descriptors open
        with self._waking:
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_write = -1

    # ---- the process

    def _connect(self) -> socket.socket:
        if self._launch.kind is not None:
            return self._launch_class()
        path = self._launch.control_id or ""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            with contextlib.suppress(FileNotFoundError):
                if Path(path).is_socket():
                    os.unlink(path)
            mask = os.umask(0o177)
            try:
                listener.bind(path)
            finally:
                os.umask(mask)
            try:
                listener.listen(1)
                if self._launch.path is not None:
                    self._popen([self._launch.path, *self._launch.args])
                listener.settimeout(self._launch.timeout_s)
                connection, _ = listener.accept()
            except TimeoutError:
                raise ModuleError(f"nobody connected to {path} in {self._launch.timeout_s} s") from None
            finally:
                os.unlink(path)
        return connection

    def _launch_class(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "penstock.gateway.child", "--control", str(theirs.fileno())]
            command += ["--class", str(self._launch.kind), "--name", self.name or "module"]
            command += ["--max-message-bytes", str(self._launch.max_message_bytes)]
            if self._launch.exit_on_failure:
                command.append("--exit-on-failure")
            # Ctrl-C on a terminal comes to the child too, which ignores it, but not yet while it imports.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                self._popen(command, pass_fds=(theirs.fileno(),))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return ours

    def _popen(self, command: list[str], pass_fds: tuple[int, ...] = ()) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=pass_fds, env=environment)

    def _await_reply(self) -> None:
        decoder = control.Decoder()
        most_s, answer = self._launch.timeout_s, select.poll()
        answer.register(self._connection, select.POLLIN)
        if most_s > CREATE_TOLD_S and not answer.poll(CREATE_TOLD_S * 1000):
            self._connection.settimeout(most_s - CREATE_TOLD_S)
            log.warning("module %r: its process has not answered create yet; waiting up to %g s", self.name, most_s)
        while True:
            try:
                data = self._connection.recv(65536)
            except TimeoutError:
                raise ModuleError(f"its process did not answer create in {self._launch.timeout_s} s") from None
            except ConnectionError:
                data = b""
            if not data:
                raise ModuleError(f"its process ended while it was being made{self._status()}")
            for message in decoder.feed(data):
                if isinstance(message, control.Reply) and message.status is control.Status.OK:
                    return
                why = getattr(message, "reason", "") or "it said why on standard error"
                if isinstance(message, control.Reply) and (place := self._places.get(message.step)) is not None:
                    place.fail(why, ModuleNotFoundError(why) if message.status is control.Status.MISSING else None)
                raise ModuleError(f"its process could not make the module: {why}")

    def _end_process(self) -> None:
        if self.process is None:
            self._await_hang_up()
            return
        try:
            self.process.wait(self._launch.grace_period_s if self._closing.is_set() and self.dead is None else 0)
        except subprocess.TimeoutExpired:
            if self._closing.is_set() and self.dead is None:
                log.warning("module %r: its process did not end in %s s; it is killed", self.name,
                            self._launch.grace_period_s)  # fmt: skip
            self.process.kill()
            self.process.wait()

    def _await_hang_up(self) -> None:
        """Wait until a process that others started has closed its end of the control socket."""
        if not self._closing.is_set() or self.dead is not None or self._thread is threading.current_thread():
            return
        self._thread.join(self._launch.grace_period_s)
        if self._thread.is_alive():
            self._abandoned = True

    def _process_ended(self) -> bool:
        return self._abandoned if self.process is None else self.process.poll() is not None

    def _status(self) -> str:
        if self.process is None:
            return ""
        try:
            return f" (status {self.process.wait(1)})"
        except subprocess.TimeoutExpired:
            return ""

    def _send(self, message: control.Control) -> None:
        self._connection.sendall(control.encode(message))

    # ---- messages from the process

    def _work(self) -> None:
        try:
            self._pump()
        finally:
            self._answered.set()
            with self._handing_over:
                self._pumping = False
                left_to_this = self._closed
            if left_to_this:
                self._close_handles()

    def _pump(self) -> None:
        poll = select.poll()
        for number in (self._connection.fileno(), self._wake_read, self._subscriber.fileno()):
            poll.register(number, select.POLLIN)
        decoder = control.Decoder()
        ended: BaseException | None = None
        while ended is None:
            self._forward()
            self._passes += 1
            if self._closing.is_set() and self._process_ended():
                while self._listen(decoder) is None and self._has_spoken():
                    pass  # its last messages
                break
            for number, _ in poll.poll(1000):
                if number == self._wake_read:
                    os.read(number, 4096)
                elif number == self._connection.fileno():
                    ended = self._listen(decoder)
        self._forward()
        if not self._closing.is_set():
            error = ended or ModuleError("its process ended")
            if count := len(self.in_hand()):
                error = ModuleError(f"{reason_of(error)} while it handled {number_of(count, 'message')}")
            self.dead = error
            self._publisher.close()  # wake all threads that wait for the dead process
            self._report_failure(error)

    def _forward(self) -> None:
        """Publish everything that has arrived."""
        while not self._closed and self._forward_batch():
            pass

    def _forward_batch(self) -> bool:
        """Publish what one read returns. A function of its own, so that no batch is alive while the next is read: a
        batch holds slots of the channel."""
        try:
            batch: Any = self._subscriber.read_many(BATCH, 0)
        except ClosedError:
            return False
        if not len(batch):
            return False
        messages = self._unframer.messages(batch, self._refused)
        del batch
        for message in messages:
            if self._closed:
                return False  # it was removed from the gateway
            self._publishing = True
            try:
                self._publish(message)
            except (PenstockError, TimeoutError) as error:
                self._refused(error)
            self._publishing = False
            self._published += 1
        return True

    def _refused(self, error: Exception) -> None:
        self._throttle.error("module %r: a message of its process was refused: %s", self.name, error)
        # the process cannot know: it has already handled the message that caused this one
        if isinstance(error, TimeoutError):
            with contextlib.suppress(BrokerError):
                self.broker.note_refused(self)

    def _publish(self, message: GatewayMessage) -> None:
        named = carriage.OUTPUT_BYTES in message.encoded_properties
        output = message.properties.get(carriage.OUTPUT) if named else None
        if output is None:
            self.broker.publish(self, message)
            return
        properties = {name: value for name, value in message.properties.items() if name != carriage.OUTPUT}
        self.broker.publish_output(self, output, message.with_properties(properties))

    def _listen(self, decoder: control.Decoder) -> BaseException | None:
        """Read replies; returns the reason if the process has ended."""
        try:
            data = self._connection.recv(65536)
            messages = decoder.feed(data)
        except BlockingIOError:
            return None
        except (OSError, PenstockError) as error:
            return error
        for message in messages:
            if isinstance(message, control.Reply) and message.status is control.Status.DETACH:
                return ModuleError("its process has detached itself")
            if isinstance(message, control.Reply):
                self._take_reply(message)
        if data:
            return None
        status = self._status()
        told = self._launch.exit_on_failure and self._failures_heard and status == f" (status {EXIT_ON_FAILURE})"
        return (EndedByFailure if told else ModuleError)(f"its process ended{status}")

    def _take_reply(self, reply: control.Reply) -> None:
        error = None
        if reply.status is control.Status.ERROR:
            if reply.step in (control.Step.RECEIVE, control.Step.CREATE):  # a bare reply names no step
                self._give_back(reply)
                return
            step = reply.step.name.lower()
            error = StepFailed(f"{step} raised in its process: {reply.reason}", step)
        if reply.step is control.Step.START:
            with self._answer_lock:
                self._starting = False
                if self._awaited:
                    self._start_error, error = error, None
                self._answered.set()
        if error is not None:
            self._report_failure(error)

    def _has_spoken(self) -> bool:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(0))

    def _give_back(self, reply: control.Reply) -> None:
        """Return the messages at which the process failed: they are not handled."""
        with self._window_lock:
            begin = min(max(reply.first, self._first), self.sent)
            end = min(max(reply.first + reply.count, begin), self.sent)
            failed = list(itertools.islice(self._sent_from(begin), end - begin))
        self._report_failure(MessageFailed(reply.reason or "receive raised in its process", given_back=failed))
        self._failures_heard += reply.count > 0

    def _report_failure(self, error: BaseException) -> None:
        if self.on_failure is not None:
            self.on_failure(error)
        else:
            log.error("module %r: %s", self.name, error)

    def _wake(self) -> None:
        # A mark of this process is asked also when the next process has taken its place: then the descriptor's number
        # may be somebody else's.
        with self._waking, contextlib.suppress(BlockingIOError):
            if self._wake_write >= 0:
                os.write(self._wake_write, b"x")
