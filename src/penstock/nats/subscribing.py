"""Subscriber of a subject: messages wait in a bounded buffer that the loop's thread fills.

Core NATS: messages that find the buffer full are dropped and counted, as the protocol knows no back-pressure.
JetStream: as many are fetched as there is room for, and those that were read are acknowledged with the next read, or by
``close`` when the block was left without an error; ``close`` gives the others back. A server redelivers what was given
back first, but in the order of giving back: the next reader fetches all of that and sorts it before it hands anything
out. Any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import itertools
import json
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from penstock import channel
from penstock._core import Counters, Message
from penstock.channel import Deadline, Ledger
from penstock.errors import ClosedError, InvalidArgument, PenstockError, RefusedError
from penstock.nats.connection import Access, Connection, check_subject, properties_of
from penstock.topics import covers, overlap

MAX_WAITING, MAX_WAITING_BYTES = 65_536, 64 << 20
FETCH, FETCH_S = 256, 1.0
RETRY_S = 0.5
GIVE_BACK_S = 5.0
REQUEST_END_S = 1.0  # how long who leaves waits for the end of a request, which takes one round trip
HEARTBEAT, NO_MESSAGES, EXPIRED, NO_RESPONDERS = "100", "404", "408", "503"  # what a server says of a request
log = logging.getLogger("penstock.nats")


class Subscriber(channel.Subscriber):
    """Reads one subject or pattern: what a JetStream stream has stored (``stream``), or core NATS."""

    def __init__(
        self,
        access: Access,
        subject: str,
        *,
        queue: str = "",
        stream: str = "",
        durable: str = "",
        new: bool = False,
        from_time_ns: int | None = None,
    ) -> None:
        self.subject = check_subject(subject, wildcards=True)
        begins = {"new": new or None, "from_time_ns": from_time_ns}
        begin = [name for name, value in begins.items() if value is not None]
        for option in ["durable"] * bool(durable) + begin:
            if not stream:
                raise InvalidArgument(f"{option}= is for a JetStream stream: give stream=NAME too")
        if begin and durable:
            raise InvalidArgument(f"{begin[0]}= does not go with durable=, which goes on where it was")
        if len(begin) > 1:
            raise InvalidArgument("give new= or from_time_ns=, not both")
        self._from = None if from_time_ns is None else _moment(from_time_ns)
        self._new = new
        for option, name in (("stream", stream), ("durable", durable)):
            if not name.isprintable() or set(name) & set(" .*>/\\"):
                raise InvalidArgument(
                    f"{option}={name!r} is no name at a NATS server: no blanks and none of . * > / \\"
                )
        if queue and stream:
            raise InvalidArgument("queue= is core NATS; readers of a stream share its messages by durable=NAME")
        self._counters = Counters("nats", "subscriber", f"{access.place}/{subject}")
        self._final: Ledger | None = None
        self._waiting: deque[Message] = deque()
        self._bytes = 0
        self._unacknowledged: list[Any] = []  # messages of JetStream that were read and not acknowledged yet
        self._count = 0
        self._lock = threading.Lock()
        self._ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._failed = False  # the block was left by an error
        self._jetstream = bool(stream)
        self._refused = ""  # why the last request for messages was
        self._following = 1  # after the last message of the stream that has arrived
        self._returned = 0  # messages of the consumer that were not acknowledged when this reader came
        self._gathered: list[Any] | None = None  # the returned messages fetched so far; None once all have arrived
        self._leaves = False  # ask for nothing more
        self._may_break_off = False  # the request under way is for what is not there yet
        try:
            self._connection = Connection(access)
            try:
                self._connection.run(self._begin(queue, stream, durable), access.timeout)
            except BaseException:
                self._connection.close()
                raise
        except BaseException:
            self._counters.close()
            os.close(self._ready)
            raise

    async def _begin(self, queue: str, stream: str, durable: str) -> None:
        client = self._connection.client
        if not stream:
            await client.subscribe(self.subject, queue=queue, cb=self._arrived)
            await client.flush()
            return
        self._consumer = stream, await self._open_consumer(stream, durable)
        self._inbox = client.new_inbox()
        self._pulled = await client.subscribe(f"{self._inbox}.*", cb=self._answered)
        self._durable = durable
        self._pulling = asyncio.create_task(self._pull())

    async def _open_consumer(self, stream: str, durable: str) -> str:
        """The name of the stream's consumer, which is made where it is not there."""
        from nats.errors import NoRespondersError
        from nats.js.errors import NotFoundError, ServiceUnavailableError

        place = self._connection.access.place
        jetstream = self._connection.client.jetstream(timeout=self._connection.access.timeout)
        try:
            if durable:
                with contextlib.suppress(NotFoundError):
                    known = await jetstream.consumer_info(stream, durable)
                    await self._refuse_other(jetstream, known)
                    self._returned = known.num_ack_pending or 0
                    return durable
            return await self._make_consumer(jetstream, stream, durable)
        except NotFoundError:
            raise RefusedError(f"nats://{place} has no stream {stream}") from None
        except (NoRespondersError, ServiceUnavailableError) as error:
            if said := getattr(error, "description", None):
                raise RefusedError(f"nats://{place} does not give stream {stream}: {said}") from None
            hint = "start it with -js, or read without stream="
            raise RefusedError(f"nats://{place} has no JetStream, so no stream {stream}: {hint}") from None

    async def _refuse_other(self, jetstream: Any, known: Any) -> None:
        """A durable that exists already may give this reader other messages than those of its subject."""
        name, consumer = f"durable {known.name} of stream {known.stream_name}", known.config
        if consumer.deliver_subject:
            raise RefusedError(f"{name} is a push consumer, which cannot be read like this: take another name")
        if filters := [consumer.filter_subject] if consumer.filter_subject else consumer.filter_subjects or []:
            if filters != [self.subject]:
                raise RefusedError(f"{name} reads {', '.join(filters)}, not {self.subject}: take another name")
        elif self.subject != ">":
            every = (await jetstream.stream_info(known.stream_name)).config.subjects or [">"]  # a mirror names none
            if not all(covers(self.subject, taken) for taken in every):
                raise RefusedError(f"{name} reads every subject, not {self.subject} alone: take another name")

    async def _make_consumer(self, jetstream: Any, stream: str, durable: str) -> str:
        config = (await jetstream.stream_info(stream)).config
        elsewhere = config.sources or config.mirror or config.subject_transform  # its messages have other subjects
        if not elsewhere and not any(overlap(self.subject, taken) for taken in config.subjects or ()):
            taken = ", ".join(config.subjects or ())
            raise RefusedError(f"stream {stream} never has {self.subject}: its subjects are {taken}")
        made = await jetstream.add_consumer(stream, self._wanted(durable))
        self._following = (made.delivered.stream_seq if made.delivered is not None else 0) + 1
        return str(made.name)

    def _wanted(self, durable: str) -> Any:
        """The consumer that is asked for."""
        from nats.js.api import ConsumerConfig, DeliverPolicy

        wanted = ConsumerConfig(durable_name=durable or None, filter_subject=self.subject)
        if self._new:
            wanted.deliver_policy = DeliverPolicy.NEW
        elif self._from is not None:
            wanted.deliver_policy, wanted.opt_start_time = DeliverPolicy.BY_START_TIME, self._from
        return wanted

    async def _restore_consumer(self) -> bool:
        """Make the consumer anew where the server has none any more. It removes one without ``durable=`` that has asked
        for nothing for 5 s (a stopped process, a cut cable), and somebody may have deleted it or its stream. Returns
        whether it was made.
        """
        from nats.js.api import DeliverPolicy
        from nats.js.errors import NotFoundError

        stream, name = self._consumer
        jetstream = self._connection.client.jetstream(timeout=self._connection.access.timeout)
        try:
            await jetstream.consumer_info(stream, name)
            return False  # its servers choose a leader, perhaps, or it does not give what is asked for
        except NotFoundError:
            newest = (await jetstream.stream_info(stream)).state.last_seq
        with self._lock:
            begin = self._following
            if self._durable:  # what was not acknowledged comes again
                left = [*self._unacknowledged, *(message.source for message in self._waiting)]
                begin = min([begin, *map(_sequence, left)])
                self._waiting.clear()
                self._bytes = 0
        if begin > newest + 1:
            begin = 1  # the stream was made anew
        wanted = self._wanted(self._durable)
        if self._following > 1:
            wanted.deliver_policy, wanted.opt_start_seq = DeliverPolicy.BY_START_SEQUENCE, begin
            wanted.opt_start_time = None
        self._consumer = stream, str((await jetstream.add_consumer(stream, wanted)).name)
        log.warning("nats://%s/%s: the server had removed the consumer %s of stream %s; reading goes on at message %d",
                    self._connection.access.place, self.subject, name, stream, begin)  # fmt: skip
        return True

    async def _pull(self) -> None:
        """Ask for messages while there is room for them, one request at a time.

        What a server sends for a request whose reader has just left reaches nobody, and is delivered again late and out
        of order. So all but one kind of request end at once, and who leaves awaits that end. Only where there is
        nothing to read is a request left open, for one message.
        """
        from nats.errors import ConnectionClosedError

        with contextlib.suppress(ConnectionClosedError):
            numbers = itertools.count()
            if self._returned:
                await self._gather(numbers)
            for number in numbers:
                while (room := MAX_WAITING - len(self._waiting)) <= 0 or self._bytes > MAX_WAITING_BYTES:
                    if self._leaves:
                        return
                    await asyncio.sleep(0.01)
                if self._leaves:
                    return
                await self._ask(number, {"batch": min(FETCH, room), "no_wait": True})
                if self._due > 0 and not self._refused and not self._leaves:  # there is no more: wait for the next one
                    self._may_break_off = True
                    await self._ask(next(numbers), {"batch": 1, "expires": int(FETCH_S * 1e9)})
                    self._may_break_off = False
                if self._refused:  # the stream may have been deleted, or the servers are choosing a leader
                    said, restored = self._refused, False
                    try:
                        restored = await self._restore_consumer()
                    except ConnectionClosedError:
                        raise
                    except Exception as error:
                        said = f"{said}: {error}" if str(error) else said
                    if not restored:
                        await self._connection.note_error(RefusedError(said))
                        await asyncio.sleep(RETRY_S)
                    self._refused = ""

    async def _gather(self, numbers: Iterator[int]) -> None:
        """Fetch what readers before this one gave back, all that is there at once, and let it be read in its order."""
        self._gathered = []
        while (missing := min(self._returned, MAX_WAITING) - len(self._gathered)) > 0 and not self._leaves:
            if sum(len(message.data) for message in self._gathered) > MAX_WAITING_BYTES:
                break
            await self._ask(next(numbers), {"batch": min(FETCH, missing), "no_wait": True})
            if self._due > 0:  # there is no more, or no answer
                break
        self._gathered.sort(key=_sequence)
        for message in self._gathered:
            await self._arrived(message)
        self._gathered = None

    async def _ask(self, number: int, question: dict[str, Any]) -> None:
        """Send one request for messages and wait for its end, while messages of it arrive."""
        from nats.errors import ConnectionClosedError

        self._request, self._due, self._over = f"{self._inbox}.{number}", question["batch"], asyncio.Event()
        try:
            subject = f"$JS.API.CONSUMER.MSG.NEXT.{'.'.join(self._consumer)}"
            await self._connection.client.publish(subject, json.dumps(question).encode(), reply=self._request)
            due = -1
            while due != self._due:  # it may be lost with a connection
                due = self._due
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._over.wait(), 2 * FETCH_S)
                    return
        except ConnectionClosedError:
            raise
        except Exception as error:
            self._refused = str(error) or type(error).__name__

    async def _answered(self, message: Any) -> None:
        """A message that was asked for, or what ends a request: its time is over, or it is refused."""
        if message.subject.startswith(self._inbox):
            status = (message.headers or {}).get("Status", "")
            if message.subject == self._request and status != HEARTBEAT:
                if status not in (NO_MESSAGES, EXPIRED):
                    said = (message.headers or {}).get("Description") or "nobody answers for it"
                    said = "it is not there" if status == NO_RESPONDERS else said
                    self._refused = f"the consumer of {self._consumer[0]}: {said} ({status})"
                self._over.set()
            return
        if self._gathered is None:
            await self._arrived(message)
        else:
            self._gathered.append(message)
        self._due -= 1
        if self._due <= 0:
            self._over.set()

    async def _arrived(self, message: Any) -> None:
        """Store a message; runs in the loop's thread."""
        properties, time_ns = properties_of(message.headers)
        position = None
        if self._jetstream:
            about = message.metadata
            position = about.sequence.stream
            time_ns = time_ns if time_ns is not None else _nanoseconds(about.timestamp)
            self._following = max(self._following, position + 1)
            if about.num_delivered and about.num_delivered > 1:
                self._counters.add("redelivered", 1)
        with self._lock:
            if self._final is not None:  # closed, with its descriptor
                return
            self._counters.add("matched", 1)
            if not self._jetstream and (len(self._waiting) >= MAX_WAITING or self._bytes > MAX_WAITING_BYTES):
                self._counters.drop("overflow", 1)
                return
            self._count += 1
            made = Message(
                message.data, ordinal=self._count, timestamp_ns=time.time_ns() if time_ns is None else time_ns,
                channel=message.subject, position=position, properties=properties or None, source=message,
            )  # fmt: skip
            self._counters.add("depth", 1)
            self._waiting.append(made)
            self._bytes += len(message.data)
            if len(self._waiting) == 1:
                os.eventfd_write(self._ready, 1)

    def read(self, timeout: float | None = None) -> Message | None:
        """The next message, or None when the time is over."""
        found = self._take(1, timeout)
        return found[0] if found else None

    def read_many(self, most: int = 1024, timeout: float | None = None) -> list[Message]:
        """Up to ``most`` messages that are there; waits for the first one only."""
        if most < 1:
            raise InvalidArgument(f"most={most} must be 1 or more")
        return self._take(most, timeout)

    def _take(self, most: int, timeout: float | None) -> list[Message]:
        deadline = Deadline(timeout)
        self._check()  # before the lock, which another thread may have held at a fork
        self._acknowledge()
        while True:
            with self._lock:
                self._check()
                found = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
                size = sum(len(message) for message in found)
                self._bytes -= size
                if not self._waiting:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._ready)
                if self._jetstream:
                    self._unacknowledged += [message.source for message in found]
                if found:
                    self._counters.deliver(len(found), size, found[0].timestamp_ns)
                    return found
            if deadline.passed:
                return []
            self._sleep(deadline)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until there is something to read; False when the time is over."""
        deadline = Deadline(timeout)
        self._check()
        while True:
            with self._lock:
                self._check()
                if self._waiting:
                    return True
            if deadline.passed:
                return False
            self._sleep(deadline)

    def _sleep(self, deadline: Deadline) -> None:
        poll = select.poll()
        poll.register(self._ready, select.POLLIN)
        left = deadline.left
        # wake up regularly, to notice a close by another thread
        poll.poll(200 if left is None else min(200.0, left * 1e3))

    def fileno(self) -> int:
        """Readable when there is something to read."""
        self._check()
        return self._ready

    def _acknowledge(self) -> None:
        """Acknowledge to the stream what was read."""
        with self._lock:
            done, self._unacknowledged = self._unacknowledged, []
        if done:
            self._connection.run(self._acknowledge_all(done), self._connection.access.timeout)

    def _was_not_handled(self, message: Message) -> None:
        """The function of ``on_message=`` failed at the last message: do not acknowledge it."""
        with self._lock:
            failed, self._unacknowledged = self._unacknowledged, []  # its thread reads one by one
        for read in failed:
            with contextlib.suppress(PenstockError, OSError):  # then it comes again after the server's ack wait
                self._connection.run(read.nak(delay=channel.AGAIN_S), self._connection.access.timeout)

    async def _give_back(self) -> None:
        """What was fetched and not read, or not done, is the next reader's at once, not after the server's ack wait."""
        self._leaves = True
        if not self._may_break_off and self._connection.client.is_connected:
            await asyncio.wait([self._pulling], timeout=REQUEST_END_S)
        self._pulling.cancel()
        await self._pulled.drain()  # what the server has sent up to now is waiting here then
        with self._lock:
            left = [*self._unacknowledged, *(message.source for message in self._waiting), *(self._gathered or ())]
        if left:  # asked for this, the server forgets our last request, for which it would put the first one last
            with contextlib.suppress(Exception):  # the order alone would suffer
                await self._connection.client.jetstream(timeout=1.0).consumer_info(*self._consumer)
        left.sort(key=_sequence)
        for message in left[:-1]:
            await message.nak()
        if left:  # the server does them one by one and answers the last: before, the next reader would get newer ones
            with contextlib.suppress(Exception):
                await self._connection.client.request(left[-1].reply, b"-NAK", timeout=GIVE_BACK_S)

    async def _acknowledge_all(self, messages: list[Any]) -> None:
        for message in messages:
            await message.ack()

    def _available_messages(self) -> Iterator[Message]:
        self._check()
        return super()._available_messages()

    def _check(self) -> None:
        self._connection.refuse_child("this subscriber")
        if self.closed:
            raise ClosedError("this subscriber was closed")

    @property
    def ledger(self) -> Ledger:
        """A snapshot of the counts."""
        if self._final is not None:
            return self._final
        found = self._counters.snapshot()
        dropped = {reason: count for reason, count in found["dropped"].items() if count}
        matched, delivered = found["matched"], found["delivered"]
        in_flight = matched - delivered - sum(dropped.values())
        return Ledger(matched, delivered, dropped, 0, in_flight, found["redelivered"])

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closing

    def __exit__(self, *error: object) -> None:
        self._failed = error[:1] not in ((), (None,))
        self.close()

    def close(self) -> None:
        """Acknowledge what was read, unless an error ended the block or a function runs still that was called with it;
        give back to a stream what was not; leave.
        """
        if self._connection.forked:  # before the lock
            return
        with self._lock:
            if self._closing:
                return
            self._closing = True  # nothing is read from here on: what waits is given back
        returned = self._wait_for_call()
        with contextlib.suppress(Exception):
            if returned and not self._failed:
                self._acknowledge()
            if self._jetstream and self._connection.client.is_connected:
                self._connection.run(self._give_back(), min(self._connection.access.timeout, GIVE_BACK_S))
        self._connection.close()
        with self._lock:
            left = len(self._waiting)
            if left and not self._jetstream:
                self._counters.drop("closed", left)
            self._final = self.ledger
            self._counters.close()
            os.close(self._ready)


def _sequence(message: Any) -> int:
    """Of a message in its stream."""
    return int(message.metadata.sequence.stream)


EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def _moment(time_ns: int) -> datetime.datetime:
    """The microsecond of a time; nats-py knows none shorter. Nothing was stored before 1970, and of times before 1678 a
    server makes others.
    """
    if isinstance(time_ns, bool) or not isinstance(time_ns, int):
        raise TypeError(f"from_time_ns={time_ns!r} must be a whole number of nanoseconds since 1970")
    try:
        return EPOCH + datetime.timedelta(microseconds=max(time_ns, 0) // 1000)
    except OverflowError:
        raise InvalidArgument(f"from_time_ns={time_ns} is after the year 9999") from None


def _nanoseconds(at: datetime.datetime) -> int:
    """Since 1970, exactly: a float of that size is off by hundreds of nanoseconds."""
    return (at - EPOCH) // datetime.timedelta(microseconds=1) * 1000
