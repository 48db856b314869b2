"""The protocol of one connection: a method for each verb. Takes events of the scanner, gives replies; no sockets here.

Rules:

- Until HELLO a connection is raw, as the reference's clients are: SUB, PUB, BYE, SHUTDOWN, no reply to anything, an
  error closes. After HELLO every command but ACK, NACK and CREDIT is answered, in the order asked; answers that depend
  on the disk leave after the commit.
- Used by the broker's loop thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.broker import words
from penstock.broker.look_verbs import LookVerbs
from penstock.broker.publish_verbs import PublishVerbs
from penstock.broker.queue_verbs import QueueVerbs
from penstock.broker.rights import EVERYTHING
from penstock.broker.words import Disconnect, Refusal

if TYPE_CHECKING:
    from penstock._core import Batch

VERSION = 1


class Protocol(PublishVerbs, QueueVerbs, LookVerbs):
    """One connection's verbs. What brings data stands in PublishVerbs, the other groups in the files of their names."""

    def handle(self, verb: str, rest: str, batch: Batch | None) -> None:
        """One event of the scanner. Disconnect when the connection is to be closed."""
        if not (self.hello or self.host.raw_allowed or verb == "HELLO"):
            raise Disconnect
        if verb == "PUB" and batch is not None:
            self.pub(rest, batch)
            return
        try:
            if verb == words.NEW_TOPIC:
                self.topic(rest)
            elif verb == words.REFUSED:
                code, _, line = rest.partition(" ")
                self.refused(code, line)
            elif verb == words.BROKEN:
                raise Disconnect(rest)
            elif not self.hello:
                self.raw_verb(verb, rest)
            elif verb == "STAGE" and batch is not None:
                self.stage(rest, batch)
            elif verb == "LOAD" and batch is not None:
                self.load(rest, batch)
            else:
                self.hello_verb(verb, rest)
        except Refusal as refusal:
            if not self.hello:
                raise Disconnect(refusal.text) from None
            self.reply(words.error_line(refusal.code, refusal.text))

    def raw_verb(self, verb: str, rest: str) -> None:
        """A line of a client that has not said HELLO."""
        if verb == "HELLO":
            self.hello_(rest.split())
        elif verb == "SUB":
            self.raw_sub(rest)
        elif verb == "BYE" and not rest:
            raise Disconnect
        elif verb == "SHUTDOWN" and not rest:
            self.shutdown([])
        else:
            raise Disconnect("unknown verb")

    def hello_verb(self, verb: str, rest: str) -> None:
        """A line of a client that has said HELLO."""
        method = _VERBS.get(verb)
        if method is None:
            raise Disconnect(f"unknown verb {verb[:40]!r}")
        method(self, rest.split())

    # --- sessions

    def hello_(self, arguments: list[str]) -> None:
        """HELLO <version> [token=] [name=] [producer=]: ask for replies and framing."""
        if self.hello or self.subscriptions:
            raise Disconnect("HELLO comes first")
        version, *rest = arguments or [""]
        if version != str(VERSION):
            self.hello = True
            raise Disconnect(f"this broker speaks version {VERSION}: HELLO {VERSION}")
        self.hello = True
        options = words.split_options(rest, {"token": str, "name": str, "producer": str})
        self.token = str(options["token"]) if "token" in options else None
        self.rights = self.host.rights_of(self.token, self)
        self.name = str(options.get("name", ""))[:255]
        more = b""
        if options.get("producer"):
            self.producer = self._own(str(options["producer"]), "producer")
            self.host.take_over(self.producer, self)
            more = b" last=%d" % self.broker.producers.get(self.producer, 0)
        self.confirms = True  # `last` counts what is on its way to the disk
        limits = self.broker.limits
        self.reply(
            b"HELLO %d journal=%s max_message_bytes=%d%s\n"
            % (VERSION, self.broker.store.identity.encode(), limits.max_message_bytes, more)
        )

    def ping(self, arguments: list[str]) -> None:
        """PING: answered by PONG, after everything before it is on disk."""
        self.confirms = True
        self.reply(b"PONG\n")

    def bye(self, arguments: list[str]) -> None:
        """BYE: close."""
        raise Disconnect

    def shutdown(self, arguments: list[str]) -> None:
        """SHUTDOWN: end the server gracefully; from loopback or with the right."""
        if not (self.rights.shutdown or (self.loopback and self.rights is EVERYTHING)):
            raise Refusal("denied", "SHUTDOWN needs the right shutdown, or a connection from loopback")
        self.host.shutdown()
        raise Disconnect


_VERBS: dict[str, Callable[[Protocol, list[str]], None]] = {
    "SUB": Protocol.sub,
    "UNSUB": Protocol.unsub,
    "QUEUE": Protocol.queue,
    "CREDIT": Protocol.credit,
    "ACK": Protocol.ack,
    "NACK": Protocol.nack,
    "SEEK": Protocol.seek,
    "PURGE": Protocol.purge,
    "PAUSE": Protocol.pause,
    "RESUME": Protocol.resume,
    "DELETE": Protocol.delete,
    "REDRIVE": Protocol.redrive,
    "LIST": Protocol.list_queues,
    "STATS": Protocol.stats,
    "PEERS": Protocol.peers,
    "FETCH": Protocol.fetch,
    "COMMIT": Protocol.commit,
    "ABORT": Protocol.abort,
    "PING": Protocol.ping,
    "BYE": Protocol.bye,
    "SHUTDOWN": Protocol.shutdown,
    "HELLO": Protocol.hello_,
}
