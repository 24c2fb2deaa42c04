"""Corrected join: a stream-table join that re-joins records when the table changes.

A record of the table changes its key's value from its timestamp to the next version of the key. The
stream records of that key and interval that an earlier run has joined are joined again. The run finds
them by key and time in the stream's log, in the range that its table records reach back to. The table's
record itself, which the run has read, is the new answer: no version is looked up. A run without table
records reads no such range and is a plain stream-table join.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import reduce
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster.columns import (
    ARRIVAL,
    CAUSE,
    FINAL,
    IS_LATEST,
    IS_TOMBSTONE,
    LEFT_OFFSET,
    OFFSET,
    OLD,
    OUTCOME,
    PARTITION,
    REVISION,
    TIMESTAMP,
)
from vt_dagster.core.affected_times import (
    ANSWER,
    BY,
    EDGE,
    FROM,
    TO,
    UNTIL,
    affected_times,
    same,
    with_row_of_key,
)
from vt_dagster.core.arrival_order import HOUR, Outcome, arrival_chunk, has_key, micros, union
from vt_dagster.core.as_of_join import FOUND
from vt_dagster.core.grace_buffer import moves_stream_time
from vt_dagster.core.log_columns import POSITION_TYPE, value_columns
from vt_dagster.core.processor import Counts
from vt_dagster.core.run_context import Input, Lookup, RunContext
from vt_dagster.core.source_records import POSITION, RAW, REASON, SOURCE
from vt_dagster.core.stream_table_join import MATCHED, StreamTableJoinProcessor, answered
from vt_dagster.core.table_changes import columns, match_names
from vt_dagster.errors import RefusedRecordsError
from vt_dagster.topology.model import Stream
from vt_dagster.topology.operators import CorrectedJoin, JoinKind

CORRECTED, TOO_LATE, CHANGES = "corrected", "corrections_too_late", "changes"
_TABLE, _CHANGED = "table", "changed"
_UNMATCHED, _AGAIN_COUNT = "unmatched", "joined_again"
_AGAIN, _ROW, _GONE, _TOO_OLD = "_again", "_row_before", "_revision_gone", "_too_old"
_RECORD, _TWICE, _TWICE_AT, _SEEN, _PRODUCED = "_record", "_twice", "_twice_at", "_seen", "_produced"
_TOLD, _TOLD_OF = "_told", "_told_of"
_CARRIED = (_AGAIN, _ROW, _GONE, _TOO_OLD, CAUSE)
_LATER = 1 << 40
"""More chunks than corrections have."""


class CorrectedJoinProcessor(StreamTableJoinProcessor):
    """Judges records like a stream-table join, re-joins earlier ones, and emits the changes.

    Its stream time is that of the stream. Within a run the table's records come first: corrections
    apply the promise as of the stream time before the run, and precede new rows in the log.
    """

    persists_rows = True
    quarantined_outcomes = (Outcome.TOO_LATE,)
    shown_counts = (
        *("in", "out", "late", "dropped", _UNMATCHED, Outcome.WAITING),
        *(CORRECTED, TOO_LATE),
    )

    @property
    def operator(self) -> CorrectedJoin:
        operator: Any = self.node.operator
        return operator

    @property
    def consumed(self) -> tuple[Stream, ...]:
        return (self.operator.left, self.operator.right)

    @property
    def monotonic(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return False

    @property
    def bounded(self) -> bool:
        return False

    @property
    def keeps_order(self) -> bool:
        return False

    # -- times -----------------------------------------------------------------------------------

    def rescan_from(
        self,
        place: int,
        stream_time: Mapping[int, int],
        emitted_up_to: Mapping[int, int],
        watermarks: Mapping[str, Mapping[int, int]],
    ) -> int | None:
        return None if place else super().rescan_from(place, stream_time, emitted_up_to, watermarks)

    def rescan_from_batch(self, place: int, watermarks: Mapping[str, Mapping[int, int]]) -> int | None:
        changed = watermarks.get(_CHANGED)
        return min(changed.values()) - 1 if changed else None

    def reads_own_table(self, watermarks: Mapping[str, Mapping[int, int]]) -> bool:
        return bool(self.operator.key or watermarks.get(_CHANGED))

    def stream_time_advance(self, inputs: Sequence[Input], context: RunContext) -> DataFrame:
        stream, table = (one.rows for one in inputs)
        at, nothing = F.unix_micros(TIMESTAMP), F.lit(None).cast("long")
        moved = stream.where(moves_stream_time(self.operator.left.key))
        rows = moved.select(PARTITION, at.alias("time"), nothing.alias(_TABLE)).unionByName(
            table.select(PARTITION, nothing.alias("time"), at.alias(_TABLE))
        )
        newest, oldest = F.max(_TABLE).alias(_TABLE), F.min(_TABLE).alias(_CHANGED)
        return rows.groupBy(PARTITION).agg(F.max("time").alias("time"), newest, oldest)

    def watermarks(
        self, found: Sequence[Any], before: Mapping[str, Mapping[int, int]]
    ) -> dict[str, dict[int, int]]:
        """Returns the stream time of the table, the time that its records of the run reach back to, and
        the time before which rows are final, by partition of the result.

        The last one never decreases, even if ``corrected_for`` becomes longer.
        """
        promised = self.operator.corrected_for // timedelta(microseconds=1)
        times: dict[str, dict[int, int]] = {n: dict(before.get(n, {})) for n in (_TABLE, FINAL)}
        for row in found:
            told = {_TABLE: row[_TABLE], FINAL: row["time"] and row["time"] - promised}
            for name, moment in told.items():
                if moment is not None:
                    known = times[name].get(row[PARTITION], moment)
                    times[name][row[PARTITION]] = max(known, moment)
        changed = {row[PARTITION]: row[_CHANGED] for row in found if row[_CHANGED] is not None}
        return {**times, _CHANGED: changed}

    # -- lookup ----------------------------------------------------------------------------------

    def waiting(
        self, logs: Sequence[DataFrame], emitted_up_to: Mapping[int, int], state: DataFrame | None
    ) -> DataFrame:
        return super().waiting([logs[0].where(has_key(self.operator.key))], emitted_up_to, state)

    def judge(self, inputs: Sequence[Input], context: RunContext) -> DataFrame:
        (stream, table), named = inputs, has_key(self.operator.key)
        earlier = None if stream.earlier is None else stream.earlier.where(named)
        new = super().judge([replace(stream, earlier=earlier)], context)
        joined = F.col(OUTCOME).isin(Outcome.APPLIED, Outcome.LATE, Outcome.WAITING)
        new = new.withColumn(
            OUTCOME, F.when(joined & ~named, Outcome.DROPPED).otherwise(F.col(OUTCOME))
        )
        changes = table.rows.select(PARTITION, F.lit(Outcome.CHANGE).alias(OUTCOME))
        if earlier is None or context.since is None or context.view is None:
            return union(new, changes)
        again = self._again(earlier, table, context)
        return union(
            union(new, again if context.persist_rows is None else context.persist_rows(again)), changes
        )

    def _again(self, earlier: DataFrame, table: Input, context: RunContext) -> DataFrame:
        """Returns earlier joined records that new table records affect: those to re-join, with their
        rows, and those whose correction comes too late."""
        operator, right = self.operator, self.operator.right
        times = affected_times(
            table.rows,
            table.earlier,
            key=right.key,
            values=sorted({*right.key, *operator.projection().right_columns()}),
            promised=micros(operator.corrected_for),
            stream_time=context.watermarks.get(_TABLE, _nothing()),
            chunk=None if table.broadcastable else arrival_chunk(),
            broadcastable=table.broadcastable,
        )
        times = F.broadcast(times) if table.broadcastable else times
        joined = earlier.where(
            moves_stream_time(operator.left.key) & (F.col(TIMESTAMP) <= context.emitted_up_to)
        )
        at = F.col(TIMESTAMP)
        within = (at >= F.col(FROM)) & (F.col(TO).isNull() | (at < F.col(TO)))
        for k, n in zip(operator.left.key, match_names(right.key), strict=True):
            within = within & (F.col(f"`{k}`") == F.col(n))
        final = F.greatest(context.watermarks.get(FINAL, _nothing()), F.col(EDGE))
        late = F.coalesce(F.unix_micros(TIMESTAMP) < final, F.lit(False))
        cause = F.struct(F.lit(right.name).alias("table"), F.col(f"{BY}.*"))
        met = joined.join(times, within & (~late | F.col(UNTIL).isNull() | (at < F.col(UNTIL))))
        met = met.select(
            *columns(earlier.columns),
            F.col(OFFSET).alias(ARRIVAL),
            F.when(late, Outcome.TOO_LATE).otherwise(Outcome.AGAIN).alias(OUTCOME),
            late.alias(_TOO_OLD),
            cause.cast(POSITION_TYPE).alias(CAUSE),
            ANSWER,
        )
        return self._with_rows(self._first_refused(met, context), context)

    def _first_refused(self, met: DataFrame, context: RunContext) -> DataFrame:
        """Drops records already in quarantine for a late correction: each is quarantined once."""
        if context.refused is None:
            return met
        told = context.refused.where(F.col("reason") == Outcome.TOO_LATE)
        told = told.select(F.col(PARTITION).alias(_TOLD_OF), F.col("position").alias(_TOLD))
        same_record = (F.col(PARTITION) == F.col(_TOLD_OF)) & (F.col(OFFSET) == F.col(_TOLD))
        found = met.join(told, F.col(_TOO_OLD) & same_record, "left").where(F.col(_TOLD).isNull())
        return found.drop(_TOLD_OF, _TOLD)

    def _with_rows(self, records: DataFrame, context: RunContext) -> DataFrame:
        """Adds the current row of each record, or for a deleted row its last revision."""
        operator, node = self.operator, self.node
        own = operator.key or (PARTITION, OFFSET)
        assert context.view is not None
        rows = context.view.where(F.col(TIMESTAMP) > F.timestamp_micros(F.lit(context.since)))
        position = F.col(LEFT_OFFSET).alias(_RECORD)
        kept = [*columns(value_columns(node)), TIMESTAMP, REVISION, PARTITION, position]
        records = with_row_of_key(records, own, rows, node.key, F.struct(*kept), _ROW)
        if context.state is None:
            return records
        return with_row_of_key(records, own, context.state, node.key, F.col(REVISION), _GONE)

    # -- results ---------------------------------------------------------------------------------

    @property
    def lookup_kind(self) -> JoinKind:
        return "left"

    def selected_columns(self, judged: DataFrame) -> list[tuple[str, str]]:
        carried = [(c, f"left.`{c}`") for c in _CARRIED if c in judged.columns]
        return [*self.operator.columns, (_RECORD, f"left.`{OFFSET}`"), *carried]

    def look_up(self, judged: DataFrame, lookup: Lookup, context: RunContext) -> DataFrame:
        again = F.col(OUTCOME).isin(Outcome.AGAIN, Outcome.TOO_LATE)
        told = judged.withColumn(_AGAIN, again)
        found = super().look_up(told, lookup, context)
        if ANSWER in judged.columns:
            has = told.where(_AGAIN).withColumn(FOUND, F.col(ANSWER).isNotNull())
            found = found.unionByName(answered(has, told.columns, ANSWER, self.selected_columns(told)))
        found = self._decided(found)
        if not self.operator.key:
            return found
        asked = judged.where(F.col(OUTCOME).isin(Outcome.APPLIED, Outcome.LATE, Outcome.AGAIN))
        return self._with_twice(found, asked, context)

    def _decided(self, rows: DataFrame) -> DataFrame:
        """Decides the result of each lookup: a new row, an update, a tombstone or nothing."""
        node, values = self.node, value_columns(self.node)
        again = F.col(_AGAIN)
        has = F.col(MATCHED) | F.lit(self.operator.kind == "left")
        outcome = F.when(has, Outcome.APPLIED).otherwise(Outcome.NO_RESULT)
        old = F.when(F.lit(False), F.struct(*columns(values), TIMESTAMP))
        told = {REVISION: F.lit(0), CAUSE: F.lit(None).cast(POSITION_TYPE), _PRODUCED: has}
        if _ROW in rows.columns:
            row, types, existed = F.col(_ROW), dict(rows.dtypes), _has_row()
            alike = reduce(lambda so_far, v: so_far & same(v, types[v], row), values, has & existed)
            corrected = F.when(F.col(_TOO_OLD), Outcome.TOO_LATE)
            corrected = corrected.when(alike | ~(has | existed), Outcome.NO_RESULT)
            outcome = F.when(again, corrected.otherwise(Outcome.APPLIED)).otherwise(outcome)
            before = [row.getField(c).alias(c) for c in (*values, TIMESTAMP)]
            old = F.when(existed, F.struct(*before))
            gone = F.col(_GONE) + 1 if _GONE in rows.columns else F.lit(0)
            revision = F.coalesce(F.when(existed, row.getField(REVISION) + 1), gone, F.lit(0))
            produced = (has | existed) & ~F.coalesce(F.col(_TOO_OLD), F.lit(False))
            told = {REVISION: revision, CAUSE: F.col(CAUSE), _PRODUCED: produced}
        there = {c: F.when(has, F.col(f"`{c}`")).alias(c) for c in values}
        return rows.select(
            *[
                there.get(c, F.col(f"`{c}`"))
                for c in node.schema.names
                if c in rows.columns and c != TIMESTAMP
            ],
            TIMESTAMP,
            PARTITION,
            (~has).alias(IS_TOMBSTONE),
            F.lit(True).alias(IS_LATEST),
            old.alias(OLD),
            *[c.alias(name) for name, c in told.items()],
            ARRIVAL,
            MATCHED,
            again.alias(_AGAIN),
            outcome.alias(OUTCOME),
            F.col(_RECORD),
            *([_ROW, *self._place()] if _ROW in rows.columns else []),
        )

    def _place(self) -> list[Column]:
        """Returns the quarantine columns, without values, of a row whose correction is too late."""
        source, nothing = F.lit(self.operator.left.name), F.lit(None).cast("string")
        told = {REASON: F.lit(Outcome.TOO_LATE), SOURCE: source, POSITION: F.col(_RECORD), RAW: nothing}
        return [c.alias(name) for name, c in told.items()]

    def _with_twice(self, rows: DataFrame, judged: DataFrame, context: RunContext) -> DataFrame:
        """Adds whether another record has a row of the same key.

        Plan: one shuffle and sort by key, and a join with the existing rows by key.
        """
        key = list(self.node.key)
        of_key = F.sum(F.col(_PRODUCED).cast("int")).over(W.partitionBy(*columns(key)))
        twice = of_key > 1
        if context.view is not None:
            there = context.view.select(*columns(key))
            if self.single_task:
                asked = F.broadcast(judged.select(*columns(key)).distinct())
                there = there.join(asked, key, "left_semi")
            rows = rows.join(there.withColumn(_SEEN, F.lit(True)), key, "left")
            # All rows of the table, not only those as young as the changes: the other record may be
            # older.
            own = _has_row() if _ROW in rows.columns else F.lit(False)
            twice = twice | (F.col(_SEEN) & ~own)
        told = F.coalesce(F.col(_PRODUCED) & twice, F.lit(False))
        return rows.withColumns({_TWICE: told, LEFT_OFFSET: F.col(_RECORD)}).drop(_SEEN)

    def state_after(self, rows: DataFrame, context: RunContext) -> DataFrame | None:
        """Inner join only: returns deleted rows that may reappear, with their last revision."""
        if self.operator.kind != "inner":
            return None
        key = [f"{c}" for c in self.node.key]
        updated = rows.where((F.col(OUTCOME) == Outcome.APPLIED) & F.col(_AGAIN))
        kept = [*columns(key), F.col(REVISION), F.col(TIMESTAMP), F.col(PARTITION)]
        gone = updated.where(IS_TOMBSTONE).select(*kept)
        if context.state is None:
            return gone
        final = context.watermarks_after.get(FINAL, _nothing())
        young = context.state.where(F.coalesce(F.unix_micros(TIMESTAMP) >= final, F.lit(True)))
        return union(young.join(updated.select(*columns(key)), key, "left_anti"), gone)

    @property
    def result_order(self) -> list[Column]:
        """Corrections, then new rows; each by arrival, with a grace period by time and arrival."""
        order = (TIMESTAMP, ARRIVAL) if self.operator.waits else (ARRIVAL,)
        return [(~F.col(_AGAIN)).cast("int"), *[F.col(c) for c in order]]

    def result_chunk(self, single_task: bool) -> Column | None:
        if single_task:
            return None
        waits = self.operator.waits
        place = F.floor(F.unix_micros(TIMESTAMP) / F.lit(HOUR)) if waits else arrival_chunk()
        return place + F.when(F.col(_AGAIN), 0).otherwise(_LATER)

    # -- counts ----------------------------------------------------------------------------------

    def tallies(self, columns: Sequence[str]) -> dict[str, Column]:
        told = {
            _UNMATCHED: F.count_if(~F.col(MATCHED) & ~F.col(_AGAIN)),
            CORRECTED: F.count_if(F.col(_AGAIN) & (F.col(OUTCOME) == Outcome.APPLIED)),
        }
        if _TWICE not in columns:
            return told
        first = F.coalesce(F.min(F.when(F.col(_TWICE), F.col(_RECORD))), F.lit(0))
        return {**told, _TWICE: F.count_if(F.col(_TWICE)), _TWICE_AT: first}

    def check(self, found: Mapping[int, Counts]) -> None:
        wrong = {p: some for p, some in found.items() if some.get(_TWICE)}
        if not wrong:
            return
        operator, (partition, some) = self.operator, min(wrong.items())
        raise RefusedRecordsError(
            f"{self.node.name}: expected one record of {operator.left.name!r} for each key "
            f"{list(operator.key)}, got {sum(one[_TWICE] for one in wrong.values())} with the key of "
            f"another record, the first at partition {partition} offset {some[_TWICE_AT]}; nothing was "
            "committed. Add columns to key, or remove it: each record then has a row of its own, keyed "
            "by partition and offset",
            list(wrong),
        )

    def counts(self, taken: int, found: Counts, judged: Counts) -> dict[str, int]:
        outcomes = (Outcome.APPLIED, Outcome.LATE, Outcome.WAITING, Outcome.DROPPED)
        counts = {"in": taken, **{outcome: judged.get(outcome, 0) for outcome in outcomes}}
        told = {name: found[name] for name in (_UNMATCHED, CORRECTED)}
        told[TOO_LATE] = found[Outcome.TOO_LATE]
        counts |= {CHANGES: judged.get(Outcome.CHANGE, 0), _AGAIN_COUNT: judged.get(Outcome.AGAIN, 0)}
        return {**counts, "out": found[Outcome.APPLIED], **told}

    def accounts(self, totals: Counts, taken: int, rows: int) -> list[tuple[str, int, int]]:
        outcomes = (Outcome.APPLIED, Outcome.LATE, Outcome.DROPPED, Outcome.WAITING, CHANGES)
        done = sum(totals.get(outcome, 0) for outcome in outcomes)
        inner = totals.get(_UNMATCHED, 0) if self.operator.kind == "inner" else 0
        joined = totals.get(Outcome.APPLIED, 0) + totals.get(Outcome.LATE, 0) - inner
        out = totals.get("out", 0)
        return [
            ("records in = joined + dropped + waiting + table changes", totals.get("in", 0), done),
            ("records out = rows in the log", out, rows),
            ("joined + corrected = records out", joined + totals.get(CORRECTED, 0), out),
        ]


def _has_row() -> Column:
    """Returns whether the row of a record's key is the record's own; null-safe if there is none."""
    place = [F.col(_ROW).getField(c).eqNullSafe(F.col(c)) for c in (PARTITION, _RECORD)]
    return F.col(_ROW).isNotNull() & place[0] & place[1]


def _nothing() -> Column:
    return F.lit(None).cast("long")
