"""The kernel of sliding windows agrees with the model on many random records, without Spark; windows
at the ends of time."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from itertools import groupby
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StringType, StructField, StructType, TimestampType

from tests.core.random_scenarios import scenarios
from vt_dagster import SlidingWindow, Stream
from vt_dagster.columns import WINDOW_END, WINDOW_START
from vt_dagster.core import windowed_aggregate
from vt_dagster.core.windowed_aggregate import CLOSED, FRESH, HORIZON, KEYED, KIND, MERGED
from vt_dagster.testing import TopologyTestDriver

Row = dict[str, Any]
BATCH = 3


def micros(ms: int) -> int:
    return ms * 1000


def records_of(scenario: Row) -> list[Row]:
    """A scenario's records in order of arrival, in the kernel's input format."""
    window = scenario["config"]["window"]
    time: int | None = None
    rows: list[Row] = []
    for i, record in enumerate(scenario["records"]):
        counts = record["key"] is not None and record["value"] is not None
        at = record["timestamp"]
        if counts:
            time = at if time is None else max(time, at)
        rows.append(
            {
                "key": record["key"],
                "order": i,
                FRESH: True,
                KEYED: counts,
                WINDOW_START: micros(at),
                windowed_aggregate.YOUNG: micros(at),
                windowed_aggregate.LENGTH: micros(window["size"]),
                HORIZON: None if time is None else micros(time - window["grace"]),
                windowed_aggregate.HIDDEN: None,
                "n": 1,
            }
        )
    return rows


def batches(rows: list[Row]) -> list[Any]:
    """The rows by key, in batches of a fixed size, which may split a key."""
    by_key = sorted(rows, key=lambda r: (r["key"] or "", r["key"] is None, r["order"]))
    made: list[Row] = []
    for _, group in groupby(by_key, key=lambda r: (r["key"] or "", r["key"] is None)):
        members = list(group)
        last = len(members) - 1
        made += [r | {"_first": i == 0, "_last": i == last} for i, r in enumerate(members)]
    schema = pa.schema(
        [(c, pa.bool_() if c in (FRESH, KEYED) else pa.int64()) for c in rows[0] if c != "key"]
        + [("key", pa.string()), ("_first", pa.bool_()), ("_last", pa.bool_())]
    )
    return [
        pa.RecordBatch.from_pylist(made[i : i + BATCH], schema=schema)
        for i in range(0, len(made), BATCH)
    ]


def results_of(scenario: Row) -> tuple[list[tuple[Any, ...]], int]:
    """The results of both kernels for a scenario, in order, and the number of dropped records."""
    rows = records_of(scenario)
    window = scenario["config"]["window"]
    kept = window.get("retention") or 2 * window["size"] + window["grace"]
    largest: dict[int, int | None] = {}
    for batch in windowed_aggregate._largest(iter(batches(rows))):
        largest |= {r["order"]: r[windowed_aggregate.LARGEST] for r in batch.to_pylist()}
    newest: int | None = None
    for row in rows:
        row[windowed_aggregate.HIDDEN] = None if newest is None else newest - micros(kept)
        found = largest[row["order"]]
        newest = newest if found is None else max(found, -(10**18) if newest is None else newest)
    passed = ["key", "order"]
    out: list[Row] = []
    for batch in windowed_aggregate._sliding_merge(iter(batches(rows)), passed, ["n"], ["sum"]):
        out += batch.to_pylist()
    out.sort(key=lambda r: (r["order"], r["_turn"]))
    results = [
        (r["order"], r["key"], r["n"], r["timestamp"], r[WINDOW_START], r[WINDOW_END])
        for r in out
        if r[KIND] == MERGED
    ]
    return results, sum(r[KIND] == CLOSED for r in out)


@pytest.mark.parametrize("seed", range(3))
def test_sliding_kernel_agrees_with_model(seed: int) -> None:
    from tests.core.reference_model import complete

    compared = 0
    for scenario in scenarios(seed, "windowed_aggregate", configs=40, sequences=4, sliding=True):
        plain = {"config": scenario["config"] | {"suppress": None, "aggregate": "count"}}
        known = complete(scenario | plain)
        if "expected_error" in known:
            continue
        expected = [
            (
                e["trigger"],
                e["key"],
                int(e["value"]),
                *(micros(e[c]) for c in ("timestamp", "window_start", "window_end")),
            )
            for e in known["expected"]
        ]
        found, dropped = results_of(scenario)
        assert found == expected, scenario["name"]
        assert dropped == known["metrics"]["dropped_records"], scenario["name"]
        compared += 1
    assert compared > 100


@pytest.mark.usefixtures("few_rows")
def test_windows_stay_within_year_1_and_9999(spark: SparkSession) -> None:
    """Windows begin in the year 1 at the earliest and end in the year 9999 at the latest. The next run
    reads them with their own bounds."""
    hour, minute, tick = timedelta(hours=1), timedelta(minutes=1), timedelta(milliseconds=1)
    first, last = (t.replace(tzinfo=timezone.utc) for t in (datetime.min, datetime.max))
    fields = [StructField("k", StringType()), StructField("timestamp", TimestampType())]
    visits = Stream("visits", key="k", schema=StructType(fields), partitions=2)
    sliding = visits.group_by().windowed_by(SlidingWindow(hour, hour)).count(name="sliding")
    driver = TopologyTestDriver(sliding, spark=spark)

    def found(*records: tuple[str, int, datetime]) -> list[tuple[Any, ...]]:
        rows = [{"k": k, "partition": home, "timestamp": at} for k, home, at in records]
        driver.pipe("visits", *rows)
        names = ("k", WINDOW_START, WINDOW_END, "count")
        return [tuple(row[n] for n in names) for row in driver.read("sliding")]

    early = [first + n * minute for n in (0, 10, 20)]
    late, noon = last - 30 * minute, last - 30 * minute - timedelta(microseconds=999)
    assert found(("a", 0, early[0]), ("a", 0, early[1]), ("z", 1, late), ("z", 1, last)) == [
        ("a", first, early[0], 1),
        ("a", early[0] + tick, early[0] + tick + hour, 1),
        ("a", first, early[1], 2),
        ("z", noon - hour, noon, 1),
        ("z", noon + tick, last, 1),
        ("z", last - timedelta(microseconds=999) - hour, last - timedelta(microseconds=999), 2),
    ]
    assert found(("a", 0, early[2]), ("a", 0, early[0])) == [
        ("a", early[0] + tick, early[0] + tick + hour, 2),
        ("a", early[1] + tick, early[1] + tick + hour, 1),
        ("a", first, early[2], 3),
        ("a", first, early[2], 4),
        ("a", first, early[1], 3),
        ("a", first, early[0], 2),
    ]
