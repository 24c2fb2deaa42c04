"""Each check fails on a table that was corrupted for it, names the offending rows, and blocks
downstream assets."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import dagster as dg
import pytest
from deltalake import write_deltalake
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from tests.market import Market, checks, record, run
from vt_dagster import TopologyError, build_asset, build_freshness_check
from vt_dagster.orchestration import checks as checks_module
from vt_dagster.runs import audit
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.spark_reader import Snapshot

pytestmark = pytest.mark.usefixtures("few_rows")


def at(text: str) -> Any:
    return F.lit(f"2024-01-{text}").cast("timestamp")


def with_changed_values(rows: DataFrame, condition: str, **values: Any) -> DataFrame:
    for name, value in values.items():
        rows = rows.withColumn(name, F.when(F.expr(condition), value).otherwise(F.col(name)))
    return rows


def with_added_rows(rows: DataFrame, condition: str, **values: Any) -> DataFrame:
    more = rows.where(condition)
    for name, value in values.items():
        more = more.withColumn(name, value)
    return rows.unionByName(more)


def with_expired_version(rows: DataFrame) -> DataFrame:
    """Adds a key whose first version ended long before the history begins."""
    long_ago, ended = F.lit("2023-01-01").cast("timestamp"), F.lit("2023-01-02").cast("timestamp")
    one = rows.where("v = 'p4'").withColumn("k", F.lit("z"))
    return rows.unionByName(one.withColumns({"valid_from": long_ago, "valid_to": ended})).unionByName(
        one.withColumn("valid_from", ended)
    )


class Case(NamedTuple):
    check: str
    asset: str
    table: str
    corrupt: Callable[[DataFrame], DataFrame]
    names: dict[str, str]
    """Columns of one offending row in the sample."""


CASES = {
    "overlap": Case(
        "versions_do_not_overlap",
        "prices",
        "view",
        lambda rows: with_changed_values(rows, "v = 'p3'", valid_to=at("02T09:00")),
        {"k": "a", "valid_to": "2024-01-02 09:00:00", "next_valid_from": "2024-01-02 05:00:00"},
    ),
    "gap": Case(
        "versions_are_contiguous",
        "prices",
        "view",
        lambda rows: with_changed_values(rows, "v = 'p3'", valid_to=at("01T09:00")),
        {"k": "a", "valid_to": "2024-01-01 09:00:00", "next_valid_from": "2024-01-02 05:00:00"},
    ),
    "no open version": Case(
        "versions_are_contiguous",
        "prices",
        "view",
        lambda rows: with_changed_values(rows, "v = 'p4'", valid_to=at("03T00:00")),
        {"k": "a", "valid_from": "2024-01-02 05:00:00"},
    ),
    "duplicate version": Case(
        "one_version_per_key_and_timestamp",
        "prices",
        "view",
        lambda rows: with_added_rows(rows, "v = 'p4'", offset=F.lit(100).cast("long")),
        {"k": "a", "valid_from": "2024-01-02 05:00:00"},
    ),
    "ends when it begins": Case(
        "valid_from_before_valid_to",
        "prices",
        "view",
        lambda rows: with_changed_values(rows, "v = 'p3'", valid_to=F.col("valid_from")),
        {"k": "a", "valid_from": "2024-01-01 06:00:00", "valid_to": "2024-01-01 06:00:00"},
    ),
    "ends before it begins": Case(
        "valid_from_before_valid_to",
        "prices",
        "view",
        lambda rows: with_changed_values(rows, "v = 'q1'", valid_from=at("01T23:00")),
        {"k": "b", "valid_from": "2024-01-01 23:00:00", "valid_to": "2024-01-01 12:00:00"},
    ),
    "two open versions": Case(
        "one_current_version_per_key",
        "prices",
        "view",
        lambda rows: with_changed_values(rows, "v = 'p3'", valid_to=F.lit(None).cast("timestamp")),
        {"k": "a", "valid_from": "2024-01-01 06:00:00"},
    ),
    "older than retention": Case(
        "nothing_older_than_retention",
        "prices",
        "view",
        with_expired_version,
        {"k": "z", "valid_from": "2023-01-01 00:00:00", "valid_to": "2023-01-02 00:00:00"},
    ),
    "history in another segment": Case(
        "versions_lie_in_their_segment",
        "prices",
        "view",
        lambda rows: with_changed_values(rows, "v = 'p3'", history_segment=F.lit(7)),
        {"k": "a", "valid_from": "2024-01-01 06:00:00"},
    ),
    "duplicate current row": Case(
        "one_row_per_key",
        "rates",
        "view",
        lambda rows: with_added_rows(rows, "k = 'b'", offset=F.lit(100).cast("long")),
        {"k": "b", "offset": "100"},
    ),
    "decreasing join timestamps": Case(
        "timestamps_do_not_decrease",
        "priced",
        "log",
        lambda rows: with_changed_values(rows, "v = 's3'", timestamp=at("01T01:00")),
        {"k": "a", "timestamp": "2024-01-01 01:00:00", "newest_before": "2024-01-01 03:00:00"},
    ),
    "lost log record": Case(
        "every_record_is_accounted_for",
        "sales",
        "log",
        lambda rows: rows.where("offset != 3"),
        {"what": "offsets of partition 0", "expected": "3..3", "found": "missing"},
    ),
    "lost first log records": Case(
        "every_record_is_accounted_for",
        "sales",
        "log",
        lambda rows: rows.where("offset > 1"),
        {"what": "offsets of partition 0", "expected": "0..1", "found": "missing"},
    ),
    "lost last log record": Case(
        "every_record_is_accounted_for",
        "priced",
        "log",
        lambda rows: rows.where("offset < 2"),
        {"what": "offsets of partition 0", "found": "missing"},
    ),
    "doubled log record": Case(
        "every_record_is_accounted_for",
        "prices",
        "log",
        lambda rows: with_added_rows(rows, "v = 'p3'"),
        {"what": "offsets of partition 0", "found": "more than once"},
    ),
    "lost quarantined record": Case(
        "every_record_is_accounted_for",
        "prices",
        "quarantine",
        lambda rows: rows.where("reason != 'null_key'"),
        {"what": "bad records in quarantine", "expected": "2", "found": "1"},
    ),
    "lost late record": Case(
        "every_record_is_accounted_for",
        "prices",
        "quarantine",
        lambda rows: rows.where("reason != 'late'"),
        {"what": "late records in quarantine", "expected": "1", "found": "0"},
    ),
}


def sample(evaluation: dg.AssetCheckEvaluation) -> list[dict[str, Any]]:
    value = evaluation.metadata["sample"]
    assert isinstance(value, dg.TableMetadataValue)
    return [dict(r.data) for r in value.records]


def test_checks_pass_on_healthy_tables(market: Market) -> None:
    for result in market.results:
        found = checks(result)
        assert {n for n, e in found.items() if not e.passed} == set()
        for node in market.nodes:
            for check in audit.checks_of(node):
                assert f"{node.name}:{check.name}" in found
    assert {c.check for c in CASES.values()} == {
        check.name for node in market.nodes for check in audit.checks_of(node)
    }, "every check has a corrupted table"


def test_check_metadata_of_healthy_table(market: Market) -> None:
    found = checks(market.results[-1])["prices:every_record_is_accounted_for"].metadata
    numbers = {name: value.value for name, value in found.items()}
    assert numbers["looked_at"] == "changes of batch 2"
    assert numbers["records_in"] == 11
    assert numbers["records_applied"] == 8
    assert numbers["records_late"] == 1
    assert numbers["records_quarantined"] == 2
    assert numbers["rows_in_log"] == 8
    assert numbers["offending_rows"] == 0
    everything = audit.audit(market.store(market.prices))[-1]
    assert everything.looked_at == "everything"
    assert everything.numbers["records_duplicate"] == 1


def test_checks_pass_before_first_commit(market: Market, tmp_path: Path) -> None:
    empty = Market(tmp_path, market.spark)
    for name in ("prices", "rates"):
        (tmp_path / "landing" / name).mkdir(parents=True)
    result = empty.run([empty.prices, empty.rates])
    assert result.success
    found = checks(result)
    assert all(e.passed for e in found.values())
    of_rates = [e for e in found.values() if e.asset_key.path == ["rates"]]
    (said,) = {str(e.metadata["looked_at"].value) for e in of_rates}
    assert said == f"nothing: there are no tables in {empty.warehouse / 'rates'}"


def corrupt(market: Market, asset: str, table: str, *changes: Callable[[DataFrame], DataFrame]) -> None:
    """Overwrites a table with changed rows; Delta writes them without Spark, in less time."""
    path = str(market.warehouse / asset / table)
    rows = reduce(
        lambda rows, change: change(rows), changes, market.spark.read.format("delta").load(path)
    )
    write_deltalake(path, rows.toArrow(), mode="overwrite")


def require_red(found: list[audit.Finding], check: str, names: dict[str, str]) -> None:
    (one,) = (finding for finding in found if finding.name == check)
    assert not one.passed
    texts = [{name: str(value) for name, value in row.items()} for row in one.sample]
    assert any(names.items() <= row.items() for row in texts), texts


OF_VIEW = [name for name, case in CASES.items() if (case.asset, case.table) == ("prices", "view")]


def test_checks_fail_on_corrupted_view(
    market: Market, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One audit finds the corrupted rows of all cases. The rows of each case have different keys."""
    monkeypatch.setattr(audit, "SAMPLE", 100)
    suffixed = F.concat("k", F.lit(" of "), "case")

    def of_each(rows: DataFrame) -> DataFrame:
        each = [CASES[name].corrupt(rows).withColumn("case", F.lit(name)) for name in OF_VIEW]
        return reduce(DataFrame.unionByName, each).withColumn("k", suffixed).drop("case")

    copy = market.copy(tmp_path / "copy")
    corrupt(copy, "prices", "view", of_each)
    found = audit.audit(copy.store(copy.prices))
    for name in OF_VIEW:
        case = CASES[name]
        require_red(found, case.check, {**case.names, "k": f"{case.names['k']} of {name}"})


BY_DAGSTER = ["overlap", "lost last log record"]


def test_checks_fail_on_other_corrupted_tables(market: Market, tmp_path: Path) -> None:
    """One audit of an asset finds the corrupted rows of all its cases."""
    copy, others = market.copy(tmp_path / "copy"), [*CASES.keys() - {*OF_VIEW, *BY_DAGSTER}]
    by_table: dict[tuple[str, str], list[Case]] = {}
    for name in others:
        by_table.setdefault((CASES[name].asset, CASES[name].table), []).append(CASES[name])
    for (asset, table), cases in by_table.items():
        corrupt(copy, asset, table, *[case.corrupt for case in cases])
    found = {node.name: audit.audit(copy.store(node)) for node in copy.nodes}
    for name in others:
        require_red(found[CASES[name].asset], CASES[name].check, CASES[name].names)


@pytest.mark.parametrize("name", BY_DAGSTER)
def test_corrupted_table_fails_checks_and_blocks_downstream(
    market: Market, tmp_path: Path, name: str
) -> None:
    """Dagster reports a corrupted view and a corrupted log, and does not run the asset downstream. The
    other tests run the checks without Dagster."""
    case, copy = CASES[name], market.copy(tmp_path / "copy")
    corrupt(copy, case.asset, case.table, case.corrupt)
    ran: list[str] = []

    @dg.asset(deps=[case.asset])
    def report() -> None:
        ran.append("report")

    node = next(n for n in copy.nodes if n.name == case.asset)
    result = copy.run([node], report)
    found = checks(result)[f"{case.asset}:{case.check}"]
    assert not found.passed
    assert found.severity == dg.AssetCheckSeverity.ERROR
    assert found.blocking
    assert found.metadata["offending_rows"].value >= 1
    said = sample(found)
    assert any(case.names.items() <= row.items() for row in said), said
    assert not result.success
    assert ran == []


def test_freshness_compares_stream_time_with_clock(
    market: Market, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An asset is fresh if stream time (here day 2, 05:00) is at most ``at_most`` behind the clock. The
    time of its last run makes no difference."""
    newest = datetime(2024, 1, 2, 5, tzinfo=timezone.utc).timestamp()

    check = build_freshness_check(market.prices, at_most=timedelta(hours=2))

    def checked(warehouse: Path) -> Any:
        chosen = dg.AssetSelection.checks(check)
        return run([build_asset(market.prices), check], warehouse, selection=chosen)

    def said(age: float) -> Any:
        monkeypatch.setattr(checks_module, "time", SimpleNamespace(time=lambda: newest + age))
        (found,) = checked(market.warehouse).get_asset_check_evaluations()
        return found

    for age, passed in ((0, True), (7200, True), (7200.001, False), (-60, True)):
        found = said(age)
        assert (found.check_name, found.passed) == ("is_fresh", passed)
        assert found.metadata["age_seconds"].value == age
        assert found.metadata["stream_time"].value == newest
    text = "The newest record is from 2024-01-02T05:00:00Z; the maximum age is 2 hours."
    assert found.description == text
    (never,) = checked(tmp_path).get_asset_check_evaluations()
    assert not never.passed, "an asset that has never run is not fresh, of which an alert tells"
    assert never.description == "There is no record yet; the maximum age is 2 hours."
    with pytest.raises(TopologyError, match="expected at_most to be a positive timedelta"):
        build_freshness_check(market.prices, at_most=timedelta(0))


def test_check_rereads_after_concurrent_commit(market: Market, tmp_path: Path) -> None:
    """If another run commits while a check reads, the check reads again and reports no finding."""
    copy = market.copy(tmp_path / "copy")

    class Overtaken(AssetStore):
        waiting = True

        def snapshot(self, as_stored: bool = False) -> Snapshot:
            there = super().snapshot(as_stored)
            if self.waiting:
                self.waiting = False
                copy.land("prices", "9.jsonl", record("z", "p9", "2 09:00"))
                assert copy.run([copy.prices]).success
            return there

    store = Overtaken(str(copy.warehouse), copy.prices, copy.spark)
    assert [one.name for one in audit.audit(store) if not one.passed] == []
    assert not store.waiting
