"""Joins by what was known: each row equals ``read(as_of=, as_known_at=)``; ``max_age``,
``at="before"``."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import IntegerType, StringType, StructField, StructType, TimestampType

import vt_dagster
from vt_dagster.errors import StorageError, TopologyError
from vt_dagster.runs.run import run_once
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.storage.asset_store import stores_of
from vt_dagster.testing.driver import MemoryStore, Records
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
START, MINUTE = int(EPOCH.timestamp()) * 1_000_000, 60_000_000
KEYS = [f"k{i}" for i in range(10)]
FOUND = ["left.*", "right.n as rate", "right.valid_from as since", "right.valid_to as until"]

RATES = VersionedTable(
    "rates",
    key="k",
    schema=SCHEMA,
    tombstone="n is null",
    history_retention=timedelta(minutes=60),
    partitions=2,
)
ORDERS = Stream("orders", key="k", schema=SCHEMA, null_key="keep")


def at(minutes: float) -> int:
    return START + int(minutes * MINUTE)


Row = Mapping[str, Any]


class Log:
    """The rule of these joins, applied to the rows of a table's log."""

    def __init__(self, rows: Sequence[Row], retention: timedelta) -> None:
        self.rows, self.retention = rows, retention

    def known(self, key: str | None, moment: datetime, cut: datetime) -> Row | None:
        """The version of a key as of ``moment`` (inclusive) with its end, by rows recorded until
        ``cut``."""
        there = [r for r in self.rows if r["recorded_at"] <= cut]
        mine = {r["timestamp"]: r for r in sorted(there, key=lambda r: r["offset"]) if r["k"] == key}
        earlier = [t for t in mine if t <= moment]
        if not earlier or mine[max(earlier)]["is_tombstone"]:
            return None
        found = mine[max(earlier)]
        time = max(r["timestamp"] for r in there if r["partition"] == found["partition"])
        later = [t for t in mine if t > moment]
        if later and moment < time - self.retention:
            return None
        return {"rate": found["n"], "since": found["timestamp"], "until": min(later, default=None)}


def random_records(chance: random.Random, number: int, now: int, back: int) -> list[dict[str, Any]]:
    """Records of about the time ``now``: some late, some deletions, some with equal times."""
    return [
        {
            "k": chance.choice(KEYS),
            "n": chance.choice([None, *range(9)]),
            "timestamp": EPOCH + timedelta(minutes=max(0, now - chance.choice([0, 1, 2, 5, back]))),
        }
        for _ in range(number)
    ]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(s, marks=pytest.mark.endurance) for s in range(1, 10))]
)
def test_joined_rows_are_as_known_at_record_time(spark: SparkSession, seed: int) -> None:
    """Each row equals the rule's, with late and rejected records, deletions, replaced versions and
    expired history."""
    chance = random.Random(seed)
    joins = {
        "recorded": {"as_known": "when_recorded"},
        "strict": {"as_known": "when_recorded", "at": "before", "max_age": timedelta(minutes=9)},
        "until": {"as_known": timedelta(minutes=5), "grace_period": timedelta(minutes=5)},
        "soon": {"as_known": timedelta(minutes=5)},
        "young": {"max_age": timedelta(minutes=3), "at": "before"},
    }
    made = {n: ORDERS.left_join(RATES, name=n, select=FOUND, **a) for n, a in joins.items()}
    stores = {n.name: MemoryStore(n, spark) for n in (RATES, ORDERS, *made.values())}

    def run(node: Stream, recorded: int | None = None, records: Sequence[Row] = ()) -> None:
        store = stores[node.name]
        source = None if node.operator else Records(store, list(records))
        run_once(node, lambda one: stores[one.name], source, recorded_at=recorded)

    now = 0
    for step in range(4):
        run(RATES, at(now + 3), random_records(chance, 20, now, 20))
        if step in (1, 2):
            run(
                ORDERS,
                at(now + 6),
                [*random_records(chance, 30, now, 30), {"k": None, "n": 1, "timestamp": EPOCH}],
            )
            run(made["recorded"])
        now += chance.choice([5, 30])
    for node in made.values():
        run(node)

    def rows(name: str) -> list[dict[str, Any]]:
        head = stores[name].head()
        assert head is not None
        return stores[name].log({}, head).toArrow().to_pylist()

    log, recorded = Log(rows("rates"), RATES.history_retention), dict[Any, Any]()
    for row in rows("orders"):
        recorded[row["k"], row["n"], row["timestamp"], row["offset"]] = row["recorded_at"]
    instant, none = timedelta(microseconds=1), {"rate": None, "since": None, "until": None}
    by_offset = {key[-1]: value for key, value in recorded.items()}
    alive = [r for r in rows("orders") if not r["is_tombstone"]]
    for name, about in joins.items():
        results = rows(name)
        assert results, name
        assert len(results) == len(alive) or name == "until"
        places = [r["offset"] for r in alive] if name != "until" else [None] * len(results)
        for row, place in zip(results, places, strict=True):
            known, time = about.get("as_known", "now"), row["timestamp"]
            cut = max(r["recorded_at"] for r in rows("rates")) if known == "now" else None
            if known == "when_recorded":
                cut = by_offset[place]
            elif isinstance(known, timedelta):
                cut = time + known
            assert cut is not None
            expected = log.known(row["k"], time - instant * (about.get("at") == "before"), cut) or none
            age = about.get("max_age")
            if age is not None and expected["since"] and time - expected["since"] > age:
                expected = none
            assert {n: row[n] for n in none} == expected, (name, row, cut)
    strategies = [stores[n].head().commit.strategy for n in joins]  # pyright: ignore
    assert any("by the log" in said and " 0 records" not in said for said in strategies)


def test_as_known_join_on_delta_is_split_invariant(spark: SparkSession, tmp_path: Path) -> None:
    """A join that runs after each run of its stream, and a join that runs once at the end, after all
    late records: both have the same rows, and each row equals that of ``vt_dagster.read``. A run of a
    join with changed settings is refused."""
    warehouse, chance = str(tmp_path / "warehouse"), random.Random(7)
    stores = stores_of(warehouse, spark)
    rates = VersionedTable(
        "rates",
        key="k",
        schema=SCHEMA,
        tombstone="n is null",
        history_retention=timedelta(minutes=30),
        source=FilesSource(str(tmp_path / "rates"), max_bad_share=1.0),
    )
    orders = Stream("orders", key="k", schema=SCHEMA, source=FilesSource(str(tmp_path / "orders")))

    def join(name: str, **about: Any) -> Stream:
        return orders.join(rates, name=name, select=["left.*", "right.n as rate"], **about)

    each, once = (join(name, as_known="when_recorded") for name in ("each", "once"))

    def land(node: Stream, step: int, records: Sequence[Row]) -> None:
        (tmp_path / node.name).mkdir(exist_ok=True)
        lines = [json.dumps(r, default=lambda t: t.isoformat()) for r in records]
        (tmp_path / node.name / f"{step}.json").write_text("\n".join(lines), encoding="utf-8")
        run_once(node, stores, recorded_at=at(40 * step + len(node.name)))

    for step in range(3):
        land(rates, step, random_records(chance, 30, 20 * step, 15))
        if step != 1:
            land(
                orders,
                step,
                [r | {"n": r["n"] or 0} for r in random_records(chance, 30, 20 * step, 25)],
            )
            run_once(each, stores)
    run_once(once, stores)
    rows = stores(each).read().orderBy("offset").drop("recorded_at").collect()
    assert rows == stores(once).read().orderBy("offset").drop("recorded_at").collect()
    found = {(r["k"], r["timestamp"], r["n"]): r["rate"] for r in rows}
    missing = 0
    for order in stores(orders).read().toArrow().to_pylist():
        asked = {"as_of": order["timestamp"], "as_known_at": order["recorded_at"]}
        told = vt_dagster.read("rates", warehouse=warehouse, key=order["k"], partial=True, **asked)
        expected = told.column("n").to_pylist()
        missing += not expected
        place = order["k"], order["timestamp"].replace(tzinfo=None), order["n"]
        assert [found[place]] == expected if expected else place not in found
    assert 0 < missing < 30
    with pytest.raises(StorageError) as refused:
        run_once(join("each", max_age=timedelta(hours=2)), stores)
    assert "as_known was 'when_recorded', is 'now'" in str(refused.value)
    assert "max_age was None, is 2 hours" in str(refused.value)
    assert "vt-dagster replay" in str(refused.value)


def test_shown_settings() -> None:
    """The shown settings are those that differ from the defaults."""
    plain = ORDERS.join(RATES, name="x").operator
    assert plain is not None
    assert plain.settings == {"grace_period": "0 seconds"}
    chosen = ORDERS.join(RATES, name="x", max_age=timedelta(hours=2), at="before").operator
    assert chosen is not None
    assert chosen.settings == {"grace_period": "0 seconds", "max_age": "2 hours", "at": "before"}
    assert "; max_age 2 hours; at before." in chosen.describe()


DAY = timedelta(days=1)


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"at": "forward"}, "'at_or_after', 'after' or 'nearest', got 'forward'"),
        ({"at": "after_lunch"}, "'at_or_after', 'after' or 'nearest', got 'after_lunch'"),
        ({"as_known": "then"}, "as_known must be 'now', 'when_recorded' or a datetime.timedelta"),
        ({"as_known": -DAY}, "as_known must be between 0 and"),
        ({"max_age": -DAY}, "max_age must be between 0 and"),
        ({"max_age": 3}, "max_age must be a datetime.timedelta, got 3"),
        (
            {"as_known": "when_recorded", "grace_period": timedelta(minutes=1)},
            "so a grace period changes nothing: remove grace_period",
        ),
    ],
)
def test_refused_when_declared(about: dict[str, Any], said: str) -> None:
    with pytest.raises(TopologyError) as refused:
        ORDERS.join(RATES, name="x", **about)
    assert str(refused.value).startswith("x: ")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "about", [{"as_known": "when_recorded"}, {"max_age": DAY}, {"at": "before"}], ids=str
)
def test_refused_with_unversioned_table(about: dict[str, Any]) -> None:
    plain = Table("plain", key="k", schema=SCHEMA)
    with pytest.raises(TopologyError, match="'plain' is not versioned"):
        ORDERS.left_join(plain, name="x", **about)
    (what,) = about
    with pytest.raises(
        TopologyError, match=f"{what} is only for a join of a stream with a versioned table"
    ):
        ORDERS.left_join(Stream("more", key="k", schema=SCHEMA), name="x", within=DAY, **about)
