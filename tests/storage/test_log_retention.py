"""Truncated logs: a read of a time within the limit gives the same rows as before, a read of an earlier
time names the limit, and no consumer loses a record."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructField, StructType

import vt_dagster
from tests.storage.test_as_known_at import FIRST, MINUTE, moment, read_requests, read_rows, sorted_rows
from tests.storage.topology import SCHEMA, Topology
from vt_dagster.columns import RECORDED_AT
from vt_dagster.errors import ConcurrentRunError, StorageError, TopologyError
from vt_dagster.provenance.explain_request import Explanation
from vt_dagster.runs.audit import audit
from vt_dagster.runs.erase import erase
from vt_dagster.runs.export import ExportRun, export_of
from vt_dagster.runs.pin import require_reach
from vt_dagster.runs.replay import compare, replay
from vt_dagster.runs.restate import restate
from vt_dagster.runs.run import Run, run_once
from vt_dagster.runs.truncate_log import truncate_logs
from vt_dagster.runs.what_if import what_if
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.storage import delta, parquet
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.storage.commit_log import Commit, Shape, Truncation, commits
from vt_dagster.topology.durations import in_utc
from vt_dagster.topology.feature_views import FeatureView, TrainingSet
from vt_dagster.topology.model import VersionedTable
from vt_dagster.topology.windows import SessionWindow, TumblingWindow

pytestmark = pytest.mark.usefixtures("few_rows")

RETENTION = timedelta(minutes=8)
"""The log retention, which covers the records of one or two rounds."""
ROUND = 10 * MINUTE


class Kept(Topology):
    """``rates`` and ``orders`` with a log retention, and joins that read them again."""

    nodes: Any = ()

    def __init__(self, root: Path, retention: timedelta = RETENTION) -> None:
        super().__init__(root)
        # For a late record, the corrected join re-reads the later records of the history.
        log_retention = max(retention, timedelta(minutes=10))
        self.rates = replace(self.rates, log_retention=log_retention)
        self.orders = replace(self.orders, log_retention=retention)
        self.fixed = self.orders.left_join(
            self.rates,
            name="fixed",
            corrected_for=timedelta(minutes=6),
            grace_period=timedelta(minutes=2),
            select=["left.*", "right.n as rate"],
        )
        self.near = self.orders.left_join(
            self.orders,
            name="near",
            before=timedelta(minutes=3),
            grace=timedelta(minutes=1),
            select=["left.n", "right.n as other"],
        )
        self.nodes = [self.rates, self.orders, self.fixed, self.near]

    def round(self, number: int, spark: SparkSession, only: Sequence[str] = ()) -> None:
        """Runs all assets, with a recording time that is the same in each copy."""
        at = FIRST + number * ROUND
        for node in self.nodes:
            if not only or node.name in only:
                run_once(node, stores_of(self.warehouse, spark), recorded_at=at)

    def cut(self, number: int, spark: SparkSession, **more: Any) -> tuple[dict[str, int], list[str]]:
        """Truncates the logs shortly after a round."""
        told: list[str] = []
        now = FIRST + number * ROUND + MINUTE
        done = truncate_logs(self.warehouse, spark, self.nodes, now=now, tell=told.append, **more)
        return done, told

    def commit(self, name: str) -> Commit:
        found = delta.last_commit(f"{self.warehouse}/{name}/log")
        assert found is not None
        return Commit.model_validate(found.document)


def land_round(topology: Topology, number: int, chance: random.Random) -> None:
    """Lands random records around the round's time, some of them out of order, late or deletions."""
    for name in ("rates", "orders"):
        records = [
            (chance.choice("abc"), chance.choice([None, 1, 2, 3]), 10 * number + chance.randint(-6, 6))
            for _ in range(8)
        ]
        told = [(k, n if name == "rates" or n else 5, t) for k, n, t in records]
        topology.land(name, f"{number}.jsonl", told)


def copy_of(topology: Topology, place: Path) -> Kept:
    shutil.copytree(topology.root, place)
    return Kept(place)


@pytest.fixture(scope="module")
def two_rounds(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Kept:
    """The topology after two rounds, with whole logs."""
    topology = Kept(tmp_path_factory.mktemp("two_rounds"))
    chance = random.Random(7)
    for number in range(2):
        land_round(topology, number, chance)
        topology.round(number, spark, () if number else ("rates", "orders"))
    return topology


def rows_of(topology: Kept, name: str, what: str | None = None) -> list[Any]:
    rows = vt_dagster.read(name, warehouse=topology.warehouse, what=what)
    return sorted_rows(rows.drop_columns([RECORDED_AT]))


def expected_rows(topology: Kept, name: str, whole: Kept, known: str | None) -> list[Any]:
    """The rows of the whole log of another copy, without those that are truncated here."""
    rows = vt_dagster.read(name, warehouse=whole.warehouse, what="log", as_known_at=known)
    commit = topology.commit(name)
    places = zip(rows.column("partition").to_pylist(), rows.column("offset").to_pylist(), strict=True)
    return sorted_rows(rows.filter([o >= commit.kept_from(p) for p, o in places]))


def require_same_reads(topology: Kept, whole: Kept, rounds: int) -> tuple[int, int]:
    """Compares the reads of both copies as known at each round. Returns how many reads gave the same
    rows and how many were refused."""
    same = refused = 0
    for name, kind in (("rates", "versioned"), ("orders", "stream"), ("fixed", "table")):
        since = topology.commit(name).truncation
        for number in range(rounds):
            for known in (FIRST + number * ROUND, FIRST + (number + 1) * ROUND - 1):
                for asked in read_requests(kind)[number % 2 :: 2] if name != "fixed" else [{}]:
                    if "key" in asked and name == "orders":
                        continue
                    found = read_rows(topology.warehouse, name, moment(known), **asked)
                    if since is not None and known < since.recorded_at:
                        assert f"expected a time from {moment(since.recorded_at)} on" in found
                        refused += 1
                        continue
                    wanted = read_rows(whole.warehouse, name, moment(known), **asked)
                    if asked.get("what") == "log" and "key" not in asked:
                        wanted = expected_rows(topology, name, whole, moment(known))
                    elif asked.get("what") == "log":
                        continue
                    assert found == wanted, (name, moment(known), asked)
                    same += 1
    return same, refused


def test_truncation_keeps_reads_within_limit_and_refuses_earlier(
    two_rounds: Kept, tmp_path: Path, spark: SparkSession
) -> None:
    """With random arrivals, truncations between runs change no result of a consumer. The consumers
    re-read logs: a join with grace, a corrected join, and a join of a stream with itself."""
    whole, topology = copy_of(two_rounds, tmp_path / "whole"), copy_of(two_rounds, tmp_path / "cut")
    done, told = topology.cut(1, spark, keep=timedelta(0))
    assert set(done) <= {"rates", "orders"}
    assert done["rates"] > 0, told
    first = topology.commit("rates")
    for one in (whole, topology):
        land_round(one, 3, random.Random(12))
        one.round(3, spark)
    done, told = topology.cut(3, spark)
    assert topology.commit("orders").truncation is not None, told
    second = topology.commit("rates")
    assert first.truncation is not None
    assert second.truncation is not None
    assert second.truncation.batch > first.truncation.batch
    for name in ("fixed", "near"):
        assert rows_of(topology, name, "log") == rows_of(whole, name, "log")
    for what in ("current", "versions"):
        assert rows_of(topology, "rates", what) == rows_of(whole, "rates", what)
    same, refused = require_same_reads(topology, whole, 4)
    assert (same > 20, refused > 20) == (True, True)
    for node in topology.nodes[:2]:
        assert [f for f in audit(AssetStore(topology.warehouse, node, spark)) if not f.passed] == []


# ------------------------------------------------------------------------------- one table by itself


@pytest.fixture
def rates_only(two_rounds: Kept, tmp_path: Path) -> Kept:
    """``rates`` by itself, after two runs."""
    shutil.copytree(two_rounds.root / "rates", tmp_path / "alone" / "rates")
    shutil.copytree(f"{two_rounds.warehouse}/rates", tmp_path / "alone" / "warehouse" / "rates")
    topology = Kept(tmp_path / "alone")
    topology.nodes = [topology.rates]
    return topology


def read_all(topology: Kept) -> list[Any]:
    known = [moment(FIRST), moment(FIRST + ROUND), None]
    return [
        read_rows(topology.warehouse, "rates", at, what=w) for at in known for w in ("log", "versions")
    ]


def failing(patched: pytest.MonkeyPatch, whose: Any, name: str, call: int, after: bool) -> None:
    """Makes a function fail at one of its calls, before or after its work."""
    real, calls = getattr(whose, name), [0]

    def wrapped(*args: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] == call and not after:
            raise RuntimeError("killed")
        found = real(*args, **more)
        if calls[0] == call and after:
            raise RuntimeError("killed")
        return found

    patched.setattr(whose, name, wrapped)


BEFORE_TRUNCATION = [
    *((parquet, "write", 1, after) for after in (False, True)),
    *((AssetStore, "stage_files", 1, after) for after in (False, True)),
    (parquet, "write", 2, False),
]
"""Moments before the commit of a truncation: a function, which of its calls, whether after it."""


@pytest.mark.parametrize(
    "committed", [(parquet, "write", 2, True), (AssetStore, "remove_staged_before", 1, True)]
)
def test_killed_truncation_is_atomic(
    rates_only: Kept, spark: SparkSession, committed: tuple[Any, str, int, bool]
) -> None:
    """Before the commit, a killed truncation has no effect; after it, the whole truncation. The next
    truncation cleans up."""
    before = read_all(rates_only)
    for moment_of_kill in [*BEFORE_TRUNCATION, committed]:
        with pytest.MonkeyPatch.context() as patched:
            failing(patched, *moment_of_kill)
            with pytest.raises(RuntimeError, match="killed"):
                rates_only.cut(1, spark)
        if moment_of_kill != committed:
            assert rates_only.commit("rates").truncation is None
            assert read_all(rates_only) == before
    commit = rates_only.commit("rates")
    assert commit.truncation is not None
    assert (commit.batch, commit.upkeep) == (3, True)
    assert read_all(rates_only)[2:4] == [
        expected_rows(rates_only, "rates", rates_only, moment(FIRST + ROUND)),
        before[3],
    ]
    assert len(list(Path(rates_only.warehouse, "rates", "bases").iterdir())) > 1
    assert rates_only.cut(1, spark, keep=timedelta(0)) == ({}, [])
    assert [p.name for p in Path(rates_only.warehouse, "rates", "bases").iterdir()] == [
        commit.truncation.base
    ]
    land_round(rates_only, 2, random.Random(3))
    rates_only.round(2, spark)
    assert rates_only.commit("rates").batch == 4
    assert not any(
        f.offending for f in audit(AssetStore(rates_only.warehouse, rates_only.rates, spark))
    )


def test_concurrent_run_and_truncation_have_one_winner(rates_only: Kept, spark: SparkSession) -> None:
    """Of a run and a truncation at the same time, the first commit wins; the other must be repeated."""
    land_round(rates_only, 2, random.Random(3))
    run = Run.pin(rates_only.rates, stores_of(rates_only.warehouse, spark))
    results = run.operate(run.read())
    assert rates_only.cut(1, spark)[0]
    with pytest.raises(ConcurrentRunError, match="another run committed at the same time"):
        run.commit(results)
    rates_only.round(2, spark)
    assert rates_only.commit("rates").batch == 4
    with pytest.MonkeyPatch.context() as patched:
        real = AssetStore.stage_files

        def slow(store: AssetStore, *about: Any) -> None:
            patched.undo()
            land_round(rates_only, 3, random.Random(4))
            rates_only.round(3, spark)
            real(store, *about)

        patched.setattr(AssetStore, "stage_files", slow)
        done, (told,) = rates_only.cut(3, spark)
    assert done == {}
    assert "rates: its log was not truncated, a later maintenance will" in told
    assert rates_only.commit("rates").batch == 5
    assert rates_only.cut(3, spark)[0]


def test_late_records_before_truncation_do_not_count(tmp_path: Path, spark: SparkSession) -> None:
    """``lateness`` compares the late records since then with the records that the log still has."""
    topology = Topology(tmp_path)
    topology.rates = replace(topology.rates, log_retention=timedelta(0))

    def late() -> tuple[int, int]:
        (choice,) = vt_dagster.lateness("rates", grace=["10m"], warehouse=topology.warehouse).choices
        return choice.wrong, choice.of

    for number, minute in enumerate((0, 60, 5, 61)):  # the third is late
        topology.land("rates", f"{number}.jsonl", [("a", number, minute)])
        topology.run("rates", spark)
    assert late() == (1, 4)
    assert truncate_logs(topology.warehouse, spark, [topology.rates]) == {"rates": 3}
    assert late() == (0, 0)
    for number, minute in enumerate((62, 55, 7), start=4):  # out of order, but not late; late
        topology.land("rates", f"{number}.jsonl", [("a", number, minute)])
        topology.run("rates", spark)
    assert late() == (1, 3)


def test_windows_keep_stream_time_after_truncation(tmp_path: Path, spark: SparkSession) -> None:
    """A record is late for a window by the stream time of truncated records too, also of those that the
    same run consumed."""
    topology = Topology(tmp_path)
    topology.orders = replace(topology.orders, log_retention=timedelta(0))
    window = TumblingWindow(timedelta(minutes=10), grace=timedelta(minutes=5))
    hourly = topology.orders.group_by().windowed_by(window).count(name="hourly")

    def late() -> tuple[int, int, int]:
        told = vt_dagster.lateness("hourly", grace=["10m"], warehouse=topology.warehouse)
        (choice,) = told.choices
        return choice.of, choice.late, choice.wrong

    for number, minute in enumerate((0, 60, 5)):  # the third is late
        topology.land("orders", f"{number}.jsonl", [("a", number, minute)])
        topology.run("orders", spark)
        if number == 1:
            run_once(hourly, stores_of(topology.warehouse, spark))
            assert truncate_logs(topology.warehouse, spark, [hourly]) == {"orders": 2}
    run_once(hourly, stores_of(topology.warehouse, spark))
    assert late() == (1, 1, 1)
    for number, minute in enumerate((200, 100), start=3):  # the last one is late
        topology.land("orders", f"{number}.jsonl", [("a", number, minute)])
        topology.run("orders", spark)
    (cut,) = (c for c in commits(topology.store("orders", spark).root) if c.batch == 5)
    run_once(hourly, stores_of(topology.warehouse, spark))
    now = cut.recorded_at
    assert truncate_logs(topology.warehouse, spark, [hourly], now=now) == {"orders": 2}
    assert late() == (1, 1, 1)


class Explained(Kept):
    """``rates``, ``users`` and ``orders`` without a log retention, and results that need no record
    again."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.rates = replace(self.rates, log_retention=timedelta(0))
        self.orders = replace(self.orders, log_retention=timedelta(0))
        users = FilesSource(str(root / "users"), max_bad_share=1.0)
        self.users = replace(self.rates, name="users", source=users)
        grace = timedelta(minutes=5)
        tens, sessions = TumblingWindow(2 * grace, grace=grace), SessionWindow(grace, grace=grace)
        both = ["left.n", "right.n as other"]
        tables: Any = [
            self.rates.left_join(self.users, name="pairs", select=both),
            self.rates.group_by("n").count(name="sums"),
            self.rates.left_join(self.users, foreign_key="k", name="referred", select=both),
            self.orders.group_by("k").count(name="counts"),
            *(
                self.orders.group_by().windowed_by(window).count(name=name)
                for name, window in (("tens", tens), ("sessions", sessions))
            ),
        ]
        self.results = [one.name for one in tables]
        self.nodes = [self.rates, self.users, self.orders, *tables]

    def explained(self) -> dict[tuple[str, int], Explanation]:
        asked: dict[str, Any] = {"warehouse": self.warehouse}
        return {
            (name, offset): vt_dagster.explain(name, offset=(0, offset), **asked)
            for name in self.results
            for offset in vt_dagster.read(name, what="log", **asked).column("offset").to_pylist()
        }


def facts(one: Explanation) -> tuple[set[Any], set[Any]]:
    """The decisions and the places of the inputs."""
    decisions = {(d.rule, d.because) for d in one.decisions}
    return decisions, {(part.asset, part.record and part.record.place) for part in one.made_of}


def without_number(decisions: set[Any]) -> set[Any]:
    """The decisions without the number of a record in its group or window."""
    return {(rule, re.sub(", record number .*", "", because)) for rule, because in decisions}


def test_explanations_after_truncation(tmp_path: Path, spark: SparkSession) -> None:
    """An explanation is the same without the truncated records, or it says less and that they are
    gone."""
    topology = Explained(tmp_path / "cut")
    rounds: list[dict[str, list[tuple[str | None, int | None, float]]]] = [
        {
            "rates": [("a", 1, 0), ("b", 2, 1), ("a", 3, 5), ("a", 9, 3), ("c", 9, 3)],
            "users": [("a", 1, 3), ("b", 4, 2)],
            "orders": [("a", 1, 2), ("b", 1, 3), ("a", 1, 4), ("a", 1, 11)],
        },
        {
            "rates": [("a", 4, 6), ("c", 2, 7), ("b", None, 8)],
            "users": [("b", 5, 7), ("a", 6, 8)],
            "orders": [("a", 1, 7), ("b", 1, 8), ("a", 1, 12)],
        },
        {
            "rates": [("a", 9, 9), ("b", 2, 9)],
            "users": [("c", 7, 9)],
            "orders": [("a", 1, 9), ("a", 1, 13), ("b", 1, 30), ("a", 1, 1)],
        },
        {
            "rates": [("a", 2, 10), ("c", None, 11)],
            "users": [("a", None, 12), ("b", 1, 3)],
            "orders": [("a", 1, 27), ("a", 1, 33), ("b", 1, 32), ("a", 1, 12)],
        },
    ]

    def take(one: Explained, number: int) -> None:
        for name, records in rounds[number].items():
            one.land(name, f"{number}.jsonl", records)
        # The first run of the results consumes two batches.
        one.round(number, spark, () if number else ("rates", "users", "orders"))

    for number in range(3):
        take(topology, number)
    shutil.copytree(topology.root, tmp_path / "whole")
    whole = Explained(tmp_path / "whole")
    assert topology.cut(0, spark)[0] == {"rates": 5, "users": 2, "orders": 4}
    for one in (topology, whole):
        take(one, 3)
    then, now = whole.explained(), topology.explained()
    assert then.keys() == now.keys()
    same, less = set[str](), set[str]()
    for place, one in now.items():
        (decisions, parts), (all_decisions, all_parts) = facts(one), facts(then[place])
        assert decisions <= all_decisions | without_number(all_decisions), (place, one.notes)
        assert parts <= all_parts, (place, one.notes)
        if (decisions, parts) == (all_decisions, all_parts):
            same.add(place[0])
        else:
            assert "are gone: its log was truncated at" in str(one.notes), (place, one.notes)
            less.add(place[0])
    assert less == {*topology.results}
    assert same == less - {"counts"}  # which number a record has in its group is not known


def test_explain_lookup_before_truncation(tmp_path: Path, spark: SparkSession) -> None:
    """The version before the one that matched, which is gone, is not called the match."""
    topology = Topology(tmp_path)
    topology.rates = replace(topology.rates, log_retention=timedelta(0))
    select = ["left.n", "right.n as rate"]
    looked = topology.orders.left_join(topology.rates, name="looked", select=select)
    topology.land("rates", "0.jsonl", [("a", 1, 0), ("a", 2, 5), ("b", 3, 5)])
    topology.land("orders", "0.jsonl", [("a", 1, 6), ("b", 1, 6)])
    for name in ("rates", "orders"):
        topology.run(name, spark)
    run_once(looked, stores_of(topology.warehouse, spark))
    topology.land("rates", "1.jsonl", [("a", 4, 5)])
    topology.run("rates", spark)
    assert truncate_logs(topology.warehouse, spark, [topology.rates, looked]) == {"rates": 4}
    asked: dict[str, Any] = {"warehouse": topology.warehouse}
    replaced, kept = (vt_dagster.explain("looked", offset=(0, n), **asked) for n in range(2))
    assert (replaced.rules, kept.rules) == (("applied",), ("applied", "as_of"))
    assert "a version of rates that is gone may have matched: its log was" in str(replaced.notes)


def test_log_is_held_for_unknown_and_later_consumers(
    two_rounds: Kept, tmp_path: Path, spark: SparkSession
) -> None:
    topology = copy_of(two_rounds, tmp_path / "cut")
    every = topology.nodes
    topology.nodes = every[:2]
    done, told = topology.cut(1, spark)
    assert done == {}
    assert told == [
        f"{log}: its log is held for {name}, of which maintenance was not given the definition"
        for log, names in (("rates", ["fixed"]), ("orders", ["fixed", "near"]))
        for name in names
    ]
    high = topology.rates.filter("n > 1", name="high")
    topology.nodes = [*every, high]
    done, told = topology.cut(1, spark)
    assert "rates: its log is held for high, which has never run" in told
    assert set(done) == {"orders"}
    topology.nodes = every
    assert set(topology.cut(1, spark)[0]) == {"rates"}
    cut = topology.commit("rates").truncation
    (first,) = cut.next_offset.values()
    told_then = {"what": "versions", "as_known_at": moment(cut.recorded_at)}
    kept = vt_dagster.read("rates", warehouse=topology.warehouse, **told_then).to_pylist()
    old = next(row["offset"] for row in kept if row["offset"] < first)
    told_of = vt_dagster.explain("rates", offset=(0, old), warehouse=topology.warehouse)
    assert "it is no longer known whether its key had" in str(told_of.decisions[0])
    # The rows as of the truncation do not count.
    rest = vt_dagster.read("rates", warehouse=topology.warehouse, what="log")
    cost = vt_dagster.lateness("rates", grace=["10m"], warehouse=topology.warehouse)
    assert (cost.choices[0].of, cost.choices[0].wrong) == (rest.num_rows, 0)
    assert "records of rates that were removed do not count" in cost.notes[0]
    with pytest.raises(StorageError, match="high: expected the log of rates from 0:0 on") as refused:
        run_once(high, stores_of(topology.warehouse, spark))
    assert f"begins at 0:{first}" in str(refused.value)
    with pytest.raises(StorageError, match="fixed: expected the log of"):
        restate(topology.warehouse, topology.fixed, "2020-01-01T00:00:00", spark, every)
    with pytest.raises(StorageError, match="fixed: expected the log of"):
        what_if(topology.warehouse, topology.fixed, spark)
    explained = vt_dagster.explain("orders", offset="0:0", warehouse=topology.warehouse)
    assert explained.record is None
    assert "that offset is gone from its log: the log was truncated" in str(explained.notes)
    store = AssetStore(topology.warehouse, topology.orders, spark)
    with pytest.raises(StorageError, match="expected a stream with its whole log to compare"):
        compare(store, store)
    # A join of a stream with itself may re-read records of its current window, recorded long ago. A
    # corrected join may re-read the table's records that bound later ones.
    batches = [topology.commit(name).truncation.batch for name in ("rates", "orders")]
    done, told = topology.cut(100, spark)
    assert done == {}
    assert [topology.commit(name).truncation.batch for name in ("rates", "orders")] == batches
    assert {"rates: its log is held for fixed", "orders: its log is held for near"} <= set(told)
    # A replay of the source has all records again.
    again = replay(topology.warehouse, topology.rates, "again", spark)
    assert again.head().commit.truncation is None
    found = compare(AssetStore(topology.warehouse, topology.rates, spark), again)
    assert (found.missing, found.extra) == (0, 0)


def test_explain_after_truncation_and_rename(rates_only: Kept, spark: SparkSession) -> None:
    """The rows as of the truncation have the earlier names."""
    assert rates_only.cut(1, spark)[0]
    renamed = {"k": "currency", "n": "rate"}
    schema = StructType([StructField(renamed.get(f.name, f.name), f.dataType) for f in SCHEMA])
    about: dict[str, Any] = {"schema": schema, "key": "currency", "tombstone": "rate is null"}
    rates = replace(rates_only.rates, **about, renamed=renamed)
    rates_only.land("rates", "9.jsonl", [("a", 7, 14)])
    run_once(rates, stores_of(rates_only.warehouse, spark))
    asked: dict[str, Any] = {"warehouse": rates_only.warehouse}
    cut = rates_only.commit("rates").truncation
    assert cut is not None
    base = f"{rates_only.warehouse}/rates/bases/{cut.base}"
    old = pq.read_table(base, columns=["k", "n", "offset"]).to_pylist()
    new = vt_dagster.read("rates", what="log", **asked).to_pylist()
    told = {row["offset"]: (row["currency"], row["rate"]) for row in new}
    told |= {row["offset"]: (row["k"], row["n"]) for row in old}
    assert len(told) == len(old) + len(new)
    for offset, (currency, rate) in told.items():
        found = vt_dagster.explain("rates", offset=(0, offset), **asked).record
        assert found is not None
        assert (found.values["currency"], found.values["rate"]) == (currency, rate)


def test_longer_retention_after_truncation(rates_only: Kept, spark: SparkSession) -> None:
    """Versions that had expired at the truncation are lost; the others are rebuilt from the base."""
    assert rates_only.cut(1, spark)[0]
    store = AssetStore(rates_only.warehouse, rates_only.rates, spark)
    then = read_all(rates_only)
    # A record that a version still has is explained; for others, a note says that they may be removed.
    base = pq.read_table(
        f"{store.root}/bases/{rates_only.commit('rates').truncation.base}", columns=["offset"]
    )
    there = {*base.column("offset").to_pylist()}
    asked: dict[str, Any] = {"warehouse": rates_only.warehouse}
    found = vt_dagster.explain("rates", offset=(0, min(there)), **asked)
    assert found.record is not None
    assert "valid from" in str(found.notes)
    found = vt_dagster.explain("rates", key="unheard of", **asked)
    assert (found.record, "its log was truncated at" in str(found.notes)) == (None, True)
    fs, view = delta.filesystem(store.view_path)
    fs.rm(view, recursive=True)
    assert read_all(rates_only) == then
    store.rebuild_view()
    assert read_all(rates_only) == then
    longer = replace(rates_only.rates, history_retention=timedelta(minutes=60))
    with pytest.raises(StorageError, match="expected a history_retention of at most "):
        AssetStore(rates_only.warehouse, longer, spark).catch_up()
    cut = rates_only.commit("rates").truncation
    grown = (rates_only.commit("rates").stream_time[0] - cut.stream_time[0]) // MINUTE
    assert grown > 0
    longer = replace(rates_only.rates, history_retention=timedelta(minutes=10 + grown))
    now = AssetStore(rates_only.warehouse, longer, spark)
    now.catch_up()
    # A read by the last commit uses the retention in that commit.
    assert now.read("versions").count() >= len(then[-1])


def test_erase_after_truncation(rates_only: Kept, spark: SparkSession) -> None:
    """The erase removes the key from the base too."""
    assert rates_only.cut(1, spark)[0]
    erase(rates_only.warehouse, rates_only.rates, spark, reason="asked for", key=["a"])
    files = [*Path(rates_only.warehouse, "rates").rglob("*.parquet")]
    data = [f for f in files if "_delta_log" not in f.parts and "attempts" not in f.parts]
    assert {f.parts[-3] for f in data} >= {"log"}
    assert any("bases" in f.parts for f in data)
    assert not any("a" in pq.read_table(f, columns=["k"]).column("k").to_pylist() for f in data)
    assert not any(
        f.offending for f in audit(AssetStore(rates_only.warehouse, rates_only.rates, spark))
    )
    known = {"warehouse": rates_only.warehouse, "as_known_at": moment(FIRST), "what": "versions"}
    assert "a" not in vt_dagster.read("rates", **known).column("k").to_pylist()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda t: t.orders.left_join(t.rates, name="x", grace_period=timedelta(minutes=9)),
            "re-reads records of 'orders' for 9 minutes (grace period, window or corrected_for), "
            "longer than its log_retention of 8 minutes",
        ),
        (
            lambda t: t.orders.join(t.rates, name="x", corrected_for=timedelta(minutes=9)),
            "re-reads records of 'orders' for 9 minutes",
        ),
        (
            lambda t: t.orders.join(
                t.orders, name="x", within=timedelta(minutes=3), grace=timedelta(minutes=4)
            ),
            "re-reads records of 'orders' for 10 minutes",
        ),
        (
            lambda t: t.orders.join(t.rates, name="x", as_known="when_recorded"),
            "a join by what was known needs an input without log_retention, got 'rates'",
        ),
        (
            lambda t: FeatureView(t.rates, key="k"),
            "a join by what was known needs an input without log_retention, got 'rates'",
        ),
        (
            lambda t: TrainingSet("x", t.orders, (FeatureView(t.rates, key="k", as_known="now"),)),
            "the spine of a training set needs an input without log_retention, got 'orders'",
        ),
        (
            lambda t: replace(t.orders, log_retention=timedelta(-1)),
            "log_retention must be between 0 and",
        ),
    ],
)
def test_too_short_log_retention_is_refused(make: Any, message: str) -> None:
    with pytest.raises(TopologyError) as refused:
        make(Kept(Path("nowhere")))
    assert message in str(refused.value)


def test_truncation_keeps_file_system_times(tmp_path: Path, spark: SparkSession) -> None:
    """The commit of a truncation has no rows, so it has no system times of the last run either."""
    topology, times = Topology(tmp_path), [FIRST + n * ROUND for n in range(3)]
    rates = VersionedTable(
        "rates",
        key="k",
        schema=SCHEMA,
        tombstone="n is null",
        history_retention=timedelta(minutes=10),
        log_retention=RETENTION,
        source=FilesSource(str(tmp_path / "rates"), recorded_at="file_time"),
    )
    for number, known in enumerate(times):
        topology.land("rates", f"{number}.jsonl", [("a", number, number)])
        os.utime(tmp_path / "rates" / f"{number}.jsonl", ns=(0, known * 1000))
    for only in (["0.jsonl"], ["1.jsonl", "2.jsonl"]):
        run_once(rates, stores_of(topology.warehouse, spark), only=only)
    now = times[2] + MINUTE
    assert truncate_logs(topology.warehouse, spark, [rates], now=now) == {"rates": 1}
    for known, log in ((times[1], [1]), (times[2], [1, 2]), (now, [1, 2])):
        about: Any = {"warehouse": topology.warehouse, "as_known_at": in_utc(known)}
        assert vt_dagster.read("rates", what="log", **about).column("n").to_pylist() == log
        assert vt_dagster.read("rates", **about).column("n").to_pylist() == log[-1:]


def test_longer_window_after_truncation_is_refused() -> None:
    """A window longer than at the truncation would miss truncated records, so the run is refused."""
    kept = Kept(Path("nowhere"), timedelta(minutes=30))
    near = kept.orders.join(kept.orders, name="near", within=timedelta(minutes=15))
    cut = Truncation(
        batch=1, recorded_at=FIRST, stream_time={0: 60 * MINUTE}, log_retention=20 * MINUTE
    )
    shape = Shape(kind="stream", key=["k"])
    log = Commit(asset="orders", batch=9, attempt="", shape=shape, truncation=cut)
    before = log.model_copy(update={"stream_time": {0: 70 * MINUTE}, "truncation": None})
    with pytest.raises(StorageError, match="reads 30 minutes back from 1970-01-01T01:10:00Z"):
        require_reach(near, kept.orders, before, log)
    require_reach(near, kept.orders, before.model_copy(update={"stream_time": {0: 90 * MINUTE}}), log)
    longer = log.model_copy(
        update={"truncation": cut.model_copy(update={"log_retention": 30 * MINUTE})}
    )
    require_reach(near, kept.orders, before, longer)


def test_lagging_export_holds_log_back(rates_only: Kept, spark: SparkSession, tmp_path: Path) -> None:
    """The export holds the log back if maintenance is given it. Otherwise its next run fails, and the
    error names the missing offsets. So does a run that would write all rows again: the rows that
    were truncated would be missing. A first export has what the log has."""
    to = str(tmp_path / "export")
    exporting = ExportRun(export_of(rates_only.rates, "log", to), rates_only.warehouse, spark)
    assert exporting.run() is not None
    land_round(rates_only, 2, random.Random(3))
    rates_only.round(2, spark)
    _, told = rates_only.cut(100, spark, exports=[to])
    assert told[0] == f"rates: its log is held for {to}"
    assert rates_only.commit("rates").truncation.batch == 2
    rates_only.cut(100, spark)
    with pytest.raises(StorageError, match="rates_export: expected the log of rates from 0:"):
        exporting.run()
    exported = delta.require_table(to).to_pyarrow_table()
    assert exported.num_rows > 0
    other = export_of(rates_only.rates, "log", to, with_columns=["offset"])
    with pytest.raises(StorageError, match="rates_export: expected the log of rates from 0:0 on"):
        ExportRun(other, rates_only.warehouse, spark).run()
    anew = export_of(rates_only.rates, "log", f"{to}_anew")
    assert ExportRun(anew, rates_only.warehouse, spark).run() is not None
    assert delta.require_table(to).to_pyarrow_table().equals(exported)
