"""``vt-dagster class-archive``: makes the archive of Spark's classes, from which new JVMs load them.

Runs a small topology in a JVM of its own, which writes the classes that it has loaded when it ends.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NoReturn

import typer
from pyspark import SparkContext
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from vt_dagster.errors import SparkUnavailableError
from vt_dagster.runs.audit import audit
from vt_dagster.runs.run import run_once
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.spark.class_archive import HALF, JVM_OPTIONS, QUIET, ClassArchive
from vt_dagster.spark.session import FEW_QUERIES, build_session, check_java, check_spark_home
from vt_dagster.storage.asset_store import stores_of
from vt_dagster.topology.model import Stream, VersionedTable
from vt_dagster.topology.windows import TumblingWindow

_LIMIT_SECONDS, _EXIT_SECONDS = 1_800, 600
"""Limits for making an archive, and for the end of its JVM: long, because a process of low priority is
slow on a busy machine."""
_RECORDS = 100


def class_archive() -> None:
    """Create an archive of Spark's classes, so that Spark starts faster.

    The first run on a machine makes the archive when it ends. For a container, call this command when
    you build the image.
    """
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(_LIMIT_SECONDS)
    archive = ClassArchive.of(check_java(), check_spark_home())
    try:
        archive.directory().mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=archive.directory(), prefix=HALF) as folder:
            os.chdir(folder)  # Spark may write into its working directory
            made = Path(folder, "made.jsa")
            write(made, work)
            kept = archive.keep(made)
            os.chdir("/")
    except OSError as error:
        raise SparkUnavailableError(
            f"Expected Java to write an archive of its classes in {archive.directory()}, got: "
            f"{error}. Spark works without it; make the directory writable, or use a Java that has "
            "class data sharing."
        ) from None
    typer.echo(f"wrote {kept}, {kept.stat().st_size / 1e6:.0f} MB")


def write(file: Path, work: Callable[[SparkSession, Path], object]) -> None:
    """Starts Spark in this process, calls ``work`` with an empty directory, and ends the JVM. The JVM
    then writes an archive of the classes that it has loaded."""
    dump = f'{FEW_QUERIES[JVM_OPTIONS]} "-XX:ArchiveClassesAtExit={file}" {QUIET}'
    spark = build_session("vt_dagster classes", master="local[2]", conf={JVM_OPTIONS: dump})
    gateway: Any = SparkContext._gateway
    try:
        with tempfile.TemporaryDirectory() as folder:
            work(spark, Path(folder))
        spark.stop()
        gateway.proc.stdin.close()  # so the JVM ends
        gateway.proc.wait(_EXIT_SECONDS)
    finally:
        gateway.proc.kill()


def work(spark: SparkSession, root: Path) -> None:
    """Runs a versioned table, a stream, their join and a windowed count twice, and checks them."""
    schema = StructType().add("key", "string").add("value", "long").add("at", "timestamp")

    def about(name: str) -> dict[str, Any]:
        source = FilesSource(str(root / name))
        return {"name": name, "key": "key", "schema": schema, "timestamp": "at", "source": source}

    prices = VersionedTable(**about("prices"), history_retention=timedelta(days=3650))
    orders = Stream(**about("orders"))
    hour = timedelta(hours=1)
    nodes: list[Stream] = [
        prices,
        orders,
        orders.left_join(
            prices, name="priced", select=["left.*", "right.value as price"], grace_period=hour
        ),
        orders.group_by().windowed_by(TumblingWindow(hour, hour)).count(name="counted"),
    ]
    stores = stores_of(str(root / "warehouse"), spark)
    for start in (0, _RECORDS):
        for name in ("prices", "orders"):
            _write_records(root / name / f"{start}.jsonl", range(start, start + _RECORDS))
        for node in nodes:
            run_once(node, stores, run_id=f"run {start}")
            audit(stores(node), f"run {start}")


def _write_records(file: Path, numbers: Iterable[int]) -> None:
    began = datetime(2024, 1, 1, tzinfo=timezone.utc)
    file.parent.mkdir(exist_ok=True)
    with file.open("w", encoding="utf-8") as lines:
        for i in numbers:
            # Every tenth record comes three minutes late.
            at = began + timedelta(minutes=i - 3 * (i % 10 == 0))
            lines.write(json.dumps({"key": f"k{i % 100}", "value": i, "at": at.isoformat()}) + "\n")


def _too_long(*_: object) -> NoReturn:
    raise TimeoutError(f"no archive after {_LIMIT_SECONDS // 60} minutes")
