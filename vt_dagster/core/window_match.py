"""Window match: pairs records of two sides with the same key and nearby times.

Time is divided into tiles twice as long as the window. A record of one side is in the tile of its own
time, a record of the other side in the one or two tiles that its window overlaps; the sides are joined
by key and tile. The records of one key spread over many tasks, and about three pairs are compared per
match.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import (
    ARRIVAL,
    HOME,
    INPUT,
    LEFT_OFFSET,
    LEFT_PARTITION,
    OFFSET,
    ORDER,
    PARTITION,
    RIGHT_OFFSET,
    RIGHT_PARTITION,
    SEQUENCE,
)
from vt_dagster.core.arrival_order import micros
from vt_dagster.topology.durations import Duration

LEFT, RIGHT = "left", "right"
SIDE = "_side"
"""0 = left, 1 = right."""
AT = "_at"
"""A record's own time. All times of this module are epoch microseconds."""
LOW, HIGH = "_low", "_high"
"""The range of times of matching records of the other side, both inclusive."""
END = "_end"
"""The stream time after which a record's window is over: no record in time matches it any more."""
NEW = "_new"
"""Whether a record is of this run; if not, the columns below are null."""
NOW = "_now"
"""Stream time as of the record."""
LOOK = "_look"
"""As of the record, the stream time at which unmatched records were last emitted."""
HORIZON = "_horizon"
"""A late record matches only records later than this."""
LATE = "_late"
"""Whether a record came too late to be guaranteed all its matches."""
ONCE = "_once"
"""Whether the record's window was over on its arrival."""
FROM = "_from"
"""The offset of a match's earlier record by arrival; for an unmatched record its own."""
THERE = "_there"
"""The time of a match's earlier record by arrival."""
_TILE, _WIDE = "_tile", "_wide"


def tile_width(before: Duration, after: Duration) -> Column:
    """Returns the length of a tile, for the row's partition."""
    return F.greatest(F.lit(1), (micros(before) + micros(after)) * 2)


def matches(
    new: Sequence[DataFrame], earlier: Sequence[DataFrame | None], *, on: Sequence[str], width: Column
) -> DataFrame:
    """Returns each pair of matching records of which at least one is new.

    The later record by arrival finds the other: every record in its window, or if it is late, those
    later than its horizon.

    Plan: a shuffle of each side by key and tile and a join; one such join of the new left records with
    all right ones, and one of the earlier left records with the new right ones.

    Args:
        new, earlier: of the left and the right side, with ``on`` and the columns above.
        width: of a tile, see ``tile_width``.

    Returns:
        ``left, right`` (the sides' structs), ``_at`` (the larger time)``, partition, ORDER, _late``
        (of the later one by arrival)``, _there, _from``, and the positions of both.
    """
    left, right = new
    found = found_by(left, _with(right, earlier[1]), 0, on=on, width=width)
    if earlier[0] is None:
        return found
    return found.unionByName(found_by(right, earlier[0], 1, on=on, width=width))


def found_by(
    new: DataFrame, others: DataFrame, place: int, *, on: Sequence[str], width: Column
) -> DataFrame:
    """Returns the pairs of new records of one side with others, like :func:`matches`.

    Args:
        place: the side of the new records.
    """
    near, far = _wide(new, on, width), _narrow(others, on, width)
    return _pairs(near, far, on) if place == 0 else _pairs(far, near, on)


def without_match(
    records: DataFrame,
    others: DataFrame,
    others_earlier: DataFrame | None,
    *,
    on: Sequence[str],
    width: Column,
) -> DataFrame:
    """Returns the records that no other record has matched in time.

    A record has a match if it found one on arrival; or, unless its window and grace period were over by
    then, if a later record found it before unmatched records were emitted.

    Plan: a shuffle of each side by key and tile and an anti-join.

    Args:
        records: new ones of one side, and earlier ones still unmatched.
        others: new ones of the other side; ``others_earlier``: those of earlier runs.
    """
    mine = _named(records.withColumn(_TILE, _tile(AT, width)), "u")
    theirs = _wide(_with(others, others_earlier), on, width)
    narrow = [*on, _TILE, AT, LOW, HIGH, NEW, *ORDER, LATE, LOOK, HORIZON]
    theirs = _named(theirs.select(*narrow), "o")
    meet = _equal(on, "u", "o") & _c("u", AT).between(_c("o", LOW), _c("o", HIGH))
    after = _c("o", NEW) & (~_c("u", NEW) | (_order("o") > _order("u")))
    in_time = ~_c("u", ONCE) & F.coalesce(_c("o", LOOK) <= _c("u", END), F.lit(True))
    finds = F.when(after, in_time & _finds("o", "u")).otherwise(_c("u", NEW) & _finds("u", "o"))
    left = mine.join(theirs, meet & finds, "left_anti")
    return left.select(*[_c("u", c).alias(c) for c in records.columns])


def _pairs(left: DataFrame, right: DataFrame, on: Sequence[str]) -> DataFrame:
    ours, theirs = _named(left, "l"), _named(right, "r")
    meet = _equal(on, "l", "r") & _c("r", AT).between(_c("l", LOW), _c("l", HIGH))
    by_left = _c("l", NEW) & (~_c("r", NEW) | (_order("l") > _order("r")))
    finds = F.when(by_left, _finds("l", "r")).otherwise(_finds("r", "l"))

    def of_later(column: str) -> Column:
        return F.when(by_left, _c("l", column)).otherwise(_c("r", column)).alias(column)

    def of_earlier(column: str, name: str) -> Column:
        return F.when(by_left, _c("r", column)).otherwise(_c("l", column)).alias(name)

    return ours.join(theirs, meet & finds).select(
        _c("l", LEFT).alias(LEFT),
        _c("r", RIGHT).alias(RIGHT),
        F.greatest(_c("l", AT), _c("r", AT)).alias(AT),
        *[of_later(c) for c in (PARTITION, *ORDER, LATE)],
        of_earlier(AT, THERE),
        of_earlier(OFFSET, FROM),
        *[_c("l", c).alias(n) for c, n in ((PARTITION, LEFT_PARTITION), (OFFSET, LEFT_OFFSET))],
        *[_c("r", c).alias(n) for c, n in ((PARTITION, RIGHT_PARTITION), (OFFSET, RIGHT_OFFSET))],
    )


def _finds(one: str, other: str) -> Column:
    """Returns whether a new record finds an earlier one in its window."""
    return ~_c(one, LATE) | (_c(other, AT) > _c(one, HORIZON))


def _order(side: str) -> Column:
    return F.struct(*[_c(side, c) for c in (ARRIVAL, INPUT, HOME, SEQUENCE)])


def _equal(on: Sequence[str], one: str, other: str) -> Column:
    equal = _c(one, _TILE) == _c(other, _TILE)
    for name in on:
        equal = equal & (_c(one, name) == _c(other, name))
    return equal


def _with(new: DataFrame, earlier: DataFrame | None) -> DataFrame:
    return new if earlier is None else new.unionByName(earlier)


def _narrow(rows: DataFrame, on: Sequence[str], width: Column) -> DataFrame:
    """Places each record in the tile of its own time."""
    return rows.withColumn(_TILE, _tile(AT, width))


def _wide(rows: DataFrame, on: Sequence[str], width: Column) -> DataFrame:
    """Places each record in every tile that its window overlaps."""
    return rows.withColumn(_TILE, F.explode(F.sequence(_tile(LOW, width), _tile(HIGH, width))))


def _tile(moment: str, width: Column) -> Column:
    """Returns a tile number; the tiling requires only that it never descends with time."""
    return F.call_function("div", F.col(moment), width)


def _named(rows: DataFrame, side: str) -> DataFrame:
    return rows.select(*[F.col(f"`{c}`").alias(f"{side}_{c}") for c in rows.columns])


def _c(side: str, column: str) -> Column:
    return F.col(f"`{side}_{column}`")
