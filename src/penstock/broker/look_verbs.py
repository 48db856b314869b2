"""The verbs that look: LIST, STATS, PEERS, FETCH. The loop thread only."""

from __future__ import annotations

import json
from typing import Any

from penstock._core.broker import batch_names, fetch_index
from penstock.broker import words
from penstock.broker.session import Session, need
from penstock.broker.words import Refusal


class LookVerbs(Session):
    """Looking at what there is."""

    def list_queues(self, arguments: list[str]) -> None:
        """LIST: the queues, as JSON."""
        self._need_statistics()
        self._data([queue.summary() for queue in self.broker.queues.values() if self.rights.may_use(queue.name)])

    def stats(self, arguments: list[str]) -> None:
        """STATS: counts of the broker, as JSON."""
        self._need_statistics()
        self._data(self.host.statistics())

    def peers(self, arguments: list[str]) -> None:
        """PEERS <topic>: how many queues take it and how many consumers these have."""
        (name,) = need(arguments, 1, "PEERS <topic>", most=1)
        if not (self.rights.may_publish(words.check_topic(name)) or self.rights.may_subscribe(name)):
            raise Refusal("denied", f"the topic is neither yours to publish to nor to read: {name}")
        queues = self.broker.queues_of(name)
        self.reply(b"PEERS %d %d\n" % (len(queues), sum(len(queue.consumers) for queue in queues)))

    def fetch(self, arguments: list[str]) -> None:
        """FETCH <first> <most> [bytes=] [topics=]: messages by position, index first, for readers in bulk."""
        first, most, *rest = need(arguments, 2, "FETCH <first> <most> [bytes=] [topics=]")
        options = words.split_options(rest, {"bytes": int, "topics": str})
        patterns = str(options["topics"]).split(",") if "topics" in options else [">"]
        for pattern in patterns:
            self._check_pattern(pattern)
        most_bytes = min(int(options.get("bytes", 4 << 20)), 16 << 20)
        start, count = words.number(first, "position"), min(words.number(most, "most"), 1 << 20)
        self.reply(lambda: self._put_range(start, max(1, count), most_bytes, patterns))

    def _put_range(self, start: int, count: int, most_bytes: int, patterns: list[str]) -> None:
        batch, following, _ = self.broker.store.read(start, count, most_bytes, tuple(patterns))
        statistics = self.broker.store.statistics()  # afterwards: retention that the read has seen is told
        index, size = fetch_index(batch)
        head = {
            "count": len(batch),
            "next": following,
            "first": statistics.first,
            "frontier": statistics.next,
            "journal": self.broker.store.identity,
            "topics": {str(number): name for number, name in enumerate(batch_names(batch)) if name},
        }
        text = json.dumps(head).encode() + b"\n"
        self.outbox.text(b"DATA %d\n%s" % (len(text) + len(index) + size, text))
        self.outbox.lent(index)
        self.outbox.payloads(batch)
        self.outbox.text(b"\n")

    def _data(self, value: Any) -> None:
        text = json.dumps(value).encode()
        self.reply(b"DATA %d\n%s\n" % (len(text), text))
