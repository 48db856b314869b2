"""Payloads to columns: ``decode.json(frame, "speed double")``, ``decode.msgpack``, ``decode.arrow``,
``decode.protobuf``, ``decode.avro``, ``decode.struct``, ``decode.array``, ``decode.gateway``.

Rules: each takes a DataFrame and gives it back with a column ``value`` (named by ``into``) and a column ``_corrupt``
that is null, or says why this payload could not be decoded. A bad payload never fails the job and its row never
vanishes; decoding twice keeps the first reason. JSON stays inside the JVM; the rest runs on executors over Arrow
batches. Nothing is evaluated: no pickle in arrays, no code in layouts.
"""

from __future__ import annotations

import json as texts
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy
import pyarrow

from penstock.errors import InvalidArgument
from penstock.spark import payload

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType

CORRUPT = "_corrupt"
_ITEMS, _END = "_penstock_items", "_penstock_end"  # what stands around a JSON text
_PARSED, _REASON = "_penstock_parsed", "_penstock_reason"  # columns while JSON is decoded
Decoder = Callable[[pyarrow.Array], tuple[pyarrow.Array, pyarrow.Array]]

__all__ = ["json", "msgpack", "arrow", "protobuf", "avro", "struct", "array", "gateway"]


def json(
    frame: DataFrame, schema: StructType | str | None = None, *, column: str = "payload", into: str = "value"
) -> DataFrame:
    """JSON text to the columns of ``schema``, or to Spark's variant when there is none."""
    from pyspark.sql import functions as F

    _require(frame, column)
    text = F.col(column).cast("string")
    bad = F.when(F.col(column).isNull(), "payload is null").when(~F.is_valid_utf8(text), "not UTF-8")
    parsed = F.col(_PARSED)
    if schema is None:
        frame = frame.withColumn(_PARSED, F.try_parse_json(F.concat(F.lit("["), text, F.lit(f', "{_END}"]'))))
        decoded = F.try_variant_get(parsed, "$[0]", "variant")
        one = F.try_variant_get(parsed, "$[1]", "string").eqNullSafe(F.lit(_END))
        bad = bad.when(~one | decoded.isNull(), "not JSON")
    else:
        from penstock.spark.json_numbers import misfits

        fields = _struct_type(schema)
        frame = frame.withColumn(_PARSED, _from_json(text, fields))
        item, ended = F.get(parsed[_ITEMS], F.lit(0)), F.get(parsed[_ITEMS], F.lit(1))[_END]
        one = (F.size(parsed[_ITEMS]) == 2) & ended.eqNullSafe(F.lit(1)) & parsed["_record"].isNull()
        bad = bad.when(~F.coalesce(one, F.lit(False)) | item.isNull(), "not JSON of the schema")
        wrong = misfits(text, item, fields, lambda kind: F.get(_from_json(text, kind)[_ITEMS], F.lit(0)))
        bad = bad if wrong is None else bad.when(wrong, "a number does not fit its column")
        decoded = item.dropFields(_END)
    if CORRUPT in frame.columns:
        bad = F.coalesce(F.col(CORRUPT), bad)
    # In projections of their own: Spark would parse anew for each use of an expression.
    checked, reason = frame.withColumn(_REASON, bad), F.col(_REASON)
    made = checked.withColumns({into: F.when(reason.isNull(), decoded), CORRUPT: reason})
    return made.drop(_PARSED, _REASON)


def _from_json(text: Column, fields: StructType) -> Column:
    """The text as a struct, in an array before an item that ends it.

    Spark's parser reads one value and does not look at what follows it. Here anything more is malformed, or changes the
    number of items.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType, StructType

    item = StructType(list(fields.fields)).add(_END, "integer")
    outer = StructType().add(_ITEMS, ArrayType(item)).add("_record", "string")
    framed = F.concat(F.lit(f'{{"{_ITEMS}": ['), text, F.lit(f', {{"{_END}": 1}}]}}'))
    return F.from_json(framed, outer, {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": "_record"})


def msgpack(frame: DataFrame, schema: DataType | str, *, column: str = "payload", into: str = "value") -> DataFrame:
    """MessagePack to ``schema`` (a struct for maps; arrays and plain values by their own type)."""
    kind = _data_type(schema)
    arrow_type = _arrow_type(kind)
    return _apply(frame, column, into, kind, lambda batch: payload.msgpack(batch, arrow_type))


def arrow(
    frame: DataFrame, schema: StructType | str, *, column: str = "payload", into: str = "value", explode: bool = True
) -> DataFrame:
    """Arrow IPC streams to rows of ``schema``: one row each, or arrays of them with ``explode=False``."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType

    kind = _struct_type(schema)
    arrow_type = _arrow_type(kind)
    decoded = _apply(frame, column, into, ArrayType(kind), lambda batch: payload.arrow(batch, arrow_type))
    return decoded.withColumn(into, F.explode_outer(into)) if explode else decoded


def protobuf(
    frame: DataFrame, message: Any, descriptors: str | os.PathLike[str] | bytes | None = None, *,
    column: str = "payload", into: str = "value",
) -> DataFrame:  # fmt: skip
    """Protocol buffers: ``message`` is a generated class, or a name in ``descriptors``, a file of ``protoc
    --include_imports --descriptor_set_out`` (or its bytes). Unset fields with presence are null, enums their names.
    """
    from penstock.spark import protobuf as room

    data, name = room.descriptor_bytes(message, descriptors)
    kind = _spark_type(room.compiled(data, name)[0])
    return _apply(frame, column, into, kind, lambda batch: payload.protobuf(batch, data, name))


def avro(
    frame: DataFrame, schema: str | Mapping[str, Any], *, skip: int = 0, column: str = "payload", into: str = "value"
) -> DataFrame:
    """Avro's binary form by its schema (JSON text or a dict), after ``skip`` bytes (5 with a registry's number)."""
    from penstock.spark import avro as room

    text = schema if isinstance(schema, str) else texts.dumps(schema)
    return _apply(frame, column, into, _spark_type(room.compiled(text)[0]), lambda b: payload.avro(b, text, skip))


def struct(frame: DataFrame, layout: Mapping[str, str], *, column: str = "payload", into: str = "value") -> DataFrame:
    """Fixed layouts: ``{"speed": "<f8", "count": "<u4"}`` names packed fields by numpy type, in order."""
    dtype = payload.check_layout(layout)
    return _apply(frame, column, into, _layout_type(dtype), lambda batch: payload.struct(batch, dtype))


def array(
    frame: DataFrame, dtype: str | None = None, *, shape: tuple[int, ...] | None = None, column: str = "payload",
    into: str = "value",
) -> DataFrame:  # fmt: skip
    """numpy arrays, flat: raw bytes of ``dtype`` (exactly of ``shape`` when given), or ``.npy`` files as doubles."""
    from pyspark.sql.types import ArrayType

    if dtype is None:
        return _apply(frame, column, into, ArrayType(_scalar_type(numpy.dtype("f8"))), payload.npy)
    kind = payload.check_number(numpy.dtype(dtype), "dtype")
    count = None if shape is None else int(numpy.prod(shape))
    return _apply(frame, column, into, ArrayType(_scalar_type(kind)), lambda batch: payload.array(batch, kind, count))


def gateway(frame: DataFrame, *, column: str = "payload", into: str = "value") -> DataFrame:
    """The gateway's byte form to ``struct<properties: map<string, string>, content: binary>``."""
    kind = _data_type("struct<properties: map<string, string>, content: binary>")
    return _apply(frame, column, into, kind, payload.gateway)


def _apply(frame: DataFrame, column: str, into: str, kind: DataType, decoder: Decoder) -> DataFrame:
    """Run ``decoder`` over Arrow batches on the executors; one call gives the values and the reasons."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import StringType, StructField, StructType

    result = StructType([StructField("value", kind), StructField("reason", StringType())])

    def run(batch: pyarrow.Array) -> pyarrow.Array:
        values, reasons = decoder(batch)
        return pyarrow.StructArray.from_arrays([values, reasons], names=["value", "reason"])

    run.__annotations__ = {"batch": pyarrow.Array, "return": pyarrow.Array}
    decoded = F.arrow_udf(run, result)(F.col(column))  # type: ignore[attr-defined]
    return _attach(frame, column, decoded["value"], decoded["reason"], into)


def _attach(frame: DataFrame, column: str, decoded: Column, bad: Column, into: str) -> DataFrame:
    from pyspark.sql import functions as F

    _require(frame, column)
    reason = F.when(F.col(column).isNull(), "payload is null").otherwise(bad)
    if CORRUPT in frame.columns:
        reason = F.coalesce(F.col(CORRUPT), reason)
    return frame.withColumns({into: F.when(reason.isNull(), decoded), CORRUPT: reason})


def _require(frame: DataFrame, column: str) -> None:
    if column not in frame.columns:
        raise InvalidArgument(f"there is no column {column!r} to decode; the frame has {', '.join(frame.columns)}")


def _data_type(schema: DataType | str) -> DataType:
    from pyspark.sql.types import DataType

    return DataType.fromDDL(schema) if isinstance(schema, str) else schema


def _struct_type(schema: StructType | str) -> StructType:
    from pyspark.sql.types import StructType

    kind = _data_type(schema)
    if not isinstance(kind, StructType):
        raise InvalidArgument(f"schema={schema!r} must name columns, as in 'speed double, name string'")
    return StructType(list(kind.fields))


def _arrow_type(kind: DataType) -> pyarrow.DataType:
    from pyspark.sql.pandas.types import to_arrow_type

    return to_arrow_type(kind, timezone="UTC")


def _spark_type(kind: pyarrow.DataType) -> DataType:
    from pyspark.sql.pandas.types import from_arrow_type

    return from_arrow_type(kind, prefer_timestamp_ntz=False)


def _layout_type(dtype: numpy.dtype[Any]) -> StructType:
    from pyspark.sql.types import BinaryType, StructField, StructType

    fields = []
    for name in dtype.names or ():
        kind = dtype[name]
        fields.append(StructField(name, BinaryType() if kind.kind == "S" else _scalar_type(kind)))
    return StructType(fields)


def _scalar_type(dtype: numpy.dtype[Any]) -> DataType:
    """The Spark type that holds every value of ``dtype``: Spark has no unsigned ones, so they widen."""
    from pyspark.sql.pandas.types import from_arrow_type

    return from_arrow_type(payload.widened(dtype))
