"""Stream-stream join: joins records of two streams that are close to each other in time.

The records that later ones may match are a range of the two logs; they are not stored again. A run
reads the part of that range that its new records can match. The unmatched records are kept from run to
run, as offsets only: whether a late record has found a match depends on the order of arrival, which two
logs do not share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from vt_dagster.columns import (
    ARRIVAL,
    HOME,
    INPUT,
    IS_LATE,
    IS_TOMBSTONE,
    OFFSET,
    ORDER,
    OUTCOME,
    PARTITION,
    SEQUENCE,
    TIMESTAMP,
)
from vt_dagster.core.arrival_order import Outcome, hour_of_arrival, union, with_columns
from vt_dagster.core.processor import Counts
from vt_dagster.core.run_context import Input, RunContext
from vt_dagster.core.stream_join_base import (
    EXPIRED,
    LOOK_WATERMARK,
    SIDES,
    VALID,
    StreamJoinProcessor,
    null_long,
)
from vt_dagster.core.table_changes import columns, match_names
from vt_dagster.core.window_match import (
    AT,
    END,
    FROM,
    LATE,
    LEFT,
    NEW,
    ONCE,
    SIDE,
    THERE,
    matches,
    tile_width,
    without_match,
)

PHASE, RANK = "_phase", "_rank"
UNMATCHED, MATCHED = "unmatched", "_matched"
_FIRST_HOUR = 1 << 40
"""More hours than the range of timestamps has."""


class StreamStreamJoinProcessor(StreamJoinProcessor):
    """Computes matches (``window_match.matches``) and unmatched records, and when the latter are
    emitted.

    A record with a key and a value whose timestamp is stream time emits the waiting unmatched records
    up to that time, before its own matches. A run therefore emits them first.

    Source: FORMAT 4.13.
    """

    drops_late = False
    persists_rows = True
    shown_counts = ("in", "out", UNMATCHED, "late", "dropped", Outcome.WAITING)

    # -- results ---------------------------------------------------------------------------------

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        new = self.with_lateness(self.with_largest_times(rows, context), context)
        once = (
            context.none_late
            and not self.preserved_sides
            and all(one.earlier is None for one in inputs)
        )
        if context.persist_rows is not None and not once:
            new = context.persist_rows(new)
        earlier = [self._earlier(one, i, new.schema) for i, one in enumerate(inputs)]
        sides = [new.where(F.col(VALID) & (F.col(SIDE) == i)) for i in (0, 1)]
        on, width = (
            match_names(self.consumed[0].key),
            tile_width(self.operator.before, self.operator.after),
        )
        found = self._results(matches(sides, earlier, on=on, width=width).withColumn(PHASE, F.lit(1)))
        parts = [found, self.rejected(new)]
        for i in self.preserved_sides:
            records = union(sides[i], self.pending_unmatched(earlier[i], i, context))
            alone = without_match(records, sides[1 - i], earlier[1 - i], on=on, width=width)
            parts += [*self.unmatched_rows(alone, i, context), self._keyless(new, i)]
            parts += self.retractions(earlier[i], sides[1 - i], i, context)
        return reduce(union, parts)

    def _earlier(self, one: Input, place: int, like: StructType) -> DataFrame | None:
        """Returns records of earlier runs, with the columns of new ones."""
        if one.earlier is None:
            return None
        rows = self.with_window(self.side_rows(one.earlier, place)).where(VALID)
        there = set(rows.columns)
        told = {NEW: F.lit(False), ONCE: F.lit(False)}
        missing = {
            f.name: told.get(f.name, F.lit(None).cast(f.dataType))
            for f in like.fields
            if f.name not in there
        }
        return with_columns(rows, missing).select(*[F.col(f"`{c}`") for c in like.names])

    def pending_unmatched(
        self, earlier: DataFrame | None, place: int, context: RunContext
    ) -> DataFrame | None:
        """Returns records of earlier runs that may still find their first match."""
        if earlier is None or context.state is None:
            return None
        kept = self.unmatched_state(context.state, place)
        return earlier.join(kept, [PARTITION, OFFSET])

    def unmatched_rows(self, rows: DataFrame, place: int, context: RunContext) -> list[DataFrame]:
        """Returns unmatched records: those to emit, and those that still wait for a match."""
        over = self.is_over(F.col(END), context)
        wait = rows.where(~F.col(ONCE) & ~over).select(
            SIDE, PARTITION, F.col(OFFSET).alias(FROM), F.lit(Outcome.KEPT).alias(OUTCOME)
        )
        return [self.leaving(rows.where(F.col(ONCE) | over), F.col(ONCE), place), wait]

    def is_over(self, moment: Column, context: RunContext) -> Column:
        """Returns whether stream time is past a moment when the run emits unmatched records."""
        return F.coalesce(
            moment < context.watermarks_after.get(LOOK_WATERMARK, null_long()), F.lit(False)
        )

    def leaving(self, rows: DataFrame, once: Column, place: int) -> DataFrame:
        """Returns the results of unmatched records.

        Args:
            once: records emitted on arrival; the others are emitted first of all, by time.
        """
        told = rows.withColumns({PHASE: F.when(once, 1).otherwise(0), FROM: F.col(OFFSET)})
        first = {c: F.when(F.col(PHASE) == 0, 0).otherwise(F.col(c)) for c in (INPUT, HOME, SEQUENCE)}
        first[ARRIVAL] = F.when(F.col(PHASE) == 0, F.col(AT)).otherwise(F.col(ARRIVAL))
        return self._results(self.with_nothing(with_columns(told, first), place), matched=False)

    def retractions(
        self, earlier: DataFrame | None, others: DataFrame, place: int, context: RunContext
    ) -> list[DataFrame]:
        """Returns retractions of unmatched rows; this join has none."""
        return []

    def _keyless(self, new: DataFrame, place: int) -> DataFrame:
        """Emits records of a preserved side with a value but no key: at once, unmatched."""
        rows = new.where((F.col(SIDE) == place) & ~F.col(VALID) & ~F.col(IS_TOMBSTONE))
        return self.leaving(rows, F.lit(True), place)

    def with_nothing(self, rows: DataFrame, place: int) -> DataFrame:
        """Adds a left side that contains only the key, for unmatched records of the right side."""
        rows = rows.withColumn(THERE, F.lit(0).cast("long"))
        if place == 0:
            return rows
        key = self.consumed[0].key
        on = dict(zip(key, match_names(key), strict=True))
        kind = rows.schema[LEFT].dataType
        assert isinstance(kind, StructType)
        fields = [
            F.col(on[f.name]) if f.name in on else F.lit(None).cast(f.dataType) for f in kind.fields
        ]
        alone = F.struct(*[c.alias(f.name) for c, f in zip(fields, kind.fields, strict=True)])
        return rows.withColumn(LEFT, alone)

    def _results(self, rows: DataFrame, matched: bool = True) -> DataFrame:
        """Returns the log's columns and the columns of the result order."""
        place = F.lit(0) if matched else F.lit(1) - F.col(SIDE)
        chosen = self.operator.projection().columns
        return rows.select(
            *[F.expr(expression).alias(name) for name, expression in chosen],
            F.timestamp_micros(AT).alias(TIMESTAMP),
            PARTITION,
            F.lit(False).alias(IS_TOMBSTONE),
            F.col(LATE).alias(IS_LATE) if matched else F.coalesce(LATE, F.lit(False)).alias(IS_LATE),
            *ORDER,
            F.col(PHASE).cast("int").alias(PHASE),
            THERE,
            place.alias(RANK),
            FROM,
            F.lit(matched).alias(MATCHED),
            F.lit(Outcome.APPLIED).alias(OUTCOME),
            *self.extra_columns(matched),
        )

    def extra_columns(self, matched: bool) -> list[Column]:
        """Returns additional columns of a result."""
        return []

    @property
    def is_unusable(self) -> Column:
        """Whether a record can have no result: it lacks a key or a value."""
        alone = F.lit(False)
        for i in self.preserved_sides:
            alone = alone | ((F.col(SIDE) == i) & ~F.col(IS_TOMBSTONE))
        return ~F.col(VALID) & ~alone

    def rejected(self, new: DataFrame) -> DataFrame:
        """Returns the records to count: unusable ones and those too old for any later match (dropped),
        and other late ones."""
        dropped = F.col(EXPIRED) | self.is_unusable
        outcome = F.when(dropped, Outcome.DROPPED).when(F.col(LATE) & F.col(VALID), Outcome.LATE)
        return new.select(PARTITION, outcome.alias(OUTCOME)).where(F.col(OUTCOME).isNotNull())

    def state_after(self, rows: DataFrame, context: RunContext) -> DataFrame | None:
        if not self.preserved_sides:
            return None
        return rows.where(F.col(OUTCOME) == Outcome.KEPT).select(SIDE, PARTITION, FROM)

    def waiting(
        self, logs: Sequence[DataFrame], emitted_up_to: Mapping[int, int], state: DataFrame | None
    ) -> DataFrame:
        """Returns the unmatched records that may still find a match: ``key columns`` (the left one's),
        ``timestamp, partition, offset, side``."""
        key, found = self.consumed[0].key, list[DataFrame]()
        for place, (log, node) in enumerate(zip(logs, self.consumed, strict=True)):
            named = [c.alias(k) for c, k in zip(columns(node.key), key, strict=True)]
            there = F.lit(SIDES[place]).alias("side")
            rows = log.select(*named, TIMESTAMP, PARTITION, OFFSET, there)
            kept = None if state is None else self.unmatched_state(state, place)
            on = [PARTITION, OFFSET]
            found.append(rows.limit(0) if kept is None else rows.join(kept, on, "left_semi"))
        return reduce(DataFrame.unionByName, found)

    def unmatched_state(self, state: DataFrame, place: int) -> DataFrame:
        return state.where(F.col(SIDE) == place).select(PARTITION, F.col(FROM).alias(OFFSET))

    # -- order and counts ------------------------------------------------------------------------

    @property
    def result_order(self) -> list[Column]:
        """Unmatched records by time, right before left, key, arrival; then matches by the arriving
        record, the time of its match, and that match's arrival."""
        order = (PHASE, *ORDER, THERE, RANK, *self.node.key, FROM)
        return [F.col(f"`{c}`") for c in order]

    def result_chunk(self, single_task: bool) -> Column | None:
        if single_task:
            return None
        return hour_of_arrival() + F.col(PHASE) * _FIRST_HOUR

    def tallies(self, columns: Sequence[str]) -> dict[str, Column]:
        return {
            UNMATCHED: F.count_if(~F.col(MATCHED)),
            Outcome.WAITING: F.count_if(F.col(OUTCOME) == Outcome.KEPT),
        }

    def counts(self, taken: int, found: Counts, judged: Counts) -> dict[str, int]:
        told = (UNMATCHED, Outcome.LATE, Outcome.DROPPED, Outcome.WAITING)
        return {"in": taken, "out": found[Outcome.APPLIED], **{name: found[name] for name in told}}
