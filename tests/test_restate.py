"""A restatement recomputes results in place from a time on. It equals a full replay, also if it is
interrupted at any step."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from tests.storage.topology import EPOCH, Topology
from vt_dagster import Stream
from vt_dagster.cli import app
from vt_dagster.errors import DefinitionsError, SourceError, StorageError, TopologyError
from vt_dagster.provenance.explain import explain
from vt_dagster.runs.erase import erase
from vt_dagster.runs.replay import replay, swap
from vt_dagster.runs.restate import restate
from vt_dagster.runs.run import run_once
from vt_dagster.runs.truncate_log import truncate_logs
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.sources.frame_sources import Delivery, FunctionSource, Given
from vt_dagster.spark.settings import small_run
from vt_dagster.storage.asset_store import AssetStore, stores_of

pytestmark = pytest.mark.usefixtures("few_rows")

LATE = "2020-01-01T00:04:00Z"
"""The timestamp of the late record of the table."""


class World(Topology):
    """Joins of orders with rates: ``joined`` without a grace period, ``priced`` with one of two
    minutes. Downstream of ``joined`` are a stateless stream (``moved``) and counts (``counted``)."""

    def __init__(self, root: Path, spark: SparkSession) -> None:
        super().__init__(root)
        self.spark = spark
        self.joined = self.orders.join(
            self.rates, name="joined", select=["left.*", "right.n as rate", "left.n as number"]
        )
        self.moved = self.joined.select_key("number", name="moved")
        self.counted = self.joined.group_by().count(name="counted")

    @property
    def nodes(self) -> list[Stream]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return [self.rates, self.orders, self.joined, self.priced, self.moved, self.counted]

    def run_each(self, *nodes: Stream) -> None:
        for node in nodes or self.nodes:
            run_once(node, stores_of(self.warehouse, self.spark))

    def rows(self, name: str, order: bool = True) -> list[Any]:
        """The rows of the log without ``recorded_at``. With ``order=False`` also without the offset."""
        rows = AssetStore.open(self.warehouse, name, self.spark).read("log").drop("recorded_at")
        rows = rows if order else rows.drop("offset")
        return sorted(rows.collect(), key=repr)

    def restate(self, name: str, start: str = LATE, tell: Any = None) -> list[str]:
        node = getattr(self, name)
        return restate(self.warehouse, node, start, self.spark, self.nodes, tell)

    def replayed(self, name: str, order: bool = True) -> list[Any]:
        replay(self.warehouse, getattr(self, name), f"{name}_whole", self.spark)
        return self.rows(f"{name}_whole", order)


@pytest.fixture(scope="module")
def after_three_runs(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> World:
    """The state after three runs. In the third, rates of minute 4 come late: orders of minutes 5 and 6
    are already joined."""
    world = World(tmp_path_factory.mktemp("after_three_runs"), spark)
    world.land("rates", "1.jsonl", [("a", 1, 0), ("b", 1, 0)])
    world.land("orders", "1.jsonl", [("a", 1, 1), ("b", 2, 3.5), ("a", 3, 3)])
    world.run_each()
    world.land("rates", "2.jsonl", [("b", 2, 4.5)])
    world.land("orders", "2.jsonl", [("a", 4, 5), ("b", 5, 6), ("c", 6, 5), ("a", 7, 3)])
    world.run_each()
    world.land("rates", "3.jsonl", [("a", 9, 4), ("c", 8, 4)])
    world.land("orders", "3.jsonl", [("a", 8, 7)])
    world.run_each()
    return world


@pytest.fixture
def world(after_three_runs: World, tmp_path: Path, spark: SparkSession) -> World:
    return World(shutil.copytree(after_three_runs.root, tmp_path / "copy"), spark)


Expected = tuple[World, list[str], dict[str, list[Any]]]


@pytest.fixture(scope="module")
def expected(
    after_three_runs: World, tmp_path_factory: pytest.TempPathFactory, spark: SparkSession
) -> Expected:
    """The state after a restatement of the join, the lines it printed, and the logs of full replays."""
    world = World(
        shutil.copytree(after_three_runs.root, tmp_path_factory.mktemp("restated") / "copy"), spark
    )
    lines: list[str] = []
    with small_run(spark):
        assert world.restate("joined", tell=lines.append) == ["joined", "moved", "counted"]
        assert not list(Path(world.warehouse).glob("*restate*"))
        replayed = {name: world.replayed(name) for name in ("joined", "moved", "counted")}
    return world, lines, replayed


def rates_of(world: World, name: str) -> dict[int, int]:
    return {row["n"]: row["rate"] for row in world.rows(name)}


def test_restate_of_join_includes_late_records(after_three_runs: World, expected: Expected) -> None:
    before = rates_of(after_three_runs, "joined")
    assert before == {1: 1, 2: 1, 3: 1, 4: 1, 5: 2, 7: 1, 8: 9}  # order 6 found no rate
    world, lines, replayed = expected
    assert rates_of(world, "joined") == {**before, 4: 9, 6: 8}
    assert "joined: keeps 3 of 7 results" in lines
    assert "moved: keeps 3 of 7 results" in lines
    assert "counted: replayed: it has a state, and only that of its last run is kept" in lines
    assert {name: world.rows(name) for name in replayed} == replayed
    # the assets can run after the restatement
    world.land("orders", "4.jsonl", [("c", 9, 8)])
    world.run_each(world.orders, world.joined, world.moved, world.counted)
    assert rates_of(world, "moved")[9] == 8
    assert [r["count"] for r in world.rows("counted") if r["k"] == "c"] == [1, 2]


def test_replay_and_restate_take_files_of_live_table(tmp_path: Path, spark: SparkSession) -> None:
    """Files that the live table has not consumed are left to its next run."""
    world = World(tmp_path, spark)
    for file, n in (("2.jsonl", 1), ("3.jsonl", 2)):
        world.land("rates", file, [("a", n, n), ("b", n, n)])
        world.run_each(world.rates)
    log = world.rows("rates")
    for file in ("1.jsonl", "4.jsonl"):
        world.land("rates", file, [("c", 1, 5)])
    assert world.replayed("rates") == log
    assert restate(world.warehouse, world.rates, LATE, spark) == ["rates"]
    assert world.rows("rates") == log
    commit = world.run("rates", spark).commit
    assert commit is not None
    assert commit.totals["in"] == 6


def test_replay_of_other_files_takes_all(tmp_path: Path, spark: SparkSession) -> None:
    """A source of another directory has none of the live table's files."""
    world = World(tmp_path, spark)
    world.land("rates", "1.jsonl", [("a", 1, 1)])
    world.run_each(world.rates)
    world.land("moved", "new.jsonl", [("a", 1, 1), ("b", 1, 1)])
    world.rates = replace(world.rates, source=FilesSource(str(tmp_path / "moved")))
    assert len(world.replayed("rates")) == 2


def test_file_with_fewer_records_is_replayed(tmp_path: Path, spark: SparkSession) -> None:
    """A restatement takes fewer records for a loss, and says how to accept them."""
    world = World(tmp_path, spark)
    world.land("rates", "1.jsonl", [("a", 1, 0), ("wrong", 1, 0)])
    world.run_each(world.rates)
    world.land("rates", "1.jsonl", [("a", 2, 0)])
    said = r"expected the 2 records .* got 1.* replay rates under another name, compare the two"
    with pytest.raises(SourceError, match=said):
        restate(world.warehouse, world.rates, LATE, spark)
    assert [row["n"] for row in world.replayed("rates")] == [2]
    swap(world.warehouse, "rates", "rates_whole")
    world.land("rates", "2.jsonl", [("b", 1, 1)])
    world.run_each(world.rates)
    assert [row["k"] for row in world.rows("rates")] == ["a", "b"]


def test_restate_of_dataframes_is_refused_at_once(tmp_path: Path, spark: SparkSession) -> None:
    """They are not stored. Nothing is left that would have to be completed first."""
    world = World(tmp_path, spark)
    source = FunctionSource(function=lambda: None)
    node = replace(world.rates, source=source)
    frame = pa.table({"k": ["a"], "n": [1], "timestamp": [EPOCH]})
    given = Given(node, source, [Delivery("run", "", lambda: frame)])
    run_once(node, stores_of(world.warehouse, spark), given)
    with pytest.raises(SourceError, match="rates: expected records that can be read again, got what"):
        restate(world.warehouse, node, LATE, spark)
    assert not list(Path(world.warehouse).glob("*.restate"))


def test_dry_run_lists_recomputed_assets(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)("world_module")
    vars(module).update(joined=world.joined, moved=world.moved, counted=world.counted)
    monkeypatch.setitem(sys.modules, "world_module", module)
    files = {path: path.stat().st_mtime_ns for path in Path(world.warehouse).rglob("*")}
    about = ["--from", LATE, "--module", "world_module", "--warehouse", world.warehouse]
    done = CliRunner().invoke(app, ["restate", "joined", *about, "--dry-run"])
    assert done.exit_code == 0, done.output
    assert "joined: keeps 3 of 7 results" in done.output
    assert done.output.endswith("would recompute: joined, moved, counted\n")
    assert {path: path.stat().st_mtime_ns for path in Path(world.warehouse).rglob("*")} == files


def test_restate_with_grace_period(world: World) -> None:
    lines: list[str] = []
    assert world.restate("priced", tell=lines.append) == ["priced"]
    assert "priced: keeps 1 of 6 results" in lines
    assert world.rows("priced", order=False) == world.replayed("priced", order=False)
    world.land("orders", "4.jsonl", [("a", 9, 9)])
    world.run_each(world.orders, world.priced)
    assert rates_of(world, "priced") == {1: 1, 2: 1, 3: 1, 4: 9, 5: 2, 6: 8, 7: 1, 8: 9}


class Killed(BaseException):
    pass


def test_killed_restate_is_completed(world: World, expected: Expected) -> None:
    """The restatement is killed after each commit, before each exchange of tables, and between an
    exchange's two renames. Until it is completed, nothing else may rewrite its tables."""
    for step in (
        *("joined: keeps", "counted: replayed", "joined: committed", "moved: committed"),
        *("counted: committed", "joined: replaces", "moved: replaces", "counted: replaces"),
    ):

        def tell(line: str, step: str = step) -> None:
            if line.startswith(step):
                raise Killed

        with pytest.raises(Killed):
            world.restate("joined", tell=tell)
        if step == "moved: replaces":
            beside = Path(world.warehouse) / "joined.restate"
            (beside / "old").mkdir(exist_ok=True)
            (Path(world.warehouse) / "moved").rename(beside / "old" / "moved")
            with pytest.raises(StorageError, match=r"was interrupted, of .*'moved'.* the same time"):
                world.restate("joined", "2020-01-01T00:05:00Z")
        if step == "joined: committed":
            lines: list[str] = []
            short = replace(world.moved, log_retention=timedelta(0))
            assert truncate_logs(world.warehouse, world.spark, [short], tell=lines.append) == {}
            assert "moved: expected no restatement in progress" in lines[0]
            about: dict[str, Any] = {"reason": "asked to", "key": [1], "among": world.nodes}
            with pytest.raises(StorageError, match="joined: expected no restatement in progress"):
                world.restate("rates")
            with pytest.raises(StorageError, match="moved: expected no restatement in progress"):
                erase(world.warehouse, world.moved, world.spark, **about)
    assert world.restate("joined") == ["joined", "moved", "counted"]
    *_, replayed = expected
    assert {name: world.rows(name) for name in replayed} == replayed
    assert not list(Path(world.warehouse).glob("*restate*"))


def test_restate_of_source_rereads_records(world: World) -> None:
    file = world.root / "orders" / "2.jsonl"
    aside = file.rename(world.root / "aside.jsonl")
    with pytest.raises(SourceError, match=r"got 1 that is no longer in .*2\.jsonl"):
        world.restate("orders")
    assert not list(Path(world.warehouse).glob("*restate*"))
    aside.rename(file)
    # records of an erased key may be missing from the source
    world.land("orders", "4.jsonl", [("e", 9, 7), ("a", 10, 7)])
    world.run_each(world.orders)
    erase(world.warehouse, world.orders, world.spark, key=["e"], reason="asked to", among=world.nodes)
    world.land("orders", "4.jsonl", [("a", 10, 7)])
    assert world.restate("orders") == ["orders", "joined", "priced", "moved", "counted"]
    assert {row["k"] for row in world.rows("orders")} == {"a", "b", "c"}
    assert world.run("orders", world.spark).commit is None
    assert rates_of(world, "joined")[4] == 9
    assert rates_of(world, "moved")[6] == 8


def test_restate_after_table_replay_starts_early_enough(world: World) -> None:
    """A replayed table has other Delta versions than the log that the join has read. So a restatement
    must start early enough to join all its records again; the message says from when."""
    some = world.rates.filter("n > 0", name="some")
    met = world.orders.join(some, name="met", select=["left.*", "right.n as rate"])
    world.run_each(some, met)
    world.land("rates", "4.jsonl", [("b", 7, 4.75)])
    world.land("orders", "4.jsonl", [("b", 9, 9)])
    world.run_each(world.rates, world.orders, some, met)
    with pytest.raises(StorageError, match=r"got 1 of them, from 2020-01-01T00:04:45Z on"):
        restate(world.warehouse, met, "2020-01-01T00:08:00Z", world.spark)
    replay(world.warehouse, some, "some_new", world.spark)
    swap(world.warehouse, "some", "some_new")
    with pytest.raises(StorageError, match=r"some got no records .* got \d+ of them") as refused:
        restate(world.warehouse, met, "2020-01-01T00:08:00Z", world.spark)
    found = explain("met", offset="0:4", warehouse=world.warehouse)
    assert "all records of some were recorded later, for example by a replay" in str(found)
    (start,) = re.findall(r"--from (\S+)", str(refused.value))
    restate(world.warehouse, met, start, world.spark)
    assert {row["n"]: row["rate"] for row in world.rows("met")}[5] == 7


def test_refused_restates(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match=r"got 2 of them, from 2020-01-01T00:04:00Z on: .* --from"):
        world.restate("joined", "2020-01-01T00:07:00Z")
    with pytest.raises(StorageError, match="got none of counted, which consumes joined"):
        restate(world.warehouse, world.joined, LATE, world.spark, [world.moved])
    assert world.restate("joined", "2020-01-01T01:00:00Z") == []
    lines: list[str] = []
    about: Any = {"tell": lines.append, "dry_run": True}
    restate(world.warehouse, world.rates, LATE, world.spark, [world.priced], **about)
    assert [line for line in lines if line.startswith("! joined looks up rates, but its definition")]
    by_known: Any = {"as_known": "when_recorded", "select": ["left.*", "right.n as rate"]}
    known = world.orders.left_join(world.rates, name="known", **by_known)
    world.run_each(known)
    with pytest.raises(StorageError, match=r"known: expected no restated input, .* got rates"):
        restate(world.warehouse, world.rates, LATE, world.spark, [known])
    never = world.orders.left_join(world.rates, name="never", select=["left.*", "right.n as rate"])
    with pytest.raises(StorageError, match="never: nothing was ever committed"):
        restate(world.warehouse, never, LATE, world.spark)
    short = replace(world.rates, history_retention=timedelta(seconds=60))
    forgets = world.orders.join(
        short, name="joined", select=["left.*", "right.n as rate", "left.n as number"]
    )
    with pytest.raises(
        StorageError, match="the history of rates covers all records to join again, got records of"
    ):
        restate(world.warehouse, forgets, LATE, world.spark, [])
    module = type(sys)("world_module")
    vars(module).update(joined=world.joined, moved=world.moved, counted=world.counted)
    monkeypatch.setitem(sys.modules, "world_module", module)
    about = ["--from", LATE, "--module", "world_module", "--warehouse", world.warehouse]
    done = CliRunner().invoke(app, ["restate", "nobody", *about])
    assert isinstance(done.exception, TopologyError)
    nowhere = CliRunner().invoke(app, ["restate", "joined", "--from", LATE, "--module", "no.where"])
    assert isinstance(nowhere.exception, DefinitionsError)
    assert "expected a module 'no.where', found none" in str(nowhere.exception)
    assert not list(Path(world.warehouse).glob("*restate*"))
