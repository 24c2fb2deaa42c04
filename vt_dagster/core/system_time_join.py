"""System-time join: the version valid at each row's time, among those recorded up to the row's *cut*.

The cut is a system time. The table's current versions answer most rows: the version found is the newest
of all at the row's time; if it was recorded up to the cut, it is also the newest of those known then.
The table's log answers the other rows. Of a key's log rows, in the order of recording, those known at a
cut are the first n. Such a prefix is split into blocks of 2**l rows, one for each binary digit of n
that is 1; in each block one sort finds the last row as of the time, and the last of these is the
version. Each log row is in at most log2(rows of its key) blocks, no row is compared with all rows of a
key, and any order of arrival is possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster.columns import (
    ARRIVAL,
    IS_TOMBSTONE,
    OFFSET,
    PARTITION,
    RECORDED_AT,
    TIMESTAMP,
    VALID_FROM,
    VALID_TO,
)
from vt_dagster.core.arrival_order import has_key
from vt_dagster.core.as_of_join import FOUND, JoinStrategy, as_of_join

KNOWN_AT = "_known_at"
"""The cut of a row: versions recorded later do not count. TIMESTAMP."""
SINCE, UNTIL, HORIZON = "_since", "_until", "_horizon"
"""Columns of ``SystemTimeHistory.horizons``: the horizon for cuts from ``_since`` to ``_until``."""

_SURE, _DEAD = "_sure", "_dead"
_AT, _TURN, _ROW = "_at", "_turn", "_version"
_KNOWN, _NEWEST, _NEXT = "_known", "_newest", "_next"
_BLOCK, _BEST, _FORGOTTEN = "_block", "_best", "_forgotten"
PLACES = ("_place0", "_place1")
ANSWER = "_answer"


class SystemTimeHistory(Protocol):
    """A table's history by system time, for rows that its current versions do not answer."""

    def persist_rows(self, rows: DataFrame) -> DataFrame:
        """Persists rows that are read several times."""
        ...

    def log(self, doubtful: DataFrame, ends: bool) -> DataFrame | None:
        """Returns the part of the table's log that can answer these rows; None = there are no such
        rows.

        Args:
            ends: whether to include the later rows that give the ``valid_to`` of an answer.
        """
        ...

    def horizons(self) -> DataFrame | None:
        """Returns ``partition, _since (inclusive), _until (exclusive, null = open), _horizon``.

        ``_horizon`` is the time from which on the table answered, at cuts in that interval; None = the
        table retained all rows of ``log``.
        """
        ...


def system_time_join(
    left: DataFrame,
    versions: DataFrame,
    history: SystemTimeHistory,
    *,
    left_key: Sequence[str],
    right_key: Sequence[str],
    horizon: Column,
    name: str,
    ends: bool,
    strategy: JoinStrategy = "sorted",
) -> DataFrame:
    """Looks up, for each row of ``left``, the version valid at its ``timestamp`` (inclusive) among
    those recorded up to its cut (inclusive), with the horizon at the cut.

    A log row without a system time counts as recorded before any cut.

    Plan: that of ``as_of_join``, whose result is persisted. For rows that it does not answer: one
    shuffle by key of these rows and their keys' log rows, two sorts there (three with ``ends``), and
    one shuffle of the answers and of the rows themselves.

    Args:
        left: ``key columns, timestamp, _known_at, partition, _arrival, …``; the last two are unique.
        versions: the current versions, with ``recorded_at``.
        ends: whether ``valid_to`` is needed, which may have been different at the cut; otherwise it is
            null in answers from the log.

    Returns:
        see ``as_of_join``.

    Source: ``read(as_of, as_known_at)`` of each row.
    """
    seen = versions.withColumns({_DEAD: F.col(IS_TOMBSTONE), IS_TOMBSTONE: F.lit(False)})
    found = as_of_join(
        left,
        seen,
        left_key=left_key,
        right_key=right_key,
        horizon=horizon,
        name=name,
        strategy=strategy,
    )
    recorded = F.col(name)[RECORDED_AT]
    sure = F.col(FOUND) & (recorded.isNull() | (recorded <= F.col(KNOWN_AT)))
    if ends:
        sure = sure & F.col(name)[VALID_TO].isNull()
    told = history.persist_rows(found.withColumn(_SURE, sure | ~has_key([f"`{k}`" for k in left_key])))
    own = [F.col(f"`{c}`") for c in left.columns]
    alive = F.col(FOUND) & ~F.col(name)[_DEAD]
    whole = F.struct(*[F.col(name)[c].alias(c) for c in versions.columns])
    answered = told.where(_SURE).select(*own, F.when(alive, whole).alias(name), alive.alias(FOUND))
    doubtful = told.where(~F.col(_SURE)).select(*own)
    needed = [c for c in versions.columns if c not in (VALID_FROM, VALID_TO, RECORDED_AT)]
    best = answers_from_log(
        doubtful, history, needed=needed, left_key=left_key, right_key=right_key, ends=ends
    )
    if best is None:
        return answered
    types = {f.name: f.dataType for f in versions.schema.fields}
    keep, row = F.col(ANSWER).isNotNull(), F.col(ANSWER)
    whole = F.struct(
        *[
            (F.lit(None) if c == RECORDED_AT else row[c]).cast(types[c]).alias(c)
            for c in versions.columns
        ]
    )
    joined = doubtful.join(best, at_place(), "left")
    return answered.unionByName(joined.select(*own, F.when(keep, whole).alias(name), keep.alias(FOUND)))


def at_place() -> Column:
    """Returns the condition that joins rows with the result of :func:`answers_from_log`."""
    return (F.col(PARTITION) == F.col(PLACES[0])) & (F.col(ARRIVAL) == F.col(PLACES[1]))


def answers_from_log(
    doubtful: DataFrame,
    history: SystemTimeHistory,
    *,
    needed: Sequence[str],
    left_key: Sequence[str],
    right_key: Sequence[str],
    ends: bool,
) -> DataFrame | None:
    """Looks up rows in the log: see the module's docstring.

    Args:
        doubtful: ``key columns, timestamp, _known_at, partition, _arrival``.
        needed: the log columns to return, including ``is_tombstone`` and ``partition``.

    Returns:
        ``_place0, _place1`` (``partition`` and ``_arrival`` of a row) and ``_answer``: a struct of
        ``valid_from``, ``valid_to`` (null without ``ends``) and the needed columns; null if the table
        had no value or no longer retained it. A row without any log row known at its cut is omitted.
        None = there are no doubtful rows.
    """
    log = history.log(doubtful, ends)
    if log is None:
        return None
    best = _remembered(
        _known_then(doubtful, log, needed, left_key, right_key, ends), history.horizons()
    )
    row = F.col(_BEST)
    answer = F.struct(
        row[_AT].alias(VALID_FROM),
        F.col(_NEXT).alias(VALID_TO),
        *[row[_ROW][c].alias(c) for c in needed],
    )
    there = row.isNotNull() & ~row[_ROW][IS_TOMBSTONE] & ~F.col(_FORGOTTEN)
    return best.select(*PLACES, F.when(there, answer).alias(ANSWER))


def _known_then(
    doubtful: DataFrame,
    log: DataFrame,
    needed: Sequence[str],
    left_key: Sequence[str],
    right_key: Sequence[str],
    ends: bool,
) -> DataFrame:
    """Finds for each row the newest log row of its key up to its time, among those recorded up to its
    cut.

    Returns:
        ``_place0, _place1`` (partition and order of arrival of the row), ``_best``: the log row;
        ``_next``: the start of the following version; ``_newest``: the newest time known at the cut;
        ``_at`` and ``_known_at`` of the row. A row without any log row known at its cut is omitted.
    """
    keys = [f"_key{i}" for i in range(len(left_key))]
    asked = doubtful.select(
        *[F.col(f"`{k}`").alias(n) for k, n in zip(left_key, keys, strict=True)],
        F.col(TIMESTAMP).alias(_AT),
        KNOWN_AT,
        *[F.col(c).alias(p) for c, p in zip((PARTITION, ARRIVAL), PLACES, strict=True)],
    )
    ever = F.timestamp_micros(F.lit(-(2**62)))
    rows = log.select(
        *[F.col(f"`{k}`").alias(n) for k, n in zip(right_key, keys, strict=True)],
        F.col(TIMESTAMP).alias(_AT),
        F.coalesce(RECORDED_AT, ever).alias(KNOWN_AT),
        F.struct(OFFSET, PARTITION).alias(_TURN),
        F.struct(*[F.col(f"`{c}`") for c in needed]).alias(_ROW),
    ).join(asked.select(*keys).distinct(), keys, "left_semi")
    both = rows.unionByName(asked, allowMissingColumns=True)
    of_log = F.col(_TURN).isNotNull()
    # At equal times log rows come before the rows to look up.
    in_order = W.partitionBy(*keys).orderBy(KNOWN_AT, F.asc_nulls_last(_TURN))
    so_far = in_order.rowsBetween(W.unboundedPreceding, W.currentRow)
    counted = both.withColumns(
        {
            _KNOWN: F.count(F.when(of_log, 1)).over(so_far),
            _NEWEST: F.max(F.when(of_log, F.col(_AT))).over(so_far),
            "_all": F.count(F.when(of_log, 1)).over(W.partitionBy(*keys)),
        }
    )
    blocks = counted.withColumn(_BLOCK, F.explode(F.when(of_log, _in_blocks()).otherwise(_blocks())))
    by_time = W.partitionBy(*keys, _BLOCK).orderBy(_AT, F.asc_nulls_last(_TURN))
    last = F.when(of_log, F.struct(_AT, _TURN, KNOWN_AT, _ROW))
    found = blocks.withColumn(
        _BEST,
        F.last(last, ignorenulls=True).over(by_time.rowsBetween(W.unboundedPreceding, W.currentRow)),
    )
    following = F.lit(None).cast("timestamp")
    if ends:
        back = W.partitionBy(*keys, _BLOCK).orderBy(F.desc(_AT), F.desc_nulls_first(_TURN))
        back = back.rowsBetween(W.unboundedPreceding, W.currentRow)
        following = F.last(F.when(of_log, F.col(_AT)), ignorenulls=True).over(back)
    return (
        found.withColumn(_NEXT, following)
        .where(~of_log)
        .groupBy(*PLACES)
        .agg(
            F.max_by(_BEST, F.struct(F.col(_BEST)[_AT], F.col(_BEST)[_TURN])).alias(_BEST),
            F.min(_NEXT).alias(_NEXT),
            F.any_value(_NEWEST).alias(_NEWEST),
            F.any_value(_AT).alias(_AT),
            F.any_value(KNOWN_AT).alias(KNOWN_AT),
        )
    )


def _levels(number: str) -> Column:
    """Returns 0, 1, … up to the highest binary digit of a number; an empty array for 0."""
    digits = F.length(F.bin(number)) - 1
    return F.when(F.col(number) > 0, F.sequence(F.lit(0), digits)).otherwise(
        F.array().cast("array<int>")
    )


def _blocks() -> Column:
    """Returns the blocks that the first ``_known`` rows are split into: level and number."""

    def block(level: Column) -> Column:
        return F.struct(level.alias("level"), (_shifted(F.col(_KNOWN), level) - 1).alias("number"))

    there = F.filter(_levels(_KNOWN), lambda level: _shifted(F.col(_KNOWN), level) % 2 == 1)
    return F.transform(there, block)


def _in_blocks() -> Column:
    """Returns the blocks of the ``_known``-th log row that a lookup may use: complete left halves."""
    place = F.col(_KNOWN) - 1

    def asked(level: Column) -> Column:
        number = _shifted(place, level)
        return (number % 2 == 0) & (number < _shifted(F.col("_all"), level))

    def block(level: Column) -> Column:
        return F.struct(level.alias("level"), _shifted(place, level).alias("number"))

    return F.transform(F.filter(_levels("_all"), asked), block)


def _shifted(number: Column, level: Column) -> Column:
    return F.call_function("shiftright", number, level)


def _remembered(best: DataFrame, horizons: DataFrame | None) -> DataFrame:
    """Adds ``_forgotten``: whether the row's time lies before the horizon at its cut.

    A version that was its key's newest at the cut still answers.
    """
    if horizons is None:
        return best.withColumn(_FORGOTTEN, F.lit(False))
    of_then = (
        (F.col(_BEST)[_TURN][PARTITION] == F.col(PARTITION))
        & (F.col(KNOWN_AT) >= F.col(SINCE))
        & (F.col(UNTIL).isNull() | (F.col(KNOWN_AT) < F.col(UNTIL)))
    )
    told = best.join(F.broadcast(horizons), of_then, "left")
    old = (F.col(_AT) < F.col(HORIZON)) & (F.col(_BEST)[_AT] < F.col(_NEWEST))
    return told.withColumn(_FORGOTTEN, F.coalesce(old, F.lit(False)))
