"""The input of a stream-stream join: the records of both sides with their times and lateness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import reduce
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import ARRIVAL, IS_TOMBSTONE, OFFSET, ORDER, PARTITION, TIMESTAMP
from vt_dagster.core.arrival_order import micros, union, with_columns
from vt_dagster.core.grace_buffer import moves_stream_time
from vt_dagster.core.largest_times import largest_by_chunk, largest_if_none_late, with_largest
from vt_dagster.core.log_columns import value_columns
from vt_dagster.core.processor import Processor
from vt_dagster.core.run_context import Input, RunContext
from vt_dagster.core.table_changes import columns, match_columns
from vt_dagster.core.window_match import (
    AT,
    END,
    HIGH,
    HORIZON,
    LATE,
    LEFT,
    LOOK,
    LOW,
    NEW,
    NOW,
    ONCE,
    RIGHT,
    SIDE,
)
from vt_dagster.topology.durations import Duration, length_at
from vt_dagster.topology.operators import StreamStreamJoin

SIDES = (LEFT, RIGHT)
OPEN, LOOK_WATERMARK = "open", "look"
LOWEST = -62_135_596_800_000_000
"""The year 1: no record is earlier."""
VALID, EXPIRED = "_valid", "_expired"
_TIMES = {"_left": LEFT, "_right": RIGHT, LOOK: LOOK_WATERMARK}
_SEGMENT = 60_000


class StreamJoinProcessor(Processor[StreamStreamJoin]):
    """The times of a join of two streams."""

    merges = True
    has_stream_time = True

    @property
    def bounded(self) -> bool:
        return False

    @property
    def preserved_sides(self) -> tuple[int, ...]:
        """The sides whose records are emitted without a match if they have none."""
        return {"inner": (), "left": (0,), "outer": (0, 1)}[self.operator.kind]

    @property
    def lookahead(self) -> tuple[Duration, Duration]:
        """How far a match may lie after a record of the left side, and of the right side."""
        return self.operator.after, self.operator.before

    def rescan_from(
        self,
        place: int,
        stream_time: Mapping[int, int],
        emitted_up_to: Mapping[int, int],
        watermarks: Mapping[str, Mapping[int, int]],
    ) -> int | None:
        operator, ahead = self.operator, self.lookahead[place]
        own, let_go = watermarks.get(SIDES[place], {}), watermarks.get(OPEN, {})
        found: list[int] = []
        for p, now in stream_time.items():
            # What a new record in time may match, what a late record may match, and what is still
            # unmatched.
            found.append(now - in_micros_at(operator.promise, p) - in_micros_at(ahead, p) - 1)
            if p in own:
                found.append(own[p] - in_micros_at(operator.reach, p))
            if p in let_go and place in self.preserved_sides:
                found.append(let_go[p] - in_micros_at(ahead, p) - 1)
        return max(LOWEST, min(found)) if found else None

    def stream_time_advance(self, inputs: Sequence[Input], context: RunContext) -> DataFrame:
        rows = self.with_largest_times(self.in_order(inputs), context, slim=True)
        newest = {told: F.max(name).alias(told) for name, told in {NOW: "time", **_TIMES}.items()}
        return rows.groupBy(PARTITION).agg(*newest.values())

    def lateness_bounds(self, inputs: Sequence[Input]) -> DataFrame | None:
        if self.single_task:
            return None
        rows = [self.side_rows(one.rows, i, slim=True) for i, one in enumerate(inputs)]
        return largest_by_chunk(reduce(union, rows), SIDE, AT, F.col(VALID))

    def advance_if_none_late(
        self,
        found: Sequence[Any],
        before: Mapping[int, int],
        watermarks: Mapping[str, Mapping[int, int]],
    ) -> list[dict[str, Any]] | None:
        promise = self.operator.promise
        newest = largest_if_none_late(found, SIDE, before, lambda p: in_micros_at(promise, p))
        if newest is None:
            return None
        rows: list[dict[str, Any]] = []
        for p, (now, of) in newest.items():
            look = max(of.values(), default=None)
            # If not equal, an unusable record has advanced stream time, and its position matters.
            if look != now:
                return None
            sides = {name: of.get(i) for i, name in enumerate(SIDES)}
            rows.append({PARTITION: p, "time": now, "look": look, **sides})
        return rows

    def watermarks(
        self, found: Sequence[Any], before: Mapping[str, Mapping[int, int]]
    ) -> dict[str, dict[int, int]]:
        watermarks = {name: dict(before.get(name, {})) for name in (LEFT, RIGHT, "look")}
        for row in found:
            for name, newest in watermarks.items():
                if row[name] is not None:
                    newest[row[PARTITION]] = row[name]
        seen = {*before.get(OPEN, {}), *(row[PARTITION] for row in found)}
        promise, look = self.operator.promise, watermarks["look"]
        let_go = {p: look[p] - in_micros_at(promise, p) if p in look else LOWEST for p in seen}
        return {**watermarks, OPEN: let_go}

    def with_largest_times(
        self, rows: Sequence[DataFrame], context: RunContext, slim: bool = False
    ) -> DataFrame:
        """Returns the new records of both sides with all times as of them.

        If no record is late, the times that only late records need are null.

        Args:
            slim: omits keys and values.
        """
        new = reduce(union, [self.side_rows(r, i, slim) for i, r in enumerate(rows)])
        # They are merged by the largest time so far of their own log: no earlier record has a larger
        # time.
        new = new.withColumn(NOW, F.greatest(F.col(ARRIVAL), F.unix_micros(context.stream_time)))
        if context.none_late:
            return with_columns(new, {name: null_long() for name in _TIMES})
        before = {name: context.watermarks.get(told, null_long()) for name, told in _TIMES.items()}
        look = F.when(F.col(VALID) & (F.col(AT) == F.col(NOW)), F.col(AT))
        moves = {LOOK: look}
        for i, name in enumerate(("_left", "_right")):
            moves[name] = F.when(F.col(VALID) & (F.col(SIDE) == i), F.col(AT))
        return with_largest(new, moves, before, self.chunk)

    def side_rows(self, rows: DataFrame, place: int, slim: bool = False) -> DataFrame:
        """Returns a side's rows under names common to both sides; the record itself is a struct."""
        node, operator = self.consumed[place], self.operator
        own = [*node.key, *value_columns(node), TIMESTAMP]
        used = {c for some in operator.lineage().values() for _, c in some} | {*node.key, TIMESTAMP}
        wanted = [c for c in own if c.lower() in {u.lower() for u in used}]
        valid = moves_stream_time(node.key)
        there = [F.unix_micros(TIMESTAMP).alias(AT), PARTITION, OFFSET, valid.alias(VALID)]
        order = [c for c in ORDER if c in rows.columns]
        return rows.select(
            F.lit(place).alias(SIDE),
            *([] if slim else match_columns(node.key)),
            *([] if slim else [F.struct(*columns(wanted)).alias(SIDES[place])]),
            *there,
            IS_TOMBSTONE,
            *order,
        )

    def with_window(self, rows: DataFrame) -> DataFrame:
        """Adds the bounds and the end of each record's window."""
        operator = self.operator
        before, after, promise = map(micros, (operator.before, operator.after, operator.promise))
        of_left = F.col(SIDE) == 0
        ahead = F.when(of_left, after).otherwise(before)
        back = F.when(of_left, before).otherwise(after)
        at = F.col(AT)
        return rows.withColumns({LOW: at - back, HIGH: at + ahead, END: at + ahead + promise})

    def with_lateness(self, rows: DataFrame, context: RunContext) -> DataFrame:
        """Adds the lateness of new records, and the range of matches of late ones."""
        once = F.col(END) < F.col(NOW)
        if context.none_late:
            no = F.lit(False)
            told = {NEW: F.lit(True), LATE: no, HORIZON: null_long(), ONCE: once, EXPIRED: no}
            return with_columns(self.with_window(rows), told)
        operator, at = self.operator, F.col(AT)
        reach, promise = micros(operator.reach), micros(operator.promise)
        of_left = F.col(SIDE) == 0
        own = F.when(of_left, F.col("_left")).otherwise(F.col("_right"))
        other = F.when(of_left, F.col("_right")).otherwise(F.col("_left"))
        segment = F.greatest(F.lit(_SEGMENT), F.call_function("div", reach, F.lit(2000))) * 1000
        oldest = F.call_function("div", F.greatest(F.lit(0), own - reach), segment)
        return self.with_window(rows).withColumns(
            {
                NEW: F.lit(True),
                LATE: at < F.col(NOW) - promise,
                HORIZON: other - reach,
                ONCE: once,
                EXPIRED: F.col(VALID) & (F.call_function("div", at, segment) < oldest),
            }
        )


def null_long() -> Column:
    return F.lit(None).cast("long")


def in_micros_at(value: Duration, partition: int) -> int:
    return length_at(value, partition) // timedelta(microseconds=1)
