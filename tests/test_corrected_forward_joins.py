"""Corrected joins that look ahead: late table records correct the rows of forward and nearest joins."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.test_forward_joins import (
    EPOCH,
    MINUTE,
    RETENTION,
    Row,
    declare_nodes,
    land,
    random_records,
    source,
    with_timestamps,
)
from vt_dagster.components.topology_component import CONCEPTS
from vt_dagster.errors import TopologyError
from vt_dagster.provenance.explain import Explainer
from vt_dagster.runs.audit import audit
from vt_dagster.runs.run import run_once
from vt_dagster.storage.asset_store import stores_of
from vt_dagster.testing import TopologyTestDriver

pytestmark = pytest.mark.usefixtures("few_rows")

PROMISE = 12
CORRECTED: dict[str, Any] = {"max_age": 4 * MINUTE, "corrected_for": PROMISE * MINUTE}
SELECT = ["left.*", "right.n as rate", "right.valid_from as since"]
JOINS: dict[str, dict[str, Any]] = {
    "next": {"at": "at_or_after", **CORRECTED},
    "strictly_next": {"at": "after", "key": "n", **CORRECTED},
    "nearest": {"at": "nearest", **CORRECTED},
    "waits": {"at": "nearest", "grace_period": 5 * MINUTE, **CORRECTED},
}
INNER = ("strictly_next",)
RATES, ORDERS = declare_nodes({}, {"null_key": "keep"})
Versions = dict[int, int | None]
LONG_AGO = -(10**9)
SEED = 398


def join(name: str, stream: Any = ORDERS, table: Any = RATES) -> Any:
    method = stream.join if name in INNER else stream.left_join
    return method(table, name=name, select=SELECT, **JOINS[name])


# ------------------------------------------------------------------------------------- the model


def match(versions: Versions, at: int, about: Mapping[str, Any]) -> tuple[int, int] | None:
    """Start (in minutes) and value of the version that a record matches among those that it knows."""
    how, age = about["at"], about["max_age"] // MINUTE
    ahead = [t for t, n in versions.items() if n is not None and t >= at]
    ahead = [t for t in ahead if t > at or how == "at_or_after"]
    found = [min(ahead)] if ahead else []
    if how == "nearest":
        back = max((t for t in versions if t <= at), default=None)
        found += [back] if back is not None and versions[back] is not None else []
    best = min(found, key=lambda t: (abs(t - at), t), default=None)
    value = None if best is None else versions[best]
    return (best, value) if best is not None and value is not None and abs(best - at) <= age else None


@dataclass
class Joined:
    """A joined record: the versions of its key that it knows, and the match of its row."""

    number: int
    key: str | None
    at: int
    knows: Versions
    found: tuple[int, int] | None
    too_late: bool = False


@dataclass
class Model:
    """The rules, applied record by record, in one partition. A run applies the table's records
    first."""

    about: Mapping[str, Any]
    rates: dict[str, Versions] = field(default_factory=dict[str, Versions])
    table_time: int = LONG_AGO
    seen: int = LONG_AGO
    rows: list[Joined] = field(default_factory=list[Joined])
    waiting: list[Row] = field(default_factory=list[Row])

    @property
    def final(self) -> int:
        return self.seen - PROMISE

    def rate(self, record: Row) -> None:
        self.table_time = max(self.table_time, record["at"])
        if record["at"] < self.table_time - RETENTION:
            return
        self.rates.setdefault(record["k"], {})[record["at"]] = record["n"]
        since = max(self.table_time - PROMISE, self.final)
        for row in self.rows:
            if row.key != record["k"]:
                continue
            knows = {**row.knows, record["at"]: record["n"]}
            if row.at >= since:
                row.knows, row.found = knows, match(knows, row.at, self.about)
            elif match(knows, row.at, self.about) != match(row.knows, row.at, self.about):
                row.too_late = True

    def joined(self, order: Row) -> Joined:
        mine, at = self.rates.get(order["k"] or "", {}), order["at"]
        found, horizon = match(mine, at, self.about), self.table_time - RETENTION
        if at < horizon:
            # For times before its history, a table has only the key's latest version.
            latest = max(mine, default=None)
            valid = self.about["at"] == "nearest" and latest is not None and latest <= at
            found = found if valid and found is not None and found[0] == latest else None
        return Joined(order["n"], order["k"], at, dict(mine), found)

    def run(self, rates: Sequence[Row], orders: Sequence[Row]) -> None:
        for record in rates:
            self.rate(record)
        grace = self.about.get("grace_period", 0 * MINUTE) // MINUTE
        leaves: list[Row] = []
        for order in orders:
            if order["k"] is None:
                leaves.append(order)
                continue
            self.seen = max(self.seen, order["at"])
            late = order["at"] < self.seen - grace
            (leaves if late or not grace else self.waiting).append(order)
        leaves += [o for o in self.waiting if o["at"] <= self.seen - grace]
        self.waiting = [o for o in self.waiting if o["at"] > self.seen - grace]
        self.rows += [self.joined(order) for order in leaves]

    def told(self, inner: bool) -> dict[int, Any]:
        rows = [r for r in self.rows if r.found is not None or not inner]
        rows = [r for r in rows if r.key is not None or not inner]
        return {r.number: (r.found, r.at < self.final) for r in rows}

    def listed(self, inner: bool) -> list[int]:
        return sorted(r.number for r in self.rows if r.too_late and not (inner and r.key is None))


def matches(driver: TopologyTestDriver, name: str) -> dict[int, Any]:
    """For each row its match, and whether the row is final."""
    return {
        r["n"]: (r["since"] and ((r["since"] - EPOCH) // MINUTE, r["rate"]), r["is_final"])
        for r in driver.table(name)
    }


def quarantined(driver: TopologyTestDriver, name: str) -> list[int]:
    refused = driver._stores[name].quarantine()  # pyright: ignore[reportPrivateUsage]
    return [] if refused is None else sorted(r["position"] for r in refused.collect())


@pytest.mark.parametrize(
    ("seed", "runs", "names"),
    [
        (SEED, 2, ("next", "strictly_next", "waits")),
        *(pytest.param(s, 5, (*JOINS,), marks=pytest.mark.endurance) for s in range(1, 30)),
    ],
)
def test_random_runs_equal_model(
    spark: SparkSession, seed: int, runs: int, names: Sequence[str]
) -> None:
    """Each join equals the model after each run. Some steps have an extra run for a part of their
    versions. The second step of ``SEED`` has many cases: corrections of each join, and some that come
    too late."""
    chance = random.Random(seed)
    driver = TopologyTestDriver(*map(join, names), spark=spark)
    models = {name: Model(JOINS[name]) for name in names}
    now, first = 10, 0
    for step in range(runs):
        rates = random_records(chance, now, chance.randrange(4, 16), 1_000 + 100 * now, 8)
        for rate in rates:
            rate["n"] = None if chance.random() < 0.3 else rate["n"]
        orders = random_records(chance, now, chance.randrange(1, 20), first, 10)
        first += len(orders)
        if orders and chance.random() < 0.3:
            orders[0]["k"] = None
        # Before the stream's first records, the split into runs makes no difference.
        early = rates[:3] if step % 2 else []
        if early:
            driver.run({"rates": with_timestamps(early)})
        driver.run({"rates": with_timestamps(rates[len(early) :]), "orders": with_timestamps(orders)})
        for name, model in models.items():
            model.run(rates, orders)
            inner = name in INNER
            assert matches(driver, name) == model.told(inner), (name, now)
            assert quarantined(driver, name) == model.listed(inner), (name, now)
        now += chance.choice([0, 1, 4, 9])
    for model in models.values():
        # A row that is not final equals the result of one run over all records.
        young = max(model.table_time, model.seen) - PROMISE
        for row in (r for r in model.rows if r.at >= young and r.key is not None):
            assert row.found == match(model.rates.get(row.key or "", {}), row.at, model.about)
    assert all(any(r.found for r in model.rows) for model in models.values())
    assert seed != SEED or all(model.listed(False) for model in models.values())
    heads = [driver._stores[name].head() for name in names]  # pyright: ignore[reportPrivateUsage]
    assert sum(head.commit.totals.get("corrected", 0) for head in heads if head is not None)


# ------------------------------------------------------------------------------------- by example


def rate(n: int | None, at: int) -> Row:
    (record,) = with_timestamps([{"k": "a", "n": n, "at": at}])
    return record


def orders_at(*times: int) -> list[Row]:
    return with_timestamps([{"k": "a", "n": at, "at": at} for at in times])


def updates(driver: TopologyTestDriver, name: str) -> list[Any]:
    """For each new row the order, the rate, the revision and the offset of its cause."""
    return [(r["n"], r["rate"], r["revision"], r["cause"]["offset"]) for r in driver.read(name)]


def test_late_version_corrects_earlier_records(spark: SparkSession) -> None:
    driver = TopologyTestDriver(join("next"), spark=spark)
    driver.pipe("orders", *orders_at(7, 8, 10))
    assert [(r["rate"], r["revision"], r["cause"]) for r in driver.read("next")] == [
        (None, 0, None)
    ] * 3
    driver.pipe("rates", rate(1, 12))  # at most 4 minutes after 8 and 10
    assert updates(driver, "next") == [(8, 1, 1, 0), (10, 1, 1, 0)]
    driver.pipe("rates", rate(2, 11))
    assert updates(driver, "next") == [(7, 2, 1, 1), (8, 2, 2, 1), (10, 2, 2, 1)]
    driver.pipe("rates", rate(3, 9), rate(None, 13))  # the deletion at 13 changes no match
    assert updates(driver, "next") == [(7, 3, 2, 2), (8, 3, 3, 2)]
    driver.pipe("rates", rate(None, 11), rate(4, 10))
    assert updates(driver, "next") == [(10, 4, 3, 5)]
    driver.pipe("rates", rate(None, 9), rate(None, 10))  # the next one is at 12
    assert updates(driver, "next") == [(7, None, 3, 6), (8, 1, 4, 6), (10, 1, 4, 7)]


@pytest.mark.endurance  # random runs have matches on both sides, the test above revisions and causes
def test_nearest_version_on_both_sides(spark: SparkSession) -> None:
    driver = TopologyTestDriver(join("nearest"), spark=spark)
    driver.pipe("rates", rate(1, 10))
    driver.pipe("orders", *orders_at(7, 11, 12, 13, 15, 18, 19))
    assert {r["n"]: r["rate"] for r in driver.read("nearest")} == {
        **dict.fromkeys((7, 11, 12, 13), 1),
        **dict.fromkeys((15, 18, 19)),
    }
    driver.pipe("rates", rate(2, 14))  # the order at 12 is halfway: the earlier version
    assert updates(driver, "nearest") == [(13, 2, 1, 1), (15, 2, 1, 1), (18, 2, 1, 1)]
    driver.pipe("rates", rate(None, 12))  # the order at 12 has no version before it now
    assert updates(driver, "nearest") == [(12, 2, 1, 2)]
    driver.pipe("rates", rate(None, 10), rate(3, 15))
    assert updates(driver, "nearest") == [
        *((7, None, 1, 3), (11, 2, 1, 3)),
        *((15, 3, 2, 4), (18, 3, 2, 4), (19, 3, 1, 4)),
    ]
    # A run deletes a version and adds another one: the row has one more revision.
    driver.pipe("rates", rate(None, 15), rate(4, 16), rate(None, 17))
    assert updates(driver, "nearest") == [(15, 4, 3, 6), (18, None, 3, 7), (19, None, 2, 7)]


@pytest.mark.endurance  # random runs have such corrections of each join
def test_late_correction_is_dropped(spark: SparkSession) -> None:
    """The row keeps its match. A late version that by itself would not change the match is not listed
    in quarantine."""
    driver = TopologyTestDriver(join("next"), spark=spark)
    # rows from 18 on can change
    driver.run({"rates": [rate(1, 11)], "orders": orders_at(8, 9, 18, 30)})
    assert [r["rate"] for r in driver.read("next")] == [1, 1, None, None]
    driver.pipe("rates", rate(2, 14), rate(None, 9), rate(None, 12))
    assert quarantined(driver, "next") == []
    driver.pipe("rates", rate(None, 11), rate(3, 18))
    assert updates(driver, "next") == [(18, 3, 1, 5)]
    assert quarantined(driver, "next") == [0, 1]
    driver.pipe("rates", rate(5, 8))
    assert quarantined(driver, "next") == [0, 1]  # each is listed once
    assert {r["n"]: (r["rate"], r["is_final"]) for r in driver.table("next")} == {
        8: (1, True),
        9: (1, True),
        18: (3, False),
        30: (None, False),
    }


@pytest.mark.endurance
def test_inner_rows_are_inserted_and_retracted(spark: SparkSession) -> None:
    driver = TopologyTestDriver(join("strictly_next"), spark=spark)
    driver.pipe("orders", *orders_at(8))
    for n, at in ((1, 8), (2, 9), (None, 9), (3, 12)):
        driver.pipe("rates", rate(n, at))
    rows = [(r["n"], r["rate"], r["revision"], r["is_tombstone"]) for r in driver.read("strictly_next")]
    assert rows == [(8, 2, 0, False), (8, None, 1, True), (8, 3, 2, False)]


# ------------------------------------------------------------------------------------- on Delta


def test_explain_on_delta(spark: SparkSession, tmp_path: Path) -> None:
    """``explain`` names the order, the version and the cause of each revision."""
    warehouse = str(tmp_path / "warehouse")
    rates, orders = declare_nodes(*({"source": source(tmp_path, n)} for n in ("rates", "orders")))
    about = {"max_age": 4 * MINUTE, "corrected_for": RETENTION * MINUTE}
    nodes = [
        orders.left_join(rates, name=name, select=SELECT, at=at, **about)
        for name, at in (("next", "at_or_after"), ("nearest", "nearest"))
    ]
    stores, chance = stores_of(warehouse, spark), random.Random(7)
    for step, now in enumerate((10, 14)):
        for node, first in ((rates, 1_000 + 100 * step), (orders, 100 * step)):
            records = random_records(chance, now, 12, first, 9)
            for record in records if node is rates else ():
                record["n"] = None if chance.random() < 0.2 else record["n"]
            land(tmp_path, node.name, step, records)
            run_once(node, stores)
        for node in nodes[1 - step :]:
            run_once(node, stores)
    explainer, rules, corrected = Explainer(warehouse), set[str](), 0
    for node in nodes:
        for row in stores(node).read("log").toArrow().to_pylist():
            found = explainer.explain(node.name, offset=(0, row["offset"]))
            of = {p.asset: p.record.values["n"] for p in found.made_of if p.record is not None}
            assert of == {"orders": row["n"], **({"rates": row["rate"]} if row["rate"] else {})}, found
            rules |= {*found.rules}
            corrected += row["cause"] is not None
        assert [f.name for f in audit(stores(node)) if not f.passed] == []
    assert corrected
    assert {"corrected", "next", "nearest"} <= rules


# ------------------------------------------------------------------------------------- declarations


def test_options_in_yaml_and_shown_settings() -> None:
    yaml = CONCEPTS["left_join"].yaml
    told = {"at": "nearest", "max_age": "4m", "corrected_for": "12m"}
    built = vars(yaml.model_validate({"left": "orders", "right": "rates", **told}))
    assert (built["at"], built["corrected_for"]) == ("nearest", PROMISE * MINUTE)
    operator = join("nearest").operator
    assert operator.settings == {
        **{"grace_period": "0 seconds", "max_age": "4 minutes", "at": "nearest"},
        "corrected_for": "12 minutes",
    }
    assert "; at nearest; one row per record, corrected for 12 minutes" in operator.describe()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no bound": (
        {"at": "nearest", "corrected_for": MINUTE},
        "how far from the record a version may start, and corrected_for to at least that",
    ),
    "final too early": (
        {"at": "after", "max_age": 2 * MINUTE, "corrected_for": MINUTE, "grace_period": 9 * MINUTE},
        "needs a corrected_for of at least max_age, 0:02:00, got 0:01:00: the row would be final",
    ),
    "no length": (
        {"at": "after", "max_age": MINUTE, "corrected_for": 5},
        "must be a datetime.timedelta",
    ),
    "as known": ({**JOINS["next"], "as_known": MINUTE}, "at='at_or_after' matches versions that"),
    "looks back": (
        {"at": "before", "corrected_for": MINUTE},
        "at is only for a join of a stream with a versioned table, not for a corrected join that looks",
    ),
    "another word": ({**JOINS["next"], "at": "forward"}, "at must be 'at_or_before', 'before',"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_when_declared(case: str) -> None:
    about, said = REFUSED[case]
    with pytest.raises(TopologyError) as refused:
        ORDERS.join(RATES, name="x", select=SELECT, **about)
    assert str(refused.value).startswith("x: ")
    assert said in str(refused.value)


def test_table_log_covers_lookup_margin() -> None:
    """A late version affects orders up to 4 minutes before it, which may match versions up to 4 minutes
    before them: the log must reach back 8 minutes beyond the history retention."""
    short, _ = declare_nodes({"log_retention": (RETENTION + 7) * MINUTE}, {})
    with pytest.raises(TopologyError, match="re-reads records of 'rates' for 33 minutes"):
        join("nearest", table=short)
    join("nearest", table=declare_nodes({"log_retention": (RETENTION + 8) * MINUTE}, {})[0])
