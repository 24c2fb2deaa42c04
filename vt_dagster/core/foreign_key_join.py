"""Foreign-key join: each left row with the right row that it refers to; both sides trigger
(KIP-914)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster.columns import (
    ARRIVAL,
    IS_TOMBSTONE,
    ORDER,
    OUTCOME,
    PARTITION,
    TIMESTAMP,
    TURN,
)
from vt_dagster.core.arrival_order import Outcome, union
from vt_dagster.core.table_changes import (
    EXISTS,
    LEFT,
    RIGHT,
    TAKEN,
    TableInput,
    comes_from,
    match_columns,
    match_names,
    over_struct,
    result_rows,
    state_of,
    timeline,
)
from vt_dagster.core.table_changes import columns as named
from vt_dagster.core.table_table_join import TableTableJoinProcessor

_NEW, _OLD, _STATE, _RIGHT_STATE = "_new_state", "_old_state", "_state", "_right_state"
_NEW_KEY, _OLD_KEY, _REFERS = "_new_foreign_key", "_old_foreign_key", "_foreign_key"
_KEY, _SALT = "_left_key", "_salt"
_START, _END, _MOMENT, _FIRST = "_start", "_end", "_moment", "_first"
_PLACE, _CHANGES = "_place", "_changes"


class ForeignKeyJoinProcessor(TableTableJoinProcessor):
    """A table-table join by foreign key, see :func:`join` in this module."""

    def joined(self, left: TableInput, right: TableInput) -> DataFrame:
        operator: Any = self.operator
        return join(
            left,
            right,
            kind=operator.kind,
            foreign_key=operator.foreign_key,
            columns=operator.projection().columns,
        )


def join(
    left: TableInput,
    right: TableInput,
    *,
    kind: Literal["inner", "left"],
    foreign_key: Sequence[str],
    columns: Sequence[tuple[str, str]],
) -> DataFrame:
    """Joins left rows with the right rows whose key they contain.

    Out-of-order changes of a versioned side are dropped, and so are left changes of an inner join that
    neither have nor had a foreign key (kip914-fk-inner-unversioned-unversioned). A left change gives
    one result or none. A right change gives one result for each left row that refers to it at that
    moment, in order of the left keys (kip914-probe-fk-order-of-subscribers). The timestamp after a left
    change is the larger of the left record's and the right row's; after a right change it is the right
    record's own (kip914-probe-fk-result-timestamps).

    Plan: left changes, one shuffle and sort of both sides together by foreign key, after one semi-join
    of the right's ``current``. Right changes, one shuffle and sort of the left's changes by left key,
    one of these and the right changes by foreign key, sorted twice, and an equi-join by foreign key and
    place (a shuffle and sort per side, unless Spark broadcasts), after a semi-join and an anti-join of
    the left's ``current``. The cost is proportional to the results, even for a key with many changes.

    Args:
        foreign_key: SQL expressions over the left's key and value columns, one for each key column
            of the right; a null component makes the whole foreign key null.
        columns: the result's (name, SQL expression over ``left.*`` and ``right.*``), including the
            left's key columns. A missing right row is null.

    Returns:
        ``columns, timestamp, partition`` (of the left row)``, is_tombstone, _outcome, ORDER`` (of the
        record that caused it)``, _turn`` (the left key). One row per left change, one per result of a
        right change, and one without a key per dropped right change.

    Source: KIP-914 "Foreign-Key Joins".
    """
    rows = union(
        _after_left(left, right, kind, foreign_key), _after_right(left, right, kind, foreign_key)
    )
    key = {k: F.col(LEFT).getField(k) for k in left.key}
    return result_rows(rows, key=key, select=columns)


def _after_left(
    left: TableInput, right: TableInput, kind: Literal["inner", "left"], foreign_key: Sequence[str]
) -> DataFrame:
    """Returns the results of left changes, and dropped right changes, which this plan reads too."""
    on = match_names(right.key)
    changes = left.changes.select(
        *named(left.key),
        TIMESTAMP,
        PARTITION,
        *ORDER,
        left.taken().alias(TAKEN),
        left.new_state().alias(_NEW),
        left.old_state().alias(_OLD),
    )
    keyed = _with_foreign_key(changes, left, _NEW, foreign_key, _NEW_KEY)
    keyed = _with_foreign_key(keyed, left, _OLD, foreign_key, _OLD_KEY)
    # An inner join whose foreign key is removed looks up the former right row, for its timestamp.
    wanted = F.col(_NEW_KEY) if kind == "left" else F.coalesce(_NEW_KEY, _OLD_KEY)
    asking = keyed.select(
        *[wanted.getField(n).alias(n) for n in on],
        # Spread rows without a foreign key: otherwise they would all meet in one task.
        F.when(wanted.isNull(), F.xxhash64(*named(left.key))).alias(_SALT),
        F.struct(*named(left.key)).alias(_KEY),
        *[c for c in keyed.columns if c not in left.key],
    )
    rows = union(asking, timeline(right, RIGHT, asking))
    moments = rows.withColumn(_RIGHT_STATE, state_of(RIGHT, [*on, _SALT])).where(
        F.col(TAKEN).isNotNull() & (~comes_from(RIGHT) | ~F.col(TAKEN))
    )
    outcome, tombstone = _outcome(kind)
    found = F.col(_RIGHT_STATE).isNotNull()
    larger = F.greatest(F.col(TIMESTAMP), F.col(_RIGHT_STATE).getField(TIMESTAMP))
    return moments.select(
        _left_row(left, _NEW).alias(LEFT),
        F.when(found, _right_row(right, _RIGHT_STATE)).alias(RIGHT),
        F.when(outcome == Outcome.APPLIED, larger).otherwise(F.col(TIMESTAMP)).alias(TIMESTAMP),
        PARTITION,
        ((outcome == Outcome.APPLIED) & tombstone).alias(IS_TOMBSTONE),
        outcome.alias(OUTCOME),
        *ORDER,
        F.col(_KEY).alias(TURN),
    )


def _outcome(kind: Literal["inner", "left"]) -> tuple[Column, Column]:
    """Returns the outcome of a left change, and whether its result is a tombstone."""
    exists, existed = F.col(_NEW).isNotNull(), F.col(_OLD).isNotNull()
    refers, referred = F.col(_NEW_KEY).isNotNull(), F.col(_OLD_KEY).isNotNull()
    found = F.col(_RIGHT_STATE).isNotNull()
    outcome = F.when(~F.col(TAKEN), Outcome.DROPPED)
    if kind == "left":
        return outcome.when(exists | existed, Outcome.APPLIED).otherwise(Outcome.NO_RESULT), ~exists
    moved = referred & (F.col(_NEW_KEY) != F.col(_OLD_KEY))
    outcome = (
        outcome.when(refers, F.when(found | moved, Outcome.APPLIED).otherwise(Outcome.NO_RESULT))
        .when(referred, Outcome.APPLIED)
        .when(exists | existed, Outcome.DROPPED)
        .otherwise(Outcome.NO_RESULT)
    )
    return outcome, ~(refers & found)


def _after_right(
    left: TableInput, right: TableInput, kind: Literal["inner", "left"], foreign_key: Sequence[str]
) -> DataFrame:
    """Returns the results of right changes: one per left row that refers to them at that moment."""
    on = match_names(right.key)
    changes = right.changes.where(right.taken()).select(
        *match_columns(right.key),
        TIMESTAMP,
        *ORDER,
        F.struct(*named(ORDER)).alias(_MOMENT),
        right.new_state().alias(_RIGHT_STATE),
    )
    intervals = _intervals(left, foreign_key, changes.select(*on))
    place = F.row_number().over(W.partitionBy(*on).orderBy(_MOMENT)).cast("long")
    numbered = changes.withColumn(_PLACE, place)
    rows = _each_within(intervals, changes.select(*on, _MOMENT), on).join(numbered, [*on, _PLACE])
    referring = rows.withColumn(_KEY, F.struct(*named(left.key)))
    exists = F.col(_RIGHT_STATE).isNotNull()
    return referring.select(
        _left_row(left, _STATE).alias(LEFT),
        F.when(exists, _right_row(right, _RIGHT_STATE)).alias(RIGHT),
        TIMESTAMP,
        PARTITION,
        (F.lit(kind == "inner") & ~exists).alias(IS_TOMBSTONE),
        F.lit(Outcome.APPLIED).alias(OUTCOME),
        *ORDER,
        F.col(_KEY).alias(TURN),
    )


def _each_within(intervals: DataFrame, changes: DataFrame, on: Sequence[str]) -> DataFrame:
    """Returns one row per change of the foreign key within an interval, with the change's number.

    Changes are counted at both ends of an interval, so that no interval is compared with a change
    outside it, however many changes a key has.
    """
    moments = changes.select(*on, F.col(_MOMENT).alias(_START), F.col(_MOMENT).alias(_END))
    rows = union(intervals.withColumn(_CHANGES, F.lit(0)), moments.withColumn(_CHANGES, F.lit(1)))
    of_key, until_here = W.partitionBy(*on), (W.unboundedPreceding, W.currentRow)
    # Exclude a change at either end: where a table refers to itself, it is a record of both sides.
    starts = (F.col(_START).asc_nulls_first(), F.col(_CHANGES).desc())
    ends = (F.col(_END).asc_nulls_last(), F.col(_CHANGES))
    before = of_key.orderBy(*starts).rowsBetween(*until_here)
    until = of_key.orderBy(*ends).rowsBetween(*until_here)
    counted = rows.withColumns(
        {_START: F.sum(_CHANGES).over(before), _END: F.sum(_CHANGES).over(until)}
    )
    within = (F.col(_CHANGES) == 0) & (F.col(_START) < F.col(_END))
    places = F.explode(F.sequence(F.col(_START) + 1, F.col(_END))).alias(_PLACE)
    kept = [c for c in intervals.columns if c not in (_START, _END)]
    return counted.where(within).select(*kept, places)


def _intervals(left: TableInput, foreign_key: Sequence[str], asked: DataFrame) -> DataFrame:
    """Returns the intervals of the run (exclusive, null = open) in which left rows have a foreign key.

    Args:
        asked: foreign keys; unchanged left rows are read only if they have one of these.

    Returns:
        key columns, ``partition, _state, _start, _end`` and the ``match_names`` of the foreign key.
    """
    changes = left.changes.where(left.taken())
    in_order = W.partitionBy(*named(left.key)).orderBy(*ORDER)
    moment = F.struct(*named(ORDER))
    held = changes.select(
        *named(left.key),
        PARTITION,
        left.old_state().alias(_OLD),
        left.new_state().alias(_NEW),
        moment.alias(_MOMENT),
        F.lag(ARRIVAL).over(in_order).isNull().alias(_FIRST),
        F.lead(moment).over(in_order).alias(_END),
    ).select(*named(left.key), PARTITION, F.inline(F.array(_before(), _after())))
    rows = _referring(held, left, foreign_key)
    if left.current is None:
        return rows
    current = left.current.select(*named(left.key), PARTITION, left.row_state().alias(_STATE))
    unchanged = (
        _referring(current, left, foreign_key)
        .join(asked, asked.columns, "left_semi")
        .join(changes.select(*named(left.key)), list(left.key), "left_anti")
    )
    return union(rows, unchanged)


def _before() -> Column:
    """Returns the interval that ends at a left key's first change; a null state for other changes."""
    nothing = F.when(F.lit(False), F.col(_MOMENT))
    state = F.when(F.col(_FIRST), F.col(_OLD))
    return F.struct(state.alias(_STATE), nothing.alias(_START), F.col(_MOMENT).alias(_END))


def _after() -> Column:
    """Returns the interval that starts at a left change."""
    return F.struct(F.col(_NEW).alias(_STATE), F.col(_MOMENT).alias(_START), F.col(_END))


def _referring(rows: DataFrame, left: TableInput, foreign_key: Sequence[str]) -> DataFrame:
    """Keeps left states that have a foreign key, and adds its ``match_names``."""
    keyed = _with_foreign_key(rows, left, _STATE, foreign_key, _REFERS)
    parts = [F.col(_REFERS).getField(n).alias(n) for n in match_names(foreign_key)]
    return keyed.where(F.col(_REFERS).isNotNull()).select(*rows.columns, *parts)


def _with_foreign_key(
    rows: DataFrame, left: TableInput, state: str, foreign_key: Sequence[str], name: str
) -> DataFrame:
    """Adds the foreign key of a left state as a struct of ``match_names``; null = none.

    Args:
        rows: the left's key columns, ``state``, and other columns, but no value column.
    """
    parts = [F.expr(e).alias(n) for e, n in zip(foreign_key, match_names(foreign_key), strict=True)]
    complete = F.col(EXISTS)
    for e in foreign_key:
        complete = complete & F.expr(e).isNotNull()
    added = {name: F.when(complete, F.struct(*parts))}
    return over_struct(rows, left.key, F.col(state), left.state_columns, added)


def _left_row(left: TableInput, state: str) -> Column:
    """Returns a left row as a struct: key, values, timestamp."""
    return F.struct(
        *[F.col(_KEY).getField(k).alias(k) for k in left.key],
        *[F.col(state).getField(c).alias(c) for c in left.state_columns],
    )


def _right_row(right: TableInput, state: str) -> Column:
    """Returns a right row as a struct: key, values, timestamp."""
    return F.struct(
        *[F.col(n).alias(k) for n, k in zip(match_names(right.key), right.key, strict=True)],
        *[F.col(state).getField(c).alias(c) for c in right.state_columns],
    )
