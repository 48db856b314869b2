"""The client: makes calls, many at a time, from any number of threads and from asyncio.

Rules:

- Every call ends exactly once: with its answer, or with an error that says why there is none.
- No thread of its own. Of the threads that wait, one reads and passes the others their answers; when its own answer has
  come, it wakes the next reader. The event loop reads for calls that are awaited in it, unless a thread is reading.
- While calls are in flight, the reader checks every ``LOOK_S`` whether their servers are alive.
- Any thread may call any method.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
from collections.abc import Hashable
from time import monotonic, monotonic_ns, time_ns
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from penstock._core import Counters
from penstock.address import without_secrets
from penstock.calls.envelope import Envelope, Kind, pack, payload_of
from penstock.calls.lanes import open_client
from penstock.channel import Handle, Ledger, check_timeout
from penstock.errors import (
    CallFailed,
    ClosedError,
    DecodeError,
    InvalidArgument,
    PeerGone,
    PenstockError,
    RefusedError,
    StateError,
)
from penstock.types import codec_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Buffer  # type: ignore[attr-defined]

    from typing_extensions import TypeVar as _TypeVar

    Asked = _TypeVar("Asked", default=Buffer)
    Answered = _TypeVar("Answered", default=bytes)
else:
    Asked, Answered = TypeVar("Asked"), TypeVar("Answered")

MAX_TIMEOUT_S = 1e8  # three years
LOOK_S = 0.05  # how often servers with calls in flight are checked


class _Call:
    """One call in flight."""

    __slots__ = ("answer", "done", "error", "future", "loop", "number", "peer", "started_ns", "wake")

    def __init__(self, number: int, loop: asyncio.AbstractEventLoop | None) -> None:
        self.number = number
        self.peer: Hashable = None
        self.done = False
        self.answer = b""
        self.error: Exception | None = None
        self.started_ns = monotonic_ns()
        self.loop = loop
        self.future: asyncio.Future[None] | None = None if loop is None else loop.create_future()
        self.wake: threading.Lock | None = None  # created by the waiting thread, released to wake it


class Client(Handle, Generic[Asked, Answered]):
    """Calls the servers of one address. With ``type`` it sends objects, with ``reply_type`` it returns objects."""

    def __init__(
        self, address: str, *, max_calls: int = 32, type: Any = None, reply_type: Any = None, **options: Any
    ) -> None:
        self._encode = None if type is None else codec_of(type).encode
        self._answers = None if reply_type is None else codec_of(reply_type)
        if isinstance(max_calls, bool) or not isinstance(max_calls, int) or not 1 <= max_calls <= 4096:
            raise InvalidArgument(f"max_calls={max_calls!r} must be 1 to 4096 calls under way at a time")
        self.address = self.name = without_secrets(address)
        self._origin = os.urandom(16)
        self._pid = os.getpid()
        self._lane = open_client(address, options, self._origin, max_calls, Client)
        scheme, _, name = self.address.partition(":")
        self._counters = Counters(scheme, "client", name.removeprefix("//"))
        self._counters.set("capacity", max_calls)
        self._numbers = itertools.count(1)
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()  # one permit for each further call that may start
        for _ in range(max_calls):
            self._room.put(None)
        self._calls: dict[int, _Call] = {}
        self._lock = threading.Lock()  # guards the table of calls
        self._reading = threading.Lock()  # held by the thread that reads
        self._watched: asyncio.AbstractEventLoop | None = None  # the event loop that watches the descriptor
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._final: Ledger | None = None

    # --- calling

    def call(self, data: Asked, timeout: float | None = None) -> Answered:
        """The server's answer to ``data``.

        ``TimeoutError``: no answer came in time; the server has been sent a cancellation. ``PeerGone``: the server has
        died or closed, or there is none. ``CallFailed``: the server's function raised; the text says what.
        """
        # Written out, because every call comes through here and each function call costs a tenth of a bare round trip.
        deadline = self._deadline(timeout)
        payload: Any = data if self._encode is None and data.__class__ is bytes else self._payload(data)
        try:
            self._room.get(deadline is None or timeout != 0, timeout if deadline is not None else None)
        except queue.Empty:
            raise TimeoutError(f"{self.address}: timed out while max_calls other calls are in progress") from None
        try:
            call = self._register(None)
            try:
                self._send(call, payload, deadline)
                self._await(call, deadline)
            except BaseException as error:
                self._give_up(call, error)
                raise
        finally:
            self._room.put(None)
        if call.error is None and self._answers is None:
            return call.answer  # type: ignore[return-value]
        answer: Answered = self._result(call)
        return answer

    def _payload(self, data: Any) -> bytes:
        return _payload(data if self._encode is None else self._encode(data))

    async def call_async(self, data: Asked, timeout: float | None = None) -> Answered:
        """``call`` for asyncio: the event loop goes on meanwhile. Cancelling the task cancels the call."""
        import asyncio

        deadline = self._deadline(timeout)
        payload = self._payload(data)
        loop = asyncio.get_running_loop()
        await self._room_async(deadline)
        call = self._register(loop)
        try:
            await self._send_async(loop, call, payload, deadline)
            self._watch(loop)
            assert call.future is not None
            left = None if deadline is None else max(0.0, deadline - monotonic())
            async with asyncio.timeout(left):
                await call.future
        except TimeoutError as error:
            self._give_up(call, error)
            raise TimeoutError(f"{self.address}: no answer within {timeout:g} s") from None
        except BaseException as error:
            self._give_up(call, error)
            raise
        finally:
            self._room.put(None)
        answer: Answered = self._result(call)
        return answer

    async def _send_async(
        self, loop: asyncio.AbstractEventLoop, call: _Call, payload: bytes, deadline: float | None
    ) -> None:
        """Send at once if there is room; otherwise a thread waits for room."""
        import asyncio

        if self._lane.ready:
            left = 0 if deadline is None else max(1, int((deadline - monotonic()) * 1e9))
            data = pack(Kind.REQUEST, call.number, left, self._origin, payload)
            try:
                call.peer = self._lane.send(data, 0.0)
                return
            except TimeoutError:
                pass
        sending = loop.run_in_executor(None, self._send, call, payload, deadline)
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            # The request may have been sent already. When the thread knows, it sends the cancellation.
            sending.add_done_callback(lambda _: self._tell_cancelled(call))
            raise

    async def _room_async(self, deadline: float | None) -> None:
        """Wait for a permit for one more call, without blocking the event loop."""
        import asyncio

        while not self._take_room():
            if self._closed:
                raise ClosedError(f"the client of {self.address} was closed")
            if deadline is not None and monotonic() >= deadline:
                raise TimeoutError(f"{self.address}: timed out while max_calls other calls are in progress")
            await asyncio.sleep(0.001)

    def _take_room(self) -> bool:
        try:
            self._room.get_nowait()
        except queue.Empty:
            return False
        return True

    def wait_ready(self, servers: int = 1, timeout: float | None = None) -> bool:
        """Wait until so many servers are there; False when the time is over."""
        timeout = check_timeout(timeout)
        self._check()
        return self._lane.wait_ready(servers, timeout)

    def _deadline(self, timeout: float | None) -> float | None:
        timeout = check_timeout(timeout)
        self._check()
        # Treat a time-out of years as none: clocks and locks cannot represent it.
        return None if timeout is None or timeout > MAX_TIMEOUT_S else monotonic() + timeout

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"the client of {self.address} was closed")
        if os.getpid() != self._pid:
            raise StateError(f"the client of {self.address} was opened before this process was forked; open it again")

    def _register(self, loop: asyncio.AbstractEventLoop | None) -> _Call:
        call = _Call(next(self._numbers), loop)
        with self._lock:
            if self._closed:
                self._check()
            self._calls[call.number] = call
            alone = len(self._calls) == 1
        if alone:
            self._lane.renew()
        self._counters.add("matched")
        return call

    def _send(self, call: _Call, payload: bytes, deadline: float | None) -> None:
        left = 0 if deadline is None else max(1, int((deadline - monotonic()) * 1e9))
        call.peer = self._lane.send(pack(Kind.REQUEST, call.number, left, self._origin, payload), deadline)

    def _result(self, call: _Call) -> Any:
        if call.error is not None:
            raise call.error
        if self._answers is None:
            return call.answer
        try:
            return self._answers.decode(call.answer)
        except Exception as error:
            told = f"{self.address}: an answer of {len(call.answer)} bytes is not {self._answers.name}: {error}"
            raise DecodeError(told, call.answer) from error

    # --- waiting

    def _await(self, call: _Call, deadline: float | None) -> None:
        """Wait until the call is done; read for all calls if no other thread does."""
        reading = self._reading
        try:
            while not call.done:
                left = LOOK_S if deadline is None else deadline - monotonic()
                if left <= 0:
                    raise TimeoutError(f"{self.address}: no answer in time")
                if reading.acquire(False):
                    try:
                        if not call.done:  # by the thread that has read until now
                            self._read_once(left if left < LOOK_S else LOOK_S)
                    finally:
                        reading.release()
                else:
                    self._wait(call, -1 if deadline is None else left)
        finally:
            if self._calls:
                self._hand_over()

    def _wait(self, call: _Call, left: float) -> None:
        """Sleep until the call is done or the reader has left."""
        with self._lock:
            if call.done:
                return
            if call.wake is None:
                call.wake = threading.Lock()
                call.wake.acquire()
            wake = call.wake
        if self._reading.acquire(False):  # the reader left before it could see that this thread waits
            self._reading.release()
            return
        wake.acquire(timeout=left)

    def _read_once(self, timeout: float) -> bool:
        """Receive one envelope; the caller holds ``_reading``. If none came, check the servers."""
        try:
            found = self._lane.receive(timeout)
        except PeerGone as error:
            self._fail_all(str(error))
            return False
        if found is None:
            if timeout:
                self._check_servers()
            return False
        self._take(found)
        return True

    def _take(self, envelope: Envelope) -> None:
        kind, number, _, origin, payload = envelope
        if kind is Kind.GOODBYE:
            peer = payload.decode("utf-8", "replace")
            self._fail_calls_of(peer, f"{self.address}: the server has closed or died before it answered")
            return
        with self._lock:
            call = self._calls.pop(number, None) if origin == self._origin else None
        if call is None:
            return  # a late answer: its caller already has its TimeoutError
        if kind is Kind.ANSWER:
            counters = self._counters
            counters.add("delivered")
            counters.add("bytes", len(payload))
            counters.note_latency(monotonic_ns() - call.started_ns)
            counters.set("last_ns", time_ns())
            self._settle(call, payload, None)
            return
        text = payload.decode("utf-8", "replace")
        if kind is Kind.REFUSAL:
            self._counters.drop("refused")
            self._settle(call, b"", RefusedError(f"{self.address}: {text}"))
        else:
            self._counters.drop("error")
            self._counters.add("errors")
            self._settle(call, b"", CallFailed(text))

    def _settle(self, call: _Call, answer: bytes, error: Exception | None) -> None:
        """Wake the caller. The call has left the table already, so this happens once."""
        self._lane.settled(call.peer, error is None or isinstance(error, CallFailed | RefusedError))
        call.answer, call.error = answer, error
        if call.loop is None:
            with self._lock:
                call.done = True
                if call.wake is not None:
                    _wake(call)
        else:
            call.done = True
            _call_soon(call.loop, _wake_future, call.future)

    def _check_servers(self) -> None:
        """Fail the calls whose server has died or closed."""
        with self._lock:
            peers = {call.peer for call in self._calls.values() if call.peer is not None}
        for peer in peers:
            if self._lane.gone(peer):
                self._fail_calls_of(peer, f"{self.address}: the server has closed or died before it answered")

    def _fail_calls_of(self, peer: Hashable, reason: str) -> None:
        with self._lock:
            calls = [self._calls.pop(call.number) for call in list(self._calls.values()) if call.peer == peer]
        for call in calls:
            self._counters.drop("closed")
            self._settle(call, b"", PeerGone(reason))

    def _fail_all(self, reason: str) -> None:
        with self._lock:
            peers = {call.peer for call in self._calls.values() if call.peer is not None}
        for peer in peers:
            self._fail_calls_of(peer, reason)

    def _hand_over(self) -> None:
        """The reader leaves: wake another waiting call to read next, or ask the event loop to."""
        with self._lock:
            self._wake_next()
            awaited = any(call.loop is not None for call in self._calls.values())
        if awaited and self._watched is not None:
            _call_soon(self._watched, self._pump)

    def _wake_next(self) -> None:
        """Wake one waiting thread, which becomes the reader. The caller holds ``_lock``."""
        for call in self._calls.values():
            # not one that is still sending: it reads when it starts to wait
            if call.wake is not None and call.wake.locked():
                call.wake.release()
                return

    def _give_up(self, call: _Call, error: BaseException) -> None:
        """The caller no longer waits: forget the call, count it, and tell the server."""
        with self._lock:
            pending = self._calls.pop(call.number, None)
        if pending is None:
            return
        if isinstance(error, PeerGone):
            self._counters.drop("closed")
        elif isinstance(error, TimeoutError):
            self._counters.add("expired")
        elif isinstance(error, PenstockError | OSError):
            self._counters.drop("refused")
        else:
            self._counters.drop("filtered")  # cancelled by the caller
        self._tell_cancelled(call)

    def _tell_cancelled(self, call: _Call) -> None:
        """Send a cancellation to the server. To a broker that may block, so a thread does it for an event loop."""
        if call.peer is None or self._closed:
            return
        self._lane.settled(call.peer, answered=False)
        data = pack(Kind.CANCEL, call.number, 0, self._origin)
        if call.loop is not None and self._lane.durable:
            # Not the event loop's executor, which may be shut down already.
            threading.Thread(target=self._lane.cancel, args=(call.peer, data), daemon=True).start()
        else:
            self._lane.cancel(call.peer, data)

    # --- asyncio

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._watched is not loop:
            if self._watched is not None and not self._watched.is_closed():
                raise InvalidArgument(f"{self.address}: one client serves one event loop; open a client for each")
            self._watched = loop
            loop.add_reader(self._lane.fileno(), self._pump)
        if self._timer is None:
            self._tick()
        else:
            self._pump()

    def _pump(self) -> None:
        """Read what has arrived, inside the event loop. If a thread is reading, it does that instead and calls this
        when it leaves."""
        if self._closed or not self._reading.acquire(blocking=False):
            return
        try:
            while self._read_once(0):
                pass
        except (PenstockError, OSError) as error:
            self._fail_all(f"{self.address}: {error}")
        finally:
            self._reading.release()
        with self._lock:
            self._wake_next()

    def _tick(self) -> None:
        """Check the servers while calls are awaited; the timer stops when there are none."""
        self._timer = None
        if self._closed or self._watched is None:
            return
        self._pump()
        self._check_servers()
        with self._lock:
            awaited = any(call.loop is not None for call in self._calls.values())
        if awaited:
            self._timer = self._watched.call_later(LOOK_S, self._tick)
        else:
            self._watched.remove_reader(self._lane.fileno())
            self._watched = None

    # --- the end

    @property
    def ledger(self) -> Ledger:
        """Calls: matched = answered (delivered) + timed out (expired) + dropped by reason + in flight.

        The reasons: ``closed`` the server has gone, ``error`` it raised, ``refused``, ``filtered`` cancelled here.
        """
        return self._final or Ledger.of(self._counters.snapshot())

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def close(self) -> None:
        """Release everything. Calls in flight end with ``ClosedError``."""
        if os.getpid() != self._pid:  # after a fork the calls, the loop and the locks belong to the parent
            if not self._closed:
                self._closed = True
                self._lane.abandon()
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            calls = list(self._calls.values())
            self._calls.clear()
        for call in calls:
            self._counters.drop("closed")
            self._settle(call, b"", ClosedError(f"the client of {self.address} was closed meanwhile"))
        if self._watched is not None and not self._watched.is_closed():
            loop, self._watched = self._watched, None
            _call_soon(loop, loop.remove_reader, self._lane.fileno())
        self._room.put(None)  # a thread that waits for a permit finds the client closed and passes the permit on
        self._lane.close()
        self._final = Ledger.of(self._counters.snapshot())
        self._counters.close()


def _payload(data: Buffer) -> bytes:
    return payload_of(data, "a call takes")


def _wake(call: _Call) -> None:
    """Wake the thread of this call, now or when it next waits. The caller holds the table's lock."""
    if call.wake is not None and call.wake.locked():
        call.wake.release()


def _wake_future(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _call_soon(loop: asyncio.AbstractEventLoop, function: Any, *arguments: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended, so nothing waits in it
        loop.call_soon_threadsafe(function, *arguments)
