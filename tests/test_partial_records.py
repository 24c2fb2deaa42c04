"""Records that say a part of their row: ``only_columns`` and ``ignore_null_updates``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from random import Random
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import (
    ArrayType,
    IntegerType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from vt_dagster import VersionedTable
from vt_dagster.testing import TopologyTestDriver

RETENTION = timedelta(seconds=40)
START = datetime(2024, 6, 1, tzinfo=timezone.utc)
PARTS = ("tier", "city", "tags")
SCHEMA = StructType(
    [
        StructField("k", StringType()),
        StructField("tier", StringType()),
        StructField("city", StringType()),
        StructField("tags", MapType(StringType(), IntegerType())),
        StructField("given", ArrayType(StringType())),
        StructField("timestamp", TimestampType()),
    ]
)


def at(second: int) -> datetime:
    return START + timedelta(seconds=second)


def table(**more: Any) -> VersionedTable:
    about: dict[str, Any] = {"key": "k", "schema": SCHEMA, "history_retention": RETENTION}
    return VersionedTable("members", **{**about, **more})


@dataclass(frozen=True)
class Change:
    k: str
    second: int
    given: tuple[str, ...] | None
    values: tuple[Any, ...]
    deleted: bool = False

    @property
    def row(self) -> dict[str, Any]:
        told = dict(zip(PARTS, self.values, strict=True))
        return {"k": self.k, **told, "given": self.given, "timestamp": at(self.second)}


def expected(arrived: Sequence[Change], retention: int) -> list[tuple[Any, ...]]:
    """The versions by the definition: each key's accepted records in order of time, each put on top of
    the one before it."""
    now = -(10**9)
    accepted: list[Change] = []
    for one in arrived:
        if one.second >= now - retention:
            accepted.append(one)
            now = max(now, one.second)
    found: list[tuple[Any, ...]] = []
    for key in sorted({one.k for one in accepted}):
        row: dict[str, Any] | None = None
        own: dict[int, dict[str, Any] | None] = {}
        for one in sorted((c for c in accepted if c.k == key), key=lambda c: c.second):
            before = row or dict.fromkeys(PARTS)
            said = dict(zip(PARTS, one.values, strict=True))
            given = PARTS if one.given is None else one.given
            row = None if one.deleted else {c: said[c] if c in given else before[c] for c in PARTS}
            own[one.second] = row
        ends = [*list(own)[1:], None]
        for (second, row), end in zip(own.items(), ends, strict=True):
            expired = end is not None and end <= now - retention
            if not expired and not (row is None and second < now - retention):
                found.append((key, second, end, row))
    return found


def told(driver: TopologyTestDriver) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for r in driver.versions("members"):
        begin, end = (
            None if r[c] is None else round((r[c] - START).total_seconds())
            for c in ("valid_from", "valid_to")
        )
        row = None if r["is_tombstone"] else {c: as_map(r[c]) if c == "tags" else r[c] for c in PARTS}
        found.append((r["k"], begin, end, row))
    return sorted(found, key=lambda v: v[:2])


def as_map(value: Any) -> Any:
    return None if value is None else dict(value)


def some_changes(random: Random, key: str, n: int, last: int) -> list[Change]:
    """With ties, deletions, nulls, records that say nothing or all, and late ones."""
    found: list[Change] = []
    for i in range(n):
        deleted = random.random() < 0.1
        given = None if random.random() < 0.2 else tuple(c for c in PARTS if random.random() < 0.4)
        values = (
            random.choice(["gold", "silver", None, f"t{i}"]),
            random.choice(["Rome", "Oslo", None]),
            random.choice([{"a": i}, {}, None]),
        )
        found.append(Change(key, random.randrange(last), given, values, deleted))
    return found


def test_whatever_the_order_and_the_cuts(spark: SparkSession) -> None:
    """Many keys at once, in random order, in runs of random lengths: the fold by time, and the same log
    however it is cut."""
    random = Random(11)
    arrived = [c for n in range(60) for c in some_changes(random, f"k{n:03}", random.randint(1, 14), 60)]
    random.shuffle(arrived)
    arrived.sort(key=lambda one: one.second + random.choice([0, 0, 10, 30]))
    logs: list[Any] = []
    for cuts in ([], sorted(random.sample(range(1, len(arrived)), 4))):
        driver = TopologyTestDriver(
            table(only_columns="given", deleted_when="size(given) = 1 and given[0] = 'gone'"),
            spark=spark,
        )
        rows = [{**c.row, **({"given": ["gone"]} if c.deleted else {})} for c in arrived]
        for start, end in zip([0, *cuts], [*cuts, len(rows)], strict=True):
            driver.pipe("members", *rows[start:end])
            assert told(driver) == expected(arrived[:end], 40)
        logs.append([{c: r[c] for c in r if c != "recorded_at"} for r in driver.read("members")])
    assert logs[0] == logs[1]
    assert any(r["carried"] > 1 for r in logs[0])


if __name__ == "__main__":
    pytest.main([__file__, "-x", "-q"])
