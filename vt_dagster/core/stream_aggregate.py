"""Stream aggregation without windows: adds each record to its group."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import IS_TOMBSTONE, ORDER, OUTCOME, PARTITION, TIMESTAMP, TURN
from vt_dagster.core.arrival_order import Outcome, has_key, union
from vt_dagster.core.processor import Processor
from vt_dagster.core.run_context import Input, RunContext
from vt_dagster.core.source_records import home_of
from vt_dagster.core.table_aggregate import ADD, TAKE, aggregate, refuse, state_after
from vt_dagster.topology.model import VersionedTable
from vt_dagster.topology.operators import StreamAggregate


class StreamAggregateProcessor(Processor[StreamAggregate]):
    """See :func:`entries`, and ``table_aggregate.aggregate``."""

    monotonic = True

    @property
    def merges(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return bool(self.operator.group_key)

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        operator, node = self.operator, self.node
        aggregates = operator.parsed()
        added = entries(
            rows[0],
            key=operator.keys().columns,
            inputs=[(a.name, a.expression) for a in aggregates.accumulators],
            partition=home_of(node.key, node) if operator.group_key else F.col(PARTITION),
            rekeyed=operator.rekeyed,
        )
        if isinstance(node, VersionedTable):
            taken = F.col(OUTCOME) == Outcome.APPLIED
            decided = refuse(
                added.where(taken).drop(OUTCOME),
                context.state,
                key=node.key,
                stream_time=context.stream_time,
                history_retention=node.history_retention,
                chunk=self.chunk,
            )
            added = union(decided, added.where(~taken))
        once = operator.emit == "per_run"
        return aggregate(added, context.state, key=node.key, aggregates=aggregates, once=once)

    def state_after(self, rows: DataFrame, context: RunContext) -> DataFrame:
        return state_after(rows, context.state, key=self.node.key)


def entries(
    records: DataFrame,
    *,
    key: Sequence[tuple[str, str]],
    inputs: Sequence[tuple[str, str]],
    partition: Column,
    rekeyed: bool,
) -> DataFrame:
    """Returns each record's contribution to its group.

    Plan: projections only.

    Args:
        records: the stream's log rows in order.
        key: (name, SQL expression) of the group's key.
        inputs: (name, SQL expression) of an aggregate's inputs; a key column does not hide a record's
            column of the same name.
        partition: of the group, over its key columns.
        rekeyed: whether the records were moved to this key: then a null key is not counted.

    Returns:
        ``key columns, _take`` (null), ``_add, timestamp, partition, _outcome, ORDER, _turn``:
        ``applied``; ``dropped`` without a value or a key; ``no_result`` without a key if they were
        rekeyed.

    Source: FORMAT 4.12.4-4.12.6; merge-then-count-counts-both-and-drops-nulls,
    select-key-then-count-null-keys-vanish.
    """
    row = F.struct(*[F.expr(sql).alias(name) for name, sql in inputs])
    nothing = Outcome.NO_RESULT if rekeyed else Outcome.DROPPED
    outcome = F.when(~has_key([name for name, _ in key]), nothing)
    outcome = outcome.when(F.col(IS_TOMBSTONE), Outcome.DROPPED).otherwise(Outcome.APPLIED)
    rows = records.select(
        *[F.expr(sql).alias(name) for name, sql in key],
        F.when(F.lit(False), row).alias(TAKE),
        row.alias(ADD),
        TIMESTAMP,
        PARTITION,
        IS_TOMBSTONE,
        *ORDER,
        F.lit(0).alias(TURN),
    )
    return rows.withColumns({OUTCOME: outcome, PARTITION: partition}).drop(IS_TOMBSTONE)
