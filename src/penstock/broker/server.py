"""Server: one loop over epoll that accepts, reads, commits once for all, confirms and delivers.

A turn: the input of all connections is scanned and staged; one commit (one sync, without the GIL) makes it durable;
replies are sent; queues deliver what became visible. No thread, future or callback per message.

``run`` is called by one thread, which does everything; ``stop`` may be called by any thread or signal handler.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import itertools
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self

from penstock.address import is_loopback
from penstock.broker import notify
from penstock.broker.broker import LAZY_S, Broker
from penstock.broker.connection import TURN_S, Connection, ConnectionLimits
from penstock.broker.endpoint import FREE_PORT, OWN_PORT, descriptors, listen
from penstock.broker.entry import Entry
from penstock.broker.limits import Limits
from penstock.broker.liveness import PROBES
from penstock.broker.queue import Queue
from penstock.broker.rights import EVERYTHING, Rights
from penstock.broker.session import Session
from penstock.broker.store import DISK_FULL, JournalStore, Store
from penstock.broker.unfinished import Unfinished
from penstock.broker.words import Disconnect
from penstock.errors import InvalidArgument, PenstockError, StateError

log = logging.getLogger("penstock.broker")
HELLO_S = 10.0  # time to show a token, or to finish the TLS handshake
HOUSEKEEPING_S = 1.0
OBSERVE_S = 0.002  # seconds per turn for counting backlogs
PAUSE_S = 0.02
ACKNOWLEDGED_S = 0.005  # how often the kernel is asked what the peers have acknowledged
RETRY_S = 1.0  # pause after a failed step of the loop
TRIM_S = 10.0  # how often the store may free what all queues have passed
TELL_FAILURE_S = 10.0
#: What a sync of a replicated store fails with when another broker leads, or this one may not wait for an answer.
OTHER_LEADS = (errno.ESTALE, errno.ETIMEDOUT)
COMMIT_BYTES = 64 << 20  # commit at once when this much is staged, so that a commit has a bound
MAX_POLL_S = 5.0


class Server:
    """A broker that listens, with its journal in ``directory``.

    ``port=0`` takes a free port: ``server.port`` says which. ``start()`` serves in a thread of its own and returns the
    server, which a ``with`` block closes; ``run()`` serves in the calling thread until ``stop()``. ``tokens``: the file
    that says who may do what; ``certificate`` and ``key``: TLS; ``client_authority``: clients need certificates of this
    authority; ``insecure``: listen off loopback without tokens. ``drain_s``: how long ending waits for what is in
    progress. Other options are those of the journal, and ``keep`` (``"1GiB"``, ``"7d"`` or ``"forever"``).
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        port: int = 9876,
        *,
        host: str = "127.0.0.1",
        limits: Limits | None = None,
        connection_limits: ConnectionLimits | None = None,
        max_connections: int = 10_000,
        tokens: str | Path | None = None,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        client_authority: str | Path | None = None,
        insecure: bool = False,
        drain_s: float = 5.0,
        store: Callable[[Any], Store] | None = None,
        leads: Callable[[], bool] | None = None,
        entry: Entry | None = None,
        **journal_options: Any,
    ) -> None:
        """``store`` creates a store other than a journal in ``directory``. When ``leads`` returns False, another broker
        has taken over the log: this one ends at once and delivers nothing more. ``entry``: who may connect, read before
        from the files that the other options name.
        """
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65_535:
            raise InvalidArgument(f"port={port!r} must be a number from 0 to 65535")
        entry = entry or Entry(
            host,
            tokens=tokens,
            certificate=certificate,
            key=key,
            client_authority=client_authority,
            insecure=insecure,
        )
        entry.warn()
        self.tokens = entry.tokens
        self.raw_allowed = entry.raw_allowed
        self._tls = entry.tls
        self.limits = limits or Limits()
        self.connection_limits = connection_limits or ConnectionLimits(max_message_bytes=self.limits.max_message_bytes)
        self.drain_s = drain_s
        self.max_connections = min(max_connections, descriptors() - 64)
        if store is None:
            if directory is None:
                raise InvalidArgument("a broker needs a directory for its journal")
            quota = self.limits.quota_bytes
            store = lambda snapshot: JournalStore(directory, snapshot, quota_bytes=quota, **journal_options)  # noqa: E731
        self._leads = leads or (lambda: True)
        self._listener = listen(host, port, FREE_PORT if leads is None else OWN_PORT)
        self.host = host
        self.port: int = self._listener.getsockname()[1]
        try:
            where = f"[{host}]" if ":" in host else host
            self.broker = Broker(store, self.limits, f"{where}:{self.port}")
        except BaseException:
            self._listener.close()
            raise
        self.broker.trusting = not self.tokens.required
        self.draining = False
        self.connections: dict[int, Connection] = {}
        self._producers: dict[str, Connection] = {}
        self._touched: set[Connection] = set()
        # connections that are not read from now; the one that has waited longest comes first
        self._paused: dict[Connection, None] = {}
        # with messages that count as acknowledged once the peer's TCP has them
        self._unacknowledged: set[Connection] = set()
        self._numbers = itertools.count(1).__next__
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._accepting = True
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Nobody may write to a descriptor's number after it was closed. A signal's function may wake too.
        self._waking = threading.RLock()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._stop = False
        self._reload = False
        self._drain_until = 0.0
        self._housekeeping = 0.0
        self._observing: Iterator[None] | None = None  # counting in progress
        self._observed = False  # whether the queues' counters are up to date
        self._told_failure = -TELL_FAILURE_S
        self._trim_at = 0.0
        self._thread: threading.Thread | None = None
        self._started = time.time()
        self.commits = 0
        self.failures = 0  # commits that failed
        self.full_since = 0.0  # since when messages found the disk full (monotonic); 0: the last ones were stored
        self._unfinished: Unfinished[Connection] = Unfinished()
        self.internal_errors = 0  # unexpected errors
        self._not_before: dict[str, float] = {}  # by step of the loop that failed: when it is tried again
        self.turns = 0
        self.accepted = 0

    # --- life

    def run(self) -> None:
        """Serve until stopped, then drain and close."""
        notify.ready(f"listening on {self.host}:{self.port}")
        try:
            while not self._finished():
                self._turn()
        finally:
            self._close()

    def start(self) -> Self:
        """Serve in a thread of its own, for programs that embed a broker. It can be started only once."""
        if self._thread is not None or self._stop:
            raise StateError(f"this server {'was closed' if self._stop else 'is running'}: make another one")
        # runs while threads still exist: native code must not run while the interpreter shuts down
        atexit.register(self.close)
        self._thread = threading.Thread(target=self.run, name="penstock-broker", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """End gracefully: accept nothing new, deliver what is in progress, close. Any thread, any signal handler."""
        self._stop = True
        self.wake()

    def wake(self) -> None:
        """Wake the loop, which then checks whether this broker still leads. Any thread."""
        with self._waking:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def cut_off(self) -> None:
        """Listen no more and end every connection, even while the loop waits for its store. Any thread."""
        for sock in (self._listener, *(connection.socket for connection in self.connections.copy().values())):
            with contextlib.suppress(OSError):  # closed already
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not that of TLS, whose state belongs to the loop
        self.wake()

    def reload(self) -> None:
        """Read the tokens again at the next turn. Any thread, any signal handler."""
        self._reload = True
        self.wake()

    def close(self) -> None:
        """Stop, and wait for the thread that ``start`` created."""
        self.stop()
        atexit.unregister(self.close)
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        else:
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _finished(self) -> bool:
        if not self._leads():
            return True
        if self._stop and not self.draining:
            self.draining = True
            self._drain_until = time.monotonic() + self.drain_s
            notify.stopping()
            self._stop_accepting()
        if not self.draining:
            return False
        # wait for answers that are not sent yet, and for acknowledgements: without them messages would be redelivered
        connections = self.connections.values()
        busy = any(c.outbox.pending_bytes or c.session.answers or c.unacknowledged for c in connections)
        busy = busy or any(queue.state.in_flight for queue in self.broker.queues.values() if queue.consumers)
        busy = busy or self.broker.large is not None
        return not busy or time.monotonic() >= self._drain_until

    def _close(self) -> None:
        with self._waking:
            if self._wake < 0:
                return
            wake, self._wake = self._wake, -1
        self._stop_accepting()
        for connection in list(self.connections.values()):
            self._drop(connection)
        self._epoll.close()
        os.close(wake)
        self.broker.close()

    # --- the loop

    def _turn(self) -> None:
        for descriptor, mask in self._epoll.poll(self._timeout()):
            self._observed = False
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
            elif descriptor in self.connections:
                self._event(self.connections[descriptor], mask)
                if self.broker.staged_bytes > COMMIT_BYTES:
                    self._commit()
            else:
                self._accept()
        self.turns += 1
        now = time.monotonic()
        if self._paused:
            self._resume()
        if self._unacknowledged:
            self._settle()
        if now >= self._housekeeping:
            self._housekeeping = now + HOUSEKEEPING_S
            self._step("housekeeping", partial(self._keep_house, now))
        if self._observing is not None:
            self._step("counting what waits", self._observe)
        now_ns = time.time_ns()
        if self.broker.delayed.state.next_time_ns <= now_ns:
            self._step("delayed messages", partial(self.broker.delayed.release, now_ns))
        self._commit()
        self._output(ending=False)  # send confirmations first, so that they do not wait for deliveries
        # Deliver nothing new while draining, nor if another broker has taken over since the commit began.
        if not self.draining and self.broker.may_hand_out and self._leads():
            self._step("delivery", self._pump)
        self._output()

    def _step(self, name: str, act: Callable[[], None]) -> None:
        """Run a step of the loop that belongs to no client. After an unexpected error it is tried again later; the loop
        goes on.
        """
        before, now = self.broker.changes, time.monotonic()
        if now < self._not_before.get(name, 0.0):
            return
        try:
            act()
        except OSError:
            raise
        except Exception:
            if not self.broker.tripped:  # otherwise only that queue waits, not the whole step
                self._not_before[name] = now + RETRY_S
            self._note_fault(name)
            if self.broker.changes != before:
                self._reopen()

    def _note_fault(self, where: str) -> None:
        log.exception("%s: internal error of the broker (%d so far)", where, self.internal_errors + 1)
        self.internal_errors += 1  # count after logging: who sees the count finds the line in the log

    def _pump(self) -> None:
        end = time.monotonic() + TURN_S
        for queue in self.broker.pump(time.time_ns(), lambda: time.monotonic() >= end):
            self.internal_errors += 1
            for consumer in [c for c in self.connections.values() if queue.name in c.session.subscriptions]:
                self._drop(consumer)

    def _observe(self) -> None:
        """Do at least one step, so that counters are updated during long work too."""
        end = time.monotonic() + OBSERVE_S
        observing, self._observing = self._observing, None
        for _ in observing or ():
            if time.monotonic() >= end:
                self._observing = observing
                return

    def _timeout(self) -> float:
        if self.broker.busy or self._touched or self._observing is not None:
            return 0.0
        if self._paused:
            return PAUSE_S if all(c.paused() or not c.could_go_on for c in self._paused) else 0.0
        if self._unacknowledged:
            return ACKNOWLEDGED_S
        timeout = LAZY_S if self.broker.dirty or self.draining else HOUSEKEEPING_S if not self._observed else MAX_POLL_S
        if self.connections and self.connection_limits.keepalive_s:
            timeout = min(timeout, max(LAZY_S, self.connection_limits.keepalive_s / PROBES))
        due_ns = self.broker.next_time_ns() - time.time_ns()
        return max(0.0, min(timeout, due_ns / 1e9))

    def _event(self, connection: Connection, mask: int) -> None:
        # both directions are closed: the peer has reset the connection
        if mask & select.EPOLLHUP and not connection.reset:
            connection.end_output()
        if mask & (select.EPOLLOUT | select.EPOLLHUP):
            self._touched.add(connection)
        readable = mask & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR)
        if readable and connection not in self._paused:
            self._serve(connection, partial(self._read, connection, connection.readable))

    def _read(self, connection: Connection, take: Callable[[], None]) -> None:
        take()
        self._note_unfinished(connection, connection.scanner.buffered_bytes)
        if connection.descriptor in self.connections and (connection.paused() or connection.working):
            self._paused[connection] = None
            self._watch(connection)

    def _note_unfinished(self, connection: Connection, size: int) -> None:
        """Note how much of an incomplete message is in memory; all connections together have a bound."""
        now = time.monotonic()
        self._unfinished.note(connection, size, now)
        most = max(self.limits.max_unfinished_bytes, 2 * self.limits.max_message_bytes)
        while self._unfinished.total > most and (slowest := self._unfinished.slowest(connection, now)) is not None:
            text = f"no room: messages that have begun to come in hold {most} bytes, the most of all clients together"
            log.warning("%s: closed: %s", slowest.peer, text)
            self._unfinished.forget(slowest)
            slowest.scanner.clear()
            self._end(slowest, text)

    def _serve(self, connection: Connection, act: Callable[[], None]) -> None:
        """Run ``act`` for one connection. An error in it ends this connection only."""
        before = self.broker.changes
        try:
            act()
        except Disconnect as end:
            if end.reason:
                log.info("%s: closed: %s", connection.peer, end.reason)
            self._end(connection, end.reason)
        except PenstockError as error:
            log.error("%s: %s", connection.peer, error)
            self._end(connection, str(error))
        except OSError as error:
            log.debug("%s: %s", connection.peer, error)
            self._drop(connection)
        except Exception:
            self._fault(connection, self.broker.changes != before)

    def _fault(self, connection: Connection, changed: bool) -> None:
        """Handle an unexpected error: close the connection. If shared state had changed already, load it from the log
        again; nothing of this turn is confirmed.
        """
        self._note_fault(connection.peer)
        if not changed:
            try:
                self._drop(connection)
                return
            except Exception:
                self._note_fault(connection.peer)
        self._forget(connection)
        connection.give_back()
        self._reopen()

    def _reopen(
        self, code: str = "unavailable", text: str = "the broker takes its state from the log again; nothing was stored"
    ) -> None:
        """Load the state from the log again. Producers that number their messages are disconnected: they reconnect and
        send the missing ones again.
        """
        for connection in list(self.connections.values()):
            if connection.session.producer and connection.session.confirms:
                self._forget(connection)
                connection.give_back()
                continue
            try:
                connection.session.cancel(code, text)
                connection.session.fail_answers(code, text)
            except Disconnect:
                self._end(connection, "")
            except Exception:
                self._note_fault(connection.peer)
                self._forget(connection)
                connection.give_back()
        self._end_unconfirmed()
        self.broker.reopen()  # if the store cannot be opened, the broker ends
        for connection in list(self.connections.values()):
            connection.session.attach()

    def _resume(self) -> None:
        """Continue connections that had to wait, and commands that take more than one turn, for at most TURN_S."""
        end = time.monotonic() + TURN_S
        busy = True
        while busy:
            busy = False
            for connection in list(self._paused):
                # it may have been dropped while an earlier one was served
                if connection not in self._paused or connection.paused():
                    continue
                self._serve(connection, partial(self._go_on, connection))
                busy = busy or (connection in self._paused and connection.could_go_on)
                if time.monotonic() >= end:
                    return

    def _go_on(self, connection: Connection) -> None:
        self._paused.pop(connection)
        connection.scan()
        self._note_unfinished(connection, connection.scanner.buffered_bytes)
        if connection.paused() or connection.working:
            self._paused[connection] = None  # at the end of the line
        else:
            self._watch(connection)

    def _commit(self) -> None:
        try:
            whole = self._store()
        except OSError as error:
            self._fail(error)
            return
        except Exception:
            self._note_fault("commit")
            self._reopen()
            return
        for connection in list(self._touched):
            if whole or not connection.session.confirms:
                self._serve(connection, connection.session.flush)

    def _store(self) -> bool:
        """Make the changes of this turn durable. False: they will be, with the end of a commit in parts."""
        broker, large = self.broker, self.broker.large
        if large is not None and large.begun:
            broker.write_part()
            if large.left:
                return False
        begins = large is not None and not large.begun
        confirm = broker.dirty and any(connection.session.confirms for connection in self._touched)
        if broker.staged_anything or confirm or broker.lazy_due() or (begins and broker.dirty):
            messages = broker.staged_bytes > 0
            broker.commit()
            self.commits += 1
            if messages:
                self.full_since = 0.0
        if begins:
            broker.begin_large()
        elif large is not None:
            for connection in self._paused:  # those that wait for the large commit continue at once
                connection.busy = True
        return True

    def _fail(self, error: OSError) -> None:
        """A commit failed: nothing of this turn is confirmed. After a failed sync the broker must be started again."""
        # only a replicated store raises this: opening it again restores what it has lost
        if error.errno == errno.ENODATA:
            log.error("the store is opened again: %s", error)
            self._reopen("unavailable", f"nothing was stored: {error}")
            return
        full = error.errno in DISK_FULL
        in_parts = self.broker.large is not None and self.broker.large.begun
        if self.broker.store.failed and not (in_parts and full):
            if error.errno not in OTHER_LEADS:  # of a replicated store: an ordinary take-over
                log.critical("the journal failed and must be opened again: %s", error)
            raise error
        now = time.monotonic()
        if now - self._told_failure > TELL_FAILURE_S:
            self._told_failure = now
            log.error("nothing can be stored now: %s", error)
        self.failures += 1  # count after logging: who sees the count finds the line in the log
        self.broker.wants_room = self.broker.wants_room or full
        if full:
            self.full_since = self.full_since or now
        text = f"nothing was stored: {'the disk is full' if full else error.strerror or error}"
        code = "full" if full else "unavailable"
        if in_parts:  # no reader has seen the parts that are on disk; opening again removes them
            self._reopen(code, text)
            return
        for connection in list(self.connections.values()):
            self._serve(connection, partial(connection.session.fail_answers, code, text))
        self._end_unconfirmed()

    def _end_unconfirmed(self) -> None:
        """Disconnect clients that learn of a failed commit only by a closed connection: producers that number their
        messages, and clients without replies.
        """
        for connection in list(self.connections.values()):
            if connection.session.failed and (connection.session.producer or not connection.session.hello):
                self._end(connection, "")

    def _output(self, ending: bool = True) -> None:
        """Send pending output. With ``ending``, connections that end are closed afterwards; call it so after
        deliveries.
        """
        touched, self._touched = self._touched, set()
        for connection in touched:
            if connection.ending and not ending:
                self._touched.add(connection)
                continue
            if connection.descriptor in self.connections:
                self._serve(connection, partial(self._send, connection))
            if connection.session.answers and self.broker.large is not None:
                self._touched.add(connection)  # its answers wait for the end of a commit in parts

    def _settle(self) -> None:
        """Ask the kernel what the peers have acknowledged: there is no event for it."""
        for connection in list(self._unacknowledged):
            self._serve(connection, connection.settle)
            if not connection.unacknowledged:
                self._unacknowledged.discard(connection)
                if connection.ending and not connection.outbox.pending_bytes:
                    self._drop(connection)

    def _send(self, connection: Connection) -> None:
        before = connection.wants_write
        connection.send()
        if connection.unacknowledged:
            self._unacknowledged.add(connection)
        if connection.ending and not (connection.outbox.pending_bytes or connection.unacknowledged):
            self._drop(connection)
        elif connection.wants_write != before:
            self._watch(connection)

    def _touch(self, connection: Connection) -> None:
        """Note that the connection has output, or replies that become output after the commit."""
        self._touched.add(connection)

    def _watch(self, connection: Connection) -> None:
        mask = 0 if connection in self._paused or connection.ending else select.EPOLLIN
        self._epoll.modify(connection.descriptor, mask | (select.EPOLLOUT if connection.wants_write else 0))

    def _end(self, connection: Connection, reason: str) -> None:
        """Close the connection when its pending output is sent. A client that does not read it delays nobody else."""
        connection.end(reason)
        self._watch(connection)
        self._touched.add(connection)

    def _drop(self, connection: Connection) -> None:
        if self._forget(connection):
            connection.close()

    def _forget(self, connection: Connection) -> bool:
        if self.connections.get(connection.descriptor) is not connection:
            return False
        del self.connections[connection.descriptor]
        log.debug("%s: has gone", connection.peer)
        self._unfinished.forget(connection)
        self._paused.pop(connection, None)
        self._unacknowledged.discard(connection)
        self._touched.discard(connection)
        if self._producers.get(connection.session.producer) is connection:
            del self._producers[connection.session.producer]
        with contextlib.suppress(OSError):
            self._epoll.unregister(connection.descriptor)
        return True

    # --- accepting

    def _accept(self) -> None:
        for _ in range(64):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if self._leads():  # else it was cut off
                    log.warning("cannot accept: %s", error)
                return
            if len(self.connections) >= self.max_connections:
                sock.close()
                continue
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection = Connection(
                    self, sock, f"{address[0]}:{address[1]}", is_loopback(address[0]), self.connection_limits,
                    self._numbers, self._touch, self._tls,
                )  # fmt: skip
            except OSError as error:  # the peer disconnected before it was accepted
                log.debug("%s: %s", address[0], error)
                sock.close()
                continue
            self.connections[connection.descriptor] = connection
            self._epoll.register(connection.descriptor, select.EPOLLIN)
            self.accepted += 1
            log.debug("%s: connected", connection.peer)

    def _stop_accepting(self) -> None:
        if self._accepting:
            self._accepting = False
            self._epoll.unregister(self._listener)
            self._listener.close()

    # --- once a second

    def _keep_house(self, now: float) -> None:
        if self._reload:
            self._reload = False
            self._reload_tokens()
        self.broker.transactions.forget_idle()
        self._observing = self._observing or self.broker.observing()
        self._observed = True
        self._drop_silent(now)
        if now >= self._trim_at or self.broker.wants_room or self.broker.store.full:
            self._trim_at = now + (0.0 if self.broker.trim() else TRIM_S)
        if self.tokens.required or self._tls is not None:
            for connection in list(self.connections.values()):
                if now - connection.opened > HELLO_S and not (connection.session.hello and connection.secure):
                    self._drop(connection)

    def _drop_silent(self, now: float) -> None:
        """Drop the connections whose peers have vanished; each is checked three times per time-out."""
        every_s = self.connection_limits.keepalive_s / PROBES
        for connection in list(self.connections.values()) if every_s else ():
            if now >= connection.look_at:
                connection.look_at = now + every_s
                if connection.liveness.silent():
                    log.info("%s: closed: it was silent for %g s", connection.peer, every_s * PROBES)
                    self._drop(connection)

    def _reload_tokens(self) -> None:
        try:
            self.tokens.reload()
        except (OSError, InvalidArgument) as error:
            log.error("the file of tokens was not reloaded, the old rights stay: %s", error)
            return
        for connection in list(self.connections.values()):
            connection.scanner.forget_topics()
            rights = self.tokens.rights(connection.session.token or "")
            if rights is None:
                connection.session.end()  # deliver nothing more while the pending output is sent
                self._end(connection, "this token is not known any more")
                continue
            session = connection.session
            session.rights = rights
            queues = [subscription.queue for subscription in session.subscriptions.values()]
            lost = next((queue for queue in queues if not session.may_read(queue)), None)
            if lost is not None:
                self._withdraw(connection, lost)

    # --- what sessions ask for

    def rights_of(self, token: str | None, session: Session) -> Rights:
        """What the token allows; raises Disconnect if it is not valid."""
        rights = self.tokens.rights(token or "")
        if rights is None:
            raise Disconnect("this token is not known" if token else "HELLO needs token=")
        return rights

    def take_over(self, producer: str, session: Session) -> None:
        """Drop an older connection of the same producer, with its unread input."""
        old = self._producers.get(producer)
        if old is not None and old.session is not session:
            self._drop(old)
        for connection in self.connections.values():
            if connection.session is session:
                self._producers[producer] = connection

    def evict_lost(self, queue: Queue) -> bool | None:
        """Probe the consumers of an exclusive queue."""
        for connection in [found for found in self.connections.values() if queue.name in found.session.subscriptions]:
            there = connection.liveness.probe()
            if there is False:
                log.info(
                    "%s: closed: it missed its probe, and another client wants queue %s", connection.peer, queue.name
                )
                self._drop(connection)
            else:
                return there
        return None

    def withdraw(self, session: Session, queue: Queue) -> None:
        """End a consumer whose queue has got topics that it may not read."""
        connection = next((found for found in self.connections.values() if found.session is session), None)
        if connection is not None:
            self._withdraw(connection, queue)

    def _withdraw(self, connection: Connection, queue: Queue) -> None:
        """Close the connection and tell its client why. The client may subscribe again to the queues that it may still
        read.
        """
        connection.session.end()  # deliver nothing more while the pending output is sent
        if not connection.ending:
            self._end(connection, f"queue {queue.name} is not yours to read any more")

    def shutdown(self) -> None:
        """A client asked the server to end."""
        log.info("shutting down, as a client asked")
        self.stop()

    def statistics(self) -> dict[str, Any]:
        """Counts for STATS."""
        stored = self.broker.store.statistics()
        return {
            "journal": self.broker.store.identity,
            "uptime_s": round(time.time() - self._started, 3),
            "connections": len(self.connections),
            "accepted": self.accepted,
            "queues": len(self.broker.queues),
            "consumers": sum(len(queue.consumers) for queue in self.broker.queues.values()),
            "published": self.broker.counters.get("matched"),
            "expired": self.broker.expired,
            "commits": self.commits,
            "internal_errors": self.internal_errors,
            "first": stored.first,
            "next": stored.next,
            "stored_bytes": stored.stored_bytes,
            "quota_bytes": self.limits.quota_bytes,
            "keep": getattr(self.broker.store, "kept", ""),
            "staged_bytes": self.broker.transactions.staged_bytes,
            "unfinished_bytes": self._unfinished.total,
        }


__all__ = ["EVERYTHING", "Server"]
