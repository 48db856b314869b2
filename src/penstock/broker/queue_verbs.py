"""The verbs of queues: SUB, QUEUE, ACK, NACK and their like. The loop thread only."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from penstock.broker import words
from penstock.broker.dead_letters import redrive
from penstock.broker.queue import Queue, QueueOptions
from penstock.broker.session import Session, Subscription, need
from penstock.broker.words import Disconnect, Refusal

RAW_CREDIT = 16_384
MAX_SUBSCRIPTIONS = 1024
MAX_DEAD_LETTER_NAME_BYTES = 245  # "$dead.NAME" and "NAME.dead" are names too

_QUEUE_OPTIONS = {
    "topics": str, "ack_timeout_ms": int, "max_deliveries": int, "ttl_ms": int, "exclusive": int, "temporary": int,
    "dead_letter": str,
}  # fmt: skip
_START_OPTIONS = {"from_position": int, "from_ordinal": int, "from_time_ns": int}


class QueueVerbs(Session):
    """Consuming and managing queues."""

    def raw_sub(self, name: str) -> None:
        """SUB of the compatible mode: one queue a connection, one connection a queue."""
        if self.subscriptions:
            raise Disconnect("a second SUB")
        try:
            words.check_queue(name)
        except Refusal:
            raise Disconnect("bad name") from None
        queue = self.broker.queue(name, QueueOptions())
        if queue.consumers:
            raise Disconnect("the queue has a client")
        queue.raw = True
        self._subscribe(queue, RAW_CREDIT, automatic=True, raw=True)

    def sub(self, arguments: list[str]) -> None:
        """SUB <queue> [options]: consume a queue; made if it is not there."""
        name, *rest = need(arguments, 1, "SUB <queue> [options]")
        options = words.split_options(rest, {**_QUEUE_OPTIONS, **_START_OPTIONS, "credit": int, "ack": str})
        self._check_queue(name)
        if name in self.subscriptions:
            raise Refusal("exists", f"this connection consumes {name} already")
        if len(self.subscriptions) >= MAX_SUBSCRIPTIONS:
            raise Refusal("limit", f"a connection consumes at most {MAX_SUBSCRIPTIONS} queues")
        credit = max(1, min(int(options.get("credit", 256)), self.max_unacknowledged))
        if options.get("ack", "") not in ("", "none"):
            raise Refusal("bad_option", "ack is none, or left out")
        found = self.broker.queues.get(name)
        if found is not None and not self.may_read(found):
            raise Refusal("denied", f"queue {name} has topics that are not yours to read")
        queue = self._declare(name, options, change=False)
        if queue.consumers and (queue.raw or queue.options.exclusive):
            raise Refusal("busy", f"queue {name} has a client and is exclusive")
        self.confirms = True
        self.reply(b"OK\n")
        self._subscribe(queue, credit, automatic=options.get("ack") == "none", raw=False)

    def _subscribe(self, queue: Queue, credit: int, *, automatic: bool, raw: bool) -> None:
        subscription = Subscription(self, queue, self.numbers(), credit, automatic, raw)
        self.subscriptions[queue.name] = subscription
        queue.add(subscription)
        self.broker.wake(queue)

    def queue(self, arguments: list[str]) -> None:
        """QUEUE <queue> [options] [create]: make a queue, or give it other options (with create: only make it)."""
        name, *rest = need(arguments, 1, "QUEUE <queue> [options]")
        options = words.split_options(rest, {**_QUEUE_OPTIONS, **_START_OPTIONS, "create": int})
        self._check_queue(name)
        self._declare(name, options, change="create" not in options)
        self.confirms = True
        self.reply(b"OK\n")

    def _declare(self, name: str, given: dict[str, Any], *, change: bool) -> Queue:
        found = self.broker.queues.get(name)
        old = found.options if found else QueueOptions()
        wanted = self._options(given, old)
        self._check_dead_letters(name, wanted)
        if found is None:
            for pattern in wanted.topics:
                self._check_pattern(pattern)
            return self.broker.queue(name, wanted, start=self._start(given, wanted.topics))
        if wanted != old:
            if not change:
                raise Refusal("exists", f"queue {name} has other options (LIST shows them); QUEUE changes them")
            if not self.rights.manage:
                raise Refusal("denied", f"queue {name} has other options; changing them needs the right manage")
            for pattern in wanted.topics:
                if pattern not in old.topics:
                    self._check_pattern(pattern)
            self.broker.rebind(found, wanted)
        start = self._start(given, wanted.topics)
        if start is not None:
            self._need_manage()
            self.broker.seek(found, start)
        return found

    def _check_dead_letters(self, name: str, wanted: QueueOptions) -> None:
        """The broker itself uses these names later, when nobody is there to be refused."""
        if wanted.dead_letter:
            self._check_queue(wanted.dead_letter)
            if wanted.dead_letter == name:
                raise Refusal("bad_option", f"queue {name} cannot be its own queue of dead letters")
        if wanted.max_deliveries and len(name.encode()) > MAX_DEAD_LETTER_NAME_BYTES:
            raise Refusal(
                "bad_name", f"a queue with max_deliveries has a name of at most {MAX_DEAD_LETTER_NAME_BYTES} bytes"
            )

    @staticmethod
    def _options(given: dict[str, Any], old: QueueOptions) -> QueueOptions:
        changes: dict[str, Any] = {}
        if "topics" in given:
            changes["topics"] = tuple(str(given["topics"]).split(","))
        if "ack_timeout_ms" in given:
            changes["ack_timeout_s"] = given["ack_timeout_ms"] / 1e3
        if "ttl_ms" in given:
            changes["ttl_s"] = given["ttl_ms"] / 1e3
        for key in ("max_deliveries", "dead_letter"):
            if key in given:
                changes[key] = given[key]
        for key in ("exclusive", "temporary"):
            if key in given:
                changes[key] = bool(given[key])
        return replace(old, **changes)

    def _start(self, given: dict[str, Any], topics: tuple[str, ...]) -> int | None:
        """Where a queue is to begin, when the client says so."""
        if "from_position" in given:
            return int(given["from_position"])
        if "from_time_ns" in given:
            return self.broker.store.find(timestamp_ns=int(given["from_time_ns"]))
        if "from_ordinal" in given:
            if len(topics) != 1 or "*" in topics[0] or ">" in topics[0]:
                raise Refusal("bad_option", "from_ordinal needs a queue of one topic without wildcards")
            return self.broker.store.find(ordinal=int(given["from_ordinal"]), topic=topics[0])
        return None

    def unsub(self, arguments: list[str]) -> None:
        """UNSUB <queue>: consume no more; what was not acknowledged goes back."""
        (name,) = need(arguments, 1, "UNSUB <queue>", most=1)
        subscription = self._subscription(name)
        del self.subscriptions[name]
        self.broker.leave(subscription.queue, subscription)
        self.reply(b"OK\n")

    def credit(self, arguments: list[str]) -> None:
        """CREDIT <queue> <count>: how many unacknowledged messages this consumer takes. Not answered."""
        name, count = need(arguments, 2, "CREDIT <queue> <count>", most=2)
        subscription = self._subscription(name)
        subscription.credit = min(words.number(count, "credit"), self.max_unacknowledged)
        self.broker.wake(subscription.queue)

    def ack(self, arguments: list[str]) -> None:
        """ACK <queue> <position>[-<position>] ... [confirm]: these are done. Answered only with confirm."""
        name, *spans = need(arguments, 2, "ACK <queue> <position>[-<position>] ...")
        confirm = spans[-1] == "confirm"
        subscription = self._subscription(name)
        count = 0
        for text in spans[:-1] if confirm else spans:
            count += self.broker.acknowledge(subscription.queue, subscription, *words.span(text))
        if confirm:
            self.confirms = True
            self.reply(b"OK %d\n" % count)

    def nack(self, arguments: list[str]) -> None:
        """NACK <queue> <position> [delay_ms=]: deliver it again. Not answered."""
        name, position, *rest = need(arguments, 2, "NACK <queue> <position> [delay_ms=]")
        options = words.split_options(rest, {"delay_ms": int})
        subscription = self._subscription(name)
        due_ns = time.time_ns() + int(options.get("delay_ms", 0)) * 1_000_000
        if subscription.queue.state.return_message(subscription.number, words.number(position, "position"), due_ns):
            self.broker.wake(subscription.queue)

    def seek(self, arguments: list[str]) -> None:
        """SEEK <queue> from_position=|from_ordinal=|from_time_ns=: deliver from there on."""
        name, *rest = need(arguments, 2, "SEEK <queue> from_position=|from_ordinal=|from_time_ns=")
        queue = self._managed(name)
        start = self._start(words.split_options(rest, _START_OPTIONS), queue.options.topics)
        self.broker.seek(queue, start or 1)
        self.confirms = True
        self.reply(b"OK\n")

    def purge(self, arguments: list[str]) -> None:
        """PURGE <queue>: drop what it has."""
        (name,) = need(arguments, 1, "PURGE <queue>", most=1)
        self.confirms = True
        self.reply(b"OK %d\n" % self.broker.purge(self._managed(name)))

    def pause(self, arguments: list[str]) -> None:
        """PAUSE <queue>: hand out nothing, also across restarts, until RESUME."""
        self._pause(arguments, "PAUSE <queue>", True)

    def resume(self, arguments: list[str]) -> None:
        """RESUME <queue>: hand out again."""
        self._pause(arguments, "RESUME <queue>", False)

    def _pause(self, arguments: list[str], form: str, paused: bool) -> None:
        (name,) = need(arguments, 1, form, most=1)
        queue = self._managed(name)
        self.broker.rebind(queue, queue.with_options(paused=paused))
        self.confirms = True
        self.reply(b"OK\n")

    def delete(self, arguments: list[str]) -> None:
        """DELETE <queue>: forget it; refused while it has consumers."""
        (name,) = need(arguments, 1, "DELETE <queue>", most=1)
        queue = self._managed(name)
        if queue.consumers:
            raise Refusal("busy", f"queue {name} has {len(queue.consumers)} consumer(s)")
        self.broker.delete(queue)
        self.confirms = True
        self.reply(b"OK\n")

    def redrive(self, arguments: list[str]) -> None:
        """REDRIVE <queue>: send its dead letters back to it."""
        (name,) = need(arguments, 1, "REDRIVE <queue>", most=1)
        self.confirms = True
        self.reply(b"OK %d\n" % redrive(self.broker, self._managed(name)))
