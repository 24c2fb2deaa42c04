"""Joins of two tables: by key, by foreign key, and over their histories.

What they are: see ``vt_dagster.topology.operators.table_joins``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster.columns import (
    ARRIVAL,
    INPUT,
    INPUT_OFFSET,
    INPUT_PARTITION,
    IS_LATEST,
    IS_TOMBSTONE,
    OFFSET,
    OLD,
    ORDER,
    OUTCOME,
    PARTITION,
    TIMESTAMP,
    TURN,
    VALID_FROM,
    VALID_TO,
)
from vt_dagster.core import table_store
from vt_dagster.core.arrival_order import Outcome, by_partition, repartitioned, union, with_columns
from vt_dagster.core.log_columns import value_columns
from vt_dagster.core.processor import (
    BEFORE_ANY_RUN,
    Input,
    Processor,
    RunContext,
    RunPlan,
    RunTimes,
)
from vt_dagster.core.source_records import partition_of_key
from vt_dagster.core.table_changes import (
    EXISTS,
    LEFT,
    REPEATS,
    RIGHT,
    TAKEN,
    TableInput,
    comes_from,
    found_state,
    match_columns,
    match_names,
    over_struct,
    result_rows,
    state_of,
    timeline,
)
from vt_dagster.core.table_changes import columns as named
from vt_dagster.topology.model import Table, VersionedTable
from vt_dagster.topology.operators import ForeignKeyJoin, JoinKind, TableTableJoin
from vt_dagster.topology.version_rules import new_version_on_of

# Table-table join


_LEFT_STATE, _RIGHT_STATE, _OLD_STATE = "_left_state", "_right_state", "_old_state"
_FROM_LEFT, _LAST_TIME = "_from_left", "_last_time"
_LAST_OFFSET, _ALL, _MOVED = "_last_offset", "_all", "_moved"


class TableTableJoinProcessor(Processor[TableTableJoin]):
    """Joins two tables: :func:`join_tables`, with monotone timestamps also :func:`monotone`."""

    def plan(self, times: RunTimes = BEFORE_ANY_RUN) -> RunPlan:
        monotone = self.operator.monotone
        # The store of a plain table takes every result, and has a window over the earlier ones anyway.
        by_store = monotone and self.operator.emit == "every_update" and not self.node.versioned
        return RunPlan(
            self.whole_inputs,
            merges=True,
            reads_tables=True,
            monotonic=monotone,
            risen=_LAST_TIME if by_store else None,
        )

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        sides: list[TableInput] = []
        for node, changes, one in zip(self.node.inputs, rows, inputs, strict=True):
            there = None
            if one.table is not None and isinstance(node, Table):
                there = table_store.rows_of(node, one.table)
            on = new_version_on_of(node)
            about = changes, there, node.key, value_columns(node), node.versioned
            sides.append(TableInput(*about, new_version_on=on))
        left, right = sides
        joined = self.at_partition_of_key(self.joined(left, right, inputs))
        if not self.operator.monotone:
            return joined
        known = with_last_time(joined, context.state, self.node.key)
        return known if self.plan().risen else monotone(known, self.node.key)

    def at_partition_of_key(self, joined: DataFrame) -> DataFrame:
        """Moves all results of a key to one partition, if the sides may store the key in different
        ones: offsets of two partitions have no common order."""
        if self.operator.partitioning is not None:
            return joined
        return joined.withColumn(PARTITION, partition_of_key(self.node.key, self.node))

    def joined(self, left: TableInput, right: TableInput, inputs: Sequence[Input]) -> DataFrame:
        """Joins both sides."""
        operator, sides = self.operator, (left, right)
        # Timestamps of versioned sides do not decrease, so the last result has the largest one.
        last_decides = not operator.monotone or (left.versioned and right.versioned)
        last_decides &= all(side.new_version_on is None for side in sides)
        few_keys = not self.single_task and all(one.few_keys for one in inputs)
        if operator.emit == "per_run" and last_decides and few_keys:
            left, right = last_changes(sides, [one.rows for one in inputs])
        return join_tables(operator, left, right)

    def state_after(self, rows: DataFrame, context: RunContext) -> DataFrame | None:
        return last_times(rows, context.state, self.node.key) if self.operator.monotone else None


def last_changes(sides: Sequence[TableInput], logs: Sequence[DataFrame]) -> list[TableInput]:
    """Omits changes that do not affect the last result of a key in the run.

    After a key's last change, the state of each side is that after its own last change. If these states
    give no result, no earlier change has given one. That holds only for keys without a tombstone in the
    run, and for keys that stay in one partition: all changes of other keys are kept.

    Plan: one hash aggregate over the keys of both logs, broadcast, before both sides are shuffled by
    key.

    Args:
        sides: without ``new_version_on``.
        logs: the log rows of the sides' changes, which are many rows of few keys.
    """
    on = match_names(sides[0].key)
    ends = [f"{_LAST_OFFSET}{i}" for i in range(len(sides))]
    found = [
        rows.where(side.taken())
        .groupBy(*match_columns(side.key))
        .agg(
            F.max(OFFSET).alias(end),
            F.max(IS_TOMBSTONE).alias(_ALL),
            (F.min(PARTITION) != F.max(PARTITION)).alias(_MOVED),
        )
        for side, rows, end in zip(sides, logs, ends, strict=True)
    ]
    both = union(*found).groupBy(*on)
    of_key = both.agg(
        *[F.max(end).alias(end) for end in ends], F.max(F.col(_ALL) | F.col(_MOVED)).alias(_ALL)
    )
    kept: list[TableInput] = []
    for side, end in zip(sides, ends, strict=True):
        keyed = side.changes.select("*", *match_columns(side.key))
        known = keyed.join(F.broadcast(of_key), on, "left")
        last = F.coalesce(F.col(_ALL), F.lit(True)) | (F.col(OFFSET) == F.col(end))
        rows = known.where(~side.taken() | last).select(*named(side.changes.columns))
        kept.append(replace(side, changes=rows))
    return kept


def join_tables(operator: TableTableJoin, left: TableInput, right: TableInput) -> DataFrame:
    """Joins two tables by equal keys; the key columns may have different names.

    An out-of-order change of a versioned side is dropped (kip914-proposal). Any other change gives one
    result, or none if neither side has or had a row, if the kind of join requires more, or if it
    repeats its version (``new_version_on``); equal results and repeated tombstones are results too
    (kip914-probe-repeated-tombstones-inner, -left, -outer). The timestamp is the larger of the record's
    and that of the other side's latest row; without such a row it is the record's own
    (kip914-probe-result-timestamps).

    Plan: one shuffle and sort of both sides together by key, one pass of windows; before it one
    semi-join per available ``current`` with the keys of the other side's changes.

    A missing left row has only its key, a missing right row is null.

    Returns:
        one row per change: the selected columns, ``timestamp, partition`` (the record's)``,
        is_tombstone, _outcome`` (``applied``, ``no_result``, ``dropped``)``, ORDER, _turn``.

    Source: KIP-914 "Table-Table Joins".
    """
    on = match_names(left.key)
    left_keys = left.changes.select(*match_columns(left.key))
    right_keys = right.changes.select(*match_columns(right.key))
    rows = union(timeline(left, LEFT, right_keys), timeline(right, RIGHT, left_keys))
    rows = rows.withColumn(TURN, F.lit(0))
    # By key and in the order that the result's store needs next, so that it need not sort again.
    order = [*ORDER, TURN]
    from_left = comes_from(LEFT)
    moments = rows.select(
        *on,
        TIMESTAMP,
        PARTITION,
        *order,
        TAKEN,
        REPEATS,
        from_left.alias(_FROM_LEFT),
        state_of(left, LEFT, on, order).alias(_LEFT_STATE),
        state_of(right, RIGHT, on, order).alias(_RIGHT_STATE),
        F.when(from_left, found_state(LEFT).isNotNull())
        .otherwise(found_state(RIGHT).isNotNull())
        .alias(_OLD_STATE),
    ).where(F.col(TAKEN).isNotNull())
    says, tombstone = _outcome(operator.kind)
    says = says & ~F.col(REPEATS)
    other = F.when(F.col(_FROM_LEFT), F.col(_RIGHT_STATE).getField(TIMESTAMP)).otherwise(
        F.col(_LEFT_STATE).getField(TIMESTAMP)
    )
    applied = F.col(TAKEN) & says
    joined = moments.select(
        *on,
        side_row(left, F.col(_LEFT_STATE)).alias(LEFT),
        F.when(F.col(_RIGHT_STATE).isNotNull(), side_row(right, F.col(_RIGHT_STATE))).alias(RIGHT),
        F.when(applied, F.greatest(TIMESTAMP, other)).otherwise(F.col(TIMESTAMP)).alias(TIMESTAMP),
        PARTITION,
        (applied & tombstone).alias(IS_TOMBSTONE),
        F.when(~F.col(TAKEN), Outcome.DROPPED)
        .when(says, Outcome.APPLIED)
        .otherwise(Outcome.NO_RESULT)
        .alias(OUTCOME),
        *order,
    )
    key = {k: F.col(n) for k, n in zip(left.key, on, strict=True)}
    return result_rows(joined, key=key, select=operator.projection().columns)


def _outcome(kind: JoinKind) -> tuple[Column, Column]:
    """Returns whether a change gives a result, and whether the result is a tombstone."""
    has_left, has_right = F.col(_LEFT_STATE).isNotNull(), F.col(_RIGHT_STATE).isNotNull()
    anything = has_left | has_right | F.col(_OLD_STATE)
    from_left = F.col(_FROM_LEFT)
    if kind == "inner":
        return F.when(from_left, has_right).otherwise(has_left), ~(has_left & has_right)
    if kind == "left":
        return F.when(from_left, anything).otherwise(has_left), ~has_left
    return anything, ~(has_left | has_right)


def side_row(side: TableInput, state: Column) -> Column:
    """Returns a side's row as a struct: key, values, timestamp."""
    return F.struct(
        *[F.col(n).alias(k) for n, k in zip(match_names(side.key), side.key, strict=True)],
        *[state.getField(c).alias(c) for c in side.state_columns],
    )


def with_last_time(rows: DataFrame, state: DataFrame | None, key: Sequence[str]) -> DataFrame:
    """Adds ``_last_time``, the last timestamp of a key's results before the run; null = none.

    Plan: a join by key with ``state``, which has one row per key.
    """
    if state is None:
        return rows.withColumn(_LAST_TIME, F.lit(None).cast("timestamp"))
    return rows.join(state.withColumnRenamed(TIMESTAMP, _LAST_TIME), list(key), "left")


def monotone(rows: DataFrame, key: Sequence[str]) -> DataFrame:
    """Makes the timestamps of a key's results monotone: they never decrease.

    Plan: one shuffle and sort by key.

    Args:
        rows: of :func:`with_last_time`.

    Source: FORMAT section 7, "Join timestamps".
    """
    applied = F.col(OUTCOME) == Outcome.APPLIED
    so_far = W.partitionBy(*key).orderBy(*ORDER, TURN).rowsBetween(W.unboundedPreceding, W.currentRow)
    newest = F.greatest(F.max(F.when(applied, F.col(TIMESTAMP))).over(so_far), F.col(_LAST_TIME))
    timed = rows.withColumn(TIMESTAMP, F.when(applied, newest).otherwise(F.col(TIMESTAMP)))
    return timed.drop(_LAST_TIME)


def last_times(rows: DataFrame, state: DataFrame | None, key: Sequence[str]) -> DataFrame:
    """Returns the last timestamp of each key's results, including those that the result's store
    refused.

    Source: FORMAT section 7, "Join timestamps".
    """
    results = rows.where(F.col(OUTCOME).isin(Outcome.APPLIED, Outcome.LATE)).select(*key, TIMESTAMP)
    return union(results, state).groupBy(*key).agg(F.max(TIMESTAMP).alias(TIMESTAMP))


# Foreign-key join


_NEW, _OLD, _STATE = "_new_state", "_old_state", "_state"
_NEW_KEY, _OLD_KEY, _REFERS = "_new_foreign_key", "_old_foreign_key", "_foreign_key"
_KEY, _SALT = "_left_key", "_salt"
_START, _END, _MOMENT, _FIRST = "_start", "_end", "_moment", "_first"
_PLACE, _CHANGES, _TIME = "_place", "_changes", "_time"
_UNTIL, _SPAN = "_until", "_span"
_FEW_CHANGES = 64
"""Maximum number of changes of a right row that each of its left rows is compared with."""


class ForeignKeyJoinProcessor(TableTableJoinProcessor):
    """Joins two tables by a foreign key: :func:`join_by_foreign_key`."""

    @property
    def operator(self) -> ForeignKeyJoin:
        operator: Any = self.node.operator
        return operator

    def plan(self, times: RunTimes = BEFORE_ANY_RUN) -> RunPlan:
        return replace(super().plan(times), counts_keys_of=self.operator.right.name)

    def joined(self, left: TableInput, right: TableInput, inputs: Sequence[Input]) -> DataFrame:
        most = inputs[1].most_of_key
        first_run = left.current is None and right.current is None
        broadcast = first_run and most is not None and most <= _FEW_CHANGES
        return join_by_foreign_key(self.operator, left, right, broadcast=broadcast)


def join_by_foreign_key(
    operator: ForeignKeyJoin, left: TableInput, right: TableInput, *, broadcast: bool
) -> DataFrame:
    """Joins left rows with the right rows whose key they contain.

    Out-of-order changes of a versioned side are dropped, and so are left changes of an inner join that
    neither have nor had a foreign key (kip914-fk-inner-unversioned-unversioned). A left change gives
    one result or none. A right change gives one result for each left row that refers to it at that
    moment, in order of the left keys (kip914-probe-fk-order-of-subscribers). The timestamp after a left
    change is the larger of the left record's and the right row's; after a right change it is the right
    record's own (kip914-probe-fk-result-timestamps).

    Plan: left changes, one shuffle and sort of both sides together by foreign key, after one semi-join
    of the right's ``current``. Right changes, one shuffle and sort of the left's changes by left key,
    one of these and the right changes by foreign key, sorted twice, and an equi-join by foreign key and
    place (a shuffle and sort per side, unless Spark broadcasts), after a semi-join and an anti-join of
    the left's ``current``. The cost is proportional to the results, even for a key with many changes.
    With ``broadcast``: one shuffle and sort of the left's changes by left key, a broadcast of the
    right's changes, and a sort of the results, which are by key already.

    Args:
        broadcast: whether every task may receive all changes of the right, and compare each left row
            with all changes of its right row; only if both ``current`` are None.

    A missing right row is null.

    Returns:
        the selected columns, ``timestamp, partition`` (of the left row)``, is_tombstone, _outcome,
        ORDER`` (of the record that caused it)``, _turn`` (the left key). One row per left change, one
        per result of a right change, and one without a key per dropped right change.

    Source: KIP-914 "Foreign-Key Joins".
    """
    if broadcast:
        rows = _while_both_last(operator, left, right)
        key = {k: F.col(n) for k, n in zip(left.key, _left_names(left), strict=True)}
    else:
        rows = union(_after_left(operator, left, right), _after_right(operator, left, right))
        key = {k: F.col(LEFT).getField(k) for k in left.key}
    return result_rows(rows, key=key, select=operator.projection().columns)


def _left_names(left: TableInput) -> list[str]:
    return [f"_left{i}" for i in range(len(left.key))]


def _while_both_last(operator: ForeignKeyJoin, left: TableInput, right: TableInput) -> DataFrame:
    """Returns the results of both sides' changes in a run that has all of them.

    A row of a side exists from its change to the next change of its key. Each pair of rows that exist
    at the same time gives one result, caused by the later of the two changes. A left row whose right
    key has no row yet, or never has one, gives a result too.

    Plan: see :func:`join_by_foreign_key`; by key and in order, as the result's store needs them.
    """
    kind, foreign_key = operator.kind, operator.foreign_key
    key, on, moment = _left_names(left), match_names(right.key), F.struct(*named(ORDER))
    changes = left.changes.select(
        *named(left.key),
        TIMESTAMP,
        PARTITION,
        *ORDER,
        left.taken().alias(TAKEN),
        left.new_state().alias(_NEW),
        F.when(left.existed(), F.lit(True)).alias(_OLD),
        *([OLD] if kind == "inner" else []),
    )
    keyed = _with_foreign_key(changes, left, _NEW, foreign_key, _NEW_KEY)
    wanted, shown = F.col(_NEW_KEY), {_NEW_KEY: F.when(F.col(_NEW_KEY).isNotNull(), F.lit(True))}
    if kind == "inner":
        of_old = _with_foreign_key(keyed, left, OLD, foreign_key, _OLD_KEY, left.existed())
        keyed = of_old.drop(OLD)
        wanted = F.coalesce(_NEW_KEY, _OLD_KEY)  # see `_after_left`
        # The plan needs only whether the old key equals the new one, so it does not carry its value.
        same = F.coalesce(F.col(_NEW_KEY) == F.col(_OLD_KEY), F.lit(False))
        shown[_OLD_KEY] = F.when(F.col(_OLD_KEY).isNotNull(), same)
    rows = keyed.select(
        *[c.alias(n) for c, n in zip(named(left.key), key, strict=True)],
        *[wanted.getField(n).alias(n) for n in on],
        *[shown.get(c, F.col(c)).alias(c) for c in keyed.columns if c not in left.key],
    )
    if right.versioned:
        dropped = right.changes.where(~right.taken())
        rows = union(rows, dropped.select(TIMESTAMP, PARTITION, *ORDER, F.lit(False).alias(TAKEN)))
    rows = repartitioned(rows, key)  # before a row has its place twice
    # lead, not a frame of all following rows, which Spark would compute again for each row.
    place = f"PARTITION BY {', '.join(key)} ORDER BY {', '.join(ORDER)}"
    rows = rows.withColumn(_END, F.when(F.col(TAKEN), moment)).withColumns(
        {_MOMENT: moment, _END: F.expr(f"lead({_END}) IGNORE NULLS OVER ({place})")}
    )
    # Right changes give results only while the left row refers to them.
    refers = F.col(TAKEN) & F.col(_NEW_KEY).isNotNull()
    rows = rows.withColumn(_END, F.when(refers, F.col(_END)).otherwise(F.col(_MOMENT)))
    begun = F.col(_START).isNull() | F.col(_END).isNull() | (F.col(_START) < F.col(_END))
    ended = F.col(_UNTIL) <= F.col(_MOMENT)
    spans = F.broadcast(_spans(right).withColumnsRenamed({n: _SPAN + n for n in on}))
    same = [F.col(n) == F.col(_SPAN + n) for n in on]
    pairs = rows.join(spans, [*same, begun & ~F.coalesce(ended, F.lit(False))], "left")
    first = F.col(_START).isNull() | (F.col(_START) < F.col(_MOMENT))
    outcome, tombstone = _foreign_key_outcome(kind)
    found = F.col(_RIGHT_STATE).isNotNull()
    applied = outcome == Outcome.APPLIED
    larger = F.greatest(F.col(TIMESTAMP), F.col(_RIGHT_STATE).getField(TIMESTAMP))
    time = F.when(~first, F.col(_TIME)).when(applied, larger).otherwise(F.col(TIMESTAMP))
    gone = F.when(first, applied & tombstone).otherwise(F.lit(kind == "inner") & ~found)
    row = [F.col(n).alias(k) for n, k in zip(key, left.key, strict=True)]
    values = [F.col(_NEW).getField(c).alias(c) for c in left.state_columns]
    return pairs.select(
        *key,
        F.struct(*row, *values).alias(LEFT),
        F.when(found, side_row(right, F.col(_RIGHT_STATE))).alias(RIGHT),
        time.alias(TIMESTAMP),
        PARTITION,
        gone.alias(IS_TOMBSTONE),
        F.when(first, outcome).otherwise(Outcome.APPLIED).alias(OUTCOME),
        *[F.when(first, F.col(c)).otherwise(F.col(_START).getField(c)).alias(c) for c in ORDER],
        F.struct(*row).alias(TURN),
    )


def _spans(right: TableInput) -> DataFrame:
    """Returns the states of right keys, each from one change (null = the start of the run) to the next
    (null = the end of the run); before a key's first change, the state is null.

    Returns:
        the ``match_names``, ``_start, _until, _right_state``, and ``_time``: of the change.
    """
    on, moment = match_names(right.key), F.struct(*named(ORDER))
    in_order = W.partitionBy(*named(right.key)).orderBy(*ORDER)
    changes = right.changes.where(right.taken()).select(
        *match_columns(right.key),
        moment.alias(_START),
        F.lead(moment).over(in_order).alias(_UNTIL),
        F.lag(ARRIVAL).over(in_order).isNull().alias(_FIRST),
        right.new_state().alias(_RIGHT_STATE),
        F.col(TIMESTAMP).alias(_TIME),
    )
    before = changes.where(_FIRST).select(*on, F.col(_START).alias(_UNTIL))
    return union(changes.drop(_FIRST), before)


def _after_left(operator: ForeignKeyJoin, left: TableInput, right: TableInput) -> DataFrame:
    """Returns the results of left changes, and dropped right changes, which this plan reads too."""
    kind, foreign_key, on = operator.kind, operator.foreign_key, match_names(right.key)
    changes = left.changes.select(
        *named(left.key),
        TIMESTAMP,
        PARTITION,
        *ORDER,
        left.taken().alias(TAKEN),
        left.new_state().alias(_NEW),
        left.old_state().alias(_OLD),
    )
    keyed = _with_foreign_key(changes, left, _NEW, foreign_key, _NEW_KEY)
    keyed = _with_foreign_key(keyed, left, _OLD, foreign_key, _OLD_KEY)
    # An inner join whose foreign key is removed looks up the former right row, for its timestamp.
    wanted = F.col(_NEW_KEY) if kind == "left" else F.coalesce(_NEW_KEY, _OLD_KEY)
    asking = keyed.select(
        *[wanted.getField(n).alias(n) for n in on],
        # Spread rows without a foreign key: otherwise they would all meet in one task.
        F.when(wanted.isNull(), F.xxhash64(*named(left.key))).alias(_SALT),
        F.struct(*named(left.key)).alias(_KEY),
        *[c for c in keyed.columns if c not in left.key],
    )
    rows = union(asking, timeline(right, RIGHT, asking))
    moments = rows.withColumn(_RIGHT_STATE, state_of(right, RIGHT, [*on, _SALT])).where(
        F.col(TAKEN).isNotNull() & (~comes_from(RIGHT) | ~F.col(TAKEN))
    )
    outcome, tombstone = _foreign_key_outcome(kind)
    found = F.col(_RIGHT_STATE).isNotNull()
    larger = F.greatest(F.col(TIMESTAMP), F.col(_RIGHT_STATE).getField(TIMESTAMP))
    return moments.select(
        _left_row(left, _NEW).alias(LEFT),
        F.when(found, side_row(right, F.col(_RIGHT_STATE))).alias(RIGHT),
        F.when(outcome == Outcome.APPLIED, larger).otherwise(F.col(TIMESTAMP)).alias(TIMESTAMP),
        PARTITION,
        ((outcome == Outcome.APPLIED) & tombstone).alias(IS_TOMBSTONE),
        outcome.alias(OUTCOME),
        *ORDER,
        F.col(_KEY).alias(TURN),
    )


def _foreign_key_outcome(kind: JoinKind) -> tuple[Column, Column]:
    """Returns the outcome of a left change, and whether its result is a tombstone."""
    exists, existed = F.col(_NEW).isNotNull(), F.col(_OLD).isNotNull()
    refers, referred = F.col(_NEW_KEY).isNotNull(), F.col(_OLD_KEY).isNotNull()
    found = F.col(_RIGHT_STATE).isNotNull()
    outcome = F.when(~F.col(TAKEN), Outcome.DROPPED)
    if kind == "left":
        return outcome.when(exists | existed, Outcome.APPLIED).otherwise(Outcome.NO_RESULT), ~exists
    moved = referred & (F.col(_NEW_KEY) != F.col(_OLD_KEY))
    outcome = (
        outcome.when(refers, F.when(found | moved, Outcome.APPLIED).otherwise(Outcome.NO_RESULT))
        .when(referred, Outcome.APPLIED)
        .when(exists | existed, Outcome.DROPPED)
        .otherwise(Outcome.NO_RESULT)
    )
    return outcome, ~(refers & found)


def _after_right(operator: ForeignKeyJoin, left: TableInput, right: TableInput) -> DataFrame:
    """Returns the results of right changes: one per left row that refers to them at that moment."""
    on = match_names(right.key)
    changes = right.changes.where(right.taken()).select(
        *match_columns(right.key),
        TIMESTAMP,
        *ORDER,
        F.struct(*named(ORDER)).alias(_MOMENT),
        right.new_state().alias(_RIGHT_STATE),
    )
    intervals = _intervals(left, operator.foreign_key, changes.select(*on))
    place = F.row_number().over(W.partitionBy(*on).orderBy(_MOMENT)).cast("long")
    numbered = changes.withColumn(_PLACE, place)
    rows = _each_within(intervals, changes.select(*on, _MOMENT), on).join(numbered, [*on, _PLACE])
    referring = rows.withColumn(_KEY, F.struct(*named(left.key)))
    exists = F.col(_RIGHT_STATE).isNotNull()
    return referring.select(
        _left_row(left, _STATE).alias(LEFT),
        F.when(exists, side_row(right, F.col(_RIGHT_STATE))).alias(RIGHT),
        TIMESTAMP,
        PARTITION,
        (F.lit(operator.kind == "inner") & ~exists).alias(IS_TOMBSTONE),
        F.lit(Outcome.APPLIED).alias(OUTCOME),
        *ORDER,
        F.col(_KEY).alias(TURN),
    )


def _each_within(intervals: DataFrame, changes: DataFrame, on: Sequence[str]) -> DataFrame:
    """Returns one row per change of the foreign key within an interval, with the change's number.

    Changes are counted at both ends of an interval, so that no interval is compared with a change
    outside it, however many changes a key has.
    """
    moments = changes.select(*on, F.col(_MOMENT).alias(_START), F.col(_MOMENT).alias(_END))
    rows = union(intervals.withColumn(_CHANGES, F.lit(0)), moments.withColumn(_CHANGES, F.lit(1)))
    of_key, until_here = W.partitionBy(*on), (W.unboundedPreceding, W.currentRow)
    # Exclude a change at either end: where a table refers to itself, it is a record of both sides.
    starts = (F.col(_START).asc_nulls_first(), F.col(_CHANGES).desc())
    ends = (F.col(_END).asc_nulls_last(), F.col(_CHANGES))
    before = of_key.orderBy(*starts).rowsBetween(*until_here)
    until = of_key.orderBy(*ends).rowsBetween(*until_here)
    counted = rows.withColumns(
        {_START: F.sum(_CHANGES).over(before), _END: F.sum(_CHANGES).over(until)}
    )
    within = (F.col(_CHANGES) == 0) & (F.col(_START) < F.col(_END))
    places = F.explode(F.sequence(F.col(_START) + 1, F.col(_END))).alias(_PLACE)
    kept = [c for c in intervals.columns if c not in (_START, _END)]
    return counted.where(within).select(*kept, places)


def _intervals(left: TableInput, foreign_key: Sequence[str], requests: DataFrame) -> DataFrame:
    """Returns the intervals of the run (exclusive, null = open) in which left rows have a foreign key.

    Args:
        requests: foreign keys; unchanged left rows are read only if they have one of these.

    Returns:
        key columns, ``partition, _state, _start, _end`` and the ``match_names`` of the foreign key.
    """
    changes = left.changes.where(left.taken())
    in_order = W.partitionBy(*named(left.key)).orderBy(*ORDER)
    moment = F.struct(*named(ORDER))
    held = changes.select(
        *named(left.key),
        PARTITION,
        left.old_state().alias(_OLD),
        left.new_state().alias(_NEW),
        moment.alias(_MOMENT),
        F.lag(ARRIVAL).over(in_order).isNull().alias(_FIRST),
        F.lead(moment).over(in_order).alias(_END),
    ).select(*named(left.key), PARTITION, F.inline(F.array(_before(), _after())))
    rows = _referring(held, left, foreign_key)
    if left.current is None:
        return rows
    current = left.current.select(*named(left.key), PARTITION, left.row_state().alias(_STATE))
    unchanged = (
        _referring(current, left, foreign_key)
        .join(requests, requests.columns, "left_semi")
        .join(changes.select(*named(left.key)), list(left.key), "left_anti")
    )
    return union(rows, unchanged)


def _before() -> Column:
    """Returns the interval that ends at a left key's first change; a null state for other changes."""
    nothing = F.when(F.lit(False), F.col(_MOMENT))
    state = F.when(F.col(_FIRST), F.col(_OLD))
    return F.struct(state.alias(_STATE), nothing.alias(_START), F.col(_MOMENT).alias(_END))


def _after() -> Column:
    """Returns the interval that starts at a left change."""
    return F.struct(F.col(_NEW).alias(_STATE), F.col(_MOMENT).alias(_START), F.col(_END))


def _referring(rows: DataFrame, left: TableInput, foreign_key: Sequence[str]) -> DataFrame:
    """Keeps left states that have a foreign key, and adds its ``match_names``."""
    keyed = _with_foreign_key(rows, left, _STATE, foreign_key, _REFERS)
    parts = [F.col(_REFERS).getField(n).alias(n) for n in match_names(foreign_key)]
    return keyed.where(F.col(_REFERS).isNotNull()).select(*rows.columns, *parts)


def _with_foreign_key(
    rows: DataFrame,
    left: TableInput,
    state: str,
    foreign_key: Sequence[str],
    name: str,
    exists: Column | None = None,
) -> DataFrame:
    """Adds the foreign key of a left state as a struct of ``match_names``; null = none.

    Args:
        rows: the left's key columns, ``state``, and other columns, but no value column.
        exists: whether there is a state, if that need not read all of it.
    """
    parts = [F.expr(e).alias(n) for e, n in zip(foreign_key, match_names(foreign_key), strict=True)]
    complete = F.col(EXISTS)
    for e in foreign_key:
        complete = complete & F.expr(e).isNotNull()
    added = {name: F.when(complete, F.struct(*parts))}
    return over_struct(rows, left.key, F.col(state), left.state_columns, added, exists)


def _left_row(left: TableInput, state: str) -> Column:
    """Returns a left row as a struct: key, values, timestamp."""
    return F.struct(
        *[F.col(_KEY).getField(k).alias(k) for k in left.key],
        *[F.col(state).getField(c).alias(c) for c in left.state_columns],
    )


# Join of histories


_AT, _RANK, _HISTORY_STATE, _CHANGE, _SIDES = "_at", "_rank", "state", "change", (LEFT, RIGHT)
_MATCHED, _CAUSE, _BEGINS, _UNKNOWN = "_matched", "_cause", "_begins", "_unknown"
_HISTORY_PLACE = (INPUT, INPUT_PARTITION, INPUT_OFFSET, PARTITION)


class HistoryJoinProcessor(TableTableJoinProcessor):
    """Joins the histories of two versioned tables: :func:`join_histories`."""

    def plan(self, times: RunTimes = BEFORE_ANY_RUN) -> RunPlan:
        return replace(super().plan(times), reads_versions=True)

    def in_order(self, inputs: Sequence[Input]) -> list[DataFrame]:
        # Results are emitted by time, whenever the changes have arrived.
        return self.with_order_columns([one.rows for one in inputs])

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        sides: list[TableInput] = []
        for node, changes, one in zip(self.node.inputs, rows, inputs, strict=True):
            assert isinstance(node, VersionedTable)
            horizon = table_store.horizon_of(node, by_partition(one.times))
            sides.append(TableInput(changes, one.table, node.key, value_columns(node), True, horizon))
        return self.at_partition_of_key(join_histories(self.operator, *sides))


def join_histories(operator: TableTableJoin, left: TableInput, right: TableInput) -> DataFrame:
    """Joins two versioned tables at every time.

    A change is valid from its timestamp to the next version of its key. Within that interval each start
    of a version of either side gives one result, at that time, from the versions that both sides have
    there at the end of the run. If the kind of join requires a row that is missing, the result is a
    tombstone, omitted if there was no result before. Results are emitted by time, each from the
    change that caused it. A result at a time that a side no longer retains, while it has later versions
    of the key, is ``late``.

    Plan: for each side one read of the versions and a semi-join with the keys that change, then one
    shuffle and sort of both together by key, one pass of windows.

    Args:
        left, right: ``current`` contains the versions, tombstones included, that exist at the end of
            the run and end at or after the run's oldest change.

    Returns:
        as for ``join_tables``.

    Source: none: Kafka Streams joins only the latest rows.
    """
    on = match_names(left.key)
    keys = [side.changes.select(*match_columns(side.key)) for side in (left, right)]
    changed = keys[0].union(keys[1])
    events = union(_events(left, LEFT, changed), _events(right, RIGHT, changed))
    by_key = W.partitionBy(*on)
    in_order = by_key.orderBy(_AT, _RANK, INPUT, INPUT_OFFSET)
    so_far = in_order.rowsBetween(W.unboundedPreceding, W.currentRow)
    next_at = F.lead(_AT).over(in_order)
    if left.current is not None or right.current is not None:
        events = with_columns(events, {side: _without_unknown_end(side, on) for side in _SIDES})
    forgot = [F.max(_forgotten(side)).over(by_key).alias(_forgotten(side)) for side in _SIDES]
    moments = events.select(
        *on,
        _AT,
        *forgot,
        *[F.last(side, ignorenulls=True).over(so_far).alias(side) for side in _SIDES],
        F.coalesce(next_at > F.col(_AT), F.lit(True)).alias(_BEGINS),
    ).where(_BEGINS)
    states = [F.col(side).getField(_HISTORY_STATE) for side in _SIDES]
    there = [state.isNotNull() for state in states]
    found = [F.col(side).getField(_CHANGE) for side in _SIDES]
    ends = [t.isNull() & ~one.getField(IS_TOMBSTONE) for t, one in zip(states, found, strict=True)]
    unknown = [
        (F.col(side).isNull() | F.coalesce(end, F.lit(False))) & (F.col(_AT) < F.col(_forgotten(side)))
        for side, end in zip(_SIDES, ends, strict=True)
    ]
    moments = moments.withColumns(
        {
            _MATCHED: F.coalesce(_wanted(operator.kind, *there), F.lit(False)),
            _CAUSE: F.coalesce(*found),
            _UNKNOWN: F.coalesce(unknown[0] | unknown[1], F.lit(False)),
        }
    )
    so_before = F.lag(F.col(_MATCHED) | F.col(_UNKNOWN)).over(by_key.orderBy(_AT))
    before = F.coalesce(so_before, F.lit(False))
    # A tombstone change may end an earlier result; without one, a side without a row now had none
    # before.
    deleted = [F.coalesce(one.getField(IS_TOMBSTONE), F.lit(False)) for one in found]
    ended = before | deleted[0] | deleted[1] | F.col(_UNKNOWN)
    marked = moments.withColumn(_BEGINS, F.col(_MATCHED) | ended)
    cause = {name: F.col(_CAUSE).getField(name) for name in _HISTORY_PLACE}
    joined = marked.where(F.col(_BEGINS) & F.col(_CAUSE).isNotNull()).select(
        *on,
        side_row(left, F.col(LEFT).getField(_HISTORY_STATE)).alias(LEFT),
        F.when(there[1], side_row(right, F.col(RIGHT).getField(_HISTORY_STATE))).alias(RIGHT),
        F.col(_AT).alias(TIMESTAMP),
        (~F.col(_MATCHED)).alias(IS_TOMBSTONE),
        F.when(F.col(_UNKNOWN), Outcome.LATE).otherwise(Outcome.APPLIED).alias(OUTCOME),
        F.unix_micros(_AT).alias(ARRIVAL),
        *[column.alias(name) for name, column in cause.items()],
        F.lit(0).alias(TURN),
    )
    key = {k: F.col(n) for k, n in zip(left.key, on, strict=True)}
    return result_rows(joined, key=key, select=operator.projection().columns)


def _wanted(kind: JoinKind, left: Column, right: Column) -> Column:
    """Returns whether the join has a result, by the presence of both sides."""
    return {"inner": left & right, "left": left, "outer": left | right}[kind]


def _events(side: TableInput, name: str, changed: DataFrame) -> DataFrame:
    """Returns the times at which a side's state may change: the starts and ends of its versions, and
    the run's changes.

    Returns:
        the time from which on the side retains history (of a change only if its end may be unknown);
        ``match_names, _at, _rank`` (at equal times the decisive event comes last)``, _input,
        _input_offset``; and under the side's name a struct: the state from then on (null = none), and
        the run's change that caused it (null = none).
    """
    on = match_names(side.key)
    place = F.struct(IS_TOMBSTONE, *_HISTORY_PLACE)
    horizon = F.lit(None) if side.horizon is None or side.current is None else side.horizon
    horizon = horizon.cast("timestamp")
    # A later version came first. If it has expired, the end of this one is not known.
    expired = ~F.col(IS_TOMBSTONE) & ~F.col(IS_LATEST) & (F.col(TIMESTAMP) < horizon)
    made = side.changes.select(
        *match_columns(side.key),
        F.when(expired, horizon).alias(_forgotten(name)),
        F.col(TIMESTAMP).alias(_AT),
        F.lit(2).alias(_RANK),
        *(INPUT, INPUT_OFFSET),
        F.struct(side.new_state().alias(_HISTORY_STATE), place.alias(_CHANGE)).alias(name),
    )
    if side.current is None:
        return made
    # Nulls of the types of a change's place and of a state, without another plan that is analysed.
    absent = {INPUT: F.lit(0), INPUT_PARTITION: F.lit(0), INPUT_OFFSET: F.lit(0).cast("long")}
    fields = [absent.get(c, F.col(c)).alias(c) for c in (IS_TOMBSTONE, *_HISTORY_PLACE)]
    none, no_state = (F.when(F.lit(False), one) for one in (F.struct(*fields), side.row_state()))
    versions = side.current.select("*", *match_columns(side.key)).join(changed, on, "left_semi")

    def events_at(at: str, rank: int, state: Column) -> Column:
        return F.struct(F.col(at).alias(_AT), F.lit(rank).alias(_RANK), state.alias(_HISTORY_STATE))

    # Expand start and end from one scan: two scans would read the table twice.
    both = F.array(events_at(VALID_TO, 0, no_state), events_at(VALID_FROM, 1, side.new_state()))
    begins = versions.select(*on, horizon.alias(_forgotten(name)), none.alias(_CHANGE), F.inline(both))
    begins = begins.where(F.col(_AT).isNotNull())
    state = F.struct(_HISTORY_STATE, _CHANGE).alias(name)
    zeros = [F.lit(0).alias(c) for c in (INPUT, INPUT_OFFSET)]
    return union(made, begins.select(*on, _forgotten(name), _AT, _RANK, *zeros, state))


def _without_unknown_end(side: str, on: Sequence[str]) -> Column:
    """Returns a side's events. A late version that the table no longer has gives no state: it ended
    before the history that the table retains, and the table may have forgotten when.

    Args:
        on: the key columns.
    """
    of_time = W.partitionBy(*on).orderBy(_AT, _RANK, INPUT, INPUT_OFFSET)
    so_far = of_time.rowsBetween(W.unboundedPreceding, W.currentRow)
    there, state = F.col(side).isNotNull(), F.col(side).getField(_HISTORY_STATE)
    begun = F.max(F.when(there & (F.col(_RANK) == 1), F.col(_AT))).over(so_far)
    gone = (F.col(_RANK) == 2) & F.col(_forgotten(side)).isNotNull() & ~begun.eqNullSafe(F.col(_AT))
    change = F.col(side).getField(_CHANGE).alias(_CHANGE)
    return F.when(there, F.struct(F.when(~gone, state).alias(_HISTORY_STATE), change))


def _forgotten(side: str) -> str:
    return f"_forgotten_{side}"
