"""Aggregates of a stream without windows: every record adds to what its key has so far."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import FATE, IS_TOMBSTONE, ORDER, PARTITION, TIMESTAMP, TURN
from vt_dagster.core.arrival import Fate, has_key, union
from vt_dagster.core.processor import Input, Known, Processor
from vt_dagster.core.records import home_of
from vt_dagster.core.table_aggregate import ADD, TAKE, aggregate, refuse, state_after
from vt_dagster.topology.model import VersionedTable
from vt_dagster.topology.operators import StreamAggregate


class StreamAggregateProcessor(Processor[StreamAggregate]):
    """See :func:`entries`, and ``refuse`` and ``aggregate`` of tables."""

    goes_forward = True

    @property
    def merges(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return bool(self.operator.group_key)

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], known: Known) -> DataFrame:
        operator, node = self.operator, self.node
        changes = entries(
            rows[0],
            key=operator.keys().columns,
            inputs=[(a.name, a.expression) for a in operator.parsed().accumulators],
            partition=home_of(node.key, node) if operator.group_key else F.col(PARTITION),
            regrouped=operator.regrouped,
        )
        if isinstance(node, VersionedTable):
            added = F.col(FATE) == Fate.APPLIED
            judged = refuse(
                changes.where(added).drop(FATE),
                known.state,
                key=node.key,
                stream_time=known.stream_time,
                history_retention=node.history_retention,
                chunk=self.chunk,
            )
            changes = union(judged, changes.where(~added))
        return aggregate(changes, known.state, key=node.key, aggregates=operator.parsed())

    def state_after(self, rows: DataFrame, known: Known) -> DataFrame:
        return state_after(rows, known.state, key=self.node.key)


def entries(
    records: DataFrame,
    *,
    key: Sequence[tuple[str, str]],
    inputs: Sequence[tuple[str, str]],
    partition: Column,
    regrouped: bool,
) -> DataFrame:
    """What each record adds to its key's group: a row of ``table_aggregate.entries``, with its fate.

    Plan: none but projections.

    Args:
        key: (name, SQL expression) of the group's key.
        inputs: (name, SQL expression) of what an aggregate needs of a record.
        partition: of the group, over its key columns.
        regrouped: whether records without a key are left out, not dropped and counted.

    Returns:
        ``group key columns, _take`` (null)``, _add, timestamp, partition, _fate, ORDER, _turn``.

    Source: FORMAT 4.12.4, 4.12.5.
    """
    add = F.struct(*[F.expr(sql).alias(name) for name, sql in inputs])
    rows = records.select(
        *[F.expr(sql).alias(name) for name, sql in key],
        F.when(F.lit(False), add).alias(TAKE),
        add.alias(ADD),
        TIMESTAMP,
        PARTITION,
        IS_TOMBSTONE,
        *ORDER,
        F.lit(0).alias(TURN),
    )
    keyed = has_key([name for name, _ in key])
    if regrouped:
        rows = rows.where(keyed)
    fate = F.when(~keyed | F.col(IS_TOMBSTONE), Fate.DROPPED).otherwise(Fate.APPLIED)
    return rows.withColumns({FATE: fate, PARTITION: partition}).drop(IS_TOMBSTONE)
