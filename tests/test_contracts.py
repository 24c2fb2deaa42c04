"""The invariants as pandera checks, on DataFrames of users and on the library's own tables."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandera.pyspark as pa
import pyspark.sql.types as T
import pytest
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from tests.market import Market, record
from tests.storage.topology import Topology
from vt_dagster import contract, contracts
from vt_dagster.core.processor import ResultOrder, RunPlan
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.core.source_processor import SourceProcessor
from vt_dagster.core.stream_table_join import StreamTableJoinProcessor
from vt_dagster.errors import ContractError
from vt_dagster.runs.audit import Finding, _count, _OnRows, _rules
from vt_dagster.runs.gate import CHECKS
from vt_dagster.runs.run import run_once
from vt_dagster.storage.asset_store import stores_of
from vt_dagster.topology.operators import UntilWindowCloses
from vt_dagster.topology.windows import TumblingWindow

pytestmark = pytest.mark.usefixtures("few_rows")


START = datetime(2024, 1, 1)
VERSIONS = "table int, id string, valid_from timestamp, valid_to timestamp"
KEY = ["table", "id"]


def hour(n: float | None) -> datetime | None:
    return None if n is None else START + timedelta(hours=n)


def failed(frame: Any) -> set[str]:
    """The names of the checks that pandera reports as failed for a validated DataFrame."""
    found: Any = frame.pandera.errors.get("DATA", {})
    return {str(e["check"]).split("(")[0] for some in found.values() for e in some}


class Snapshot(pa.DataFrameModel):
    """A dbt snapshot of a user."""

    customer: T.StringType = pa.Field(nullable=False)
    dbt_valid_from: T.TimestampType = pa.Field(nullable=False)
    dbt_valid_to: T.TimestampType = pa.Field(nullable=True)

    @pa.dataframe_check(name="history_is_whole")
    def history_is_whole(cls, df: DataFrame) -> bool:
        return contracts.versions_are_contiguous(
            df, key="customer", valid_from="dbt_valid_from", valid_to="dbt_valid_to"
        )

    class Config:
        versions_do_not_overlap = {  # noqa: RUF012
            "key": ["customer"],
            "valid_from": "dbt_valid_from",
            "valid_to": "dbt_valid_to",
        }
        one_current_version_per_key = {"key": ["customer"], "valid_to": "dbt_valid_to"}  # noqa: RUF012


@pytest.mark.parametrize(
    ("versions", "broken"),
    [
        ([(0, 2), (2, None)], set()),
        ([(0, 2), (2, 5)], set()),  # a deleted row of a dbt snapshot
        ([(0, 3), (2, None)], {"versions_do_not_overlap"}),
        ([(0, 1), (2, None)], {"history_is_whole"}),
        ([(0, None), (2, None)], {"versions_do_not_overlap", "one_current_version_per_key"}),
    ],
)
def test_user_model_with_checks(
    spark: SparkSession, versions: list[tuple[int, int | None]], broken: set[str]
) -> None:
    rows = [("c", hour(a), hour(b)) for a, b in versions]
    frame = spark.createDataFrame(
        rows, "customer string, dbt_valid_from timestamp, dbt_valid_to timestamp"
    )
    assert failed(Snapshot.validate(frame)) == broken


# ------------------------------------------------------------------------------- random tables


def random_table(rng: random.Random, number: int) -> list[tuple[int, str, float, float | None]]:
    """The versions of a few keys. About half of the tables have faults."""
    rows: list[tuple[int, str, float, float | None]] = []
    for name in "abc"[: rng.randint(1, 3)]:
        times = sorted(rng.sample(range(30), rng.randint(1, 5)))
        ends: list[float | None] = [*times[1:], rng.choice([None, None, 40])]
        rows += [(number, name, a, b) for a, b in zip(times, ends, strict=True)]
    for _ in range(rng.choice([0, 0, 1, 2])):
        i = rng.randrange(len(rows))
        _, name, start, end = rows[i]
        fault = rng.randrange(6)
        if fault == 0:
            rows[i] = (number, name, start, start + rng.choice([0.5, 7, 35]))
        elif fault == 1:
            rows[i] = (number, name, start, None)
        elif fault == 2:
            rows.append((number, name, start, end))
        elif fault == 3:
            rows[i] = (number, name, start, start - rng.choice([0, 1]))
        elif fault == 4:
            del rows[i]
            if not rows:
                rows.append((number, name, start, None))
        else:
            rows.append((number, name, start + 0.25, end))
    return rows


def failures_in_plain_python(
    rows: list[tuple[int, str, float, float | None]], horizon: float
) -> dict[str, int]:
    """The number of offending rows by check, counted record by record in plain Python."""
    found = dict.fromkeys(OF_VERSIONS, 0)
    by_key = defaultdict[str, list[tuple[float, float]]](list)
    for _, name, start, end in rows:
        by_key[name].append((start, float("inf") if end is None else end))
    for versions in by_key.values():
        versions.sort()
        found["one_row_per_key"] += len(versions) if len(versions) > 1 else 0
        current = sum(end == float("inf") for _, end in versions)
        found["one_current_version_per_key"] += current if current > 1 else 0
        for start, end in versions:
            found["valid_from_before_valid_to"] += end <= start
            found["nothing_older_than_retention"] += end <= horizon
        for (start, end), (following, _) in pairwise(versions):
            found["versions_do_not_overlap"] += following > start and end > following
            found["versions_are_contiguous"] += end < following
            found["one_version_per_key_and_timestamp"] += start == following
    return found


OF_VERSIONS: dict[str, dict[str, Any]] = {
    "versions_do_not_overlap": {"key": KEY},
    "versions_are_contiguous": {"key": KEY},
    "one_version_per_key_and_timestamp": {"key": KEY},
    "valid_from_before_valid_to": {},
    "one_current_version_per_key": {"key": KEY},
    "nothing_older_than_retention": {"retention": timedelta(hours=20), "stream_time": hour(24)},
    "one_row_per_key": {"key": KEY},
}


def findings(rows: _OnRows) -> list[Finding]:
    """The findings for rows that are not in a stored table."""
    (counted,) = _count([rows.counts])
    return rows.findings(counted[None])


def test_pandera_and_single_pass_equal_plain_python(spark: SparkSession) -> None:
    """The checks find the same offending rows as plain Python in each of 100 random tables, in one pass
    over all tables. Pandera's ``validate`` finds the same on one of the tables, and on all at once."""
    rng = random.Random(20240101)
    tables = [random_table(rng, number) for number in range(100)]
    rows = [(n, k, hour(a), hour(b)) for table in tables for n, k, a, b in table]
    frame = spark.createDataFrame(rows, VERSIONS).repartition(2).cache()
    expected = [failures_in_plain_python(table, 4) for table in tables]
    assert all(sum(e[name] > 0 for e in expected) >= 5 for name in OF_VERSIONS)
    rules = _rules(OF_VERSIONS, frame.columns)
    counted = frame.withColumns({n: c for r in rules for n, c in r.columns.items()})
    by_table = {
        row["table"]: row
        for row in counted.groupBy("table")
        .agg(*[F.count_if(r.violated).alias(r.name) for r in rules])
        .collect()
    }
    for number, wanted in enumerate(expected):
        assert {n: by_table[number][n] for n in wanted} == wanted, (number, tables[number])
    whole = {f.name: f.offending for f in findings(_OnRows(frame, rules, ["table", "id"]))}
    assert whole == {n: sum(e[n] for e in expected) for n in OF_VERSIONS}
    checks = [getattr(pa.Check, name)(**given) for name, given in OF_VERSIONS.items()]
    schema = pa.DataFrameSchema({"id": pa.Column(T.StringType())}, checks=checks)
    assert failed(schema.validate(frame)) == set(OF_VERSIONS)
    number = next(n for n, e in enumerate(expected) if 0 < sum(count > 0 for count in e.values()) < 4)
    alone = schema.validate(frame.where(F.col("table") == number))
    assert failed(alone) == {n for n, count in expected[number].items() if count}
    frame.unpersist()


def test_order_checks_of_results(spark: SparkSession) -> None:
    rng = random.Random(7)
    rows = [
        (rng.randrange(2), n, rng.choice("ab"), hour(rng.randrange(6) + n / 10), rng.random() < 0.2)
        for n in range(60)
    ]
    frame = spark.createDataFrame(
        rows, "partition int, offset long, id string, timestamp timestamp, is_late boolean"
    )
    newest: dict[Any, Any] = {}
    older = 0
    for partition, _, name, moment, late in rows:
        if late:
            continue
        older += newest.get((partition, name), moment) > moment
        newest[partition, name] = max(newest.get((partition, name), moment), moment)
    (rule,) = _rules({"timestamps_do_not_decrease": {"key": ["id"]}}, frame.columns)
    (found,) = findings(_OnRows(frame, [rule], ["id"]))
    assert older > 3
    assert found.offending == older
    assert {"id", "newest_before"} <= set(found.sample[0])
    assert not contracts.timestamps_do_not_decrease(frame, key="id")
    assert contracts.timestamps_do_not_decrease(frame.where("is_late"), key="id")
    in_order = frame.where("not is_late").drop("is_late", "partition")
    assert contracts.timestamps_do_not_decrease(in_order, key="offset")

    windows = frame.select("id", F.col("timestamp").alias("window_start"), "offset")
    assert contracts.one_result_per_window(windows, key="id") == (
        windows.select("id", "window_start").distinct().count() == 60
    )
    again = windows.unionByName(windows.limit(2))
    assert not contracts.one_result_per_window(again, key="id", order="offset")


def test_checks_are_registered_with_pandera() -> None:
    assert len(CHECKS) == 9
    for name in CHECKS:
        assert callable(getattr(pa.Check, name))
        assert getattr(contracts, name) is CHECKS[name]


# ---------------------------------------------------------------------- the library's own tables


def test_market_tables_meet_their_contracts(market: Market) -> None:
    for node in market.nodes:
        store = market.store(node)
        rows = store.read("versions") if node.versioned else store.read()
        errors: Any = contract(node).validate(rows).pandera.errors
        assert not errors, (node.name, dict(errors))


# -------------------------------------------------------------------------- before the commit


def folder_is_unchanged(market: Market, name: str, before: set[str]) -> bool:
    """Whether an asset's folder has the same files as ``before``."""
    return {str(p) for p in (market.warehouse / name).rglob("*") if p.is_file()} == before


def files(market: Market, name: str) -> set[str]:
    return {str(p) for p in (market.warehouse / name).rglob("*") if p.is_file()}


def with_older_current_version(rows: DataFrame) -> DataFrame:
    """A fault in the library: a record becomes the current version, but is earlier than the version
    that it replaces."""
    day_before = F.col("timestamp") - F.expr("interval 1 day")
    return rows.withColumn(
        "timestamp", F.when(F.col("is_latest"), day_before).otherwise(F.col("timestamp"))
    )


def with_record_before_history(rows: DataFrame) -> DataFrame:
    """A fault in the library: a record is older than the history retention, but not late."""
    return rows.withColumns(
        {"timestamp": F.lit("2020-01-01").cast("timestamp"), "is_latest": F.lit(False)}
    )


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (with_older_current_version, "versions_do_not_overlap"),
        (with_record_before_history, "nothing_older_than_retention"),
    ],
)
def test_fault_in_put_fails_before_commit(
    market: Market, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any, check: str
) -> None:
    copy = market.copy(tmp_path / "copy")
    put = SourceProcessor.results
    monkeypatch.setattr(SourceProcessor, "results", lambda self, *given: fault(put(self, *given)))
    copy.land("prices", "8.jsonl", record("a", "p8", "2 08:00"))
    before = files(copy, "prices")
    with pytest.raises(ContractError, match=rf"{check}: 1 record.*for example \{{"):
        run_once(copy.prices, stores_of(str(copy.warehouse), copy.spark))
    assert folder_is_unchanged(copy, "prices", before)
    monkeypatch.undo()
    assert run_once(copy.prices, stores_of(str(copy.warehouse), copy.spark)).commit is not None


def test_out_of_order_results_fail_before_commit(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = Topology(tmp_path)
    stores = stores_of(topology.warehouse, spark)
    topology.land("rates", "1.jsonl", [("a", 1, 0)])
    topology.land("orders", "1.jsonl", [("a", m, m) for m in (1, 5, 9, 12, 30, 60)])
    for node in (topology.rates, topology.orders):
        run_once(node, stores)

    class Turned(ResultOrder):
        def columns(self) -> list[Column]:
            return [F.col("timestamp").desc(), F.col("_arrival")]

    plan = StreamTableJoinProcessor.plan

    def turned(self: Any, *given: Any) -> RunPlan:
        return replace(plan(self, *given), order=Turned())

    monkeypatch.setattr(StreamTableJoinProcessor, "plan", turned)
    with pytest.raises(ContractError, match=r"timestamps_do_not_decrease: \d record"):
        run_once(topology.priced, stores)
    assert not list(Path(topology.warehouse, topology.priced.name).rglob("*.parquet"))
    monkeypatch.undo()
    assert run_once(topology.priced, stores).commit is not None


def test_window_emitted_twice_fails_before_commit(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = Topology(tmp_path)
    stores = stores_of(topology.warehouse, spark)
    counts = (
        topology.orders.group_by("k")
        .windowed_by(TumblingWindow(timedelta(minutes=5), timedelta(0)))
        .count(name="counts")
    )
    final = counts.suppress(UntilWindowCloses(), name="final")
    topology.land("orders", "1.jsonl", [("a", 1, m) for m in (1, 6, 20)])
    for node in (topology.orders, counts):
        run_once(node, stores)
    processor: Any = type(processor_of(final))
    process = processor.process

    def twice(self: Any, *given: Any) -> DataFrame:
        rows = process(self, *given)
        return rows.unionByName(rows)

    monkeypatch.setattr(processor, "process", twice)
    with pytest.raises(ContractError, match="one_result_per_window: 2 record"):
        run_once(final, stores)
    assert not list(Path(topology.warehouse, "final").rglob("*.parquet"))
    monkeypatch.undo()
    assert run_once(final, stores).commit is not None
