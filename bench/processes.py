"""Runs that Dagster starts in separate processes: from the shell, and from a landing to its commit."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from measure import Outputs, Result, compare, take_turns

from vt_dagster.spark import server
from vt_dagster.storage.arrow_reader import head_of

BIN = Path(sys.executable).parent
RECORDS = 1_000
EXECUTORS = ("in_process_executor", "multiprocess_executor")
INTERVAL = 5
"""Seconds between a sensor's ticks."""

OURS = """
from datetime import timedelta

import dagster as dg
from pyspark.sql.types import StringType, StructField, StructType, TimestampType

from vt_dagster import FilesSource, SparkResource, VersionedTable
from vt_dagster import build_asset, build_checks, build_resources, build_sensor

TYPES = {{"k": StringType(), "v": StringType(), "at": TimestampType()}}

prices = VersionedTable(
    "prices",
    key="k",
    schema=StructType([StructField(name, kind) for name, kind in TYPES.items()]),
    timestamp="at",
    history_retention=timedelta(days=3650),
    source=FilesSource({landing!r}),
)
defs = dg.Definitions(
    assets=[build_asset(prices)],
    asset_checks=[build_checks(prices)],
    sensors=[build_sensor(prices, minimum_interval_seconds={interval}, running=True)],
    resources=build_resources({warehouse!r}, SparkResource(master="local[2]")),
    executor=dg.in_process_executor,
)
"""

THREE = """
from datetime import timedelta

import dagster as dg
from pyspark.sql.types import StringType, StructField, StructType, TimestampType

from vt_dagster import FilesSource, SparkResource, Stream, VersionedTable, build_definitions

TYPES = {{"k": StringType(), "v": StringType(), "at": TimestampType()}}
ABOUT = {{
    "key": "k",
    "schema": StructType([StructField(name, kind) for name, kind in TYPES.items()]),
    "timestamp": "at",
    "source": FilesSource({landing!r}),
}}

prices = VersionedTable("prices", history_retention=timedelta(days=3650), **ABOUT)
orders = Stream("orders", **ABOUT)
priced = orders.left_join(prices, name="priced", select=["left.*", "right.v as price"])
defs = dg.Definitions.merge(
    build_definitions(priced, warehouse={warehouse!r}, spark=SparkResource(master="local[2]")),
    dg.Definitions(executor=dg.{executor}),
)
"""

APPEND = """
from pathlib import Path

import dagster as dg

from vt_dagster import SparkResource

CHECKS = [f"check_{{i}}" for i in range(8)]

@dg.asset
def prices(spark: SparkResource) -> None:
    newest = max(Path({landing!r}).glob("*.jsonl"), key=lambda path: int(path.stem))
    lines = spark.spark_session.read.schema("k string, v string, at timestamp").json(str(newest))
    lines.write.format("delta").mode("append").save({appended!r})

@dg.multi_asset_check(specs=[dg.AssetCheckSpec(name, asset="prices", blocking=True) for name in CHECKS])
def check():
    for name in CHECKS:
        yield dg.AssetCheckResult(asset_key="prices", check_name=name, passed=True)

defs = dg.Definitions(
    assets=[prices],
    asset_checks=[check],
    resources={{"spark": SparkResource(master="local[2]")}},
    executor=dg.in_process_executor,
)
"""

NOTHING = """
import dagster as dg

CHECKS = [f"check_{i}" for i in range(8)]

@dg.asset
def prices() -> None: ...

@dg.multi_asset_check(specs=[dg.AssetCheckSpec(name, asset="prices", blocking=True) for name in CHECKS])
def check():
    for name in CHECKS:
        yield dg.AssetCheckResult(asset_key="prices", check_name=name, passed=True)

defs = dg.Definitions(assets=[prices], asset_checks=[check], executor=dg.in_process_executor)
"""


class Project:
    """A folder with code locations, a Dagster instance, and a landing directory."""

    def __init__(self, root: Path) -> None:
        self.root, self.warehouse, self.landed = root, str(root / "warehouse"), 0
        self.landing = root / "landing"
        self.landing.mkdir(parents=True)
        self.home = root / "home"
        self.home.mkdir()
        (self.home / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
        places = {"landing": str(self.landing), "warehouse": self.warehouse, "interval": INTERVAL}
        (root / "ours.py").write_text(OURS.format(**places))
        (root / "append.py").write_text(APPEND.format(appended=str(root / "appended"), **places))
        (root / "nothing.py").write_text(NOTHING)
        for executor in EXECUTORS:
            (root / f"{executor}.py").write_text(THREE.format(**places, executor=executor))

    def land(self) -> None:
        """Lands the next file: records of 100 keys, one per minute."""
        start, self.landed = self.landed * RECORDS, self.landed + 1
        lines = (
            {"k": f"k{i % 100}", "v": str(i), "at": f"2024-01-{1 + i // 1440:02d}T{minute(i)}:00Z"}
            for i in range(start, start + RECORDS)
        )
        path = self.landing / f".{self.landed}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        path.rename(self.landing / f"{self.landed}.jsonl")

    def materialize(self, module: str, warm: bool = False, select: str = "prices") -> None:
        words = ["dagster", "asset", "materialize", "--select", select, "-f", f"{module}.py"]
        done = subprocess.run(
            [str(BIN / words[0]), *words[1:]],
            cwd=self.root,
            env=self.environment(warm),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise AssertionError(done.stdout + done.stderr)

    def environment(self, warm: bool) -> dict[str, str]:
        named = {server.NAMED: server.SERVER} if warm else {}
        return {**os.environ, "DAGSTER_HOME": str(self.home), **named}

    @property
    def batch(self) -> int:
        """The last committed batch; 0 before the first."""
        with contextlib.suppress(Exception):  # before the first commit there is no log
            return head_of(self.warehouse, "prices")[1].batch
        return 0

    @contextlib.contextmanager
    def daemon(self, warm: bool) -> Iterator[None]:
        log = self.root / "daemon.log"
        with log.open("wb") as told:
            running = subprocess.Popen(
                [str(BIN / "dagster-daemon"), "run", "-f", "ours.py"],
                cwd=self.root,
                env=self.environment(warm),
                stdout=told,
                stderr=told,
            )
        try:
            yield
        finally:
            running.terminate()
            running.wait(60)


def minute(i: int) -> str:
    return f"{i // 60 % 24:02d}:{i % 60:02d}"


def run(repeat: int, ticks: int, outputs: Outputs) -> tuple[list[Result], list[str]]:
    """Times runs in separate processes, compared with an asset that does nothing. Then times ``ticks``
    files that land one after the other, with a daemon whose sensor finds them."""
    found = server.running()
    if found is not None:
        raise AssertionError("a Spark server is there already: vt-dagster spark stop")
    server.start("local[2]")
    try:
        results = _from_the_shell(Project(Path(outputs.fresh("shell"))), repeat)
        notes: list[str] = []
        for warm in (True, False):
            seconds = _landed(Project(Path(outputs.fresh(f"daemon {warm}"))), warm, ticks)
            what = "the server" if warm else "a JVM a run"
            p50, p95 = statistics.median(seconds), sorted(seconds)[int(0.95 * (len(seconds) - 1))]
            for name, value in (("p50", p50), ("p95", p95)):
                line = f"file lands -> committed, sensor and daemon, {what}: {name} of {ticks}"
                peer = "the sensor's interval"
                results.append(compare(line, RECORDS, [value], peer, [float(INTERVAL)], None))
    finally:
        server.stop()
    return results, notes


def executors(repeat: int, outputs: Outputs) -> tuple[list[Result], list[str]]:
    """Times a run of three assets and their checks in one process, and with a process per asset."""
    projects = {executor: Project(Path(outputs.fresh(executor))) for executor in EXECUTORS}

    def news(executor: str) -> None:
        projects[executor].land()
        projects[executor].materialize(executor, select="*")

    one, many = EXECUTORS
    times = take_turns({one: lambda: news(one), many: lambda: news(many)}, repeat)
    for project in projects.values():
        head = head_of(project.warehouse, "priced")[1]
        if sum(head.next_offset.values()) != RECORDS * project.landed:
            raise AssertionError(f"expected the records of {project.landed} files, got {head}")
    line = f"table, stream and join of {RECORDS:,} records, shell to shell, one process"
    peer = "a process for each asset, and for its checks"
    return [compare(line, RECORDS, times[one], peer, times[many], None)], [
        "executors: each joined all its records"
    ]


def _from_the_shell(project: Project, repeat: int) -> list[Result]:
    def news(warm: bool) -> None:
        project.land()
        project.materialize("ours", warm)

    news(True)
    times = take_turns(
        {
            "warm": lambda: news(True),
            "idle": lambda: project.materialize("ours", True),
            "cold": lambda: news(False),
            "nothing": lambda: project.materialize("nothing"),
            "appends warm": lambda: project.materialize("append", True),
            "appends cold": lambda: project.materialize("append"),
        },
        repeat,
    )
    if project.batch != project.landed:
        raise AssertionError(f"{project.landed} files landed, batch {project.batch}")
    peer = "an asset and eight checks that do nothing"
    lines = (
        ("warm", f"materialize of {RECORDS:,} records, shell to shell, with the server", 1.5),
        ("cold", f"materialize of {RECORDS:,} records, shell to shell, a JVM of its own", None),
        ("idle", "materialize where nothing is new, shell to shell", None),
    )
    results = [compare(what, RECORDS, times[n], peer, times["nothing"], t) for n, what, t in lines]
    floor = "an asset that appends the same lines to Delta by Spark alone, and such checks"
    for name, what, _ in lines[:2]:
        results.append(compare(what, RECORDS, times[name], floor, times[f"appends {name}"], None))
    return results


def _landed(project: Project, warm: bool, ticks: int) -> list[float]:
    seconds: list[float] = []
    with project.daemon(warm):
        for tick in range(-1, ticks):  # the first waits for the daemon to start: not counted
            project.land()
            landed = time.monotonic()
            while project.batch < project.landed:
                if time.monotonic() > landed + 300:
                    raise AssertionError((project.root / "daemon.log").read_text()[-3000:])
                time.sleep(0.05)
            if tick >= 0:
                seconds.append(time.monotonic() - landed)
            time.sleep(INTERVAL * (tick % 7) / 7)  # files land at different times between ticks
    return seconds
