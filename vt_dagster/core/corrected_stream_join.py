"""Corrected stream-stream join: a later match retracts the unmatched row of a record.

It is a stream-stream join whose records may be late by up to the promise (``corrected_for``). A record
without a match is emitted as unmatched after its grace period, which is shorter. Until the promise
expires the record is kept in the state, marked as emitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType

from vt_dagster.columns import (
    CAUSE,
    FINAL,
    IS_LATE,
    IS_LATEST,
    IS_TOMBSTONE,
    LEFT_OFFSET,
    LEFT_PARTITION,
    OFFSET,
    OLD,
    ORDER,
    OUTCOME,
    PARTITION,
    REVISION,
    RIGHT_OFFSET,
    RIGHT_PARTITION,
    TIMESTAMP,
)
from vt_dagster.core.arrival_order import Outcome, micros, with_columns
from vt_dagster.core.corrected_join import CORRECTED
from vt_dagster.core.log_columns import POSITION_TYPE, value_columns
from vt_dagster.core.processor import Counts
from vt_dagster.core.run_context import Input, RunContext
from vt_dagster.core.source_records import POSITION, RAW, REASON, SOURCE
from vt_dagster.core.stream_join_base import LOWEST, VALID, in_micros_at, null_long
from vt_dagster.core.stream_stream_join import (
    MATCHED,
    PHASE,
    RANK,
    UNMATCHED,
    StreamStreamJoinProcessor,
)
from vt_dagster.core.table_changes import match_names
from vt_dagster.core.window_match import (
    AT,
    END,
    FROM,
    HORIZON,
    LATE,
    LEFT,
    ONCE,
    RIGHT,
    SIDE,
    THERE,
    found_by,
    tile_width,
)
from vt_dagster.topology.operators import CorrectedStreamJoin

_NEVER = 1 << 62
"""Later than any time."""
_EMITTED = "_said"
"""Whether the unmatched row of a record has been emitted."""
_PLACES = ((LEFT_PARTITION, LEFT_OFFSET), (RIGHT_PARTITION, RIGHT_OFFSET))
_KINDS = {LEFT_PARTITION: "int", LEFT_OFFSET: "long", RIGHT_PARTITION: "int", RIGHT_OFFSET: "long"}
_ROW = "_row"


class CorrectedStreamJoinProcessor(StreamStreamJoinProcessor):
    """Emits unmatched records after the grace period, and retracts them if a match arrives later."""

    quarantined_outcomes = (Outcome.TOO_LATE,)
    shown_counts = ("in", "out", UNMATCHED, "late", "dropped", Outcome.WAITING, CORRECTED)

    @property
    def operator(self) -> CorrectedStreamJoin:
        operator: Any = self.node.operator
        return operator

    def watermarks(
        self, found: Sequence[Any], before: Mapping[str, Mapping[int, int]]
    ) -> dict[str, dict[int, int]]:
        """Returns the watermarks of the join, and the time before which rows are final.

        That time never decreases, even if ``corrected_for`` becomes longer.
        """
        final = dict(before.get(FINAL, {}))
        for row in found:
            if row["time"] is not None:
                p = row[PARTITION]
                at = row["time"] - in_micros_at(self.operator.promise, p) - self._lookahead_at(p)
                final[p] = max(final.get(p, at), at)
        return {**super().watermarks(found, before), FINAL: final}

    def _lookahead_at(self, partition: int) -> int:
        return max(in_micros_at(ahead, partition) for ahead in self.lookahead)

    def advance_if_none_late(
        self,
        found: Sequence[Any],
        before: Mapping[int, int],
        watermarks: Mapping[str, Mapping[int, int]],
    ) -> list[dict[str, Any]] | None:
        final = watermarks.get(FINAL, {})
        for row in found:
            p = row[PARTITION]
            if p in final and row["oldest"] < final[p] + self._lookahead_at(p):
                return None
        return super().advance_if_none_late(found, before, watermarks)

    def with_lateness(self, rows: DataFrame, context: RunContext) -> DataFrame:
        # A late record finds no match, even if it is late only by an earlier, shorter
        # ``corrected_for``: a match would contradict rows that are already final.
        ahead = F.greatest(*map(micros, self.lookahead))
        edge = context.watermarks.get(FINAL, null_long()) + ahead
        again = F.coalesce(F.col(AT) < edge, F.lit(False))
        told = super().with_lateness(rows, context)
        return told.withColumns({LATE: F.col(LATE) | again, HORIZON: F.lit(_NEVER)})

    def results(self, inputs: Sequence[Input], context: RunContext) -> DataFrame:
        return self.process(self.in_order(inputs), inputs, context)

    # -- unmatched rows and their retraction -----------------------------------------------------

    def unmatched_rows(self, rows: DataFrame, place: int, context: RunContext) -> list[DataFrame]:
        """Returns unmatched records: those to emit now, and those that may still find a match."""
        if _EMITTED not in rows.columns:
            rows = rows.withColumn(_EMITTED, F.lit(False))
        said = F.coalesce(F.col(_EMITTED), F.lit(False))
        over = F.col(AT) + micros(self.lookahead[place]) + micros(self.operator.grace)
        leaves = ~said & (F.col(ONCE) | self.is_over(over, context))
        kept = rows.where(~F.col(ONCE) & ~self.is_over(F.col(END), context)).select(
            *(SIDE, PARTITION, F.col(OFFSET).alias(FROM), F.lit(Outcome.KEPT).alias(OUTCOME)),
            (said | leaves).alias(_EMITTED),
        )
        return [self.leaving(rows.where(leaves), F.col(ONCE), place), kept]

    def retractions(
        self, earlier: DataFrame | None, others: DataFrame, place: int, context: RunContext
    ) -> list[DataFrame]:
        """Returns the tombstones of unmatched rows, each caused by the first match in time.

        Plan: pairs of emitted unmatched records with the run's records of the other side, as in
        ``window_match.matches``, and one shuffle of these pairs by position.
        """
        there = self.pending_unmatched(earlier, place, context)
        if there is None:
            return []
        on, operator = match_names(self.consumed[0].key), self.operator
        width = tile_width(operator.before, operator.after)
        said = there.where(_EMITTED).drop(_EMITTED)
        found = found_by(others, said, 1 - place, on=on, width=width)
        first = F.min_by(F.struct(*found.columns), F.struct(*ORDER))
        row = found.groupBy(*_PLACES[place]).agg(first.alias(_ROW)).select(f"{_ROW}.*")
        return [self._end(row, place)]

    def _end(self, pairs: DataFrame, place: int) -> DataFrame:
        """Returns the tombstones of records' unmatched rows, from pairs of record and match."""
        (partition, offset), cause = _PLACES[place], _PLACES[1 - place]
        alone = with_columns(pairs, self._record_alone(pairs, place))
        at, name = F.timestamp_micros(THERE), F.lit(self.consumed[1 - place].name)
        by = F.struct(name, *map(F.col, cause)).cast(POSITION_TYPE)
        chosen = self.operator.projection().columns
        nothing = [F.when(F.lit(False), F.expr(sql)).alias(name) for name, sql in chosen]
        ends = {
            TIMESTAMP: at,
            PARTITION: F.col(partition),
            IS_TOMBSTONE: F.lit(True),
            IS_LATE: F.lit(False),
            PHASE: F.lit(1),
            THERE: F.lit(LOWEST),
            RANK: F.lit(0),
            FROM: F.col(offset),
            MATCHED: F.lit(True),
            OUTCOME: F.lit(Outcome.APPLIED),
        }
        told = {OLD: self._row(at), REVISION: F.lit(1), CAUSE: by}
        return alone.select(
            *nothing, *ORDER, *_named(ends), *_named(self._besides(place, partition, offset) | told)
        )

    def _record_alone(self, pairs: DataFrame, place: int) -> dict[str, Column]:
        """Returns both sides of a pair as in one record's unmatched row: the other side is null."""

        def only(side: str, names: Sequence[str]) -> Column:
            kind: Any = pairs.schema[side].dataType
            of_side = F.col(side)
            fields = {
                f.name: of_side.getField(f.name) if f.name in names else _null(f.dataType) for f in kind
            }
            return F.struct(*_named(fields))

        if place == 1:
            return {LEFT: only(LEFT, self.consumed[0].key)}
        return {RIGHT: _null(pairs.schema[RIGHT].dataType)}

    def extra_columns(self, matched: bool) -> list[Column]:
        if matched:
            places = {name: F.col(name) for names in _PLACES for name in names}
            return _named(places | self._new())
        one, other = (self._besides(i, PARTITION, FROM) for i in (0, 1))
        of_left = F.col(SIDE) == 0
        places = {n: F.when(of_left, one[n]).otherwise(other[n]) for names in _PLACES for n in names}
        return _named(places | self._new())

    def _besides(self, place: int, partition: str, offset: str) -> dict[str, Column]:
        """Returns the key of a record's unmatched row, and ``is_latest`` (true)."""
        mine, other = _PLACES[place], _PLACES[1 - place]
        values = (F.col(partition), F.col(offset), F.lit(-1), F.lit(-1))
        key = dict(zip((*mine, *other), values, strict=True))
        return {**{name: c.cast(_KINDS[name]) for name, c in key.items()}, IS_LATEST: F.lit(True)}

    def _new(self) -> dict[str, Column]:
        nothing = F.when(F.lit(False), self._row(F.timestamp_micros(AT)))
        told = {OLD: nothing, REVISION: F.lit(0), CAUSE: _null(POSITION_TYPE)}
        return {IS_LATEST: F.lit(True), **told}

    def _row(self, at: Column) -> Column:
        """Returns a row's values and timestamp, nullable: otherwise Arrow cannot write a null
        struct."""
        values, there = value_columns(self.node), F.col(PARTITION).isNotNull()
        chosen = {name: F.expr(sql) for name, sql in self.operator.projection().columns}
        told = {name: F.when(there, chosen[name]) for name in values}
        return F.struct(*_named({**told, TIMESTAMP: at}))

    # -- state and counts ------------------------------------------------------------------------

    def rejected(self, new: DataFrame) -> DataFrame:
        """Returns unusable records (dropped) and late ones (quarantined, with their position)."""
        outcome = F.when(self.is_unusable, Outcome.DROPPED).when(
            F.col(LATE) & F.col(VALID), Outcome.TOO_LATE
        )
        names = [node.name for node in self.consumed]
        place = {
            REASON: F.lit(Outcome.TOO_LATE),
            SOURCE: F.when(F.col(SIDE) == 0, names[0]).otherwise(names[1]),
            POSITION: F.col(OFFSET),
            RAW: F.lit(None).cast("string"),
            TIMESTAMP: F.timestamp_micros(AT),
        }
        rows = new.select(PARTITION, outcome.alias(OUTCOME), *_named(place))
        return rows.where(F.col(OUTCOME).isNotNull())

    def unmatched_state(self, state: DataFrame, place: int) -> DataFrame:
        return state.where(F.col(SIDE) == place).select(PARTITION, F.col(FROM).alias(OFFSET), _EMITTED)

    def state_after(self, rows: DataFrame, context: RunContext) -> DataFrame | None:
        return rows.where(F.col(OUTCOME) == Outcome.KEPT).select(SIDE, PARTITION, FROM, _EMITTED)

    def state_after_erase(self, state: DataFrame, erased: DataFrame) -> DataFrame:
        """Removes records whose unmatched row is erased: there is no row left to retract."""
        rows = erased.where((F.col(LEFT_OFFSET) < 0) | (F.col(RIGHT_OFFSET) < 0))
        of_left = F.col(RIGHT_OFFSET) < 0
        (left, left_from), (right, right_from) = _PLACES
        gone = rows.select(
            F.when(of_left, 0).otherwise(1).alias(SIDE),
            F.when(of_left, F.col(left)).otherwise(F.col(right)).alias(PARTITION),
            F.when(of_left, F.col(left_from)).otherwise(F.col(right_from)).alias(FROM),
        )
        return state.join(gone, [SIDE, PARTITION, FROM], "left_anti").select(state.columns)

    def waiting(
        self, logs: Sequence[DataFrame], emitted_up_to: Mapping[int, int], state: DataFrame | None
    ) -> DataFrame:
        waits = None if state is None else state.where(~F.col(_EMITTED))
        return super().waiting(logs, emitted_up_to, waits)

    def tallies(self, columns: Sequence[str]) -> dict[str, Column]:
        return {
            UNMATCHED: F.count_if(~F.col(MATCHED)),
            Outcome.WAITING: F.count_if((F.col(OUTCOME) == Outcome.KEPT) & ~F.col(_EMITTED)),
            CORRECTED: F.count_if((F.col(OUTCOME) == Outcome.APPLIED) & (F.col(REVISION) > 0)),
        }

    def counts(self, taken: int, found: Counts, judged: Counts) -> dict[str, int]:
        told = (UNMATCHED, Outcome.DROPPED, Outcome.WAITING, CORRECTED)
        counts = {"in": taken, "out": found[Outcome.APPLIED], **{name: found[name] for name in told}}
        return {**counts, Outcome.LATE: found[Outcome.TOO_LATE]}


def _named(told: Mapping[str, Column]) -> list[Column]:
    return [c.alias(name) for name, c in told.items()]


def _null(kind: DataType) -> Column:
    return F.lit(None).cast(kind)
