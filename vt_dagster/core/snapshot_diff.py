"""Snapshot diff: compares a full snapshot with the rows that a table holds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster.core.arrival_order import has_key, in_order_of_keys
from vt_dagster.core.source_records import DELETED, POSITION, REASON, SOURCE, Reason

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
    told = dump.withColumn(REASON, F.coalesce(F.col(REASON), twice))
    given = told.select(*keys, F.struct(*[F.col(f"`{c}`") for c in own]).alias(_GIVEN))
    there = F.lit(True).alias(_THERE)
    rows = held.select(*keys, F.struct(there, *[F.col(f"`{c}`") for c in compared]).alias(_HELD))
    both = given.join(rows, list(key), "full_outer")
    types = dict(dump.dtypes)
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


def _same(name: str, kind: str) -> Column:
    one, other = F.col(_GIVEN)[name], F.col(_HELD)[name]
    if "map<" in kind:  # Spark cannot compare maps
        one, other = F.to_json(F.struct(one)), F.to_json(F.struct(other))
    return one.eqNullSafe(other)
