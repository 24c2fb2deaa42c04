"""Joins with versions that start after the record: the next, the nearest, and a key's first version."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import IntegerType, StringType, StructField, StructType, TimestampType

from vt_dagster.components.topology_component import CONCEPTS
from vt_dagster.errors import StorageError, TopologyError
from vt_dagster.provenance.explain import Explainer
from vt_dagster.provenance.lateness import lateness
from vt_dagster.runs.restate import restate
from vt_dagster.runs.run import run_once
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.storage.asset_store import stores_of
from vt_dagster.testing import TopologyTestDriver
from vt_dagster.topology.feature_views import FeatureView
from vt_dagster.topology.model import Stream, Table, VersionedTable

pytestmark = pytest.mark.usefixtures("few_rows")

SCHEMA = StructType(
    [
        StructField("k", StringType()),
        StructField("n", IntegerType()),
        StructField("timestamp", TimestampType()),
    ]
)
EPOCH = datetime(2020, 1, 1, tzinfo=timezone.utc)
MINUTE = timedelta(minutes=1)
AHEAD: dict[str, Any] = {"max_age": 4 * MINUTE, "grace_period": 5 * MINUTE}
RETENTION = 25
SELECT = ["left.*", "right.n as rate", "right.valid_from as since"]
JOINS: dict[str, dict[str, Any]] = {
    "next": {"at": "at_or_after", **AHEAD},
    "strictly_next": {"at": "after", **AHEAD},
    "nearest": {"at": "nearest", **AHEAD},
    "first": {"before_first": "first_version"},
    "strictly_first": {"before_first": "first_version", "at": "before", "max_age": 6 * MINUTE},
    "waits_first": {"before_first": "first_version", "grace_period": 3 * MINUTE},
}
Row = dict[str, Any]


def declare_nodes(table: Mapping[str, Any], stream: Mapping[str, Any]) -> tuple[Any, Any]:
    rates = VersionedTable(
        "rates",
        key="k",
        schema=SCHEMA,
        tombstone="n is null",
        history_retention=RETENTION * MINUTE,
        **table,
    )
    return rates, Stream("orders", key="k", schema=SCHEMA, **stream)


RATES, ORDERS = declare_nodes({}, {"null_key": "keep"})


# ------------------------------------------------------------------------------------- the reference


@dataclass
class Reference:
    """The rules of the joins, applied record by record, in one partition; times are minutes."""

    about: Mapping[str, Any]
    rates: dict[str, dict[int, int | None]] = field(default_factory=dict[str, dict[int, int | None]])
    time: int = -(10**9)
    waiting: list[Row] = field(default_factory=list[Row])
    seen: int = -(10**9)

    def rate(self, record: Row) -> None:
        self.time = max(self.time, record["at"])
        if record["at"] >= self.time - RETENTION:
            self.rates.setdefault(record["k"], {})[record["at"]] = record["n"]

    def versions(self, key: str | None) -> list[tuple[int, int | None, int | None]]:
        """The versions of a key that have not expired: start, value, end."""
        mine = self.rates.get(key or "", {})
        times, horizon = sorted(mine), self.time - RETENTION
        every = zip(times, [mine[t] for t in times], [*times[1:], None], strict=bool(times))
        return [
            (begin, n, end)
            for begin, n, end in (every if times else ())
            if not ((end is not None and end <= horizon) or (n is None and begin < horizon))
        ]

    def match(self, key: str | None, at: int) -> tuple[int, int | None] | None:
        """Start and value of the version that a record matches."""
        versions, how = self.versions(key), self.about.get("at", "at_or_before")
        age = self.about.get("max_age", 10**9 * MINUTE) // MINUTE
        values = [v for v in versions if v[1] is not None]
        if "before_first" in self.about:
            until = [v for v in versions if v[0] < at or (v[0] == at and how != "before")]
            if not until:
                return values[0][:2] if values else None
            begin, n, _ = until[-1]
            return (begin, n) if n is not None and at - begin <= age else None
        remembered = at >= self.time - RETENTION
        ahead = [v for v in values if v[0] > at or (v[0] == at and how == "at_or_after")]
        near = ahead[:1] if remembered else []
        back = [v for v in versions if v[0] <= at][-1:]
        if how == "nearest" and back and back[0][1] is not None:
            near = (back if remembered or back[0][2] is None else []) + near
        best = min(near, key=lambda v: abs(v[0] - at), default=None)
        return best[:2] if best is not None and abs(best[0] - at) <= age else None

    def run(self, rates: Sequence[Row], orders: Sequence[Row]) -> list[Any]:
        """The results of a run, by order number: start and value of each match."""
        for record in rates:
            self.rate(record)
        grace = self.about.get("grace_period", 0 * MINUTE) // MINUTE
        out: list[Row] = []
        for order in orders:
            if order["k"] is None or not grace:
                out.append(order)
                continue
            self.seen = max(self.seen, order["at"])
            (out if order["at"] < self.seen - grace else self.waiting).append(order)
        out += [o for o in self.waiting if o["at"] <= self.seen - grace]
        self.waiting = [o for o in self.waiting if o["at"] > self.seen - grace]
        return sorted((o["n"], self.match(o["k"], o["at"])) for o in out)


def matches(rows: Sequence[Row]) -> list[Any]:
    return sorted((r["n"], r["since"] and ((r["since"] - EPOCH) // MINUTE, r["rate"])) for r in rows)


def random_records(chance: random.Random, now: int, number: int, first: int, back: int) -> list[Row]:
    """Records around the time ``now``, some late, some of the same time; ``n`` counts up."""
    return [
        {
            "k": chance.choice("abcdef"),
            "n": first + i,
            "at": max(0, now + chance.choice([0, 1, 2, 3, 5, -2, -back])),
        }
        for i in range(number)
    ]


def with_timestamps(records: Sequence[Row]) -> list[Row]:
    return [{"k": r["k"], "n": r["n"], "timestamp": EPOCH + r["at"] * MINUTE} for r in records]


@pytest.mark.parametrize(
    ("seed", "runs"),
    [(669, 2), *(pytest.param(s, 7, marks=pytest.mark.endurance) for s in range(1, 30))],
)
def test_random_runs_equal_reference(spark: SparkSession, seed: int, runs: int) -> None:
    """Each join equals the reference, with keys that appear late, deletions, expired versions and late
    records."""
    chance = random.Random(seed)
    made = [ORDERS.left_join(RATES, name=n, select=SELECT, **about) for n, about in JOINS.items()]
    driver = TopologyTestDriver(*made, spark=spark)
    models = {name: Reference(about) for name, about in JOINS.items()}
    now, matched, first = 10, dict.fromkeys(JOINS, 0), 0
    for _ in range(runs):
        rates = random_records(chance, now, chance.randrange(9), 1_000 + first, 12)
        for rate in rates:
            rate["n"] = None if chance.random() < 0.35 else rate["n"]
        orders = random_records(chance, now, chance.randrange(1, 14), first, 30)
        first += len(orders)
        if orders and chance.random() < 0.3:
            orders[0]["k"] = None
        driver.run({"rates": with_timestamps(rates), "orders": with_timestamps(orders)})
        for name, model in models.items():
            found = matches(driver.read(name))
            assert found == model.run(rates, orders), (name, now)
            matched[name] += sum(match is not None for _, match in found)
        now += chance.choice([0, 2, 6, 14])
    assert all(matched.values())


def test_matched_version(spark: SparkSession) -> None:
    """Examples of the rules: ties, deletions, and a key that begins with a deletion. Of two equally
    near versions a record matches the earlier one."""
    made = [ORDERS.left_join(RATES, name=n, select=SELECT, **about) for n, about in JOINS.items()]
    driver = TopologyTestDriver(*made, spark=spark)
    rates = [("a", None, 4), ("a", 1, 10), ("a", None, 14), ("a", 2, 18), ("b", 3, 20)]
    rates += [("d", 1, 10), ("d", 2, 14), ("d", 3, 17)]
    orders = [("a", at) for at in (2, 4, 7, 10, 14, 16)] + [("b", 16), ("b", 15), ("c", 10)]
    near = (11, 12, 13, 15, 16, 21, 22)
    asked = [{"k": k, "n": i, "at": at} for i, (k, at) in enumerate(orders)]
    asked += [{"k": "d", "n": 100 + at, "at": at} for at in near] + [{"k": "c", "n": 99, "at": 40}]
    driver.run(
        {
            "rates": with_timestamps([{"k": k, "n": n, "at": at} for k, n, at in rates]),
            "orders": with_timestamps(asked),
        }
    )
    every = {name: matches(driver.read(name)) for name in JOINS}
    found = {
        name: [match and match[1] for n, match in rows if n < len(orders)]
        for name, rows in every.items()
    }
    assert found == {
        "next": [None, None, 1, 1, 2, 2, 3, None, None],
        "strictly_next": [None, None, 1, None, 2, 2, 3, None, None],
        "nearest": [None, None, 1, 1, 2, 2, 3, None, None],
        "first": [1, None, None, 1, None, None, 3, 3, None],
        "strictly_first": [1, 1, None, None, 1, None, 3, 3, None],
        "waits_first": [1, None, None, 1, None, None, 3, 3, None],
    }
    nearest = {n - 100: match and match[1] for n, match in every["nearest"] if n >= 100}
    assert nearest == {11: 1, 12: 1, 13: 2, 15: 2, 16: 3, 21: 3, 22: None}


# ------------------------------------------------------------------------------------- on Delta


def source(root: Path, name: str) -> FilesSource:
    return FilesSource(str(root / name), max_bad_share=1.0)


def land(root: Path, name: str, step: int, records: Sequence[Row]) -> None:
    (root / name).mkdir(exist_ok=True)
    lines = [json.dumps(r, default=lambda t: t.isoformat()) for r in with_timestamps(records)]
    (root / name / f"{step}.json").write_text("\n".join(lines), encoding="utf-8")


def test_explain_on_delta(spark: SparkSession, tmp_path: Path) -> None:
    """``explain`` names the version and the rule of each row. ``lateness`` refuses these joins."""
    warehouse = str(tmp_path / "warehouse")
    rates, orders = declare_nodes(*({"source": source(tmp_path, n)} for n in ("rates", "orders")))
    names = ("next", "nearest", "first")
    nodes = [orders.left_join(rates, name=n, select=SELECT, **JOINS[n]) for n in names]
    stores, chance = stores_of(warehouse, spark), random.Random(5)
    for node, first in ((rates, 1_000), (orders, 0)):
        records = random_records(chance, 10, 12, first, 9) + random_records(
            chance, 16, 12, first + 100, 9
        )
        for record in records if node is rates else ():
            record["n"] = None if chance.random() < 0.2 else record["n"]
        land(tmp_path, node.name, 0, records)
    for node in (rates, orders, *nodes):
        run_once(node, stores)
    explainer, seen = Explainer(warehouse), set[str]()
    for name in names:
        for row in stores({n.name: n for n in nodes}[name]).read().toArrow().to_pylist():
            found = explainer.explain(name, offset=(0, row["offset"]))
            of = {p.asset: p.record.values["n"] for p in found.made_of if p.record is not None}
            assert of == {"orders": row["n"], **({"rates": row["rate"]} if row["rate"] else {})}, found
            seen |= {*found.rules} & {"next", "nearest", "first_version", "too_old", "no_match"}
    assert seen == {"next", "nearest", "first_version", "too_old", "no_match"}
    for name in names:
        with pytest.raises(StorageError, match="expected a join that looks back from each record"):
            lateness(name, warehouse=warehouse, grace=[MINUTE])


def test_restate_recomputes_results_changed_by_later_version(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A version that arrived after the joins ran matches records from before its start. A replay would
    find it, so joins that look ahead refuse the restatement; a join that looks back is restated."""
    warehouse = str(tmp_path / "warehouse")
    rates, orders = declare_nodes(*({"source": source(tmp_path, n)} for n in ("rates", "orders")))
    about = {"back": {"grace_period": 5 * MINUTE}, "next": JOINS["next"], "first": JOINS["first"]}
    nodes = [orders.left_join(rates, name=n, select=SELECT, **more) for n, more in about.items()]
    stores = stores_of(warehouse, spark)
    steps = [([("b", 1, 0)], [("a", 1, 5), ("a", 2, 10)]), ([("a", 7, 9)], [("a", 3, 12)])]
    for step, told_now in enumerate(steps):
        for node, records in zip((rates, orders), told_now, strict=True):
            rows = [{"k": k, "n": n, "at": at} for k, n, at in records]
            land(tmp_path, node.name, step, rows)
            run_once(node, stores)
        for node in nodes:
            run_once(node, stores)
    start, every = "2020-01-01T00:11:00Z", [rates, orders, *nodes]
    assert restate(warehouse, nodes[0], start, spark, every) == ["back"]
    for node in nodes[1:]:
        with pytest.raises(StorageError, match="the kept results would differ from a replay"):
            restate(warehouse, node, start, spark, every)


# ------------------------------------------------------------------------------------- declarations


def test_options_in_yaml() -> None:
    """YAML accepts the settings of the Python method with the same values; another value is refused."""
    yaml, sides = CONCEPTS["left_join"].yaml, {"left": "orders", "right": "rates"}
    told = yaml.model_validate({**sides, "at": "nearest", "max_age": "4m", "grace_period": "5m"})
    assert vars(told)["at"] == "nearest"
    opened = yaml.model_validate({**sides, "before_first": "first_version"})
    assert vars(opened)["before_first"] == "first_version"
    for wrong in ({"at": "forward"}, {"before_first": "any"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            yaml.model_validate({**sides, **wrong})


def test_shown_settings() -> None:
    chosen = ORDERS.join(RATES, name="x", **JOINS["nearest"]).operator
    assert chosen is not None
    assert chosen.settings == {"grace_period": "5 minutes", "max_age": "4 minutes", "at": "nearest"}
    opened = ORDERS.join(RATES, name="x", **JOINS["first"]).operator
    assert opened is not None
    assert opened.settings == {"grace_period": "0 seconds", "before_first": "first_version"}
    assert "; before_first first_version." in opened.describe()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no bound": ({"at": "nearest", "grace_period": MINUTE}, "at='nearest' needs max_age"),
    "no wait": ({"at": "after", "max_age": MINUTE}, "at least max_age, 0:01:00, got 0:00:00: the"),
    "too short a wait": (
        {"at": "at_or_after", "max_age": 2 * MINUTE, "grace_period": {0: 3 * MINUTE, 1: MINUTE}},
        "at least max_age, 0:02:00, got 0:01:00 of partition 1: the",
    ),
    "both": ({**JOINS["next"], "before_first": "first_version"}, "only for at='at_or_before'"),
    "as known": ({**JOINS["next"], "as_known": MINUTE}, "at='at_or_after' matches versions that"),
    "first as known": (
        {**JOINS["first"], "as_known": "when_recorded"},
        "before_first='first_version' matches versions that start after the record, but as_known",
    ),
    "another word": ({"before_first": "any"}, "expected before_first to be 'first_version' or None"),
    "corrected": (
        {"before_first": "first_version", "corrected_for": MINUTE},
        "before_first is only for a join of a stream with a versioned table, not for a corrected join",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_when_declared(case: str) -> None:
    about, said = REFUSED[case]
    with pytest.raises(TopologyError) as refused:
        ORDERS.join(RATES, name="x", **about)
    assert str(refused.value).startswith("x: ")
    assert said in str(refused.value)


def test_refused_with_unversioned_table() -> None:
    plain = Table("plain", key="k", schema=SCHEMA)
    with pytest.raises(TopologyError, match="before_first needs a versioned table, but 'plain'"):
        ORDERS.join(plain, name="x", before_first="first_version")
    with pytest.raises(TopologyError, match="'plain' is not versioned"):
        ORDERS.join(plain, name="x", at="nearest", max_age=MINUTE)


@pytest.mark.parametrize("at", ["at_or_after", "after", "nearest"])
def test_training_set_refuses_forward_features(at: Any) -> None:
    with pytest.raises(TopologyError, match="which leaks the future into the result"):
        FeatureView(RATES, at=at)
