"""Turns the input of a source into records: timestamp, partition, tombstone or a reason for quarantine.

The input is rows, a full snapshot that is compared with the rows that a table holds, or Delta's change
data feed, whose rows become puts and tombstones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DateType,
    MapType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from vt_dagster import rules
from vt_dagster.columns import IS_TOMBSTONE, OUTCOME, PARTITION, PROVIDED_COLUMNS, TIMESTAMP
from vt_dagster.core.arrival_order import Outcome, has_key, in_order_of_keys
from vt_dagster.core.log_columns import always_provided, comparable, partial_columns
from vt_dagster.topology.model import Stream, Table, VersionedTable
from vt_dagster.topology.schema import types_in

# Source records


REASON = "_reason"
"""Why a row is quarantined, a code of ``Reason``; null for a good record."""


SOURCE = "_source"
"""The origin of a row: a file's name, a topic."""
POSITION = "_position"
"""The position of a row in its origin: the line from 1, the offset."""
RAW = "_raw"
"""The row as read: the line, the message's bytes."""
RAW_KEY = "_raw_key"
"""The bytes of a message's key, if it has one."""
DELETED = "_deleted"
"""Whether the source marks a row as a tombstone; an optional column of its rows."""
RECORD_TIME = "_record_time"
"""When the source received a row: the timestamp of a tombstone whose own columns have none."""

START = "_start"
"""Whether a row belongs to the table's initial snapshot; an optional column of its rows."""
SOURCE_TIME = "record_time"
"""The name under which ``deleted_at`` may use ``_record_time``."""
RESTATES = "_restates"
"""Whether a row states the current value of a key instead of a change, and may repeat it: for Debezium
a null message and a snapshot's row, for a snapshot table each row; an optional column of its rows."""
TRUNCATES = "_truncates"
"""Whether a row deletes all rows of the source's table; an optional column of its rows. Such a row is
also ``_deleted``."""
SOURCE_RECORDED_AT = "_source_recorded_at"
"""The system time that the source provides for a row, if it is requested; an optional column of its
rows."""
MOVED = "_moved"
"""Column of rows of a change feed: whether an update changes a key column."""
UNCHANGED = "_unchanged"
"""The columns that a row omits because they are unchanged: an array of names; null = none. An optional
column of a source's rows."""


class Reason:
    """The reasons why a row is not a record or a record is not in the log, see ``rules``."""

    UNREADABLE = rules.UNREADABLE.name
    UNREADABLE_FILE = rules.UNREADABLE_FILE.name
    UNKNOWN_SCHEMA = rules.UNKNOWN_SCHEMA.name
    NULL_KEY = rules.NULL_KEY.name
    NULL_TIMESTAMP = rules.NULL_TIMESTAMP.name
    FUTURE_TIMESTAMP = rules.FUTURE_TIMESTAMP.name
    IMPOSSIBLE_TIMESTAMP = rules.IMPOSSIBLE_TIMESTAMP.name
    NULL_RECORDED_AT = rules.NULL_RECORDED_AT.name
    FUTURE_RECORDED_AT = rules.FUTURE_RECORDED_AT.name
    NULL_PARTITION = rules.NULL_PARTITION.name
    NULL_TOMBSTONE = rules.NULL_TOMBSTONE.name
    UNKNOWN_COLUMNS = rules.UNKNOWN_COLUMNS.name
    DUPLICATE_KEY = rules.DUPLICATE_KEY.name
    BROKEN_CONTRACT = rules.BROKEN_CONTRACT.name
    """The names of the broken checks follow it in the quarantine: ``broken_contract: positive
    (price)``."""


_FIRST, _LAST = "0001-01-01T00:00:00Z", "9999-12-31T23:59:59.999999Z"
"""The range of times that Python, Parquet readers and SQL engines have in common."""


def prepare(rows: DataFrame, node: Stream, latest: Column | None = None) -> DataFrame:
    """Turns a source's rows into records.

    Args:
        rows: the columns of ``node.schema``, ``_arrival``; if the source detects broken rows,
            ``_reason`` (null = good); if it has tombstones, ``_deleted`` and ``_record_time``; if they
            may belong to an initial snapshot, ``_start`` (such a row without a time of its own has
            ``_record_time``); if the source provides the system time of a row, ``_source_recorded_at``
            (for a tombstone without one, ``_record_time``). An input's ``partition`` is kept; otherwise
            it is the key's hash modulo ``node.partitions``.
        latest: the largest accepted timestamp and system time (inclusive); None = any. A timestamp in
            the far future would make all later records late, or recorded late.

    A deletion has the time of ``deleted_at``; if that is null or not set, its own time like any record;
    if it has none, ``_record_time``.

    If an expression of the node fails for a record (text that is not a time, a number out of range),
    the expression is null for that record: the record is at fault, not the run.

    Returns:
        the rows with ``timestamp, partition, is_tombstone, _outcome, _reason``; ``_outcome`` is
        ``quarantined`` if there is a reason, else null. For a table with partial updates also
        ``provided_columns``, the columns that the record provides; null = all.

    Source: FORMAT 4.2.1; kip889-tombstone-is-null, kip889-probe-null-key.
    """
    when = time_of(node, rows)
    broken = F.col(REASON) if REASON in rows.columns else F.lit(None).cast("string")
    reason = F.when(broken.isNotNull(), broken)
    if TRUNCATES in rows.columns and not isinstance(node, Table):
        reason = reason.when(F.col(TRUNCATES), Reason.UNREADABLE)
    if MOVED in rows.columns and isinstance(node, Table):
        # The row of the key before it would remain.
        reason = reason.when(F.col(MOVED), Reason.UNREADABLE)
    if isinstance(node, Table) or node.null_key == "quarantine":
        lacks_key = ~has_key(node.key)
        lacks_key = lacks_key & ~F.col(TRUNCATES) if TRUNCATES in rows.columns else lacks_key
        reason = reason.when(lacks_key, Reason.NULL_KEY)
    reason = reason.when(F.col(TIMESTAMP).isNull(), Reason.NULL_TIMESTAMP)
    sane = F.col(TIMESTAMP).between(F.lit(_FIRST).cast("timestamp"), F.lit(_LAST).cast("timestamp"))
    reason = reason.when(~sane, Reason.IMPOSSIBLE_TIMESTAMP)
    if latest is not None:
        reason = reason.when(F.col(TIMESTAMP) > latest, Reason.FUTURE_TIMESTAMP)
    reason = reason.when(_has_odd_value(node), Reason.UNREADABLE)
    tombstone = F.lit(False)
    if node.tombstone is not None:
        deletes = _attempt(F.coalesce(F.expr(node.tombstone), F.lit(False)), "boolean")
        reason = reason.when(deletes.isNull(), Reason.NULL_TOMBSTONE)
        tombstone = F.coalesce(deletes, F.lit(False))
    if DELETED in rows.columns:
        tombstone = tombstone | F.col(DELETED)
        when = F.coalesce(when, F.when(F.col(DELETED), F.col(RECORD_TIME)))
    if isinstance(node, Table) and node.deleted_at is not None:
        stated = F.timestamp_micros(_attempt(F.unix_micros(F.expr(node.deleted_at)), "bigint"))
        when = F.coalesce(F.when(tombstone, stated), when)
    if START in rows.columns:
        when = F.coalesce(when, F.when(F.col(START), F.col(RECORD_TIME)))
    if SOURCE_RECORDED_AT in rows.columns:
        recorded = F.col(SOURCE_RECORDED_AT)
        if DELETED in rows.columns:
            recorded = F.coalesce(recorded, F.when(F.col(DELETED), F.col(RECORD_TIME)))
        rows = rows.withColumn(SOURCE_RECORDED_AT, recorded)
        reason = reason.when(F.col(SOURCE_RECORDED_AT).isNull(), Reason.NULL_RECORDED_AT)
        if latest is not None:
            reason = reason.when(F.col(SOURCE_RECORDED_AT) > latest, Reason.FUTURE_RECORDED_AT)
    named = RECORD_TIME in rows.columns and SOURCE_TIME not in rows.columns
    rows = rows.withColumn(SOURCE_TIME, F.col(RECORD_TIME)) if named else rows
    timed = rows.withColumns({TIMESTAMP: when, IS_TOMBSTONE: tombstone})
    parts = partial_columns(node)
    if UNCHANGED in rows.columns and not takes_unchanged(node):
        # Only a partial column is filled from a version: another would become null, which nobody sent.
        filled = [F.lit(c) for c in parts if c not in always_provided(node)]
        lost = F.array_except(UNCHANGED, F.array(*filled).cast("array<string>"))
        reason = reason.when(~tombstone & (F.size(lost) > 0), Reason.UNREADABLE)
    if parts:
        assert isinstance(node, VersionedTable)
        given, unknown = _given(node, rows, parts)
        timed = timed.withColumn(PROVIDED_COLUMNS, F.when(~F.col(IS_TOMBSTONE), given))
        reason = reason.when(~tombstone & unknown, Reason.UNKNOWN_COLUMNS)
    added = dict[str, Column]()
    if PARTITION not in rows.columns:
        if node.partition_by is not None:
            chosen = _chosen(node.partition_by)
            reason = reason.when(has_key(node.key) & chosen.isNull(), Reason.NULL_PARTITION)
        added[PARTITION] = partition_of_key(node.key, node)
    outcome = F.when(F.col(REASON).isNotNull(), Outcome.QUARANTINED)
    # The quarantine is a table too, and its readers fail at times outside the range above.
    in_range = F.when(sane, F.col(TIMESTAMP))
    judged = timed.withColumns({**added, REASON: reason})
    judged = judged.withColumns({OUTCOME: outcome, TIMESTAMP: in_range})
    unwanted = {SOURCE_TIME: named, MOVED: MOVED in rows.columns}
    unwanted[UNCHANGED] = UNCHANGED in rows.columns and not takes_unchanged(node)
    dropped = [column for column, is_so in unwanted.items() if is_so]
    return judged.drop(*dropped) if dropped else judged


def takes_unchanged(node: Stream) -> bool:
    """Returns whether an unchanged column, which the source omits, takes the value of the previous
    record in source order.

    With ``only_columns`` it takes the value at the record's time instead.
    """
    whole = isinstance(node, VersionedTable) and not node.has_partial_updates and node.tie_break is None
    return whole and getattr(node.source, "orders_changes", False)


def _has_odd_value(node: Stream) -> Column:
    """Returns whether a column has a time outside the years 1 to 9999, see ``_FIRST``, or a map with a
    key twice, at any depth. Files may contain both."""
    found = F.lit(False)
    for f in node.schema.fields:
        if f.name != node.timestamp and _may_be_odd(f.dataType):
            found = found | F.coalesce(_is_odd(F.col(f"`{f.name}`"), f.dataType), F.lit(False))
    return found


def are_once(values: Column) -> Column:
    """Returns whether no value of an array occurs twice; null if the array is."""
    return F.size(values) == F.size(F.array_distinct(values))


def _may_be_odd(kind: DataType) -> bool:
    odd = DateType | TimestampType | TimestampNTZType | MapType
    return any(isinstance(k, odd) for k in types_in(kind))


def _is_odd(value: Column, kind: DataType) -> Column:
    if isinstance(kind, StructType):
        inner = [f for f in kind.fields if _may_be_odd(f.dataType)]
        no = F.lit(False)
        each = [F.coalesce(_is_odd(value[f.name], f.dataType), no) for f in inner]
        return reduce(lambda one, other: one | other, each)
    if isinstance(kind, ArrayType):
        element = kind.elementType
        return F.exists(value, lambda one: F.coalesce(_is_odd(one, element), F.lit(False)))
    if isinstance(kind, MapType):
        pairs = [(F.map_keys(value), kind.keyType), (F.map_values(value), kind.valueType)]
        twice = ~are_once(F.map_keys(value))
        each = [_is_odd(some, ArrayType(k)) for some, k in pairs if _may_be_odd(k)]
        return reduce(lambda one, other: one | other, each, twice)
    return ~F.year(value).between(1, 9999)


_EXACT = {
    # Spark's own formats truncate to milliseconds: two rows would be one.
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS[XXX]",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}


def as_json(columns: Sequence[str], nulls: bool = False) -> Column:
    """Returns columns as a text in JSON, with times to the microsecond.

    Args:
        nulls: whether the text has the columns that are null.
    """
    row = F.struct(*[F.col(f"`{c}`") for c in columns])
    return F.to_json(row, {**_EXACT, "ignoreNullFields": str(not nulls).lower()})


def time_of(node: Stream, rows: DataFrame) -> Column:
    """Returns the valid time of a source's rows; null if it cannot be determined."""
    column = node.timestamp in node.schema.names
    when = F.col(f"`{node.timestamp}`") if column else F.expr(node.timestamp)
    if (node.timestamp, "timestamp") in rows.dtypes:
        return when
    return F.timestamp_micros(_attempt(F.unix_micros(when.cast("timestamp")), "bigint"))


def _given(
    node: VersionedTable, rows: DataFrame, parts: Mapping[str, Sequence[str]]
) -> tuple[Column, Column]:
    """Returns the columns that a record provides (null = all), and whether they are unreadable.

    Args:
        parts: by column its earlier names.
    """
    only, nulls = node.only_columns, node.ignore_null_updates
    ignored = set(parts) if nulls is True else set(nulls or ())
    always = always_provided(node)
    listed, unknown = None, F.lit(False)
    if isinstance(only, str):
        listed, unknown = _listed(only, rows)
    provided: list[Column] = []
    for part, before in parts.items():
        names, says = (part, *before), F.lit(True)
        if listed is not None:
            says = F.coalesce(F.arrays_overlap(listed, F.array(*map(F.lit, names))), F.lit(True))
        elif only is not None:
            says = F.lit(part in only)
        if UNCHANGED in rows.columns:
            unchanged = F.array_contains(UNCHANGED, part)
            says = says & ~F.coalesce(unchanged, F.lit(False))
        if part in ignored:
            says = says & F.col(f"`{part}`").isNotNull()
        provided.append(F.lit(part) if part in always else F.when(says, F.lit(part)))
    given = F.array_compact(F.array(*provided))
    return F.when(F.size(given) < len(parts), given), unknown


def _listed(only_columns: str, rows: DataFrame) -> tuple[Column, Column]:
    """Returns the names that an expression lists (null if it is null), and whether it cannot be
    read."""
    names = F.expr(only_columns)
    listed = isinstance(rows.select(names).schema.fields[0].dataType, ArrayType)
    text = F.trim(_attempt(F.to_json(names) if listed else names, "string"))
    read = F.when(text.startswith("["), F.from_json(text, ArrayType(StringType())))
    read = F.array_compact(read.otherwise(F.split(text, r"\s*,\s*")))
    whole = _attempt(names.isNull(), "boolean")
    return read, whole.isNull() | (~whole & read.isNull())


def _chosen(partition_by: str) -> Column:
    return _attempt(F.expr(partition_by).cast("int"), "int")


def _attempt(value: Column, kind: str) -> Column:
    """Returns a value, or null if its computation fails.

    Spark catches errors only inside ``try_`` functions; this one accepts any expression.
    """
    return F.try_to_binary(value.cast("string"), F.lit("utf-8")).cast("string").cast(kind)


def partition_of_key(key: Sequence[str], node: Stream) -> Column:
    """Returns the partition of a key in a log that chooses it.

    If ``partition_by`` gives null, as for a record without a key, it is the first partition.
    """
    if node.partition_by is not None:
        return F.coalesce(_chosen(node.partition_by), F.lit(0))
    return F.pmod(F.xxhash64(*[F.col(f"`{k}`") for k in key]), F.lit(node.partitions)).cast("int")


# Differences to a full snapshot


_GIVEN, _HELD, _THERE = "_given", "_held", "_there"


def difference(
    dump: DataFrame,
    held: DataFrame,
    *,
    key: Sequence[str],
    compared: Sequence[str],
    buckets: int,
) -> DataFrame:
    """Returns the puts and tombstones that turn a table's rows into those of a snapshot.

    A row whose compared columns equal the held ones (two nulls are equal) gives no record. Rows with a
    duplicate key are rejected, and the table's row of that key is unchanged.

    Plan: one full outer join by key, that is one shuffle and sort of each side; one shuffle of the
    differences.

    Args:
        dump: key and value columns, ``_source``, ``_position``, ``_reason`` (null for a good row) and
            any other columns of a row.
        held: key columns and at least the compared ones of each row of the table; no tombstones.
        compared: value columns.
        buckets: the number of parts that the order of arrival is split into, see ``in_order_of_keys``.

    Returns:
        the rows of the snapshot that are new, changed or bad (``_reason``, also ``duplicate_key``), and
        for each key that the snapshot lacks a row of nulls; with ``_deleted`` and ``_arrival``.
    """
    keys = [F.col(f"`{k}`") for k in key]
    own = [c for c in dump.columns if c not in key]
    in_turn = W.partitionBy(*keys).orderBy(SOURCE, POSITION)
    beside = F.coalesce(F.lag(F.lit(1)).over(in_turn), F.lead(F.lit(1)).over(in_turn))
    twice = F.when(has_key(key) & beside.isNotNull(), Reason.DUPLICATE_KEY)
    checked = dump.withColumn(REASON, F.coalesce(F.col(REASON), twice))
    given = checked.select(*keys, F.struct(*[F.col(f"`{c}`") for c in own]).alias(_GIVEN))
    there = F.lit(True).alias(_THERE)
    rows = held.select(*keys, F.struct(there, *[F.col(f"`{c}`") for c in compared]).alias(_HELD))
    both = given.join(rows, list(key), "full_outer")
    types = {f.name: f.dataType for f in dump.schema.fields}
    same = reduce(
        lambda found, name: found & _same(name, types[name]), compared, F.col(_HELD).isNotNull()
    )
    gone = F.col(_GIVEN).isNull()
    news = both.where(gone | F.col(_GIVEN)[REASON].isNotNull() | ~same)
    records = news.select(
        *keys, *[F.col(_GIVEN)[c].alias(c) for c in own], F.col(_GIVEN).isNull().alias(DELETED)
    )
    then = [F.col(SOURCE), F.col(POSITION)]
    return in_order_of_keys(records, key=key, then=then, place=F.lit(0), buckets=F.lit(buckets))


def _same(name: str, kind: DataType) -> Column:
    one, other = comparable(F.col(_GIVEN)[name], kind), comparable(F.col(_HELD)[name], kind)
    return one.eqNullSafe(other)


# Delta's change data feed


CHANGE = "_change_type"
"""The column in which Delta's feed gives the kind of a change."""
VERSION = "_commit_version"
"""The column in which Delta's feed gives the version that made the change."""
BUCKETS = "_buckets"
_PUTS, _PUT, _CHANGE_FEED_FIRST, _ROW = ("insert", "update_postimage"), "_put", "_first", "_row"


def changes(feed: DataFrame, *, key: Sequence[str], values: Sequence[str], start: int) -> DataFrame:
    """Returns the effect of a table's commits on each key.

    For each version and key, the rows that exist after the version are puts. If there are none, the row
    that was deleted, or that had the key before an update, gives one tombstone. A row that one commit
    deletes and writes again is therefore a put, and an update that changes the key deletes the old key.
    Several puts of a key are rejected: the key is not one of the table.

    Plan: two shuffles and sorts, by version and hash of the key.

    Args:
        feed: key and value columns, ``_change_type``, ``_commit_version``, ``_buckets`` (the number of
            parts that a version is split into), and any other columns of a row.
        start: the smallest version.

    Returns:
        the rows by version, with ``_deleted``, ``_arrival`` and ``_reason`` (``duplicate_key`` or
        null), without ``_change_type`` and ``_buckets``; the values of a tombstone are null.
    """
    keys = [F.col(f"`{k}`") for k in key]
    kinds = dict(feed.dtypes)
    row = F.xxhash64(*[F.col(f"`{c}`") for c in values if "map<" not in kinds[c]], F.lit(0))
    rows = feed.withColumns({_PUT: F.col(CHANGE).isin(*_PUTS), _ROW: row})
    of_key = W.partitionBy(VERSION, *keys)
    # By content: the rows of a version have no order in the feed, and a repeated run must get the same
    # one.
    in_turn = of_key.orderBy(F.col(_PUT).desc(), _ROW)
    # Puts sort first, so a key's first row is a deletion only if the version has no put of the key.
    beside = [F.coalesce(near(_PUT).over(in_turn), F.lit(False)) for near in (F.lag, F.lead)]
    twice = has_key(key) & F.col(_PUT) & (beside[0] | beside[1])
    judged = rows.withColumns(
        {
            _CHANGE_FEED_FIRST: F.row_number().over(in_turn) == 1,
            REASON: F.when(twice, Reason.DUPLICATE_KEY),
        }
    )
    taken = judged.where(F.col(_PUT) | F.col(_CHANGE_FEED_FIRST))
    gone = ~F.col(_PUT)
    nulled = {c: F.when(~gone, F.col(f"`{c}`")) for c in values}
    records = taken.withColumns({**nulled, DELETED: gone})
    ordered = in_order_of_keys(
        records,
        key=key,
        then=[F.col(_ROW)],
        place=F.col(VERSION) - start,
        buckets=F.col(BUCKETS),
    )
    return ordered.drop(CHANGE, BUCKETS, _PUT, _CHANGE_FEED_FIRST, _ROW)
