"""What a table's new records change: which times of which keys, and what was said of them before."""

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
    """From when to when each of a table's new records is what is true, to rows that it still corrects.

    A record corrects rows whose timestamp is not before its *edge*: its partition's stream time on its
    own arrival less the promise. To a row before that it is as if it were not there, and the record
    that answers is the last one, by timestamp and offset, of those that came before. So an answer
    depends on the order of arrival, never on what is taken together.

    Plan: a semi-join of the earlier records, then one shuffle and sort by key of what is left, and that
    of ``with_stream_time`` over the new ones.

    Args:
        changes: the table's log rows of the run.
        earlier: its log rows before them that are younger than the oldest of these; None = none.
        values: the table's columns that answers have.
        promised: how long rows are corrected, microseconds.
        stream_time: before the run, epoch microseconds, by partition of the table.
        chunk: see ``with_stream_time``.
        broadcastable: whether each task may have all keys of the changes.

    Returns:
        ``match_names`` of the key, ``_from`` (inclusive), ``_to`` (exclusive; null = from then on),
        ``_edge`` (epoch microseconds), ``_by``: a struct of the record's partition and offset,
        ``_answer``: a struct of the values, null of a tombstone; and ``_until`` (exclusive; null = from
        then on): where it stops to be true to rows before any edge. Times of a key from the edge on do
        not overlap, nor do those up to ``_until``.
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
    # Descending: a frame that grows downwards is made anew for each row.
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
    """Records with what another table has for their key, null where nothing.

    Args:
        own: the records' columns that are the other's key.
        rows, key: the other table, one row a key.
        what: over its columns; ``name``: what it is called.
    """
    names = [f"_key{i}" for i in range(len(key))]
    theirs = [c.alias(n) for c, n in zip(columns(key), names, strict=True)]
    there = nullable(rows.select(*theirs, what.alias(name)), name)
    matches = F.lit(True)
    for mine, other in zip(own, names, strict=True):
        matches = matches & (F.col(f"`{mine}`") == F.col(other))
    return records.join(there, matches, "left").drop(*names)


def nullable(rows: DataFrame, name: str) -> DataFrame:
    """Rows with a column that may be null: Arrow makes no null of a struct whose fields cannot be."""
    kind = rows.schema[name].dataType
    if not isinstance(kind, StructType):
        return rows
    fields = [StructField(f.name, f.dataType) for f in kind.fields]
    return rows.withColumn(name, F.col(name).cast(StructType(fields)))


def same(name: str, kind: str, row: Column) -> Column:
    """Whether a column has the value that it has in another row; null is like any other.

    Args:
        kind: Spark's name of its type.
        row: the other, a struct.
    """
    one, other = F.col(f"`{name}`"), row.getField(name)
    if "map<" in kind:  # Spark compares no maps
        one, other = F.to_json(F.struct(one)), F.to_json(F.struct(other))
    return one.eqNullSafe(other)


def with_finality(rows: DataFrame, watermarks: Mapping[str, Mapping[int, int]]) -> DataFrame:
    """The rows of a table, of a corrected join with ``is_final``: whether a row can no longer change.

    A row exactly as old as the promise is not final. Where none of its partition is, it is false.

    Args:
        watermarks: of the commit that the rows are as of, see ``Commit``.
    """
    if FINAL not in watermarks:
        return rows
    final = F.unix_micros(TIMESTAMP) < by_partition(watermarks[FINAL], "long")
    return rows.withColumn(IS_FINAL, F.coalesce(final, F.lit(False)))
