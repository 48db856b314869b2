"""``penstock sql``: queries recordings and journals with DuckDB over Arrow, without a JVM."""

from __future__ import annotations

import contextlib
import csv
import datetime
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import exits, show
from penstock.errors import InvalidArgument, PenstockError
from penstock.observe import decode
from penstock.quantities import iso_time
from penstock.recording.story import STORY, is_journal, parts, read_story
from penstock.recording.tables import Columns, Described
from penstock.types.fields import json_text

if TYPE_CHECKING:
    import duckdb

    from penstock.journal import Journal

app = typer.Typer()

#: What follows FROM or JOIN: a folder, in quotes if its name is not a plain word.
_TABLE = re.compile(r"""\b(from|join)\s+('[^']+'|"[^"]+"|[\w./-]+)""", re.IGNORECASE)
_PAYLOAD = re.compile(r"\*|\b(payload|text|json)\b", re.IGNORECASE)
_PROPERTIES = re.compile(r"\*|\bproperties\b", re.IGNORECASE)
BAR_COLUMNS = 40
FORMS = ("table", "csv", "json")


@dataclass(frozen=True, slots=True)
class _Moment:
    """A time with its nanoseconds, which DuckDB's own Python value lacks."""

    since_1970_ns: int


_WHOLE = (int, float, datetime.date, datetime.time, datetime.timedelta, _Moment)  #: never cut in a table


@app.command()
def sql(
    query: Annotated[str, typer.Argument(help="SQL; FROM names the folder of a recording or journal.")],
    form: Annotated[str, typer.Option("--format", "-f", help="table, csv or json (an object a line).")] = FORMS[0],
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    plot: Annotated[bool, typer.Option("--plot", help="The last column as bars beside the first.")] = False,
    check: Annotated[bool, typer.Option(help="Verify the checksum of every message that is read.")] = True,
) -> None:
    """Query recordings and journals with SQL (DuckDB). FROM names a folder, in quotes if its name is no plain word.

    Columns: position, topic, ordinal, timestamp (UTC), timestamp_ns, payload (bytes), text and json (the payload as
    text or JSON, decoded by its topic's declared type if there is one; else NULL), size, properties. Folders are read
    from the disk of this machine; the query cannot read other files.

    Example: [green]penstock sql "select topic, count(*), avg((json->>'celsius')::double) from run1 group by 1"[/]
    """
    exits.choice(form, FORMS, "--format")
    import duckdb

    failed: list[PenstockError] = []
    connection = duckdb.connect(config={"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"})
    try:
        asked = _TABLE.sub(lambda found: _named(connection, found, query, check, failed), query)
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
        answer = connection.execute(asked)
        if answer is None:  # the query is only a comment or a semicolon
            raise InvalidArgument("sql: the query is empty")
        names = [column[0] for column in answer.description or ()]
        rows = _rows(connection, answer)
    except duckdb.CatalogException as error:
        if lacking := re.search(r"Table with name (\S+) does not exist", str(error)):
            said = f"no folder {lacking[1]} of a recording or journal"
            if Path(lacking[1]).is_dir():
                said = f"a folder {lacking[1]}; write it directly after FROM or JOIN, without brackets"
            raise InvalidArgument(f"sql: there is {said}") from None
        raise InvalidArgument(f"sql: {str(error).strip()}") from None
    except duckdb.Error as error:
        if failed:
            raise failed[0] from None
        raise InvalidArgument(f"sql: {str(error).strip()}") from None
    finally:
        connection.close()
    _print(names, rows, "json" if as_json else form, plot)


def _arrow_table(answer: Any) -> Any:
    # DuckDB 2 has another name for it
    return answer.to_arrow_table() if hasattr(answer, "to_arrow_table") else answer.fetch_arrow_table()


def _rows(connection: duckdb.DuckDBPyConnection, answer: duckdb.DuckDBPyConnection) -> list[tuple[Any, ...]]:
    precise = [str(column[1]) == "TIMESTAMP_NS" for column in answer.description or ()]
    if not any(precise):
        return list(answer.fetchall())
    connection.register("penstock_answer", _arrow_table(answer))
    chosen = ", ".join(f"epoch_ns(#{at})" if is_time else f"#{at}" for at, is_time in enumerate(precise, 1))
    rows = connection.execute(f"select {chosen} from penstock_answer").fetchall()  # noqa: S608 - numbers alone
    return [
        tuple(
            _Moment(value) if is_time and value is not None else value
            for value, is_time in zip(row, precise, strict=True)
        )
        for row in rows
    ]


def _named(
    connection: duckdb.DuckDBPyConnection, found: re.Match[str], query: str, check: bool, failed: list[PenstockError]
) -> str:
    """Replace a folder after FROM by a table of that name; leave anything else unchanged."""
    word = found[2]
    path = Path(word.strip("'\""))
    if not path.is_dir():
        if word.startswith("'"):
            raise InvalidArgument(f"{path} is no folder of a recording or journal")
        return found[0]
    name = '"' + str(path).replace('"', '""') + '"'
    if connection.execute("select 1 from duckdb_views() where view_name = ?", [str(path)]).fetchone() is None:
        _load(connection, path, name, query, check, failed)
    return f"{found[1]} {name}"


def _load(
    connection: duckdb.DuckDBPyConnection, path: Path, name: str, query: str, check: bool, failed: list[PenstockError]
) -> None:
    """Load the messages into a DuckDB table, which is in memory and spills to disk if it does not fit.

    What reading fails with is added to ``failed``: DuckDB makes a text with a traceback of it.
    """
    import pyarrow

    for gap in read_story(path).missing():
        exits.told(f"{path}: {gap}")
    wanted = ["position", "topic", "ordinal", "timestamp_ns", "size"]
    wanted += ["payload"] if _PAYLOAD.search(query) else []
    wanted += ["properties"] if _PROPERTIES.search(query) else []
    batches = _batches(path, wanted, check and "payload" in wanted)
    first = next(batches, None)
    if first is None:
        raise InvalidArgument(f"{path} holds no messages")
    reader = pyarrow.RecordBatchReader.from_batches(first.schema, _chain(first, batches, failed))
    connection.register("penstock_reader", reader)
    kept = f'"messages of {len(connection.execute("show tables").fetchall())}"'
    connection.execute(f"create temp table {kept} as select * from penstock_reader where topic <> '{STORY}'")  # noqa: S608 - own names
    connection.unregister("penstock_reader")
    payload = (
        "payload, case when packed then decoded else try(decode(payload)) end as text, "
        "try_cast(case when packed then decoded else try(decode(payload)) end as json) as json, "
        if "payload" in wanted
        else ""
    )
    more = "properties, " if "properties" in wanted else ""
    connection.execute(
        f"create temp view {name} as select position, topic, ordinal, size, "  # noqa: S608 - own names, quoted
        f"make_timestamp_ns(timestamp_ns) as timestamp, {payload}{more}timestamp_ns from {kept}"
    )


def _batches(path: Path, columns: Sequence[str], check: bool) -> Iterator[Any]:
    from penstock.journal import Journal

    for folder in parts(path) if not is_journal(path) else [path]:
        with Journal(folder, mode="read") as journal:
            batches = journal.batches(columns=columns, check=check)
            yield from batches if "payload" not in columns else _decoded(journal, batches)


def _decoded(journal: Journal, batches: Iterator[Any]) -> Iterator[Any]:
    """The batches with two more columns: ``packed``, whether a message has a binary encoding, and ``decoded``, its
    value as JSON in that case.
    """
    import pyarrow

    described = Described([journal])
    known: dict[str, Columns | None] = {}
    for topic in journal.topics:
        if any(schema.encoding not in ("json", "utf-8", "bytes") for schema in described.schemas(topic)):
            known[topic] = None
            # without a usable schema its bytes are still there
            with contextlib.suppress(PenstockError, ModuleNotFoundError):
                known[topic] = described.columns(topic)
    for batch in batches:
        texts: list[str | None] = [None] * len(batch)
        packed = [False] * len(batch)
        if known:
            rows = zip(*(batch.column(name).to_pylist() for name in ("topic", "position", "payload")), strict=True)
            for at, (topic, position, data) in enumerate(rows):
                columns = known.get(topic)
                packed[at] = topic in known
                if columns is not None and data is not None:
                    with contextlib.suppress(ValueError):
                        texts[at] = json_text(columns.value(data, (0, position)), decode.MAX_SHOWN_FIELD_BYTES)
        more = batch.append_column("decoded", pyarrow.array(texts, pyarrow.string()))
        yield more.append_column("packed", pyarrow.array(packed, pyarrow.bool_()))


def _chain(first: Any, rest: Iterator[Any], failed: list[PenstockError]) -> Iterator[Any]:
    yield first
    try:
        yield from rest
    except PenstockError as error:
        failed.append(error)
        raise


def _print(names: list[str], rows: list[tuple[Any, ...]], form: str, plot: bool) -> None:
    if form == "json":
        for row in rows:
            show.print_json(dict(zip(names, (_plain(value) for value in row), strict=True)))
    elif form == "csv":
        writer = csv.writer(sys.stdout)
        writer.writerow(names)
        writer.writerows([_text(value) for value in row] for row in rows)
    else:
        numbers = [name for at, name in enumerate(names) if rows and isinstance(rows[0][at], _WHOLE)]
        cells = [[_text(value) for value in row] for row in rows]
        if plot and rows and not isinstance(rows[0][-1], int | float):
            exits.told(f"--plot draws the last column, and {names[-1]} holds no numbers")
        elif plot:
            bars = _bars([row[-1] for row in rows])
            names, cells = [*names, ""], [[*row, bar] for row, bar in zip(cells, bars, strict=True)]
        others = [name for name in names if name not in numbers]
        show.console().print(show.table(names, cells, numbers, names=others, spare=[""]))


def _bars(values: list[Any]) -> list[str]:
    """A bar for each number, to the left of zero if it is negative; the longest one fills the width. Other values, NaN
    and infinity have none.
    """
    known = [float(value) if isinstance(value, int | float) else 0.0 for value in values]
    numbers = [number if math.isfinite(number) else 0.0 for number in known]
    least, most = min([0.0, *numbers]), max([0.0, *numbers])
    step = (most / BAR_COLUMNS - least / BAR_COLUMNS) or 1.0
    zero = round(-least / step)
    bars = [round(abs(number) / step) for number in numbers]
    return [
        " " * (zero - wide) + "█" * wide if number < 0 else " " * zero + "█" * wide
        for number, wide in zip(numbers, bars, strict=True)
    ]


def _plain(value: Any) -> Any:
    """A value of DuckDB for JSON."""
    if isinstance(value, bytes):
        return decode.body_value(value)
    if isinstance(value, _Moment):
        return iso_time(value.since_1970_ns)[:-1].replace("T", " ")  # as DuckDB writes it
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None  # NaN or infinity, which JSON does not have
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _text(value: Any) -> str:
    """A value of DuckDB for people."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, _Moment):
        return iso_time(value.since_1970_ns)
    if isinstance(value, datetime.datetime):
        moment = value.replace(tzinfo=value.tzinfo or datetime.UTC)
        return iso_time(int(moment.timestamp() * 10**6) * 1000)
    plain = _plain(value)
    return plain if isinstance(plain, str) else json.dumps(plain)
