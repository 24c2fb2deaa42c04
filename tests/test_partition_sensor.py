"""The sensor requests the partitions that a change of a table made stale, and each of them once."""

import json
import random
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest
from pyspark.sql import SparkSession

import vt_dagster
from tests.market import QUIET, Market, record
from vt_dagster import SparkResource, build_asset, build_partition_sensor, build_resources
from vt_dagster.errors import TopologyError
from vt_dagster.orchestration.io_manager import READS
from vt_dagster.runs.run import run_once
from vt_dagster.storage.asset_store import stores_of

DAYS = dg.DailyPartitionsDefinition("2024-01-01", end_date="2024-03-01")
SHOPS = dg.StaticPartitionsDefinition(["x", "y"])
AS_OF = {"vt_dagster/as_of": "partition_end"}
FIRST, LAST = 2, 7
"""The first and last day with a partition in the tests."""


def day(number: int) -> str:
    return f"2024-01-{number:02d}"


class Reports:
    """A report with one partition a day, which reads the prices as of the day's end, and its sensor."""

    def __init__(self, root: Path, spark: SparkSession, partitions: Any = DAYS) -> None:
        self.market = Market(root, spark)
        self.prices = replace(self.market.prices, history_retention=timedelta(days=20))
        self.market.prices = self.prices
        self.instance = dg.DagsterInstance.ephemeral()
        self.stored = stored = dict[str, set[Any]]()
        self.landed = 0

        @dg.asset(partitions_def=partitions, ins={"prices": dg.AssetIn(metadata=AS_OF)})
        def report(context: dg.AssetExecutionContext, prices: pl.DataFrame) -> None:
            stored[context.partition_key] = {*prices.select("k", "v", "offset").iter_rows()}

        # The report must not use Spark: no server listens at this address.
        resources = build_resources(
            str(self.market.warehouse), SparkResource(remote="sc://localhost:1")
        )
        self.report = report
        self.sensor = build_partition_sensor(report, reads=self.prices)
        self.resources = resources
        self.assets = [report, build_asset(self.prices)]
        self.defs = dg.Definitions(self.assets, sensors=[self.sensor], resources=resources)

    def land(self, *records: Any) -> None:
        """Writes records to a file of the source, and commits them to the table of prices."""
        self.landed += 1
        self.market.land("prices", f"{self.landed:03d}.jsonl", *records)
        run_once(self.prices, stores_of(str(self.market.warehouse), self.market.spark))

    def make(self, partition: str) -> dict[str, Any]:
        """Materializes a partition. Returns the metadata of the materialization."""
        done = dg.materialize(
            self.assets,
            selection=[self.report],
            partition_key=partition,
            resources=self.resources,
            instance=self.instance,
            run_config=QUIET,
        )
        (event,) = done.get_asset_materialization_events()
        return {name: value.value for name, value in event.materialization.metadata.items()}

    def tick(self, cursor: str | None = None) -> Any:
        """The sensor's result, evaluated as Dagster's daemon does."""
        return self.sensor.evaluate_tick(
            dg.build_sensor_context(
                instance=self.instance,
                cursor=cursor,
                repository_def=self.defs.get_repository_def(),
                resources=self.resources,
            )
        )

    def asked(self, cursor: str | None = None) -> list[str]:
        return [str(request.partition_key) for request in self.tick(cursor).run_requests or []]

    def now(self, partition: str) -> set[Any]:
        """The rows that a run of the partition would store now."""
        end = f"{partition}T23:59:59.999999Z"
        rows = vt_dagster.read("prices", warehouse=str(self.market.warehouse), as_of=end, into="polars")
        return {*rows.select("k", "v", "offset").iter_rows()}

    def reported(self, partition: str, reads: Any) -> None:
        """Reports a materialization from outside a run; ``reads``: what it has read, if known."""
        told = {} if reads is None else {READS: {"prices": reads}}
        key = self.report.key
        self.instance.report_runless_asset_event(
            dg.AssetMaterialization(key, partition=partition, metadata=told)
        )


@pytest.mark.endurance  # test_stale_partitions.py tests each cause
@pytest.mark.parametrize("seed", [1, 2])
def test_requested_runs_restore_all_partitions(spark: SparkSession, tmp_path: Path, seed: int) -> None:
    dice, reports = random.Random(seed), Reports(tmp_path, spark)
    for number in range(1, LAST + 1, 2):
        reports.land(
            *[
                record(k, f"{k}{d}", f"{d} {dice.randrange(24):02d}:00")
                for d in (number, number + 1)
                for k in "abc"
            ]
        )
    partitions = [day(n) for n in range(FIRST, LAST + 1)]
    for one in partitions:
        reports.make(one)
    cursor, asked_for, left = reports.tick().cursor, 0, 0
    for turn in range(5):
        before = dict(reports.stored)
        some = [
            record(
                dice.choice("abcd"),
                dice.choice([None, f"late {turn}", f"later {turn}"]),
                f"{dice.randrange(1, LAST + 1)} {dice.randrange(24):02d}:{dice.choice(['00', '30'])}",
            )
            for _ in range(dice.choice([1, 1, 2]))
        ]
        reports.land(*some, record("a", f"newest {turn}", f"9 {turn:02d}:00"))
        said = reports.tick(cursor)
        requests = said.run_requests or []
        # a second tick, whose cursor is lost, requests the same runs
        again = reports.tick(None).run_requests or []
        assert [one.run_key for one in again] == [one.run_key for one in requests]
        assert len({one.run_key for one in requests}) == len(requests)
        cursor = said.cursor
        assert reports.asked(cursor) == []
        asked = [str(one.partition_key) for one in requests]
        wrong = [one for one in partitions if before[one] != reports.now(one)]
        assert {*wrong} <= {*asked}
        earliest = min(one["at"][:10] for one in some)
        assert all(one >= earliest for one in asked)
        for one in asked:
            reports.make(one)
        assert reports.stored == {one: reports.now(one) for one in partitions}
        asked_for, left = asked_for + len(asked), left + len(partitions) - len(asked)
    assert reports.asked(None) == []
    assert asked_for > 3
    assert left > 3


@pytest.fixture(scope="module")
def reports(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Partitions of days 2 to 7 are made. Then a late price comes, valid from day 3 until day 5."""
    reports = Reports(tmp_path_factory.mktemp("reports"), spark)
    reports.land(
        record("a", "a1", "1 12:00"), record("a", "a5", "5 00:00"), record("b", "b8", "8 00:00")
    )
    for number in range(FIRST, LAST + 1):
        told = reports.make(day(number))
    assert told[READS]["prices"] == {
        "asset": "prices",
        "what": "current",
        "as_of": "2024-01-07T23:59:59.999999Z",
        "log": told[READS]["prices"]["log"],
        "batch": 1,
        "next_offset": {"0": 3},
        "erased": 0,
    }
    reports.land(record("a", "a3", "3 00:00"))
    return reports


def test_stale_partitions_and_reasons(reports: Reports) -> None:
    """A day reads as of the instant just before its end. So day 4 is stale: the late price ends when a5
    begins, which is the end of day 4."""
    said = reports.tick()
    assert [one.partition_key for one in said.run_requests or []] == [day(3), day(4)]
    keys = {one.run_key for one in said.run_requests or []}
    assert all(str(key).startswith("report_partitions_of_prices:2024-01-0") for key in keys)
    assert {one.tags["vt_dagster/why"] for one in said.run_requests or []} == {"changed"}
    assert reports.tick(said.cursor).skip_message == "nothing new in prices: batch 2, 4 records"
    told = json.loads(said.cursor or "")
    told["position"]["log"] = "old"
    for lost in ("somebody's own", "{}", json.dumps(told)):
        assert {one.run_key for one in reports.tick(lost).run_requests or []} == keys
    # day 8 was never materialized, so it has read nothing
    assert day(8) not in reports.asked()


def test_partition_without_recorded_reads_is_requested(reports: Reports) -> None:
    reports.reported("2024-02-01", None)
    reports.reported("2023-12-31", None)  # the definition has no such partition
    said = reports.tick()
    assert [one.partition_key for one in said.run_requests or []] == [day(3), day(4), "2024-02-01"]
    key = (said.run_requests or [])[-1].run_key
    reports.reported("2024-02-01", None)  # the requested run does not report what it read either
    assert (reports.tick().run_requests or [])[-1].run_key == key
    reports.make("2024-02-01")
    assert reports.asked() == [day(3), day(4)]


def test_older_run_ending_last_is_stale(reports: Reports) -> None:
    """If an older run ends last, the partition has the rows of an older position. The sensor requests
    the partition again."""
    said = reports.tick()
    (first,) = [one for one in said.run_requests or [] if one.partition_key == day(3)]
    before = reports.instance.fetch_materializations(
        dg.AssetRecordsFilter(reports.report.key, asset_partitions=[day(3)]), limit=1
    ).records[0]
    event: Any = before.asset_materialization
    reports.make(day(3))
    assert reports.asked() == [day(4)]
    cursor = reports.tick(said.cursor).cursor
    reports.reported(day(3), event.metadata[READS].value["prices"])
    (again,) = reports.tick(cursor).run_requests or []
    assert (again.partition_key, again.run_key != first.run_key) == (day(3), True)


def test_partition_beyond_history_is_skipped(
    reports: Reports, capfd: pytest.CaptureFixture[str]
) -> None:
    told = reports.make("2024-01-02")[READS]["prices"]
    reports.reported("2024-02-02", {**told, "log": "another"})
    reports.reported("2024-01-02", {**told, "log": "another", "as_of": "2023-12-01T00:00:00Z"})
    said = reports.tick()
    (request,) = [one for one in said.run_requests or [] if one.partition_key == "2024-02-02"]
    assert request.tags["vt_dagster/why"] == "another_log"
    assert "2024-01-02" not in {one.partition_key for one in said.run_requests or []}
    told = "1 partition may be stale, with times before the history of prices: 2024-01-02"
    assert told in capfd.readouterr().err


# The warning is about tags that Dagster itself gives a run of several dimensions.
@pytest.mark.filterwarnings("ignore:Non-compliant tag keys:DeprecationWarning")
def test_multi_partitions(spark: SparkSession, tmp_path: Path) -> None:
    both = dg.MultiPartitionsDefinition({"day": DAYS, "shop": SHOPS})
    reports = Reports(tmp_path, spark, both)
    assert reports.tick().skip_message.startswith("cannot look at prices: expected an asset 'prices'")
    reports.land(record("a", "a1", "1 12:00"), record("a", "a5", "5 00:00"))
    for one in ("2024-01-03|x", "2024-01-03|y", "2024-01-05|x"):
        reports.make(one)
    cursor = reports.tick().cursor
    reports.land(record("a", None, "3 23:59"))
    assert reports.asked(cursor) == ["2024-01-03|x", "2024-01-03|y"]


def _asset(partitions: Any = DAYS, **metadata: Any) -> Any:
    @dg.asset(partitions_def=partitions, ins={"prices": dg.AssetIn(metadata=metadata)})
    def report(prices: pl.DataFrame) -> None: ...

    return report


@dg.asset(partitions_def=DAYS, deps=["prices"])
def run_unpartitioned() -> None: ...


@dg.op
def counted(prices: pl.DataFrame) -> None: ...


@dg.graph_asset(partitions_def=DAYS, ins={"prices": dg.AssetIn(metadata=AS_OF)})
def of_graph(prices: Any) -> Any:
    return counted(prices)


@pytest.mark.parametrize(
    ("report", "reads", "said"),
    [
        (_asset(None, **AS_OF), "prices", "report: expected one asset with partitions"),
        (of_graph, "prices", "of_graph: expected an asset of one op, got a graph asset"),
        (_asset(), "prices", "expected an input that reads prices as of a time"),
        (run_unpartitioned, "prices", "run_unpartitioned: expected an input that reads prices"),
        (
            _asset(**AS_OF, **{"vt_dagster/as_known_at": "partition_end"}),
            "prices",
            "as known at a time never changes",
        ),
        (_asset(**AS_OF, **{"vt_dagster/read": "log"}), "prices", "current rows changes with each run"),
        (_asset(**AS_OF), "rates", "expected a versioned table in reads, got the Table 'rates'"),
        (
            _asset(dg.DynamicPartitionsDefinition(name="shops"), **AS_OF),
            "prices",
            "as of 'partition_end', got a DynamicPartitionsDefinition",
        ),
        (
            _asset(dg.MultiPartitionsDefinition({"a": SHOPS, "b": SHOPS}), **AS_OF),
            "prices",
            "expected partitions by one time, since prices reads prices",
        ),
        (
            _asset(dg.MultiPartitionsDefinition({"a": DAYS, "b": DAYS}), **AS_OF),
            "prices",
            "as of 'partition_end', got a MultiPartitionsDefinition",
        ),
    ],
)
def test_refused_when_declared(tmp_path: Path, report: Any, reads: str, said: str) -> None:
    market: Any = Market(tmp_path, None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TopologyError, match=said):
        build_partition_sensor(report, reads=getattr(market, reads))


def test_refusal_says_how_a_result_gets_a_history(tmp_path: Path) -> None:
    market: Any = Market(tmp_path, None)  # pyright: ignore[reportArgumentType]
    select, day = ["left.*", "right.v as price"], timedelta(days=1)
    late = market.sales.left_join(market.prices, name="late", corrected_for=day, select=select)
    counted = market.sales.group_by().count(name="counted")
    history = r"materialized=Materialized\(history_retention=...\)"
    for reads, said in (
        (market.rates, "declare its history_retention"),
        (counted, f"declare it with {history}"),
        (late, rf"read to_stream\(name=...\).to_table\(name=..., {history}\) of it"),
        (market.sales, rf"read to_table\(name=..., {history}\) of it"),
    ):
        with pytest.raises(TopologyError, match=f"{reads.name}', which has no history; {said}$"):
            build_partition_sensor(_asset(**AS_OF), reads=reads)


def test_sensor_reads_only_new_materializations(
    reports: Reports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sensor reads only new materializations from Dagster's storage. Wiped ones, and those of
    another storage, do not count."""
    instance, read = reports.instance, list[int]()
    reads = {one: reports.make(one)[READS]["prices"] for one in (day(3), day(4), day(5))}
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    try:
        reports.instance = dg.DagsterInstance.local_temp(str(tmp_path / "one"))
        for one, told in reads.items():
            reports.reported(one, {**told, "log": "gone"})
        assert reports.asked() == [*reads]
        fetch = dg.DagsterInstance.fetch_materializations

        def counted(*args: Any, **more: Any) -> Any:
            found = fetch(*args, **more)
            read.append(len(found.records))
            return found

        monkeypatch.setattr(dg.DagsterInstance, "fetch_materializations", counted)
        reports.reported(day(3), reads[day(3)])
        assert reports.asked() == [day(4), day(5)]
        assert read == [2, 2]  # the last known one and the new one; then those of the requested days
        reports.instance.wipe_assets([reports.report.key])
        reports.reported(day(5), {**reads[day(5)], "log": "gone"})
        assert reports.asked() == [day(5)]
        reports.instance = dg.DagsterInstance.local_temp(str(tmp_path / "other"))
        assert reports.asked() == []
        reports.reported(day(4), {**reads[day(4)], "log": "gone"})
        assert reports.asked() == [day(4)]
    finally:
        reports.instance = instance
