"""Looks up the version of a table that is valid at each row's time, now or as known at a system time.

**As-of join.** Three strategies give the same result. *Sorted*: rows and versions are shuffled and
sorted together by key and time. This suits any distribution of keys and times, and nothing has to fit
into memory. *Broadcast*: all versions go to each executor, and a row is compared with every version of
its key. This suits a table with few versions. *Tiled*: time is divided into tiles so that each holds
few versions of a key; rows and versions are shuffled by key and tile, and a row is compared with the
versions in its tile. Nothing is sorted, and the rows of one key spread over many tasks.

**System-time join.** It finds the version among those recorded up to the row's *cut*. The cut is a
system time. The table's current versions answer most rows: the version found is the newest of all at
the row's time; if it was recorded up to the cut, it is also the newest of those known then. The table's
log answers the other rows. Of a key's log rows, in the order of recording, those known at a cut are the
first n. Such a prefix is split into blocks of 2**l rows, one for each binary digit of n that is 1; in
each block one sort finds the last row as of the time, and the last of these is the version. Each log
row is in at most log2(rows of its key) blocks, no row is compared with all rows of a key, and any order
of arrival is possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, Protocol

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

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
from vt_dagster.core.arrival_order import has_key, union
from vt_dagster.topology.operators.stream_table_join import At

# As-of join


BUCKETS = 1 << 16
"""Number of hash buckets of keys; all keys of a bucket share one tile length."""

INSTANT = timedelta(microseconds=1)
"""The smallest difference between two times."""
FOUND = "_found"
ANSWERS_FROM, ANSWERS_TO = "_answers_from", "_answers_to"
"""The bounds of the record times that a version answers, if these differ from its validity: from
(inclusive), to (exclusive; null = open)."""
_BEGIN, _END, _HORIZON = "_begin", "_end", "_horizon"
_VERSION, _SIDE = "_version", "_side"
_BUCKET, _LEVEL = "_bucket", "_level"


@dataclass(frozen=True)
class Tiles:
    """The division of time into tiles: a tile of level n covers 2**n microseconds of epoch time.

    Args:
        level: one level for all keys; or, if keys differ much, a frame of ``_bucket`` (of keys) and
            ``_level``, without the buckets that have no version in that time.
        first: the earliest time of the rows that look up versions, epoch microseconds, inclusive.
        last: the latest such time, epoch microseconds, inclusive.
        tasks: the number of partitions of rows and of versions.
    """

    level: int | DataFrame
    first: int
    last: int
    tasks: int


JoinStrategy = Literal["sorted", "broadcast"] | Tiles


def as_of_join(
    left: DataFrame,
    versions: DataFrame,
    *,
    left_key: Sequence[str],
    right_key: Sequence[str],
    horizon: Column,
    name: str,
    strategy: JoinStrategy = "sorted",
) -> DataFrame:
    """Looks up for each row of ``left`` the version valid at its ``timestamp`` (inclusive), or the one
    that answers that time, see :func:`with_answers`.

    A key with a null component matches nothing.

    Plan: sorted, one shuffle and sort by key of both sides together; tiled, one shuffle of each side
    and a hash join; broadcast, neither shuffle nor sort.

    Args:
        strategy: see the module's docstring; for ``Tiles``, every timestamp of ``left`` must lie in
            their time range.

    Returns:
        every row of ``left`` once, with ``_found``: whether the table has a value at that time, within
        its history retention; and ``name``: a struct of the version's columns, null fields if not
        found.

    Source: KIP-889 ``get(key, asOfTimestamp)``, FORMAT 4.1.4, 4.1.5; kip889-validity-interval,
    kip889-expired-get.
    """
    begin, end = _interval(versions)
    own = [c for c in versions.columns if c not in (ANSWERS_FROM, ANSWERS_TO)]
    names = {c: f"_version{i}" for i, c in enumerate(own)}
    table = versions.select(
        *[F.col(k).alias(n) for k, n in zip(right_key, _keys(right_key), strict=True)],
        begin.alias(_BEGIN),
        end.alias(_END),
        *[F.col(f"`{c}`").alias(n) for c, n in names.items()],
        horizon.alias(_HORIZON),
    )
    if strategy == "sorted":
        rows = _sorted(left, table, left_key, names[IS_TOMBSTONE])
    else:
        # Start the interval at the horizon: an expired time matches only a current version.
        begin = F.when(F.col(_END).isNull(), F.col(_BEGIN)).otherwise(F.greatest(_BEGIN, _HORIZON))
        table = table.where(~F.col(names[IS_TOMBSTONE])).withColumn(_BEGIN, begin)
        rows = (
            _tiled(left, table, left_key, strategy)
            if isinstance(strategy, Tiles)
            else _compared(left, table, left_key)
        )
    # A projection only: Spark splits the struct and prunes unused fields, as long as each expression is
    # cheap to compute twice.
    return rows.select(
        *[F.col(f"`{c}`") for c in left.columns],
        F.struct(*[F.col(n).alias(c) for c, n in names.items()]).alias(name),
        F.col(_BEGIN).isNotNull().alias(FOUND),
    )


def with_answers(
    versions: DataFrame,
    *,
    key: Sequence[str],
    horizon: Column,
    at: At,
    first: bool,
) -> DataFrame:
    """Adds the interval of record times for which each version is the match, for the ``at`` of a join.

    ``_answers_from`` is inclusive, ``_answers_to`` exclusive (null = no end). The intervals of a key do
    not overlap, so :func:`as_of_join` looks them up like validity intervals. Versions that match no
    record, such as tombstones, are omitted.

    Plan: one shuffle and sort of the versions by key.

    Args:
        versions: those that end after the earliest record; ones that ended before it make no
            difference, since a key's versions follow one another without a gap.
        horizon: see ``as_of_join``.
        at: determines the interval.

            - ``at_or_before``, ``before`` (the caller looks up a microsecond earlier): the version's
              validity interval.
            - ``at_or_after``: from the start of the previous version with a value (exclusive) to the
              version's own start (inclusive).
            - ``after``: the same, with the first bound inclusive and the second exclusive.
            - ``nearest``: the times around the version's start to which no other start is nearer. A
              version that started before the record must still be valid. Of two equally near ones the
              earlier matches.
        first: whether a key's first version with a value also matches records from before all versions
            of the key; the result then has that version twice.

    Source: ``StreamTableJoin``.
    """
    by_time = W.partitionBy(*key).orderBy(VALID_FROM)
    begin, end = F.col(VALID_FROM), F.col(VALID_TO)
    # A version that ended by itself at or before its start was never valid.
    value = ~F.col(IS_TOMBSTONE) & (end.isNull() | (end > begin))
    if first:
        since, number, spans = "_since", "_number", "_spans"
        answering = versions.withColumn(since, F.min(VALID_FROM).over(W.partitionBy(*key)))
        answering = answering.where(value).withColumn(number, F.row_number().over(by_time))
        # Two intervals: between them are the times of tombstones with which the key begins.
        valid, earlier = _span(begin, end), _span(_ever(), F.col(since))
        every = F.when(F.col(number) == 1, F.array(earlier, valid)).otherwise(F.array(valid))
        own = [F.col(f"`{c}`") for c in versions.columns]
        return answering.select(*own, F.explode(every).alias(spans)).select(*own, f"{spans}.*")
    answering = versions.where(value)
    before = F.lag(begin).over(by_time)
    if at != "nearest":
        instant = F.lit(INSTANT if at == "at_or_after" else timedelta(0))
        return answering.withColumns(
            {ANSWERS_FROM: F.coalesce(before + instant, _ever()), ANSWERS_TO: begin + instant}
        )
    here = F.coalesce(_nearest_until(before, begin, F.lag(end).over(by_time)), _ever())
    # Before the horizon only a version that is valid then can answer, which must be the current one.
    limited = end.isNull() & horizon.isNotNull()
    opened = F.when(limited, F.greatest(here, F.least(begin, horizon))).otherwise(here)
    until = _nearest_until(begin, F.lead(begin).over(by_time), end)
    return answering.withColumns({ANSWERS_FROM: opened, ANSWERS_TO: until})


def _interval(versions: DataFrame) -> tuple[Column, Column]:
    """Returns the start and the end of the times that a version answers."""
    has_answers = ANSWERS_FROM in versions.columns
    names = (ANSWERS_FROM, ANSWERS_TO) if has_answers else (VALID_FROM, VALID_TO)
    return F.col(names[0]), F.col(names[1])


def still_answers(moment: Column, end: Column, horizon: Column) -> Column:
    """Returns whether a version that began at or before a time is the match as of that time.

    It is not if it had ended by then (a version may end before the next one begins). If it has ended
    since, the time must not be before the horizon, even if the version is still stored.

    Args:
        moment: the time.
        end: of the version, exclusive; null = current.
        horizon: inclusive; null = the table has no records, or retains all versions.

    Source: FORMAT 4.1.4, 4.1.5; kip889-expired-get, kip889-validity-interval.
    """
    return end.isNull() | ((moment < end) & (horizon.isNull() | (moment >= horizon)))


def _ever() -> Column:
    """Returns a time before all others."""
    return F.timestamp_micros(F.lit(-(2**62)))


def _span(begin: Column, end: Column) -> Column:
    return F.struct(begin.alias(ANSWERS_FROM), end.alias(ANSWERS_TO))


def _nearest_until(one: Column, next_one: Column, end: Column) -> Column:
    """Returns the time from which on a version is no longer the nearest: the next one is nearer, or the
    version has ended; null = never."""
    middle = F.shiftright(F.unix_micros(one) + F.unix_micros(next_one), 1)
    return F.least(end, F.timestamp_micros(middle + 1))


def level_for(versions: DataFrame, *, key: Sequence[str], first: int, last: int) -> DataFrame:
    """Computes the tile level that suits the versions from ``first`` to ``last`` (microseconds,
    inclusive).

    A tile is two to four times as long as the average life of a version in that range. Versions that
    reach into more than one tile therefore add at most half as many copies as there are versions, and
    a tile holds about four versions of a key.

    Returns:
        one row per bucket of keys, with ``_bucket``; one row in total if ``key`` is empty: ``_level``,
        null if there is no version in that range; and ``versions``, the number of versions in it.
    """
    begin, end = _clipped(*_interval(versions), first, last)
    life = (end - begin + 1).alias("life")
    lives = versions.select(*([_bucket(key)] if key else []), life).where("life > 0")
    level = F.floor(F.log2(4 * F.avg("life"))).cast("int").alias(_LEVEL)
    return lives.groupBy(*([_BUCKET] if key else [])).agg(level, F.count(F.lit(1)).alias("versions"))


def max_versions_per_tile(
    versions: DataFrame,
    *,
    key: Sequence[str],
    level: int | DataFrame,
    first: int,
    last: int,
    places: int,
) -> DataFrame:
    """Returns one row, ``most``: the most versions of a key that begin in one tile; null if none.

    Args:
        places: the number of hash values by which tiles are counted: a smaller one needs less memory
            and overestimates.
    """
    begin, end = _clipped(*_interval(versions), first, last)
    there = _with_level(versions.where(begin <= end), key, level)
    place = F.pmod(F.xxhash64(*key, _tile(begin)), F.lit(places))
    counts = there.groupBy(place).agg(F.count(F.lit(1)).alias("versions"))
    return counts.agg(F.max("versions").alias("most"))


def _keys(key: Sequence[str]) -> list[str]:
    return [f"_key{i}" for i in range(len(key))]


def _sorted(left: DataFrame, table: DataFrame, key: Sequence[str], tombstone: str) -> DataFrame:
    """Returns each row with its key's last version at or before it, if that is a value and still valid.

    The version is carried as one struct, so that columns of different versions never mix.
    """
    keys, at = _keys(key), "_at"
    rows = left.select(
        *[F.col(f"`{c}`") for c in left.columns],
        *[F.col(k).alias(n) for k, n in zip(key, keys, strict=True)],
        F.col(TIMESTAMP).alias(at),
        F.lit(1).alias(_SIDE),
    )
    version = [c for c in table.columns if c not in keys]
    there = table.select(
        *keys, F.col(_BEGIN).alias(at), F.lit(0).alias(_SIDE), F.struct(*version).alias(_VERSION)
    )
    # By _SIDE: at equal times the version sorts before the row, because valid_from is inclusive.
    so_far = W.partitionBy(*keys).orderBy(at, _SIDE).rowsBetween(W.unboundedPreceding, W.currentRow)
    last = F.last(_VERSION, ignorenulls=True).over(so_far)
    found = union(rows, there).withColumn(_VERSION, last).where(F.col(_SIDE) == 1)
    seen = F.col(_VERSION)
    in_time = still_answers(F.col(TIMESTAMP), seen.getField(_END), seen.getField(_HORIZON))
    value = F.col(key[0]).isNotNull() & ~seen.getField(tombstone)
    return found.withColumn(_VERSION, F.when(in_time & value, seen)).select(
        *[F.col(f"`{c}`") for c in left.columns], f"{_VERSION}.*"
    )


def _compared(left: DataFrame, table: DataFrame, key: Sequence[str]) -> DataFrame:
    """Returns each row with the version of its key whose interval contains the row's time."""
    return left.join(F.broadcast(table), _matches(key), "left")


def _tiled(left: DataFrame, table: DataFrame, key: Sequence[str], tiles: Tiles) -> DataFrame:
    """Returns each row with the version of its key whose interval contains the row's time, by tiles."""
    mine, theirs, keys = "_of", "_tile", _keys(key)
    rows = _with_level(left, key, tiles.level).withColumn(mine, _tile(F.unix_micros(TIMESTAMP)))
    begin, end = _clipped(F.col(_BEGIN), F.col(_END), tiles.first, tiles.last)
    there = _with_level(table.where(begin <= end), keys, tiles.level)
    there = there.withColumn(theirs, F.explode(F.sequence(_tile(begin), _tile(end))))
    rows = rows.select(*[F.col(f"`{c}`") for c in left.columns], mine)
    there = there.select(*table.columns, theirs)
    return rows.repartition(tiles.tasks, *[F.col(k) for k in key], mine).join(
        # A hash join, since a sort-merge join would sort both sides; a tile has few versions of a key.
        there.repartition(tiles.tasks, *keys, theirs).hint("shuffle_hash"),
        _matches(key) & (F.col(mine) == F.col(theirs)),
        "left",
    )


def _matches(key: Sequence[str]) -> Column:
    end = F.col(_END)
    matches = (F.col(TIMESTAMP) >= F.col(_BEGIN)) & (end.isNull() | (F.col(TIMESTAMP) < end))
    for k, n in zip(key, _keys(key), strict=True):
        matches = matches & (F.col(k) == F.col(n))
    return matches


def _clipped(begin: Column, end: Column, first: int, last: int) -> tuple[Column, Column]:
    """Returns a version's first and last microsecond within a range; first > last if outside."""
    ends = F.coalesce(F.unix_micros(end) - 1, F.lit(last))
    return F.greatest(F.unix_micros(begin), F.lit(first)), F.least(ends, F.lit(last))


def _bucket(key: Sequence[str]) -> Column:
    return F.pmod(F.xxhash64(*key), F.lit(BUCKETS)).cast("int").alias(_BUCKET)


def _with_level(rows: DataFrame, key: Sequence[str], level: int | DataFrame) -> DataFrame:
    if isinstance(level, int):
        return rows.withColumn(_LEVEL, F.lit(level))
    return rows.withColumn(_BUCKET, _bucket(key)).join(F.broadcast(level), _BUCKET, "left")


def _tile(moment: Column) -> Column:
    """Returns the tile number of an epoch time (microseconds), at the row's ``_level``."""
    return F.call_function("shiftright", moment, F.col(_LEVEL))


# System-time join


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

    def persist_rows(self, rows: DataFrame, /) -> DataFrame:
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

        ``_horizon`` is the start of the table's history (inclusive) as of a cut, a system time, in that
        interval. None = the table retained all rows of ``log``.
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
    # Tombstones are looked up like rows: a deletion that was recorded by the cut is an answer, and the
    # log need not be searched.
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
        # A version that has ended by now may have been current at the cut.
        sure = sure & F.col(name)[VALID_TO].isNull()
    judged = history.persist_rows(
        found.withColumn(_SURE, sure | ~has_key([f"`{k}`" for k in left_key]))
    )
    own = [F.col(f"`{c}`") for c in left.columns]
    alive = F.col(FOUND) & ~F.col(name)[_DEAD]
    whole = F.struct(*[F.col(name)[c].alias(c) for c in versions.columns])
    answered = judged.where(_SURE).select(*own, F.when(alive, whole).alias(name), alive.alias(FOUND))
    doubtful = judged.where(~F.col(_SURE)).select(*own)
    needed = [c for c in versions.columns if c not in (VALID_FROM, VALID_TO, RECORDED_AT)]
    best = answers_from_log(
        doubtful, history, needed=needed, left_key=left_key, right_key=right_key, ends=ends
    )
    if best is None:
        return answered
    there, answer = F.col(ANSWER).isNotNull(), answer_as(versions.schema, needed)
    joined = doubtful.join(best, at_place(), "left")
    return answered.unionByName(joined.select(*own, answer.alias(name), there.alias(FOUND)))


def at_place() -> Column:
    """Returns the condition that joins rows with the result of :func:`answers_from_log`."""
    return (F.col(PARTITION) == F.col(PLACES[0])) & (F.col(ARRIVAL) == F.col(PLACES[1]))


def answer_as(kind: StructType, needed: Sequence[str]) -> Column:
    """Returns the answer of :func:`answers_from_log` as a version of this type; null = none. The fields
    that it lacks are null."""
    answer, known = F.col(ANSWER), (VALID_FROM, VALID_TO, *needed)
    fields = [(answer[f.name] if f.name in known else F.lit(None), f) for f in kind.fields]
    version = F.struct(*[value.cast(f.dataType).alias(f.name) for value, f in fields])
    return F.when(answer.isNotNull(), version)


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
    requests = doubtful.select(
        *[F.col(f"`{k}`").alias(n) for k, n in zip(left_key, keys, strict=True)],
        F.col(TIMESTAMP).alias(_AT),
        KNOWN_AT,
        *[F.col(c).alias(p) for c, p in zip((PARTITION, ARRIVAL), PLACES, strict=True)],
    )
    rows = log.select(
        *[F.col(f"`{k}`").alias(n) for k, n in zip(right_key, keys, strict=True)],
        F.col(TIMESTAMP).alias(_AT),
        F.coalesce(RECORDED_AT, _ever()).alias(KNOWN_AT),
        F.struct(OFFSET, PARTITION).alias(_TURN),
        F.struct(*[F.col(f"`{c}`") for c in needed]).alias(_ROW),
    ).join(requests.select(*keys).distinct(), keys, "left_semi")
    both = rows.unionByName(requests, allowMissingColumns=True)
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

    def requested(level: Column) -> Column:
        number = _shifted(place, level)
        return (number % 2 == 0) & (number < _shifted(F.col("_all"), level))

    def block(level: Column) -> Column:
        return F.struct(level.alias("level"), _shifted(place, level).alias("number"))

    return F.transform(F.filter(_levels("_all"), requested), block)


def _shifted(number: Column, level: Column) -> Column:
    return F.call_function("shiftright", number, level)


def _remembered(best: DataFrame, horizons: DataFrame | None) -> DataFrame:
    """Adds ``_forgotten``: whether the table no longer answered the row's time at its cut, because the
    time lies before the horizon.

    A version that was its key's newest at the cut still answers.
    """
    if horizons is None:
        return best.withColumn(_FORGOTTEN, F.lit(False))
    of_then = (
        (F.col(_BEST)[_TURN][PARTITION] == F.col(PARTITION))
        & (F.col(KNOWN_AT) >= F.col(SINCE))
        & (F.col(UNTIL).isNull() | (F.col(KNOWN_AT) < F.col(UNTIL)))
    )
    with_horizons = best.join(F.broadcast(horizons), of_then, "left")
    old = (F.col(_AT) < F.col(HORIZON)) & (F.col(_BEST)[_AT] < F.col(_NEWEST))
    return with_horizons.withColumn(_FORGOTTEN, F.coalesce(old, F.lit(False)))
