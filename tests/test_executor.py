"""An asset is one op, so any executor runs it. A graph of ops with one process per step fails at its
first step, with a message that names the executor to use."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StringType, StructField, StructType, TimestampType

from tests.market import QUIET, Market, lines, record, run
from vt_dagster import (
    FilesSource,
    SparkResource,
    Stream,
    WarehouseResource,
    build_asset,
    build_definitions,
    build_maintenance,
    build_resources,
    ops,
)
from vt_dagster.orchestration import resources
from vt_dagster.storage.asset_store import AssetStore

ROOT = Path(__file__).parent.parent
RESOURCES = ("spark", "warehouse", "tables")
ARCHIVED = {
    "schema": StructType([StructField("k", StringType()), StructField("at", TimestampType())]),
    "timestamp": "at",
    "source": FilesSource("archived"),
}

SELECTED = ["sales", "priced"]
FORK_SERVER = {
    "start_method": {"forkserver": {"preload_modules": ["vt_dagster.orchestration.factory"]}}
}

# Dagster captures a step's output in a process that ends with the step. On a busy machine it loses the
# last lines, which say why the step failed (Dagster issue 23336), so the tests capture no output.
INSTANCE = """
telemetry: {enabled: false}
compute_logs: {module: dagster._core.storage.noop_compute_log_manager, class: NoOpComputeLogManager}
"""


def kill_where_marked(root: Path) -> None:
    """Makes commits kill this process: before or after the next commit of the asset NAME, if a file
    ``before.NAME`` or ``after.NAME`` exists."""
    commit = AssetStore.commit

    def killed(store: AssetStore, *args: Any) -> Any:
        def die(when: str) -> None:
            mark = root / f"{when}.{store.node.name}"
            if mark.exists():
                mark.unlink()
                os.kill(os.getpid(), signal.SIGKILL)

        die("before")
        head = commit(store, *args)
        die("after")
        return head

    AssetStore.commit = killed


def job_of(root: str, parent: int, name: str) -> dg.JobDefinition:
    """The job that each process of a run loads. ``parent`` is the ID of the process that starts the
    others; that process is never killed."""
    if parent != os.getpid():
        kill_where_marked(Path(root))
    market = Market(Path(root), None)  # type: ignore[arg-type]
    sales_op = ops.read_op(market.sales), ops.put_op(market.sales), ops.write_op(market.sales)
    buffer_op, join_op = ops.grace_buffer_op(market.priced), ops.stream_table_join_op(market.priced)
    joined_op = ops.read_logs_op(market.priced), buffer_op, join_op, ops.write_op(market.priced)

    @dg.graph_asset
    def graph_of_sales() -> Any:
        read, put, write = sales_op
        records, arrival = read()
        return write(put(records, arrival), arrival)

    @dg.graph_asset
    def graph_of_priced() -> Any:
        read, buffer, join, write = joined_op
        sales, arrival = read()
        released, waiting = buffer(sales=sales, arrival=arrival)
        return write(join(released=released, waiting=waiting, arrival=arrival), arrival)

    forked = dg.multiprocess_executor.configured(FORK_SERVER)
    defs = dg.Definitions(
        assets=[
            *[build_asset(node, retry_policy=dg.RetryPolicy(max_retries=2)) for node in market.nodes],
            *[graph_of_sales, graph_of_priced],
        ],
        resources=build_resources(str(market.warehouse), SparkResource(master="local[1]")),
        jobs=[
            dg.define_asset_job("default", selection="graph_of_sales"),
            dg.define_asset_job("joined", selection="graph_of_priced", executor_def=forked),
            dg.define_asset_job("assets", selection=SELECTED, executor_def=forked),
        ],
    )
    return defs.resolve_job_def(name)


@contextmanager
def run_of(root: Path, instance: dg.DagsterInstance, name: str) -> Iterator[dg.JobExecutionResult]:
    """Runs a job; its steps are forked from one process that has already imported the library."""
    args: Any = (str(root), os.getpid(), name)
    job = dg.build_reconstructable_job("tests.test_executor", "job_of", args)
    of_default = {"execution": {"config": {"multiprocess": FORK_SERVER}}} if name == "default" else {}
    with dg.execute_job(job, instance, run_config={**QUIET, **of_default}) as done:
        yield done


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """A Dagster instance that several processes share."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "dagster.yaml").write_text(INSTANCE)
    with dg.DagsterInstance.from_config(str(home)) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    ["default", pytest.param("joined", marks=pytest.mark.endurance)],  # "joined" has more ops
)
def test_graph_with_process_per_step_is_refused(
    instance: dg.DagsterInstance, tmp_path: Path, job: str
) -> None:
    (tmp_path / "landing" / "sales").mkdir(parents=True)
    (tmp_path / "landing" / "sales" / "1.jsonl").write_text(lines(record("a", "s1", "1 00:00")))
    with run_of(tmp_path, instance, job) as done:
        assert not done.success
    failed = [e.step_failure_data.error for e in done.all_events if e.is_step_failure]
    assert len(failed) == 1
    said = str(failed[0])
    assert "ExecutorError" in said
    assert "in_process_executor" in said
    assert "KeyError" not in said
    assert not (tmp_path / "warehouse").exists(), "nothing was written"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kills",  # a process that is killed before its commit leaves nothing behind
    [["after.sales"], pytest.param(["before.sales", "after.sales"], marks=pytest.mark.endurance)],
)
def test_assets_run_in_separate_processes_from_second_run(
    spark: SparkSession, instance: dg.DagsterInstance, tmp_path: Path, kills: list[str]
) -> None:
    """Each process is forked from a server that has imported the library, and has its own session."""
    market = Market(tmp_path, spark)
    market.land("prices", "1.jsonl", record("a", "p1", "1 00:00"))
    market.land("sales", "1.jsonl", record("a", "s1", "1 03:00"), record("a", "s2", "1 06:00"))
    first = map(build_asset, market.nodes)
    assert run(first, market.warehouse, selection=["prices", *SELECTED]).success
    market.land("sales", "2.jsonl", record("b", "s3", "1 08:00"), record("a", "s4", "1 08:00"))
    for mark in kills:
        (tmp_path / mark).touch()
    for killed in (["sales"] * len(kills), []):  # with new records, and without
        with run_of(tmp_path, instance, "assets") as done:
            said = "\n".join(entry.user_message for entry in instance.all_logs(done.run_id))
            assert done.success, said
        kinds = [(e.event_type_value, e.step_key) for e in done.all_events]
        assert [step for kind, step in kinds if kind == "STEP_UP_FOR_RETRY"] == killed, said
        assert ("sales: reports batch 2, committed but not yet" in said) is bool(killed)
        workers = [step for kind, step in kinds if kind == "STEP_WORKER_STARTED"]
        assert sorted(map(str, workers)) == sorted([*SELECTED, *killed])
        started = [line for line in said.splitlines() if line.partition("Spark ")[2][:1].isdigit()]
        assert bool(started) is bool(killed), said
        assert not [line for line in started if "compiling fast, for few rows" not in line], said
        assert ("Spark" in said) is bool(killed), "what has nothing new starts none"
        idle = {step for kind, step in kinds if kind == "ASSET_OBSERVATION"}
        assert idle == (set() if killed else {*SELECTED}), said
    assert [row["v"] for row in market.store(market.sales).read("log").orderBy("offset").collect()] == [
        *("s1", "s2", "s3", "s4")
    ]
    # The grace period releases s2 in the second run; s3 and s4 wait.
    rows = market.store(market.priced).read("log").collect()
    assert sorted((row["v"], row["price"]) for row in rows) == [("s1", "p1"), ("s2", "p1")]


def test_spark_starts_for_few_rows_if_all_assets_are_small(
    spark: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    market = Market(tmp_path, spark)  # type: ignore[arg-type]
    market.land("prices", "1.jsonl", record("a", "p1", "1 00:00"))
    market.land("sales", "1.jsonl", record("a", "s1", "1 03:00"))
    began: list[SparkResource] = []
    monkeypatch.setattr(SparkResource, "expect_few_rows", lambda self: began.append(self))
    monkeypatch.setattr(SparkResource, "may_start_jvm", True)  # as in a separate process
    assert market.run([market.prices, market.sales]).success
    assert len(began) == 4, "two runs and their checks"
    began.clear()

    @dg.asset
    def theirs() -> None: ...

    market.land("prices", "2.jsonl", record("b", "p1", "1 04:00"))
    assert market.run([market.prices], theirs).success
    assert not began, "the JVM cannot change its compiler, and nothing is known of another's asset"
    monkeypatch.setattr(resources, "_FEW_ROWS", 2)
    market.land("prices", "3.jsonl", record("c", "p1", "1 05:00"))
    assert market.run([market.prices]).success
    assert len(began) == 1, "a run may write the whole view, and its checks read three rows"
    began.clear()
    market.land("sales", "2.jsonl", record("a", "s2", "1 05:00"))
    assert market.run([market.prices, market.sales]).success
    assert not began, "the log of prices has many rows"


def test_definitions_merge_with_other_location(tmp_path: Path) -> None:
    """The definitions merge with a code location's own executor and ``spark`` resource, and with the
    definitions of a second warehouse."""
    market, archive = Market(tmp_path, None), Stream("archived", key="k", **ARCHIVED)  # type: ignore[arg-type]

    @dg.asset
    def theirs(spark: dg.ResourceParam[str], warehouse: dg.ResourceParam[str]) -> str:
        return spark + warehouse

    merged = dg.Definitions.merge(
        build_definitions(market.priced, warehouse="a"),
        build_definitions(market.rates, warehouse="a"),
        build_maintenance(),
        build_definitions(archive, warehouse="b", resource_prefix="archive"),
        dg.Definitions(
            assets=[theirs],
            resources={"spark": "their ", "warehouse": "own"},
            executor=dg.multiprocess_executor,
        ),
    )
    dg.Definitions.validate_loadable(merged)
    job = merged.resolve_implicit_global_asset_job_def()
    assert job.executor_def is dg.multiprocess_executor
    assert set(job.get_required_resource_defs()) == {
        *(f"{prefix}_{what}" for prefix in ("vt_dagster", "archive") for what in RESOURCES),
        *("spark", "warehouse", "io_manager"),
    }
    result = job.execute_in_process(asset_selection=[dg.AssetKey("theirs")])
    assert result.asset_value("theirs") == "their own"


def test_key_prefix_selects_warehouse(spark: object, tmp_path: Path) -> None:
    """The asset, its checks, its sensor and an asset that reads it use the prefix's warehouse."""
    market = Market(tmp_path, spark)  # type: ignore[arg-type]
    market.land("prices", "1.jsonl", record("a", "p1", "1 00:00"))
    got: list[str] = []

    @dg.asset(ins={"prices": dg.AssetIn(input_manager_key="archive_tables")})
    def mine(prices: pa.Table) -> None:
        got.extend(prices.column("v").to_pylist())

    ours = build_definitions(
        market.prices,
        warehouse=str(tmp_path / "archive"),
        spark=SparkResource(master="local[2]"),
        resource_prefix="archive",
    )
    defs = dg.Definitions.merge(
        ours, dg.Definitions(assets=[mine], resources={"warehouse": "theirs", "spark": "theirs"})
    )
    where = {"archive_warehouse": WarehouseResource(path=str(tmp_path / "archive"))}
    (sensor,) = ours.sensors or []
    tick = sensor(dg.build_sensor_context(resources=where))  # type: ignore[operator]
    assert isinstance(tick, dg.SensorResult)
    (request,) = tick.run_requests or []
    result = defs.resolve_implicit_global_asset_job_def().execute_in_process(
        run_config=request.run_config
    )
    assert result.success
    assert all(one.passed for one in result.get_asset_check_evaluations())
    assert got == ["p1"]
    assert not (tmp_path / "warehouse").exists()
