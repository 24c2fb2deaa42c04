"""An asset is replayed beside the live one, compared with it, and swapped for it."""

from __future__ import annotations

import shutil
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from tests.kafka.pipeline import Pipeline
from tests.kafka.topics import SCHEMA, Topics, record, records
from vt_dagster import Stream, Table, VersionedTable
from vt_dagster.cli import app
from vt_dagster.errors import SourceError, StorageError
from vt_dagster.kafka import Raw
from vt_dagster.runs.replay import compare, replay, swap
from vt_dagster.runs.restate import restate
from vt_dagster.runs.run import run_once
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.storage.commit_log import commits

pytestmark = pytest.mark.usefixtures("few_rows")


@pytest.fixture
def pipeline(tmp_path: Path, spark: SparkSession) -> Pipeline:
    return Pipeline(tmp_path, spark, checked=False)


def test_replay_compare_and_swap(topics: Topics, pipeline: Pipeline, spark: SparkSession) -> None:
    topic = topics.create(partitions=2)
    topics.produce(topic, records(range(60), keys=6))
    source = pipeline.source(topics, topic, max_records_per_run=30, key=Raw("k"))
    node = VersionedTable(
        "t", key="k", schema=SCHEMA, timestamp="at", source=source, history_retention=timedelta(days=1)
    )
    big = node.filter("n >= 30", name="big")
    warehouse = str(pipeline.root / "warehouse")
    with pytest.raises(StorageError, match="nothing was ever committed"):
        replay(warehouse, node, "t2", spark)
    for _ in range(2):
        run_once(node, stores_of(warehouse, spark))
    run_once(big, stores_of(warehouse, spark))
    topics.produce(topic, records([999]))  # after the live table's last run, so not replayed
    # the same definition gives the same table, in as many runs as it takes
    same = replay(warehouse, node, "t2", spark)
    assert pipeline.head(node).inputs == same.head().commit.inputs  # pyright: ignore
    found = compare(AssetStore(warehouse, node, spark), same)
    assert (found.missing, found.extra) == (0, 0)
    live, anew = (list(commits(f"{warehouse}/{name}")) for name in ("t", "t2"))
    assert [(c.recorded_at, c.taken) for c in anew] == [(c.recorded_at, c.taken) for c in live]
    # another definition gives another table: compare reports the differing rows
    fixed = VersionedTable(
        "t",
        key="k",
        schema=SCHEMA,
        timestamp="at",
        source=source,
        tombstone="n % 10 = 7",
        history_retention=timedelta(days=1),
    )
    mended = replay(warehouse, fixed, "t3", spark)
    found = compare(AssetStore(warehouse, node, spark), mended)
    assert (found.missing, found.extra) == (6, 6)
    assert all('"is_tombstone":' in r.row for r in found.rows.collect())
    swap(warehouse, "t", "t3")
    now = AssetStore(warehouse, fixed, spark)
    assert compare(now, same).extra == 6
    # the live table continues at its position
    assert run_once(fixed, stores_of(warehouse, spark)).commit is not None
    assert pipeline.head(fixed).batch == 3
    assert pipeline.head(fixed).totals["in"] == 61
    # a consumer of the old log refuses to consume the new one
    with pytest.raises(StorageError, match="the log of t that batch 1 consumed, got another log"):
        run_once(big, stores_of(warehouse, spark))
    big_now = fixed.filter("n >= 30", name="big")
    replay(warehouse, big_now, "big2", spark)
    swap(warehouse, "big", "big2")
    assert run_once(big_now, stores_of(warehouse, spark)).commit is None
    rows = AssetStore(warehouse, big_now, spark).read("log").where("not is_tombstone").collect()
    assert 30 <= min(r.n for r in rows) < 54, "54 is the least value of a current row"


def test_replay_from_offsets_or_time(topics: Topics, pipeline: Pipeline, spark: SparkSession) -> None:
    topic = topics.create()
    base = int(datetime(2024, 5, 1, tzinfo=timezone.utc).timestamp() * 1000)
    topics.produce(topic, [{**record("a", n, n), "timestamp": base + n * 1000} for n in range(10)])
    node = Stream("s", key="k", schema=SCHEMA, timestamp="at", source=pipeline.source(topics, topic))
    warehouse = str(pipeline.root / "warehouse")
    run_once(node, stores_of(warehouse, spark))
    later = replay(
        warehouse, node, "late", spark, datetime.fromtimestamp(base / 1000 + 7, timezone.utc)
    )
    assert sorted(r.n for r in later.read().collect()) == [7, 8, 9]
    placed = replay(warehouse, node, "placed", spark, {topic: {0: 8}})
    assert sorted(r.n for r in placed.read().collect()) == [8, 9]
    found = compare(AssetStore(warehouse, node, spark), placed)
    assert (found.missing, found.extra) == (8, 0)
    files = Table("f", key="k", schema=SCHEMA, timestamp="at")
    with pytest.raises(StorageError, match="nothing was ever committed"):
        replay(warehouse, files, "g", spark)
    with pytest.raises(SourceError, match="start must be"):
        pipeline.source(topics, topic, start={"another": {0: 1}})


def test_replay_refuses_expired_records(
    topics: Topics, pipeline: Pipeline, spark: SparkSession
) -> None:
    """A replay or restatement with fewer or other records is an error, unless the user accepts it."""
    topic = topics.create()
    topics.produce(topic, records(range(3)))
    source = pipeline.source(topics, topic, start="latest", max_records_per_run=4)
    node = Stream("s", key="k", schema=SCHEMA, timestamp="at", source=source)
    warehouse = str(pipeline.root / "warehouse")
    stores = stores_of(warehouse, spark)
    run_once(node, stores)
    topics.produce(topic, records(range(3, 9)))
    run_once(node, stores)
    # the replay begins where the live asset began, wherever ``latest`` is now
    same = replay(warehouse, node, "same", spark)
    assert sorted(r.n for r in same.read().collect()) == [3, 4, 5, 6]
    topics.expire(topic, {0: 5})
    with pytest.raises(SourceError, match=r"s: .* 2 offsets are gone: 3 is the next .* --from-offsets"):
        replay(warehouse, node, "short", spark)
    late = replay(warehouse, node, "late", spark, {topic: {0: 5}})
    assert sorted(r.n for r in late.read().collect()) == [5, 6]
    topics.delete(topic)
    topics.create(topic)
    topics.produce(topic, records(range(100, 109)))
    said = (
        f"s: expected the topic {topic} that batch 1 consumed, got one that was deleted and recreated"
    )
    with pytest.raises(SourceError, match=said):
        replay(warehouse, node, "other", spark)
    with pytest.raises(SourceError, match=said):
        restate(warehouse, node, "2020-01-01T00:00:00Z", spark)
    with pytest.raises(SourceError, match="run it once with accept_gap: true first"):
        replay(warehouse, node, "new", spark, {topic: {0: 1}})
    run_once(node, stores, accept_gap=True)
    new = replay(warehouse, node, "new", spark, {topic: {0: 1}})
    assert sorted(r.n for r in new.read().collect()) == [101, 102, 103]


def test_interrupted_swap_is_completed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "log").mkdir(parents=True)
        (tmp_path / name / "is").write_text(name)
    for renames in (1, 2):
        copy = tmp_path / f"after{renames}"
        for name in ("a", "b"):
            shutil.copytree(tmp_path / name, copy / name)
        (copy / "a").rename(copy / "_a.swap.b")
        if renames == 2:
            (copy / "b").rename(copy / "a")
        swap(str(copy), "a", "b")
        assert [(copy / name / "is").read_text() for name in ("a", "b")] == ["b", "a"]
        assert sorted(p.name for p in copy.iterdir()) == ["a", "b"]
    with pytest.raises(StorageError, match=r"found no \['c'\]; replay an asset into"):
        swap(str(tmp_path), "a", "c")
    with pytest.raises(StorageError, match="name the live asset and its replay"):
        swap(str(tmp_path), "a", "a")


def test_replay_commands(
    topics: Topics, pipeline: Pipeline, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = topics.create()
    topics.produce(topic, records(range(5)))
    (pipeline.root / "shop.py").write_text(
        "from tests.kafka.topics import SCHEMA, Topics\n"
        "from vt_dagster import Stream\n"
        "from vt_dagster.kafka import KafkaSource\n"
        f"cluster = Topics({topics.cluster.servers!r}).cluster\n"
        f"source = KafkaSource(cluster, {topic!r})\n"
        "orders = Stream('orders', key='k', schema=SCHEMA, timestamp='at', source=source)\n"
    )
    monkeypatch.chdir(pipeline.root)
    monkeypatch.setattr(sys, "path", [str(pipeline.root), *sys.path])
    warehouse = str(pipeline.root / "warehouse")
    from shop import orders  # pyright: ignore[reportMissingImports]

    run_once(orders, stores_of(warehouse, spark))

    def said(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, [*arguments, "--warehouse", warehouse])
        return done.exit_code, done.output

    offsets = f'{{"{topic}": {{"0": 3}}}}'
    code, text = said(
        "replay", "orders", "--into", "less", "--module", "shop", "--from-offsets", offsets
    )
    assert (code, text.splitlines()[-1]) == (0, "less: 2 records in 1 run"), text
    code, text = said("compare", "orders", "less")
    assert code == 1
    assert "3 rows only in orders, 0 only in less" in text
    assert 'only in orders: {"at":"2020-01-01T00:00:00.000000Z"' in text
    assert said("swap", "orders", "less")[0] == 0
    assert AssetStore(warehouse, orders, spark).read().count() == 2
