"""However an arrival order is split into runs, the results are the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta
from decimal import Decimal
from itertools import accumulate
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from pyspark.sql import SparkSession
from pyspark.sql.types import (
    DecimalType,
    DoubleType,
    IntegerType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from vt_dagster.core import arrival_order, processor
from vt_dagster.runs import gate, pin
from vt_dagster.testing import TopologyTestDriver
from vt_dagster.topology.model import Stream, Table, VersionedTable
from vt_dagster.topology.windows import HoppingWindow

Record = dict[str, Any]
PARTITIONS = 12
LENGTH = 14
MS = timedelta(milliseconds=1)

# Each partition is a separate experiment: its number is part of every key, and it has its own
# history retention and grace period. So one run of the driver tests many small cases.
COLUMNS = StructType(
    [
        StructField("case", IntegerType()),
        StructField("key", StringType()),
        StructField("value", StringType()),
        StructField("timestamp", TimestampType()),
    ]
)
SOURCE: dict[str, Any] = {
    "key": ("case", "key"),
    "schema": COLUMNS,
    "tombstone": "value IS NULL",
}

record = st.fixed_dictionaries(
    {
        "key": st.sampled_from(["a", "b"]),
        "value": st.sampled_from(["x", "y", None]),
        "timestamp": st.integers(0, 30),
    }
)
some_records = st.lists(record, max_size=6)
durations = st.lists(st.integers(0, 15), min_size=PARTITIONS, max_size=PARTITIONS)
cuts = st.lists(st.integers(0, 6), min_size=PARTITIONS, max_size=PARTITIONS)


def each_case(records: SearchStrategy[list[Record]]) -> SearchStrategy[list[list[Record]]]:
    """Records of each case; without the simplest examples, which have hardly any records."""
    drawn = st.lists(records, min_size=PARTITIONS, max_size=PARTITIONS)
    return drawn.filter(lambda cases: sum(map(len, cases)) > PARTITIONS)


of_each_case = each_case(some_records)

careful = settings(
    max_examples=1,  # with a case per partition: a run costs the same for few records
    # A failing example is already small; shrinking it takes longer than reading it.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def ms(numbers: Iterable[int]) -> dict[int, timedelta]:
    return {i: timedelta(milliseconds=n) for i, n in enumerate(numbers)}


def placed(cases: Sequence[Sequence[Record]]) -> list[Record]:
    return [r | {"case": i, "partition": i} for i, case in enumerate(cases) for r in case]


def heads(cases: Sequence[Sequence[Record]], at: Sequence[int]) -> list[Record]:
    return placed([case[:n] for case, n in zip(cases, at, strict=True)])


def tails(cases: Sequence[Sequence[Record]], at: Sequence[int]) -> list[Record]:
    return placed([case[n:] for case, n in zip(cases, at, strict=True)])


def by_case(rows: Sequence[Record]) -> dict[int, list[Record]]:
    return {i: [r for r in rows if r["case"] == i] for i in range(PARTITIONS)}


@pytest.mark.slow
@careful
@given(retention=durations, puts=of_each_case, first=cuts, second=cuts)
def test_split_puts_give_same_log_and_versions(
    spark: SparkSession,
    retention: list[int],
    puts: list[list[Record]],
    first: list[int],
    second: list[int],
) -> None:
    table = VersionedTable("table", history_retention=ms(retention), **SOURCE)
    whole, split = (TopologyTestDriver(table, spark=spark) for _ in range(2))
    whole.pipe("table", *placed(puts))
    rest = [case[n:] for case, n in zip(puts, first, strict=True)]
    for records in (heads(puts, first), heads(rest, second), tails(rest, second)):
        split.pipe("table", *records)
    assert by_case(split.read("table")) == by_case(whole.read("table"))
    assert split.versions("table") == whole.versions("table")
    assert split.metrics("table") == whole.metrics("table")


@pytest.mark.slow
@careful
@given(
    retention=durations,
    grace=durations,
    blocks=st.lists(st.tuples(of_each_case, of_each_case, cuts, cuts), min_size=1, max_size=2),
)
def test_split_join_gives_same_results_for_same_table_contents(
    spark: SparkSession,
    retention: list[int],
    grace: list[int],
    blocks: list[tuple[list[list[Record]], list[list[Record]], list[int], list[int]]],
) -> None:
    """A block is table records, then stream records: the table does not change between these."""
    table = VersionedTable("table", history_retention=ms(retention), **SOURCE)
    stream = Stream("stream", null_key="keep", **SOURCE)
    selected = ("left.value", "right.value as found")
    waits = ms(min(g, r) for g, r in zip(grace, retention, strict=True))
    joins = (
        stream.left_join(table, name="at_once", select=selected),
        stream.left_join(table, name="held_back", select=selected, grace_period=waits),
    )
    whole, split = (TopologyTestDriver(*joins, spark=spark) for _ in range(2))
    for rows, records, row_cut, record_cut in blocks:
        whole.run({"table": placed(rows), "stream": placed(records)})
        split.run({"table": heads(rows, row_cut)})
        split.run({"table": tails(rows, row_cut), "stream": heads(records, record_cut)})
        split.run({"stream": tails(records, record_cut)})
        assert by_case(split.read("at_once")) == by_case(whole.read("at_once"))
        assert by_case(split.read("held_back")) == by_case(whole.read("held_back"))
        assert as_set(split.waiting("held_back")) == as_set(whole.waiting("held_back"))
    assert split.metrics("held_back")["waiting"] == len(split.waiting("held_back"))


@pytest.mark.slow
def test_grace_join_emits_in_kafka_order_for_any_split(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late record follows the waiting records that are due when it arrives; a record exactly at the
    deadline, and in a left join one without a key, are emitted on arrival too. So windows after the
    join have the same late records, however arrivals are split into runs, small or large."""
    choose = Random(11)
    table = VersionedTable("table", history_retention=timedelta(seconds=1), **SOURCE)
    stream = Stream("stream", null_key="keep", **SOURCE)
    about: dict[str, Any] = {"select": ("left.value", "right.value as found")}
    about["grace_period"] = ms(number % 7 for number in range(PARTITIONS))
    left, inner = (
        stream.left_join(table, name="left", **about),
        stream.join(table, name="inner", **about),
    )
    window = HoppingWindow(6 * MS, advance=2 * MS, grace=3 * MS)
    counted = left.group_by().windowed_by(window).count(name="counted")
    each, small, large = (TopologyTestDriver(inner, counted, spark=spark) for _ in range(3))
    for driver in (each, small, large):
        driver.pipe("table", *placed([[{"key": "a", "value": "row", "timestamp": 0}]] * PARTITIONS))
    cases = [
        [
            {
                "key": choose.choice(["a", "b", "b", None]),
                "value": choose.choice(["x", "y", "z", None]),
                "timestamp": max(0, number + choose.randrange(-12, 4)),
            }
            for number in range(LENGTH)
        ]
        for _ in range(PARTITIONS)
    ]
    for number in range(LENGTH):
        each.pipe("stream", *placed([case[number : number + 1] for case in cases]))
    for whole in (small, large):
        if whole is large:
            for module, name, n in ((processor, "FINE", 4), (pin, "CHUNK", -1), (gate, "CHUNK", -1)):
                monkeypatch.setattr(module, name, n)
        whole.pipe("stream", *heads(cases, [6] * PARTITIONS))
        whole.pipe("stream", *tails(cases, [6] * PARTITIONS))
    one_by_one = {name: each.read(name) for name in ("left", "inner", "counted")}
    for name, rows in one_by_one.items():
        assert by_case(small.read(name)) == by_case(large.read(name)) == by_case(rows), name
    assert {row["is_late"] for row in one_by_one["left"] if row["key"]} == {True, False}
    assert any(row["key"] is None for row in one_by_one["left"])
    assert small.metrics("counted") == large.metrics("counted") == each.metrics("counted")
    assert each.metrics("counted")["dropped"] > 0


@pytest.mark.slow
def test_stream_join_emits_in_kafka_order_for_any_split(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record without a match is emitted before the matches of the record that moves stream time past
    the end of its window. So windows after the join have the same late records in a run with all
    records, small or large."""
    choose = Random(7)
    left, right = (Stream(name, null_key="keep", **SOURCE) for name in ("left", "right"))
    about: dict[str, Any] = {"before": 3 * MS, "after": 2 * MS, "grace": 2 * MS}
    about["select"] = ("left.value", "right.value as found")
    joined = left.outer_join(right, name="joined", **about)
    window = HoppingWindow(6 * MS, advance=2 * MS, grace=3 * MS)
    counted = joined.group_by().windowed_by(window).count(name="counted")
    each, small, large = (TopologyTestDriver(counted, spark=spark) for _ in range(3))
    cases = {
        name: [
            [
                {
                    "key": choose.choice(["a", "b", "c", None] if usable else ["a", "b", "c"]),
                    "value": choose.choice(["x", "y", None] if usable else ["x", "y"]),
                    "timestamp": max(0, 3 * number + choose.randrange(-12, 4)),
                }
                for number in range(LENGTH // 2)
            ]
            for usable in [False, True] * (PARTITIONS // 2)
        ]
        for name in ("left", "right")
    }
    whole = {name: placed(some) for name, some in cases.items()}
    turns = [task_order(*some) for some in zip(cases["left"], cases["right"], strict=True)]
    for turn in zip(*turns, strict=True):
        taken: dict[str, list[Record]] = {"left": [], "right": []}
        for case, (name, record) in enumerate(turn):
            taken[name].append(record | {"case": case, "partition": case})
        each.run(taken)
    small.run(whole)
    for module, name, n in ((arrival_order, "HOUR", 4000), (pin, "CHUNK", -1), (gate, "CHUNK", -1)):
        monkeypatch.setattr(module, name, n)
    large.run(whole)
    one_by_one = {name: each.read(name) for name in ("joined", "counted")}
    for name, rows in one_by_one.items():
        assert by_case(small.read(name)) == by_case(large.read(name)) == by_case(rows), name
    assert small.metrics("counted") == large.metrics("counted") == each.metrics("counted")
    assert each.metrics("counted")["dropped"] > 0


def task_order(left: Sequence[Record], right: Sequence[Record]) -> list[tuple[str, Record]]:
    """Returns the order in which a task takes the records of two inputs: by the stream time of each
    input, the left one first."""
    found: list[tuple[int, int, str, Record]] = []
    for place, (name, records) in enumerate((("left", left), ("right", right))):
        times = accumulate((r["timestamp"] for r in records), max)
        found += [(time, place, name, record) for time, record in zip(times, records, strict=True)]
    return [(name, record) for _, _, name, record in sorted(found, key=lambda one: one[:2])]


def as_set(rows: Sequence[Record]) -> Counter[tuple[Any, ...]]:
    names = ("case", "key", "value", "found", "timestamp")
    return Counter(tuple(row.get(n) for n in names) for row in rows)


@pytest.mark.parametrize("runs", [1, 4])
def test_split_sums_of_doubles_are_those_of_kafka_streams(spark: SparkSession, runs: int) -> None:
    """An adder and a subtractor in Kafka Streams see each record: the old value is subtracted from the
    sum of its group, then the new one is added."""
    columns = [StructField("case", IntegerType()), StructField("x", DoubleType())]
    schema = StructType([*columns, StructField("timestamp", TimestampType())])
    about: dict[str, Any] = {"key": "case", "schema": schema}
    sums = {"total": "sum(x)"}
    streamed = Stream("orders", **about).group_by().aggregate(sums, name="streamed")
    tabled = Table("prices", **about).group_by("case % 2 as half").aggregate(sums, name="tabled")
    random = Random(1)
    values = [0.1, 0.2, 0.3, -0.7, 1e15, 3.3]
    records = [
        {"case": random.randrange(4), "x": random.choice(values), "timestamp": i} for i in range(24)
    ]
    totals, groups, old = Counter[int](), Counter[int](), dict[int, float]()
    expected: dict[str, list[tuple[int, float]]] = {"streamed": [], "tabled": []}
    for one in records:
        case, x = one["case"], one["x"]
        totals[case] += x
        groups[case % 2] = groups[case % 2] - old.get(case, 0) + x
        old[case] = x
        expected["streamed"].append((case, totals[case]))
        expected["tabled"].append((case % 2, groups[case % 2]))
    driver = TopologyTestDriver(streamed, tabled, spark=spark)
    size = len(records) // runs
    for start in range(0, len(records), size):
        some = records[start : start + size]
        driver.run({"orders": some, "prices": some})
    for name, key in (("streamed", "case"), ("tabled", "half")):
        assert [(r[key], r["total"]) for r in driver.read(name)] == expected[name]


@pytest.mark.parametrize("runs", [1, 3])
@pytest.mark.parametrize("more", [{}, {"floats": "sum(x)"}], ids=["alone", "beside_doubles"])
def test_split_sums_of_long_decimals_are_exact(
    spark: SparkSession, runs: int, more: dict[str, str]
) -> None:
    """Spark's own sum of two decimals of 38 digits has fewer digits after the point."""
    columns = [
        StructField("case", IntegerType()),
        StructField("d", DecimalType(38, 18)),
        StructField("x", DoubleType()),
    ]
    schema = StructType([*columns, StructField("timestamp", TimestampType())])
    about: dict[str, Any] = {"key": "case", "schema": schema}
    sums = {"total": "sum(d)", **more}
    streamed = Stream("orders", **about).group_by("0 as all").aggregate(sums, name="streamed")
    tabled = Table("prices", **about).group_by("0 as all").aggregate(sums, name="tabled")
    values = [Decimal("1.123456789012345678"), Decimal("1E-18"), Decimal("-0.000000000000000003")]
    records = [{"case": i, "d": d, "x": 0.1, "timestamp": i} for i, d in enumerate(values)]
    driver = TopologyTestDriver(streamed, tabled, spark=spark)
    size = len(records) // runs
    for start in range(0, len(records), size):
        some = records[start : start + size]
        driver.run({"orders": some, "prices": some})
    for name in ("streamed", "tabled"):
        assert [r["total"] for r in driver.read(name)] == [*accumulate(values)]
