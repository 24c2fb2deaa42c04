"""The plain table: the latest record per key, by arrival, whatever its timestamp."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster.columns import IS_LATEST, IS_TOMBSTONE, OLD, OUTCOME, TIMESTAMP
from vt_dagster.core.arrival_order import Outcome, over_all_partitions, union, with_columns

BEFORE, NEWEST = "_before", "_newest"
_SEEN, _LAST = "_seen", "_last"


def put(
    records: DataFrame,
    current: DataFrame | None,
    *,
    key: Sequence[str],
    values: Sequence[str],
    order: Sequence[str],
    of_rejected: Sequence[str] = (),
) -> DataFrame:
    """Adds what each record replaces: every record of a plain table is its key's latest.

    Plan: one shuffle and sort by key together with one row per key of ``current``.

    Args:
        records: ``key columns, value columns, timestamp, is_tombstone, _outcome, order columns``; those
            without an outcome are applied, those with another one are passed through.
        current: the rows of the table before the run; None = none.
        order: columns in whose order a key's records are taken.
        of_rejected: columns that are null in what is applied.

    Returns:
        the records with ``_outcome``, ``is_latest`` (true) and ``old``.

    Source: FORMAT 4.2.1; kip889-motivation-unversioned.
    """
    rejected = F.col(OUTCOME).isNotNull()
    records = with_columns(records, {c: F.when(rejected, F.col(c)) for c in of_rejected})
    known = with_row_before(records, current, key=key, values=values)
    applied = known.withColumn(OUTCOME, F.coalesce(OUTCOME, F.lit(Outcome.APPLIED)))
    counts = F.col(OUTCOME) == Outcome.APPLIED
    replaced = with_old(applied, counts, key=key, values=values, order=order)
    return replaced.withColumn(IS_LATEST, F.lit(True)).drop(NEWEST)


def with_row_before(
    records: DataFrame, current: DataFrame | None, *, key: Sequence[str], values: Sequence[str]
) -> DataFrame:
    """Adds what a table holds before the run for a record's key.

    Returns:
        the records with ``_before``: the struct of its values and timestamp, null where it has no row;
        and ``_newest``: the timestamp of its row or tombstone.
    """
    row = F.struct(*[F.col(f"`{v}`") for v in values], TIMESTAMP)
    if current is None:
        none = F.lit(None).cast("timestamp")
        return records.withColumns({BEFORE: F.when(F.lit(False), row), NEWEST: none})
    held = F.when(~F.col(IS_TOMBSTONE), row).alias(BEFORE)
    rows = current.select(*[F.col(f"`{k}`") for k in key], held, F.col(TIMESTAMP).alias(NEWEST))
    return records.join(rows, list(key), "left")


def with_old(
    rows: DataFrame, counts: Column, *, key: Sequence[str], values: Sequence[str], order: Sequence[str]
) -> DataFrame:
    """Adds ``old``: the struct of values and timestamp that a key has before a record; null where it
    has none.

    Args:
        rows: of ``with_row_before``.
        counts: whether a record is its key's latest from then on.

    Returns:
        the rows with ``old``, without ``_before``.

    Source: FORMAT 4.2.1, 4.2.3; kip914-aggregate-unversioned.
    """
    before = W.partitionBy(*key).orderBy(*order).rowsBetween(W.unboundedPreceding, -1)
    row = F.struct(*[F.col(f"`{v}`") for v in values], TIMESTAMP)
    # A struct around it, for "deleted" is not the same as "nothing seen yet".
    held = F.when(counts, F.struct(F.when(~F.col(IS_TOMBSTONE), row).alias("row")))
    # A column of its own: Spark computes a window as often as an expression names it.
    seen = rows.withColumn(_SEEN, F.last(held, ignorenulls=True).over(before))
    old = F.when(F.col(_SEEN).isNotNull(), F.col(_SEEN)["row"]).otherwise(F.col(BEFORE))
    return seen.withColumn(OLD, old).drop(_SEEN, BEFORE)


def fold(rows: DataFrame | None, log: DataFrame, *, key: Sequence[str]) -> DataFrame:
    """The current rows after more of the log: what the view of a plain table is.

    Plan: one shuffle and sort by key.

    Args:
        rows: the current rows before; None = none.
        log: log rows after those that made ``rows``; a tombstone removes its key.

    Source: FORMAT 4.2.1; kip889-motivation-unversioned.
    """
    fresh = log.drop(IS_LATEST, OLD)
    everything = union(fresh, rows)
    in_order = W.partitionBy(*key).orderBy(*over_all_partitions(everything))
    # Not the first of the rows backwards: for that Spark sorts a second time, before it shuffles.
    last = F.lead(F.lit(1)).over(in_order).isNull()
    return everything.withColumn(_LAST, last).where(F.col(_LAST) & ~F.col(IS_TOMBSTONE)).drop(_LAST)
