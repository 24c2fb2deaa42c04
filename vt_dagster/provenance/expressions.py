"""SQL expressions and conditions on records, evaluated without Spark.

Evaluates the expressions of an operator, and selects the record of a log to explain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from importlib import import_module
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vt_dagster.columns import OLD, RECORDED_AT, TIMESTAMP
from vt_dagster.errors import StorageError
from vt_dagster.provenance.explain_request import Condition, Log, Record, both, places_of
from vt_dagster.storage.arrow_reader import arrival_order, micros
from vt_dagster.storage.values import as_key
from vt_dagster.topology.durations import as_time, parse_time
from vt_dagster.topology.specification import Token, tokens

_WORD = re.compile(r"`([^`]+)`|(\w+)")
_SAME = (
    *("abs", "coalesce", "length", "lower", "nullif", "upper"),
    *("case", "when", "then", "else", "end", "and", "or", "not", "is", "in", "between"),
    *("null", "true", "false"),
)
"""Functions and keywords that have one meaning in Spark and DuckDB."""
_CASES = re.compile(r"upper|lower", re.IGNORECASE)


def used(expressions: Iterable[str], columns: Sequence[str]) -> list[str]:
    """Returns the columns that SQL expressions mention."""
    words = {(a or b).lower() for sql in expressions for a, b in _WORD.findall(sql)}
    return [c for c in columns if c.lower() in words]


def plain(sql: str, columns: Sequence[str]) -> str | None:
    """Returns the column if an expression is a plain column; else None."""
    word = sql.strip().strip("`").lower()
    return next((c for c in columns if c.lower() == word), None)


def evaluate(rows: pa.Table, sql: str) -> pa.ChunkedArray | None:
    """Evaluates a SQL expression for rows, with DuckDB; None = only Spark can evaluate it, or DuckDB is
    not installed."""
    column = plain(sql, rows.column_names)
    if column is not None:
        return rows.column(column)
    duckdb = _duckdb()
    if duckdb is None or not _means_the_same(sql, rows.column_names):
        return None
    try:
        found = duckdb.from_arrow(rows).project(sql.replace("`", '"')).to_arrow_table().column(0)
        cases = pa.types.is_string(found.type) and _CASES.search(sql) is not None
        # DuckDB and Spark change the case of non-ASCII letters differently.
        return None if cases and not all(v.isascii() for v in found.to_pylist() if v) else found
    except duckdb.Error:  # a function or syntax that DuckDB lacks, or values that it refuses
        return None


def _means_the_same(sql: str, columns: Sequence[str]) -> bool:
    """Returns whether an expression has one meaning in Spark and DuckDB. Most functions have not:
    DuckDB rounds in casts to integers, counts the days of a week from 0, and skips nulls in concat."""
    if '"' in sql or "\\" in sql:  # a text in Spark, a name in DuckDB
        return False
    known = {*_SAME, *(c.lower() for c in columns)}

    def same(token: Token) -> bool:
        if token.kind == "symbol":
            return token.value in "(),+-*%|=<>!"
        return token.kind == "text" or token.value in known or token.value.isdecimal()

    return all(map(same, tokens(sql)))


def _duckdb() -> Any:
    """Returns the package duckdb; None = it is not installed."""
    try:
        return import_module("duckdb")
    except ModuleNotFoundError:
        return None


def replaced_rows(rows: pa.Table) -> pa.Table:
    """Returns the rows that a table's records replaced, under the table's column names."""
    old = rows.column(OLD).combine_chunks()
    for i, field in enumerate(old.type):
        if field.name in rows.column_names:
            at = rows.schema.get_field_index(field.name)
            nothing = pa.scalar(None, field.type)
            values = pc.call_function("if_else", [old.is_null(), nothing, old.field(i)])
            rows = rows.set_column(at, field.name, values)
    return rows


class Group:
    """The rows of a log with a given value of a computed key.

    Args:
        log: the log.
        keys: (name, SQL expression) of the key's columns.
        values: the values of the key, by name.
    """

    def __init__(self, log: Log, keys: Sequence[tuple[str, str]], values: Mapping[str, Any]) -> None:
        self._log, self._keys, self._values = log, keys, values

    @property
    def columns(self) -> list[str]:
        """The log's columns that the key's expressions use."""
        return used([sql for _, sql in self._keys], self._log.columns.names)

    def condition(self, replaced: bool = False) -> Condition:
        """Returns an Arrow condition that all rows of the group satisfy; other rows may satisfy it too.

        Args:
            replaced: whether records that replaced a row of the group satisfy it too.
        """

        def one(name: str, sql: str) -> Condition:
            def condition(columns: pa.Schema) -> Any:
                column = plain(sql, columns.names)
                if column is None or pa.types.is_nested(columns.field(column).type):
                    return None
                value, field = self._values[name], pc.field(column)
                scalar = as_key(column, value, columns.field(column).type)
                found = field.is_null() if value is None else field == scalar
                # The rows as of a truncation have replaced none.
                old = columns.field(OLD).type if replaced and OLD in columns.names else None
                if old is not None and old.get_field_index(column) >= 0:
                    found = found | (pc.field(OLD, column) == scalar)
                return found

            return condition

        return both(*[one(name, sql) for name, sql in self._keys])

    def has(self, rows: pa.Table) -> Any:
        """Returns whether each row is in the group; None = computing the key needs Spark."""
        found = np.ones(rows.num_rows, bool)
        for name, sql in self._keys:
            values = evaluate(rows, sql)
            if values is None:
                return None
            given, same = self._values[name], values.is_null()
            if given is not None:
                key = as_key(name, given, values.type)
                same = pc.call_function("equal", [values, key]).fill_null(False)
            found &= np.array(same)
        return found


# Record selection


_MOST_NAMED = 10


def in_micros(moment: str | datetime) -> int:
    """Returns a time argument as epoch microseconds."""
    return parse_time(moment.isoformat() if isinstance(moment, datetime) else moment)


def select_record(
    log: Log,
    key: Sequence[Any] | None,
    at: int | None,
    offset: tuple[int, int] | str | None,
    where: str | None,
) -> tuple[Record | None, str]:
    """Returns the selected record, or None and the reason why there is none."""
    if offset is not None:
        return _at_offset(log, *_parsed(offset))
    condition: Condition = log.of_key(key) if key is not None else both()
    if where is not None:
        return _only_match(log, condition, where)
    rows = log.rows(condition, only=[TIMESTAMP, RECORDED_AT])
    if not rows.num_rows:
        return None, f"there is no record of {spoken_key(key)} in its log"
    moments = micros(rows, TIMESTAMP)
    by_time = at is not None or log.head.shape.kind == "versioned"
    order = np.lexsort((*arrival_order(rows), *([moments] if by_time else [])))
    if at is not None:
        order = order[moments[order] <= at]
        if not len(order):
            first = as_time(int(moments.min()))
            return None, f"its first record of {spoken_key(key)} is of {first}, after {as_time(at)}"
    (place,) = places_of(rows.slice(int(order[-1]), 1))
    return log.one(*place), ""


def _parsed(offset: tuple[int, int] | str) -> tuple[int, int]:
    try:
        partition, place = offset.split(":") if isinstance(offset, str) else offset
        return int(partition), int(place)
    except ValueError:
        raise StorageError(
            f"expected an offset as PARTITION:OFFSET, for example 0:17, got {offset!r}"
        ) from None


def _at_offset(log: Log, partition: int, offset: int) -> tuple[Record | None, str]:
    ends = log.commit.next_offset
    if partition not in ends:
        return None, f"its log has no partition {partition}, only {sorted(ends)}"
    if not 0 <= offset < ends[partition]:
        return None, f"partition {partition} of its log has the offsets 0 to {ends[partition] - 1}"
    record = log.one(partition, offset)
    erased = offset < log.head.erased_before.get(partition, 0)
    gone = "it was erased" if erased else "the log was truncated"
    return record, "" if record else f"that offset is gone from its log: {gone}"


def _only_match(log: Log, condition: Condition, where: str) -> tuple[Record | None, str]:
    """Returns the only record that meets a SQL condition, or None and the reason."""
    duckdb = _duckdb()
    if duckdb is None:
        raise StorageError(
            "expected the package duckdb for a condition in SQL, found none; install it, or select "
            "the row by key or offset"
        )
    rows = log.rows(condition, only=used([where], log.columns.names))
    try:
        table = duckdb.from_arrow(rows).filter(where).limit(_MOST_NAMED + 1).to_arrow_table()
    except duckdb.Error as error:
        raise StorageError(
            f"{log.name}: expected a SQL condition over {log.columns.names}, got {where!r}: "
            f"{str(error).splitlines()[0]}"
        ) from None
    places = places_of(table)
    if len(places) > 1:
        raise StorageError(
            f"{log.name}: expected a condition that one record meets, but {where!r} is met by "
            f"{'more than ' * (len(places) > _MOST_NAMED)}{min(len(places), _MOST_NAMED)}, for "
            f"example the offsets {', '.join(map(str, places[:3]))}; give --offset"
        )
    if not places:
        return None, f"no record meets {where!r}"
    return log.one(*places[0]), ""


def spoken_key(key: Sequence[Any] | None) -> str:
    """Returns a key as text for a message."""
    return "/".join(map(str, key or ()))
