"""Numbers of JSON that do not fit their columns. Spark's own parser reads 1e400 into a double as infinite, 2**53 + 1 as
2**53, 1.25 into a decimal(4,1) as 1.3, and 200 into a tinyint as -56, each without a word.

A text in which a number may not fit is parsed a second time, into types that keep every number, and the two are
compared inside the JVM. Few texts are: a fraction such as 0.1 fits a float, which holds the nearest number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import StructType

_WIDEST = "decimal(38,0)"
_GREAT = r"|[eE][+]?[0-9]{2}"  # an exponent with which a number may be too great
_INFINITE = r"\b(Infinity|INF|Inf)\b"  # Spark's words for it


def misfits(text: Column, decoded: Column, fields: StructType, parse: Callable[[StructType], Column]) -> Column | None:
    """Whether a number of ``text`` is not what ``decoded`` has for it; None if no column can have such numbers.

    ``parse`` gives the same text as other types.
    """
    from pyspark.sql import functions as F

    exact = _exact_type(fields)
    if exact is None:
        return None
    # An array of one: the second parse is evaluated once, however many columns are compared.
    both = F.array(F.struct(decoded.alias("decoded"), parse(exact).alias("exact")))
    named_infinite = text.rlike(_INFINITE)
    found = F.exists(both, lambda pair: _differs(pair["decoded"], pair["exact"], fields, named_infinite))
    return F.when(text.rlike("|".join(sorted(_patterns(fields)))), found).otherwise(F.lit(False))


def _exact_type(kind: Any) -> Any:
    """A type that keeps each number that ``kind`` could change: None where it changes none."""
    from pyspark.sql import types

    if isinstance(kind, types.StructType):
        found = [(field.name, _exact_type(field.dataType)) for field in kind.fields]
        fields = [types.StructField(name, inner) for name, inner in found if inner is not None]
        return types.StructType(fields) if fields else None
    if isinstance(kind, types.ArrayType):
        inner = _exact_type(kind.elementType)
        return None if inner is None else types.ArrayType(inner)
    if isinstance(kind, types.MapType):
        inner = _exact_type(kind.valueType)
        return None if inner is None else types.MapType(kind.keyType, inner)
    if isinstance(kind, types.ByteType):
        return types.IntegerType()
    if isinstance(kind, types.FloatType | types.DoubleType):
        return types.StringType()  # integers with all digits; other numbers as a double, which is enough for these
    return types.VariantType() if isinstance(kind, types.DecimalType) else None


def _patterns(kind: Any) -> set[str]:
    """What a text must match so that one of its numbers can be one that does not fit."""
    from pyspark.sql import types

    if isinstance(kind, types.StructType):
        return set().union(*(_patterns(field.dataType) for field in kind.fields))
    if isinstance(kind, types.ArrayType):
        return _patterns(kind.elementType)
    if isinstance(kind, types.MapType):
        return _patterns(kind.valueType)
    if isinstance(kind, types.ByteType):
        return {"[0-9]{3}"}
    if isinstance(kind, types.FloatType):
        return {r"(?<![0-9.])[0-9]{8}" + _GREAT}  # not the digits of a fraction
    if isinstance(kind, types.DoubleType):
        return {r"(?<![0-9.])[0-9]{16}" + _GREAT}
    return {rf"[.][0-9]{{{kind.scale + 1}}}|[0-9][eE]"} if isinstance(kind, types.DecimalType) else set()


def _differs(decoded: Column, exact: Column, kind: Any, named_infinite: Column) -> Column:
    """Whether ``decoded``, of type ``kind``, is another number than ``exact``; never null."""
    from pyspark.sql import functions as F
    from pyspark.sql import types

    def inside(inner: Any) -> Callable[[Column, Column], Column]:
        return lambda one, other: _differs(one, other, inner, named_infinite)

    if isinstance(kind, types.StructType):
        checked = [field for field in kind.fields if _exact_type(field.dataType) is not None]
        each = [inside(field.dataType)(decoded[field.name], exact[field.name]) for field in checked]
        return reduce(lambda one, other: one | other, each)
    if isinstance(kind, types.ArrayType):
        found = F.exists(F.zip_with(decoded, exact, inside(kind.elementType)), lambda bad: bad)
    elif isinstance(kind, types.MapType):
        values = F.map_values(decoded), F.map_values(exact)
        found = F.exists(F.zip_with(*values, inside(kind.valueType)), lambda bad: bad)
    elif isinstance(kind, types.DecimalType):
        found = _rounded(decoded, F.try_variant_get(exact, "$", "string"), kind.scale)
    elif isinstance(kind, types.ByteType):
        found = decoded.cast("int") != exact
    else:
        found = _changed(decoded, exact, named_infinite)
    return F.coalesce(found, F.lit(False))


def _changed(number: Column, text: Column, named_infinite: Column) -> Column:
    """Whether a float or double is infinite though its text is not, or has lost digits of an integer."""
    from pyspark.sql import functions as F

    too_great = (F.abs(number) == float("inf")) & (text.rlike("^-?[0-9]") | ~named_infinite)
    # Its shortest text or its exact value may be the integer: 10**20 as a double is exact, so is 2**60.
    shortest = text.try_cast(_WIDEST).eqNullSafe(number.cast("string").try_cast(_WIDEST))
    value = (number < float(2**63)) & text.try_cast("bigint").eqNullSafe(number.try_cast("bigint"))
    known = text.try_cast(_WIDEST).isNotNull() & (shortest | (value & text.try_cast("bigint").isNotNull()))
    return too_great | (text.rlike("^-?[0-9]+$") & ~known)


def _rounded(number: Column, text: Column, scale: int) -> Column:
    """Whether a decimal of ``scale`` lacks digits of its text, where an exponent stands in some."""
    from pyspark.sql import functions as F

    fits = text.rlike(rf"^[^.]*([.][0-9]{{0,{scale}}}0*)?$")
    differs = number.cast("double") != text.try_cast("double")
    return F.when(text.rlike("[eE]"), differs).otherwise(~fits)
