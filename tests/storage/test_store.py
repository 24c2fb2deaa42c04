"""The commit protocol without crashes: batches, concurrency, rebuilding, reading."""

from __future__ import annotations

import itertools
import re
import shutil
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from tests.storage.topology import Topology, land_first, land_second
from vt_dagster.contracts import timestamps_do_not_decrease
from vt_dagster.errors import ConcurrentRunError, ContractError, StorageError
from vt_dagster.runs import pin as arrivals
from vt_dagster.runs import run as run_module
from vt_dagster.runs.run import Results, Run
from vt_dagster.storage import delta, parquet
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.storage.commit_log import commits

pytestmark = pytest.mark.usefixtures("few_rows")


@pytest.fixture(scope="module")
def two_batches(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Topology:
    """The topology after two batches of each asset."""
    topology = Topology(tmp_path_factory.mktemp("two_batches"))
    land_first(topology)
    for name in ("rates", "orders", "priced"):
        topology.run(name, spark)
    land_second(topology)
    for name in ("rates", "orders", "priced"):
        topology.run(name, spark)
    return topology


def _minutes(row: Any, column: str) -> float | None:
    moment = row[column]
    return None if moment is None else (moment.hour * 60 + moment.minute)


def test_table_versions(two_batches: Topology, spark: SparkSession) -> None:
    rows = two_batches.store("rates", spark).read("versions").orderBy("k", "valid_from").collect()
    # stream time 14, retention 10: versions that ended at or before minute 4 have expired
    assert [
        (r.k, r.n, _minutes(r, "valid_from"), _minutes(r, "valid_to"), r.is_tombstone) for r in rows
    ] == [
        ("a", 3, 3, 5, False),
        ("a", 2, 5, None, False),
        ("b", 1, 1, 12, False),
        ("b", None, 12, None, True),
        ("c", 2, 14, None, False),
    ]


def test_log_has_accepted_records_in_arrival_order(two_batches: Topology, spark: SparkSession) -> None:
    rows = two_batches.store("rates", spark).read("log").orderBy("offset").collect()
    assert [r.offset for r in rows] == list(range(7))
    assert [(r.k, r.n, r.is_latest, r.is_tombstone) for r in rows] == [
        ("a", 1, True, False),
        ("b", 1, True, False),
        ("a", 2, True, False),
        ("a", 3, False, False),
        ("b", None, True, True),
        ("c", 1, True, False),
        ("c", 2, True, False),
    ]


def test_rejected_records_are_quarantined_with_origin(
    two_batches: Topology, spark: SparkSession
) -> None:
    quarantine = two_batches.store("rates", spark).quarantine()
    assert quarantine is not None
    rows = quarantine.orderBy("position").collect()
    assert [(r.reason, r.source, r.position, r.batch) for r in rows] == [
        ("late", "2.jsonl", 3, 2),
        ("null_key", "2.jsonl", 5, 2),
    ]
    assert '"n": 9' in rows[0].raw


def test_join_results(two_batches: Topology, spark: SparkSession) -> None:
    rows = two_batches.store("priced", spark).read("log").orderBy("offset").collect()
    assert [(r.n, r.rate, r.is_late) for r in rows] == [
        (1, 1, False),
        (3, 3, False),  # the same minute: a leaves before b
        (2, 1, False),
        (5, None, True),  # minute 0 is before the table's horizon
        (4, None, False),  # deleted at minute 12
        (7, None, False),
    ]


def test_join_of_many_records_picks_cheaper_lookup(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this test, more than no records count as many. The commit names the strategy and its reason;
    each strategy gives the same results."""
    topology = Topology(tmp_path)
    for land in (land_first, land_second):
        land(topology)
    for name in ("rates", "orders"):
        topology.run(name, spark)

    def joined() -> tuple[str, list[Any]]:
        commit = topology.run("priced", spark).commit
        assert commit is not None
        rows = topology.store("priced", spark).read("log").orderBy("offset").collect()
        shutil.rmtree(tmp_path / "warehouse" / "priced")
        return commit.strategy, [(r.k, r.n, r.rate, r.is_late) for r in rows]

    said, expected = joined()
    assert said == "sorted: the run has few records"
    assert len(expected) > 3
    monkeypatch.setattr(arrivals, "CHUNK", -1)
    assert joined() == ("broadcast: the table has at most 7 versions, and 2 per key", expected)
    with monkeypatch.context() as patched:
        patched.setattr(run_module, "_FEW_VERSIONS", 6)
        said, rows = joined()
    assert re.fullmatch(r"tiled: at most \d versions of a key in a tile of time", said)
    assert rows == expected
    monkeypatch.setattr(run_module, "_FEW_OF_A_KEY", 1)
    monkeypatch.setattr(run_module, "_FEW_IN_A_TILE", 1)
    said, rows = joined()
    assert re.fullmatch(r"sorted: \d versions of a key may be in one tile of time, more than 1", said)
    assert rows == expected


def test_idle_run_makes_no_commit(two_batches: Topology, spark: SparkSession) -> None:
    for name in ("rates", "orders", "priced"):
        before = two_batches.store(name, spark).head()
        assert two_batches.run(name, spark).commit is None
        assert two_batches.store(name, spark).head() == before


def test_rebuilt_view_equals_view(two_batches: Topology, spark: SparkSession) -> None:
    before = two_batches.tables("rates", spark)
    two_batches.store("rates", spark).rebuild_view()
    assert two_batches.tables("rates", spark) == before


def test_asset_opens_by_name(two_batches: Topology, spark: SparkSession) -> None:
    store = AssetStore.open(two_batches.warehouse, "rates", spark)
    assert store.node.key == ("k",)
    assert store.node.history_retention == two_batches.rates.history_retention  # type: ignore[attr-defined]
    assert {r.k: r.n for r in store.read().collect()} == {"a": 2, "c": 2}
    as_of = store.read(as_of="2020-01-01T00:04:30Z").collect()
    assert {r.k: r.n for r in as_of} == {"a": 3, "b": 1}


def test_invalid_reads_are_refused(two_batches: Topology, spark: SparkSession) -> None:
    with pytest.raises(StorageError, match=r"'nowhere'.*rates"):
        AssetStore.open(two_batches.warehouse, "nowhere", spark)
    with pytest.raises(StorageError, match="as_of needs a VersionedTable"):
        two_batches.store("orders", spark).read(as_of="2020-01-01")
    with pytest.raises(ContractError, match="expected a time like"):
        two_batches.store("rates", spark).read(as_of="")


def test_spark_error_has_no_cyclic_cause(tmp_path: Path, spark: SparkSession) -> None:
    """An exception of Spark is not its own cause: a program that follows causes would never end."""
    topology = Topology(tmp_path)
    land_first(topology)
    run = Run.pin(topology.rates, stores_of(topology.warehouse, spark))
    results = run.operate(run.read())
    broken = results.rows.withColumn("n", F.raise_error(F.lit("poison")).cast("int"))
    with pytest.raises((PySparkException, Py4JJavaError), match="poison") as caught:
        run.commit(replace(results, rows=broken))
    assert caught.value.__cause__ is not caught.value


def test_concurrent_runs_have_one_winner(tmp_path: Path, spark: SparkSession) -> None:
    """Both runs have pinned the same batch before either commits."""
    topology = Topology(tmp_path)
    land_first(topology)
    store = topology.store("rates", spark)
    prepared: list[tuple[Run, Results]] = []
    for _ in range(2):
        run = Run.pin(topology.rates, stores_of(topology.warehouse, spark))
        prepared.append((run, run.operate(run.read())))
    outcomes: list[Any] = []
    lost: list[tuple[Run, Results]] = []

    def commit(run: Run, results: Results) -> None:
        try:
            outcomes.append(run.commit(results))
        except ConcurrentRunError as error:
            outcomes.append(error)
            lost.append((run, results))

    threads = [threading.Thread(target=commit, args=pair) for pair in prepared]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    losers = [o for o in outcomes if isinstance(o, ConcurrentRunError)]
    assert len(losers) == 1
    assert "another run committed at the same time and won" in str(losers[0])
    assert store.read("log").count() == 3
    assert store.read("versions").count() == 3
    # a run that commits after the winner loses too
    with pytest.raises(ConcurrentRunError):
        lost[0][0].commit(lost[0][1])
    assert store.read("log").count() == 3


def test_older_view_never_replaces_newer_view(two_batches: Topology, spark: SparkSession) -> None:
    """A slow process that updates the view to an older commit changes nothing."""
    store = two_batches.store("rates", spark)
    head = store.head()
    assert head is not None
    before = two_batches.tables("rates", spark)
    older = head.commit.model_copy(update={"batch": 1, "next_offset": {0: 3}})
    there = delta.last_commit(store.view_path)
    store._update_view(type(head)(0, older))
    assert delta.last_commit(store.view_path) == there
    assert two_batches.tables("rates", spark) == before


def test_foreign_delta_table_is_refused(tmp_path: Path, spark: SparkSession) -> None:
    path = str(tmp_path / "warehouse" / "rates" / "log")
    spark.range(1).write.format("delta").save(path)
    with pytest.raises(StorageError, match="none of its commits was written by vt_dagster"):
        delta.last_commit(path)


def test_missing_table_version_is_reported(two_batches: Topology, spark: SparkSession) -> None:
    path = two_batches.store("rates", spark).log_path
    assert parquet.read(spark, path, 0).count() == 3
    with pytest.raises(ConcurrentRunError, match="expected version 7 of"):
        parquet.read(spark, path, 7)


def test_unsupported_delta_feature_is_refused(tmp_path: Path, spark: SparkSession) -> None:
    path = str(tmp_path / "table")
    spark.range(3).write.format("delta").option("delta.columnMapping.mode", "name").save(path)
    with pytest.raises(StorageError, match="columnMapping"):
        parquet.read(spark, path)


def test_changed_type_is_refused_before_commit(tmp_path: Path, spark: SparkSession) -> None:
    topology = Topology(tmp_path)
    land_first(topology)
    topology.run("orders", spark)
    store = topology.store("orders", spark)
    head = store.head()
    assert head is not None
    changed = store.read("log").withColumn("n", F.col("n").cast("string"))
    after = {"batch": 2, "previous": head.commit.attempt}
    with pytest.raises(StorageError, match="n: int -> string"):
        store.commit(changed, head.commit.model_copy(update=after), 1)


def test_grace_period_may_change_between_runs(tmp_path: Path, spark: SparkSession) -> None:
    """Each record is joined once, whether the grace period becomes longer, shorter or none. After the
    first run, all records wait."""
    topology = Topology(tmp_path)
    topology.land("rates", "1.jsonl", [("a", 1, 0)])
    topology.run("rates", spark)
    minutes = iter(range(100))
    seen: list[int] = []
    for file, grace in enumerate((6, 1, 2, 0)):
        topology.priced = topology.orders.left_join(
            topology.rates, name="priced", grace_period=timedelta(minutes=grace) if grace else None
        )
        land = [("a", n, float(n)) for n in itertools.islice(minutes, 3)]
        topology.land("orders", f"{file}.jsonl", land)
        topology.run("orders", spark)
        receipt = topology.run("priced", spark)
        assert receipt.commit is not None
        seen.append(receipt.commit.totals["waiting"])
        if file == 0:
            assert receipt.commit.counts["out"] == 0
            assert topology.store("priced", spark).read().count() == 0
    rows = topology.store("priced", spark).read("log").orderBy("offset").collect()
    assert [r.n for r in rows] == list(range(12))
    # at stream times 2, 5, 8, 11; records released up to minute 4 stay released
    assert seen == [3, 1, 2, 0]


def test_late_record_after_the_grace_period_became_longer(tmp_path: Path, spark: SparkSession) -> None:
    """A record that the longer grace period would hold back, but that is older than records that were
    emitted, is late: no other result of its key is older than an earlier one."""
    topology = Topology(tmp_path)
    topology.land("rates", "1.jsonl", [("a", 1, 0)])
    topology.run("rates", spark)
    first = [("a", 1, 0.0), ("a", 2, 3.0), ("a", 3, 5.0)]
    for file, (grace, records) in enumerate([(1, first), (6, [("a", 4, 2.0)])]):
        topology.priced = topology.orders.left_join(
            topology.rates, name="priced", grace_period=timedelta(minutes=grace)
        )
        topology.land("orders", f"{file}.jsonl", records)
        topology.run("orders", spark)
        topology.run("priced", spark)
    log = topology.store("priced", spark).read("log")
    rows = log.orderBy("offset").collect()
    assert [(row.n, row.is_late) for row in rows] == [(1, False), (2, False), (4, True)]
    assert timestamps_do_not_decrease(log, key="k")


def test_join_with_table_without_commits(tmp_path: Path, spark: SparkSession) -> None:
    topology = Topology(tmp_path)
    topology.priced = topology.orders.join(topology.rates, name="priced")
    topology.land("orders", "1.jsonl", [("a", 1, 0), ("b", 2, 1)])
    topology.run("orders", spark)
    receipt = topology.run("priced", spark)
    assert receipt.commit is not None
    assert receipt.commit.counts["in"] == receipt.commit.counts["unmatched"] == 2
    assert topology.store("priced", spark).read().count() == 0
    assert topology.run("priced", spark).commit is None


def test_newer_view_is_not_overwritten(
    two_batches: Topology, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run does not write a view that another run has meanwhile updated to a later batch."""
    store = two_batches.store("rates", spark)
    head = store.head()
    assert head is not None
    first = type(head)(0, next(iter(commits(store.root))))
    assert first.commit.batch == 1
    monkeypatch.setattr(parquet, "write", lambda *_, **__: pytest.fail("it was written again"))
    found = store.catch_up(first)
    assert found.base is not None
    assert (found.head, found.base.checkpoint.batch) == (first, 2)
