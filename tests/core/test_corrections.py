"""A corrected join gives the rows of a single run, however its input is split into runs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql.types import IntegerType, StructField, StructType

from tests.core.test_split_invariance import (
    COLUMNS,
    PARTITIONS,
    SOURCE,
    Record,
    careful,
    cuts,
    heads,
    of_each_case,
    placed,
    tails,
)
from vt_dagster.testing import TopologyTestDriver
from vt_dagster.topology.model import Stream, VersionedTable

MS = timedelta(milliseconds=1)
RETENTION, PROMISE = 20, 12
NAMES = ("left", "inner", "waiting", "keyed", "keyed_waiting")
COLUMNS_OF_STREAM = StructType([*COLUMNS.fields, StructField("number", IntegerType())])


FEW = ("left", "keyed_waiting")
"""A left join without a grace period, and an inner join with one."""


def joins(names: Sequence[str]) -> list[Stream]:
    table = VersionedTable("table", history_retention=RETENTION * MS, **SOURCE)
    stream = Stream("stream", null_key="keep", **SOURCE | {"schema": COLUMNS_OF_STREAM})
    about: dict[str, Any] = {
        "corrected_for": PROMISE * MS,
        "select": ("left.case", "left.key as of", "right.value as found"),
    }
    made: list[Stream] = [
        stream.left_join(table, name="left", **about),
        stream.join(table, name="inner", **about),
        stream.left_join(table, name="waiting", grace_period=4 * MS, **about),
        stream.join(table, name="keyed", key="number", **about),
        stream.join(table, name="keyed_waiting", key="number", grace_period=4 * MS, **about),
    ]
    return [node for node in made if node.name in names]


def numbered(blocks: list[Any]) -> list[Any]:
    """The blocks with a unique number for each record of the stream, which is its key."""
    numbers = count()
    return [
        (rows, [[r | {"number": next(numbers)} for r in case] for case in records], *rest)
        for rows, records, *rest in blocks
    ]


def stream_time_by_partition(rows: list[Record]) -> dict[int, int]:
    """Stream time of each partition, milliseconds."""
    times: dict[int, int] = {}
    for row in rows:
        at = round(row["timestamp"].timestamp() * 1000)
        times[row["partition"]] = max(times.get(row["partition"], at), at)
    return times


def matched_values(rows: list[Record], edges: dict[int, int]) -> dict[Any, Any]:
    """The value found for each record of a join's table that is younger than ``corrected_for``."""
    return {
        (r["case"], r["left_offset"]): r["found"]
        for r in rows
        # A final row may be younger, where only the table was that far ahead.
        if not r["is_final"] and r["timestamp"].timestamp() * 1000 >= edges[r["case"]]
    }


def split_independent_results(
    driver: TopologyTestDriver, name: str, rows: list[Record]
) -> dict[str, Any]:
    """The results that do not depend on the split into runs. A row's number of corrections does."""
    store = driver._stores[name]  # pyright: ignore[reportPrivateUsage]
    head, refused = store.head(), store.quarantine()
    listed = [] if refused is None else refused.collect()
    places = [(row["partition"], row["position"]) for row in listed]
    assert len(places) == len({*places}), "a record is in quarantine once"
    return {
        "rows": [
            {k: row[k] for k in ("case", "left_offset", "of", "found", "timestamp", "is_final")}
            for row in rows
        ],
        "too late": head and head.commit.totals.get("corrections_too_late", 0),
        "listed": sorted(places),
    }


@pytest.mark.slow
@pytest.mark.parametrize("names", [FEW, pytest.param(NAMES, marks=pytest.mark.endurance)])
@careful
@given(
    blocks=st.lists(st.tuples(of_each_case, of_each_case, cuts, cuts), min_size=2, max_size=2),
)
def test_split_runs_equal_single_run(
    spark: SparkSession, names: Sequence[str], blocks: list[Any]
) -> None:
    whole, split, finer = (TopologyTestDriver(*joins(names), spark=spark) for _ in range(3))
    blocks = numbered(blocks)
    for rows, records, *_ in blocks:
        split.run({"table": placed(rows), "stream": placed(records)})
    # The same order of arrival gives the same rows, also older ones, however it is split into runs.
    for place, (rows, records, first, second) in enumerate(blocks):
        if not place:  # there are no rows to correct yet, and no records wait
            finer.run({"table": placed(rows), "stream": placed(records)})
            continue
        finer.run({"table": heads(rows, first)})
        finer.run({"table": tails(rows, first), "stream": heads(records, second)})
        finer.run({"stream": tails(records, second)})
    of_split = {name: split.table(name) for name in names}
    for name in names:
        assert split_independent_results(finer, name, finer.table(name)) == split_independent_results(
            split, name, of_split[name]
        )
    every: dict[str, list[Record]] = {"table": [], "stream": []}
    for rows, records, *_ in blocks:
        every["table"] += placed(rows)
        every["stream"] += placed(records)
    whole.run(every)
    table, stream = split.read("table"), split.read("stream")
    known, seen = (
        stream_time_by_partition(table),
        stream_time_by_partition([r for r in stream if not r["is_tombstone"]]),
    )
    edges = {p: max(known.get(p, -PROMISE), seen.get(p, -PROMISE)) - PROMISE for p in range(PARTITIONS)}
    for name in names:
        assert matched_values(of_split[name], edges) == matched_values(whole.table(name), edges)
    if table and stream:
        expected = by_duckdb(table, stream, edges)
        matched = {k: v for k, v in expected.items() if v is not None}
        every_row = {"left": expected, "inner": matched, "keyed": matched}
        for name, kind in every_row.items():
            if name in names:
                assert matched_values(of_split[name], edges) == kind


def by_duckdb(table: list[Record], stream: list[Record], edges: dict[int, int]) -> dict[Any, Any]:
    """The expected values, by an ASOF JOIN over all records that the table accepted."""
    names = ("case", "key", "value", "timestamp", "offset")
    versions = pa.Table.from_pylist([{n: r[n] for n in names} for r in table])
    records = pa.Table.from_pylist([{n: r[n] for n in names} for r in stream if not r["is_tombstone"]])
    if not records.num_rows:
        return {}
    with duckdb.connect() as connection:
        connection.register("records", records)
        connection.register("versions", versions)
        rows = connection.sql(
            """
            select r."case", r."offset", epoch_ms(r."timestamp"), v.value
            from records r asof left join (
                select * from versions
                qualify row_number() over (
                    partition by "case", "key", "timestamp" order by "offset" desc
                ) = 1
            ) v on r."case" = v."case" and r."key" = v."key" and r."timestamp" >= v."timestamp"
            """
        ).fetchall()
    return {(case, offset): value for case, offset, at, value in rows if at >= edges[case]}
