"""SqlOut: writes a row of a table for each message, in SQLite or any database with a driver for Python (DB-API 2.0).

args: ``driver`` ("sqlite3"; such as "psycopg"), ``connect`` (the driver's arguments: {"database": "PATH"}), ``table``
(required), ``columns`` (required: {COLUMN: ORIGIN}, where ORIGIN is ``content``, ``time`` in seconds, ``source``,
``property:NAME``, or ``json:FIELD`` of the content, inner ones by ``json:A.B``), ``create`` (null; a statement that is
run first, such as CREATE TABLE IF NOT EXISTS). Waiting messages are written in one transaction. A missing
property or field becomes null. If a field is needed and the content is not JSON, or if the database refuses a row,
only that message fails.

Example: {"name": "rows", "loader": {"name": "python", "entrypoint": "penstock.gateway.modules:SqlOut"}, "args":
{"connect": {"database": "plant.db"}, "table": "readings", "columns": {"at": "time", "site": "property:site", "value":
"json:value"}}}
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Sequence
from typing import Any

from penstock._core.gateway import GatewayMessage
from penstock.gateway.errors import give_back
from penstock.gateway.module import Module, options

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?")
MARKS = {"qmark": "?", "format": "%s", "pyformat": "%s"}


class SqlOut(Module):
    """Inserts rows."""

    reaches_outside = True

    _connection: Any = None

    @classmethod
    def parse(cls, args: Any) -> Any:
        """Check args."""
        given = options(args, driver="sqlite3", connect={}, table="", columns={}, create=None)
        if not given["columns"]:
            raise ValueError("columns is missing")
        for name in (given["table"], *given["columns"]):
            if not NAME.fullmatch(name):
                raise ValueError(f"{name!r} cannot name a table or column: letters, digits and _")
        for place in given["columns"].values():
            if not isinstance(place, str) or not re.fullmatch(r"content|time|source|property:.+|json:.+", place):
                raise ValueError(f"a column must be content, time, source, property:NAME or json:FIELD, not {place!r}")
        try:
            style = importlib.import_module(given["driver"]).paramstyle
        except (ImportError, AttributeError) as error:
            raise ValueError(f"driver {given['driver']!r} cannot be loaded: {error}") from None
        if style not in MARKS:
            raise ValueError(f"driver {given['driver']!r} has paramstyle {style!r}; supported: {', '.join(MARKS)}")
        marks = ", ".join([MARKS[style]] * len(given["columns"]))
        columns = ", ".join(given["columns"])  # the names were checked above; values are passed as parameters
        return {**given, "insert": f"INSERT INTO {given['table']} ({columns}) VALUES ({marks})"}  # noqa: S608

    def start(self) -> None:
        """Connect; raises if the database cannot be reached."""
        self._connect()

    def receive_many(self, messages: Sequence[GatewayMessage]) -> None:
        """Insert them, in one transaction."""
        rows: list[tuple[GatewayMessage, tuple[Any, ...]]] = []
        failed: list[tuple[Exception, GatewayMessage]] = []
        for message in messages:
            try:
                rows.append((message, self._row(message)))
            except ValueError as error:
                if len(messages) == 1:
                    raise
                failed.append((error, message))
        try:
            self._insert([row for _, row in rows])
        except Exception as error:
            if len(messages) == 1 or self._is_of_the_database(error):
                raise
            self._insert_one_by_one(rows)
        for failure, message in failed:
            give_back(self, failure, message)

    def _insert_one_by_one(self, rows: Sequence[tuple[GatewayMessage, tuple[Any, ...]]]) -> None:
        """Insert rows one by one, so that a row that the database refuses does not cost the others."""
        for number, (message, row) in enumerate(rows):
            try:
                self._insert([row])
            except Exception as error:
                if self._is_of_the_database(error):
                    give_back(self, error, *(message for message, _ in rows[number:]))
                    return
                give_back(self, error, message)

    def _insert(self, rows: Sequence[tuple[Any, ...]]) -> None:
        if not rows:
            return
        connection = self._connect()
        try:
            connection.cursor().executemany(self.configuration["insert"], rows)
            connection.commit()
        except Exception:
            self.destroy()  # nothing was committed; the next try opens a new connection
            raise

    def _is_of_the_database(self, error: Exception) -> bool:
        """Whether the database failed, not this row: no other row could be inserted now either."""
        driver = importlib.import_module(self.configuration["driver"])
        return isinstance(error, OSError | driver.OperationalError | driver.InterfaceError)

    def receive(self, message: GatewayMessage) -> None:
        """Insert one."""
        self.receive_many([message])

    def destroy(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connect(self) -> Any:
        if self._connection is None:
            c = self.configuration
            self._connection = importlib.import_module(c["driver"]).connect(**c["connect"])
            if c["create"] is not None:
                self._connection.cursor().execute(c["create"])
                self._connection.commit()
        return self._connection

    def _row(self, message: GatewayMessage) -> tuple[Any, ...]:
        places = self.configuration["columns"].values()
        data = json.loads(bytes(message)) if any(place.startswith("json:") for place in places) else None
        return tuple(_value(message, place, data) for place in places)


def _value(message: GatewayMessage, place: str, data: Any) -> Any:
    kind, _, name = place.partition(":")
    if kind == "property":
        return message.properties.get(name)
    if kind == "json":
        for part in name.split("."):
            data = data.get(part) if isinstance(data, dict) else None
        return json.dumps(data) if isinstance(data, dict | list) else data
    return {"content": bytes(message), "time": message.timestamp_ns / 1e9, "source": str(message.channel)}[kind]
