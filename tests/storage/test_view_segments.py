"""A run rewrites only the segments of a view that change. The view equals a rebuild from the log."""

from __future__ import annotations

import random
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.storage.topology import EPOCH, Topology
from vt_dagster.errors import ConcurrentRunError
from vt_dagster.runs.audit import audit
from vt_dagster.runs.run import Run, run_once
from vt_dagster.spark import settings
from vt_dagster.storage import delta, parquet
from vt_dagster.storage import view as view_module
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.storage.commit_log import Checkpoint
from vt_dagster.storage.view import Base, Segments

pytestmark = pytest.mark.usefixtures("few_rows")


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> int:
    """Segments of a few versions, where a table of many millions has segments of many thousands."""
    monkeypatch.setattr(view_module, "SEGMENT_ROWS", 6)
    return 6


def layout(store: AssetStore) -> Segments:
    base = store.catch_up().base
    assert base is not None
    assert base.checkpoint.segments is not None
    return base.checkpoint.segments


def rows_per_segment(store: AssetStore) -> Counter[int | None]:
    """The number of rows in each segment."""
    rows = parquet.read(store.spark, store.view_path, parted=True)
    return Counter(
        {row[0]: row[1] for row in rows.groupBy("history_segment").count().toLocalIterator()}
    )


def files(store: AssetStore) -> set[str]:
    """The files of the view that hold history."""
    return {file.place for file in delta.files(store.view_path) if file.segment is not None}


def rebuilt_versions(topology: Topology, spark: SparkSession, to: str) -> list[object]:
    """The versions that a rebuild from the whole log gives."""
    store = topology.store("rates", spark)
    head = store.head()
    assert head is not None
    copy = AssetStore(str(topology.root / to), topology.rates, spark)
    first = head.commit.model_copy(update={"rejected": False, "batch": 1, "previous": ""})
    log = store.log({}, head)
    copy.commit(log, first, log.count())
    return rows_of(copy)


def rows_of(store: AssetStore) -> list[object]:
    rows = store.read("versions")
    return sorted(rows.select(*sorted(rows.columns)).collect(), key=repr)


def test_incremental_view_equals_rebuild(
    tmp_path: Path, spark: SparkSession, small_segments: int
) -> None:
    """Records are out of order, replaced, deleted or expired, in runs of any size."""
    dice = random.Random(889)
    topology = Topology(tmp_path)
    now = 0.0
    forgotten = 0
    for run in range(4):
        records = []
        for _ in range(dice.choice([1, 3, 5, 30])):
            now += dice.choice([0, 0.5, 1, 2])
            moment = max(0.0, now - dice.choice([0, 0, 0, 0, 3, 8, 12]))
            records.append((dice.choice("abcd"), dice.choice([None, 1, 2, 3]), moment))
        topology.land("rates", f"{run}.jsonl", records)
        run_once(topology.rates, stores_of(topology.warehouse, spark), run_id=f"run {run}")
        store = topology.store("rates", spark)
        found = audit(store, f"run {run}")
        assert {f.name: f.sample for f in found if not f.passed} == {}
        assert {f.looked_at for f in found} == {f"changes of batch {run + 1}" if run else "everything"}
        if run == 3:
            assert rows_of(store) == rebuilt_versions(topology, spark, f"anew{run}")
        now_there = layout(store)
        forgotten = now_there.first
        assert all(n is None or n >= forgotten for n in rows_per_segment(store))
    assert forgotten > 0, "segments were forgotten on the way"
    wrong = {f.name: f.sample for f in audit(topology.store("rates", spark)) if not f.passed}
    assert wrong == {}


def test_in_order_run_rewrites_no_history(
    tmp_path: Path, spark: SparkSession, small_segments: int
) -> None:
    topology = Topology(tmp_path)
    topology.land("rates", "0.jsonl", [("a", i, i / 10) for i in range(20)])
    topology.run("rates", spark)
    store = topology.store("rates", spark)
    before = files(store)
    assert len(layout(store).ends) >= 3
    topology.land("rates", "1.jsonl", [("a", 1, 2.5), ("b", 1, 2.4), ("a", 2, 2.6)])
    topology.run("rates", spark)
    assert before < files(store)
    # a record out of order rewrites the segments that end after it
    topology.land("rates", "2.jsonl", [("a", 7, 1.51)])
    topology.run("rates", spark)
    assert 0 < len(files(store) & before) < len(before)
    # segments that expired from the history retention are removed without a read
    topology.land("rates", "3.jsonl", [("a", 8, 60)])
    topology.run("rates", spark)
    assert not files(store) & before
    assert layout(store).first >= 3


def test_expired_tombstone_does_not_revive_version(tmp_path: Path, spark: SparkSession) -> None:
    """A rewritten segment may have a version whose tombstone has expired; no read returns it."""
    topology = Topology(tmp_path)
    topology.land("rates", "0.jsonl", [("a", 1, 0), ("a", None, 1), ("b", 1, 20), ("b", 2, 25)])
    topology.run("rates", spark)
    topology.land("rates", "1.jsonl", [("b", 3, 21)])
    topology.run("rates", spark)
    store = topology.store("rates", spark)
    assert {row.k for row in store.read("versions").collect()} == {"b"}
    assert [f.name for f in audit(store) if not f.passed] == []


def test_small_run_is_decided_by_current_keys(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current keys of a table decide whether a run is small, not its log's length: otherwise a
    table that runs often would become slow some day."""
    topology = Topology(tmp_path)

    def next_is_small(file: str, *records: tuple[str, int, float]) -> bool:
        topology.land("rates", file, records)
        with monkeypatch.context() as patched:
            patched.setattr(settings, "_FEW_READ", 8)
            small = Run.pin(topology.rates, stores_of(topology.warehouse, spark)).arrival.small
        topology.run("rates", spark)
        return small

    assert next_is_small("0.jsonl", *[("a", i, i / 10) for i in range(20)]), "nothing is there"
    assert next_is_small("1.jsonl", ("b", 1, 3)), "one key is current, of 20 versions"
    assert next_is_small("2.jsonl", *[(k, 1, 4) for k in "cdefghijk"]), "two keys are current"
    assert not next_is_small("3.jsonl", ("a", 1, 5)), "eleven are"
    head = topology.store("rates", spark).head()
    assert head is not None
    assert sum(head.commit.next_offset.values()) == 31


def test_rows_reached_by_time() -> None:
    layout = Segments(first=2, ends=[10, 20], rows=4)
    checkpoint = Checkpoint(asset="a", batch=1, attempt="", segments=layout)
    view = Base("view", 1, checkpoint, {None: 3, 2: 100, 3: 50, 4: 4})
    assert [view.reach(None), view.reach(25), view.reach(20)] == [3, 7, 7]
    assert [view.reach(19), view.reach(-1)] == [57, 157]


def test_join_reads_only_needed_history(
    tmp_path: Path, spark: SparkSession, small_segments: int
) -> None:
    topology = Topology(tmp_path)
    topology.land("rates", "0.jsonl", [("a", i, i / 10) for i in range(40)])
    topology.run("rates", spark)
    store = topology.store("rates", spark)
    since = int((EPOCH + timedelta(minutes=3)).timestamp()) * 1_000_000
    ends = [row.valid_to for row in store.view_at(store.catch_up(), since).collect()]
    assert len(ends) == 10, "the versions that end after it"
    assert sum(end is None for end in ends) == 1
    topology.land("orders", "0.jsonl", [("a", 1, 3.05), ("a", 2, 3.95), ("a", 3, 9)])
    topology.run("orders", spark)
    topology.run("priced", spark)
    rates = {row.n: row.rate for row in topology.store("priced", spark).read("log").collect()}
    assert rates == {1: 30, 2: 39}


def test_concurrent_compaction_does_not_fail_run(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test raises the conflict itself, because the window for a real one is too short to hit."""
    topology = Topology(tmp_path)
    topology.land("rates", "0.jsonl", [("a", 1, 0), ("a", 2, 1)])
    write, refused = parquet.write, list[str]()

    def once_refused(rows: object, path: str, **more: Any) -> int:
        if path.endswith("/view") and not refused:
            refused.append(path)
            raise ConcurrentRunError("compacted")
        return write(rows, path, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(parquet, "write", once_refused)
    topology.run("rates", spark)
    assert len(refused) == 1
    assert topology.store("rates", spark).read("versions").count() == 2
