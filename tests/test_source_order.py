"""Sources that follow an upstream table: a key's last record in source order counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType, StringType, StructField, StructType, TimestampType
from starlette.testclient import TestClient

from vt_dagster import (
    DeltaSource,
    FilesSource,
    SnapshotSource,
    Stream,
    Table,
    TopologyError,
    VersionedTable,
    explain,
    lateness,
)
from vt_dagster.core.source_order import deletions_yield
from vt_dagster.core.source_records import DELETED, POSITION, RAW, REASON, RECORD_TIME, RESTATES, SOURCE
from vt_dagster.errors import StorageError
from vt_dagster.explore.app import application
from vt_dagster.orchestration.metadata import definition_metadata
from vt_dagster.orchestration.translator import code_version
from vt_dagster.runs.audit import audit
from vt_dagster.runs.run import run_once
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.testing.driver import MemoryStore, Records

pytestmark = pytest.mark.usefixtures("few_rows")


BEGIN = datetime(2024, 1, 1, tzinfo=timezone.utc)
RETENTION = timedelta(seconds=30)
SCHEMA = StructType(
    [
        StructField("k", StringType()),
        StructField("v", IntegerType()),
        StructField("changed_at", TimestampType()),
    ]
)
ROW = pa.schema([("k", pa.string()), ("v", pa.int32()), ("changed_at", pa.timestamp("us", "UTC"))])


def at(second: int) -> datetime:
    return BEGIN + timedelta(seconds=second)


def seconds(moment: datetime | None) -> int | None:
    if moment is None:
        return None
    return round((moment.replace(tzinfo=timezone.utc) - BEGIN).total_seconds())


class Change(NamedTuple):
    """A record of a feed: a put at its own time, or a deletion (``v`` is None) at the source's time."""

    k: str
    v: int | None
    own: int
    source: int
    restates: bool = False

    @property
    def time(self) -> int:
        return self.source if self.v is None else self.own


class Feed(Records):
    """A fake source that gives an upstream table's changes in order, like Kafka with Debezium."""

    orders_changes = restates = gives_timestamp = True

    def check(self, name: str, key: Sequence[str], schema: StructType) -> None:
        """Accepts any schema."""

    def read(self, spark: SparkSession, node: Stream) -> DataFrame:
        rows = [
            {"k": c.k, "v": c.v, "changed_at": None if c.v is None else at(c.own)}
            | {RECORD_TIME: at(c.source), DELETED: c.v is None, RESTATES: c.restates}
            | {"_arrival": i, "partition": 0}
            for i, c in enumerate(self.records)
        ]
        extra = [(RECORD_TIME, pa.timestamp("us", "UTC")), (DELETED, pa.bool_())]
        extra += [(RESTATES, pa.bool_()), ("_arrival", pa.int64()), ("partition", pa.int32())]
        table = pa.Table.from_pylist(rows, pa.schema([*ROW, *extra]))
        none = F.lit(None).cast("string")
        named = node.schema.names[-1]
        about = {SOURCE: F.lit("feed"), POSITION: F.col("_arrival"), RAW: none, REASON: none}
        return self.store.frame(table).withColumns(about).withColumnRenamed("changed_at", named)


def model(changes: Sequence[Change]) -> tuple[list[Any], list[Any], dict[str, int]]:
    """The expected log, versions and current rows, by the definition."""
    log: list[tuple[str, int, int | None]] = []
    newest: dict[str, int] = {}
    held: dict[str, int | None] = {}
    for c in changes:
        if c.restates and held.get(c.k) == c.v:
            continue
        log.append((c.k, c.time, c.v))
        if c.time < newest.get(c.k, c.time):
            log.append((c.k, newest[c.k], c.v))
        newest[c.k] = max(newest.get(c.k, c.time), c.time)
        held[c.k] = c.v
    horizon = max(t for _, t, _ in log) - RETENTION // timedelta(seconds=1)
    last = {(k, t): v for k, t, v in log}
    found: list[Any] = []
    for k in held:
        times = sorted(t for one, t in last if one == k)
        for begin, end in zip(times, [*times[1:], None], strict=True):
            v = last[k, begin]
            if (end is None or end > horizon) and (v is not None or begin >= horizon):
                found.append((k, begin, end, v))
    return log, sorted(found), {k: v for k, v in held.items() if v is not None}


def random_changes(seed: int, worlds: int = 12, length: int = 25) -> list[Change]:
    """Random changes of many keys. Each key has its own clocks, which lead, lag and jump back."""
    random, found = Random(seed), list[Change]()
    state: dict[str, tuple[int, int] | None] = {}
    clocks = {
        f"{seed}-{w}": (random.choice([0, 0, 8, -8, 40]), random.choice([0, 0, 15]))
        for w in range(worlds)
    }
    now = 0
    for _ in range(worlds * length // 2):
        now += random.randint(0, 1)
        k = random.choice(list(clocks))
        lead, late = clocks[k]
        if random.random() < 0.1:
            clocks[k] = (random.randint(-20, 20), late)
        row, own = state.get(k), now + lead + random.randint(-5, 5)
        kind = random.random()
        if row is not None and kind < 0.3:
            found.append(Change(k, None, 0, now + late))
            if random.random() < 0.5:  # the null message after the deletion
                found.append(Change(k, None, 0, now + late + random.randint(0, 60), restates=True))
            state[k] = None
        elif row is None and kind < 0.4:
            found.append(Change(k, None, 0, now + late, restates=True))
        elif row is not None and kind < 0.4:  # a row of another snapshot
            found.append(Change(k, row[0], row[1], now, restates=True))
        else:
            before = [c.own for c in found if c.k == k and c.v is not None]
            own = random.choice([own, own, *before[-1:]])  # the row may come with its old time
            state[k] = (random.randint(0, 4), own)
            found.append(Change(k, *state[k], now))  # type: ignore[misc]
    return found


@pytest.mark.parametrize(
    ("seed", "cut"),
    [(0, [2]), *(pytest.param(s, [1, 3], marks=pytest.mark.endurance) for s in range(4))],
)
def test_last_change_in_source_order_wins(spark: SparkSession, seed: int, cut: Sequence[int]) -> None:
    """Random changes: log and versions are those of the definition, for each split into runs."""
    changes, random = random_changes(seed), Random(seed)
    log, versions, current = model(changes)
    node = VersionedTable(
        "rows", key="k", schema=SCHEMA, timestamp="changed_at", history_retention=RETENTION
    )
    assert sum(1 for c in changes if c.restates) > 5
    assert len(log) > len(changes) - sum(c.restates for c in changes)
    for runs in cut:
        store = MemoryStore(node, spark)
        own = replace(node, source=Feed(store, []))
        store.node = own
        cuts = sorted(random.sample(range(1, len(changes)), runs - 1))
        totals = {"in": 0, "applied": 0, "carried": 0, "nothing_new": 0, "late": 0}
        for start, end in zip([0, *cuts], [*cuts, len(changes)], strict=True):
            receipt = run_once(own, lambda _, s=store: s, Feed(store, changes[start:end]))
            assert receipt.commit is not None
            for name in totals:
                totals[name] += receipt.commit.counts.get(name, 0)
        rows = store.rows.to_pylist()
        assert [(r["k"], seconds(r["timestamp"]), r["v"]) for r in rows] == log
        found = [
            (r["k"], seconds(r["valid_from"]), seconds(r["valid_to"]), r["v"])
            for r in store.view().collect()
        ]
        assert sorted(found) == versions
        latest = {r[0]: r[3] for r in found if r[2] is None and r[3] is not None}
        assert latest == current
        carried = len(log) - totals["applied"]
        said = totals["applied"] + totals["nothing_new"]
        assert (totals["in"], totals["carried"], totals["late"]) == (said, carried, 0)
        assert totals["in"] == len(changes)


class Notes(Feed):
    """A feed like a topic whose messages may come in any order. A deletion has its message's time."""

    orders_changes = restates = False
    assumes_deletions = True


def yielding_model(changes: Sequence[Change], keeps: bool) -> list[Any]:
    """The expected log, by the definition.

    Args:
        keeps: whether the log keeps the own time of a version that replaced another at that one's time.
    """
    log: list[tuple[str, int, int | None]] = []
    newest: dict[str, int] = {}
    assumed: dict[str, int | None] = {}
    """Keys whose newest version has an assumed time: the version's own time, None for a deletion."""
    for c in changes:
        log.append((c.k, c.time, c.v))
        if c.time >= newest.get(c.k, c.time):
            newest[c.k] = c.time
            assumed.pop(c.k, None)
            if c.v is None:
                assumed[c.k] = None
            continue
        of = assumed.get(c.k)
        if c.v is None or (c.k in assumed and (of is None or (keeps and c.own >= of))):
            log.append((c.k, newest[c.k], c.v))
            assumed[c.k] = None if c.v is None else c.own
    return log


@pytest.mark.parametrize(
    ("seed", "named", "cut"),
    [
        (11, "changed_at", [2]),
        (13, "timestamp", [2]),
        pytest.param(11, "changed_at", [1, 3], marks=pytest.mark.endurance),
        pytest.param(12, "changed_at", [1, 3], marks=pytest.mark.endurance),
        pytest.param(13, "timestamp", [1, 3], marks=pytest.mark.endurance),
    ],
)
def test_deletion_without_stated_time_yields(
    spark: SparkSession, seed: int, named: str, cut: Sequence[int]
) -> None:
    """Random changes of a topic. A record that is late by its own time stays late. But a deletion that
    has only its message's time does not end a record that arrives after it."""
    changes, random = random_changes(seed), Random(seed)
    log = yielding_model(changes, named != "timestamp")
    assert len(log) > len(changes) + 10
    fields = [StructField(named, f.dataType) if f.name == "changed_at" else f for f in SCHEMA.fields]
    about: dict[str, Any] = {"key": "k", "schema": StructType(fields), "timestamp": named}
    node = VersionedTable("rows", **about, history_retention=timedelta(days=9))
    for runs in cut:
        store = MemoryStore(node, spark)
        own = replace(node, source=Notes(store, []))
        store.node = own
        cuts = sorted(random.sample(range(1, len(changes)), runs - 1))
        for start, end in zip([0, *cuts], [*cuts, len(changes)], strict=True):
            run_once(own, lambda _, s=store: s, Notes(store, changes[start:end]))
        rows = store.rows.to_pylist()
        assert [(r["k"], seconds(r["timestamp"]), r["v"]) for r in rows] == log
    assert deletions_yield(own)
    assert not deletions_yield(replace(own, deleted_at="record_time"))


# -- dumps and Delta tables ------------------------------------------------------------------------


class Shop:
    """A table that follows an upstream table by its source, and the table's stores."""

    def __init__(self, root: Path, spark: SparkSession, source: Any, **about: Any) -> None:
        about = {"history_retention": timedelta(days=36500), "timestamp": "changed_at", **about}
        self.node = VersionedTable("rows", key="k", schema=SCHEMA, source=source, **about)
        self.stores = stores_of(str(root / "warehouse"), spark)
        self.warehouse = str(root / "warehouse")

    def take(self, **asked: Any) -> dict[str, int]:
        """Runs the table once. Returns the counts of the commit, empty if nothing is new."""
        commit = run_once(self.node, self.stores, **asked).commit
        return {} if commit is None else commit.counts

    @property
    def store(self) -> AssetStore:
        store = self.stores(self.node)
        assert isinstance(store, AssetStore)
        return store

    def current(self) -> dict[str, tuple[int, int | None]]:
        rows = self.store.read("current").collect()
        return {r["k"]: (r["v"], seconds(r["changed_at"])) for r in rows}

    def versions(self, k: str) -> list[tuple[int | None, int | None, int | None]]:
        rows = self.store.read("versions").where(F.col("k") == k).orderBy("valid_from").collect()
        return [(seconds(r["valid_from"]), seconds(r["valid_to"]), r["v"]) for r in rows]


State = dict[str, tuple[int, int]]
"""For each key, the value and the second of the row's own time."""


def next_state(random: Random, state: State, day: int, keys: Sequence[str]) -> State:
    """The upstream table's next state: rows come, change, go and come back, with unreliable times."""
    found = dict(state)
    for k in keys:
        kind, moment = random.random(), day + random.choice([0, 0, 90_000, -90_000, 3_600])
        if k in found and kind < 0.25:
            del found[k]
        elif k in found and kind < 0.5:
            found[k] = (found[k][0] + 1, moment)
        elif k in found and kind < 0.6:
            found[k] = (found[k][0] + 1, found[k][1])  # a new value with the old time
        elif k not in found and kind < 0.5:
            found[k] = (random.randint(0, 3), moment)
        elif k not in found and kind < 0.7:
            found[k] = (7, 0)  # the row comes back with the same value and time
    return found


def rows_of(state: State) -> pa.Table:
    rows = [{"k": k, "v": v, "changed_at": at(own)} for k, (v, own) in state.items()]
    return pa.Table.from_pylist(rows, ROW)


@pytest.mark.parametrize(
    ("seed", "days"), [pytest.param(1, 36500, marks=pytest.mark.endurance), (2, 1)]
)
def test_current_rows_equal_last_dump(
    spark: SparkSession, tmp_path: Path, seed: int, days: int
) -> None:
    """The table's current rows are those of the last dump, whatever the times of rows and dumps. Rows
    may be older than the history retention. An equal dump adds nothing."""
    (tmp_path / "dumps").mkdir()
    source = SnapshotSource(str(tmp_path / "dumps"), "jsonl", dump_time="%Y-%m-%d", max_shrink=1.0)
    shop = Shop(tmp_path, spark, source, history_retention=timedelta(days=days))
    random, state = Random(seed), State()
    keys = [f"k{n}" for n in range(200)]
    carried = 0
    for day in range(1, 4 if days > 1 else 3):
        state = next_state(random, state, day * 86_400, keys)
        lines = [
            json.dumps({"k": k, "v": v, "changed_at": at(own).isoformat()})
            for k, (v, own) in state.items()
        ]
        (tmp_path / "dumps" / f"2024-01-{day:02}.jsonl").write_text("\n".join(lines))
        counts = shop.take()
        carried += counts.get("carried", 0)
        assert (counts["late"], counts["quarantined"]) == (0, 0)
        assert shop.current() == {k: (v, own) for k, (v, own) in state.items()}
    assert carried > 5
    (tmp_path / "dumps" / "2024-01-09.jsonl").write_text("\n".join(lines))
    assert shop.take()["in"] == 0
    assert [f.name for f in audit(shop.store) if not f.passed] == []


def test_row_returns_with_its_old_time(spark: SparkSession, tmp_path: Path) -> None:
    """A deletion, which has the time of its dump, yields to a row that comes back with its old time. A
    row whose time is after the dump's is deleted too. A new value whose time goes back counts."""
    (tmp_path / "dumps").mkdir()
    source = SnapshotSource(str(tmp_path / "dumps"), "jsonl", dump_time="%Y-%m-%d", max_shrink=1.0)
    shop, day = Shop(tmp_path, spark, source), 86_400
    states: list[State] = [
        {"back": (1, -9), "ahead": (1, 3 * day), "mended": (1, 90)},
        {"mended": (2, 50)},
        {"back": (1, -9), "mended": (2, 50)},
    ]
    for number, state in enumerate(states, 1):
        lines = [
            json.dumps({"k": k, "v": v, "changed_at": at(own).isoformat()})
            for k, (v, own) in state.items()
        ]
        (tmp_path / "dumps" / f"2024-01-{number:02}.jsonl").write_text("\n".join(lines))
        assert shop.take()["in"] == (3 if number < 3 else 1)
        assert shop.current() == state
    assert shop.versions("back") == [(-9, day, 1), (day, None, 1)]
    assert shop.versions("mended") == [(50, 90, 2), (90, None, 2)]
    assert [v for *_, v in shop.versions("ahead")] == [None, None]
    assert shop.store.head().commit.counts["carried"] == 1  # type: ignore[union-attr]
    told = explain("rows", warehouse=shop.warehouse, key="back")
    assert "carried" in str(told), told
    assert "came after the version of" in str(told)
    with pytest.raises(StorageError, match="rows follows the order of its source and accepts each"):
        lateness("rows", warehouse=shop.warehouse)
    pages = TestClient(application(shop.warehouse), base_url="http://127.0.0.1:3001")
    page = pages.get("/lateness/rows")
    assert page.status_code == 200
    assert "follows the order of its source" in page.text
    assert "what-if" not in page.text


def test_delete_and_insert_in_change_feed(spark: SparkSession, tmp_path: Path) -> None:
    """The table equals the upstream Delta table, read by its change feed or by its versions, though the
    commits' clock is years ahead of the rows' times. ``deleted_at`` gives the time of a deletion."""
    path = str(tmp_path / "theirs")
    feed = {"delta.enableChangeDataFeed": "true"}
    shops = {
        mode: Shop(tmp_path / mode, spark, DeltaSource(path, mode, max_shrink=1.0))  # type: ignore[arg-type]
        for mode in ("changes", "snapshots")
    }
    source = DeltaSource(path, "changes", start="earliest")
    earlier = "record_time - interval 10000 days"
    stated = Shop(tmp_path / "stated", spark, source, deleted_at=earlier)
    random, state = Random(5), State()
    keys = [f"k{n}" for n in range(30)]
    for number in range(2):
        for _ in range(2 if number else 1):
            before, state = state, next_state(random, state, number * 86_400, keys)
            gone = [k for k, row in before.items() if state.get(k) != row]
            if gone:
                DeltaTable(path).delete(f"k in ({', '.join(repr(k) for k in gone)})")
            new = {k: row for k, row in state.items() if before.get(k) != row}
            write_deltalake(path, rows_of(new), mode="append", configuration=feed)
        for shop in shops.values():
            shop.take()
            assert shop.current() == state
    last = {name: shop.take() for name, shop in shops.items()}
    assert not any(last.values())
    # One run takes all changes.
    shops["stated"] = stated
    stated.take()
    assert stated.current() == state
    years = {
        name: {r["timestamp"].year for r in shop.store.read("log").where("is_tombstone").collect()}
        for name, shop in shops.items()
    }
    assert min(years["stated"]) < 2000 < min(years["changes"])


def test_rows_marked_as_deleted_are_deleted_once(spark: SparkSession, tmp_path: Path) -> None:
    """A row that is marked as deleted in several dumps is deleted once."""
    (tmp_path / "dumps").mkdir()
    source = SnapshotSource(str(tmp_path / "dumps"), "jsonl", dump_time="%Y-%m-%d", max_shrink=1.0)
    shop = Shop(tmp_path, spark, source, deleted_when="v < 0")
    for day, v in ((1, 1), (2, -1), (3, -1)):
        rows = [{"k": "a", "v": v, "changed_at": at(0).isoformat()}, {"k": "b", "v": -1}]
        rows[1]["changed_at"] = at(5).isoformat()
        (tmp_path / "dumps" / f"2024-01-{day:02}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        counts = shop.take()
        assert counts["applied"] == (1 if day != 3 else 0)
        assert counts["nothing_new"] == (1 if day != 3 else 2)
        assert list(shop.current()) == (["a"] if v > 0 else [])


# -- topics, without a broker -----------------------------------------------------------------------


@dataclass(frozen=True)
class Topic(Records):
    """Messages in the form of Spark's Kafka source. The table's own source reads them."""

    partitions: int = 1

    def pinned(self, node: Stream) -> Any:
        from vt_dagster.sources.kafka_source import PinnedTopics

        source: Any = node.source
        taken = {"x": dict.fromkeys(range(self.partitions), (0, 99))}
        return PinnedTopics(source, None, taken, {}, {}, {}, 0)

    def read(self, spark: SparkSession, node: Stream) -> DataFrame:
        return self.pinned(node).read(spark, node)

    def explain(self, error: Exception) -> Any:
        return self.pinned(self.store.node).explain(error)


def message(number: int, key: Any, value: Any, second: int = 600) -> dict[str, Any]:
    """A message with the timestamp ``second``. With None as value it is a null message."""
    data = [None if one is None else json.dumps(one).encode() for one in (key, value)]
    place = {"topic": "x", "partition": 0, "offset": number, "timestamp": at(second)}
    return {"key": data[0], "value": data[1], **place, "timestampType": 0}


def event(op: str, row: tuple[int, Any] | None, second: int) -> dict[str, Any]:
    image = None if row is None else {"id": row[0], "name": row[1]}
    parts = (image, None) if op == "d" else (None, image)
    source = {"ts_ms": (1_704_067_200 + second) * 1000}
    return {"op": op, "before": parts[0], "after": parts[1], "source": source}


NAMES = StructType([StructField("id", IntegerType()), StructField("name", StringType())])
Take = Callable[..., tuple[dict[int, str], list[Any], dict[str, int]]]


@pytest.fixture
def topic(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Take:
    """Gives a function that runs a table on messages. It returns current rows, versions and counts."""
    from vt_dagster.kafka import Debezium, Json, KafkaCluster, KafkaSource
    from vt_dagster.sources import kafka_source

    def take(
        *messages: tuple[Any, Any],
        runs: int = 1,
        value: Any = None,
        partitions: int = 1,
        second: int = 600,
        kind: Any = VersionedTable,
        schema: StructType = NAMES,
        **about: Any,
    ) -> tuple[dict[int, str], list[Any], dict[str, int]]:
        cluster = KafkaCluster("127.0.0.1:9")
        source = KafkaSource(cluster, "x", key=Json(), value=value or Debezium(), max_bad_share=1.0)
        more = {"history_retention": timedelta(days=30)} if kind is VersionedTable else {}
        node = kind("t", key="id", schema=schema, source=source, **more, **about)
        store = MemoryStore(node, spark)
        rows = [message(n, k, v, second) for n, (k, v) in enumerate(messages)]
        totals: dict[str, int] = {}
        size = -(-len(rows) // runs)
        for start in range(0, len(rows), size):
            kinds = [("key", pa.binary()), ("value", pa.binary()), ("topic", pa.string())]
            kinds += [("partition", pa.int32()), ("offset", pa.int64())]
            kinds += [("timestamp", pa.timestamp("us", "UTC")), ("timestampType", pa.int32())]
            table = pa.Table.from_pylist(rows[start : start + size], pa.schema(kinds))
            monkeypatch.setattr(kafka_source, "read_messages", lambda *_, t=table, **__: store.frame(t))
            receipt = run_once(node, lambda _: store, Topic(store, [{}], partitions))
            assert receipt.commit is not None
            totals = receipt.commit.totals
        if kind is Table:
            return {r["id"]: r["name"] for r in store.view().collect()}, [], totals
        found = [
            (r["id"], seconds(r["valid_from"]), seconds(r["valid_to"]), r["name"])
            for r in store.view().orderBy("id", "valid_from").collect()
        ]
        current = {r[0]: r[3] for r in found if r[2] is None and r[3] is not None}
        return current, found, totals

    return take


def test_debezium_deletions(topic: Take) -> None:
    """Deletions of a connector that is ten minutes behind, with null messages, changed keys, and
    snapshots beside changes."""
    one, two, three, four, five, six = ({"id": n} for n in range(1, 7))
    again = [
        (one, event("c", (1, "first"), 0)),
        (one, event("d", (1, "first"), 1)),
        (one, None),
        (one, event("c", (1, "second"), 2)),
    ]
    moved = [
        (two, event("c", (2, "a"), 0)),
        *[(two, event("d", (2, "a"), 5)), (two, None), (three, event("c", (3, "a"), 5))],
        *[(three, event("d", (3, "a"), 9)), (three, None), (two, event("c", (2, "a"), 9))],
    ]
    read = [
        (four, event("r", (4, "a"), 100)),
        (five, event("r", (5, "b"), 100)),
        (four, event("u", (4, "new"), 90)),  # while the snapshot was read
        (five, event("d", (5, "b"), 95)),
        (four, event("r", (4, "new"), 200)),
        (six, event("c", (6, "a"), 0)),
        (six, None),  # only a null message reports this deletion
    ]
    # Alternately, so that each of the three is split between the two runs.
    every = [one for some in zip_longest(again, moved, read) for one in some if one is not None]
    current, versions, counts = topic(*every, runs=2)
    assert current == {1: "second", 2: "a", 4: "new"}
    told = {n: [v for v in versions if v[0] == n] for n in range(1, 7)}
    assert told[1] == [(1, 0, 1, "first"), (1, 1, 2, None), (1, 2, None, "second")]
    assert told[3][-1] == (3, 9, None, None)
    assert told[4][:2] == [(4, 90, 100, "new"), (4, 100, None, "new")]
    assert told[6] == [(6, 0, 600, "a"), (6, 600, None, None)]
    assert (counts["in"], counts["nothing_new"], counts["carried"]) == (18, 4, 2)
    assert topic(*again, kind=Table)[0] == {1: "second"}


@pytest.mark.parametrize("kind", [VersionedTable, Table])
def test_update_of_column_that_is_only_our_key(topic: Take, kind: Any) -> None:
    """If a column belongs only to the table's key and not to Debezium's, an update of it sends no
    deletion of the old key, whose row would remain. So a table quarantines the event; a stream accepts
    it."""
    one, two, last = ({"id": n, "name": text} for n, text in ((1, "x"), (2, "x"), (2, "y")))

    def update(before: Any, after: Any, second: int, op: str = "u") -> tuple[Any, Any]:
        return {"id": after["id"]}, {**event(op, None, second), "before": before, "after": after}

    insert = ({"id": 1}, event("c", (1, "x"), 0))
    current, _, totals = topic(insert, update(one, two, 1), kind=kind)
    assert (current, totals.get("quarantined")) == ({1: "x"}, 1)
    same = [update(two, last, 3), update(None, two, 4), update({"name": "z"}, last, 5)]
    current, _, totals = topic(insert, update(one, two, 2, "r"), *same, kind=kind)
    assert (current, totals.get("quarantined", 0)) == ({1: "x", 2: "y"}, 0)


def test_deletion_takes_source_time_not_row_time(topic: Take) -> None:
    """If rows have their own time, a deletion has the time of the source's record, not that of the
    deleted row. With ``deleted_at`` it has the time of that expression."""
    from vt_dagster.kafka import Debezium, Json

    schema = StructType([*NAMES.fields, StructField("changed_at", TimestampType())])

    def change(n: int, op: str, second: int, own: int, name: str = "a") -> tuple[Any, Any]:
        told = event(op, (n, name), second)
        for part in ("before", "after"):
            if told[part] is not None:
                told[part]["changed_at"] = at(own).isoformat()
        return {"id": n}, told

    about = {"schema": schema, "timestamp": "changed_at"}
    told = [change(n, *one) for n in (1, 2) for one in (("c", 20, 10), ("d", 30, 10))]
    assert topic(*told, change(2, "c", 40, 10), **about)[1] == [
        *((1, 10, 30, "a"), (1, 30, None, None)),
        *((2, 10, 30, "a"), (2, 30, None, "a")),
    ]
    stated = {**about, "deleted_at": "record_time - interval 5 seconds"}
    assert topic(*told[:2], **stated)[1] == [(1, 10, 25, "a"), (1, 25, None, None)]

    def plain(n: int, name: str, own: int, **more: Any) -> tuple[Any, Any]:
        return {"id": n}, {"id": n, "name": name, "changed_at": at(own).isoformat(), **more}

    # a topic whose rows have their own time, and whose producer is behind
    behind = [plain(1, "first", 0), ({"id": 1}, None), plain(1, "second", 2), plain(1, "late", 1)]
    # Debezium's transform that leaves only the row
    flat = [
        plain(2, "a", 10, __deleted="false"),
        plain(2, "a", 10, __deleted="true"),
        ({"id": 2}, None),
    ]
    current, versions, _ = topic(*behind[:2], *flat, *behind[2:], **about, value=Json())
    assert current == {1: "second"}
    assert [name for n, *_, name in versions if n == 1] == ["first", "late", "second", "second"]
    aimed = [plain(3, "a", 10, __deleted="false"), plain(3, "a", 10, __deleted="true")]
    aimed[1][1]["__source_ts_ms"] = (1_704_067_200 + 12) * 1000
    _, versions, counts = topic(*flat, *aimed, **about, value=Debezium(unwrapped=True))
    assert versions[:3] == [(2, 10, 600, "a"), (2, 600, None, None), (3, 10, 12, "a")]
    assert counts["nothing_new"] == 1


def test_unavailable_toast_value_is_taken_from_previous_record(topic: Take) -> None:
    """A TOAST value that PostgreSQL has not sent is taken from the key's record before, also from an
    earlier run. If the key is unknown, the record is unreadable."""
    one, two, large = {"id": 1}, {"id": 2}, "__debezium_unavailable_value"
    told = [
        (one, event("c", (1, "large"), 5)),
        (one, event("u", (1, large), 3)),  # the clock jumped back
        (two, event("u", (2, large), 6)),
        (one, event("u", (1, large), 7)),
    ]
    current, versions, counts = topic(*told, runs=2)
    assert current == {1: "large"}
    assert {name for *_, name in versions} == {"large"}
    assert (counts["in"], counts["quarantined"]) == (4, 1)


def test_truncate_event_deletes_every_key(topic: Take) -> None:
    """A truncate event deletes all keys at its time, also those of earlier runs. Records after it
    stay. With several partitions it is refused, because the order between partitions is unknown."""
    from vt_dagster.errors import SourceError
    from vt_dagster.kafka import Debezium

    one, two, three = ({"id": n} for n in (1, 2, 3))
    told = [
        (one, event("c", (1, "a"), 0)),
        (two, event("c", (2, "b"), 1)),
        (two, event("d", (2, "b"), 2)),
        (three, event("c", (3, "c"), 3)),
        (None, event("t", None, 4)),
        (three, event("c", (3, "again"), 5)),
    ]
    current, versions, _ = topic(*told, runs=2)
    assert current == {3: "again"}
    assert versions == [
        *[(1, 0, 4, "a"), (1, 4, None, None), (2, 1, 2, "b"), (2, 2, None, None)],
        *[(3, 3, 4, "c"), (3, 4, 5, None), (3, 5, None, "again")],
    ]
    assert topic(*told, kind=Table)[0] == {3: "again"}
    with pytest.raises(SourceError, match=r"op t \(truncate\) with several topics or partitions"):
        topic(*told, partitions=2)
    kept = Debezium(truncate="quarantine")
    current, _, counts = topic(*told, value=kept)
    assert (current, counts["quarantined"]) == ({1: "a", 3: "again"}, 1)


def test_deleted_at_is_checked_and_shown(spark: SparkSession, tmp_path: Path) -> None:
    about = {"key": "k", "schema": SCHEMA, "timestamp": "changed_at"}
    about |= {"history_retention": RETENTION}
    plain, stated = (
        VersionedTable("t", **about, **more)
        for more in ({}, {"deleted_at": "removed_on", "deleted_when": "v is null"})
    )
    assert code_version(plain) != code_version(stated)
    assert definition_metadata(stated)["vt_dagster/deleted_at"] == "removed_on"
    with pytest.raises(TopologyError, match="expected deleted_at to be a SQL expression"):
        VersionedTable("t", **about, deleted_at=" ")
    with pytest.raises(TopologyError, match="deleted_at needs a table with a source"):
        replace(plain.filter("v > 1", name="f"), deleted_at="changed_at")
    (tmp_path / "in").mkdir()
    lines = [
        {"k": "a", "v": 1, "changed_at": at(0).isoformat()},
        {"k": "a", "changed_at": at(9).isoformat(), "gone": at(5).isoformat()},
        {"k": "b", "v": 1, "changed_at": at(0).isoformat()},
        {"k": "b", "changed_at": at(9).isoformat()},
    ]
    (tmp_path / "in" / "1.jsonl").write_text("\n".join(map(json.dumps, lines)))
    source = FilesSource(str(tmp_path / "in"))
    more = {"deleted_when": "v is null", "deleted_at": "to_timestamp(gone)"}
    shop = Shop(tmp_path, spark, source, **more)
    assert shop.take()["applied"] == 4
    assert [shop.versions(k)[-1][0] for k in "ab"] == [5, 9]
    wrong = Shop(tmp_path / "wrong", spark, source, deleted_at="v + 1")
    with pytest.raises(TopologyError, match="expected deleted_at to be a SQL expression of type"):
        wrong.take()
