"""The server: each request gets exactly one answer.

With a function, threads of the server call it: ``function(payload)``, or ``function(payload, request)`` where it takes
two arguments. Its result is the answer; what it raises is sent to the client as text. Without a function, iterate:
``for request in server: request.reply(...)``.

Rules:

- One thread receives. With one worker it also runs the function, so that a request needs no hand-over between threads.
- A request that has timed out or was cancelled while it waited is not started, and is counted.
- ``Request.reply`` and ``fail`` may be called by any thread, one of them once. A request that is dropped without an
  answer fails when it is garbage-collected.
- ``close`` may be called by any thread; clients whose requests have no answer yet are told at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from penstock._core import Counters
from penstock.address import without_secrets
from penstock.calls.envelope import Envelope, Kind, pack, payload_of, text_of
from penstock.calls.lanes import open_server
from penstock.channel import Handle, Ledger
from penstock.clock import refuse_if_virtual
from penstock.errors import ClosedError, DecodeError, InvalidArgument, PenstockError, ProtocolError, StateError
from penstock.types import codec_of

logger = logging.getLogger("penstock.calls")
MAX_BACKLOG = 1024  # requests received while a function asked whether it was cancelled
LOOK_S = 0.05  # how often `cancelled` checks whether the client's process is alive
TURN_S = 0.2  # how long the receiving thread waits before it checks whether the server was closed


class Request:
    """One request. ``payload`` is what the client sent."""

    __slots__ = (
        "__weakref__", "_cancelled", "_deadline", "_done", "_looked", "_origin", "_server", "_way", "number", "payload",
    )  # fmt: skip

    def __init__(self, server: Server, way: Any, envelope: Envelope) -> None:
        self._server = server
        self._way = way
        self._origin = envelope.origin
        self._done = False
        now = time.monotonic()
        self._deadline = now + envelope.left_ns / 1e9 if envelope.left_ns else None
        self._cancelled = False
        self._looked = now
        self.number = envelope.number  #: the client's number for this call
        self.payload: bytes = envelope.payload

    @property
    def value(self) -> Any:
        """What the client sent, as an object where the server has a ``type``; else its bytes."""
        codec = self._server._request_codec
        if codec is None:
            return self.payload
        try:
            return codec.decode(self.payload)
        except Exception as error:
            size = len(self.payload)
            raise DecodeError(f"a request of {size} bytes is not {codec.name}: {error}", self.payload) from error

    def reply(self, data: Any) -> bool:
        """Answer with ``data`` (bytes; None: nothing; an object where the server has a ``reply_type``).

        Returns False if the client no longer waits for it.
        """
        return self._server._answer(self, Kind.ANSWER, self._encoded(data))

    def _encoded(self, data: Any) -> bytes:
        encode = self._server._encode
        if encode is None:
            return b"" if data is None else payload_of(data, "an answer is")
        return payload_of(encode(data), "an answer is")

    def fail(self, why: str | BaseException) -> bool:
        """Answer with an error: the client's call raises ``CallFailed`` with this text."""
        text = text_of(why) if isinstance(why, BaseException) else str(why).encode("utf-8", "replace")
        return self._server._answer(self, Kind.FAILURE, text)

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the answer: the client has cancelled the call, its time is over, it has died, or
        this server was closed."""
        if not self._cancelled and not self._done:
            self._server._look_for_cancellations()
            now = time.monotonic()
            if now >= self._looked + LOOK_S:  # checking whether a process is alive is a system call: not each time
                self._looked = now
                if self._server._lane.gone(self._way):  # never set back: a cancellation may just have been seen
                    self._cancelled = True
        return self._cancelled or self._late or self._server.closed

    @property
    def _late(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    @property
    def time_left(self) -> float | None:
        """Seconds that the client still waits; None: it waits for ever."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def __del__(self) -> None:
        if not getattr(self, "_done", True) and not self._server.closed:
            self._server._forgotten(self._way, self._origin, self.number)

    def __repr__(self) -> str:
        return f"<calls.Request {self.number} of {len(self.payload)} bytes{', answered' if self._done else ''}>"


class Server(Handle):
    """Answers the calls to one address."""

    def __init__(
        self,
        address: str,
        function: Callable[..., Any] | None = None,
        *,
        workers: int = 1,
        type: Any = None,
        reply_type: Any = None,
        **options: Any,
    ) -> None:
        refuse_if_virtual(f"a server at {without_secrets(address)} (it answers in threads of its own)")
        self._request_codec = None if type is None else codec_of(type)
        self._encode = None if reply_type is None else codec_of(reply_type).encode
        if function is not None and not callable(function):
            raise TypeError(f"a server takes a function or None, not {function.__class__.__name__}")
        if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= 1024:
            raise InvalidArgument(f"workers={workers!r} must be 1 to 1024 threads")
        self._function = function
        self._passes = _passes_request(function) if function is not None else ""
        self._lane = open_server(address, options, Server)
        self.address = without_secrets(address)
        if self._lane.port is not None:  # tcp://HOST:0 listens at a port that the system has chosen
            scheme, _, rest = self.address.partition("://")
            host, query = rest.partition("?")[0].rpartition(":")[0], rest.partition("?")[2]
            self.address = f"{scheme}://{host}:{self._lane.port}{'?' if query else ''}{query}"
        self.name = self.address
        scheme, _, name = self.address.partition(":")
        self._counters = Counters(scheme, "server", name.removeprefix("//"))
        self._open: dict[tuple[bytes, int], weakref.ref[Request]] = {}  # weak: a dropped request removes itself
        self._backlog: deque[Request] = deque()
        self._lock = threading.RLock()  # reentrant: a finaliser may run in a thread that already holds it
        self._receiver = threading.get_ident()
        self._pid = os.getpid()
        self._closed = threading.Event()
        self._final: Ledger | None = None
        self._failure_logged = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._workers = workers
        self._slots = threading.Semaphore(workers)
        self._pool = ThreadPoolExecutor(workers, "penstock calls") if function is not None and workers > 1 else None
        self._thread: threading.Thread | None = None
        if function is not None:
            self._thread = threading.Thread(target=self._serve, name=f"penstock calls {self.address}", daemon=True)
            self._thread.start()

    @property
    def port(self) -> int | None:
        """The port that it listens at, where it has one."""
        return self._lane.port

    # --- receiving

    def __iter__(self) -> Iterator[Request]:
        """Requests as they come, until closed."""
        if self._function is not None:
            raise StateError("this server has a function that answers; open it without one to iterate")
        while not self._closed.is_set():
            try:
                self._check()
                request = self._next()
            except ClosedError:
                return
            if request is not None:
                yield request
                del request

    def receive(self, timeout: float | None = None) -> Request | None:
        """The next request, or None when the time is over."""
        if self._function is not None:
            raise StateError("this server has a function that answers; open it without one to receive")
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._check()
            left = TURN_S if deadline is None else max(0.0, min(TURN_S, deadline - time.monotonic()))
            request = self._next(left)
            if request is not None or (deadline is not None and time.monotonic() >= deadline):
                return request

    def _check(self) -> None:
        if self._closed.is_set():
            raise ClosedError(f"the server of {self.address} was closed")
        if os.getpid() != self._pid:
            raise StateError(f"the server of {self.address} was opened before this process was forked; open it again")

    def _next(self, timeout: float = TURN_S) -> Request | None:
        """The next request that has neither timed out nor been cancelled."""
        self._receiver = threading.get_ident()
        request = self._backlog.popleft() if self._backlog else self._receive(timeout)
        if request is None:
            return None
        if request._cancelled or request._late:
            self._drop(request)
            return None
        return request

    def _receive(self, timeout: float) -> Request | None:
        try:
            found = self._lane.receive(timeout)
        except ProtocolError as error:
            self._counters.add("errors")
            logger.warning("%s: %s", self.address, error)
            return None
        if found is None:
            return None
        way, envelope = found
        if envelope.kind is Kind.CANCEL:
            with self._lock:
                found_open = self._open.get((envelope.origin, envelope.number))
            request = None if found_open is None else found_open()
            if request is not None:
                request._cancelled = True
            self._lane.drop(way)
            return None
        # A client sends nothing else; ignoring it keeps the server alive if one does.
        if envelope.kind is not Kind.REQUEST:
            self._lane.drop(way)
            return None
        request = Request(self, way, envelope)
        with self._lock:
            self._open[envelope.origin, envelope.number] = weakref.ref(request)
        self._counters.add("matched")
        self._counters.add("bytes", len(envelope.payload))
        self._counters.set("last_ns", time.time_ns())
        return request

    def _look_for_cancellations(self) -> None:
        """Receive what has arrived, cancellations included. Does nothing in other threads than the receiving one, which
        does so itself."""
        if threading.get_ident() != self._receiver or self._pool is not None:
            return
        while len(self._backlog) < MAX_BACKLOG and not self._closed.is_set():
            before = self._counters.get("matched")
            request = self._receive(0.0)
            if request is not None:
                self._backlog.append(request)
            elif self._counters.get("matched") == before:
                return

    # --- answering

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                request = self._next()
            except ClosedError:
                return
            except (PenstockError, OSError) as error:
                if self._closed.is_set():
                    return
                logger.warning("%s: %s", self.address, error)
                self._counters.add("errors")  # count after logging: who sees the count finds the line in the log
                self._closed.wait(0.1)
                continue
            if request is None:
                continue
            if self._pool is None:
                self._run(request)
            else:
                self._slots.acquire()  # back-pressure: with all workers busy, further requests stay with their clients
                self._pool.submit(self._run_in_pool, request)
            del request

    def _run_in_pool(self, request: Request) -> None:
        try:
            self._run(request)
        finally:
            self._slots.release()

    def _run(self, request: Request) -> None:
        assert self._function is not None
        try:
            if self._passes == "request=":
                result = self._function(request.value, request=request)
            else:
                result = self._function(request.value, *((request,) if self._passes else ()))
            if inspect.isawaitable(result):
                asyncio.run_coroutine_threadsafe(self._finish(request, result), self._event_loop())
                return
        except BaseException as error:  # SystemExit too: one request must not end the thread that serves all
            self._fail(request, error)
        else:
            self._reply(request, result)

    async def _finish(self, request: Request, awaitable: Any) -> None:
        try:
            result = await awaitable
        except BaseException as error:
            self._fail(request, error)
        else:
            self._reply(request, result)

    def _reply(self, request: Request, result: Any) -> None:
        if request._done:
            return  # the function has called `reply` or `fail`
        try:
            payload = request._encoded(result)
        except Exception as error:  # the function returned something that cannot be sent
            self._fail(request, error)
            return
        try:
            self._answer(request, Kind.ANSWER, payload)
        except (PenstockError, OSError) as error:
            if not self._closed.is_set():
                logger.warning("%s: an answer could not be sent: %s", self.address, error)
                self._counters.add("errors")

    def _fail(self, request: Request, error: BaseException) -> None:
        if not self._failure_logged:
            self._failure_logged = True
            logger.warning("%s: a call failed; from now on failures are only counted", self.address, exc_info=error)
        self._counters.add("errors")
        if not request._done and not self._closed.is_set():
            # the server was closed meanwhile, or the client cannot be reached
            with contextlib.suppress(PenstockError, OSError):
                self._answer(request, Kind.FAILURE, text_of(error))

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop for functions that are coroutines, created when the first one is called."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run_loop, args=(self._loop,), name="penstock calls loop", daemon=True).start()
        return self._loop

    def _answer(self, request: Request, kind: Kind, payload: bytes) -> bool:
        with self._lock:
            if request._done:
                raise StateError(f"request {request.number} was answered already; a call gets one answer")
            if self._closed.is_set():
                raise ClosedError(f"the server of {self.address} was closed")
            request._done = True
            self._open.pop((request._origin, request.number), None)
        if request._cancelled or request._late:  # the client has given up: the answer has no recipient
            self._lane.drop(request._way)
            self._counters.drop("filtered")
            return False
        data = pack(kind, request.number, 0, request._origin, payload)
        if not self._lane.answer(request._way, data):
            self._counters.drop("closed")
            return False
        if kind is Kind.ANSWER:
            self._counters.add("delivered")
        else:
            self._counters.drop("error")
        return True

    def _forgotten(self, way: Any, origin: bytes, number: int) -> None:
        """A request was garbage-collected without an answer. This runs in a finaliser, which must not block: another
        thread tells the client."""
        data = pack(Kind.FAILURE, number, 0, origin, b"the server gave no answer")
        self._open.pop((origin, number), None)
        self._counters.drop("error")

        def tell() -> None:
            # the server was closed meanwhile, which has told the client
            with contextlib.suppress(PenstockError, OSError):
                self._lane.answer(way, data)

        threading.Thread(target=tell, name="penstock calls forgotten", daemon=True).start()

    def _drop(self, request: Request) -> None:
        """Do not start it: it was cancelled or has timed out."""
        with self._lock:
            request._done = True
            self._open.pop((request._origin, request.number), None)
        self._lane.drop(request._way)
        if request._late:  # a cancellation by the client changes nothing any more
            self._counters.add("expired")
        else:
            self._counters.drop("filtered")

    # --- the end

    @property
    def ledger(self) -> Ledger:
        """Requests: matched = answered (delivered) + timed out before they were started (expired) + dropped by reason +
        in flight.

        The reasons: ``closed`` the client has gone, or this server closed first; ``filtered`` the client gave up.
        """
        return self._final or Ledger.of(self._counters.snapshot())

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed.is_set()

    def close(self, timeout: float = 5.0) -> None:
        """Tell the clients and release everything. Waits at most ``timeout`` seconds for a running function."""
        if os.getpid() != self._pid:  # after a fork the threads and locks belong to the parent
            if not self._closed.is_set():
                self._closed.set()
                self._lane.abandon()
            return
        deadline = time.monotonic() + timeout
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            pending = [request for reference in list(self._open.values()) if (request := reference()) is not None]
            self._open.clear()
        for request in pending:
            request._done = True
            self._counters.drop("closed")
        self._lane.close(pack(Kind.GOODBYE, 0, 0, bytes(16)))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            for _ in range(self._workers):  # a worker is free again when its function has returned
                if not self._slots.acquire(timeout=max(0.0, deadline - time.monotonic())):
                    break
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(_end_tasks(self._loop), self._loop)
        self._final = Ledger.of(self._counters.snapshot())
        self._counters.close()


async def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what still runs in a server's loop, then end the loop."""
    tasks = [task for task in asyncio.all_tasks(loop) if task is not asyncio.current_task(loop)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    loop.call_soon(loop.stop)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _passes_request(function: Callable[..., Any]) -> str:
    """How the function takes the request: by position, as ``request=``, or (empty) not at all.

    A second parameter with a default gets the request only if it is called ``request``.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without a signature
        return ""
    parameters = signature.parameters
    if "request" in parameters and parameters["request"].kind is inspect.Parameter.KEYWORD_ONLY:
        return "request="
    one, two = _binds(signature, None), _binds(signature, None, None)
    if not one and not two:
        name = getattr(function, "__name__", repr(function))
        takes = f"{name}{signature}"
        raise TypeError(f"a server's function takes the payload, or the payload and the request; this is {takes}")
    if one and two:
        second = list(parameters.values())[1:2]
        return "position" if second and second[0].name == "request" else ""
    return "position" if two else ""


def _binds(signature: inspect.Signature, *arguments: Any) -> bool:
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True
