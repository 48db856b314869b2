"""A loaded frame whose every scan has a Python source of its own, with the columns and filters of its query alone.

Why: Spark 4.3 keeps one Python source per loaded frame and in it the plan that the last push-down made. The filters of
one query would stay for the next one over the same frame, and of two scans in one query the last one's filters would
count for both: rows would go missing. Nor does it tell a Python source which columns a query uses. This module replaces
the frame's table by one that makes a new source for each scan, with the columns it needs (``scans``, Java that is
compiled in the driver's JVM). All filters are returned to Spark, which checks every row again. Every scan plans for
itself, so the end of each journal is recorded when the frame is loaded: all scans of a frame see the same messages.

In SQL two rules among a session's extensions do the same. They also give a catalog table the options that it was
created with (Spark forgets them), and resolve ``penstock.`/path` ``.

With a version of Spark where this fails or that was never tested, a warning says what is lost: frames and views are
correct, but without push-down. Driver only; any thread may load.
"""

from __future__ import annotations

import functools
import json
import logging
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.spark import scans

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

LOG = logging.getLogger("penstock.spark")
_compiled: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_with_rules: weakref.WeakSet[Any] = weakref.WeakSet()  # contexts
TRIED = ("4.3.",)  # versions of Spark that tests/spark/test_relation.py has run with
_ENABLED = "spark.sql.python.filterPushdown.enabled"


def push_down(spark: SparkSession) -> None:
    """Enable push-down of columns and filters in ``spark``, a session that ``session()`` did not start.

    It applies to frames loaded afterwards, in classic sessions; Spark Connect reads whole frames.
    """
    spark.conf.set(_ENABLED, "true")
    install(spark)


def install(spark: SparkSession) -> None:
    """Make ``spark.read.format("penstock").load(...)`` return such frames; other formats are not affected.

    Tables and paths in SQL work only if ``spark`` has not run a query yet.
    """
    _add_rules(spark)
    _wrap_load()


def _add_rules(spark: SparkSession) -> None:
    context = getattr(spark, "_sc", None)
    if context is None or context in _with_rules:  # Spark Connect has no JVM here
        return
    _with_rules.add(context)
    version = context.version
    if not version.startswith(TRIED):
        LOG.warning("Penstock was tested with Spark %s, not with %s: check your results", ", ".join(TRIED), version)
    try:
        gateway = context._gateway
        made = _table_class(gateway).getClasses()
        queries = next(item for item in made if item.getSimpleName() == "Queries").getConstructors()[0]
        for paths in (True, False):
            arguments = gateway.new_array(gateway.jvm.java.lang.Object, 1)
            arguments[0] = paths
            rule, extensions = queries.newInstance(arguments), spark._jsparkSession.extensions()
            (extensions.injectHintResolutionRule if paths else extensions.injectResolutionRule)(rule)
    except Exception as error:  # other versions of Spark may differ here
        what = "tables and paths of journals cannot be used in SQL (views can), and filters are not pushed down"
        LOG.warning("with Spark %s %s: %s", version, what, _reason(error))


def _wrap_load() -> None:
    from pyspark.sql.readwriter import DataFrameReader

    original = DataFrameReader.load
    if getattr(original, "penstock", False):
        return

    @functools.wraps(original)
    def load(self: DataFrameReader, *arguments: Any, **options: Any) -> DataFrame:
        return separated(original(self, *arguments, **options))

    load.penstock = True  # type: ignore[attr-defined]
    DataFrameReader.load = load  # type: ignore[method-assign]


def separated(frame: DataFrame) -> DataFrame:
    """The same frame with a source for each scan; unchanged if it is not ours or push-down is off.

    Errors in options, schema or path are raised here as Penstock errors, without Spark's stack trace around them.
    """
    relation = _relation(frame)
    if relation is None:
        return frame
    given = {str(key): str(value) for key, value in dict(relation.options().asCaseSensitiveMap()).items()}
    small = {key.lower(): value for key, value in given.items()}
    enabled = frame.sparkSession.conf.get(_ENABLED, "false")
    if enabled != "true" or small.get("pushdown", "true").lower() != "true":
        return frame
    if "decode" in small:
        from penstock.spark.described import fixed

        given = fixed(given)
    more = {"pushdown": "true", "ends": ends_of(given, frame.schema)}
    try:
        return _with_own_sources(frame, relation, given | more)
    except Exception as error:  # other versions of Spark may differ here: results stay correct, without push-down
        text = "with Spark %s filters are not pushed down to journals, which are read whole: %s"
        LOG.warning(text, frame.sparkSession.version, _reason(error))
        return frame


def _reason(error: Exception) -> str:
    java = getattr(error, "java_exception", None)
    return str(error if java is None else java.toString()).splitlines()[0]


def _relation(frame: DataFrame) -> Any:
    """The relation of a frame of ours, None for any other."""
    java_frame = getattr(frame, "_jdf", None)
    if java_frame is None:
        return None
    plan = java_frame.queryExecution().analyzed()
    if plan.getClass().getSimpleName() != "DataSourceV2Relation":
        return None
    table = plan.table()
    ours = table.getClass().getSimpleName() == "PythonTable" and table.name().lower() == "penstock"
    return plan if ours else None


def _with_own_sources(frame: DataFrame, relation: Any, options: Mapping[str, str]) -> DataFrame:
    from pyspark.sql import DataFrame as ClassicFrame

    spark = frame.sparkSession
    gateway: Any = spark.sparkContext._gateway
    jvm = gateway.jvm
    words = jvm.java.util.HashMap()
    for key, value in options.items():
        words.put(key, value)
    arguments = gateway.new_array(jvm.java.lang.Object, 3)
    arguments[0] = jvm.org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2()
    arguments[1] = relation.table().name()
    arguments[2] = relation.table().schema()
    table = _table_class(gateway).getConstructors()[0].newInstance(arguments)
    map_ = jvm.org.apache.spark.sql.util.CaseInsensitiveStringMap(words)
    copied = relation.copy(
        table, relation.output(), relation.catalog(), relation.identifier(), map_, relation.timeTravelSpec()
    )
    session = spark._jsparkSession
    return ClassicFrame(jvm.org.apache.spark.sql.classic.Dataset.ofRows(session, copied), spark)


def _table_class(gateway: Any) -> Any:
    """The Java class of ``scans``, compiled once for each JVM."""
    known = _compiled.get(gateway)
    if known is None:
        jvm = gateway.jvm
        compiler = jvm.org.codehaus.janino.SimpleCompiler()
        compiler.setParentClassLoader(jvm.java.lang.Thread.currentThread().getContextClassLoader())
        compiler.cook(scans.JAVA)
        known = compiler.getClassLoader().loadClass(scans.CLASS)
        _compiled[gateway] = known
    return known


def ends_of(options: Mapping[str, str], schema: StructType) -> str:
    """Where each journal ends now, as the option ``ends``."""
    from penstock.spark.places import open_places
    from penstock.spark.source import JournalReader

    reader = JournalReader(dict(options), schema)
    ends = {place.uuid: place.frontier for place in open_places(reader.places)}
    return json.dumps(ends if reader.ends is None else reader.ends)  # the option may have been given already
