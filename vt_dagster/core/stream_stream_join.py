"""Stream-stream join: the records of two streams that are near each other in time.

What later records may match is a range of the two logs, and nothing of it is stored again. A run reads
as much of that as its new records can match. Which of them have found no match so far is kept from run
to run as offsets alone: whether one that was late has found another is told by the order of arrival,
which logs do not have between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import reduce
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from vt_dagster.columns import (
    ARRIVAL,
    FATE,
    HOME,
    INPUT,
    IS_LATE,
    IS_TOMBSTONE,
    OFFSET,
    ORDER,
    PARTITION,
    SEQUENCE,
    TIMESTAMP,
)
from vt_dagster.core.arrival import Fate, hour_of_arrival, micros, union
from vt_dagster.core.changes import columns, match_columns, match_names
from vt_dagster.core.grace import moves_stream_time
from vt_dagster.core.known import Input, Known
from vt_dagster.core.log import value_columns
from vt_dagster.core.processor import Counts, Processor
from vt_dagster.core.side_times import largest_by_chunk, largest_in_time, with_largest
from vt_dagster.core.within import (
    AT,
    END,
    FROM,
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
    THERE,
    matches,
    tile_width,
    without_match,
)
from vt_dagster.topology.durations import Duration, length_at
from vt_dagster.topology.operators import StreamStreamJoin

_SIDES = (LEFT, RIGHT)
_TIMES = {"_left": LEFT, "_right": RIGHT, LOOK: "look"}
_VALID, _EXPIRED = "_valid", "_expired"
_PHASE, _RANK = "_phase", "_rank"
_UNMATCHED, _MATCHED = "unmatched", "_matched"
_OPEN = "open"
_LOWEST = -62_135_596_800_000_000
"""The year 1: no record is earlier."""
_FIRST_HOUR = 1 << 40
"""More hours than there are in time."""
_SEGMENT = 60_000


class StreamStreamJoinProcessor(Processor[StreamStreamJoin]):
    """Finds the matches (``within.matches``) and what has none, and says when that leaves.

    What waits without a match is let go by a record with a key and a value that is at stream time: up
    to there, and before that record's own matches. So a run lets it go first of all.

    Source: FORMAT 4.13.
    """

    merges = True
    goes_by_time = True
    drops_late = False
    holds = True
    counted = ("in", "out", _UNMATCHED, "late", "dropped", Fate.WAITING)

    @property
    def bounded(self) -> bool:
        return False

    @property
    def kept(self) -> tuple[int, ...]:
        """The sides whose records leave without a match where there is none."""
        return {"inner": (), "left": (0,), "outer": (0, 1)}[self.operator.kind]

    @property
    def ahead(self) -> tuple[Duration, Duration]:
        """How far a match of the left side's records may lie after them, and of the right side's."""
        return self.operator.after, self.operator.before

    # -- times -----------------------------------------------------------------------------------

    def look_back(
        self,
        place: int,
        stream_time: Mapping[int, int],
        released: Mapping[int, int],
        marks: Mapping[str, Mapping[int, int]],
    ) -> int | None:
        operator, ahead = self.operator, self.ahead[place]
        own, let_go = marks.get(_SIDES[place], {}), marks.get(_OPEN, {})
        found: list[int] = []
        for p, now in stream_time.items():
            # What a record finds that is in time, one that is late, and what has no match yet.
            found.append(now - _long(operator.grace, p) - _long(ahead, p) - 1)
            if p in own:
                found.append(own[p] - _long(operator.reach, p))
            if p in let_go and place in self.kept:
                found.append(let_go[p] - _long(ahead, p) - 1)
        return max(_LOWEST, min(found)) if found else None

    def own_time(self, inputs: Sequence[Input], known: Known) -> DataFrame:
        rows = self._seen(self.in_order(inputs), known, slim=True)
        newest = {told: F.max(name).alias(told) for name, told in {NOW: "time", **_TIMES}.items()}
        return rows.groupBy(PARTITION).agg(*newest.values())

    def bounds_of_time(self, inputs: Sequence[Input]) -> DataFrame | None:
        if self.few:
            return None
        rows = [self._record(one.rows, i, slim=True) for i, one in enumerate(inputs)]
        return largest_by_chunk(reduce(union, rows), SIDE, AT, F.col(_VALID))

    def in_time(
        self, found: Sequence[Any], stream_time: Mapping[int, int]
    ) -> list[dict[str, Any]] | None:
        grace = self.operator.grace
        newest = largest_in_time(found, SIDE, stream_time, lambda p: _long(grace, p))
        if newest is None:
            return None
        rows: list[dict[str, Any]] = []
        for p, (now, of) in newest.items():
            look = max(of.values(), default=None)
            # Else one that matches nothing has moved stream time on, and it matters when.
            if look != now:
                return None
            sides = {name: of.get(i) for i, name in enumerate(_SIDES)}
            rows.append({PARTITION: p, "time": now, "look": look, **sides})
        return rows

    def marks(
        self, found: Sequence[Any], before: Mapping[str, Mapping[int, int]]
    ) -> dict[str, dict[int, int]]:
        marks = {name: dict(before.get(name, {})) for name in (LEFT, RIGHT, "look")}
        for row in found:
            for name, newest in marks.items():
                if row[name] is not None:
                    newest[row[PARTITION]] = row[name]
        seen = {*before.get(_OPEN, {}), *(row[PARTITION] for row in found)}
        grace = self.operator.grace
        let_go = {
            p: marks["look"][p] - _long(grace, p) if p in marks["look"] else _LOWEST for p in seen
        }
        return {**marks, _OPEN: let_go}

    def _seen(self, rows: Sequence[DataFrame], known: Known, slim: bool = False) -> DataFrame:
        """The new records of both sides, with all times as of them; those that only what is late is
        told by are null where nothing is.

        Args:
            slim: without keys and values.
        """
        new = reduce(union, [self._record(r, i, slim) for i, r in enumerate(rows)])
        # They are merged by the largest time so far of their own log: nothing before them has a larger.
        new = new.withColumn(NOW, F.greatest(F.col(ARRIVAL), F.unix_micros(known.stream_time)))
        if known.in_time:
            return new.withColumns({name: _nothing() for name in _TIMES})
        before = {name: known.marks.get(told, _nothing()) for name, told in _TIMES.items()}
        look = F.when(F.col(_VALID) & (F.col(AT) == F.col(NOW)), F.col(AT))
        moves = {LOOK: look}
        for i, name in enumerate(("_left", "_right")):
            moves[name] = F.when(F.col(_VALID) & (F.col(SIDE) == i), F.col(AT))
        return with_largest(new, moves, before, self.chunk)

    def _record(self, rows: DataFrame, place: int, slim: bool = False) -> DataFrame:
        """A side's rows, under names that both have: the record itself is one struct."""
        node, operator = self.consumed[place], self.operator
        own = [*node.key, *value_columns(node), TIMESTAMP]
        used = {c for some in operator.lineage().values() for _, c in some} | {*node.key, TIMESTAMP}
        wanted = [c for c in own if c.lower() in {u.lower() for u in used}]
        valid = moves_stream_time(node.key)
        there = [F.unix_micros(TIMESTAMP).alias(AT), PARTITION, OFFSET, valid.alias(_VALID)]
        order = [c for c in ORDER if c in rows.columns]
        return rows.select(
            F.lit(place).alias(SIDE),
            *([] if slim else match_columns(node.key)),
            *([] if slim else [F.struct(*columns(wanted)).alias(_SIDES[place])]),
            *there,
            IS_TOMBSTONE,
            *order,
        )

    def _with_window(self, rows: DataFrame) -> DataFrame:
        """With what each record's window is."""
        operator = self.operator
        before, after, grace = map(micros, (operator.before, operator.after, operator.grace))
        of_left = F.col(SIDE) == 0
        ahead = F.when(of_left, after).otherwise(before)
        back = F.when(of_left, before).otherwise(after)
        at = F.col(AT)
        return rows.withColumns({LOW: at - back, HIGH: at + ahead, END: at + ahead + grace})

    def _judged(self, rows: DataFrame, known: Known) -> DataFrame:
        """New records with what becomes of them."""
        once = F.col(END) < F.col(NOW)
        if known.in_time:
            no = F.lit(False)
            told = {NEW: F.lit(True), LATE: no, HORIZON: _nothing(), ONCE: once, _EXPIRED: no}
            return self._with_window(rows).withColumns(told)
        operator, at = self.operator, F.col(AT)
        reach, grace = micros(operator.reach), micros(operator.grace)
        of_left = F.col(SIDE) == 0
        own = F.when(of_left, F.col("_left")).otherwise(F.col("_right"))
        other = F.when(of_left, F.col("_right")).otherwise(F.col("_left"))
        segment = F.greatest(F.lit(_SEGMENT), F.call_function("div", reach, F.lit(2000))) * 1000
        oldest = F.call_function("div", F.greatest(F.lit(0), own - reach), segment)
        return self._with_window(rows).withColumns(
            {
                NEW: F.lit(True),
                LATE: at < F.col(NOW) - grace,
                HORIZON: other - reach,
                ONCE: once,
                _EXPIRED: F.col(_VALID) & (F.call_function("div", at, segment) < oldest),
            }
        )

    # -- results ---------------------------------------------------------------------------------

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], known: Known) -> DataFrame:
        new = self._judged(self._seen(rows, known), known)
        once = known.in_time and not self.kept and all(one.earlier is None for one in inputs)
        if known.hold is not None and not once:
            new = known.hold(new)
        earlier = [self._earlier(one, i, new.schema) for i, one in enumerate(inputs)]
        sides = [new.where(F.col(_VALID) & (F.col(SIDE) == i)) for i in (0, 1)]
        on, width = (
            match_names(self.consumed[0].key),
            tile_width(self.operator.before, self.operator.after),
        )
        found = self._results(matches(sides, earlier, on=on, width=width).withColumn(_PHASE, F.lit(1)))
        parts = [found, self._rejected(new)]
        for i in self.kept:
            records = union(sides[i], self._without_match_yet(earlier[i], i, known))
            alone = without_match(records, sides[1 - i], earlier[1 - i], on=on, width=width)
            parts += self._alone(alone, i, known)
            parts.append(self._keyless(new, i))
        return reduce(union, parts)

    def _earlier(self, one: Input, place: int, like: StructType) -> DataFrame | None:
        """Records of earlier runs, with the columns of new ones."""
        if one.earlier is None:
            return None
        rows = self._with_window(self._record(one.earlier, place)).where(_VALID)
        there = set(rows.columns)
        told = {NEW: F.lit(False), ONCE: F.lit(False)}
        missing = {
            f.name: told.get(f.name, F.lit(None).cast(f.dataType))
            for f in like.fields
            if f.name not in there
        }
        return rows.withColumns(missing).select(*[F.col(f"`{c}`") for c in like.names])

    def _without_match_yet(
        self, earlier: DataFrame | None, place: int, known: Known
    ) -> DataFrame | None:
        if earlier is None or known.state is None:
            return None
        kept = self._kept(known.state, place)
        return earlier.join(kept, kept.columns, "left_semi").select(*earlier.columns)

    def _alone(self, rows: DataFrame, place: int, known: Known) -> list[DataFrame]:
        """Records without a match: those that leave, and those that wait for one."""
        gone = ~F.col(ONCE) & F.coalesce(
            F.col(END) < known.marks_after.get("look", _nothing()), F.lit(False)
        )
        told = rows.withColumns({_PHASE: F.when(F.col(ONCE), 1).when(gone, 0), FROM: F.col(OFFSET)})
        first = {c: F.when(F.col(_PHASE) == 0, 0).otherwise(F.col(c)) for c in (INPUT, HOME, SEQUENCE)}
        first[ARRIVAL] = F.when(F.col(_PHASE) == 0, F.col(AT)).otherwise(F.col(ARRIVAL))
        leave = told.where(F.col(_PHASE).isNotNull()).withColumns(first)
        wait = told.where(F.col(_PHASE).isNull()).select(
            SIDE, PARTITION, FROM, F.lit(Fate.KEPT).alias(FATE)
        )
        return [self._results(self._with_nothing(leave, place), matched=False), wait]

    def _keyless(self, new: DataFrame, place: int) -> DataFrame:
        """Records of a side that is kept which have a value and no key: they leave at once."""
        rows = new.where((F.col(SIDE) == place) & ~F.col(_VALID) & ~F.col(IS_TOMBSTONE))
        told = rows.withColumns({_PHASE: F.lit(1), FROM: F.col(OFFSET)})
        return self._results(self._with_nothing(told, place), matched=False)

    def _with_nothing(self, rows: DataFrame, place: int) -> DataFrame:
        """With a left side that has the key alone, where it is missing."""
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
        """The log's columns, and what they are put in order by."""
        place = F.lit(0) if matched else F.lit(1) - F.col(SIDE)
        chosen = self.operator.projection().columns
        return rows.select(
            *[F.expr(expression).alias(name) for name, expression in chosen],
            F.timestamp_micros(AT).alias(TIMESTAMP),
            PARTITION,
            F.lit(False).alias(IS_TOMBSTONE),
            F.col(LATE).alias(IS_LATE) if matched else F.coalesce(LATE, F.lit(False)).alias(IS_LATE),
            *ORDER,
            F.col(_PHASE).cast("int").alias(_PHASE),
            THERE,
            place.alias(_RANK),
            FROM,
            F.lit(matched).alias(_MATCHED),
            F.lit(Fate.APPLIED).alias(FATE),
        )

    def _rejected(self, new: DataFrame) -> DataFrame:
        """What is counted: records without a key or a value, those that nothing later can find, and
        others that were late."""
        alone = F.lit(False)
        for i in self.kept:
            alone = alone | ((F.col(SIDE) == i) & ~F.col(IS_TOMBSTONE))
        dropped = F.col(_EXPIRED) | (~F.col(_VALID) & ~alone)
        fate = F.when(dropped, Fate.DROPPED).when(F.col(LATE) & F.col(_VALID), Fate.LATE)
        return new.select(PARTITION, fate.alias(FATE)).where(F.col(FATE).isNotNull())

    def state_after(self, rows: DataFrame, known: Known) -> DataFrame | None:
        if not self.kept:
            return None
        return rows.where(F.col(FATE) == Fate.KEPT).select(SIDE, PARTITION, FROM)

    def waiting(
        self, logs: Sequence[DataFrame], released: Mapping[int, int], state: DataFrame | None
    ) -> DataFrame:
        """``key columns`` (the left one's), ``timestamp, partition, offset, side`` of what has found no
        match and may still find one."""
        key, found = self.consumed[0].key, list[DataFrame]()
        for place, (log, node) in enumerate(zip(logs, self.consumed, strict=True)):
            named = [c.alias(k) for c, k in zip(columns(node.key), key, strict=True)]
            there = F.lit(_SIDES[place]).alias("side")
            rows = log.select(*named, TIMESTAMP, PARTITION, OFFSET, there)
            kept = None if state is None else self._kept(state, place)
            found.append(rows.limit(0) if kept is None else rows.join(kept, kept.columns, "left_semi"))
        return reduce(DataFrame.unionByName, found)

    def _kept(self, state: DataFrame, place: int) -> DataFrame:
        return state.where(F.col(SIDE) == place).select(PARTITION, F.col(FROM).alias(OFFSET))

    # -- order and counts ------------------------------------------------------------------------

    @property
    def result_order(self) -> list[Column]:
        """What is let go by time, right before left, key, arrival; then matches by the record that
        came, the time of what it found, and that one's arrival."""
        order = (_PHASE, *ORDER, THERE, _RANK, *self.node.key, FROM)
        return [F.col(f"`{c}`") for c in order]

    def result_chunk(self, few: bool) -> Column | None:
        if few:
            return None
        return hour_of_arrival() + F.col(_PHASE) * _FIRST_HOUR

    def tallies(self, columns: Sequence[str]) -> dict[str, Column]:
        return {
            _UNMATCHED: F.count_if(~F.col(_MATCHED)),
            Fate.WAITING: F.count_if(F.col(FATE) == Fate.KEPT),
        }

    def counts(self, taken: int, found: Counts, judged: Counts) -> dict[str, int]:
        told = (_UNMATCHED, Fate.LATE, Fate.DROPPED, Fate.WAITING)
        return {"in": taken, "out": found[Fate.APPLIED], **{name: found[name] for name in told}}


def _nothing() -> Column:
    return F.lit(None).cast("long")


def _long(value: Duration, partition: int) -> int:
    return length_at(value, partition) // timedelta(microseconds=1)
