"""Records of two sides that have the same key and are near each other in time.

Time is cut into tiles twice as long as the window. Of two sides one is in the tile of its own time, the
other in each tile that its window reaches into, which is one or two; they meet by key and tile. So the
records of one key are in many tasks, and no more pairs are compared than some three for each match.
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
"""A record's own time; all times here are epoch microseconds."""
LOW, HIGH = "_low", "_high"
"""The times of the other side's records that it matches, both inclusive."""
END = "_end"
"""The stream time after which its window is over, and nothing that is in time matches it."""
NEW = "_new"
"""Whether it is of this run; the columns below are null where it is not."""
NOW = "_now"
"""Stream time as of it."""
LOOK = "_look"
"""The stream time at which unmatched records were last let go, as of it."""
HORIZON = "_horizon"
"""If it is late it finds only what is later than this."""
LATE = "_late"
"""Whether it came later than is promised that it finds every match."""
ONCE = "_once"
"""Whether that was so when it came."""
FROM = "_from"
"""Of a match, the offset of the record that was there; of a record without one, its own."""
THERE = "_there"
"""Of a match, the time of the record that was there."""
_TILE, _WIDE = "_tile", "_wide"


def tile_width(before: Duration, after: Duration) -> Column:
    """How long a tile is, of the row's partition."""
    return F.greatest(F.lit(1), (micros(before) + micros(after)) * 2)


def matches(
    new: Sequence[DataFrame], earlier: Sequence[DataFrame | None], *, on: Sequence[str], width: Column
) -> DataFrame:
    """Each pair of records that match, of which at least one is new.

    The later one of them by arrival finds the other: all that is in its window, or if it is late what
    is later than its horizon.

    Plan: a shuffle of each side by key and tile and a join; one such join of what is new on the left
    with all of the right, and one of the rest with what is new on the right.

    Args:
        new, earlier: the left and the right side's, with ``on`` and the columns above.
        width: of a tile, see ``tile_width``.

    Returns:
        ``left, right`` (the sides' structs), ``_at`` (the larger time)``, partition, ORDER, _late``
        (of the later one by arrival)``, _there, _from``, and the places of both.
    """
    left, right = new
    found = found_by(left, _with(right, earlier[1]), 0, on=on, width=width)
    if earlier[0] is None:
        return found
    return found.unionByName(found_by(right, earlier[0], 1, on=on, width=width))


def found_by(
    new: DataFrame, others: DataFrame, place: int, *, on: Sequence[str], width: Column
) -> DataFrame:
    """The pairs of new records of a side with others, as of :func:`matches`.

    Args:
        place: of the side that is new.
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
    """The records that no other has matched as long as that was in time.

    One found a match when it arrived; or, unless its window and grace were over by then, a record after
    it did, before it was let go.

    Plan: a shuffle of each side by key and tile and an anti-join.

    Args:
        records: new ones of one side, and earlier ones that have had no match until now.
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
    """Whether a new record finds one that was there and is in its window."""
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
    """Each record in the tile of its own time."""
    return rows.withColumn(_TILE, _tile(AT, width))


def _wide(rows: DataFrame, on: Sequence[str], width: Column) -> DataFrame:
    """Each record in every tile that its window reaches into."""
    return rows.withColumn(_TILE, F.explode(F.sequence(_tile(LOW, width), _tile(HIGH, width))))


def _tile(moment: str, width: Column) -> Column:
    """It never descends with time, which is all that is asked of it."""
    return F.call_function("div", F.col(moment), width)


def _named(rows: DataFrame, side: str) -> DataFrame:
    return rows.select(*[F.col(f"`{c}`").alias(f"{side}_{c}") for c in rows.columns])


def _c(side: str, column: str) -> Column:
    return F.col(f"`{side}_{column}`")
