"""CPU seconds of a cold process, by stage: ``python bench/cold.py``, a process for each measurement.

A session, then a first run of 1,000 records each of a table, a stream and their join, without Dagster.
``--archive on`` starts from the user's class archive, which ``vt-dagster class-archive`` makes.
``--conf name=value`` adds a Spark setting, such as
``spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1``.

CPU seconds are of Python and its JVM, user and system, from ``/proc``: a clock says little on a machine
that does other work. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import defaultdict
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path

RECORDS, KEYS = 1_000, 100
TICKS = os.sysconf("SC_CLK_TCK")
THREADS = {
    "C1": "compiling fast",
    "C2": "compiling well",
    "G1": "collecting garbage",
    "GC": "collecting garbage",
}
"""The work of a JVM thread, by the beginning of its name."""


def stat_of(path: Path) -> tuple[str, list[str]]:
    """Returns a process's or thread's name and the numbers after it, from ``/proc``."""
    before, _, after = (path / "stat").read_text().rpartition(")")
    return before.partition("(")[2], after.split()


def jvms() -> list[Path]:
    """Returns this process's JVMs."""
    found: list[Path] = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                name, numbers = stat_of(path)
            except OSError:  # the process has ended
                continue
            if name == "java" and int(numbers[1]) == os.getpid():
                found.append(path)
    return found


def cpu_seconds() -> float:
    """Returns the CPU seconds so far of this process, its JVM and its ended children."""
    mine = os.times()
    ended = mine.user + mine.system + mine.children_user + mine.children_system
    return ended + sum(sum(map(int, stat_of(path)[1][11:15])) for path in jvms()) / TICKS


def of_threads() -> list[tuple[str, float]]:
    """Returns the JVM's CPU seconds by the work of its threads, in descending order."""
    found: defaultdict[str, float] = defaultdict(float)
    for jvm in jvms():
        for thread in (jvm / "task").iterdir():
            name, numbers = stat_of(thread)
            found[THREADS.get(name[:2], "all else")] += (int(numbers[11]) + int(numbers[12])) / TICKS
    return sorted(found.items(), key=lambda one: -one[1])


def main(archive: str, conf: dict[str, str]) -> None:
    os.environ["VT_DAGSTER_CLASS_ARCHIVE"] = archive
    marks = [("start", 0.0)]

    def mark(stage: str) -> None:
        marks.append((stage, cpu_seconds()))

    # Imported here, because the imports are the first stage.
    from pyspark.sql.types import StringType, StructField, StructType, TimestampType

    from vt_dagster import FilesSource, Stream, VersionedTable
    from vt_dagster.runs.run import run_once
    from vt_dagster.spark.session import build_session
    from vt_dagster.storage.asset_store import stores_of

    mark("import")
    types = {"k": StringType(), "v": StringType(), "at": TimestampType()}
    schema = StructType([StructField(name, kind) for name, kind in types.items()])
    begin = datetime(2024, 1, 1, tzinfo=timezone.utc)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("prices", "orders"):
            (root / name).mkdir()
            lines = (
                {"k": f"k{i % KEYS}", "v": str(i), "at": (begin + timedelta(minutes=i)).isoformat()}
                for i in range(RECORDS)
            )
            (root / name / "1.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        prices = VersionedTable(
            "prices",
            key="k",
            schema=schema,
            timestamp="at",
            history_retention=timedelta(days=3650),
            source=FilesSource(str(root / "prices")),
        )
        orders = Stream(
            "orders", key="k", schema=schema, timestamp="at", source=FilesSource(str(root / "orders"))
        )
        priced = orders.left_join(prices, name="priced", select=["left.*", "right.v as price"])
        spark = build_session("cold", master="local[2]", conf=conf)
        mark("session")
        stores = stores_of(str(root / "warehouse"), spark)
        for node in (prices, orders, priced):
            assert run_once(node, stores).commit is not None
            mark(node.name)
        for (_, before), (stage, after) in pairwise(marks):
            print(f"{stage:<10} {after - before:5.1f}")
        print(f"{'all':<10} {marks[-1][1]:5.1f}")
        for what, seconds in of_threads():
            print(f"  JVM, {what:<20} {seconds:5.1f}")
        spark.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--archive", choices=("on", "off"), default="off")
    parser.add_argument("--conf", action="append", default=[], help="name=value")
    given = parser.parse_args()
    main(given.archive, dict(one.split("=", 1) for one in given.conf))
