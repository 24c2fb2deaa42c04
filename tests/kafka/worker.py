"""Ticks both sensors, and does the runs that they request: ``ROOT SERVERS PRICES SALES MOST``. Prints
``asked`` before a run, and ``idle`` if none is requested; then it waits for a line on stdin."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.kafka.pipeline import Pipeline
from tests.kafka.test_end_to_end import ticks, topology
from tests.kafka.topics import Topics
from vt_dagster.spark.session import build_session


def main() -> None:
    root, servers, prices, sales, most = sys.argv[1:]
    conf = {"spark.sql.shuffle.partitions": "2"}
    spark = build_session("worker", master="local[2]", conf=conf)
    pipeline, going_on = Pipeline(Path(root), spark, checked=False), True
    nodes = topology(Topics(servers), prices, sales, int(most))
    while going_on:
        asked = False
        for _ in ticks(pipeline, nodes):
            print("asked", flush=True)
            asked = True
        if not asked:
            print("idle", flush=True)
            going_on = bool(sys.stdin.readline())


if __name__ == "__main__":
    main()
