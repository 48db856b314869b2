"""Subscriber: merges the streams of any number of publishers, each over a session of its own.

Rules:

- ``read`` receives in the caller's own thread, directly from the sockets. Threads that read one handle take turns.
- ``on_message(function)`` with ``process_all`` calls it in the caller's thread; with ``delivery="synchronous"`` the
  executor calls it for every message, in order (a slow function slows the publisher, through TCP); with
  ``delivery="newest"`` it gets the newest message that has arrived when it returns; skipped ones count as dropped.
- A message names its session (``message.source``) and the publisher's address (``message.channel``).
- Ordinals and times are the publisher's if it is one of ours. Otherwise ordinals count from 1 for each connection, and
  the time is that of receipt.
"""

from __future__ import annotations

import contextlib
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
from penstock.address import check_host_name
from penstock.channel import Function, Ledger, Terms, check_timeout, choose, refuse_read
from penstock.channel import Subscriber as SubscriberContract
from penstock.errors import CapacityError, ClosedError, InvalidArgument, PenstockError, ProtocolError, RefusedError
from penstock.history import check_start, wants_past
from penstock.tcp import sockets
from penstock.tcp.executor import READ, Executor, default_executor
from penstock.tcp.log import logger
from penstock.tcp.protocol import Agreed, Request, Wanted
from penstock.tcp.session import Session, SessionState, Target
from penstock.types.schema import MAX_VERSIONS

if TYPE_CHECKING:
    import datetime
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
        start: int | str | datetime.datetime | None = None,
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
        self._wanted = Wanted(past=wants_past(history), start="" if start is None else check_start(start))
        self._identity = os.urandom(16)
        # Always enough for one message of the largest size besides those that the user still holds.
        held = max(held_bytes, 4 * max_message_size, 8 << 20)
        self._inlet = native.Inlet(max_message_size, held, name)
        self._sessions: dict[int, Session] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self._in_callback = threading.RLock()
        self._delivery = Delivery.PROCESS_ALL
        self._closing = False
        self._full_logged = False
        self._terms: Terms | None = None
        self._schemas: list[str] = []  # those of the handshakes, each once, the newest last
        self.refusal: PenstockError | None = None  #: why a session ended whose publisher's type does not match ours
        self._owner_pid = os.getpid()
        # Holds this: whoever has `subscriber.read` alone, which is a method of the inlet, has the subscriber.
        self._inlet.on_lost(self._on_connection_lost)
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
        targets = _targets(host, port)
        with self._lock:
            self._check_open()
            session = Session(self, next(self._numbers), targets, max_reconnects)
            self._sessions[session.number] = session
            self._inlet.finish(False, "")  # all sessions may have ended: reading is open again
        self.executor.call_soon(session.connect)
        return session

    @property
    def sessions(self) -> list[Session]:
        """All that have not been cancelled."""
        with self._lock:
            return list(self._sessions.values())

    def agree(self, terms: Terms) -> None:
        """Check the publishers' schemas: those that are connected now, the others in their handshakes.

        A schema that does not match ends the connection; when no session is left, reading ends with ``refusal``, until
        a publisher comes whose schema matches.
        """
        with self._lock:
            self._terms = terms
            refused = [
                session for session in self._sessions.values() if not self._accepts_schema(session.schema, session)
            ]
        for session in refused:
            session.disagree()
            self._inlet.detach(session.number)
            session.close_sockets()

    def _accepts_schema(self, schema: str, session: Session) -> bool:
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
        """The schema from its publisher's handshake; None if there was none, or nobody is connected."""
        return next((session.schema for session in self.sessions if session.schema), None)

    def schemas_of(self, topic: str | None) -> list[str]:
        """Those of all publishers that it was connected to, the newest last: what they sent may still be unread."""
        return self._schemas

    def note_schema(self, schema: str) -> None:
        """A session is connected to a publisher of this schema. The executor's thread calls it."""
        if schema:
            self._schemas = [*(one for one in self._schemas if one != schema), schema][-MAX_VERSIONS:]

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
        """A session has ended. When all have, ``read`` raises once everything is read."""
        logger.warning("session to %s ended: %s", session.publisher, session.last_error)
        self.check_end(session)

    def check_end(self, session: Session) -> None:
        """A session has ended, or has a publisher of another type: reading ends where no other is left."""
        with self._lock:
            over = all(one.disagrees or one.state is SessionState.ENDED for one in self._sessions.values())
            # With the lock: otherwise this could overwrite the `finish(False)` of a session that is being added.
            self._inlet.finish(over, session.refused)

    def agrees_again(self) -> None:
        """A publisher of our type has come after one of another: reading goes on."""
        with self._lock:
            self._inlet.finish(False, "")
            self.refusal = None  # last: who finds reading ended finds the reason

    def attach(self, session: Session, connection: socket.socket, agreed: Agreed, fresh: bool) -> int:
        """Hand a connected socket to the native core, which reads it. Gives the connection's serial number."""
        serial = self._inlet.attach(
            session.number, connection.fileno(), agreed.extended, fresh, agreed.next_ordinal, agreed.past,
            session.publisher, session,
        )
        self._count_peers()
        return serial

    def new_request(self, session: Session) -> Request:
        """The protocol state of a new connection; with ``start=`` it goes on where the last connection ended."""
        wanted = self._wanted
        if wanted.start:
            wanted = replace(wanted, last=(session.identity, self._inlet.last_ordinal(session.number)))
        return Request(self._token, extended=self._extended, identity=self._identity, wanted=wanted)

    def count_error(self) -> None:
        self._inlet.error()

    def _on_connection_lost(self, number: int, serial: int, reason: str, error: int, messages: int) -> None:
        session = self._sessions.get(number)
        if session is not None:
            session.lost(serial, reason, error, messages)

    def _count_peers(self) -> None:
        self._inlet.peers(sum(session.connected for session in self.sessions))

    # -- reading

    def read(self, timeout: float | None = None) -> Message | None:
        """The next message of any session, or None after ``timeout`` seconds."""
        return self._inlet.read(timeout)

    def read_many(self, most: int = 1024, timeout: float | None = None) -> Batch:
        """Up to ``most`` messages of one session that have arrived; waits for the first one."""
        return self._inlet.read_many(most, timeout)

    def read_newest(self, timeout: float | None = None) -> Message | None:
        """The newest message that has arrived; older ones are skipped and counted as dropped."""
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
        """How much receive memory messages use now, incomplete ones included."""
        return self._inlet.held_bytes

    # -- callbacks

    def _available_messages(self) -> Iterator[Message]:
        come = self._inlet.come()
        while not self._inlet.given(come) and (message := self._inlet.read(0)) is not None:
            yield message

    def on_message(self, function: Function, delivery: Delivery | str = Delivery.PROCESS_ALL) -> Function:
        """Set the function that is called with each message, and who calls it; None unsets it.

        The function itself may call this.
        """
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
            with self._in_callback:  # wait for a call that is running in another thread
                pass
        return function

    @property
    def _calls_by_itself(self) -> bool:
        return self._caller is not None or self._delivery is not Delivery.PROCESS_ALL

    def _deliver(self) -> None:
        """In an executor's thread: call the function with what has arrived, then watch for more."""
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
                self._call_and_log(function, message)
        with self._lock:
            if self._closing or self._delivery is Delivery.PROCESS_ALL:
                return
            if more:  # messages received ahead are in our buffer, so the descriptor may never become readable
                self.executor.call_soon(self._deliver)
            else:
                self.executor.watch(self._inlet.fileno(), READ, self._deliver)

    def _deliver_later(self, error: CapacityError) -> None:
        """The user's messages use all the receive memory. Poll: nothing notifies us when they are released."""
        if not self._full_logged:
            self._full_logged = True
            logger.warning("%r: %s", self, error)
        with self._lock:
            if not self._closing and self._delivery is not Delivery.PROCESS_ALL:
                self.executor.call_later(FULL_RETRY_S, self._deliver)

    def _call_and_log(self, function: Callable[[Message], Any], message: Message) -> None:
        try:
            function(message)
        except BaseException:  # SystemExit too: the thread belongs to the executor
            logger.exception("the function of on_message failed with %r", message)
            self._inlet.error()  # count after logging: who sees the count finds the line in the log

    # -- the end

    def _check_open(self) -> None:
        if self._closing:
            raise ClosedError("this subscriber is closed")

    @property
    def closed(self) -> bool:
        return self._closing

    def close(self) -> None:
        """End all sessions. Waits for a callback that is running, unless the callback calls this."""
        self._end(wake_readers=True)

    def end_at_exit(self) -> None:
        """As ``close``, but leaves a daemon thread waiting in ``read``: at exit nobody could handle its error."""
        self._end(wake_readers=False)

    def _end(self, wake_readers: bool) -> None:
        if self._owner_pid != os.getpid():
            return  # a forked child's copy: the connections belong to the parent
        with self._lock:
            if self._closing:
                return
            self._closing = True
            sessions = list(self._sessions.values())
        self.executor.unwatch(self._inlet.fileno())
        for session in sessions:
            session.end_quietly()
        if wake_readers:
            self._inlet.close()  # readers let go of the sockets, which are closed next
        for session in sessions:
            session.close_sockets()
        with self._in_callback:
            pass
        self._use_native_read()

    def __del__(self) -> None:
        """Forgotten: a thread of the executor ends its sessions, so that no publisher waits for it."""
        if vars(self).get("_closing") is False and self._owner_pid == os.getpid():
            with contextlib.suppress(ClosedError):
                self.executor.call_soon(partial(Subscriber.close, self))

    def __repr__(self) -> str:
        publishers = ", ".join(session.publisher for session in self.sessions) or "nobody yet"
        return f"<tcp.Subscriber of {publishers}{', closed' if self.closed else ''}>"


def _targets(host: Any, port: Any) -> list[Target]:
    """The hosts of a session with their ports, checked."""
    hosts = [host] if isinstance(host, str) or not isinstance(host, Sequence) or isinstance(host, bytes) else host
    if not hosts:
        raise InvalidArgument("a session needs at least one host")
    targets = [tuple(one) if isinstance(one, (tuple, list)) and len(one) == 2 else (one, port) for one in hosts]
    for name, number in targets:
        check_host_name(name)
        sockets.check_port(number)
    return targets
