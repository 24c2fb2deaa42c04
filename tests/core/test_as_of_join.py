"""All strategies of a version look-up give the same results, for any keys and times."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from itertools import chain

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

from vt_dagster.core import as_of_join
from vt_dagster.core.as_of_join import JoinStrategy, Tiles, with_answers
from vt_dagster.runs import run
from vt_dagster.runs.run import tiles_of
from vt_dagster.spark.settings import settings as settings_of
from vt_dagster.topology.operators.stream_table_join import At

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
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
CASES = 6
"""Cases of one example, as a join costs the same for few rows; each has its own keys and horizon."""
cases_of_joins = st.lists(
    st.tuples(histories, rows_of_a_run, moments, st.integers(1, 5)), min_size=CASES, max_size=CASES
).filter(lambda cases: sum(len(rows) for _, rows, *_ in cases) > 10 * CASES)  # not the simplest ones
Looks = tuple[dict[str, list[int]], list[tuple[str | None, int]], int, int]
Version = tuple[str, int, datetime, datetime | None, bool, int]
one_example = settings(
    max_examples=1,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def key_of(case: int, key: str | None) -> str | None:
    return None if key is None else f"{key}{case}"


def versions_of(cases: list[Looks]) -> dict[str, list[Version]]:
    """The versions by key; some keys begin or end with a tombstone. The case is the partition."""
    found: dict[str, list[Version]] = {}
    for case, (table, _, _, deleted) in enumerate(cases):
        for key, times in table.items():
            starts = [*map(at, sorted(times))]
            name = f"{key}{case}"
            found[name] = [
                (name, case, begin, end, n % 6 < deleted, n)
                for n, (begin, end) in enumerate(zip(starts, [*starts[1:], None], strict=True))
            ]
    return found


def horizon_of(cases: list[Looks]) -> Column:
    """The horizon of each partition."""
    every = (
        (F.lit(i), F.timestamp_micros(F.lit((at(horizon) - EPOCH) // timedelta(microseconds=1))))
        for i, (*_, horizon, _) in enumerate(cases)
    )
    return F.element_at(F.create_map(*chain(*every)), F.col("partition"))


def rows_of(cases: list[Looks]) -> list[tuple[int, str | None, int]]:
    """The case, key and time of each record."""
    return [(i, key_of(i, key), t) for i, (_, rows, *_) in enumerate(cases) for key, t in rows]


@one_example
@given(cases_of_joins)
def test_every_strategy_gives_same_result(spark: SparkSession, cases: list[Looks]) -> None:
    looked_up = rows_of(cases)
    versions = spark.createDataFrame([*chain(*versions_of(cases).values())], VERSIONS)
    left = spark.createDataFrame([(k, at(t), i) for i, (_, k, t) in enumerate(looked_up)], ROWS)
    first, last = left.agg(
        F.min(F.unix_micros("timestamp")), F.max(F.unix_micros("timestamp"))
    ).collect()[0]

    def found(strategy: JoinStrategy) -> list[tuple[int, int | None, bool]]:
        joined = as_of_join.as_of_join(
            left,
            versions,
            left_key=KEY,
            right_key=KEY,
            horizon=horizon_of(cases),
            name="found",
            strategy=strategy,
        )
        rows = joined.select("i", "found.n", as_of_join.FOUND).collect()
        return sorted((row.i, row.n, row._found) for row in rows)

    expected = found("sorted")
    assert [i for i, _, _ in expected] == list(range(len(looked_up)))
    assert found("broadcast") == expected
    for crowd in (0, 100):  # tiles per bucket of keys, the same tiles for all
        tiles, _ = tiles_of(versions, key=KEY, first=first, last=last, crowd=crowd)
        assert isinstance(tiles.level, int) == (crowd == 100)
        assert found(tiles) == expected


INTERPRETED = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
"""For tests of many plans with few rows each: code generation would take most of the time."""
LOOKS: dict[str, tuple[At, bool]] = {
    "at or after": ("at_or_after", False),
    "after": ("after", False),
    "nearest": ("nearest", False),
    "first": ("at_or_before", True),
}


def matching(versions: list[Version], moment: datetime, horizon: datetime, look: str) -> int | None:
    """The rule, version by version: the number of the version that a time finds."""
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


@one_example
@given(cases_of_joins)
def test_forward_versions_by_every_strategy(spark: SparkSession, cases: list[Looks]) -> None:
    """Each strategy gives what the rule gives."""
    of_key: dict[str | None, list[Version]] = {**versions_of(cases)}
    looked_up = rows_of(cases)
    versions = spark.createDataFrame([*chain(*of_key.values())], VERSIONS)
    left = spark.createDataFrame([(k, at(t), i) for i, (_, k, t) in enumerate(looked_up)], ROWS)
    first, last = left.agg(
        F.min(F.unix_micros("timestamp")), F.max(F.unix_micros("timestamp"))
    ).collect()[0]
    ends_at = horizon_of(cases)
    with settings_of(spark, INTERPRETED):
        for look, (asked, opened) in LOOKS.items():
            about = with_answers(versions, key=KEY, horizon=ends_at, at=asked, first=opened)
            expected = [
                matching(of_key.get(k, []), at(t), at(cases[case][2]), look) if k is not None else None
                for case, k, t in looked_up
            ]
            tiles, _ = tiles_of(about, key=KEY, first=first, last=last, crowd=0)
            # Where "at or after" differs from "after" does not depend on the strategy.
            ways = ("sorted",) if look == "at or after" else ("sorted", "broadcast", tiles)
            for strategy in ways:
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
                got = [(row.n, row._found) for row in rows]
                assert got == [(n, n is not None) for n in expected], (look, strategy)


def test_hot_key_has_short_tiles(spark: SparkSession) -> None:
    """Tiles fit how often their key changes: few versions in a tile, and few copies of a version."""
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
    assert levels(early) == [21, 24]  # versions outside the times looked up do not count


def test_keys_equal_by_collation_match(spark: SparkSession) -> None:
    """Spark's hash differs for ``a`` and ``A``, but a collation takes them as equal: they share
    tiles."""
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
def test_versions_per_task_are_bounded(
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
