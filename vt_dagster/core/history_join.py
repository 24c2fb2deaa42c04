"""History join: intersects the versions of two tables, with new results where either side changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster.columns import (
    ARRIVAL,
    HOME,
    INPUT,
    IS_TOMBSTONE,
    OUTCOME,
    PARTITION,
    SEQUENCE,
    TIMESTAMP,
    TURN,
    VALID_FROM,
    VALID_TO,
)
from vt_dagster.core import table_store
from vt_dagster.core.arrival_order import Outcome, by_partition, union
from vt_dagster.core.log_columns import value_columns
from vt_dagster.core.run_context import Input, RunContext
from vt_dagster.core.table_changes import (
    LEFT,
    RIGHT,
    TableInput,
    match_columns,
    match_names,
    result_rows,
)
from vt_dagster.core.table_table_join import TableTableJoinProcessor, side_row
from vt_dagster.topology.model import Stream, VersionedTable
from vt_dagster.topology.operators import HistoryJoin, JoinKind

_AT, _RANK, _STATE, _CHANGE, _SIDES = "_at", "_rank", "state", "change", (LEFT, RIGHT)
_MATCHED, _CAUSE, _BEGINS, _UNKNOWN = "_matched", "_cause", "_begins", "_unknown"
_PLACE = (INPUT, HOME, SEQUENCE, PARTITION)


class HistoryJoinProcessor(TableTableJoinProcessor):
    """See :func:`join`."""

    @property
    def operator(self) -> HistoryJoin:
        operator: Any = self.node.operator
        return operator

    def versions_since(self, logs: Sequence[DataFrame]) -> DataFrame:
        """Returns the run's oldest change less one microsecond: a version valid then may end with
        it."""
        times = [rows.select(F.unix_micros(TIMESTAMP).alias(_AT)) for rows in logs]
        return times[0].union(times[1]).agg(F.min(_AT) - 1)

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        left, right = (
            TableInput(
                *(changes, one.table, node.key, value_columns(node), node.versioned),
                horizon=_horizon(node, one),
            )
            for node, changes, one in zip(self.consumed, rows, inputs, strict=True)
        )
        operator = self.operator
        joined = join(left, right, kind=operator.kind, columns=operator.projection().columns)
        return self.at_home(joined)


def _horizon(node: Stream, one: Input) -> Column | None:
    return (
        table_store.horizon_of(node, by_partition(one.times))
        if isinstance(node, VersionedTable)
        else None
    )


def join(
    left: TableInput, right: TableInput, *, kind: JoinKind, columns: Sequence[tuple[str, str]]
) -> DataFrame:
    """Joins two versioned tables at every time.

    A change is valid from its timestamp to the next version of its key. Within that interval each start
    of a version of either side gives one result, at that time, from the versions that both sides have
    there at the end of the run. If the kind of join requires a row that is missing, the result is a
    tombstone, omitted if there was no result before. Results are emitted by time, each from the
    change that caused it. A result at a time that a side no longer retains, while it has later versions
    of the key, is ``late``.

    Plan: for each side one read of the versions and a semi-join with the keys that change, then one
    shuffle and sort of both together by key, one pass of windows.

    Args:
        left, right: ``current`` contains the versions, tombstones included, that exist at the end of
            the run and end at or after the run's oldest change.
        columns: the result's (name, SQL expression over ``left.*`` and ``right.*``), including the
            left's key columns.

    Returns:
        as for ``table_table_join.join``.

    Source: none: Kafka Streams joins only the latest rows.
    """
    on = match_names(left.key)
    keys = [side.changes.select(*match_columns(side.key)) for side in (left, right)]
    changed = keys[0].union(keys[1])
    events = union(_events(left, LEFT, changed), _events(right, RIGHT, changed))
    by_key = W.partitionBy(*on)
    in_order = by_key.orderBy(_AT, _RANK, INPUT, SEQUENCE)
    so_far = in_order.rowsBetween(W.unboundedPreceding, W.currentRow)
    next_at = F.lead(_AT).over(in_order)
    forgot = [F.max(_forgotten(side)).over(by_key).alias(_forgotten(side)) for side in _SIDES]
    moments = events.select(
        *on,
        _AT,
        *forgot,
        *[F.last(side, ignorenulls=True).over(so_far).alias(side) for side in _SIDES],
        F.coalesce(next_at > F.col(_AT), F.lit(True)).alias(_BEGINS),
    ).where(_BEGINS)
    there = [F.col(side).getField(_STATE).isNotNull() for side in _SIDES]
    found = [F.col(side).getField(_CHANGE) for side in _SIDES]
    moments = moments.withColumns(
        {_MATCHED: F.coalesce(_wanted(kind, *there), F.lit(False)), _CAUSE: F.coalesce(*found)}
    )
    unknown = [F.col(side).isNull() & (F.col(_AT) < F.col(_forgotten(side))) for side in _SIDES]
    moments = moments.withColumn(_UNKNOWN, F.coalesce(unknown[0] | unknown[1], F.lit(False)))
    so_before = F.lag(F.col(_MATCHED) | F.col(_UNKNOWN)).over(by_key.orderBy(_AT))
    before = F.coalesce(so_before, F.lit(False))
    # A tombstone change may end an earlier result; without one, a side without a row now had none
    # before.
    deleted = [F.coalesce(one.getField(IS_TOMBSTONE), F.lit(False)) for one in found]
    ended = before | deleted[0] | deleted[1] | F.col(_UNKNOWN)
    told = moments.withColumn(_BEGINS, F.col(_MATCHED) | ended).where(F.col(_CAUSE).isNotNull())
    cause = {name: F.col(_CAUSE).getField(name) for name in _PLACE}
    joined = told.where(_BEGINS).select(
        *on,
        side_row(left, F.col(LEFT).getField(_STATE)).alias(LEFT),
        F.when(there[1], side_row(right, F.col(RIGHT).getField(_STATE))).alias(RIGHT),
        F.col(_AT).alias(TIMESTAMP),
        (~F.col(_MATCHED)).alias(IS_TOMBSTONE),
        F.when(F.col(_UNKNOWN), Outcome.LATE).otherwise(Outcome.APPLIED).alias(OUTCOME),
        F.unix_micros(_AT).alias(ARRIVAL),
        *[column.alias(name) for name, column in cause.items()],
        F.lit(0).alias(TURN),
    )
    key = {k: F.col(n) for k, n in zip(left.key, on, strict=True)}
    return result_rows(joined, key=key, select=columns)


def _wanted(kind: JoinKind, left: Column, right: Column) -> Column:
    """Returns whether the join has a result, by the presence of both sides."""
    return {"inner": left & right, "left": left, "outer": left | right}[kind]


def _events(side: TableInput, name: str, changed: DataFrame) -> DataFrame:
    """Returns the times at which a side's state may change: the starts and ends of its versions, and
    the run's changes.

    Returns:
        the time from which on the side retains history; ``match_names, _at, _rank`` (at equal times the
        decisive event comes last)``, _input, _sequence``; and under the side's name a struct: the state
        from then on (null = none), and the run's change that caused it (null = none).
    """
    on = match_names(side.key)
    place = F.struct(IS_TOMBSTONE, *_PLACE)
    made = side.changes.select(
        *match_columns(side.key),
        F.lit(None).cast("timestamp").alias(_forgotten(name)),
        F.col(TIMESTAMP).alias(_AT),
        F.lit(2).alias(_RANK),
        *(INPUT, SEQUENCE),
        F.struct(side.new_state().alias(_STATE), place.alias(_CHANGE)).alias(name),
    )
    if side.current is None:
        return made
    none = F.lit(None).cast(side.changes.select(place.alias(_CHANGE)).schema[_CHANGE].dataType)
    versions = side.current.select("*", *match_columns(side.key)).join(changed, on, "left_semi")

    def said(at: str, rank: int, state: Column) -> Column:
        return F.struct(F.col(at).alias(_AT), F.lit(rank).alias(_RANK), state.alias(_STATE))

    # Expand start and end from one scan: two scans would read the table twice.
    no_state = F.lit(None).cast(_type_of(side))
    both = F.array(said(VALID_TO, 0, no_state), said(VALID_FROM, 1, side.new_state()))
    horizon = F.lit(None) if side.horizon is None else side.horizon
    forgotten = horizon.cast("timestamp").alias(_forgotten(name))
    told = versions.select(*on, forgotten, F.inline(both)).where(F.col(_AT).isNotNull())
    state = F.struct(_STATE, none.alias(_CHANGE)).alias(name)
    zeros = [F.lit(0).alias(c) for c in (INPUT, SEQUENCE)]
    return union(made, told.select(*on, _forgotten(name), _AT, _RANK, *zeros, state))


def _forgotten(side: str) -> str:
    return f"_forgotten_{side}"


def _type_of(side: TableInput) -> Any:
    return side.changes.select(side.row_state().alias(_STATE)).schema[_STATE].dataType
