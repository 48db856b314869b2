"""Subscriber: aggregates the streams of any number of publishers, each over a session of its own.

Rules:

- ``read`` receives in the caller's own thread: nothing stands between the socket and the reader. One thread at a time.
- ``on_message(function)`` with ``process_all`` calls it in the caller's thread; with ``delivery="synchronous"`` the
  executor calls it for every message, in order (a slow function slows the publisher, through TCP); with
  ``delivery="newest"`` it gets the newest message that is there when it returns, and what was passed over is counted.
- A message says its session (``message.source``) and the publisher's address (``message.channel``).
- Ordinals and times are the publisher's where it is one of ours; else they count from 1 per connection, at receipt.
"""

from __future__ import annotations

import enum
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock._core import tcp as native
from penstock.channel import Ledger, Terms, check_timeout, choose, refuse_read
from penstock.channel import Subscriber as SubscriberContract
from penstock.errors import CapacityError, ClosedError, InvalidArgument, PenstockError, ProtocolError, RefusedError
from penstock.history import check_start
from penstock.tcp import sockets
from penstock.tcp.executor import READ, Executor, default_executor
from penstock.tcp.log import logger
from penstock.tcp.protocol import Agreed, Request, Wanted
from penstock.tcp.session import Session, SessionState

if TYPE_CHECKING:
    import socket
    import ssl

    from penstock._core import Batch, Message

MESSAGES_PER_TURN = 1000
FULL_RETRY_S = 0.05


class Delivery(enum.StrEnum):
    """Who calls the function of ``on_message``, and with what."""

    PROCESS_ALL = "process_all"
    SYNCHRONOUS = "synchronous"
    NEWEST = "newest"


class Subscriber(SubscriberContract):
    """One reading handle over any number of sessions."""

    def __init__(
        self,
        *,
        extended: bool = True,
        tls: ssl.SSLContext | None = None,
        token: str | bytes | None = None,
        max_message_size: int = 256 << 20,
        held_bytes: int = 1 << 30,
        handshake_timeout: float = 10.0,
        keepalive: float | None = 15.0,
        reconnect_delay: float = 0.05,
        reconnect_delay_max: float = 2.0,
        name: str = "",
        executor: Executor | None = None,
        history: bool = True,
        start: int | str | None = None,
    ) -> None:
        if not 0 <= max_message_size < 1 << 40:
            raise InvalidArgument(f"max_message_size={max_message_size} must be from 0 to {(1 << 40) - 1} bytes")
        if token is not None and not extended:
            raise InvalidArgument("token= needs extended=True: plain version 0 has no authentication")
        if start is not None and not extended:
            raise InvalidArgument("start= needs extended=True: plain version 0 has no past")
        self.max_message_size = max_message_size
        self.tls = tls
        self.handshake_timeout = check_timeout(handshake_timeout, "handshake_timeout") or 10.0
        self.keepalive = check_timeout(keepalive, "keepalive")
        self.reconnect_delay = check_timeout(reconnect_delay, "reconnect_delay") or 0.001
        self.reconnect_delay_max = max(self.reconnect_delay, reconnect_delay_max)
        self.executor = executor if executor is not None else default_executor()
        self.executor.check_open()
        self._token = sockets.check_secrets(token, tls, "subscriber")
        self._extended = extended
        self._wanted = Wanted(past=history, start="" if start is None else check_start(start))
        self._identity = os.urandom(16)
        # Room for a message of the largest size beside what the user holds, whatever was asked for.
        held = max(held_bytes, 4 * max_message_size, 8 << 20)
        self._inlet = native.Inlet(max_message_size, held, name)
        self._sessions: dict[int, Session] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self._in_callback = threading.RLock()
        self._delivery = Delivery.PROCESS_ALL
        self._closing = False
        self._told_full = False
        self._terms: Terms | None = None
        self.refusal: PenstockError | None = None  #: its publisher's type does not go with ours: a session ended
        self._owner_pid = os.getpid()
        self._inlet.on_lost(_lost_of(weakref.ref(self)))
        self._use_native_read()
        self.executor.handles.add(self)

    def _use_native_read(self) -> None:
        """The native methods themselves, so that a message costs no Python frame."""
        vars(self)["read"] = self._inlet.read
        vars(self)["read_many"] = self._inlet.read_many

    # -- sessions

    def add_session(
        self, host: str | Sequence[str | tuple[str, int]], port: int = 0, max_reconnects: int = -1
    ) -> Session:
        """Connect to ``host`` (or to the first of a list that answers) and stay connected.

        A host is a name or an address; one that begins with ``/`` is the path of a unix socket; an entry of a list may
        bring its own port as ``(host, port)``.
        """
        hosts = [host] if isinstance(host, str) else list(host)
        if not hosts:
            raise InvalidArgument("a session needs at least one host")
        targets = [(one, port) if isinstance(one, str) else (one[0], one[1]) for one in hosts]
        for target in targets:
            sockets.check_port(target[1])
        with self._lock:
            self._check_open()
            session = Session(self, next(self._numbers), targets, max_reconnects)
            self._sessions[session.number] = session
            self._inlet.finish(False)
        self.executor.call_soon(session.connect)
        return session

    @property
    def sessions(self) -> list[Session]:
        """All that have not been cancelled."""
        with self._lock:
            return list(self._sessions.values())

    def agree(self, terms: Terms) -> None:
        """A publisher tells its schema when it greets: whoever has done so is looked at now, the others then.

        One that does not go with it ends its session; when no session is left reading ends with ``refusal``.
        """
        with self._lock:
            self._terms = terms
            refused = [session for session in self._sessions.values() if not self._goes_with(session.schema, session)]
        for session in refused:
            session.refuse(str(self.refusal))
            self._inlet.detach(session.number)
            session.close_sockets()

    def _goes_with(self, schema: str, session: Session) -> bool:
        if self._terms is None:
            return True
        try:
            self._terms.check(schema, session.publisher)
        except (RefusedError, ProtocolError) as error:
            self.refusal = error
            return False
        return True

    @property
    def schema(self) -> str | None:
        """What the greeting of its publisher said of the messages; None where nothing was said, or nobody is there."""
        return next((session.schema for session in self.sessions if session.schema), None)

    def forget(self, session: Session) -> None:
        """A session was cancelled; wait for a callback that runs, unless this is called inside it."""
        if self._owner_pid == os.getpid():
            self._inlet.detach(session.number)
        session.close_sockets()
        with self._lock:
            self._sessions.pop(session.number, None)
        with self._in_callback:
            pass
        self._count_peers()

    def ended(self, session: Session) -> None:
        """A session gave up. When all have, a reader learns it once everything is read."""
        logger.warning("session to %s ended: %s", session.publisher, session.last_error)
        with self._lock:
            over = all(one.state is SessionState.ENDED for one in self._sessions.values())
            self._inlet.finish(over)  # with the lock: a session that is added now has the last word

    def attach(self, session: Session, connection: socket.socket, agreed: Agreed, fresh: bool) -> int:
        """A session is connected: the native core reads it. Gives the connection's serial number."""
        serial = self._inlet.attach(
            session.number, connection.fileno(), agreed.extended, fresh, agreed.next_ordinal, agreed.past,
            session.publisher, session,
        )
        self._count_peers()
        return serial

    def new_request(self, session: Session) -> Request:
        """The protocol's side of a new connection; who began in the past goes on where it was."""
        wanted = self._wanted
        if wanted.start:
            wanted = replace(wanted, last=(session.identity, self._inlet.last_ordinal(session.number)))
        return Request(self._token, extended=self._extended, identity=self._identity, wanted=wanted)

    def count_error(self) -> None:
        self._inlet.error()

    def _lost(self, number: int, serial: int, reason: str, error: int, messages: int) -> None:
        session = self._sessions.get(number)
        if session is not None:
            session.lost(serial, reason, error, messages)

    def _count_peers(self) -> None:
        self._inlet.peers(sum(session.connected for session in self.sessions))

    # -- reading

    def read(self, timeout: float | None = None) -> Message | None:
        """The next message of any session, or None when the time is over."""
        return self._inlet.read(timeout)

    def read_many(self, most: int = 1024, timeout: float | None = None) -> Batch:
        """Up to ``most`` messages of one session that are there."""
        return self._inlet.read_many(most, timeout)

    def read_newest(self, timeout: float | None = None) -> Message | None:
        """The newest message that is there; older ones are passed over and counted as dropped."""
        return self._inlet.read_newest(timeout)

    def wait(self, timeout: float | None = None) -> bool:
        return self._inlet.wait(timeout)

    def fileno(self) -> int:
        self._check_open()
        return self._inlet.fileno()

    @property
    def ledger(self) -> Ledger:
        matched, delivered, dropped, in_flight = self._inlet.ledger()
        return Ledger(matched, delivered, dropped, 0, in_flight)

    @property
    def held_bytes(self) -> int:
        """Receive memory that messages (and half-received ones) hold now."""
        return self._inlet.held_bytes

    # -- callbacks

    def _there(self) -> Iterator[Message]:
        come = self._inlet.come()
        while not self._inlet.given(come) and (message := self._inlet.read(0)) is not None:
            yield message

    def on_message(
        self, function: Callable[[Message], Any] | None, delivery: Delivery | str = Delivery.PROCESS_ALL
    ) -> None:
        """What is called with each message, and by whom; None unsets it. It may be changed inside the function."""
        chosen = choose(Delivery, delivery, "delivery")
        with self._lock:
            self._check_open()
            before, self._delivery = self._delivery, Delivery.PROCESS_ALL if function is None else chosen
            super().on_message(function)
            if self._delivery is Delivery.PROCESS_ALL:
                if self._caller is None:
                    self._use_native_read()
                if before is not Delivery.PROCESS_ALL:
                    self.executor.unwatch(self._inlet.fileno())
            else:
                vars(self)["read"] = vars(self)["read_many"] = partial(refuse_read, weakref.ref(self))
                self.executor.watch(self._inlet.fileno(), READ, self._deliver)
        if function is None:
            with self._in_callback:  # one that runs in another thread ends before this returns
                pass

    @property
    def _calls_by_itself(self) -> bool:
        return self._caller is not None or self._delivery is not Delivery.PROCESS_ALL

    def _deliver(self) -> None:
        """In an executor's thread: call the function with what is there, then listen again."""
        more = True
        with self._in_callback:
            for _ in range(MESSAGES_PER_TURN):
                function, delivery = self._callback, self._delivery
                if function is None or delivery is Delivery.PROCESS_ALL or self._closing:
                    return
                try:
                    newest = delivery is Delivery.NEWEST
                    message = self._inlet.read_newest(0) if newest else self._inlet.read(0)
                except ClosedError:
                    return
                except CapacityError as error:
                    self._deliver_later(error)
                    return
                if message is None:
                    more = False
                    break
                self._call_quietly(function, message)
        with self._lock:
            if self._closing or self._delivery is Delivery.PROCESS_ALL:
                return
            if more:  # what was received ahead does not show at the descriptor
                self.executor.call_soon(self._deliver)
            else:
                self.executor.watch(self._inlet.fileno(), READ, self._deliver)

    def _deliver_later(self, error: CapacityError) -> None:
        """Messages that the user holds take all the memory: try again, for nothing tells when they are given back."""
        if not self._told_full:
            self._told_full = True
            logger.warning("%r: %s", self, error)
        with self._lock:
            if not self._closing and self._delivery is not Delivery.PROCESS_ALL:
                self.executor.call_later(FULL_RETRY_S, self._deliver)

    def _call_quietly(self, function: Callable[[Message], Any], message: Message) -> None:
        try:
            function(message)
        except BaseException:  # an exit too: the thread is the executor's
            self._inlet.error()
            logger.exception("the function of on_message failed with %r", message)

    # -- the end

    def _check_open(self) -> None:
        if self._closing:
            raise ClosedError("this subscriber is closed")

    @property
    def closed(self) -> bool:
        return self._closing

    def close(self) -> None:
        """End all sessions. A callback that runs is waited for, unless this is called inside it."""
        self._end(wake_readers=True)

    def end_at_exit(self) -> None:
        """As ``close``, but a daemon thread that waits in ``read`` stays there: nobody could handle its error."""
        self._end(wake_readers=False)

    def _end(self, wake_readers: bool) -> None:
        if self._owner_pid != os.getpid():
            return  # a child's copy: nothing of it is ours to end
        with self._lock:
            if self._closing:
                return
            self._closing = True
            sessions = list(self._sessions.values())
        self.executor.unwatch(self._inlet.fileno())
        for session in sessions:
            session.end_quietly()
        if wake_readers:
            self._inlet.close()
        for session in sessions:
            session.close_sockets()
        with self._in_callback:
            pass
        self._use_native_read()

    def __repr__(self) -> str:
        return f"<tcp.Subscriber of {', '.join(session.publisher for session in self.sessions) or 'nobody yet'}>"


def _lost_of(subscriber: weakref.ref[Subscriber]) -> Callable[[int, int, str, int, int], None]:
    """What the native core calls; it must not keep the subscriber alive."""

    def lost(number: int, serial: int, reason: str, error: int, messages: int) -> None:
        alive = subscriber()
        if alive is not None:
            alive._lost(number, serial, reason, error, messages)

    return lost
