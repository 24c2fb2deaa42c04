"""The numbers of ``lateness`` equal those of real Spark runs with each grace period or retention."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import IntegerType, StringType, StructField, StructType, TimestampType
from typer.testing import CliRunner

from tests.log_writer import LogWriter
from vt_dagster import (
    FilesSource,
    HoppingWindow,
    Stream,
    TumblingWindow,
    VersionedTable,
    WarehouseResource,
    build_lateness_check,
    lateness,
)
from vt_dagster.cli import app
from vt_dagster.errors import ContractError, StorageError, TopologyError
from vt_dagster.provenance.lateness import Choice, LateJoin, Lateness, Match, Records, Versions
from vt_dagster.runs.erase import erase
from vt_dagster.runs.run import run_once
from vt_dagster.spark.settings import small_run
from vt_dagster.storage.asset_store import stores_of
from vt_dagster.storage.commit_log import Shape
from vt_dagster.testing.driver import MemoryStore

EPOCH = datetime(2020, 1, 1, tzinfo=timezone.utc)
START, MINUTE = int(EPOCH.timestamp()) * 1_000_000, 60_000_000
VALUES = [StructField("k", StringType()), StructField("n", IntegerType())]
SCHEMA = StructType([*VALUES, StructField("timestamp", TimestampType())])
RETENTION = timedelta(minutes=15)
GRACES = [timedelta(0), timedelta(minutes=3), timedelta(minutes=15)]
MAX_AGE = timedelta(minutes=9)
STEPS = 3
FOUND = ["left.n as id", "right.n as rate"]
Row = Mapping[str, Any]


class Lab:
    """A stream and a table whose records land in steps and out of order, with joins and windows of
    several grace periods. Those with no grace are stored on Delta, the others in memory."""

    def __init__(self, root: Path, spark: SparkSession) -> None:
        self.root, self.spark, self.warehouse = root, spark, str(root / "warehouse")
        self.rates = VersionedTable(
            "rates",
            key="k",
            schema=SCHEMA,
            tombstone="n is null",
            history_retention=RETENTION,
            partitions=2,
            source=FilesSource(str(root / "rates"), max_bad_share=1.0),
        )
        self.orders = Stream(
            "orders",
            key="k",
            schema=SCHEMA,
            tombstone="n is null",
            partitions=2,
            null_key="keep",
            source=FilesSource(str(root / "orders"), max_bad_share=1.0),
        )
        match: dict[str, Any] = {"select": FOUND, "max_age": MAX_AGE, "at": "before"}
        self.joins = {
            grace: self.orders.left_join(self.rates, name=f"join{i}", grace_period=grace, **match)
            for i, grace in enumerate(GRACES)
        }
        self.inner = self.orders.join(self.rates, name="inner", **match)
        size, advance = timedelta(minutes=4), timedelta(minutes=2)
        windows = {
            "tumbling": TumblingWindow(size),
            "tumbling_waits": TumblingWindow(size, grace=GRACES[1]),
            "hopping": HoppingWindow(size, advance),
        }
        self.windows = [
            self.orders.group_by().windowed_by(window).aggregate({"many": "count(*)"}, name=name)
            for name, window in windows.items()
        ]
        self.short = replace(self.rates, name="short", history_retention=timedelta(minutes=4))
        joins = [*self.joins.values()]
        self.once = [self.inner, self.short, *self.windows]
        self.nodes = {n.name: n for n in [self.rates, self.orders, *joins, *self.once]}
        on_delta = stores_of(self.warehouse, spark)
        in_memory = [*joins[1:], self.windows[1]]
        self.memory = {n.name: MemoryStore(n, spark) for n in in_memory}
        self.stores: Any = lambda node: self.memory.get(node.name) or on_delta(node)

    def land(self, node: Stream, step: int, rows: Sequence[Row]) -> None:
        (self.root / node.name).mkdir(exist_ok=True)
        lines = [json.dumps(r, default=lambda t: t.isoformat()) for r in rows]
        (self.root / node.name / f"{step}.json").write_text("\n".join(lines), encoding="utf-8")

    def run(self) -> None:
        chance, ids = random.Random(3), iter(range(10_000))
        for step in range(STEPS):
            now = 12 * step
            # The table lags: some of its records arrive one or two steps after their timestamp.
            rates = [
                {"k": chance.choice("abcd"), "n": chance.choice([None, *range(5)]), "timestamp": moment}
                for moment in times(chance, 40, now, [0, 0, 1, 4, 13])
            ]
            orders = [
                {
                    "k": chance.choice(["a", "b", "c", "d", "e", None]),
                    "n": None if chance.random() < 0.1 else next(ids),
                    "timestamp": moment,
                }
                for moment in times(chance, 60, now, [0, 0, 1, 5, 14])
            ]
            self.land(self.rates, step, rates)
            self.land(self.orders, step, orders)
            run_once(self.rates, self.stores)
            run_once(self.orders, self.stores)
            for node in self.joins.values():
                run_once(node, self.stores, recorded_at=recorded(step))
        for node in self.once:
            run_once(node, self.stores)

    def rows(self, name: str) -> list[dict[str, Any]]:
        store = self.stores(self.nodes[name])
        return store.log({}, store.head()).toArrow().to_pylist()

    def commits(self, name: str) -> list[Any]:
        return [*self.stores(self.nodes[name]).commits()]

    def lateness(self, name: str, **asked: Any) -> Lateness:
        return lateness(name, warehouse=self.warehouse, **asked)


def recorded(step: int) -> int:
    """The ``recorded_at`` of the joins' runs of a step; the intervals are not equal."""
    return START + (step * step + 100) * 3600 * 1_000_000


def times(chance: random.Random, number: int, now: int, back: Sequence[int]) -> list[datetime]:
    found = [now + 12 * i / number - chance.choice(back) for i in range(number)]
    return [EPOCH + timedelta(minutes=max(0.0, round(one * 4) / 4)) for one in found]


@pytest.fixture(scope="module")
def lab(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    made = Lab(tmp_path_factory.mktemp("lateness"), spark)
    with small_run(spark):
        made.run()
    return made


def true_matches(lab: Lab) -> dict[int, int | None]:
    """Returns what each order should find in all rates recorded so far, row by row."""
    rates = sorted(lab.rows("rates"), key=lambda r: r["offset"])
    found: dict[int, int | None] = {}
    for order in lab.rows("orders"):
        if order["is_tombstone"]:
            continue
        mine = {r["timestamp"]: r for r in rates if r["k"] == order["k"]}
        moment = order["timestamp"]
        earlier = [t for t in mine if t < moment]
        best = mine[max(earlier)] if earlier else None
        young = best is not None and moment - best["timestamp"] <= MAX_AGE
        found[order["n"]] = best["n"] if best is not None and young else None
    return found


def assert_as_run(lab: Lab, name: str, choice: Choice, should: dict[int, int | None]) -> None:
    """A choice must have the numbers of a left join that ran with its grace period."""
    commits, rows = lab.commits(name), lab.rows(name)
    assert choice.late == sum(c.counts["late"] for c in commits)
    waiting = [c.counts["waiting"] for c in commits]
    assert choice.waiting == waiting[-1]
    assert choice.waiting_most == max(waiting)
    assert choice.waiting_average == np.mean(waiting)
    wrong = [r for r in rows if should[r["id"]] != r["rate"]]
    assert choice.wrong == len(wrong)
    assert choice.of == len(rows) + waiting[-1] == len(should)
    first = {r["id"]: r["recorded_at"] for r in lab.rows("join0")}
    later = sorted(r["recorded_at"] - first[r["id"]] for r in rows)
    steps = {datetime.fromtimestamp(recorded(s) / 1e6, timezone.utc): s for s in range(STEPS)}
    behind = sorted(
        commits[steps[r["recorded_at"]]].stream_time[r["partition"]]
        - commits[steps[first[r["id"]]]].stream_time[r["partition"]]
        for r in rows
    )
    assert choice.later is not None
    assert choice.later_in_stream_time is not None
    for share, at, time in (
        (50, choice.later.p50, choice.later_in_stream_time.p50),
        (99, choice.later.p99, choice.later_in_stream_time.p99),
    ):
        place = -(-len(rows) * share // 100) - 1
        assert at == later[place]
        assert time // timedelta(microseconds=1) == behind[place]


def test_lateness_of_grace_period_equals_run(lab: Lab) -> None:
    found, should = lab.lateness("join0", grace=GRACES), true_matches(lab)
    for grace, node in lab.joins.items():
        assert_as_run(lab, node.name, found.of(grace), should)
    wrong = [found.of(grace).wrong for grace in GRACES]
    assert wrong[0] > wrong[1] > 0
    assert found.of(GRACES[1]).late > 0
    assert found.of(GRACES[2]).late == 0
    # A record that waits longer than the table's history retention finds its version expired.
    assert found.of(GRACES[2]).expired == wrong[2] > wrong[0]
    assert found.declared == found.of(GRACES[0])


def test_suggested_grace_period_for_percentage(lab: Lab) -> None:
    """The suggestion fits the shortest sufficient grace period in steps of 15 s, those of the records'
    times."""
    grid = [timedelta(seconds=15 * i) for i in range(60)]
    shown = lab.lateness("join0", grace=grid)
    for percentage in (9, 9.5, 10, 11):
        found = lab.lateness("join0", at_most=f"{percentage}%")
        assert found.suggested is not None
        enough = [g for g in grid if shown.of(g).share <= percentage / 100]
        assert enough[0] - grid[1] < found.suggested <= enough[0]
        assert found.of(found.suggested).share <= percentage / 100
        assert not found.passed
    assert lab.lateness("join0", at_most=0.12).passed
    hopeless = lab.lateness("join0", at_most="1%")
    assert hopeless.suggested is None
    assert "a longer history retention" in hopeless.notes[0]
    retention = lab.lateness("rates", at_most="5%")
    assert retention.suggested is not None
    lengths = [retention.suggested - timedelta(microseconds=1), retention.suggested]
    shares = [one.share for one in lab.lateness("rates", grace=lengths).choices]
    assert shares[0] > 0.05 >= shares[1]
    for at_most in ("5", "-1%", 1.5, "x%"):
        with pytest.raises(StorageError, match="expected a share of the results like"):
            lab.lateness("join0", at_most=at_most)
    with pytest.raises(StorageError, match="orders is made by source: expected a join"):
        lab.lateness("orders")


class Answers:
    """Versions whose answer depends on the state alone; the answer of the last state is right."""

    now = 4

    def known_since(self, place: Any) -> Any:
        return np.full(len(place), 3)

    def answers(self, place: Any, codes: Any, moment: Any, state: Any) -> Any:
        return np.array([1, 0, 2, 0, 0])[state], np.zeros(len(place), bool)

    def same(self, one: Any, other: Any) -> Any:
        return one == other


def test_shorter_grace_may_be_right_by_chance() -> None:
    """Of four runs, the second and the fourth give the answer known now. A grace period until the
    second run is enough."""
    join = LateJoin.__new__(LateJoin)
    one = np.zeros(1, np.int64)
    home = {"run": 0, "home": one, "moment": one + 10, "now": one + 20, "keyed": one == 0}
    records = Records(**home, codes=one, place=one, truth=one)
    join.state, join._recorded = np.arange(4), np.arange(4)
    join._time, join.runs, join.versions = np.array([[20, 30, 40, 50]]), [None] * 4, Answers()  # type: ignore
    join.records = lambda: iter([records])  # type: ignore[method-assign]
    every = [timedelta(microseconds=n) for n in range(60)]
    enough = [c.length for c in join.cost(every) if not c.wrong]
    best = join.smallest(0)
    assert best is not None
    assert best.length == enough[0] == timedelta(microseconds=11)


def test_ended_version_does_not_match() -> None:
    """At a time before the history only a current version answers. A version with its own end is not
    current, so it does not answer there."""
    rows = pa.table(
        {
            **{"k": ["a", "a"], "partition": [0, 0], "offset": [0, 1], "is_tombstone": [False] * 2},
            "timestamp": pa.array([10, 30], pa.timestamp("us", "UTC")),
            "u": pa.array([20, 90], pa.timestamp("us", "UTC")),
        }
    )
    shape = Shape(kind="versioned", key=["k"], history_retention=10)
    log: Any = SimpleNamespace(
        key=("k",), head=SimpleNamespace(shape=shape), rows=lambda *_, **__: rows
    )
    state: Any = SimpleNamespace(next_offset={0: 2}, stream_time={0: 60})
    versions = Versions(log, [state], Match([], valid_until="u"))
    moments = np.array([10, 19, 20, 30, 49, 50, 89, 90])
    codes = versions.keys.of([pa.chunked_array([["a"] * len(moments)])], new=False)
    place = versions.place(codes, moments)
    then, _ = versions.answers(place, codes, moments, np.zeros(len(moments), np.int64))
    now, _ = versions.answers(place, codes, moments, np.full(len(moments), versions.now))
    assert then.tolist() == [-1, -1, -1, -1, -1, 1, 1, -1]
    assert now.tolist() == [0, 0, -1, 1, 1, 1, 1, -1]


def test_suggested_length_in_words() -> None:
    """A grace period is exclusive: it suffices from a microsecond more on."""
    grace = Lateness("j", "stream_table_join", "grace_period", (), 0.1, timedelta(microseconds=1))
    assert grace.suggestion == "just over 0 seconds"
    longer = replace(grace, suggested=timedelta(minutes=3, microseconds=1))
    assert longer.suggestion == "just over 3 minutes"
    assert replace(grace, suggested=timedelta(0)).suggestion == "0 seconds"
    retention = replace(longer, what="history_retention")
    assert retention.suggestion == "3 minutes 1 µs"


def test_lateness_command_and_check(lab: Lab, tmp_path: Path) -> None:
    drawn = tmp_path / "lateness.svg"
    args = ["lateness", "join0", "--grace", "0s,3m", "--at-most", "10%", "--warehouse", lab.warehouse]
    told = CliRunner().invoke(app, [*args, "--picture", str(drawn)])
    assert told.exit_code == 1, told.output
    narrow = CliRunner().invoke(app, args, env={"COLUMNS": "40"}).output
    wide = CliRunner().invoke(app, args, env={"COLUMNS": "200"}).output
    assert "…" not in narrow
    numbers = re.compile(r"[\d,.]+ %")
    assert sorted(numbers.findall(narrow)) == sorted(numbers.findall(wide))
    assert "> at most 10 % wrong: the shortest grace period is" in told.output
    assert drawn.read_text().startswith("<svg")
    said = json.loads(CliRunner().invoke(app, [*args, "--json"]).output)
    assert said["choices"][0]["length"] == 0.0
    assert said["choices"][0]["wrong"] == lab.lateness("join0", grace=["0s"]).choices[0].wrong
    node = lab.joins[GRACES[0]]
    for at_most, passed in (("10%", False), ("50%", True)):
        check = build_lateness_check(node, at_most=at_most)
        result = dg.materialize(
            [dg.AssetSpec("join0"), check],
            selection=dg.AssetSelection.checks(check),
            resources={"vt_dagster_warehouse": WarehouseResource(path=lab.warehouse)},
        )
        (one,) = result.get_asset_check_evaluations()
        assert one.passed is passed
        assert one.metadata["wrong"].value == said["choices"][0]["wrong"]
        assert one.description is not None
        assert one.description.lower() == f"{one.metadata['result'].value}.".lower()
        assert "image/svg+xml" in str(one.metadata["picture"].value)
    with pytest.raises(TopologyError, match="orders: expected a join of a stream"):
        build_lateness_check(lab.orders, at_most="1%")


@pytest.mark.parametrize(
    ("length", "said"),
    [
        (timedelta(minutes=-1), "prices: grace must be between 0 and 365,000 days, got -1 day, 23:59"),
        ("-1m", "expected a length of time like 7d, 1h30m"),
        (timedelta.max, "prices: grace must be between 0 and 365,000 days, got 999999999 days"),
        ("400000d", "prices: grace must be between 0 and 365,000 days, got 400000 days"),
        ("1000000000d", "expected a length of at most 999,999,999 days, got '1000000000d'"),
    ],
)
def test_invalid_lengths_are_refused(tmp_path: Path, length: str | timedelta, said: str) -> None:
    LogWriter(tmp_path).run([("apple", "1", 0)], 1)
    with pytest.raises((ContractError, TopologyError), match=said):
        lateness("prices", grace=["1m", length], warehouse=str(tmp_path))
    prices = VersionedTable(
        "prices",
        key="k",
        timestamp="timestamp",
        history_retention=RETENTION,
        schema=SCHEMA,
        source=FilesSource("landing"),
    )
    with pytest.raises((ContractError, TopologyError), match=said):
        build_lateness_check(prices, at_most="1%", grace=["1m", length])


def test_inner_join_skips_records_without_key(lab: Lab) -> None:
    choice, should = lab.lateness("inner", grace=["0s"]).choices[0], true_matches(lab)
    keyed = {r["n"] for r in lab.rows("orders") if r["k"] is not None and not r["is_tombstone"]}
    there = {r["id"]: r["rate"] for r in lab.rows("inner")}
    assert choice.of == len(keyed) < len(should)
    assert choice.wrong == sum(should[one] != there.get(one) for one in keyed)


def test_lateness_of_windows_equals_run(lab: Lab) -> None:
    for name, node in (
        ("tumbling", "tumbling"),
        ("tumbling", "tumbling_waits"),
        ("hopping", "hopping"),
    ):
        grace = GRACES[node == "tumbling_waits"]
        choice = lab.lateness(name, grace=[grace]).of(grace)
        (commit,) = lab.commits(node)
        assert choice.late == commit.counts["late_records_dropped"] > 0
        assert choice.dropped == commit.counts["expired_window_records_dropped"]
        counted = {r["window_start"]: r["many"] for r in lab.rows(node) if r["k"] == "a"}
        every = Counter[datetime]()
        for order in (r for r in lab.rows("orders") if r["k"] == "a"):
            minutes = (order["timestamp"] - EPOCH) // timedelta(minutes=1)
            step = 2 if name == "hopping" else 4
            first = minutes // step * step
            starts = [first, first - step] if name == "hopping" else [first]
            every.update(EPOCH + timedelta(minutes=one) for one in starts)
        lacking = sum(counted.get(start) != many for start, many in every.items())
        assert lacking <= choice.wrong
        assert choice.of >= len(every)
    longest = lab.lateness("tumbling", grace=["1d"]).choices[0]
    assert (longest.late, longest.wrong, longest.dropped) == (0, 0, 0)


def test_lateness_of_retention_equals_run(lab: Lab) -> None:
    found = lab.lateness("rates", grace=[timedelta(minutes=4), RETENTION, "1d"])
    refused = [lab.commits(name)[-1].totals["late"] for name in ("short", "rates")]
    assert [one.wrong for one in found.choices[:2]] == refused
    assert found.of(timedelta(minutes=4)).of == sum(
        lab.commits("short")[-1].counts[c] for c in ("applied", "late")
    )
    assert found.choices[1].declared
    assert found.choices[2].wrong == 0


def test_erased_late_records_make_upper_bounds(spark: SparkSession, tmp_path: Path) -> None:
    """The lateness of an erased record is unknown, so that counts may be upper bounds; that of the
    other records is known."""
    source = FilesSource(str(tmp_path / "rates"))
    about: dict[str, Any] = {"key": "k", "schema": SCHEMA, "source": source}
    node = VersionedTable("rates", history_retention=timedelta(minutes=4), **about)
    stores = stores_of(str(tmp_path / "warehouse"), spark)
    (tmp_path / "rates").mkdir()
    with small_run(spark):
        for name, records in (("1", [("a", 60)]), ("2", [("a", 50), ("b", 50), ("b", 40)])):
            rows = [{"k": k, "n": 1, "timestamp": f"2024-01-01T00:{m - 1}:00Z"} for k, m in records]
            (tmp_path / "rates" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
            run_once(node, stores)
        erase(str(tmp_path / "warehouse"), node, spark, key=["a"], reason="asked")
    lengths = [timedelta(minutes=m) for m in (4, 15, 30)]
    found = lateness(node, grace=lengths, warehouse=str(tmp_path / "warehouse"))
    assert [one.wrong for one in found.choices] == [3, 2, 1]
    assert [one.of for one in found.choices] == [3, 3, 3], "the accepted record was erased"
    assert found.notes[0].startswith("records of rates that were erased (1) are not counted")
    assert found.notes[-1].startswith("the number refused with 30 minutes is an upper bound")
