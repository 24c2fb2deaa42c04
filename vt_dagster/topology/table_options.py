"""What a table says of the records of its source, checked when it is declared."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, cast

from pyspark.sql.types import StructField, TimestampType

from vt_dagster.errors import TopologyError
from vt_dagster.topology.schema import holds_map


def check_deletions(table: Any) -> None:
    """Refuses what does not say which records are deletions, and when they happened; keeps
    ``deleted_when`` as ``tombstone``.

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
    """The condition of a tombstone, of a table that has it by the one name or by the other."""
    if not isinstance(deleted_when, str) or not deleted_when.strip():
        raise TopologyError(
            f"{name}: expected deleted_when to be a SQL condition over the columns of the source, like "
            f"\"op = 'D'\", got {deleted_when!r}; correct it, or leave it out"
        )
    if tombstone is not None:
        raise TopologyError(
            f"{name}: expected one of deleted_when and tombstone, which say the same, got "
            f"{deleted_when!r} and {tombstone!r}; leave one out, or join them by or"
        )
    return deleted_when


def _check_deleted_at(name: str, deleted_at: object, has_source: bool) -> None:
    """Refuses what says of no deletion when it happened."""
    if not isinstance(deleted_at, str) or not deleted_at.strip():
        raise TopologyError(
            f"{name}: expected deleted_at to be a SQL expression of type timestamp over the columns of "
            f'the source, like "removed_on" or "record_time", got {deleted_at!r}; correct it, or leave '
            "it out"
        )
    if not has_source:
        raise TopologyError(
            f"{name}: expected deleted_at of a table with a source, got it of the result of an "
            "operator, whose deletions have the times of its inputs: declare it there"
        )


def check_versions(table: Any) -> None:
    """Refuses what a versioned table cannot say of its versions.

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
    """Refuses what has no meaning in a join of two tables.

    Args:
        both: they, in words.
        corrected: whether ``corrected_for`` is given.
    """
    if grace_period is not None:
        raise TopologyError(
            f"{name}: a grace period lets a stream's records wait, but a join of {both} is made anew "
            "at each change: leave grace_period out"
        )
    if corrected:
        raise TopologyError(
            f"{name}: corrected_for is for a stream's join with a versioned table, which is as of each "
            f"record's own time; a join of {both} is of their latest rows, and follows every change of "
            "both already: leave corrected_for out"
        )
    if history not in ("latest", "complete"):
        raise TopologyError(f"{name}: history must be 'latest' or 'complete', got {history!r}")
    if history == "complete" and foreign_key is not None:
        raise TopologyError(
            f"{name}: history='complete' is for a join by the common key, got the foreign key "
            f"{foreign_key!r}; leave one of them out"
        )


def _check_ready(name: str, ready: object, has_source: bool) -> None:
    """Refuses a time from when on a table is ready that is none, or that it cannot say."""
    timed = isinstance(ready, datetime) and ready.tzinfo is not None
    if ready is not None and ready != "initial_load" and not timed:
        raise TopologyError(
            f"{name}: ready must be 'initial_load', a datetime with a time zone or None, got {ready!r}"
        )
    if ready is not None and not has_source:
        raise TopologyError(
            f"{name}: expected ready of a table with a source, got it of the result of an "
            "operator, which is ready when what it is made of is: declare it there"
        )


def _check_start(table: Any) -> None:
    """Refuses to start with what is no snapshot, or beside what needs none."""
    name, start, source = table.name, table.start, table.source
    if not getattr(start, "whole", False):
        raise TopologyError(
            f"{name}: expected start to be a source of whole states, SnapshotSource(...) or "
            f"DeltaSource(..., mode='snapshots'), got {start!r}; give one, or leave it out"
        )
    if not hasattr(source, "news") or getattr(source, "whole", False):
        raise TopologyError(
            f"{name}: expected start beside a source of changes, of files, topics or a Delta table, "
            f"got {source!r}; give it one, or leave start out"
        )
    start.check(name, table.key, table.schema)


def _check_tie_break(name: str, column: object, values: Sequence[StructField]) -> None:
    """Refuses what is no column that decides between records of one key and timestamp.

    Args:
        values: the value columns of a table with a source; of another, none.
    """
    found = next((f for f in values if f.name == column), None)
    if found is None:
        raise TopologyError(
            f"{name}: expected tie_break to be a value column of a table with a source, of "
            f"{[f.name for f in values]}, got {column!r}; correct it, or leave it out"
        )
    if holds_map(found.dataType):
        raise TopologyError(
            f"{name}: expected tie_break to be a column whose values have an order, got {column!r}, "
            f"which is {found.dataType.simpleString()}; name another, for example a number"
        )


def _check_valid_until(name: str, column: object, values: Sequence[StructField]) -> None:
    """Refuses what is no column that says when a version ends."""
    found = next((f for f in values if f.name == column), None)
    if found is None or not isinstance(found.dataType, TimestampType):
        kinds = [f"{f.name} {f.dataType.simpleString()}" for f in values]
        raise TopologyError(
            f"{name}: expected valid_until to be a value column of type timestamp, got {column!r} "
            f"among {kinds}; correct it, or leave it out"
        )


def has_partial_updates(table: Any) -> bool:
    """Whether a record of a table may leave out what is unchanged."""
    return table.only_columns is not None or bool(table.ignore_null_updates)


def _check_partial_updates(table: Any, values: Sequence[StructField]) -> None:
    """Refuses what says of no record which part of its row it tells."""
    name, only, nulls = table.name, table.only_columns, table.ignore_null_updates
    if table.operator is not None or getattr(table.source, "whole", False):
        what = "the result of an operator" if table.operator is not None else table.source.describe()
        raise TopologyError(
            f"{name}: expected only_columns and ignore_null_updates of a table with a source of "
            f"changes, got them of {what}, which gives whole rows: leave them out"
        )
    if table.tie_break is not None:
        raise TopologyError(
            f"{name}: expected only_columns or ignore_null_updates without tie_break, "
            f"{table.tie_break!r}: of two records of one time that each say a part of the row none is "
            "to be refused; leave one of both out: then they go by the order of arrival"
        )
    taken = {"provided_columns", "propagated_from"} & {f.name.lower() for f in values}
    if taken:
        raise TopologyError(
            f"{name}: expected no value columns named {sorted(taken)}, which vt_dagster adds to a "
            "table with only_columns or ignore_null_updates: give them other names"
        )
    own = {table.timestamp, table.valid_until}
    parts = [f for f in values if f.name not in own]
    if isinstance(only, str) and not only.strip():
        raise TopologyError(
            f"{name}: expected only_columns to be a list of value columns or a SQL expression that "
            f"gives their names, got {only!r}; correct it, or leave it out"
        )
    if only is not None and not isinstance(only, str):
        otherwise = "every record says its whole row"
        table_columns = _distinct(name, "only_columns", only, parts, otherwise)
        object.__setattr__(table, "only_columns", table_columns)
    if not isinstance(nulls, bool):
        columns = _distinct(name, "ignore_null_updates", nulls, parts, "a null is a null")
        object.__setattr__(table, "ignore_null_updates", columns)


def _distinct(
    name: str, setting: str, columns: object, values: Sequence[StructField], otherwise: str
) -> tuple[str, ...]:
    """A list of value columns as a tuple.

    Args:
        otherwise: what is where the setting is left out.
    """
    listed = isinstance(columns, list | tuple) and all(isinstance(c, str) for c in columns)
    found = tuple(cast("Sequence[str]", columns)) if listed else ()
    if not found or len({*found}) < len(found):
        raise TopologyError(
            f"{name}: expected {setting} to be a list of value columns, each once, some of "
            f"{[f.name for f in values]}, got {columns!r}; correct it, or leave it out: then "
            f"{otherwise}"
        )
    unknown = [c for c in found if c not in {f.name for f in values}]
    if unknown:
        raise TopologyError(
            f"{name}: expected {setting} to name value columns, some of {[f.name for f in values]}, "
            f"got {unknown}: a key column is the same in all versions of a key, and others are not "
            "there; correct it"
        )
    return found


def _check_new_version_on(
    name: str, columns: Sequence[str], values: Sequence[StructField], valid_until: str | None
) -> None:
    """Refuses what are no columns by which versions can be told apart."""
    kinds = {f.name: f.dataType for f in values}
    maps = [f"{c} {kinds[c].simpleString()}" for c in columns if holds_map(kinds[c])]
    if maps:
        raise TopologyError(
            f"{name}: expected new_version_on to name columns whose values can be compared, got {maps}"
            "; name others, for example a text made of the map"
        )
    if valid_until is not None and valid_until not in columns:
        raise TopologyError(
            f"{name}: expected new_version_on to name valid_until, {valid_until!r}, too, got "
            f"{list(columns)}: a record that only moves the end would make no version, and its end "
            "would be lost; add it, or leave one of both out"
        )
