"""After a run, the audit checks what the run changed; if that is not enough, it checks everything."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tests.storage.topology import EPOCH, Topology
from vt_dagster.columns import SEGMENT
from vt_dagster.runs.audit import Finding, audit
from vt_dagster.runs.run import run_once
from vt_dagster.storage import delta, parquet, view
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.topology.model import Stream
from vt_dagster.topology.operators import UntilWindowCloses
from vt_dagster.topology.windows import TumblingWindow

pytestmark = pytest.mark.usefixtures("few_rows")

SEGMENT_ROWS = 6
THIRD = [("a", 1, 2.7), ("c", 2, 2.8)]


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Path:
    """``rates`` after two runs whose records are in order, in segments of a few versions."""
    topology = Topology(tmp_path_factory.mktemp("two_runs"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(view, "SEGMENT_ROWS", SEGMENT_ROWS)
        topology.land("rates", "1.jsonl", [("a", i, i / 10) for i in range(20)])
        run(topology, topology.rates, spark)
        topology.land("rates", "2.jsonl", [("b", 1, 2.5), ("b", 2, 2.6)])
        run(topology, topology.rates, spark)
    return topology.root


@pytest.fixture(scope="module")
def three_runs(two_runs: Path, tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Path:
    """``rates`` after a third run, in order too."""
    topology = Topology(Path(shutil.copytree(two_runs, tmp_path_factory.mktemp("three_runs") / "copy")))
    topology.land("rates", "3.jsonl", THIRD)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(view, "SEGMENT_ROWS", SEGMENT_ROWS)
        run(topology, topology.rates, spark)
    return topology.root


@pytest.fixture
def topology_after_third_run(
    three_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Topology:
    monkeypatch.setattr(view, "SEGMENT_ROWS", SEGMENT_ROWS)
    return Topology(Path(shutil.copytree(three_runs, tmp_path / "copy")))


@pytest.fixture
def topology_before_third_run(
    two_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Topology:
    """``rates`` after two runs; the third file has landed, but no run has consumed it."""
    monkeypatch.setattr(view, "SEGMENT_ROWS", SEGMENT_ROWS)
    topology = Topology(Path(shutil.copytree(two_runs, tmp_path / "copy")))
    topology.land("rates", "3.jsonl", THIRD)
    return topology


def run(topology: Topology, node: Stream, spark: SparkSession) -> AssetStore:
    """Runs the asset, and returns its store."""
    done = run_once(node, stores_of(topology.warehouse, spark), run_id=f"run of {node.name}")
    assert done.commit is not None
    return AssetStore(topology.warehouse, node, spark)


def findings(store: AssetStore) -> dict[str, Finding]:
    """The findings, by name, for the run that made the last commit."""
    return {f.name: f for f in audit(store, f"run of {store.node.name}")}


def failed_checks(found: list[Finding] | dict[str, Finding]) -> set[str]:
    return {f.name for f in (found.values() if isinstance(found, dict) else found) if not f.passed}


def overwrite(path: str, rows: DataFrame, segment: int | None = None) -> None:
    """Overwrites a table as a bug of ours would: in the name of the last batch."""
    found = delta.last_commit(path)
    assert found is not None
    parquet.write(
        rows,
        path,
        mode="overwrite",
        document={**found.document, "attempt": uuid4().hex},
        batch=found.document["batch"],
        asset=uuid4().hex,
        parted=segment is not None,
        over=found.version,
        replaced=delta.everything if segment is None else lambda file: file.segment == segment,
    )


def view_of(store: AssetStore) -> DataFrame:
    return parquet.read(store.spark, store.view_path, parted=True)


FIRST = f"{SEGMENT} = 0"


def with_duplicate_version(rows: DataFrame) -> DataFrame:
    """The rows of the first segment, one version of which is there twice."""
    first = rows.where(FIRST)
    again = first.orderBy("valid_from").limit(1)
    return first.unionByName(again)


def test_unchanged_segments_are_not_audited_again(
    topology_before_third_run: Topology, spark: SparkSession
) -> None:
    """The audit of a run skips segments that the run left unchanged, after another program's compaction
    too. An audit of everything finds the fault in such a segment."""
    store = topology_before_third_run.store("rates", spark)
    spark.sql(f"OPTIMIZE delta.`{store.view_path}`")
    overwrite(store.view_path, with_duplicate_version(view_of(store)), 0)
    found = findings(run(topology_before_third_run, topology_before_third_run.rates, spark))
    assert failed_checks(found) == set()
    assert {f.looked_at for f in found.values()} == {"changes of batch 3"}
    assert found["every_record_is_accounted_for"].numbers["rows_in_log"] == 24
    everything = audit(store)
    assert failed_checks(everything) == {"one_version_per_key_and_timestamp"}
    assert {f.looked_at for f in everything} == {"everything"}
    # an empty run commits nothing: its audit checks everything
    assert failed_checks(audit(store, "another run")) == failed_checks(everything)


def test_segments_rewritten_by_out_of_order_run_are_audited(
    topology_before_third_run: Topology, spark: SparkSession
) -> None:
    topology_before_third_run.land("rates", "3.jsonl", [("a", 1, 0.05)])
    store = run(topology_before_third_run, topology_before_third_run.rates, spark)
    assert failed_checks(findings(store)) == set()
    overwrite(store.view_path, with_duplicate_version(view_of(store)), 0)
    found = findings(store)
    assert failed_checks(found) == {"one_version_per_key_and_timestamp"}
    assert {f.looked_at for f in found.values()} == {"changes of batch 3"}


def test_foreign_write_triggers_full_audit(
    topology_before_third_run: Topology, spark: SparkSession
) -> None:
    store = topology_before_third_run.store("rates", spark)
    rows = with_duplicate_version(view_of(store))
    writer = rows.write.format("delta").mode("overwrite").option("replaceWhere", FIRST)
    writer.save(store.view_path)
    found = findings(run(topology_before_third_run, topology_before_third_run.rates, spark))
    assert failed_checks(found) == {"one_version_per_key_and_timestamp"}
    assert {f.looked_at for f in found.values()} == {"everything"}


def test_run_with_only_late_records_skips_view(
    topology_after_third_run: Topology, spark: SparkSession
) -> None:
    """The run commits a batch without rows. The view is unchanged, so the audit does not read it."""
    topology_after_third_run.land("rates", "4.jsonl", [("a", 1, -60)])
    store = run(topology_after_third_run, topology_after_third_run.rates, spark)
    head = store.head()
    assert head is not None
    assert (head.commit.batch, head.commit.counts["late"]) == (4, 1)
    found = findings(store)
    assert failed_checks(found) == set()
    assert {f.looked_at for f in found.values()} == {
        "changes of batch 4",
        "nothing: the view is unchanged since the last audit",
    }
    assert found["every_record_is_accounted_for"].looked_at == "changes of batch 4"
    assert found["every_record_is_accounted_for"].numbers["rows_in_quarantine_late"] == 1


def test_lost_or_duplicated_record_is_found(
    topology_after_third_run: Topology, spark: SparkSession
) -> None:
    store = topology_after_third_run.store("rates", spark)
    log = store.read("log").localCheckpoint()
    overwrite(store.log_path, log.where("k != 'c'"))
    found = findings(store)["every_record_is_accounted_for"]
    assert found.looked_at == "changes of batch 3"
    assert (found.passed, found.numbers["rows_lost"]) == (False, 1)
    assert {"what": "offsets of partition 0", "expected": "23..23", "found": "missing"} in found.sample
    overwrite(store.log_path, log.unionByName(log.where("k = 'c'")))
    found = findings(store)["every_record_is_accounted_for"]
    assert any(row["found"] == "more than once" for row in found.sample)
    # a lost row of an earlier batch shows in the number of rows
    overwrite(store.log_path, log.where("`offset` != 3"))
    found = findings(store)["every_record_is_accounted_for"]
    assert found.sample == [
        {"what": "records applied = rows in the log", "expected": "24", "found": "23"}
    ]


def test_results_contradicting_previous_run_are_found(tmp_path: Path, spark: SparkSession) -> None:
    """The audit finds a result that is older than an earlier run's, and a window released twice."""
    topology = Topology(tmp_path)
    counts = (
        topology.orders.group_by("k")
        .windowed_by(TumblingWindow(timedelta(minutes=5), timedelta(0)))
        .count(name="counts")
    )
    final = counts.suppress(UntilWindowCloses(), name="final")
    topology.land("rates", "1.jsonl", [("a", 1, 0)])
    run(topology, topology.rates, spark)
    for name, minutes in (("1.jsonl", (1, 5, 9)), ("2.jsonl", (12, 15))):
        topology.land("orders", name, [("a", int(m), m) for m in minutes])
        for node in (topology.orders, topology.priced, counts, final):
            run(topology, node, spark)
    priced, released = topology.store("priced", spark), AssetStore(topology.warehouse, final, spark)
    assert failed_checks(findings(priced)) == failed_checks(findings(released)) == set()
    log = priced.read("log").localCheckpoint()
    assert log.count() == 4
    early = F.lit((EPOCH + timedelta(minutes=2)).isoformat()).cast("timestamp")
    moment = F.when(F.col("n") == 12, early).otherwise(F.col("timestamp"))
    overwrite(priced.log_path, log.withColumn("timestamp", moment))
    found = findings(priced)
    assert failed_checks(found) == {"timestamps_do_not_decrease"}
    assert found["timestamps_do_not_decrease"].looked_at == "changes of batch 2"
    log = released.read("log").localCheckpoint()
    assert log.count() == 3
    last = log.where("`offset` = 2")
    again = log.where("`offset` = 0").drop("offset").crossJoin(last.select("offset"))
    overwrite(released.log_path, log.where("`offset` < 2").unionByName(again))
    found = findings(released)
    assert failed_checks(found) == {"one_result_per_window"}
    assert found["one_result_per_window"].looked_at == "changes of batch 2"
