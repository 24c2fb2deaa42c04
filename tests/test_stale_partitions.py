"""Which partitions are stale after a restatement, swap, erase or truncated log, and by file times."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.market import lines, record
from tests.test_partition_sensor import Reports, day
from vt_dagster.orchestration.io_manager import READS
from vt_dagster.runs.erase import erase
from vt_dagster.runs.replay import replay, swap
from vt_dagster.runs.restate import restate
from vt_dagster.runs.truncate_log import truncate_logs
from vt_dagster.storage.maintenance import maintain
from vt_dagster.storage.stale_reads import UNDECIDABLE
from vt_dagster.topology.durations import parse_time

pytestmark = pytest.mark.usefixtures("few_rows")

EVERY = [day(n) for n in range(2, 8)]
FAR = parse_time("2100-01-01T00:00:00Z")
Copy = Callable[[], Reports]


@pytest.fixture(scope="module")
def reports_template(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Reports, Any]:
    """Key c has a value at the ends of days 2 and 3, key d at those of 6 and 7, and a3 is the value of
    key a at those of 3 and 4. ``made`` has what each partition has read."""
    reports = Reports(tmp_path_factory.mktemp("reports"), spark)
    reports.land(
        record("a", "a1", "1 12:00"),
        record("a", "a5", "5 00:00"),
        record("c", "c2", "2 06:00"),
        record("c", None, "4 06:00"),
        record("d", "d6", "6 10:00"),
        record("z", "z9", "9 00:00"),
    )
    reports.land(record("a", "a3", "3 00:00"))
    return reports, {one: reports.make(one)[READS]["prices"] for one in EVERY}


@pytest.fixture
def copy(reports_template: tuple[Reports, Any], tmp_path: Path) -> Reports:
    """A copy in another directory, with the partitions as they were made."""
    before, reads = reports_template
    shutil.copytree(before.market.root, tmp_path / "copy")
    reports = Reports(tmp_path / "copy", before.market.spark)
    reports.landed, reports.prices = before.landed, reports.prices
    reports.stored.update(before.stored)
    for one in EVERY:
        reports.reported(one, reads[one])
    assert reports.asked() == []
    return reports


def correct_source(reports: Reports) -> None:
    """Changes the value of a3 in its source file."""
    folder = Path(reports.prices.source.path)  # pyright: ignore[reportAttributeAccessIssue]
    (folder / "002.jsonl").write_text(lines(record("a", "A3", "3 00:00")))


def restated(reports: Reports) -> None:
    restate(str(reports.market.warehouse), reports.prices, "2024-01-01", reports.market.spark)


def require_right(reports: Reports, asked: list[str], every: Sequence[str] = EVERY) -> None:
    """Makes the requested partitions. Then each partition has the rows that a new run would store
    (offsets may differ), and the sensor requests none."""
    for one in asked:
        reports.make(one)
    for one in every:
        assert {row[:2] for row in reports.stored[one]} == {row[:2] for row in reports.now(one)}, one
    assert reports.asked() == []


def test_restate_makes_partitions_stale(copy: Reports, capfd: pytest.CaptureFixture[str]) -> None:
    cursor = copy.tick().cursor
    restated(copy)
    assert copy.asked(cursor) == copy.asked() == []
    correct_source(copy)
    restated(copy)  # the log that the partitions have read was replaced twice
    said = copy.tick(cursor)
    assert [one.partition_key for one in said.run_requests] == [day(3), day(4)]
    assert {one.tags["vt_dagster/why"] for one in said.run_requests} == {"changed"}
    lost = copy.tick()
    assert [one.run_key for one in lost.run_requests] == [one.run_key for one in said.run_requests]
    # a new record in the new log makes a partition stale that has read the old log
    copy.land(record("d", "d7", "7 00:00"))
    assert copy.asked(said.cursor) == [day(7)]
    require_right(copy, copy.asked())
    assert "it is unknown whether" not in capfd.readouterr().err
    warehouse, spark = str(copy.market.warehouse), copy.market.spark
    assert maintain(warehouse, "prices", spark)["replaced_removed"] == 0
    assert maintain(warehouse, "prices", spark, timedelta(0))["replaced_removed"] == 2
    # the other partitions have read the first log, which is removed now
    assert copy.asked() == [day(2), day(5), day(6)]
    assert "3 partitions are requested, because it is unknown whether prices made them stale: " in (
        said_so := capfd.readouterr().err
    )
    assert UNDECIDABLE["another_log"] in said_so


def test_swap_makes_partitions_stale(copy: Reports) -> None:
    cursor, warehouse = copy.tick().cursor, str(copy.market.warehouse)
    correct_source(copy)
    replay(warehouse, copy.prices, "prices_new", copy.market.spark)
    assert copy.asked(cursor) == []
    swap(warehouse, "prices", "prices_new")
    said = copy.tick(cursor)
    assert [one.partition_key for one in said.run_requests] == copy.asked() == [day(3), day(4)]
    assert copy.asked(said.cursor) == []
    swap(warehouse, "prices", "prices_new")
    assert copy.asked() == []
    swap(warehouse, "prices", "prices_new")
    require_right(copy, copy.asked())


def erased(reports: Reports, key: str) -> None:
    erase(
        str(reports.market.warehouse),
        reports.prices,
        reports.market.spark,
        key=[key],
        reason="asked to",
    )


def test_erase_makes_partitions_stale(copy: Reports) -> None:
    cursor = copy.tick().cursor
    erased(copy, "c")
    said = copy.tick(cursor)
    assert [one.partition_key for one in said.run_requests] == copy.asked() == [day(2), day(3)]
    assert {one.tags["vt_dagster/why"] for one in said.run_requests} == {"erased"}
    assert copy.asked(said.cursor) == []
    require_right(copy, [day(2), day(3)])
    # the erase also removes a deletion for which the sensor has requested no run yet
    copy.land(record("d", None, "6 20:00"))
    erased(copy, "d")
    assert copy.asked() == [day(6), day(7)]
    require_right(copy, [day(6), day(7)])


def test_truncated_log_is_undecidable_without_cursor(
    copy: Reports, capfd: pytest.CaptureFixture[str]
) -> None:
    copy.land(record("c", "late", "3 12:00"))
    said = copy.tick()
    assert [one.partition_key for one in said.run_requests] == [day(3)]
    kept = replace(copy.prices, log_retention=timedelta(days=30))
    warehouse, spark = str(copy.market.warehouse), copy.market.spark
    assert truncate_logs(warehouse, spark, [kept], now=FAR) == {"prices": 8}
    # by its cursor, the sensor has seen the removed commits; without a cursor it cannot know
    assert copy.asked(said.cursor) == []
    assert copy.asked() == EVERY
    assert UNDECIDABLE["truncated"] in capfd.readouterr().err
    copy.land(record("d", "d7", "7 00:00"))
    assert copy.asked(said.cursor) == [day(7)]


def test_file_times_make_partitions_stale(spark: SparkSession, tmp_path: Path) -> None:
    """A record that arrives later counts as later, though its file has an earlier time. So its requests
    have another run key."""
    reports = Reports(tmp_path, spark)
    source: Any = replace(reports.prices.source, recorded_at="file_time")  # pyright: ignore
    reports.prices = replace(reports.prices, source=source)
    folder, keys, few = Path(source.path), list[str](), EVERY[:3]
    for number, (value, hours) in enumerate([("a", 9), ("b", 5), ("c", 1)], 1):
        day_of = "1 00:00" if number == 1 else f"3 0{number}:00"
        reports.market.land("prices", f"{number:03d}.jsonl", record("k", value, day_of))
        os.utime(folder / f"{number:03d}.jsonl", (hours * 3600, hours * 3600))
        reports.landed = number
        reports.market.prices = reports.prices
        reports.market.run([reports.prices])
        if number == 1:
            for one in few:
                reports.make(one)
        else:
            requests = reports.tick().run_requests
            assert [one.partition_key for one in requests] == few[1:]
            keys.append(requests[0].run_key)
    assert keys[0] != keys[1]
    require_right(reports, reports.asked(), few)
