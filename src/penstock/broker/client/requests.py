"""The requests of a client to a broker, one method each, the same for ``Client`` and ``AsyncClient``. A method encodes
the request and passes it to ``_finish``: the sync client's waits for the answer, the asyncio client's returns an
awaitable.
"""

from __future__ import annotations

import base64
import json
import operator
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.address import check_options
from penstock.broker import words
from penstock.broker.client.dialogue import MAX_LINE_BYTES, Dialogue, Pending, Position
from penstock.errors import InvalidArgument

if TYPE_CHECKING:
    from penstock.channel import Buffer

MAX_STAGED_NAMES = 10_000


class Requests(ABC):
    """Requests and their answers. A method returns the answer, or an awaitable, depending on the class."""

    _dialogue: Dialogue
    _staged: dict[str, int]  #: by transaction: how many messages this client has staged and not committed

    @abstractmethod
    def _finish(self, pending: Pending) -> Any:
        """Wait for the answer."""

    # --- publishing

    def publish(
        self,
        topic: str,
        data: Buffer,
        *,
        properties: Mapping[str, str] | None = None,
        message_id: str | None = None,
        ttl_s: float | None = None,
        delay_s: float | None = None,
        at_ns: int | None = None,
        timestamp_ns: int | None = None,
    ) -> Any:
        """Publish one message; returns its position once it is on disk. ``timestamp_ns``: its time, if not that of
        storing.
        """
        options = publish_options(message_id, ttl_s, delay_s, at_ns)
        times = None if timestamp_ns is None else times_of([timestamp_ns])
        pending = self._dialogue.publish(topic, [data], options, words.encode_properties(properties), times)
        pending.convert = lambda span: _position(span[1], pending.duplicate)
        return self._finish(pending)

    def publish_many(
        self,
        topic: str,
        batch: Iterable[Buffer],
        *,
        properties: Mapping[str, str] | Iterable[Mapping[str, str]] | None = None,
        ttl_s: float | None = None,
        timestamps_ns: Iterable[int] | None = None,
    ) -> Any:
        """Publish them in order; returns first and last position once all are on disk. Properties: of all, or of each;
        times: of each.
        """
        items = batch if hasattr(batch, "__len__") else list(batch)
        options = publish_options(None, ttl_s, None, None)
        times = None if timestamps_ns is None else times_of(timestamps_ns)
        return self._finish(self._dialogue.publish(topic, items, options, encode_many(properties), times))

    def stage(
        self,
        transaction: str,
        topic: str,
        batch: Iterable[Buffer],
        *,
        properties: Mapping[str, str] | Iterable[Mapping[str, str]] | None = None,
    ) -> Any:
        """Stage messages at the broker until ``commit``; returns how many."""
        items = batch if hasattr(batch, "__len__") else list(batch)
        pending = self._dialogue.stage(transaction, topic, items, encode_many(properties))
        pending.convert = lambda count: self._note_staged(transaction, count)
        return self._finish(pending)

    def _note_staged(self, transaction: str, count: int) -> int:
        self._staged[transaction] = self._staged.get(transaction, 0) + count
        while len(self._staged) > MAX_STAGED_NAMES:
            self._staged.pop(next(iter(self._staged)))
        return count

    def commit(self, transaction: str, parts: Iterable[str] = ()) -> Any:
        """Publish what was staged (under the id itself, or the parts named), once per id; (first, last, again).

        RefusedError if not everything that this client has staged is there: the broker was restarted meanwhile, or has
        dropped it. Then stage all of it again.
        """
        given = list(parts)
        wholes = [transaction + part if part.startswith(".") else part for part in given] or [transaction]
        count = sum(self._staged.pop(name, 0) for name in dict.fromkeys(wholes))
        more = [f"staged={count}"] if count and self._dialogue.version > 1 else []
        return self._finish(self._dialogue.ask(" ".join(["COMMIT", transaction, *given, *more]), convert=_committed))

    def abort(self, transaction: str) -> Any:
        """Forget what was staged."""
        head = transaction.removesuffix("*") if transaction.endswith(".*") else None
        for name in [name for name in self._staged if name == transaction or (head and name.startswith(head))]:
            del self._staged[name]
        return self._finish(self._dialogue.ask(f"ABORT {transaction}", convert=_nothing))

    # --- queues

    def queue(self, name: str, *, create: bool = False, drop_waiting: bool = False, **options: Any) -> Any:
        """Create a queue or change its options: topics, ack_timeout_s, max_tries, ttl_s, exclusive, dead_letter.

        Other topics are refused while messages of the old ones wait, unless with ``drop_waiting``.
        """
        flags = [word for word, said in (("create", create), ("drop_waiting", drop_waiting)) if said]
        check_options(options, queue_options, f"queue {name!r}")
        line = " ".join(filter(None, ["QUEUE", words.check_queue(name), queue_options(**options), *flags]))
        return self._finish(self._dialogue.ask(line, convert=_nothing))

    def queues(self) -> Any:
        """All queues: a list of dicts."""
        return self._finish(self._dialogue.ask("LIST", convert=_queues))

    def statistics(self) -> Any:
        """Counts of the broker: a dict."""
        return self._finish(self._dialogue.ask("STATS", convert=_counts))

    def peers(self, topic: str) -> Any:
        """How many queues are bound to the topic, and how many consumers they have."""
        return self._finish(self._dialogue.ask(f"PEERS {words.check_topic(topic)}", convert=_peers))

    def schema(self, topic: str) -> Any:
        """The schema of the topic's messages: version (0: none was declared), text, digests of all versions."""
        return self._finish(self._dialogue.ask(f"SCHEMA {words.check_topic(topic)}", convert=schema_answer))

    def declare_schema(self, topic: str, version: int, text: str) -> Any:
        """Declare the schema of the topic. ``version`` must be one more than the newest; otherwise it is refused."""
        encoded = base64.b64encode(text.encode()).decode()
        line = f"SCHEMA {words.check_topic(topic)} {version} {encoded}"
        return self._finish(self._dialogue.ask(line, convert=_nothing, most_bytes=MAX_LINE_BYTES - 2))

    def purge(self, name: str) -> Any:
        """Drop the queue's messages; returns how many there were."""
        return self._finish(self._dialogue.ask(_about("PURGE", name), repeat=False, convert=_number))

    def delete(self, name: str) -> Any:
        """Delete the queue."""
        return self._finish(self._dialogue.ask(_about("DELETE", name), repeat=False, convert=_nothing))

    def pause(self, name: str) -> Any:
        """Deliver nothing of the queue until ``resume``, also after a restart; messages wait on disk."""
        return self._finish(self._dialogue.ask(_about("PAUSE", name), convert=_nothing))

    def resume(self, name: str) -> Any:
        """Deliver messages of a paused queue again."""
        return self._finish(self._dialogue.ask(_about("RESUME", name), convert=_nothing))

    def redrive(self, name: str) -> Any:
        """Send dead letters of the queue back to it, up to 65,536 at a time; returns how many."""
        return self._finish(self._dialogue.ask(_about("REDRIVE", name), repeat=False, convert=_number))

    def seek(
        self, name: str, *, position: int | None = None, ordinal: int | None = None, time_ns: int | None = None
    ) -> Any:
        """Deliver from there on."""
        line = f"{_about('SEEK', name)} {start_option(position, ordinal, time_ns)}"
        return self._finish(self._dialogue.ask(line, convert=_nothing))

    def ping(self) -> Any:
        """Answered when everything asked before is on disk."""
        return self._finish(self._dialogue.ask("PING", convert=_pong))

    def shutdown(self) -> Any:
        """End the broker: it finishes what it has begun and closes every connection, this one too."""
        return self._finish(self._dialogue.ask("SHUTDOWN", repeat=False, ends=True))


def _about(verb: str, queue: str) -> str:
    """A command for a queue, which may be an internal one of the broker."""
    return f"{verb} {words.check_name(queue, 'queue', internal=True)}"


def encode_many(properties: Mapping[str, str] | Iterable[Mapping[str, str]] | None) -> bytes | list[bytes]:
    """Properties of all messages, or of each."""
    if properties is None or isinstance(properties, Mapping):
        return words.encode_properties(properties)
    return [words.encode_properties(one) for one in properties]


def publish_options(message_id: str | None, ttl_s: float | None, delay_s: float | None, at_ns: int | None) -> str:
    """The options of a publish, as words of the protocol."""
    found = []
    if message_id is not None:
        found.append(f"id={words.check_name(message_id, 'message id')}")
    if ttl_s is not None:
        found.append(f"ttl_ms={milliseconds(ttl_s, 'ttl_s')}")
    if delay_s is not None and at_ns is not None:
        raise InvalidArgument("delay_s= and at_ns= both say when: give one of them")
    if delay_s is not None:
        found.append(f"delay_ms={milliseconds(delay_s, 'delay_s')}")
    if at_ns is not None:
        found.append(f"at_ns={non_negative_int(at_ns, 'at_ns')}")
    return " ".join(found)


def queue_options(
    *,
    topics: Iterable[str] | str | None = None,
    ack_timeout_s: float | None = None,
    max_tries: int | None = None,
    ttl_s: float | None = None,
    exclusive: bool | None = None,
    temporary: bool | None = None,
    dead_letter: str | None = None,
    from_position: int | None = None,
    from_ordinal: int | None = None,
    from_time_ns: int | None = None,
) -> str:
    """The options of QUEUE and SUB as words."""
    found = []
    if topics is not None:
        patterns = [topics] if isinstance(topics, str) else list(topics)
        found.append("topics=" + ",".join(words.check_pattern(pattern) for pattern in patterns))
    if ack_timeout_s is not None:
        found.append(f"ack_timeout_ms={milliseconds(ack_timeout_s, 'ack_timeout_s')}")
    if ttl_s is not None:
        found.append(f"ttl_ms={milliseconds(ttl_s, 'ttl_s')}")
    if max_tries is not None:
        found.append(f"max_tries={non_negative_int(max_tries, 'max_tries')}")
    if exclusive is not None:
        found.append(f"exclusive={_flag(exclusive, 'exclusive')}")
    if temporary is not None:
        found.append(f"temporary={_flag(temporary, 'temporary')}")
    if dead_letter is not None:
        found.append(f"dead_letter={words.check_queue(dead_letter)}")
    if (from_position, from_ordinal, from_time_ns) != (None, None, None):
        found.append(start_option(from_position, from_ordinal, from_time_ns))
    return " ".join(found)


def start_option(position: int | None, ordinal: int | None, time_ns: int | None) -> str:
    """The start position of a queue, as a word of the protocol."""
    given = [
        f"from_{name}={non_negative_int(value, name)}"
        for name, value in (("position", position), ("ordinal", ordinal), ("time_ns", time_ns))
        if value is not None
    ]
    if len(given) != 1:
        raise InvalidArgument("give exactly one of position, ordinal and time_ns")
    return given[0]


def times_of(given: Iterable[int]) -> array[int]:
    """Times of messages in the form that the native core expects."""
    try:
        return array("q", given)
    except (OverflowError, TypeError) as error:
        raise InvalidArgument(f"a time is a whole number of nanoseconds since 1970, in 64 bits: {error}") from None


def milliseconds(seconds: float, what: str) -> int:
    """Seconds as milliseconds, the unit of the protocol."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"{what} must be a number of seconds, not {type(seconds).__name__}")
    if not 0 <= seconds <= words.MAX_MILLISECONDS / 1000:
        raise InvalidArgument(f"{what}={seconds!r} must be 0 to {words.MAX_MILLISECONDS // 1000} seconds")
    return round(seconds * 1000)


def non_negative_int(number: int, what: str) -> int:
    """An integer of 0 or more; a number with a fraction is refused, not truncated."""
    try:
        found = operator.index(number)
    except TypeError:
        raise TypeError(f"{what} must be a whole number, not {number!r}") from None
    if not 0 <= found <= words.MAX_NUMBER:
        raise InvalidArgument(f"{what}={number!r} must be 0 to {words.MAX_NUMBER}")
    return found


def _flag(value: bool, what: str) -> int:
    if value not in (0, 1):
        raise InvalidArgument(f"{what}={value!r} must be True or False")
    return int(value)


def _position(position: int | None, duplicate: bool) -> Position | None:
    if position is None:  # stored, but the broker does not remember where
        return None
    found = Position(position)
    found.duplicate = duplicate
    return found


# Parsers of answers. Whatever they raise means that the answer is invalid.


def _text(answer: Any, verb: str) -> str:
    if not isinstance(answer, tuple) or answer[0] != verb:
        raise ValueError(f"expected {verb}")
    return str(answer[1])


def _nothing(answer: Any) -> None:
    if _text(answer, "OK"):
        raise ValueError("expected OK and nothing after it")


def _pong(answer: Any) -> None:
    _text(answer, "PONG")


def _queues(answer: Any) -> Any:
    found = json.loads(bytes(answer[0]))
    if not isinstance(found, list) or not all(isinstance(queue, dict) for queue in found):
        raise ValueError("expected a list of queues")
    return found


def _counts(answer: Any) -> Any:
    found = json.loads(bytes(answer[0]))
    if not isinstance(found, dict):
        raise ValueError("expected an object of counts")
    return found


def schema_answer(answer: Any) -> tuple[int, str, list[str]]:
    found = _counts(answer)
    version, text, digests = found["version"], found["schema"], found["digests"]
    if not (isinstance(version, int) and isinstance(text, str) and isinstance(digests, list)):
        raise ValueError("expected a schema")
    return version, text, digests


def schema_versions_answer(answer: Any) -> list[str]:
    versions = _counts(answer)["versions"]
    if not (isinstance(versions, list) and all(isinstance(text, str) for text in versions)):
        raise ValueError("expected the versions of a schema")
    return versions


def _number(answer: Any) -> int:
    return words.number(_text(answer, "OK"), "count")


def _peers(answer: Any) -> tuple[int, int]:
    queues, consumers = _text(answer, "PEERS").split()
    return words.number(queues, "queues"), words.number(consumers, "consumers")


def _committed(answer: Any) -> tuple[int, int, bool]:
    span, _, again = _text(answer, "COMMITTED").partition(" ")
    first, _, last = span.partition("-")  # 0-0: nothing was staged
    return words.number(first, "position"), words.number(last, "position"), bool(again)
