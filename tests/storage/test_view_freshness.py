"""A view is a checkpoint of its log: it may be behind, but readers see all committed rows."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from tests.storage.topology import EPOCH, SCHEMA, Topology
from vt_dagster.core.log_columns import arrow_schema, log_schema
from vt_dagster.errors import TopologyError
from vt_dagster.runs.audit import audit
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.storage import delta, parquet, view
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.commit_log import Commit, Shape
from vt_dagster.topology.model import Stream, Table

pytestmark = pytest.mark.usefixtures("few_rows")


@pytest.fixture
def large_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treats a small table as one of many millions of rows, whose view is not written by each run."""
    monkeypatch.setattr(view, "EACH_RUN", 0)


def redeclared(topology: Topology, **more: Any) -> Topology:
    """The topology with ``rates`` declared otherwise."""
    topology.rates = replace(topology.rates, **more)
    topology.priced = topology.orders.left_join(
        topology.rates, name="priced", select=["left.*", "right.n as rate"]
    )
    return topology


def view_batch(store: AssetStore) -> int:
    """The batch in the document of the view."""
    base = store._view.base()
    assert base is not None
    return base.checkpoint.batch


def rows_of(store: AssetStore, what: str, as_of: str | None = None) -> list[Any]:
    rows = store.read(what, as_of, partial=True)
    return sorted(rows.select(*sorted(rows.columns)).collect(), key=repr)


def all_reads(store: AssetStore) -> list[list[Any]]:
    """All rows that reads of a versioned table return, also as of some times."""
    times = [f"2020-01-01T00:{minute:02}:00Z" for minute in (0, 3, 7, 12)]
    return [rows_of(store, "versions"), *(rows_of(store, "current", time) for time in (None, *times))]


@pytest.fixture(scope="module")
def after_first_run(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Path:
    """One run of thirty keys; a second file, with two of these keys, has landed."""
    topology = Topology(tmp_path_factory.mktemp("after_first_run"))
    topology.land("rates", "0.jsonl", [(f"k{i}", i, 1) for i in range(30)])
    topology.run("rates", spark)
    topology.land("rates", "1.jsonl", [("k3", 100, 5), ("k4", None, 6), ("k3", 50, 3), (None, 1, 2)])
    return topology.root


@pytest.fixture
def topology_after_first_run(after_first_run: Path, tmp_path: Path) -> Topology:
    return Topology(Path(shutil.copytree(after_first_run, tmp_path / "copy")))


def run_second_file(topology: Topology, spark: SparkSession) -> AssetStore:
    """Runs the second file, and returns the store."""
    topology.run("rates", spark)
    return topology.store("rates", spark)


@pytest.fixture(scope="module")
def after_second_run(
    after_first_run: Path, tmp_path_factory: pytest.TempPathFactory, spark: SparkSession
) -> Path:
    """After the second run of a table that counts as large: its view is that of the first run."""
    root = shutil.copytree(after_first_run, tmp_path_factory.mktemp("after_second_run") / "copy")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(view, "EACH_RUN", 0)
        run_second_file(Topology(root), spark)
    return root


@pytest.fixture
def lagging(after_second_run: Path, tmp_path: Path, large_table: None) -> Topology:
    return Topology(Path(shutil.copytree(after_second_run, tmp_path / "copy")))


def test_small_view_is_written_by_each_run(
    topology_after_first_run: Topology, spark: SparkSession
) -> None:
    assert view_batch(run_second_file(topology_after_first_run, spark)) == 2


def test_readers_fold_the_tail_of_the_log(lagging: Topology, spark: SparkSession) -> None:
    topology, store = lagging, lagging.store("rates", spark)
    assert view_batch(store) == 1
    found = all_reads(store)
    # the table's next run, a join, checks and the quarantine see the same rows
    topology.land("rates", "2.jsonl", [("k4", 7, 5.5), ("k5", 8, 8)])
    topology.run("rates", spark)
    topology.land("orders", "0.jsonl", [("k3", 1, 4), ("k4", 2, 6), ("k3", 3, 5), ("k5", 4, 20)])
    topology.run("orders", spark)
    receipt = topology.run("priced", spark)
    assert view_batch(store) == 1
    assert receipt.commit is not None
    assert receipt.commit.reads == {"orders/log": 0, "rates/view": 0, "rates/log": 2}
    rates = {row.n: row.rate for row in topology.store("priced", spark).read("log").collect()}
    assert rates == {1: 50, 2: None, 3: 100}, "the fourth waits"
    latest = {row.offset: row.is_latest for row in store.read("log").collect()}
    assert [latest[o] for o in range(30, 35)] == [True, True, False, False, True]
    quarantine = store.quarantine()
    assert quarantine is not None
    assert quarantine.count() == 1
    assert [one.name for one in audit(store) if not one.passed] == []
    # these rows equal a rebuild from the whole log
    now = all_reads(store)
    assert now != found
    store.rebuild_view()
    assert (view_batch(store), all_reads(store)) == (3, now)


def test_reads_write_nothing(lagging: Topology, spark: SparkSession) -> None:
    store = lagging.store("rates", spark)
    before = sorted(lagging.root.rglob("*"))
    all_reads(store)
    store.quarantine()
    audit(store)
    assert sorted(lagging.root.rglob("*")) == before


def test_other_engines_read_the_checkpoint(lagging: Topology, spark: SparkSession) -> None:
    """Other engines read the view of an earlier batch; its document names that batch."""
    store = lagging.store("rates", spark)
    by_polars = pl.read_delta(store.view_path).filter(pl.col("valid_to").is_null())
    assert dict(zip(by_polars["k"], by_polars["n"], strict=True)) == {f"k{i}": i for i in range(30)}
    by_spark = spark.read.format("delta").load(store.view_path)
    assert by_spark.count() == 30
    assert spark.read.format("delta").load(store.log_path).count() == 33
    assert pl.read_delta(store.log_path).height == 33
    store.catch_up(now=True)
    assert pl.read_delta(store.view_path).filter(pl.col("n") == 100).height == 1
    assert spark.read.format("delta").load(store.view_path).where("n = 100").count() == 1


def is_due(topology: Topology, spark: SparkSession, rows: int = 0) -> bool:
    """Whether a run that adds this number of rows writes the view, which is a batch behind."""
    store = topology.store("rates", spark)
    head = store.head()
    assert head is not None
    ends = {home: end + rows for home, end in head.commit.next_offset.items()}
    return store._view.is_due(store._view.base(), head.commit.model_copy(update={"next_offset": ends}))


@pytest.mark.parametrize(
    ("freshness", "due"),
    [("every_run", True), (timedelta(0), True), (timedelta(hours=1), False), ("on_growth", False)],
)
def test_freshness_option_decides_when_view_is_written(
    lagging: Topology, spark: SparkSession, freshness: Any, due: bool
) -> None:
    assert is_due(redeclared(lagging, freshness=freshness), spark) == due


def test_view_is_due_when_log_grows_by_fifth(lagging: Topology, spark: SparkSession) -> None:
    assert not is_due(lagging, spark, 2)
    assert is_due(lagging, spark, 3), "six of 30 rows are a fifth"


def test_view_is_due_after_many_batches(
    lagging: Topology, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "BATCHES", 1)
    assert is_due(lagging, spark)


@pytest.mark.endurance  # test_view_segments and test_lookup have random runs, the above such views
def test_view_plus_log_tail_equals_rebuild(
    tmp_path: Path, spark: SparkSession, large_table: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view and the log rows after it give what a rebuild gives. Records of several batches are out of
    order in any segment, replaced, deleted or expired. Reads need all or a part of the history."""
    monkeypatch.setattr(view, "SEGMENT_ROWS", 6)
    monkeypatch.setattr(view, "SHARE", 10)
    dice = random.Random(20)
    topology = Topology(tmp_path)
    now = 0.0
    behind = set[int]()
    for run in range(6):
        records = list[tuple[str | None, int | None, float]]()
        for _ in range(30 if run == 0 else dice.choice([1, 3, 5])):
            now += dice.choice([0, 0.5, 0.5, 1])
            moment = max(0.0, now - dice.choice([0, 0, 0, 3, 8, 12]))
            records.append((dice.choice("abcd"), dice.choice([None, 1, 2, 3]), moment))
        topology.land("rates", f"{run}.jsonl", records)
        topology.run("rates", spark)
        store = topology.store("rates", spark)
        head, at = store.head(), store.snapshot()
        assert head is not None
        behind.add(head.commit.batch - view_batch(store))
        if run % 3 != 2:
            continue
        copy = AssetStore(str(tmp_path / f"anew{run}"), topology.rates, spark)
        first = head.commit.model_copy(update={"rejected": False, "batch": 1, "previous": ""})
        log = store.log({}, head)
        copy.commit(log, first, log.count())
        copy.catch_up()
        # Also a look-up of some keys, one of them twice, and one that does not exist.
        few = spark.createDataFrame([("a",), ("a",), ("c",), ("z",)], "k string")
        assert {row.k for row in store.current_at(at).collect()} > {"a", "c"}
        of_keys, all_rows = store.current_at(at, few), copy.current_at(copy.snapshot())
        ours, theirs = (
            sorted(rows.select(*SORTED).collect(), key=repr)
            for rows in (of_keys, all_rows.where("k in ('a', 'c')"))
        )
        assert ours == theirs
        for many in (10**9, -1) if run > 2 else (-1,):
            monkeypatch.setattr(view, "MANY_ROWS", many)
            assert rows_of(store, "versions") == rows_of(copy, "versions")
            assert rows_of(store, "current") == rows_of(copy, "current")
            for back in (0.1, 6):
                since = int((EPOCH + timedelta(minutes=now - back)).timestamp() * 1e6)
                needed = f"valid_to is null or unix_micros(valid_to) > {since}"
                ours, theirs = (
                    sorted(s.view_at(a, since).where(needed).select(*SORTED).collect(), key=repr)
                    for s, a in ((store, at), (copy, copy.snapshot()))
                )
                assert ours == theirs
        if run == 2:
            store.catch_up(now=True)
    assert max(behind) >= 3


SORTED = ["k", "n", "valid_from", "valid_to", "is_tombstone", "offset"]


def test_stream_refuses_freshness() -> None:
    source = FilesSource("landing")
    with pytest.raises(TopologyError, match="freshness applies to a table's view"):
        Stream("orders", key="k", schema=SCHEMA, source=source, freshness="every_run")
    for wrong in ("daily", timedelta(-1), 3):
        with pytest.raises(TopologyError, match="'on_growth', 'every_run' or a timedelta"):
            Table("rates", key="k", schema=SCHEMA, source=source, freshness=wrong)  # type: ignore[arg-type]


def minute(n: float) -> int:
    """Epoch microseconds."""
    return int((EPOCH + timedelta(minutes=n)).timestamp() * 1e6)


def test_run_opens_only_needed_files(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log has thirty batches, alternately of three partitions. Arrow writes them, for speed."""
    node = Stream("orders", key="k", schema=SCHEMA, source=FilesSource("landing"))
    store = AssetStore(str(tmp_path), node, spark)
    rows = spark.createDataFrame([], log_schema(node))
    kinds = arrow_schema(log_schema(node))
    new = dict[str, Any]()

    def write_files(_rows: Any, folder: str, _parted: bool) -> None:
        Path(folder).mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist([new], schema=kinds), Path(folder) / "part.parquet")

    monkeypatch.setattr(parquet, "_write_files", write_files)
    ends = dict[int, int]()
    for batch in range(1, 31):
        partition = batch % 3
        offset = ends.get(partition, 0)
        ends[partition] = offset + 1
        moment = EPOCH + timedelta(minutes=batch)
        new |= {"k": "a", "n": 1, "timestamp": moment, "partition": partition, "offset": offset}
        new["is_tombstone"] = False
        commit = Commit(
            asset="orders",
            batch=batch,
            attempt=str(batch),
            previous=str(batch - 1) if batch > 1 else "",
            shape=Shape(kind="stream", key=["k"]),
            next_offset=dict(ends),
        )
        head = store.commit(rows, commit, 1)
    assert len(delta.files(store.log_path)) == 30
    last = {p: end - 1 for p, end in ends.items()}
    assert len(store.log({**ends, 2: last[2]}, head).inputFiles()) == 1
    assert len(store.log(last, head).inputFiles()) == 3
    assert {row.offset for row in store.log(last, head).collect()} == set(last.values())
    recent = minute(26.5)
    assert len(store.log(last, head, recent).inputFiles()) == 4
    # These offsets are taken as those after a batch.
    assert len(store.log(last, head, consumed=28).inputFiles()) == 2
    assert len(store.log(last, head, recent, consumed=28).inputFiles()) == 4
    first, later = (store.oldest(last, head, consumed=batch) for batch in (0, 29))
    assert [first, later] == [minute(28), minute(30)]
    assert store.log({}, head).count() == 30
    # a log that Spark compacted still has statistics
    spark.sql(f"OPTIMIZE delta.`{store.log_path}`")
    (file,) = delta.files(store.log_path)
    assert (file.rows, file.partitions, file.offsets) == (30, (0, 2), (0, 9))
    assert (file.batch, file.oldest) == (None, minute(1)), "it has rows of each batch"
