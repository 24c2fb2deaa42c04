"""Stream time from bounds per chunk, and offsets in place, give the same as a pass over each record."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType, TimestampType

from tests.core.test_as_of_join import INTERPRETED
from vt_dagster.columns import (
    ARRIVAL,
    IS_TOMBSTONE,
    OFFSET,
    OLD,
    ORDER,
    OUTCOME,
    PARTITION,
    TIMESTAMP,
    TURN,
    WINDOW_END,
    WINDOW_START,
)
from vt_dagster.core import arrival_order, plain_table, processor, table_joins
from vt_dagster.core.arrival_order import (
    CHUNK,
    LONGEST,
    SHORTEST,
    InPlace,
    Outcome,
    by_partition,
    chunk_level,
    number,
    number_by_blocks,
    number_in_place,
)
from vt_dagster.core.processor import Input, RunContext
from vt_dagster.core.processor_registry import processor_of
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
from vt_dagster.runs.read_source import _LAST  # pyright: ignore[reportPrivateUsage]
from vt_dagster.runs.record_times import bounds_of
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.spark.settings import settings
from vt_dagster.topology.model import Stream
from vt_dagster.topology.windows import SessionWindow, SlidingWindow

START = datetime(2020, 1, 1, tzinfo=timezone.utc)
FINE = 7


@pytest.fixture(autouse=True)
def fine_chunks(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(arrival_order, "FINE", FINE)
    with settings(spark, INTERPRETED):
        yield


def micros(seconds: float) -> int:
    return int((START + timedelta(seconds=seconds)).timestamp() * 1e6)


def records(spark: SparkSession, seed: int, late: float, waits: tuple[int, int]) -> DataFrame:
    """Three partitions; some records are late, do not advance stream time, or have no deadline."""
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


def with_bounds_frame(spark: SparkSession, bounds: Bounds) -> Bounds:
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
def test_bounds_give_same_lateness_as_per_record_pass(
    spark: SparkSession, seed: int, late: float, waits: tuple[int, int], exact: bool
) -> None:
    rows = records(spark, seed, late, waits).cache()
    before = {0: micros(10), 2: micros(-100)}
    chunk, deadline, moves = F.floor(F.col(ARRIVAL) / FINE), F.col("deadline"), F.col("moves")
    chunks = time_by_chunk(Timed(rows, moves, deadline), chunk).collect()
    found = with_bounds_frame(spark, Bounds.of(chunks, before))
    told = with_bounds_frame(
        spark, found.only(undecided_chunks(rows, deadline, chunk, found).collect())
    )
    assert told.near == exact
    known = by_partition(before)
    by_bounds = passed(rows, deadline, known, moves, chunk=chunk, bounds=told)
    each = passed(rows, deadline, known, moves, chunk=None, bounds=None)
    assert by_bounds.exceptAll(each).isEmpty()
    assert by_bounds.count() == each.count() == rows.count()
    assert each.where(PASSED).isEmpty() != exact
    # If the undecided chunks are not read, the result differs: they matter.
    blind = with_bounds_frame(spark, Bounds([replace(c, exact=False) for c in told.chunks]))
    guessed = passed(rows, deadline, known, moves, chunk=chunk, bounds=blind)
    assert guessed.exceptAll(each).isEmpty() != (late > 0.1)
    # Without a stream time before the run, none of the records in order reaches its deadline.
    alone = Bounds.of(chunks, {})
    assert alone.none_passed != exact
    if alone.none_passed:
        first = [
            passed(rows, deadline, by_partition({}), moves, chunk=c, bounds=b).where(PASSED)
            for c, b in ((chunk, alone), (None, None))
        ]
        assert all(one.isEmpty() for one in first)
    rows.unpersist()


def test_chunked_lateness_approximates_per_record_lateness(spark: SparkSession) -> None:
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


@pytest.mark.parametrize("of_record", [1, 3])
@pytest.mark.parametrize("left_out", [0.0, 0.03, 0.5, 1.0])
def test_offsets_in_place_equal_numbered_offsets(
    spark: SparkSession, left_out: float, of_record: int
) -> None:
    chance = random.Random(6)
    large = 1 << 20  # a partition from partition_by
    taken = {0: (0, 50), 1: (13, 90), 2: (7, 8), large: (0, 20), large + 1: (0, 40)}
    rows = [
        (partition, offset, turn)
        for partition, (start, end) in taken.items()
        for offset in range(start, end)
        for turn in range(of_record)
        if chance.random() >= left_out
    ]
    chance.shuffle(rows)
    kept = spark.createDataFrame(rows, f"{PARTITION} INT, {ARRIVAL} BIGINT, {TURN} BIGINT")
    first, order = by_partition({0: 100, 2: 5}, "long"), [F.col(ARRIVAL), F.col(TURN)]
    ways = {
        "in place": number_in_place(kept, first, InPlace(taken, not left_out, of_record)),
        "anew": number(kept, first, order),
        "by chunks": number(kept, first, order, F.floor(F.col(ARRIVAL) / FINE), [*taken]),
    }
    if of_record == 1:
        ways["by blocks"] = number_by_blocks(kept, first, [*taken])
    found = {
        way: sorted(tuple(row) for row in numbered.select(PARTITION, ARRIVAL, TURN, OFFSET).collect())
        for way, numbered in ways.items()
    }
    assert all(way == found["anew"] for way in found.values()), found
    assert len(found["anew"]) == len(rows)


def test_offsets_of_a_large_snapshot(spark: SparkSession) -> None:
    """Rows of a snapshot arrive after all changes. The last arrival of these is unknown, so the arrival
    numbers of the snapshot's rows are large."""
    rows = spark.range(2 * CHUNK + 1).select((F.col("id") + _LAST).alias(ARRIVAL), "id")
    rows = rows.withColumn(PARTITION, F.lit(7))
    placed = number(rows, F.lit(5), [F.col(ARRIVAL)], arrival_order.arrival_chunk(), [7])
    assert placed.where(F.col(OFFSET) == F.col("id") + 5).count() == 2 * CHUNK + 1


@pytest.mark.parametrize(
    ("rows", "seconds", "level"),
    [(1_000_000, 5_000, 21), (1_000_000, 1, SHORTEST), (1_000, 10**9, LONGEST), (0, 1, LONGEST)],
)
def test_chunk_level_of_results_by_time(rows: int, seconds: int, level: int) -> None:
    assert chunk_level(rows, (7, 7 + seconds * 10**6)) == level
    assert chunk_level(rows, None) == LONGEST


@pytest.mark.parametrize("late", [0, 40], ids=["none late", "many late"])
def test_windows_by_chunk_bounds_equal_windows_per_record(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    """Sessions and sliding windows of a large run, whose chunks have late records or none."""
    monkeypatch.setattr(processor, "FINE", FINE)
    chance, partitions = random.Random(8), 2
    rows: list[tuple[str | None, datetime, int, int, bool]] = []
    for partition in range(partitions):
        for offset in range(90):
            at = START + timedelta(seconds=offset - chance.randrange(late + 4))
            key = chance.choice(["a", "b", "c", None])
            rows.append((key, at, partition, offset, chance.random() < 0.1))
    fields = [StructField("k", StringType()), StructField(TIMESTAMP, TimestampType())]
    orders = Stream("orders", key="k", schema=StructType(fields), source=FilesSource("nowhere"))
    log = spark.createDataFrame(
        rows,
        f"k STRING, {TIMESTAMP} TIMESTAMP, {PARTITION} INT, {OFFSET} BIGINT, {IS_TOMBSTONE} BOOLEAN",
    )
    inputs = [Input(log.repartition(2).cache())]
    for window in (
        SessionWindow(timedelta(seconds=3), timedelta(seconds=12)),
        SlidingWindow(timedelta(seconds=3), timedelta(seconds=12)),
    ):
        counted = orders.group_by().windowed_by(window).count(name="counted")
        told: list[list[tuple[Any, ...]]] = []
        for single in (False, True):
            one, context = processor_of(counted, single), RunContext.nothing()
            policy = one.plan().stream_time
            assert policy is not None
            if not single:
                bounds = bounds_of(policy, inputs, {}, spark)
                assert bounds.near == bool(late)
                context = replace(context, bounds=bounds)
            results = one.results(inputs, context).where(F.col(OUTCOME) != Outcome.KEPT)
            columns = ["k", WINDOW_START, WINDOW_END, "count", PARTITION, OUTCOME, ARRIVAL, TURN, OLD]
            told.append(sorted(map(repr, results.select(*columns).collect())))
        assert told[0] == told[1]
        assert any("dropped" in row and "window_start=d" in row for row in told[0]) == bool(late)
    inputs[0].rows.unpersist()


def test_store_advances_stream_time_like_separate_pass(spark: SparkSession) -> None:
    """The records are results of a join; some keys have results of earlier runs."""
    chance, rows = random.Random(9), list[tuple[Any, ...]]()
    for arrival in range(200):
        at = START + timedelta(seconds=arrival - chance.randrange(80))
        rows.append((chance.choice("abcd"), arrival, at, chance.random() < 0.2, arrival))
    types = f"k STRING, v INT, {TIMESTAMP} TIMESTAMP, {IS_TOMBSTONE} BOOLEAN, {ARRIVAL} BIGINT"
    times = [("a", START + timedelta(seconds=60)), ("b", START), ("d", START + timedelta(seconds=99))]
    state = spark.createDataFrame(times, f"k STRING, {TIMESTAMP} TIMESTAMP")
    view = state.where("k <> 'b'").withColumns({"v": F.lit(-1), IS_TOMBSTONE: F.lit(False)})
    places = {c: F.lit(0) for c in (*ORDER, TURN) if c != ARRIVAL}
    results = spark.createDataFrame(rows, types).withColumns(places)
    about: dict[str, Any] = {"key": ["k"], "values": ["v"], "order": [*ORDER, TURN]}
    for before, last in ((None, None), (view, state)):
        known = table_joins.with_last_time(results, last, ["k"])
        known = known.withColumn(OUTCOME, F.lit(Outcome.APPLIED))
        in_turn = plain_table.put(table_joins.monotone(known, ["k"]), before, **about)
        at_once = plain_table.put(known, before, **about, risen="_last_time")
        columns = ["k", "v", TIMESTAMP, IS_TOMBSTONE, OLD]
        told = [sorted(map(repr, one.select(*columns).collect())) for one in (in_turn, at_once)]
        assert told[0] == told[1]
        assert sorted(in_turn.columns) == sorted(at_once.columns)
