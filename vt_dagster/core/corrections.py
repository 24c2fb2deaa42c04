"""What a table's new records change: which times of which keys, and what was said of them before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from vt_dagster.columns import FINAL, IS_FINAL, OFFSET, PARTITION, TIMESTAMP, VALID_FROM
from vt_dagster.core.arrival import by_partition, union
from vt_dagster.core.changes import columns, match_columns, match_names

FROM, TO, EDGE, BY = "_from", "_to", "_edge", "_by"
_NEW = "_new"


def changed_times(
    changes: DataFrame, versions: DataFrame | None, *, key: Sequence[str], edge: Column
) -> DataFrame:
    """From when to when each of a table's new records is what is true.

    Plan: a broadcast semi-join of the versions, then one shuffle and sort by key of what is left.

    Args:
        changes: the table's log rows of the run.
        versions: the table after them, as far back as they reach; None = they are all that it has.
        edge: by partition of the table, epoch microseconds: what is before it is no longer corrected.

    Returns:
        ``match_names`` of the key, ``_from`` (inclusive), ``_to`` (exclusive; null = from then on),
        ``_edge`` and ``_by``: a struct of the record's partition and offset. Times of a key do not
        overlap; a record that another one of the same timestamp replaces has none.
    """
    on = match_names(key)

    def told(rows: DataFrame, start: str, new: bool) -> DataFrame:
        at = F.col(start).alias(FROM)
        return rows.select(*match_columns(key), at, F.lit(new).alias(_NEW), PARTITION, OFFSET)

    rows = told(changes, TIMESTAMP, True)
    if versions is not None:
        keys = rows.select(*on).distinct()
        rows = union(rows, told(versions, VALID_FROM, False).join(keys, on, "left_semi"))
    until = F.lead(FROM).over(W.partitionBy(*on).orderBy(FROM, _NEW, PARTITION, OFFSET))
    timed = rows.withColumn(TO, until).where(_NEW)
    holds = F.col(TO).isNull() | (F.col(TO) > F.col(FROM))
    by = F.struct(PARTITION, OFFSET).alias(BY)
    return timed.where(holds).select(*on, FROM, TO, edge.alias(EDGE), by)


def beside(
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
    there = rows.select(*theirs, what.alias(name))
    kind = there.schema[name].dataType
    if isinstance(kind, StructType):
        # Arrow makes no null of a struct with a field that cannot be null.
        nullable = StructType([StructField(f.name, f.dataType) for f in kind.fields])
        there = there.withColumn(name, F.col(name).cast(nullable))
    matches = F.lit(True)
    for mine, other in zip(own, names, strict=True):
        matches = matches & (F.col(f"`{mine}`") == F.col(other))
    return records.join(there, matches, "left").drop(*names)


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


def with_finality(rows: DataFrame, marks: Mapping[str, Mapping[int, int]]) -> DataFrame:
    """The rows of a table, of a corrected join with ``is_final``: whether a row can no longer change.

    A row exactly as old as the promise is not final. Where none of its partition is, it is false.

    Args:
        marks: of the commit that the rows are as of, see ``Commit``.
    """
    if FINAL not in marks:
        return rows
    final = F.unix_micros(TIMESTAMP) < by_partition(marks[FINAL], "long")
    return rows.withColumn(IS_FINAL, F.coalesce(final, F.lit(False)))
