"""The ways to look a version up give the same, whatever the keys and times are like."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from vt_dagster.core import as_of_join
from vt_dagster.core.as_of_join import JoinStrategy, Tiles, with_answers
from vt_dagster.runs import run
from vt_dagster.runs.run import tiles_of
from vt_dagster.topology.operators.stream_table_join import At

START = datetime(1969, 12, 31, 23, 59, 59, 999_900, tzinfo=timezone.utc)
"""Times are on both sides of 1970, where epoch microseconds change their sign."""

VERSIONS = (
    "key string, partition int, valid_from timestamp, valid_to timestamp, is_tombstone boolean, n int"
)
ROWS = "key string, timestamp timestamp, i int"
KEY = ["key"]


def at(moment: int) -> datetime:
    return START + timedelta(microseconds=moment)


moments = st.one_of(st.integers(0, 200), st.integers(0, 10**12))
histories = st.dictionaries(
    st.sampled_from("abc"), st.lists(moments, min_size=1, max_size=40, unique=True), min_size=1
)
rows_of_a_run = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", "d", None]), moments), min_size=1, max_size=80
)


@settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(histories, rows_of_a_run, moments)
def test_every_way_finds_the_same(
    spark: SparkSession,
    table: dict[str, list[int]],
    looked_up: list[tuple[str | None, int]],
    horizon: int,
) -> None:
    stored: list[tuple[str, int, datetime, datetime | None, bool, int]] = []
    for key, times in table.items():
        for n, (begin, end) in enumerate(zip(sorted(times), [*sorted(times)[1:], None], strict=True)):
            ends = None if end is None else at(end)
            stored.append((key, 0, at(begin), ends, n % 5 == 4, n))
    versions = spark.createDataFrame(stored, VERSIONS)
    left = spark.createDataFrame([(k, at(t), i) for i, (k, t) in enumerate(looked_up)], ROWS)
    first, last = left.agg(
        F.min(F.unix_micros("timestamp")), F.max(F.unix_micros("timestamp"))
    ).collect()[0]

    def found(strategy: JoinStrategy) -> list[tuple[int, int | None, bool]]:
        joined = as_of_join.as_of_join(
            left,
            versions,
            left_key=KEY,
            right_key=KEY,
            horizon=F.timestamp_micros(F.lit((at(horizon) - at(0)) // timedelta(microseconds=1) - 100)),
            name="found",
            strategy=strategy,
        )
        rows = joined.select("i", "found.n", as_of_join.FOUND).collect()
        return sorted((row.i, row.n, row._found) for row in rows)

    expected = found("sorted")
    assert [i for i, _, _ in expected] == list(range(len(looked_up)))
    assert found("broadcast") == expected
    for crowd in (0, 100):  # tiles of each bucket's own, tiles for all
        tiles, _ = tiles_of(versions, key=KEY, first=first, last=last, crowd=crowd)
        assert isinstance(tiles.level, int) == (crowd == 100)
        assert found(tiles) == expected


Version = tuple[str, int, datetime, datetime | None, bool, int]
LOOKS: dict[str, tuple[At, bool]] = {
    "at or after": ("at_or_after", False),
    "after": ("after", False),
    "nearest": ("nearest", False),
    "first": ("at_or_before", True),
}


def matching(versions: list[Version], moment: datetime, horizon: datetime, look: str) -> int | None:
    """The rule, version by version: the number of the one that a time finds."""
    values = [v for v in versions if not v[4]]
    valid = next((v for v in reversed(versions) if v[2] <= moment), None)
    remembered = valid is not None and (valid[3] is None or moment >= horizon)
    if look == "first":
        if valid is None:
            return values[0][5] if values else None
        return None if valid[4] else valid[5]
    later = [v for v in values if v[2] > moment or (look == "at or after" and v[2] == moment)]
    near = later[:1] if moment >= horizon else []
    if look == "nearest" and valid is not None and not valid[4] and remembered:
        near = [valid, *near]
    return min(near, key=lambda v: abs(v[2] - moment))[5] if near else None


@settings(
    max_examples=3,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(histories, rows_of_a_run, moments, st.integers(1, 5))
def test_versions_that_start_after_a_record(
    spark: SparkSession,
    table: dict[str, list[int]],
    looked_up: list[tuple[str | None, int]],
    horizon: int,
    deleted: int,
) -> None:
    """Each way against the rule; keys begin and end with tombstones, too."""
    of_key: dict[str | None, list[Version]] = {}
    for key, times in table.items():
        ends = [*(at(moment) for moment in sorted(times)[1:]), None]
        of_key[key] = [
            (key, 0, at(begin), end, n % 6 < deleted, n)
            for n, (begin, end) in enumerate(zip(sorted(times), ends, strict=True))
        ]
    versions = spark.createDataFrame([v for some in of_key.values() for v in some], VERSIONS)
    left = spark.createDataFrame([(k, at(t), i) for i, (k, t) in enumerate(looked_up)], ROWS)
    first, last = left.agg(
        F.min(F.unix_micros("timestamp")), F.max(F.unix_micros("timestamp"))
    ).collect()[0]
    ends_at = F.timestamp_micros(F.lit((at(horizon) - at(0)) // timedelta(microseconds=1) - 100))
    for look, (asked, opened) in LOOKS.items():
        about = with_answers(versions, key=KEY, horizon=ends_at, at=asked, first=opened)
        expected = [
            matching(of_key.get(k, []), at(t), at(horizon), look) if k is not None else None
            for k, t in looked_up
        ]
        tiles, _ = tiles_of(about, key=KEY, first=first, last=last, crowd=0)
        for strategy in ("sorted", "broadcast", tiles):
            joined = as_of_join.as_of_join(
                left,
                about,
                left_key=KEY,
                right_key=KEY,
                horizon=F.lit(None).cast("timestamp") if opened else ends_at,
                name="found",
                strategy=strategy,  # type: ignore[arg-type]
            )
            rows = sorted(joined.select("i", "found.n", as_of_join.FOUND).collect())
            assert [(row.n, row._found) for row in rows] == [(n, n is not None) for n in expected], (
                look,
                strategy,
            )


def test_a_key_that_changes_often_has_short_tiles(spark: SparkSession) -> None:
    """Each key's tiles fit its own rhythm: few versions in one, and few copies of a version."""
    often = F.struct(F.lit("often").alias("key"), F.lit(1).alias("step"))
    seldom = F.struct(F.lit("seldom").alias("key"), F.lit(1_000).alias("step"))
    rows = (
        spark.range(10_000)
        .select("id", F.explode(F.array(often, seldom)).alias("of"))
        .where(F.col("id") % F.col("of.step") == 0)
        .select(
            F.col("of.key").alias("key"),
            F.lit(0).alias("partition"),
            F.timestamp_micros(F.col("id") * 1_000_000).alias("valid_from"),
            F.timestamp_micros((F.col("id") + F.col("of.step")) * 1_000_000).alias("valid_to"),
        )
    )
    tiles, most = tiles_of(rows, key=KEY, first=0, last=9_999_999_999, crowd=4)
    assert levels(tiles) == [21, 31]  # some two seconds, some two thousand
    assert 2 < most < 40  # an upper bound
    early, _ = tiles_of(rows, key=KEY, first=0, last=4_999_999, crowd=0)
    assert levels(early) == [21, 24]  # what is not looked for does not count


def test_keys_that_are_equal_without_being_the_same_meet(spark: SparkSession) -> None:
    """Spark's hash tells ``a`` from ``A`` where a collation does not: such keys share their tiles."""
    lower = "CAST(key AS STRING COLLATE UTF8_LCASE) AS key"
    often = [("a", 0, at(n), at(n + 1), False, n) for n in range(20)]
    seldom = [("b", 0, at(0), at(10**9), False, 99)]
    versions = spark.createDataFrame([*often, *seldom], VERSIONS)
    versions = versions.selectExpr(lower, *versions.columns[1:])
    left = spark.createDataFrame([("A", at(7), 1), ("B", at(10**8), 2)], ROWS)
    left = left.selectExpr(lower, "timestamp", "i")
    first, last = -100, 10**8
    tiles, _ = tiles_of(versions, key=KEY, first=first, last=last, crowd=0)
    for way in ("sorted", tiles):
        joined = as_of_join.as_of_join(
            left,
            versions,
            left_key=KEY,
            right_key=KEY,
            horizon=F.lit(None).cast("timestamp"),
            name="found",
            strategy=way,  # type: ignore[arg-type]
        )
        assert sorted((r.i, r.n) for r in joined.select("i", "found.n").collect()) == [(1, 7), (2, 99)]


def levels(tiles: Tiles) -> list[int]:
    assert not isinstance(tiles.level, int)
    return sorted(row._level for row in tiles.level.collect())


@pytest.mark.parametrize(("rows", "tasks"), [(10, 2), (400, 6)])
def test_tasks_have_a_bounded_number_of_versions(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, rows: int, tasks: int
) -> None:
    monkeypatch.setattr(run, "VERSIONS_OF_A_TASK", 100)
    versions = spark.range(rows).select(
        F.col("id").alias("key"),
        F.timestamp_micros(F.lit(0)).alias("valid_from"),
        F.lit(None).cast("timestamp").alias("valid_to"),
    )
    tiles, _ = tiles_of(versions, key=KEY, first=0, last=9)
    assert tiles.tasks == tasks
