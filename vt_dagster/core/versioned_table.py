"""The versioned table: put, fold, reads, retention, and which records define a version (KIP-889).

A *version* is a row ``key, values, valid_from (inclusive), valid_to (exclusive, null = current),
is_tombstone, partition, offset``. Versions depend on timestamps, never on arrival: a record that
arrives out of order splits the interval that contains its timestamp.

Throughout, ``horizon`` is ``stream time - history retention`` of a row's partition, as a column over
``partition``: the table answers for times at or after it.

**``new_version_on``.** Only some columns define a version, so a record may repeat one. A table's view
keeps every record, because a late record may fall between two of one version. Each row has as ``old``
the previous version: a STRUCT of the values, ``timestamp`` and ``offset`` of that version's first
record; null if there is none or it is a tombstone. A row therefore shows by itself whether it repeats a
version and which one, even if only a part of the key's history is read or left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from vt_dagster.columns import (
    IS_LATEST,
    IS_TOMBSTONE,
    OLD,
    OUTCOME,
    PARTITION,
    PROPAGATED_FROM,
    TIMESTAMP,
    VALID_FROM,
    VALID_TO,
)
from vt_dagster.core.arrival_order import Outcome, duration, over_all_partitions, union, with_columns
from vt_dagster.core.as_of_join import FOUND, as_of_join, still_answers
from vt_dagster.core.partial_updates import merge_forward, with_always, without_lost_columns
from vt_dagster.core.plain_table import NEWEST, with_old, with_row_before
from vt_dagster.core.source_order import SO_FAR, SourceOrder
from vt_dagster.core.source_records import START
from vt_dagster.core.stream_time import PASSED, Bounds, late_from, passed, passed_in_one_task
from vt_dagster.topology.version_rules import VersionRules, expired

# new_version_on


_PEER, _LAST, _FIRST, _VERSION, _ROW = "_peer", "_last", "_first", "_of_version", "row"
_REPEATS, _END, _LAST_END = "_repeats", "_end", "_last_end"


def with_version_before(
    rows: DataFrame, replaced: Column, key: Sequence[str], new_version_on: Sequence[str]
) -> DataFrame:
    """Adds ``old`` to the rows of a view: the version before the row, null = none.

    Plan: window functions over rows that are sorted already; no shuffle.

    Args:
        rows: all rows that end after the earliest new one, with ``valid_from`` and ``valid_to``; stored
            rows also have ``old``, which is used if the previous version is not among the rows.
        replaced: whether another row of the same key and time replaces the row: such rows are dropped.
    """
    rows = rows.withColumn(OLD, _stored(rows, key))
    peers = rows.withColumn(_PEER, F.first(OLD, ignorenulls=True).over(W.partitionBy(*key, VALID_FROM)))
    kept = peers.where(~replaced).drop(OLD)
    in_order = W.partitionBy(*key).orderBy(VALID_FROM, *over_all_partitions(rows))
    state = F.struct(IS_TOMBSTONE, *[F.col(f"`{c}`") for c in new_version_on])
    kept = kept.withColumn(_LAST, F.lag(state).over(in_order))
    is_first, lives = F.col(_LAST).isNull(), ~F.col(IS_TOMBSTONE)
    as_last = ~F.col(_LAST)[IS_TOMBSTONE] & _same(new_version_on, F.col(_LAST))
    as_peer = F.col(_PEER).isNotNull() & _same(new_version_on, F.col(_PEER))
    # In a struct, to distinguish "no version" from "the version of the previous row".
    first_changes = F.struct(F.when(lives, _version(kept, key)).alias(_ROW))
    found = (
        F.when(
            is_first,
            F.when(lives & as_peer, F.struct(F.col(_PEER).alias(_ROW))).otherwise(first_changes),
        )
        .when(lives & as_last, F.lit(None))
        .otherwise(first_changes)
    )
    so_far = in_order.rowsBetween(W.unboundedPreceding, W.currentRow)
    known = kept.withColumn(_FIRST, found)
    known = known.withColumn(_VERSION, F.last(_FIRST, ignorenulls=True).over(so_far))
    before = F.lag(_VERSION).over(in_order)[_ROW]
    rows_with_old = known.withColumn(OLD, F.when(F.col(_LAST).isNull(), F.col(_PEER)).otherwise(before))
    return rows_with_old.drop(_PEER, _LAST, _FIRST, _VERSION)


def collapse_repeats(rows: DataFrame, key: Sequence[str], new_version_on: Sequence[str]) -> DataFrame:
    """Returns the versions of a view, without rows that repeat a version and without ``old``.

    Plan: one shuffle and sort by key.

    Args:
        rows: all rows of each key that end after some time. The first of them stands for a version that
            began before that time.
    """
    in_order = W.partitionBy(*key).orderBy(VALID_FROM)
    whole = in_order.rowsBetween(W.unboundedPreceding, W.unboundedFollowing)
    marked = rows.withColumns(
        {
            _REPEATS: repeats_version(new_version_on),
            _END: F.lag(VALID_TO).over(in_order),
            _LAST_END: F.last(VALID_TO).over(whole),
            _FIRST: F.lag(F.lit(1)).over(in_order).isNull(),
        }
    )
    kept = marked.where(~F.col(_REPEATS) | F.col(_FIRST)).withColumn(
        _LAST, F.lead(F.lit(1)).over(in_order).isNull()
    )
    ends = F.when(F.col(_LAST), F.col(_LAST_END)).otherwise(F.lead(_END).over(in_order))
    versions = with_version_start(kept.withColumn(VALID_TO, ends), new_version_on)
    return versions.drop(_REPEATS, _END, _LAST_END, _FIRST, _LAST)


def with_version_start(rows: DataFrame, new_version_on: Sequence[str]) -> DataFrame:
    """Gives rows the values and ``valid_from`` of their version's first record; drops ``old``."""
    repeats, old = repeats_version(new_version_on), F.col(OLD)
    kind = rows.schema[OLD].dataType
    assert isinstance(kind, StructType)
    fields = [c for c in kind.names if c in rows.columns]
    values = {c: F.when(repeats, old.getField(c)).otherwise(F.col(f"`{c}`")) for c in fields}
    begin = F.when(repeats, old.getField(TIMESTAMP)).otherwise(F.col(VALID_FROM))
    return rows.withColumns({**values, VALID_FROM: begin}).drop(OLD)


def repeats_version(new_version_on: Sequence[str]) -> Column:
    """Returns whether a row repeats the version in its ``old``: in a view the previous version, in a
    log the row that was its key's newest."""
    there = ~F.col(IS_TOMBSTONE) & F.col(OLD).isNotNull()
    return F.coalesce(there & _same(new_version_on, F.col(OLD)), F.lit(False))


def _same(new_version_on: Sequence[str], other: Column) -> Column:
    each = [F.col(f"`{c}`").eqNullSafe(other.getField(c)) for c in new_version_on]
    return reduce(lambda one, more: one & more, each)


def _version(rows: DataFrame, key: Sequence[str]) -> Column:
    """Returns the struct of a version: values, timestamp and offset of its first record."""
    return F.struct(*[F.col(f"`{f.name}`") for f in _version_fields(rows, key)])


def _version_fields(rows: DataFrame, key: Sequence[str]) -> list[StructField]:
    left_out = {*key, PARTITION, IS_TOMBSTONE, VALID_FROM, VALID_TO, OLD, _PEER, _LAST}
    return [f for f in rows.schema.fields if f.name not in left_out]


def _stored(rows: DataFrame, key: Sequence[str]) -> Column:
    """Returns the stored ``old``, cast to the current fields."""
    found = next((f.dataType for f in rows.schema.fields if f.name == OLD), None)
    if not isinstance(found, StructType):
        return F.when(F.lit(False), _version(rows, key))
    there, old = set(found.names), F.col(OLD)
    fields = [
        (old.getField(f.name) if f.name in there else F.lit(None)).cast(f.dataType).alias(f.name)
        for f in _version_fields(rows, key)
    ]
    return F.when(old.isNotNull(), F.struct(*fields))


# Versioned table


FIRST = "_first"
"""The first time of a key in the log."""
_HELD = "_held"


def horizon_of(rules: VersionRules, stream_time: Column) -> Column:
    """Returns the time (inclusive) from which on a table answers, for a row's partition.

    Source: KIP-889 "history retention", FORMAT 4.1.4; kip889-expired-get.
    """
    return stream_time - duration(rules.history_retention)


def is_refused(time: Column, rules: VersionRules, stream_time: Column) -> Column:
    """Returns whether a record is too old for the table: before the horizon; at the horizon it is
    accepted. Null, for example before the first record, counts as not too old.

    Source: FORMAT 4.1.1; kip889-grace-rejects-old-writes.
    """
    return F.coalesce(time < horizon_of(rules, stream_time), F.lit(False))


def put(
    records: DataFrame,
    versions: DataFrame | None,
    *,
    rules: VersionRules,
    values: Sequence[str],
    order: Sequence[str],
    stream_time: Column,
    chunk: Column | None = None,
    bounds: Bounds | None = None,
    of_rejected: Sequence[str] = (),
    colliding_versions: DataFrame | None = None,
    first_changes: DataFrame | None = None,
    parts: Mapping[str, Sequence[str]] = {},
    ties: StructField | None = None,
    by_source: SourceOrder | None = None,
) -> DataFrame:
    """Decides for each record whether the table accepts it, and whether it is its key's latest.

    A record with ``timestamp < stream time - history_retention`` is refused, one exactly that old is
    accepted; refused records do not advance stream time. Tombstones are records like any other. A
    record at its key's newest timestamp replaces that version and is the latest. A row of an initial
    snapshot (``_start``) is never late.

    If the table follows its source's order (``by_source``), no record is late, and the table holds the
    last record of a key: see ``core.source_order``.

    Plan: that of ``passed`` (not if the source's order is followed), then one shuffle and sort by
    key together with one row per key of ``versions``.

    Args:
        records: ``key columns, value columns, timestamp, partition, is_tombstone, _outcome, …`` of one
            run; those with an outcome already (quarantined) are passed through and have no effect.
        versions: the versions before the run, of which those with ``valid_to`` null are used;
            None = none.
        order: the columns that define the order of a key's records.
        stream_time: stream time of the record's partition before the run.
        chunk, bounds: see ``passed``.
        of_rejected: columns that are null in applied records.
        colliding_versions: see :func:`without_lost_ties`.
        first_changes: see :func:`without_superseded`.
        parts: see :func:`core.partial_updates.merge_forward`, which takes ``colliding_versions`` as its
            versions; empty: each record is a whole row.
        ties: see :func:`core.partial_updates.without_lost_columns`; None = ties are between rows.
        by_source: the effect of the source's order; None = none. Cannot be combined with ``parts``.

    Returns:
        the records with ``_outcome`` (``applied``, ``late``, ``lost_tie``, ``covered`` or
        ``nothing_new``), ``is_latest``, and ``old``: the key's newest row before the record. With
        ``parts`` and ``by_source`` also ``propagated_from`` (INT): 0 for a record, 1, 2, … for rows
        derived from it.

    Source: KIP-889 "history retention doubles as grace period"; kip889-grace-rejects-old-writes.
    """
    key, tie_break = rules.key, rules.tie_break
    starts, follows = START in records.columns, by_source is not None and by_source.follows
    if follows:
        judged = records.withColumn(OUTCOME, F.coalesce(OUTCOME, F.lit(Outcome.APPLIED)))
    else:
        # A record with an outcome is quarantined, and must not advance stream time.
        late, moves = late_from(rules.history_retention), F.col(OUTCOME).isNull()
        if chunk is None and bounds is None:
            seen, refused = records, passed_in_one_task(records, late, stream_time, moves)
        else:
            seen = passed(records, late, stream_time, moves, chunk=chunk, bounds=bounds)
            refused = F.col(PASSED)
        refused = refused & ~F.col(START) if starts else refused
        outcome = F.when(refused, Outcome.LATE).otherwise(Outcome.APPLIED)
        judged = seen.withColumn(OUTCOME, F.coalesce(OUTCOME, outcome))
        judged = judged if seen is records else judged.drop(PASSED)
    newest = None if versions is None else versions.where(F.col(VALID_TO).isNull())
    if by_source is not None:
        judged = by_source.without_repeated(judged, newest, key=key, values=values, order=order)
    if starts:
        judged = without_superseded(judged, first_changes, key=key)
    about: dict[str, Any] = {"key": key, "order": order}
    if ties is not None:
        if colliding_versions is not None:
            colliding_versions = with_always(colliding_versions, rules.always_provided)
        by_column: dict[str, Any] = {"tie_break": tie_break, "parts": parts, "ties": ties}
        judged = without_lost_columns(judged, colliding_versions, **about, **by_column)
    elif tie_break is not None:
        judged = without_lost_ties(judged, colliding_versions, **about, tie_break=tie_break)
    if parts:
        own = [] if ties is None else [ties.name]
        judged = merge_forward(judged, colliding_versions, **about, values=[*values, *own], parts=parts)
        order = [*order, PROPAGATED_FROM]
    rejected = F.col(OUTCOME) != Outcome.APPLIED
    judged = with_columns(judged, {c: F.when(rejected, F.col(c)) for c in of_rejected})
    known = with_row_before(judged, newest, key=key, values=values)
    if by_source is not None:
        known = by_source.with_last(known, key=key)
    before = W.partitionBy(*key).orderBy(*order).rowsBetween(W.unboundedPreceding, -1)
    accepted = F.when(F.col(OUTCOME) == Outcome.APPLIED, F.col(TIMESTAMP))
    so_far = F.greatest(F.max(accepted).over(before), F.col(NEWEST))
    if by_source is not None:
        known, so_far = known.withColumn(SO_FAR, so_far), F.col(SO_FAR)
    in_order = F.coalesce(F.col(TIMESTAMP) >= so_far, F.lit(True))
    decided = known.withColumn(IS_LATEST, (F.col(OUTCOME) == Outcome.APPLIED) & in_order)
    if by_source is not None:
        decided = by_source.in_force_again(decided, newest, key=key, order=order)
        order = [*order, PROPAGATED_FROM]
    latest, own = F.col(IS_LATEST), (NEWEST, SO_FAR)
    return with_old(decided, latest, key=key, values=values, order=order, drop=own)


def without_superseded(
    records: DataFrame, first_changes: DataFrame | None, *, key: Sequence[str]
) -> DataFrame:
    """Marks rows of an initial snapshot that changes supersede: ``covered``.

    From the time of its first change on, a key's history consists of its changes: a snapshot row at or
    after that time is covered, also by a deletion. The snapshot therefore counts only for keys that
    have no change or whose first change is later.

    Plan: a join by key with the log's keys; the shuffle by key is one that :func:`put` needs.

    Args:
        records: with their outcome and ``_start``.
        first_changes: ``key columns, _first`` of the log; None = it is empty.
    """
    applied_at = F.when((F.col(OUTCOME) == Outcome.APPLIED) & ~F.col(START), F.col(TIMESTAMP))
    first = F.min(applied_at).over(W.partitionBy(*key))
    if first_changes is not None:
        records = records.join(first_changes, list(key), "left")
        first = F.least(first, F.col(FIRST))
    covered = F.col(START) & (F.col(OUTCOME) == Outcome.APPLIED) & (first <= F.col(TIMESTAMP))
    outcome = F.when(F.coalesce(covered, F.lit(False)), Outcome.COVERED).otherwise(F.col(OUTCOME))
    return records.withColumn(OUTCOME, outcome).drop(FIRST)


def without_lost_ties(
    records: DataFrame,
    versions: DataFrame | None,
    *,
    key: Sequence[str],
    order: Sequence[str],
    tie_break: str,
) -> DataFrame:
    """Marks records that lose against another record of their key and timestamp: ``lost_tie``.

    A record loses against an earlier arrival with a larger value; with an equal value it wins. The
    accepted records of a key and timestamp therefore ascend, and the last one by offset has the largest
    value, whatever the order of arrival. Null is smaller than any value.

    Plan: a join with the versions; the shuffle by key is one that :func:`put` needs.

    Args:
        records: with their outcome; ``versions``: those that may have their keys and timestamps; None =
            none.
        tie_break: a value column.
    """
    place, value = [*key, TIMESTAMP], F.struct(F.col(f"`{tie_break}`").alias("value"))
    there = F.lit(None)
    if versions is not None:
        keys = [F.col(f"`{k}`") for k in key]
        held = versions.select(*keys, F.col(VALID_FROM).alias(TIMESTAMP), value.alias(_HELD))
        records, there = records.join(held, place, "left"), F.col(_HELD)
    before = W.partitionBy(*place).orderBy(*order).rowsBetween(W.unboundedPreceding, -1)
    counts = F.col(OUTCOME) == Outcome.APPLIED
    largest = F.greatest(F.max(F.when(counts, value)).over(before), there)
    lost = counts & F.coalesce(largest > value, F.lit(False))
    return records.withColumn(OUTCOME, F.when(lost, Outcome.LOST_TIE).otherwise(F.col(OUTCOME))).drop(
        _HELD
    )


def fold(
    versions: DataFrame | None,
    log: DataFrame,
    *,
    key: Sequence[str],
    horizon: Column,
    new_version_on: Sequence[str] | None = None,
) -> DataFrame:
    """Returns the versions after more of the log: the view of a versioned table.

    There is one version per key and timestamp, the last offset wins; ``valid_to`` is the next
    version's ``valid_from``; tombstones are versions. A version with ``valid_to <= horizon`` has
    expired, and so has a tombstone before the horizon, since no later record can be accepted before it.

    Plan: one shuffle and sort by key.

    Args:
        versions: the versions before; None = none. Sufficient are those that end after the earliest
            new out-of-order row, and all current ones.
        log: log rows, ``key columns, value columns, timestamp, partition, offset, is_tombstone``,
            after those that made ``versions``; rows already included change nothing.
        horizon: after these log rows.
        new_version_on: adds ``old``, see ``core.versioned_table``; None = does not.

    Source: KIP-889 "validity interval", FORMAT 4.1.3, section 7; kip889-validity-interval,
    kip889-put-replaces-same-timestamp.
    """
    fresh = log.drop(IS_LATEST, OLD).withColumn(VALID_FROM, F.col(TIMESTAMP))
    everything = union(fresh, None if versions is None else versions.drop(VALID_TO))
    in_order = W.partitionBy(*key).orderBy(VALID_FROM, *over_all_partitions(everything))
    chained = everything.withColumn(VALID_TO, F.lead(VALID_FROM).over(in_order))
    # Of two records of one key and timestamp the later offset wins (KIP-889), so the earlier one has an
    # empty interval.
    replaced = F.coalesce(F.col(VALID_TO) <= F.col(VALID_FROM), F.lit(False))
    if new_version_on is not None:
        return drop_expired(with_version_before(chained, replaced, key, new_version_on), horizon)
    return chained.where(~replaced & ~_is_expired(horizon))


def drop_expired(versions: DataFrame, horizon: Column) -> DataFrame:
    """Removes expired versions."""
    return versions.where(~_is_expired(horizon))


def _is_expired(horizon: Column) -> Column:
    gone = expired(F.col(VALID_FROM), F.col(VALID_TO), F.col(IS_TOMBSTONE), horizon)
    return F.coalesce(gone, F.lit(False))


def clip_at_valid_until(versions: DataFrame, valid_until: str) -> DataFrame:
    """Returns the versions as a reader sees them: each ends with the next one, or earlier by itself.

    Args:
        valid_until: the column with the time at which a version ends by itself; null = it does not.
    """
    return versions.withColumn(VALID_TO, F.least(F.col(VALID_TO), F.col(f"`{valid_until}`")))


def valid_at(as_of: Column, horizon: Column) -> Column:
    """Returns whether a version is the match as of a time, see :func:`still_answers`. A tombstone
    never is."""
    begun = F.col(VALID_FROM) <= as_of
    return begun & still_answers(as_of, F.col(VALID_TO), horizon) & ~F.col(IS_TOMBSTONE)


def latest(versions: DataFrame) -> DataFrame:
    """Returns the current version of every key: a row or a tombstone.

    Source: FORMAT 4.1.3; kip889-tombstone-is-null.
    """
    return versions.where(F.col(VALID_TO).isNull())


def get(versions: DataFrame) -> DataFrame:
    """Returns the current row of every key, without deleted keys.

    Source: KIP-889 ``get(key)``; kip889-motivation-versioned.
    """
    return latest(versions).where(~F.col(IS_TOMBSTONE))


def get_as_of(versions: DataFrame, as_of: Column, horizon: Column) -> DataFrame:
    """Returns the row of every key as of a time (inclusive).

    Source: KIP-889 ``get(key, asOfTimestamp)``; kip889-validity-interval, kip889-expired-get.
    """
    return versions.where(valid_at(as_of, horizon))


def history(versions: DataFrame, *, key: Sequence[str]) -> DataFrame:
    """Returns all versions, tombstones included, by key and time."""
    return versions.orderBy(*key, VALID_FROM)


def key_range(
    versions: DataFrame, *, key: Sequence[str], lower: Sequence[object], upper: Sequence[object]
) -> DataFrame:
    """Returns the versions of the keys from ``lower`` to ``upper``, both inclusive, compared as
    tuples."""

    def tuple_of(values: Sequence[Column]) -> Column:
        return F.struct(*[v.alias(f"k{i}") for i, v in enumerate(values)])

    columns = tuple_of([F.col(k) for k in key])
    low, high = (
        tuple_of([F.lit(v).cast(versions.schema[k].dataType) for k, v in zip(key, side, strict=True)])
        for side in (lower, upper)
    )
    return versions.where((columns >= low) & (columns <= high))


def delete(
    requests: DataFrame, versions: DataFrame, *, rules: VersionRules, stream_time: Column
) -> DataFrame:
    """Returns the row that a deletion removes: the row as of each request, null if there is none or the
    request is refused.

    A deletion is a tombstone record; :func:`put` stores it. Pass at most one request per key and
    run: each sees the table as it was before the run.

    Args:
        requests: ``key columns, timestamp, partition, …``.
        stream_time: stream time of the request's partition before the run.

    Returns:
        the requests with ``removed``, the struct of the found version's columns.

    Source: KIP-889 ``delete``; kip889-delete-is-get-and-put-null.
    """
    key, horizon = rules.key, horizon_of(rules, stream_time)
    found = as_of_join(requests, versions, left_key=key, right_key=key, horizon=horizon, name="removed")
    refused = is_refused(F.col(TIMESTAMP), rules, stream_time)
    removed = F.when(F.col(FOUND) & ~refused, F.col("removed"))
    return found.withColumn("removed", removed).drop(FOUND)
