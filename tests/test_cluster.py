"""The operators and the storage on separate Spark processes: a local cluster, a standalone cluster with
two workers, and a Spark Connect server. They need little memory, whatever the size of the data."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

from tests.cluster_child import WORKED
from tests.memory_child import NEAR, START, Shop
from tests.storage.chain import Chain
from tests.storage.topology import Topology, land_first, land_second
from vt_dagster.spark.jars import resolve_jars
from vt_dagster.spark.session import DELTA_CATALOG, DELTA_EXTENSION

pytestmark = [pytest.mark.endurance, pytest.mark.cluster, pytest.mark.timeout(3_600)]

ROOT = Path(__file__).parent.parent
SPARK = Path(pyspark.__file__).parent / "bin"
CHAIN_RECORDS = 250_000
"""Enough records that a run processes them in chunks."""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextlib.contextmanager
def processes(folder: Path, *commands: list[str]) -> Iterator[None]:
    """Starts processes; stops them at the end of the context."""
    running: list[subprocess.Popen[bytes]] = []
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    try:
        for i, command in enumerate(commands):
            with (folder / f"process{i}.log").open("wb") as log:
                running.append(
                    subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
                )
        yield
    finally:
        for one in running:
            one.terminate()
        for one in running:
            one.wait(30)


def wait_until_open(port: int, folder: Path) -> None:
    """Waits until a server that was just started accepts connections."""
    end = time.monotonic() + 120
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2):
            return
        assert time.monotonic() < end, (folder / "process0.log").read_text()
        time.sleep(1)


@contextlib.contextmanager
def standalone(folder: Path) -> Iterator[str]:
    port = free_port()
    address = f"spark://127.0.0.1:{port}"
    start = str(SPARK / "spark-class")
    master = [start, "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1"]
    master += ["--port", str(port), "--webui-port", str(free_port())]
    worker = [start, "org.apache.spark.deploy.worker.Worker", "--host", "127.0.0.1"]
    worker += ["--cores", "1", "--memory", "1g", "--work-dir", str(folder / "work")]
    workers = [[*worker, "--webui-port", str(free_port()), address] for _ in range(2)]
    with processes(folder, master, *workers):
        wait_until_open(port, folder)
        yield address


@contextlib.contextmanager
def connect(folder: Path) -> Iterator[str]:
    port = free_port()
    settings = {
        "spark.master": "local[2]",
        "spark.connect.grpc.binding.port": str(port),
        "spark.sql.extensions": DELTA_EXTENSION,
        "spark.sql.catalog.spark_catalog": DELTA_CATALOG,
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.extraJavaOptions": "-Duser.timezone=UTC",
        "spark.ui.enabled": "false",
        "spark.jars": ",".join(jar.as_uri() for jar in resolve_jars()),
    }
    server = [str(SPARK / "spark-submit")]
    server += [part for key, value in settings.items() for part in ("--conf", f"{key}={value}")]
    server += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
    with processes(folder, server):
        wait_until_open(port, folder)
        yield f"sc://127.0.0.1:{port}"


@contextlib.contextmanager
def local_cluster(folder: Path) -> Iterator[str]:
    work = SPARK.parent / "work"  # directory of the executors; no setting changes it
    others = set(work.glob("*"))
    try:
        yield "local-cluster[2,1,1024]"
    finally:
        for left in set(work.glob("*")) - others:
            shutil.rmtree(left, ignore_errors=True)


def run_module(*arguments: str) -> str:
    """Runs a module in another process; returns its output."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=3_000,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4_000:]
    return done.stdout


@pytest.mark.parametrize("kind", [local_cluster, standalone, connect], ids=lambda kind: kind.__name__)
def test_scenarios_and_tables_are_identical_on_cluster(
    kind: Callable[[Path], AbstractContextManager[str]], tmp_path: Path, spark: SparkSession
) -> None:
    here, chain, tables = Topology(tmp_path / "here"), Chain(tmp_path / "here"), tmp_path / "tables"
    chain.land(spark, CHAIN_RECORDS)
    shutil.copytree(tmp_path / "here", tables)
    with kind(tmp_path) as address:
        said = run_module("tests.cluster_child", address, str(tables))
    for land in (land_first, land_second):
        land(here)
        for name in ("rates", "orders", "priced"):
            here.run(name, spark)
    for name in ("rates", "orders", "priced"):
        assert f"{name} {here.tables(name, spark)}" in said
    chain.run(spark)
    assert f"chain {chain.tables(spark)}" in said
    assert f"{len(list(WORKED.glob('*.json')))} identical, 0 different, 0 not supported" in said


@pytest.mark.parametrize(
    ("prices", "orders", "products"),
    [
        pytest.param(2_000_000, 20_000_000, 1_000, id="many_rows"),
        pytest.param(5_000_000, 1_000_000, 1, id="hot_key"),
    ],
)
def test_shop_runs_with_one_gigabyte_per_process(
    prices: int,
    orders: int,
    products: int,
    tmp_path: Path,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shop = Shop(tmp_path)
    shop.land(spark, prices, orders, products)
    monkeypatch.delenv("JDK_JAVA_OPTIONS")  # for so many rows, optimizing the code pays off
    with standalone(tmp_path) as address:
        said = run_module("tests.memory_child", address, str(tmp_path))
    due = spark.read.schema("due long").json(str(tmp_path / "orders")).agg(F.sum("due")).collect()
    seconds = prices // products
    assert json.loads(said) == {
        "joined": orders,
        "wrong": 0,
        "joined_sum": due[0][0],
        "versions": prices,
        "current": products,
        "versions_sum": products * (seconds * (seconds - 1) // 2),
    }


def test_operators_with_one_key_run_with_one_gigabyte(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = 5_000_000
    Shop(tmp_path).land(spark, updates, updates, 1)
    monkeypatch.delenv("JDK_JAVA_OPTIONS")
    with standalone(tmp_path) as address:
        said = json.loads(run_module("tests.memory_child", address, str(tmp_path), "operators"))

    per_second = spark.read.schema("due long").json(str(tmp_path / "orders"))
    seconds = per_second.groupBy((F.col("due") + START).alias("t")).agg(F.count("due").alias("n"))
    days = seconds.groupBy(F.expr("t div 86400").alias("day")).agg(F.sum("n").alias("of_day"))
    is_closed = F.expr(f"(day + 1) * 86400 + 3600 <= {seconds.agg(F.max('t')).collect()[0][0]}")
    all_days, closed_days, in_closed = days.agg(
        F.count("day"), F.count_if(is_closed), F.sum(F.when(is_closed, F.col("of_day")))
    ).collect()[0]
    hops = seconds.select(F.explode(F.expr("array(t div 43200, t div 43200 - 1)"))).distinct().count()
    neighbours = seconds.withColumn("before", F.expr("lag(struct(t, n)) over (order by t)"))
    is_next = F.expr("before.t = t - 1")
    # A sliding window ends at each second with orders; another one starts after a second, if the next
    # second also has orders.
    sliding = neighbours.agg(
        F.count("t") + F.count_if(is_next),
        F.sum("n") + F.sum(F.when(is_next, F.expr("before.n + n"))),
    ).collect()[0]
    session = said.pop("session")
    assert session[1:] == [1, updates], "one session, for no two orders are an hour apart"
    assert updates < session[0] < 2 * updates, "a session that grows ends the one before"
    assert said.pop("sliding")[1:] == [*sliding]
    # The second price of each pair is out of order: operators on tables drop it.
    assert said == {
        "daily": [updates, all_days, updates],
        "closed": [closed_days, closed_days, in_closed],
        "hopping": [2 * updates, hops, 2 * updates],
        "counted": [updates, 1, updates],
        "summed": [updates // 2, 1, updates - 1],
        "summed_once": [1, 1, updates - 1],
        "paired": [updates - 1, 1, updates - 1],
        "foreign": [updates - 1, 1, updates - 1],
        "even": [updates, 0, None],
    }


def test_stream_join_of_thousand_matches_per_record_runs_with_one_gigabyte(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A join of two streams with one key stays within the memory. Each order matches all offers within
    a thousand seconds, 500 before it and 500 after it."""
    seconds = 20_000
    Shop(tmp_path).land(spark, seconds, seconds, 1)
    monkeypatch.delenv("JDK_JAVA_OPTIONS")
    with standalone(tmp_path) as address:
        found = json.loads(run_module("tests.memory_child", address, str(tmp_path), "near"))
    orders = spark.read.schema("due long").json(str(tmp_path / "orders"))
    matches = orders.select("due", F.explode(F.sequence(*seconds_range(seconds))).alias("price"))
    expected = matches.agg(F.count("due"), F.sum("price"), F.sum("due")).collect()[0]
    assert found == [*expected]
    assert found[0] > 900 * seconds


def seconds_range(seconds: int) -> tuple[Column, Column]:
    """The first and the last second whose offers match an order."""
    near = NEAR // timedelta(seconds=1)
    first, last = F.col("due") - near, F.col("due") + near
    return F.greatest(F.lit(0), first), F.least(F.lit(seconds - 1), last)
