"""The operators and the storage on Spark processes of their own: a local cluster, a standalone cluster
with two workers, and a Spark Connect server; and within little memory, whatever the data."""

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
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from tests.cluster_child import WORKED
from tests.memory_child import Shop
from tests.storage.chain import Chain
from tests.storage.topology import Topology, land_first, land_second
from vt_dagster.spark.jars import resolve_jars
from vt_dagster.spark.session import DELTA_CATALOG, DELTA_EXTENSION

pytestmark = [pytest.mark.endurance, pytest.mark.cluster, pytest.mark.timeout(3_600)]

ROOT = Path(__file__).parent.parent
SPARK = Path(pyspark.__file__).parent / "bin"
CHAIN_RECORDS = 250_000
"""So many that a run's records are cut into chunks."""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextlib.contextmanager
def processes(folder: Path, *commands: list[str]) -> Iterator[None]:
    """Processes that run for as long as they are needed."""
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


def until_open(port: int, folder: Path) -> None:
    """Waits for a server that has just been started."""
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
        until_open(port, folder)
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
        until_open(port, folder)
        yield f"sc://127.0.0.1:{port}"


@contextlib.contextmanager
def local_cluster(folder: Path) -> Iterator[str]:
    work = SPARK.parent / "work"  # where its executors run; no setting moves it
    others = set(work.glob("*"))
    try:
        yield "local-cluster[2,1,1024]"
    finally:
        for left in set(work.glob("*")) - others:
            shutil.rmtree(left, ignore_errors=True)


def child(*arguments: str) -> str:
    """What a module prints that runs in a process of its own."""
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
def test_scenarios_and_tables_are_the_same(
    kind: Callable[[Path], AbstractContextManager[str]], tmp_path: Path, spark: SparkSession
) -> None:
    here, chain, tables = Topology(tmp_path / "here"), Chain(tmp_path / "here"), tmp_path / "tables"
    chain.land(spark, CHAIN_RECORDS)
    shutil.copytree(tmp_path / "here", tables)
    with kind(tmp_path) as address:
        said = child("tests.cluster_child", address, str(tables))
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
def test_one_gigabyte_a_process_is_enough(
    prices: int,
    orders: int,
    products: int,
    tmp_path: Path,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shop = Shop(tmp_path)
    shop.land(spark, prices, orders, products)
    monkeypatch.delenv("JDK_JAVA_OPTIONS")  # so many rows are worth compiling well for
    with standalone(tmp_path) as address:
        said = child("tests.memory_child", address, str(tmp_path))
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
