"""What a table says of the records of its source, checked when it is declared."""

from __future__ import annotations

from datetime import datetime

from vt_dagster.errors import TopologyError


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
