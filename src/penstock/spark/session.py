"""``session()``: a Spark session that is right for Penstock without further settings.

It sets what would otherwise be looked up in a manual: the Python of the workers, UTC, filter push-down for Python
sources, a shuffle as wide as the machine, RocksDB for state, loopback only, large buffers to the workers. Whatever the
caller names wins. The start-up class cache is an archive of the classes that Spark loads, made once by
``make_class_cache()`` and used when it is there. Call it from the thread that will use Spark.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import InvalidArgument, StateError
from penstock.spark import relation
from penstock.spark.java import Java, cache_directory, find_java, write_script

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
# Spark puts its own zip archives in front of PYTHONPATH. Python compiles what it imports from an archive each time:
# a worker then starts in 1.2 s instead of 0.4 s, and Spark gives up on one that has not connected after 10 s.
_WORKER = """\
#!/bin/sh
set -f
IFS=:
kept=
for entry in $PYTHONPATH; do
  case $entry in
    {archives}/*.zip) ;;
    *) kept=$kept:$entry ;;
  esac
done
PYTHONPATH=${{kept#:}} exec {python} "$@"
"""
BUFFER_BYTES = 1 << 20  # between the JVM and a Python worker; Arrow batches are of this order


def session(
    name: str = "penstock", *, master: str | None = None, class_cache: Any = True, **config: Any
) -> SparkSession:
    """Start Spark (or give the session that runs) with ``config`` such as ``**{"spark.driver.memory": "4g"}``.

    ``class_cache`` (a bool): use the cache that ``make_class_cache()`` has made, if there is one. It is typed ``Any``,
    because type checkers would otherwise reject a ``config`` of texts.
    """
    for key in config:
        if not key.startswith("spark."):
            raise InvalidArgument(f"session has no option {key!r}; Spark's own settings begin with 'spark.'")
    _require_pyspark()
    java = find_java()
    os.environ["JAVA_HOME"] = str(java.home)
    where = master or config.get("spark.master", "local[*]")
    for variable in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):  # for tasks, and for planning on the driver
        if os.environ.get(variable, "") in ("", worker_python("local")):
            os.environ[variable] = worker_python(where)
    from pyspark.sql import SparkSession

    if where.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    settings = {**defaults(where, java, class_cache), **config}
    builder = SparkSession.builder.appName(name)
    for key, value in settings.items():
        builder = builder.config(key, _text(value))
    spark = builder.getOrCreate()
    relation.install(spark)
    return spark


def defaults(master: str, java: Java, class_cache: bool = True) -> dict[str, Any]:
    """What ``session`` sets when the caller does not."""
    settings: dict[str, Any] = {
        "spark.master": master,
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.python.filterPushdown.enabled": True,
        "spark.sql.execution.arrow.pyspark.enabled": True,
        "spark.sql.streaming.stateStore.providerClass": _ROCKSDB,
        "spark.sql.streaming.metricsEnabled": True,
        "spark.ui.showConsoleProgress": False,
    }
    if master.startswith("local"):
        settings |= {
            "spark.pyspark.python": worker_python(master),
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.ui.enabled": False,
            "spark.sql.shuffle.partitions": os.cpu_count() or 2,
            "spark.default.parallelism": os.cpu_count() or 2,
            "spark.buffer.size": BUFFER_BYTES,
        }
    options = java_options(java, class_cache)
    if options:
        settings["spark.driver.extraJavaOptions"] = " ".join(options)
    return settings


def worker_python(master: str) -> str:
    """The Python of the workers; on this machine a script that imports PySpark from its installed files."""
    import pyspark

    home = Path(pyspark.__file__).parent
    if not master.startswith("local") or Path(os.environ.get("SPARK_HOME") or home) != home:
        return sys.executable  # other machines have no such script, another Spark needs its own PySpark
    text = _WORKER.format(archives=shlex.quote(str(home / "python" / "lib")), python=shlex.quote(sys.executable))
    try:
        script = cache_directory() / f"python-{zlib.crc32(text.encode()):08x}"
        write_script(script, text)
    except OSError:  # the home directory is read-only: Spark's own way works too, only slower
        return sys.executable
    return str(script) if os.access(script, os.X_OK) else sys.executable


def java_options(java: Java, class_cache: bool) -> list[str]:
    """Flags of the driver's JVM: the class cache where there is one."""
    archive = class_cache_path(java)
    return (
        [f"-XX:SharedArchiveFile={archive}", "-Xshare:auto", "-Xlog:disable"]
        if class_cache and archive.exists()
        else []
    )


def class_cache_path(java: Java) -> Path:
    """The path of the class cache for this Spark and this Java; a cache is valid for one location of the jars only."""
    import pyspark

    place = zlib.crc32(str(Path(pyspark.__file__).parent).encode())
    return cache_directory() / f"spark-{pyspark.__version__}-java-{java.version}-{place:08x}.jsa"


def make_class_cache(timeout: float = 300.0) -> Path:
    """Make the start-up class cache by one short run of Spark; gives its path. Takes about half a minute, once."""
    _require_pyspark()
    java = find_java()
    path = class_cache_path(java)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        command = [sys.executable, "-m", "penstock.spark.warm", str(temporary)]
        subprocess.run(command, check=True, timeout=timeout, capture_output=True)
        os.replace(temporary, path)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        raise StateError(f"the class cache was not made ({error}); Spark starts without it, only slower") from error
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _require_pyspark() -> None:
    try:
        import pyspark
    except ImportError:
        raise StateError("penstock.spark needs PySpark: run `pip install 'penstock[spark]'`.") from None
    major, minor = (int(part) for part in pyspark.__version__.split(".")[:2])
    if (major, minor) < (4, 3):
        raise StateError(
            f"penstock.spark needs PySpark 4.3 or newer, not {pyspark.__version__}: pip install -U pyspark"
        )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
