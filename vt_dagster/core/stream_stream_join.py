"""The stream-stream join: joins records of two streams that are close to each other in time.

The records that later ones may match are a range of the two logs; they are not stored again. A run
reads the part of that range that its new records can match. The unmatched records are kept from run to
run, as their offsets and whether they came late: whether a late record has found a match depends on the
order of arrival, which two logs do not share.

**Window match.** It pairs records of two sides with the same key and nearby times. Time is divided into
tiles twice as long as the window. A record of one side is in the tile of its own time, a record of the
other side in the one or two tiles that its window overlaps; the sides are joined by key and tile. The
records of one key spread over many tasks, and about three pairs are compared per match.

**Corrections.** A later match retracts the unmatched row of a record. A corrected join's records may be
late by up to the promise (``corrected_for``). A record without a match is emitted as unmatched after
its grace period, which is shorter. Until the promise expires the record is kept in the state, marked as
emitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import reduce
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StructType

from vt_dagster.columns import (
    ARRIVAL,
    CAUSE,
    EMITTED_AT,
    FINAL,
    INPUT,
    INPUT_OFFSET,
    INPUT_PARTITION,
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
from vt_dagster.core.arrival_order import Outcome, hour_of_arrival, micros, union, with_columns
from vt_dagster.core.log_columns import POSITION_TYPE, value_columns
from vt_dagster.core.processor import (
    BEFORE_ANY_RUN,
    Counts,
    Input,
    InputPlan,
    Processor,
    ResultOrder,
    RunContext,
    RunCounts,
    RunPlan,
    RunTimes,
    TimePolicy,
    Times,
)
from vt_dagster.core.stream_table_join import (
    CORRECTED,
    MATCHED,
    UNMATCHED,
    moves_stream_time,
    no_time,
    too_late_columns,
)
from vt_dagster.core.stream_time import (
    Timed,
    largest_by_chunk,
    largest_if_none_late,
    running_max,
)
from vt_dagster.core.table_changes import LEFT, RIGHT, columns, match_columns, match_names
from vt_dagster.topology.durations import FIRST_TIME, Duration, length_at
from vt_dagster.topology.operators import CorrectedStreamJoin, StreamStreamJoin

# Window match


SIDE = "_side"
"""0 = left, 1 = right."""
AT = "_at"
"""A record's own time. All times of this module are epoch microseconds."""
LOW, HIGH = "_low", "_high"
"""The range of times of matching records of the other side, both inclusive."""
END = "_end"
"""The stream time at which a record's window ends: after it, no record that is in time matches."""
NEW = "_new"
"""Whether a record is of this run; if not, the columns below are null."""
NOW = "_now"
"""Stream time as of the record."""
LOOK = "_look"
"""As of the record, the stream time at which unmatched records were last emitted."""
HORIZON = "_horizon"
"""A late record matches only records later than this."""
LATE = "_late"
"""Whether a record is so late that it may miss some of its matches."""
ONCE = "_once"
"""Whether the record's window had ended when the record arrived."""
FROM = "_from"
"""The offset of a match's earlier record by arrival; for an unmatched record its own."""
THERE = "_there"
"""The time of a match's earlier record by arrival."""
_TILE = "_tile"


def tile_width(operator: StreamStreamJoin) -> Column:
    """Returns the length of a tile, for the row's partition."""
    return F.greatest(F.lit(1), (micros(operator.before) + micros(operator.after)) * 2)


def matches(
    operator: StreamStreamJoin, new: Sequence[DataFrame], earlier: Sequence[DataFrame | None]
) -> DataFrame:
    """Returns each pair of matching records of which at least one is new.

    The later record by arrival finds the other: every record in its window, or if it is late, those
    later than its horizon.

    Plan: a shuffle of each side by key and tile and a join; one such join of the new left records with
    all right ones, and one of the earlier left records with the new right ones.

    Args:
        new, earlier: of the left and the right side, with ``match_names`` and the columns above.

    Returns:
        ``left, right`` (the sides' structs), ``_at`` (the larger time)``, partition, ORDER, _late``
        (of the later one by arrival)``, _there, _from``, and the positions of both.
    """
    left, right = new
    # New left records with all right ones, then new right ones with earlier left ones: each pair with a
    # new record once.
    found = matches_of_new(operator, left, union(right, earlier[1]), 0)
    if earlier[0] is None:
        return found
    return found.unionByName(matches_of_new(operator, right, earlier[0], 1))


def matches_of_new(
    operator: StreamStreamJoin, new: DataFrame, others: DataFrame, place: int
) -> DataFrame:
    """Returns the pairs of new records of one side with others, like :func:`matches`.

    Args:
        place: the side of the new records.
    """
    on, width = match_names(operator.left.key), tile_width(operator)
    near, far = _wide(new, width), _narrow(others, width)
    return _pairs(near, far, on) if place == 0 else _pairs(far, near, on)


def without_match(operator: StreamStreamJoin, records: DataFrame, others: DataFrame) -> DataFrame:
    """Returns the records that no other record has matched in time.

    A record has a match if it found one on arrival; or, unless its window and grace period were over by
    then, if a later record found it before unmatched records were emitted.

    Plan: a shuffle of each side by key and tile and an anti-join.

    Args:
        records: new ones of one side, and earlier ones still unmatched.
        others: all of the other side.
    """
    on, width = match_names(operator.left.key), tile_width(operator)
    mine = _named(_narrow(records, width), "u")
    theirs = _wide(others, width)
    narrow = [*on, _TILE, AT, LOW, HIGH, NEW, *ORDER, LATE, LOOK, HORIZON]
    theirs = _named(theirs.select(*narrow), "o")
    meet = _equal(on, "u", "o") & _col("u", AT).between(_col("o", LOW), _col("o", HIGH))
    after = _col("o", NEW) & (~_col("u", NEW) | (_order("o") > _order("u")))
    in_time = ~_col("u", ONCE) & F.coalesce(_col("o", LOOK) <= _col("u", END), F.lit(True))
    finds = F.when(after, in_time & _finds("o", "u")).otherwise(_col("u", NEW) & _finds("u", "o"))
    left = mine.join(theirs, meet & finds, "left_anti")
    return left.select(*[_col("u", c).alias(c) for c in records.columns])


def _pairs(left: DataFrame, right: DataFrame, on: Sequence[str]) -> DataFrame:
    ours, theirs = _named(left, "l"), _named(right, "r")
    meet = _equal(on, "l", "r") & _col("r", AT).between(_col("l", LOW), _col("l", HIGH))
    by_left = _col("l", NEW) & (~_col("r", NEW) | (_order("l") > _order("r")))
    finds = F.when(by_left, _finds("l", "r")).otherwise(_finds("r", "l"))

    def of_later(column: str) -> Column:
        return F.when(by_left, _col("l", column)).otherwise(_col("r", column)).alias(column)

    def of_earlier(column: str, name: str) -> Column:
        return F.when(by_left, _col("r", column)).otherwise(_col("l", column)).alias(name)

    return ours.join(theirs, meet & finds).select(
        _col("l", LEFT).alias(LEFT),
        _col("r", RIGHT).alias(RIGHT),
        F.greatest(_col("l", AT), _col("r", AT)).alias(AT),
        *[of_later(c) for c in (PARTITION, *ORDER, LATE)],
        of_earlier(AT, THERE),
        of_earlier(OFFSET, FROM),
        *[_col("l", c).alias(n) for c, n in ((PARTITION, LEFT_PARTITION), (OFFSET, LEFT_OFFSET))],
        *[_col("r", c).alias(n) for c, n in ((PARTITION, RIGHT_PARTITION), (OFFSET, RIGHT_OFFSET))],
    )


def _finds(one: str, other: str) -> Column:
    """Returns whether a new record finds an earlier one in its window."""
    return ~_col(one, LATE) | (_col(other, AT) > _col(one, HORIZON))


def _order(side: str) -> Column:
    return F.struct(*[_col(side, c) for c in (ARRIVAL, INPUT, INPUT_PARTITION, INPUT_OFFSET)])


def _equal(on: Sequence[str], one: str, other: str) -> Column:
    equal = _col(one, _TILE) == _col(other, _TILE)
    for name in on:
        equal = equal & (_col(one, name) == _col(other, name))
    return equal


def _narrow(rows: DataFrame, width: Column) -> DataFrame:
    """Places each record in the tile of its own time."""
    return rows.withColumn(_TILE, _tile(AT, width))


def _wide(rows: DataFrame, width: Column) -> DataFrame:
    """Places each record in every tile that its window overlaps."""
    # Only one side is copied to several tiles: two copies of a pair would be two results.
    return rows.withColumn(_TILE, F.explode(F.sequence(_tile(LOW, width), _tile(HIGH, width))))


def _tile(moment: str, width: Column) -> Column:
    """Returns a tile number; the tiling requires only that it never descends with time."""
    return F.call_function("div", F.col(moment), width)


def _named(rows: DataFrame, side: str) -> DataFrame:
    return rows.select(*[F.col(f"`{c}`").alias(f"{side}_{c}") for c in rows.columns])


def _col(side: str, column: str) -> Column:
    return F.col(f"`{side}_{column}`")


# Stream time of the join


SIDES = (LEFT, RIGHT)
OPEN, LOOK_WATERMARK = "open", "look"
VALID, EXPIRED = "_valid", "_expired"
_TIMES = {"_left": LEFT, "_right": RIGHT, LOOK: LOOK_WATERMARK}
_SEGMENT = 60_000


@dataclass(frozen=True)
class StreamJoinTime(TimePolicy):
    """The stream time of both streams together, and watermarks of each."""

    processor: StreamStreamJoinProcessor

    def rows(self, inputs: Sequence[Input]) -> Timed:
        raise AssertionError("a stream-stream join computes its stream time in advance()")

    def advance(self, inputs: Sequence[Input], context: RunContext) -> DataFrame:
        rows = self.processor.with_largest_times(self.processor.in_order(inputs), context, slim=True)
        newest = {
            watermark: F.max(name).alias(watermark)
            for name, watermark in {NOW: "time", **_TIMES}.items()
        }
        return rows.groupBy(PARTITION).agg(*newest.values())

    def lateness_bounds(self, inputs: Sequence[Input]) -> DataFrame | None:
        if self.processor.single_task:
            return None
        rows = [self.processor.side_rows(one.rows, i, slim=True) for i, one in enumerate(inputs)]
        return largest_by_chunk(reduce(union, rows), SIDE, AT, F.col(VALID))

    def advance_if_none_late(
        self, found: Sequence[Any], before: Times, watermarks: Mapping[str, Times]
    ) -> list[dict[str, Any]] | None:
        promise = self.processor.operator.promise
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
        self, found: Sequence[Any], before: Mapping[str, Times]
    ) -> dict[str, dict[int, int]]:
        watermarks = {name: dict(before.get(name, {})) for name in (LEFT, RIGHT, "look")}
        for row in found:
            for name, newest in watermarks.items():
                if row[name] is not None:
                    newest[row[PARTITION]] = row[name]
        seen = {*before.get(OPEN, {}), *(row[PARTITION] for row in found)}
        promise, look = self.processor.operator.promise, watermarks["look"]
        let_go = {p: look[p] - in_micros_at(promise, p) if p in look else FIRST_TIME for p in seen}
        return {**watermarks, OPEN: let_go}


def in_micros_at(value: Duration, partition: int) -> int:
    return length_at(value, partition) // timedelta(microseconds=1)


# Stream-stream join


PHASE, RANK = "_phase", "_rank"
_PLACE = "_place"


@dataclass(frozen=True)
class StreamStreamJoinCounts(RunCounts):
    """The counts of results, of records without a match, and of refused ones."""

    @property
    def shown(self) -> tuple[str, ...]:
        return ("in", "out", UNMATCHED, "late", "dropped", Outcome.WAITING)

    def tallies(self, columns: Sequence[str]) -> dict[str, Column]:
        return {
            UNMATCHED: F.count_if(~F.col(MATCHED)),
            Outcome.WAITING: F.count_if(F.col(OUTCOME) == Outcome.KEPT),
        }

    def of_run(self, taken: int, found: Counts, judged: Counts) -> dict[str, int]:
        shown = (UNMATCHED, Outcome.LATE, Outcome.DROPPED, Outcome.WAITING)
        return {"in": taken, "out": found[Outcome.APPLIED], **{name: found[name] for name in shown}}


class StreamStreamJoinProcessor(Processor[StreamStreamJoin]):
    """Computes matches (``matches``) and unmatched records, and when the latter are emitted.

    A record with a key and a value whose timestamp is stream time emits the waiting unmatched records
    up to that time, before its own matches.

    Source: FORMAT 4.13.
    """

    def plan(self, times: RunTimes = BEFORE_ANY_RUN) -> RunPlan:
        inputs = [InputPlan(n, self.rescan_from(i, times)) for i, n in enumerate(self.node.inputs)]
        # By the arriving record: first the unmatched records that it emits, by time, right before left,
        # key, arrival; then its matches, by the time of the match, and that match's arrival.
        by = (ARRIVAL, PHASE, *ORDER[1:], THERE, RANK, *self.node.key, FROM)
        return RunPlan(
            inputs=tuple(inputs),
            merges=True,
            persists_rows=True,
            stream_time=StreamJoinTime(self),
            order=ResultOrder(by),
            drops_late=False,
            counts=StreamStreamJoinCounts(),
        )

    # -- records ---------------------------------------------------------------------------------

    @property
    def preserved_sides(self) -> tuple[int, ...]:
        """The sides whose records are emitted without a match if they have none."""
        return {"inner": (), "left": (0,), "outer": (0, 1)}[self.operator.kind]

    @property
    def lookahead(self) -> tuple[Duration, Duration]:
        """How far a match may lie after a record of the left side, and of the right side."""
        return self.operator.after, self.operator.before

    def rescan_from(self, place: int, times: RunTimes) -> int | None:
        """Returns from where a side's log is read again, see ``InputPlan``.

        Args:
            place: of the side.
        """
        operator, ahead = self.operator, self.lookahead[place]
        own, let_go = times.watermarks.get(SIDES[place], {}), times.watermarks.get(OPEN, {})
        found: list[int] = []
        for p, now in times.stream_time.items():
            # Read back to the oldest record that a new record in time may match, that a late record may
            # match, or that is still unmatched.
            found.append(now - in_micros_at(operator.promise, p) - in_micros_at(ahead, p) - 1)
            if p in own:
                found.append(own[p] - in_micros_at(operator.reach, p))
            if p in let_go and place in self.preserved_sides:
                found.append(let_go[p] - in_micros_at(ahead, p) - 1)
        return max(FIRST_TIME, min(found)) if found else None

    def with_largest_times(
        self, rows: Sequence[DataFrame], context: RunContext, slim: bool = False
    ) -> DataFrame:
        """Returns the new records of both sides with stream time and all watermarks as of each record.

        If no record is late, the times that only late records need are null.

        Args:
            slim: omits keys and values.
        """
        new = reduce(union, [self.side_rows(r, i, slim) for i, r in enumerate(rows)])
        # Records of the two logs are merged by the largest time so far in their own log (``ARRIVAL``),
        # which is therefore also the largest time of all earlier records.
        new = new.withColumn(NOW, F.greatest(F.col(ARRIVAL), F.unix_micros(context.stream_time)))
        if context.none_late:
            return with_columns(new, {name: no_time() for name in _TIMES})
        before = {
            name: context.watermarks.get(watermark, no_time()) for name, watermark in _TIMES.items()
        }
        look = F.when(F.col(VALID) & (F.col(AT) == F.col(NOW)), F.col(AT))
        moves = {LOOK: look}
        for i, name in enumerate(("_left", "_right")):
            moves[name] = F.when(F.col(VALID) & (F.col(SIDE) == i), F.col(AT))
        return running_max(new, moves, before, chunk=self.chunk)

    def side_rows(self, rows: DataFrame, place: int, slim: bool = False) -> DataFrame:
        """Returns a side's rows under names common to both sides; the record itself is a struct."""
        node, operator = self.node.inputs[place], self.operator
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
        """Adds the window of each new record, whether it is late, and ``_horizon``: a late record
        finds only matches after it."""
        once = F.col(END) < F.col(NOW)
        if context.none_late:
            no = F.lit(False)
            added = {NEW: F.lit(True), LATE: no, HORIZON: no_time(), ONCE: once, EXPIRED: no}
            return with_columns(self.with_window(rows), added)
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
        found = matches(self.operator, sides, earlier).withColumn(PHASE, F.lit(1))
        found = self._results(found)
        parts = [found, self.rejected(new)]
        for i in self.preserved_sides:
            records = union(sides[i], self.pending_unmatched(earlier[i], i, context))
            alone = without_match(self.operator, records, union(sides[1 - i], earlier[1 - i]))
            unmatched = self.unmatched_rows(alone, records, i, new, context)
            parts += [unmatched, self._unmatched_without_key(new, i)]
            parts += self.retractions(earlier[i], sides[1 - i], i, context)
        return reduce(union, parts)

    def _earlier(self, one: Input, place: int, like: StructType) -> DataFrame | None:
        """Returns records of earlier runs, with the columns of new ones."""
        if one.earlier is None:
            return None
        rows = self.with_window(self.side_rows(one.earlier, place)).where(VALID)
        there = set(rows.columns)
        added = {NEW: F.lit(False), ONCE: F.lit(False)}
        missing = {
            f.name: added.get(f.name, F.lit(None).cast(f.dataType))
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
        # The state of an earlier release does not have it.
        rows = earlier.drop(LATE) if LATE in kept.columns else earlier
        return rows.join(kept, [PARTITION, OFFSET])

    def unmatched_rows(
        self, rows: DataFrame, records: DataFrame, place: int, new: DataFrame, context: RunContext
    ) -> DataFrame:
        """Returns the unmatched records of one side: those to emit, and those that still wait for a
        match.

        Args:
            rows: the unmatched ones of ``records``.
            place: the position of the side: 0 = left, 1 = right.
            new: the run's records of both sides.
        """
        # One plan for emitted and waiting records: two filters would compute the anti-join twice.
        timed = self.with_emission(rows, records, self.unmatched_end(place), new)
        return self.emitted_and_waiting(
            self.with_unmatched_outcome(timed, place, context), F.col(ONCE), place
        )

    def unmatched_end(self, place: int) -> Column:
        """Returns the stream time after which an unmatched record is emitted."""
        return F.col(END)

    def with_unmatched_outcome(self, rows: DataFrame, place: int, context: RunContext) -> DataFrame:
        """Adds whether an unmatched record is emitted or still waits for a match."""
        leaves = F.col(ONCE) | self.is_past(self.unmatched_end(place), context)
        return rows.withColumn(OUTCOME, F.when(leaves, Outcome.APPLIED).otherwise(Outcome.KEPT))

    def is_past(self, moment: Column, context: RunContext) -> Column:
        """Returns whether stream time is past a moment when the run emits unmatched records."""
        return F.coalesce(
            moment < context.watermarks_after.get(LOOK_WATERMARK, no_time()), F.lit(False)
        )

    def with_emission(
        self, rows: DataFrame, records: DataFrame, end: Column, new: DataFrame
    ) -> DataFrame:
        """Adds the time at which each unmatched record is emitted: the timestamp of the run's first
        record after the end of its window, or that end if there is none.

        Plan: that of ``running_max``, over the unmatched records and the times of the run's records.

        Args:
            rows, records, new: see ``unmatched_rows``.
        """
        # In descending order of time, the next record is a running maximum of the negated times.
        nothing = {c: F.lit(0) for c in (INPUT, INPUT_PARTITION, INPUT_OFFSET)}
        emitting = new.where(F.col(VALID) & (F.col(AT) == F.col(NOW)))
        times = emitting.select(PARTITION, (-F.col(AT)).alias(ARRIVAL)).withColumns(
            {**nothing, INPUT: F.lit(1)}
        )
        backwards = rows.withColumn(_PLACE, F.struct(*ORDER)).withColumns({ARRIVAL: -end, **nothing})
        emits = F.when(F.col(INPUT) == 1, F.col(ARRIVAL))
        chunk = bounds = None
        if not self.single_task:
            # The chunks of all records contain those of the unmatched ones, and need no anti-join.
            ends = records.select(PARTITION, (-end).alias(ARRIVAL), F.lit(0).alias(INPUT))
            chunk, bounds = hour_of_arrival(), union(ends, times)
        rows = union(backwards, times)
        found = running_max(
            rows, {EMITTED_AT: emits}, {EMITTED_AT: no_time()}, chunk=chunk, bounded_by=bounds
        )
        found = found.where(F.col(INPUT) == 0).withColumns(
            {
                EMITTED_AT: -F.coalesce(EMITTED_AT, ARRIVAL),
                **{c: F.col(_PLACE)[c] for c in ORDER},
            }
        )
        return found.drop(_PLACE)

    def emitted_and_waiting(self, rows: DataFrame, once: Column, place: int) -> DataFrame:
        """Returns the results of unmatched records, and what is kept of those that wait.

        Args:
            rows: with their outcome and :meth:`with_emission`.
            once: whether a record is emitted on arrival.
        """
        leaving = rows.withColumns({PHASE: F.when(once, 1).otherwise(0), FROM: F.col(OFFSET)})
        waited = F.col(PHASE) == 0
        first = {
            c: F.when(waited, 0).otherwise(F.col(c)) for c in (INPUT, INPUT_PARTITION, INPUT_OFFSET)
        }
        first[ARRIVAL] = F.when(waited, F.col(EMITTED_AT)).otherwise(F.col(ARRIVAL))
        first[THERE] = F.when(waited, F.col(AT)).otherwise(0)
        return self._results(
            self.with_left_key_only(with_columns(leaving, first), place), matched=False
        )

    def retractions(
        self, earlier: DataFrame | None, others: DataFrame, place: int, context: RunContext
    ) -> list[DataFrame]:
        """Returns retractions of unmatched rows; this join has none."""
        return []

    def _unmatched_without_key(self, new: DataFrame, place: int) -> DataFrame:
        """Emits records of a preserved side with a value but no key: at once, unmatched."""
        rows = new.where((F.col(SIDE) == place) & ~F.col(VALID) & ~F.col(IS_TOMBSTONE))
        rows = rows.withColumns({EMITTED_AT: F.col(AT), OUTCOME: F.lit(Outcome.APPLIED)})
        return self.emitted_and_waiting(rows, F.lit(True), place)

    def with_left_key_only(self, rows: DataFrame, place: int) -> DataFrame:
        """Adds a left side that contains only the key, for unmatched records of the right side."""
        if place == 0:
            return rows
        key = self.node.inputs[0].key
        on = dict(zip(key, match_names(key), strict=True))
        kind = rows.schema[LEFT].dataType
        assert isinstance(kind, StructType)
        fields = [
            F.col(on[f.name]) if f.name in on else F.lit(None).cast(f.dataType) for f in kind.fields
        ]
        alone = F.struct(*[c.alias(f.name) for c, f in zip(fields, kind.fields, strict=True)])
        return rows.withColumn(LEFT, alone)

    def _results(self, rows: DataFrame, matched: bool = True) -> DataFrame:
        """Returns the log's columns and the columns of the result order. Values are null in rows of
        records that wait."""
        place = F.lit(0) if matched else F.lit(1) - F.col(SIDE)
        chosen = {name: F.expr(sql) for name, sql in self.operator.projection().columns}
        if not matched:
            emitted = F.col(OUTCOME) == Outcome.APPLIED
            chosen = {name: F.when(emitted, value) for name, value in chosen.items()}
        return rows.select(
            *[value.alias(name) for name, value in chosen.items()],
            F.timestamp_micros(AT).alias(TIMESTAMP),
            PARTITION,
            F.lit(False).alias(IS_TOMBSTONE),
            F.col(LATE).alias(IS_LATE) if matched else F.coalesce(LATE, F.lit(False)).alias(IS_LATE),
            *ORDER,
            F.col(PHASE).cast("int").alias(PHASE),
            THERE,
            place.alias(RANK),
            FROM,
            *(self._matched_columns() if matched else self._unmatched_columns(rows)),
            *self.extra_columns(matched),
        )

    def _matched_columns(self) -> list[Column]:
        return [F.lit(True).alias(MATCHED), F.lit(Outcome.APPLIED).alias(OUTCOME)]

    def _unmatched_columns(self, rows: DataFrame) -> list[Column]:
        # Whether a record that waits has a match is not known yet.
        known = F.when(F.col(OUTCOME) == Outcome.APPLIED, F.lit(False))
        kept = [F.col(c) for c in self.kept_columns if c in rows.columns]
        return [known.alias(MATCHED), F.col(OUTCOME), *kept]

    @property
    def kept_columns(self) -> tuple[str, ...]:
        """The columns that the state has of a waiting record, beside its position."""
        return (SIDE, LATE)

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
        kept = rows.where(F.col(OUTCOME) == Outcome.KEPT)
        return kept.select(PARTITION, FROM, *self.kept_columns)

    def waiting(
        self, logs: Sequence[DataFrame], emitted_up_to: Times, state: DataFrame | None
    ) -> DataFrame:
        """Returns the unmatched records that may still find a match: ``key columns`` (the left one's),
        ``timestamp, partition, offset, side``."""
        key, found = self.node.inputs[0].key, list[DataFrame]()
        for place, (log, node) in enumerate(zip(logs, self.node.inputs, strict=True)):
            named = [c.alias(k) for c, k in zip(columns(node.key), key, strict=True)]
            there = F.lit(SIDES[place]).alias("side")
            rows = log.select(*named, TIMESTAMP, PARTITION, OFFSET, there)
            kept = None if state is None else self.unmatched_state(state, place)
            on = [PARTITION, OFFSET]
            found.append(rows.limit(0) if kept is None else rows.join(kept, on, "left_semi"))
        return reduce(DataFrame.unionByName, found)

    def unmatched_state(self, state: DataFrame, place: int) -> DataFrame:
        return state.where(F.col(SIDE) == place).drop(SIDE).withColumnRenamed(FROM, OFFSET)


# Corrected stream-stream join


_NEVER = 1 << 62
"""Later than any time."""
_EMITTED = "_said"
"""Whether the unmatched row of a record has been emitted."""
_PLACES = ((LEFT_PARTITION, LEFT_OFFSET), (RIGHT_PARTITION, RIGHT_OFFSET))
_KINDS = {LEFT_PARTITION: "int", LEFT_OFFSET: "long", RIGHT_PARTITION: "int", RIGHT_OFFSET: "long"}
_ROW = "_row"


@dataclass(frozen=True)
class CorrectedStreamJoinTime(StreamJoinTime):
    """The times of the join, and the time before which rows are final."""

    processor: CorrectedStreamJoinProcessor

    def watermarks(
        self, found: Sequence[Any], before: Mapping[str, Times]
    ) -> dict[str, dict[int, int]]:
        """Returns the watermarks of the join, and the time before which rows are final.

        That time never decreases, even if ``corrected_for`` becomes longer.
        """
        final, promise = dict(before.get(FINAL, {})), self.processor.operator.promise
        for row in found:
            if row["time"] is not None:
                p = row[PARTITION]
                at = row["time"] - in_micros_at(promise, p) - self._lookahead_at(p)
                final[p] = max(final.get(p, at), at)
        return {**super().watermarks(found, before), FINAL: final}

    def _lookahead_at(self, partition: int) -> int:
        return max(in_micros_at(ahead, partition) for ahead in self.processor.lookahead)

    def advance_if_none_late(
        self, found: Sequence[Any], before: Times, watermarks: Mapping[str, Times]
    ) -> list[dict[str, Any]] | None:
        final = watermarks.get(FINAL, {})
        for row in found:
            p = row[PARTITION]
            if p in final and row["oldest"] < final[p] + self._lookahead_at(p):
                return None
        return super().advance_if_none_late(found, before, watermarks)


@dataclass(frozen=True)
class CorrectedStreamJoinCounts(RunCounts):
    """The counts of results and corrections. ``late`` counts only the records that are refused and in
    quarantine."""

    @property
    def shown(self) -> tuple[str, ...]:
        return ("in", "out", UNMATCHED, "late", "dropped", Outcome.WAITING, CORRECTED)

    def tallies(self, columns: Sequence[str]) -> dict[str, Column]:
        return {
            UNMATCHED: F.count_if(~F.col(MATCHED)),
            Outcome.WAITING: F.count_if((F.col(OUTCOME) == Outcome.KEPT) & ~F.col(_EMITTED)),
            CORRECTED: F.count_if((F.col(OUTCOME) == Outcome.APPLIED) & (F.col(REVISION) > 0)),
        }

    def of_run(self, taken: int, found: Counts, judged: Counts) -> dict[str, int]:
        shown = (UNMATCHED, Outcome.DROPPED, Outcome.WAITING, CORRECTED)
        counts = {"in": taken, "out": found[Outcome.APPLIED], **{name: found[name] for name in shown}}
        return {**counts, Outcome.LATE: found[Outcome.TOO_LATE]}


class CorrectedStreamJoinProcessor(StreamStreamJoinProcessor):
    """Emits unmatched records after the grace period, and retracts them if a match arrives later."""

    @property
    def operator(self) -> CorrectedStreamJoin:
        operator: Any = self.node.operator
        return operator

    def plan(self, times: RunTimes = BEFORE_ANY_RUN) -> RunPlan:
        return replace(
            super().plan(times),
            stream_time=CorrectedStreamJoinTime(self),
            quarantined_outcomes=(Outcome.TOO_LATE,),
            counts=CorrectedStreamJoinCounts(),
        )

    def with_lateness(self, rows: DataFrame, context: RunContext) -> DataFrame:
        # A late record finds no match, even if it is late only by an earlier, shorter
        # ``corrected_for``: a match would contradict rows that are already final.
        ahead = F.greatest(*map(micros, self.lookahead))
        edge = context.watermarks.get(FINAL, no_time()) + ahead
        again = F.coalesce(F.col(AT) < edge, F.lit(False))
        marked = super().with_lateness(rows, context)
        return marked.withColumns({LATE: F.col(LATE) | again, HORIZON: F.lit(_NEVER)})

    def results(self, inputs: Sequence[Input], context: RunContext) -> DataFrame:
        return self.process(self.in_order(inputs), inputs, context)

    # -- unmatched rows and their retraction -----------------------------------------------------

    @property
    def kept_columns(self) -> tuple[str, ...]:
        return (*super().kept_columns, _EMITTED)

    def unmatched_end(self, place: int) -> Column:
        return F.col(AT) + micros(self.lookahead[place]) + micros(self.operator.grace)

    def with_unmatched_outcome(self, rows: DataFrame, place: int, context: RunContext) -> DataFrame:
        """Adds whether an unmatched record is emitted now, may still find a match, or both: one row
        each. Omits those that were emitted and can find none."""
        before = F.col(_EMITTED) if _EMITTED in rows.columns else F.lit(False)
        emitted = F.coalesce(before, F.lit(False))
        leaves = ~emitted & (F.col(ONCE) | self.is_past(self.unmatched_end(place), context))
        waits = ~F.col(ONCE) & ~self.is_past(F.col(END), context)
        outcomes = F.array(F.when(leaves, Outcome.APPLIED), F.when(waits, Outcome.KEPT))
        return rows.withColumns(
            {_EMITTED: emitted | leaves, OUTCOME: F.explode(F.array_compact(outcomes))}
        )

    def retractions(
        self, earlier: DataFrame | None, others: DataFrame, place: int, context: RunContext
    ) -> list[DataFrame]:
        """Returns the tombstones of unmatched rows, each caused by the first match in time.

        Plan: pairs of emitted unmatched records with the run's records of the other side, as in
        ``matches``, and one shuffle of these pairs by position.
        """
        there = self.pending_unmatched(earlier, place, context)
        if there is None:
            return []
        emitted = there.where(_EMITTED).drop(_EMITTED)
        found = matches_of_new(self.operator, others, emitted, 1 - place)
        first = F.min_by(F.struct(*found.columns), F.struct(*ORDER))
        row = found.groupBy(*_PLACES[place]).agg(first.alias(_ROW)).select(f"{_ROW}.*")
        return [self._tombstones_of_unmatched(row, place)]

    def _tombstones_of_unmatched(self, pairs: DataFrame, place: int) -> DataFrame:
        """Returns the tombstones of unmatched rows, from pairs of a record and its first match."""
        (partition, offset), cause = _PLACES[place], _PLACES[1 - place]
        alone = with_columns(pairs, self._record_alone(pairs, place))
        at, name = F.timestamp_micros(THERE), F.lit(self.node.inputs[1 - place].name)
        by = F.struct(name, *map(F.col, cause)).cast(POSITION_TYPE)
        chosen = self.operator.projection().columns
        nothing = [F.when(F.lit(False), F.expr(sql)).alias(name) for name, sql in chosen]
        ends = {
            TIMESTAMP: at,
            PARTITION: F.col(partition),
            IS_TOMBSTONE: F.lit(True),
            IS_LATE: F.lit(False),
            PHASE: F.lit(1),
            THERE: F.lit(FIRST_TIME),
            RANK: F.lit(0),
            FROM: F.col(offset),
            MATCHED: F.lit(True),
            OUTCOME: F.lit(Outcome.APPLIED),
        }
        added = {OLD: self._row(at), REVISION: F.lit(1), CAUSE: by}
        return alone.select(
            *nothing,
            *ORDER,
            *_corrected_named(ends),
            *_corrected_named(self._unmatched_key(place, partition, offset) | added),
        )

    def _record_alone(self, pairs: DataFrame, place: int) -> dict[str, Column]:
        """Returns both sides of a pair as in the record's unmatched row: the other side is null."""

        def only(side: str, names: Sequence[str]) -> Column:
            kind: Any = pairs.schema[side].dataType
            of_side = F.col(side)
            fields = {
                f.name: of_side.getField(f.name) if f.name in names else _null(f.dataType) for f in kind
            }
            return F.struct(*_corrected_named(fields))

        if place == 1:
            return {LEFT: only(LEFT, self.node.inputs[0].key)}
        return {RIGHT: _null(pairs.schema[RIGHT].dataType)}

    def extra_columns(self, matched: bool) -> list[Column]:
        if matched:
            places = {name: F.col(name) for names in _PLACES for name in names}
            return _corrected_named(places | self._new())
        one, other = (self._unmatched_key(i, PARTITION, FROM) for i in (0, 1))
        of_left = F.col(SIDE) == 0
        places = {n: F.when(of_left, one[n]).otherwise(other[n]) for names in _PLACES for n in names}
        return _corrected_named(places | self._new())

    def _unmatched_key(self, place: int, partition: str, offset: str) -> dict[str, Column]:
        """Returns the key of a record's unmatched row, and ``is_latest`` (true)."""
        mine, other = _PLACES[place], _PLACES[1 - place]
        values = (F.col(partition), F.col(offset), F.lit(-1), F.lit(-1))
        key = dict(zip((*mine, *other), values, strict=True))
        return {**{name: c.cast(_KINDS[name]) for name, c in key.items()}, IS_LATEST: F.lit(True)}

    def _new(self) -> dict[str, Column]:
        nothing = F.when(F.lit(False), self._row(F.timestamp_micros(AT)))
        added = {OLD: nothing, REVISION: F.lit(0), CAUSE: _null(POSITION_TYPE)}
        return {IS_LATEST: F.lit(True), **added}

    def _row(self, at: Column) -> Column:
        """Returns the values and the timestamp of a row as a struct of nullable fields: Arrow cannot
        write a null struct of other fields."""
        values, there = value_columns(self.node), F.col(PARTITION).isNotNull()
        chosen = {name: F.expr(sql) for name, sql in self.operator.projection().columns}
        added = {name: F.when(there, chosen[name]) for name in values}
        return F.struct(*_corrected_named({**added, TIMESTAMP: at}))

    # -- state and counts ------------------------------------------------------------------------

    def rejected(self, new: DataFrame) -> DataFrame:
        """Returns unusable records (dropped) and late ones (quarantined, with their position)."""
        outcome = F.when(self.is_unusable, Outcome.DROPPED).when(
            F.col(LATE) & F.col(VALID), Outcome.TOO_LATE
        )
        names = [node.name for node in self.node.inputs]
        source = F.when(F.col(SIDE) == 0, names[0]).otherwise(names[1])
        place = [*too_late_columns(source, OFFSET), F.timestamp_micros(AT).alias(TIMESTAMP)]
        rows = new.select(PARTITION, outcome.alias(OUTCOME), *place)
        return rows.where(F.col(OUTCOME).isNotNull())

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
        self, logs: Sequence[DataFrame], emitted_up_to: Times, state: DataFrame | None
    ) -> DataFrame:
        waits = None if state is None else state.where(~F.col(_EMITTED))
        return super().waiting(logs, emitted_up_to, waits)


def _corrected_named(added: Mapping[str, Column]) -> list[Column]:
    return [c.alias(name) for name, c in added.items()]


def _null(kind: DataType) -> Column:
    return F.lit(None).cast(kind)
