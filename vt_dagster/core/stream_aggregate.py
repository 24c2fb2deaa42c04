"""Stream aggregation without windows: each record added to its group."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import FATE, IS_TOMBSTONE, ORDER, PARTITION, TIMESTAMP, TURN
from vt_dagster.core.arrival import Fate, has_key, union
from vt_dagster.core.processor import Input, Known, Processor
from vt_dagster.core.records import home_of
from vt_dagster.core.table_aggregate import ADD, TAKE, aggregate, refuse, state_after
from vt_dagster.topology.model import VersionedTable
from vt_dagster.topology.operators import StreamAggregate


class StreamAggregateProcessor(Processor[StreamAggregate]):
    """See :func:`entries`, and ``table_aggregate.aggregate``."""

    goes_forward = True

    @property
    def merges(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return bool(self.operator.group_key)

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], known: Known) -> DataFrame:
        operator, node = self.operator, self.node
        records = rows[0]
        if operator.group_key:
            chosen = {name: F.expr(sql) for name, sql in operator.keys().columns}
            records = records.withColumns(chosen)
            records = records.withColumn(PARTITION, home_of(list(chosen), node))
        aggregates = operator.parsed()
        added = entries(
            records,
            key=node.key,
            inputs=[(a.name, a.expression) for a in aggregates.accumulators],
            rekeyed=operator.rekeyed,
        )
        if isinstance(node, VersionedTable):
            taken = F.col(FATE) == Fate.APPLIED
            decided = refuse(
                added.where(taken).drop(FATE),
                known.state,
                key=node.key,
                stream_time=known.stream_time,
                history_retention=node.history_retention,
                chunk=self.chunk,
            )
            added = union(decided, added.where(~taken))
        return aggregate(added, known.state, key=node.key, aggregates=aggregates)

    def state_after(self, rows: DataFrame, known: Known) -> DataFrame:
        return state_after(rows, known.state, key=self.node.key)


def entries(
    records: DataFrame, *, key: Sequence[str], inputs: Sequence[tuple[str, str]], rekeyed: bool
) -> DataFrame:
    """What each record adds to its group.

    Plan: none but projections.

    Args:
        records: log rows in order, ``key columns`` and ``partition`` already the group's.
        inputs: (name, SQL expression) of what an aggregate needs of a record.
        rekeyed: whether the records were brought to this key: then a null key is not counted.

    Returns:
        ``key columns, _take`` (null), ``_add, timestamp, partition, _fate, ORDER, _turn``: ``applied``;
        ``dropped`` without a value or a key; ``no_result`` without a key where they were rekeyed.

    Source: FORMAT 4.12.4-4.12.6; merge-then-count-counts-both-and-drops-nulls,
    select-key-then-count-null-keys-vanish.
    """
    row = F.struct(*[F.expr(sql).alias(name) for name, sql in inputs])
    nothing = Fate.NO_RESULT if rekeyed else Fate.DROPPED
    fate = F.when(~has_key(key), nothing).when(F.col(IS_TOMBSTONE), Fate.DROPPED)
    return records.select(
        *key,
        F.when(F.lit(False), row).alias(TAKE),
        row.alias(ADD),
        TIMESTAMP,
        PARTITION,
        fate.otherwise(Fate.APPLIED).alias(FATE),
        *ORDER,
        F.lit(0).alias(TURN),
    )
