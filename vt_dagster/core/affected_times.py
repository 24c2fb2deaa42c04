"""The time intervals of keys that a table's new records change, and the answers that they replace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from vt_dagster.columns import (
    ARRIVAL,
    FINAL,
    IS_FINAL,
    IS_TOMBSTONE,
    OFFSET,
    PARTITION,
    TIMESTAMP,
    VALID_FROM,
)
from vt_dagster.core.arrival_order import by_partition, union
from vt_dagster.core.stream_time import STREAM_TIME, with_stream_time
from vt_dagster.core.table_changes import columns, match_columns, match_names

FROM, TO, UNTIL, EDGE, BY, ANSWER = "_from", "_to", "_until", "_edge", "_by", "_answer"
_NEW, _SEEN = "_new", "_seen_from"


def affected_times(
    changes: DataFrame,
    earlier: DataFrame | None,
    *,
    key: Sequence[str],
    values: Sequence[str],
    promised: Column,
    stream_time: Column,
    chunk: Column | None,
    broadcastable: bool,
) -> DataFrame:
    """Returns the interval in which each new record of a table is valid for the rows that it corrects.

    A record corrects rows whose timestamp is at or after its *edge*: the stream time of its partition
    on its own arrival, less the promise. A row before the edge ignores the record and keeps the last
    record, by timestamp and offset, among those that arrived earlier. The result therefore depends on
    the order of arrival alone, never on how records are batched into runs.

    Plan: a semi-join of the earlier records, then one shuffle and sort by key of the remaining rows,
    and the plan of ``with_stream_time`` over the new records.

    Args:
        changes: the table's log rows of the run.
        earlier: the table's earlier log rows that are younger than the oldest change; None = none.
        values: the columns of the table that answers contain.
        promised: how long rows are corrected, in microseconds.
        stream_time: before the run, epoch microseconds, by partition of the table.
        chunk: see ``with_stream_time``.
        broadcastable: whether every task may receive all keys of the changes.

    Returns:
        ``match_names`` of the key, ``_from`` (inclusive), ``_to`` (exclusive; null = open),
        ``_edge`` (epoch microseconds), ``_by``: a struct of the record's partition and offset,
        ``_answer``: a struct of the values, null for a tombstone; and ``_until`` (exclusive; null =
        open): the end of the record's interval for rows before any edge. For one key, the intervals
        from the edge on do not overlap, and neither do the intervals up to ``_until``.
    """
    on, at = match_names(key), F.col(TIMESTAMP)
    before = F.timestamp_micros(stream_time)
    timed = with_stream_time(changes.withColumn(ARRIVAL, F.col(OFFSET)), before, chunk=chunk)
    edge = F.unix_micros(STREAM_TIME) - promised
    said = {VALID_FROM: at}
    answer = F.when(
        ~F.col(IS_TOMBSTONE), F.struct(*[said.get(v, F.col(f"`{v}`")).alias(v) for v in values])
    )
    place = [PARTITION, OFFSET]
    rows = timed.select(
        *match_columns(key),
        *(at.alias(FROM), F.greatest(at, F.timestamp_micros(edge)).alias(_SEEN)),
        *(F.lit(True).alias(_NEW), *place, edge.alias(EDGE), answer.alias(ANSWER)),
    )
    if earlier is not None:
        there = earlier.select(
            *match_columns(key), at.alias(FROM), at.alias(_SEEN), F.lit(False).alias(_NEW), *place
        )
        keys = rows.select(*on)
        rows = union(rows, there.join(F.broadcast(keys) if broadcastable else keys, on, "left_semi"))
    # A descending window: Spark recomputes a frame that grows downwards for each row.
    later = W.partitionBy(*on).orderBy(*[F.col(c).desc() for c in (FROM, OFFSET, PARTITION)])
    until, seen_until = F.lag(FROM), F.min(_SEEN)
    timed = rows.withColumns(
        {
            UNTIL: until.over(later),
            TO: seen_until.over(later.rowsBetween(W.unboundedPreceding, -1)),
        }
    ).where(_NEW)
    alone = F.col(UNTIL).isNull() | (F.col(UNTIL) > F.col(FROM))
    seen = F.col(TO).isNull() | (F.col(TO) > F.col(_SEEN))
    first = F.when(alone, F.col(FROM)).otherwise(F.col(_SEEN)).alias(FROM)
    found = timed.where(alone | seen)
    return nullable(
        found.select(*on, first, TO, UNTIL, EDGE, F.struct(*place).alias(BY), ANSWER), ANSWER
    )


def with_row_of_key(
    records: DataFrame, own: Sequence[str], rows: DataFrame, key: Sequence[str], what: Column, name: str
) -> DataFrame:
    """Joins records with a column of another table's row of their key; null where there is no row.

    Args:
        own: the columns of the records that hold the other table's key.
        rows, key: the other table, one row per key.
        what: an expression over the other table's columns; ``name``: the name of its result.
    """
    names = [f"_key{i}" for i in range(len(key))]
    theirs = [c.alias(n) for c, n in zip(columns(key), names, strict=True)]
    there = nullable(rows.select(*theirs, what.alias(name)), name)
    matches = F.lit(True)
    for mine, other in zip(own, names, strict=True):
        matches = matches & (F.col(f"`{mine}`") == F.col(other))
    return records.join(there, matches, "left").drop(*names)


def nullable(rows: DataFrame, name: str) -> DataFrame:
    """Makes a struct's fields nullable: Arrow cannot write a null struct of non-null fields."""
    kind = rows.schema[name].dataType
    if not isinstance(kind, StructType):
        return rows
    fields = [StructField(f.name, f.dataType) for f in kind.fields]
    return rows.withColumn(name, F.col(name).cast(StructType(fields)))


def same(name: str, kind: str, row: Column) -> Column:
    """Returns whether a column equals the field of that name in another row; two nulls are equal.

    Args:
        kind: Spark's name of the column's type.
        row: the other row, a struct.
    """
    one, other = F.col(f"`{name}`"), row.getField(name)
    if "map<" in kind:  # Spark cannot compare maps
        one, other = F.to_json(F.struct(one)), F.to_json(F.struct(other))
    return one.eqNullSafe(other)


def with_finality(rows: DataFrame, watermarks: Mapping[str, Mapping[int, int]]) -> DataFrame:
    """Adds ``is_final`` to the rows of a corrected join's table: whether a row can no longer change.

    A row exactly as old as the promise is not final. In a partition without a final row it is false.

    Args:
        watermarks: those of the commit that the rows are read as of, see ``Commit``.
    """
    if FINAL not in watermarks:
        return rows
    final = F.unix_micros(TIMESTAMP) < by_partition(watermarks[FINAL], "long")
    return rows.withColumn(IS_FINAL, F.coalesce(final, F.lit(False)))
