"""What a table says of the records of its source, checked when it is declared."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from pyspark.sql.types import StructField

from vt_dagster.errors import TopologyError
from vt_dagster.topology.schema import holds_map


def one_condition(name: str, deleted_when: object, tombstone: str | None) -> str:
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


def check_ready(name: str, ready: object, has_source: bool) -> None:
    """Refuses a time from when on a table is ready that is none, or that it cannot say."""
    timed = isinstance(ready, datetime) and ready.tzinfo is not None
    if ready is not None and ready != "first_end" and not timed:
        raise TopologyError(
            f"{name}: ready must be 'first_end', a datetime with a time zone or None, got {ready!r}"
        )
    if ready is not None and not has_source:
        raise TopologyError(
            f"{name}: expected ready of a table with a source, got it of the result of an "
            "operator, which is ready when what it is made of is: declare it there"
        )


def check_tie_break(name: str, column: object, values: Sequence[StructField]) -> None:
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
