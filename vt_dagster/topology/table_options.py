"""Checks of a table's options for its source records, made when the table is declared."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, cast

from pyspark.sql.types import StructField, TimestampType

from vt_dagster.errors import TopologyError
from vt_dagster.topology.schema import holds_map


def check_deletions(table: Any) -> None:
    """Checks ``deleted_when`` and ``deleted_at``; stores ``deleted_when`` as ``tombstone``.

    Args:
        table: a ``Table``.
    """
    if table.deleted_when is not None:
        condition = _one_condition(table.name, table.deleted_when, table.tombstone)
        object.__setattr__(table, "tombstone", condition)
        object.__setattr__(table, "deleted_when", None)
    if table.deleted_at is not None:
        _check_deleted_at(table.name, table.deleted_at, table.operator is None)


def _one_condition(name: str, deleted_when: object, tombstone: str | None) -> str:
    """Returns the deletion condition, set as ``deleted_when`` or as ``tombstone`` but not both."""
    if not isinstance(deleted_when, str) or not deleted_when.strip():
        raise TopologyError(
            f"{name}: expected deleted_when to be a SQL condition over the columns of the source, like "
            f"\"op = 'D'\", got {deleted_when!r}; correct it, or leave it out"
        )
    if tombstone is not None:
        raise TopologyError(
            f"{name}: expected only one of deleted_when and its alias tombstone, got "
            f"{deleted_when!r} and {tombstone!r}; remove one, or combine both conditions with OR"
        )
    return deleted_when


def _check_deleted_at(name: str, deleted_at: object, has_source: bool) -> None:
    """Raises TopologyError if ``deleted_at`` is no expression, or the table has no source."""
    if not isinstance(deleted_at, str) or not deleted_at.strip():
        raise TopologyError(
            f"{name}: expected deleted_at to be a SQL expression of type timestamp over the columns of "
            f'the source, like "removed_on" or "record_time", got {deleted_at!r}; correct it, or leave '
            "it out"
        )
    if not has_source:
        raise TopologyError(
            f"{name}: deleted_at needs a table with a source, got the result of an operator, whose "
            "deletions have the times of its inputs: declare it on the input"
        )


def check_versions(table: Any) -> None:
    """Checks the options of a versioned table, and stores lists of columns as tuples.

    Args:
        table: a ``VersionedTable``.
    """
    own = table.operator is None
    _check_ready(table.name, table.ready, own)
    values = [table.schema[c] for c in table.value_columns]
    if table.start is not None:
        _check_start(table)
    if table.tie_break is not None:
        _check_tie_break(table.name, table.tie_break, values if own else ())
    if table.valid_until is not None:
        _check_valid_until(table.name, table.valid_until, values)
    if table.new_version_on is not None:
        otherwise = "every record makes a version"
        columns = _distinct(table.name, "new_version_on", table.new_version_on, values, otherwise)
        _check_new_version_on(table.name, columns, values, table.valid_until)
        object.__setattr__(table, "new_version_on", columns)
    if table.only_columns is not None or table.ignore_null_updates is not False:
        _check_partial_updates(table, values)


def check_join(
    name: str,
    both: str,
    history: object,
    grace_period: object,
    foreign_key: object,
    corrected: bool,
) -> None:
    """Raises TopologyError for settings that a join of two tables does not have.

    Args:
        both: the two tables, for messages.
        corrected: whether ``corrected_for`` is given.
    """
    if grace_period is not None:
        raise TopologyError(
            f"{name}: a grace period is only for a join of a stream with a table, but a join of {both} "
            "is updated at each change: remove grace_period"
        )
    if corrected:
        raise TopologyError(
            f"{name}: corrected_for is only for a join of a stream; a join of {both} already follows "
            "every change of both: remove corrected_for"
        )
    if history not in ("latest", "complete"):
        raise TopologyError(f"{name}: history must be 'latest' or 'complete', got {history!r}")
    if history == "complete" and foreign_key is not None:
        raise TopologyError(
            f"{name}: history='complete' is for a join by the common key, got the foreign key "
            f"{foreign_key!r}; remove one of the two"
        )


def _check_ready(name: str, ready: object, has_source: bool) -> None:
    """Raises TopologyError if ``ready`` is invalid, or the table has no source."""
    timed = isinstance(ready, datetime) and ready.tzinfo is not None
    if ready is not None and ready != "initial_load" and not timed:
        raise TopologyError(
            f"{name}: ready must be 'initial_load', a datetime with a time zone or None, got {ready!r}"
        )
    if ready is not None and not has_source:
        raise TopologyError(
            f"{name}: ready needs a table with a source, got the result of an operator, which is ready "
            "when its inputs are: declare it on the input"
        )


def _check_start(table: Any) -> None:
    """Raises TopologyError if ``start`` is no snapshot source, or the table's source has no changes."""
    name, start, source = table.name, table.start, table.source
    if not getattr(start, "whole", False):
        raise TopologyError(
            f"{name}: expected start to be a source of snapshots, SnapshotSource(...) or "
            f"DeltaSource(..., mode='snapshots'), got {start!r}; pass one, or remove start"
        )
    if not hasattr(source, "news") or getattr(source, "whole", False):
        raise TopologyError(
            f"{name}: start needs a source of changes (files, topics or a Delta table), got "
            f"{source!r}; set such a source, or remove start"
        )
    start.check(name, table.key, table.schema)


def _check_tie_break(name: str, column: object, values: Sequence[StructField]) -> None:
    """Raises TopologyError if ``tie_break`` is not a value column with ordered values.

    Args:
        values: the value columns of a table with a source; empty for an operator's result.
    """
    found = next((f for f in values if f.name == column), None)
    if found is None:
        raise TopologyError(
            f"{name}: expected tie_break to be a value column of a table with a source, one of "
            f"{[f.name for f in values]}, got {column!r}; correct it, or remove tie_break"
        )
    if holds_map(found.dataType):
        raise TopologyError(
            f"{name}: expected tie_break to be a column whose values have an order, got {column!r} of "
            f"type {found.dataType.simpleString()}; name another column, for example a number"
        )


def _check_valid_until(name: str, column: object, values: Sequence[StructField]) -> None:
    """Raises TopologyError if ``valid_until`` is not a value column of type timestamp."""
    found = next((f for f in values if f.name == column), None)
    if found is None or not isinstance(found.dataType, TimestampType):
        kinds = [f"{f.name} {f.dataType.simpleString()}" for f in values]
        raise TopologyError(
            f"{name}: expected valid_until to be a value column of type timestamp, got {column!r} "
            f"among {kinds}; correct it, or remove valid_until"
        )


def has_partial_updates(table: Any) -> bool:
    """Returns whether a record of a table may omit unchanged columns."""
    return table.only_columns is not None or bool(table.ignore_null_updates)


def _check_partial_updates(table: Any, values: Sequence[StructField]) -> None:
    """Checks ``only_columns`` and ``ignore_null_updates``, and stores lists as tuples."""
    name, only, nulls = table.name, table.only_columns, table.ignore_null_updates
    if table.operator is not None or getattr(table.source, "whole", False):
        what = "the result of an operator" if table.operator is not None else table.source.describe()
        raise TopologyError(
            f"{name}: only_columns and ignore_null_updates need a table with a source of changes, got "
            f"{what}, which provides whole rows: remove them"
        )
    if table.tie_break is not None:
        raise TopologyError(
            f"{name}: only_columns and ignore_null_updates do not allow tie_break, got "
            f"{table.tie_break!r}: it would refuse one of two partial updates with equal timestamps; "
            "remove it to apply both in order of arrival"
        )
    taken = {"provided_columns", "propagated_from"} & {f.name.lower() for f in values}
    if taken:
        raise TopologyError(
            f"{name}: expected no value columns named {sorted(taken)}, which vt_dagster adds to a "
            "table with only_columns or ignore_null_updates: rename them"
        )
    own = {table.timestamp, table.valid_until}
    parts = [f for f in values if f.name not in own]
    if isinstance(only, str) and not only.strip():
        raise TopologyError(
            f"{name}: expected only_columns to be a list of value columns or a SQL expression that "
            f"returns their names, got {only!r}; correct it, or remove only_columns"
        )
    if only is not None and not isinstance(only, str):
        otherwise = "every record provides its whole row"
        table_columns = _distinct(name, "only_columns", only, parts, otherwise)
        object.__setattr__(table, "only_columns", table_columns)
    if not isinstance(nulls, bool):
        columns = _distinct(name, "ignore_null_updates", nulls, parts, "a null sets a column to null")
        object.__setattr__(table, "ignore_null_updates", columns)


def _distinct(
    name: str, setting: str, columns: object, values: Sequence[StructField], otherwise: str
) -> tuple[str, ...]:
    """Returns a list of distinct value columns as a tuple.

    Args:
        otherwise: the behaviour without the setting, for messages.
    """
    listed = isinstance(columns, list | tuple) and all(isinstance(c, str) for c in columns)
    found = tuple(cast("Sequence[str]", columns)) if listed else ()
    if not found or len({*found}) < len(found):
        raise TopologyError(
            f"{name}: expected {setting} to be a list of value columns, each once, some of "
            f"{[f.name for f in values]}, got {columns!r}; correct it, or remove {setting}: then "
            f"{otherwise}"
        )
    unknown = [c for c in found if c not in {f.name for f in values}]
    if unknown:
        raise TopologyError(
            f"{name}: expected {setting} to name value columns, some of {[f.name for f in values]}, "
            f"got {unknown}, which are key columns or not in the schema; correct it"
        )
    return found


def _check_new_version_on(
    name: str, columns: Sequence[str], values: Sequence[StructField], valid_until: str | None
) -> None:
    """Raises TopologyError if ``new_version_on`` has columns that cannot be compared, or lacks
    ``valid_until``."""
    kinds = {f.name: f.dataType for f in values}
    maps = [f"{c} {kinds[c].simpleString()}" for c in columns if holds_map(kinds[c])]
    if maps:
        raise TopologyError(
            f"{name}: expected new_version_on to name columns whose values can be compared, got {maps}"
            "; name other columns, for example a string made from the map"
        )
    if valid_until is not None and valid_until not in columns:
        raise TopologyError(
            f"{name}: expected new_version_on to include valid_until, {valid_until!r}, got "
            f"{list(columns)}: a record that only changes the end would make no version, and its end "
            "would be lost; add the column, or remove one of the two settings"
        )
