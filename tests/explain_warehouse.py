"""A warehouse with a result of each operator over random records, whose rows the tests explain."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.types import IntegerType, StringType, StructField, StructType, TimestampType

from vt_dagster import (
    FilesSource,
    SessionWindow,
    SlidingWindow,
    Stream,
    Table,
    TumblingWindow,
    UntilTimeLimit,
    UntilWindowCloses,
    VersionedTable,
)
from vt_dagster.runs.run import run_once
from vt_dagster.storage.asset_store import stores_of
from vt_dagster.topology.model import topological

EPOCH = datetime(2020, 1, 1, tzinfo=timezone.utc)
VALUES = [
    StructField("k", StringType()),
    StructField("g", StringType()),
    StructField("n", IntegerType()),
]
SCHEMA = StructType([*VALUES, StructField("timestamp", TimestampType())])
LONG, MINUTE = timedelta(days=9000), timedelta(minutes=1)
SOURCES = ("left", "right", "clicks", "views")
RECORDS, ROUNDS = 24, 2
ONCE = (
    *("views", "session", "sliding", "refers", "of_left", "of_clicks"),
    *("strict", "limited", "final", "either"),
)
"""Nodes that run in the last round only, and process the records of all rounds in one run."""
JOINED = ["left.k", "left.g as lg", "left.n as ln", "right.g as rg", "right.n as rn"]
COUNTED = {"count": "count(*)", "sum": "sum(n)"}
WINDOWS = {
    "tumbling": TumblingWindow(4 * MINUTE, grace=MINUTE),
    "session": SessionWindow(MINUTE, grace=MINUTE),
    "sliding": SlidingWindow(3 * MINUTE, grace=MINUTE),
}
WITHIN = {"before": MINUTE, "after": 2 * MINUTE, "grace": 2 * MINUTE}


@dataclass
class Warehouse:
    """A warehouse in ``root``, with its nodes by name."""

    root: Path
    nodes: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        about: dict[str, Any] = {"key": "k", "schema": SCHEMA, "tombstone": "n is null"}
        left = VersionedTable(
            "left", **about, partitions=2, history_retention=LONG, source=self._source("left")
        )
        right = Table("right", **about, partitions=2, source=self._source("right"))
        clicks, views = (Stream(n, **about, source=self._source(n)) for n in ("clicks", "views"))
        self.nodes = {n.name: n for n in topological(_operators(left, right, clicks, views))}

    def _source(self, name: str) -> FilesSource:
        return FilesSource(str(self.root / name))

    @property
    def path(self) -> str:
        return str(self.root / "warehouse")

    def build(self, spark: SparkSession) -> None:
        """In each round, lands random records and runs the nodes (those of ``ONCE`` in the last)."""
        chance, stores, number = random.Random(24), stores_of(self.path, spark), 0
        for place in range(ROUNDS):
            for name in SOURCES:
                (self.root / name).mkdir(parents=True, exist_ok=True)
                lines: list[str] = []
                for _ in range(RECORDS):
                    number += 1
                    lines.append(json.dumps(_record(chance, number, place)))
                text = "".join(f"{line}\n" for line in lines)
                (self.root / name / f"{place}.jsonl").write_text(text)
            for name, node in self.nodes.items():
                if name not in ONCE or place == ROUNDS - 1:
                    run_once(node, stores, run_id=f"round {place}")


def _record(chance: random.Random, number: int, place: int) -> Mapping[str, Any]:
    moment = EPOCH + timedelta(minutes=10 + 5 * place, seconds=30 * chance.randrange(24))
    empty = chance.random() < 0.2
    return {
        "k": chance.choice("abc"),
        "g": None if empty else chance.choice("abc"),
        "n": None if empty else number,
        "timestamp": moment.isoformat(),
    }


def _operators(left: Any, right: Any, clicks: Any, views: Any) -> list[Any]:
    own = clicks.group_by()
    windowed = {
        name: own.windowed_by(window).aggregate(COUNTED, name=name) for name, window in WINDOWS.items()
    }
    grouped = clicks.group_by("g").aggregate(COUNTED, name="of_clicks")
    return [
        left.outer_join(right, name="outer", select=JOINED),
        left.join(right, foreign_key="g", name="refers", select=JOINED),
        left.group_by("g").aggregate(COUNTED, name="of_left"),
        grouped,
        *windowed.values(),
        windowed["tumbling"].suppress(UntilWindowCloses(), name="final"),
        grouped.suppress(UntilTimeLimit(2 * MINUTE), name="limited"),
        clicks.outer_join(views, name="either", select=JOINED, **WITHIN),
        clicks.left_join(left, name="corrected", select=JOINED, corrected_for=timedelta(days=1)),
        clicks.left_join(
            left,
            name="strict",
            select=JOINED,
            at="before",
            max_age=2 * MINUTE,
            as_known="when_recorded",
        ),
    ]
