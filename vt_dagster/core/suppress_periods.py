"""The periods of suppress with a time limit: each starts depending on the end of the previous one.

A Python kernel over sorted Arrow batches therefore computes them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pyarrow  # pyright: ignore[reportMissingTypeStubs]
from pyspark import cloudpickle
from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from pyspark.sql.types import BooleanType, LongType, StructType

from vt_dagster.columns import ORDER, PARTITION
from vt_dagster.core.arrival_order import gathered
from vt_dagster.core.stream_time import STREAM_TIME
from vt_dagster.core.suppress_emit_early import AT, FRESH, PLACE, RANK, RELEASED

pa: Any = pyarrow

# Pickle by value: Spark's workers need not have this package installed.
cast(Any, cloudpickle).register_pickle_by_value(sys.modules[__name__])

LATE = "_late"
_FIRST, _LAST, _PERIOD, _AFTER = "_first", "_last", "_period", "_after"


def split_into_periods(
    rows: DataFrame, *, key: Sequence[str], kept: Sequence[str], period: Column, after: Column
) -> DataFrame:
    """Splits each key's updates into periods; returns the last update of each, emitted or waiting.

    Plan: one shuffle and sort by key; a Python kernel, with one row of one key in memory.

    Args:
        rows: updates and waiting rows: ``kept, ORDER, _fresh, _at``, and ``_stream_time`` before each
            update (epoch microseconds).
        period: the length of a period (microseconds); after: stream time at the end of the run (epoch
            microseconds).

    Returns:
        ``kept, ORDER, _released, _late, _place, _rank``: ``_late`` = due on arrival.

    Source: FORMAT 4.11.1, 4.11.2; kip328-timer-not-restarted.
    """
    group, order = [PARTITION, *key], [FRESH, *ORDER]
    in_order = W.partitionBy(*group).orderBy(*order)
    grouped = (
        gathered(rows, group)
        .withColumns({_PERIOD: period, _AFTER: after})
        .withColumn(_FIRST, F.row_number().over(in_order) == 1)
        .withColumn(_LAST, F.lead(F.lit(1)).over(in_order).isNull())
        .sortWithinPartitions(*group, *order)
    )
    passed = [*kept, *ORDER]
    schema = StructType([grouped.schema[c] for c in passed]).add(RELEASED, BooleanType())
    schema = schema.add(LATE, BooleanType()).add(PLACE, LongType()).add(RANK, LongType())

    def kernel(batches: Iterator[Any]) -> Iterator[Any]:
        return _periods(batches, passed)

    return cast(Any, grouped).mapInArrow(kernel, schema)


class _Key:
    """The place of one key in the buffer."""

    def __init__(self) -> None:
        self.row: int | None = None
        """The last update, as its row in the current batch; None = no update waits."""
        self.place = 0

    def put(self, row: int, at: int) -> bool:
        """Stores an update; returns whether it opens a period."""
        opens = self.row is None
        if opens:
            self.place = at
        self.row = row
        return opens

    def due(self, stream_time: int | None, period: int) -> bool:
        """Returns whether the waiting update is due at a stream time."""
        return self.row is not None and stream_time is not None and self.place + period <= stream_time

    def leave(self, released: bool, late: bool = False, rank: int = 0) -> tuple[Any, ...]:
        """Removes the waiting update and returns (row, released, late, place, rank)."""
        left = (self.row, released, late, self.place, rank if late else self.place)
        self.row = None
        return left


def _periods(batches: Iterator[Any], passed: Sequence[str]) -> Iterator[Any]:
    key, carried = _Key(), None
    wanted = [FRESH, _FIRST, _LAST, AT, STREAM_TIME, _PERIOD, _AFTER]
    for batch in batches:
        rows, start = pa.Table.from_batches([batch]), 0
        if carried is not None:
            # The update that waits at the end of a batch is the first row of the next batch.
            rows, start, key.row = pa.concat_tables([carried, rows]).combine_chunks(), 1, 0
        out: list[tuple[Any, ...]] = []
        taken = zip(*[batch.column(c).to_pylist() for c in wanted], strict=True)
        for row, (fresh, first, last, at, seen, period, after) in enumerate(taken, start):
            if first:
                key = _Key()
            if fresh and key.due(seen, period):
                out.append(key.leave(True))
            opens = key.put(row, at)
            now = at if seen is None else max(at, seen)
            if fresh and key.due(now, period):
                out.append(key.leave(True, opens, now - period))
            if last and key.row is not None:
                out.append(key.leave(key.due(after, period)))
        carried = None if key.row is None else rows.take(pa.array([key.row]))
        result = rows.select(list(passed)).take(pa.array([o[0] for o in out], pa.int64()))
        for i, name in enumerate((RELEASED, LATE, PLACE, RANK), 1):
            kind = pa.bool_() if i < 3 else pa.int64()
            result = result.append_column(name, pa.array([o[i] for o in out], kind))
        yield from result.to_batches()
