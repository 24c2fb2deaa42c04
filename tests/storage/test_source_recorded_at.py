"""``recorded_at`` taken from a source: reads as known at a time give the rows that one run per such
time would give."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from deltalake import CommitProperties, write_deltalake
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType, TimestampType

import vt_dagster
from tests.storage.test_as_known_at import START, moment, read_requests, read_rows, sorted_rows
from tests.storage.topology import EPOCH, SCHEMA, Topology
from vt_dagster.columns import ARRIVAL, OUTCOME, PARTITION, RECORDED_AT
from vt_dagster.core.arrival_order import Outcome
from vt_dagster.core.source_records import SOURCE_RECORDED_AT
from vt_dagster.errors import TopologyError
from vt_dagster.runs import record_times
from vt_dagster.runs.pin import Arrival
from vt_dagster.runs.run import run_once
from vt_dagster.sources.base import Uncounted
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.storage import commit_log, delta
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.storage.commit_log import Commit
from vt_dagster.storage.schema_evolution import shape_of
from vt_dagster.storage.spark_reader import Head
from vt_dagster.topology.model import Stream, VersionedTable

pytestmark = pytest.mark.usefixtures("few_rows")

HOUR = 3_600_000_000
Y2100 = 4_102_444_800
RATES: dict[str, tuple[int, list[tuple[str | None, int | None, float]]]] = {
    "1": (0, [("a", 1, 0), ("b", 1, 1), ("a", 2, 5)]),
    "2": (4, [("a", 3, 3), ("b", None, 12), ("a", 9, 1), ("c", 1, 14)]),
    "3": (3, [("c", 2, 14), ("a", 8, 4)]),  # written before 2
    "4": (8, [("a", 7, 26), ("b", 5, 16)]),
    "5": (9, [("b", 6, 20), ("d", 1, 27)]),
    "6": (7, [("a", 6, 19), ("b", 4, 17)]),  # in the second run, but written before the first run
    "7": ((Y2100 * 10**6 - START) // HOUR, [("d", 2, 28)]),
}
TIMES = [(0, 0), (4, 0), (4, 0), (8, 0), (9, 0), (9, 1)]
"""The effective times of these files: hours, and microseconds after them. That of file 7 is now."""
ORDERS: dict[str, list[tuple[str, int, float, int | None]]] = {
    "1": [
        ("a", 1, 4, 2),
        ("b", 2, 4, 5),
        ("a", 3, 4, 4),
        ("b", 4, 13, 3),  # recorded before the record ahead of it in its partition
        ("a", 0, 1, None),
        ("a", 5, 0, 3),  # the same
        ("a", 0, 1, RATES["7"][0]),
        ("c", 6, 15, 5),
    ],
    "2": [("a", 7, 25, 10), ("a", 8, 4, 10), ("b", 9, 18, 8), ("d", 10, 27, 12)],
    "3": [("a", 11, 4, 11), ("d", 12, 28, 13)],  # in the second run
}
"""Records, with the hours in their column ``seen``; b is alone in its partition."""
SEEN = {1: 2, 2: 5, 3: 4, 4: 5, 5: 4, 6: 5, 7: 10, 8: 10, 9: 8, 10: 12, 11: 12, 12: 13}
"""The hour at which each record counts as recorded; 11 counts a microsecond later."""


def at(hours: int, micros: int = 0) -> int:
    return START + hours * HOUR + micros


def micros(known: datetime) -> int:
    return (known.replace(tzinfo=timezone.utc) - EPOCH) // timedelta(microseconds=1) + START


def copy_with_one_run_per_time(warehouse: str, name: str, copy: str) -> None:
    """Copies a log as one run per recording time would have written it."""
    log = vt_dagster.read(name, warehouse=warehouse, what="log")
    last = list(commit_log.commits(f"{warehouse}/{name}"))[-1]
    offsets, stream_time = dict[int, int](), dict[int, int]()
    for batch, known in enumerate(sorted({*log[RECORDED_AT].to_pylist()}), 1):
        rows = log.filter([row == known for row in log[RECORDED_AT].to_pylist()])
        for row in rows.to_pylist():
            home, true = row[PARTITION], micros(row["timestamp"])
            offsets[home] = offsets.get(home, 0) + 1
            stream_time[home] = max(stream_time.get(home, true), true)
        document = Commit(
            asset=name,
            batch=batch,
            attempt=f"attempt-{batch}",
            shape=last.shape,
            recorded_at=micros(known),
            next_offset=offsets,
            stream_time=stream_time,
        )
        about = {"userMetadata": json.dumps({delta.MARK: delta.with_format(document.model_dump())})}
        properties = CommitProperties(custom_metadata=about)
        write_deltalake(f"{copy}/{name}/log", rows, mode="append", commit_properties=properties)


@pytest.fixture(scope="module")
def table_and_stream(
    tmp_path_factory: pytest.TempPathFactory, spark: SparkSession
) -> tuple[VersionedTable, Stream, str, str]:
    """A table with its files' times and a stream with the times of a column, after two runs each; and
    their copies with one commit per time."""
    topology = Topology(tmp_path_factory.mktemp("table_and_stream"))
    for file, (hours, records) in RATES.items():
        topology.land("rates", f"{file}.jsonl", records)
        os.utime(topology.root / "rates" / f"{file}.jsonl", ns=(0, at(hours) * 1000))
    (topology.root / "orders").mkdir()
    for file, seen in ORDERS.items():
        rows = [
            {"k": k, "n": n, "timestamp": moment(START + round(t * 60_000_000))}
            | ({} if hours is None else {"seen": moment(at(hours))})
            for k, n, t, hours in seen
        ]
        lines = "\n".join(json.dumps(row) for row in rows)
        (topology.root / "orders" / f"{file}.jsonl").write_text(lines)
    rates = VersionedTable(
        "rates",
        key="k",
        schema=SCHEMA,
        tombstone="n is null",
        history_retention=timedelta(minutes=10),
        source=FilesSource(str(topology.root / "rates"), max_bad_share=1.0, recorded_at="file_time"),
    )
    orders = Stream(
        "orders",
        key="k",
        schema=StructType([*SCHEMA.fields, StructField("seen", TimestampType())]),
        source=FilesSource(str(topology.root / "orders"), max_bad_share=1.0, recorded_at="seen"),
        partitions=2,
        partition_by="if(k = 'b', 1, 0)",
    )
    for node, first in ((rates, 5), (orders, 2)):
        files = [f"{file}.jsonl" for file in (RATES if node is rates else ORDERS)]
        for only in (files[:first], files[first:]):
            run_once(node, stores_of(topology.warehouse, spark), only=only)
    copy = str(topology.root / "copy")
    for node in (rates, orders):
        copy_with_one_run_per_time(topology.warehouse, node.name, copy)
    return rates, orders, topology.warehouse, copy


def test_rows_are_recorded_at_file_time(table_and_stream: tuple[Any, Any, str, str]) -> None:
    *_, warehouse, _ = table_and_stream
    first, second = commit_log.commits(f"{warehouse}/rates")
    assert [step.recorded_at for step in first.steps] == [at(0), at(4), at(8)]
    assert first.recorded_at == at(9)
    assert [step.recorded_at for step in second.steps] == [at(9, 1)]
    assert at(9, 1) < second.recorded_at <= time.time_ns() // 1000
    expected: list[tuple[Any, ...]] = []
    for (_, records), known in zip(RATES.values(), [*[at(*t) for t in TIMES], 0], strict=True):
        expected += [(k, n, known or second.recorded_at) for k, n, _ in records]
    rows = vt_dagster.read("rates", warehouse=warehouse, what="log").to_pylist()
    found = [(r["k"], r["n"], micros(r[RECORDED_AT])) for r in rows]
    refused = [("a", 9, at(4))]  # late: older than the history retention
    assert sorted(found + refused, key=repr) == sorted(expected, key=repr)


def test_rows_are_recorded_at_column_time(
    table_and_stream: tuple[Any, Stream, str, str], spark: SparkSession
) -> None:
    _, orders, warehouse, _ = table_and_stream
    first, second = commit_log.commits(f"{warehouse}/orders")
    assert [step.recorded_at for step in first.steps] == [at(h) for h in (2, 4, 5, 8, 10)]
    assert [step.next_offset for step in first.steps[:2]] == [{0: 1}, {0: 3}]
    assert (first.recorded_at, second.recorded_at) == (at(12), at(13))
    rows = vt_dagster.read("orders", warehouse=warehouse, what="log").to_pylist()
    found = {r["n"]: micros(r[RECORDED_AT]) for r in rows}
    assert found == {n: at(hours, n == 11) for n, hours in SEEN.items()}
    refused = AssetStore(warehouse, orders, spark).quarantine()
    assert refused is not None
    reasons = [(r.position, r.reason) for r in refused.orderBy("position").collect()]
    assert reasons == [(5, "null_recorded_at"), (7, "future_recorded_at")]


@pytest.mark.parametrize("name", ["rates", "orders"])
def test_reads_equal_one_run_per_recorded_time(
    table_and_stream: tuple[Any, Any, str, str], spark: SparkSession, name: str
) -> None:
    table, stream, warehouse, copy = table_and_stream
    kind = "versioned" if name == "rates" else "stream"
    times = sorted({at(*t) for t in TIMES} | {at(h) for h in SEEN.values()})
    every = [at(0) - 1, *times, *(later - 1 for _, later in pairwise(times)), at(14)]
    for number, known in enumerate(every):
        for asked in read_requests(kind)[number % 2 :: 2]:
            found, expected = (read_rows(w, name, moment(known), **asked) for w in (warehouse, copy))
            assert found == expected, (known - START, asked)
    store = AssetStore(warehouse, table if name == "rates" else stream, spark)
    what: Any = "versions" if kind == "versioned" else "log"
    by_spark = store.read(what, as_known_at=moment(at(5)))
    assert sorted_rows(by_spark.toArrow()) == read_rows(copy, name, moment(at(5)), what=what)


def test_as_known_joins_follow_recorded_times(
    table_and_stream: tuple[VersionedTable, Stream, str, str], spark: SparkSession
) -> None:
    """A join of a backfill by what was known at each record's time; versions that had expired by then
    are not found."""
    rates, orders, warehouse, copy = table_and_stream
    joined = orders.left_join(
        rates, name="known", select=["left.*", "right.n as rate"], as_known="when_recorded"
    )
    run_once(joined, stores_of(warehouse, spark))
    rows = vt_dagster.read("orders", warehouse=warehouse, what="log").to_pylist()
    results = vt_dagster.read("known", warehouse=warehouse, what="log").to_pylist()
    found = {row["n"]: row["rate"] for row in results}
    for row in rows:
        about = {"as_of": row["timestamp"], "as_known_at": row[RECORDED_AT], "partial": True}
        then = vt_dagster.read("rates", warehouse=copy, key=row["k"], **about)
        assert then["n"].to_pylist() == [n for n in [found[row["n"]]] if n is not None], row
    assert found == EXPECTED
    for row in results:
        place = row["partition"], row["offset"]
        told = vt_dagster.explain("known", offset=place, warehouse=warehouse)
        versions = [one.record for one in told.made_of if one.asset == "rates"]
        assert [r and r.values["n"] for r in versions] == [n for n in [row["rate"]] if n is not None]


EXPECTED = {1: 1, 2: 1, 3: 8, 4: None, 5: None, 6: 2, 7: 6, 8: None, 9: 5, 10: 1, 11: None, 12: 1}


def test_recorded_times_never_decrease(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times do not decrease in a partition, also across the chunks of tasks. They are neither before
    the last commit nor after the run. Too many different times are rounded up to fewer."""
    monkeypatch.setattr(record_times, "_MOST", 3)
    topology = Topology(tmp_path)
    store = topology.store("orders", spark)
    rows = [(0, 0, 5), (0, 1, 9), (0, 100_001, 2), (1, 2, 3), (1, 3, 20), (1, 4, 1), (0, 200_000, None)]
    read = spark.createDataFrame(rows, f"{PARTITION} INT, {ARRIVAL} LONG, told LONG").select(
        PARTITION,
        ARRIVAL,
        F.timestamp_micros("told").alias(SOURCE_RECORDED_AT),
        F.when(F.col("told").isNull(), Outcome.QUARANTINED).otherwise(Outcome.APPLIED).alias(OUTCOME),
    )
    shape = shape_of(topology.orders)
    before = Commit(asset="orders", batch=1, attempt="a", shape=shape, recorded_at=1)
    source: Any = Uncounted()
    arrival = Arrival(topology.orders, Head(0, before), "attempt", source=source)
    timed, end = record_times.assign_system_times(read, arrival, store, 12)
    found = [r[0] for r in timed.orderBy(ARRIVAL).select(F.unix_micros(RECORDED_AT)).collect()]
    for held in arrival.persisted:
        store.unpersist(held)
    assert end == 12
    # Of the times 2, 3, 5, 9 and 12, two each become one.
    assert found[:6] == [9, 9, 3, 12, 12, 9]


def test_invalid_recorded_at_is_refused(tmp_path: Path) -> None:
    for wrong in ("modified", "n"):
        source = FilesSource(str(tmp_path), recorded_at=wrong)
        with pytest.raises(TopologyError, match=rf"\(\['timestamp'\]\), got '{wrong}'"):
            Stream("orders", key="k", schema=SCHEMA, source=source)
