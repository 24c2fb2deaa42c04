"""Stream time told by its bounds, and offsets kept in place: the same as looking at each record."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from vt_dagster.columns import ARRIVAL, OFFSET, ORDER, PARTITION, TIMESTAMP
from vt_dagster.core import arrival_order
from vt_dagster.core.arrival_order import InPlace, by_partition, number, number_in_place
from vt_dagster.core.stream_time import (
    PASSED,
    Bounds,
    Timed,
    lateness,
    mean_and_most,
    passed,
    time_by_chunk,
    undecided_chunks,
)

START = datetime(2020, 1, 1, tzinfo=timezone.utc)
FINE = 7


@pytest.fixture(autouse=True)
def fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival_order, "FINE", FINE)


def micros(seconds: float) -> int:
    return int((START + timedelta(seconds=seconds)).timestamp() * 1e6)


def records(spark: SparkSession, seed: int, late: float, waits: tuple[int, int]) -> DataFrame:
    """Three partitions of some records each; some late, some that do not move stream time, some
    without a deadline."""
    chance = random.Random(seed)
    rows: list[Row] = []
    for partition in range(3):
        for offset in range(chance.randrange(60, 120)):
            second = offset - (chance.randrange(60) if chance.random() < late else 0)
            deadline = None if chance.random() < 0.05 else micros(second + chance.randrange(*waits))
            moves = chance.random() < 0.9
            at = START + timedelta(seconds=second)
            rows.append(
                Row(partition=partition, _arrival=offset, timestamp=at, moves=moves, deadline=deadline)
            )
    chance.shuffle(rows)
    schema = f"{PARTITION} INT, {ARRIVAL} BIGINT, {TIMESTAMP} TIMESTAMP, moves BOOLEAN, deadline BIGINT"
    return spark.createDataFrame(rows, schema)


def framed(spark: SparkSession, bounds: Bounds) -> Bounds:
    return replace(bounds, frame=spark.createDataFrame(*bounds.rows))


@pytest.mark.parametrize(
    ("seed", "late", "waits", "exact"),
    [
        (1, 0.0, (FINE + 1, 200), False),
        (2, 0.05, (FINE + 1, 30), True),
        (3, 0.3, (1, 30), True),
        (4, 1.0, (1, 5), True),
    ],
    ids=["in order", "few late", "many late", "all late"],
)
def test_bounds_decide_as_looking_at_each_record_does(
    spark: SparkSession, seed: int, late: float, waits: tuple[int, int], exact: bool
) -> None:
    rows = records(spark, seed, late, waits).cache()
    before = {0: micros(10), 2: micros(-100)}
    chunk, deadline, moves = F.floor(F.col(ARRIVAL) / FINE), F.col("deadline"), F.col("moves")
    found = Bounds.of(time_by_chunk(Timed(rows, moves, deadline), chunk).collect(), before)
    found = framed(spark, found)
    told = framed(spark, found.only(undecided_chunks(rows, deadline, chunk, found).collect()))
    assert told.near == exact
    known = by_partition(before)
    by_bounds = passed(rows, deadline, known, moves, chunk=chunk, bounds=told)
    each = passed(rows, deadline, known, moves, chunk=None, bounds=None)
    assert by_bounds.exceptAll(each).isEmpty()
    assert by_bounds.count() == each.count() == rows.count()
    assert each.where(PASSED).isEmpty() != exact
    # Without a look at the chunks in doubt, another answer: they matter.
    blind = framed(spark, Bounds([replace(c, exact=False) for c in told.chunks]))
    guessed = passed(rows, deadline, known, moves, chunk=chunk, bounds=blind)
    assert guessed.exceptAll(each).isEmpty() != (late > 0.1)
    rows.unpersist()


def test_lateness_by_chunks_is_that_of_records_more_or_less(spark: SparkSession) -> None:
    rows = records(spark, 5, 0.2, (1, 60))
    rows = rows.withColumns({c: F.lit(0) for c in ORDER if c != ARRIVAL})
    times = Timed(rows, F.lit(True))
    chunk = F.floor(F.col(ARRIVAL) / FINE)
    told = Bounds.of(time_by_chunk(times, chunk).collect(), {}).lateness
    exact = mean_and_most(lateness(rows, by_partition({}), None).collect())
    assert told is not None
    assert exact is not None
    assert told[0] == pytest.approx(exact[0], abs=FINE / 2)
    assert told[1] == pytest.approx(exact[1], abs=FINE)
    assert Bounds([]).lateness is None


@pytest.mark.parametrize("left_out", [0.0, 0.03, 0.5, 1.0])
def test_offsets_in_place_are_those_of_numbering(spark: SparkSession, left_out: float) -> None:
    chance = random.Random(6)
    taken = {0: (0, 50), 1: (13, 90), 2: (7, 8)}
    rows = [
        (partition, offset)
        for partition, (start, end) in taken.items()
        for offset in range(start, end)
        if chance.random() >= left_out
    ]
    chance.shuffle(rows)
    kept = spark.createDataFrame(rows, f"{PARTITION} INT, {ARRIVAL} BIGINT")
    first = by_partition({0: 100, 2: 5}, "long")
    ways = {
        "in place": number_in_place(kept, first, InPlace(taken, not left_out)),
        "anew": number(kept, first, [F.col(ARRIVAL)]),
    }
    found = {
        way: sorted(tuple(row) for row in numbered.select(PARTITION, ARRIVAL, OFFSET).collect())
        for way, numbered in ways.items()
    }
    assert found["in place"] == found["anew"]
    assert len(found["anew"]) == len(rows)
