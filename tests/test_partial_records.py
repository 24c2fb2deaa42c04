"""Partial records give only some columns of a row: ``only_columns`` and ``ignore_null_updates``."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VarcharType,
)

from vt_dagster import (
    FilesSource,
    SnapshotSource,
    Stream,
    TopologyError,
    VersionedTable,
    explain,
    lateness,
)
from vt_dagster.columns import IS_TOMBSTONE, PROPAGATED_FROM, PROVIDED_COLUMNS, TIMESTAMP
from vt_dagster.core import partial_updates
from vt_dagster.orchestration.translator import code_version
from vt_dagster.runs.audit import audit
from vt_dagster.runs.erase import erase
from vt_dagster.runs.replay import replay
from vt_dagster.runs.run import run_once
from vt_dagster.runs.truncate_log import truncate_logs
from vt_dagster.storage.arrow_reader import look_up
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.storage.stale_reads import Read, stale_reads
from vt_dagster.testing import TopologyTestDriver

pytestmark = pytest.mark.usefixtures("few_rows")


RETENTION = timedelta(seconds=40)
START = datetime(2024, 6, 1, tzinfo=timezone.utc)
GONE = "size(given) = 1 and given[0] = 'gone'"
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

ORDER = StructType([SCHEMA["k"], StructField("n", IntegerType()), SCHEMA["timestamp"]])
NAME = StructType([SCHEMA["k"], StructField("name", StringType()), SCHEMA["timestamp"]])


def at(second: int) -> datetime:
    return START + timedelta(seconds=second)


def seconds(moment: datetime | None) -> int | None:
    return None if moment is None else round((moment - START).total_seconds())


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
        told = dict(zip((*PARTS, *ALWAYS), self.values, strict=False))
        return {"k": self.k, **told, "given": self.given, "timestamp": at(self.second)}

    @property
    def row_or_deletion(self) -> dict[str, Any]:
        return {**self.row, "given": ["gone"]} if self.deleted else self.row


def expected(arrived: Sequence[Change], retention: int) -> list[tuple[Any, ...]]:
    """The versions by the definition: for each key, the accepted records in order of time. Each record
    changes the row of the record before it."""
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


def version_rows(driver: TopologyTestDriver) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for r in driver.versions("members"):
        begin, end = (seconds(r[c]) for c in ("valid_from", "valid_to"))
        row = None if r["is_tombstone"] else {c: as_map(r[c]) if c == "tags" else r[c] for c in PARTS}
        found.append((r["k"], begin, end, row))
    return sorted(found, key=lambda v: v[:2])


def as_map(value: Any) -> Any:
    return None if value is None else dict(value)


def random_changes(random: Random, key: str, n: int, last: int) -> list[Change]:
    """Random changes of a key, with ties, deletions, nulls, and records that give no or all columns. A
    change may be late."""
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


def test_versions_equal_fold_for_any_order_and_split(spark: SparkSession) -> None:
    """Versions are the fold of each key's records by time, for many keys in random order. The log is
    the same if the records are split into two runs and the kernel gets few rows at a time."""
    random, arrived = Random(11), list[Change]()
    for n in range(50):
        arrived += random_changes(random, f"k{n:03}", random.randint(1, 14), 60)
    random.shuffle(arrived)
    arrived.sort(key=lambda one: one.second + random.choice([0, 0, 10, 30, 50]))
    rows = [c.row_or_deletion for c in arrived]
    node = table(only_columns="given", deleted_when=GONE)
    logs: list[Any] = []
    for cuts, at_once in ([], 10_000), (random.sample(range(1, len(arrived)), 1), 3):
        driver = TopologyTestDriver(node, spark=spark)
        with batches_of(spark, at_once):
            for start, end in zip([0, *cuts], [*cuts, len(rows)], strict=True):
                driver.pipe("members", *rows[start:end])
                assert version_rows(driver) == expected(arrived[:end], 40)
        logs.append([{c: r[c] for c in r if c != "recorded_at"} for r in driver.read("members")])
    assert logs[0] == logs[1]
    assert any(r["propagated_from"] > 1 for r in logs[0])
    metrics = driver.metrics("members")
    assert metrics["applied"] + metrics["late"] == len(arrived)
    assert metrics["applied"] + metrics["carried"] == len(logs[0])


@contextmanager
def batches_of(spark: SparkSession, rows: int) -> Generator[None]:
    """Inside this context, a kernel gets at most this number of rows at once."""
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(name)
    spark.conf.set(name, rows)
    try:
        yield
    finally:
        spark.conf.set(name, str(before))


def put(k: str, second: int, given: Any = None, **values: Any) -> dict[str, Any]:
    told = {"tier": None, "city": None, "tags": None, **values}
    return {"k": k, "timestamp": at(second), "given": given, **told}


def rows_of(driver: TopologyTestDriver, *columns: str) -> list[tuple[Any, ...]]:
    found = driver.versions("members")
    return [
        (seconds(r["valid_from"]), *(r[c] for c in columns)) if not r["is_tombstone"] else None
        for r in found
    ]  # pyright: ignore[reportReturnType]


def test_late_value_carries_into_later_versions(spark: SparkSession) -> None:
    """A late record's column holds in later versions, until a version whose own record gives the
    column, or until a deletion. Each changed version gets one more row in the log."""
    driver = TopologyTestDriver(table(only_columns="given", deleted_when="tier = 'gone'"), spark=spark)
    driver.pipe(
        "members",
        put("a", 1, tier="gold", city="Rome"),
        put("a", 10, ["city"], city="Oslo"),
        put("a", 20, ["city"], city="Bonn"),
        put("a", 30, ["tier"], tier="silver"),
    )
    driver.read("members")
    driver.pipe("members", put("a", 5, ["tier", "city"], tier="iron", city="Kyiv"))
    assert rows_of(driver, "tier", "city") == [
        (1, "gold", "Rome"),
        (5, "iron", "Kyiv"),
        (10, "iron", "Oslo"),
        (20, "iron", "Bonn"),
        (30, "silver", "Bonn"),
    ]
    log = driver.read("members")
    assert [(seconds(r["timestamp"]), r["propagated_from"], r["provided_columns"]) for r in log] == [
        (5, 0, ["tier", "city"]),
        (10, 1, ["city"]),
        (20, 2, ["city"]),
    ]
    assert [r["is_latest"] for r in log] == [False] * 3
    driver.pipe("members", put("a", 15, tier="gone"))
    assert rows_of(driver, "tier", "city") == [
        (1, "gold", "Rome"),
        (5, "iron", "Kyiv"),
        (10, "iron", "Oslo"),
        None,
        (20, None, "Bonn"),
        (30, "silver", "Bonn"),
    ]
    assert driver.metrics("members") == {"waiting": 0, "applied": 6, "carried": 3}
    # The newest version changes: its row in the log is the latest, so downstream assets get the change.
    driver.read("members")
    driver.pipe("members", put("a", 25, ["city"], city="Lima"))
    assert [(r["is_latest"], r["city"], r["old"]) for r in driver.read("members")][-1] == (
        True,
        "Lima",
        {"tier": "silver", "city": "Bonn", "tags": None, "given": None, "timestamp": at(30)},
    )


def test_late_negative_zero_carries_into_later_versions() -> None:
    """A late -0.0 replaces the 0.0 that a later record of the run inherits: in a double and in a list
    of doubles. NaN in the rows does not matter."""
    kernel: Any = partial_updates
    names = ["x", "xs", "y", *(TIMESTAMP, IS_TOMBSTONE, PROVIDED_COLUMNS, "n", PROPAGATED_FROM)]
    doubles, gives_x = (0.0, math.nan, -0.0, 1.0), (True, False, True, False)
    times, floors = (1, 3, 2, 4), (2, 2, 4, None)
    rows = pa.table(
        {
            "x": pa.array(doubles),
            "xs": pa.array([[one] for one in doubles]),
            "y": pa.array([math.nan] * 4),
            TIMESTAMP: pa.array(times, pa.timestamp("us", "UTC")),
            IS_TOMBSTONE: pa.array([False] * 4),
            PROVIDED_COLUMNS: pa.array([["x", "xs"] if gives else ["y"] for gives in gives_x]),
            "n": pa.array(range(4)),
            "_kind": pa.array([1] * 4),
            "_time": pa.array(times),
            "_floor": pa.array(floors, pa.int64()),
        }
    )
    columns = kernel._Columns(("x", "xs", "y"), {"x": 0, "xs": 1, "y": 2}, ())
    made = kernel._merge_batches(iter(rows.to_batches()), columns, names)
    found = [row for batch in made for row in batch.to_pylist()]
    assert [(row["n"], row[PROPAGATED_FROM], str(row["x"]), str(row["xs"])) for row in found] == [
        (0, 0, "0.0", "[0.0]"),
        (1, 0, "0.0", "[0.0]"),
        (2, 0, "-0.0", "[-0.0]"),
        (2, 1, "-0.0", "[-0.0]"),
        (3, 0, "-0.0", "[-0.0]"),
    ]


def test_records_of_same_time_merge_into_one_version(spark: SparkSession) -> None:
    """The version has the columns of both records. If both give a column, the later arrival counts."""
    driver = TopologyTestDriver(table(only_columns="given"), spark=spark)
    driver.pipe("members", put("a", 1, tier="gold", city="Rome", tags={"x": 1}))
    driver.pipe("members", put("a", 5, ["tier"], tier="iron"), put("a", 5, ["city"], city="Oslo"))
    driver.pipe("members", put("a", 5, ["city"], city="Bonn"))
    driver.pipe("members", put("a", 3, ["tier", "city"], tier="late", city="late", tags={"x": 9}))
    assert rows_of(driver, "tier", "city", "provided_columns")[2] == (
        5,
        "iron",
        "Bonn",
        ["tier", "city"],
    )


@pytest.mark.parametrize(
    ("setting", "kept"),
    [
        ({"ignore_null_updates": True}, ("gold", "Rome", [("x", 1)])),
        ({"ignore_null_updates": ["city"]}, (None, "Rome", None)),
        ({"only_columns": ["tags", "tier"]}, (None, "Rome", None)),
        (
            {"only_columns": ["tags", "tier"], "ignore_null_updates": ["tags"]},
            (None, "Rome", [("x", 1)]),
        ),
        ({}, (None, None, None)),
    ],
)
def test_meaning_of_null(spark: SparkSession, setting: dict[str, Any], kept: Any) -> None:
    driver = TopologyTestDriver(table(**setting), spark=spark)
    first = {"tier": "gold", "tags": {"x": 1}}
    driver.pipe("members", put("a", 1, city="Rome", **first), put("a", 5))
    if "only_columns" in setting:
        # A column that no record gives stays null.
        assert rows_of(driver, "city") == [(1, None), (5, None)]
        return
    assert rows_of(driver, *PARTS)[1] == (5, *kept)


@pytest.mark.parametrize(
    "only_columns", ["changed", "from_json(changed, 'array<string>')", "split(changed, ' *, *')"]
)
def test_column_names_as_json_or_comma_list(spark: SparkSession, only_columns: str) -> None:
    """The names are a JSON array or a list with commas, in a column that the table does not have. Null
    means all columns."""
    driver = TopologyTestDriver(table(only_columns=only_columns), spark=spark)
    some = "city , other" if "split" in only_columns else '["city", "other"]'
    driver.pipe(
        "members",
        put("a", 1, tier="gold", city="Rome", changed=None),
        put("a", 5, tier="x", city="Oslo", changed=some),
        put("a", 7, tier="x", city="x", changed="" if "json" not in only_columns else "[]"),
        put("a", 9, tier="iron", changed=None),
    )
    assert rows_of(driver, "tier", "city") == [
        (1, "gold", "Rome"),
        (5, "gold", "Oslo"),
        (7, "gold", "Oslo"),
        (9, "iron", None),
    ]


def test_record_with_unknown_columns_is_quarantined(spark: SparkSession) -> None:
    """A record whose columns are unknown is quarantined. Else its nulls would replace existing
    values."""
    node = table(only_columns="if(tier = 'bad', array(raise_error('no')), given)")
    driver = TopologyTestDriver(node, spark=spark)
    driver.pipe("members", put("a", 1, tier="gold"), put("a", 5, tier="bad"))
    assert driver.metrics("members")["quarantined/unknown_columns"] == 1
    driver = TopologyTestDriver(table(only_columns="changed"), spark=spark)
    driver.pipe("members", put("a", 1, tier="gold", changed='["tier"'), put("a", 5, tier="iron"))
    assert driver.metrics("members")["quarantined/unknown_columns"] == 1
    assert rows_of(driver, "tier") == [(5, "iron")]


def test_version_does_not_inherit_timestamp_or_end(spark: SparkSession) -> None:
    """A version does not inherit the timestamp or the end of the version before it. A record may give a
    renamed column by its old or new name."""
    own = [*SCHEMA.fields[:4], StructField("changed_at", TimestampType())]
    columns = StructType([*own, StructField("until", TimestampType())])
    node = table(
        schema=columns,
        timestamp="changed_at",
        valid_until="until",
        only_columns="given",
        renamed={"town": "city"},
    )
    driver = TopologyTestDriver(node, spark=spark)
    none = dict.fromkeys(("tier", "city", "tags", "until"))
    first = {**none, "k": "a", "changed_at": at(1), "until": at(4), "city": "Rome", "given": None}
    driver.pipe("members", first)
    driver.pipe("members", {**none, "k": "a", "changed_at": at(9), "given": '["tier"]', "tier": "x"})
    driver.pipe("members", {**none, "k": "a", "changed_at": at(7), "given": "town", "city": "Oslo"})
    found = [
        (
            seconds(r["valid_from"]),
            seconds(r["valid_to"]),
            r["city"],
            r["tier"],
            seconds(r["changed_at"]),
        )
        for r in driver.versions("members")
    ]
    assert found == [(1, 4, "Rome", None, 1), (7, 9, "Oslo", None, 7), (9, None, "Oslo", "x", 9)]


def test_partial_records_with_new_version_on(spark: SparkSession) -> None:
    """``new_version_on`` compares whole rows, after partial records are applied."""
    random, arrived = Random(5), list[Change]()
    for n in range(25):
        arrived += random_changes(random, f"k{n:03}", 8, 40)
    random.shuffle(arrived)
    node = table(only_columns="given", deleted_when=GONE, new_version_on=["city"])
    driver = TopologyTestDriver(node, spark=spark)
    rows = [c.row_or_deletion for c in arrived]
    driver.pipe("members", *rows[:90])
    driver.pipe("members", *rows[90:])
    whole = [(k, begin, end, row) for k, begin, end, row in expected(arrived, 40)]
    collapsed: list[tuple[Any, ...]] = []
    for k, begin, end, row in whole:
        last = collapsed[-1] if collapsed and collapsed[-1][0] == k else None
        if last and last[3] is not None and row is not None and last[3]["city"] == row["city"]:
            collapsed[-1] = (*last[:2], end, last[3])
        else:
            collapsed.append((k, begin, end, row))
    assert version_rows(driver) == collapsed


# -- with a tie-break ---------------------------------------------------------------------------------

TIED = StructType(
    [*SCHEMA.fields, StructField("n", IntegerType()), StructField("until", TimestampType())]
)
ALWAYS = ("n", "until")


def tied_versions(arrived: Sequence[Change]) -> tuple[list[tuple[Any, ...]], int]:
    """The versions by the definition, and how many records lost all columns. For a key and time, each
    column is from the record that provides it with the largest ``n``; of equal ones, from the last."""

    def tie(one: Change) -> int:
        return -1 if one.values[3] is None else one.values[3]

    def provides(one: Change, column: str) -> bool:
        return one.deleted or one.given is None or column in (*one.given, *ALWAYS)

    columns, lost = (*PARTS, "given", *ALWAYS), 0
    found: list[tuple[Any, ...]] = []
    for key in sorted({one.k for one in arrived}):
        row: dict[str, Any] = {}
        for second in sorted({one.second for one in arrived if one.k == key}):
            givers: dict[str, Change] = {}
            for one in (c for c in arrived if (c.k, c.second) == (key, second)):
                its = [c for c in columns if provides(one, c)]
                won = [c for c in its if c not in givers or tie(givers[c]) <= tie(one)]
                lost += not won
                givers |= dict.fromkeys(won, one)
            new: dict[str, Any] = {c: row.get(c) for c in (*PARTS, "given")}
            for c, giver in givers.items():
                own = {**giver.row, "given": giver.given and [*giver.given]}
                new[c] = None if giver.deleted and not givers["n"].deleted else own[c]
            largest = tie(givers["n"])
            smaller = {c: g.values[3] for c, g in givers.items() if tie(g) < largest}
            given = None if len(givers) == len(columns) else {*givers}
            deleted = givers["n"].deleted
            row = {} if deleted else new
            found.append((key, second, None if deleted else new, given, smaller or None))
    return found, lost


def tied_changes(random: Random, key: str, many: int) -> list[Change]:
    found: list[Change] = []
    for one in random_changes(random, key, many, 4):
        n, until = random.choice([None, 0, 1, 2, 3]), random.choice([None, at(9)])
        given = None if one.given is None else tuple({*one.given, *random.sample(["given", "n"], 1)})
        found.append(replace(one, given=given, values=(*one.values, n, until)))
    return found


def test_tie_break_decides_per_column(spark: SparkSession) -> None:
    """Of the records of one time, each column is from the one that wins the tie-break. This holds
    however records are split into runs, and in two orders of arrival."""
    random, arrived = Random(7), list[Change]()
    for n in range(30):
        arrived += tied_changes(random, f"k{n:02}", random.randint(2, 9))
    other = arrived.copy()
    random.shuffle(arrived)
    about: dict[str, Any] = {"schema": TIED, "tie_break": "n", "valid_until": "until"}
    node = table(only_columns="given", deleted_when=GONE, **about)
    logs: list[Any] = []
    for changes, cuts in (arrived, []), (arrived, [60]), (other, []):
        driver = TopologyTestDriver(node, spark=spark)
        lost = 0
        for start, end in zip([0, *cuts], [*cuts, len(changes)], strict=True):
            driver.pipe("members", *[c.row_or_deletion for c in changes[start:end]])
            expected_now, lost = tied_versions(changes[:end])
            assert tied(driver) == expected_now
        assert driver.metrics("members")["lost_tie"] == lost > 0
        logs.append([{c: r[c] for c in r if c != "recorded_at"} for r in driver.read("members")])
    assert logs[0] == logs[1]
    assert any(r["propagated_from"] and r["n_by_column"] for r in logs[0])


def tied(driver: TopologyTestDriver) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for r in driver.versions("members"):
        row = {c: as_map(r[c]) if c == "tags" else r[c] for c in (*PARTS, "given", *ALWAYS)}
        given, smaller = r["provided_columns"], r["n_by_column"]
        about = None if given is None else {*given}, None if smaller is None else dict(smaller)
        found.append((r["k"], seconds(r["valid_from"]), None if r["is_tombstone"] else row, *about))
    return sorted(found, key=lambda v: v[:2])


ODD = "Tier-é/%"
ALL_KINDS = StructType(
    [
        StructField("k", StringType()),
        StructField(ODD, StringType()),
        StructField("price", DecimalType(9, 2)),
        StructField("raw", BinaryType()),
        StructField("box", StructType([StructField("x", DoubleType())])),
        StructField("seen", TimestampNTZType()),
        StructField("given", ArrayType(StringType())),
        StructField("Lsn#", DoubleType()),
        StructField("timestamp", TimestampType()),
    ]
)


def downstream_of(source: VersionedTable) -> list[Stream]:
    """A corrected join, a foreign-key join and an aggregate of a table."""
    orders = Stream("orders", key="k", schema=ORDER)
    names = VersionedTable("names", key="k", schema=NAME, history_retention=RETENTION)
    tier = f"right.`{ODD}` as tier"
    select = ["left.*", tier, "right.price", "right.box", "right.seen", "right.raw"]
    summed = {"many": "count(*)", "sum": "sum(price)"}
    return [
        orders.left_join(source, name="corrected", select=select, corrected_for=timedelta(seconds=30)),
        names.left_join(source, foreign_key="name", name="named", select=["left.name", tier]),
        source.group_by(f"`{ODD}` as tier").aggregate(summed, name="by_tier"),
    ]


def test_downstream_assets_equal_table_of_whole_rows(spark: SparkSession) -> None:
    """Downstream assets are the same as those of a table of whole rows that gets this log's rows as
    records, in whatever order the records arrive. Columns have several types and names with special
    characters; the tie-break has NaN and -0.0."""
    random, values = Random(4), [f.name for f in ALL_KINDS.fields[1:-1]]
    some: list[tuple[Any, ...]] = [
        ("x", Decimal("1.50"), b"1", {"x": math.nan}, datetime(2024, 1, 1)),
        ("y", Decimal("2.25"), b"\xff", {"x": -0.0}, datetime(2020, 2, 2)),
        (None, None, None, None, None),
    ]
    changes: list[dict[str, Any]] = []
    for _ in range(57):
        row = [random.choice(those) for those in zip(*some, strict=True)]
        given = random.choice([None, ["gone"], *[random.sample(values, 2) for _ in range(5)]])
        lsn = random.choice([None, math.nan, 0.0, -0.0, 1.0])
        when = at(random.randrange(12) * 4)
        row = dict(zip(values, [*row, given, lsn], strict=True))
        changes.append({"k": random.choice("xyz"), **row, "timestamp": when})
    # Equal values of the tie-break in different runs, and a larger one.
    zeros = [
        {"k": "zero", "given": [column], "Lsn#": lsn, "timestamp": at(30)}
        for column, lsn in ((ODD, -0.0), (ODD, 0.0), ("price", 1.0))
    ]
    changes = [zeros[0], *changes, *zeros[1:]]
    orders = [
        {"k": random.choice("xyz"), "n": n, "timestamp": at(random.randrange(50))} for n in range(20)
    ]
    names = [
        {"k": one["k"], "name": random.choice("xyz"), "timestamp": one["timestamp"]} for one in orders
    ]
    whole = table(schema=ALL_KINDS)
    partial = replace(whole, only_columns="given", deleted_when=GONE, tie_break="Lsn#")
    drivers = [TopologyTestDriver(*downstream_of(node), spark=spark) for node in (partial, whole)]
    logs: list[Any] = []
    for start, end in ((0, 40), (40, 60)):
        others = {"orders": orders[start // 4 : end // 3], "names": names[start // 4 : end // 3]}
        rows = changes[start:end]
        for driver in drivers:
            driver.run({"members": rows, **others})
            log = driver.read("members")
            rows = [{c: r[c] for c in (*ALL_KINDS.names, IS_TOMBSTONE)} for r in log]
            logs.append(log)
            made = {name: driver.read(name) for name in driver.nodes if name != "members"}
            logs.append(repr(made))
        assert logs[-3] == logs[-1]
    assert drivers[0].metrics("members")["lost_tie"] > 0
    assert drivers[1].metrics("members") == {"waiting": 0, "applied": len(logs[0]) + len(logs[4])}
    alone = TopologyTestDriver(partial, spark=spark)
    alone.pipe("members", *changes)
    assert repr(alone.read("members")) == repr(logs[0] + logs[4])


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"only_columns": ["k"]}, "only_columns to name value columns"),
        ({"only_columns": []}, "only_columns to be a list of value columns"),
        ({"only_columns": " "}, "only_columns to be a list of value columns or a SQL expression"),
        ({"only_columns": ["timestamp"]}, "only_columns to name value columns"),
        ({"ignore_null_updates": ["town"]}, "ignore_null_updates to name value columns"),
        ({"ignore_null_updates": "city"}, "ignore_null_updates to be a list of value columns"),
        ({"ignore_null_updates": ["tier"], "tie_break": "tier"}, "ignore_null_updates to name value"),
        (
            {
                "ignore_null_updates": True,
                "tie_break": "tier",
                "schema": StructType([*SCHEMA.fields, StructField("Tier_by_column", StringType())]),
            },
            "no columns named ['tier_by_column']",
        ),
        (
            {
                "ignore_null_updates": True,
                "key": "provided_columns",
                "schema": StructType([*SCHEMA.fields, StructField("provided_columns", StringType())]),
            },
            "no columns named ['provided_columns']",
        ),
        (
            {"ignore_null_updates": True, "source": SnapshotSource("dumps", dump_time="modified")},
            "with a source of changes",
        ),
        (
            {
                "ignore_null_updates": True,
                "schema": StructType([*SCHEMA.fields, StructField("propagated_from", StringType())]),
            },
            "no columns named ['propagated_from']",
        ),
    ],
)
def test_refused_when_declared(about: dict[str, Any], said: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(said)):
        table(**about)


@pytest.mark.parametrize(
    ("only_columns", "said"),
    [
        ("size(given)", "which is int"),
        ("giben", "similar to 'given'"),
        ("given[", "which Spark refuses"),
    ],
)
def test_invalid_column_names_are_refused(spark: SparkSession, only_columns: str, said: str) -> None:
    driver = TopologyTestDriver(table(only_columns=only_columns), spark=spark)
    with pytest.raises(TopologyError, match=re.escape(said)):
        driver.pipe("members", put("a", 1))


def test_partial_options_change_code_version() -> None:
    told = [{}, {"only_columns": "given"}, {"only_columns": ["city"]}, {"ignore_null_updates": True}]
    assert len({code_version(table(**about)) for about in told}) == len(told)


# -- on Delta -----------------------------------------------------------------------------------------

MEMBER = StructType([f for f in SCHEMA.fields if f.name not in ("tags", "given")])


class Members:
    """A table that reads files, and a corrected join that reads the table."""

    def __init__(self, root: Path, spark: SparkSession, **about: Any) -> None:
        self.root, self.spark = root, spark
        for name in ("members", "orders", "dump"):
            (root / name).mkdir()
        told: dict[str, Any] = {"key": "k", "schema": MEMBER, "history_retention": timedelta(days=1)}
        source = FilesSource(str(root / "members"))
        self.table = VersionedTable("members", **{"source": source, **told, **about})
        source = FilesSource(str(root / "orders"))
        self.orders = Stream("orders", key="k", schema=ORDER, source=source)
        self.joined = self.orders.join(self.table, name="joined", corrected_for=timedelta(days=1))
        self.warehouse = str(root / "warehouse")
        self.stores = stores_of(self.warehouse, spark)

    def land(self, into: str, name: str, *rows: dict[str, Any]) -> None:
        lines = [json.dumps({**row, "timestamp": row["timestamp"].isoformat()}) for row in rows]
        (self.root / into / f"{name}.jsonl").write_text("\n".join(lines))

    def run(self, *nodes: Stream) -> dict[str, int]:
        """Runs the nodes. Returns the counts of the last one's commit."""
        commits = [run_once(node, self.stores).commit for node in nodes]
        assert commits[-1] is not None
        return commits[-1].counts

    def store(self, node: Stream | None = None) -> AssetStore:
        found = self.stores(node or self.table)
        assert isinstance(found, AssetStore)
        return found

    def versions(self, node: Stream | None = None) -> list[tuple[Any, ...]]:
        rows = self.store(node).read("versions").collect()
        told = [
            (r["k"], seconds(r["valid_from"].astimezone(timezone.utc)), r["tier"], r["city"])
            for r in rows
        ]
        return sorted(told)


def change(k: str, second: int, changed: str | None = None, **values: Any) -> dict[str, Any]:
    said = {} if changed is None else {"changed": changed.split()}
    return {"k": k, "timestamp": at(second), **said, **values}


def test_late_partial_record_corrects_join_and_is_explained(
    tmp_path: Path, spark: SparkSession
) -> None:
    made = Members(tmp_path, spark, only_columns="changed")
    made.land(
        "members",
        "1",
        change("a", 10, tier="gold", city="Rome"),
        change("a", 30, "city", city="Oslo"),
        change("b", 20, "tier", tier="tin"),
    )
    made.land("orders", "1", {"k": "a", "n": 1, "timestamp": at(35)})
    assert made.run(made.table, made.orders, made.joined)["corrected"] == 0
    known = datetime.now(timezone.utc)
    before = made.versions()
    made.land("members", "2", change("a", 20, "tier", tier="silver"), change("a", 40, "city"))
    counts = made.run(made.table)
    assert (counts["in"], counts["applied"], counts["carried"]) == (2, 2, 1)
    assert made.versions() == [
        ("a", 10, "gold", "Rome"),
        ("a", 20, "silver", "Rome"),
        ("a", 30, "silver", "Oslo"),
        ("a", 40, "silver", None),
        ("b", 20, "tin", None),
    ]
    assert made.run(made.joined)["corrected"] == 1
    (row,) = [r for r in made.store(made.joined).read("log").collect() if r["revision"] == 1]
    assert (row["tier"], row["city"], row["cause"]["offset"]) == ("silver", "Oslo", 4)
    # Read as known before the late part, then without Spark, then after a replay.
    then = made.store().read("versions", as_known_at=known.isoformat()).collect()
    assert {(r["k"], r["tier"], r["city"]) for r in then} == {(k, t, c) for k, _, t, c in before}
    found = look_up(made.warehouse, "members", "versions").to_pylist()
    assert (
        sorted((r["k"], seconds(r["valid_from"]), r["tier"], r["city"]) for r in found)
        == made.versions()
    )
    replay(made.warehouse, made.table, "again", spark)
    assert made.versions(replace(made.table, name="again")) == made.versions()
    assert not [f for f in audit(made.store()) if f.offending]
    # explain names the records behind a version. Only the late record is late, not the changed version.
    told = explain("members", key="a", at=at(30), warehouse=made.warehouse)
    assert [d.rule for d in told.decisions] == ["carried"]
    assert "offset 0:3 of 2024-06-01 00:00:20" in told.decisions[0].because
    assert "its own records provide city; the others are as offset 0:3 has them" in told.notes
    told = explain("members", offset="0:1", warehouse=made.warehouse)
    assert "its own records provide city; the others are as offset 0:0 has them" in told.notes
    (choice,) = lateness("members", grace=["0s"], warehouse=made.warehouse).choices
    assert (choice.of, choice.late) == (5, 2)


def test_partial_records_after_initial_snapshot(tmp_path: Path, spark: SparkSession) -> None:
    """Rows of the snapshot are whole. A column that a change leaves out has the snapshot's value, also
    if an older change arrives after a newer one."""
    dump = SnapshotSource(str(tmp_path / "dump"), "jsonl", dump_time="%Y-%m-%dT%H%M%SZ")
    made = Members(tmp_path, spark, start=dump, ignore_null_updates=True)
    name = f"{at(0):%Y-%m-%dT%H%M%SZ}"
    whole = [{"k": "a", "tier": "gold", "city": "Rome"}, {"k": "b", "tier": "tin", "city": None}]
    (tmp_path / "dump" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, whole)))
    made.land("members", "1", change("a", 10, city="Oslo"), change("b", 20, city="Bonn"))
    made.run(made.table)
    made.land("members", "2", change("a", 5, tier="iron"), change("c", 6, tier="x"))
    assert made.run(made.table)["carried"] == 1
    assert made.versions() == [
        ("a", 0, "gold", "Rome"),
        ("a", 5, "iron", "Rome"),
        ("a", 10, "iron", "Oslo"),
        ("b", 0, "tin", None),
        ("b", 20, "tin", "Bonn"),
        ("c", 6, "x", None),
    ]


def test_option_switched_on_and_off_in_live_table(tmp_path: Path, spark: SparkSession) -> None:
    """The option holds for records that arrive after it is set; earlier records give their whole row.
    After a rename, a version still gives the column that it gave under the old name."""
    made = Members(tmp_path, spark)
    made.land("members", "1", change("a", 10, tier="gold", city="Rome"), change("a", 30, city="Oslo"))
    made.run(made.table)
    made.table = replace(made.table, ignore_null_updates=True)
    rows = [change("a", 20, city="Kyiv"), change("a", 36, city="Bonn"), change("a", 40, tier="iron")]
    made.land("members", "2", *rows)
    with batches_of(spark, 1):
        made.run(made.table)
    assert made.versions() == [
        ("a", 10, "gold", "Rome"),
        ("a", 20, "gold", "Kyiv"),
        ("a", 30, None, "Oslo"),
        ("a", 36, None, "Bonn"),
        ("a", 40, "iron", "Bonn"),
    ]
    renamed = [StructField("town", StringType()) if f.name == "city" else f for f in MEMBER.fields]
    table = replace(made.table, schema=StructType(renamed), renamed={"city": "town"})
    made.land("members", "2b", change("a", 33, town="Riga"))
    assert made.run(table)["carried"] == 0
    made.table = replace(table, ignore_null_updates=False)
    made.land("members", "3", change("a", 35, city="Lima"))
    made.run(made.table)
    found = made.store().read("versions").collect()
    assert sorted(
        (seconds(r["valid_from"].astimezone(timezone.utc)), r["tier"], r["town"]) for r in found
    ) == [
        (10, "gold", "Rome"),
        (20, "gold", "Kyiv"),
        (30, None, "Oslo"),
        (33, None, "Riga"),
        (35, None, "Lima"),
        (36, None, "Bonn"),
        (40, "iron", "Bonn"),
    ]


def test_column_tie_break_on_delta(tmp_path: Path, spark: SparkSession) -> None:
    """A tie-break decides for each column: switched on in a live table, across runs, in versions that
    a late record changes, and after its column gets another name and a wider type."""
    more = [StructField("plan", VarcharType(9))]
    more += [StructField("until", TimestampType()), StructField("n", IntegerType())]
    made = Members(
        tmp_path,
        spark,
        schema=StructType([*MEMBER.fields, *more]),
        only_columns="changed",
        segment_interval=timedelta(seconds=10),
    )
    # The corrected join of ``made`` would refuse a table with ``valid_until``.
    made.table = replace(made.table, valid_until="until")

    def stored() -> list[tuple[Any, ...]]:
        rows = made.store().read("versions").collect()
        name = made.table.tie_break or "n"
        return sorted(
            (
                seconds(r["valid_from"].astimezone(timezone.utc)),
                *(r[c] for c in ("tier", "city", "plan", name)),
                r["until"] and seconds(r["until"].astimezone(timezone.utc)),
            )
            for r in rows
        )

    end = at(90).isoformat()
    made.land(
        "members", "1", change("a", 10, tier="t1", n=9), change("a", 30, "city", city="c1", until=end)
    )
    made.run(made.table)
    made.table = replace(made.table, tie_break="n")
    made.land(
        "members",
        "2",
        change("a", 20, "tier", tier="t2", n=5),
        change("a", 40, "tier", tier="t3", n=7),
        change("a", 40, "tier city", tier="no", city="c2", n=3),
    )
    counts = made.run(made.table)
    assert (counts["applied"], counts["carried"]) == (3, 1)
    assert stored() == [
        (10, "t1", None, None, 9, None),
        (20, "t2", None, None, 5, None),
        (30, "t2", "c1", None, 9, 90),
        (40, "t3", "c2", None, 7, None),
    ]
    longer = [StructField("seq", LongType()) if f.name == "n" else f for f in made.table.schema.fields]
    about: dict[str, Any] = {"schema": StructType(longer), "renamed": {"n": "seq"}, "tie_break": "seq"}
    made.table = replace(made.table, **about)
    # Rebuild the view without the definition, as ``vt-dagster rebuild`` does.
    AssetStore.open(made.warehouse, "members", spark).rebuild_view()
    made.land("members", "3", change("a", 40, "tier city", tier="no", city="c3", seq=5))
    made.land(
        "members", "3b", change("a", 40, "city", city="no", seq=4), change("a", 35, "plan", plan="p")
    )
    counts = made.run(made.table)
    assert (counts["applied"], counts["lost_tie"], counts["carried"]) == (2, 1, 1)
    assert stored()[3:] == [(35, "t2", "c1", "p", None, None), (40, "t3", "c3", "p", 7, None)]
    last = made.store().read("log").orderBy("offset").collect()[-1]
    assert (last["propagated_from"], last["seq_by_column"]) == (1, {"city": 5})
    before = made.versions()
    replay(made.warehouse, made.table, "again", spark)
    assert made.versions(replace(made.table, name="again")) == before
    assert not [f for f in audit(made.store()) if f.offending]
    told = explain("members", key="a", at=at(40), warehouse=made.warehouse)
    assert [d.rule for d in told.decisions] == ["carried"]
    # A truncated log keeps the tie-breaks of columns in its base. So does an erase of another key.
    head = made.store().head()
    assert head is not None
    read = Read.of("members", head.commit, "current", at(50).isoformat(), None)
    kept, days = replace(made.table, log_retention=timedelta(days=1)), 2 * 86_400_000_000
    cut = truncate_logs(made.warehouse, spark, [kept], now=head.commit.recorded_at + days)
    assert cut == {"members": head.commit.total}
    shutil.rmtree(Path(made.store().view_path))
    made.land(
        "members",
        "4",
        change("a", 40, "tier city", tier="no", city="c4", seq=6),
        change("b", 40, "city", city="no", seq=1),
    )
    assert made.run(made.table)["applied"] == 2
    head = made.store().head()
    assert head is not None
    (stale,) = stale_reads(made.warehouse, (head.version, head.commit), [read])
    assert stale is not None
    assert stale.why == "changed"
    erase(made.warehouse, made.table, spark, reason="asked", key=["b"])
    assert stored()[3:] == [(35, "t2", "c1", "p", None, None), (40, "t3", "c4", "p", 7, None)]
    assert not [f for f in audit(made.store()) if f.offending]
