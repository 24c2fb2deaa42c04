"""Versions that only some columns define (``new_version_on``): handles records that repeat a version.

A table's view keeps every record, because a late record may fall between two of one version. Each row
has as ``old`` the previous version: a STRUCT of the values, ``timestamp`` and ``offset`` of that
version's first record; null if there is none or it is a tombstone. A row therefore shows by itself
whether it repeats a version and which one, even if only a part of the key's history is read or left.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from vt_dagster.columns import (
    IS_TOMBSTONE,
    OLD,
    PARTITION,
    TIMESTAMP,
    VALID_FROM,
    VALID_TO,
)
from vt_dagster.core.arrival_order import over_all_partitions

_PEER, _LAST, _FIRST, _VERSION, _ROW = "_peer", "_last", "_first", "_of_version", "row"
_REPEATS, _END, _LAST_END = "_repeats", "_end", "_last_end"


def with_version_before(
    rows: DataFrame, replaced: Column, key: Sequence[str], new_version_on: Sequence[str]
) -> DataFrame:
    """Adds ``old`` to the rows of a view.

    Plan: windows over the order that the rows have already.

    Args:
        rows: all rows that end after the earliest new one, with ``valid_from`` and ``valid_to``; stored
            rows also have ``old``, which is used if the previous version is not among the rows.
        replaced: whether another row of the same key and time replaces the row: such rows are dropped.
    """
    rows = rows.withColumn(OLD, _stored(rows, key))
    peers = rows.withColumn(_PEER, F.first(OLD, ignorenulls=True).over(W.partitionBy(*key, VALID_FROM)))
    kept = peers.where(~replaced).drop(OLD)
    in_order = W.partitionBy(*key).orderBy(VALID_FROM, *over_all_partitions(rows))
    state = F.struct(IS_TOMBSTONE, *[F.col(f"`{c}`") for c in new_version_on])
    kept = kept.withColumn(_LAST, F.lag(state).over(in_order))
    is_first, lives = F.col(_LAST).isNull(), ~F.col(IS_TOMBSTONE)
    as_last = ~F.col(_LAST)[IS_TOMBSTONE] & _same(new_version_on, F.col(_LAST))
    as_peer = F.col(_PEER).isNotNull() & _same(new_version_on, F.col(_PEER))
    # In a struct, to distinguish "no version" from "the version of the previous row".
    first_changes = F.struct(F.when(lives, _version(kept, key)).alias(_ROW))
    found = (
        F.when(
            is_first,
            F.when(lives & as_peer, F.struct(F.col(_PEER).alias(_ROW))).otherwise(first_changes),
        )
        .when(lives & as_last, F.lit(None))
        .otherwise(first_changes)
    )
    so_far = in_order.rowsBetween(W.unboundedPreceding, W.currentRow)
    known = kept.withColumn(_FIRST, found)
    known = known.withColumn(_VERSION, F.last(_FIRST, ignorenulls=True).over(so_far))
    before = F.lag(_VERSION).over(in_order)[_ROW]
    told = known.withColumn(OLD, F.when(F.col(_LAST).isNull(), F.col(_PEER)).otherwise(before))
    return told.drop(_PEER, _LAST, _FIRST, _VERSION)


def collapse_repeats(rows: DataFrame, key: Sequence[str], new_version_on: Sequence[str]) -> DataFrame:
    """Returns the versions of a view, without rows that repeat a version and without ``old``.

    Plan: one shuffle and sort by key.

    Args:
        rows: all rows of each key that end after some time. The first of them stands for a version that
            began before that time.
    """
    in_order = W.partitionBy(*key).orderBy(VALID_FROM)
    whole = in_order.rowsBetween(W.unboundedPreceding, W.unboundedFollowing)
    marked = rows.withColumns(
        {
            _REPEATS: _repeats(new_version_on),
            _END: F.lag(VALID_TO).over(in_order),
            _LAST_END: F.last(VALID_TO).over(whole),
            _FIRST: F.lag(F.lit(1)).over(in_order).isNull(),
        }
    )
    kept = marked.where(~F.col(_REPEATS) | F.col(_FIRST)).withColumn(
        _LAST, F.lead(F.lit(1)).over(in_order).isNull()
    )
    ends = F.when(F.col(_LAST), F.col(_LAST_END)).otherwise(F.lead(_END).over(in_order))
    told = with_version_start(kept.withColumn(VALID_TO, ends), new_version_on)
    return told.drop(_REPEATS, _END, _LAST_END, _FIRST, _LAST)


def with_version_start(rows: DataFrame, new_version_on: Sequence[str]) -> DataFrame:
    """Gives rows the values and ``valid_from`` of their version's first record; drops ``old``."""
    repeats, old = _repeats(new_version_on), F.col(OLD)
    kind = rows.schema[OLD].dataType
    assert isinstance(kind, StructType)
    fields = [c for c in kind.names if c in rows.columns]
    told = {c: F.when(repeats, old.getField(c)).otherwise(F.col(f"`{c}`")) for c in fields}
    begin = F.when(repeats, old.getField(TIMESTAMP)).otherwise(F.col(VALID_FROM))
    return rows.withColumns({**told, VALID_FROM: begin}).drop(OLD)


def _repeats(new_version_on: Sequence[str]) -> Column:
    """Returns whether a row of a view repeats the previous version."""
    there = ~F.col(IS_TOMBSTONE) & F.col(OLD).isNotNull()
    return F.coalesce(there & _same(new_version_on, F.col(OLD)), F.lit(False))


def _same(new_version_on: Sequence[str], other: Column) -> Column:
    each = [F.col(f"`{c}`").eqNullSafe(other.getField(c)) for c in new_version_on]
    return reduce(lambda one, more: one & more, each)


def _version(rows: DataFrame, key: Sequence[str]) -> Column:
    """Returns the struct of a version: values, timestamp and offset of its first record."""
    return F.struct(*[F.col(f"`{f.name}`") for f in _told(rows, key)])


def _told(rows: DataFrame, key: Sequence[str]) -> list[StructField]:
    left_out = {*key, PARTITION, IS_TOMBSTONE, VALID_FROM, VALID_TO, OLD, _PEER, _LAST}
    return [f for f in rows.schema.fields if f.name not in left_out]


def _stored(rows: DataFrame, key: Sequence[str]) -> Column:
    """Returns the stored ``old``, cast to the current fields."""
    found = next((f.dataType for f in rows.schema.fields if f.name == OLD), None)
    if not isinstance(found, StructType):
        return F.when(F.lit(False), _version(rows, key))
    there, old = set(found.names), F.col(OLD)
    fields = [
        (old.getField(f.name) if f.name in there else F.lit(None)).cast(f.dataType).alias(f.name)
        for f in _told(rows, key)
    ]
    return F.when(old.isNotNull(), F.struct(*fields))
