"""Table-table join: each change of a side with the other side's latest row at that moment (KIP-914)."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import FATE, INPUT, IS_TOMBSTONE, ORDER, PARTITION, TIMESTAMP, TURN
from vt_dagster.core.arrival import Fate, union
from vt_dagster.core.changes import (
    LEFT,
    RIGHT,
    TAKEN,
    TableInput,
    found_state,
    match_columns,
    match_names,
    result_rows,
    state_of,
    timeline,
)
from vt_dagster.topology.operators import JoinKind

_LEFT_STATE, _RIGHT_STATE, _OLD_STATE = "_left_state", "_right_state", "_old_state"


def join(
    left: TableInput,
    right: TableInput,
    *,
    kind: JoinKind,
    columns: Sequence[tuple[str, str]],
) -> DataFrame:
    """Joins two tables that have the same key, under whatever names.

    A change out of order on a versioned side is dropped (kip914-proposal). Any other gives one
    result, or none where neither side has anything to say or the kind of join asks for more; equal
    results and repeated tombstones are results too (kip914-probe-repeated-tombstones-inner, -left,
    -outer). The timestamp is the larger of the record's and the other side's latest row's, without
    such a row the record's own (kip914-probe-result-timestamps).

    Plan: one shuffle and sort of both sides together by key, one pass of windows; before it one
    semi-join for each ``current`` that there is, with the keys of the other side's changes.

    Args:
        columns: the result's (name, SQL expression over ``left.*`` and ``right.*``), the left's key
            columns among them. A missing left row has its key alone, a missing right row is null.

    Returns:
        one row a change: ``columns, timestamp, partition`` (the record's)``, is_tombstone, _fate``
        (``applied``, ``no_result``, ``dropped``)``, ORDER, _turn``.

    Source: KIP-914 "Table-Table Joins".
    """
    on = match_names(left.key)
    left_keys = left.changes.select(*match_columns(left.key))
    right_keys = right.changes.select(*match_columns(right.key))
    rows = union(timeline(left, LEFT, right_keys), timeline(right, RIGHT, left_keys))
    rows = rows.withColumn(TURN, F.lit(0))
    # By key and in the order in which the result's store wants them next: it sorts no more.
    order = [*ORDER, TURN]
    from_left = F.col(INPUT) == 0
    moments = rows.select(
        *on,
        TIMESTAMP,
        PARTITION,
        *order,
        TAKEN,
        state_of(LEFT, on, order).alias(_LEFT_STATE),
        state_of(RIGHT, on, order).alias(_RIGHT_STATE),
        F.when(from_left, found_state(LEFT).isNotNull())
        .otherwise(found_state(RIGHT).isNotNull())
        .alias(_OLD_STATE),
    ).where(F.col(TAKEN).isNotNull())
    says, tombstone = _outcome(kind)
    other = F.when(from_left, F.col(_RIGHT_STATE).getField(TIMESTAMP)).otherwise(
        F.col(_LEFT_STATE).getField(TIMESTAMP)
    )
    applied = F.col(TAKEN) & says
    joined = moments.select(
        *on,
        _row(left, _LEFT_STATE).alias(LEFT),
        F.when(F.col(_RIGHT_STATE).isNotNull(), _row(right, _RIGHT_STATE)).alias(RIGHT),
        F.when(applied, F.greatest(TIMESTAMP, other)).otherwise(F.col(TIMESTAMP)).alias(TIMESTAMP),
        PARTITION,
        (applied & tombstone).alias(IS_TOMBSTONE),
        F.when(~F.col(TAKEN), Fate.DROPPED)
        .when(says, Fate.APPLIED)
        .otherwise(Fate.NO_RESULT)
        .alias(FATE),
        *order,
    )
    key = {k: F.col(n) for k, n in zip(left.key, on, strict=True)}
    return result_rows(joined, key=key, select=columns)


def _outcome(kind: JoinKind) -> tuple[Column, Column]:
    """Whether a change gives a result, and whether that is a tombstone."""
    has_left, has_right = F.col(_LEFT_STATE).isNotNull(), F.col(_RIGHT_STATE).isNotNull()
    anything = has_left | has_right | F.col(_OLD_STATE)
    from_left = F.col(INPUT) == 0
    if kind == "inner":
        return F.when(from_left, has_right).otherwise(has_left), ~(has_left & has_right)
    if kind == "left":
        return F.when(from_left, anything).otherwise(has_left), ~has_left
    return anything, ~(has_left | has_right)


def _row(side: TableInput, state: str) -> Column:
    """A side's row as a struct: key, values, timestamp."""
    return F.struct(
        *[F.col(n).alias(k) for n, k in zip(match_names(side.key), side.key, strict=True)],
        *[F.col(state).getField(c).alias(c) for c in side.state_columns],
    )
