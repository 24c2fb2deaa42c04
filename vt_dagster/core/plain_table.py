"""The plain table: keeps the latest record per key, by arrival, whatever its timestamp."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster.columns import (
    IS_LATEST,
    IS_TOMBSTONE,
    OFFSET,
    OLD,
    OUTCOME,
    PARTITION,
    TIMESTAMP,
)
from vt_dagster.core.arrival_order import Outcome, over_all_partitions, union, with_columns

BEFORE, NEWEST = "_before", "_newest"
_SEEN, _LAST, _RISEN = "_seen", "_last", "_risen"


def put(
    records: DataFrame,
    current: DataFrame | None,
    *,
    key: Sequence[str],
    values: Sequence[str],
    order: Sequence[str],
    of_rejected: Sequence[str] = (),
    risen: str | None = None,
) -> DataFrame:
    """Adds the row that each record replaces: every record of a plain table is its key's latest.

    Plan: one shuffle and sort by key together with one row per key of ``current``.

    Args:
        records: ``key columns, value columns, timestamp, is_tombstone, _outcome, order columns``;
            records without an outcome are applied, those with another outcome are passed through.
        current: the rows of the table before the run; None = none.
        order: the columns that define the order of a key's records.
        of_rejected: columns that are null in applied records.
        risen: a column with the largest timestamp of the key's records before the run (null = none), if
            the timestamps of a key must not decrease: each is then at least that of the one before.

    Returns:
        the records with ``_outcome``, ``is_latest`` (true) and ``old``, without the column ``risen``.

    Source: FORMAT 4.2.1; kip889-motivation-unversioned.
    """
    rejected = F.col(OUTCOME).isNotNull()
    records = with_columns(records, {c: F.when(rejected, F.col(c)) for c in of_rejected})
    known = with_row_before(records, current, key=key, values=values)
    outcome = F.coalesce(OUTCOME, F.lit(Outcome.APPLIED))
    applied = known.withColumns({OUTCOME: outcome, IS_LATEST: F.lit(True)})
    counts = F.col(OUTCOME) == Outcome.APPLIED
    about = {"key": key, "values": values, "order": order}
    return with_old(applied, counts, **about, risen=risen, drop=[NEWEST])


def with_row_before(
    records: DataFrame, current: DataFrame | None, *, key: Sequence[str], values: Sequence[str]
) -> DataFrame:
    """Adds the row that a table has of a record's key before the run.

    Returns:
        the records with ``_before``: the struct of the row's values and timestamp, null if there is
        none; and ``_newest``: the timestamp of the key's row or tombstone.
    """
    row = F.struct(*[F.col(f"`{v}`") for v in values], TIMESTAMP)
    if current is None:
        none = F.lit(None).cast("timestamp")
        return records.withColumns({BEFORE: F.when(F.lit(False), row), NEWEST: none})
    held = F.when(~F.col(IS_TOMBSTONE), row).alias(BEFORE)
    rows = current.select(*[F.col(f"`{k}`") for k in key], held, F.col(TIMESTAMP).alias(NEWEST))
    return records.join(rows, list(key), "left")


def with_old(
    rows: DataFrame,
    counts: Column,
    *,
    key: Sequence[str],
    values: Sequence[str],
    order: Sequence[str],
    risen: str | None = None,
    drop: Sequence[str] = (),
) -> DataFrame:
    """Adds ``old``: the struct of values and timestamp of a key's previous row; null = no row.

    Args:
        rows: of ``with_row_before``.
        counts: whether a record becomes its key's latest.
        risen: see :func:`put`.
        drop: further columns to leave out.

    Returns:
        the rows with ``old``, without ``_before``.

    Source: FORMAT 4.2.1, 4.2.3; kip914-aggregate-unversioned.
    """
    before = W.partitionBy(*key).orderBy(*order).rowsBetween(W.unboundedPreceding, -1)
    row = F.struct(*[F.col(f"`{v}`") for v in values], TIMESTAMP)
    # In a struct, to distinguish "deleted" from "no record yet".
    held = F.when(counts, F.struct(F.when(~F.col(IS_TOMBSTONE), row).alias("row")))
    # Columns of their own: Spark computes a window once per mention in an expression.
    windows = {_SEEN: F.last(held, ignorenulls=True).over(before)}
    replaced, moved = F.col(_SEEN)["row"], dict[str, Column]()
    if risen is not None:
        windows[_RISEN] = F.max(F.when(counts, F.col(TIMESTAMP))).over(before)
        newest = F.greatest(_RISEN, risen)
        kept = [replaced.getField(v).alias(v) for v in values]
        replaced = F.when(replaced.isNotNull(), F.struct(*kept, newest.alias(TIMESTAMP)))
        moved[TIMESTAMP] = F.when(counts, F.greatest(TIMESTAMP, newest)).otherwise(F.col(TIMESTAMP))
        drop = [*drop, _RISEN, risen]
    seen = with_columns(rows, windows)
    old = F.when(F.col(_SEEN).isNotNull(), replaced).otherwise(F.col(BEFORE))
    return seen.withColumns({OLD: old, **moved}).drop(_SEEN, BEFORE, *drop)


def fold(
    rows: DataFrame | None, log: DataFrame, *, key: Sequence[str], few_keys: bool = False
) -> DataFrame:
    """Returns the current rows after more of the log: the view of a plain table.

    Plan: one shuffle and sort by key. With ``few_keys`` of each key's last rows only, which a hash
    aggregate finds; the log is read twice.

    Args:
        rows: the current rows before; None = none.
        log: log rows after those that made ``rows``; a tombstone removes its key.
        few_keys: whether the log has many rows of few keys, so few that they can be broadcast.

    Source: FORMAT 4.2.1; kip889-motivation-unversioned.
    """
    fresh = log.drop(IS_LATEST, OLD)
    if few_keys:
        # Of each partition: a key may have moved. An aggregate of two numbers needs no sort.
        last = fresh.groupBy(*key, PARTITION).agg(F.max(OFFSET).alias(OFFSET))
        places = F.broadcast(last.select(PARTITION, OFFSET))
        # A join by names puts their columns first.
        fresh = fresh.join(places, [PARTITION, OFFSET], "left_semi").select(*fresh.columns)
    everything = union(fresh, rows)
    in_order = W.partitionBy(*key).orderBy(*over_all_partitions(everything))
    # lead, not row_number over a descending window: Spark would sort once more, before the shuffle.
    last = F.lead(F.lit(1)).over(in_order).isNull()
    return everything.withColumn(_LAST, last).where(F.col(_LAST) & ~F.col(IS_TOMBSTONE)).drop(_LAST)
