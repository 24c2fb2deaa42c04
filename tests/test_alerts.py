"""Alerts: each breach of a limit is sent once, and again after a recovery. No breach is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from tests.market import RECORD, Market, checks, record, run
from vt_dagster import (
    Alert,
    FilesSource,
    SnapshotSource,
    Stream,
    TopologyError,
    TumblingWindow,
    VersionedTable,
    VtDagsterError,
    WarehouseResource,
    build_alerts,
    build_asset,
    build_definitions,
    build_freshness_check,
    build_lateness_check,
    build_quarantine_check,
    build_waiting_check,
)
from vt_dagster.orchestration import checks as checks_module

pytestmark = pytest.mark.usefixtures("few_rows")

NEWEST = {
    "prices": datetime(2024, 1, 2, 5, tzinfo=timezone.utc).timestamp(),
    "sales": datetime(2024, 1, 1, 9, tzinfo=timezone.utc).timestamp(),
}
"""The timestamps of the newest records of the market."""


@dataclass
class Pager:
    """Receives alerts; fails for those of ``broken`` assets."""

    sent: list[Alert] = field(default_factory=list[Alert])
    broken: set[str] = field(default_factory=set[str])
    asked: list[str] = field(default_factory=list[str])

    def send(self, alert: Alert) -> None:
        self.asked.append(alert.key)
        if alert.asset in self.broken:
            raise ConnectionError(f"no answer to {alert.key}")
        self.sent.append(alert)

    @property
    def keys(self) -> list[str]:
        return [alert.key for alert in self.sent]


class Deployment:
    """Definitions with alerts in a separate Dagster instance, with a clock that tests set."""

    def __init__(self, market: Market, instance: dg.DagsterInstance, patch: pytest.MonkeyPatch) -> None:
        self.pager, self._instance, self._patch = Pager(), instance, patch
        alerts = build_alerts(
            [market.prices, market.sales], freshness=timedelta(hours=2), to=self.pager.send
        )
        made = build_definitions(*market.nodes, warehouse=str(market.warehouse))
        self.defs = dg.Definitions.merge(made, alerts)
        dg.Definitions.validate_loadable(self.defs)
        self.cursor: str | None = None

    def check(self, now: float) -> str:
        """Checks freshness at the time ``now``, as the schedule does; returns the id of the run."""
        self._patch.setattr(checks_module, "time", SimpleNamespace(time=lambda: now))
        (schedule,) = self.defs.get_repository_def().schedule_defs
        assert (schedule.name, schedule.cron_schedule) == ("alerts_freshness", "*/15 * * * *")
        job = self.defs.resolve_job_def(schedule.job_name)
        done = job.execute_in_process(instance=self._instance)
        assert len(done.get_asset_check_evaluations()) == 2
        return done.run_id

    def tick(self) -> Any:
        """Evaluates a tick as Dagster's daemon does: a tick that fails does not change the cursor."""
        context = dg.build_sensor_context(
            instance=self._instance,
            cursor=self.cursor,
            repository_def=self.defs.get_repository_def(),
        )
        done = self.defs.resolve_sensor_def("alerts").evaluate_tick(context)
        assert not done.run_requests
        self.cursor = done.cursor
        return done.skip_message


@pytest.fixture
def deployment(market: Market, monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployment]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield Deployment(market, instance, monkeypatch)


LATER = 7201.0


def test_breach_alerts_once_and_again_after_recovery(deployment: Deployment) -> None:
    pager, prices, sales = deployment.pager, NEWEST["prices"], NEWEST["sales"]
    assert deployment.tick() == "no new breach; 0 known: none"  # before any check
    deployment.check(sales)
    assert deployment.tick() == "no new breach; 0 known: none"
    ran = deployment.check(sales + LATER)
    assert deployment.tick() == "sent 1 alert: sales:is_fresh"
    (alert,) = pager.sent
    assert alert.text == "The newest record is from 2024-01-01T09:00:00Z; the maximum age is 2 hours."
    assert (alert.asset, alert.check, alert.severity) == ("sales", "is_fresh", "ERROR")
    assert alert.run_id == ran
    assert abs(alert.at - datetime.now(timezone.utc)) < timedelta(minutes=5)
    expected = {"age_seconds": LATER, "at_most_seconds": 7200.0, "stream_time": sales}
    assert alert.values == expected

    assert deployment.tick() == "no new breach; 1 known: sales:is_fresh"
    deployment.check(prices + LATER)  # prices are stale too
    assert deployment.tick() == "sent 1 alert: prices:is_fresh"
    deployment.check(prices + 2 * LATER)
    assert deployment.tick() == "no new breach; 2 known: prices:is_fresh, sales:is_fresh"
    deployment.check(sales)
    assert deployment.tick() == "no new breach; 0 known: none"
    deployment.check(sales + LATER)
    assert deployment.tick() == "sent 1 alert: sales:is_fresh"
    # between two ticks the check passed and failed again: that is another breach
    deployment.check(sales)
    deployment.check(sales + LATER)
    assert deployment.tick() == "sent 1 alert: sales:is_fresh"
    assert deployment.tick() == "no new breach; 1 known: sales:is_fresh"
    assert pager.keys == ["sales:is_fresh", "prices:is_fresh", "sales:is_fresh", "sales:is_fresh"]
    # a cursor that was lost, or that the sensor did not write: the current breaches are sent again
    for cursor in (None, "somebody's own", "[1]"):
        deployment.cursor = cursor
        assert deployment.tick() == "sent 1 alert: sales:is_fresh"
    # ids of another Dagster instance, which had more check results
    deployment.cursor = json.dumps({"sales:is_fresh": 10_000})
    assert deployment.tick() == "sent 1 alert: sales:is_fresh"
    assert deployment.tick() == "no new breach; 1 known: sales:is_fresh"


def test_failed_alert_is_retried(deployment: Deployment) -> None:
    pager = deployment.pager
    deployment.check(NEWEST["prices"] + LATER)
    pager.broken = {"prices", "sales"}
    for _ in range(2):
        with pytest.raises(Exception, match="no answer to prices:is_fresh"):
            deployment.tick()
    assert len(pager.asked) == 4
    assert pager.keys == []
    # One alert is sent, which only a tick that succeeds can store. The next tick fails if it sends
    # none.
    pager.broken = {"prices"}
    said = "sent 1 alert: sales:is_fresh; 1 could not be sent, the next tick tries again"
    assert deployment.tick() == said
    with pytest.raises(Exception, match="no answer to prices:is_fresh"):
        deployment.tick()
    pager.broken = set()
    assert deployment.tick() == "sent 1 alert: prices:is_fresh"
    assert pager.keys == ["sales:is_fresh", "prices:is_fresh"]
    # A recovery between failed ticks counts, although a failed tick does not store its cursor.
    deployment.check(NEWEST["sales"])
    deployment.check(NEWEST["prices"] + LATER)
    pager.broken = {"prices", "sales"}
    with pytest.raises(Exception, match="no answer"):
        deployment.tick()
    deployment.check(NEWEST["prices"] + 2 * LATER)
    pager.broken = {"sales"}
    assert "sent 1 alert: prices:is_fresh; 1 could not be sent" in deployment.tick()
    pager.broken = set()
    assert deployment.tick() == "sent 1 alert: sales:is_fresh"
    assert deployment.tick() == "no new breach; 2 known: prices:is_fresh, sales:is_fresh"


def test_last_run_limits_are_inclusive(market: Market, tmp_path: Path) -> None:
    """In the last run one of four records is bad, and one waits. Both limits are inclusive."""
    copy = market.copy(tmp_path / "copy")
    rows = [record("a", f"p{day}", f"{day} 00:00") for day in (3, 4, 5)]
    copy.land("prices", "9.jsonl", *rows, record(None, "nobody's", "5 00:00"))

    def evaluated(*made: Any, only: bool = False) -> dict[str, dg.AssetCheckEvaluation]:
        chosen = dg.AssetSelection.checks(*made) if only else None
        assets = [build_asset(copy.prices), build_asset(copy.priced), *made]
        return checks(run(assets, copy.warehouse, selection=chosen))

    few = build_quarantine_check(copy.prices, at_most="24%")
    found = evaluated(few)["prices:few_records_are_quarantined"]
    assert not found.passed
    assert found.description == "Bad records of the last run: 1 of 4 (25 %), allowed: 24 %."
    values = {name: value.value for name, value in found.metadata.items()}
    assert values == {"quarantined": 1, "of": 4, "share": 0.25, "at_most": 0.24}
    exact = build_quarantine_check(copy.prices, at_most=0.25)
    assert evaluated(exact, only=True)["prices:few_records_are_quarantined"].passed
    none = build_waiting_check(copy.priced, at_most=0)
    found = evaluated(none, only=True)["priced:few_records_wait"]
    assert not found.passed
    assert found.description == "Records that wait after the last run: 1, allowed: 0."
    one = build_waiting_check(copy.priced, at_most=1)
    assert evaluated(one, only=True)["priced:few_records_wait"].passed


def test_limits_apply_to_kinds_of_assets(market: Market, tmp_path: Path) -> None:
    """A limit applies to assets of some kinds: only these get its check."""
    pager = Pager()
    how: Any = {"to": pager.send, "running": True, "severity": dg.AssetCheckSeverity.WARN}
    limits: Any = {"late_share": "0%", "quarantine_share": "0%", "waiting": 0}
    alerts = build_alerts(market.nodes, name="pages", **limits, **how)
    defs = dg.Definitions.merge(
        build_definitions(*market.nodes, warehouse=str(market.warehouse)), alerts
    )
    ours = {
        "few_results_are_wrong": {"prices", "priced"},
        "few_records_are_quarantined": {"prices", "rates", "sales"},
        "few_records_wait": {"priced"},
    }
    found: dict[str, set[str]] = {name: set() for name in ours}
    for check in alerts.asset_checks or ():
        for spec in check.check_specs:  # pyright: ignore[reportAttributeAccessIssue]
            found[spec.name].add(spec.asset_key.to_user_string())
            assert not spec.blocking
    assert found == ours
    sensor = defs.resolve_sensor_def("pages")
    assert sensor.default_status == dg.DefaultSensorStatus.RUNNING
    assert not defs.get_repository_def().schedule_defs  # only freshness changes without a run
    job = dg.define_asset_job("all", dg.AssetSelection.checks(*(alerts.asset_checks or ())))  # pyright: ignore[reportArgumentType]
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        every = dg.Definitions.merge(defs, dg.Definitions(jobs=[job]))
        done = every.resolve_job_def("all").execute_in_process(instance=instance)
        assert done.success
        failed = {
            f"{e.asset_key.to_user_string()}:{e.check_name}"
            for e in checks(done).values()
            if not e.passed
        }
        context = dg.build_sensor_context(instance=instance, repository_def=every.get_repository_def())
        sensor.evaluate_tick(context)
    # A late record needs a version that has expired from the history; one record waits.
    assert {*pager.keys} == failed
    assert "priced:few_records_wait" in failed
    by_key = {alert.key: alert for alert in pager.sent}
    late = by_key["prices:few_results_are_wrong"]
    assert late.severity == "WARN"
    assert "results are wrong" in late.text
    assert late.values["wrong"] >= 1
    assert "picture" not in late.values


def test_refused_when_definitions_load(market: Market) -> None:
    send = Pager().send
    for nodes, about, said in (
        (
            market.nodes,
            {"to": send},
            "alerts: expected a limit, got none; set one or more of fresh",
        ),
        (
            market.nodes,
            {"to": "my.send", "waiting": 1},
            "a function that takes an Alert (to), got 'my",
        ),
        ([market.sales], {"to": send, "waiting": 1}, "to which waiting applies, got ['sales']"),
        ([market.sales], {"to": send, "late_share": "1%"}, "to which late_share applies"),
        ([market.priced], {"to": send, "quarantine_share": "1%"}, "to which quarantine_share applies"),
        ([], {"to": send, "freshness": timedelta(1)}, "to which freshness applies, got []"),
        (market.nodes, {"to": send, "freshness": timedelta(0)}, "a positive timedelta"),
        (market.sales, {"to": send, "freshness": "2h"}, "sales: expected at_most to be a positive"),
        (
            market.sales,
            {"to": send, "freshness": timedelta(1), "severity": "ERROR"},
            "sales: expected severity to be a dagster.AssetCheckSeverity, got 'ERROR'",
        ),
        (market.nodes, {"to": send, "waiting": "5"}, "a number of records from 0 on, got '5'"),
        (market.nodes, {"to": send, "quarantine_share": "5"}, "expected a share"),
        (market.nodes, {"to": send, "waiting": -1}, "expected at_most to be a number of records"),
    ):
        with pytest.raises(VtDagsterError) as raised:
            build_alerts(nodes, **about)  # pyright: ignore[reportArgumentType]
        assert said in str(raised.value)
    with pytest.raises(TopologyError, match="sales: expected a join of a stream with a table"):
        build_waiting_check(market.sales, at_most=1)
    with pytest.raises(TopologyError, match="priced: expected a stream or table with a source"):
        build_quarantine_check(market.priced, at_most="1%")


def test_late_share_skips_uncountable_assets() -> None:
    """``late_share`` leaves out assets whose late results cannot be counted. A lateness check that is
    declared for such an asset fails when definitions load, and the error states the reason."""
    day = timedelta(days=1)
    prices, offers, dump = (
        VersionedTable(name, key="k", schema=RECORD, timestamp="at", history_retention=day, **more)
        for name, more in (
            ("prices", {"source": FilesSource("prices")}),
            ("offers", {"source": FilesSource("offers"), "new_version_on": ["v"]}),
            ("dump", {"source": SnapshotSource("dump", dump_time="file_time")}),
        )
    )
    sales = Stream("sales", key="k", schema=RECORD, timestamp="at", source=FilesSource("sales"))
    select = ["left.v", "right.v as price"]
    priced = sales.left_join(prices, name="priced", select=select, grace_period=day)
    offered = sales.left_join(offers, name="offered", select=select, grace_period=day)
    window = TumblingWindow(day)
    by_name = sales.group_by("v").windowed_by(window).count(name="by_name")
    by_letter = sales.group_by("left(v, 1) as letter").windowed_by(window).count(name="by_letter")
    corrected = sales.left_join(prices, name="corrected", corrected_for=day, select=select)
    counted = [prices, offers, priced, by_name]
    every = [*counted, dump, offered, by_letter, sales, corrected]
    alerts = build_alerts(every, to=Pager().send, late_share="1%")
    keys = {spec.asset_key for check in alerts.asset_checks or () for spec in check.check_specs}
    assert keys == {dg.AssetKey(node.name) for node in counted}
    for node, why in (
        (dump, "for which no record is late"),
        (offered, r"with offers, which has new_version_on: the cost .* cannot be computed; remove"),
        (corrected, "whose wrong results its log does not show: a later run corrects each row that"),
        (by_letter, r"by left\(v, 1\) as letter, which needs Spark; remove the check"),
    ):
        with pytest.raises(TopologyError, match=f"^{node.name}: expected .* got one {why}"):
            build_lateness_check(node, at_most="1%")


def test_asset_without_run_is_not_fresh(tmp_path: Path) -> None:
    node = Stream("sales", key="k", schema=RECORD, timestamp="at", source=FilesSource("sales"))
    check = build_freshness_check(node, at_most=timedelta(days=1))
    result = dg.materialize(
        [dg.AssetSpec("sales"), check],
        selection=dg.AssetSelection.checks(check),
        resources={"vt_dagster_warehouse": WarehouseResource(path=str(tmp_path))},
    )
    (one,) = result.get_asset_check_evaluations()
    assert not one.passed
    assert one.description == "There is no record yet; the maximum age is 1 day."
