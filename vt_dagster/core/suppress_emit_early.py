"""suppress with a limit and ``emit_early``: emits after each update, as in Kafka Streams.

A record may give several updates (a merged session and its tombstone, sliding windows). Which of them
leave a full buffer, with which value and in which order, depends on each update and on all keys of a
partition. A Python kernel therefore processes the updates of one partition in order. It holds in memory
the updates that the limit allows to wait, and one batch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, cast

import pyarrow  # pyright: ignore[reportMissingTypeStubs]
from pyspark import cloudpickle
from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from pyspark.sql.types import BooleanType, LongType, StructType

from vt_dagster.columns import ORDER, PARTITION
from vt_dagster.core.arrival_order import by_partition, gathered
from vt_dagster.core.stream_time import STREAM_TIME
from vt_dagster.topology.operators import Limit

pa: Any = pyarrow

# Pickle by value: Spark's workers need not have this package installed.
cast(Any, cloudpickle).register_pickle_by_value(sys.modules[__name__])

FRESH, AT = "_fresh", "_at"
PLACE, RANK, RELEASED, NTH = "_place", "_rank", "_released", "_nth"
BYTES = "_bytes"
_KEY, _SIZE, _PERIOD, _RECORDS, _MOST_BYTES = "_key", "_size", "_period", "_records", "_most_bytes"
_FIRST, _LAST = "_first", "_last"
_TAKEN = (FRESH, _KEY, AT, _SIZE, STREAM_TIME, _PERIOD, _RECORDS, _MOST_BYTES, _FIRST, _LAST)


def emit_early(
    rows: DataFrame,
    *,
    kept: Sequence[str],
    turn: Sequence[str],
    period: Column,
    size: Column,
    max_records: Column,
    max_bytes: Column,
) -> DataFrame:
    """Emits, after each update, those that are due, and then those above the limit, oldest place first.

    Plan: one shuffle by partition and two sorts of its rows.

    Args:
        rows: updates and waiting rows, ``kept columns, partition, ORDER, _fresh, _at, _stream_time``;
            times are epoch microseconds. ``_fresh`` false: a waiting row, ``_at`` its place; true: an
            update, ``_at`` its timestamp, ``_stream_time`` T just before it.
        turn: the key columns, in the order in which keys of one place are emitted.
        max_records, max_bytes: null = no limit.

    Returns:
        ``kept columns, _released, _place, _rank, _nth`` of each emitted update, and of the last one of
        each key that waits at the end. Their order is ``_rank, _nth``: T, and a number.

    Source: FORMAT 4.11.1-4.11.3; kip328-keys-late, kip328-probe-keys-order-of-eviction.
    """
    in_order = W.partitionBy(PARTITION).orderBy(FRESH, *ORDER, AT, *turn)
    ordered = (
        gathered(rows, [PARTITION])
        .withColumn(_KEY, F.dense_rank().over(W.partitionBy(PARTITION).orderBy(*turn)).cast("long"))
        .withColumns({_SIZE: size.cast("long"), _PERIOD: period})
        .withColumns({_RECORDS: max_records.cast("long"), _MOST_BYTES: max_bytes.cast("long")})
        .withColumn(_FIRST, F.row_number().over(in_order) == 1)
        .withColumn(_LAST, F.lead(F.lit(1)).over(in_order).isNull())
        .sortWithinPartitions(PARTITION, FRESH, *ORDER, AT, *turn)
    )
    schema = StructType([ordered.schema[c] for c in kept]).add(RELEASED, BooleanType())
    schema = schema.add(PLACE, LongType()).add(RANK, LongType()).add(NTH, LongType())

    def kernel(batches: Iterator[Any]) -> Iterator[Any]:
        return _let_out(batches, kept)

    return cast(Any, ordered).mapInArrow(kernel, schema)


def most(limit: Limit) -> Column:
    """Returns the limit of the row's partition; null = none."""
    if limit is None or isinstance(limit, int):
        return F.lit(limit).cast("long")
    return by_partition(limit, "long")


@dataclass
class _Held:
    """The waiting update of one key: its place, its row in the current batch, its size in bytes."""

    place: int
    row: int
    size: int


@dataclass
class _Buffer:
    """The buffer of one partition: keys by place, then in their own order."""

    held: dict[int, _Held] = field(default_factory=dict[int, _Held])
    order: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    size: int = 0
    left: int = 0

    def put(self, key: int, at: int, row: int, size: int) -> None:
        """Stores an update, at the place of the waiting one if there is one."""
        was = self.held.get(key)
        if was is None:
            heappush(self.order, (at, key))
            self.held[key] = _Held(at, row, size)
        else:
            self.held[key] = _Held(was.place, row, size)
        self.size += size - (was.size if was else 0)

    def leave(self, rank: int, released: bool = True) -> tuple[Any, ...]:
        """Removes the first update: (row, released, place, rank, number)."""
        _, key = heappop(self.order)
        gone = self.held.pop(key)
        self.size -= gone.size
        self.left += 1
        return gone.row, released, gone.place, rank, self.left

    def full(self, records: int | None, size: int | None) -> bool:
        """Returns whether the buffer exceeds a limit."""
        return bool(self.held) and (
            (records is not None and len(self.held) > records)
            or (size is not None and self.size > size)
        )

    def carry(self) -> list[int]:
        """Returns the rows of waiting updates and renumbers them: they come first in the next batch."""
        rows = [one.row for one in self.held.values()]
        for place, one in enumerate(self.held.values()):
            one.row = place
        return rows


def _let_out(batches: Iterator[Any], kept: Sequence[str]) -> Iterator[Any]:
    buffer, carried = _Buffer(), None
    for batch in batches:
        rows, start = pa.Table.from_batches([batch]), 0
        if carried is not None:
            start = carried.num_rows
            rows = pa.concat_tables([carried, rows]).combine_chunks()
        out: list[tuple[Any, ...]] = []
        taken = zip(*[batch.column(c).to_pylist() for c in _TAKEN], strict=True)
        for row, one in enumerate(taken, start):
            fresh, key, at, size, seen, period, records, most, first, last = one
            if first:
                buffer = _Buffer()
            buffer.put(key, at, row, size)
            if fresh:
                now = at if seen is None else max(at, seen)
                while buffer.order and buffer.order[0][0] <= now - period:
                    out.append(buffer.leave(now))
                while buffer.full(records, most):
                    out.append(buffer.leave(now))
            while last and buffer.order:
                out.append(buffer.leave(0, False))
        result = rows.select(list(kept)).take(pa.array([o[0] for o in out], pa.int64()))
        for i, name in enumerate((RELEASED, PLACE, RANK, NTH), 1):
            kind = pa.bool_() if i == 1 else pa.int64()
            result = result.append_column(name, pa.array([o[i] for o in out], kind))
        yield from result.to_batches()
        carried = rows.take(pa.array(buffer.carry(), pa.int64()))
