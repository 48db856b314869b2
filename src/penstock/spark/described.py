"""The column ``value`` of topics whose publishers said what their messages are made of (``option("decode", "auto")``).

Rules. The types are those that were known when the frame was loaded. A topic's type has the fields of every version of
its schema, and each message is read by the version that counted when it was stored. Topics
whose values have one type share it: ``value`` is that type. Where they have several, ``value`` is a struct with a field
for each topic, null but for the message's own. A message of many rows is an array of them. A payload that does not
decode has no value and a reason in ``_corrupt``, as with ``decode``; so does one of a topic that nobody described.
Decoding runs on executors and needs no native code.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy
import pyarrow

from penstock.errors import InvalidArgument, PenstockError, StateError
from penstock.spark import columns, payload
from penstock.spark.bounds import Bounds, from_options
from penstock.spark.options import folded
from penstock.spark.places import open_places, resolve, shown
from penstock.types.shape import Shape
from penstock.types.versions import Place, Versions, parse_versions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

Texts = Mapping[str, Mapping[str, str]]  # {journal UUID: {topic: all versions of its schema}}
MAX_TOPICS = 1000  # fields of ``value`` where topics have several types
_NUMBERS = {
    "uint8": pyarrow.int16(), "uint16": pyarrow.int32(), "uint32": pyarrow.int64(),
    "uint64": pyarrow.decimal128(20, 0), "float16": pyarrow.float32(),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Type:
    """How the payloads of one schema become values."""

    kind: pyarrow.DataType
    decode: Callable[[bytes, Place | None], Any]


@functools.lru_cache(maxsize=MAX_TOPICS)
def type_of(texts: tuple[str, ...]) -> Type:
    """The type of a topic that each journal describes by one of ``texts``; ``PenstockError`` if it cannot be read here.
    A place is the number of the journal among them, and the position in it."""
    versions = Versions(version for part, text in enumerate(texts) for version in parse_versions(text, part))
    record = spark_shape(versions.record)
    shape = record if versions.is_record else record.fields[0][1]
    if versions.holds_rows:
        shape = Shape("list", shape)

    def decode(data: bytes, place: Place | None = None) -> Any:
        if versions.takes_null and versions.read(data, place) is None:
            return None
        rows: list[Any] = versions.rows(data, place, record)
        if not versions.is_record:
            rows = [row["value"] for row in rows]
        return rows if versions.holds_rows else rows[0]

    return Type(spark_kind(shape), decode)


def _of_topic(texts: Texts, topic: str) -> tuple[str, ...]:
    """What the journals say of one topic, in the order of the journals."""
    return tuple(topics[topic] for _, topics in sorted(texts.items()) if topic in topics)


def _journal_index(texts: Texts, topic: str, journal: str) -> int:
    """Which of ``_of_topic`` is a journal's."""
    return sum(topic in topics for other, topics in texts.items() if other < journal)


def spark_shape(shape: Shape) -> Shape:
    """What Spark can hold of it: its times are of microseconds, and so are durations."""
    if shape.unit is not None:
        return Shape(f"{shape.kind.partition('[')[0]}[us]")
    item = None if shape.item is None else spark_shape(shape.item)
    return Shape(shape.kind, item, tuple((name, spark_shape(part)) for name, part in shape.fields))


def spark_kind(shape: Shape) -> pyarrow.DataType:
    """The Arrow type of a column that Spark can hold: it has no unsigned numbers and no half floats, so they widen."""
    if shape.kind == "struct":
        return pyarrow.struct([(name, spark_kind(part)) for name, part in shape.fields])
    if shape.kind == "list":
        return pyarrow.list_(spark_kind(shape.item or Shape("any")))
    if shape.kind == "map":
        return pyarrow.map_(pyarrow.string(), spark_kind(shape.item or Shape("any")))
    if shape.kind == "timestamp[us]":
        return pyarrow.timestamp("us", "UTC")
    simple = {"bytes": pyarrow.binary(), "bool": pyarrow.bool_(), "text": pyarrow.string(), "any": pyarrow.string()}
    return simple.get(shape.kind) or _NUMBERS.get(shape.kind) or pyarrow.type_for_alias(shape.kind)


# --- which types there are


def texts_of(options: Mapping[str, str]) -> Texts | None:
    """What the option ``decode`` asks for: the schemas of the journals' topics, or those that it holds; else None."""
    given = folded(options)
    wanted = given.get("decode", "none")
    if wanted.startswith("{"):  # written by ``fixed``: a frame keeps the types that it was loaded with
        return _parse(wanted)
    if wanted.lower() not in ("auto", "none"):
        raise InvalidArgument(f"decode={wanted!r} is not a choice; valid: auto, none")
    if wanted.lower() == "none":
        return None
    places = resolve(given)
    found = journals_texts(places, from_options(given))
    if not any(found.values()):
        named = ", ".join(map(shown, places[:3]))
        raise InvalidArgument(
            f"decode=auto: no topic of {named} that is read has a known type. Publish with type=, or decode by "
            "penstock.spark.decode"
        )
    return found


def journals_texts(places: Sequence[str], bounds: Bounds) -> dict[str, dict[str, str]]:
    """All versions of the schema of each described topic that ``bounds`` let through, by journal."""
    return {
        place.uuid: {topic: text for topic, text in place.schemas().items() if bounds.wants_topic(topic)}
        for place in open_places(places)
    }


def fixed(options: Mapping[str, str]) -> dict[str, str]:
    """The options with what ``decode=auto`` stands for now, so that all scans of a frame decode alike."""
    texts = texts_of(options)
    if texts is None:
        return dict(options)
    return {**{name: value for name, value in options.items() if name.lower() != "decode"}, "decode": json.dumps(texts)}


def _parse(text: str) -> Texts:
    try:
        found = json.loads(text)
        return {str(key): {str(name): str(one) for name, one in topics.items()} for key, topics in found.items()}
    except (ValueError, AttributeError, RecursionError):
        raise InvalidArgument(f"decode={text[:80]!r} is not of the form {{journal: {{topic: schema}}}}") from None


def kinds(texts: Texts) -> dict[str, pyarrow.DataType]:
    """The type of each topic's values; one that cannot be read here is left out."""
    found: dict[str, pyarrow.DataType] = {}
    for topic in sorted({topic for topics in texts.values() for topic in topics}):
        try:
            found[topic] = type_of(_of_topic(texts, topic)).kind
        except (PenstockError, ModuleNotFoundError):
            continue
    return found


def value_kind(texts: Texts) -> pyarrow.DataType:
    """The type of the column ``value``."""
    by_topic = kinds(texts)
    if not by_topic:
        raise InvalidArgument("decode=auto: no topic that is read has a type that can be read here")
    if len(set(by_topic.values())) == 1:
        return next(iter(by_topic.values()))
    if len(by_topic) > MAX_TOPICS:
        raise InvalidArgument(f"decode=auto: {len(by_topic)} topics of several types; name some by the option topics")
    return pyarrow.struct(list(by_topic.items()))


def table_schema(options: Mapping[str, str]) -> StructType:
    """The columns of a frame with these options."""
    from pyspark.sql.types import StringType, StructField, StructType

    texts = texts_of(options)
    more = () if texts is None else columns.DECODED
    names = columns.choose(folded(options).get("columns"), more)
    fields = {name: StructField(name, columns.spark_type(name)) for name in names if name not in more}
    if columns.VALUE in names and texts is not None:
        fields[columns.VALUE] = StructField(columns.VALUE, _spark_type(value_kind(texts)))
    fields[columns.CORRUPT] = StructField(columns.CORRUPT, StringType())
    return StructType([fields[name] for name in names])


def attach(frame: DataFrame, texts: Texts) -> DataFrame:
    """A frame with the columns journal, topic and payload, such as a lake's, with ``value`` and ``_corrupt`` added."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import StringType, StructField, StructType

    kind = value_kind(texts)
    values = Values(texts, pyarrow.schema([(columns.VALUE, kind), (columns.CORRUPT, pyarrow.string())]))

    def run(
        journals: pyarrow.Array, topics: pyarrow.Array, payloads: pyarrow.Array, positions: pyarrow.Array
    ) -> pyarrow.Array:
        names = journals.dictionary_encode()
        indices = names.indices.to_numpy(zero_copy_only=False)
        parts = []
        for number, journal in enumerate(names.dictionary.to_pylist()):
            good = indices == number
            mask = pyarrow.array(good)
            chosen = topics.filter(mask), payloads.filter(mask), positions.filter(mask)
            parts.append((good, values.decode(journal, *chosen, kind)))
        found = [
            merged([(good, part[n]) for good, part in parts], item.type, len(topics))
            for n, item in enumerate(values.schema)
        ]
        return pyarrow.StructArray.from_arrays(found, fields=list(values.schema))

    run.__annotations__ = dict.fromkeys(("journals", "topics", "payloads", "positions", "return"), pyarrow.Array)
    result = StructType([StructField(columns.VALUE, _spark_type(kind)), StructField(columns.CORRUPT, StringType())])
    decoded = F.arrow_udf(run, result)("journal", "topic", "payload", "position")  # type: ignore[attr-defined]
    return frame.withColumns({name: decoded[name] for name in columns.DECODED})


def _spark_type(kind: pyarrow.DataType) -> Any:
    from pyspark.sql.pandas.types import from_arrow_type

    return from_arrow_type(kind, prefer_timestamp_ntz=False)


# --- decoding


@dataclass(frozen=True, slots=True)
class Values:
    """Adds ``value`` and ``_corrupt`` to batches. Picklable: executors make the decoders from the texts."""

    texts: Texts
    schema: pyarrow.Schema = field(repr=False)  # of the batches that go out

    @property
    def inner(self) -> pyarrow.Schema:
        """The schema of the batches that are read: without these two columns, with what they are made from."""
        names = [name for name in self.schema.names if name not in columns.DECODED]
        fields = [self.schema.field(name) for name in names]
        needed = [("topic", pyarrow.string()), ("payload", pyarrow.binary())]
        if self._changes:
            needed.append(("position", pyarrow.int64()))
        return pyarrow.schema(fields + [pyarrow.field(name, kind) for name, kind in needed if name not in names])

    def extend(self, journal: str, batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        """The batch of a journal with its values."""
        names = self.schema.names
        kind = self.schema.field(columns.VALUE).type if columns.VALUE in names else value_kind(self.texts)
        positions = batch.column("position") if self._changes else None
        made = self.decode(journal, batch.column("topic"), batch.column("payload"), positions, kind)
        found = dict(zip(columns.DECODED, made, strict=True))
        arrays = [found[name] if name in found else batch.column(name) for name in names]
        return pyarrow.RecordBatch.from_arrays(arrays, schema=self.schema)

    @property
    def _changes(self) -> bool:
        """Whether the type of a topic has changed, so that positions are needed."""
        topics = {topic for topics in self.texts.values() for topic in topics}
        return any("\n" in "\n".join(_of_topic(self.texts, topic)) for topic in topics)

    def decode(
        self,
        journal: str,
        names: pyarrow.Array,
        payloads: pyarrow.Array,
        positions: pyarrow.Array | None,
        kind: pyarrow.DataType,
    ) -> payload.Decoded:
        """Values and reasons of payloads, by the topic of each."""
        known = kinds(self.texts)
        shared = len(set(known.values())) == 1
        if not shared and not (pyarrow.types.is_struct(kind) and {item.name for item in kind} <= known.keys()):
            raise StateError("the types of topics have changed since this frame was loaded; load it again")
        coded = names.dictionary_encode() if not pyarrow.types.is_dictionary(names.type) else names
        indices = coded.indices.to_numpy(zero_copy_only=False)
        parts = []
        for number, topic in enumerate(coded.dictionary.to_pylist()):
            good = indices == number
            if good.any():
                part_kind = kind if shared else kind.field(topic).type if topic in kind.names else None
                mask = pyarrow.array(good)
                places = None
                if positions is not None:
                    part = _journal_index(self.texts, topic, journal)
                    places = [(part, position) for position in positions.filter(mask).to_pylist()]
                said = _of_topic(self.texts, topic) if topic in self.texts.get(journal, {}) else ()
                parts.append((good, topic, *_decode_topic(topic, said, payloads.filter(mask), places, part_kind)))
        reasons = merged([(good, why) for good, _, _, why in parts], pyarrow.string(), len(names))
        if shared:
            return merged([(good, values) for good, _, values, _ in parts], kind, len(names)), reasons
        return _by_topic([(good, topic, values) for good, topic, values, _ in parts], kind, reasons), reasons


def _decode_topic(
    topic: str,
    texts: tuple[str, ...],
    payloads: pyarrow.Array,
    places: Sequence[Place] | None,
    kind: pyarrow.DataType | None,
) -> payload.Decoded:
    if not texts or kind is None:
        return _nothing(payloads, kind, f"topic {topic!r} had no known type when this was loaded")
    try:
        decode = type_of(texts).decode
    except (PenstockError, ModuleNotFoundError) as error:
        return _nothing(payloads, kind, f"the type of topic {topic!r} cannot be read here: {error}"[:300])
    return payload.each(payloads, decode, kind, places)


def _nothing(payloads: pyarrow.Array, kind: pyarrow.DataType | None, reason: str) -> payload.Decoded:
    reasons = pyarrow.array([reason] * len(payloads), pyarrow.string())
    return pyarrow.nulls(len(payloads), kind or pyarrow.null()), reasons


def merged(parts: Sequence[tuple[Any, pyarrow.Array]], kind: pyarrow.DataType, count: int) -> pyarrow.Array:
    """One array of what each part has where its mask holds. The masks cover every place once."""
    if not parts:
        return pyarrow.nulls(count, kind)
    if len(parts) == 1:
        return parts[0][1]
    places = numpy.concatenate([numpy.flatnonzero(good) for good, _ in parts])
    order = numpy.empty(count, numpy.int64)
    order[places] = numpy.arange(count)
    return pyarrow.concat_arrays([values for _, values in parts]).take(pyarrow.array(order))


def _by_topic(
    parts: Sequence[tuple[Any, str, pyarrow.Array]], kind: pyarrow.DataType, reasons: pyarrow.Array
) -> pyarrow.Array:
    found = {topic: (good, values) for good, topic, values in parts}
    children = []
    for item in kind:
        good, values = found.get(item.name, (None, None))
        if good is None:
            children.append(pyarrow.nulls(len(reasons), item.type))
        else:
            children.append(payload.spread(values, good))
    return pyarrow.StructArray.from_arrays(children, fields=list(kind), mask=reasons.is_valid())
