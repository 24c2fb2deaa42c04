"""Table-table join: joins each change of a side with the other side's current row (KIP-914)."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster.columns import IS_TOMBSTONE, ORDER, OUTCOME, PARTITION, TIMESTAMP, TURN
from vt_dagster.core import table_store
from vt_dagster.core.arrival_order import Outcome, union
from vt_dagster.core.log_columns import value_columns
from vt_dagster.core.processor import Processor
from vt_dagster.core.run_context import Input, RunContext
from vt_dagster.core.source_records import home_of
from vt_dagster.core.table_changes import (
    LEFT,
    RIGHT,
    TAKEN,
    TableInput,
    comes_from,
    found_state,
    match_columns,
    match_names,
    result_rows,
    state_of,
    timeline,
)
from vt_dagster.topology.model import Table
from vt_dagster.topology.operators import JoinKind, TableTableJoin

_LEFT_STATE, _RIGHT_STATE, _OLD_STATE = "_left_state", "_right_state", "_old_state"
_FROM_LEFT, _LAST_TIME = "_from_left", "_last_time"


class TableTableJoinProcessor(Processor[TableTableJoin]):
    """See :func:`join`; with monotone timestamps also :func:`monotone`."""

    reads_tables = True
    merges = True

    @property
    def monotonic(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.operator.monotone

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        sides: list[TableInput] = []
        for node, changes, one in zip(self.consumed, rows, inputs, strict=True):
            there = None
            if one.table is not None and isinstance(node, Table):
                there = table_store.rows_of(node, one.table)
            sides.append(TableInput(changes, there, node.key, value_columns(node), node.versioned))
        left, right = sides
        joined = self.at_home(self.joined(left, right))
        return monotone(joined, context.state, self.node.key) if self.operator.monotone else joined

    def at_home(self, joined: DataFrame) -> DataFrame:
        """Moves all results of a key to one partition, even if the sides store the key in different
        ones: offsets of two partitions have no common order."""
        if self.operator.copartitioned:
            return joined
        return joined.withColumn(PARTITION, home_of(self.node.key, self.node))

    def joined(self, left: TableInput, right: TableInput) -> DataFrame:
        """Joins both sides."""
        operator = self.operator
        return join(left, right, kind=operator.kind, columns=operator.projection().columns)

    def state_after(self, rows: DataFrame, context: RunContext) -> DataFrame | None:
        return last_times(rows, context.state, self.node.key) if self.operator.monotone else None


def join(
    left: TableInput,
    right: TableInput,
    *,
    kind: JoinKind,
    columns: Sequence[tuple[str, str]],
) -> DataFrame:
    """Joins two tables by equal keys; the key columns may have different names.

    An out-of-order change of a versioned side is dropped (kip914-proposal). Any other change gives one
    result, or none if neither side has or had a row or if the kind of join requires more; equal results
    and repeated tombstones are results too (kip914-probe-repeated-tombstones-inner, -left, -outer). The
    timestamp is the larger of the record's and that of the other side's latest row; without such a row
    it is the record's own (kip914-probe-result-timestamps).

    Plan: one shuffle and sort of both sides together by key, one pass of windows; before it one
    semi-join per available ``current`` with the keys of the other side's changes.

    Args:
        columns: the result's (name, SQL expression over ``left.*`` and ``right.*``), including the
            left's key columns. A missing left row has only its key, a missing right row is null.

    Returns:
        one row per change: ``columns, timestamp, partition`` (the record's)``, is_tombstone, _outcome``
        (``applied``, ``no_result``, ``dropped``)``, ORDER, _turn``.

    Source: KIP-914 "Table-Table Joins".
    """
    on = match_names(left.key)
    left_keys = left.changes.select(*match_columns(left.key))
    right_keys = right.changes.select(*match_columns(right.key))
    rows = union(timeline(left, LEFT, right_keys), timeline(right, RIGHT, left_keys))
    rows = rows.withColumn(TURN, F.lit(0))
    # By key and in the order that the result's store needs next, so that it need not sort again.
    order = [*ORDER, TURN]
    from_left = comes_from(LEFT)
    moments = rows.select(
        *on,
        TIMESTAMP,
        PARTITION,
        *order,
        TAKEN,
        from_left.alias(_FROM_LEFT),
        state_of(LEFT, on, order).alias(_LEFT_STATE),
        state_of(RIGHT, on, order).alias(_RIGHT_STATE),
        F.when(from_left, found_state(LEFT).isNotNull())
        .otherwise(found_state(RIGHT).isNotNull())
        .alias(_OLD_STATE),
    ).where(F.col(TAKEN).isNotNull())
    says, tombstone = _outcome(kind)
    other = F.when(F.col(_FROM_LEFT), F.col(_RIGHT_STATE).getField(TIMESTAMP)).otherwise(
        F.col(_LEFT_STATE).getField(TIMESTAMP)
    )
    applied = F.col(TAKEN) & says
    joined = moments.select(
        *on,
        side_row(left, F.col(_LEFT_STATE)).alias(LEFT),
        F.when(F.col(_RIGHT_STATE).isNotNull(), side_row(right, F.col(_RIGHT_STATE))).alias(RIGHT),
        F.when(applied, F.greatest(TIMESTAMP, other)).otherwise(F.col(TIMESTAMP)).alias(TIMESTAMP),
        PARTITION,
        (applied & tombstone).alias(IS_TOMBSTONE),
        F.when(~F.col(TAKEN), Outcome.DROPPED)
        .when(says, Outcome.APPLIED)
        .otherwise(Outcome.NO_RESULT)
        .alias(OUTCOME),
        *order,
    )
    key = {k: F.col(n) for k, n in zip(left.key, on, strict=True)}
    return result_rows(joined, key=key, select=columns)


def _outcome(kind: JoinKind) -> tuple[Column, Column]:
    """Returns whether a change gives a result, and whether the result is a tombstone."""
    has_left, has_right = F.col(_LEFT_STATE).isNotNull(), F.col(_RIGHT_STATE).isNotNull()
    anything = has_left | has_right | F.col(_OLD_STATE)
    from_left = F.col(_FROM_LEFT)
    if kind == "inner":
        return F.when(from_left, has_right).otherwise(has_left), ~(has_left & has_right)
    if kind == "left":
        return F.when(from_left, anything).otherwise(has_left), ~has_left
    return anything, ~(has_left | has_right)


def side_row(side: TableInput, state: Column) -> Column:
    """Returns a side's row as a struct: key, values, timestamp."""
    return F.struct(
        *[F.col(n).alias(k) for n, k in zip(match_names(side.key), side.key, strict=True)],
        *[state.getField(c).alias(c) for c in side.state_columns],
    )


def monotone(rows: DataFrame, state: DataFrame | None, key: Sequence[str]) -> DataFrame:
    """Makes the timestamps of a key's results monotone: they never decrease.

    Plan: one shuffle and sort by key, together with one row per key of ``state``.

    Source: FORMAT section 7, "Join timestamps".
    """
    applied = F.col(OUTCOME) == Outcome.APPLIED
    so_far = W.partitionBy(*key).orderBy(*ORDER, TURN).rowsBetween(W.unboundedPreceding, W.currentRow)
    if state is None:
        known = rows.withColumn(_LAST_TIME, F.lit(None).cast("timestamp"))
    else:
        known = rows.join(state.withColumnRenamed(TIMESTAMP, _LAST_TIME), list(key), "left")
    newest = F.greatest(F.max(F.when(applied, F.col(TIMESTAMP))).over(so_far), F.col(_LAST_TIME))
    timed = known.withColumn(TIMESTAMP, F.when(applied, newest).otherwise(F.col(TIMESTAMP)))
    return timed.drop(_LAST_TIME)


def last_times(rows: DataFrame, state: DataFrame | None, key: Sequence[str]) -> DataFrame:
    """Returns the last timestamp of each key's results, including those that the result's store
    refused.

    Source: FORMAT section 7, "Join timestamps".
    """
    results = rows.where(F.col(OUTCOME).isin(Outcome.APPLIED, Outcome.LATE)).select(*key, TIMESTAMP)
    return union(results, state).groupBy(*key).agg(F.max(TIMESTAMP).alias(TIMESTAMP))
