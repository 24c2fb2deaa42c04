"""A join with a table that is still loading holds its records until the table is ready."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from tests.market import RECORD, lines, materialized, record, run
from vt_dagster import (
    FeatureView,
    FilesSource,
    Stream,
    Table,
    TopologyError,
    VersionedTable,
    build_asset,
)
from vt_dagster.errors import RefusedRecordsError, StorageError
from vt_dagster.runs.pin import _partitioned_alike
from vt_dagster.runs.run import run_once
from vt_dagster.runs.training_set_run import TrainingRun
from vt_dagster.storage.asset_store import stores_of
from vt_dagster.storage.commit_log import Commit
from vt_dagster.topology.feature_views import TrainingSet

pytestmark = pytest.mark.usefixtures("few_rows")

DAY = timedelta(days=1)
AGAIN = [
    ("a", *pair) for pair in (("a1", "a1"), ("a2", "a1"), ("a2", "a2"), ("a3", "a2"), ("a3", "a3"))
]


@dataclass
class Shop:
    """Prices, which load one file in each run, and sales, which are joined with the prices."""

    root: Path
    spark: SparkSession
    ready: Any = "initial_load"
    per_run: int | None = 1
    retention: timedelta = 30 * DAY
    prices: VersionedTable = field(init=False)
    sales: Stream = field(init=False)
    sold: Stream = field(init=False)

    def __post_init__(self) -> None:
        for name in ("prices", "sales"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        about: dict[str, Any] = {"key": "k", "schema": RECORD, "timestamp": "at"}
        source = FilesSource(str(self.root / "prices"), max_files_per_run=self.per_run)
        self.prices = VersionedTable(
            *("prices",),
            **about,
            tombstone="v is null",
            history_retention=self.retention,
            source=source,
            ready=self.ready,
        )
        self.sales = Stream("sales", **about, source=FilesSource(str(self.root / "sales")))
        select = ("left.v", "right.v as price")
        self.sold = self.sales.left_join(self.prices, select=select, name="sold")
        self.stores = stores_of(str(self.root / "warehouse"), self.spark)

    def land(self, name: str, file: int, *rows: Any) -> None:
        (self.root / name / f"{file}.jsonl").write_text(lines(*rows))

    def land_all(self) -> None:
        for day in (1, 2, 3):
            self.land("prices", day, record("a", f"a{day}", f"{day} 00:00"))
        self.land("sales", 1, record("a", "s1", "1 12:00"), record("a", "s2", "3 12:00"))

    def run(self, node: Stream, **asked: Any) -> Commit | None:
        """Runs one asset. Returns its commit, None if there is none."""
        return run_once(node, self.stores, **asked).commit

    def rows(self, node: Stream | None = None) -> list[tuple[Any, ...]]:
        node = node or self.sold
        store = self.stores(node)
        head = store.head()
        if head is None:
            return []
        columns = ("partition", "offset", "k", *node.value_columns, "timestamp", "is_tombstone")
        return sorted(tuple(r) for r in store.log({}, head).select(*columns).collect())


Made = Callable[..., Shop]


@pytest.fixture
def shop(tmp_path: Path, spark: SparkSession) -> Made:
    def made(name: str = "shop", **about: Any) -> Shop:
        return Shop(tmp_path / name, spark, **about)

    return made


def test_join_holds_records_until_initial_load(shop: Made) -> None:
    one = shop()
    one.land_all()
    at_once = replace(one.prices, ready=None)
    early = one.sales.left_join(at_once, select=("left.v", "right.v as price"), name="early")
    for node in (one.prices, one.sales, early):
        one.run(node)
    assert [row[4] for row in one.rows(early)] == ["a1", "a1"], "joined for ever with the first part"
    # The first run has set the end of the initial load: the join does not wait for later files.
    one.land("prices", 4, record("a", "a4", "4 00:00"))
    for _ in range(2):
        assert one.run(one.sold) is None
        one.run(one.prices)
    commit = one.run(one.sold)
    assert commit is not None
    assert (commit.counts["in"], commit.not_ready) == (2, [])
    assert [row[4] for row in one.rows()] == ["a1", "a3"]
    # The join never waits again: from now on the table loads beside the stream, as without ``ready``.
    one.land("sales", 2, record("a", "s3", "3 13:00"))
    one.run(one.sales)
    assert one.run(one.sold) is not None


def test_derived_table_is_ready_after_consuming_ready_input(shop: Made) -> None:
    one = shop()
    one.land_all()
    dear: Table = one.prices.filter("v > 'a0'", name="dear")
    sold = one.sales.left_join(dear, select=("left.v", "right.v as price"), name="sold")
    again = dear.join(one.prices, select=("left.v", "right.v as other"), name="again")
    for node in (one.prices, one.sales, dear, sold, again, one.prices, one.prices, sold, again):
        commit = one.run(node)
        assert commit is None or node not in (sold, again)
    assert one.run(dear) is not None
    for node in (sold, again):
        commit = one.run(node)
        assert commit is not None
        assert commit.ready_at == commit.next_offset
    assert [row[4] for row in one.rows(sold)] == ["a1", "a3"]
    # The join has waited for both tables: its updates are those of one run with all records.
    assert [row[2:5] for row in one.rows(again)] == AGAIN


def test_existing_table_counts_as_loaded(shop: Made) -> None:
    before = shop(ready=None)
    before.land_all()
    before.run(before.prices)
    after = shop()
    after.run(after.sales)
    assert after.run(after.sold) is not None
    after.run(after.prices)
    assert (head := after.stores(after.prices).head()) is not None
    assert head.commit.ready_at == {0: 1}


def test_held_records_are_reported(shop: Made) -> None:
    one = shop()
    one.land_all()
    made = [build_asset(node) for node in (one.prices, one.sales, one.sold)]
    with dg.DagsterInstance.ephemeral() as instance:
        result = run(made, one.root / "warehouse", instance=instance, raise_on_error=True)
        told = [
            e.asset_observation_data.asset_observation for e in result.get_asset_observation_events()
        ]
        (held,) = (one.metadata for one in told if one.asset_key == dg.AssetKey("sold"))
        assert held["status"].value == "held until prices is ready: no commit"
        assert held["records_held"].value == 2
        config = {"ops": {"sold": {"config": {"accept_not_ready": True}}}}
        result = run(made[2:], one.root / "warehouse", instance=instance, run_config=config)
        assert materialized(result, "sold")["records_in"] == 2
    head = one.stores(one.sold).head()
    assert head is not None
    assert (head.commit.not_ready, head.commit.ready_at) == (["prices"], None)


def test_ready_from_time_needs_history_of_held_records(shop: Made) -> None:
    one = shop(retention=DAY, ready=datetime(2024, 1, 3, tzinfo=timezone.utc))
    one.land_all()
    for node in (one.sales, one.prices, one.prices):
        one.run(node)
    assert one.run(one.sold) is None
    one.run(one.prices)
    said = (
        "sold: expected the history of prices to cover all records .* the first of them is of "
        "2024-01-01T12:00:00Z .* the history is 1 day, from 2024-01-02T00:00:00Z on.* accept_not_ready"
    )
    with pytest.raises(RefusedRecordsError, match=said):
        one.run(one.sold)
    commit = one.run(one.sold, accept_not_ready=True)
    assert commit is not None
    assert commit.ready_at == commit.next_offset


def test_readiness_without_copartitioning(shop: Made) -> None:
    """If stream and table are partitioned differently, the history of each partition of the table
    counts. A tombstone of the stream looks up nothing, so the history does not matter for it."""
    one = shop(retention=DAY)
    prices = replace(one.prices, partitions=2, partition_by="if(k = 'b', 1, 0)")
    sales = replace(one.sales, tombstone="v is null")
    about: dict[str, Any] = {"select": ("left.v", "right.v as price")}
    sold, other = (sales.left_join(prices, name=name, **about) for name in ("sold", "other"))
    one.land("prices", 1, record("a", "p", "1 00:00"), record("b", "p", "1 00:00"))
    one.land("prices", 2, record("b", "q", "3 00:00"))
    one.land("sales", 1, record("b", None, "1 12:00"))
    for node in (prices, sales, prices):
        one.run(node)
    assert one.run(sold) is not None
    one.land("sales", 2, record("b", "s", "1 12:00"))
    one.run(sales)
    with pytest.raises(
        RefusedRecordsError, match=r"expected the history of prices to cover .* 2024-01-01T12:00:00Z"
    ):
        one.run(other)


def test_copartitioned_inputs(shop: Made) -> None:
    one = shop()
    wide = replace(one.prices, partitions=4)
    assert _partitioned_alike(one.sales, {0: 1}, one.prices, {0: 2})
    assert not _partitioned_alike(one.sales, {0: 1}, wide, {0: 2, 3: 2})
    # The partitions of topics count, whatever the nodes declare.
    assert _partitioned_alike(one.sales, {0: 1, 1: 1}, one.prices, {0: 2, 1: 2})
    assert not _partitioned_alike(one.sales, {0: 1}, one.prices, {0: 2, 1: 2})


def test_training_set_waits_for_ready_table(shop: Made, tmp_path: Path) -> None:
    one = shop()
    one.land_all()
    declared = TrainingSet("examples", one.sales, (FeatureView(one.prices, prefix="price_"),))
    way = TrainingRun(declared, str(tmp_path / "set"), str(one.root / "warehouse"), one.spark)
    one.run(one.sales)
    for _ in range(2):
        one.run(one.prices)
        with pytest.raises(
            StorageError, match=r"examples: .* to be ready, but \['prices'\] are not, and the set"
        ):
            way.run()
    one.run(one.prices)
    assert way.run() is not None


@pytest.mark.parametrize("given", ["soon", datetime(2024, 1, 1)])
def test_invalid_ready_is_refused(shop: Made, given: Any) -> None:
    with pytest.raises(
        TopologyError, match="prices: ready must be 'initial_load', a datetime with a time"
    ):
        shop(ready=given)


def test_ready_requires_source(shop: Made) -> None:
    one = shop()
    with pytest.raises(TopologyError, match="kept: ready needs a table with a source"):
        one.prices.__class__(
            "kept",
            key="k",
            schema=RECORD,
            timestamp="at",
            history_retention=DAY,
            operator=one.sold.operator,
            ready="initial_load",
        )
