"""``emit="per_run"``: emits the last update of each key in a run, like Kafka Streams' record cache.

No scenario covers it: they are recorded without a cache. The result is, bit for bit, the last of all
updates. Where a sum does not depend on the order of its terms, the other updates are not computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    IntegralType,
    StringType,
    TimestampNTZType,
    TimestampType,
)

from vt_dagster.columns import (
    ARRIVAL,
    HOME,
    INPUT,
    ORDER,
    OUTCOME,
    SEQUENCE,
    TURN,
)
from vt_dagster.core.arrival_order import Outcome, with_columns

_EXACT = (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    IntegralType,
    TimestampNTZType,
    TimestampType,
)
_ALONE = ("_alone_home", "_alone_sequence")
_HOMES = 1 << 16


def last_of_run(rows: DataFrame, key: Sequence[str]) -> DataFrame:
    """Suppresses all but the last update of each key.

    Plan: one shuffle and sort by key, which an aggregate has made already.
    """
    earlier = (F.col(OUTCOME) == Outcome.APPLIED) & ~is_last(key)
    outcome = F.when(earlier, Outcome.NO_RESULT).otherwise(F.col(OUTCOME))
    return rows.withColumn(OUTCOME, outcome)


def is_last(key: Sequence[str]) -> Column:
    """Returns whether a row is the last applied update of its group or key in this run."""
    in_order = W.partitionBy(*key).orderBy(*ORDER, TURN)
    so_far = in_order.rowsBetween(W.unboundedPreceding, W.currentRow)
    whole = in_order.rowsBetween(W.unboundedPreceding, W.unboundedFollowing)
    applied = F.col(OUTCOME) == Outcome.APPLIED
    updates = F.count(F.when(applied, 1))
    return applied & (updates.over(so_far) == updates.over(whole))


def is_exact(types: Sequence[DataType]) -> bool:
    """Returns whether sums, minima and maxima of these types are independent of the order of rows.

    Floating-point sums depend on it: they are made in order of the records, and the minimum of 0.0 and
    -0.0 is the one that comes first. Strings with a collation depend on it too.
    """
    return all(isinstance(t, _EXACT) or t == StringType() for t in types)


def folded(
    rows: DataFrame, by: Sequence[str], counts: Column, merged: Mapping[str, Column]
) -> DataFrame:
    """Aggregates the rows that count to one row per group; returns other rows unchanged.

    A group takes the position of its last update. If several inputs are merged, stream time and then
    the offset decide which update is last.

    Plan: one hash aggregate, before and after one shuffle by group.

    Args:
        rows: ``by, ORDER, _turn`` (0 or 1)``, …``, of a single input.
        counts: whether a row counts.
        merged: the aggregates of a group, by name.

    Returns:
        ``by, merged, ORDER, _turn``.
    """
    alone = [F.when(~counts, F.col(c)).alias(a) for c, a in zip((HOME, SEQUENCE), _ALONE, strict=True)]
    home, sequence = _ALONE
    made = rows.groupBy(*by, *alone).agg(
        *[column.alias(name) for name, column in merged.items()],
        F.max(ARRIVAL).alias(ARRIVAL),
        F.max((F.col(SEQUENCE) * 2 + F.col(TURN)) * _HOMES + F.col(HOME)).alias(SEQUENCE),
    )
    place = {
        INPUT: F.lit(0),
        HOME: F.coalesce(home, F.lit(0)),
        SEQUENCE: F.coalesce(sequence, SEQUENCE),
        TURN: F.lit(0),
    }
    return with_columns(made, place).drop(*_ALONE)
