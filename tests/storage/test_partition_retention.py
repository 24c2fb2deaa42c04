"""Tables with a history retention per partition, and logs of many partitions."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.market import RECORD, lines, record
from vt_dagster import FilesSource, VersionedTable
from vt_dagster.errors import ContractError, StorageError
from vt_dagster.runs.audit import audit
from vt_dagster.runs.run import run_once
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.storage.spark_reader import MANY, at_or_after
from vt_dagster.topology.durations import length_at

pytestmark = pytest.mark.usefixtures("few_rows")


HOUR = timedelta(hours=1)


def versions(store: AssetStore) -> list[tuple[Any, ...]]:
    rows = store.read("versions").orderBy("k", "valid_from").collect()
    return [(row["k"], row["v"]) for row in rows]


def test_history_retention_per_partition(spark: SparkSession, tmp_path: Path) -> None:
    landing, warehouse = tmp_path / "landing", tmp_path / "warehouse"
    landing.mkdir()
    table = VersionedTable(
        "prices",
        key="k",
        schema=RECORD,
        timestamp="at",
        tombstone="v is null",
        history_retention={0: HOUR, 1: 5 * HOUR},
        partition_by="if(k = 'short', 0, 1)",
        source=FilesSource(str(landing)),
    )
    days = [("short", "long")[i % 2] for i in range(8)]
    records = [record(k, f"{k}{i}", f"1 {i:02d}:00") for i, k in enumerate(days)]
    records += [record("short", "late", "1 04:30"), record("long", "in time", "1 02:30")]
    for part, number in ((records[:6], 1), (records[6:], 2)):
        (landing / f"{number}.jsonl").write_text(lines(*part), encoding="utf-8")
        run_once(table, stores_of(str(warehouse), spark))

    # in the short one, versions that ended by 05:00 have expired
    kept = [("long", v) for v in ("long1", "in time", "long3", "long5", "long7")]
    kept += [("short", v) for v in ("short4", "short6")]
    store = AssetStore(str(warehouse), table, spark)
    opened = AssetStore.open(str(warehouse), "prices", spark)
    assert versions(store) == versions(opened) == kept
    assert opened.node == table.__class__(
        "prices", key="k", schema=opened.node.schema, history_retention={0: HOUR, 1: 5 * HOUR}
    )
    rejected = store.quarantine()
    assert rejected is not None
    assert [(row["partition"], row["reason"]) for row in rejected.collect()] == [(0, "late")]
    for of in (store, opened):
        # a time that has expired in one partition can still be read in the other
        moment = "2024-01-01T03:30:00Z"
        with pytest.raises(StorageError, match="from 2024-01-01T05:00:00Z on"):
            of.read(as_of=moment)
        then = {row["k"]: row["v"] for row in of.read(as_of=moment, partial=True).collect()}
        assert then == {"long": "long3"}
    store.rebuild_view()
    assert versions(store) == kept
    assert [found for found in audit(store) if not found.passed] == []


def test_missing_partition_length_is_refused() -> None:
    with pytest.raises(ContractError, match=r"partition 2, got only \[0, 1\]"):
        length_at({0: HOUR, 1: HOUR}, 2)


@pytest.mark.parametrize("partitions", [3, MANY + 40])
def test_rows_at_or_after_offsets(spark: SparkSession, partitions: int) -> None:
    """Some partitions have no new rows. Some have no start offset yet: all their rows are read."""
    ends = {p: p % 5 + p + 2 for p in range(partitions)}
    start = {p: max(0, end - p % 3) for p, end in ends.items() if p % 7 != 1}
    rows = [(p, offset) for p, end in ends.items() for offset in range(end)]
    log = spark.createDataFrame(rows, "partition int, offset bigint")
    found = {(row["partition"], row["offset"]) for row in log.where(at_or_after(start, ends)).collect()}
    assert found == {(p, offset) for p, offset in rows if offset >= start.get(p, 0)}


def test_offsets_at_end_select_no_row(spark: SparkSession) -> None:
    log = spark.createDataFrame([(0, 0), (1, 0)], "partition int, offset bigint")
    assert log.where(at_or_after({0: 1, 1: 1}, {0: 1, 1: 1})).collect() == []
